"""The networks of the articles, from arguments, against their formulas written out.

S. J. Callis 2024, "Tokens-to-Token ViT, explained" and "Vision Transformers, explained": attention adds its values
everywhere, and its scale is that of the keys' width.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.networks import randomized
from vitlab.models import VisionTransformer

SHAPE = {"in_chans": 1, "num_classes": 1, "qkv_bias": False, "norm_eps": 1e-5, "pos_embed": "sincos1d"}
VIT = {**SHAPE, "img_size": (400, 100), "patch_size": 50, "embed_dim": 768, "depth": 12, "num_heads": 1}
T2T = {**VIT, "tokenizer": "t2t", "t2t_attn": "transformer", "value_skip": True, "t2t_qk_scale": 64**-0.5}


@pytest.mark.parametrize(("arguments", "parameters"), [(T2T, 85_619_491), (VIT, 86_950_657)])
def test_parameter_counts_are_those_of_the_articles(arguments, parameters):
    with torch.device("meta"):
        net = VisionTransformer(**arguments)
    assert sum(p.numel() for p in net.parameters() if p.requires_grad) == parameters


def norm(x, w, name):
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)


def mlp(x, w, name):
    hidden = x @ w[f"{name}.fc1.weight"].T + w[f"{name}.fc1.bias"]
    hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
    return hidden @ w[f"{name}.fc2.weight"].T + w[f"{name}.fc2.bias"]


def attention(x, w, name, heads):
    """softmax(q k^T / sqrt(d)) v, projected, plus v."""
    B, N, _ = x.shape
    q, k, v = (x @ w[f"{name}.qkv.weight"].T).reshape(B, N, 3, heads, -1).permute(2, 0, 3, 1, 4)
    d = q.shape[-1]
    scores = torch.softmax(q @ k.transpose(2, 3) / math.sqrt(d), dim=-1)
    y = (scores @ v).transpose(1, 2).reshape(B, N, -1) @ w[f"{name}.proj.weight"].T + w[f"{name}.proj.bias"]
    return v.transpose(1, 2).reshape(B, N, -1) + y


def sinusoid(count, width):
    table = torch.zeros(count, width, dtype=torch.float64)
    for i in range(count):
        for j in range(width):
            angle = i / 10_000 ** (2 * (j // 2) / width)
            table[i, j] = math.sin(angle) if j % 2 == 0 else math.cos(angle)
    return table


def backbone(tokens, w, depth, heads):
    x = torch.cat([w["cls_token"].expand(len(tokens), -1, -1), tokens], dim=1)
    table = sinusoid(x.shape[1], x.shape[2])
    x = x + torch.cat([torch.zeros_like(table[:1]), table[1:]])  # ours: row 0 is part of the class token
    for i in range(depth):
        x = x + attention(norm(x, w, f"blocks.{i}.norm1"), w, f"blocks.{i}.attn", heads)
        x = x + mlp(norm(x, w, f"blocks.{i}.norm2"), w, f"blocks.{i}.mlp")
    return norm(x, w, "norm")[:, 0] @ w["head.weight"].T + w["head.bias"]


def tokens_to_token(images, w, kernels, heads):
    x = images
    for i, k in enumerate(kernels, start=1):
        s, p = math.ceil(k / 2), math.ceil(k / 4)
        h, width = ((side + 2 * p - k) // s + 1 for side in x.shape[2:])
        x = nn.Unfold(k, stride=s, padding=p)(x).transpose(1, 2)
        if i < len(kernels):
            name = f"tokenizer.attention{i}"
            x = attention(norm(x, w, f"{name}.norm1"), w, f"{name}.attn", heads)
            x = x + mlp(norm(x, w, f"{name}.norm2"), w, f"{name}.mlp")
            x = x.transpose(1, 2).reshape(len(x), -1, h, width)
    return x @ w["tokenizer.project.weight"].T + w["tokenizer.project.bias"]


def net_of(**arguments):
    return randomized(VisionTransformer(**arguments).double(), std=0.05)


@pytest.mark.parametrize("img_size", [(60, 100), pytest.param((400, 100), marks=pytest.mark.rare)])
@pytest.mark.parametrize("heads", [1, 4])
def test_t2t_is_the_formula_of_the_article(img_size, heads):
    small = {"embed_dim": 32, "depth": 2, "num_heads": 2, "mlp_ratio": 1.5, "img_size": img_size}
    module = {"t2t_num_heads": heads, "t2t_mlp_ratio": 1.5, "t2t_qk_scale": (64 // heads) ** -0.5}
    net = net_of(**{**T2T, **small, **module})
    w, images = dict(net.named_parameters()), torch.rand(2, 1, *img_size, dtype=torch.float64)
    tokens = tokens_to_token(images, w, (7, 3, 3), heads)
    torch.testing.assert_close(net.tokenizer(images), tokens, rtol=0, atol=1e-6)
    outputs = backbone(tokens, w, depth=2, heads=2)
    assert outputs.shape == (2, 1)
    torch.testing.assert_close(net(images), outputs, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("img_size", "patch_size"), [((60, 100), 20), ((400, 100), 50)])
def test_vit_is_the_formula_of_the_article(img_size, patch_size):
    small = {"embed_dim": 32, "depth": 2, "num_heads": 1, "img_size": img_size, "patch_size": patch_size}
    net = net_of(**{**VIT, **small, "value_skip": True})
    w, images = dict(net.named_parameters()), torch.rand(2, 1, *img_size, dtype=torch.float64)
    patches = nn.Unfold(patch_size, stride=patch_size)(images).transpose(1, 2)
    tokens = patches @ w["tokenizer.proj.weight"].flatten(1).T + w["tokenizer.proj.bias"]
    torch.testing.assert_close(net(images), backbone(tokens, w, depth=2, heads=1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("pos_embed", ["learned", "relpos"])
def test_the_value_skip_of_the_last_block_is_the_class_tokens(pos_embed):
    small = {"embed_dim": 32, "depth": 2, "num_heads": 2, "img_size": (60, 100), "patch_size": 20}
    net = net_of(**{**VIT, **small, "value_skip": True, "pos_embed": pos_embed})
    images = torch.rand(2, 1, 60, 100, dtype=torch.float64)
    whole = net(images)
    net.skips_unread_tokens = True
    torch.testing.assert_close(net(images), whole, rtol=0, atol=1e-12)
