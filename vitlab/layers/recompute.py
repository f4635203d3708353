"""Compute twice what need not be kept for the backward pass: normalizations, activations, biases of long grids."""

import random
import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint as whole

from vitlab.layers.plain import is_plain
from vitlab.layers.precision import autocast_again, product_dtype

T = TypeVar("T")
CHEAP = (nn.GELU, nn.SiLU, nn.LayerNorm, nn.RMSNorm)  # they draw no random numbers, and keep their input
LEAST = 2**19  # values; the hooks take longer than they are worth below 2 MiB
LONG = 1024  # tokens, from which the biases of a grid are not kept
PART = 2**23  # logits, of which no fewer are computed at a time: glibc gives 32 MiB back and cuts up what is smaller


class _State(threading.local):
    off = False


_state = _State()


def recomputed(module: nn.Module, x: Tensor, use: Callable[[Tensor], T], shared: bool = False) -> T:
    """Return ``use(module(x))`` without keeping ``module(x)`` for the backward pass, where it is computed again.

    What a linear layer keeps is its input. Where that is a normalized or activated tensor, a block keeps it beside the
    tensor it was made of: six of the sixteen tensors of width D that a ViT's block keeps. Values and gradients do not
    change by a bit. Applies to :data:`CHEAP` modules without hooks, and large tensors, on a CPU. A compiled network
    recomputes by itself. On a GPU nothing is recomputed: the host's hooks cost a network that is not compiled a quarter
    of its speed, for a third of its memory.

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
    y = module(x)
    if not y.requires_grad or y.device.type != "cpu" or _is_off() or y.numel() < LEAST:
        return use(y)
    if not is_plain(module, *CHEAP) or getattr(module, "inplace", False):
        return use(y)
    cast = y.dtype if shared else product_dtype(y)
    y, source = y.to(cast), x.detach()  # as a linear layer would cast it
    place, version = y.untyped_storage()._cdata, y._version  # also of a fake tensor
    autocast = autocast_again(x)

    def compute() -> Tensor:
        with torch.no_grad(), autocast():
            return module.forward(source).to(cast)

    def pack(kept: Tensor) -> Callable[[], Tensor]:
        if kept.untyped_storage()._cdata != place or kept._version != version:  # `use` may change its input in place
            return partial(_unchanged, kept.detach(), kept._version)  # saved as it is, an output would keep its graph
        size, stride, offset = kept.size(), kept.stride(), kept.storage_offset()
        return lambda: compute().as_strided(size, stride, offset)

    with saved_tensors_hooks(pack, lambda kept: kept()):
        return use(y)


def _unchanged(kept: Tensor, version: int) -> Tensor:
    """Return a tensor unless it was changed since: autograd itself does not look where there are hooks."""
    if kept._version != version:
        rule = "was changed in place after a layer had kept it for its gradient: change a copy"
        raise RuntimeError(f"a tensor of shape {tuple(kept.shape)} {rule}")
    return kept


def checkpoint(block: Callable[..., T], *args: Any) -> T:
    """Return ``block(*args)``, of which nothing but ``args`` is kept, as Chen et al. 2016 (arXiv:1604.06174).

    Buffers that a pass changes, such as the running statistics of a batch norm, change once, and it is computed again
    with what they were before, and with the same numbers from the generators of torch, NumPy and Python. Modules are
    those of the block and of ``args``, such as a position embedding.

    Example:
        >>> checkpoint(nn.Linear(8, 4), torch.ones(2, 8)).shape
        torch.Size([2, 4])
    """
    if torch.compiler.is_compiling():
        return whole.checkpoint(block, *args, use_reentrant=False)
    modules = [module for each in (block, *args) if isinstance(each, nn.Module) for module in each.modules()]
    return whole.checkpoint(block, *args, use_reentrant=False, context_fn=partial(_first_and_again, modules))


def is_long(k: Tensor) -> bool:
    """Return whether the logits of these ``(B, A, L, d)`` keys are to be computed by :func:`by_queries`.

    They are where a CPU trains with :data:`LONG` tokens or more. A compiled network computes them as a whole.

    Example:
        >>> is_long(torch.zeros(1, 1, LONG, 8, requires_grad=True)), is_long(torch.zeros(1, 1, LONG, 8))
        (True, False)
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or k.device.type != "cpu":
        return False
    return k.shape[2] >= LONG and k.requires_grad and torch.is_grad_enabled()


def by_queries(use: Callable[[Tensor, slice], Tensor], q: Tensor, num_keys: int) -> Tensor:
    """Return ``use(q, tokens)`` for a few of the ``(B, A, L, d)`` queries at a time, joined to ``(B, A, L, d)``.

    ``tokens`` says which they are. Nothing that ``use`` computes is kept for the backward pass, so that memory grows
    with the number of tokens, not with its square.

    Example:
        >>> q = torch.zeros(1, 1, 40, 1, requires_grad=True)
        >>> by_queries(lambda some, tokens: some + tokens.stop, q, num_keys=2**19).unique().tolist()
        [16.0, 32.0, 40.0]
    """
    B, A, L, _ = q.shape
    count = -(-PART // (B * A * num_keys))
    tokens = [slice(i, min(i + count, L)) for i in range(0, L, count)]
    return torch.cat([checkpoint(use, q[:, :, some], some) for some in tokens], dim=2)


class _Off:
    """Within this context, :func:`recomputed` keeps what it is given."""

    def __enter__(self) -> None:
        self.before, _state.off = _state.off, True

    def __exit__(self, *error: object) -> None:
        _state.off = self.before


class _First(_Off):
    """At its begin, this context keeps the buffers of modules, and the states of generators that torch does not keep.

    Those of vitlab's own modules are tables, which no pass changes, and they draw from torch alone.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        others = [module for module in modules if not type(module).__module__.startswith("vitlab.")]
        self.modules = [module for module in others if module._buffers]
        classes = {cls for module in others for cls in type(module).__mro__}  # of a parametrized or sharded one, too
        self.draws = any(not cls.__module__.startswith(("torch.", "vitlab.", "builtins")) for cls in classes)

    def __enter__(self) -> None:
        super().__enter__()
        self.buffers, self.states = [_cloned(module) for module in self.modules], _drawn() if self.draws else None


class _Again(_Off):
    """Within this context, modules compute with copies of the buffers that there were before, and draw the same."""

    def __init__(self, first: _First) -> None:
        self.first = first

    def __enter__(self) -> None:
        super().__enter__()
        self.now = [dict(module._buffers) for module in self.first.modules]
        for module, before in zip(self.first.modules, self.first.buffers, strict=True):
            module._buffers.clear()
            module._buffers.update({name: value if value is None else value.clone() for name, value in before.items()})
        self.states = _drawn(self.first.states) if self.first.states else None

    def __exit__(self, *error: object) -> None:
        for module, now in zip(self.first.modules, self.now, strict=True):
            module._buffers.clear()
            module._buffers.update(now)
        if self.states:
            _drawn(self.states)
        super().__exit__(*error)


def _first_and_again(modules: Iterable[nn.Module]) -> tuple[_First, _Again]:
    first = _First(modules)
    return first, _Again(first)


def _cloned(module: nn.Module) -> dict[str, Tensor | None]:
    """Return copies of buffers; of one that is computed from parameters, a pass keeps what its gradient needs."""
    pairs = module._buffers.items()
    return {name: v if v is None else v.detach().clone().requires_grad_(v.requires_grad) for name, v in pairs}


def _drawn(states: tuple[Any, Any] | None = None) -> tuple[Any, Any]:
    """Return the states of the generators of Python and NumPy, if it is imported, and set them if some are given."""
    numpy = getattr(sys.modules.get("numpy"), "random", None)
    now = random.getstate(), numpy and numpy.get_state()
    if states:
        random.setstate(states[0])
        if numpy and states[1]:
            numpy.set_state(states[1])
    return now


def _is_off() -> bool:
    return _state.off or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
