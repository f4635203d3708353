import json
import logging
from contextlib import nullcontext
from functools import partial

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.models import save_for_hf
from torchvision.models import VisionTransformer as TorchvisionViT

import vitlab.models
from vitlab.data.timm_images import images_of_timm
from vitlab.models import VisionTransformer, create, create_model, load, load_network, timm_networks
from vitlab.models.convert import convert_layout
from vitlab.models.create import load_of_library
from vitlab.models.walk import as_transformer
from vitlab.models.weights_file import read_weights

TINY = {"img_size": 16, "patch_size": 4, "in_chans": 1, "num_classes": 5, "embed_dim": 16, "depth": 2, "num_heads": 2}


@pytest.fixture
def checkpoint(tmp_path):
    net = VisionTransformer(**TINY)
    arguments = {**TINY, "lr": 0.1}  # as a task saves them
    state = {f"net.{name}": value for name, value in net.state_dict().items()}
    torch.save({"state_dict": state, "hyper_parameters": arguments}, tmp_path / "last.ckpt")
    return net.eval(), tmp_path / "last.ckpt"


def test_vitlab_models_exports_its_public_names_and_nothing_else():
    assert {"SIZES", "VisionTransformer", "create_model", "load_network"} <= set(dir(vitlab.models))
    with pytest.raises(AttributeError, match="no attribute 'creat_model'"):
        vitlab.models.creat_model  # noqa: B018


def test_a_size_sets_arguments_and_given_ones_override_them():
    net = create_model("vit_ti16", pos_embed="rope2d", img_size=(32, 48), depth=2, num_classes=7)
    assert (net.embed_dim, net.grid_size, len(net.blocks), net.num_classes) == (192, (2, 3), 2, 7)
    assert type(net.pos_embed).__name__ == "RoPE2d"
    assert create_model(**TINY).state_dict().keys() == VisionTransformer(**TINY).state_dict().keys()


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        (
            "t2t_vit_15",
            {},
            r"`name` must be one of vit_ti16, .* or torchvision:NAME, got 't2t_vit_15'; did you mean \"t2t_vit_1",
        ),
        ("vit_s16", {"pos_embd": "none"}, "a network has no argument 'pos_embd'; did you mean \"pos_embed\""),
        ("timm:vit_tiny_patch16_22", {}, 'timm has no .* for timm:vit_tiny_patch16_22: .*did you mean "vit_tiny'),
        ("vit_s16", {"weights": "nowhere.pt"}, "no such file: nowhere.pt"),
        ("vit_s16", {"pretrained": True}, "no argument 'pretrained'; trained weights are those of `weights`"),
    ],
)
def test_a_name_that_does_not_exist_is_one_line_with_the_closest(name, arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        create_model(name, **arguments)
    assert "\n" not in str(error.value)


def test_no_other_name_is_proposed_where_a_download_fails(monkeypatch):
    def offline(*args, **kwargs):
        raise OSError("no internet")

    monkeypatch.setattr(timm, "create_model", offline)
    for name in ("timm:deit_small_patch16_224", "timm:deit_small_patch16_224.fb_in1k"):
        with pytest.raises(ValueError, match=f"^timm has no weights to give for {name}: no internet$"):
            timm_networks.timm_model(name, pretrained=True)


def test_weights_bring_their_classes_unless_others_are_requested(checkpoint, caplog):
    net, path = checkpoint
    images = torch.randn(2, 1, 16, 16)
    again = create_model(weights=path, **{**TINY, "num_classes": 5}).eval()
    assert torch.equal(again(images), net(images))
    arguments = {name: value for name, value in TINY.items() if name != "num_classes"}
    assert torch.equal(create_model(weights=path, **arguments).eval()(images), net(images))
    with caplog.at_level(logging.INFO, logger="vitlab.models.create"):
        other = create_model(weights=path, **{**TINY, "num_classes": 3})
    assert other(images).shape == (2, 3) and torch.equal(other.norm.weight, net.norm.weight)
    assert caplog.messages == ["head: not loaded, the file's has 5 outputs and the model's new one 3"]


def test_positions_are_carried_to_another_grid(checkpoint, caplog):
    path = checkpoint[1]
    with caplog.at_level(logging.INFO, logger="vitlab.models.create"):
        larger = create_model(weights=path, **{**TINY, "img_size": 32})
    assert larger.pos_embed.weight.shape == (1, 64, 16)
    assert caplog.messages[0].startswith("positions: interpolate from 4 x 4 to 8 x 8")
    with pytest.raises(ValueError, match="the resize policy must be one of interpolate"):
        create_model(weights=path, resize=None, **{**TINY, "img_size": 32})


def saved_timm(name, folder):
    theirs = timm.create_model(name, pretrained=False).eval()
    for p in theirs.parameters():
        torch.nn.init.normal_(p, std=0.05)
    torch.save(theirs.state_dict(), folder / "timm.pt")
    return theirs, folder / "timm.pt"


@pytest.mark.slow
def test_a_network_of_timm_is_rebuilt_with_its_weights(tmp_path):
    theirs, path = saved_timm("test_vit", tmp_path)
    ours = create_model("timm:test_vit", weights=path).eval()
    images = torch.randn(2, 3, 160, 160)
    torch.testing.assert_close(ours(images), theirs(images), rtol=0, atol=1e-5)
    small = create_model("timm:test_vit", weights=path, num_classes=2, img_size=96)
    assert small(torch.randn(1, 3, 96, 96)).shape == (1, 2)


FAMILIES = {  # each at a small size: timm's class, arguments of its builder
    "vit_base_patch16_clip_quickgelu_224": {},
    "vit_giant_patch14_dinov2": {"mlp_ratio": 2.66667 * 2},
    "vit_little_patch16_reg1_gap_256": {},
    "vit_tiny_patch16_224": {},
    "deit3_small_patch16_224": {},
    "vit_base_patch16_siglip_224": {},
    "vit_base_patch16_siglip_gap_224": {},
    "beit_base_patch16_224": {},
    "beitv2_base_patch16_224": {},
    "eva02_base_patch14_224": {"ref_feat_shape": (4, 8), "scale_mlp": False},  # queries, keys and values by themselves
    "naflexvit_base_patch16_gap": {"img_size": None, "pos_embed_grid_size": (4, 8)},
    "naflexvit_base_patch16_siglip": {"img_size": None, "pos_embed_grid_size": (4, 8)},
    "vit_small_plus_patch16_dinov3": {},
    "eva02_tiny_patch14_224": {"ref_feat_shape": (4, 8)},  # published: the grid of 224 pixels
    "vit_medium_patch16_rope_reg1_gap_256": {"ref_feat_shape": (4, 8)},
    "vit_small_patch16_dinov3": {},
    "vit_small_patch16_rope_224": {},
    "vit_small_patch16_rope_ape_224": {},
    "vit_small_patch16_rope_mixed_224": {},
    "vit_small_patch16_rope_mixed_ape_224": {},
}
SMALL = {"img_size": (56, 112), "patch_size": 14, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_families_of_timm_are_rebuilt_from_their_files(name, tmp_path, monkeypatch):
    build = timm.create_model
    small = {key: value for key, value in (SMALL | FAMILIES[name]).items() if value is not None}
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: build(name, **small))
    theirs, path = saved_timm(name, tmp_path)
    ours, images = create_model(f"timm:{name}", weights=path).eval(), torch.randn(2, 3, 56, 112)
    with torch.no_grad():
        expected = theirs.eval()(images)
        torch.testing.assert_close(ours(images), expected, rtol=0, atol=2e-6 * float(expected.abs().max().clamp(min=5)))


def test_a_file_that_does_not_state_its_rotation_is_refused_until_the_user_does(tmp_path, monkeypatch):
    build = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: build(name, **SMALL))
    theirs, path = saved_timm("vit_small_patch16_dinov3", tmp_path)
    same = {"qkv_bias": False, "reg_tokens": 4, "layer_scale": 1.0, "global_pool": "avg", "norm_eps": 1e-5}
    with pytest.raises(ValueError, match=r"timm's files do not say how they rotate; .* half, yx for DINOv3"):
        create_model(weights=path, pos_embed="rope2d", **SMALL, **same)
    said = {"coordinates": "normalized", "pairs": "half", "axes": "yx"}
    rotation = {"class_path": "rope2d", "init_args": said}
    ours, images = create_model(weights=path, pos_embed=rotation, **SMALL, **same).eval(), torch.randn(1, 3, 56, 112)
    torch.testing.assert_close(ours(images), theirs.eval()(images), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_rotation_that_is_stated_beside_a_file_is_the_models_in_every_respect_or_the_file_is_refused(
    tmp_path, monkeypatch
):
    build = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: build(name, **SMALL))
    path = saved_timm("vit_small_patch16_dinov3", tmp_path)[1]
    ours = {**SMALL, "qkv_bias": False, "reg_tokens": 4, "layer_scale": 1.0, "global_pool": "avg"}
    ours |= {"pos_embed": "rope2d"}
    others = {"theta": 50.0, "coordinates": "normalized", "pairs": "half", "axes": "yx", "register_theta": 100.0}
    for said in ({}, *({key: value} for key, value in others.items())):
        stated = ours | {"pos_embed": {"class_path": "rope2d", "init_args": said}}
        path.with_name("timm.pt.json").write_text(json.dumps({"network": stated}))
        with pytest.raises(ValueError, match="do not say how they rotate") if said else nullcontext():
            create_model(weights=path, **ours)


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("eva02_base_patch14_224", "it has scale_mlp$"),
        ("vit_base_patch16_xp_224", "it has block_fn=ParallelScalingBlock"),
        ("vit_small_patch16_18x2_224", "it has block_fn=ParallelThingsBlock"),
        ("eva02_tiny_patch14_336", "RotaryEmbeddingCat of another grid"),
        ("naflexvit_base_patch16_par_gap", "pos_embed_ar_preserving"),
        ("deit_tiny_distilled_patch16_224", "a distillation token"),
        ("vit_relpos_small_patch16_224", "VisionTransformerRelPos"),
    ],
)
def test_families_without_a_counterpart_are_refused_with_what_is_missing(name, missing, tmp_path, monkeypatch):
    build = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: build(name, embed_dim=32, depth=1, num_heads=2))
    with pytest.raises(ValueError, match=f"has no counterpart here.*{missing}|{missing} has no counterpart"):
        create_model(f"timm:{name}", weights=tmp_path / "never_read.pt")


def test_a_network_of_timm_without_a_counterpart_is_refused_with_what_is_missing(tmp_path):
    with pytest.raises(ValueError, match="has no counterpart here: it has pool_include_prefix"):
        create_model("timm:test_vit3", weights=saved_timm("test_vit3", tmp_path)[1])


def test_another_family_of_timm_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"timm's ResNet has no counterpart here"):
        create_model("timm:test_resnet", weights=tmp_path / "never_read.pt")


def test_a_network_with_different_outputs_is_not_accepted_as_equivalent(tmp_path, monkeypatch):
    def with_attention_scale(name, pretrained=False):
        model = timm.models.VisionTransformer(img_size=32, patch_size=16, embed_dim=16, depth=1, num_heads=2)
        model.blocks[0].attn.scale = 3.0
        model.blocks[0].attn.fused_attn = False
        return model

    monkeypatch.setattr(timm, "create_model", with_attention_scale)
    torch.save(with_attention_scale("").state_dict(), tmp_path / "timm.pt")
    with pytest.raises(ValueError, match="timm:scaled computes something else than this network"):
        create_model("timm:scaled", weights=tmp_path / "timm.pt")


def test_a_table_with_a_rotation_is_never_taken_for_a_table_alone(tmp_path, monkeypatch):
    build = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: build(name, **SMALL))
    theirs, path = saved_timm("vit_small_patch16_rope_ape_224", tmp_path)
    same = {"layer_scale": 1.0, "qkv_bias": True}
    with pytest.raises(ValueError, match=r"a pos_embed of \[learned, rope2d\] .*if nothing rotates, put"):
        create_model(weights=path, **SMALL, **same)
    rotation = {"class_path": "rope2d", "init_args": {"coordinates": "index", "pairs": "interleaved", "axes": "xy"}}
    ours = create_model(weights=path, pos_embed=["learned", rotation], **SMALL, **same).eval()
    images = torch.randn(1, 3, 56, 112)
    torch.testing.assert_close(ours(images), theirs.eval()(images), rtol=0, atol=1e-5)
    path.with_name("timm.pt.json").write_text('{"network": {"pos_embed": "learned"}}')
    create_model(weights=path, **SMALL, **same)


def test_weights_that_timm_fetches_are_loaded_into_no_other_network(monkeypatch):
    build = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: build(name, **SMALL))
    net = create_model("vit_s16", weights="timm:vit_small_patch16_224", **SMALL)
    assert net.grid_size == (4, 8)
    other = {"act_layer": "quick_gelu", "norm_eps": 1e-3}
    with pytest.raises(ValueError, match=r"act_layer=gelu and not quick_gelu, norm_eps=1e-06 and not 0\.001"):
        create_model("vit_s16", weights="timm:vit_small_patch16_224", **SMALL, **other)
    net = VisionTransformer(**SMALL | other)
    with pytest.raises(ValueError, match="build yours with act_layer=gelu"):
        load_of_library(net, "timm:vit_small_patch16_224", SMALL | other, "usual", None)


def test_a_file_that_states_its_network_builds_it_without_a_name(checkpoint):
    net, path = checkpoint
    images = torch.randn(2, 1, 16, 16)
    torch.testing.assert_close(create_model(weights=path).eval()(images), net(images))
    with pytest.raises(ValueError, match=r"create_model\(..., weights=...\) builds only the network"):
        vitlab.load(path)
    assert create_model(weights=path, img_size=24, num_classes=3).grid_size == (6, 6)


def test_weights_are_read_once(tmp_path, monkeypatch):
    path, read = tmp_path / "weights.pt", []
    torch.save(VisionTransformer(**SMALL).state_dict(), path)
    monkeypatch.setattr(create, "read_weights", lambda path: read.append(path) or read_weights(path))
    monkeypatch.setattr(load, "read_weights", create.read_weights)
    create_model(weights=path, **SMALL)
    assert read == [path]


# A network from its file


def test_a_checkpoint_gives_its_network_ready_to_evaluate(checkpoint):
    net, path = checkpoint
    again = load_network(path)
    images = torch.randn(2, 1, 16, 16)
    assert not again.training and torch.equal(again(images), net(images))


def test_the_head_of_a_file_decides_the_number_of_outputs(tmp_path):
    arguments = {name: value for name, value in TINY.items() if name != "num_classes"}  # a regressor's
    for outputs in (1, 0):
        net = VisionTransformer(**arguments, num_classes=outputs, head_hidden=3 * outputs)
        content = {"state_dict": net.state_dict(), "hyper_parameters": {**arguments, "head_hidden": 3 * outputs}}
        torch.save(content, tmp_path / "last.ckpt")
        assert load_network(tmp_path / "last.ckpt").num_classes == outputs


def test_safetensors_with_arguments_give_their_network(checkpoint, tmp_path):
    net, _ = checkpoint
    metadata = {"hyper_parameters": '{"img_size": 16, "patch_size": 4, "in_chans": 1, "embed_dim": 16, '}
    metadata["hyper_parameters"] += '"depth": 2, "num_heads": 2}'
    save_file(net.state_dict(), tmp_path / "net.safetensors", metadata)
    images = torch.randn(2, 1, 16, 16)
    assert torch.equal(load_network(tmp_path / "net.safetensors")(images), net(images))


def test_a_file_that_does_not_describe_its_network_is_refused(tmp_path):
    torch.save(VisionTransformer(**TINY).state_dict(), tmp_path / "weights.pt")
    with pytest.raises(ValueError, match="does not say how its network was built; give its arguments"):
        load_network(tmp_path / "weights.pt")


def test_a_file_that_does_not_fit_its_own_arguments_is_refused(tmp_path):
    state = VisionTransformer(**TINY).state_dict()
    torch.save({"state_dict": state, "hyper_parameters": {**TINY, "depth": 1}}, tmp_path / "torn.ckpt")
    with pytest.raises(ValueError, match=r"does not fit the model: 12 unexpected \(blocks.1"):
        load_network(tmp_path / "torn.ckpt")


def test_a_network_that_is_in_training_is_compared_without_dropout_and_stays_in_training():
    theirs = timm.models.VisionTransformer(**TINY, drop_path_rate=0.5, proj_drop_rate=0.5).train()
    theirs.blocks[0].eval()
    ours = as_transformer(theirs, "mine")
    assert ours.training and theirs.training and theirs.blocks[1].mlp.training
    assert not theirs.blocks[0].mlp.training


def test_a_network_in_half_precision_is_compared_in_full_and_keeps_its_precision():
    theirs = timm.models.VisionTransformer(**TINY).bfloat16()
    torch.nn.init.normal_(theirs.pos_embed)
    assert as_transformer(theirs, "mine").head.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(("in_chans", "patch"), [(1, 8), (4, (4, 8)), (5, 4), (12, 4)])
def test_patches_of_naflexvit_have_any_channels(in_chans, patch):
    from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg

    size = {"embed_dim": 16, "depth": 1, "num_heads": 2, "pos_embed_grid_size": (3, 2), "patch_size": patch}
    options = {"global_pool": "avg", "class_token": False, "pos_embed": "learned", "fc_norm": True}
    theirs = NaFlexVit(NaFlexVitCfg(**size, **options), in_chans=in_chans, num_classes=5).eval()
    assert as_transformer(theirs, "mine").tokenizer.proj.in_channels == in_chans  # which compares their outputs
    with pytest.raises(ValueError, match=r"patches have \d+ numbers, which are not 7 x 2 x 2: change `in_chans` or"):
        convert_layout(theirs.state_dict(), 6, 0, 2, patch=(7, 2, 2))


def test_a_width_of_the_mlp_that_the_quotient_misses_is_met():
    theirs = timm.models.VisionTransformer(**TINY | {"embed_dim": 88, "mlp_ratio": 1.3637})
    assert theirs.blocks[0].mlp.fc2.in_features == 120 and int(88 * (120 / 88)) == 119
    assert as_transformer(theirs, "mine").blocks[0].mlp.fc2.in_features == 120
    peer = TorchvisionViT(16, 8, num_layers=1, num_heads=2, hidden_dim=88, mlp_dim=120, num_classes=5)
    assert as_transformer(peer, "mine").blocks[0].mlp.fc2.in_features == 120


def test_pixels_that_no_patch_holds_are_cut_off_as_timm_does():
    theirs = timm.models.VisionTransformer(**TINY | {"img_size": (18, 19)})  # published: 384 in patches of 14
    assert as_transformer(theirs, "mine").img_size == (16, 16)  # which compares their outputs


def test_norms_of_torch_are_known_in_networks_of_timm():
    for norm in (torch.nn.RMSNorm, partial(torch.nn.RMSNorm, eps=1e-3)):
        ours = as_transformer(timm.models.VisionTransformer(**TINY, norm_layer=norm), "mine")
        assert isinstance(ours.norm, torch.nn.RMSNorm)


def test_a_folder_of_timm_states_how_its_images_are_prepared(tmp_path):
    theirs = timm.create_model("test_vit", num_classes=7)
    save_for_hf(theirs, tmp_path, model_config={"pretrained_cfg": theirs.pretrained_cfg | {"mean": (0.1, 0.2, 0.3)}})
    assert images_of_timm(f"timm:local-dir:{tmp_path}")["mean"] == [0.1, 0.2, 0.3]
    with pytest.raises(ValueError, match="A folder of timm is given as timm:local-dir:FOLDER"):
        vitlab.load(tmp_path / "pytorch_model.bin")
    net, transform = vitlab.load(f"timm:local-dir:{tmp_path}")
    assert net.num_classes == 7
    upright = Image.linear_gradient("L").convert("RGB")
    lying, exif = upright.rotate(90), Image.Exif()
    exif[0x0112] = 6  # orientation: to be turned clockwise, as analyses turn the file
    lying.save(tmp_path / "lying.png", exif=exif)
    assert torch.equal(transform(Image.open(tmp_path / "lying.png")), transform(upright))
    with pytest.raises(ValueError, match=r"timm:local-dir:nowhere is no folder with a config\.json of timm: "):
        images_of_timm("timm:local-dir:nowhere")
