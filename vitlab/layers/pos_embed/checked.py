"""What hooks of classes outside vitlab return: in the shape and precision of the tokens, or refused."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vitlab.errors import UsageError


def shape_kept(hook: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a hook of a method that refuses to change the shape of its tensor, and keeps its precision.

    Example:
        >>> shape_kept(lambda self, x: x * torch.ones(2, dtype=torch.float64))(None, torch.ones(2)).dtype
        torch.float32
    """

    @functools.wraps(hook)
    def checked(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found = hook(self, x, *args, **kwargs)
        shape = getattr(found, "shape", None)
        if shape != x.shape:
            (h, w), tokens = self.grid_size, "queries or keys" if hook.__name__ == "rotate" else "tokens"
            got = type(found).__name__ if shape is None else tuple(shape)
            where = f"{type(self).__name__}.{hook.__name__} at a grid of {h} x {w}"
            raise UsageError(f"{where} changes the {tokens} from {tuple(x.shape)} to {got}: it must keep their shape")
        return in_precision_of(x, found)

    return checked


def in_precision_of(x: Tensor, values: Tensor) -> Tensor:
    """Return values for tokens ``x`` in their precision: numpy computes in float64, which no layer mixes with float32.

    Autocast mixes 16 and 32 bits by itself: it leaves 32 bits of positions, and float64 becomes float32.

    Example:
        >>> in_precision_of(torch.zeros(1), torch.zeros(1, dtype=torch.float64)).dtype
        torch.float32
    """
    if values.dtype == x.dtype or not values.is_floating_point():
        return values
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return values.float() if values.dtype == torch.float64 else values
    return values.to(x.dtype)


def bias_of(method: Any, bias: Tensor | None, related: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Return the sum of what ``bias`` and ``relate`` of a position embedding gave, in the precision of the logits.

    Args:
        method: The position embedding.
        bias: ``(A, L, L)`` or ``(B, A, L, L)``, or None.
        related: ``(B, A, L, L)``, or None.
        q: ``(B, A, L, d)`` queries: all, the first ones, whose rows are taken, or those of ``method.queries``.
        k: ``(B, A, L, d)`` keys.

    Raises:
        UsageError: There is no row for each query, or no column for each key.

    Example:
        >>> from vitlab.layers.pos_embed.base import PosEmbed
        >>> q = torch.zeros(1, 2, 5, 4)
        >>> bias_of(PosEmbed((2, 2)), torch.zeros(2, 4, 4), None, q, q)
        Traceback (most recent call last):
        vitlab.errors.UsageError: `bias` of PosEmbed must return (A, L, L), here (2, 5, 5): 1 prefix token + 4...
    """
    bias = None if bias is None else _of_logits(bias, q, k, method, "bias")
    related = None if related is None else _of_logits(related, q, k, method, "relate")
    return related if bias is None else bias if related is None else bias + related


def _of_logits(values: Tensor, q: Tensor, k: Tensor, method: Any, hook: str) -> Tensor:
    queries, keys = q.shape[2], k.shape[2]
    if not torch.compiler.is_compiling():
        rows = (1, queries, keys) if method.queries == slice(None) else (1, queries)
        if values.ndim < 2 or values.shape[-2] not in rows or values.shape[-1] not in (1, keys):
            raise UsageError(_misshapen(values, q, k, method, hook))
    return values.to(q.dtype)[..., :queries, :]


def _misshapen(values: Tensor, q: Tensor, k: Tensor, method: Any, hook: str) -> str:
    names = " or ".join(type(each).__name__ for each in method.single_methods().values())
    (h, w), keys = method.grid_size, k.shape[2]
    whole = (*q.shape[:2], keys, keys)
    rule = f"(A, L, L), here {whole[1:]}" if hook == "bias" else f"(B, A, L, L), here {whole}"
    if method.queries != slice(None):  # rows of others would be added to these
        rule = f"the rows of `self.queries` alone, here {q.shape[2]}"
    elif method.order is None and method.owner is None:
        rule += f": {tokens_in_words(keys - h * w, h * w)}"
    return f"`{hook}` of {names} must return {rule}; got {tuple(values.shape)}"


def tokens_in_words(num_prefix_tokens: int, num_patches: int) -> str:
    """Return the tokens of a block in words.

    Example:
        >>> tokens_in_words(1, 16)
        '1 prefix token + 16 patches'
    """
    return f"{num_prefix_tokens} prefix token{'s' * (num_prefix_tokens != 1)} + {num_patches} patches"
