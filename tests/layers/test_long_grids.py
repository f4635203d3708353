"""Biases of long grids: computed for a few queries at a time, and again in the backward pass."""

import pytest
import torch

from vitlab.layers import Attention, recompute
from vitlab.layers.pos_embed import build_pos_embed
from vitlab.layers.pos_embed.biases import RelPos
from vitlab.models import VisionTransformer

BIASES = ["relpos", "alibi2d", "cpb", "fire", "relpos1d", ["relpos", "relpos1d", "rope2d"]]


def gradients(net, count=2):
    torch.manual_seed(1)
    outputs = net(torch.randn(count, 3, 20, 24))
    return [outputs.detach(), *torch.autograd.grad(outputs.square().mean(), list(net.parameters()))]


def network(pos_embed, **more):
    torch.manual_seed(0)
    sizes = {"img_size": (20, 24), "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}
    net = VisionTransformer(**sizes | {"reg_tokens": 2, "init_std": 0.2} | more, pos_embed=pos_embed)
    for parameter in net.pos_embed.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return net


@pytest.fixture
def split(monkeypatch):
    """Return a function that lets grids be long, a few queries at a time, and the numbers of queries that were."""
    seen = []

    def few(*args, **kwargs):
        seen.append(args[2])
        return whole(*args, **kwargs)

    whole = recompute.checkpoint

    def start():
        monkeypatch.setattr(recompute, "LONG", 1)
        monkeypatch.setattr(recompute, "PART", 2 * 2 * 33 * 5)  # 5 queries of 2 images and 2 heads: 33 tokens, 7 parts
        monkeypatch.setattr(recompute, "checkpoint", few)
        return seen

    return start


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"global_pool": "avg"}, {"grad_checkpoint": True}], ids=["token", "avg", "again"])
@pytest.mark.parametrize("name", BIASES, ids=str)
def test_values_and_gradients_are_those_of_the_whole(name, more, split):
    net = network(name, **more)
    whole, seen = gradients(net), split()
    parts = gradients(net)
    rows = {(some.start, some.stop) for some in seen}
    assert {(0, 5), (30, 33)} <= rows and (len(rows) == 7 or (0, 1) in rows)
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6 * max(1, float(a.abs().max())))
    assert sum(float(p.abs().sum()) > 0 for p in whole) > len(whole) * 0.8  # not equal because they are 0


@pytest.mark.slow
def test_short_grids_compiled_networks_and_what_is_not_trained_are_computed_as_a_whole(split):
    net, seen = network("relpos"), split()
    with torch.no_grad():
        net(torch.randn(2, 3, 20, 24))
    net.eval().requires_grad_(False)(torch.randn(2, 3, 20, 24))
    torch.export.export(net.requires_grad_(True), (torch.randn(2, 3, 20, 24),))
    network("rope2d")(torch.randn(2, 3, 20, 24))
    assert recompute.LONG == 1 and not seen
    net(torch.randn(2, 3, 20, 24))
    assert seen


def test_custom_biases_and_kernels_see_all_queries(split):
    class Doubled(RelPos):  # a bias of one's own says nothing of rows
        def biases(self, layer):
            return 2 * super().biases(layer)

    class Watched(Attention):
        def position_bias(self, q, k, pos_embed, layer):
            assert q.shape[2] in (1, k.shape[2])
            return super().position_bias(q, k, pos_embed, layer)

    assert RelPos.splits_queries and not Doubled.splits_queries
    net = network("relpos")
    doubled = Doubled(net.pos_embed.grid_size, 2, 2, net.num_prefix_tokens)
    doubled.load_state_dict(net.pos_embed.state_dict())
    others = [network("relpos"), network("relpos"), network("relpos")]
    others[0].pos_embed = doubled
    for block in others[1].blocks:
        block.attn.__class__ = Watched
    for block in others[2].blocks:
        block.attn.kernel = lambda q, k, v, bias, scale: (q @ k.mT * scale + bias).relu() @ v
    whole = [gradients(other) for other in others]
    seen = split()
    for before, other in zip(whole, others, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(before, gradients(other), strict=True))
    assert not seen


def test_a_list_of_methods_splits_queries_if_each_of_its_biases_does():
    def splits(*names):
        return build_pos_embed(list(names), (2, 3), 16, num_heads=2, depth=1, num_prefix_tokens=1).splits_queries

    assert splits("learned", "relpos") and splits("relpos", "alibi2d", "rope2d") and not splits("learned", "rope2d")
    own = {"class_path": "vitlab.layers.pos_embed.biases.BiasPosEmbed"}
    assert not splits("relpos", own)


def test_dropped_weights_are_the_same_when_computed_again(split):
    net = network("relpos")
    for block in net.blocks:
        block.attn.attn_dropout = 0.5
    split()
    parameter, step = net.pos_embed.bias_table, 1e-2
    gradient = gradients(net)[1 + [name for name, _ in net.named_parameters()].index("pos_embed.bias_table")]

    def loss(shift):
        parameter.data.add_(gradient, alpha=shift / gradient.norm().item())
        torch.manual_seed(1)
        value = net(torch.randn(2, 3, 20, 24)).detach().square().mean().item()
        parameter.data.sub_(gradient, alpha=shift / gradient.norm().item())
        return value

    slope = (loss(step) - loss(-step)) / (2 * step)
    assert slope == pytest.approx(float(gradient.norm()), rel=0.02)
