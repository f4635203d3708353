import pytest
import torch
from torch import nn

from tests.networks import randomized
from vitlab.tokenizers.token_layers import TokenAttention, TokenPerformer, TokenTransformer


def layer_norm(x, norm):
    centered = x - x.mean(-1, keepdim=True)
    return centered / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt() * norm.weight + norm.bias


def test_token_transformer_is_the_formula():
    layer = randomized(TokenTransformer(in_dim=27, dim=8)).double()
    x = torch.randn(2, 11, 27, dtype=torch.float64)
    q, k, v = (layer_norm(x, layer.norm1) @ layer.attn.qkv.weight.T).split(8, dim=-1)
    weights = (q @ k.mT * 27**-0.5).softmax(-1)  # the input's width, not the 8 of the keys
    y = v + layer.attn.proj(weights @ v)
    y = y + layer.mlp.fc2(nn.functional.gelu(layer.mlp.fc1(layer_norm(y, layer.norm2))))
    torch.testing.assert_close(layer(x), y, rtol=0, atol=1e-12)


def test_token_attention_has_the_articles_shapes_and_size():
    attention = TokenAttention(in_dim=49, dim=64)
    assert attention(torch.randn(13, 100, 49)).shape == (13, 100, 64)
    assert attention.weights(torch.randn(13, 100, 49)).shape == (13, 1, 100, 100)
    assert sum(p.numel() for p in attention.parameters()) == 9408 + 4096 + 64


def test_token_attention_weights_are_what_forward_applies():
    attention = randomized(TokenAttention(in_dim=12, dim=6))
    x = torch.randn(2, 9, 12)
    v = attention.qkv(x)[..., 12:]
    torch.testing.assert_close(attention.weights(x).sum(-1), torch.ones(2, 1, 9))
    torch.testing.assert_close(attention(x), v + attention.proj(attention.weights(x)[:, 0] @ v))


def test_token_transformer_has_the_articles_number_of_parameters():
    assert sum(p.numel() for p in TokenTransformer(49, 64).parameters()) == 22_114


def slow_performer_attention(layer, q, k, v):
    """Token by token and feature by feature."""
    w, out = layer.w.double(), torch.zeros_like(v)
    m = len(w)

    def phi(t):
        return torch.stack([torch.exp(w[i] @ t - t @ t / 2) / m**0.5 for i in range(m)])

    for b in range(len(q)):
        for n in range(q.shape[1]):
            shares = torch.stack([phi(q[b, n]) @ phi(k[b, j]) for j in range(k.shape[1])])
            out[b, n] = (shares[:, None] * v[b]).sum(0) / (shares.sum() + 1e-8)
    return out


def test_token_performer_is_the_formula_with_keys_first():
    layer = randomized(TokenPerformer(in_dim=12, dim=6)).double()
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    k, q, v = layer.kqv(layer_norm(x, layer.norm1)).split(6, dim=-1)
    y = v + layer.proj(slow_performer_attention(layer, q, k, v))
    y = y + layer.mlp[2](nn.functional.gelu(layer.mlp[0](layer_norm(y, layer.norm2))))
    torch.testing.assert_close(layer(x), y, rtol=0, atol=1e-12)


def test_performer_features_are_orthogonal_rows_frozen_and_saved():
    layer = TokenPerformer(in_dim=147, dim=64)
    torch.testing.assert_close(layer.w @ layer.w.T, 32 * torch.eye(32), rtol=0, atol=1e-4)
    assert "w" in layer.state_dict()
    assert "w" not in dict(layer.named_parameters())
    torch.manual_seed(1)
    assert not torch.equal(layer.w, TokenPerformer(147, 64).w)


def test_performer_with_gaussian_features_converges_to_softmax_attention():
    q, k, v = (torch.randn(1, 20, 64, dtype=torch.float64) * 0.1 for _ in range(3))
    v = v * 10
    exact = (q @ k.mT).softmax(-1) @ v
    errors = []
    for m in (32, 1024, 32768):
        layer = TokenPerformer(8, 64)
        layer.w = torch.randn(m, 64, dtype=torch.float64)
        errors.append((layer.attend(q, k, v) - exact).abs().max().item())
    assert errors[0] > errors[1] > errors[2]
    assert errors[1] < 0.07
    assert errors[2] < 0.012


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_performer_stays_finite_under_autocast_where_the_official_layer_is_nan(dtype):
    layer = TokenPerformer(147, 64).eval()
    with torch.no_grad():
        layer.kqv.weight *= 2
        x = torch.randn(2, 50, 147)
        k, q, v = layer.kqv(layer.norm1(x)).chunk(3, dim=-1)
        expected = layer(x)
        with torch.autocast("cpu", dtype):
            y = layer(x)
            attended = layer.attend(q.to(dtype), k.to(dtype), v.to(dtype))
    assert k.norm(dim=-1).mean() > 5
    assert y.isfinite().all()
    torch.testing.assert_close(y.float(), expected, rtol=0, atol=0.1)
    exact = layer.attend(*(t.to(dtype).float() for t in (q, k, v)))
    torch.testing.assert_close(attended, exact.to(dtype), rtol=0, atol=0)


def test_official_arithmetic_is_nan_in_float16():
    k = torch.randn(1, 50, 64) * 9 / 8
    w = TokenPerformer(147, 64).w
    features = (torch.exp(k @ w.T - k.square().sum(-1, keepdim=True) / 2) / 32**0.5).half()
    assert (features @ features.sum(1, keepdim=True).mT + torch.tensor(1e-8).half()).eq(0).any()


def test_performer_works_in_float64_and_returns_it():
    layer = TokenPerformer(12, 6).double().eval()
    x = torch.randn(1, 4, 12, dtype=torch.float64)
    assert layer(x).dtype == torch.float64
    torch.testing.assert_close(layer.float()(x.float()).double(), layer.double()(x), rtol=0, atol=1e-5)


def test_performer_drops_a_tenth_after_projection_and_mlp_in_training():
    layer, dropped = TokenPerformer(12, 8), []
    assert (layer.dropout.p, layer.mlp[3].p) == (0.1, 0.1)
    for part in (layer.dropout, layer.mlp[3]):
        part.register_forward_hook(lambda _, x, y: dropped.append((y == 0).float().mean().item()))
    x = torch.randn(1, 500, 12)
    layer(x)
    assert dropped == pytest.approx([0.1, 0.1], abs=0.02)
    assert torch.equal(layer.eval()(x), layer(x))


@pytest.mark.parametrize("layer", [TokenPerformer(9, 1 + 1), TokenTransformer(9, 1)])
def test_narrow_tokens_are_legal(layer):
    assert layer(torch.randn(1, 3, 9)).isfinite().all()


def test_a_performer_of_width_one_is_refused():
    with pytest.raises(ValueError, match="`t2t_dim` must be at least 2"):
        TokenPerformer(9, 1)
