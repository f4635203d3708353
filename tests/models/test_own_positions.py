"""Position embeddings of one's own that know nothing of kept or permuted tokens have each token in its place."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vitlab.errors import UsageError
from vitlab.jobs.train.describe import _idle_options
from vitlab.layers.pos_embed import PosEmbed, grid_cells, resample_pos_embed
from vitlab.layers.pos_embed.added import AddedPosEmbed
from vitlab.layers.pos_embed.biases import RelPos
from vitlab.layers.pos_embed.rotary import RoPE2d, RoPEMixed, String
from vitlab.layers.resample import Grid, resize_table
from vitlab.models import VisionTransformer
from vitlab.optim import describe_groups, param_groups
from vitlab.tasks import MAE

SIZE = {"img_size": (8, 12), "in_chans": 1, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}


class Waves(PosEmbed):
    """Vectors by the number of a token."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (torch.arange(x.shape[1])[:, None] * torch.arange(1, 1 + x.shape[2])).sin()


class Enters(PosEmbed):
    """The same before each block, for prefix tokens too."""

    def enter(self, x: Tensor, layer: int) -> Tensor:
        return x + (torch.arange(x.shape[1])[:, None] * torch.arange(layer, layer + x.shape[2])).sin()


class Turns(PosEmbed):
    """A rotation of all tokens by their number."""

    def rotate(self, x: Tensor, layer: int) -> Tensor:
        angle = torch.arange(x.shape[2])[:, None] * 0.5
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1)


class Near(PosEmbed):
    """A bias by the difference of numbers, for all tokens."""

    def bias(self, layer: int) -> Tensor:
        n = torch.arange(1.0 + self.grid_size[0] * self.grid_size[1])
        return -(n[:, None] - n).square()[None] * (1 + layer)


class ByKey(PosEmbed):
    """A bias by the number of a key, one row for all queries."""

    def bias(self, layer: int) -> Tensor:
        return torch.arange(1.0 + self.grid_size[0] * self.grid_size[1]).cos()[None, None] * (1 + layer)


class ForAllHeads(Near):
    """The bias of two tokens, without the axis of heads."""

    def bias(self, layer: int) -> Tensor:
        return super().bias(layer)[0]


class ByKeyAlone(PosEmbed):
    """A bias by keys and their numbers, one row for all queries."""

    def relate(self, q: Tensor, k: Tensor, layer: int) -> Tensor:
        return k[..., :1].mT.tanh() * torch.arange(k.shape[2]).cos()


class ByQuery(PosEmbed):
    """A bias by queries, with the signature that vitlab had first."""

    def relate(self, q: Tensor, layer: int) -> Tensor:
        return q.mean(dim=-1, keepdim=True) * torch.arange(q.shape[2])


class ByBoth(PosEmbed):
    """A bias by queries, keys and numbers of both."""

    def relate(self, q: Tensor, k: Tensor, layer: int) -> Tensor:
        n = torch.arange(k.shape[2])
        return (q[..., :1] * k[..., :1].mT).tanh() * (n[:, None] - 2 * n).cos()


class Mean(PosEmbed):
    """The mean of all tokens after each block."""

    def leave(self, x: Tensor, layer: int) -> Tensor:
        return x + x.mean(dim=1, keepdim=True)


OWN = [Waves, Enters, Turns, Near, ByKey, ForAllHeads, ByKeyAlone, ByQuery, ByBoth, [Turns, Near]]


def net_of(pos_embed: object) -> VisionTransformer:
    torch.manual_seed(0)
    spec = [{"class_path": f"{__name__}.{cls.__name__}"} for cls in pos_embed] if type(pos_embed) is list else pos_embed
    return VisionTransformer(**SIZE, init_std=0.3, pos_embed=spec).double().eval()


def masked(net: VisionTransformer, image: Tensor, keep: Tensor) -> Tensor:
    """Slow and obvious: all tokens in their places, and no attention to those that are not kept."""
    tokens = torch.cat([torch.zeros(1, dtype=torch.long), keep + 1])
    hidden = torch.full((7, 7), -torch.inf).index_fill(1, tokens, 0.0)
    pos, x = net.pos_embed, net.embed(image)
    for i, block in enumerate(net.blocks):
        x, attn = pos.enter(x, i), block.attn
        q, k, v = attn.qkv(block.norm1(x)).view(1, 7, 3, 2, 8).permute(2, 0, 3, 1, 4)
        q, k = pos.rotate(q, i), pos.rotate(k, i)
        biases = (pos.bias(i), pos.relate(q * attn.qk_scale, k, i))
        logits = q @ k.mT * attn.qk_scale + sum(bias for bias in biases if bias is not None) + hidden
        x = x + attn.proj((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))
        x = x + block.mlp(block.norm2(x))
    return net.norm(x)[:, tokens]


@pytest.mark.parametrize("pos_embed", ["learned", "rope2d", "relpos", [Turns, Near]], ids=str)
def test_a_method_that_relates_no_queries_to_keys_is_not_given_scaled_ones(pos_embed: object, monkeypatch) -> None:
    monkeypatch.setattr(PosEmbed, "relate", None)
    images = torch.randn(2, 1, 8, 12, dtype=torch.float64)
    for size in ((8, 12), (12, 8)):
        assert net_of(pos_embed)(images.view(2, 1, *size)).isfinite().all()


@pytest.mark.parametrize("own", OWN, ids=str)
def test_kept_tokens_have_the_positions_of_their_cells(own: type[PosEmbed]) -> None:
    net, images = net_of(own), torch.randn(3, 1, 8, 12, dtype=torch.float64)
    keep = torch.stack([torch.randperm(6)[:4] for _ in images])
    found = net.forward_features(images, keep=keep)
    wanted = torch.cat([masked(net, images[i : i + 1], keep[i]) for i in range(3)])
    torch.testing.assert_close(found, wanted, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("own", OWN, ids=str)
def test_permuted_positions_move_with_the_tokens_and_change_without_them(own: type[PosEmbed]) -> None:
    net, images, order = net_of(own), torch.randn(2, 1, 8, 12, dtype=torch.float64), torch.tensor([3, 2, 5, 4, 1, 0])
    here = net(images)
    with net.pos_embed.permute_positions(order):
        alone = net(images)
        hook = net.tokenizer.register_forward_hook(lambda module, args, tokens: tokens[:, order])
        both = net(images)
        hook.remove()
    torch.testing.assert_close(both, here, atol=1e-9, rtol=1e-9)
    assert (alone - here).abs().max() > 1e-3


def test_a_masked_autoencoder_learns_with_a_custom_position_embedding() -> None:
    task = MAE(**SIZE, pos_embed=f"{__name__}.Turns", decoder_dim=16, decoder_depth=1, decoder_heads=2, mask_ratio=0.5)
    loss = task.pixel_loss(torch.randn(2, 1, 8, 12), torch.stack([torch.randperm(6) for _ in range(2)]))
    loss.backward()
    assert all(p.grad is not None for p in task.net.blocks.parameters())


def test_what_mixes_neighbors_after_a_block_cannot_leave_out_tokens() -> None:
    with pytest.raises(ValueError, match="Mean has a `leave`, which may mix neighboring tokens"):
        net_of(Mean).forward_features(torch.zeros(1, 1, 8, 12, dtype=torch.float64), keep=torch.zeros(1, 2).long())


class Vectors(AddedPosEmbed):
    """A table of vectors, frozen where it is built, in a part of the module."""

    def __init__(self, grid_size: Grid, embed_dim: int, scale: float = 1.0, depth: int = 1) -> None:
        super().__init__(grid_size)
        self.factor, self.depth = scale, depth
        self.vectors = nn.Embedding(grid_size[0] * grid_size[1], embed_dim).requires_grad_(False)

    def table(self, layer: int = 0) -> Tensor:
        return self.factor * self.vectors(torch.arange(self.grid_size[0] * self.grid_size[1]))


class Resized(Vectors):
    def _resized_state(self, state: dict[str, Tensor], old_grid: Grid, policy: str, antialias: bool):
        table = resize_table(state["vectors.weight"][None], old_grid, self.grid_size, antialias)
        return state | {"vectors.weight": table[0]}


class Fixed(AddedPosEmbed):
    """A table that nothing trains."""

    def table(self, layer: int = 0) -> Tensor:
        return torch.ones(self.grid_size[0] * self.grid_size[1], 16)


class Short(AddedPosEmbed):
    """A table for one grid."""

    def table(self, layer: int = 0) -> Tensor:
        return torch.ones(6, 16)


class Gains(AddedPosEmbed):
    """One table, which is no slice for each block."""

    def __init__(self, grid_size: Grid, embed_dim: int, join: str = "every_layer") -> None:
        super().__init__(grid_size, join)
        self.weight = nn.Parameter(torch.ones(grid_size[0] * grid_size[1], embed_dim))


class FirstHead(RoPEMixed):
    """A rotation of the first head alone."""

    def rotate(self, x: Tensor, layer: int) -> Tensor:
        return torch.cat([super().rotate(x, layer)[:, :1], x[:, 1:]], dim=1)


def spec(cls: type[PosEmbed], **args: object) -> dict[str, object]:
    return {"class_path": f"{__name__}.{cls.__name__}", "init_args": args}


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


def test_a_rotation_of_ones_own_receives_queries_and_keys_apart() -> None:
    net, images = net_of(FirstHead), torch.randn(2, 1, 8, 12, dtype=torch.float64)
    found = net.forward_features(images)
    torch.testing.assert_close(found, torch.cat([masked(net, image[None], torch.arange(6)) for image in images]))
    assert RoPEMixed.rotates_stacked and String.rotates_stacked


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


class OneRow(AddedPosEmbed):
    """A number of rows of one's own."""

    policies = ()

    def __init__(self, grid_size: Grid, embed_dim: int, *rows: int, join: str = "stem") -> None:
        super().__init__(grid_size, join)
        self.shape = (*(rows or [1]), embed_dim)

    def table(self, layer: int = 0) -> Tensor:
        return torch.ones(self.shape)


@pytest.mark.parametrize("join", ["stem", "every_layer"])
def test_a_table_has_a_row_for_each_patch_or_one_for_all(join: str) -> None:
    x = torch.zeros(2, 1 + 6, 4)
    added = OneRow((2, 3), 4, join=join)
    for method in (added, added.kept(torch.tensor([[0, 5], [1, 2]]))):
        N = 6 if method is added else 2
        patches = method(x[:, 1 : 1 + N]) if join == "stem" else method.enter(x[:, : 1 + N], 0)[:, 1:]
        assert (patches == 1).all() and not method.enter(x, 0)[:, 0].any()
    assert added.added().shape == (6, 4)  # for analyses and exports, too
    rule = r"`table` of OneRow must return \(N, {}\), a vector for each of the 6 patches or one for all, got \({}\)"
    for wrong, text in (
        (OneRow((2, 3), 4, 5, join=join), ("D", "5, 4")),
        (OneRow((2, 3), 4, 1, 6, join=join), ("D", "1, 6, 4")),  # as timm stores it
        (OneRow((2, 3), 4, 2, 6, join=join), ("D", "2, 6, 4")),  # which would broadcast over a batch of two
        (OneRow((2, 3), 1, 6, join=join), ("4", "6, 1")),  # and this over channels
    ):
        with pytest.raises(UsageError, match=rule.format(*text)):
            _ = wrong(x[:, 1:]) if join == "stem" else wrong.enter(x, 0)


class Relates:
    """Hooks of a mixin, which is no position embedding itself."""

    def relate(self, q: Tensor, layer: int) -> Tensor:
        return ByQuery.relate(self, q, None, layer)  # type: ignore[call-arg, arg-type]


class Rotates:
    def rotate(self, x: Tensor, layer: int) -> Tensor:
        return Turns.rotate(self, x, layer)  # type: ignore[arg-type]


class Mixed(Relates, PosEmbed):
    pass


class MixedAgain(Mixed):
    pass


class Turned(Rotates, RoPEMixed):
    pass


def test_hooks_of_a_mixin_act_as_those_of_the_class() -> None:
    images = torch.randn(2, 1, 8, 12, dtype=torch.float64)
    for cls in (Mixed, MixedAgain):
        torch.testing.assert_close(net_of(cls)(images), net_of(ByQuery)(images))
        assert cls.relates and (net_of(cls)(images) - net_of("none")(images)).abs().max() > 1e-3
    assert RoPEMixed.rotates_stacked and not Turned.rotates_stacked


class Halves:
    """Hooks of a mixin that change the shape: by one channel, or by one head for all."""

    rotates_stacked = True

    def enter(self, x: Tensor, layer: int) -> Tensor:
        return x[..., :1]

    def rotate(self, x: Tensor, layer: int) -> Tensor:
        return x.mean(dim=-3, keepdim=True)


class Halved(Halves, PosEmbed):
    pass


class HalvedAgain(Halved):
    pass


class Doubles(Halves):
    def rotate(self, x: Tensor, layer: int) -> Tensor:
        return 2 * x


class Doubled(Halved, Doubles):
    """Of whose bases the second defines the rotation, as it comes before `Halves`."""


@pytest.mark.parametrize("cls", [Halved, HalvedAgain, Doubled])
def test_hooks_of_a_mixin_must_keep_the_shape_of_their_tensor(cls: type[PosEmbed]) -> None:
    method, q = cls((2, 3)), torch.randn(2, 2, 7, 4)
    with pytest.raises(UsageError, match=rf"{cls.__name__}.enter at a grid of 2 x 3 changes the tokens from \(2, 7, 4"):
        method.enter(torch.randn(2, 7, 4), 0)
    if cls is Doubled:
        assert torch.equal(method.rotate(q, 0), 2 * q) and not cls.rotates_stacked
        return
    with pytest.raises(UsageError, match=rf"{cls.__name__}.rotate at .* changes the queries or keys"):
        method.rotate(q, 0)
    assert cls.rotates_stacked  # as the mixin says


class Leaves(RelPos):
    def leave(self, x: Tensor, layer: int) -> Tensor:
        return x


class AllRows(RelPos):
    def bias(self, layer: int) -> Tensor:
        return 2 * super().bias(layer)


class LeavesAllRows(Leaves, AllRows):
    """Of whose bases the second defines the bias, and does not say that it gives some rows."""


def test_a_class_of_two_methods_gives_the_rows_that_the_one_with_the_bias_gives() -> None:
    assert Leaves.splits_queries and not AllRows.splits_queries and not LeavesAllRows.splits_queries


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


TRANSPOSED, LARGER = (12, 8), (12, 16)


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
        net_of({"class_path": f"{__name__}.Beside", "init_args": {"kind": kind}})


@pytest.mark.parametrize("kind", ["a second name", "constants", "a computed one"])
def test_second_names_constants_and_what_is_computed_may_stand_outside_of_the_state_dict(kind: str) -> None:
    net_of({"class_path": f"{__name__}.Beside", "init_args": {"kind": kind}})


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
            net_of({"class_path": f"{__name__}.Early", "init_args": {"early": early}})
    told = rf"`pos_embed`: {__name__}.Early cannot be built: .*test_own_positions.py, line .*no attribute 'grid_sise'"
    with pytest.raises(ValueError, match=told):
        net_of({"class_path": f"{__name__}.Early", "init_args": {"early": "misspelt"}})


class OneImageElsewhere(PosEmbed):
    """Drop the batch at every grid but the first: the sum with what other images give would broadcast."""

    hook = "forward"

    def __init__(self, grid_size: Grid) -> None:
        super().__init__(grid_size)
        self.first = grid_size

    def _act(self, x: Tensor) -> Tensor:
        return x if self.grid_size == self.first else x[:1]

    def forward(self, x: Tensor) -> Tensor:
        return self._act(x) if self.hook == "forward" else x

    def enter(self, x: Tensor, layer: int) -> Tensor:
        return self._act(x) if self.hook == "enter" else x

    def rotate(self, x: Tensor, layer: int) -> Tensor:
        return self._act(x) if self.hook == "rotate" else x

    def leave(self, x: Tensor, layer: int) -> Tensor:
        return self._act(x) if self.hook == "leave" else x


@pytest.mark.parametrize("hook", ["forward", "enter", "rotate", "leave"])
def test_a_hook_that_changes_a_shape_at_the_second_size_alone_is_refused(hook: str, monkeypatch) -> None:
    monkeypatch.setattr(OneImageElsewhere, "hook", hook)
    net = VisionTransformer(**SIZE, num_classes=3, pos_embed=f"{__name__}.OneImageElsewhere").eval()
    assert net(torch.randn(4, 1, 8, 12)).shape == (4, 3)
    with pytest.raises(UsageError, match=rf"OneImageElsewhere.{hook} at a grid of 3 x 3 changes .* from \(4, .*\(1, "):
        net(torch.randn(4, 1, 12, 12))


@pytest.mark.rare  # traced by dynamo
def test_hooks_that_are_checked_are_exported_with_an_open_batch() -> None:
    net = VisionTransformer(**SIZE, num_classes=3, pos_embed=f"{__name__}.OneImageElsewhere").eval()
    shapes = ({0: torch.export.Dim("batch")},)
    graph = torch.export.export(net, (torch.randn(2, 1, 8, 12),), dynamic_shapes=shapes, strict=True).module()
    images = torch.randn(5, 1, 8, 12)
    torch.testing.assert_close(graph(images), net(images))
