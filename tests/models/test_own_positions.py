"""Position embeddings of one's own have each token in its place, kept, permuted or in rows, and keep its shape."""

import pytest
import torch
from torch import Tensor

from tests.models.own_positions import OWN, SIZE, ByQuery, Near, OneRow, Turns, net_of, spec
from vitlab.errors import UsageError
from vitlab.layers.pos_embed import PosEmbed
from vitlab.layers.pos_embed.biases import RelPos
from vitlab.layers.pos_embed.rotary import RoPEMixed, String
from vitlab.layers.resample import Grid
from vitlab.models import VisionTransformer
from vitlab.tasks import MAE


class Mean(PosEmbed):
    """The mean of all tokens after each block."""

    def leave(self, x: Tensor, layer: int) -> Tensor:
        return x + x.mean(dim=1, keepdim=True)


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
    task = MAE(**SIZE, pos_embed=spec(Turns), decoder_dim=16, decoder_depth=1, decoder_heads=2, mask_ratio=0.5)
    loss = task.pixel_loss(torch.randn(2, 1, 8, 12), torch.stack([torch.randperm(6) for _ in range(2)]))
    loss.backward()
    assert all(p.grad is not None for p in task.net.blocks.parameters())


def test_what_mixes_neighbors_after_a_block_cannot_leave_out_tokens() -> None:
    with pytest.raises(ValueError, match="Mean has a `leave`, which may mix neighboring tokens"):
        net_of(Mean).forward_features(torch.zeros(1, 1, 8, 12, dtype=torch.float64), keep=torch.zeros(1, 2).long())


class FirstHead(RoPEMixed):
    """A rotation of the first head alone."""

    def rotate(self, x: Tensor, layer: int) -> Tensor:
        return torch.cat([super().rotate(x, layer)[:, :1], x[:, 1:]], dim=1)


def test_a_rotation_of_ones_own_receives_queries_and_keys_apart() -> None:
    net, images = net_of(FirstHead), torch.randn(2, 1, 8, 12, dtype=torch.float64)
    found = net.forward_features(images)
    torch.testing.assert_close(found, torch.cat([masked(net, image[None], torch.arange(6)) for image in images]))
    assert RoPEMixed.rotates_stacked and String.rotates_stacked


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
    net = VisionTransformer(**SIZE, num_classes=3, pos_embed=spec(OneImageElsewhere)).eval()
    assert net(torch.randn(4, 1, 8, 12)).shape == (4, 3)
    with pytest.raises(UsageError, match=rf"OneImageElsewhere.{hook} at a grid of 3 x 3 changes .* from \(4, .*\(1, "):
        net(torch.randn(4, 1, 12, 12))


@pytest.mark.rare  # traced by dynamo
def test_hooks_that_are_checked_are_exported_with_an_open_batch() -> None:
    net = VisionTransformer(**SIZE, num_classes=3, pos_embed=spec(OneImageElsewhere)).eval()
    shapes = ({0: torch.export.Dim("batch")},)
    graph = torch.export.export(net, (torch.randn(2, 1, 8, 12),), dynamic_shapes=shapes, strict=True).module()
    images = torch.randn(5, 1, 8, 12)
    torch.testing.assert_close(graph(images), net(images))
