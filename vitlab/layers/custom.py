"""Layers of the user's choice, given as a class: one of torch.nn, or a class path."""

import copy
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from vitlab.class_paths import build_part, find_class, name_and_args
from vitlab.errors import UsageError, in_own_code, named_line, preview

_READS_CHANNELS_SECOND = (
    nn.modules.instancenorm._InstanceNorm.forward,
    nn.LocalResponseNorm.forward,
    nn.Softmax2d.forward,
)


class PerToken(nn.Module):
    """Apply a normalization that expects channels second, such as BatchNorm1d, to tokens, whose channels are last.

    Args:
        norm: The normalization; it sees each token as a sample.

    Example:
        >>> PerToken(nn.BatchNorm1d(8))(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(..., D)`` to ``(..., D)``."""
        return self.norm(x.flatten(0, -2)).view_as(x)


def build_custom(key: str, value: Any, dim: int, words: Iterable[str], offered: Mapping[str, Any]) -> nn.Module:
    """Build a layer from a class of torch.nn or a class path, and check that it keeps the shape ``(B, L, dim)``.

    Args:
        key: Name of the argument, for error messages.
        value: Name or path of a class, or a mapping with ``class_path`` and ``init_args``.
        dim: Token width D.
        words: The names that the argument also accepts, for error messages.
        offered: Arguments that are passed to the class if its constructor has them.

    Raises:
        ValueError: There is no such class, or it changes the shape, or takes tokens for channels or images.

    Example:
        >>> build_custom("act_layer", {"class_path": "LeakyReLU", "init_args": {"negative_slope": 0.2}}, 8, [], {})
        LeakyReLU(negative_slope=0.2)
    """
    path, args = name_and_args(key, value)
    layer = build_part(key, find_class(key, path, nn.Module, words, home="torch.nn"), args, offered)
    if isinstance(layer, nn.modules.batchnorm._BatchNorm | nn.GroupNorm):
        layer = PerToken(layer)
    if type(layer).forward in _READS_CHANNELS_SECOND:  # torch would take tokens for channels without a word
        raise ValueError(
            f"`{key}`: {path} expects channels second, and those of (B, L, {dim}) tokens are last: a class of your own "
            "may transpose them"
        )
    if isinstance(layer, nn.Softmax | nn.LogSoftmax | nn.Softmin) and layer.dim in (None, 0, -3):
        what = f"{path} with `dim` {layer.dim} normalizes over the images of a batch"
        raise ValueError(f"`{key}`: {what}: set `{key}.dim` to -1, the channels of each token")
    shape = output_shape(key, path, layer, torch.zeros(2, 3, dim), f"(B, L, {dim}) tokens")
    if shape != (2, 3, dim):
        raise ValueError(f"`{key}`: {path} must keep the shape of tokens, but maps (2, 3, {dim}) to {shape}")
    return layer


def output_shape(key: str, path: str, module: nn.Module, x: Tensor, what: str) -> tuple[int, ...] | str:
    """Return the shape of what a part of the user makes of ``x`` in evaluation mode; of no tensor, what it is.

    Args:
        key: Name of the argument, for the message.
        path: Path of the class, for the message.
        module: The part, which is left in training mode.
        x: What it is called with.
        what: The same in words, for the message.

    Raises:
        ValueError: The part cannot be called with ``x``; the message has the line of the user's file.

    Example:
        >>> output_shape("act_layer", "torch.nn.GLU", nn.GLU(), torch.zeros(2, 3, 8), "(B, L, 8) tokens")
        (2, 3, 4)
    """
    try:
        with torch.no_grad():
            found = _called(module, x)
    except Exception as error:  # foreign code can raise anything
        raise ValueError(f"`{key}`: {path} does not take {what}: {in_own_code(error) or named_line(error)}") from error
    module.train()
    return tuple(found.shape) if isinstance(found, Tensor) else f"a {type(found).__name__}"


def _called(module: nn.Module, x: Tensor) -> Any:
    """Call a copy, as a part may keep something of its first call; or itself, if that makes parameters."""
    trial, state = spare(module), torch.get_rng_state()
    found = trial.eval()(x)
    if trial is module or _tensors(trial) == _tensors(module):
        return found
    torch.set_rng_state(state)
    return module.eval()(x)


def _tensors(module: nn.Module) -> dict[str, bool]:
    """Return whether each tensor has no shape yet."""
    return {name: is_lazy(each) for name, each in chain(module.named_parameters(), module.named_buffers())}


def check_shaped(key: str, module: nn.Module) -> nn.Module:
    """Return a part that is not called before its weights are drawn, or refuse one whose parameters have no shape yet.

    Raises:
        ValueError: It has a lazy layer.

    Example:
        >>> check_shaped("block", nn.Sequential(nn.LazyLinear(2)))
        Traceback (most recent call last):
        ValueError: `block`: `0.weight` has no shape before a first call: use nn.Linear, with the channels that come in
    """
    lazy = next((name for name, has_no_shape in _tensors(module).items() if has_no_shape), None)
    if lazy is not None:
        layer = type(module.get_submodule(lazy.rpartition(".")[0])).__name__.removeprefix("Lazy")
        way_out = f"use nn.{layer}, with the channels that come in"
        raise ValueError(f"`{key}`: `{lazy}` has no shape before a first call: {way_out}")
    return module


def check_complete(module: nn.Module, called: nn.Module) -> None:
    """Refuse a network of which a part makes parameters or buffers when it is called, later than the optimizer is made.

    Args:
        module: The network.
        called: The same, or a copy, after a call.

    Raises:
        UsageError: There are more of them after the call.

    Example:
        >>> check_complete(nn.Identity(), nn.Linear(2, 2))
        Traceback (most recent call last):
        vitlab.errors.UsageError: a first call makes bias, weight: make them in `__init__`, else the optimizer has...
    """
    if late := sorted({*called.state_dict()} - {*module.state_dict()}):
        why = "else the optimizer has no such parameter, and no network takes the checkpoint"
        raise UsageError(f"a first call makes {preview(late)}: make them in `__init__`, {why}")


def spare(module: nn.Module, shared: Iterable[Tensor] = ()) -> nn.Module:
    """Return a copy of a module that a trial may change; the module itself if it cannot be copied.

    Args:
        module: The module.
        shared: Tensors that the copy has, too.

    Example:
        >>> module = nn.Linear(2, 2)
        >>> spare(module, [module.weight]).weight is module.weight, spare(module).weight is module.weight
        (True, False)
    """
    try:
        return copy.deepcopy(module, {id(each): each for each in shared})
    except Exception:  # such as of a tensor that was computed, or of an open file
        return module
