"""Position embeddings of one's own at grids that they were not built for."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.own_positions import LARGER, OWN, SIZE, TRANSPOSED, Fixed, OneRow, Turns, Vectors, net_of, spec
from vitlab.errors import UsageError
from vitlab.jobs.train.describe import _idle_options
from vitlab.layers.pos_embed import PosEmbed, grid_cells, resample_pos_embed
from vitlab.layers.pos_embed.added import AddedPosEmbed
from vitlab.layers.resample import Grid, resize_table
from vitlab.models import VisionTransformer


class Resized(Vectors):
    def _resized_state(self, state: dict[str, Tensor], old_grid: Grid, policy: str, antialias: bool):
        table = resize_table(state["vectors.weight"][None], old_grid, self.grid_size, antialias)
        return state | {"vectors.weight": table[0]}


class Short(AddedPosEmbed):
    """A table for one grid."""

    def table(self, layer: int = 0) -> Tensor:
        return torch.ones(6, 16)


def test_a_tensor_of_a_part_is_resized_for_images_of_another_size_as_for_a_network_of_that_size() -> None:
    net, images = net_of(Resized), torch.randn(2, 1, 12, 16, dtype=torch.float64)
    torch.manual_seed(0)
    other = VisionTransformer(**SIZE | {"img_size": (12, 16)}, pos_embed=Resized).double().eval()
    other.load_state_dict(resample_pos_embed(net.state_dict(), other, (2, 3), "interpolate")[0])
    before = net.pos_embed.vectors.weight
    torch.testing.assert_close(net(images), other(images))
    assert net.pos_embed.vectors.weight is before and len(before) == 6


def test_a_class_that_cannot_be_resized_says_so_in_one_line() -> None:
    net, other = net_of(Vectors), VisionTransformer(**SIZE | {"img_size": (12, 16)}, pos_embed=Vectors)
    with pytest.raises(UsageError, match=r"Vectors cannot interpolate `vectors.weight` to another .*: give it a `_res"):
        resample_pos_embed(net.state_dict(), other, (2, 3), "interpolate")
    fixed = net_of(Fixed)
    assert resample_pos_embed(fixed.state_dict(), fixed, (3, 4), "interpolate")[1] == []
    assert fixed(torch.zeros(1, 1, 12, 16, dtype=torch.float64)).isfinite().all()
    with pytest.raises(UsageError, match="Short cannot interpolate `table` to another grid"):
        net_of(Short)(torch.zeros(1, 1, 12, 16, dtype=torch.float64))


class Listed(AddedPosEmbed):
    """One table under a name for each block."""

    def __init__(self, grid_size: Grid, embed_dim: int, depth: int) -> None:
        super().__init__(grid_size, "every_layer_shared")
        table = nn.Parameter(torch.randn(1, grid_size[0] * grid_size[1], embed_dim))
        self.tables = nn.ParameterList([table] * depth)

    def table(self, layer: int = 0) -> Tensor:
        return self.tables[layer][0]

    def _resized_state(self, state: dict[str, Tensor], old_grid: Grid, policy: str, antialias: bool):
        return {name: resize_table(value, old_grid, self.grid_size, antialias) for name, value in state.items()}


@pytest.mark.parametrize("size", [(12, 16), (12, 8)])
def test_a_tensor_with_several_names_is_resized_under_each(size: tuple[int, int]) -> None:
    net, images = net_of(Listed), torch.randn(2, 1, *size, dtype=torch.float64)
    other = VisionTransformer(**SIZE | {"img_size": size}, pos_embed=Listed).double().eval()
    other.load_state_dict(resample_pos_embed(net.state_dict(), other, (2, 3), "interpolate")[0])
    torch.testing.assert_close(net(images), other(images))


class Rows(AddedPosEmbed):
    """A trained row for each patch that nothing resizes."""

    def __init__(self, grid_size: Grid, embed_dim: int) -> None:
        super().__init__(grid_size)
        self.weight = nn.Parameter(torch.randn(grid_size[0] * grid_size[1], embed_dim))

    def table(self, layer: int) -> Tensor:  # as docs/position_embeddings.md writes it
        return self.weight


class FromCells(AddedPosEmbed):
    """A network of the cell, as wide as the grid has patches."""

    def __init__(self, grid_size: Grid, embed_dim: int) -> None:
        super().__init__(grid_size)
        self.net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, embed_dim))

    def table(self, layer: int = 0) -> Tensor:
        return self.net(torch.stack(grid_cells(self.grid_size), dim=1).to(self.net[0].weight))


class Apart(PosEmbed):
    """A trained bias by the number of rows and columns between two tokens, which the constructor counts."""

    def __init__(self, grid_size: Grid, num_heads: int, is_saved: bool = False) -> None:
        super().__init__(grid_size)
        self.by_distance = nn.Parameter(torch.randn(num_heads, 9))
        y, x = grid_cells(grid_size)
        distance = ((y[:, None] - y).abs() + (x[:, None] - x).abs()).long()
        self.register_buffer("distance", nn.functional.pad(distance, (1, 0, 1, 0), value=8), persistent=is_saved)

    def bias(self, layer: int) -> Tensor:
        return self.by_distance[:, self.distance]


class Follows(Apart):
    """The same, counted for each grid."""

    def fill_tables(self) -> None:
        self.distance = Apart(self.grid_size, 1).distance


class CountsInAPart(AddedPosEmbed):
    """Vectors of rows, whose numbers a module of its own keeps."""

    def __init__(self, grid_size: Grid, embed_dim: int) -> None:
        super().__init__(grid_size)
        self.rows, self.index = nn.Embedding(64, embed_dim), nn.Module()
        self.fill_tables()

    def fill_tables(self) -> None:
        self.index.register_buffer("row", grid_cells(self.grid_size)[0].long(), persistent=False)

    def table(self, layer: int = 0) -> Tensor:
        return self.rows(self.index.row)


def test_images_of_another_size_leave_the_tables_in_a_part_of_a_method_as_they_are() -> None:
    """They had the numbers of the other grid afterwards, and the network other outputs."""
    net, images = net_of(CountsInAPart), torch.randn(1, 1, 8, 12, dtype=torch.float64)
    before = net(images)
    for size in (TRANSPOSED, LARGER):
        assert net(torch.zeros(1, 1, *size, dtype=torch.float64)).isfinite().all()
        assert torch.equal(net(images), before)


class Offsets(PosEmbed):
    """A parameter by the name of a table that is none."""

    policies = ("interpolate",)

    def __init__(self, grid_size: Grid, num_heads: int) -> None:
        super().__init__(grid_size)
        self.weight = nn.Parameter(torch.ones(num_heads, *grid_size))

    def _resized_state(self, state: dict[str, Tensor], *how: Any) -> dict[str, Tensor]:
        return {"weight": torch.ones(len(state["weight"]), *self.grid_size)}


def test_the_norm_of_a_position_is_told_of_vectors_alone() -> None:
    for own, told in ((Offsets, "from 2 x 3 to 4 x 3"), ("learned", "from 2 x 3 to 4 x 3, norm of a position x ")):
        other = VisionTransformer(**SIZE | {"img_size": (16, 12)}, pos_embed=own)
        _, (sentence,) = resample_pos_embed(net_of(own).state_dict(), other, (2, 3), "usual")
        assert told in sentence and sentence.endswith(told) == (own is Offsets)


@pytest.mark.parametrize("size", [TRANSPOSED, LARGER])
@pytest.mark.parametrize(("own", "what"), [(Rows, "table"), (Vectors, "table"), (Apart, "bias")])
def test_what_is_for_one_grid_is_refused_at_another_also_if_that_has_as_many_patches(own, what, size) -> None:
    net, images = net_of(own), torch.zeros(1, 1, *size, dtype=torch.float64)
    told = rf"{own.__name__} cannot interpolate `{what}` to another grid: give it a `_resized_state`, or `fill_tables`"
    for given in (images, list(images)):
        with pytest.raises(UsageError, match=told):
            net(given)
    with pytest.raises(UsageError, match=told):
        net_of([own, Turns])(images)


@pytest.mark.parametrize("own", [FromCells, Fixed, Follows, OneRow, *OWN[:-1]], ids=str)
def test_what_follows_the_grid_is_used_at_another_with_as_many_patches(own) -> None:
    net, images = net_of(own), torch.randn(1, 1, *TRANSPOSED, dtype=torch.float64)
    other = VisionTransformer(**SIZE | {"img_size": TRANSPOSED}, pos_embed=own).double().eval()
    other.load_state_dict(resample_pos_embed(net.state_dict(), other, (2, 3), "usual")[0])
    torch.testing.assert_close(net(images), other(images))


def test_weights_for_the_transposed_grid_are_refused_where_they_belong_to_patches() -> None:
    saved = spec(Apart, is_saved=True)
    for own, name in ((Rows, "weight"), (Vectors, "vectors.weight"), (saved, "distance")):
        other = VisionTransformer(**SIZE | {"img_size": TRANSPOSED}, pos_embed=own)
        with pytest.raises(UsageError, match=f"cannot interpolate `{name}` to another grid"):
            resample_pos_embed(net_of(own).state_dict(), other, (2, 3), "usual")
    loaded = VisionTransformer(**SIZE | {"img_size": TRANSPOSED}, pos_embed=Apart)
    resample_pos_embed(net_of(Apart).state_dict(), loaded, (2, 3), "usual")


class OwnWords(Rows):
    """Arguments that vitlab has words for, too."""

    def __init__(self, grid_size: Grid, embed_dim: int, scale: float = 0.5, resize: str = "nearest") -> None:
        super().__init__(grid_size, embed_dim)
        self.scale, self.resize = scale, resize

    def table(self, layer: int = 0) -> Tensor:
        return self.scale * self.weight

    def _resized_state(self, state: dict[str, Tensor], old_grid: Grid, policy: str, antialias: bool):
        rows = nn.functional.interpolate(
            state["weight"].T.unflatten(1, old_grid)[None], self.grid_size, mode=self.resize
        )
        return state | {"weight": rows[0].flatten(1).T}


def test_scale_and_resize_of_a_class_that_has_them_stay_what_its_constructor_made_them() -> None:
    net, images = net_of(OwnWords), torch.randn(2, 1, *LARGER, dtype=torch.float64)
    assert torch.equal(net.pos_embed.added(), 0.5 * net.pos_embed.weight)
    assert _idle_options(net.pos_embed) == ""
    before = net(images)
    net.pos_embed_resize = "interpolate"  # as `analyze resolution` does
    assert torch.equal(net(images), before)
    assert net.pos_embed.resize == "nearest" and net.pos_embed_resize == "interpolate"
