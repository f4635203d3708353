import argparse
import errno
import json
import os
import pickle
import re
from functools import partial
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from safetensors.torch import save_file
from timm.layers import SwiGLUPacked
from timm.models.vision_transformer import VisionTransformer as TimmViT
from torch import nn
from torch.nn import functional as F

from tests.networks import randomized
from vitlab.errors import UsageError
from vitlab.interface import has_grid
from vitlab.jobs.checkpoint import load_checkpoint, save_weights
from vitlab.jobs.train.initial import load_initial
from vitlab.layers.pos_embed.added import SinCos1d, SinCos2d
from vitlab.models.convert import to_timm
from vitlab.models.create import create_model
from vitlab.models.load import load_network, load_weights
from vitlab.models.vit import VisionTransformer
from vitlab.models.weights_file import WeightsFile, check_readable, read_weights
from vitlab.pretraining import MAE
from vitlab.shipped import card_beside
from vitlab.tasks import Classifier, LinearProbe, MultiTask, Regressor
from vitlab.tokenizers.patch import cut_patches

TINY = {
    "img_size": 16,
    "patch_size": 4,
    "embed_dim": 16,
    "depth": 2,
    "num_heads": 2,
    "mlp_ratio": 2.0,
    "num_classes": 5,
}
UNSAID = "positions: the file does not say its grid, taken to be 4 x 4"
T2T = TINY | {"tokenizer": "t2t", "t2t_kernels": (3, 3, 3), "t2t_strides": (2, 2, 1), "t2t_dim": 4}
T2T |= {"pos_embed": "sincos1d", "qkv_bias": False, "norm_eps": 1e-5}


def tiny(**arguments):
    return VisionTransformer(**TINY | arguments)


def official(model, extra_rows=1):
    """The state dict of ``model`` as the official T2T-ViT would have it, class position 0."""
    table = torch.cat([torch.zeros(extra_rows, 16), model.pos_embed.table()])[None]
    state = {name.replace("tokenizer.", "tokens_to_token."): value for name, value in model.state_dict().items()}
    return state | {"pos_embed": table}


def assert_same_outputs(one, two):
    images = torch.randn(2, 3, *one.img_size)
    with torch.no_grad():
        torch.testing.assert_close(one.eval()(images), two.eval()(images), rtol=1e-5, atol=1e-5)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "weights.pth"


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


# Heads and grids


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"num_classes": 3}, "head: not loaded, the file's has 5 outputs and the model's new one 3"),
        ({"num_classes": 0}, "head: not loaded, the file's has 5 outputs and the model's new one 0"),
        (
            {"head_hidden": 4},
            "head: not loaded, the file's has 5 outputs and the model's new one 5 after a hidden layer of 4",
        ),
    ],
)
def test_a_head_that_does_not_fit_is_left_new_and_reported(path, changed, sentence):
    saved = randomized(tiny())
    torch.save(saved.state_dict(), path)
    model = tiny(**changed)
    head = {name: value.clone() for name, value in model.head.state_dict().items()}
    assert load_weights(model, path) == [UNSAID, sentence]
    assert all(torch.equal(value, head[name]) for name, value in model.head.state_dict().items())
    assert torch.equal(model.blocks[1].attn.qkv.weight, saved.blocks[1].attn.qkv.weight)


TURNED = {"class_path": "rope2d", "init_args": {"theta": 10.0}}
ROTATED = {"pos_embed": ["learned", "rope2d"]}


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
        (
            ROTATED,
            {"pos_embed": ["learned", {"class_path": "rope2d", "init_args": {"theta": 10.0}}]},
            "theta=100.0; 10.0",
        ),
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
        (ROTATED, two("learned", {"class_path": "rope2d", "init_args": {"theta": 100}}), None),
    ],
)
def test_a_network_that_computes_something_else_with_the_same_weights_is_told(path, file, model, told):
    torch.save({"state_dict": tiny(**file).state_dict(), "hyper_parameters": {**TINY, **file}}, path)
    said = [sentence for sentence in load_weights(tiny(**model), path) if not sentence.startswith("head: not loaded")]
    assert len(said) == bool(told)
    theirs, _, ours = (told or "").partition("; ")
    before, after = re.split(" where |, the model ", said[0]) if told else ("", "")
    assert theirs in before and ours in after


NUMBERS = {"class_names": [], "targets": {"kind": "number", "names": ["width", "height"]}}


@pytest.mark.parametrize("place", ["run", "card"])
@pytest.mark.parametrize(
    ("theirs", "ours", "why"),
    [
        ({"class_names": ["a", "b"]}, {"class_names": ["a", "b"]}, None),
        ({"class_names": ["a", "b"]}, {"class_names": ["a", "c"]}, "the file's is for b, which the data lack"),
        ({"class_names": ["a", "b"]}, {"class_names": ["b", "a"]}, "the file's is in another order than the data's"),
        ({"class_names": ["a", "b"]}, NUMBERS, "the file's is for a, b, which the data lack"),
        ({"class_names": []}, {"class_names": ["b", "a"]}, None),
        ({"class_names": ["a", "b"]}, {}, None),
    ],
)
def test_a_head_of_other_classes_is_left_new_and_reported_where_both_are_known(tmp_path, place, theirs, ours, why):
    saved, model = randomized(tiny(num_classes=2)), tiny(num_classes=2)
    new, file = model.head.weight.clone(), tmp_path / "weights" / "best.safetensors"
    file.parent.mkdir()
    save_file(saved.state_dict(), file)
    if place == "run":
        (tmp_path / "config.yaml").touch()
        (tmp_path / "data.json").write_text(json.dumps(theirs))
    else:
        card_beside(file).write_text(json.dumps({"outputs": theirs["class_names"]}))
    (task := L.LightningModule()).net = model
    told = load_initial(task, SimpleNamespace(**ours), file)
    kept = ["head: the file's, as it has as many outputs, 2; it does not say whether they are the same classes"]
    unknown = kept if not theirs["class_names"] or not ours else []
    assert told == [UNSAID, *([f"head: not loaded, {why}"] if why else unknown)]
    assert torch.equal(model.head.weight, new if why else saved.head.weight)
    assert torch.equal(model.blocks[1].attn.qkv.weight, saved.blocks[1].attn.qkv.weight)


NUMBER = {"kind": "number", "names": ["age", "ink"]}
MIXED = {"kind": "mixed", "names": ["pet", "age"], "classes": [["cat", "dog"], []]}


@pytest.mark.parametrize("own_head", [False, True])
@pytest.mark.parametrize(
    ("cls", "facts", "scales"),
    [
        (Regressor, NUMBER, [([40.0, 300.0], [20.0, 30.0]), ([40.0, 400.0], [10.0, 20.0])]),
        (MultiTask, MIXED, [([0.0, 40.0], [1.0, 20.0]), ([0.0, 60.0], [1.0, 5.0])]),
    ],
)
def test_a_head_of_numbers_predicts_the_same_on_targets_of_another_scale(tmp_path, cls, facts, scales, own_head):
    theirs, ours = ({**facts, "mean": mean, "std": std} for mean, std in scales)
    net = {name: value for name, value in TINY.items() if name != "num_classes"}
    saved, started, same = (cls(targets=targets, **net) for targets in (theirs, ours, theirs))
    randomized(saved.net)
    if own_head:
        for task in (saved, started):
            nn.utils.parametrizations.weight_norm(task.net.head)
    file = tmp_path / "checkpoints" / "best.ckpt"
    file.parent.mkdir()
    torch.save({"state_dict": saved.state_dict(), "hyper_parameters": net}, file)
    (tmp_path / "config.yaml").touch()
    (tmp_path / "data.json").write_text(json.dumps({"class_names": [], "targets": theirs}))
    told = load_initial(started, SimpleNamespace(class_names=[], targets=ours), file)
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        before, after = saved.eval()(images), started.eval()(images)
    if own_head:
        assert told == ["head: not loaded, the file's is for targets of another mean and spread"]
        assert not torch.allclose(before, after)
        return
    assert told == ["head: converted from mean and spread of the file's targets to those of the data"]
    torch.testing.assert_close(before, after)
    assert load_initial(same, SimpleNamespace(class_names=[], targets=theirs), file) == []


def test_features_without_a_head_fill_a_model_with_one(path):
    torch.save(randomized(tiny(num_classes=0)).state_dict(), path)
    assert load_weights(tiny(), path)[1:] == ["head: not loaded, the file's has 0 outputs and the model's new one 5"]


AVG = {"class_token": False, "global_pool": "avg"}
AFTER = "pooling: the norm after it starts new, the file has none; left out the file's final norm, before pooling"
MAP = "pooling: the attention pool starts new, the file has none"


@pytest.mark.parametrize(
    ("file", "model", "told", "left_out"),
    [
        ({"num_classes": 0}, {"global_pool": "avg", "fc_norm": True}, [AFTER], ["norm."]),  # MAE's own fine-tuning
        ({}, {"num_classes": 3, "fc_norm": True, "norm_layer": "rmsnorm"}, [AFTER], ["norm."]),
        ({}, {"num_classes": 3, "global_pool": "map"}, [MAP], []),
        ({}, {"num_classes": 3, "global_pool": "map", "fc_norm": True}, [AFTER, MAP], ["norm."]),
        (
            {"global_pool": "map"},
            {"num_classes": 3},
            ["pooling: left out the file's attention pool, the model has none"],
            ["attn_pool."],
        ),
        ({"global_pool": "map"}, {"num_classes": 3, "global_pool": "map"}, [], []),
        ({**AVG, "fc_norm": True}, {**AVG, "num_classes": 3, "fc_norm": True}, [], []),
    ],
)
def test_below_a_new_head_what_pools_for_it_is_new_where_the_file_has_none(path, file, model, told, left_out):
    norm = {"norm_layer": model["norm_layer"]} if "norm_layer" in model else {}
    saved, net = randomized(tiny(**file, **norm)).state_dict(), tiny(**model)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    torch.save(saved, path)
    assert [sentence for sentence in load_weights(net, path) if sentence.startswith("pooling: ")] == told
    for name, value in net.state_dict().items():
        is_new = name.startswith("head.") or name not in saved
        assert torch.equal(value, before[name] if is_new else saved[name]), name
    others = saved.keys() - before.keys()
    assert not [name for name in others if not name.startswith(("head.", *left_out))]


@pytest.mark.parametrize(
    ("file", "model", "way_out"),
    [
        ({}, {"fc_norm": True}, r"missing \(fc_norm.*no norm after pooling, .*: set `model.fc_norm=False`$"),
        ({}, {"global_pool": "map"}, r"no attention pool, .*: set `model.global_pool` to token, avg or max$"),
        ({"global_pool": "map"}, {}, r"unexpected \(attn_pool.*pools by attention: set `model.global_pool=map`$"),
        ({"num_classes": 5}, {"num_classes": 0, "fc_norm": True}, "set `model.fc_norm=False`$"),
        ({"num_classes": 0}, {"num_classes": 0, "global_pool": "map"}, "to token, avg or max$"),
    ],
)
def test_without_a_new_head_weights_that_pool_otherwise_are_refused_with_the_arguments(path, file, model, way_out):
    torch.save(tiny(**file).state_dict(), path)
    with pytest.raises(ValueError, match=way_out):
        load_weights(tiny(**model), path)


LEFT_OUT = "pooling: left out the file's {}, the model pools nothing"
NEW_NORM = "; its norm of the tokens starts new"
NO_HEAD = "head: not loaded, the file's has 5 outputs and the model's new one 0"


@pytest.mark.parametrize(
    ("file", "told"),
    [
        (AVG | {"fc_norm": True}, [LEFT_OUT.format("fc_norm") + NEW_NORM, NO_HEAD]),
        (
            AVG | {"fc_norm": True, "num_classes": 0},
            [LEFT_OUT.format("fc_norm") + NEW_NORM],
        ),
        (AVG | {"global_pool": "map"}, [LEFT_OUT.format("attn_pool"), NO_HEAD]),
        (AVG | {"num_classes": 0, "global_pool": "max"}, []),
    ],
)
def test_a_task_that_pools_nothing_takes_weights_that_pool_in_any_way(path, file, told):
    torch.save({"state_dict": (saved := randomized(tiny(**file))).state_dict(), "hyper_parameters": TINY | file}, path)
    arguments = {name: value for name, value in TINY.items() if name != "num_classes"} | AVG
    net = MAE(**arguments, decoder_dim=8, decoder_depth=1, decoder_heads=2).net
    assert load_weights(net, path) == told
    assert torch.equal(net.blocks[1].attn.qkv.weight, saved.blocks[1].attn.qkv.weight)
    assert torch.equal(net.norm.weight, torch.ones(16) if file.get("fc_norm") else saved.norm.weight)


def test_features_that_are_pooled_otherwise_are_told_where_there_is_no_head(path):
    file = {"num_classes": 0, "global_pool": "avg"}
    torch.save({"state_dict": tiny(**file).state_dict(), "hyper_parameters": TINY | file}, path)
    told = ["features: the file's network has global_pool=avg where this one has token"]
    assert load_weights(tiny(num_classes=0), path) == told


def test_an_attention_pool_that_is_not_trained_does_not_start_new(path):
    torch.save(tiny(num_classes=0).state_dict(), path)
    probe = LinearProbe(**TINY | {"num_classes": 3, "global_pool": "map"})
    with pytest.raises(ValueError, match=r"starts new only where it is trained .*: set `model.global_pool` to token,"):
        load_weights(probe.net, path)


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


def test_another_position_method_without_weights_is_reported(path):
    saved = randomized(tiny(pos_embed="sincos1d"))
    arguments = TINY | {"pos_embed": "sincos1d"}
    torch.save({"state_dict": saved.state_dict(), "hyper_parameters": arguments}, path)
    assert load_weights(tiny(pos_embed="rope2d"), path) == ["positions: trained with SinCos1d, the model has RoPE2d"]


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


def test_a_damaged_json_beside_weights_is_reported(path):
    torch.save(randomized(tiny()).state_dict(), path)
    for text, reason in (
        ("[", "must hold a JSON object"),
        ('{"network": 3}', "`network` must hold arguments .*, got 3"),
    ):
        path.with_name(f"{path.name}.json").write_text(text)
        with pytest.raises(ValueError, match=reason):
            load_weights(tiny(), path)


# What is refused


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


class Own(L.LightningModule):
    """A module that knows nothing of vitlab."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 2)


class Late(Own):
    """A module that has its head once Lightning has called its ``setup``."""

    def setup(self, stage):
        self.head = nn.Linear(2, 2)


def test_a_module_of_ones_own_starts_with_all_weights_as_they_are(tmp_path):
    source = Own()
    torch.save({"state_dict": source.state_dict()}, tmp_path / "last.ckpt")
    torch.save(source.state_dict(), tmp_path / "plain.pt")
    save_file(source.net.state_dict(), tmp_path / "net.safetensors")
    for name in ("last.ckpt", "plain.pt", "net.safetensors"):
        assert load_initial(own := Own(), None, tmp_path / name) == []
        assert torch.equal(own.net.weight, source.net.weight)
    torch.save({"weight": source.net.weight}, tmp_path / "other.pt")
    with pytest.raises(UsageError, match=r"other\.pt does not fit the network .*Missing key"):
        load_initial(Own(), None, tmp_path / "other.pt")


def test_weights_of_a_network_that_setup_builds_are_refused_by_the_reason(path):
    (late := Late()).setup("fit")
    torch.save({"state_dict": late.state_dict()}, path)
    with pytest.raises(
        UsageError, match=r"Late has no head.weight before its `setup`.* in `__init__` or `configure_model`$"
    ):
        load_checkpoint(Late(), path)


class Beside(L.LightningModule):
    """A module whose outputs are of a network of vitlab and of a layer beside it."""

    def __init__(self):
        super().__init__()
        self.net = randomized(tiny(num_classes=0))
        self.last = nn.Linear(16, 3)

    def forward(self, images):
        return self.last(self.net(images))


class Compiling(L.LightningModule):
    """Compiles its network."""

    def __init__(self):
        super().__init__()
        self.net = torch.compile(self.net, backend="eager")


class Compiled(Compiling, Beside):
    """The same, compiled."""


class Built(Beside):
    """Its last layer is built by Lightning's hook for that."""

    def __init__(self):
        super().__init__()
        self.last = None

    def configure_model(self):
        self.last = self.last or nn.Linear(16, 3)


class Frozen(Beside):
    """Its checkpoints leave out what is not trained, a constant."""

    strict_loading = False

    def __init__(self):
        super().__init__()
        self.given = nn.Parameter(torch.ones(3), requires_grad=False)


@pytest.mark.parametrize("cls", [Beside, pytest.param(Compiled, marks=pytest.mark.slow), Built, Frozen])
def test_a_module_of_ones_own_gets_the_weights_beside_its_network_too(path, cls):
    (saved := cls()).configure_model()
    state = {name: value for name, value in saved.state_dict().items() if name != "given"}
    torch.save({"state_dict": state}, path)
    save_weights(path, weights := path.with_suffix(".safetensors"), saved)
    images = torch.randn(2, 3, 16, 16)
    for file in (path, weights):
        load_checkpoint(loaded := cls(), file)
        assert loaded(images).equal(saved(images))
        (started := cls()).configure_model()
        assert "weights: those outside the network, too, last.bias, last.weight" in load_initial(started, None, file)
        assert started(images).equal(saved(images))
    save_file(saved.net.state_dict(), weights)
    with pytest.raises(UsageError, match=r"would give the network alone, and \w+ is measured with .*take a checkpoint"):
        load_checkpoint(saved, weights)


class BuiltNet(L.LightningModule):
    """Its whole network is built by Lightning's hook for that."""

    def __init__(self):
        super().__init__()
        self.net = None

    def configure_model(self):
        self.net = self.net or nn.Linear(3, 2)


class CompiledNet(Compiling, Own):
    """Its network is compiled."""


class Counting(Own):
    """Keeps what is no tensor in its state dict."""

    def get_extra_state(self):
        return {"count": 3}

    def set_extra_state(self, state):
        self.count = state["count"]


@pytest.mark.parametrize("cls", [BuiltNet, CompiledNet, Counting])
def test_weights_that_are_kept_alone_are_read_again(path, cls):
    (saved := cls()).configure_model()
    torch.save({"state_dict": saved.state_dict()}, path)
    save_weights(path, weights := path.with_suffix(".safetensors"), saved)
    for file in (path, weights):
        load_checkpoint(loaded := cls(), file)
        assert loaded.net(torch.ones(1, 3)).equal(saved.net(torch.ones(1, 3)))


class Projected(Classifier):
    """A task of vitlab with a layer that only `embed` uses."""

    def __init__(self, **task):
        super().__init__(**task)
        self.project = nn.Linear(16, 4)

    def embed(self, images):
        return self.project(self.net.forward_features(images)[:, 0])


def test_what_a_subclass_of_a_task_adds_is_loaded_too(path):
    saved, loaded = (Projected(**TINY, in_chans=3) for _ in range(2))
    torch.save({"state_dict": saved.state_dict()}, path)
    save_weights(path, weights := path.with_suffix(".safetensors"), saved)
    for file in (path, weights):
        nn.init.zeros_(loaded.project.weight)
        load_checkpoint(loaded, file)
        assert loaded.project.weight.equal(saved.project.weight)


def test_a_network_of_ones_own_with_a_grid_size_is_none_of_vitlab():
    (task := L.LightningModule()).net = nn.Linear(3, 2)
    task.net.grid_size = (4, 4)
    assert not has_grid(task)


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


def test_timm_weights_with_fc_norm_are_refused(path):
    torch.save(TimmViT(**TINY, global_pool="avg").state_dict(), path)
    with pytest.raises(ValueError, match=r"unexpected \(fc_norm.*normalizes after pooling: set `model.fc_norm=True`"):
        load_weights(tiny(global_pool="avg"), path)


class Trap:
    def __init__(self, flag):
        self.flag = flag

    def __reduce__(self):
        return os.mkdir, (str(self.flag),)


@pytest.mark.parametrize("legacy", [True, False])
def test_a_file_that_would_run_code_is_refused_and_does_not(path, tmp_path, legacy):
    flag = tmp_path / "it_ran"
    torch.save({"state_dict": Trap(flag)}, path, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(ValueError, match="could run code") as error:
        load_weights(tiny(), path)
    assert not flag.exists()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.95])
def test_a_truncated_torch_file_is_refused_in_one_line(path, share, legacy):
    torch.save(tiny().state_dict(), path, _use_new_zipfile_serialization=not legacy)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(ValueError, match="truncated or not a file that torch wrote") as error:
        load_weights(tiny(), path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE, errno.EIO])
def test_a_file_that_cannot_be_opened_is_not_called_truncated(path, monkeypatch, number):
    """Before, the first raised ValueError: "is truncated or not a file that torch wrote"."""
    torch.save(tiny().state_dict(), path)
    real = open

    def refused(file, *words, **more):
        if str(file) == str(path):
            raise OSError(number, os.strerror(number), str(file))
        return real(file, *words, **more)

    monkeypatch.setattr("builtins.open", refused)
    for read in (check_readable, read_weights):
        with pytest.raises(OSError) as error:
            read(path)
        assert (error.value.errno, error.value.filename) == (number, str(path))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.95])
def test_a_truncated_safetensors_file_is_refused_in_one_line(tmp_path, share):
    path = tmp_path / "weights.safetensors"
    save_file(tiny().state_dict(), path)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(ValueError, match="truncated or not a safetensors file") as error:
        load_weights(tiny(), path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "content", [b"<html>not found</html>", b"\x80\x02garbage", b"PK\x03\x04 no zip", pickle.dumps({"a": 1}, 4)]
)
def test_another_kind_of_file_is_refused_in_one_line(path, content):
    path.write_bytes(content)
    with pytest.raises(ValueError, match="truncated or not a file that torch wrote"):
        load_weights(tiny(), path)


@pytest.mark.parametrize(
    "content", [[1, 2], {"epoch": 3}, torch.zeros(3), {"state_dict": {"a": torch.ones(1), "b": 2}}]
)
def test_a_file_without_a_state_dict_is_refused(path, content):
    torch.save(content, path)
    with pytest.raises(ValueError, match="holds no state dict"):
        load_weights(tiny(), path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        load_weights(tiny(), tmp_path / "none.pth")


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
