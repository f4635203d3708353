"""``vitlab analyze``: tables and figures of what a run has learned."""

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitlab.analysis import ANALYSES
from vitlab.config.arguments import CommandParser
from vitlab.config.trust import add_trust
from vitlab.errors import UsageError, did_you_mean
from vitlab.jobs.rebuild import evaluation_args, one_device
from vitlab.runs.directory import RunDir, find_run

if TYPE_CHECKING:
    from torch import Tensor

    from vitlab.analysis.subject import Subject
    from vitlab.config.parser import VitlabCLI


def main(argv: list[str]) -> int:
    """Run ``vitlab analyze`` and return its exit code."""
    options, rest = _parser().parse_known_args(argv)
    names = _names(options.names)
    (run, checkpoint), against = find_run(options.run), options.against and find_run(options.against)
    from vitlab.config.parser import user_mistakes
    from vitlab.jobs.terminal import open_terminal, say

    open_terminal(options.quiet)
    subject = _subject(run, checkpoint, rest, options)
    if against:
        subject.other = _subject(*against, rest, argparse.Namespace(images=None, num_images=options.num_images))
        _check_same_data(subject, subject.other)
    folder = Path(options.output) if options.output else run.path / "analysis"
    page: list[tuple[str, str, bytes]] = []
    notes = RunDir(folder)
    for name in names:
        module, function = ANALYSES[name][0].split(":")
        try:
            with user_mistakes():
                finding = getattr(importlib.import_module(module), function)(subject)
        except UsageError as error:
            notes.update("notes.json", **{name: {"not_done": str(error)}})
            if len(names) == 1:
                raise
            say(f"{name:<16} not done: {error}")
            page.append((name, f"Not done: {error}", b""))
            continue
        paths = finding.save(folder, name)
        notes.update("notes.json", **{name: {"note": finding.note, "checkpoint": checkpoint.name}})
        say(f"{name:<16} {', '.join(path.name for path in paths)}: {finding.note}")
        page.append((name, finding.note, paths[1].read_bytes()))
    if options.names == "all":
        from vitlab.analysis.page import write_page

        say(f"{'page':<16} {write_page(folder, f'{run.path.name} ({checkpoint.name})', page).name}")
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
    add("--quiet", action="store_true", help="print nothing but mistakes")
    add_trust(parser)
    return parser


def _query(text: str) -> tuple[int, int]:
    try:
        row, column = map(int, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be ROW,COLUMN of a patch, such as 3,4, got {text}") from None
    return row, column


def _names(text: str) -> list[str]:
    if text == "all":
        return list(ANALYSES)
    names = text.split(",")
    for name in names:
        if name not in ANALYSES:
            hint = did_you_mean(name, ANALYSES)
            raise UsageError(f'no analysis called "{name}"{hint}; there are all, {", ".join(ANALYSES)}')
    return names


def _subject(run: RunDir, checkpoint: Path, rest: Sequence[str], options: argparse.Namespace) -> "Subject":
    """Rebuild a run, its data included, with the weights of one of its checkpoints."""
    from vitlab.analysis.subject import Subject
    from vitlab.config.parser import user_mistakes
    from vitlab.models.convert import of_network
    from vitlab.tasks import Classifier

    cli = _rebuild(run, checkpoint, [*one_device(run), *rest], bool(options.images))
    with user_mistakes():
        return Subject(
            net=cli.model.net.to(cli.trainer.strategy.root_device),
            data=cli.datamodule,
            arguments={**of_network(cli.model.hparams), "num_classes": _num_outputs(cli.model.net)},
            name=run.path.name,
            classifies=isinstance(cli.model, Classifier),
            pictures=_pictures(options.images, cli.datamodule) if options.images else None,
            num_images=options.num_images,
            **{name: getattr(options, name, None) for name in ("layer", "head", "query")},
        )


def _rebuild(run: RunDir, checkpoint: Path, rest: Sequence[str], has_pictures: bool) -> "VitlabCLI":
    """Build task and data of a run and load the weights; the data's files may be gone if there are other pictures."""
    from vitlab.config.parser import VitlabCLI, user_mistakes
    from vitlab.jobs.restore import restore
    from vitlab.models.convert import load_weights

    try:
        cli = VitlabCLI(evaluation_args(run, list(rest)), default_root_dir=str(run.path))
    except UsageError:
        if not has_pictures:
            raise
        cli = restore(run, checkpoint, rest, default_root_dir=str(run.path))
        _check_size(cli, run)
        return cli
    _check_size(cli, run)
    with user_mistakes():
        cli.datamodule.prepare_data()
        cli.datamodule.load_state_dict(run.need("data.json"))
        load_weights(cli.model.net, checkpoint, "usual")
    return cli


def _num_outputs(net: Any) -> int:
    shapes = [parameter.shape for parameter in net.head.parameters()]
    return shapes[-1][0] if shapes else 0


def _check_size(cli: "VitlabCLI", run: RunDir) -> None:
    trained, now = run.read("model.json").get("img_size"), list(cli.model.net.img_size)
    if trained and trained != now:
        sizes = [" x ".join(map(str, size)) for size in (trained, now)]
        raise UsageError(
            f"{run.path} was trained on images of {sizes[0]} pixels, not {sizes[1]}: `vitlab analyze resolution` "
            "measures other sizes, and the other analyses look at the size of the training"
        )


def _check_same_data(subject: "Subject", other: "Subject") -> None:
    sizes = [[s.net.in_chans, *s.net.img_size] for s in (subject, other)]
    if sizes[0] != sizes[1]:
        raise UsageError(f"`--against` must be a run on images of the same size, got {sizes[1]} and {sizes[0]}")


def _pictures(text: str, data: Any) -> "Tensor":
    import torch

    from vitlab.data.files.decode import decode
    from vitlab.data.find import find_images
    from vitlab.jobs.terminal import say

    files, others = find_images([text])
    if not files:
        reason = next(iter(others.values()), "no file in it")
        raise UsageError(f"`--images {text}`: no images found: {reason}")
    images = [decode(file, data.mode) for file in files[:8]]
    resized = sum((image.height, image.width) != data.img_size for image in images)
    if resized:
        h, w = data.img_size
        say(f"images           {resized} of {len(images)} cut and resized to {h} x {w} pixels, as in evaluation")
    return torch.stack([data.eval_transform(image) for image in images])
