"""Analyses of a run, one after the other."""

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vitlab.analysis import ANALYSES
from vitlab.analysis.subject import Finding, Subject
from vitlab.config.images import find_images
from vitlab.config.parser import VitlabCLI, user_mistakes
from vitlab.data.files.decode import decode
from vitlab.errors import UsageError
from vitlab.jobs.rebuild import evaluation_args, one_device
from vitlab.jobs.restore import check_ours, restore
from vitlab.jobs.terminal import say
from vitlab.models.load import load_weights, of_network
from vitlab.runs.directory import RunDir
from vitlab.tasks import Classifier

Checkpointed = tuple[RunDir, Path]  # a run and one of its checkpoints


@dataclass(frozen=True)
class View:
    """What of a network an analysis looks at.

    Args:
        images: Folder or file of pictures to show maps of; None takes validation images.
        layer: The block, from 0; None leaves the choice to the analysis.
        head: The head, from 0; None for all.
        query: Row and column of the patch whose attention is shown; None for the class token.
        num_images: Images to measure with, at most.
        split: Whose images errors, confusion and calibration look at.
    """

    images: str | None = None
    layer: int | None = None
    head: int | None = None
    query: tuple[int, int] | None = None
    num_images: int = 512
    split: Literal["train", "val", "test"] = "val"


def analyze(
    names: Sequence[str],
    of: Checkpointed,
    view: View,
    against: Checkpointed | None = None,
    output: str | Path | None = None,
    arguments: Sequence[str] = (),
) -> Iterator[tuple[str, Finding | UsageError, list[Path]]]:
    """Yield each analysis with what it found and the files it wrote, or with why it cannot be done.

    Args:
        names: Names of analyses.
        of: The run to look at and which of its weights to use.
        view: What of it to look at.
        against: Another run to compare with.
        output: Folder for tables and figures; default: ``analysis/`` of the run.
        arguments: Arguments of the command line that change values of the run's configuration.
    """
    run, checkpoint = of
    subject = subject_of(run, checkpoint, arguments, view)
    if against:
        subject.other = subject_of(*against, arguments, View(num_images=view.num_images))
        _check_same_data(subject, subject.other)
    folder = Path(output) if output else run.path / "analysis"
    notes = RunDir(folder)
    for name in names:
        module, function = ANALYSES[name][0].split(":")
        try:
            with user_mistakes():
                finding: Finding = getattr(importlib.import_module(module), function)(subject)
        except UsageError as error:
            notes.update("notes.json", **{name: {"not_done": str(error)}})
            yield name, error, []
            continue
        paths = finding.save(folder, name)
        notes.update("notes.json", **{name: {"note": finding.note, "checkpoint": checkpoint.name}})
        yield name, finding, paths


def subject_of(run: RunDir, checkpoint: Path, rest: Sequence[str], view: View) -> Subject:
    """Rebuild a run, its data included, with the weights of one of its checkpoints."""

    cli = _rebuild(run, checkpoint, [*one_device(run), *rest], bool(view.images))
    with user_mistakes():
        return Subject(
            net=cli.model.net.to(cli.trainer.strategy.root_device),
            data=cli.datamodule,
            arguments={**of_network(cli.model.hparams), "num_classes": _num_outputs(cli.model.net)},
            name=run.path.name,
            classifies=isinstance(cli.model, Classifier) and cli.model.kind == "class",
            split=view.split,
            pictures=_pictures(view.images, cli.datamodule) if view.images else None,
            num_images=view.num_images,
            layer=view.layer,
            head=view.head,
            query=view.query,
        )


def _rebuild(run: RunDir, checkpoint: Path, rest: Sequence[str], has_pictures: bool) -> VitlabCLI:
    """Build task and data of a run and load the weights; the data's files may be gone if there are other pictures."""

    try:
        cli = VitlabCLI(evaluation_args(run, list(rest)), default_root_dir=str(run.path))
    except UsageError:
        if not has_pictures:
            raise
        cli = restore(run, checkpoint, rest, default_root_dir=str(run.path))
        check_ours(cli, "vitlab analyze")
        _check_size(cli, run)
        return cli
    check_ours(cli, "vitlab analyze")
    _check_size(cli, run)
    with user_mistakes():
        cli.datamodule.prepare_data()
        cli.datamodule.load_state_dict(dict(run.data))
        load_weights(cli.model.net, checkpoint, "usual")
    return cli


def _num_outputs(net: Any) -> int:
    shapes = [parameter.shape for parameter in net.head.parameters()]
    return shapes[-1][0] if shapes else 0


def _check_size(cli: VitlabCLI, run: RunDir) -> None:
    trained, now = run.model.get("img_size"), list(cli.model.net.img_size)
    if trained and trained != now:
        sizes = [" x ".join(map(str, size)) for size in (trained, now)]
        raise UsageError(
            f"{run.path} was trained on images of {sizes[0]} pixels, not {sizes[1]}: `vitlab analyze resolution` "
            "measures other sizes, and the other analyses look at the size of the training"
        )


def _check_same_data(subject: Subject, other: Subject) -> None:
    sizes = [[s.net.in_chans, *s.net.img_size] for s in (subject, other)]
    if sizes[0] != sizes[1]:
        raise UsageError(f"`--against` must be a run on images of the same size, got {sizes[1]} and {sizes[0]}")


def _pictures(text: str, data: Any) -> Tensor:

    files, others = find_images([text])
    if not files:
        reason = next(iter(others.values()), "no file in it")
        raise UsageError(f"`--images {text}`: no images found: {reason}")
    images = [decode(file, data.decoding) for file in files[:8]]
    resized = sum((image.height, image.width) != data.img_size for image in images)
    if resized:
        h, w = data.img_size
        say(f"images           {resized} of {len(images)} cut and resized to {h} x {w} pixels, as in evaluation")
    return torch.stack([data.eval_transform(image) for image in images])
