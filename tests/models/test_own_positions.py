"""Position embeddings of one's own that know nothing of kept or permuted tokens have each token in its place."""

import pytest
import torch
from torch import Tensor

from vitlab.layers.pos_embed import PosEmbed
from vitlab.models import VisionTransformer
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


OWN = [Waves, Enters, Turns, Near, ByQuery, ByBoth, [Turns, Near]]


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
    with pytest.raises(ValueError, match="Mean mixes neighboring tokens"):
        net_of(Mean).forward_features(torch.zeros(1, 1, 8, 12, dtype=torch.float64), keep=torch.zeros(1, 2).long())
