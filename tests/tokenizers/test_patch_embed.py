from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from vitlab.tokenizers.patch import PatchEmbed

MOUNTAINS = Path(__file__).parents[2] / "data" / "mountains" / "mountains.npy"


def test_patches_are_cut_in_raster_order_and_mapped_by_one_linear_map():
    tokenizer = PatchEmbed((6, 10), patch_size=2, in_chans=3, embed_dim=8)
    images = torch.randn(2, 3, 6, 10)
    patches = [images[:, :, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2].flatten(1) for i in range(3) for j in range(5)]
    weight = tokenizer.proj.weight.reshape(8, -1)
    expected = torch.stack(patches, dim=1) @ weight.T + tokenizer.proj.bias
    torch.testing.assert_close(tokenizer(images), expected, rtol=0, atol=1e-5)


def test_unfolded_patches_and_a_linear_layer_are_the_same():
    tokenizer = PatchEmbed((60, 100), patch_size=20, in_chans=1, embed_dim=768)
    linear = nn.Linear(400, 768)
    linear.load_state_dict({"weight": tokenizer.proj.weight.reshape(768, -1), "bias": tokenizer.proj.bias})
    images = torch.randn(1, 1, 60, 100)
    patches = nn.functional.unfold(images, 20, stride=20).mT
    assert patches.shape == (1, 15, 400)
    torch.testing.assert_close(tokenizer(images), linear(patches), rtol=0, atol=1e-5)


def test_grid_is_a_pair_of_whole_numbers():
    grid_size = PatchEmbed((60, 100), 20, 1, 8).grid_size
    assert grid_size == (3, 5)
    assert [type(side) for side in grid_size] == [int, int]


def test_images_do_not_mix_when_there_are_as_many_tokens_as_values_per_patch():
    tokenizer = PatchEmbed((400, 400), patch_size=20, in_chans=1, embed_dim=8)  # N = P * P = 400
    images = torch.randn(2, 1, 400, 400)
    changed = images.clone()
    changed[1] = 0
    assert tokenizer(images).shape == (2, 400, 8)
    assert torch.equal(tokenizer(images)[0], tokenizer(changed)[0])


@pytest.mark.skipif(not MOUNTAINS.exists(), reason="the demo image is not part of the repository")
def test_the_twelfth_patch_of_the_mountains_is_the_articles():
    image = torch.tensor(np.load(MOUNTAINS))[None, None]
    tokenizer = PatchEmbed((60, 100), 20, 1, 400).double()
    with torch.no_grad():
        tokenizer.proj.weight.copy_(torch.eye(400).view(400, 1, 20, 20))
        tokenizer.proj.bias.zero_()
    patch = tokenizer(image)[0, 11]
    torch.testing.assert_close(patch.view(20, 20), image[0, 0, 40:60, 20:40])
    assert sorted({round(v, 4) for v in patch.tolist()}) == [0, 0.0846, 0.1393, 0.4677]


@pytest.mark.parametrize(("img_size", "patch_size"), [((60, 100), 50), ((224, 224), 15), ((100, 60), 50), ((8, 8), 16)])
def test_patches_that_do_not_fit_are_refused_with_both_values(img_size, patch_size):
    message = rf"`patch_size` must divide .* got patch_size={patch_size} and img_size=\[{img_size[0]}, {img_size[1]}\]"
    with pytest.raises(ValueError, match=message):
        PatchEmbed(img_size, patch_size, in_chans=1, embed_dim=8)


@pytest.mark.parametrize("patch_size", [0, (4, 0), (4, 4, 4), (4.5, 4)])
def test_a_patch_has_one_side_or_two(patch_size):
    with pytest.raises(ValueError, match=r"`patch_size` must be one side or \[height, width\], in whole pixels, got"):
        PatchEmbed((8, 8), patch_size, in_chans=1, embed_dim=8)


def test_rectangular_patches_are_the_convolution():
    tokenizer, images = PatchEmbed((40, 30), (20, 10), in_chans=3, embed_dim=8), torch.randn(2, 3, 40, 30)
    assert tokenizer.grid_size == (2, 3)
    torch.testing.assert_close(tokenizer(images), tokenizer.proj(images).flatten(2).transpose(1, 2))
