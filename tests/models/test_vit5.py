"""ViT-5, Wang et al. 2026 (arXiv:2602.08071), written out from the authors' description and names of weights."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vitlab.layers.attention import Attention
from vitlab.layers.kernels import products, sdpa
from vitlab.layers.pos_embed import PosEmbed
from vitlab.models import SIZES, create_model

D, HEADS, DEPTH, CLASSES = 16, 2, 2, 5
SMALL = {"embed_dim": D, "depth": DEPTH, "num_heads": HEADS, "num_classes": CLASSES, "img_size": 48}


def official():
    """Weights by the authors' names: 3 x 3 patches and four registers, which stand last in their code."""
    g = torch.Generator().manual_seed(0)
    shapes = {"cls_token": (1, 1, D), "reg_token": (1, 4, D), "pos_embed": (1, 9, D)}
    shapes |= {"patch_embed.proj.weight": (D, 3, 16, 16), "patch_embed.proj.bias": (D,), "norm.weight": (D,)}
    shapes |= {"head.weight": (CLASSES, D), "head.bias": (CLASSES,)}
    for i in range(DEPTH):
        block = {"norm1.weight": (D,), "norm2.weight": (D,), "gamma_1": (D,), "gamma_2": (D,)}
        block |= {"attn.qkv.weight": (3 * D, D), "attn.proj.weight": (D, D), "attn.proj.bias": (D,)}
        block |= {f"attn.{x}_norm.weight": (D // HEADS,) for x in "qk"}
        block |= {f"attn.rope{x}.freqs": (D // HEADS // 4,) for x in ("", "_reg")}
        block |= {"mlp.fc1.weight": (4 * D, D), "mlp.fc1.bias": (4 * D,)}
        block |= {"mlp.fc2.weight": (D, 4 * D), "mlp.fc2.bias": (D,)}
        shapes |= {f"blocks.{i}.{name}": shape for name, shape in block.items()}
    return {name: torch.randn(shape, generator=g, dtype=torch.float64) * 0.3 for name, shape in shapes.items()}


def rms(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turned(x, row, column, theta):
    """Turn neighboring channels of one head: the first half with the row, the second with the column."""
    x, quarter = x.clone(), len(x) // 4
    for i in range(2 * quarter):
        angle = (row if i < quarter else column) * theta ** (-(i % quarter) / quarter)
        a, b = x[2 * i].clone(), x[2 * i + 1].clone()
        x[2 * i] = a * math.cos(angle) - b * math.sin(angle)
        x[2 * i + 1] = b * math.cos(angle) + a * math.sin(angle)
    return x


def formula(images, w):
    patches = F.conv2d(images, w["patch_embed.proj.weight"], w["patch_embed.proj.bias"], stride=16)
    x = patches.flatten(2).transpose(1, 2)[0] + w["pos_embed"][0]
    x = torch.cat([w["cls_token"][0], x, w["reg_token"][0]])
    places = [None, *((i // 3, i % 3, 1e4) for i in range(9)), *((i // 2, i % 2, 100.0) for i in range(4))]
    for i in range(DEPTH):
        b = {name.removeprefix(f"blocks.{i}."): value for name, value in w.items() if name.startswith(f"blocks.{i}.")}
        q, k, v = (rms(x, b["norm1.weight"]) @ b["attn.qkv.weight"].T).view(-1, 3, HEADS, D // HEADS).unbind(1)
        q, k = rms(q, b["attn.q_norm.weight"]), rms(k, b["attn.k_norm.weight"])
        for token, place in enumerate(places):
            for head in range(HEADS if place else 0):
                q[token, head], k[token, head] = turned(q[token, head], *place), turned(k[token, head], *place)
        y = torch.stack(
            [(q[:, a] @ k[:, a].T / math.sqrt(D // HEADS)).softmax(-1) @ v[:, a] for a in range(HEADS)], dim=1
        ).flatten(1)
        x = x + b["gamma_1"] * (y @ b["attn.proj.weight"].T + b["attn.proj.bias"])
        hidden = F.gelu(rms(x, b["norm2.weight"]) @ b["mlp.fc1.weight"].T + b["mlp.fc1.bias"])
        x = x + b["gamma_2"] * (hidden @ b["mlp.fc2.weight"].T + b["mlp.fc2.bias"])
    return rms(x, w["norm.weight"])[0] @ w["head.weight"].T + w["head.bias"]


def test_vit5_is_its_formula_with_the_authors_weights(tmp_path):
    torch.save(official(), tmp_path / "vit5.pth")
    net = create_model("vit5_s16", weights=tmp_path / "vit5.pth", **SMALL).double().eval()
    images = torch.randn(1, 3, 48, 48, dtype=torch.float64)
    with torch.no_grad():
        expected = formula(images, official())
        torch.testing.assert_close(net(images)[0], expected, rtol=0, atol=1e-5)
        net.skips_unread_tokens = True
        torch.testing.assert_close(net(images)[0], expected, rtol=0, atol=1e-5)
    assert net.blocks[0].ls1.gamma.shape == (D,) and SIZES["vit5_s16"]["layer_scale"] == 1e-4


def test_a_gate_scales_what_attention_returns_channel_by_channel():
    attention, x = Attention(8, num_heads=2, attn_gate=True), torch.randn(2, 5, 8)
    y = attention(x, PosEmbed(), layer=0)
    q, k, v = attention.qkv(x).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    mixed = products(q, k, v, None, 0.5).transpose(1, 2).flatten(2)
    torch.testing.assert_close(y, attention.proj(mixed * attention.gate(x).sigmoid()))
    torch.testing.assert_close(attention(x, PosEmbed(), layer=0, first_only=True), y[:, :1])


class Weighing(Attention):
    """Weights of its own, which no kernel knows."""

    def weigh(self, q, k, pos_embed, layer):
        return super().weigh(-q, k, pos_embed, layer)


@pytest.mark.parametrize(("cls", "kernel"), [(Attention, products), (Attention, sdpa), (Weighing, products)])
def test_dropped_weights_of_attention_keep_their_mean_in_training_alone(cls, kernel):
    attention, x = cls(8, num_heads=2, attn_dropout=0.5), torch.randn(1, 5, 8)
    attention.kernel = kernel
    nn.init.zeros_(attention.proj.bias)
    with torch.no_grad():
        expected = attention.eval()(x, PosEmbed(), layer=0)
        drawn = attention.train()(x.expand(4000, -1, -1), PosEmbed(), layer=0)
    assert drawn.std(0).max() > 0.01
    torch.testing.assert_close(drawn.mean(0), expected[0], rtol=0, atol=0.05)
