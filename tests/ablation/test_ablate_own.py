"""Levels that are classes: what they are called, what a cell sets, and whose code counts."""

import sys
from pathlib import Path

import pytest

from vitlab.ablation.execution import probe, resolve
from vitlab.ablation.execution.commands import fit_args
from vitlab.ablation.execution.identity import code_digest
from vitlab.ablation.file.arms import _level_names
from vitlab.ablation.file.spec import read_ablation
from vitlab.ablation.lab import Lab
from vitlab.analysis.catalogue import Catalogue
from vitlab.config.parser import VitlabCLI
from vitlab.config.trust import not_allowed, trust
from vitlab.errors import UsageError

MINE = """
from vitlab.layers.pos_embed.added import Learned
from vitlab.tasks import Classifier
class Wave(Learned):
    def __init__(self, grid_size, embed_dim, width: int = 1):
        super().__init__(grid_size, embed_dim)
        self.width = width
class Sharp(Classifier):
    def __init__(self, sharpness: float = 2.0, **task):
        super().__init__(**task)
"""
FILE = """
name: own
base: [vit, small.yaml]
trust_imports: [mine_of_ablation]
axes:
  model.pos_embed: [learned, mine_of_ablation.Wave, {class_path: mine_of_ablation.Wave, init_args: {width: 2}}]
  task:
    plain: {model: Classifier}
    sharp: {model: mine_of_ablation.Sharp, model.sharpness: 3.0}
baseline: {pos_embed: learned}
metric: {primary: acc1}
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine_of_ablation", raising=False)
    Path("mine_of_ablation.py").write_text(MINE)
    Path("small.yaml").write_text("model: {init_args: {depth: 1}}\ntrainer: {logger: false}\n")
    Path("own.yaml").write_text(FILE)
    return tmp_path


def test_a_level_is_named_after_its_class_and_after_its_arguments_if_two_share_a_class():
    wave = {"class_path": "mine.Wave", "init_args": {"width": 64, "kind": "A b"}}
    assert _level_names(["none", "mine.Coordinates", wave]) == ["none", "coordinates", "wave"]
    assert _level_names(["mine.Wave", wave]) == ["wave", "wave_width64_kinda_b"]
    assert _level_names([True, 0.5, "bf16-mixed", "a.yaml"]) == ["true", "0.5", "bf16-mixed", "a.yaml"]


def test_two_levels_with_one_name_are_refused_with_their_line(here):
    Path("own.yaml").write_text(FILE.replace("learned, mine_of_ablation.Wave,", "learned, other.Wave, other2.Wave,"))
    with pytest.raises(
        UsageError, match=r"line 6: two levels are called wave; name the levels: .NAME: .LEVEL: .model.pos_embed: VAL"
    ):
        read_ablation("own.yaml")


@pytest.mark.slow
def test_arms_with_custom_parts_and_tasks_are_built_on_the_base(here):
    trust(["mine_of_ablation"])
    ablation = read_ablation("own.yaml")
    assert [arm.name for arm in ablation.arms][2:5] == ["wave-plain", "wave-sharp", "wave_width2-plain"]
    arm = ablation.arms[5]
    task = VitlabCLI(fit_args(ablation, arm, 0, Path("given.yaml"))).model
    assert type(task).__name__ == "Sharp"
    assert task.hparams["sharpness"] == 3.0
    assert task.net.pos_embed.width == 2
    assert (task.hparams["embed_dim"], len(task.net.blocks)) == (48, 1), "the base's"


@pytest.mark.slow
def test_a_package_that_the_command_line_does_not_confirm_is_no_mistake_of_an_arm(here):
    Path("own.yaml").write_text(FILE)
    with pytest.raises(
        UsageError, match=r"^own.yaml, line \d: the file imports mine_of_ablation: confirm it with --tr"
    ):
        resolve.resolve(read_ablation("own.yaml"), 1)


@pytest.mark.slow
def test_what_is_in_a_package_that_only_the_command_line_names_is_refused(here, monkeypatch):
    trust(["mine_of_ablation"])
    Path("own.yaml").write_text(FILE.replace("trust_imports: [mine_of_ablation]\n", ""))
    started = []

    def refuse(words, *more, **given):
        started.append(words)
        return 2, [f"vitlab: {not_allowed('mine_of_ablation.Wave')}"]

    monkeypatch.setattr(probe, "run_in_slot", refuse)
    with pytest.raises(UsageError, match=r"name it in `trust_imports` of this file: mine_of_ablation$"):
        resolve.resolve(read_ablation("own.yaml"), 1)
    assert started and "--trust_imports" not in started[0]
    Path("own.yaml").write_text(FILE.replace("trust_imports: [mine_of_ablation]", "analyses: [errors]"))
    monkeypatch.setattr(Catalogue, "module_of", lambda self, name: "mine_of_ablation.analyses")
    with pytest.raises(UsageError, match=r"line 4: errors is in mine_of_ablation, which no cell imports: name it in"):
        Lab("own.yaml").commands()


def test_custom_code_identifies_a_cell_as_vitlabs_does_and_is_not_imported(here):
    before = code_digest(here, own=["mine_of_ablation"])
    assert before != code_digest(here)
    assert "mine_of_ablation" not in sys.modules
    Path("mine_of_ablation.py").write_text(MINE.replace("2.0", "4.0"))
    assert code_digest(here, own=["mine_of_ablation"]) != before
    Path("mine_of_ablation.py").write_text(f"# a comment\n{MINE}")
    assert code_digest(here, own=["mine_of_ablation"]) == before


def test_a_checkout_under_another_name_has_the_same_code(here, monkeypatch):
    digests = set()
    for checkout in ("one", "two"):
        Path(here, checkout).mkdir()
        monkeypatch.chdir(here / checkout)
        Path("mine_of_ablation.py").write_text(MINE)
        Path("mine_package").mkdir()
        Path("mine_package/__init__.py").write_text("RATE = 1\n")
        digests.add(code_digest(here / "package", own=["mine_of_ablation", "mine_package"]))
    assert len(digests) == 1


def test_code_in_a_folder_without_init_identifies_a_cell_and_code_that_is_nowhere_is_refused(here):
    Path("mine_in_a_folder/deep").mkdir(parents=True)
    Path("mine_in_a_folder/deep/pos.py").write_text("RATE = 1\n")
    before = code_digest(here, own=["mine_in_a_folder.deep.pos"])
    sys.path.append(str(here))  # as trusting it does
    assert code_digest(here, own=["mine_in_a_folder.deep.pos"]) == before
    Path("mine_in_a_folder/deep/pos.py").write_text("RATE = 2\n")
    assert code_digest(here, own=["mine_in_a_folder.deep.pos"]) != before
    for name in ("mine_nowhere", "parts/nowhere.py", "sys"):
        with pytest.raises(UsageError, match=f"there is no source of {name}"):
            code_digest(here, own=[name])


def test_what_custom_code_imports_from_files_beside_it_counts_too(here):
    plain = code_digest(here / "package", own=["mine_of_ablation"])
    Path("helper.py").write_text("RATE = 1.0\n")
    Path("tools").mkdir()
    Path("tools/__init__.py").touch()
    Path("tools/deep.py").write_text("from . import numbers_\n")
    Path("tools/numbers_.py").write_text("TWO = 2\n")
    assert code_digest(here / "package", own=["mine_of_ablation"]) == plain, "it imports none of them"
    Path("mine_of_ablation.py").write_text(f"import math, torch\nfrom helper import RATE\nimport tools.deep\n{MINE}")
    digests = {code_digest(here / "package", own=["mine_of_ablation"])}
    for file in ("helper.py", "tools/__init__.py", "tools/numbers_.py"):
        Path(file).write_text(f"{Path(file).read_text()}MORE = 3\n")
        digests.add(code_digest(here / "package", own=["mine_of_ablation"]))
    assert len(digests) == 4
    Path("helper.py").write_text(f"# a comment\n{Path('helper.py').read_text()}")
    assert code_digest(here / "package", own=["mine_of_ablation"]) in digests
