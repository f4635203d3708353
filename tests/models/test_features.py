import math

import pytest
import timm
import torch
from timm.optim import param_groups_weight_decay
from torch import nn

from vitlab.models import VisionTransformer
from vitlab.models.convert import from_timm
from vitlab.models.features import knn
from vitlab.models.walk import attention_inputs, attention_logits, attention_maps, block_tokens, pooled_features
from vitlab.optim import param_groups

TINY = {"img_size": (16, 24), "patch_size": 4, "in_chans": 1, "embed_dim": 16, "depth": 4, "num_heads": 2}


@pytest.fixture
def images():
    return torch.randn(2, 1, 16, 24)


@pytest.fixture
def both():
    theirs = timm.models.VisionTransformer(**TINY, num_classes=5, reg_tokens=2).eval()
    for name, p in theirs.named_parameters():
        nn.init.normal_(p, std=0.3, mean=1.0 if "norm" in name and name.endswith("weight") else 0.0)
    ours = VisionTransformer(**TINY, num_classes=5, reg_tokens=2).eval()
    ours.load_state_dict(from_timm(theirs.state_dict(), 24))
    return ours, theirs


def assert_alike(ours, theirs):
    if isinstance(ours, torch.Tensor):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
        return
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert_alike(one, other)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"indices": 2, "norm": True},
        {"indices": [0, -2], "return_prefix_tokens": True},
        {"indices": [1], "stop_early": True, "output_fmt": "NLC"},
        {"indices": [3, 0], "intermediates_only": True, "output_fmt": "NLC", "norm": True},
    ],
)
def test_intermediates_are_those_of_timm(both, images, options):
    ours, theirs = both
    assert_alike(ours.forward_intermediates(images, **options), theirs.forward_intermediates(images, **options))


@pytest.mark.parametrize("options", [{}, {"n": 3, "reshape": True}, {"n": [0, 2], "return_prefix_tokens": True}])
@pytest.mark.parametrize("norm", [True, False])
def test_intermediate_layers_are_those_of_timm(both, images, options, norm):
    ours, theirs = both
    expected = theirs.get_intermediate_layers(images, norm=norm, **options)
    assert_alike(ours.get_intermediate_layers(images, norm=norm, **options), expected)


@pytest.mark.parametrize("indices", [0, 5, [4], [-5], []])
def test_indices_of_missing_blocks_are_refused(images, indices):
    with pytest.raises(ValueError, match="the network has 4 blocks, 0 to 3, got"):
        VisionTransformer(**TINY).forward_intermediates(images, indices=indices)


def test_an_unknown_format_is_refused(images):
    with pytest.raises(ValueError, match="`output_fmt` must be NCHW or NLC, got 'NHWC'"):
        VisionTransformer(**TINY).forward_intermediates(images, output_fmt="NHWC")


def test_features_and_attention_have_gradients_on_request(images):
    net = VisionTransformer(**TINY)
    found = net.get_intermediate_layers(images, n=2)
    found += [attention_maps(net, images, 3, gradients=True), *attention_logits(net, images, gradients=True)]
    found += attention_inputs(net, images, gradients=True) + block_tokens(net, images, gradients=True)
    for x in found:
        (gradient,) = torch.autograd.grad(x.square().sum(), net.tokenizer.proj.weight, retain_graph=True)
        assert gradient.any()
    without = [attention_maps(net, images, 3), *attention_logits(net, images), *attention_inputs(net, images)]
    assert not any(x.requires_grad for x in [*without, *block_tokens(net, images)])


@pytest.mark.parametrize("global_pool", ["token", "avg"])
def test_hooks_on_a_network_see_all_tokens(images, global_pool):
    net, seen = VisionTransformer(**TINY, global_pool=global_pool), []
    for module in (*net.blocks, net.norm):
        module.register_forward_hook(lambda module, args, x: seen.append(x.shape[1]))
    net(images)
    assert seen == [25] * 5


def test_a_new_head_has_new_outputs_and_leaves_the_rest(images):
    net = VisionTransformer(**TINY, head_hidden=3, init_std=0.1).double().eval()
    before = net.forward_features(images.double())
    net.reset_head(7)
    assert net.num_classes == 7 and net(images.double()).shape == (2, 7) and not net.head.training
    assert net.head[2].weight.std().item() == pytest.approx(0.1, rel=0.5) and not net.head[2].bias.any()
    assert torch.equal(net.forward_features(images.double()), before)
    net.reset_head(0)
    assert torch.equal(net(images.double()), net.pool(before))
    with pytest.raises(ValueError, match=r"`num_classes` must be in \[0, 1e6\], got -1"):
        net.reset_head(-1)


@pytest.mark.parametrize(
    ("arguments", "patch_size"),
    [
        ({"patch_size": 4}, 4),
        ({"patch_size": (4, 8)}, (4, 8)),
        ({"tokenizer": "t2t", "img_size": 32}, 16),
        ({"tokenizer": "conv", "t2t_kernels": (3, 3), "t2t_strides": (2, 3)}, 6),
    ],
)
def test_a_network_states_its_width_its_outputs_and_the_step_of_its_tokens(arguments, patch_size):
    net = VisionTransformer(**{**TINY, "num_classes": 5, **arguments})
    assert (net.embed_dim, net.num_classes, net.patch_size) == (16, 5, patch_size)


@pytest.mark.parametrize("pos_embed", ["learned", "relpos", "rope_mixed", "conv"])
@pytest.mark.parametrize("tokenizer", ["patch", "t2t"])
def test_the_optimizers_of_timm_let_the_same_parameters_decay(pos_embed, tokenizer):
    options = {"reg_tokens": 1, "layer_scale": 0.1, "global_pool": "map", "img_size": 32}
    net = VisionTransformer(**{**TINY, **options}, pos_embed=pos_embed, tokenizer=tokenizer)
    theirs = param_groups_weight_decay(net, 0.1, no_weight_decay_list=net.no_weight_decay())
    decays = [
        {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
        for groups in (theirs, param_groups(net, 0.1, 0.1))
    ]
    assert decays[0] == decays[1] and decays[0]


@pytest.mark.parametrize("fc_norm", [False, True])
def test_pooled_features_are_what_the_head_reads(images, fc_norm):
    net = VisionTransformer(**TINY, num_classes=5, global_pool="avg", fc_norm=fc_norm, init_std=0.3).eval()
    torch.testing.assert_close(net.head(pooled_features(net, images)), net(images), rtol=0, atol=1e-6)


@pytest.mark.parametrize("k", [1, 5, 40])
def test_the_classes_of_neighbors_are_those_of_a_loop_and_far_neighbors_hardly_vote(k):
    near, queries, labels = torch.randn(15, 3).double(), torch.randn(1060, 3).double(), torch.arange(15) % 4
    found = knn(7 * near, labels, queries, k, num_classes=6)
    assert found.shape == (1060,)
    for x, voted in zip(queries[1000:], found[1000:].tolist(), strict=True):  # on both sides of a part of 1024
        cosines = nn.functional.cosine_similarity(x[None], near).tolist()
        nearest = sorted(range(15), key=lambda i: -cosines[i])[:k]
        votes = [sum(math.exp(cosines[i] / 0.07) for i in nearest if labels[i] == c) for c in range(6)]
        assert voted == votes.index(max(votes))
