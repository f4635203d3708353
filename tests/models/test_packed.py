"""Images of their own sizes in one batch: each gets what it gets alone."""

from typing import get_args

import pytest
import torch
from torch import nn

from vitlab.layers import Attention
from vitlab.layers.drop_path import DropPath
from vitlab.layers.pos_embed import PosEmbed
from vitlab.layers.pos_embed.build import PosEmbedName
from vitlab.models import VisionTransformer
from vitlab.models.packed_batch import PackedPosEmbed, check_packed
from vitlab.packed_batch import PackedBatch
from vitlab.tokenizers.patch import PatchEmbed

SIZES = [(16, 24), (8, 12), (24, 16), (4, 8), (16, 24), (12, 8)]
METHODS = [*get_args(PosEmbedName), ["learned", "rope2d", "relpos"]]
TINY = {"img_size": 16, "patch_size": 4, "num_classes": 5, "embed_dim": 16, "depth": 2, "num_heads": 2, "in_chans": 1}


def network(**changes):
    torch.manual_seed(0)
    net = VisionTransformer(**{**TINY, "init_std": 0.3, **changes}).double()
    for p in net.pos_embed.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return net


def pictures():
    rng = torch.Generator().manual_seed(1)
    return [torch.randn(1, *size, generator=rng, dtype=torch.float64) for size in SIZES]


def outputs_and_gradients(net, forward):
    net.zero_grad()
    outputs = forward()
    (outputs * torch.arange(1.0, outputs.numel() + 1).view_as(outputs)).sum().backward()
    return outputs, {name: p.grad for name, p in net.named_parameters()}


def check_equal(net):
    images = pictures()
    alone, slow = outputs_and_gradients(net, lambda: torch.cat([net(image[None]) for image in images]))
    packed, fast = outputs_and_gradients(net, lambda: net(PackedBatch.of(images, 4)))
    assert (packed - alone).abs().max() < 1e-5 * alone.abs().max()
    for name, gradient in slow.items():
        if gradient is None:
            assert fast[name] is None or not fast[name].any(), name
        else:
            assert (fast[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max().clamp(min=1e-3), name


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_packed_batch_has_the_outputs_and_gradients_of_its_images_one_by_one(method):
    check_equal(network(pos_embed=method, reg_tokens=1))


@pytest.mark.parametrize(
    "changes",
    [
        {"global_pool": "avg", "class_token": False, "attn_gate": True, "qk_norm": True, "layer_scale": 0.5},
        # whose only block drops none
        {"pos_embed": "none", "drop_path_rate": 0.5, "drop_path_subset": True, "depth": 1},
        {"global_pool": "max", "value_skip": True, "pre_norm": True},
        {"global_pool": "map", "fc_norm": True, "dense_blocks": [1, 1], "ghost": True, "norm_layer": "rmsnorm"},
        {"pos_embed": "learned", "pos_embed_join": "every_layer", "head_hidden": 8, "mlp_layer": "swiglu"},
    ],
    ids=str,
)
def test_a_packed_batch_agrees_with_single_images_for_other_parts_too(changes):
    check_equal(network(**changes))


def test_training_draws_the_coordinates_of_each_packed_batch_and_evaluation_none():
    moving = {"class_path": "rope2d", "init_args": {"coordinates": "normalized", "shift": 0.5}}
    net, images = network(pos_embed=moving), PackedBatch.of(pictures(), 4)
    with torch.no_grad():
        drawn, again, still, same = net(images), net(images), net.eval()(images), net(images)
    assert min((a - b).abs().max() for a, b in ((drawn, again), (drawn, still))) > 1e-3 and torch.equal(still, same)


def test_half_precision_and_evaluation_without_gradients_agree_too():
    net, images = network().eval().float(), [image.float() for image in pictures()]
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        alone, packed = torch.cat([net(image[None]) for image in images]), net(PackedBatch.of(images, 4))
    assert (alone.float() - packed.float()).abs().max() < 0.02 * alone.abs().max()


def test_images_come_back_from_their_patches_and_can_be_chosen():
    images = pictures()
    packed = PackedBatch.of(images, 4)
    assert all(torch.equal(a, b) for a, b in zip(packed.images(), images, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(packed[[2, 0]].images(), [images[2], images[0]], strict=True))


def test_rows_are_as_long_as_the_longest_image_and_short_ones_share_one():
    sizes = [(1, 2), (2, 3), (2, 2), (3, 2)]
    packed = PackedPosEmbed(PosEmbed(), sizes, num_prefix_tokens=0)
    assert packed.owner.tolist() == [[1] * 6, [3] * 6, [2] * 4 + [0] * 2]


def test_a_branch_is_dropped_for_whole_images_not_for_rows():
    owner, drop = torch.tensor([[0, 0, 1, 1], [2, 2, 2, 3]]).repeat(1, 50), DropPath(0.5)
    y = drop(torch.zeros(2, 200, 1), torch.ones_like, owner)[..., 0]
    seen = {tuple(y[owner == i].unique().tolist()) for i in range(4)}
    assert seen <= {(0.0,), (2.0,)}
    draws = torch.stack(
        [drop(torch.zeros(2, 200, 1), torch.ones_like, owner)[:, [0, 2], 0].flatten() for _ in range(99)]
    )
    assert 0.6 < draws.mean() < 1.4 and (draws[:, 0] != draws[:, 1]).any()


class WholeImages(PatchEmbed):
    def forward(self, images):
        return PatchEmbed.forward(self, images - images.mean((1, 2, 3), keepdim=True))


class Doubled(PatchEmbed):
    def forward(self, images):
        return 2 * super().forward(images)


def test_patches_of_ones_own_are_packed_if_they_pass_the_batch_on():
    check_equal(network(tokenizer=f"{__name__}.Doubled"))


class MeanGate(nn.Module):
    """An MLP that looks across tokens."""

    def __init__(self, dim, hidden_dim):
        super().__init__()
        self.fc, self.gate = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x):
        return self.fc(x) * self.gate(x.mean(1, keepdim=True))


class Everywhere(nn.Module):
    """Attention between all tokens of a row."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.attn = nn.MultiheadAttention(dim, num_heads, batch_first=True)

    def forward(self, x, pos_embed, layer):
        return self.attn(x, x, x, need_weights=False)[0]


class Within(Attention):
    """Attention that lets the base class keep images apart."""


class Noisy(nn.Module):
    """An MLP whose outputs tell nothing about its inputs."""

    def __init__(self, dim):
        super().__init__()

    def forward(self, x):
        return torch.randn_like(x)


@pytest.mark.parametrize("part", [{"mlp_layer": "MeanGate"}, {"attn": "Everywhere"}])
def test_a_part_of_ones_own_that_mixes_the_images_of_a_row_is_refused(part):
    own = {name: f"{__name__}.{cls}" for name, cls in part.items()}
    net, images = VisionTransformer(**TINY, **own, layer_scale=1e-4), [torch.randn(1, 8, 4), torch.randn(1, 4, 8)]
    for _ in range(2):
        with pytest.raises(
            ValueError, match=rf"your own mix those of a row \({next(iter(part.values()))}\): act on each"
        ):
            net(images)


@pytest.mark.parametrize("part", [{"attn": "Within"}, {"mlp_layer": "Noisy"}])
def test_a_part_of_ones_own_is_tried_once_with_other_weights_and_draws_nothing(part, monkeypatch):
    net = VisionTransformer(**TINY, **{name: f"{__name__}.{cls}" for name, cls in part.items()}, dropout=0.1)
    before, random = {k: v.clone() for k, v in net.state_dict().items()}, torch.get_rng_state()
    check_packed(net, 1, (4, 4))
    assert net.training and torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    monkeypatch.setattr("vitlab.models.packed_batch._mixes_images", None)
    assert net([torch.randn(1, 8, 4), torch.randn(1, 4, 8)]).shape == (2, 5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"tokenizer": "t2t", "t2t_dim": 8, "img_size": 32, "embed_dim": 16},
            "T2TTokenizer makes its tokens otherwise",
        ),
        ({"tokenizer": f"{__name__}.WholeImages"}, "WholeImages makes its tokens otherwise: use tokenizer=patch"),
        ({"patch_size": 2}, "patches of 1 x 4 x 4, but the network takes 1 x 2 x 2"),
        ({"in_chans": 3}, "the network takes 3 x 4 x 4"),
        ({"flexi_patch": [4, 8]}, "`flexi_patch` draws others"),
        ({"se_reduction": 4}, "`se_reduction` averages"),
        ({"drop_path_rate": 0.5, "drop_path_subset": True}, "`drop_path_subset` drops rows"),
    ],
    ids=str,
)
def test_a_network_that_cannot_take_packed_images_says_why(changes, said):
    net = VisionTransformer(**{**TINY, **changes})
    with pytest.raises(ValueError, match="images of their own sizes") as refused:
        net(PackedBatch.of([image.float() for image in pictures()], 4))
    assert said in str(refused.value)
