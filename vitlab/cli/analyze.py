"""``vitlab analyze``: tables and figures of what a network has learned."""

import argparse
import sys
import time
from pathlib import Path

from vitlab.analysis import ANALYSES, names_of
from vitlab.config.arguments import CommandParser, KeepLines, add_print, grid_of, parse_around_keys
from vitlab.config.trust import add_trust
from vitlab.errors import UsageError
from vitlab.lazy import quick_imports
from vitlab.runs.atomic import is_writable
from vitlab.runs.find import find_run

QUICK = 64  # images
MOST_PICTURES = 64  # of --images; most figures show fewer


def main(argv: list[str]) -> int:
    """Run ``vitlab analyze`` and return its exit code."""
    parser = _parser()
    options, rest = parse_around_keys(parser, argv)
    names = names_of(options.names)
    _take_fold(options)
    given = {"--data": options.data, "--data.root": options.root}  # before what changes their values
    rest = [*(f"{flag}={value}" for flag, value in given.items() if value), *rest]
    with quick_imports():
        from vitlab.analysis.typeset import formats_of
        from vitlab.jobs.analyze import analyze
        from vitlab.jobs.find_subject import has_no_run
        from vitlab.jobs.subject_without_run import name_of_network
        from vitlab.jobs.terminal import open_terminal, say
        from vitlab.jobs.view import View
        from vitlab.look.analysis_page import write_leaves, write_page
    formats = formats_of(options.format)
    away = has_no_run(options.run)
    if away and options.root and not options.data:
        raise UsageError("`--root` needs --data=NAME, such as ImageFolder")
    own = Path("analysis") / name_of_network(options.run) if away else None
    if options.against:
        find_run(options.against)
    folder = Path(options.output) if options.output else own or find_run(options.run)[0].path / "analysis"
    if not is_writable(folder):
        raise UsageError(f"cannot write into {folder}; choose another folder with --output")
    open_terminal(options.quiet)
    view = View(
        options.images, options.layer, options.head, options.query, QUICK if options.quick else options.num_images,
        options.split, options.weights, options.img_size, shown=MOST_PICTURES, tokens=options.tokens,
        init_grid=options.init_grid, masks=options.masks,
    )  # fmt: skip
    page: list[tuple[str, str, bytes]] = []
    progress = _Progress(len(names), options.quiet)
    findings = analyze(
        names, options.run, view, options.against, options.output, rest, progress, formats, options.width
    )  # fmt: skip
    for name, finding, paths in findings:
        progress.clear()
        folder = paths[0].parent if paths else folder
        if isinstance(finding, UsageError):
            if len(names) == 1:
                raise finding
            say(f"{name:<16} not done: {finding}")
            page.append((name, f"Not done: {finding}", b""))
        else:
            say(f"{name:<16} {', '.join(path.name for path in paths)}: {finding.note}")
            if finding.gallery:
                say(f"{'page':<16} {write_leaves(folder, options.named, name, finding.note, finding.gallery).name}")
            shown = next((path.read_bytes() for path in paths if path.suffix == ".png"), b"")
            page.append((name, finding.note, shown or finding.picture()))
    if options.names == "all":
        say(f"{'page':<16} {write_page(folder, options.named, page).name}")
    say(f"wrote {folder}")
    return 0 if any(png for *_, png in page) else 1


def _take_fold(options: argparse.Namespace) -> None:
    """For the folder of a cross-validation, take its first fold that was trained, and write beside the folds."""
    home, options.named = Path(options.run), options.run
    if not (home / "cv.yaml").is_file():
        return
    runs = sorted(file.parent for file in home.glob("fold*/*/config.yaml") if any(file.parent.glob("checkpoints/*")))
    if not runs:
        raise UsageError(f"{home} has no fold that was trained: let `vitlab cv` finish first")
    options.run, options.output = str(runs[0]), options.output or str(home / "analysis")


class _Progress:
    """A progress line on the terminal: the current analysis and the time left."""

    def __init__(self, count: int, quiet: bool) -> None:
        self.count, self.start, self.shown = count, time.monotonic(), not quiet and sys.stderr.isatty()

    def __call__(self, name: str, done: int) -> None:
        left = (time.monotonic() - self.start) / done * (self.count - done) if done else 0
        after = f", about {left / 60:.0f} min left" if left > 90 else f", about {left:.0f} s left" if done else ""
        if self.shown:
            sys.stderr.write(f"\r\x1b[K{done + 1}/{self.count} {name}{after}")
            sys.stderr.flush()

    def clear(self) -> None:
        """Erase the line."""
        if self.shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "vitlab analyze",
        description="Show what a network has learned: a table and a figure for each analysis.",
        epilog="what each analysis does NOT show:\n"
        + "\n".join(f"  {name:<15} {no}" for name, no in ANALYSES.limits().items())
        + "\n\nAny --trainer.*, --model.* or --data.* argument changes a value of the run's configuration.",
        formatter_class=KeepLines,
    )
    add = parser.add_argument
    add("names", metavar="NAME[,NAME...]", help=f"{', '.join(ANALYSES)}; or all, which also writes one page")
    add("run", metavar="RUN", help="run directory, run name, checkpoint in a run, or last; a safetensors file of "
        "vitlab; with --images or --data also timm:NAME, hf:NAME, torchvision:NAME, or a name of `vitlab models` with "
        "--weights")  # fmt: skip
    add("--weights", metavar="FILE", help="weights of a named network (default: those that are published)")
    add("--img_size", type=int, metavar="N", help="side of the images of a named network, in pixels")
    add(
        "--init_grid",
        metavar="ROWS,COLUMNS",
        type=grid_of,
        help="token grid of --weights, if the file does not state it",
    )
    add(
        "--data",
        metavar="NAME",
        help="another data set than that of the run to measure on; of a named network: images with classes",
    )
    add("--root", metavar="DIR", help="folder of that data set")
    add("--quick", action="store_true", help=f"measure with {QUICK} images")
    add("--against", metavar="RUN", help="run to compare with, such as another seed for cka, or one without positions")
    add("--images", metavar="DIR", help="folder or file of images to draw maps for (default: validation images)")
    add("--masks", metavar="DIR", help="folder of masks for segmentation: a/b.png, of class numbers, for image a/b.jpg")
    add("-o", "--output", metavar="DIR", help="folder for tables and figures (default: RUN/analysis)")
    add("--layer", type=int, help="block to analyze, from 0 (default: the last, or all)")
    add("--head", type=int, help="head to analyze, from 0 (default: all)")
    add("--query", metavar="ROW,COLUMN", type=grid_of, help="patch whose attention is shown (default: class token)")
    add("--num_images", type=int, default=512, help="largest number of images to measure with (default: %(default)s)")
    add("--split", choices=("train", "val", "test"), default="val", help="split that errors, confusion and calibration "
        "use (default: %(default)s)")  # fmt: skip
    add("--tokens", choices=("mean", "class", "flattened"), default="mean", help="by which tokens cka compares images: "
        "mean of the patches, the class token, or all, cell by cell, which is high for any two networks "
        "(default: %(default)s)")  # fmt: skip
    add_print(parser, "png,svg")
    add("--quiet", action="store_true", help="print errors only")
    add_trust(parser)
    return parser
