"""``vitlab pack SRC DST``: write a folder of images into memory-mapped files."""

import shlex
import time
from functools import partial
from typing import Any

from vitlab.cli.lines import show
from vitlab.config.arguments import CommandParser
from vitlab.errors import RunFailed, UsageError, printable, what_failed
from vitlab.runs.guard import guarded
from vitlab.runs.interrupt import until_stopped
from vitlab.tables import counted


def main(argv: list[str]) -> int:
    """Run ``vitlab pack``."""
    parser = CommandParser(
        "vitlab pack",
        description="Write all images of a folder, uncropped, into a few large files, which `data: Packed` reads as "
        "`data: ImageFolder` reads the folder. Run an interrupted command again to continue it.",
    )
    parser.add_argument("source", metavar="SRC", help="SRC/CLASS/IMAGE, SRC/{train,val,test}/CLASS/IMAGE, or "
                        "ImageNet's tar files with its development kit")  # fmt: skip
    parser.add_argument("target", metavar="DST", help="folder to create")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--size", type=int, default=256, help="shrink images to at most this shorter side and store raw "
                     "pixels, which need no decoding (default: %(default)s)")  # fmt: skip
    how.add_argument("--keep", action="store_true", help="store the files as they are: smaller, decoded at every read")
    parser.add_argument("--max_unreadable", type=int, default=0, help="unreadable files to tolerate (default: none)")
    parser.add_argument("--num_workers", type=int, default=2, help="processes that decode (default: %(default)s)")
    parser.add_argument("--value_range", type=float, nargs=2, metavar=("LOW", "HIGH"), help="for files of more than 8 "
                        "bits: values that map to black and white (default: each file's own range)")  # fmt: skip
    parser.add_argument("--max_pixels", type=int, default=50_000_000, help="refuse larger files (default: %(default)s)")
    parser.add_argument("--color_profile", choices=["srgb", "ignore"], default="srgb", help="convert photos with an "
                        "ICC profile to sRGB, or take their values as they are (default: %(default)s)")  # fmt: skip
    options = parser.parse_args(argv)
    return until_stopped(partial(_pack, options), f"while packing {options.target}; the same command continues")


def _pack(options: Any) -> int:
    from vitlab.data.pack.write import pack

    started = time.perf_counter()
    with guarded() as guard:
        guard.way_on = "the same command continues"
        guard.enter("pack", f"{options.source} to be listed")
        try:
            done = pack(
                options.source, options.target, None if options.keep else options.size, options.max_unreadable,
                options.num_workers, options.value_range, options.max_pixels, options.color_profile,
            )  # fmt: skip
        except ValueError as error:
            raise UsageError(str(error)) from error
        except OSError as error:
            raise RunFailed(f"{options.target} could not be written: {what_failed(error) or error}") from error
    show(*(f"left out {printable(path)}: {reason}" for path, reason in done["unreadable"].items()))
    seconds = time.perf_counter() - started
    target = shlex.quote(str(options.target))
    before = f", {done['continued']:,} of them earlier" if done["continued"] else ""
    show(
        f"{done['n']:,} images of {counted(done['classes'], 'class')}{before}, {done['bytes'] / 1e6:,.1f} MB, "
        f"{seconds:.1f} s, {(done['n'] - done['continued']) / seconds:,.0f} images/s",
        f"next  vitlab fit --config configs/photos_t2t.yaml --data=Packed --data.root {target}",
    )
    return 0
