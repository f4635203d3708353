"""Support for position embeddings of users, which need not handle kept or permuted tokens."""

from collections.abc import Callable
from typing import Self

from torch import Tensor

from vitlab.layers.pos_embed.base import PosEmbed
from vitlab.layers.pos_embed.together import Together

HOOKS = ("forward", "enter", "rotate", "bias", "relate", "leave")


def placed(method: PosEmbed) -> PosEmbed:
    """Return ``method`` itself, or where its ``order`` says nothing to its hooks, one that gives each token its place.

    Example:
        >>> method = PosEmbed((2, 3))
        >>> placed(method) is method
        True
    """
    if isinstance(method, Together):
        return method.with_parts({name: placed(part) for name, part in method.parts.items()})
    if method.order is None or all(_asks_for_order(method, name) for name in HOOKS):
        return method
    return Placed(method.view(order=None), method.order)


class Placed(PosEmbed):
    """Call hooks that do not handle ``order`` with each token in its place, and zeros in places without one.

    Args:
        method: The position embedding, of the whole grid.
        order: Places of the patch tokens, ``(N,)`` or ``(B, K)``.

    Example:
        >>> import torch
        >>> class Ramp(PosEmbed):
        ...     def forward(self, x):
        ...         return x + torch.arange(6.0)[:, None]
        >>> Placed(Ramp((2, 3)), torch.tensor([[5, 2]]))(torch.zeros(1, 2, 1)).flatten()
        tensor([5., 2.])
    """

    method: PosEmbed

    def __init__(self, method: PosEmbed, order: Tensor) -> None:
        super().__init__(method.grid_size)
        self.__dict__["method"] = method  # no submodule: its parameters are not of this module
        self.order, self.rotates_stacked, self.relates = order, method.rotates_stacked, method.relates
        self.num_kept, self.num_patches = order.shape[-1], method.grid_size[0] * method.grid_size[1]

    def single_methods(self) -> dict[str, PosEmbed]:
        """Return the method, under an empty name."""
        return {"": self.method}

    def for_batch(self) -> Self:
        """Return this object with what the method draws for a batch."""
        return self.view(method=self.method.for_batch())

    def forward(self, x: Tensor) -> Tensor:
        """Map the ``(B, K, D)`` patch tokens to ``(B, K, D)``."""
        return self._call(self.method, x)

    def enter(self, x: Tensor, layer: int) -> Tensor:
        """Map the ``(B, P + K, D)`` tokens that enter block ``layer``."""
        return self._call(self.method.enter, x, layer)

    def leave(self, x: Tensor, layer: int) -> Tensor:
        """Map the ``(B, P + K, D)`` tokens that leave block ``layer``."""
        return self._call(self.method.leave, x, layer)

    def rotate(self, x: Tensor, layer: int) -> Tensor:
        """Map ``(B, A, P + K, d)`` queries or keys of block ``layer``."""
        return self._call(self.method.rotate, x, layer)

    def bias(self, layer: int) -> Tensor | None:
        """Return ``(A, P + K, P + K)``, or ``(B, A, P + K, P + K)``, or None."""
        bias = self.method.bias(layer)
        if bias is None:
            return None
        if (side := max(bias.shape[-2:])) == 1:  # of all tokens alike
            return bias
        bias = _whole(bias, side, side, 3)
        tokens = self._tokens(side - self.num_patches)
        picked = bias.movedim(-3, -1)[..., tokens[..., None], tokens[..., None, :], :]
        return picked.movedim(-1, -3)

    def relate(self, q: Tensor, k: Tensor, layer: int) -> Tensor | None:
        """Return ``(B, A, P + K, P + K)``, or one row for each of the first queries, or None."""
        has_all = q.shape[-2] == k.shape[-2]
        related = self.method.relate(self._spread(q) if has_all else q, self._spread(k), layer)
        if related is None:
            return None
        tokens = self._tokens(k.shape[-2] - self.num_kept)
        whole = k.shape[-2] - self.num_kept + self.num_patches
        related = _whole(related, whole if has_all else related.shape[-2], whole, 4)
        related = self._gather(related.mT, tokens).mT
        return self._gather(related, tokens) if has_all else related

    def acts_after(self, layer: int) -> bool:
        """Return whether the method changes the tokens that leave block ``layer``."""
        return self.method.acts_after(layer)

    def _call(self, hook: Callable[..., Tensor], x: Tensor, *layer: int) -> Tensor:
        y = hook(whole := self._spread(x), *layer)
        return x if y is whole else self._gather(y, self._tokens(x.shape[-2] - self.num_kept))

    def _tokens(self, num_prefix_tokens: int) -> Tensor:
        tokens = self.token_order(num_prefix_tokens)
        assert tokens is not None
        return tokens

    def _spread(self, x: Tensor) -> Tensor:
        """Map ``(..., P + K, d)`` to the tokens of the whole grid, ``(..., P + N, d)``."""
        P = x.shape[-2] - self.num_kept
        whole = x.new_zeros(*x.shape[:-2], P + self.num_patches, x.shape[-1])
        return whole.scatter(-2, self._index(x, self._tokens(P)), x)

    def _gather(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x.gather(-2, self._index(x, tokens))

    def _index(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Expand ``(L,)`` or ``(B, L)`` places to ``(..., L, d)``."""
        if tokens.ndim == 2 and x.ndim > 3:  # (B, A, L, d), or (2, B, A, L, d)
            tokens = tokens[:, None]
        return tokens[..., None].expand(*x.shape[:-2], -1, x.shape[-1])


def _whole(logits: Tensor, queries: int, keys: int, ndim: int) -> Tensor:
    """Return logits with a row for each query and a column for each key; a single one stands for all of them."""
    rows, columns = (size if here == 1 else here for here, size in zip(logits.shape[-2:], (queries, keys), strict=True))
    return logits.expand(*(1,) * (ndim - logits.ndim), *logits.shape[:-2], rows, columns)


def _asks_for_order(method: PosEmbed, name: str) -> bool:
    """Return whether a hook is one of vitlab's, which all do; those of others may not."""
    return getattr(type(method), name).__module__.startswith("vitlab.layers.pos_embed.")
