"""The base class of position embeddings: six hooks, all neutral, and what a method declares about itself."""

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from vitlab.layers.pos_embed.resizable import Resizable
from vitlab.objects import Described

PosEmbedJoin = Literal["stem", "every_layer", "every_layer_shared"]


class PosEmbed(Resizable, metaclass=Described):
    """No position embedding, and the base class of every method.

    A position embedding can act in six places, each neutral here: it can add to the patch tokens once
    (:meth:`forward`) or before every block (:meth:`enter`), rotate queries and keys (:meth:`rotate`), bias the
    attention logits (:meth:`bias`, or :meth:`relate` by queries and keys), or mix the tokens after a block
    (:meth:`leave`). Tokens are P prefix tokens, then N patches. Prefix tokens have no position: it would be a constant,
    which their trained vectors can absorb.

    Each hook is a function of its arguments, the parameters and ``grid_size``; a batch leaves no state on the module.
    For images of another size, a subset of the tokens, some of the queries and numbers drawn for a batch, :meth:`at`,
    :meth:`kept`, :meth:`of_queries` and :meth:`for_batch` return another object that shares the parameters.

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

    completed_by = ("grid_size", "embed_dim", "num_heads", "head_dim", "depth", "num_prefix_tokens")  # of the network
    joins: tuple[PosEmbedJoin, ...] = ()  # where it can act, the default first
    trains = False  # whether it has parameters, or can have some
    rotates_stacked = False  # whether rotate also takes (2, B, A, L, d): queries and keys stacked
    relates = False  # whether relate acts: true of a class that defines it
    splits_queries = False  # whether bias or relate acts, and gives the rows of :attr:`queries` alone
    join: PosEmbedJoin | None = None
    stacks: Mapping[str, int] = MappingProxyType({})  # parameters that hold a slice for each block, and its axis
    owner: Tensor | None = None  # (R, L), the image of each token, in packed rows
    order: Tensor | None = None  # (N,) inside permute_positions; (B, K) after kept
    queries: slice = slice(None)  # the tokens whose rows bias and relate give; all, unless of_queries chose some

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Accept a ``relate`` of queries and layer, as it was before the keys were given too.

        A class with biases of its own says ``splits_queries`` itself, or gives all rows; one with a rotation of its own
        says ``rotates_stacked`` itself, or receives queries and keys apart.
        """
        for flag, hooks in (("rotates_stacked", {"rotate"}), ("splits_queries", {"bias", "biases", "relate"})):
            own = ((base, vars(base).keys() - vars(base).get("of_mixins", ())) for base in cls.__mro__)
            first = next(base for base, names in own if names & {flag, *hooks})
            if flag not in vars(first):  # but a hook, maybe of a mixin
                setattr(cls, flag, False)
        super().__init_subclass__(**kwargs)
        by_queries: Any = cls.relate  # its own, of a base class or of a mixin
        cls.relates = by_queries is not PosEmbed.relate
        if len(inspect.signature(by_queries, follow_wrapped=False).parameters) == 3:
            by_both: Any = functools.wraps(by_queries)(lambda self, q, k, layer: by_queries(self, q, layer))
            cls.relate = by_both  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(B, N, D)`` patch tokens to ``(B, N, D)``, before prefix tokens are prepended."""
        return x

    def prepend(self, prefix: Sequence[Tensor], x: Tensor) -> Tensor:
        """Prepend prefix tokens, ``(1, n, D)`` each, to ``(B, N, D)`` patch tokens: ``(B, P + N, D)``."""
        B = x.shape[0]  # not len(x), which would fix the batch size of an exported graph
        return torch.cat([*[token.expand(B, -1, -1) for token in prefix], x], dim=1)

    def enter(self, x: Tensor, layer: int) -> Tensor:
        """Map the ``(B, L, D)`` tokens that enter block ``layer`` to ``(B, L, D)``."""
        return x

    def rotate(self, x: Tensor, layer: int) -> Tensor:
        """Map ``(B, A, L, d)`` queries or keys of block ``layer``; prefix tokens are not rotated."""
        return x

    def bias(self, layer: int) -> Tensor | None:
        """Return ``(A, L, L)`` to add to the scaled attention logits of block ``layer``, or None.

        After :meth:`kept` it is ``(B, A, L, L)``: each image keeps other tokens.
        """
        return None

    def relate(self, q: Tensor, k: Tensor, layer: int) -> Tensor | None:
        """Return a bias by scaled ``(B, A, L, d)`` queries and by keys, both rotated, ``(B, A, L, L)``, or None.

        ``q`` may hold the first queries only.
        """
        return None

    def leave(self, x: Tensor, layer: int) -> Tensor:
        """Map the ``(B, L, D)`` tokens that leave block ``layer`` to ``(B, L, D)``."""
        return x

    def acts_after(self, layer: int) -> bool:
        """Return whether :meth:`leave` changes the tokens of block ``layer``."""
        return type(self).leave is not PosEmbed.leave

    def num_sets(self, depth: int) -> int:
        """Return how many sets of parameters ``depth`` blocks have: one each, or one for all."""
        return depth if self.join == "every_layer" else 1

    def block_parameters(self, layer: int) -> list[nn.Parameter]:
        """Return the parameters that act only in block ``layer``."""
        return []

    def stacked_parameters(self) -> list[tuple[nn.Parameter, int]]:
        """Return the parameters that hold a slice for each block, with the axis of the blocks."""
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
        """Return this module, sharing its parameters, for a subset of the patch tokens, at their original positions.

        Args:
            keep: ``(B, K)`` indices of the patch tokens to keep, K of each image.

        Raises:
            ValueError: The method has a ``leave``, which may mix neighboring tokens.
        """
        if type(self).leave is not PosEmbed.leave:
            what = f"{type(self).__name__} has a `leave`, which may mix neighboring tokens"
            raise ValueError(f"{what}: it needs all tokens of an image, not a subset")
        return self.view(order=keep if self.order is None else self.order[keep])

    def of_queries(self, queries: slice) -> Self:
        """Return this module, sharing its parameters, with the rows of these tokens alone in its biases.

        For methods that say ``splits_queries``, and all tokens in their places: without :attr:`order`.
        """
        return self.view(queries=queries)

    def single_methods(self) -> dict[str, "PosEmbed"]:
        """Return the methods that this one combines, by name; itself, under an empty one, if it combines none."""
        return {"": self}

    def for_batch(self) -> Self:
        """Return the object whose hooks one batch goes through: this one, or one with what is drawn for the batch."""
        return self

    def tokens(self, x: Tensor) -> Tensor:
        """Return the kept ones of ``(B, N, D)`` patch tokens, ``(B, K, D)``; all, unless :meth:`kept` chose some."""
        if self.order is None or self.order.ndim == 1:
            return x
        return x[torch.arange(len(x), device=x.device)[:, None], self.order]

    def token_order(self, num_prefix_tokens: int) -> Tensor | None:
        """Return ``order`` extended to prefix tokens, which stay in place: ``(L,)`` or ``(B, L)``, or None."""
        if self.order is None:
            return None
        prefix = torch.arange(num_prefix_tokens, device=self.order.device)
        return torch.cat([prefix.expand(*self.order.shape[:-1], -1), self.order + num_prefix_tokens], dim=-1)

    def gather_tokens(self, values: Tensor, order: Tensor | None, axis: int) -> Tensor:
        """Reorder values of tokens, ``(L, ...)`` or ``(A, L, ...)``; one order per image gives ``(B, A or 1, L, ...)``.

        Args:
            values: The values, patches in raster order.
            order: As :meth:`token_order` returns it.
            axis: Axis of the tokens, 0 or 1.
        """
        if order is None or order.ndim == 1:
            return values if order is None else values.index_select(axis, order)
        return values[order][:, None] if axis == 0 else values[:, order].transpose(0, 1)
