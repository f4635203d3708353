"""Build the subject of an analysis from a run: its network and data, with the weights of a checkpoint."""

import inspect
import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitlab.analysis.outcomes.labels import PLAN
from vitlab.analysis.pictures import LoadedImages
from vitlab.analysis.subject import Subject
from vitlab.config.explain import user_mistakes
from vitlab.config.parser import VitlabCLI, settings
from vitlab.data.base import ImageData
from vitlab.data.record import Trained, measured
from vitlab.errors import UsageError, named_line
from vitlab.interface import answering, has_grid, image_sizes, network, path_of
from vitlab.jobs.checkpoint import load_checkpoint, load_outside, load_resized, needs_more_than_net
from vitlab.jobs.restore import load_data_state, restore
from vitlab.jobs.stored import evaluation_args, naming_place_of_data
from vitlab.jobs.subject_without_run import data_set_called, number_classes, usual_transform
from vitlab.jobs.terminal import say
from vitlab.jobs.view import View
from vitlab.models.foreign import AnyNetwork
from vitlab.models.load import network_args
from vitlab.models.timm_networks import NoCounterpart
from vitlab.models.walk import Asked, as_transformer
from vitlab.runs.directory import RunDir
from vitlab.tables import shape_text
from vitlab.tasks import Classifier
from vitlab.tasks.base import Task


class CannotBeAsked(UsageError):
    """The network of the run maps no images to outputs that analyses can read."""


def subject_of_run(run: RunDir, checkpoint: Path, rest: Sequence[str], view: View) -> Subject:
    """Rebuild a run and its data, with the weights of one of its checkpoints."""
    cli = _rebuild(run, checkpoint, rest, bool(view.images))
    with user_mistakes():
        images = _loaded(cli, bool(view.images))
        net: Any = _asked(cli, run, images)
        data: Any = images or _transform_of(cli.datamodule, net)
        subject = Subject(
            net=net.to(cli.trainer.strategy.root_device),
            data=data,
            arguments=dict(network_args(cli.model.hparams)),
            name=run.name,
            classifies=_classifies(cli.model, data, net),
            is_elsewhere="data" in dict(settings(list(rest))) and data.class_names != run.data.get("class_names"),
            task=_with_decoder(cli.model, checkpoint).to(cli.trainer.strategy.root_device),
            folds=next((home for home in run.path.parents[:2] if (home / PLAN).is_file()), None),  # of `vitlab cv`
            **view.of_subject(),
        )
        subject.pictures = view.pictures(subject.data)
    return subject


def _asked(cli: VitlabCLI, run: RunDir, images: ImageData | None) -> Asked:
    """Return the network of a run as analyses ask it; an own one takes images of the data, or as model.json says."""
    name, data = f"the network of {run.path}", images or cli.datamodule
    size, in_chans = image_sizes(cli.model, data, run.model).values()
    try:
        try:
            return as_transformer(_answering_like(cli.model, size, in_chans), name)
        except NoCounterpart as error:
            theirs = error.theirs
        if size and in_chans:
            return AnyNetwork(theirs, name, (size[0], size[1]), in_chans)
    except UsageError as error:
        raise CannotBeAsked(str(error)) from error
    owner = path_of(cli.datamodule)
    raise CannotBeAsked(f"{name} does not say what images it takes: give {owner} `img_size` and `in_chans`")


def _answering_like(task: Any, size: list[int] | None, in_chans: int | None) -> nn.Module:
    """Return the ``net`` of a task, which is looked into; an own task itself if its ``forward`` returns something else.

    Args:
        task: The LightningModule.
        size: Height and width of its images, if they are known.
        in_chans: Their channels, if they are known.
    """
    net = network(task)
    if isinstance(task, Task) or (whole := answering(task)) is net or not size or not in_chans:
        return net
    value = next(task.parameters(), torch.zeros(()))
    images = torch.randn(2, in_chans, *size, generator=torch.Generator().manual_seed(0)).to(value)
    try:
        with torch.no_grad():
            mine, theirs = whole.eval()(images), net.eval()(images)
        same = mine.shape == theirs.shape and torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    except Exception:  # whatever a foreign network raises; the whole one is asked again, and its refusal told
        same = False
    return net if same else whole


def _classifies(task: Any, data: Any, net: Asked) -> bool:
    """Return whether the outputs are scores of the data's classes; for an own module, by their number."""
    if isinstance(task, Classifier):
        return task.kind == "class"
    if path_of(task).startswith("vitlab."):
        return False
    return isinstance(data, ImageData) and data.targets["kind"] == "class" and data.num_classes == net.num_classes


def _with_decoder(task: Any, checkpoint: Path) -> Any:
    """Return a task, one such as MAE with the decoder of its checkpoint, or unable to fill images without one."""
    if hasattr(task, "fill") and checkpoint.suffix == ".safetensors":
        task.fill = None
    elif hasattr(task, "fill"):
        load_outside(task, checkpoint)
    return task


def _loaded(cli: VitlabCLI, has_pictures: bool) -> ImageData | None:
    """Return data with images: of vitlab, or what the loaders of another data module give.

    None if they give none, and for other pictures, which data without ``eval_transform`` cannot prepare.
    """
    data: Any = cli.datamodule
    if isinstance(data, ImageData):
        return data
    if has_pictures and not hasattr(data, "eval_transform"):
        return None
    try:
        return LoadedImages(data, cli.model, cli.trainer)
    except UsageError as error:
        reason = str(error)
    except Exception as error:  # whatever foreign data raise, such as that files are missing
        reason = f"{path_of(data)} raises {named_line(error)}"
    say(f"images           left out those of the data: {reason}")
    return None


def _transform_of(data: Any, net: Any) -> Any:
    """Return the transform of images for a data module that is not vitlab's."""
    if callable(own := getattr(data, "eval_transform", None)):
        return own
    say("images           the data module has no `eval_transform`: using ImageNet's normalization")
    return usual_transform(net, None)


def _rebuild(run: RunDir, checkpoint: Path, rest: Sequence[str], has_pictures: bool) -> VitlabCLI:
    """Build task and data of a run and load the weights; with other pictures, the data's files may be missing."""
    other = dict(settings(list(rest)))
    rest = [*rest, *_training_size(run, other)]
    facts = run.data
    has_scale = (facts.get("targets") or {}).get("kind") in ("number", "mixed")  # of its outputs, whatever the data
    as_trained = measured(Trained(facts, None, "val")) if has_scale or "data" not in other else nullcontext()
    try:
        with naming_place_of_data(run, rest), as_trained:
            cli = VitlabCLI(evaluation_args(run, rest, alone=True), default_root_dir=str(run.path))
    except UsageError as error:
        if not has_pictures:
            raise UsageError(f"{run.path}: {error}") from error  # which may be one of several
        cli = restore(run, checkpoint, rest)
        _check_size(cli, run)
        return cli
    _check_size(cli, run)
    if not isinstance(cli.datamodule, ImageData):
        return restore(run, checkpoint, rest)
    with user_mistakes():
        cli.datamodule.prepare_data()
        built = cli.datamodule.num_classes
        if "data" not in other:
            load_data_state(cli.datamodule, run, checkpoint)
        else:
            number_classes(cli.datamodule, run.data.get("class_names") or ())
            scale = {key: facts[key] for key in ("mean", "std")}
            cli.datamodule.take_images(scale, [key.removeprefix("data.") for key in other])
        if has_grid(cli.model):
            trained = len(run.data.get("class_names") or ())
            if "data" in other and 0 < trained != built == cli.model.net.num_classes:
                cli.model.net.reset_head(trained)
            load_resized(cli.model, checkpoint)
            if needs_more_than_net(cli.model):
                load_outside(cli.model, checkpoint)
        else:
            load_checkpoint(cli.model, checkpoint)
    return cli


def _training_size(run: RunDir, given: dict[str, Any]) -> list[str]:
    """Return arguments that give another data set the image size and channels of the run."""
    cls = data_set_called(given.get("data"))
    taken = inspect.signature(cls).parameters if cls else ()
    known = {"img_size": run.model.get("img_size"), "in_chans": run.model.get("in_chans")}
    sizes = {name: v for name, v in known.items() if v and name in taken and f"data.{name}" not in given}
    return [f"--data.{name}={json.dumps(value)}" for name, value in sizes.items()]


def _check_size(cli: VitlabCLI, run: RunDir) -> None:
    built = image_sizes(cli.model, None)["img_size"]
    trained = run.model.get("img_size") or built
    now = list(cli.datamodule.img_size) if isinstance(cli.datamodule, ImageData) else built
    if trained and now and trained != now:
        sizes = [shape_text(size) for size in (trained, now)]
        raise UsageError(
            f"{run.path} was trained on images of {sizes[0]} pixels, not {sizes[1]}: leave out `--data.img_size`; "
            "`vitlab analyze resolution` measures other sizes, and `vitlab test` this one"
        )
