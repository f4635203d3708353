"""``vitlab data FOLDER``: report what a folder of images holds."""

import sys
from pathlib import Path
from typing import Any

from vitlab.config.arguments import CommandParser, add_formats
from vitlab.errors import UsageError
from vitlab.tables import formatted

_NOT_DRAWN = ("img_size_schedule", "random_erasing", "mixup", "cutmix")


def main(argv: list[str]) -> int:
    """Run ``vitlab data``."""
    parser = CommandParser("vitlab data", description="Check every file of a folder of images.")
    parser.add_argument("folder", metavar="FOLDER", help="FOLDER/CLASS/IMAGE or FOLDER/{train,val,test}/CLASS/IMAGE")
    parser.add_argument("--config", "-c", metavar="FILE", help="config whose data.* settings the picture shows")
    parser.add_argument("--augment", help="value of data.augment to show (default: the config's, or crop-flip)")
    parser.add_argument("--img_size", type=int, help="side of the images in the picture (default: the training size)")
    parser.add_argument("--num_workers", type=int, default=2, help="processes that decode (default: %(default)s)")
    parser.add_argument("-o", "--output", help="picture to write (default: samples-FOLDER.png)")
    add_formats(parser, "also write the report to FILE")
    options = parser.parse_args(argv)
    picture = Path(options.output or f"samples-{Path(options.folder).resolve().name}.png")
    if picture.suffix not in (".png", ".jpg"):
        raise UsageError(f"`--output` must end in .png or .jpg, got {picture}")
    from vitlab.config.yaml_files import parse_yaml
    from vitlab.data.imagenet import kind_of
    from vitlab.data.report import report, report_as_text, write_picture
    from vitlab.runs.atomic import write_json

    try:
        given = {"augment": "crop-flip", **(_data_of(options.config) if options.config else {})}
        if options.augment:
            given["augment"] = parse_yaml(options.augment, "--augment")
        if options.img_size:
            given["img_size"] = options.img_size
        data = kind_of(options.folder)(options.folder, **given | {"num_workers": options.num_workers})
        found = report(data)
        form, notes = options.form, sys.stderr if options.form else sys.stdout
        text = formatted([found], "json") if form == "json" else formatted(_classes(found), "csv")
        sys.stdout.write(text if form else report_as_text(found) + "\n")
        if options.json_file:
            write_json(Path(options.json_file), found)
        if found["images"].get("train"):
            done = "replaced" if picture.exists() else "wrote"
            write_picture(data, picture)
            left_out = [name for name in _NOT_DRAWN if given.get(name)]
            without = f"; not drawn: {', '.join(left_out)}" if left_out else ""
            what = f"first column as evaluation sees it, then {given['augment']}{without}"
            notes.write(f"\n{done} {picture}: {what}\n")
    except BrokenPipeError:  # an OSError, but no mistake of the user's
        raise
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from error
    return 0


def _classes(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each class: its name, and the number of its images in each split."""
    counts = found["class_counts"].items()
    return [{"class": name, **{split: n[k] for split, n in counts}} for k, name in enumerate(found["class_names"])]


def _data_of(config: str) -> dict[str, Any]:
    """Return the data settings of a configuration that ``ImageFolder`` takes, without the root."""
    from inspect import signature

    from vitlab.config.keys import class_and_arguments
    from vitlab.config.yaml_files import read_yaml
    from vitlab.data.image_folder import ImageFolder
    from vitlab.shipped import find_file

    _, arguments = class_and_arguments(read_yaml(find_file(config, "--config")), "data")
    names = set(signature(ImageFolder).parameters) - {"root"}
    return {key: value for key, value in arguments.items() if key in names}
