import errno
import json
import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from vitlab.errors import UsageError
from vitlab.runs.directory import RunDir
from vitlab.runs.openings import note_opening, openings
from vitlab.runs.records import parameters_of

DATA = {"class_names": ["a", "b"], "mean": [0.5], "std": [0.25]}


@pytest.fixture
def run(tmp_path):
    """A run directory with what is read of each file."""
    run = RunDir(tmp_path / "run")
    run.write("run.json", {"status": "done", "attempts": 2, "wandb_id": None, "started": "2026-01-01T00:00:00+00:00"})
    run.write("results.json", {"test": {"acc1": 0.5, "n": 3.0}})
    run.write("data.json", {**DATA, "splits": {"train": {"n": 3, "hash": "0", "class_counts": [1, 2]}}})
    run.write("model.json", {"grid": [2, 2], "flops": 1000})
    return run


def test_each_record_is_read_in_its_own_format(run):
    assert run.record["attempts"] == 2 and run.record["wandb_id"] is None
    assert run.results["test"] == run.measured("test") == {"acc1": 0.5, "n": 3.0}
    assert run.data["splits"]["train"]["n"] == 3
    assert run.model["grid"] == [2, 2]


def test_missing_records_are_empty_or_reported(tmp_path):
    run = RunDir(tmp_path)
    assert run.record == run.results == run.measured("val") == {}
    for name in ("data", "model"):
        with pytest.raises(UsageError, match=rf"has no {name}\.json: copy it from where the run was trained"):
            getattr(run, name)


@pytest.mark.parametrize(
    ("file", "name"), [("run", "record"), ("results", "results"), ("data", "data"), ("model", "model")]
)
@pytest.mark.parametrize("text", ['{"a": 1', "", "\x00\x00", "[1]", "3", '"text"', "[" * 100_000, "\ud800"])
def test_a_damaged_file_is_named_with_a_way_out(run, file, name, text):
    (run.path / f"{file}.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(UsageError, match=rf"{file}\.json is damaged: .*; (remove|copy) it") as error:
        getattr(run, name)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("file", "name", "content"),
    [
        ("run", "attempts", {"attempts": "two"}),
        ("run", "wandb_id", {"wandb_id": 7}),
        ("results", "test", {"test": [1]}),
        ("results", "variations", {"variations": [1]}),
        ("data", "mean", {**DATA, "mean": 0.5}),
        ("data", "class_names", {**DATA, "class_names": [1]}),
        ("data", "splits", {**DATA, "splits": {"train": {"n": "3"}}}),
        ("data", "std", {"class_names": [], "mean": [0.5]}),
        ("model", "grid", {"grid": "4x4"}),
    ],
)
def test_a_value_of_another_type_is_named(run, file, name, content):
    run.write(f"{file}.json", content)
    attribute = "record" if file == "run" else file
    with pytest.raises(UsageError, match=rf"{file}\.json is damaged: .*`{name}`"):
        getattr(run, attribute)


def test_unknown_keys_of_a_later_vitlab_are_kept(run):
    run.update("model.json", color={"deep": [1]})
    assert run.model["color"] == {"deep": [1]}
    assert json.loads((run.path / "model.json").read_text())["grid"] == [2, 2]


def test_a_damaged_run_does_not_affect_others(run, monkeypatch):
    from vitlab.runs import find

    monkeypatch.setattr(find, "RUNS", run.path.parent)
    torn = RunDir(run.path.parent / "torn")
    torn.path.mkdir()
    (torn.path / "run.json").write_text("{")
    assert [one.path.name for one in find.all_runs()] == ["torn", "run"]
    (torn.path / "run.json").unlink()
    (torn.path / "run.json").mkdir()  # the system refuses to read it
    assert [one.path.name for one in find.some_runs()] == ["torn", "run"]


def test_an_opening_that_cannot_be_noted_or_counted_is_an_error_unless_the_run_is_read_only(tmp_path, monkeypatch):
    note_opening(tmp_path, "test", "best.ckpt", {})
    assert openings(tmp_path, "test") == 1 and openings(tmp_path, "val") == 0
    real = Path.open

    def fails(number):
        def opened(path, *words, **more):
            if path.name == "openings.jsonl":
                raise OSError(number, os.strerror(number), str(path))
            return real(path, *words, **more)

        return opened

    for number in (errno.ENOSPC, errno.EIO, errno.ESTALE, errno.EROFS, errno.EACCES):
        monkeypatch.setattr(Path, "open", fails(number))
        with nullcontext() if number in (errno.EROFS, errno.EACCES) else pytest.raises(OSError, match="openings"):
            note_opening(tmp_path, "test", "best.ckpt", {})
        with pytest.raises(OSError, match="openings"):
            openings(tmp_path, "test")


def test_the_size_of_a_network_counts_its_frozen_parameters(tmp_path):
    run = RunDir(tmp_path)
    run.write("model.json", {"parameters": 250, "parameters_total": 8050})
    assert parameters_of(run.read("model.json")) == 8050
    run.write("model.json", {"parameters": 250})  # of an older vitlab
    assert parameters_of(run.read("model.json")) == 250
    assert parameters_of({}) is None
