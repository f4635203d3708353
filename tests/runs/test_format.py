"""A checkpoint knows what it is: older formats resume to the same curve, what is incomplete or newer is refused."""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch

import vitlab
from vitlab.cli.main import main
from vitlab.jobs.checkpoint import save_weights
from vitlab.models.weights_file import read_weights
from vitlab.runs.format import FORMAT, format_of, read_resumable
from vitlab.tasks import Classifier

# Each folder has a run of three epochs that was stopped in its second, as the vitlab of its time wrote it, and the
# metrics of one that was not stopped. Format 1 was written by the commit before 9c25e0f, format 2 by that before 3,
# format 3 by 0.1.0, and 0.2.0 by the commit that gave this number.
OLD = Path(__file__).parent / "checkpoints"
FROZEN = {"format1": 1, "format2": 2, "format3": 3, "0.2.0": 3}


def place(folder, name):
    """Return a run directory with the checkpoint of a format, or of a release."""
    run = folder / "runs" / "old"
    (run / "checkpoints").mkdir(parents=True)
    for file in ("config.yaml", "metrics.jsonl"):
        shutil.copy(OLD / name / file, run / file)
    shutil.copy(OLD / name / "last.ckpt", run / "checkpoints" / "last.ckpt")
    return run


def curve(path):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {(row["step"], "val/loss" in row): row.get("val/loss", row.get("train/loss")) for row in rows}


@pytest.mark.slow
@pytest.mark.parametrize("name", FROZEN)
def test_a_frozen_checkpoint_resumes_to_the_curve_of_its_time(tmp_path, monkeypatch, name):
    run = place(tmp_path, name)
    assert format_of(torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)) == FROZEN[name]
    monkeypatch.chdir(tmp_path)
    assert main(["fit", "--resume", "old", "--quiet"]) == 0
    expected = curve(OLD / name / "curve.jsonl")
    found = curve(run / "metrics.jsonl")
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected, rel=1e-4)  # other machines round differently
    section = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["vitlab"]
    assert (section["format"], section["optimizers"], section["schedules"]) == (FORMAT, 1, 1)


@pytest.mark.slow
def test_a_run_with_older_class_paths_resumes_is_measured_and_loaded(tmp_path, monkeypatch):
    run = place(tmp_path, "0.2.0")
    text = (run / "config.yaml").read_text()
    moved = {
        "vitlab.Digits": "vitlab.data.known.digits.Digits",
        "callbacks: null": "callbacks: [{class_path: vitlab.look.growing.GrowingPage, init_args: {share: 0.01}}]",
    }
    for now, then in moved.items():
        assert now in text
        text = text.replace(now, then)
    (run / "config.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert main(["fit", "--resume", "old", "--quiet"]) == 0
    assert curve(run / "metrics.jsonl") == pytest.approx(curve(OLD / "0.2.0" / "curve.jsonl"), rel=1e-4)
    (run / "config.yaml").write_text(text)
    assert main(["validate", "old", "--quiet"]) == 0
    assert vitlab.load("old").net.num_classes == 10


def test_each_format_and_each_release_has_a_frozen_checkpoint():
    released = re.findall(r"^## (\S+)", (Path(__file__).parents[2] / "CHANGELOG.md").read_text(), re.MULTILINE)
    sections = [torch.load(OLD / name / "last.ckpt", weights_only=True).get("vitlab", {}) for name in FROZEN]
    assert {*released} <= {section.get("version") for section in sections}, (
        "freeze a run of the release in checkpoints/"
    )
    assert {*FROZEN.values()} == {*range(1, FORMAT + 1)}


def _drop(name):
    return lambda content: content.pop(name)


def _put(value, *names):
    def edit(content):
        for name in names[:-1]:
            content = content[name]
        content[names[-1]] = value

    return edit


def _spoil(content):
    content["optimizer_states"][0]["state"][0]["exp_avg"].fill_(float("nan"))


def _spoil_trained(content):
    content["vitlab"]["trained"] = ["net.cls_token", "net.gone"]
    content["state_dict"]["net.cls_token"].fill_(float("nan"))


EDITS = {
    "no section `loops`": _drop("loops"),
    "no section `callbacks`": _drop("callbacks"),
    "`callbacks` lacks RunRecord": _put({}, "callbacks"),
    "no section `optimizer_states`": _drop("optimizer_states"),
    "`lr_schedulers` has 0 entries, and 1 were written": _put([], "lr_schedulers"),
    "`optimizer_states` has 0 entries, and 1 were written": _put([], "optimizer_states"),
    "no state of the data, `Digits`": _drop("Digits"),
    "`epoch` must not be negative, got -1": _put(-1, "epoch"),
    "`global_step` must be int, not str": _put("x", "global_step"),
    "written with Lightning 99.0": _put("99.0", "pytorch-lightning_version"),
    "written with Lightning 1.0": _put("1.0", "pytorch-lightning_version"),
    "no section `pytorch-lightning_version`": _drop("pytorch-lightning_version"),
    "no weights": _put({}, "state_dict"),
    "state_dict.net.cls_token is not finite": _spoil_trained,
    "exp_avg is not finite": _spoil,
    "lacks fit_loop.epoch_progress": lambda content: content["loops"]["fit_loop"].pop("epoch_progress"),
    "no section `epoch`": lambda content: content.clear(),
    "has format 4, of vitlab 9.9": _put({"format": 4, "version": "9.9"}, "vitlab"),
}


def edited(path, edit):
    content = torch.load(path, weights_only=True)
    edit(content)
    torch.save(content, path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    entry = {"sha256": digest, "size": path.stat().st_size, "modified": path.stat().st_mtime_ns}
    (path.parent / "manifest.json").write_text(json.dumps({path.name: entry}))


@pytest.mark.parametrize("said", EDITS)
def test_an_edited_checkpoint_is_refused_in_one_line_that_names_the_fault(tmp_path, said):
    path = place(tmp_path, "format3") / "checkpoints" / "last.ckpt"
    read_resumable(path)
    edited(path, EDITS[said])
    with pytest.raises(ValueError, match=said) as error:
        read_resumable(path)
    assert "\n" not in str(error.value) and str(path) in str(error.value)


def _keep_extra_state(content):
    content["state_dict"] |= {"net._extra_state": {"calls": 3}, "lowest": torch.tensor(torch.inf)}


def test_buffers_may_be_infinite_and_modules_may_have_an_extra_state(tmp_path):
    path = place(tmp_path, "format3") / "checkpoints" / "last.ckpt"
    edited(path, _keep_extra_state)
    assert read_resumable(path)["state_dict"]["net._extra_state"] == {"calls": 3}


@pytest.mark.slow
@pytest.mark.parametrize("said", ["`epoch` must not be negative", "has format 4"])
def test_resuming_from_an_edited_checkpoint_exits_with_code_2(tmp_path, monkeypatch, capsys, said):
    path = place(tmp_path, "format3") / "checkpoints" / "last.ckpt"
    edited(path, next(edit for text, edit in EDITS.items() if said in text))
    monkeypatch.chdir(tmp_path)
    assert main(["fit", "--resume", "old"]) == 2
    assert said in (shown := capsys.readouterr().err) and shown.count("\n") == 1


def test_weights_of_a_newer_format_are_not_read_either(tmp_path):
    path = place(tmp_path, "format3") / "checkpoints" / "last.ckpt"
    assert read_weights(path).arguments["depth"] == 1
    edited(path, _put({"format": 4, "version": "9.9"}, "vitlab"))
    with pytest.raises(ValueError, match=r"has format 4, of vitlab 9\.9; this is vitlab .* update vitlab"):
        read_weights(path)


def test_weights_have_the_mode_of_other_files(tmp_path):
    path, others = tmp_path / "last.safetensors", tmp_path / "others"
    before = os.umask(0o027)
    try:
        task = Classifier(img_size=8, in_chans=1, patch_size=4, embed_dim=8, depth=1, num_heads=2)
        save_weights(place(tmp_path, "format3") / "checkpoints" / "last.ckpt", path, task)
        others.touch()
    finally:
        os.umask(before)
    assert path.stat().st_mode == others.stat().st_mode
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last.safetensors", "others", "runs"]


@pytest.mark.parametrize("edit", [_drop("loops"), _put(-1, "epoch"), _put([], "optimizer_states")])
@pytest.mark.parametrize("number", [1, 2])
def test_migration_does_not_hide_faults_of_an_older_checkpoint(tmp_path, number, edit):
    path = place(tmp_path, f"format{number}") / "checkpoints" / "last.ckpt"
    read_resumable(path)
    edited(path, edit)
    with pytest.raises(ValueError, match="cannot be resumed"):
        read_resumable(path)
