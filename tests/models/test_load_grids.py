"""Weights at another grid: positions are resized when asked, and the grid of a file is found or asked for."""

import json

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer as TimmViT
from torch import nn
from torch.nn import functional as F

from tests.models.saved import T2T, TINY, UNSAID, assert_same_outputs, official, tiny
from tests.networks import randomized
from vitlab.layers.pos_embed.added import AddedPosEmbed, SinCos1d
from vitlab.models.convert import to_timm
from vitlab.models.load import load_weights
from vitlab.models.weights_file import WeightsFile
from vitlab.tokenizers.patch import cut_patches


@pytest.mark.parametrize("size", [24, (12, 20)])
def test_a_learned_table_is_interpolated_when_asked(path, size):
    from timm.layers import resample_abs_pos_embed

    saved = randomized(tiny())
    torch.save(saved.state_dict(), path)
    model = tiny(img_size=size)
    with pytest.raises(ValueError, match="resize policy must be one of interpolate"):
        load_weights(model, path, grid=(4, 4))
    (sentence,) = load_weights(model, path, resize="interpolate", grid=(4, 4))
    h, w = model.grid_size
    assert sentence.startswith(f"positions: interpolate from 4 x 4 to {h} x {w}")
    expected = resample_abs_pos_embed(saved.pos_embed.weight, (h, w), (4, 4), num_prefix_tokens=0)
    torch.testing.assert_close(model.pos_embed.weight, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("pos_embed", "resize", "ways"),
    [
        ({"class_path": "sincos2d", "init_args": {"resize": "interpolate"}}, "usual", "interpolate"),
        (["sincos2d", "conv", "rope2d"], "usual", "sincos2d by rescale, rope2d by extrapolate"),
        (["learned", "rope2d"], "rescale", "learned by interpolate, rope2d by rescale"),
    ],
)
def test_each_method_of_a_list_has_its_usual_way_to_another_grid_and_the_sentence_says_which(pos_embed, resize, ways):
    saved, images = randomized(tiny(pos_embed=pos_embed)), torch.randn(2, 3, 24, 24)
    model = tiny(pos_embed=pos_embed, img_size=24)
    (sentence,) = load_weights(model, WeightsFile(saved.state_dict()), resize=resize, grid=(4, 4))
    assert sentence.startswith(f"positions: {ways} from 4 x 4 to 6 x 6")
    saved.pos_embed_resize = saved.pos_embed_resize if resize == "usual" else resize
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(images), saved(images))


def test_weights_can_be_loaded_again_by_another_way():
    net, images = randomized(tiny(pos_embed="sincos2d")), torch.randn(2, 3, 24, 24)
    model = tiny(pos_embed="sincos2d", img_size=24).eval()
    for policy in ("rescale", "extrapolate", "interpolate", "extrapolate"):
        load_weights(model, WeightsFile(net.state_dict()), policy, grid=(4, 4))
        net.pos_embed_resize = policy
        with torch.no_grad():
            torch.testing.assert_close(model(images), net(images))


def test_a_timm_file_of_another_grid_is_resized(path):
    theirs = randomized(TimmViT(**TINY, reg_tokens=2))
    torch.save(theirs.state_dict(), path)
    sentences = load_weights(tiny(img_size=24, reg_tokens=2), path, resize="interpolate", grid=(4, 4))
    assert [s.split(" from")[0] for s in sentences] == ["layout: converted", "positions: interpolate"]


@pytest.mark.parametrize("policy", ["interpolate", "extrapolate"])
def test_official_t2t_positions_of_another_grid_are_resized_or_computed_anew(path, policy):
    saved = randomized(tiny(**T2T))
    torch.save(official(saved), path)
    model = tiny(**T2T | {"img_size": 24})
    sentences = load_weights(model, path, resize=policy)
    assert sentences[-1].startswith(f"positions: {policy} from 4 x 4 to 6 x 6")
    formula = SinCos1d((6, 6), 16).table()
    assert torch.equal(model.pos_embed.table(), formula) == (policy == "extrapolate")
    assert model(torch.randn(1, 3, 24, 24)).isfinite().all()


def test_a_fixed_table_of_another_grid_is_noticed_by_the_files_arguments(path):
    saved = randomized(tiny(pos_embed="sincos2d", img_size=(8, 16)))
    state = {f"net.{name}": value for name, value in saved.state_dict().items()}
    arguments = TINY | {"img_size": [8, 16], "pos_embed": "sincos2d"}
    torch.save({"state_dict": state, "hyper_parameters": arguments}, path)
    model = tiny(pos_embed="sincos2d")
    with pytest.raises(ValueError, match="trained on a 2 x 4 grid and the model has 4 x 4"):
        load_weights(model, path)
    (sentence,) = load_weights(model, path, resize="rescale")
    assert "rescale from 2 x 4 to 4 x 4" in sentence


def test_a_file_without_its_grid_is_reported(path):
    torch.save(randomized(tiny(pos_embed="rope2d")).state_dict(), path)
    (sentence,) = load_weights(tiny(pos_embed="rope2d"), path)
    assert sentence == UNSAID


class Rows(AddedPosEmbed):
    """Vectors of rows, a gain and a slope: names that vitlab's own methods have, too, with other shapes."""

    def __init__(self, grid_size, embed_dim):
        super().__init__(grid_size)
        self.row = nn.Parameter(torch.randn(grid_size[0], embed_dim))
        self.weight = nn.Parameter(torch.randn(embed_dim))
        self.bias_table = nn.Parameter(torch.randn(()))

    def table(self, layer=0):
        return (self.weight * self.row + self.bias_table).repeat_interleave(self.grid_size[1], 0)

    def _resized_state(self, state, old_grid, policy, antialias):
        return state | {"row": F.interpolate(state["row"].T[None], self.grid_size[0], mode="linear")[0].T}


def test_tensors_of_a_class_of_the_users_are_not_read_as_the_tables_of_vitlab_that_have_their_names(path):
    saved = randomized(tiny(pos_embed=Rows))
    torch.save(saved.state_dict(), path)
    model = tiny(pos_embed=Rows)
    assert load_weights(model, path) == [UNSAID]
    assert_same_outputs(saved, model)
    other = tiny(pos_embed=Rows, img_size=(24, 16))
    with pytest.raises(ValueError, match=r"^the file has positions and does not say their grid, which is not the ne"):
        load_weights(other, path, resize="usual")
    assert load_weights(other, path, resize="usual", grid=(4, 4)) == ["positions: interpolate from 4 x 4 to 6 x 4"]


@pytest.mark.parametrize("img_size", [(8, 12), 24, (16, 36)])
@pytest.mark.parametrize("layout", ["ours", "timm"])
def test_positions_of_an_unknown_grid_are_refused_until_the_grid_is_given(path, img_size, layout):
    saved = randomized(tiny(img_size=img_size))
    state = saved.state_dict()
    torch.save(state if layout == "ours" else to_timm(state), path)
    model, (h, w) = tiny(), saved.grid_size
    with pytest.raises(ValueError, match=f"the file has {h * w}|{h * w + 1} positions and does not say their grid"):
        load_weights(model, path, resize="interpolate")
    sentences = load_weights(model, path, resize="interpolate", grid=(h, w))
    assert sentences[-1].startswith(f"positions: interpolate from {h} x {w} to 4 x 4")
    by_flag = model.pos_embed.weight.clone()
    path.with_name(f"{path.name}.json").write_text(json.dumps({"network": TINY | {"img_size": img_size}}))
    load_weights(model, path, resize="interpolate")
    assert torch.equal(model.pos_embed.weight, by_flag)


def test_the_given_grid_locates_the_position_of_the_class_token(path):
    saved = randomized(tiny(img_size=(12, 20)))  # 15 patches and a class token: as many rows as 4 x 4 patches
    torch.save(to_timm(saved.state_dict()), path)
    assert UNSAID in load_weights(tiny(), path)
    model = tiny()
    load_weights(model, path, resize="interpolate", grid=(3, 5))
    torch.testing.assert_close(model.cls_token, saved.cls_token)
    with pytest.raises(
        ValueError, match=r"`grid` must be one side or \[height, width\], in whole tokens, got \(0, 5\)"
    ):
        load_weights(model, path, resize="interpolate", grid=(0, 5))


@pytest.mark.parametrize(
    ("saved", "method"), [("learned", "relpos"), ("learned", "factorized"), ("relpos", ["learned", "rope2d"])]
)
def test_positions_of_another_method_are_refused_at_another_size_as_at_their_own(path, saved, method):
    torch.save(
        {"state_dict": tiny(pos_embed=saved).state_dict(), "hyper_parameters": TINY | {"pos_embed": saved}}, path
    )
    for img_size in (16, 24):
        with pytest.raises(
            ValueError, match=r"missing \(pos_embed.*build the model with the `model\.pos_embed` of the"
        ):
            load_weights(tiny(pos_embed=method, img_size=img_size), path, resize="usual")


def test_a_kernel_meets_enlarged_patches_as_it_met_the_patches_it_was_trained_on(path):
    small, large, images = randomized(tiny()), tiny(img_size=32, patch_size=8).eval(), torch.randn(2, 3, 16, 16)
    torch.save({"hyper_parameters": TINY, "state_dict": small.state_dict()}, path)
    with pytest.raises(ValueError, match=r"tokenizer\.proj\.weight \(16, 3, 4, 4\), not \(16, 3, 8, 8\)"):
        load_weights(large, path)
    assert load_weights(large, path, "usual") == ["patches: kernels of 4 x 4 resized to 8 x 8"]
    patches = cut_patches(images, (4, 4)).flatten(0, 2)[:, None]  # (B N C, 1, 4, 4)
    enlarged = F.interpolate(patches, (8, 8), mode="bilinear").view(2, 16, 3, 8, 8)
    with torch.no_grad():
        expected = small.tokenizer(images)
        actual = F.linear(enlarged.flatten(2), large.tokenizer.proj.weight.flatten(1), large.tokenizer.proj.bias)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


class Windows(nn.Module):
    """Patches, or with ``overlap`` windows that reach into their neighbors."""

    def __init__(self, img_size, in_chans, embed_dim, patch_size, overlap: int = 0):
        super().__init__()
        self.patch_size, self.grid_size = patch_size, tuple(side // patch_size for side in img_size)
        self.proj = nn.Conv2d(in_chans, embed_dim, patch_size + 2 * overlap, stride=patch_size, padding=overlap)

    def forward(self, images):
        return self.proj(images).flatten(2).transpose(1, 2)


@pytest.mark.parametrize("overlap", [0, 1])
def test_the_kernels_of_a_tokenizer_of_ones_own_are_loaded_as_they_are(path, overlap):
    own = {"tokenizer": {"class_path": f"{__name__}.Windows", "init_args": {"overlap": overlap}}}
    saved, model = randomized(tiny(**own)), tiny(**own)
    torch.save({"hyper_parameters": TINY | own, "state_dict": saved.state_dict()}, path)
    assert load_weights(model, path, "usual") == []
    assert_same_outputs(model, saved)
