"""What position embeddings of one's own are told: scale, join, training, rates of blocks; and what they may keep."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.own_positions import Fixed, Turns, Vectors, net_of, spec
from vitlab.errors import UsageError
from vitlab.layers.pos_embed import PosEmbed
from vitlab.layers.pos_embed.added import AddedPosEmbed
from vitlab.layers.pos_embed.rotary import RoPE2d
from vitlab.layers.resample import Grid
from vitlab.optim import describe_groups, param_groups


@pytest.mark.parametrize(("trainable", "trained"), [(None, False), (True, True), (False, False)])
def test_what_a_class_freezes_is_trained_only_on_demand(trainable: bool | None, trained: bool) -> None:
    given = {} if trainable is None else {"trainable": trainable}
    assert net_of(spec(Vectors, **given)).pos_embed.vectors.weight.requires_grad is trained


class Pulls(PosEmbed):
    """A trained bias of a class that says nothing of training."""

    def __init__(self, grid_size: Grid) -> None:
        super().__init__(grid_size)
        self.pull = nn.Parameter(torch.zeros(1))

    def bias(self, layer: int) -> Tensor:
        return self.pull.expand(1, 7, 7)


class Constant(PosEmbed):
    """A class with a switch of its own."""

    def __init__(self, grid_size: Grid, trainable: bool) -> None:
        super().__init__(grid_size)
        self.pull = nn.Parameter(torch.zeros(1)) if trainable else torch.zeros(1)


def test_what_derives_from_the_base_class_is_frozen_and_trained_on_demand() -> None:
    for trainable in (True, False):
        assert net_of(spec(Pulls, trainable=trainable)).pos_embed.pull.requires_grad is trainable
        with pytest.raises(ValueError, match=r"Turns' has nothing to train: leave `pos_embed.trainable` at null"):
            net_of(spec(Turns, trainable=trainable))
        assert isinstance(net_of(spec(Constant, trainable=trainable)).pos_embed.pull, nn.Parameter) is trainable


def test_scale_and_depth_of_a_class_that_takes_them_are_its_own() -> None:
    for given in (spec(Vectors, scale=10.0, depth=5), Vectors(scale=10.0, depth=5)):
        built = net_of(given).pos_embed
        assert (built.factor, built.depth) == (10.0, 5)
        torch.testing.assert_close(built.added(), 10 * built.vectors.weight)
    assert net_of(spec(Fixed, scale=3.0)).pos_embed.added()[0, 0] == 3


class Straight(Fixed):
    """A class that adds its vectors itself."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table()


class EntersStraight(Fixed):
    def __init__(self, grid_size: Grid, join: str = "stem") -> None:
        super().__init__(grid_size, join)

    def enter(self, x: Tensor, layer: int) -> Tensor:
        return x + 1


class Twice(Fixed):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


def test_a_scale_that_a_class_goes_around_is_refused() -> None:
    for cls, join, hook in ((Straight, {}, "forward"), (EntersStraight, {"join": "every_layer"}, "enter")):
        with pytest.raises(ValueError, match=rf"`scale` multiplies `table`, which `{hook}` of {cls.__name__} goes aro"):
            net_of(spec(cls, scale=3.0, **join))
    assert net_of(spec(EntersStraight, scale=3.0)).pos_embed(torch.zeros(1, 6, 16))[0, 0, 0] == 3
    assert net_of(spec(Twice, scale=3.0)).pos_embed(torch.zeros(1, 6, 16))[0, 0, 0] == 6


def test_join_and_trainable_that_a_class_does_not_follow_are_refused() -> None:
    assert net_of(spec(Fixed)).pos_embed.join == net_of(spec(Vectors, join="stem")).pos_embed.join == "stem"
    with pytest.raises(ValueError, match=r"`pos_embed.join` must be stem or null for .*Vectors'.* got 'every_layer'"):
        net_of(spec(Vectors, join="every_layer"))
    with pytest.raises(ValueError, match=r"Fixed' has nothing to train: leave `pos_embed.trainable` at null"):
        net_of(spec(Fixed, trainable=True))


class Gridless(PosEmbed):
    """A class that keeps its grid to itself."""

    def __init__(self, grid_size: Grid) -> None:
        super().__init__()


def test_a_class_that_does_not_pass_its_grid_on_is_refused() -> None:
    told = r"Gridless' has a grid of 0 x 0 in place of 2 x 3: its constructor must pass the grid on, as in `super\(\)"
    with pytest.raises(ValueError, match=told):
        net_of(Gridless)


class Gains(AddedPosEmbed):
    """One table, which is no slice for each block."""

    def __init__(self, grid_size: Grid, embed_dim: int, join: str = "every_layer") -> None:
        super().__init__(grid_size, join)
        self.weight = nn.Parameter(torch.ones(grid_size[0] * grid_size[1], embed_dim))


class EachBlock(Gains):
    """A table for each block, unless something else is said."""

    def __init__(self, grid_size: Grid, embed_dim: int, trainable: bool = True, join: str = "every_layer") -> None:
        super().__init__(grid_size, embed_dim, join)
        self.weight.requires_grad_(trainable)


class Asks(EachBlock):
    """The same without defaults of its own."""

    def __init__(self, grid_size: Grid, embed_dim: int, trainable: bool | None, join: str | None = None) -> None:
        super().__init__(grid_size, embed_dim, trainable, join)


def test_a_class_keeps_its_own_defaults_of_join_and_trainable() -> None:
    def built(cls: type[PosEmbed], **args: object) -> tuple[str, bool]:
        method = net_of(spec(cls, **args)).pos_embed
        return method.join, method.weight.requires_grad

    assert built(EachBlock) == ("every_layer", True) and built(Asks) == ("stem", False)
    for cls in (EachBlock, Asks):
        assert built(cls, join="stem", trainable=True) == ("stem", True)
        assert built(cls, join="every_layer", trainable=False) == ("every_layer", False)


class PassesOn(EachBlock):
    """One that passes all of its arguments on."""

    def __init__(self, grid_size: Grid, more: float = 1.0, **others: Any) -> None:
        super().__init__(grid_size, **others)


class PassesOnAgain(PassesOn):
    """The same once more."""

    def __init__(self, grid_size: Grid, most: float = 1.0, **others: Any) -> None:
        super().__init__(grid_size, **others)


class Turning(RoPE2d):
    """A rotation that passes all of its arguments on."""

    def __init__(self, grid_size: Grid, **others: Any) -> None:
        super().__init__(grid_size, **others)


def test_a_class_that_passes_its_arguments_on_gets_those_of_every_base_class() -> None:
    method = net_of(spec(PassesOnAgain, join="stem")).pos_embed
    assert method.join == "stem" and method.weight.requires_grad
    assert net_of(spec(Turning, theta=50.0)).pos_embed.theta == 50.0


def test_only_tensors_that_a_class_declares_are_slices_for_each_block() -> None:
    assert net_of(Gains).pos_embed.stacked_parameters() == []
    learned = net_of({"class_path": "learned", "init_args": {"join": "every_layer"}}).pos_embed
    assert [(p is learned.weight, axis) for p, axis in learned.stacked_parameters()] == [(True, 0)]


class Listens(PosEmbed):
    """A vector for each block that is added to all of its tokens, as the page of positions teaches it."""

    def __init__(self, grid_size: Grid, embed_dim: int, depth: int) -> None:
        super().__init__(grid_size)
        self.tables = nn.ParameterList(torch.zeros(1, embed_dim) for _ in range(depth))

    def block_parameters(self, layer: int) -> list[nn.Parameter]:
        return [self.tables[layer]]


class Stacks(PosEmbed):
    """The same in one tensor."""

    stacks = {"weight": 0}  # noqa: RUF012
    join = "every_layer"

    def __init__(self, grid_size: Grid, embed_dim: int, depth: int) -> None:
        super().__init__(grid_size)
        self.weight = nn.Parameter(torch.zeros(depth, embed_dim))


def test_what_a_class_assigns_to_a_block_learns_at_its_rate() -> None:
    page = (Path(__file__).parents[2] / "docs/position_embeddings.md").read_text()
    assert "`def block_parameters(self, layer): return [self.tables[layer]]`" in page
    assert '`stacks = {"weight": 0}`' in page
    for own in (Listens, Stacks):
        net = net_of(own)
        groups = param_groups(net, lr=1.0, weight_decay=0.0, layer_decay=0.5)
        rows = [row for row in describe_groups(net, groups, 1.0, 0.5) if row["name"].startswith("pos_embed.")]
        assert [row["lr_scale"] for row in rows] == [0.25, 0.5]  # of two blocks; that of the embedding is 0.125


@pytest.mark.parametrize("axis", [1, 2, -1])
def test_a_stack_that_has_no_slice_for_each_block_is_refused(axis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stacks, "stacks", {"weight": axis})
    net = net_of(Stacks)
    param_groups(net, lr=1.0, weight_decay=0.0)
    with pytest.raises(UsageError, match=rf"names axis {axis} of `weight`, \(2, \d+\), .* must be 2 long"):
        param_groups(net, lr=1.0, weight_decay=0.0, layer_decay=0.5)


class Named(PosEmbed):
    """A tensor or module under a name of one's own."""

    def __init__(self, grid_size: Grid, embed_dim: int, name: str = "", is_module: bool = False) -> None:
        super().__init__(grid_size)
        setattr(self, name, nn.Linear(2, 2) if is_module else nn.Parameter(torch.zeros(embed_dim)))


def test_a_tensor_or_module_by_a_name_of_the_base_class_is_refused_in_one_line() -> None:
    for name in ("bias", "order", "queries", "owner"):
        for is_module in (False, True):
            told = f"has a module `{name}`, a name of its base" if is_module else f"line .*'{name}' already exists"
            with pytest.raises(ValueError, match=rf"`pos_embed`: .*Named .*{told}"):
                net_of(spec(Named, name=name, is_module=is_module))
    for name in ("scale", "resize", "table"):
        assert name in dict(net_of(spec(Named, name=name)).pos_embed.named_parameters())


class Beside(PosEmbed):
    """Numbers to train beside the parameters."""

    def __init__(self, grid_size: Grid, kind: str) -> None:
        super().__init__(grid_size)
        one = nn.Parameter(torch.ones(2))
        self.inner = nn.Identity()
        match kind:
            case "a list":
                self.rows = [one]
            case "a mapping":
                self.rows = {"x": {"y": one}}
            case "layers":
                self.rows = [nn.Linear(2, 2)]
            case "a tensor of a part":
                self.inner.rows = torch.ones(2, requires_grad=True)
            case "a second name":
                self.own = one
                self.rows = [self.own]
            case "constants":
                self.rows = [torch.ones(2), nn.Linear(2, 2).requires_grad_(False)]
            case "a computed one":
                self.own = one
                self.rows = (2 * one,)


@pytest.mark.parametrize("kind", ["a list", "a mapping", "layers", "a tensor of a part"])
def test_what_would_be_trained_outside_of_the_state_dict_is_refused(kind: str) -> None:
    name = "inner.rows" if "part" in kind else "rows"
    with pytest.raises(
        ValueError, match=f"`pos_embed`: neither optimizer nor state dict would have `{name}` of .*List"
    ):
        net_of(spec(Beside, kind=kind))


@pytest.mark.parametrize("kind", ["a second name", "constants", "a computed one"])
def test_second_names_constants_and_what_is_computed_may_stand_outside_of_the_state_dict(kind: str) -> None:
    net_of(spec(Beside, kind=kind))


class Early(PosEmbed):
    """An `__init__` that forgets that of its base class."""

    def __init__(self, grid_size: Grid, early: str | None = None) -> None:
        self.number = 1
        if early == "parameter":
            self.weight = nn.Parameter(torch.ones(1))
        if early == "misspelt":
            super().__init__(grid_size)
            self.side = self.grid_sise  # type: ignore[has-type]


def test_an_init_without_that_of_its_base_class_is_told_with_the_key_and_the_class() -> None:
    for early in (None, "parameter"):
        rule = f"`pos_embed`: `__init__` of {__name__}.Early must call `super.*` first"
        with pytest.raises(ValueError, match=rule):
            net_of(spec(Early, early=early))
    told = rf"`pos_embed`: {__name__}.Early cannot be built: .*position_options.py, line .*no attribute 'grid_sise'"
    with pytest.raises(ValueError, match=told):
        net_of(spec(Early, early="misspelt"))
