"""``vitlab pack SRC DST``: photos into one file that is mapped into memory."""

import sys
import time

from vitlab.config.arguments import CommandParser
from vitlab.errors import UsageError, printable


def main(argv: list[str]) -> int:
    """Run ``vitlab pack``."""
    parser = CommandParser(
        "vitlab pack",
        description="Decode and resize all photos of a folder once; `data: Packed` then reads them without decoding.",
        allow_abbrev=False,
    )
    parser.add_argument("source", metavar="SRC", help="SRC/CLASS/IMAGE or SRC/{train,val,test}/CLASS/IMAGE")
    parser.add_argument("target", metavar="DST", help="folder to make")
    parser.add_argument("--size", type=int, default=256, help="side of the packed images (default: %(default)s)")
    parser.add_argument("--max_unreadable", type=int, default=0, help="files that may be left out (default: none)")
    parser.add_argument("--num_workers", type=int, default=2, help="processes that decode (default: %(default)s)")
    options = parser.parse_args(argv)
    from vitlab.data.pack import pack

    started = time.perf_counter()
    try:
        done = pack(options.source, options.target, options.size, options.max_unreadable, options.num_workers)
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from error
    for path, reason in done["unreadable"].items():
        sys.stdout.write(f"left out {printable(path)}: {reason}\n")
    sys.stdout.write(
        f"{done['n']:,} images of {done['classes']} classes, {done['bytes'] / 1e6:,.1f} MB, "
        f"{time.perf_counter() - started:.1f} s\n"
        f"next  vitlab fit --config configs/photos_t2t.yaml --data=Packed --data.root {options.target}\n"
    )
    return 0
