"""Patches of several sizes by one kernel, FlexiViT, Beyer et al. 2023 (arXiv:2212.08013)."""

import pytest
import torch
import torch.nn.functional as F
from timm.layers import resample_patch_embed

from vitlab.models import VisionTransformer, count_macs
from vitlab.tokenizers.patch import PatchEmbed, pseudo_inverse_resize

SMALL = {"img_size": (48, 96), "patch_size": 12, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 3}


@pytest.mark.parametrize("side", [8, 16, 24])
def test_the_kernel_is_resized_as_timm_does_it(side):
    embed = PatchEmbed((48, 96), 12, 3, 8, [side, 12])
    theirs = resample_patch_embed(embed.proj.weight, [side, side], interpolation="bilinear", antialias=True)
    torch.testing.assert_close(embed.weight_of((side, side)), theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("new", [(8, 8), (12, 16)])
def test_a_resized_kernel_maps_enlarged_patches_to_the_same_tokens(new):
    patch, kernel = torch.randn(2, 1, 6, 6, dtype=torch.float64)
    large = F.interpolate(patch[None], size=new, mode="bilinear", antialias=True).flatten()
    resized = pseudo_inverse_resize((6, 6), new) @ kernel.flatten()
    torch.testing.assert_close(large @ resized, patch.flatten() @ kernel.flatten())


def test_a_kernel_of_one_column_is_that_of_one_row_transposed():
    row, column = pseudo_inverse_resize((4, 4), (1, 8)), pseudo_inverse_resize((4, 4), (8, 1))
    torch.testing.assert_close(column.unflatten(1, (4, 4)), row.unflatten(1, (4, 4)).mT)


@pytest.mark.parametrize("pos_embed", ["learned", "rope2d", "relpos"])
def test_a_step_has_patches_of_its_own_and_evaluation_those_of_the_kernel(pos_embed):
    net, images = VisionTransformer(flexi_patch=[8, 12, 16], pos_embed=pos_embed, **SMALL), torch.randn(2, 3, 48, 96)
    plain = VisionTransformer(pos_embed=pos_embed, **SMALL)
    plain.load_state_dict(net.state_dict())
    counts = []
    net.blocks[0].register_forward_pre_hook(lambda block, args: counts.append(args[0].shape[1] - 1))
    for step in range(12):
        net.zero_grad()
        net.start_step(step)
        net(images).square().sum().backward()
        assert net.tokenizer.proj.weight.grad.any() and all(p.grad.any() for p in net.pos_embed.parameters())
    assert set(counts) == {6 * 12, 4 * 8, 3 * 6}
    torch.testing.assert_close(net.eval()(images), plain.eval()(images))
    net.tokenizer.eval_patch = (8, 8)
    assert net(images).shape == (2, 3) and counts[-1] == 6 * 12
    again = VisionTransformer(flexi_patch=[8, 12, 16], **SMALL)
    again.start_step(11)
    assert again.tokenizer.patch == net.train().tokenizer.patch  # the same where a run is continued


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"flexi_patch": [8, 10]}, r"must divide height and width of `img_size`, \[48, 96\], got 10"),
        ({"flexi_patch": [8, 32]}, r"must divide height and width of `img_size`, \[48, 96\], got 32"),
        ({"flexi_patch": [8, 32], "img_size": (96, 48)}, r"height and width of `img_size`, \[96, 48\], got 32"),
        ({"flexi_patch": [8, -12]}, "must divide height and width .* got -12"),
        ({"flexi_patch": [8]}, r"must list at least two patch sides, got \[8\]"),
        ({"flexi_patch": [8, 8]}, r"must list at least two patch sides, got \[8, 8\]"),
        ({"flexi_patch": [8, 12], "tokenizer": "t2t"}, "belongs to tokenizer='patch', got .* for 't2t'"),
    ],
)
def test_impossible_patch_sizes_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        VisionTransformer(**SMALL | changed)


def test_a_kernel_resized_in_inference_mode_can_be_trained():
    net, images = VisionTransformer(flexi_patch=[8, 12, 16], **SMALL), torch.randn(1, 3, 48, 96)
    net.tokenizer.eval_patch = net.tokenizer.drawn = (8, 8)
    with torch.inference_mode():
        net.eval()(images)
    net.train()(images).sum().backward()
    assert net.tokenizer.proj.weight.grad.any()


def test_other_precisions_and_counting_leave_the_resized_kernel_alone():
    net = VisionTransformer(flexi_patch=[8, 12], **SMALL).eval()
    net.tokenizer.eval_patch = (8, 8)
    count_macs(net)
    kernel = net.tokenizer.weight_of((8, 8)).clone()
    half = net.half().tokenizer.weight_of((8, 8))
    assert half.dtype == torch.float16
    theirs = pseudo_inverse_resize((12, 12), (8, 8))
    for precise in (net.double(), net.float()):
        weight = precise.tokenizer.proj.weight.double().flatten(2)
        resized = precise.tokenizer.weight_of((8, 8)).double().flatten(2)
        torch.testing.assert_close(resized, weight @ theirs.T, rtol=0, atol=1e-6)
    count_macs(net)
    torch.testing.assert_close(net.tokenizer.weight_of((8, 8)), kernel, rtol=0, atol=1e-3)  # weights were halved
