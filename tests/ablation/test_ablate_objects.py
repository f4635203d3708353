"""An ablation given as a mapping, whose levels are classes and objects."""

import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

import vitlab
from vitlab.ablation.execution.commands import command
from vitlab.ablation.execution.identity import code_digest
from vitlab.config import trust
from vitlab.config.options import FitOptions

sys.path.append(str(Path(__file__).parents[1]))
from userpkg.net import Net
from userpkg.pos import Coordinates

MINE = {
    "name": "mine",
    "base": "t2t",
    "axes": {"model.pos_embed": ["none", Coordinates(width=4)]},
    "seeds": 2,
    "baseline": {"pos_embed": "none"},
    "metric": {"primary": "acc1"},
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trust.TRUSTED.clear()
    return tmp_path


def test_a_dictionary_becomes_the_file_it_describes_and_its_cells_trust_the_classes():
    lab = vitlab.ablate(MINE)
    file = Path("runs/ablations/mine/ablation.yaml")
    level = {"class_path": "userpkg.pos.Coordinates", "init_args": {"width": 4}}
    assert yaml.safe_load(file.read_text())["axes"] == {"model.pos_embed": ["none", level]}
    assert [arm.name for arm in lab.ablation.arms] == ["none", "coordinates"]
    assert lab.ablation.trust_imports == ("userpkg",)
    assert command(lab.ablation)[-2:] == ["--trust_imports", "userpkg"]
    assert vitlab.ablate({**MINE, "trust_imports": "userpkg"}).ablation.trust_imports == ("userpkg",)
    again = vitlab.ablate(lab.ablation)
    assert again.ablation is lab.ablation
    assert vitlab.ablate(file).ablation.arms == lab.ablation.arms
    trust.trust_classes(["userpkg.pos.Coordinates"])  # as a training of this process does
    assert vitlab.ablate(MINE).ablation.trust_imports == ("userpkg",), "a second time in a process, too"
    trust.trust_classes(["elsewhere.Part"])
    assert command(lab.ablation)[-1] == "userpkg", "cells trust what identifies them"


def test_the_base_may_be_a_configuration_with_a_module_and_data_as_objects():
    base = {"model": Net, "data": vitlab.Digits(subset=0.1), "trainer": {"max_epochs": 1, "accelerator": "cpu"}}
    levels = {"small": {"model.width": 4}, "wide": {"model.width": 8}}
    change = {"base": base, "axes": {"width": levels}, "baseline": {"width": "small"}}
    lab = vitlab.ablate({**MINE, **change, "metric": {"primary": "val_acc", "mode": "max"}})
    kept = yaml.safe_load(Path("runs/ablations/mine/base.yaml").read_text())
    assert kept["model"] == {"class_path": "userpkg.net.Net"}
    assert kept["data"] == {"class_path": "vitlab.Digits", "init_args": {"subset": 0.1}}
    assert lab.ablation.base == ("runs/ablations/mine/base.yaml",)
    assert lab.ablation.trust_imports == ("userpkg",)
    with pytest.raises(ValueError, match=r"`base` is nested, as a config file is: 'trainer\.max_epochs'"):
        vitlab.ablate({**MINE, "base": {"trainer.max_epochs": 3}})


def test_numbers_of_numpy_are_numbers():
    levels = {"small": {"model.lr": np.float64(0.5)}, "large": {"model.lr": np.float32(2), "model.depth": np.int64(3)}}
    lab = vitlab.ablate({**MINE, "axes": {"lr": levels}, "baseline": {"lr": "small"}})
    FitOptions(init_from="a.pt", init_grid=(np.int64(4), np.int64(4))).check()
    assert lab.ablation.axes["lr"] == {"small": {"model.lr": 0.5}, "large": {"model.lr": 2.0, "model.depth": 3}}


WRONG = {
    "seeds that are no list": ({"seeds": range(3)}, "`seeds`: "),
    "a lambda": ({"axes": {"model.pos_embed": ["none", lambda: 1]}}, "a lambda cannot be written"),
    "no name": ({"name": None}, "`ablate` needs a `name`"),
    "a level that is not there": ({"baseline": {"pos_embed": "nome"}}, 'has no level `nome`; did you mean "none"'),
}


@pytest.mark.parametrize(("change", "answer"), WRONG.values(), ids=WRONG)
def test_a_mistake_is_one_line_and_nothing_is_written(change, answer, here):
    with pytest.raises(ValueError) as error:
        vitlab.ablate({**MINE, **change})
    assert answer in str(error.value)
    assert "\n" not in str(error.value)
    assert list(here.iterdir()) == []


@pytest.mark.rare
def test_changing_the_source_of_a_notebook_class_makes_another_cell():
    Path("parts.py").write_text("class A:\n    x = 1\n")
    before = code_digest(own=["parts.py"])
    Path("parts.py").write_text('class A:\n    """Docstrings do not count."""\n\n    x = 1\n')
    assert code_digest(own=["parts.py"]) == before
    Path("parts.py").write_text("class A:\n    x = 2\n")
    assert code_digest(own=["parts.py"]) != before
