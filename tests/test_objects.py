"""Classes and objects of Python, wherever a configuration takes a word, a class path or {class_path, init_args}."""

import copy
import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn
from torchmetrics.classification import MulticlassF1Score

import vitlab
from vitlab.class_paths import current_path
from vitlab.config import trust
from vitlab.config.arguments import as_arguments
from vitlab.config.parser import class_at
from vitlab.data.known import Digits
from vitlab.errors import UsageError
from vitlab.jobs.restore import restore
from vitlab.jobs.stored import evaluation_args, training_args
from vitlab.notebook import check_classes, source_of
from vitlab.objects import written
from vitlab.runs.directory import RunDir
from vitlab.tasks.distillation import read_teacher

sys.path.append(str(Path(__file__).parent))
from userpkg.metric import Second
from userpkg.net import Net
from userpkg.pos import Coordinates

TINY = {"img_size": 8, "in_chans": 1, "patch_size": 2, "embed_dim": 16, "depth": 1, "num_heads": 2}


@pytest.mark.parametrize("given", [Coordinates, Coordinates(width=8), functools.partial(Coordinates, width=8)])
def test_a_network_is_built_from_a_class_an_object_or_a_partial_as_from_its_path(given):
    torch.manual_seed(0)
    expected = vitlab.create_model(**TINY, pos_embed="userpkg.pos.Coordinates")
    torch.manual_seed(0)
    net = vitlab.create_model(**TINY, pos_embed=given)
    images = torch.randn(2, 1, 8, 8)
    assert torch.equal(net(images), expected(images))


def test_a_built_position_embedding_is_written_without_the_arguments_that_the_network_passes():
    built = Coordinates((4, 4), 16, width=5)
    assert written("pos_embed", built) == {"class_path": "userpkg.pos.Coordinates", "init_args": {"width": 5}}
    assert vitlab.create_model(**TINY, pos_embed=built).pos_embed.mlp[0].out_features == 5
    assert written("pos_embed", copy.deepcopy(built)) == written("pos_embed", built)


def test_classes_of_vitlab_are_written_as_users_type_them_and_found_at_older_paths():
    assert written("data", vitlab.Digits(subset=0.1)) == {"class_path": "vitlab.Digits", "init_args": {"subset": 0.1}}
    before = {"vitlab.tasks.linear_probe.LinearProbe": vitlab.LinearProbe, "vitlab.data.known.digits.Digits": Digits}
    for path, cls in before.items():
        assert class_at(path) is cls
    net = vitlab.create_model(**TINY, pos_embed="vitlab.layers.pos_embed.sincos.SinCos2d")
    assert type(net.pos_embed) is type(vitlab.create_model(**TINY, pos_embed="sincos2d").pos_embed)
    assert current_path("vitlab.layers.pos_embed.sincos.SinCos3d") == "vitlab.layers.pos_embed.sincos.SinCos3d"


def test_a_task_keeps_objects_as_a_configuration_holds_them():
    parts = {"pos_embed": Coordinates(width=6), "metrics": [Second(first=3), MulticlassF1Score(10)]}
    task = vitlab.Classifier(num_classes=10, **TINY, **parts, opt=torch.optim.SGD, act_layer=nn.Tanh)
    assert task.hparams["pos_embed"] == {"class_path": "userpkg.pos.Coordinates", "init_args": {"width": 6}}
    assert task.hparams["metrics"][0] == {"class_path": "userpkg.metric.Second", "init_args": {"first": 3}}
    assert task.hparams["opt"] == "torch.optim.sgd.SGD"
    used: list[str] = []
    written("model", task, used)
    assert {"userpkg.pos.Coordinates", "userpkg.metric.Second"} <= set(used), "`fit` trusts the classes in the object"
    again = vitlab.Classifier(**task.hparams)
    assert again.state_dict().keys() == task.state_dict().keys()


def test_a_flag_is_recovered_from_whether_the_part_exists():
    path = "torch.nn.modules.linear.Linear"
    assert written("x", nn.Linear(2, 3)) == {"class_path": path, "init_args": {"in_features": 2, "out_features": 3}}
    assert written("x", nn.Linear(2, 3, bias=False))["init_args"]["bias"] is False
    with pytest.raises(ValueError, match=r"`pos_embed`: torch\.nn\.modules\.linear\.Linear must be a subclass of"):
        vitlab.Classifier(pos_embed=nn.Linear(2, 2))  # and not that it cannot be written


def test_an_object_whose_arguments_are_its_attributes_is_written_and_verified():
    assert written("act_layer", nn.GELU("tanh")) == {
        "class_path": "torch.nn.modules.activation.GELU",
        "init_args": {"approximate": "tanh"},
    }
    assert written("metrics", Second()) == "userpkg.metric.Second"


class Forgets(nn.Module):
    def __init__(self, width, rate=0.5):
        super().__init__()
        self.layer, self.drop = nn.Linear(2, width), nn.Dropout(rate)


class Alters(nn.Module):
    def __init__(self, width=2):
        super().__init__()
        self.width = width + 1


class Hides(nn.Module):
    def __init__(self, weights=(1.0, 1.0)):
        super().__init__()
        self.register_buffer("table", torch.tensor(weights))


Twice = type("Twice", (nn.Module,), {})
Old, Twice = Twice, type("Twice", (nn.Module,), {})


class Outer:
    class Inner(nn.Module):
        pass


def local():
    class Local(nn.Module):
        pass

    return Local


WRONG = {
    "a lambda": (lambda x: x, "a lambda cannot be written into a configuration: give a class, as in MyClass"),
    "a function": (written, "the function written cannot be written"),
    "a class in a function": (local(), "Local is defined inside of local, where no configuration finds it"),
    "a class in a class": (Outer.Inner, "Inner is defined inside of Outer"),
    "a class defined twice": (Old, "Twice was defined again since: give the class as it is now"),
    "an object of a class defined twice": (Old(), "Twice was defined again since"),
    "an argument that is not kept": (Forgets(3), "does not keep its argument `width`: give functools.partial(Forgets"),
    "an attribute that is another value": (Alters(4), "how this Alters was built is not known"),
    "a default that was not used": (Hides((1.0, 2.0)), "how this Hides was built is not known (`table` differs"),
    "a tensor": (torch.zeros(3), "a Tensor cannot be written into a configuration: give a list"),
}


@pytest.mark.parametrize(("value", "answer"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_written_is_refused_with_an_alternative(value, answer):
    with pytest.raises(ValueError) as error:
        written("model.part", value)
    assert answer in str(error.value)
    assert "\n" not in str(error.value)


def with_relu(task):
    task.net.blocks[0].mlp.act = nn.ReLU()


def frozen(task):
    task.net.blocks.requires_grad_(False)


CHANGED = {
    "a part": (vitlab.Classifier, with_relu, "`net.blocks.0.mlp.act.__class__` of this Classifier was GELU"),
    "frozen": (vitlab.Classifier, frozen, "is False now, and a run is built from arguments: freeze parts by its"),
    "a rate": (vitlab.Classifier, lambda task: task.hparams.update(lr=0.5), "`hparams.lr` of this Classifier was 0.0"),
    "data": (vitlab.Digits, lambda data: setattr(data, "batch_size", 16), "`batch_size` of this Digits was 128"),
    "new": (vitlab.Digits, lambda data: setattr(data, "crop_pct", 0.5), "`crop_pct` of this Digits was None"),
    "own": (Net, lambda net: net.requires_grad_(False), "requires_grad` differs in one built from what it keeps)"),
}


@pytest.mark.parametrize(("cls", "change", "answer"), CHANGED.values(), ids=CHANGED)
def test_an_object_that_was_changed_since_it_was_built_is_refused(cls, change, answer):
    thing = cls(**TINY) if cls is vitlab.Classifier else cls()
    before = written("x", thing)
    if cls is vitlab.Digits:
        thing.setup("fit"), thing.setup("test"), thing.mean
    assert written("x", copy.deepcopy(thing)) == before
    change(thing)
    with pytest.raises(UsageError) as error:
        written("x", thing)
    assert answer in str(error.value)


@pytest.fixture
def untrusted():
    trust.TRUSTED.clear()


def test_passing_a_class_trusts_its_module_and_no_other(untrusted):
    assert not trust.may_import("userpkg.pos.Coordinates")
    text = '{"class_path": "userpkg.pos.Coordinates", "init_args": {"width": 3}}'
    assert as_arguments({"model.pos_embed": Coordinates(width=3)}) == [f"--model.pos_embed={text}"]
    assert trust.may_import("userpkg.pos.Coordinates")
    assert not trust.may_import("userpkg.net.Net")
    as_arguments({"model.pos_embed": "userpkg.net.Net"})  # text is no class in hand
    assert not trust.may_import("userpkg.net.Net")
    trust.trust("userpkg.net")
    assert trust.may_import("userpkg.net.Net")


class NoForward(nn.Module):
    pass


class Pair(nn.Module):
    def forward(self, x, *args, **kwargs):
        return x, None


@pytest.mark.parametrize("part", ["act_layer", "norm_layer", "mlp_layer", "attn", "block", "tokenizer", "global_pool"])
def test_a_part_without_forward_is_named(part):
    with pytest.raises(ValueError, match=rf"`{part}`: \S+NoForward has no `forward`"):
        vitlab.create_model(**TINY, **{part: NoForward})


@pytest.mark.slow
@pytest.mark.parametrize("part", ["mlp_layer", "attn", "block", "global_pool", "act_layer"])
def test_a_part_that_returns_a_tuple_is_named_before_anything_is_written(part, here):
    with pytest.raises(ValueError, match=r"test_objects\.Pair") as error:
        vitlab.fit("t2t", {f"model.{part}": Pair, "trainer.accelerator": "cpu"}, quiet=True)
    assert "tuple" in str(error.value) and "\n" not in str(error.value)
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("take", [vitlab.load, vitlab.ablate])
def test_what_is_neither_a_run_nor_a_file_is_refused(take):
    with pytest.raises(ValueError, match="got a function"):
        take(lambda: 1)


KINDS = {
    "a number": ({"model": 3}, "`model` must be a LightningModule"),
    "a plain module": ({"model": nn.Linear(2, 2)}, "or a class of one, got Linear"),
    "data as the model": ({"model": vitlab.Digits()}, "or a class of one, got Digits"),
    "a module as data": ({"model": Net, "data": Net}, "`data` must be a LightningDataModule"),
    "a lambda": ({"model": lambda: 1}, "a lambda cannot be written"),
    "a model to resume": ({"model": Net, "resume": "x"}, "leave out `model` and `data`"),
}


@pytest.mark.parametrize(("arguments", "answer"), KINDS.values(), ids=KINDS)
def test_an_object_of_the_wrong_kind_is_refused_before_anything_is_written(arguments, answer, here):
    with pytest.raises(ValueError) as error:
        vitlab.fit(**arguments)
    assert answer in str(error.value)
    assert "\n" not in str(error.value)
    assert list(here.iterdir()) == []


def run_python(words, folder):
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(vitlab.__file__).parents[1]), str(Path(__file__).parent)]),
    }
    return subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.rare
def test_classes_of_a_notebook_train_and_load_later_from_the_source_kept_with_the_run(tmp_path):
    script = Path(__file__).parent / "userpkg" / "notebook.py"
    done = run_python([str(script)], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    source = (tmp_path / "runs/own/parts.py").read_text()
    assert all(text in source for text in ("SCALE = 2.0", "def scaled", "class Trained", "class MyNet"))
    assert "Shifts" not in source
    refused = run_python(["-m", "vitlab", "test", "own"], tmp_path)
    assert refused.returncode == 2
    assert "MyNet was defined in a notebook or script" in refused.stderr
    tested = run_python(["-m", "vitlab", "test", "own", "--trust_imports", "runs/own/parts.py"], tmp_path)
    assert "test/acc" in tested.stdout, tested.stderr
    resume = "import vitlab; vitlab.fit(resume='parts', overrides={'trainer.max_epochs': 2}, trust_imports=[FILE])"
    went_on = run_python(["-c", resume.replace("FILE", "'runs/parts/parts.py'")], tmp_path)
    assert went_on.returncode == 0, went_on.stderr[-2000:]
    assert not (tmp_path / "runs/parts/__pycache__").exists()


ACT = """
import torch
from torch import nn

SCALE = 2.0
SEEN = []

class Act(nn.Module):
    def forward(self, x):
        SEEN.append(len(x))
        return torch.relu(x) * SCALE
"""
CONFIG = {
    "model": {"class_path": "vitlab.Classifier", "init_args": {"act_layer": "__main__.Act"}},
    "data": {"class_path": "vitlab.Digits"},
    "trainer": {},
}


def kept(name):
    """Return a run with what a training keeps of its class."""
    run = RunDir(f"runs/{name}")
    run.checkpoints.mkdir(parents=True)
    (run.checkpoints / "last.ckpt").touch()
    run.config.write_text(yaml.safe_dump(CONFIG))
    (run.path / "parts.py").write_text(source_of(["Act"]))
    return run


GOING_ON = {
    "resume": lambda run: training_args(run, [], auto=False),
    "test": lambda run: evaluation_args(run, []),
    "load": lambda run: restore(run, run.checkpoints / "last.ckpt"),
    "teach": lambda run: read_teacher(str(run.path)),
}


def test_a_run_goes_on_with_the_classes_of_a_notebook_only_as_they_were_in_its_training(cell, here):
    cell(ACT)
    run = kept("A")
    cell(ACT.replace("    def", '    """Rectify."""\n\n    def').replace("x)\n", "x)  # in place\n"))
    cell("x = torch.ones(3)  # a variable of the notebook, and not that of the class\nSEEN.append(x)")
    check_classes(run.path)
    for change in [("relu", "cos"), ("2.0", "3.0")]:
        cell(ACT.replace(*change))
        for go_on in GOING_ON.values():
            with pytest.raises(UsageError, match=r"^Act is not the class that runs/A was trained with \(runs/A/parts"):
                go_on(run)


def test_two_runs_that_define_a_class_in_two_ways_are_not_loaded_into_one_process(cell, here):
    for name, text in {"A": ACT, "C": ACT, "B": ACT.replace("relu", "cos")}.items():
        cell(text)
        kept(name)
    del vars(sys.modules["__main__"])["Act"]
    trust.trust(["runs/A/parts.py", "runs/C/parts.py"])  # which are the same
    assert source_of(["Act"]) == Path("runs/A/parts.py").read_text()
    with pytest.raises(UsageError, match=r"^runs/B/parts\.py and runs/A/parts\.py define Act in two ways"):
        trust.trust(["runs/B/parts.py"])
    cell(ACT.replace("relu", "sin"))
    assert "sin" in source_of(["Act"])  # the notebook has defined it since


BESIDE = """
from torch import nn as modules

class Twice(Act):  # of the file
    def forward(self, x):
        return super().forward(super().forward(x))

class Head(modules.Linear):
    def forward(self, x):
        return super().forward(x) + SHIFT

SHIFT = 1.0
"""


def test_a_class_of_another_run_and_one_of_the_notebook_are_kept_together(cell, here):
    cell(ACT)
    kept("A")
    for name in ("Act", "SCALE", "SEEN", "torch", "nn"):  # as in another process
        del vars(sys.modules["__main__"])[name]
    trust.trust(["runs/A/parts.py"])
    cell(BESIDE)
    for names in (["Act", "Head"], ["Twice", "Head"], ["Head", "Twice", "Act"]):
        alone = {"__name__": "alone"}
        exec(source_of(names), alone)
        x = torch.tensor([-1.0, 3.0])
        assert alone["Act"]()(x).tolist() == [0.0, 6.0] and alone["Head"](2, 1).bias.shape == (1,)
        assert "Twice" not in names or alone["Twice"]()(x).tolist() == [0.0, 12.0]
        check_classes(RunDir("runs/A").path)
    cell("SCALE = 3.0\n\n" + BESIDE.replace("SHIFT", "SCALE", 1))
    with pytest.raises(UsageError, match=r"^Act of runs/A/parts\.py uses `SCALE`, which this notebook or script defin"):
        source_of(["Act", "Head"])
    assert "relu" in source_of(["Act"]) and "SCALE = 3.0" in source_of(["Head"])


def test_a_file_that_changed_since_the_training_is_named_in_one_line_and_not_refused(here, monkeypatch, caplog):
    monkeypatch.syspath_prepend(here)
    monkeypatch.setattr(trust, "TRUSTED", ["ownact"])
    names = ("ownact", "ownhelp", "ownpack", "ownpack.sizes", "ownpack.few")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    file, helper, sizes = Path("ownact.py"), Path("ownhelp.py"), Path("ownpack/sizes.py")
    file.write_text("import torch\nfrom ownhelp import factor\n\nclass Act(torch.nn.ReLU):\n    pass\n")
    helper.write_text("from ownpack.few import SIZE\n\ndef factor():\n    return 2 * SIZE\n")
    sizes.parent.mkdir()
    Path("ownpack/__init__.py").touch()
    Path("ownpack/few.py").write_text("from .sizes import SIZE\n")  # numbers say nothing of where they are from
    sizes.write_text("SIZE = 1\n")
    run = RunDir("runs/A")
    run.path.mkdir(parents=True)
    config = {"model": {"act_layer": "ownact.Act"}, "data": {}, "trainer": {}}
    run.config.write_text(yaml.safe_dump(config))
    run.write("run.json", {"own_code": trust.own_code(config)})
    assert {*run.record["own_code"]} == {*names} - {"ownpack"}
    file.write_text(file.read_text() + "# the same\n")
    evaluation_args(run, [])
    assert not caplog.messages
    sizes.write_text("SIZE = 3\n")
    training_args(run, [], auto=False)
    (line,) = caplog.messages
    assert "ownpack.sizes changed since runs/A was trained" in line and "ownact" not in line
    run.write("run.json", {"status": "done"})  # of an older vitlab
    evaluation_args(run, [])
    assert len(caplog.messages) == 1
