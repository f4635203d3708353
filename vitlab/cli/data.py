"""``vitlab data FOLDER``: what is in a folder of photos."""

import json
import sys
from pathlib import Path
from typing import Any

from vitlab.config.arguments import CommandParser
from vitlab.errors import UsageError


def main(argv: list[str]) -> int:
    """Run ``vitlab data``."""
    parser = CommandParser("vitlab data", description="Look at every file of a folder of photos.", allow_abbrev=False)
    parser.add_argument("folder", metavar="FOLDER", help="FOLDER/CLASS/IMAGE or FOLDER/{train,val,test}/CLASS/IMAGE")
    parser.add_argument("--config", "-c", metavar="FILE", help="configuration whose data.* are pictured")
    parser.add_argument("--augment", help="a word or a list as of data.augment (default: the config's, or crop-flip)")
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
        given = {"augment": "crop-flip", **(_data_of(options.config) if options.config else {})}
        if options.augment:
            given["augment"] = parse_yaml(options.augment, "--augment")
        if options.img_size:
            given["img_size"] = options.img_size
        data = kind_of(options.folder)(options.folder, **given | {"num_workers": options.num_workers})
        found = report(data)
        sys.stdout.write(as_text(found) + "\n")
        if options.json:
            Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
        if found["images"].get("train"):
            picture(data, options.output)
            sys.stdout.write(f"\nwrote {options.output}: first column as evaluation sees it, then {given['augment']}\n")
    except BrokenPipeError:  # nobody reads the report to its end
        raise
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from error
    return 0


def _data_of(config: str) -> dict[str, Any]:
    """Return what a configuration says of its data and folders of photos have, too; not where they lie."""
    from inspect import signature

    from vitlab.config.explain import read_yaml
    from vitlab.data.image_folder import ImageFolder
    from vitlab.shipped import find_file

    said = read_yaml(find_file(config, "--config")).get("data") or {}
    names = set(signature(ImageFolder).parameters) - {"root"}
    return {key: value for key, value in (said | (said.get("init_args") or {})).items() if key in names}
