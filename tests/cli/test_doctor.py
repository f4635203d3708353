import importlib.metadata
import re
import subprocess
import sys
import tempfile
import tomllib
import types
from pathlib import Path

import pytest
import torch

from vitlab.cli import doctor
from vitlab.cli.main import main


@pytest.fixture
def installed(monkeypatch):
    """Pretend that other versions are installed; None for a package that is missing."""
    true, pretended = importlib.metadata.version, {}

    def version(name):
        found = pretended.get(name, true(name))
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    return pretended


def wrong(findings):
    return {finding.name: finding.text for finding in findings if finding.state == "wrong"}


def test_doctor_reports_versions_devices_processes_wandb_and_disk(capsys, monkeypatch):
    monkeypatch.delenv(doctor.FORCED, raising=False)
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "nothing is wrong"
    shown = "\n".join(lines)
    for word in (f"torch {torch.__version__}", "cpu", "gpu", "all-reduce over two processes works", "W&B", "GB free"):
        assert word in shown


@pytest.mark.parametrize(
    ("name", "version", "told"),
    [
        ("lightning", "2.6.2", "malware (GHSA-w37p-236h-pfx3)"),
        ("lightning", "2.6.3", "malware (GHSA-w37p-236h-pfx3)"),
        ("lightning", "2.6.5", "CVE-2026-58659"),
        ("lightning", "2.7.0", "lightning>=2.6.6,<2.7"),
        ("torch", "2.9.1+cpu", "CVE-2026-24747"),
        ("pillow", "12.1.1", "GHSA-whj4-6x5x-4v2j"),
        ("jsonargparse", "5.0.0rc1", "jsonargparse>=4.52,<5"),
        ("timm", None, "is missing"),
    ],
)
def test_a_known_bad_version_is_named_with_its_reason(installed, name, version, told):
    assert wrong(doctor.versions()) == {}
    installed[name] = version
    found = wrong(doctor.versions())
    assert list(found) == [name]
    assert told in found[name]


@pytest.mark.parametrize(
    ("name", "version"), [("lightning", "2.6.6"), ("torch", "2.10"), ("pillow", "12.2.0"), ("jsonargparse", "4.99.1")]
)
def test_the_first_good_version_is_good(installed, name, version):
    installed[name] = version
    assert wrong(doctor.versions()) == {}


def test_the_bad_versions_are_those_that_pyproject_excludes():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    floors = dict(re.findall(r'"([a-z]+)(?:\[\w+\])?>=([\d.]+)', text))
    ceilings = dict(re.findall(r'"([a-z]+)(?:\[\w+\])?>=[\d.]+,<([\d.]+)"', text))
    for name, rules in doctor.KNOWN_BAD.items():
        for rule, _ in rules:
            sign, version = re.fullmatch(r"(<|>=|==)([\d.]+)", rule).groups()
            if sign == "<":
                assert floors[name] == version
            elif sign == ">=":
                assert ceilings[name] == version


def test_doctor_checks_every_package_that_pyproject_requires():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    required = [re.match(r"[\w-]+", line)[0] for line in project["dependencies"]]
    assert set(required) <= {*doctor.PACKAGES, *doctor.MORE}


def test_a_torchvision_of_another_torch_is_named(monkeypatch):
    ((state, _, text),) = doctor.torchvision_build()
    assert state == "ok", text
    monkeypatch.setattr(torch, "__version__", "2.9.0+cpu")
    assert "this torchvision needs torch" in wrong(doctor.torchvision_build())["torchvision"]
    monkeypatch.setattr(torch, "__version__", "2.15.0+cu132")
    for needed, told in (("torch==2.14.1", "torch==2.14.1"), ("torch (>=2.14.0)", ""), ("torch<2.15", "torch<2.15")):
        monkeypatch.setattr(doctor, "requires", lambda name, needed=needed: ["numpy", needed])
        assert told in wrong(doctor.torchvision_build()).get("torchvision", "")
        assert bool(wrong(doctor.torchvision_build())) is bool(told)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    assert "does not import" in wrong(doctor.torchvision_build())["torchvision"]


def test_a_driver_without_a_gpu_in_torch_is_reported(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert wrong(doctor.devices()) == {}
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert "torch sees no GPU" in wrong(doctor.devices())["gpu"]


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("print('3.0')", None),
        ("print('2.0')", "all-reduce over two processes failed"),
        ("raise SystemExit('no route to host')", "no route to host"),
        ("import time; time.sleep(60)", "no answer within 1 s"),
    ],
)
def test_processes_that_cannot_talk_are_found_in_time(monkeypatch, code, told):
    monkeypatch.setattr(doctor, "ALL_REDUCE", code)
    found = wrong(doctor.processes(seconds=1))
    assert (told in found["gloo"]) if told else found == {}


def test_a_setting_that_lets_checkpoints_run_code_is_named(monkeypatch):
    monkeypatch.delenv(doctor.FORCED, raising=False)
    assert wrong(doctor.loading()) == {}
    monkeypatch.setenv(doctor.FORCED, "1")
    assert "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1" in wrong(doctor.loading())["checkpoints"]


def test_the_mode_of_wandb_is_shown_and_no_key(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_MODE", "WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    assert "wandb login" in next(doctor.wandb_mode()).text
    monkeypatch.setenv("WANDB_API_KEY", "canary")
    assert next(doctor.wandb_mode()).text == "online: an API key is stored"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert "offline" in next(doctor.wandb_mode()).text


def test_a_full_or_read_only_disk_is_reported(monkeypatch, here):
    assert wrong(doctor.disk()) == {}
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=5e8))
    assert "0.5 GB free" in wrong(doctor.disk())["disk"]
    assert [f.state for f in doctor.disk() if f.name == "shared memory"] == ["note"] * Path("/dev/shm").is_dir()

    def closed(dir):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", closed)
    assert "cannot write into" in wrong(doctor.disk())["disk"]


def test_one_wrong_thing_is_exit_code_1_and_hides_none_of_the_others(monkeypatch, capsys):
    def broken():
        raise ImportError("libcudart.so.13: cannot open")
        yield

    monkeypatch.setattr(doctor, "CHECKS", (broken, doctor.loading))
    monkeypatch.delenv(doctor.FORCED, raising=False)
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "libcudart.so.13" in shown
    assert "without running code" in shown
    assert "1 wrong" in shown


def test_an_argument_of_doctor_is_refused_in_one_line(capsys):
    assert main(["doctor", "me"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_on_windows_the_import_names_the_way_out():
    script = "import shutil, sys, typing; sys.platform = 'win32'; import vitlab"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1].startswith("ImportError: vitlab needs Linux; on Windows, install it in WSL")
