"""The neutral position embedding: the six hooks that a method may override, and what it says of itself."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Literal, Self

import torch
from torch import Tensor, nn

from vitlab.layers.pos_embed.resizable import Resizable

PosEmbedJoin = Literal["stem", "every_layer", "every_layer_shared"]


class PosEmbed(Resizable):
    """No position information, and the base of every class that has some.

    A position embedding can act in six places, each neutral here: it can add to the patch tokens once
    (:meth:`forward`) or before every block (:meth:`enter`), rotate queries and keys (:meth:`rotate`), bias the
    attention logits (:meth:`bias`, or :meth:`relate` by the queries), or mix the tokens after a block (:meth:`leave`).
    Tokens are P prefix tokens, then N patches. Prefix tokens have no position here: theirs is a constant, which their
    own vectors can hold.

    Args:
        grid_size: Patch tokens per column and per row, (h, w).

    Example:
        >>> class RowsAlone(PosEmbed):
        ...     def forward(self, x):
        ...         rows = torch.arange(self.grid_size[0]).repeat_interleave(self.grid_size[1])
        ...         return x + rows[:, None]
        >>> RowsAlone((2, 3))(torch.zeros(1, 6, 4))[0, :, 0]
        tensor([0., 0., 0., 1., 1., 1.])
    """

    joins: tuple[PosEmbedJoin, ...] = ()  # where it can act, its own choice first
    trains = False  # whether it has tensors that training changes, or can have
    rotates_stacked = False  # whether rotate takes (2, B, A, L, d) too: queries and keys, with tables made once
    join: PosEmbedJoin | None = None
    stacks: Mapping[str, int] = MappingProxyType({})  # parameters with values of every block, and the blocks' axis
    owner: Tensor | None = None  # (R, L), the image of each token, where a row holds tokens of several
    order: Tensor | None = None  # (N,), inside permute_positions; (B, K), of kept tokens

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(B, N, D)`` patch tokens to ``(B, N, D)``, before prefix tokens join them."""
        return x

    def prepend(self, prefix: Sequence[Tensor], x: Tensor) -> Tensor:
        """Return prefix tokens, ``(1, n, D)`` each, and the ``(B, N, D)`` patch tokens as ``(B, P + N, D)``."""
        B = x.shape[0]  # not len(x), which would fix the batch size of an exported graph
        return torch.cat([*[token.expand(B, -1, -1) for token in prefix], x], dim=1)

    def enter(self, x: Tensor, layer: int) -> Tensor:
        """Map the ``(B, L, D)`` tokens that enter block ``layer`` to ``(B, L, D)``."""
        return x

    def rotate(self, x: Tensor, layer: int) -> Tensor:
        """Map ``(B, A, L, d)`` queries or keys of block ``layer``; those of prefix tokens stay as they are."""
        return x

    def bias(self, layer: int) -> Tensor | None:
        """Return ``(A, L, L)`` to add to the scaled attention logits of block ``layer``, or None.

        Of kept tokens it is ``(B, A, L, L)``: each image has its own.
        """
        return None

    def relate(self, q: Tensor, layer: int) -> Tensor | None:
        """Return ``(B, A, L, L)`` that scaled ``(B, A, L, d)`` queries add to the logits of a block, or None."""
        return None

    def leave(self, x: Tensor, layer: int) -> Tensor:
        """Map the ``(B, L, D)`` tokens that leave block ``layer`` to ``(B, L, D)``."""
        return x

    def acts_after(self, layer: int) -> bool:
        """Return whether :meth:`leave` changes the tokens of block ``layer``."""
        return type(self).leave is not PosEmbed.leave

    def block_parameters(self, layer: int) -> list[nn.Parameter]:
        """Return the parameters that act in block ``layer`` alone."""
        return []

    def stacked_parameters(self) -> list[tuple[nn.Parameter, int]]:
        """Return the parameters that hold values of each block, and the axis of the blocks."""
        named = dict(self.named_parameters(recurse=False)) if self.join == "every_layer" else {}
        return [(named[name], axis) for name, axis in self.stacks.items() if name in named]

    @contextmanager
    def permute_positions(self, order: Tensor) -> Iterator[None]:
        """Give patch slot ``i`` the position ``order[i]`` inside a ``with`` block; the tokens stay where they are."""
        num_patches = self.grid_size[0] * self.grid_size[1]
        if num_patches and sorted(order.tolist()) != list(range(num_patches)):
            raise ValueError(f"`order` must be a permutation of the {num_patches} patch positions")
        self.order = order
        try:
            yield
        finally:
            self.order = None

    def kept(self, keep: Tensor) -> Self:
        """Return this module, with the same parameters, for some tokens of each image, which stay where they stood.

        Args:
            keep: ``(B, K)`` numbers of patch tokens, as many of each image.

        Raises:
            ValueError: The method mixes neighboring tokens.
        """
        if type(self).leave is not PosEmbed.leave:
            raise ValueError(
                f"{type(self).__name__} mixes neighboring tokens: it needs all of an image, not `keep` alone"
            )
        other = copy.copy(self)
        other.order = keep if self.order is None else self.order[keep]
        return other

    def tokens(self, x: Tensor) -> Tensor:
        """Return those of the ``(B, N, D)`` patch tokens that are kept, ``(B, K, D)``; without :meth:`kept`, all."""
        if self.order is None or self.order.ndim == 1:
            return x
        return x[torch.arange(len(x), device=x.device)[:, None], self.order]

    def token_order(self, num_prefix_tokens: int) -> Tensor | None:
        """Return ``order`` for all ``(L,)`` or ``(B, L)`` tokens, prefix tokens in their places."""
        if self.order is None:
            return None
        prefix = torch.arange(num_prefix_tokens, device=self.order.device)
        return torch.cat([prefix.expand(*self.order.shape[:-1], -1), self.order + num_prefix_tokens], dim=-1)

    def of_tokens(self, values: Tensor, order: Tensor | None, axis: int) -> Tensor:
        """Return values of each token, ``(L, ...)`` or ``(A, L, ...)``, in an order; per image ``(B, A or 1, L, ...)``.

        Args:
            values: The values, patches in raster order.
            order: As :meth:`token_order` returns it.
            axis: The tokens' axis, 0 or 1.
        """
        if order is None or order.ndim == 1:
            return values if order is None else values.index_select(axis, order)
        return values[order][:, None] if axis == 0 else values[:, order].transpose(0, 1)
