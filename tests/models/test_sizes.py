from typing import get_args

import pytest
import torch

from vitlab.layers.pos_embed import PosEmbedName
from vitlab.models import SIZES, VisionTransformer
from vitlab.models.cost import count_macs, count_parameters, count_tokens
from vitlab.models.sizes import PUBLISHED

# T2T-ViT: trained values, official total (with 197 positions and the frozen features), GMACs; Yuan et al. 2021's models
# at 224 px with 1000 classes, attention products counted.
T2T = {
    "t2t_vit_7": (4_255_694, 4_310_222, 1.147),
    "t2t_vit_10": (5_834_702, 5_889_230, 1.516),
    "t2t_vit_12": (6_887_374, 6_941_902, 1.763),
    "t2t_vit_14": (21_465_806, 21_545_550, 4.783),
    "t2t_vit_19": (39_085_070, 39_177_422, 8.480),
    "t2t_vit_24": (64_000_974, 64_105_934, 13.662),
    "t2t_vit_t_14": (21_465_422, 21_541_070, 6.089),
    "t2t_vit_t_19": (39_084_686, 39_172_942, 9.785),
    "t2t_vit_t_24": (64_000_590, 64_101_454, 14.967),
    "t2t_vit_14_resnext": (21_465_806, 21_545_550, 4.783),
    "t2t_vit_14_wide": (25_000_910, 25_156_302, 5.229),
    "t2t_vit_14_se": (21_723_854, 21_803_598, 4.784),
    "t2t_vit_dense": (23_617_750, 23_647_062, 5.276),
    "t2t_vit_16_ghost": (16_173_518, 16_253_262, 3.797),
}
VIT = {  # timm's parameter counts, which include a position of the class token
    "vit_ti16": 5_717_416,
    "vit_s16": 22_050_664,
    "vit_b16": 86_567_656,
    "vit_l16": 304_326_632,
    "vit_h14": 632_045_800,
}


VIT5 = {"vit5_s16": (384, 12, 6), "vit5_b16": (768, 12, 12), "vit5_l16": (1024, 24, 16)}


def build(**arguments):
    with torch.device("meta"):
        return VisionTransformer(**arguments)


def test_every_size_is_covered_by_these_tests():
    assert SIZES.keys() == T2T.keys() | VIT.keys() | VIT5.keys()


@pytest.mark.parametrize("name", T2T)
def test_t2t_vit_has_the_published_number_of_parameters(name):
    model = build(**SIZES[name])
    trained, total, _ = T2T[name]
    embed_dim = SIZES[name]["embed_dim"]
    features = 2 * 32 * 64 if type(model.tokenizer.attention1).__name__ == "TokenPerformer" else 0
    assert count_parameters(model) == trained
    assert trained + 197 * embed_dim + features == total
    assert sum(value.numel() for value in model.state_dict().values()) == trained + features


@pytest.mark.parametrize("name", T2T)
def test_t2t_vit_has_the_published_number_of_multiply_adds(name):
    assert PUBLISHED[name].macs / 1e9 == pytest.approx(T2T[name][2], rel=1e-3)  # the counted ones: cli/test_models.py


@pytest.mark.parametrize("name", VIT)
def test_vit_has_timms_number_of_parameters_but_the_class_position(name):
    assert count_parameters(build(**SIZES[name])) == VIT[name] - SIZES[name]["embed_dim"]


@pytest.mark.parametrize("name", VIT5)
def test_vit5_has_the_parameters_of_its_parts(name):
    D, depth, heads = VIT5[name]
    block = 3 * D * D + 2 * D // heads + D * D + D + 2 * D * 4 * D + 4 * D + D + 2 * D + 2 * D  # qkv ... norms, scales
    rest = (768 * D + D) + D + 4 * D + 196 * D + D + (1000 * D + 1000)  # patches, class, registers, table, norm, head
    assert count_parameters(build(**SIZES[name])) == depth * block + rest


@pytest.mark.parametrize(("name", "gmacs"), [("vit_ti16", 1.25), ("vit_s16", 4.60), ("vit_b16", 17.6)])
def test_vit_has_the_known_number_of_multiply_adds(name, gmacs):
    assert PUBLISHED[name].macs / 1e9 == pytest.approx(gmacs, rel=4e-3)  # known to three digits


def test_multiply_adds_are_those_of_a_count_by_hand():
    model = VisionTransformer(img_size=8, in_chans=1, num_classes=3, patch_size=4, embed_dim=8, depth=2, num_heads=2)
    L, D = 5, 8
    block = L * D * 3 * D + 2 * L * L * D + L * D * D + 2 * L * D * 4 * D
    assert count_macs(model) == 4 * 16 * D + 2 * block + D * 3
    model.blocks[1].mlp = model.blocks[0].mlp  # two blocks that share weights do as much, and keep them
    assert count_macs(model) == 4 * 16 * D + 2 * block + D * 3
    assert {p.device.type for p in model.parameters()} == {"cpu"}


@pytest.mark.slow
def test_rotations_by_matrix_exponentials_and_by_equations_count():
    L, D, heads, d = 5, 16, 2, 8
    plain, liere, string = (build(img_size=8, patch_size=4, embed_dim=D, depth=3, num_heads=heads, pos_embed=name)
                            for name in ("none", "liere", "string"))  # fmt: skip
    rotating = 2 * L * D  # multiplied by the side of a rotation: queries and keys
    assert count_macs(liere) - count_macs(plain) == 3 * (5 * heads * L * d**3 + rotating * d)
    solving = heads * (2 * d**3 // 3 // 2 + d**3)
    assert count_macs(string) - count_macs(plain) == pytest.approx(3 * (solving + 2 * rotating * d), abs=3 * heads)


@pytest.mark.slow
@pytest.mark.parametrize("name", get_args(PosEmbedName))
def test_a_network_at_another_size_costs_what_one_built_for_it_does(name):
    small, large = (build(img_size=side, patch_size=4, embed_dim=16, depth=1, num_heads=2, pos_embed=name)
                    for side in (8, 20))  # fmt: skip
    assert count_macs(small, (20, 20)) == count_macs(large)


def test_tokens_are_prefix_and_patches():
    assert count_tokens(build(**SIZES["t2t_vit_14"], reg_tokens=4)) == 1 + 4 + 196


def test_vit_b_has_heads_of_64_channels():
    widths = {name: SIZES[name]["embed_dim"] // SIZES[name]["num_heads"] for name in SIZES}
    assert {name: d for name, d in widths.items() if d != 64} == {
        "vit_h14": 80,
        "t2t_vit_14_resnext": 12,
        "t2t_vit_dense": 16,
    }


def test_another_image_size_changes_tokens_and_no_parameter():
    small, large = build(**SIZES["t2t_vit_14"]), build(**SIZES["t2t_vit_14"] | {"img_size": 384})
    assert count_parameters(small) == count_parameters(large)
    assert count_tokens(large) - count_tokens(small) == 380


@pytest.mark.parametrize(("embed_dim", "parameters"), [(256, 313_574), (384, 387_430), (448, 424_358), (512, 461_286)])
def test_the_tokenizer_alone_has_the_published_number_of_parameters(embed_dim, parameters):
    arguments = {"tokenizer": "t2t", "embed_dim": embed_dim, "num_heads": 1, "depth": 1, "norm_eps": 1e-5}
    assert count_parameters(build(**arguments, t2t_attn="performer").tokenizer) == parameters
    assert count_parameters(build(**arguments, t2t_attn="transformer").tokenizer) == parameters - 384


def test_convolutions_for_a_tokenizer_give_the_published_number_of_parameters():
    assert count_parameters(build(**SIZES["t2t_vit_14"] | {"tokenizer": "conv"})) == 21_346_344


def test_the_articles_models_have_their_numbers_of_parameters():
    common = {
        "img_size": (400, 100),
        "in_chans": 1,
        "num_classes": 1,
        "embed_dim": 768,
        "num_heads": 4,
        "qkv_bias": False,
        "pos_embed": "sincos1d",
    }
    assert count_parameters(build(**common, patch_size=50)) == 86_950_657
    t2t = build(**common, tokenizer="t2t", t2t_attn="transformer")
    assert count_parameters(t2t) == 85_619_491
    assert count_parameters(t2t.tokenizer) == 589_602
