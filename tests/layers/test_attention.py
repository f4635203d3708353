import inspect
from functools import partial

import pytest
import torch
from timm.layers import AttentionPoolLatent
from torch import nn

from vitlab.layers.attention import Attention
from vitlab.layers.block import Block
from vitlab.layers.norm import build_norm
from vitlab.layers.pool import AttentionPool
from vitlab.layers.pos_embed import PosEmbed, build_pos_embed


class RandomBias(PosEmbed):
    def bias(self, layer):
        return torch.randn(2, 5, 5, generator=torch.Generator().manual_seed(layer), dtype=torch.float64)


def slow_attention(attn, x, bias=0.0):
    """Head by head and query by query; qkv is laid out (qkv, head, channel)."""
    B, L, D = x.shape
    d = D // attn.num_heads
    qkv = attn.qkv(x).view(B, L, 3, attn.num_heads, d)
    out = torch.zeros(B, L, attn.num_heads, d, dtype=x.dtype)
    for b in range(B):
        for a in range(attn.num_heads):
            for i in range(L):
                q, k, v = qkv[b, i, 0, a], qkv[b, :, 1, a], qkv[b, :, 2, a]
                logits = (k @ q) / d**0.5 + (bias[a, i] if torch.is_tensor(bias) else bias)
                out[b, i, a] = logits.exp() / logits.exp().sum() @ v
    return attn.proj(out.flatten(2))


@pytest.mark.parametrize("qkv_bias", [True, False])
def test_attention_is_the_explicit_product(qkv_bias):
    attn = Attention(dim=8, num_heads=2, qkv_bias=qkv_bias).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    y = attn(x, PosEmbed(), 0)
    torch.testing.assert_close(y, slow_attention(attn, x), rtol=0, atol=1e-12)
    assert (y[:, 0] - y[:, 1]).abs().max() > 1e-3  # two queries get two answers


def test_a_position_bias_is_added_after_the_scale():
    attn = Attention(dim=8, num_heads=2).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    for layer in (0, 1):
        expected = slow_attention(attn, x, RandomBias().bias(layer))
        torch.testing.assert_close(attn(x, RandomBias(), layer), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("pos_embed", ["none", "relpos", "rope2d", "rope_mixed", "alibi2d"])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_weights_are_what_forward_applies_and_their_rows_sum_to_one(pos_embed, qk_norm):
    position = build_pos_embed(pos_embed, (2, 3), 16, 2, 2, 1)
    attn = Attention(dim=16, num_heads=2, qk_norm=qk_norm)
    x = torch.randn(2, 7, 16)
    weights = attn.weights(x, position, 1)
    assert weights.shape == (2, 2, 7, 7)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 7))
    torch.testing.assert_close(attn.logits(x, position, 1).softmax(-1), weights)
    v = attn.qkv(x)[..., 32:].unflatten(2, (2, 8)).transpose(1, 2)
    expected = attn.proj((weights @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attn(x, position, 1), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("pos_embed", ["none", "relpos", "rope2d", "rope_mixed", "alibi2d"])
def test_a_query_meets_the_keys_of_other_tokens_as_if_among_them(pos_embed):
    position, attn = build_pos_embed(pos_embed, (2, 3), 16, 2, 2, 1), Attention(dim=16, num_heads=2)
    x, others = torch.randn(2, 2, 7, 16)
    logits = attn.logits(x, position, 1, keys=others)
    for i in range(7):
        among = others.clone()
        among[:, i] = x[:, i]
        expected, elsewhere = attn.logits(among, position, 1)[:, :, i], torch.arange(7) != i
        torch.testing.assert_close(logits[:, :, i, elsewhere], expected[:, :, elsewhere], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(attn.logits(x, position, 1, keys=x), attn.logits(x, position, 1))


class Turned(Attention):
    """Two maps of each head: one of its queries as they are, one of the negative ones."""

    def weigh(self, q, k, pos_embed, layer):
        plain, turned = super().weigh(q, k, pos_embed, layer), super().weigh(-q, k, pos_embed, layer)
        return torch.cat([plain, turned], dim=1)


class Unscored(Attention):
    def weigh(self, q, k, pos_embed, layer):
        return (q @ k.mT).relu()


def test_logits_are_what_a_weigh_of_ones_own_makes_weights_of():
    attn, x = Turned(dim=16, num_heads=2), torch.randn(2, 5, 16)
    logits = attn.logits(x, PosEmbed(), 0)
    torch.testing.assert_close(logits.softmax(-1), attn.weights(x, PosEmbed(), 0))
    torch.testing.assert_close(logits[:, 2:], -logits[:, :2])
    assert "score" not in vars(attn)
    with pytest.raises(ValueError, match="the logits of Unscored are not known, as its `weigh` does not call"):
        Unscored(dim=16, num_heads=2).logits(x, PosEmbed(), 0)


def test_a_gate_scales_each_channel_by_the_mean_of_the_projected_tokens():
    attn, x = Attention(dim=8, num_heads=2, se_reduction=4), torch.randn(2, 5, 8)
    plain = Attention(dim=8, num_heads=2)
    plain.load_state_dict({k: v for k, v in attn.state_dict().items() if not k.startswith("se_layer")})
    y = plain(x, PosEmbed(), 0)
    narrow = torch.relu(y.mean(1) @ attn.se_layer.fc[0].weight.T)  # (B, 2)
    gate = torch.sigmoid(narrow @ attn.se_layer.fc[2].weight.T)[:, None]
    torch.testing.assert_close(attn(x, PosEmbed(), 0), y * gate)


@pytest.mark.parametrize("reduction", [-1, 9])
def test_a_gate_has_at_least_one_channel(reduction):
    with pytest.raises(ValueError, match=f"`se_reduction` must be from 1 to `embed_dim`, got {reduction} and 8"):
        Attention(dim=8, num_heads=2, se_reduction=reduction)


def test_attention_is_that_of_torch():
    attn = Attention(dim=8, num_heads=4)
    theirs = nn.MultiheadAttention(8, 4, batch_first=True)
    theirs.load_state_dict(
        {
            "in_proj_weight": attn.qkv.weight,
            "in_proj_bias": attn.qkv.bias,
            "out_proj.weight": attn.proj.weight,
            "out_proj.bias": attn.proj.bias,
        }
    )
    x = torch.randn(2, 5, 8)
    y, weights = theirs(x, x, x, average_attn_weights=False)
    torch.testing.assert_close(attn(x, PosEmbed(), 0), y)
    torch.testing.assert_close(attn.weights(x, PosEmbed(), 0), weights)


def test_attention_has_the_articles_shapes():
    attn = Attention(dim=64, num_heads=4)
    x = torch.randn(13, 100, 64)
    assert attn.weights(x, PosEmbed(), 0).shape == (13, 4, 100, 100)
    assert attn(x, PosEmbed(), 0).shape == (13, 100, 64)


def test_a_scale_of_zero_is_not_none_and_attends_uniformly():
    attn = Attention(dim=8, num_heads=2, qk_scale=0.0)
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(attn.weights(x, PosEmbed(), 0), torch.full((2, 2, 5, 5), 1 / 5))
    uniform = attn.proj(attn.qkv(x)[..., 16:].mean(1, keepdim=True)).expand(2, 5, 8)
    torch.testing.assert_close(attn(x, PosEmbed(), 0), uniform)


def test_the_scale_is_of_the_heads_width_unless_given():
    assert Attention(dim=64, num_heads=4).qk_scale == 0.25
    assert Attention(dim=64, num_heads=4, qk_scale=0.5).qk_scale == 0.5


def test_permuted_tokens_give_permuted_outputs():
    Q, K, V = article_integers()
    order = torch.tensor([2, 1, 0, 3])
    A, swapped = Q @ K.T, Q[order] @ K[order].T
    assert A.tolist() == [[1111, 1014, 895, 1003], [1030, 876, 968, 984], [875, 667, 849, 832], [1200, 1098, 966, 964]]
    assert (A @ V)[:, 0].tolist() == [43995, 41846, 35300, 45378]
    assert torch.equal(swapped, A[order][:, order])
    assert torch.equal(swapped @ V[order], (A @ V)[order])
    attn = Attention(dim=8, num_heads=2)
    x = torch.randn(1, 4, 8)
    torch.testing.assert_close(attn(x[:, order], PosEmbed(), 0), attn(x, PosEmbed(), 0)[:, order])


def article_integers():
    import numpy as np

    generator = np.random.RandomState(21)
    return (torch.tensor(generator.randint(1, 20, (4, 9))) for _ in range(3))


@pytest.mark.parametrize("num_heads", [3, 0, 16])
def test_heads_that_do_not_divide_the_width_are_refused(num_heads):
    with pytest.raises(ValueError, match=f"`num_heads` must divide `embed_dim`, got num_heads={num_heads} and embed_d"):
        Attention(dim=8, num_heads=num_heads)


def test_attention_runs_under_autocast_with_normalized_queries_and_a_bias():
    attn = Attention(dim=8, num_heads=2, qk_norm=True)
    x = torch.randn(2, 5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y = attn(x, RandomBias(), 0)
    torch.testing.assert_close(y.float(), attn(x, RandomBias(), 0), rtol=0, atol=0.02)


def test_attention_pool_is_timms():
    theirs = AttentionPoolLatent(16, num_heads=2, norm_layer=partial(nn.LayerNorm, eps=1e-6))
    ours = AttentionPool(16, num_heads=2)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    ours.load_state_dict({name: torch.randn_like(value) for name, value in theirs.state_dict().items()})
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(3, 7, 16)
    torch.testing.assert_close(ours(x), theirs(x))


def test_attention_pool_reads_every_token_and_no_order():
    pool = AttentionPool(16, num_heads=2)
    x = torch.randn(1, 7, 16, requires_grad=True)
    torch.testing.assert_close(pool(x.flip(1)), pool(x))
    pool(x).sum().backward()
    assert x.grad.abs().sum(-1).min() > 0


def test_rmsnorm_is_the_formula():
    x = torch.randn(2, 3, 8)
    norm = build_norm("rmsnorm", 8, 0.1)
    torch.testing.assert_close(norm(x), x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt())


@pytest.mark.parametrize("cls", [Attention, Block, AttentionPool])
def test_arguments_other_than_width_and_heads_are_given_by_name(cls):
    with pytest.raises(TypeError, match="positional arguments"):
        cls(16, 2, True)
    names = [p.name for p in inspect.signature(cls).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert names == ["dim", "num_heads"]
