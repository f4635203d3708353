"""Where a shortcut may use the tensors of a module instead of calling it: where nobody can tell the difference."""

import inspect
from collections.abc import Collection
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as every_module

from vitlab.objects import unsharded_class

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
TENSORS = ("torch", "torch.nn.parameter", "torch._subclasses.fake_tensor", "torch._subclasses.functional_tensor")


def is_plain(module: nn.Module, *classes: type[nn.Module]) -> bool:
    """Return whether calling ``module`` is no more than the forward of one of ``classes`` with ordinary tensors.

    It is not for a subclass, a wrapper, a parametrized or sharded module (each is of another class), with a hook of its
    own or of all modules (pruning is one), with a forward that was put into it, or with quantized weights.

    Example:
        >>> before, layer = is_plain(layer := nn.Linear(2, 2), nn.Linear), nn.utils.parametrizations.weight_norm(layer)
        >>> before, is_plain(layer, nn.Linear)
        (True, False)
    """
    return not all_are_hooked() and has_plain_tensors(module) and _is_untouched(module, type(module), classes)


def calls_plainly(module: nn.Module, classes: Collection[type[nn.Module]]) -> bool:
    """Return whether a call of ``module`` is a call of the forward of one of ``classes``; FSDP2 may shard its tensors.

    Example:
        >>> calls_plainly(nn.Linear(2, 2), {nn.Linear}), calls_plainly(nn.Linear(2, 2), {nn.LayerNorm})
        (True, False)
    """
    return _is_untouched(module, unsharded_class(module), classes)


def goes_around(cls: type, base: type, method: str, *uses: str) -> bool:
    """Return whether a method is not that of ``base``, and neither calls it by ``super()`` nor reads one of ``uses``.

    Example:
        >>> class Own(nn.Linear):
        ...     def forward(self, x):
        ...         return x @ self.weight.T
        >>> goes_around(Own, nn.Linear, "forward"), goes_around(Own, nn.Linear, "forward", "weight")
        (True, False)
    """
    own = inspect.unwrap(getattr(cls, method))
    names = {*own.__code__.co_names, *own.__code__.co_freevars}
    return own is not getattr(base, method) and names.isdisjoint({"__class__", *uses})


def all_are_hooked() -> bool:
    """Return whether every module of this process has a hook.

    Example:
        >>> all_are_hooked()
        False
    """
    return any(getattr(every_module, "_global" + name) for name in HOOKS)


def has_plain_tensors(module: nn.Module) -> bool:
    """Return whether all parameters of ``module`` itself are whole tensors of numbers: not quantized, not shared out.

    Example:
        >>> has_plain_tensors(nn.Linear(2, 2))
        True
    """
    return all(p is None or type(p).__module__ in TENSORS for p in module._parameters.values())


def is_sharded(module: nn.Module) -> bool:
    """Return whether FSDP2 gathers the parameters of ``module`` when it is called.

    Example:
        >>> is_sharded(nn.Linear(2, 2))
        False
    """
    return unsharded_class(module) is not type(module)


def local_part(value: Tensor) -> Tensor:
    """Return the part of a tensor that this process has, which is all of it unless a strategy shards the weights.

    Example:
        >>> local_part(torch.ones(2))
        tensor([1., 1.])
    """
    local: Tensor = value.to_local() if hasattr(value, "to_local") else value  # importing DTensor takes half a second
    return local


def _is_untouched(module: nn.Module, cls: type, classes: Collection[type[nn.Module]]) -> bool:
    if cls not in classes or "forward" in module.__dict__:
        return False
    if not (module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks):
        return True
    return all(_only_gathers(hook) for name in HOOKS for hook in getattr(module, name).values())


def _only_gathers(hook: Any) -> bool:
    return type(getattr(hook, "__self__", None)).__module__.startswith("torch.distributed.fsdp")
