"""STRING, FIRE and ViT's relative vectors against the formulas of their papers, written out."""

import math

import pytest
import torch
from torch import nn

from vitlab.jobs.train.describe import _model_line
from vitlab.layers.attention import Attention
from vitlab.layers.pos_embed.biases import Fire, RelPos1d
from vitlab.layers.pos_embed.rotary import RoPEMixed, String
from vitlab.models import VisionTransformer
from vitlab.tasks import Classifier


def test_fire_is_the_papers_function_of_a_distance_where_keys_lie_before_the_query():
    fire = Fire((1, 9), num_heads=2, threshold=5.0).double()
    f, c, T = fire.mlp, fire.c.item(), 5.0
    bias = fire.biases(0)
    for i in range(4, 9):  # no key behind these is farther than the first
        for j in range(i + 1):
            x = math.log(c * (i - j) + 1) / math.log(c * max(T, i) + 1)
            torch.testing.assert_close(bias[:, i, j], f(torch.tensor([0.0, x], dtype=torch.float64)))


def test_fire_knows_rows_from_columns_and_a_grid_beyond_the_trained_one_stays_bounded():
    fire = Fire((3, 4), num_heads=1, num_prefix_tokens=1)
    seen = []
    fire.mlp.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    large = fire.at((30, 40)).bias(0)
    assert large.shape == (1, 1201, 1201) and seen[-1].abs().max().item() == pytest.approx(1.0)
    bias = fire.bias(0)
    assert bias[0, 0].abs().max() == bias[0, :, 0].abs().max() == 0
    assert not torch.allclose(bias[0, 1, 2], bias[0, 1, 5]) and not torch.allclose(bias[0, 1, 2], bias[0, 2, 1])


def test_vits_relative_logits_are_products_of_queries_and_vectors_of_offsets():
    relative, attn = RelPos1d((2, 2), head_dim=4, num_prefix_tokens=1), Attention(8, num_heads=2)
    nn.init.normal_(relative.keys)
    x = torch.randn(1, 5, 8)
    q, k, _ = attn.qkv(x).unflatten(2, (3, 2, 4)).unbind(2)
    logits = attn.logits(x, relative, layer=0)
    for head in range(2):
        for i in range(5):
            for j in range(5):
                key = k[0, j, head]
                if i and j:
                    key = key + relative.keys[0, (i - 1) - (j - 1) + 3]
                expected = (q[0, i, head] @ key) / math.sqrt(4)
                torch.testing.assert_close(logits[0, head, i, j], expected)


def test_string_is_the_exponential_of_commuting_generators():
    string = String((2, 3), head_dim=8, num_heads=2, num_prefix_tokens=1).double()
    nn.init.normal_(string.skew, std=0.5)
    x = torch.randn(1, 2, 7, 8, dtype=torch.float64)
    turned = string.rotate(x, layer=0)
    for head in range(2):
        P = string.channels(0)[head]
        torch.testing.assert_close(P @ P.T, torch.eye(8, dtype=torch.float64))
        generators = []
        for freqs in string.freqs[:, 0, head]:  # of x, of y
            turns = [torch.tensor([[0.0, -w.item()], [w.item(), 0.0]], dtype=torch.float64) for w in freqs]
            generators.append(P @ torch.block_diag(*turns) @ P.T)
        gx, gy = generators
        torch.testing.assert_close(gx @ gy, gy @ gx)
        for token, (row, column) in enumerate([(0, 0), (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]):
            R = torch.matrix_exp(column * gx + row * gy)
            torch.testing.assert_close(turned[0, head, token], R @ x[0, head, token])


def test_a_new_string_is_rope_mixed():
    torch.manual_seed(0)
    string = String((2, 3), head_dim=8, num_heads=2)
    torch.manual_seed(0)
    mixed, x = RoPEMixed((2, 3), head_dim=8, num_heads=2), torch.randn(1, 2, 6, 8)
    torch.testing.assert_close(string.rotate(x, 0), mixed.rotate(x, 0))


@pytest.mark.parametrize("option", [{"c": 0.0}, {"threshold": -1.0}, {"hidden": 0}])
def test_fire_refuses_what_cannot_be(option):
    with pytest.raises(ValueError, match="must be above 0 for fire"):
        Fire((2, 2), num_heads=1, **option)


@pytest.mark.rare
@pytest.mark.parametrize("name", ["cpb", "liere", "string", "fire", "relpos1d"])
def test_methods_are_compiled_whole_and_exported_for_any_batch(name):
    size = {"img_size": (16, 24), "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 3}
    net = VisionTransformer(pos_embed=name, **size).eval()
    images = torch.randn(3, 3, 16, 24)
    with torch.no_grad():
        expected = net(images)
        torch.testing.assert_close(torch.compile(net, fullgraph=True, backend="aot_eager")(images), expected)
        batch = {"images": {0: torch.export.Dim("batch", min=1, max=8)}}
        exported = torch.export.export(net, (images[:2],), dynamic_shapes=batch).module()
        torch.testing.assert_close(exported(images), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("name", "ruled_out"), [("relpos1d", True), ("fire", True), ("string", False)])
def test_the_header_says_what_rules_out_flash_kernels(name, ruled_out):
    size = {"img_size": 8, "in_chans": 1, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}
    line = _model_line(Classifier(num_classes=3, pos_embed=name, **size), {"parameters": 1, "macs": 1})
    assert ("rules out flash kernels" in line) == ruled_out
