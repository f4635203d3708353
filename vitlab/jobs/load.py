"""Load a trained network together with the transform that prepares its images."""

import inspect
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn

from vitlab.config.explain import user_mistakes
from vitlab.config.parts import import_parts
from vitlab.data.files.decode import Decoding, decode_opened
from vitlab.errors import UsageError
from vitlab.interface import transform_of
from vitlab.jobs.formats import Graph, need_packages
from vitlab.jobs.restore import ON_CPU, Rebuilt, network_of, restore
from vitlab.models.create import library_network
from vitlab.models.load import load_network
from vitlab.models.weights_file import check_readable
from vitlab.runs.directory import RunDir
from vitlab.runs.find import find_run
from vitlab.shipped import LIBRARIES, card_beside, find_weights
from vitlab.tasks import MultiTask, Regressor

Transform = Callable[[Image.Image], Tensor]


class Loaded(NamedTuple):
    """A trained network, ready for images.

    Args:
        net: The network, in evaluation mode on the CPU; maps ``(B, C, H, W)`` to ``(B, K)``.
        transform: Maps a PIL image to a normalized ``(C, H, W)``, as in evaluation.
    """

    net: Any
    transform: Transform


def load_trained(source: str) -> Loaded:
    """Return the network and transform of a run, one of its checkpoints, an exported file or another library.

    Args:
        source: What to load; a bare name is that of a run, ``vitlab:NAME`` a trained network that vitlab ships;
            ``timm:NAME``, ``hf:NAME`` and ``torchvision:NAME`` are those of other libraries.

    Raises:
        UsageError: There is no such run or file, or it does not say how to prepare images.
    """
    source = find_weights(source)
    if source.startswith(LIBRARIES):
        return _load_of_library(library_network(source), source)
    path = Path(source)
    if path.is_file() and (card_beside(path).is_file() or path.suffix == ".onnx"):
        net, data, _ = load_exported(path)
        return Loaded(net, transform_of_pictures(data))
    if path.is_file() and not RunDir.around(path).config.is_file():
        return _load_checkpoint(path)
    run, checkpoint = find_run(source)
    cli = restore(run, checkpoint, ON_CPU)
    return Loaded(network_of(cli.model).eval(), transform_of(cli.datamodule))


def _load_of_library(net: nn.Module, source: str) -> Loaded:
    if not getattr(net, "pretrained_cfg", None):
        raise UsageError(
            f"{source} does not say how its images are prepared: create_model({source!r}) builds the network alone"
        )
    from timm.data import create_transform, resolve_model_data_config

    transform = create_transform(**resolve_model_data_config(net), is_training=False)
    decoding = Decoding("L" if getattr(net, "in_chans", 3) == 1 else "RGB")
    transform.transforms.insert(0, partial(decode_opened, how=decoding))
    return Loaded(net.eval(), transform)


def exported_card(path: Path) -> dict[str, Any]:
    """Return the card of a file: what ``vitlab export`` says of it, in FILE.json beside it.

    Raises:
        UsageError: There is no such file, or it is not one that ``vitlab export`` writes.
    """
    beside = card_beside(path)
    try:
        facts = json.loads(beside.read_text())
        if isinstance(facts["images"], dict):
            return dict(facts)
    except FileNotFoundError:
        way_out = "copy it, too, from where `vitlab export` wrote both"
        raise UsageError(f"{path} needs {beside.name} beside it, which says how to prepare images: {way_out}") from None
    except (KeyError, TypeError, ValueError):
        pass
    raise UsageError(f"{beside} is not what `vitlab export` writes beside a file")


def load_exported(path: Path) -> tuple[Any, Rebuilt, dict[str, Any]]:
    """Return network, data and card of what ``vitlab export --to safetensors``, ``onnx`` or ``onnx-int8`` wrote.

    Raises:
        UsageError: It is in another format, or does not say how to prepare images.
    """
    card = exported_card(path)
    form, images = card.get("format"), card["images"]
    if form not in ("safetensors", "onnx", "onnx-int8"):
        raise UsageError(f"{path} is exported for other programs ({form}): load its run instead")
    if str(images.get("values")).startswith("as `eval_transform`"):
        raise UsageError(f"{path} takes images {images['values']}: load its run instead")
    if "native_size" not in images:
        raise UsageError(f"{path} was exported by an older vitlab and does not say how to crop images; export it again")
    if form == "safetensors":
        import_parts(card.get("network") or {})
        net: Any = load_network(path)
    else:
        need_packages(str(path), "onnxruntime")
        net = Graph(path)
    return net, data_of_card(net, card), card


def _load_checkpoint(path: Path) -> Loaded:
    """Read what a Trainer outside of vitlab saved of a task of vitlab."""
    content: dict[str, Any] = {}
    with user_mistakes():
        if path.suffix != ".safetensors":
            check_readable(path)
            content = torch.load(path, map_location="cpu", weights_only=True)
    if "images" not in content:
        raise UsageError(
            f"{path} is not in a run directory, has no {path.name}.json beside it, and no task of vitlab with data of "
            "vitlab has written it: the preparation of its images is unknown. A folder of timm is given as "
            "timm:local-dir:FOLDER, one of transformers as hf:FOLDER; create_model(..., weights=...) builds only the "
            "network"
        )
    if own := ", ".join((content.get("own") or {}).values()):
        raise UsageError(
            f"{path}: its answers come from {own}, which is not built without a run: use its `load_from_checkpoint`"
        )
    arguments = content["hyper_parameters"]
    import_parts(arguments)
    with user_mistakes():
        cls: Any = {"number": Regressor, "mixed": MultiTask}.get((arguments.get("targets") or {}).get("kind", ""))
        if cls is None:
            net: Any = load_network(path)
        else:
            task = cls(**{k: v for k, v in arguments.items() if k in inspect.signature(cls).parameters})
            task.load_state_dict(content["state_dict"])
            net = task.network_in_units().eval()
        return Loaded(net, transform_of_pictures(data_of_card(net, content)))


def data_of_card(net: Any, card: Mapping[str, Any]) -> Rebuilt:
    """Return data that prepare images for a network as a file of weights says, with its meaning of the outputs."""
    images, targets, outputs = card["images"], card.get("targets") or {"kind": "none"}, card.get("outputs")
    names = outputs if isinstance(outputs, list) and targets["kind"] != "mixed" else []
    native, how = images["native_size"], arguments_of_card(images)
    how |= {"native_size": native and tuple(native), "img_size": list(net.img_size), "in_chans": net.in_chans}
    return Rebuilt(targets, images.get("arrays", False), class_names=names, **how)


def arguments_of_card(images: Mapping[str, Any]) -> dict[str, Any]:
    """Return how a file of weights says that images are prepared, as arguments of data; whole ones need no share."""
    names = ("mean", "std", "crop_mode", "interpolation", "color_profile", "value_range", "max_pixels", "native_patch")
    is_whole = images["native_size"] or images.get("native_patch") or images.get("arrays")
    how = {name: images[name] for name in (*names, *(() if is_whole else ("crop_pct",))) if name in images}
    how |= {"crop_mode": "squash"} if images["native_size"] else {}  # which older files do not say
    return {"crop_mode": "box", "color_profile": "ignore"} | how  # as they once were


def transform_of_pictures(data: Rebuilt) -> Transform:
    """Return the transform of single pictures; it refuses them where the network takes arrays."""

    def refuse(image: Image.Image) -> Tensor:
        raise ValueError("the network takes arrays, (x - mean) / std of x as stored, and not pictures")

    return refuse if data.arrays else data.eval_transform
