"""Build the subject of an analysis from a run, a weights file, a published network, or a timm model."""

import inspect
import json
import re
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

import vitlab.data
from vitlab.analysis.outcomes.labels import PLAN
from vitlab.analysis.pictures import LoadedImages, PreparedPictures
from vitlab.analysis.subject import CkaTokens, Subject
from vitlab.config.explain import user_mistakes
from vitlab.config.parser import VitlabCLI, settings
from vitlab.data.base import ImageData
from vitlab.data.files.splits import SplitName
from vitlab.data.image_folder import PUBLISHED
from vitlab.data.loading.pipeline import Pipeline
from vitlab.data.record import Trained, check_target_names, measured
from vitlab.data.timm_images import KEYS, images_of
from vitlab.errors import UsageError, did_you_mean, named_line
from vitlab.interface import answering, has_grid, image_fact, network, path_of
from vitlab.jobs.checkpoint import (
    load_checkpoint,
    load_outside,
    load_resized,
    misfit,
    named_outputs,
    needs_more_than_net,
)
from vitlab.jobs.load import arguments_of_card, load_exported, load_pictures, transform_of_pictures
from vitlab.jobs.restore import Rebuilt, evaluation_args, load_data_state, naming_place_of_data, restore
from vitlab.jobs.terminal import say
from vitlab.models.create import create_model
from vitlab.models.foreign import AnyNetwork
from vitlab.models.load import load_network, network_args
from vitlab.models.sizes import SIZES
from vitlab.models.timm_networks import NoCounterpart
from vitlab.models.walk import Asked, as_transformer
from vitlab.models.weights_file import WeightsFile, read_weights
from vitlab.named_kwargs import full_signature
from vitlab.runs.directory import RunDir, find_run, run_called
from vitlab.runs.standing import checksum
from vitlab.shipped import LIBRARIES, card_beside, find_weights
from vitlab.tasks import Classifier
from vitlab.tasks.base import Task


class CannotBeAsked(UsageError):
    """The network of the run maps no images to outputs that analyses can read."""


@dataclass(frozen=True)
class View:
    """Which part of a network an analysis examines, and on which images.

    Args:
        images: Folder or file of images to draw maps for; None takes validation images.
        layer: The block, from 0; None leaves the choice to the analysis.
        head: The head, from 0; None for all.
        query: Row and column of the patch whose attention is shown; None for the class token.
        num_images: Largest number of images to measure with.
        split: Split that errors, confusion and calibration use.
        weights: Weights file for a named network, instead of downloaded weights.
        img_size: Side of the images of a named network, in pixels.
        shown: Largest number of images to show.
        tokens: By which tokens cka compares images: mean of the patches, class, or flattened.
        init_grid: Rows and columns of the token grid of ``weights``, where the file lacks them.
        masks: Folder of masks for segmentation, with the names of the images.
    """

    images: str | None = None
    layer: int | None = None
    head: int | None = None
    query: tuple[int, int] | None = None
    num_images: int = 512
    split: SplitName = "val"
    weights: str | None = None
    img_size: int | None = None
    shown: int = 8
    tokens: CkaTokens = "mean"
    init_grid: tuple[int, int] | None = None
    masks: str | None = None


def is_elsewhere(source: str) -> bool:
    """Return whether a source is a network without a run: a name that no run has, or a file outside of run directories.

    >>> is_elsewhere("vit_s16"), is_elsewhere("first"), is_elsewhere("vitlab:photos64_vit")
    (True, False, True)
    """
    path = Path(find_weights(source))
    named = source in SIZES and not run_called(source)
    return source.startswith(LIBRARIES) or named or (path.is_file() and not RunDir.around(path).config.is_file())


def name_of_network(source: str) -> str:
    """Return what a network without a run is called: its file's name, or the last part of its own.

    >>> name_of_network("timm:vit_small_patch14_dinov2.lvd142m"), name_of_network("hf:facebook/deit-tiny-patch16-224")
    ('vit_small_patch14_dinov2.lvd142m', 'deit-tiny-patch16-224')
    """
    path = Path(find_weights(source))
    return path.stem if path.is_file() else re.split("[:/]", source.rstrip("/"))[-1]


def subject_at(source: str, view: View, arguments: Sequence[str] = ()) -> tuple[Subject, Path, dict[str, Any]]:
    """Return the subject that a source names, the folder of its analyses, and name and checksum of its weights.

    Args:
        source: A run, its name or a checkpoint in it; a vitlab file; ``vitlab:NAME``, a trained network that vitlab
            ships; a name of `vitlab models`, or ``timm:NAME``, ``hf:NAME``, ``torchvision:NAME``.
        view: Which part of it to analyze.
        arguments: Command-line arguments that change values of a run's configuration.

    Raises:
        UsageError: There is no such run or network, its weights do not fit, or ``view`` names weights or a size for
            a run.
    """
    source = find_weights(source)
    if is_elsewhere(source):
        subject = named_subject(source, view, arguments)
        return subject, Path("analysis") / subject.name, {"checkpoint": view.weights or source}
    if view.weights or view.img_size or view.init_grid:
        raise UsageError(f"`--weights`, `--img_size` and `--init_grid` are for named networks, and {source} is a run")
    run, checkpoint = find_run(source)
    weights = {"checkpoint": checkpoint.name, "sha256": checksum(checkpoint)}
    return subject_of(run, checkpoint, arguments, view), run.path / "analysis", weights


def named_subject(source: str, view: View, arguments: Sequence[str] = ()) -> Subject:
    """Build a network that has no run, and prepare the images of ``view`` for it, or the data that are given.

    Raises:
        UsageError: There are no weights for it, or they do not fit.
    """
    card, name = dict[str, Any](), name_of_network(source)
    with user_mistakes():
        if not Path(source).is_file():
            net: Any = _created(source, name, view)
        elif card_beside(source).is_file():
            net, prepared, card = load_exported(Path(source))
        else:
            net = load_network(source)
        if not card and not getattr(net, "pretrained_cfg", None):
            say(f"images           {source} does not define a normalization: using ImageNet's")
        data = _data_for(net, source, arguments, card.get("images"))
        named = named_outputs(view.weights or source) if data else []
        _number_classes(data, named)
        _as_trained(net, card, data)
        images = data or (_without_images(prepared) if card else _prepare(net))
        is_class = data is None or data.targets["kind"] == "class"
        subject = Subject(net, images, name=name, classifies=is_class, **_fields(view))
        subject.is_elsewhere = data is not None and not _answers_about(data, subject.net, named)
        subject.pictures = load_pictures(view.images, view.shown, subject.data) if view.images else None
    return subject


def _created(source: str, name: str, view: View) -> Any:
    """Return the network of a name, with its published weights or those of ``view``, for images of the size of that."""
    changes: dict[str, Any] = {"img_size": view.img_size} if view.img_size else {}
    weights, grid = view.weights, view.init_grid
    if weights is None and not source.startswith(LIBRARIES):
        raise UsageError(f"{source} has no weights: give them with --weights FILE")
    file = read_weights(weights) if weights and not weights.startswith(LIBRARIES) else None
    if not grid and changes and file and not file.arguments and source in SIZES:
        with suppress(ValueError):  # the grid of the network's own image size, if the weights fit it
            grid = create_model(source, weights=file).grid_size
    try:
        return create_model(source, weights=file or weights, grid=grid, **changes)
    except NoCounterpart as error:
        return _foreign(error.theirs, source, name, view, file)


def _as_trained(net: Any, card: Mapping[str, Any], data: ImageData | None) -> None:
    """Let the network of an export return what that of a run does: logits of labels, numbers in standard deviations."""
    theirs, given = card.get("targets") or {}, data.targets if data else {}
    if theirs.get("kind") == "multilabel" and card.get("scores") == "probabilities":
        net.register_forward_hook(lambda module, images, outputs: outputs.logit(eps=1e-7))
    if theirs.get("kind") == given.get("kind") == "number" and len(theirs["names"]) == len(given["names"]):
        check_target_names(given["names"], theirs["names"])
        mean, std = (torch.tensor(given[name]) for name in ("mean", "std"))
        net.register_forward_hook(lambda module, images, outputs: (outputs - mean) / std)


def _number_classes(data: ImageData | None, known: Sequence[str]) -> None:
    """Give data whose classes are among those that a network knows, but fewer or in another order, its numbers."""
    if data is not None and data.targets["kind"] == "class" and {*data.class_names} <= {*known} != set():
        with suppress(ValueError):  # of data that cannot be numbered anew: they count as other classes
            if data.class_names != [*known]:
                data.adopt_classes([*known])


def _answers_about(data: ImageData, net: Asked, named: Sequence[str]) -> bool:
    """Return whether a network answers with the classes or numbers of the data, by their names if its weights do."""
    if data.targets["kind"] == "number":
        return len(data.targets["names"]) == net.num_classes
    return data.num_classes == net.num_classes and (not named or named == data.class_names)


def _foreign(theirs: Any, source: str, name: str, view: View, file: WeightsFile | None) -> AnyNetwork:
    """Return a network of another library that has no equivalent here, with weights from a file if they are given."""
    if file is not None:
        try:
            theirs.load_state_dict(file.state_dict)
        except RuntimeError as error:
            raise misfit(Path(file.path), error) from error
    elif view.weights:
        raise UsageError(f"`--weights {view.weights}` is for networks of vitlab: {source} takes a file, or its own")
    if not theirs.pretrained_cfg:
        raise UsageError(f"{source} does not say how its images are prepared, and has no counterpart here")
    in_chans, *size = theirs.pretrained_cfg["input_size"]
    if view.img_size:
        size = [view.img_size, view.img_size]
        if hasattr(theirs, "set_input_size"):
            theirs.set_input_size(img_size=tuple(size))
    net = AnyNetwork(theirs, name, (size[0], size[1]), in_chans)
    net.pretrained_cfg = theirs.pretrained_cfg
    return net


def _without_images(prepared: Rebuilt) -> PreparedPictures:
    """Return data that prepare pictures, and have none, as they prepare them, with their meaning of the outputs."""
    data = PreparedPictures(transform_of_pictures(prepared), prepared.img_size, prepared.in_chans)
    data.decoding, data.targets, data.class_names = prepared.decoding, prepared.targets, prepared.class_names
    return data


def _data_for(net: Any, source: str, arguments: Sequence[str], described: Mapping[str, Any] | None) -> ImageData | None:
    """Return the data set of ``--data`` for a network without a run, prepared as its images are; None without one.

    Args:
        net: The network.
        source: What names it.
        arguments: The data set and its arguments.
        described: How the card of an export says that images are prepared; None without a card.
    """
    given = dict(settings(list(arguments)))
    name = given.pop("data", None)
    if name is None and not given:
        return None
    others = [key for key in given if not key.startswith("data.")]
    if others:
        raise UsageError(f"`--{others[0]}` changes the configuration of a run, and {source} is not a run")
    if name is None:
        raise UsageError(f"`--{next(iter(given))}` needs --data=NAME, such as ImageFolder")
    if (cls := _data_set(name)) is None:
        raise UsageError(f'no data set called "{name}"{did_you_mean(str(name), vitlab.data.__all__)}')
    taken = full_signature(cls).parameters
    if unknown := [key for key in given if key.removeprefix("data.") not in taken]:
        raise UsageError(f"`--data={name}` takes no `--{unknown[0]}`")
    needed = taken.keys() - {key.removeprefix("data.") for key in given}
    how = arguments_of_card(described) if described else _images(net, 0.9, needed)
    usual = {"img_size": list(net.img_size), "in_chans": net.in_chans, **how}
    known = {key: value for key, value in usual.items() if key in taken}
    values = known | {key.removeprefix("data."): value for key, value in given.items()}
    for parameter in taken.values():
        if parameter.default is parameter.empty and parameter.name not in values:
            raise UsageError(f"`--data={name}` needs `--data.{parameter.name}`")
    data: ImageData = cls(**values)
    if described and described["native_size"]:  # of photos of other sizes it takes all
        data.take_images({"crop_pct": 1.0}, [key.removeprefix("data.") for key in given])
    data.prepare_data()
    return data


def _data_set(name: Any) -> type[ImageData] | None:
    """Return the data set of vitlab with a name, or None."""
    return getattr(vitlab.data, name) if name in vitlab.data.__all__ else None


def _images(net: Any, crop_pct: float | None, needed: Container[str] = KEYS) -> dict[str, Any]:
    """Return how images are prepared for a library's weights if the network has them, else as usual for ImageNet."""
    how: dict[str, Any] = {"mean": PUBLISHED[0], "std": PUBLISHED[1], "crop_pct": crop_pct}
    how |= {"crop_mode": "center", "interpolation": "bicubic"}
    if getattr(net, "pretrained_cfg", None):
        how = images_of(net.pretrained_cfg, needed)
    return how | {name: list(how[name][: net.in_chans]) for name in ("mean", "std")}


def _prepare(net: Any, crop_pct: float | None = 0.9) -> Callable[[Image.Image], Tensor]:
    """Return the transform of :func:`_images`."""
    how = _images(net, crop_pct)
    shared = {name: how[name] for name in ("crop_pct", "interpolation", "crop_mode")}
    pipeline = Pipeline(None, net.img_size, "none", None, **shared)
    return lambda image: pipeline.eval_image(image, (tuple(how["mean"]), tuple(how["std"])))


def _fields(view: View) -> dict[str, Any]:
    names = ("num_images", "layer", "head", "query", "split", "tokens", "masks")
    return {name: getattr(view, name) for name in names}


def subject_of(run: RunDir, checkpoint: Path, rest: Sequence[str], view: View) -> Subject:
    """Rebuild a run and its data, with the weights of one of its checkpoints."""
    cli = _rebuild(run, checkpoint, rest, bool(view.images))
    with user_mistakes():
        images = _loaded(cli, bool(view.images))
        net: Any = _asked(cli, run, images)
        data: Any = images or _transform_of(cli.datamodule, net)
        subject = Subject(
            net=net.to(cli.trainer.strategy.root_device),
            data=data,
            arguments={**network_args(cli.model.hparams), "num_classes": _num_outputs(net)},
            name=run.name,
            classifies=_classifies(cli.model, data, net),
            is_elsewhere="data" in dict(settings(list(rest))) and data.class_names != run.data.get("class_names"),
            task=_with_decoder(cli.model, checkpoint).to(cli.trainer.strategy.root_device),
            folds=next((home for home in run.path.parents[:2] if (home / PLAN).is_file()), None),  # of `vitlab cv`
            **_fields(view),
        )
        subject.pictures = load_pictures(view.images, view.shown, subject.data) if view.images else None
    return subject


def _asked(cli: VitlabCLI, run: RunDir, images: ImageData | None) -> Asked:
    """Return the network of a run as analyses ask it; an own one takes images of the data, or as model.json says."""
    name, data = f"the network of {run.path}", images or cli.datamodule
    facts: list[Any] = [image_fact(data, key) or run.model.get(key) for key in ("img_size", "in_chans")]
    try:
        try:
            return as_transformer(_answering_like(cli.model, facts), name)
        except NoCounterpart as error:
            if not all(facts):
                owner = path_of(cli.datamodule)
                text = f"{name} does not say what images it takes: give {owner} `img_size` and `in_chans`"
                raise UsageError(text) from None
            return AnyNetwork(error.theirs, name, (facts[0][0], facts[0][1]), facts[1])
    except UsageError as error:
        raise CannotBeAsked(str(error)) from error


def _answering_like(task: Any, facts: Sequence[Any]) -> nn.Module:
    """Return the ``net`` of a task, which is looked into; an own task itself if its ``forward`` returns something else.

    Args:
        task: The LightningModule.
        facts: Size and channels of its images, as far as they are known.
    """
    net = network(task)
    if isinstance(task, Task) or (whole := answering(task)) is net or not all(facts):
        return net
    value = next(task.parameters(), torch.zeros(()))
    images = torch.randn(2, facts[1], *facts[0], generator=torch.Generator().manual_seed(0)).to(value)
    try:
        with torch.no_grad():
            mine, theirs = whole.eval()(images), net.eval()(images)
        same = mine.shape == theirs.shape and torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    except Exception:  # whatever a foreign network raises; the whole one is asked again, and its refusal told
        same = False
    return net if same else whole


def _classifies(task: Any, data: Any, net: Asked) -> bool:
    """Return whether the outputs are scores of the data's classes; for an own module, by their number."""
    if isinstance(task, Classifier) or path_of(task).startswith("vitlab."):
        return getattr(task, "kind", None) == "class" and isinstance(task, Classifier)
    return isinstance(data, ImageData) and data.targets["kind"] == "class" and data.num_classes == _num_outputs(net)


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
    return _prepare(net, None)


def _rebuild(run: RunDir, checkpoint: Path, rest: Sequence[str], has_pictures: bool) -> VitlabCLI:
    """Build task and data of a run and load the weights; with other pictures, the data's files may be missing."""
    other = dict(settings(list(rest)))
    rest = [*rest, *_training_size(run, other)]
    facts: dict[str, Any] = dict(run.data)
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
            _number_classes(cli.datamodule, run.data.get("class_names") or ())
            scale = {key: value for key, value in run.data.items() if key in ("mean", "std")}
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
    cls = _data_set(given.get("data"))
    taken = inspect.signature(cls).parameters if cls else ()
    known = {"img_size": run.model.get("img_size"), "in_chans": run.model.get("in_chans")}
    sizes = {name: v for name, v in known.items() if v and name in taken and f"data.{name}" not in given}
    return [f"--data.{name}={json.dumps(value)}" for name, value in sizes.items()]


def _num_outputs(net: Any) -> int:
    if isinstance(net, AnyNetwork):
        return net.num_classes
    shapes = [parameter.shape for parameter in net.head.parameters()]
    return shapes[-1][0] if shapes else 0


def _check_size(cli: VitlabCLI, run: RunDir) -> None:
    net: Any = network(cli.model)
    built = list(net.img_size if has_grid(cli.model) else getattr(getattr(net, "patch_embed", net), "img_size", ()))
    trained = run.model.get("img_size") or built
    now = list(cli.datamodule.img_size) if isinstance(cli.datamodule, ImageData) else built
    if trained and now and trained != now:
        sizes = [" x ".join(map(str, size)) for size in (trained, now)]
        raise UsageError(
            f"{run.path} was trained on images of {sizes[0]} pixels, not {sizes[1]}: leave out `--data.img_size`; "
            "`vitlab analyze resolution` measures other sizes, and `vitlab test` this one"
        )
