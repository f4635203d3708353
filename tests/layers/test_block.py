import math
from functools import partial

import pytest
import torch
from timm.models.vision_transformer import Block as TimmBlock
from torch import nn

from tests.networks import randomized
from vitlab.layers.block import Block, LayerScale
from vitlab.layers.drop_path import DropPath
from vitlab.layers.mlp import Mlp, build_act
from vitlab.layers.pos_embed import PosEmbed


class Recorder(PosEmbed):
    def __init__(self):
        super().__init__()
        self.calls = []

    def enter(self, x, layer):
        self.calls.append(("enter", layer, tuple(x.shape)))
        return x + 1

    def leave(self, x, layer):
        self.calls.append(("leave", layer, tuple(x.shape)))
        return x * 2


def test_whole_numbers_start_the_scales_of_channels():
    assert LayerScale(3, layer_scale=1)(torch.ones(1, 3)).tolist() == [[1.0, 1.0, 1.0]]


def test_block_is_timms_and_adds_no_values():
    ours = randomized(Block(dim=8, num_heads=2, mlp_ratio=1.5), 0.5)
    theirs = TimmBlock(dim=8, num_heads=2, mlp_ratio=1.5, qkv_bias=True, norm_layer=partial(nn.LayerNorm, eps=1e-6))
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(ours(x, PosEmbed(), 0), theirs(x), rtol=1e-5, atol=1e-5)


def test_block_is_a_pre_norm_residual_block():
    block = randomized(Block(dim=8, num_heads=2, layer_scale=0.3), 0.5)
    x = torch.randn(2, 5, 8)
    y = x + block.ls1.gamma * block.attn(block.norm1(x), PosEmbed(), 0)
    y = y + block.ls2.gamma * block.mlp(block.norm2(y))
    torch.testing.assert_close(block(x, PosEmbed(), 0), y)


def test_block_asks_the_position_embedding_before_and_after():
    block, recorder = Block(dim=8, num_heads=2), Recorder()
    x = torch.randn(2, 5, 8)
    y = block(x, recorder, 3)
    assert recorder.calls == [("enter", 3, (2, 5, 8)), ("leave", 3, (2, 5, 8))]
    torch.testing.assert_close(y, 2 * block(x + 1, PosEmbed(), 3))


def test_block_does_not_change_its_input():
    block, x = Block(dim=8, num_heads=2), torch.randn(2, 5, 8)
    before = x.clone()
    block(x, PosEmbed(), 0)
    assert torch.equal(x, before)


def test_mlp_keeps_the_width_and_has_the_hidden_one_asked_for():
    assert Mlp(8).fc1.out_features == 8
    assert Block(dim=768, num_heads=1, mlp_ratio=1.5).mlp.fc1.out_features == 1152
    mlp, x = Mlp(8, 5), torch.randn(2, 3, 8)
    assert torch.equal(mlp(x), mlp.fc2(nn.functional.gelu(mlp.fc1(x))))


def test_mlp_drops_after_both_layers():
    mlp = Mlp(8, 6, dropout=0.5)
    drops = []
    mlp.dropout.register_forward_hook(lambda _, x, y: drops.append(tuple(x[0].shape)))
    mlp(torch.randn(2, 3, 8))
    assert drops == [(2, 3, 6), (2, 3, 8)]


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("gelu", lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5))),
        ("gelu_tanh", lambda x: x * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))),
        ("relu", lambda x: x.clamp(min=0)),
        ("silu", lambda x: x / (1 + torch.exp(-x))),
    ],
)
def test_activations_are_their_formulas(name, function):
    x = torch.linspace(-4, 4, 101, dtype=torch.float64)
    torch.testing.assert_close(build_act(name, 4)(x), function(x), rtol=0, atol=1e-12)


def test_layer_scale_starts_at_its_value_and_scales_channels():
    scale = LayerScale(4, 1e-5)
    assert torch.equal(scale.gamma, torch.full((4,), 1e-5))
    nn.init.normal_(scale.gamma)
    x = torch.randn(2, 3, 4)
    assert torch.equal(scale(x)[1, 2], x[1, 2] * scale.gamma)


@pytest.mark.parametrize("subset", [False, True])
def test_drop_path_drops_or_scales_whole_samples_and_keeps_the_mean(subset):
    y = DropPath(0.25, subset)(torch.zeros(4000, 3, 2), torch.ones_like)
    assert {round(v, 4) for v in y.unique().tolist()} == {0.0, 1.3333}
    assert (y == y[:, :1, :1]).all()
    assert y.mean().item() == pytest.approx(1, abs=1e-6 if subset else 0.03)  # a fixed number has the mean itself


def test_a_subset_computes_the_branch_of_kept_samples_alone_and_adds_it_where_it_belongs():
    x, seen, kept = torch.arange(8.0)[:, None, None].expand(8, 3, 2), [], torch.zeros(8)
    torch.manual_seed(0)
    for _ in range(400):
        y = DropPath(0.4, subset=True)(x, lambda some: seen.append(len(some)) or 10 * some[:, :1])
        added = (y - x[:, :1])[:, 0, 0]
        assert {round(v, 3) for v in (added / x[:, 0, 0])[1:].tolist()} <= {0.0, 16.667}  # 10 / 0.6
        kept += added > 0
    assert set(seen) == {5}
    assert (kept[1:] / 400).tolist() == pytest.approx([0.6] * 7, abs=0.1)  # each sample as often as any other


def test_a_subset_drops_from_small_batches_at_its_rate():
    torch.manual_seed(0)
    for rate, n in ((0.1, 4), (0.1, 1), (0.7, 10)):
        drop_path, x = DropPath(rate, subset=True), torch.zeros(n, 1, 1)
        dropped = torch.stack([drop_path(x, torch.ones_like) == 0 for _ in range(500)]).sum((1, 2, 3))
        assert dropped.float().mean().item() == pytest.approx(rate * n, abs=0.06)
        assert dropped.unique().tolist() == [*range(math.floor(rate * n + 1e-6), math.ceil(rate * n - 1e-6) + 1)]


def test_a_subset_has_the_gradient_of_what_it_computed():
    linear, x = nn.Linear(4, 4).double(), torch.randn(6, 3, 4, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(1)
    y = DropPath(0.5, subset=True)(x, linear)
    rows = (y - x).flatten(1).abs().amax(dim=1) > 0
    assert rows.sum() == 3
    expected = x + 2 * rows[:, None, None] * linear(x)
    torch.testing.assert_close(y, expected)
    of = [x, linear.weight, linear.bias]
    found, exact = (torch.autograd.grad(z.square().sum(), of) for z in (y, expected))
    torch.testing.assert_close(found, exact)


@pytest.mark.parametrize("subset", [False, True])
def test_drop_path_does_nothing_in_evaluation_and_draws_by_the_seed(subset):
    x, drop_path = torch.randn(8, 3, 2), DropPath(0.9, subset)
    torch.manual_seed(3)
    first = drop_path(x, torch.sin)
    torch.manual_seed(3)
    assert torch.equal(drop_path(x, torch.sin), first)
    assert torch.equal(drop_path.eval()(x, torch.sin), x + x.sin())


@pytest.mark.parametrize("subset", [False, True])
def test_a_block_drops_its_two_branches_apart(subset):
    block = randomized(Block(dim=8, num_heads=2, drop_path_rate=0.5, drop_path_subset=subset), 0.5).train()
    x = torch.randn(1, 5, 8)
    y = block(x.expand(64, -1, -1), PosEmbed(), 0)
    assert len({tuple(row.flatten().round(decimals=3).tolist()) for row in y}) == 4  # none, the first, the second, both


def test_drop_path_shows_its_rate_when_printed():
    assert "rate=0.1, subset=True" in repr(DropPath(0.1, subset=True))


def test_swiglu_gates_one_half_with_the_other():
    mlp, x = Mlp(4, hidden_dim=6, act_layer="silu", mlp_layer="swiglu"), torch.randn(3, 4)
    one, other = mlp.fc1(x)[:, :6], mlp.fc1(x)[:, 6:]
    torch.testing.assert_close(mlp(x), mlp.fc2(one * one.sigmoid() * other))
