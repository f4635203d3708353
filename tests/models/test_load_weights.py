"""Weights of this library and of others fill a network, and what differs is told or refused."""

import argparse
import json
import re
from functools import partial

import pytest
import torch
from safetensors.torch import save_file
from timm.layers import SwiGLUPacked
from timm.models.vision_transformer import VisionTransformer as TimmViT
from torch import nn

from tests.models.saved import T2T, TINY, UNSAID, assert_same_outputs, official, tiny
from tests.networks import randomized
from vitlab.layers.pos_embed.added import SinCos2d
from vitlab.models.convert import to_timm
from vitlab.models.create import create_model
from vitlab.models.load import load_network, load_weights
from vitlab.models.weights_file import WeightsFile

# Our own files


@pytest.mark.parametrize("pos_embed", ["none", "learned", "factorized", "relpos", "rope_mixed", "conv"])
def test_a_plain_state_dict_is_loaded_without_a_message(path, pos_embed):
    saved = randomized(tiny(pos_embed=pos_embed))
    torch.save(saved.state_dict(), path)
    model = tiny(pos_embed=pos_embed)
    sentences = load_weights(model, path)
    assert [s for s in sentences if "does not say its grid" not in s] == []
    assert_same_outputs(model, saved)


def test_safetensors_are_loaded_with_their_stored_arguments(tmp_path):
    saved = randomized(tiny(pos_embed="sincos2d"))
    path = tmp_path / "weights.safetensors"
    save_file(saved.state_dict(), path, metadata={"hyper_parameters": json.dumps(TINY | {"pos_embed": "sincos2d"})})
    model = tiny(pos_embed="sincos2d")
    assert load_weights(model, path) == []
    assert_same_outputs(model, saved)
    with pytest.raises(ValueError, match="trained on a 4 x 4 grid and the model has 6 x 6"):
        load_weights(tiny(img_size=24, pos_embed="sincos2d"), path)


def test_a_lightning_checkpoint_is_loaded_and_other_entries_are_named(path):
    saved = randomized(tiny())
    state = {f"net.{name}": value for name, value in saved.state_dict().items()} | {"loss.weight": torch.ones(5)}
    torch.save({"state_dict": state, "hyper_parameters": TINY | {"lr": 1e-3}, "epoch": 3}, path)
    model = tiny()
    assert load_weights(model, path) == ["weights: left out what lies outside the network, loss.weight"]
    assert_same_outputs(model, saved)


@pytest.mark.parametrize("prefix", ["model.", "student.backbone."])
def test_a_prefix_that_all_names_have_is_stripped_and_told(path, prefix):
    saved = randomized(TimmViT(**TINY))
    torch.save({"state_dict": {prefix + name: value for name, value in saved.state_dict().items()}}, path)
    model = tiny(pos_embed="learned")
    assert f"weights: those under {prefix}" in load_weights(model, path)
    assert_same_outputs(model, saved)
    sizes = {name: value for name, value in TINY.items() if name != "num_classes"}
    assert create_model(weights=path, pos_embed="learned", **sizes).num_classes == 5  # as in the file
    torch.save({f"any.{name}": value for name, value in tiny().state_dict().items()} | {"bias": torch.ones(1)}, path)
    with pytest.raises(ValueError, match=r"does not fit the model: .* has its network under `any\.`") as refused:
        load_weights(model, path)
    assert "model.pos_embed" not in str(refused.value)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "net._orig_mod."])
def test_prefixes_of_wrappers_are_stripped(path, prefix):
    saved = randomized(tiny())
    torch.save({"state_dict": {prefix + name: value for name, value in saved.state_dict().items()}}, path)
    model = tiny()
    assert load_weights(model, path) == [UNSAID]
    assert_same_outputs(model, saved)


def test_the_average_that_torch_makes_is_read(path):
    saved = randomized(tiny())
    averaged = torch.optim.swa_utils.AveragedModel(saved).state_dict()
    for content in (averaged, {"model": tiny().state_dict(), "model_ema": averaged}):  # the latter as torchvision does
        torch.save(content, path)
        load_weights(model := tiny(), path)
        assert_same_outputs(model, saved)


def test_averaged_weights_are_preferred(path):
    raw, averaged = randomized(tiny()), randomized(tiny())
    torch.save({"state_dict": raw.state_dict(), "state_dict_ema": averaged.state_dict()}, path)
    model = tiny()
    assert load_weights(model, path) == ["weights: state_dict_ema, the averaged ones", UNSAID]
    assert_same_outputs(model, averaged)


def test_a_published_command_line_in_the_file_does_no_harm(path):
    saved = randomized(tiny())
    torch.save({"model": saved.state_dict(), "args": argparse.Namespace(lr=1e-3)}, path)
    model = tiny()
    assert load_weights(model, path) == [UNSAID]
    assert_same_outputs(model, saved)


def test_weights_in_half_precision_fill_a_float32_model(path):
    saved = randomized(tiny())
    torch.save({name: value.bfloat16() for name, value in saved.state_dict().items()}, path)
    model = tiny()
    load_weights(model, path)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    torch.testing.assert_close(model.norm.weight, saved.norm.weight.bfloat16().float())


# Other libraries


@pytest.mark.parametrize("no_embed_class", [True, False])
@pytest.mark.parametrize("reg_tokens", [0, 2])
def test_a_timm_file_is_recognized(path, no_embed_class, reg_tokens):
    arguments = {"no_embed_class": no_embed_class, "reg_tokens": reg_tokens}
    theirs = randomized(TimmViT(**TINY, **arguments))
    torch.save(theirs.state_dict(), path)
    model = tiny(reg_tokens=reg_tokens)
    assert load_weights(model, path) == ["layout: converted from timm", UNSAID]
    assert_same_outputs(model, theirs_with_size(theirs))


def test_a_file_exported_to_timm_is_named_as_such_and_converted(path):
    saved = randomized(tiny(pos_embed="learned"))
    torch.save(to_timm(saved.state_dict(), saved.pos_embed.added()), path)
    path.with_name(f"{path.name}.json").write_text(json.dumps({"network": TINY | {"pos_embed": "learned"}}))
    with pytest.raises(ValueError, match=r"is in timm's format: give its run, .*--to safetensors"):
        load_network(path)
    assert_same_outputs(create_model(weights=path), saved)


def theirs_with_size(theirs):
    theirs.img_size = (16, 16)
    return theirs


@pytest.mark.parametrize(("registers", "gated"), [(0, False), (2, False), (0, True)])
def test_the_published_layout_of_dinov2_is_read(path, registers, gated):
    mlp = {"mlp_layer": SwiGLUPacked, "act_layer": nn.SiLU} if gated else {}
    theirs = randomized(TimmViT(**TINY, reg_tokens=registers, no_embed_class=True, init_values=1.0, **mlp))
    state = theirs.state_dict() | {"mask_token": torch.ones(1, 16)}
    if gated:  # of the giant, whose two halves are one layer
        state = {name.replace("fc1", "w12").replace("fc2", "w3"): value for name, value in state.items()}
    state["pos_embed"] = torch.cat([torch.zeros(1, 1, 16), state["pos_embed"]], dim=1)
    if registers:
        state["register_tokens"] = state.pop("reg_token")
    torch.save(state, path)
    ours = {"mlp_layer": "swiglu", "act_layer": "silu", "mlp_ratio": 1.0} if gated else {}
    model = tiny(pos_embed="learned", reg_tokens=registers, layer_scale=1.0, **ours)
    assert "weights: left out mask_token, which only pretraining needs" in load_weights(model, path)
    assert_same_outputs(model, theirs)


@pytest.mark.parametrize("t2t_attn", ["performer", "transformer"])
def test_an_official_t2t_file_is_recognized(path, t2t_attn):
    saved = randomized(tiny(**T2T | {"t2t_attn": t2t_attn}))
    state = {f"module.{name}": value for name, value in official(saved).items()}
    torch.save({"state_dict": {}, "state_dict_ema": state}, path)
    model = tiny(**T2T | {"t2t_attn": t2t_attn})
    assert load_weights(model, path) == [
        "weights: state_dict_ema, the averaged ones",
        "layout: converted from the official T2T-ViT",
        "positions: the file's table is that of the formula, which the model computes itself",
    ]
    assert_same_outputs(model, saved)


def test_an_official_class_position_becomes_part_of_the_class_token():
    state = official(randomized(tiny(**T2T)))
    state["pos_embed"][:, 0] = torch.randn(16)
    model = tiny(**T2T)
    load_weights(model, WeightsFile(state))
    torch.testing.assert_close(model.cls_token.data, state["cls_token"] + state["pos_embed"][:, :1])


def test_an_official_table_that_is_not_the_formula_is_kept(path):
    state = official(randomized(tiny(**T2T)))
    state["pos_embed"][0, 5, 3] += 1e-5
    torch.save(state, path)
    with pytest.raises(ValueError, match=r"build the model with pos_embed .class_path: learned, init_args: "):
        load_weights(tiny(**T2T), path)
    model = tiny(**T2T | {"pos_embed": "learned", "pos_embed_trainable": False})
    assert load_weights(model, path) == ["layout: converted from the official T2T-ViT"]
    assert torch.equal(model.pos_embed.weight, state["pos_embed"][:, 1:])


def test_an_official_formula_starts_a_learned_table(path):
    saved = randomized(tiny(**T2T))
    torch.save(official(saved), path)
    model = tiny(**T2T | {"pos_embed": "learned"})
    load_weights(model, path)
    assert torch.equal(model.pos_embed.weight[0], saved.pos_embed.table())


def test_maes_table_is_compared_with_the_formula_and_mocos_is_refused(path):
    saved = randomized(tiny(pos_embed="sincos2d"))
    torch.save(to_timm(saved.state_dict(), saved.pos_embed.table() + 1e-6), path)
    model = tiny(pos_embed="sincos2d")
    assert len(load_weights(model, path)) == 3
    assert_same_outputs(model, saved)
    torch.save(to_timm(saved.state_dict(), SinCos2d((4, 4), 16, style="moco").table()), path)
    with pytest.raises(ValueError, match="not that of the formula"):
        load_weights(model, path)
    with pytest.raises(ValueError, match=r"does not fit the model: .* of another shape \(cls_token \(1, 1, 16\), not"):
        load_weights(tiny(pos_embed="sincos2d", embed_dim=32), path)  # of which the table is the least


@pytest.mark.parametrize("network", [{}, T2T])
def test_weights_of_color_for_gray_images_name_the_way_out(path, network):
    """Gray photos can be read with three channels, and the line told shapes alone."""
    torch.save(tiny(**network).state_dict(), path)
    with pytest.raises(ValueError, match="its images have 3 channels, and 2 here: set "):
        load_weights(tiny(**network | {"in_chans": 2}), path, grid=(4, 4))
    with pytest.raises(ValueError) as refused:
        load_weights(tiny(**network | {"in_chans": 2, "embed_dim": 32}), path, grid=(4, 4))
    assert "channels" not in str(refused.value)


SCALED = {"class_path": "learned", "init_args": {"scale": 0.3}}


def scaled(method):
    return tiny(pos_embed={"class_path": method, "init_args": {"scale": 0.2}})


@pytest.mark.parametrize("method", ["learned", "sincos2d"])
def test_the_table_of_another_library_is_what_a_scaled_method_adds(path, method):
    saved, model = randomized(scaled(method)), scaled(method)
    torch.save(to_timm(saved.state_dict(), saved.pos_embed.added()), path)
    load_weights(model, path)
    assert_same_outputs(model, saved)


@pytest.mark.parametrize("changes", [{}, {"pos_embed": SCALED}, {"img_size": 24}, {"patch_size": 8}])
def test_weights_in_half_precision_are_converted_in_float32(path, changes):
    half = {name: value.bfloat16() for name, value in randomized(TimmViT(**TINY)).state_dict().items()}
    nets = tiny(**{"pos_embed": "learned"} | changes), tiny(**{"pos_embed": "learned"} | changes)
    for net, state in zip(nets, (half, {name: value.float() for name, value in half.items()}), strict=True):
        torch.save(state, path)
        load_weights(net, path, "usual", grid=(4, 4))
    assert_same_outputs(*nets)


@pytest.mark.parametrize("method", ["learned", "sincos2d"])
def test_another_scale_of_positions_is_said_and_the_table_stays(path, method):
    saved, one = randomized(scaled(method)), tiny(pos_embed=method)
    arguments = TINY | {"pos_embed": {"class_path": method, "init_args": {"scale": 0.2}}}
    torch.save({"state_dict": saved.state_dict(), "hyper_parameters": arguments}, path)
    assert load_weights(one, path) == [
        "`scale` of positions: the file's is 0.2 and the model's 1, so that the same table adds 5 times as much"
    ]
    torch.testing.assert_close(0.2 * one.pos_embed.added(), saved.pos_embed.added())
    assert load_weights(scaled(method), path) == []


def test_a_formula_is_refused_where_the_model_adds_a_fifth_of_it(path):
    saved = randomized(tiny(pos_embed="sincos2d"))
    torch.save(to_timm(saved.state_dict(), saved.pos_embed.added()), path)
    with pytest.raises(ValueError, match="not that of the formula"):
        load_weights(scaled("sincos2d"), path)


# What is told


def windows(tokenizer="t2t", **options):
    return {"tokenizer": {"class_path": tokenizer, "init_args": options}}


def two(*methods):
    return {"pos_embed": [*methods]}


def positions(method, **options):
    return {"pos_embed": {"class_path": method, "init_args": options}}


@pytest.mark.parametrize(
    ("file", "model", "told"),
    [
        ({}, {"dropout": 0.1, "drop_path_rate": 0.1, "init_std": 0.1, "grad_checkpoint": True}, None),
        (
            {"num_heads": 4},
            {"act_layer": "relu"},
            "act_layer=GELU(approximate='none'), num_heads=4; ReLU(), num_heads=2",
        ),
        ({"norm_eps": 1e-5}, {}, "norm_eps=1e-05; norm_eps=1e-06"),
        ({"global_pool": "avg"}, {}, "head: the file's reads global_pool=avg; has token"),
        ({"global_pool": "avg"}, {"num_classes": 3}, None),
        (two("learned", "rope2d"), two("learned", *positions("rope2d", theta=10.0).values()), "theta=100.0; 10.0"),
        (
            {},
            {"attn": {"class_path": "softmax", "init_args": {"value_skip": True, "attn_dropout": 0.1}}},
            "value_skip=False; value_skip=True",
        ),
        ({"tokenizer": "t2t"}, windows(fused=False, t2t_dropout=0.5), None),
        ({"tokenizer": "t2t"}, windows(t2t_attn="performer_relu"), "t2t_attn=performer; t2t_attn=performer_relu"),
        ({"tokenizer": "t2t"}, windows(t2t_strides=[2, 4, 2]), "t2t_strides=(4, 2, 2); t2t_strides=(2, 4, 2)"),
        ({"tokenizer": "conv"}, windows("conv", t2t_strides=[2, 4, 2]), "t2t_strides=(4, 2, 2); =(2, 4, 2)"),
        (two("learned", "alibi2d"), two("rope2d", "learned"), "Learned and Alibi2d; RoPE2d and Learned"),
        (two("learned", "rope2d"), two("rope2d", "learned"), None),
        ({"pos_embed": "sincos2d"}, positions("sincos2d", style="moco"), "style=mae; style=moco"),
        (positions("sincos2d", trainable=True), positions("sincos2d", trainable=True, style="moco"), None),
        ({}, positions("learned", join="every_layer_shared"), "join=stem; join=every_layer_shared"),
        (two("learned", "rope2d"), two("learned", {"class_path": "rope2d", "init_args": {"theta": 100}}), None),
    ],
)
def test_a_network_that_computes_something_else_with_the_same_weights_is_told(path, file, model, told):
    torch.save({"state_dict": tiny(**file).state_dict(), "hyper_parameters": {**TINY, **file}}, path)
    said = [sentence for sentence in load_weights(tiny(**model), path) if not sentence.startswith("head: not loaded")]
    assert len(said) == bool(told)
    theirs, _, ours = (told or "").partition("; ")
    before, after = re.split(" where |, the model ", said[0]) if told else ("", "")
    assert theirs in before and ours in after


PLACES = "weights: the file's network has place=-1 where this one has place=-2, and computes something else"


class Corner(nn.Module):
    """Reads a patch of the grid, which it keeps."""

    def __init__(self, grid_size, place=-1):
        super().__init__()
        self.grid_size, self.place = grid_size, place

    def forward(self, x):
        return x[:, self.place]


def test_the_grid_that_a_part_of_ones_own_keeps_is_told_by_the_positions_alone(path):
    own = {"global_pool": f"{__name__}.Corner"}
    torch.save({"state_dict": tiny(**own).state_dict(), "hyper_parameters": {**TINY, **own}}, path)
    (told,) = load_weights(tiny(**own, img_size=24), path, resize="usual")
    assert told.startswith("positions: interpolate from 4 x 4 to 6 x 6")


def test_a_head_below_a_pool_of_ones_own_is_told_whether_or_not_the_pool_has_arguments(path):
    own, args = f"{__name__}.Corner", {"place": -2}
    for pool in (own, {"class_path": own}, {"class_path": own, "init_args": args}):
        torch.save({"state_dict": tiny().state_dict(), "hyper_parameters": {**TINY, "global_pool": pool}}, path)
        assert load_weights(tiny(), path) == [f"head: the file's reads global_pool={own} where this one has token"]
        told = load_weights(tiny(global_pool={"class_path": own, "init_args": args}), path)
        assert told == ([] if isinstance(pool, dict) and "init_args" in pool else [PLACES])


def test_another_position_method_without_weights_is_reported(path):
    saved = randomized(tiny(pos_embed="sincos1d"))
    arguments = TINY | {"pos_embed": "sincos1d"}
    torch.save({"state_dict": saved.state_dict(), "hyper_parameters": arguments}, path)
    assert load_weights(tiny(pos_embed="rope2d"), path) == ["positions: trained with SinCos1d, the model has RoPE2d"]


# What is refused


OTHERS = {
    "vit.embeddings.patch_embeddings.projection.weight": "transformers has written it: .* as hf:FOLDER",
    "backbone.patch_embed.proj.weight": "it has its network under `backbone.`: save these weights alone",
    "my.model.blocks.0.norm1.weight": "it has its network under `my.model.`: save these weights alone",
    "decoder_pos_embed": "it has the decoder of a pretraining: save its weights without those of decoder_",
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_file_of_another_layout_is_refused_with_what_can_be_done(path, name):
    rest = tiny().state_dict() if name.startswith("decoder") else {"criterion.weight": torch.zeros(5)}
    torch.save({**rest, name: torch.zeros(3, 3)}, path)
    for refused in (partial(load_weights, tiny(), path, grid=(4, 4)), partial(load_network, path)):
        with pytest.raises(ValueError, match=OTHERS[name]) as told:
            refused()
        assert "model.pos_embed" not in str(told.value)


def test_weights_of_another_network_are_refused_with_the_differences(path):
    torch.save(randomized(tiny(depth=1, embed_dim=8, qk_norm=True)).state_dict(), path)
    model = tiny(qkv_bias=False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError) as error:
        load_weights(model, path)
    message = str(error.value)
    for part in ("missing (blocks.1.", "unexpected (blocks.0.attn.qkv.bias", "cls_token (1, 1, 8), not (1, 1, 16)"):
        assert part in message
    assert "\n" not in message
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("file", "model", "way_out"),
    [
        ({}, {"reg_tokens": 2}, "`model.class_token=true` and `model.reg_tokens=0`"),
        ({"reg_tokens": 3}, {"reg_tokens": 2}, "`model.class_token=true` and `model.reg_tokens=3`"),
        ({}, {"class_token": False, "global_pool": "avg"}, "`model.class_token=true` and `model.reg_tokens=0`"),
        (
            {"class_token": False, "global_pool": "avg"},
            {},
            "`model.class_token=false`, `model.reg_tokens=0` and `model.global_pool=avg`",
        ),
    ],
)
def test_weights_of_other_tokens_before_the_patches_name_their_arguments(path, file, model, way_out):
    torch.save(tiny(**file).state_dict(), path)
    with pytest.raises(ValueError, match=f"build the model with {re.escape(way_out)}$"):
        load_weights(tiny(**model), path)
