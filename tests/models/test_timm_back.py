"""One network of a family of timm is read, goes back with a strict load, and gives equal logits."""

import pytest
import torch

from vitlab.models.convert import weights_for_timm
from vitlab.models.load import load_weights
from vitlab.models.timm_networks import timm_arguments, timm_file
from vitlab.models.vit import VisionTransformer

timm = pytest.importorskip("timm")
FAMILIES = [  # one of each, two blocks deep
    *(
        "vit_tiny_patch16_224",
        "deit3_small_patch16_224",
        "vit_small_patch14_reg4_dinov2",
        "vit_base_patch32_siglip_256",
    ),
    *("vit_base_patch32_clip_224", "vit_small_patch16_dinov3", "vit_small_patch16_rope_224"),
    *("vit_small_patch16_rope_mixed_224", "vit_small_patch16_rope_mixed_ape_224", "beitv2_base_patch16_224"),
    *("eva02_tiny_patch14_224", "naflexvit_base_patch16_gap", "naflexvit_base_patch16_siglip"),
]


def read(name):
    torch.manual_seed(0)
    theirs = timm.create_model(name, depth=2, num_classes=5).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(0.02 * torch.randn_like(p))
    ours = VisionTransformer(**timm_arguments(theirs)).eval()
    load_weights(ours, timm_file(theirs, f"timm:{name}"))
    return theirs, ours


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.rare if "base" in name else pytest.mark.slow) for name in FAMILIES]
)
def test_a_network_of_timm_goes_back_with_equal_logits(name):
    theirs, ours = read(name)
    back = timm.create_model(name, depth=2, num_classes=5).eval()
    back.load_state_dict(weights_for_timm(ours, back), strict=True)
    images = torch.randn(1, 3, *ours.img_size)
    with torch.no_grad():
        expected = theirs(images)
        torch.testing.assert_close(back(images), expected, atol=1e-5 * float(expected.abs().max().clamp(min=1)), rtol=0)


def test_a_weight_without_a_place_is_named():
    size = {"img_size": 32, "patch_size": 16, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 5}
    theirs = timm.models.VisionTransformer(**size)
    with pytest.raises(ValueError, match=r"do not fit timm's VisionTransformer: no counterpart of .*pos_embed.row"):
        weights_for_timm(VisionTransformer(**size, pos_embed="factorized"), theirs)
    with pytest.raises(ValueError, match=r"`cls_token` of timm's VisionTransformer is \(1, 1, 16\), ours \(1, 1, 8\)"):
        weights_for_timm(VisionTransformer(**size | {"embed_dim": 8}), theirs)


@pytest.mark.parametrize("fused", [True, False])
def test_a_bias_of_keys_that_are_normalized_is_not_left_out(fused):
    size = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 5}
    theirs = timm.models.Eva(**size, qk_norm=True, use_rot_pos_emb=False, qkv_fused=fused).eval()
    attn = {"class_path": "softmax", "init_args": {"qk_norm": True}}
    ours = VisionTransformer(**size, attn=attn, global_pool="avg", fc_norm=True).eval()
    with torch.no_grad():
        ours.blocks[0].attn.qkv.bias.fill_(0.3)
    with pytest.raises(ValueError, match=r"has no bias of keys, and `blocks\.0\.attn\.qkv\.bias` has one"):
        weights_for_timm(ours, theirs)
