"""The same logits as timm's ViT, with weights carried over in both directions."""

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer as TimmViT

from tests.networks import randomized
from vitlab.models.convert import from_timm, to_timm
from vitlab.models.vit import VisionTransformer

TINY = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 5}
VARIANTS = {  # timm's arguments, ours
    "default": ({}, {}),
    "avg": ({"global_pool": "avg", "fc_norm": False}, {"global_pool": "avg"}),
    "avg, then normalized": ({"global_pool": "avg"}, {"global_pool": "avg", "fc_norm": True}),
    "max": ({"global_pool": "max", "fc_norm": False}, {"global_pool": "max"}),
    "map": ({"global_pool": "map", "fc_norm": False}, {"global_pool": "map"}),
    "avg without class token": (
        {"global_pool": "avg", "fc_norm": False, "class_token": False},
        {"global_pool": "avg", "class_token": False},
    ),
    "map with registers": ({"global_pool": "map", "reg_tokens": 4}, {"global_pool": "map", "reg_tokens": 4}),
    "registers": ({"reg_tokens": 4}, {"reg_tokens": 4}),
    "registers alone": (
        {"reg_tokens": 3, "class_token": False, "global_pool": "avg", "fc_norm": False},
        {"reg_tokens": 3, "class_token": False, "global_pool": "avg"},
    ),
    "LayerScale": ({"init_values": 0.5}, {"layer_scale": 0.5}),
    "qk_norm": ({"qk_norm": True}, {"qk_norm": True}),
    "no qkv bias": ({"qkv_bias": False}, {"qkv_bias": False}),
    "no positions of prefix tokens": ({"no_embed_class": True, "reg_tokens": 2}, {"reg_tokens": 2}),
    "no positions": ({"pos_embed": "none"}, {"pos_embed": "none"}),
    "non-square": ({"img_size": (12, 20)}, {"img_size": (12, 20)}),
    "non-square with registers": ({"img_size": (8, 20), "reg_tokens": 1}, {"img_size": (8, 20), "reg_tokens": 1}),
    "one channel": ({"in_chans": 1}, {"in_chans": 1}),
    "other activation": ({"act_layer": "silu"}, {"act_layer": "silu"}),
    "tanh gelu": ({"act_layer": "gelu_tanh"}, {"act_layer": "gelu_tanh"}),
    "RMSNorm": ({"norm_layer": "rmsnorm"}, {"norm_layer": "rmsnorm"}),
    "mlp_ratio 1.5": ({"mlp_ratio": 1.5}, {"mlp_ratio": 1.5}),
    "features": ({"num_classes": 0}, {"num_classes": 0}),
}


def images_for(arguments):
    img_size = arguments["img_size"]
    H, W = (img_size, img_size) if isinstance(img_size, int) else img_size
    return torch.randn(2, arguments.get("in_chans", 3), H, W, dtype=torch.float64)


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_from_timm_give_timms_logits(variant):
    theirs_only, ours_only = VARIANTS[variant]
    theirs = randomized(TimmViT(**TINY | theirs_only)).double()
    ours = VisionTransformer(**TINY | ours_only).eval().double()
    ours.load_state_dict(from_timm(theirs.state_dict(), num_patches=ours.grid_size[0] * ours.grid_size[1]))
    images = images_for(TINY | ours_only)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images), rtol=0, atol=1e-10)
        torch.testing.assert_close(ours.float()(images.float()), theirs.float()(images.float()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_to_timm_give_our_logits(variant):
    theirs_only, ours_only = VARIANTS[variant]
    ours = randomized(VisionTransformer(**TINY | ours_only)).double()
    theirs = TimmViT(**TINY | theirs_only).eval().double()
    theirs.load_state_dict(to_timm(ours.state_dict(), no_embed_class=theirs_only.get("no_embed_class", False)))
    images = images_for(TINY | ours_only)
    with torch.no_grad():
        torch.testing.assert_close(theirs(images), ours(images), rtol=0, atol=1e-10)


@pytest.mark.parametrize("reg_tokens", [0, 2])
@pytest.mark.parametrize("rows", ["patches", "class", "prefix"])
def test_prefix_positions_are_folded_by_the_number_of_rows(reg_tokens, rows):
    state = VisionTransformer(**TINY, reg_tokens=reg_tokens).state_dict()
    extra = {"patches": 0, "class": 1, "prefix": 1 + reg_tokens}[rows]
    table = torch.randn(1, extra + 16, 16)
    theirs = to_timm(state) | {"pos_embed": table}
    for num_patches in [16, None] if extra == 1 + reg_tokens else [16]:
        ours = from_timm(theirs, num_patches)
        assert torch.equal(ours["pos_embed.weight"], table[:, extra:])
        cls_position = table[:, :1] if extra else torch.zeros(1, 1, 16)
        assert torch.equal(ours["cls_token"], theirs["cls_token"] + cls_position)
        if reg_tokens:
            reg_position = table[:, 1 : 1 + reg_tokens] if rows == "prefix" else torch.zeros(1, reg_tokens, 16)
            assert torch.equal(ours["reg_token"], theirs["reg_token"] + reg_position)


def test_a_number_of_rows_that_fits_no_layout_is_refused():
    theirs = to_timm(VisionTransformer(**TINY).state_dict())
    with pytest.raises(ValueError, match="got 17 rows, 12 patches and 1 prefix tokens"):
        from_timm(theirs, num_patches=12)


def test_conversion_leaves_its_input_alone():
    theirs = TimmViT(**TINY).state_dict()
    before = {name: value.clone() for name, value in theirs.items()}
    from_timm(theirs)
    assert theirs.keys() == before.keys()
    assert all(torch.equal(theirs[name], before[name]) for name in before)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"pos_embed": "factorized"}, "pos_embed.row"),
        ({"pos_embed_join": "every_layer"}, "a position table per block"),
        ({"head_hidden": 8}, "head.0.weight"),
        ({"tokenizer": "conv", "t2t_kernels": (3, 3), "t2t_strides": (2, 2)}, "patch_embed.convs.0.weight"),
    ],
)
def test_a_part_without_a_counterpart_in_timm_is_refused(arguments, reason):
    with pytest.raises(ValueError, match=f"no counterpart of.*{reason}"):
        to_timm(VisionTransformer(**TINY | arguments).state_dict())


@pytest.mark.parametrize("pos_embed", ["sincos1d", "sincos2d"])
def test_a_formula_table_is_written_for_timm_when_given(pos_embed):
    ours = randomized(VisionTransformer(**TINY, pos_embed=pos_embed)).double()
    theirs = TimmViT(**TINY).eval().double()
    theirs.load_state_dict(to_timm(ours.state_dict(), ours.pos_embed.table()))
    images = images_for(TINY)
    with torch.no_grad():
        torch.testing.assert_close(theirs(images), ours(images), rtol=0, atol=1e-10)


def test_gradients_are_timms():
    theirs = randomized(TimmViT(**TINY, qk_norm=True, init_values=0.1)).double()
    ours = VisionTransformer(**TINY, qk_norm=True, layer_scale=0.1).double()
    ours.load_state_dict(from_timm(theirs.state_dict()))
    images = images_for(TINY)
    for model in (ours, theirs):
        model(images).square().sum().backward()
    for name, p in theirs.blocks.named_parameters():
        torch.testing.assert_close(ours.blocks.get_parameter(name).grad, p.grad, rtol=0, atol=1e-10)
    torch.testing.assert_close(ours.cls_token.grad, theirs.cls_token.grad, rtol=0, atol=1e-10)


def test_clip_goes_back_to_timm_with_the_bias_of_patches_in_the_table():
    torch.manual_seed(0)
    clip = TimmViT(**TINY, pre_norm=True, norm_layer=torch.nn.LayerNorm).eval()
    for p in clip.parameters():
        torch.nn.init.normal_(p, std=0.2)
    ours = VisionTransformer(**TINY, pre_norm=True, norm_eps=1e-5).eval()
    ours.load_state_dict(from_timm(clip.state_dict()))
    back = TimmViT(**TINY, pre_norm=True, norm_layer=torch.nn.LayerNorm).eval()
    back.load_state_dict(to_timm(ours.state_dict()))
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(back(images), clip(images), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(ours(images), clip(images), atol=1e-5, rtol=1e-5)
    torch.nn.init.constant_(ours.tokenizer.proj.bias, 0.5)
    back.load_state_dict(to_timm(ours.state_dict()))  # the table takes it
    with torch.no_grad():
        torch.testing.assert_close(back(images), ours(images), atol=1e-5, rtol=1e-5)
    bare = VisionTransformer(**TINY, pre_norm=True, pos_embed="none")
    torch.nn.init.constant_(bare.tokenizer.proj.bias, 0.5)
    with pytest.raises(ValueError, match=r"no bias of patches .* up to 5.0e-01: set it to 0"):
        to_timm(bare.state_dict())
