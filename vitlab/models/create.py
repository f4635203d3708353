"""Create a network by name: a published size, or a network of another library."""

import copy
import inspect
import logging
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack

import torch
from torch import nn

from vitlab.errors import did_you_mean
from vitlab.layers.resample import ResizePolicy
from vitlab.models.arguments import ModelArgs
from vitlab.models.convert_peers import peer_file, peer_model, peer_outputs
from vitlab.models.hooks import modes_kept
from vitlab.models.load import load_weights, network_args, outputs_of
from vitlab.models.old_names import OLD, upgrade
from vitlab.models.sizes import SIZES
from vitlab.models.timm_networks import NoCounterpart, timm_file, timm_model
from vitlab.models.vit import VisionTransformer
from vitlab.models.weights_file import WeightsFile, read_weights, unwrapped
from vitlab.shipped import LIBRARIES, PREFIX, shipped_weights
from vitlab.tokenizers.splits import pair

_log = logging.getLogger(__name__)
# arguments that the shapes in a state dict do not show
_UNSEEN = ("num_heads", "block", "attn", "act_layer", "mlp_layer", "norm_layer", "norm_eps", "pos_embed")


def create_model(
    name: str | None = None,
    *,
    weights: str | Path | WeightsFile | None = None,
    resize: ResizePolicy | Literal["usual"] | None = "usual",
    grid: Sequence[int] | None = None,
    **arguments: Unpack[ModelArgs],
) -> VisionTransformer:
    """Build a network by name, with any argument overridden, and optionally load weights.

    Args:
        name: A size of ``SIZES``, ``vitlab:NAME``, a network that vitlab ships trained, ``timm:NAME``, ``hf:NAME`` (or
            ``hf:FOLDER``) of Hugging Face's transformers, or ``torchvision:NAME``; None builds from
            what the file of ``weights`` states and from ``arguments``.
        weights: A local file of vitlab, timm or the official T2T-ViT, ``vitlab:NAME``, which is part of the package, or
            ``timm:NAME``, ``hf:NAME``, ``torchvision:NAME``, which these libraries download. A name with a prefix has
            its weights by default. The head has as many outputs as the weights, unless ``num_classes`` is given: if
            that differs, the head is new, and so are below it a norm after pooling and an attention pool that the
            weights lack.
        resize: How to resample the positions of the weights for another grid; ``usual`` as in :func:`load_weights`.
        grid: Rows and columns of tokens that the positions of a file were trained on, if the file does not state them.
        **arguments: Arguments of :class:`VisionTransformer`.

    Returns:
        The network, in training mode. Conversions of the weights are logged at level INFO. With the weights of
        another library it has timm's ``pretrained_cfg``, from which ``timm.data.resolve_model_data_config`` tells how
        images are prepared.

    Raises:
        ValueError: A name or argument does not exist (the closest is suggested), or weights do not fit.

    Example:
        >>> net = create_model("t2t_vit_7", pos_embed="rope2d", img_size=(224, 320), num_classes=10)
        >>> net.grid_size, net.embed_dim, net.num_classes
        ((14, 20), 256, 10)
    """
    known = list(inspect.signature(VisionTransformer).parameters)
    for argument in arguments:
        if argument not in known and argument not in OLD:
            hint = "; trained weights are those of `weights`" if argument == "pretrained" else ""  # as in timm
            raise ValueError(f"a network has no argument {argument!r}{hint or did_you_mean(argument, known)}")
    if name is not None and name.startswith(PREFIX):
        name, weights = name.removeprefix(PREFIX), weights or name
    names = [*SIZES, *shipped_weights()]
    if name is not None and name not in names and not name.startswith(LIBRARIES):
        others = "timm:NAME, hf:NAME or torchvision:NAME"
        raise ValueError(f"`name` must be one of {', '.join(names)}, {others}, got {name!r}{did_you_mean(name, names)}")
    theirs: nn.Module | None = None
    if name is not None and name.startswith(LIBRARIES):
        theirs, file = _of_library(name, pretrained=weights is None)
        same_network(theirs, file, {})
        base = file.arguments  # the arguments follow from the name
        if weights is not None:
            file = unwrapped(read_weights(weights))
            file.arguments = file.arguments or base
    elif weights is None:
        return VisionTransformer(**upgrade({**_base(name), **arguments}))
    else:
        base = _base(name)
        if isinstance(weights, str) and weights.startswith(LIBRARIES):
            theirs, file = _of_library(weights, pretrained=True)
            same_network(theirs, file, upgrade({**base, **arguments}))
        else:
            file = unwrapped(read_weights(weights))
            base = base if name else network_args(file.arguments)
    net = VisionTransformer(**base | {"num_classes": outputs_of(file.state_dict)} | arguments)
    for sentence in load_weights(net, file, resize, grid=grid):
        _log.info(sentence)
    if description := getattr(theirs, "pretrained_cfg", None):
        _tell_other_size(name or str(weights), description["input_size"][1:], net, arguments)
        net.pretrained_cfg = {**description, "input_size": (net.in_chans, *net.img_size)}  # type: ignore[assignment]
    return net


def _tell_other_size(name: str, prepared: Sequence[int], net: VisionTransformer, given: Mapping[str, Any]) -> None:
    """Warn where transformers prepares images of another size than its network is built for, and nobody gave one."""
    sides = [side // step * step for side, step in zip(prepared, pair("patch_size", net.patch_size), strict=True)]
    if name.startswith("hf:") and "img_size" not in given and sides != list(net.img_size):
        (h, w), (height, width) = prepared, net.img_size
        how = f"img_size={h}" if h == w else f"img_size=({h}, {w})"
        warnings.warn(
            f"{name} prepares images of {h} x {w} pixels and is built for {height} x {width}, to which they are "
            f"prepared here: create_model(..., {how}) takes them as it does",
            stacklevel=3,
        )


def _of_library(name: str, pretrained: bool) -> tuple[nn.Module, WeightsFile]:
    """Return the network of another library that a name with its prefix means, and the file of its weights."""
    if name.startswith("timm:"):
        theirs = timm_model(name, pretrained=pretrained)
        return theirs, timm_file(theirs, name)
    theirs = peer_model(name, pretrained=pretrained)
    return theirs, peer_file(theirs, name)


def library_network(name: str) -> Any:
    """Return a trained network of another library: of timm as it is, else (transformers, torchvision) its equivalent.

    Example:
        >>> library_network("timm:no_such")  # doctest: +IGNORE_EXCEPTION_DETAIL
        Traceback (most recent call last):
        ValueError: timm has no weights to give for timm:no_such
    """
    return timm_model(name, pretrained=True) if name.startswith("timm:") else create_model(name)


def stated_classes(name: str) -> list[str]:
    """Return what a network of another library calls its classes, in the order of its outputs; empty if it does not.

    The words for those of ImageNet-1k are left out, as folders of its images are called by numbers.

    Args:
        name: ``timm:NAME``, of which ``timm:local-dir:FOLDER`` and ``timm:hf-hub:NAME`` may state them, ``hf:NAME``,
            ``hf:FOLDER`` or ``torchvision:NAME``.

    Example:
        >>> stated_classes("timm:vit_tiny_patch16_224")
        []
    """
    library, _, rest = name.partition(":")
    labels: Any = []
    if library == "hf":
        from transformers import AutoConfig

        labels = getattr(AutoConfig.from_pretrained(rest, trust_remote_code=False), "id2label", None) or {}
    elif library == "timm" and ":" in rest:
        from timm.models import load_model_config_from_hf
        from timm.models._hub import load_model_config_from_path

        place, _, rest = rest.partition(":")
        read = load_model_config_from_path if place == "local-dir" else load_model_config_from_hf
        labels = (read(rest)[0] or {}).get("label_names") or []
    if isinstance(labels, Mapping):
        by_output = {int(key): label for key, label in labels.items()}
        labels = [by_output[k] for k in range(len(labels))] if {*by_output} == {*range(len(labels))} else []
    names = [str(label) for label in labels]
    is_imagenet = len(names) == 1000 and names[0].startswith("tench")
    return [] if is_imagenet or all(re.fullmatch(r"LABEL_\d+", one) for one in names) else names


def _base(name: str | None) -> ModelArgs:
    """Return the arguments of a published or shipped network."""
    if name is None or name in SIZES:
        return SIZES.get(name or "", {})
    return read_weights(f"{PREFIX}{name}").arguments


def load_of_library(
    net: VisionTransformer, name: str, arguments: Mapping[str, Any], resize: Any, grid: Any
) -> list[str]:
    """Load the published weights of a name such as ``timm:NAME`` into ``net``, if both compute the same.

    Args:
        net: The network, built from ``arguments``.
        name: ``timm:NAME``, ``hf:NAME``, ``hf:FOLDER`` or ``torchvision:NAME``.
        arguments: What ``net`` was built from.
        resize: As for :func:`create_model`.
        grid: As for :func:`create_model`.

    Example:
        >>> net = VisionTransformer(embed_dim=48, depth=1, num_heads=3)
        >>> load_of_library(net, "timm:no_such", {}, "usual", None)  # doctest: +IGNORE_EXCEPTION_DETAIL
        Traceback (most recent call last):
        ValueError: timm has no weights to give for timm:no_such
    """
    theirs, file = _of_library(name, pretrained=True)
    sentences = load_weights(net, file, resize, grid=grid)
    same_network(theirs, file, arguments)
    return sentences


def same_network(theirs: nn.Module, file: WeightsFile, arguments: Mapping[str, Any]) -> VisionTransformer:
    """Build our network from another library's file, with blocks as in ``arguments``; check that outputs are equal.

    It is returned on the device and in the precision of ``theirs``; outputs are compared in float32 at least.

    Example:
        >>> same_network(vit := timm_model("timm:test_vit", False), timm_file(vit, "timm:test_vit"), {}).grid_size
        (10, 10)
    """
    defaults = inspect.signature(VisionTransformer).parameters
    built = upgrade(file.arguments)
    asked = {k: arguments.get(k, defaults[k].default) for k in _UNSEEN} if arguments else {}
    if "attn" in asked and "attn" not in arguments:
        del asked["attn"]  # normalized queries show in the weights
    ours = VisionTransformer(**{**built, **asked}).eval()
    load_weights(ours, file)
    config = getattr(theirs, "config", None)  # of transformers
    stated = getattr(getattr(config, "vision_config", config), "image_size", ours.img_size)
    size = getattr(getattr(theirs, "patch_embed", None), "img_size", None) or pair("image_size", stated)
    images = torch.randn(1, ours.in_chans, *size, generator=torch.Generator().manual_seed(0))
    value = next(theirs.parameters(), torch.empty(0))
    full = torch.promote_types(value.dtype, torch.float32)  # half-precision outputs differ by more than is checked
    reference = theirs if full == value.dtype else copy.deepcopy(theirs).to(full)
    ours, images = ours.to(value.device, full), images.to(value.device, full)
    with modes_kept(reference), torch.no_grad():
        expected = peer_outputs(reference.eval(), images)
        outputs = ours(images[..., : ours.img_size[0], : ours.img_size[1]])
    if (expected - outputs).abs().max() > 1e-4 * expected.abs().max().clamp(min=1.0):
        built = {k: built.get(k, defaults[k].default) for k in asked}
        changes = ", ".join(f"{k}={built[k]} and not {v}" for k, v in asked.items() if built[k] != v)
        reason = f"build yours with {changes}" if changes else "it has parts that do not exist here"
        what = f"{file.path} computes something else than this network with its weights"
        raise NoCounterpart(f"{what}: {reason}", theirs)
    return ours.to(value)
