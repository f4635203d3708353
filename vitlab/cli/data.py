"""``vitlab data FOLDER``: what is in a folder of photos."""

import json
import sys
from pathlib import Path

from vitlab.config.arguments import CommandParser
from vitlab.errors import UsageError


def main(argv: list[str]) -> int:
    """Run ``vitlab data``."""
    parser = CommandParser("vitlab data", description="Look at every file of a folder of photos.", allow_abbrev=False)
    parser.add_argument("folder", metavar="FOLDER", help="FOLDER/CLASS/IMAGE or FOLDER/{train,val,test}/CLASS/IMAGE")
    parser.add_argument(
        "--augment",
        default="crop-flip",
        help="augmentation to picture, a word or a list as of data.augment (default: %(default)s)",
    )
    parser.add_argument("--img_size", type=int, help="side of the pictured images (default: as training sees them)")
    parser.add_argument("--num_workers", type=int, default=2, help="processes that decode (default: %(default)s)")
    parser.add_argument("-o", "--output", default="samples.png", help="picture to write (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the report there too")
    options = parser.parse_args(argv)
    if Path(options.output).suffix not in (".png", ".jpg"):
        raise UsageError(f"`--output` must end in .png or .jpg, got {options.output}")
    from vitlab.config.explain import parse_yaml
    from vitlab.data.image_folder import kind_of
    from vitlab.data.report import as_text, picture, report

    try:
        data = kind_of(options.folder)(
            options.folder,
            img_size=options.img_size,
            augment=parse_yaml(options.augment, "--augment"),
            num_workers=options.num_workers,
        )
        found = report(data)
        sys.stdout.write(as_text(found) + "\n")
        if options.json:
            Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
        if found["images"].get("train"):
            picture(data, options.output)
            sys.stdout.write(f"\nwrote {options.output}: first column as evaluation sees it, then {options.augment}\n")
    except BrokenPipeError:  # nobody reads the report to its end
        raise
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from error
    return 0
