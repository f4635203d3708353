"""Build the subject of an analysis without a run: from a file of weights, a published network, or one of timm."""

import re
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

import vitlab.data
from vitlab.analysis.pictures import PreparedPictures
from vitlab.analysis.subject import Subject
from vitlab.config.explain import user_mistakes
from vitlab.config.parser import settings
from vitlab.data.base import ImageData
from vitlab.data.imagenet import PUBLISHED
from vitlab.data.loading.pipeline import Pipeline
from vitlab.data.record import check_target_names
from vitlab.data.timm_images import KEYS, images_of
from vitlab.errors import UsageError, did_you_mean
from vitlab.jobs.checkpoint import misfit, named_outputs
from vitlab.jobs.load import arguments_of_card, load_exported, transform_of_pictures
from vitlab.jobs.restore import Rebuilt
from vitlab.jobs.terminal import say
from vitlab.jobs.view import View
from vitlab.models.create import create_model
from vitlab.models.foreign import AnyNetwork
from vitlab.models.load import load_network
from vitlab.models.sizes import SIZES
from vitlab.models.timm_networks import NoCounterpart
from vitlab.models.walk import Asked
from vitlab.models.weights_file import WeightsFile, read_weights
from vitlab.named_kwargs import full_signature
from vitlab.shipped import LIBRARIES, card_beside, find_weights


def name_of_network(source: str) -> str:
    """Return what a network without a run is called: its file's name, or the last part of its own.

    >>> name_of_network("timm:vit_small_patch14_dinov2.lvd142m"), name_of_network("hf:facebook/deit-tiny-patch16-224")
    ('vit_small_patch14_dinov2.lvd142m', 'deit-tiny-patch16-224')
    """
    path = Path(find_weights(source))
    return path.stem if path.is_file() else re.split("[:/]", source.rstrip("/"))[-1]


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
        number_classes(data, named)
        _as_trained(net, card, data)
        images = data or (_without_images(prepared) if card else usual_transform(net))
        is_class = data is None or data.targets["kind"] == "class"
        subject = Subject(net, images, name=name, classifies=is_class, **view.of_subject())
        subject.is_elsewhere = data is not None and not _answers_about(data, subject.net, named)
        subject.pictures = view.pictures(subject.data)
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


def number_classes(data: ImageData | None, known: Sequence[str]) -> None:
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
    if (cls := data_set_called(name)) is None:
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


def data_set_called(name: Any) -> type[ImageData] | None:
    """Return the data set of vitlab with a name, or None."""
    return getattr(vitlab.data, name) if name in vitlab.data.__all__ else None


def _images(net: Any, crop_pct: float | None, needed: Container[str] = KEYS) -> dict[str, Any]:
    """Return how images are prepared for a library's weights if the network has them, else as usual for ImageNet."""
    how: dict[str, Any] = {"mean": PUBLISHED[0], "std": PUBLISHED[1], "crop_pct": crop_pct}
    how |= {"crop_mode": "center", "interpolation": "bicubic"}
    if getattr(net, "pretrained_cfg", None):
        how = images_of(net.pretrained_cfg, needed)
    return how | {name: list(how[name][: net.in_chans]) for name in ("mean", "std")}


def usual_transform(net: Any, crop_pct: float | None = 0.9) -> Callable[[Image.Image], Tensor]:
    """Return the transform of :func:`_images`."""
    how = _images(net, crop_pct)
    shared = {name: how[name] for name in ("crop_pct", "interpolation", "crop_mode")}
    pipeline = Pipeline(None, net.img_size, "none", None, **shared)
    return lambda image: pipeline.eval_image(image, (tuple(how["mean"]), tuple(how["std"])))
