"""`vitlab runs`: what is listed, compared and removed, on directories as trainings leave them."""

import csv
import io
import json
import math
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from vitlab.cli.main import main
from vitlab.config.keys import differences
from vitlab.jobs import listing
from vitlab.jobs.clean import remove, to_clean
from vitlab.jobs.export import _origin
from vitlab.jobs.listing import about, list_runs, run_facts
from vitlab.jobs.train.start import _first_record
from vitlab.look.facts import numbers_of
from vitlab.run import Run
from vitlab.runs import lock
from vitlab.runs.directory import LOCK, RunDir
from vitlab.runs.manifest import file_digest
from vitlab.runs.records import metrics_and_n, split_metrics

OPENED: list[str] = []
LISTENS = [False]


def listen(event, arguments):
    if event == "open" and LISTENS and LISTENS[0] and isinstance(arguments[0], str | os.PathLike):
        OPENED.append(os.fspath(arguments[0]))


sys.addaudithook(listen)


def make(name, acc1, pos_embed="none", status="done", day=1, size=1000):
    run = RunDir(Path("runs") / name)
    run.checkpoints.mkdir(parents=True)
    entries = {}
    for i, stem in enumerate(("best", "last", "previous")):
        path = run.checkpoints / f"{stem}.ckpt"
        path.write_bytes(bytes([i]) * size + name.encode())
        facts = path.stat()
        entry = {"size": facts.st_size, "modified": facts.st_mtime_ns, "epoch": i, "step": 5 * i}
        entries[path.name] = {"sha256": file_digest(path), **entry}
    run.write("checkpoints/manifest.json", entries)
    network = {"class_path": "vitlab.tasks.classifier.Classifier", "init_args": {"pos_embed": pos_embed, "depth": 3}}
    run.config.write_text(yaml.safe_dump({"model": network, "trainer": {"max_epochs": 3, "devices": "auto"}}))
    (run.path / "overrides.yaml").write_text(yaml.safe_dump({"model.pos_embed": pos_embed}))
    argv = ["vitlab", "fit", "--config", "configs/t2t.yaml"]
    started = f"2026-01-{day:02d}T00:00:00+00:00"
    run.write("run.json", {"status": status, "seed": 0, "started": started, "argv": argv, "configs": argv[-1:]})
    digest = entries["best.ckpt"]["sha256"]
    run.write("results.json", {"test": {"acc1": acc1, "n": 360.0, "checkpoint": "best.ckpt", "sha256": digest}})
    run.weights.mkdir()
    (run.weights / "best.safetensors").write_bytes(bytes(8))
    run.write("model.json", {"parameters": 1000 + day})
    run.write("data.json", {"class_names": ["0"], "mean": [0.0], "std": [1.0], "splits": {"test": {"n": 10 * day}}})
    return run


@pytest.fixture
def place(here):
    make("a", 0.75, "rope2d", day=2)
    make("b", 0.5, "none", day=1)
    make("c", 0.9, "learned", day=3)
    return here


def names(capsys, *words):
    assert main(["runs", "list", "--json", *words]) == 0
    return [row["run"] for row in json.loads(capsys.readouterr().out)]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ([], "bac"),
        (["--where", "model.pos_embed=rope2d"], "a"),
        (["--where", "model.pos_embed=r*"], "a"),
        (["--where", "model.pos_embed!=none"], "ac"),
        (["--where", "model=Classifier", "--where", "test.acc1>=0.75"], "ac"),
        (["--where", "started<2026-01-02", "--where", "model.depth=3"], "b"),
        (["--sort", "test.acc1"], "bac"),
        (["--sort", "test.acc1", "--reverse"], "cab"),
        (["--sort", "parameters"], "bac"),
        (["runs", "--where", "status=failed"], ""),
        (["--where", "trainer.devices>1"], ""),  # auto
        (["--where", "started>=2026"], "bac"),
    ],
)
def test_runs_are_filtered_and_sorted(place, capsys, words, found):
    assert names(capsys, *words) == list(found)


def test_a_run_whose_number_is_none_is_not_the_best(place, capsys):
    make("d", math.nan, day=4)
    assert names(capsys, "--sort", "test.acc1", "--reverse") == [*"cabd"]
    assert names(capsys, "--sort", "test.acc1") == [*"bacd"] and names(capsys, "--reverse") == [*"dcab"]


def test_numbers_of_replaced_weights_are_left_out_and_unverified_ones_are_marked(place, capsys, monkeypatch):
    path = Path("runs/a/checkpoints/best.ckpt")
    os.utime(path, (0, 0))
    assert main(["runs", "list", "a"]) == 0
    assert "0.75?" in capsys.readouterr().out  # a copy: not known without reading it
    assert main(["runs", "show", "a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["numbers"]["test.acc1"] == 0.75
    path.write_bytes(b"trained on")
    assert main(["runs", "show", "a", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)[0]["numbers"]
    assert "test.acc1" not in shown and "measured before it went on" in shown["test.note"]
    assert main(["runs", "list", "a"]) == 0
    out = capsys.readouterr().out
    assert "stale" in out and "0.75" not in out and "`vitlab test RUN` measures again" in out
    digest = RunDir("runs/a").stored["test"]["sha256"]
    RunDir("runs/a").write("results.json", {"val": {"acc1": 0.5, "checkpoint": "best.ckpt", "sha256": digest}})
    assert main(["runs", "list", "a"]) == 0
    assert "`vitlab validate RUN` measures again" in (out := capsys.readouterr().out) and "vitlab test" not in out
    monkeypatch.setattr("vitlab.errors.TRUSTED", ["mine"])
    assert main(["runs", "list", "a"]) == 0
    assert "`vitlab validate RUN --trust_imports mine` measures again" in capsys.readouterr().out


def test_csv_and_json_have_every_number_in_full(place, capsys):
    assert main(["runs", "list", "--csv", "--columns", "model.depth"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert next((row["run"], row["test.acc1"], row["model.depth"]) for row in rows) == ("b", "0.5", "3")
    assert main(["models", "t2t_vit_14", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["parameters"] > 21e6


def test_a_list_opens_a_dozen_small_files_of_each_run_and_no_checkpoint(place):
    for i in range(20):
        make(f"many{i}", i / 20)
    OPENED.clear()
    LISTENS[0] = True
    rows, _ = list_runs(where=["model.pos_embed=none"], sort="test.acc1")
    LISTENS[0] = False
    opened = [path for path in OPENED if "runs" in Path(path).parts]
    assert len(rows) == 21 and 23 <= len(opened) <= 12 * 23
    assert {Path(path).suffix for path in opened} <= {".json", ".yaml"}


def test_a_damaged_run_does_not_hide_the_others(place, capsys):
    Path("runs/b/results.json").write_text("{")
    assert main(["runs", "list"]) == 0
    out, error = capsys.readouterr()
    assert "left out runs/b: runs/b/results.json is damaged" in error and "0.9" in out


@pytest.mark.parametrize("content", [b"a: [", b"a: \xff\n", b"- a\n"])
def test_a_damaged_configuration_is_one_line(place, content, capsys):
    Path("runs/b/config.yaml").write_bytes(content)
    assert main(["runs", "list", "--where", "model.depth=3"]) == 0
    assert "left out runs/b: runs/b/config.yaml is damaged: " in capsys.readouterr().err
    assert main(["runs", "show", "b"]) == 2
    assert capsys.readouterr().err.startswith("vitlab: runs/b/config.yaml is damaged: ")


def test_runs_diff_shows_what_two_runs_were_given_differently(place, capsys):
    assert main(["runs", "diff", "a", "b", "--json"]) == 0
    rows = {row["key"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["model.pos_embed"] == {"part": "config", "key": "model.pos_embed", "a": "rope2d", "b": "none"}
    assert rows["test.acc1"]["difference"] == -0.25 and rows["splits.test.n"]["part"] == "data"
    assert "model.depth" not in rows


def test_clean_removes_only_what_it_showed_and_only_with_yes(place, capsys):
    spare = [Path(f"runs/{name}/checkpoints/previous.ckpt") for name in "abc"]
    assert main(["runs", "clean"]) == 0
    out, error = capsys.readouterr()
    assert "runs/a/checkpoints/previous.ckpt" in out and "Nothing was removed: add --yes" in error
    assert all(path.is_file() for path in spare)
    before = set(Path("runs").rglob("*"))
    assert main(["runs", "clean", "--yes", "--where", "run!=c"]) == 0
    assert before - set(Path("runs").rglob("*")) == set(spare[:2])
    capsys.readouterr()
    assert names(capsys, "a") == ["a"]


def test_what_a_resume_changed_is_shown(place):
    run = RunDir("runs/a")
    run.update("run.json", changes=[{"trainer.max_epochs": 9, "data.num_workers": 1}])
    assert run_facts(run)["changed"] == "model.pos_embed=rope2d trainer.max_epochs=9"


def test_a_linked_run_is_listed_and_cleaning_it_removes_the_link_alone(place, capsys):
    Path("disk").mkdir()
    Path("runs/a").rename("disk/a")
    Path("runs/a").symlink_to(place / "disk" / "a")
    Path("runs/round").symlink_to(place / "runs")
    assert names(capsys, "runs/") == list("bac")
    before = sorted(Path("disk/a").rglob("*"))
    (item,), _ = to_clean([RunDir("runs/a")], "runs")
    assert "the link alone" in item.why and remove([item]) == (0, {})
    assert not Path("runs/a").is_symlink() and sorted(Path("disk/a").rglob("*")) == before


def test_clean_leaves_a_run_that_trains_alone(place, capsys):
    RunDir("runs/a").update("run.json", status="running")
    claim = lock.take(Path("runs/a") / LOCK)
    try:
        for what in ("spare", "resume", "checkpoints", "runs"):
            assert main(["runs", "clean", "a", "--what", what, "--yes"]) == 0
            assert "kept     runs/a: a process trains in it" in capsys.readouterr().err
    finally:
        claim.release()
    assert len(list(Path("runs/a/checkpoints").glob("*.ckpt"))) == 3
    assert main(["runs", "list", "a"]) == 0
    assert "killed" in capsys.readouterr().out


def test_a_run_that_was_killed_has_no_end_of_an_earlier_attempt_and_says_how_to_go_on(place, capsys):
    run = RunDir("runs/a")
    run.update("run.json", status="failed", ended="2026-01-02T03:04:05+00:00", peak_memory={"host": 1}, steps=9)
    options = SimpleNamespace(resume="runs/a", init_from=None, start=None, resize=None, init_grid=None)
    facts = {"resumed": True, "arguments": [], "recipe": "r", "wandb_line": None, "stored_config": {}}
    job = SimpleNamespace(run=run, options=options, **facts)
    run.write("run.json", _first_record(job))
    assert not {"ended", "peak_memory"} & run.record.keys() and run.record["steps"] == 9
    assert main(["runs", "show", "a"]) == 0
    shown = capsys.readouterr().out
    assert "killed" in shown and "continue with `vitlab fit --resume runs/a`" in shown
    run.update("run.json", ended="2026-01-02T03:04:05+00:00", peak_memory={"host": 1})  # as an older vitlab left it
    assert not {"ended", "peak_memory"} & {*run_facts(run), *about(run)["run"], *about(run)["machine"]}


def test_clean_finds_what_a_killed_training_left_under_the_names_of_its_attempt(place):
    names = "checkpoints/.writing-0f", "checkpoints/.7-0.manifest.json", ".fit-0f-a1.run.json", "weights/.fit-0f-b2.x"
    left = [Path("runs/a", name) for name in names]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"torn")
    assert main(["runs", "clean", "a", "--yes"]) == 0
    assert not any(path.exists() for path in left)


def test_clean_says_which_results_lose_their_checkpoint(place, capsys):
    assert main(["runs", "clean", "a", "--what", "checkpoints", "--yes"]) == 0
    note = "note: test loses the checkpoint of the measurement, runs/a/checkpoints/best.ckpt"
    assert note in capsys.readouterr().out
    assert not list(Path("runs/a").rglob("*.ckpt")) and RunDir("runs/a").measured("test")["acc1"] == 0.75


def test_a_checkpoint_that_a_result_names_is_not_spare(place, capsys):
    run = RunDir("runs/a")
    digest = file_digest(run.checkpoints / "previous.ckpt")
    run.write("results.json", {"test": {"acc1": 0.7, "checkpoint": "previous.ckpt", "sha256": digest}})
    assert main(["runs", "clean", "a", "--yes"]) == 0
    assert "test was measured with it" in capsys.readouterr().err and (run.checkpoints / "previous.ckpt").is_file()


def test_clean_removes_whole_runs_and_keeps_files_of_others(place, capsys):
    Path("runs/b/thesis.tex").write_text("mine")
    assert main(["runs", "clean", "--what", "runs", "--where", "run!=c", "--yes"]) == 0
    assert not Path("runs/a").exists() and Path("runs/b/config.yaml").is_file()
    assert "it contains thesis.tex, which no run writes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["list", "--where", "model.pos_embd=rope2d"], 'no run has `model.pos_embd`; did you mean "model.pos_embed"?'),
        (["list", "--where", "rope2d"], '`--where` must be KEY=VALUE, or have !=, <, <=, > or >= in place of =, got'),
        (["list", "--where", "test.acc1>high"], "`--where test.acc1>high` compares with a number"),
        (["list", "--sort", "acc1"], 'no run has `acc1`; did you mean "test.acc1"?'),
        (["list", "nowhere"], 'no run or checkpoint called "nowhere"'),
        (["list", "--json", "--csv"], "not allowed with argument --json"),
        (["diff", "a", "runs/a"], "are the same run; give two"),
        (["clean", "--what", "runs"], "`--what runs` deletes whole runs: name them, or choose them with --where"),
        (["clean", "--what", "all"], "invalid choice: 'all'"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_command_on_runs_is_one_line(place, capsys, words, message):
    assert main(["runs", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_notebook_shows_status_answer_and_curves_also_of_a_damaged_run(place):
    run = Run("a")
    run._directory.metrics.write_text('{"step": 1, "val/loss": 2.0}\n{"step": 2, "val/loss": 1.0}\n')
    page = run._repr_html_()
    assert "<b>a</b>, done" in page and "75.00 %" in page and "<svg" in page
    Path("runs/a/results.json").write_text("{")
    assert "results.json is damaged" in run._repr_html_()


def test_an_unknown_format_is_refused_with_the_known_ones(place):
    message = "`to` must be one of safetensors, timm, onnx, onnx-int8, pt2, got 'torchscript'"
    with pytest.raises(ValueError, match=message):
        Run("a").export("torchscript")


def test_runs_below_a_folder_are_told_apart_by_their_path_and_a_point_has_a_name(place, monkeypatch):
    for arm in ("none", "learned"):
        shutil.copytree("runs/a", f"cells/{arm}/s0")
    assert sorted(row["run"] for row in list_runs(["cells"])[0]) == ["learned/s0", "none/s0"]
    assert [row["run"] for row in list_runs(["cells/none/s0"])[0]] == ["s0"]
    monkeypatch.chdir("cells/none/s0")
    assert [row["run"] for row in list_runs(["."])[0]] == ["s0"] == [RunDir(".").name]


def test_no_order_holds_for_a_number_that_is_none():
    for sign in ("<", "<=", ">", ">="):
        condition = listing.Condition.read(f"val.loss{sign}0.1")
        assert not condition.holds({"val.loss": float("nan")}) and condition.holds({"val.loss": 0.1}) == ("=" in sign)


def test_runs_are_compared_one_way_as_text_and_loggers_change_nothing():
    a = {"model": {"class_path": "C", "init_args": {"lr": 1, "depth": 2}}, "trainer": {"logger": False}}
    b = {"model": {"class_path": "C", "init_args": {"lr": "1", "width": 3}}, "trainer": {"logger": True}}
    assert differences([a, b]) == [("model.depth", ["2", "-"]), ("model.width", ["-", "3"])]


def test_every_reader_sees_the_same_metrics_of_a_split(place):
    images = {"img_size": [8, 8], "crop_pct": 0.9}
    run = RunDir(Path("runs/a"))
    result = {
        **run.stored["test"],
        "trained_on": 3,
        "averaged": True,
        "epoch": 2,
        "recall": {"cat": 0.5},
        "images": images,
    }
    run.update("results.json", test=result)
    assert split_metrics(result) == {"acc1": 0.75, "trained_on": 3}
    assert metrics_and_n(result) == {"acc1": 0.75, "trained_on": 3, "n": 360.0}
    assert numbers_of(run)["others"] == "trained_on 3"
    assert {"test.acc1": 0.75, "test.trained_on": 3}.items() <= list_runs(["runs/a"])[0][0].items()
    numbers = about(run)["numbers"]
    assert {k: v for k, v in numbers.items() if k != "test.checkpoint"} == {
        "test.acc1": 0.75,
        "test.trained_on": 3,
        "test.n": 360.0,
        "test.epoch": 3,  # stored counted from 0, shown counted from 1
    }
    of_file = _origin(run, run.checkpoints / result["checkpoint"], is_as_measured=True)
    assert of_file["measured"] == {"test": {"acc1": 0.75, "trained_on": 3, "n": 360.0}}
