"""``vitlab look``: one HTML page about runs and networks."""

import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitlab.config.arguments import CommandParser, grid_of, parse_around_keys
from vitlab.config.trust import add_trust
from vitlab.errors import UsageError
from vitlab.lazy import quick_imports
from vitlab.look.written import is_of_training
from vitlab.runs.atomic import is_writable, write_text
from vitlab.runs.directory import RunDir
from vitlab.runs.find import find_directory, find_run
from vitlab.runs.standing import Standing, checksum

if TYPE_CHECKING:
    from vitlab.analysis.subject import Subject
    from vitlab.jobs.view import View
    from vitlab.look.diagram import Level


def main(argv: list[str]) -> int:
    """Run ``vitlab look`` and return its exit code."""
    parser = _parser()
    options, rest = parse_around_keys(parser, argv)
    drawing = Path(options.diagram) if options.diagram else None
    if drawing and len(options.sources) > 1:
        raise UsageError(f"`--diagram` draws one network, got {len(options.sources)}: {' '.join(options.sources)}")
    if drawing and options.output:
        raise UsageError(f"`--diagram` writes the drawing alone, to {drawing}: leave out -o {options.output}")
    if options.level and not drawing:
        raise UsageError(f"`--level {options.level}` is of a drawing: add --diagram FILE; a page has all levels")
    page = Path(options.output or _place(options.sources))
    path, flag = (drawing, "--diagram FILE") if drawing else (page, "-o FILE")
    if path.suffix not in ("", ending := ".svg" if drawing else ".html"):
        raise UsageError(f"`{flag.split()[0]}` must end with {ending}, which it writes, got {path}")
    if path.exists() and not options.overwrite and not is_of_training(path):
        raise UsageError(f"{path} exists; replace it with --overwrite, or choose another file with {flag}")
    if not is_writable(path.parent):
        raise UsageError(f"cannot write into {path.parent}; choose another file with {flag}")
    if options.pictures < 0:
        raise UsageError(f"`--pictures` must be at least 0, got {options.pictures}")
    with quick_imports():
        from vitlab.jobs.terminal import open_terminal, say
        from vitlab.jobs.view import View

    open_terminal(options.quiet)
    view = View(
        options.images,
        weights=options.weights,
        img_size=options.img_size,
        shown=options.pictures,
        init_grid=options.init_grid,
    )
    if drawing:
        text = _drawing(options.sources[0], view, rest, options.level or "network")
    else:
        text = page_about(options.sources, view, rest)
    write_text(path, text)
    size = len(text.encode()) / 1e6
    say(f"wrote {path}, {size:.2f} MB" if size >= 0.1 else f"wrote {path}, {1e3 * size:.0f} kB")
    return 0


class AtCheckpoint(RunDir):
    """A run with one of its checkpoints: what was measured with another one is stale.

    Args:
        run: The run.
        checkpoint: The checkpoint.
    """

    def __init__(self, run: RunDir, checkpoint: Path) -> None:
        super().__init__(run.path)
        self.at, self.digest = checkpoint, checksum(checkpoint)

    @property
    def typed(self) -> str:
        """The checkpoint as a command line takes it."""
        return shlex.quote(str(self.at))

    def _compared(self, result: Mapping[str, Any], again: str, read: bool = True) -> Standing:
        if result.get("sha256") == self.digest:
            return Standing("current")
        return Standing("stale", f"measured with {result.get('checkpoint', 'another checkpoint')}; run `{again}`")


def _run_of(source: str) -> RunDir:
    """Return the run that a source of a page names, at a checkpoint if it names one."""
    run, checkpoint = find_run(source)
    return AtCheckpoint(run, checkpoint) if Path(source).expanduser().is_file() else run


def _drawing(source: str, view: "View", rest: list[str], level: "Level") -> str:
    from vitlab.jobs.find_subject import has_no_run, subject_at
    from vitlab.look.diagram import architecture
    from vitlab.models.create import create_model
    from vitlab.models.sizes import SIZES

    if source in SIZES and not view.weights and has_no_run(source):  # shapes need no weights
        net = create_model(source, img_size=view.img_size) if view.img_size else create_model(source)
        return architecture(net, source, level)
    return architecture(subject_at(source, view, rest)[0].net, Path(source).name, level)


def page_about(sources: list[str], view: "View", rest: list[str]) -> str:
    """Return the page about runs, files and named networks; ``rest`` changes values of the runs' configurations."""
    from vitlab.config.explain import user_mistakes
    from vitlab.jobs.find_subject import has_no_run, subject_at
    from vitlab.jobs.subject_of_run import CannotBeAsked
    from vitlab.jobs.terminal import say
    from vitlab.look.facts import MANY
    from vitlab.look.page import render

    named = [source for source in sources if has_no_run(source)]
    plain = replace(view, weights=None, img_size=None, init_grid=None) if named else view  # those are of the named ones
    runs: dict[str, RunDir] = {}
    subjects: list[Subject] = []
    for source in sources:
        try:
            changes = rest if len(sources) == 1 or source not in named else []  # of runs
            subject = subject_at(source, view if source in named else plain, changes)[0]
        except CannotBeAsked as error:  # its run still has curves
            run = _run_of(source)
            runs[run.name if run.name not in runs else source] = run
            say(f"architecture     left out, as are pictures: {error}")
            continue
        if view.shown and not subject.has_pictures:
            say(f"pictures         left out: vitlab cannot read images of {subject.name}; choose some with --images")
        if subject.name in (one.name for one in subjects):
            subject.name = source
        if source not in named:
            runs[subject.name] = _run_of(source)
        subjects.append(subject)
    names = list({**dict.fromkeys(runs), **dict.fromkeys(one.name for one in subjects)})
    title = ", ".join(names) if len(names) < MANY else f"{len(names)} runs"
    with user_mistakes():  # images may be unreadable by now
        return render(title, runs, subjects, view.shown)


def _place(sources: list[str]) -> str:
    """Return the path of the page: in the directory of a single run, else in the working directory."""
    if len(sources) == 1:
        with suppress(UsageError):  # it names a network, a file, or nothing
            return str(find_directory(sources[0]).path / "look.html")
    return "look.html"


def _parser() -> CommandParser:
    parser = CommandParser(
        "vitlab look",
        description="Write one HTML page, which works offline, about a run, several runs side by side, or any network.",
    )
    add = parser.add_argument
    add("sources", metavar="RUN|FILE|NAME", nargs="+", help="runs, checkpoints, safetensors files, names as in analyze")
    add("-o", "--output", metavar="FILE", help="file to write (default: look.html in the run, or here)")
    add("--overwrite", action="store_true", help="replace an existing page; one that training wrote is replaced anyway")
    add("--images", metavar="DIR", help="folder or file of images for the viewer (default: validation images)")
    add("--pictures", type=int, default=12, help="largest number of images (default: %(default)s)")
    add("--weights", metavar="FILE", help="weights of a named network")
    add("--img_size", type=int, metavar="N", help="side of the images of a named network, in pixels")
    add(
        "--init_grid",
        metavar="ROWS,COLUMNS",
        type=grid_of,
        help="token grid of --weights, if the file does not state it",
    )
    add("--diagram", metavar="FILE", help="write only the drawing of the architecture, as SVG")
    add("--level", metavar="LEVEL", help="what --diagram draws: network (the default), tokens, block or head")
    add("--quiet", action="store_true", help="print errors only")
    add_trust(parser)
    return parser
