"""``vitlab predict`` and ``embed``: the predictions or the features of a run for image files."""

import argparse
import os
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vitlab.cli.evaluate import chosen_checkpoint, run_parser
from vitlab.cli.lines import note, show_rows
from vitlab.config.arguments import add_formats, split_dotted
from vitlab.config.images import Problem, find_images, refuse_none
from vitlab.config.options import check_topk
from vitlab.errors import UsageError, escaped, not_finite
from vitlab.lazy import quick_imports
from vitlab.runs.atomic import is_writable
from vitlab.runs.directory import RunDir
from vitlab.runs.find import find_directory, run_called
from vitlab.shipped import LIBRARIES, card_beside, find_weights

if TYPE_CHECKING:
    import pandas as pd

Form = Literal["json", "csv"]
FORMATS = (".csv", ".parquet", ".json")
EPILOG = """Any --trainer.*, --data.* or --model.* argument changes a value of the run's configuration; the default is a
single device. The exit code is 1 if a file could not be read; all others are predicted nevertheless."""


def embed(argv: list[str]) -> int:
    """Run ``vitlab embed`` and return its exit code."""
    return main(argv, features=True)


def main(argv: list[str], features: bool = False) -> int:
    """Run ``vitlab predict``, or with ``features`` ``vitlab embed``, and return its exit code."""
    options, rest = _options(argv, features)
    output = _check_output(options.output)
    export = _export_of(options)
    if export:
        _check_goes_with_export(export, rest, options, features)
    source: Any = nullcontext((None, export, f"file  {export}")) if export else chosen_checkpoint(options)
    with source as (run, file, line):
        files, unreadable = None, list[Problem]()
        if export or features or options.images:
            name = f"vitlab {'embed' if features else 'predict'} {export or 'RUN'}"
            files, unreadable = _files(options, output, name)
        with quick_imports():
            from vitlab.jobs.predict import predict, predict_exported, predict_from_data
            from vitlab.jobs.terminal import open_terminal, say

        open_terminal(options.quiet)
        if files is None:
            table, lost = predict_from_data(run, file, rest, options.quiet), list[Problem]()
        elif export:
            table, lost = predict_exported(file, files, options.topk)
        else:
            table, lost = predict(run, file, rest, files, options.topk, options.quiet, features)
    if table is None:  # not rank 0; a code other than 0 would end rank 0 too
        return 0
    _show(table, output, options.form, "feature vector" if features else "prediction")
    if not options.form:
        say(line)
    return _told(unreadable + lost, len(table))


def _export_of(options: argparse.Namespace) -> Path | None:
    """Return the file of ``vitlab export``, or shipped weights, that the arguments name in place of a run.

    After ``--ckpt_path FILE`` the first argument, unless it names a run, is an image; ``options`` are changed so.
    """
    word = options.ckpt_path or options.run or ""
    if word.startswith(LIBRARIES):
        raise UsageError(f"{word} has no record of what it predicts: train it on, vitlab fit --init_from {word}")
    file = Path(find_weights(word))
    if options.ckpt_path and options.run and not _names_a_run(options.run):
        if file.is_file():
            options.run, options.images = None, [options.run, *options.images]
        elif file.suffix:
            raise UsageError(f"there is no file {options.ckpt_path}, and {options.run} is no run")
    if not _is_export(file):
        return None
    options.run = options.run if options.ckpt_path else None
    return file


def _check_goes_with_export(file: Path, rest: list[str], options: argparse.Namespace, features: bool) -> None:
    """Refuse what a file of ``vitlab export`` cannot do, or has no use for."""
    if not file.is_file():
        raise UsageError(f"there is no file {file}")
    if features:
        raise UsageError(f"{file} gives predictions alone: `vitlab embed` needs the run")
    if rest or options.config or options.run:
        extra = rest[0] if rest else "--config" if options.config else options.run
        raise UsageError(f"{file} is a whole network with its preparation of images: leave out {extra}")


def _is_export(file: Path) -> bool:
    """Return whether a path is a file of ``vitlab export``, or would be one and no run is called so."""
    if file.is_file():
        return file.suffix == ".onnx" or card_beside(file).is_file()
    return file.suffix == ".onnx" and not run_called(str(file))


def _names_a_run(word: str) -> bool:
    """Return whether the first argument names a run; else it is an image, where ``--ckpt_path`` names a file."""
    if os.path.lexists(word) and not RunDir(word).has_begun():  # a folder of images may have the name of a run
        return False
    with suppress(UsageError):
        return bool(find_directory(word))
    return False


def _files(options: Any, output: Path | None, command: str) -> tuple[list[str], list[Problem]]:
    """Return the images that were named, and why others cannot be read."""
    if not options.images:
        raise UsageError(f"no images given: `{command} IMAGE|DIR|GLOB ...`")
    files, unreadable = find_images(options.images)
    files = [file for file in files if output is None or not _same(file, output)]
    refuse_none(files, unreadable, options.images)
    return files, unreadable


def _told(problems: list[Problem], count: int) -> int:
    """Say which files could not be read, or have outputs that are none, beside ``count``; return the exit code."""
    from vitlab.jobs.predict import NOT_FINITE

    total, lost = count + len(problems), sum(reason == NOT_FINITE for _, reason in problems)
    for path, reason in problems:
        word = "no answer" if reason == NOT_FINITE else "unreadable"
        note(f"{word}  {escaped(path)}: {reason}")
    if unread := len(problems) - lost:
        note(f"vitlab: {unread:,} of {total:,} could not be read")
    if lost:
        note(f"vitlab: {not_finite(lost, total - unread)}")
    return 1 if problems else 0


def _options(argv: list[str], features: bool) -> tuple[argparse.Namespace, list[str]]:
    """Return the command's own options, and the arguments that change values of the run's configuration."""
    name, what = (
        ("embed", "Compute the pooled features of images with a run")
        if features
        else ("predict", "Classify images with a run, or with --ckpt_path FILE of `vitlab export`")
    )
    parser = run_parser(name, f"{what}; everything but the images comes from the run directory.", True)
    add = parser.add_argument
    add("images", metavar="IMAGE|DIR|GLOB", nargs="*", help="files, folders, or patterns such as 'a/**/*.png'")
    add("-o", "--output", metavar="FILE", help="table to write, .csv, .parquet or .json; overwrites")
    if not features:
        add("--topk", type=int, default=5, help="classes to list per image (default: %(default)s)")
    add("--quiet", action="store_true", help="print errors only")
    add_formats(parser)
    parser.epilog = EPILOG
    words, rest = split_dotted(argv)
    options = parser.parse_intermixed_args(words)
    if features:
        options.topk = 1
    if options.form and options.output:
        raise UsageError(f"`--{options.form}` prints the table, and `--output` writes it: give one of them")
    check_topk(options.topk)
    return options, rest


def _show(table: "pd.DataFrame", output: Path | None, form: Form | None, what: str) -> None:
    """Write the table to ``output``, or print it, as text or in a format for programs."""
    from vitlab.jobs.terminal import say
    from vitlab.tables import as_text, records, write

    if form:
        show_rows(records(table), form)
    elif output is None:
        say(as_text(table))
    else:
        output.parent.mkdir(parents=True, exist_ok=True)
        write(table, output)
        say(f"wrote {len(table):,} {what}{'s' if len(table) != 1 else ''} to {output}")


def _same(file: str, output: Path) -> bool:
    """Return whether a file is the table that an earlier call wrote into the folder of images."""
    return os.path.basename(file) == output.name and os.path.realpath(file) == os.path.realpath(output)


def _check_output(text: str | None) -> Path | None:
    if text is None:
        return None
    path = Path(text)
    if path.suffix not in FORMATS:
        raise UsageError(f"`--output` must end with {', '.join(FORMATS[:2])} or {FORMATS[2]}, got {text}")
    if path.is_dir():
        raise UsageError(f"`--output` must be a file, and {text} is a folder")
    if not is_writable(path.parent):  # before the work, not after it
        raise UsageError(f"`--output {text}` cannot be written; choose another folder")
    return path
