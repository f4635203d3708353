"""Code of the user's own: imported where it is named, from where you stand, and never otherwise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vitlab.cli.main import main
from vitlab.config import trust
from vitlab.runs.directory import RunDir

TESTS = Path(__file__).parents[1]
DIGITS = ["--data=Digits", "--data.subset=0.1", "--trainer.accelerator=cpu", "--trainer.max_epochs=1"]


@pytest.fixture(autouse=True)
def _forgets_mine(here, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)


def answer(capsys, words):
    assert main(words) == 2
    text = capsys.readouterr().err.strip()
    assert "\n" not in text
    return text


def test_a_module_in_the_current_folder_is_found_and_never_hides_a_library(here):
    (here / "mine.py").write_text("here = True\n")
    (here / "torch.py").write_text("raise ImportError('not this one')\n")
    words = [sys.executable, "-P", "-m", "vitlab", "models", "--trust_imports", "mine,torch"]
    env = {**os.environ, "PYTHONPATH": str(TESTS.parent)}
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


MISTAKES = {
    "no such module": ("nosuch", "", "nosuch.Net", "there is no module nosuch, neither installed nor in"),
    "an import of its own": ("mine", "import nosuch", "mine.Net", "ModuleNotFoundError: No module named 'nosuch'"),
    "a mistake of syntax": ("mine", "class Net(:", "mine.Net", "mine.py, line 1"),
    "a file": ("mine.py", "", "mine.Net", "must name modules, got 'mine.py'; did you mean \"mine\"?"),
    "a file here": ("./mine.py", "", "mine.Net", "got './mine.py'; did you mean \"mine\"?"),
    "no such class": ("mine", "class Nets: ...", "mine.Net", 'mine has no Net; did you mean "Nets"?'),
}


@pytest.mark.parametrize(("package", "text", "path", "told"), MISTAKES.values(), ids=MISTAKES)
def test_an_import_error_is_reported_in_its_own_words(package, text, path, told, here, capsys):
    (here / "mine.py").write_text(text)
    assert told in answer(capsys, ["fit", f"--model={path}", *DIGITS, "--trust_imports", package])


@pytest.mark.parametrize("command", ["fit", "submit", "models"])  # `main` reads it of all
def test_every_command_takes_trust_imports(command, capsys):
    assert "must name packages, such as my_package" in answer(capsys, [command, "--trust_imports=1x"])


def test_a_finished_run_is_measured_without_its_custom_callback(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(TESTS))
    hello = "--trainer.callbacks=[{class_path: userpkg.callback.Hello}]"
    words = ["fit", "--config=vit", *DIGITS, "--trainer.logger=false", "--name=own", hello]
    assert "userpkg.callback.Hello" in answer(capsys, words)
    assert main([*words, "--trust_imports=userpkg"]) == 0
    out = capsys.readouterr().out
    assert "hello from userpkg" in out and "next  vitlab test runs/own --trust_imports userpkg\n" in out
    trust.TRUSTED.clear()
    assert main(["test", "own"]) == 0
    assert main(["export", "own", "--to=safetensors"]) == 0


def test_the_file_of_an_ablation_is_confirmed_on_the_command_line(here, capsys):
    (here / "mine.py").write_text("")
    (here / "a.yaml").write_text(
        "name: a\nbase: t2t\ntrust_imports: [mine]\naxes: {model.pos_embed: [none, sincos1d]}\n"
        "baseline: {pos_embed: none}\nmetric: {primary: acc1}\n"
    )
    told = answer(capsys, ["ablate", "plan", "a.yaml"])
    assert "line 3: the file imports mine: confirm it with --trust_imports mine" in told
    trust.trust("userpkg")
    told = answer(capsys, ["ablate", "plan", "a.yaml"])
    assert told.endswith("confirm it with --trust_imports userpkg,mine"), "the flag as it is to be typed"


def test_a_refused_class_path_names_the_whole_flag_and_what_python_takes(monkeypatch):
    monkeypatch.syspath_prepend(str(TESTS))
    trust.trust("userpkg")
    words = 'add --trust_imports userpkg,mine (in Python, trust_imports="mine")'
    assert trust.not_allowed("mine.Digits").endswith(words)


@pytest.mark.rare
def test_a_resume_with_other_code_of_ones_own_is_a_change_of_the_run_and_no_promise_of_bits_is_left(here, monkeypatch):
    monkeypatch.setattr(trust, "TRUSTED", [*trust.TRUSTED])
    (here / "mine.py").write_text("import torch\n\nclass Act(torch.nn.ReLU):\n    pass\n")
    net = ["--model.patch_size=4", "--model.embed_dim=8", "--model.depth=1", "--model.num_heads=2"]
    words = ["--model=Classifier", "--model.act_layer=mine.Act", *net, *DIGITS, "--data.batch_size=32"]
    words += ["--trainer.logger=false", "--name", "a"]
    assert main(["fit", *words, "--trust_imports", "mine"]) == 0
    before = RunDir("runs/a").record
    (here / "mine.py").write_text((here / "mine.py").read_text() + "    inplace = False\n")
    for _ in range(2):  # the second changes nothing more
        assert main(["fit", "--resume", "a", "--trust_imports", "mine"]) == 0
        after = RunDir("runs/a").record
        assert after["own_code"] != before["own_code"] and after["changes"] == [{"own_code": after["own_code"]}]
        assert "bit-identical" in before["promises"]["weights"] and "with changes" in after["promises"]["weights"]
