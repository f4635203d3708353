"""Heads and pooling of a network that starts with the weights of another."""

import json
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer as TimmViT
from torch import nn

from tests.models.saved import TINY, UNSAID, tiny
from tests.networks import randomized
from vitlab.jobs.train.initial import load_initial
from vitlab.models.load import load_weights
from vitlab.pretraining import MAE
from vitlab.shipped import card_beside
from vitlab.tasks import LinearProbe, MultiTask, Regressor


@pytest.mark.parametrize(
    ("file", "changed", "sentence"),
    [
        ({}, {"num_classes": 3}, "head: not loaded, the file's has 5 outputs and the model's new one 3"),
        ({}, {"num_classes": 0}, "head: not loaded, the file's has 5 outputs and the model's new one 0"),
        ({"num_classes": 0}, {}, "head: not loaded, the file's has 0 outputs and the model's new one 5"),
        (
            {},
            {"head_hidden": 4},
            "head: not loaded, the file's has 5 outputs and the model's new one 5 after a hidden layer of 4",
        ),
    ],
)
def test_a_head_that_does_not_fit_is_left_new_and_reported(path, file, changed, sentence):
    saved = randomized(tiny(**file))
    torch.save(saved.state_dict(), path)
    model = tiny(**changed)
    head = {name: value.clone() for name, value in model.head.state_dict().items()}
    assert load_weights(model, path) == [UNSAID, sentence]
    assert all(torch.equal(value, head[name]) for name, value in model.head.state_dict().items())
    assert torch.equal(model.blocks[1].attn.qkv.weight, saved.blocks[1].attn.qkv.weight)


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
        (AVG | {"fc_norm": True, "num_classes": 0}, [LEFT_OUT.format("fc_norm") + NEW_NORM]),
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


def test_timm_weights_with_fc_norm_are_refused(path):
    torch.save(TimmViT(**TINY, global_pool="avg").state_dict(), path)
    with pytest.raises(ValueError, match=r"unexpected \(fc_norm.*normalizes after pooling: set `model.fc_norm=True`"):
        load_weights(tiny(global_pool="avg"), path)
