"""Compute normalizations and activations twice instead of keeping their outputs for the backward pass."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

T = TypeVar("T")
CHEAP = (nn.GELU, nn.SiLU, nn.LayerNorm, nn.RMSNorm)  # they draw no random numbers, and keep their input
LEAST = 2**19  # values; the hooks take longer than they are worth below 2 MiB


class _State(threading.local):
    off = False


_state = _State()


def recomputed(module: nn.Module, x: Tensor, use: Callable[[Tensor], T], shared: bool = False) -> T:
    """Return ``use(module(x))`` without keeping ``module(x)`` for the backward pass, where it is computed again.

    What a linear layer keeps is its input. Where that is a normalized or activated tensor, a block keeps it beside the
    tensor it was made of: six of the sixteen tensors of width D that a ViT's block keeps. Values and gradients do not
    change by a bit. Applies to :data:`CHEAP` modules and large tensors. A compiled network recomputes by itself.

    Args:
        module: A normalization or an activation.
        x: Its input, of any shape.
        use: What is done with its output: a linear layer comes first.
        shared: Whether several layers take the output. Under autocast each then keeps a cast copy of its own, so that
            their gradients are added before they are rounded.

    Example:
        >>> x = torch.randn(3, 5, 8, requires_grad=True)
        >>> recomputed(nn.GELU(), x, nn.Linear(8, 4)).shape
        torch.Size([3, 5, 4])
    """
    version = x._version
    y = module(x)
    if type(module) not in CHEAP or y.numel() < LEAST or not y.requires_grad or _is_off() or x._version != version:
        return use(y)
    device = x.device.type
    autocast = torch.is_autocast_enabled(device) and not shared
    cast = torch.get_autocast_dtype(device) if autocast else y.dtype
    y, source = y.to(cast), x.detach()  # as a linear layer would cast it
    place = y.untyped_storage().data_ptr()

    def again() -> Tensor:
        with torch.no_grad(), torch.autocast(device, enabled=False):
            return module.forward(source).to(cast)

    def pack(kept: Tensor) -> Tensor | Callable[[], Tensor]:
        if kept.untyped_storage().data_ptr() != place:
            return kept
        size, stride, offset = kept.size(), kept.stride(), kept.storage_offset()
        return lambda: again().as_strided(size, stride, offset)

    with saved_tensors_hooks(pack, lambda kept: kept() if callable(kept) else kept):
        return use(y)


@contextmanager
def keeping() -> Iterator[None]:
    """Let :func:`recomputed` keep what it is given: for what recomputes whole blocks.

    Example:
        >>> with keeping():
        ...     recomputed(nn.GELU(), torch.ones(2, 8), nn.Linear(8, 4)).shape
        torch.Size([2, 4])
    """
    before, _state.off = _state.off, True
    try:
        yield
    finally:
        _state.off = before


def _is_off() -> bool:
    return _state.off or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
