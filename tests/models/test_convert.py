import pytest
import torch
from safetensors.torch import save_file
from timm.models.beit import Beit
from timm.models.eva import Eva
from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg

from vitlab.models.convert import from_timm, weights_for_timm
from vitlab.models.load import load_weights
from vitlab.models.vit import VisionTransformer
from vitlab.models.weights_file import WeightsFile

GRID = {"img_size": (24, 40), "patch_size": 8}  # 3 x 5
SIZE = {"embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}
ROPE = {"use_abs_pos_emb": False, "use_rot_pos_emb": True, "rope_grid_indexing": "xy", "attn_type": "rope"}


def randomized(model):
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model.eval()


def eva(rope_type, theta, **options):
    return randomized(
        Eva(
            **GRID,
            **SIZE,
            **ROPE,
            rope_type=rope_type,
            rope_temperature=theta,
            init_values=1.0,
            global_pool="token",
            **options,
        )
    )


def beit(**options):
    return randomized(Beit(**GRID, **SIZE, use_abs_pos_emb=False, init_values=0.1, global_pool="token", **options))


def ours(pos_embed, **options):
    return VisionTransformer(**GRID, **(SIZE | {"pos_embed": pos_embed} | options)).eval()


def check_equal(model, reference, images=None):
    images = torch.randn(2, 3, 24, 40) if images is None else images
    with torch.no_grad():
        expected = reference(images)
        torch.testing.assert_close(model(images), expected, rtol=1e-5, atol=1e-5)
        assert expected.std() > 1e-2


def test_a_class_token_that_timms_eva_pools_is_refused_both_ways():
    model = ours("rope_mixed", layer_scale=1.0, global_pool="map")
    reference = randomized(Eva(**GRID, **SIZE, **ROPE, rope_type="mixed", init_values=1.0, global_pool="map"))
    with pytest.raises(ValueError, match="pools class and register tokens, too"):
        load_weights(model, WeightsFile(reference.state_dict()))
    with pytest.raises(ValueError, match="pools class and register tokens, too"):
        weights_for_timm(model, reference)


@pytest.mark.parametrize(("name", "rope_type", "theta"), [("rope2d", "cat", 100.0), ("rope_mixed", "mixed", 10.0)])
def test_logits_of_timms_rope_vit(name, rope_type, theta):
    reference, model = eva(rope_type, theta), ours(name, layer_scale=1.0)
    model.load_state_dict(from_timm(reference.state_dict()))
    check_equal(model, reference)


def test_a_rotation_with_another_theta_gives_other_logits():
    reference, model = eva("cat", 100.0), ours("rope2d", layer_scale=1.0, rope_theta=10.0)
    model.load_state_dict(from_timm(reference.state_dict()))
    with pytest.raises(AssertionError):
        check_equal(model, reference)


@pytest.mark.parametrize("shared", [False, True])
def test_logits_of_timms_beit(shared):
    reference = beit(use_rel_pos_bias=not shared, use_shared_rel_pos_bias=shared)
    model = ours("relpos", layer_scale=0.1, pos_embed_join="every_layer_shared" if shared else None)
    model.load_state_dict(from_timm(reference.state_dict()))
    assert model.blocks[0].attn.qkv.bias[32:64].abs().max() == 0
    check_equal(model, reference)


def test_logits_of_timms_factorized_naflexvit():
    cfg = NaFlexVitCfg(
        patch_size=8, embed_dim=32, depth=2, num_heads=2, pos_embed="factorized", pos_embed_grid_size=(3, 5),
        class_token=True, global_pool="token", fc_norm=False, init_values=1.0,
    )  # fmt: skip
    reference, model = randomized(NaFlexVit(cfg, num_classes=5)), ours("factorized", layer_scale=1.0)
    model.load_state_dict(from_timm(reference.state_dict()))
    check_equal(model, reference)


def test_files_of_timm_load_into_the_model_that_they_belong_to(tmp_path):
    references = {"rope_mixed": eva("mixed", 10.0), "relpos": beit(use_rel_pos_bias=True)}
    for name, reference in references.items():
        save_file(reference.state_dict(), tmp_path / f"{name}.safetensors")
        model = ours(name, layer_scale=1.0)
        sentences = load_weights(model, tmp_path / f"{name}.safetensors")
        assert "layout: converted from timm" in sentences
        check_equal(model, reference)


def test_the_bias_table_of_another_square_grid_is_resized_when_loading(tmp_path):
    reference = Beit(24, 8, **SIZE, use_abs_pos_emb=False, use_rel_pos_bias=True, init_values=0.1, global_pool="token")
    save_file(reference.state_dict(), tmp_path / "beit.safetensors")
    model = ours("relpos", layer_scale=0.1)
    with pytest.raises(ValueError, match="the file has 28 positions and does not say their grid"):
        load_weights(model, tmp_path / "beit.safetensors", resize="interpolate")
    with pytest.raises(ValueError, match="trained on a 3 x 3 grid and the model has 3 x 5"):
        load_weights(model, tmp_path / "beit.safetensors", grid=(3, 3))
    sentences = load_weights(model, tmp_path / "beit.safetensors", resize="interpolate", grid=(3, 3))
    assert "positions: interpolate from 3 x 3 to 3 x 5" in sentences
    table = reference.blocks[1].attn.relative_position_bias_table
    assert torch.equal(model.pos_embed.bias_table[1, -3:], table[-3:])


def test_frequencies_of_naver_need_the_number_of_heads():
    reference = eva("mixed", 10.0).state_dict()
    state = {key: value for key, value in reference.items() if key != "rope.freqs"}
    state |= {
        "freqs": reference["rope.freqs"].flatten(2),
        "freqs_t_x": torch.arange(15.0),
        "freqs_t_y": torch.arange(15.0),
    }
    assert from_timm(state, num_heads=2).keys() == from_timm(reference).keys()
    assert torch.equal(from_timm(state, num_heads=2)["pos_embed.freqs"], reference["rope.freqs"])
    with pytest.raises(ValueError, match="`num_heads` must be given for the weights of naver-ai/rope-vit"):
        from_timm(state)
