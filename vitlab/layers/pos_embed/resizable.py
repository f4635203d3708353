"""Position embeddings as modules of a grid: how their tensors are resized, loaded, cast and recomputed."""

import functools
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from vitlab.errors import UsageError
from vitlab.layers.pos_embed.checked import shape_kept
from vitlab.layers.resample import Grid, ResizePolicy, same_size

KEEP_SHAPE = ("forward", "enter", "rotate", "leave")  # hooks that map a tensor to one of the same shape
SIZED = ("interpolated", "trained_grid")  # what a method keeps of another grid, and reads when it is loaded


class Resizable(nn.Module):
    """A module for a grid that can load the weights of another grid.

    Args:
        grid_size: Patch tokens per column and per row, (h, w).

    Example:
        >>> Resizable((2, 3)).resized_state({}, (4, 4), policy=None)  # no tensor depends on the grid: nothing to do
        {}
    """

    policies: tuple[ResizePolicy, ...] = ()  # what resized_state can do, the default first
    chosen_policy: ResizePolicy | None = None  # ``resize`` of the ``init_args``: the usual one, None is the default
    keeps_float32 = False  # whether this module stays float32 when the model is cast to half precision
    trained_grid: Tensor | None  # (2,), saved; the grid whose coordinates are used, if another
    of_mixins: Collection[str] = ()  # hooks that a class outside vitlab inherits from one that has no grid

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Hold hooks of a class outside vitlab to shape and precision of the tokens: another shape may broadcast."""
        super().__init_subclass__(**kwargs)
        for name in () if cls.__module__.startswith("vitlab.") else KEEP_SHAPE:
            place = next((base for base in cls.__mro__ if name in vars(base)), Resizable)
            if place is cls:
                setattr(cls, name, shape_kept(vars(cls)[name]))
            elif not issubclass(place, Resizable):
                setattr(cls, name, shape_kept(_next_hook(cls, name)))
                cls.of_mixins = {*vars(cls).get("of_mixins", ()), name}

    def __init__(self, grid_size: Grid = (0, 0)) -> None:
        super().__init__()
        self.grid_size = grid_size
        self.register_buffer("trained_grid", None)

    def resized_state(
        self,
        state: dict[str, Tensor],
        old_grid: Grid,
        policy: ResizePolicy | Literal["usual"] | None,
        antialias: bool = True,
    ) -> dict[str, Tensor]:
        """Return a state dict from ``old_grid``, resized so that this module can load it.

        Returns ``state`` itself where there is nothing to do: equal grids, or a method that does not depend on one.

        Raises:
            ValueError: ``state`` does not allow the policy, also where the grids are equal, or a class outside vitlab
                does not resize a tensor of the old grid.
        """
        allowed = self.policies_for(state)
        if same_size(old_grid, self.grid_size):
            check_policy(policy, allowed)
            return state
        if _is_of_users(self) and not resizes(self):
            self._check_unresized(state, old_grid)
        if not allowed and policy in ("usual", None):
            return state
        if policy == "usual":
            usual: Any = self.usual_policy(state)  # None is each one's own in a list
            return self._resized_state(state, old_grid, usual, antialias)
        if policy is None or policy not in allowed:
            (h, w), (new_h, new_w) = old_grid, self.grid_size
            raise ValueError(
                f"the positions were trained on a {h} x {w} grid and the model has {new_h} x {new_w}: "
                f"{_rule(allowed)}; got {policy}"
            )
        return self._resized_state(state, old_grid, policy, antialias)

    def at(self, grid_size: Grid, policy: ResizePolicy | None = None) -> Self:
        """Return this method as a function of another grid; the module itself at its own grid.

        It shares the parameters, and gradients flow to them. Nothing is kept: one graph serves every size.

        Args:
            grid_size: Patch tokens per column and per row, (h, w).
            policy: How to resample positions; None is :meth:`usual_policy`.

        Raises:
            ValueError: The method does not have the policy, or is of a class outside vitlab and does not follow.
        """
        check_policy(policy, self.policies)
        if same_size(grid_size, self.grid_size):
            return self
        if _is_of_users(self) and not torch.compiler.is_compiling() and (stuck := self._stuck()):
            raise UsageError(no_resizing(self, stuck))
        return self._at(grid_size, policy)

    def _at(self, grid_size: Grid, policy: ResizePolicy | None = None) -> Self:
        if getattr(self, "order", None) is not None:
            raise ValueError("permuted positions cannot be resized to another grid")
        other = self.view(grid_size=grid_size)
        _own_parts(other)
        state = self.saved_tensors()
        resized = other.resized_state(state, self.grid_size, policy or "usual")
        own = next((value for value in (*self.parameters(), *self.buffers()) if value.is_floating_point()), None)
        for name in {**state, **resized}:
            if (value := resized.get(name)) is not state.get(name):
                if value is not None and own is not None and value.is_floating_point():
                    value = value.to(own)
                _set_tensor(other, name, value)
        other.fill_tables()
        return other

    def saved_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of ``state_dict()``, which would end a graph, themselves."""
        unsaved = {
            f"{place}.{name}" if place else name
            for place, module in self.named_modules(remove_duplicate=False)
            for name in module._non_persistent_buffers_set
        }
        return {name: value for name, value in self._tensors().items() if name not in unsaved}

    def _tensors(self) -> dict[str, Tensor]:
        """Return parameters and buffers under every name: one that has several is several entries of a state dict."""
        return dict([*self.named_parameters(remove_duplicate=False), *self.named_buffers(remove_duplicate=False)])

    def view(self, **changes: Any) -> Self:
        """Return this module with other attributes, sharing parameters and tables; it is not changed itself.

        Made in a way that can also be compiled, unlike ``copy.copy``.
        """
        other = _shared(self)
        other.__dict__.update(changes)
        return other

    def policies_for(self, state: dict[str, Tensor]) -> tuple[ResizePolicy, ...]:
        """Return the policies that ``state`` allows: coordinates that were rescaled once can only be rescaled again."""
        return ("rescale",) if "trained_grid" in state else self.policies

    def usual_policy(self, state: dict[str, Tensor]) -> ResizePolicy | None:
        """Return :attr:`chosen_policy` if ``state`` allows it, else the default; None if there is nothing to resize."""
        allowed = self.policies_for(state)
        return self.chosen_policy if self.chosen_policy in allowed else next(iter(allowed), None)

    def policy_text(self, state: dict[str, Tensor], policy: ResizePolicy | Literal["usual"] | None) -> str:
        """Return how :meth:`resized_state` resizes ``state`` by ``policy``, in words."""
        return str(self.usual_policy(state) if policy == "usual" else policy)

    def fill_tables(self) -> None:
        """Compute the buffers for :attr:`grid_size` that are not saved because a formula gives them."""

    def _resized_state(
        self, state: dict[str, Tensor], old_grid: Grid, policy: ResizePolicy, antialias: bool
    ) -> dict[str, Tensor]:
        if policy == "interpolate" and not resizes(self):
            tensors = self._tensors()
            sized = [name for name in state if name in tensors and state[name].shape != tensors[name].shape]
            if sized:
                raise UsageError(no_resizing(self, sized[0]))
            return state
        return {"trained_grid": torch.tensor(old_grid)} | state if policy == "rescale" else dict(state)

    def _check_unresized(self, state: dict[str, Tensor], old_grid: Grid) -> None:
        """Refuse tensors of another grid that fit all the same: a transposed grid has as many patches.

        They are numbers that the constructor computes for a grid, such as indices, and rows of a table.
        """
        own, num_patches = self._tensors(), old_grid[0] * old_grid[1]
        given = {name: value for name, value in state.items() if name in own and value is not own[name]}
        for name, value in given.items():
            is_index = value.ndim > 0 and not value.is_floating_point() and not name.endswith(SIZED)
            if is_index and value.shape == own[name].shape and not torch.equal(value.to(own[name].device), own[name]):
                raise UsageError(no_resizing(self, name))
        rows = next((name for name, value in given.items() if num_patches in value.shape), None)
        if rows is not None and self._stuck() == "table":
            raise UsageError(no_resizing(self, rows))

    def _stuck(self) -> str | None:
        """Return which hook gives at every grid what is for one: a bias, if it has one side at 2 x 2 and at 3 x 3."""

        def side(grid_size: Grid) -> int:
            method: Any = self._at(grid_size)
            bias = method.bias(0)
            return 1 if bias is None else bias.shape[-1]  # as of a bias for all tokens

        try:
            with torch.no_grad():
                return "bias" if 1 < side((2, 2)) == side((3, 3)) else None
        except Exception:  # it may not take such grids
            return None

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if "rescale" in self.policies and prefix + "trained_grid" in state_dict:
            self.trained_grid = state_dict[prefix + "trained_grid"].clone()
            self.fill_tables()
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        was_meta = any(buffer.is_meta for buffer in self.buffers())
        super()._apply(_keeping_kind(_keeping_float32(fn) if self.keeps_float32 else fn), recurse)
        if was_meta and not any(buffer.is_meta for buffer in self.buffers()):
            self.fill_tables()
        return self


def _next_hook(cls: type[Resizable], name: str) -> Callable[..., Tensor]:
    """Return the hook that follows that of a class, which a subclass with several bases may place elsewhere."""

    @functools.wraps(getattr(cls, name))
    def following(self: Resizable, *args: Any, **kwargs: Any) -> Tensor:
        found: Tensor = getattr(super(cls, self), name)(*args, **kwargs)
        return found

    return following


def _is_of_users(module: nn.Module) -> bool:
    return not type(module).__module__.startswith("vitlab.")


def resizes(module: Resizable) -> bool:
    """Return whether a class says how its tensors are resized.

    Example:
        >>> resizes(Resizable())
        False
    """
    return type(module)._resized_state is not Resizable._resized_state


def check_policy(policy: str | None, allowed: Sequence[str]) -> None:
    """Refuse a policy that is not allowed; ``usual`` and None always are.

    Example:
        >>> check_policy("usual", ["interpolate"]), check_policy("interpolate", ["interpolate"])
        (None, None)
    """
    if policy not in ("usual", None, *allowed):
        raise ValueError(f"{_rule(allowed)}; got {policy}")


def _rule(allowed: Sequence[str]) -> str:
    choices = ", ".join(allowed) + f"; usual is {allowed[0]}" if allowed else "null: there is nothing to resize"
    return f"the resize policy must be one of {choices}"


def no_resizing(method: Resizable, what: str) -> str:
    """Return what to do about a class that does not resize something of its own.

    Example:
        >>> from vitlab.layers.pos_embed.added import Learned
        >>> no_resizing(Learned((2, 2), 8, 1), "weight")[:44]
        'Learned cannot interpolate `weight` to anoth'
    """
    name = type(method).__name__
    ways = "give it a `_resized_state`, or `fill_tables` for what is computed, or keep the image size"
    return f"{name} cannot interpolate `{what}` to another grid: {ways}"


def _shared(module: Any) -> Any:
    """Return another module with the same attributes, parameters, buffers and parts, which can be replaced."""
    other = object.__new__(type(module))
    other.__dict__.update(module.__dict__)
    other.__dict__.update({name: dict(module.__dict__[name]) for name in ("_parameters", "_buffers", "_modules")})
    return other


def _own_parts(module: nn.Module) -> None:
    """Give a module that :func:`_shared` made parts of its own, so that tensors set in them are not the original's."""
    for name, part in module._modules.items():
        if part is not None:
            module._modules[name] = own = _shared(part)
            _own_parts(own)


def _set_tensor(module: nn.Module, name: str, value: Tensor | None) -> None:
    """Set a tensor of a module that :func:`_shared` made, or of one of its own parts."""
    *path, leaf = name.split(".")
    for part in path:
        module = module._modules[part]  # type: ignore[assignment]
    module._parameters.pop(leaf, None)
    module._buffers.pop(leaf, None)
    module.__dict__[leaf] = value


def _keeping_kind(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return ``fn``, but a complex tensor stays one: a cast to half precision would drop its imaginary part."""

    def moved(x: Tensor) -> Tensor:
        if not x.is_complex():
            return fn(x)
        with warnings.catch_warnings(action="ignore"):
            y = fn(x)
        return y if y.is_complex() else x.to(y.device)

    return moved


def _keeping_float32(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return ``fn``, which moves or casts tensors, without its casts to half precision."""

    def moved(x: Tensor) -> Tensor:
        y = fn(x)
        if not x.is_floating_point() or y.dtype.itemsize >= min(x.dtype.itemsize, 4):
            return y
        return x.to(y.device, torch.float32 if x.dtype is torch.float64 else x.dtype)

    return moved


def grid_cells(grid_size: Grid, trained_grid: Tensor | None = None, half_cell: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return row y and column x of each cell in raster order, two ``(N,)`` tensors in float64.

    Args:
        grid_size: Patch tokens per column and per row, (h, w).
        trained_grid: If given, coordinates are in cells of this grid over the same image.
        half_cell: Origin of a cell: 0.0 keeps the first cell at 0, 0.5 aligns the centers of the two grids. For a
            single grid both are the same numbers.

    Example:
        >>> y, x = grid_cells((2, 3))
        >>> y.tolist(), x.tolist()
        ([0.0, 0.0, 0.0, 1.0, 1.0, 1.0], [0.0, 1.0, 2.0, 0.0, 1.0, 2.0])
    """
    old: Any = grid_size if trained_grid is None else trained_grid.cpu().double().unbind()  # numbers would end a graph
    sides = [
        (torch.arange(side, dtype=torch.float64) + half_cell) * (trained / side) - half_cell
        for side, trained in zip(grid_size, old, strict=True)
    ]
    y, x = torch.meshgrid(*sides, indexing="ij")
    return y.flatten(), x.flatten()


def resample_pos_embed(
    state_dict: dict[str, Tensor],
    model: nn.Module,
    old_grid: Grid,
    policy: ResizePolicy | Literal["usual"] | None,
    antialias: bool = True,
) -> tuple[dict[str, Tensor], list[str]]:
    """Resize the positions in a state dict to the grid of ``model``; return it and a sentence for each change.

    Positions that lack a tensor of the model's method belong to another, and stay as they are.

    ``model`` is not changed: what a fixed method needs to know about the old grid goes into the state dict, is read by
    ``load_state_dict`` and is saved with the model from then on.

    Args:
        state_dict: State dict of a vitlab network that was trained at ``old_grid``.
        model: The network that will load it; has a ``pos_embed``.
        old_grid: Patch tokens per column and per row, (h, w), in training.
        policy: How to resample positions; required if the grids differ. ``usual`` is the ``resize`` of the position
            embedding, or its default.
        antialias: Whether bicubic interpolation smooths when it shrinks the grid.

    Example:
        >>> from vitlab.layers.pos_embed import build_pos_embed
        >>> model = nn.Module()
        >>> model.pos_embed = build_pos_embed("learned", (4, 4), 8, num_heads=2, depth=1, num_prefix_tokens=1)
        >>> trained = {"pos_embed.weight": torch.ones(1, 4, 8)}
        >>> state, sentences = resample_pos_embed(trained, model, (2, 2), "interpolate")
        >>> state["pos_embed.weight"].shape, sentences
        (torch.Size([1, 16, 8]), ['positions: interpolate from 2 x 2 to 4 x 4, norm of a position x 1.00'])
    """
    prefix = "pos_embed."
    pos_embed: Resizable = model.pos_embed  # type: ignore[assignment]
    old = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
    own = {key for key in pos_embed.state_dict() if not key.endswith(SIZED)}
    if own - old.keys():
        return state_dict, []
    new = pos_embed.resized_state(old, (old_grid[0], old_grid[1]), policy, antialias)
    if new is old:
        return state_dict, []
    others = {key: value for key, value in state_dict.items() if not key.startswith(prefix)}
    (h, w), (new_h, new_w) = old_grid, pos_embed.grid_size
    sentence = f"positions: {pos_embed.policy_text(old, policy)} from {h} x {w} to {new_h} x {new_w}"
    ratio = _norm_ratio(old, new) if hasattr(pos_embed, "table") else None  # only of vectors
    sentences = [sentence if ratio is None else f"{sentence}, norm of a position x {ratio:.2f}"]
    return others | {prefix + key: value for key, value in new.items()}, sentences


def _norm_ratio(old: dict[str, Tensor], new: dict[str, Tensor]) -> float | None:
    """Return the mean norm of a position vector after resizing, divided by that before; None without a table.

    A ``weight`` that is not resized is no table, but what a class of the user's calls so.
    """
    if "weight" in old and "weight" in new and new["weight"] is not old["weight"]:
        return float(new["weight"].float().norm(dim=-1).mean() / old["weight"].float().norm(dim=-1).mean())
    if "interpolated" in new:  # from a table of sines: every squared norm was D / 2
        return float(new["interpolated"].norm(dim=-1).mean() / (new["interpolated"].shape[-1] / 2) ** 0.5)
    return None
