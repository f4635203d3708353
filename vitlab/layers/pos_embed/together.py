"""Several position embeddings in one network."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Literal, Self

import torch
from torch import Tensor, nn

from vitlab.layers.pos_embed.added import AddedPosEmbed
from vitlab.layers.pos_embed.base import PosEmbed
from vitlab.layers.pos_embed.resizable import check_policy
from vitlab.layers.resample import Grid, ResizePolicy, same_size


class Together(PosEmbed):
    """Combine position embeddings that act in different places, such as a table and a rotation.

    Published with both: EVA-02, Fang et al. 2023 (arXiv:2303.11331), and the networks of Heo et
    al. 2024 (arXiv:2403.13298) whose names end in "ape".

    Args:
        grid_size: Patch tokens per column and per row, (h, w).
        parts: The position embeddings, by name.

    Example:
        >>> from vitlab.layers.pos_embed.added import Learned
        >>> from vitlab.layers.pos_embed.rotary import RoPE2d
        >>> both = Together((2, 3), {"learned": Learned((2, 3), 8), "rope2d": RoPE2d((2, 3), 8)})
        >>> list(both.state_dict()), both.rotate(torch.randn(1, 1, 6, 8), layer=0).shape
        (['learned.weight'], torch.Size([1, 1, 6, 8]))
    """

    def __init__(self, grid_size: Grid, parts: dict[str, PosEmbed]) -> None:
        super().__init__(grid_size)
        _check(parts)
        for name, part in parts.items():
            self.add_module(name, part)
        acting = [part for part in parts.values() if acts_on_logits(part)]
        self.splits_queries = bool(acting) and all(part.splits_queries for part in acting)
        self.rotates_stacked = any(part.rotates_stacked for part in parts.values())  # at most one of them rotates
        self.relates = any(part.relates for part in parts.values())
        self.policies = tuple(dict.fromkeys(policy for part in parts.values() for policy in part.policies))

    @property
    def parts(self) -> dict[str, PosEmbed]:
        """The position embeddings, by name, in the order in which they act."""
        return {name: part for name, part in self.named_children() if isinstance(part, PosEmbed)}

    def single_methods(self) -> dict[str, PosEmbed]:
        """Return the position embeddings, by name."""
        return self.parts

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(B, N, D)`` patch tokens to ``(B, N, D)``."""
        for part in self.parts.values():
            x = part(x)
        return x

    def enter(self, x: Tensor, layer: int) -> Tensor:
        """Map the ``(B, L, D)`` tokens that enter block ``layer`` to ``(B, L, D)``."""
        for part in self.parts.values():
            x = part.enter(x, layer)
        return x

    def rotate(self, x: Tensor, layer: int) -> Tensor:
        """Map ``(B, A, L, d)`` queries or keys to ``(B, A, L, d)``."""
        for part in self.parts.values():
            x = part.rotate(x, layer)
        return x

    def bias(self, layer: int) -> Tensor | None:
        """Return the sum of all biases on the logits of block ``layer``, ``(A, L, L)``, or None."""
        return _sum([part.bias(layer) for part in self.parts.values()])

    def relate(self, q: Tensor, k: Tensor, layer: int) -> Tensor | None:
        """Return the sum of all biases that depend on queries and keys, ``(B, A, L, L)``, or None."""
        return _sum([part.relate(q, k, layer) for part in self.parts.values()])

    def leave(self, x: Tensor, layer: int) -> Tensor:
        """Map the ``(B, L, D)`` tokens that leave block ``layer`` to ``(B, L, D)``."""
        for part in self.parts.values():
            x = part.leave(x, layer)
        return x

    def acts_after(self, layer: int) -> bool:
        """Return whether one of the parts changes the tokens that leave block ``layer``."""
        return any(part.acts_after(layer) for part in self.parts.values())

    def block_parameters(self, layer: int) -> list[nn.Parameter]:
        """Return the parameters that act only in block ``layer``."""
        return [p for part in self.parts.values() for p in part.block_parameters(layer)]

    def stacked_parameters(self) -> list[tuple[nn.Parameter, int]]:
        """Return the parameters that hold a slice for each block, with the axis of the blocks."""
        return [stacked for part in self.parts.values() for stacked in part.stacked_parameters()]

    @contextmanager
    def permute_positions(self, order: Tensor) -> Iterator[None]:
        """Give patch slot ``i`` the position ``order[i]`` in all parts inside a ``with`` block."""
        with super().permute_positions(order), ExitStack() as stack:
            for part in self.parts.values():
                stack.enter_context(part.permute_positions(order))
            yield

    def at(self, grid_size: Grid, policy: ResizePolicy | None = None) -> Self:
        """Return this module for another grid: each part by ``policy``, or as usual where it lacks that."""
        check_policy(policy, self.policies)
        if same_size(grid_size, self.grid_size):
            return self
        policies = self._policies(self.saved_tensors(), policy or self.chosen_policy)
        parts = {name: part.at(grid_size, policies[name]) for name, part in self.parts.items()}
        return self.view(grid_size=grid_size, _modules=parts)

    def kept(self, keep: Tensor) -> Self:
        """Return this module for a subset of the patch tokens; every part must support it."""
        order = keep if self.order is None else self.order[keep]
        return self.view(order=order, _modules={name: part.kept(keep) for name, part in self.parts.items()})

    def of_queries(self, queries: slice) -> Self:
        """Return this module with the rows of these tokens alone in the biases of each part."""
        parts = {name: part.of_queries(queries) for name, part in self.parts.items()}
        return self.view(queries=queries, _modules=parts)

    def for_batch(self) -> Self:
        """Return this module with what each part draws for a batch; the module itself if none draws."""
        return self.with_parts({name: part.for_batch() for name, part in self.parts.items()})

    def with_parts(self, parts: Mapping[str, PosEmbed]) -> Self:
        """Return this module with these parts in place of its own; the module itself if they are its own."""
        same = all(part is own for part, own in zip(parts.values(), self.parts.values(), strict=True))
        return self if same else self.view(_modules=dict(parts))

    def policies_for(self, state: dict[str, Tensor]) -> tuple[ResizePolicy, ...]:
        """Return the policies that any part allows; parts that lack the chosen one are resized as usual."""
        policies = (policy for name, part in self.parts.items() for policy in part.policies_for(_within(state, name)))
        return tuple(dict.fromkeys(policies))

    def usual_policy(self, state: dict[str, Tensor]) -> ResizePolicy | None:
        """Return :attr:`chosen_policy`; None leaves each part its own."""
        return self.chosen_policy

    def policy_text(self, state: dict[str, Tensor], policy: ResizePolicy | Literal["usual"] | None) -> str:
        """Return how :meth:`resized_state` resizes ``state`` by ``policy``: how each part is, that is resized."""
        policies = self._policies(state, self.usual_policy(state) if policy == "usual" else policy)
        return ", ".join(f"{name} by {part_policy}" for name, part_policy in policies.items() if part_policy)

    def _policies(self, state: dict[str, Tensor], policy: str | None) -> dict[str, ResizePolicy | None]:
        """Return how each part is resized: by ``policy``, or as usual where its state does not allow that."""
        found: dict[str, ResizePolicy | None] = {}
        for name, part in self.parts.items():
            own = _within(state, name)
            found[name] = next((each for each in part.policies_for(own) if each == policy), part.usual_policy(own))
        return found

    def _resized_state(
        self, state: dict[str, Tensor], old_grid: Grid, policy: ResizePolicy | None, antialias: bool
    ) -> dict[str, Tensor]:
        policies, new = self._policies(state, policy), dict[str, Tensor]()
        for name, part in self.parts.items():
            resized = part.resized_state(_within(state, name), old_grid, policies[name], antialias)
            new |= {f"{name}.{key}": value for key, value in resized.items()}
        return new


def _sum(biases: list[Tensor | None]) -> Tensor | None:
    given = [bias for bias in biases if bias is not None]
    return torch.stack(torch.broadcast_tensors(*given)).sum(0) if given else None  # some have one bias for all heads


def acts_on_logits(part: PosEmbed) -> bool:
    """Return whether a method defines a bias, of positions or of queries and keys.

    Example:
        >>> acts_on_logits(PosEmbed((2, 3)))
        False
    """
    return type(part).bias is not PosEmbed.bias or part.relates


def _within(state: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(f"{name}.")}


def _check(parts: dict[str, PosEmbed]) -> None:
    """Refuse combinations in which two parts act in the same place."""
    tables = [name for name, part in parts.items() if isinstance(part, AddedPosEmbed)]
    rotations = [name for name, part in parts.items() if type(part).rotate is not PosEmbed.rotate]
    has_none = any(type(part) is PosEmbed for part in parts.values())
    for names, what in ((tables, "are both added to the tokens"), (rotations, "both rotate queries and keys")):
        if len(names) > 1:
            raise ValueError(f"`pos_embed`: {names[0]} and {names[1]} {what}; a list can have only one of them")
    if has_none or len(parts) < 2:
        raise ValueError(f"`pos_embed`: a list needs at least two methods, and 'none' is not one, got {list(parts)}")
