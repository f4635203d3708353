"""Options by the names that they had before they moved to the parts that understand them."""

import json
import re

import pytest
import torch
import yaml
from jsonargparse import get_loader

from vitlab.config.arguments import flags
from vitlab.config.parser import VitlabCLI
from vitlab.config.parts import classes_alone, merged_parts
from vitlab.errors import UsageError
from vitlab.models import VisionTransformer, create_model
from vitlab.models.load import load_network, network_args
from vitlab.models.old_names import DEFAULTS, OLD, new_name, upgrade

TINY = {"img_size": 8, "in_chans": 1, "num_classes": 3, "patch_size": 2, "embed_dim": 8, "depth": 2, "num_heads": 2}
OLD_AND_NEW = [
    ({"qk_norm": True}, {"attn": {"class_path": "softmax", "init_args": {"qk_norm": True}}}),
    ({"attn_gate": True}, {"attn": "gated"}),
    (
        {"dense_blocks": [1, 1], "dense_growth": 4},
        {"block": {"class_path": "dense", "init_args": {"dense_blocks": [1, 1], "dense_growth": 4}}},
    ),
    ({"pos_embed_trainable": False}, {"pos_embed": {"class_path": "learned", "init_args": {"trainable": False}}}),
    ({"pos_embed_join": "every_layer"}, {"pos_embed": {"class_path": "learned", "init_args": {"join": "every_layer"}}}),
    (
        {"tokenizer": "t2t", "t2t_kernels": [3, 3], "t2t_dim": 6},
        {"tokenizer": {"class_path": "t2t", "init_args": {"t2t_kernels": [3, 3], "t2t_dim": 6}}},
    ),
    ({"flexi_patch": [2, 4]}, {"tokenizer": {"class_path": "patch", "init_args": {"flexi_patch": [2, 4]}}}),
]
FLAGS = ["--model=Classifier", "--data=Digits", "--model.patch_size=2", "--model.depth=1", "--model.embed_dim=16"]
FLAGS += ["--model.num_heads=2", "--trainer.accelerator=cpu"]


def arguments_of(*args):
    """Return the arguments of the task that a command line gives, and the old names that it used."""
    cli = VitlabCLI([*FLAGS, *args])
    text = yaml.safe_load(cli.parser.dump(cli.config, skip_none=False))
    assert not set(text["model"]["init_args"]) & set(OLD)
    return cli.model.hparams, cli.moved


@pytest.mark.parametrize(("old", "new"), OLD_AND_NEW)
def test_an_old_name_builds_the_network_of_the_new_one(old, new):
    nets = []
    for arguments in (old, new):
        torch.manual_seed(1)
        nets.append(VisionTransformer(**TINY, **arguments))
    one, other = (net.state_dict() for net in nets)
    assert list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)
    assert [p.requires_grad for p in nets[0].parameters()] == [p.requires_grad for p in nets[1].parameters()]


def test_an_old_default_in_a_file_changes_nothing():
    before = {name: old.default for name, old in OLD.items()}
    assert upgrade({**DEFAULTS, **before}) == DEFAULTS
    assert upgrade({**DEFAULTS, **before, "tokenizer": "t2t"})["tokenizer"] == "t2t"
    assert upgrade(dict.fromkeys(OLD)) == {}
    assert new_name("rope_theta") == "pos_embed.init_args.theta"


def test_an_old_name_adds_to_what_a_part_says_and_overrides_it():
    spec = {"class_path": "gated", "init_args": {"qk_scale": 0.5}}
    both = {"class_path": "gated", "init_args": {"qk_scale": 0.25, "qk_norm": True}}
    assert upgrade({"attn": spec, "qk_norm": True, "qk_scale": 0.25})["attn"] == both
    assert upgrade({"attn": spec, "qk_scale": 0.25}, weak={"qk_scale"})["attn"] == spec
    assert create_model("vit5_s16", depth=1, img_size=32, attn_dropout=0.5).blocks[0].attn.attn_dropout == 0.5


def test_a_policy_goes_to_the_entries_of_a_list_that_have_it():
    net = VisionTransformer(**TINY | {"embed_dim": 16}, pos_embed=["learned", "rope2d"], pos_embed_resize="rescale")
    assert [part.chosen_policy for part in net.pos_embed.parts.values()] == [None, "rescale"]


def test_an_older_checkpoint_gives_its_network(tmp_path):
    old = {"qk_norm": True, "rope_theta": 50.0, "pos_embed": "rope2d", "attn_gate": False, "t2t_dim": 64, "lr": 1.0}
    arguments = TINY | {"embed_dim": 16} | old
    net = VisionTransformer(**network_args(arguments)).eval()
    torch.save({"hyper_parameters": arguments, "state_dict": net.state_dict()}, tmp_path / "last.ckpt")
    images = torch.randn(2, 1, 8, 8)
    assert torch.equal(load_network(tmp_path / "last.ckpt")(images), net(images))
    assert "attn" not in network_args({"attn_gate": False})


@pytest.mark.slow
def test_the_help_shows_no_old_name_and_the_command_takes_each():
    now = flags()  # which test_fit compares with those of the classes
    shown = {flag.removeprefix("--model.") for rows in now["help"].values() for flag, *_ in rows}
    assert not shown & set(OLD) and {"attn", "block", "tokenizer"} <= shown
    assert {f"model.{name}" for name in OLD} <= set(now["keys"])


@pytest.mark.slow
def test_old_and_new_flags_give_one_configuration():
    old, moved = arguments_of("--model.qk_norm=true", "--model.pos_embed_join=every_layer")
    assert sorted(moved) == ["pos_embed_join", "qk_norm"]
    for new in (["--model.attn.qk_norm=true"], ["--model.attn.init_args.qk_norm=true"]):
        found, moved = arguments_of(*new, "--model.pos_embed.join=every_layer")
        assert dict(found) == dict(old) and moved == []


def test_a_wrong_value_is_refused_under_the_old_name_that_was_typed():
    with pytest.raises(UsageError, match=re.escape("`model.rope_theta` must be in (1, 1e12], got 1e+30")):
        VitlabCLI([*FLAGS, "--model.pos_embed=rope2d", "--model.rope_theta=1e30"])


@pytest.mark.slow
def test_the_command_line_overrides_files_with_old_and_new_names(tmp_path):
    before, now = tmp_path / "before.yaml", tmp_path / "now.yaml"
    before.write_text("model: {init_args: {qk_scale: 0.5, attn_gate: false}}\n")
    now.write_text("model: {init_args: {attn: {class_path: softmax, init_args: {qk_scale: 0.5}}}}\n")
    for path in (before, now):
        for flag in ("--model.qk_scale=0.25", "--model.attn.qk_scale=0.25"):
            found, _ = arguments_of("--config", str(path), flag)
            assert found["attn"] == {"class_path": "softmax", "init_args": {"qk_scale": 0.25}}
        found, _ = arguments_of("--config", str(path), "--model.attn.qk_norm=true")
        assert found["attn"]["init_args"] == {"qk_scale": 0.5, "qk_norm": True}


@pytest.mark.slow
@pytest.mark.parametrize("key", ["model.qk_scale", "model.init_args.qk_scale"])
def test_of_two_files_with_an_old_and_a_new_name_the_later_wins(tmp_path, key):
    (tmp_path / "old.yaml").write_text(f"{key}: 0.25\n")
    (tmp_path / "new.yaml").write_text("model: {attn: {class_path: gated, init_args: {qk_scale: 0.5}}}\n")
    for order, expected in ((("new", "old"), 0.25), (("old", "new"), 0.5)):
        files = [word for name in order for word in ("--config", str(tmp_path / f"{name}.yaml"))]
        found, _ = arguments_of(*files)
        assert found["attn"] == {"class_path": "gated", "init_args": {"qk_scale": expected}}


@pytest.mark.slow
def test_the_printed_config_has_what_an_old_flag_overrides(tmp_path, capsys):
    (tmp_path / "new.yaml").write_text("model: {attn: {class_path: gated, init_args: {qk_scale: 0.5}}}\n")
    with pytest.raises(SystemExit):
        VitlabCLI([*FLAGS, "--config", str(tmp_path / "new.yaml"), "--model.qk_scale=0.25", "--print_config"])
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["model"]["init_args"]["attn"] == {"class_path": "gated", "init_args": {"qk_scale": 0.25}}


@pytest.mark.slow
@pytest.mark.parametrize("key", ["model.attn.qk_norm", "model.init_args.attn.init_args.qk_norm"])
def test_a_file_changes_one_option_of_a_part(tmp_path, key):
    for text in (f"{key}: true\n", "model: {attn: {qk_norm: true}}\n"):
        (tmp_path / "first.yaml").write_text("model: {init_args: {attn: gated}}\n")
        (tmp_path / "second.yaml").write_text(text)
        files = [word for name in ("first", "second") for word in ("--config", str(tmp_path / f"{name}.yaml"))]
        found, _ = arguments_of(*files)
        assert found["attn"] == {"class_path": "gated", "init_args": {"qk_norm": True}}


@pytest.mark.parametrize(
    ("key", "part"),
    [
        ("model.opt.momentum", "model.opt"),
        ("model.opt.init_args.momentum", "model.opt.class_path"),
        ("model.lr_scheduler.interval", "model.lr_scheduler"),
    ],
)
def test_an_option_before_the_class_of_its_part_is_used(key, part):
    first = merged_parts([], [(key, 0.9), (part, "SGD")])
    assert first == merged_parts([], [(part, "SGD"), (key, 0.9)])
    [found] = first.values()
    assert found["class_path"] == "SGD" and 0.9 in {**found, **found["init_args"]}.values()


def test_a_later_file_changes_how_often_a_schedule_is_stepped():
    schedule = {"class_path": "StepLR", "init_args": {"step_size": 1}}
    files = [{"model": {"lr_scheduler": schedule}}, {"model": {"lr_scheduler": {"interval": "step"}}}]
    assert merged_parts(files, []) == {"lr_scheduler": schedule | {"interval": "step"}}


def test_the_classes_alone_of_a_models_parts_are_read_by_the_parser(tmp_path):
    part = {"class_path": "sgd", "init_args": {"momentum": 0.9}}
    logger = {"class_path": "WandbLogger", "init_args": {"config": {"opt": part}}}  # of one's own notes
    content = {"model": {"init_args": {"opt": part}}, "trainer": {"logger": logger}}
    (file := tmp_path / "mine.yaml").write_text(text := yaml.safe_dump(content))
    notes = yaml.safe_dump({"opt": part})  # as of --trainer.logger.config
    with classes_alone([f"--config={file}", "--trainer.logger=WandbLogger", f"--trainer.logger.config={notes}"]):
        read = get_loader("yaml")
    assert read(text) == content | {"model": {"init_args": {"opt": "sgd"}}}
    assert read(notes) == {"opt": part}


def test_a_flag_that_comes_twice_sets_a_part_each_time():
    first = {"init_args": {"opt": {"class_path": "sgd", "init_args": {"momentum": 0.9}}}}
    assert merged_parts([], [("model", first), ("model", "Classifier")]) == first["init_args"]
    assert merged_parts([], [("model.opt", "sgd"), ("model.opt", {"momentum": 0.9})]) == first["init_args"]


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_a_file_of_the_model_alone_keeps_the_options_of_parts(tmp_path, suffix):
    opt = {"class_path": "sgd", "init_args": {"momentum": 0.9}}
    (file := tmp_path / f"net.{suffix}").write_text(json.dumps({"class_path": "Classifier", "init_args": {"opt": opt}}))
    (tmp_path / "mine.yaml").write_text(f"model: net.{suffix}\n")  # beside it
    for words in ([f"--model={file}"], ["--config", str(tmp_path / "mine.yaml")]):
        assert arguments_of(*words)[0]["opt"] == opt
        changed = opt | {"init_args": {"momentum": 0.9, "nesterov": True}}
        assert arguments_of(*words, "--model.opt.nesterov=true")[0]["opt"] == changed


def test_the_class_and_small_numbers_of_a_part_stay_beside_a_flag_that_changes_another_option(tmp_path):
    (tmp_path / "mine.yaml").write_text("model: {opt: {class_path: sgd, init_args: {momentum: 1e-1}}}\n")
    found, _ = arguments_of("--config", str(tmp_path / "mine.yaml"), "--model.opt.nesterov=true")
    assert found["opt"] == {"class_path": "sgd", "init_args": {"momentum": 0.1, "nesterov": True}}
    given = "{class_path: Classifier, init_args: {opt: {class_path: sgd, init_args: {momentum: 1e-1}}}}"
    assert arguments_of(f"--model={given}", "--model.opt.nesterov=true")[0]["opt"] == found["opt"]


@pytest.mark.parametrize("keys", ["opt.momentum: 0.9, opt: SGD", "opt: SGD, init_args.opt.init_args.momentum: 0.9"])
def test_a_dotted_option_within_the_model_of_a_file_is_used_in_any_order(tmp_path, keys):
    (tmp_path / "mine.yaml").write_text(f"model: {{{keys}}}\n")
    found, _ = arguments_of("--config", str(tmp_path / "mine.yaml"))
    assert found["opt"] == {"class_path": "SGD", "init_args": {"momentum": 0.9}}


def test_arguments_beside_a_class_path_are_told_to_stand_under_init_args(tmp_path):
    (tmp_path / "mine.yaml").write_text("model: {opt: {class_path: SGD, momentum: 0.9}}\n")
    told = 'a class stand under init_args: {"class_path": "SGD", "init_args": {"momentum": 0.9}}'
    with pytest.raises(UsageError, match=re.escape(told)):
        arguments_of("--config", str(tmp_path / "mine.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "answer"),
    [
        ("--model.attn.qk_norn=true", 'attn=softmax takes no argument `qk_norn`; did you mean "qk_norm"?'),
        ("--model.attn.qk_norm=maybe", "`model.attn.qk_norm` must be true or false, got 'maybe'"),
        ("--model.attn.qk_scale=-3", r"`model.attn.qk_scale` must be in (0, 1000], got -3"),
        (
            "--model.attn=gatd",
            "`model.attn` must be one of softmax, gated, or a class path such as mypkg.Mine, got 'gatd'; did you mean",
        ),
        ("--model.block=dense", "`dense_blocks` must be numbers of blocks that sum to `model.depth`"),
        ("--model.tokenizer.t2t_dim=8", "tokenizer=patch takes no argument `t2t_dim`"),
    ],
)
def test_a_wrong_option_of_a_part_is_one_line_with_the_way_out(flag, answer):
    with pytest.raises(ValueError) as error:
        arguments_of(flag)
    assert answer in str(error.value) and "\n" not in str(error.value)
