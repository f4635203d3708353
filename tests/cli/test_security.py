"""What files, configurations and the environment cannot make vitlab do."""

import ast
import json
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import vitlab
from vitlab.cli.main import main
from vitlab.config.parts import PARTS, import_parts
from vitlab.errors import UsageError

PACKAGE = Path(vitlab.__file__).parent
CONFIG = str(PACKAGE.parent / "configs" / "vit.yaml")
FIT = ["fit", "--config", CONFIG, "--trainer.max_epochs=1", "--data.subset=0.1"]


PAYLOADS = ["os.system", "subprocess.Popen", "shutil.rmtree", "builtins.exec", "vitlab.jobs.train.fit.shutil.rmtree"]


PLACES = ["data", "model", "trainer.callbacks", "trainer.logger", "trainer.strategy"]


@pytest.mark.parametrize(
    ("payload", "place"),
    [
        *zip(PAYLOADS, PLACES, strict=True),
        *((payload, "data") for payload in PAYLOADS[1:]),
        *(("evil.Data", place) for place in (*PLACES, "model.pos_embed", "model.metrics")),
    ],
)
def test_a_class_path_runs_nothing_outside_the_allowed_packages(here, capsys, monkeypatch, payload, place):
    (here / "evil.py").write_text("open('executed', 'w')\nclass Data: pass\n")
    monkeypatch.syspath_prepend(here)
    spec = {"class_path": payload, "init_args": {"command": "touch executed", "args": "touch executed"}}
    value = [spec] if place in ("trainer.callbacks", "model.metrics") else spec
    assert main([*FIT, f"--{place}={json.dumps(value)}", "--dry_run"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert payload.split(".")[-1].lower() in error.lower()
    assert not (here / "executed").exists()
    assert "evil" not in sys.modules


@pytest.mark.parametrize("name", PARTS)
def test_no_part_of_a_task_imports_what_nobody_trusts(here, monkeypatch, name):
    (here / "evil.py").write_text("open('executed', 'w')\nclass Data: pass\n")
    monkeypatch.syspath_prepend(here)
    for value in ("evil.Data", {"class_path": "evil.Data"}, [{"class_path": "evil.Data"}]):
        with pytest.raises(UsageError, match=r"evil\.Data"):
            import_parts({name: value})
    assert not (here / "executed").exists() and "evil" not in sys.modules


def test_a_custom_package_is_imported_when_trusted(here, capsys, monkeypatch):
    (here / "mine").mkdir()
    (here / "mine" / "__init__.py").write_text("from vitlab.data import Digits\nclass MyDigits(Digits):\n    pass\n")
    monkeypatch.syspath_prepend(here)
    words = [*FIT, "--data=mine.MyDigits", "--trainer.logger=false", "--dry_run"]
    assert main(words) == 2
    assert "add --trust_imports mine" in capsys.readouterr().err
    assert main([*words, "--trust_imports", "mine"]) == 0
    assert "MyDigits: " in capsys.readouterr().out
    assert main([*words, "--trust_imports", "../x"]) == 2


def test_a_run_directory_from_others_cannot_name_a_module_to_import(here, capsys, monkeypatch):
    assert main([*FIT, "--trainer.logger=false", "--name", "given"]) == 0
    config = here / "runs" / "given" / "config.yaml"
    content = yaml.safe_load(config.read_text())
    content["data"]["class_path"] = "evil.Data"
    config.write_text(yaml.safe_dump(content))
    (here / "evil.py").write_text("open('executed', 'w')\nclass Data: pass\n")
    monkeypatch.syspath_prepend(here)
    for words in (["test"], ["predict", "given", CONFIG], ["export", "--to", "safetensors"], ["analyze", "cost"]):
        assert main([*words, "given"] if "given" not in words else words) == 2
        assert 'the class path "evil.Data" is refused' in capsys.readouterr().err
    assert not (here / "executed").exists()


@pytest.mark.parametrize("command", ["fit", "test", "predict", "export", "analyze", "validate"])
def test_an_environment_that_makes_checkpoints_run_code_is_refused(command, monkeypatch, capsys):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    assert main([command, "x"]) == 2
    assert "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 lets every checkpoint run code" in capsys.readouterr().err


class Payload:
    def __reduce__(self):
        return os.system, ("touch executed",)


def test_a_malicious_checkpoint_runs_nothing(here, capsys):
    assert main([*FIT, "--trainer.logger=false", "--name", "given"]) == 0
    folder = here / "runs" / "given" / "checkpoints"
    (folder / "manifest.json").unlink()
    for name in ("last", "best"):
        torch.save({"state_dict": Payload(), "x": Payload()}, folder / f"{name}.ckpt")
    (here / "plain.pt").write_bytes(pickle.dumps(Payload(), 2))
    capsys.readouterr()
    ends = [main(words) for words in COMMANDS]
    assert not (here / "executed").exists()
    assert ends == [2] * len(COMMANDS)
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert error.count("vitlab: ") == len(COMMANDS)


COMMANDS = [
    ["fit", "--resume", "given", "--trainer.max_epochs=2"],
    [*FIT, "--trainer.logger=false", "--name", "new", "--init_from", "plain.pt"],
    [*FIT, "--trainer.logger=false", "--name", "new", "--init_from", "given"],
    ["test", "given"],
    ["validate", "given"],
    ["predict", "given", CONFIG],
    ["export", "given", "--to", "safetensors"],
    ["analyze", "cost", "given"],
]

SECRETS = ["--trainer.logger.init_args.api_key=abc", "--model.password=abc", "--data.root=https://me:pass@host/x"]


@pytest.mark.parametrize("word", SECRETS)
def test_a_secret_in_a_configuration_is_refused(here, capsys, word):
    assert main([*FIT, word, "--dry_run"]) == 2
    assert "looks like a secret" in capsys.readouterr().err


@pytest.mark.rare
def test_no_secret_of_the_environment_reaches_the_run_directory(here, monkeypatch):
    canaries = {"WANDB_API_KEY": "c0ffee" * 6 + "beef", "HF_TOKEN": "canary-hf-1234", "MY_PASSWORD": "canary-pw-1234"}
    for name, value in canaries.items():
        monkeypatch.setenv(name, value)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_") or k in canaries}
    words = [sys.executable, "-m", "vitlab", *FIT, "--name", "canary"]  # a process without the service of other tests
    subprocess.run(words, env=environment | {"WANDB_MODE": "offline"}, check=True, timeout=600)
    run = here / "runs" / "canary"
    files = [path for path in run.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files), "W&B has written its file"
    for path in files:
        content = path.read_bytes()
        for canary in canaries.values():
            assert canary.encode() not in content, path
        if "wandb" in path.parts and socket.gethostname():
            assert f'"{socket.gethostname()}"'.encode() not in content, path
    assert not [path for path in files if path.suffix == ".patch" or "code" in path.parts]


UNPICKLES = {
    "analysis/typeset.py": "a figure that was pickled in the same line: matplotlib's own way to copy one",
    "position_bench/pictures.py": "CIFAR-10's batches, after torchvision has checked their MD5",
}
CALLS_OF_IMPORT = {  # each of a fixed name, or of one that the user trusts
    "ablation/execution/warm.py",
    "class_paths.py",
    "config/parser.py",
    "cli/main.py",
    "look/listed.py",
    "cli/bench.py",
}


def _bases(node):
    return [ast.unparse(base) for base in node.bases]


def test_the_source_has_no_call_that_runs_what_it_reads():
    for path in PACKAGE.rglob("*.py"):
        _check_calls(path)


def _check_calls(path):
    tree = ast.parse(path.read_text())
    safe = {node.name for node in tree.body if isinstance(node, ast.ClassDef) and "yaml.SafeLoader" in _bases(node)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        words = {word.arg: ast.unparse(word.value) for word in node.keywords}
        where = f"{path}:{node.lineno}"
        assert name not in ("eval", "exec", "os.system", "os.popen", "pickle.load"), where
        assert name != "pickle.loads" or str(path.relative_to(PACKAGE)) in UNPICKLES, where
        assert "shell" not in words, where
        assert words.get("allow_pickle", "False") == "False", where
        if name == "yaml.load":
            assert words["Loader"] in {*safe, "yaml.CSafeLoader"}, where
        if name == "torch.load" or "ckpt_path" in words:
            assert words["weights_only"] == "True", where
        if name == "importlib.import_module":
            assert str(path.relative_to(PACKAGE)) in CALLS_OF_IMPORT, where
