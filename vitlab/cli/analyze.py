"""``vitlab analyze``: tables and figures of what a run has learned."""

import argparse
import os
from pathlib import Path

from vitlab.analysis import ANALYSES, names_of
from vitlab.config.arguments import CommandParser
from vitlab.config.trust import add_trust
from vitlab.errors import UsageError
from vitlab.lazy import quick_imports
from vitlab.runs.directory import find_run


def main(argv: list[str]) -> int:
    """Run ``vitlab analyze`` and return its exit code."""
    options, rest = _parser().parse_known_args(argv)
    names = names_of(options.names)
    of, against = find_run(options.run), find_run(options.against) if options.against else None
    folder = Path(options.output) if options.output else of[0].path / "analysis"
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UsageError(f"{folder} cannot be written into; choose another with --output")
    with quick_imports():
        from vitlab.analysis.page import write_page
        from vitlab.jobs.analyze import View, analyze
        from vitlab.jobs.terminal import open_terminal, say

    open_terminal(options.quiet)
    view = View(options.images, options.layer, options.head, options.query, options.num_images, options.split)
    page: list[tuple[str, str, bytes]] = []
    for name, finding, paths in analyze(names, of, view, against, options.output, rest):
        if isinstance(finding, UsageError):
            if len(names) == 1:
                raise finding
            say(f"{name:<16} not done: {finding}")
            page.append((name, f"Not done: {finding}", b""))
        else:
            say(f"{name:<16} {', '.join(path.name for path in paths)}: {finding.note}")
            page.append((name, finding.note, paths[1].read_bytes()))
    if options.names == "all":
        say(f"{'page':<16} {write_page(folder, f'{of[0].path.name} ({of[1].name})', page).name}")
    say(f"wrote {folder}")
    return 0 if any(png for *_, png in page) else 1


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "vitlab analyze",
        description="Look at what a run has learned: a table and a figure for each analysis.",
        epilog="Any --trainer.*, --model.* or --data.* argument changes a value of the run's configuration.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("names", metavar="NAME[,NAME...]", help=f"{', '.join(ANALYSES)}; or all, which makes one page of them too")
    add("run", metavar="RUN", help="run directory, its name, a checkpoint in it, or last")
    add("--against", metavar="RUN", help="another run to compare with: another seed for cka, one without positions")
    add("--images", metavar="DIR", help="pictures to show maps of, a folder or a file (default: validation images)")
    add("-o", "--output", metavar="DIR", help="folder for tables and figures (default: RUN/analysis)")
    add("--layer", type=int, help="block to look at, from 0 (default: the last, or all)")
    add("--head", type=int, help="head to look at, from 0 (default: all)")
    add("--query", metavar="ROW,COLUMN", type=_query, help="patch whose attention is shown (default: class token)")
    add("--num_images", type=int, default=512, help="images to measure with, at most (default: %(default)s)")
    add("--split", choices=("train", "val", "test"), default="val", help="images of errors, confusion and calibration "
        "(default: %(default)s)")  # fmt: skip
    add("--quiet", action="store_true", help="print nothing but mistakes")
    add_trust(parser)
    return parser


def _query(text: str) -> tuple[int, int]:
    try:
        row, column = map(int, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be ROW,COLUMN of a patch, such as 3,4, got {text}") from None
    return row, column
