import pytest
import torch
from safetensors.torch import save_file
from timm.models.beit import Beit
from timm.models.eva import Eva
from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg
from timm.models.vision_transformer import VisionTransformer as TimmViT

from tests.networks import randomized
from vitlab.models.convert import from_timm, resize_patch_kernels, same_table, weights_for_timm
from vitlab.models.load import load_weights
from vitlab.models.timm_networks import timm_positions
from vitlab.models.vit import VisionTransformer
from vitlab.models.weights_file import WeightsFile

GRID = {"img_size": (24, 40), "patch_size": 8}  # 3 x 5
SIZE = {"embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}
ROPE = {"use_abs_pos_emb": False, "use_rot_pos_emb": True, "rope_grid_indexing": "xy", "attn_type": "rope"}


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


def test_a_pool_that_may_be_evas_is_that_of_a_vit_where_the_file_says_so():
    clip = {"pre_norm": True, "global_pool": "map", "fc_norm": False}
    theirs, model = randomized(TimmViT(**GRID, **SIZE, **clip).eval(), 0.3), ours("learned", **clip)
    with pytest.raises(ValueError, match=r"seems to be of timm's Eva, .* If it is of timm's VisionTransformer, put"):
        load_weights(model, WeightsFile(theirs.state_dict()))
    load_weights(model, WeightsFile(theirs.state_dict(), {"pos_embed": "learned"}))
    check_equal(model, theirs)
    clip |= {"class_token": False}  # all that either pools is patches
    theirs, model = randomized(TimmViT(**GRID, **SIZE, **clip).eval(), 0.3), ours("learned", **clip)
    with pytest.raises(ValueError, match="timm's files do not say how they rotate"):  # which Eva's may
        load_weights(model, WeightsFile(theirs.state_dict()))


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


def test_projections_and_halves_that_timm_keeps_apart_are_fused_in_their_order():
    rows = lambda value: torch.full((2, 3), float(value))  # noqa: E731
    attn = {f"blocks.0.attn.{name}_proj.weight": rows(i) for i, name in enumerate("kqv", 1)}
    attn |= {"blocks.0.attn.q_bias": rows(5)[0], "blocks.0.attn.v_bias": rows(6)[0]}  # of keys there is none: 0
    gated = {f"blocks.0.mlp.fc1_{name}.weight": rows(i) for name, i in (("x", 7), ("g", 8))}
    found = {name.removeprefix("blocks.0."): value for name, value in from_timm(attn | gated).items()}
    assert {name: value.flatten()[::3].tolist() for name, value in found.items()} == {
        "attn.qkv.weight": [2, 2, 1, 1, 3, 3], "attn.qkv.bias": [5, 0, 6], "mlp.fc1.weight": [8, 8, 7, 7]
    }  # fmt: skip


def test_flat_kernels_of_naflexvit_are_rows_of_pixels_of_channels():
    kernels = torch.arange(48.0).view(2, 24)  # of 2 x 4 pixels of 3 channels
    found = from_timm({"embeds.proj.weight": kernels}, patch=(3, 2, 4))["tokenizer.proj.weight"]
    assert (
        found.shape == (2, 3, 2, 4) and found[1, 2, 1, 3] == 47 and found[0, 1, 0, 2] == 7 and found[0, 0, 1, 0] == 12
    )
    shapes = [from_timm({"embeds.proj.weight": torch.zeros(1, n)})["tokenizer.proj.weight"].shape for n in (48, 64, 32)]
    assert shapes == [(1, 3, 4, 4), (1, 1, 8, 8), (1, 2, 4, 4)]  # unless they are told, squares of few channels


def test_each_prefix_token_gets_its_own_rows_of_the_table_in_float32():
    table = torch.tensor([1.0, 2, 3, 4, 5]).half().view(1, 5, 1)
    tokens = {"cls_token": torch.full((1, 1, 1), 2048.0).half(), "reg_token": torch.tensor([[[20.0], [30.0]]]).half()}
    found = from_timm({"pos_embed": table, **tokens}, num_patches=2)
    assert found["cls_token"].item() == 2049  # which float16 does not have
    assert found["reg_token"].flatten().tolist() == [22, 33] and found["pos_embed.weight"].flatten().tolist() == [4, 5]
    found = from_timm({"pos_embed": table, **tokens}, num_patches=4)  # rows of the class token and the patches
    assert found["cls_token"].item() == 2049 and found["reg_token"].flatten().tolist() == [20, 30]


def test_a_table_is_that_of_a_formula_only_if_neither_is_larger():
    one = torch.ones(4, 8)
    for other, same in ((one + 1e-7, True), (one - 1e-7, True), (one + 0.1, False), (one - 0.1, False)):
        assert same_table(one, other, tolerance=1e-6) == same
    assert not same_table(one, one[:2], tolerance=1e-6)


def test_kernels_are_resized_if_one_of_their_sides_is_another():
    state = {"tokenizer.proj.weight": torch.randn(4, 3, 8, 8)}
    for patch in ((8, 4), (4, 8)):
        resized, told = resize_patch_kernels(state, patch)
        assert resized["tokenizer.proj.weight"].shape == (4, 3, *patch)
        assert told == ["patches: kernels of 8 x 8 resized to {} x {}".format(*patch)]
    assert resize_patch_kernels(state, (8, 8)) == (state, [])


@pytest.mark.parametrize(("indexing", "axes"), [("ij", "yx"), ("xy", "xy")])
@pytest.mark.parametrize(("half", "pairs"), [(False, "interleaved"), (True, "half")])
def test_the_rotation_of_timm_is_described_as_it_is(indexing, axes, half, pairs):
    rope = ROPE | {"rope_grid_indexing": indexing, "rope_rotate_half": half}
    theirs = Eva(**GRID, **SIZE, **rope, rope_type="cat", rope_temperature=50.0)
    args = {"coordinates": "index", "theta": 50.0, "axes": axes, "pairs": pairs}
    assert timm_positions(theirs) == {"class_path": "rope2d", "init_args": args}
