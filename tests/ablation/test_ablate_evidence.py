"""What others can check: which images, which protocol, whether the numbers are those of the predictions."""

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import yaml

from tests.ablation.made_up import built
from vitlab.ablation.evidence import chain, protocol, repeat, verify
from vitlab.ablation.evidence.verify import Verified
from vitlab.ablation.execution import pool
from vitlab.ablation.execution.cells import Cell
from vitlab.ablation.file.spec import read_ablation
from vitlab.ablation.lab import Lab
from vitlab.ablation.report import write
from vitlab.errors import UsageError
from vitlab.runs.manifest import file_digest

pytestmark = pytest.mark.slow  # whole runs


def started():
    return Lab("toy.yaml", trust_command=True)


@pytest.fixture
def toy(lab, monkeypatch):
    """The toy, before anything; its reports without figures, which are most of their time."""
    monkeypatch.chdir(lab.path)
    monkeypatch.setenv("TOY_PREDICTIONS", "1")
    for drawn in ("figures", "panels", "responses"):
        monkeypatch.setattr(write, drawn, lambda *found: {})
    lab.change(arms=("none", "learned"))
    return started


@pytest.fixture
def done(toy, lab, finished):
    shutil.copytree(finished, lab.path, dirs_exist_ok=True)
    return toy


def change(lab, old, new):
    text = (lab.path / "toy.yaml").read_text()
    assert old in text
    (lab.path / "toy.yaml").write_text(text.replace(old, new))


def cell(lab, arm="learned", seed=0):
    (path,) = (lab.path / "runs/ablations/toy").glob(f"{arm}/s{seed}-*/run.json")
    return path.parent


@pytest.mark.rare
def test_cells_that_read_other_images_do_not_count_and_are_not_mixed(done, lab, monkeypatch):
    change(lab, "seeds: 2", "seeds: 3")
    monkeypatch.setenv("TOY_IMAGES", "480")  # the pictures behind the same root are others now
    said = []
    assert len(done().run(say=said.append).failed) == 2
    assert "the images have changed since the plan: {'train': 640, 'val': 10000} then, {'train': 480" in "".join(said)
    status = done().run()
    assert not status.failed and set(status.cells["state"]) == {"done"}
    assert "4 with other config and data" in str(status) or "4 with other data" in str(status)
    assert done().report().results["value"].notna().all()


@pytest.mark.rare
def test_a_report_is_not_copied_over_a_file(done, lab):
    with pytest.raises(UsageError, match=r"`--output` must be a folder, and base.yaml is a file"):
        done().report("base.yaml")


@pytest.mark.rare
def test_a_report_refuses_cells_that_are_mixed(done, lab):
    path = cell(lab) / "data.json"
    path.write_text(path.read_text().replace("640", "480"))
    with pytest.raises(UsageError, match=r"learned/s0-.*: trained on other images than the rest"):
        done().report()


@pytest.mark.rare
def test_a_changed_base_config_is_reported_line_by_line(done, lab):
    done().report()
    base = lab.path / "base.yaml"
    base.write_text(base.read_text().replace("lr: 0.001", "lr: 0.002"))
    assert "also finished cells that are not in this plan: 4 with other config" in str(done().run())
    done().report()
    page = (lab.path / "runs/ablations/toy/report/report.md").read_text()
    assert (
        "`base.yaml: -model: {pos_embed: none, lr: 0.001}`, `base.yaml: +model: {pos_embed: none, lr: 0.002}`" in page
    )


def test_a_registered_protocol_cannot_change_silently(done, lab):
    first = json.loads((lab.path / "runs/ablations/toy/registered.json").read_text())
    assert done().register() == first and first["cells_done"] == 0
    done().report()
    page = lab.path / "runs/ablations/toy/report/report.md"
    assert "before any cell was done" in page.read_text() and "nothing has changed since" in page.read_text()
    change(lab, "- learned > none", "- none > learned")
    done().report()
    assert "CHANGED since, see below" in page.read_text()
    assert "`the file: -- learned > none`, `the file: +- none > learned`" in page.read_text()
    protocol.record_version(done().ablation)  # as a run would
    change(lab, "- none > learned", "- learned > none")
    done().report()  # back again, and both ways are told
    assert "CHANGED since, see below" in page.read_text()
    assert "`the file: -- none > learned`, `the file: +- learned > none`" in page.read_text()
    change(lab, "- learned > none", "- none > learned")
    with pytest.raises(UsageError, match=r"toy was registered at .* and has changed since"):
        done().register()


def test_a_registered_file_can_be_corrected_until_its_first_cell_starts(toy, lab):
    first = toy().register()
    change(lab, "- learned > none", "- none > learned")
    home = lab.path / "runs/ablations/toy"
    (home / "arms").mkdir()
    (home / "arms" / "sincos2d-0123456789.json").touch()  # a probe is no cell
    second = toy().register()
    assert second["digest"] != first["digest"] and second == toy().register()
    (home / "none/s0-0123456789").mkdir(parents=True)
    (home / "none/s0-0123456789/run.json").write_text("{}")
    change(lab, "- none > learned", "- learned > none")
    with pytest.raises(UsageError, match=r"toy was registered at .* and has changed since"):
        toy().register()


def test_a_file_is_the_same_by_whatever_path_it_is_given(toy, lab):
    shutil.copytree(lab.path, lab.path / "mine", ignore=shutil.ignore_patterns("mine"))
    (lab.path / "base.yaml").unlink()
    first = Lab("mine/toy.yaml").register()
    paths = ["mine/toy.yaml", str(lab.path / "mine/toy.yaml"), "mine/../mine/toy.yaml"]
    assert [Lab(path).register() for path in paths] == [first] * 3
    kept = lab.path / "runs/ablations/toy/history"
    assert [path.stem for path in kept.iterdir()] == [first["digest"]]
    assert set(protocol.texts(Lab(paths[1]).ablation)) == {"the file", "base.yaml"}


def test_a_version_of_before_which_named_a_config_as_its_path_was_typed_is_the_same_version(done, lab):
    home = lab.path / "runs/ablations/toy"
    (path,) = (home / "history").iterdir()
    version = json.loads(path.read_text())
    version["texts"][str(lab.path / "base.yaml")] = version["texts"].pop("base.yaml")
    path.write_text(json.dumps(version))
    assert protocol.sentences(done().ablation)[1:] == ["nothing has changed since"]
    assert done().register()["digest"] == path.stem and len(list((home / "history").iterdir())) == 1
    (lab.path / "base.yaml").write_text("model: {lr: 0.1}\n")
    assert protocol.sentences(done().ablation)[2].endswith("`base.yaml: +model: {lr: 0.1}`")
    with pytest.raises(UsageError, match=r"toy was registered at .* and has changed since"):
        done().register()


def test_a_cell_that_is_trained_again_has_the_threads_of_before_and_is_no_run_of_wandb(toy, lab, monkeypatch):
    change(lab, "seeds: 2", "seeds: 2\nwandb: {project: p, mode: offline}")
    ablation = toy().ablation
    one = Cell(ablation, built({}, ablation.arms[0]), 0)
    one.run.path.mkdir(parents=True)
    (one.run.path / "run.json").write_text('{"threads": 3}')
    loggers, threads = [], []

    def run(words, log, execution, seat, more):
        threads.append(more["OMP_NUM_THREADS"])
        loggers.extend(
            yaml.safe_load(Path(word).read_text()).get("trainer.logger")
            for word in words
            if word.endswith(f"{one.run.name}.yaml")
        )
        return 1, ["enough"]

    monkeypatch.setattr(repeat.process, "run_in_slot", run)
    monkeypatch.setattr(repeat, "evaluation", lambda cell: None)
    assert repeat._again(one, with_training=True) == "it failed: enough" and loggers == [False] and threads == ["3"]


@pytest.mark.slow
def test_a_deep_verification_repeats_every_evaluation_and_one_training(done, monkeypatch):
    monkeypatch.setattr(repeat.random, "choice", lambda cells: cells[0])
    monkeypatch.setenv("TOY", '{"none 0": "fail"}')
    found = done().verify(deep=True)
    assert "weights of 4 of 4 cells evaluated again" in found.notes
    ((name, words),) = found.problems.items()
    assert name.startswith("none/s0-") and words == ["trained again: it failed: RuntimeError: the toy broke"]


@pytest.mark.parametrize("change_of", ["code", "config", "seed"])
def test_cells_outside_the_plan_are_reported_with_what_differs(done, lab, change_of, monkeypatch):
    if change_of == "code":
        monkeypatch.setattr("vitlab.ablation.execution.probe.code_digest", lambda own: "0123456789")
        monkeypatch.setattr("vitlab.ablation.execution.status.code_digest", lambda own: "0123456789")
    elif change_of == "config":
        base = lab.path / "base.yaml"
        base.write_text(base.read_text().replace("lr: 0.001", "lr: 0.002"))
    else:
        change(lab, "seeds: 2", "seeds: [5, 6]")
    assert f"also finished cells that are not in this plan: 4 with other {change_of}" in str(done().status())


def test_verify_recomputes_the_numbers_and_names_what_disagrees(done, lab):
    found = done().verify()
    assert found.is_green and str(found).endswith("\n4 cells, 8 numbers recomputed: all agree")
    path = cell(lab) / "results.json"
    results = json.loads(path.read_text())
    results["val"]["acc1"] = 0.95
    path.write_text(json.dumps(results))
    assert list(done().verify().problems) == [f"learned/{path.parent.name}"]
    code, out = lab("verify")
    assert code == 1 and "acc1 is 0.95, its predictions give 0." in out and "1 of them disagree" in out
    (cell(lab, "none") / "predictions/val.parquet").unlink()
    assert "there is no val.parquet of predictions" in str(done().verify())


def test_cells_whose_task_writes_no_predictions_are_verified_and_exported_with_a_note(done, lab):
    home = lab.path / "runs/ablations/toy"
    for (record,) in chain.read_chain(home).measured("val").values():
        (home / record["cell"] / "predictions/val.parquet").unlink()
    assert "there is no val.parquet of predictions" in str(done().verify())  # they were recorded
    for (record,) in chain.read_chain(home).measured("val").values():
        hashes = {**record["hashes"], "predictions": None}
        chain.append(home, "cell", cell=record["cell"], id=record["id"], split="val", hashes=hashes)
    found = done().verify()
    assert found.is_green and str(found).endswith("4 cells, 0 numbers recomputed: none could be recomputed")
    (note,) = [note for note in found.notes if note.startswith("cannot be recomputed")]
    assert "as the task writes no predictions: none/s0-" in note and note.endswith(" and 1 more")
    done().export("kept")
    assert Lab("kept").verify().is_green


@pytest.mark.parametrize("more", [{"split": "test"}, {}], ids=["of now", "of an older version"])
def test_a_cell_is_compared_with_its_record_of_the_evaluated_split(done, lab, more):
    home = lab.path / "runs/ablations/toy"
    (first, *_) = records = chain.read_chain(home).measured("val").values()
    assert len(records) == 4 and all(record["split"] == "val" for (record,) in records)
    for (record,) in records:  # as after `evaluate: test` and back
        chain.count_reading(home, record["cell"], "test")
        hashes = {**record["hashes"], "predictions": "0" * 64, "result": "1" * 64}
        chain.append(home, "cell", cell=record["cell"], id=record["id"], hashes=hashes, **more)
    found = done().verify()
    assert found.is_green and "measured 2 times" not in str(found)
    chain.append(home, "cell", cell=first[0]["cell"], id=first[0]["id"], split="val", hashes=hashes)
    words = str(done().verify())
    assert f"{first[0]['cell']}: not as it was recorded: " in words
    assert f"{first[0]['cell']}: measured 2 times, with 2 different results" in words


@pytest.mark.parametrize("is_older", [False, True])
@pytest.mark.parametrize("other", ["weights", "metrics", "predictions"])
def test_a_training_that_gives_the_same_numbers_again_has_equal_results(done, lab, other, is_older):
    """The bytes of its checkpoint, whose hash the result holds, are other ones after each training."""
    home = lab.path / "runs/ablations/toy"
    record = next(iter(chain.read_chain(home).measured("val").values()))[0]
    assert record["hashes"]["metrics"]
    for changed in ({"result": "1" * 64, other: "2" * 64}, {}):  # the last one lies there
        hashes = {k: v for k, v in {**record["hashes"], **changed}.items() if k != "metrics" or not is_older}
        chain.append(home, "cell", cell=record["cell"], id=record["id"], split="val", hashes=hashes)
    found = done().verify()
    is_seen = other == "predictions" or (other == "metrics" and not is_older)
    assert found.is_green
    words = "2 different results" if is_seen else "equal results"
    assert f"{record['cell']}: measured 3 times, with {words}" in found.notes


@pytest.mark.parametrize(
    ("stated", "told"), [(222592.03, ""), (222593.0, "mae is 222593, its predictions give 222592")]
)
def test_large_errors_agree_up_to_the_order_of_their_float32_sum(lab, monkeypatch, stated, told):
    monkeypatch.chdir(lab.path)
    ablation = read_ablation("toy.yaml")
    one = Cell(ablation, built({}, ablation.arms[0]), 0)
    one.run.write("results.json", {"val": {"mae": stated}})
    one.run.write("data.json", {})
    one.run.config.write_text("seed_everything: 0\n")
    (one.run.path / "predictions").mkdir()
    table = pd.DataFrame({"target_price": [500000.0], "prediction_price": [277408.0]}, dtype="float32")
    table.to_parquet(one.run.path / "predictions/val.parquet")
    assert verify._check(one) == ([told] if told else [], 1)


def test_verify_says_what_to_give_where_there_is_nothing_to_verify(lab):
    code, out = lab("verify")
    assert code == 2 and "agree" not in out
    assert str(Verified(0, {}, 0)) == "0 cells, 0 numbers recomputed: there was nothing to verify"
    with pytest.raises(UsageError, match=r"nothing to verify: no cell of toy is done in .*give the folder that"):
        Lab(lab.path / "toy.yaml").verify()


def test_the_file_of_evidence_is_verified_with_what_lies_beside_it(done, monkeypatch, tmp_path):
    done().export(tmp_path / "kept")
    monkeypatch.chdir(tmp_path)
    assert str(Lab("kept/ablation.yaml").verify()) == str(Lab("kept").verify())
    assert Lab("kept/ablation.yaml").verify().checked == 4
    monkeypatch.chdir(tmp_path / "kept")
    assert Lab("ablation.yaml").verify().is_green


FILES = ["results.json", "predictions/val.parquet"]
SELDOM = ["done.json", "run.json", "analysis/notes.json", "metrics.jsonl", "analysis/resolution.csv"]


@pytest.mark.parametrize("name", [*FILES, *(pytest.param(name, marks=pytest.mark.rare) for name in SELDOM)])
def test_a_damaged_file_does_not_affect_other_cells(done, lab, name):
    path = cell(lab) / name
    path.write_text("{" + path.read_text(errors="replace")[:20] + "}\n")
    report = done().report()
    assert len(report.results.dropna(subset=["value"])["cell"].unique()) == 3
    page = (lab.path / "runs/ablations/toy/report/report.md").read_text()
    assert "| learned | 0 | damaged |" in page and path.name in page
    if path.suffix in (".json", ".jsonl"):
        assert path.name in str(done().status()) and "1 damaged" in str(done().status())
        assert path.name in str(done().verify())
        said = []
        assert not done().run(say=said.append).failed
        assert any(line.startswith("damaged  learned/s0") for line in said)
        assert set(done().status().cells["state"]) == {"done"} and done().verify().is_green


def test_a_cell_that_was_trained_further_after_its_evaluation_is_named_and_measured_again(done, lab):
    path = cell(lab) / "checkpoints/last.ckpt"
    path.write_text('{"epoch": 2, "more": 1}')  # as after `vitlab fit --resume`
    status = path.stat()
    entry = {"sha256": file_digest(path), "size": status.st_size, "modified": status.st_mtime_ns}
    (path.parent / "manifest.json").write_text(json.dumps({"last.ckpt": entry}))
    report = done().report()
    page = (lab.path / "runs/ablations/toy/report/report.md").read_text()
    assert len(report.results.dropna(subset=["value"])["cell"].unique()) == 3
    assert "| learned | 0 | missing | measured before it went on; run `vitlab validate" in page
    assert "measured before it went on" in str(done().status()) and not done().verify().is_green
    with pytest.raises(UsageError, match=r"nothing is exported that does not verify: learned/s0-.*: measured before"):
        done().export("kept")
    assert not done().run().failed
    assert set(done().status().cells["state"]) == {"done"} and done().verify().is_green


def test_a_cell_that_was_resumed_with_other_settings_no_longer_counts(done, lab):
    record = json.loads((cell(lab) / "run.json").read_text())
    (cell(lab) / "run.json").write_text(json.dumps({**record, "changes": [{"trainer.devices": 2}]}))
    assert set(done().status().cells["state"]) == {"done"}  # cannot change a number
    (cell(lab) / "run.json").write_text(json.dumps({**record, "changes": [{"trainer.max_epochs": 9}]}))
    why = "no cell of this file any more: it was resumed with --trainer.max_epochs=9"
    assert why in str(done().status()) and why in str(done().verify())
    done().report()
    assert why in (lab.path / "runs/ablations/toy/report/report.md").read_text()
    assert not done().run().failed
    assert set(done().status().cells["state"]) == {"done"} and done().verify().is_green


def test_a_report_without_the_tables_that_a_failing_disk_hides_is_not_written(done, lab, monkeypatch):
    """Before, the cell counted as damaged, and the report was written without it and with exit code 0."""

    def fail(path, *args, **more):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(pd, "read_parquet", fail)
    with pytest.raises(OSError, match=r"Input/output error: '.*/predictions/val.parquet'"):
        done().report()
    assert not list(lab.path.glob("runs/ablations/toy/report/*"))


def test_a_report_that_fails_is_no_look(done, lab, monkeypatch):
    def fail(*asked):
        raise RuntimeError("no linear model")

    monkeypatch.setattr(write, "linear", fail)
    with pytest.raises(RuntimeError, match="no linear model"):
        done().report()
    assert not chain.read_chain(lab.path / "runs/ablations/toy").of("look")


def test_a_file_that_is_damaged_during_the_work_fails_its_cell_alone(done, lab, monkeypatch):
    change(lab, "seeds: 2", "seeds: 3")
    work, told = pool.process_cell, []

    def damaged(cell, *args):
        if cell.arm.name == "none":
            raise UsageError("run.json is damaged")
        return work(cell, *args)

    monkeypatch.setattr(pool, "process_cell", damaged)
    status = done().run(workers=1, say=told.append)
    assert [name.split("-")[0] for name in status.failed] == ["none/s2"]
    assert any("failed   none/s2" in line and "run.json is damaged" in line for line in told)
    assert dict(status.cells["state"].value_counts()) == {"done": 5, "missing": 1}


def test_an_evaluation_that_the_plan_limits_is_verified_as_what_it_is(done, monkeypatch):
    lab_there, limit = done(), "trainer.limit_val_batches=2"
    cell = lab_there._cells()[0]
    for value, told in ((2, limit), (1, "trainer.limit_val_batches=1"), (1.0, ""), (None, "")):
        config = {**cell.resolved.config, "trainer": {"limit_val_batches": value}}
        assert replace(cell, resolved=replace(cell.resolved, config=config)).limit == told
    path = cell.run.predictions("val")
    pd.read_parquet(path)[:128].to_parquet(path, index=False)
    cell.run.write("results.json", {"val": {**cell.run.stored["val"], "n": 128.0, "acc1": 1.0}})
    assert verify._check(cell)[0] == ["predictions of 128 images, the split has 10000"]
    monkeypatch.setattr(Cell, "limit", limit)
    assert verify._check(cell)[0] == []
    assert f"measured on a part of the val split, as planned: {limit}" in lab_there.verify().notes
    line = lab_there.plan().lines[1]
    assert line.endswith(f"on the val split, the evaluation on a part of its images: {limit}")


def test_a_damaged_file_of_an_arm_is_made_again(done, lab):
    for path in (lab.path / "runs/ablations/toy/arms").glob("*.json"):
        path.write_text("{")
    assert set(done().status().cells["state"]) == {"missing"}
    assert not done().run().failed
    assert set(done().status().cells["state"]) == {"done"}


def test_an_exported_folder_gives_the_same_report_elsewhere(done, tmp_path_factory, monkeypatch):
    page = done().report().files[1].read_text()
    done().export("kept")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    shutil.move("kept", elsewhere / "evidence")
    monkeypatch.chdir(elsewhere)
    lab_there = Lab("evidence")
    assert lab_there.report().files[1].read_text() == page
    assert lab_there.verify().is_green and set(lab_there.status().cells["state"]) == {"done"}
    table = pd.read_csv("evidence/seeds.csv")
    assert set(table["seed"]) == {0, 1} and {"acc1", "resolution/acc1@8"} <= set(table["metric"])
    assert not list(Path("evidence").rglob("*.ckpt"))
    slim = pd.read_parquet(next(Path("evidence").rglob("predictions/*.parquet")))
    assert {"index", "target", "prediction"} <= set(slim.columns) and "probabilities" not in slim.columns
    rows = [
        row
        for path in Path("evidence").rglob("metrics.jsonl")
        for row in map(json.loads, path.read_text().splitlines())
    ]
    assert rows and {"lr", "attempt"}.isdisjoint(key for row in rows for key in row)
    with pytest.raises(UsageError, match="evidence: it can be reported and verified, not run"):
        lab_there.run()
    sealed = {path: file_digest(path) for path in Path("evidence").rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match=r"evidence: it can be reported and verified, not registered$"):
        lab_there.register()
    assert {path: file_digest(path) for path in Path("evidence").rglob("*") if path.is_file()} == sealed


def test_evidence_takes_its_configs_from_itself_and_not_from_where_it_is_read(done, lab):
    done().export("kept")
    there = protocol.sentences(Lab("kept").ablation)
    assert "nothing has changed since" in there
    (lab.path / "base.yaml").write_text("trainer: {max_epochs: 99}\nmodel: {pos_embed: none, lr: 0.1}\ndata: {}\n")
    assert protocol.sentences(Lab("kept").ablation) == there
    assert "CHANGED since, see below" in protocol.sentences(done().ablation)


def test_an_exported_folder_that_was_changed_is_refused(done, lab):
    done().export("kept")
    with pytest.raises(UsageError, match="kept exists and is not empty"):
        done().export("kept")
    table = lab.path / "kept/seeds.csv"
    table.write_text(table.read_text().replace("0.", "0.9", 1))
    with pytest.raises(UsageError, match=r"these files changed since the export: seeds.csv"):
        Lab("kept")
    (lab.path / "empty").mkdir()
    with pytest.raises(UsageError, match="empty was not written by `vitlab ablate export`"):
        Lab("empty")


def test_a_metric_that_nobody_measures_is_found_before_any_cell(toy, lab):
    text = (lab.path / "toy.yaml").read_text()
    for wrong, words in {
        text.replace("primary: acc1", "primary: accuracy"): "no arm measures a metric `accuracy`",
        text.replace("primary: acc1", "primary: mae/height"): "no arm measures a metric `mae/height`",
        text.replace("learned > none", "learned > none on topk"): "no arm measures a metric `topk`; there are acc1, ",
    }.items():
        (lab.path / "toy.yaml").write_text(wrong)
        with pytest.raises(UsageError, match=rf"toy.yaml, line \d+: {words}"):
            toy().plan()
    assert not lab.counts()


def test_planning_starts_no_untrusted_program(lab, monkeypatch):
    monkeypatch.chdir(lab.path)
    for start in (Lab("toy.yaml").plan, Lab("toy.yaml").run, Lab("toy.yaml").commands):
        with pytest.raises(UsageError, match=r"line \d+: `run.command` starts .* if you trust it, add --trust_command"):
            start()
    assert not (lab.path / "runs").exists()


def test_every_reading_of_the_measured_split_is_counted(done, lab):
    path = lab.path / "runs/ablations/toy/readings.jsonl"
    assert len(path.read_text().splitlines()) == 4
    (cell(lab) / "results.json").unlink()
    done().run()
    assert len(path.read_text().splitlines()) == 5


@pytest.mark.rare
def test_a_cell_that_a_command_has_measured_on_the_split_before_is_measured_by_the_laboratory(done, lab):
    home, paths = lab.path / "runs/ablations/toy", (cell(lab), cell(lab, "none"))
    for path in paths:  # as `vitlab test` does
        results = json.loads((path / "results.json").read_text())
        (path / "results.json").write_text(json.dumps({**results, "test": {**results["val"], "acc1": 0.99}}))
    old = paths[1] / "done.json"
    old.write_text(json.dumps({k: v for k, v in json.loads(old.read_text()).items() if k != "splits"}))
    change(lab, "name: toy", "name: toy\nevaluate: test")
    before = done().verify()
    assert before.missing.keys() > {f"learned/{paths[0].name}"}
    (words,) = before.problems[f"none/{paths[1].name}"][-1:]
    assert words.endswith("no record of it on test; to measure it again, remove its done.json and `vitlab ablate run`")
    old.unlink()
    assert not done().run().failed and done().verify().is_green
    assert all(json.loads((path / "results.json").read_text())["test"]["acc1"] < 0.9 for path in paths)
    old.unlink()  # killed between measurement and record: it is recorded, not measured once more
    assert not done().run().failed and done().verify().is_green
    change(lab, "evaluate: test", "evaluate: val")
    assert not done().run().failed and done().verify().is_green
    assert (home / "readings.jsonl").read_text().count('"split": "test"') == 4


def test_each_version_of_the_file_is_kept_once(done, lab):
    done().run()
    assert len(protocol.stored_versions(done().ablation)) == 1
