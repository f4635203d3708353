"""Tuning per arm: the same budget for every arm, validation data and other seeds; then it is measured."""

import contextlib
import itertools
import json
import math
import random
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import yaml
from matplotlib.figure import Figure

from tests.ablation.made_up import built
from tests.ablation.toy import DEFAULTS, IMAGES, accuracy, flat
from vitlab.ablation.evidence.bundle import _thin
from vitlab.ablation.evidence.protocol import record_version
from vitlab.ablation.execution import candidates
from vitlab.ablation.execution.candidates import Candidates, Trial, _in_turn, halved, with_values
from vitlab.ablation.execution.cells import Cell, Resolved, cells_of
from vitlab.ablation.execution.process import VITLAB
from vitlab.ablation.execution.resolve import _refuse_halving
from vitlab.ablation.execution.tuning import Tuning, suggest
from vitlab.ablation.file.settings import _candidates
from vitlab.ablation.file.spec import Ablation, read_ablation
from vitlab.ablation.lab import Lab
from vitlab.ablation.report.tuned import _response, responses, tuning_section
from vitlab.ablation.running import RunOptions, _forget_failures, submit_cells
from vitlab.errors import UsageError
from vitlab.runs.directory import RunDir

pytestmark = pytest.mark.slow  # whole runs

SPACE = {"model.lr": [0.001, 0.002, 0.004, 0.008]}


@pytest.fixture
def toy(lab, monkeypatch):
    monkeypatch.chdir(lab.path)
    monkeypatch.setenv("TOY_PREDICTIONS", "1")
    write(lab, {**SPACE, "seeds": [100]})
    return lambda: Lab("toy.yaml", trust_command=True)


def write(lab, tune, **changes):
    lab.change(arms=("none", "learned"), seeds=1)
    content = yaml.safe_load((lab.path / "toy.yaml").read_text())
    (lab.path / "toy.yaml").write_text(yaml.safe_dump({**content, "tune": tune, **changes}, sort_keys=False))


def configs(lab, pattern):
    paths = (lab.path / "runs/ablations/toy").glob(f"{pattern}/config.yaml")
    return {str(p.parent.parent.name): yaml.safe_load(p.read_text()) for p in sorted(paths)}


def at_border(ablation, trial):
    return ablation.tune.is_at_border("model.lr", trial.values["model.lr"])


@pytest.mark.rare
def test_every_arm_is_measured_with_its_best_candidate_which_other_seeds_chose(toy, lab):
    plan = toy().plan()
    assert not lab.counts() and len(plan.arms) == 2
    assert not toy().run().failed
    tried = configs(lab, "tune/*/s*")
    assert len(tried) == 8 and {c["seed_everything"] for c in tried.values()} == {100}
    ablation, arms = toy().ablation, toy()._known()
    found = Tuning(ablation, arms).chosen
    for arm in ("none", "learned"):
        mine = [t for t in Tuning(ablation, arms).trials if t.arm == arm]
        assert found[arm].score() == max(t.score() for t in mine)
        assert configs(lab, f"{arm}/s*")[arm]["model"]["lr"] == found[arm].values["model.lr"]
    page = toy().report().files[1].read_text()
    part = page.split("## Tuning")[1].split("\n## ")[0]
    assert part.count("| chosen |") == 2 and "the same 4 candidates on the validation split, seeds 100" in part
    assert ("at the border" in part) == any(at_border(ablation, trial) for trial in found.values())
    assert "tuning: 8 of 8 candidates are over" in str(toy().status())
    before = lab.counts()
    assert not toy().run().failed and lab.counts() == before


@pytest.mark.rare
def test_tune_only_measures_nothing_and_says_which_choices_lie_at_the_border(toy, lab):
    said = []
    status = toy().run(say=said.append, tune_only=True)
    assert not status.failed and not configs(lab, "none/s*") and len(configs(lab, "tune/*/s*")) == 8
    ablation, arms = toy().ablation, toy()._known()
    found = Tuning(ablation, arms).chosen
    at = [f"{arm}: the best `model.lr`, {trial.values['model.lr']}, " for arm, trial in found.items()]
    at = [text for text, trial in zip(at, found.values(), strict=True) if at_border(ablation, trial)]
    lines = [line for line in str(toy().status()).split("\n") if line.startswith("tuning: ")]
    assert len(lines) == 1 + len(at) and all(f"tuning: {text}is at the border" in lines for text in at)
    before = lab.counts()
    assert not toy().run().failed and set(configs(lab, "*/s*")) == {"none", "learned"}
    assert all(lab.counts()[line] == count for line, count in before.items())  # the candidates are not trained again
    lab.change(arms=("none", "learned"), seeds=1)
    content = yaml.safe_load((lab.path / "toy.yaml").read_text())
    (lab.path / "toy.yaml").write_text(yaml.safe_dump({k: v for k, v in content.items() if k != "tune"}))
    with pytest.raises(UsageError, match="`--tune_only` trains the candidates of `tune`"):
        toy().run(tune_only=True)


def test_candidates_that_were_trained_count_where_a_longer_list_moves_them_in_the_grid(lab, monkeypatch):
    monkeypatch.chdir(lab.path)
    rates, spreads = [0.001, 0.002], [0.01, 0.02]
    write(lab, {"model.lr": rates, "model.sd": spreads, "seeds": [100, 101]})

    def numbers():
        ablation = read_ablation("toy.yaml")
        arm = built({"model": {}, "data": {}}, ablation.arms[0])
        tried = Tuning(ablation, [arm]).trials
        places = {
            (*t.values.values(),): {c.name.split("/")[0].removeprefix("none-try") for c in t.cells} for t in tried
        }
        return tried, {values: int(*found) for values, found in places.items()}

    grid = [(rate, spread) for rate in rates for spread in spreads]
    tried, first = numbers()
    assert first == {values: i for i, values in enumerate(grid)}
    tried[0].cells[0].run.write("done.json", {})
    tried[3].cells[1].fail({})  # a candidate has begun if one of its seeds has
    tried[2].cells[0].run.write("run.json", {})
    assert numbers()[1] == first
    write(lab, {"model.lr": rates, "model.sd": [*spreads, 0.03], "seeds": [100, 101]})
    longer = {
        (0.001, 0.01): 0,
        (0.001, 0.02): 1,
        (0.001, 0.03): 4,
        (0.002, 0.01): 2,
        (0.002, 0.02): 3,
        (0.002, 0.03): 5,
    }
    tried, found = numbers()
    assert found == longer
    tried[5].cells[0].run.write("run.json", {})  # the last new one begins before the first
    assert numbers()[1] == longer
    tried[2].cells[0].ablation.directory.joinpath("none-try2-try7/s100-0").mkdir(parents=True)  # of another arm
    assert numbers()[1] == longer


def test_the_history_of_candidates_holds_the_configs_and_begins_none_anew(lab, monkeypatch):
    monkeypatch.chdir(lab.path)
    write(lab, {**SPACE, "seeds": [100]})
    ablation = read_ablation("toy.yaml")
    arm = built({"model": {}, "data": {}}, ablation.arms[0])
    candidate = Tuning(ablation, [arm]).trials[0].cells[0].ablation
    before = {"time": "2026-11-01", "texts": {"the file": ablation.file.path.read_text()}}  # without configs
    RunDir(candidate.directory / "history").write("0123456789.json", before)
    digest = record_version(candidate)
    assert digest == record_version(candidate) == record_version(ablation)
    kept = {path.stem: json.loads(path.read_text())["texts"] for path in candidate.directory.glob("history/*")}
    assert set(kept) == {"0123456789", digest} and set(kept[digest]) == {"the file", "base.yaml"}


def test_one_measured_seed_more_does_not_tune_again_unasked(lab, monkeypatch):
    monkeypatch.chdir(lab.path)

    def opened(count, code="", **own):
        write(lab, {**SPACE, **own}, seeds=count)
        found = Lab("toy.yaml", trust_command=True)
        found._arms = [Resolved(found.ablation.arms[0], {"model": {}, "data": {}}, {}, {}, (), 1.0, code)]
        return found

    monkeypatch.setattr(Lab, "_refuse_evidence", lambda *words: None)
    before = opened(3)
    Tuning(before.ablation, before._known()).trials[1].cells[0].run.write("run.json", {})
    before._asked(1, [], False, False, False)
    with pytest.raises(
        UsageError, match=r"line \d+: .* is \[103\] now, .* candidates of \[102\]: `seeds: \[102\]` keeps"
    ):
        opened(4)._asked(1, [], False, False, False)
    for ask in (opened(4).plan, opened(4).verify, opened(4).report):
        with pytest.raises(UsageError, match="tunes again"):
            ask()
    opened(4, seeds=[102])._asked(1, [], False, False, False)
    opened(4, code="another")._asked(1, [], False, False, False)  # candidates are trained again in any case
    after = opened(4, seeds=[103])
    Tuning(after.ablation, after._known()).trials[0].cells[0].run.write("run.json", {})
    opened(4)._asked(1, [], False, False, False)  # tuned again


def test_retrying_forgets_failures_of_candidates_and_of_tuned_cells(lab, monkeypatch):
    monkeypatch.chdir(lab.path)
    write(lab, {**SPACE, "seeds": [100]})
    ablation = read_ablation("toy.yaml")
    arm = built({"model": {}, "data": {}}, ablation.arms[0])
    cells = [trial.cells[0] for trial in Tuning(ablation, [arm]).trials]
    failure = {"kind": "program", "stage": "fit", "last": "broke"}
    for cell, kind in zip(cells, ("program", "diverged", "program", "diverged"), strict=True):
        cell.fail({**failure, "kind": kind})
    cells[0].run.path.mkdir(parents=True)
    monkeypatch.setattr(Lab, "_known", lambda self: [arm])
    monkeypatch.setattr("vitlab.ablation.execution.status.code_digest", lambda own: "")
    told = str(Lab("toy.yaml").status()).split("\n")[:3]
    names = [cell.name for cell in cells]
    assert told == ["tuning: 2 of 8 candidates are over", *(f"tuning: {names[i]}: fit, program: broke" for i in (0, 2))]
    _forget_failures(ablation, [arm])
    assert [cell.state() for cell in cells] == ["missing", "diverged", "missing", "diverged"]
    cells[0].run.append_row({"epoch": 4, "step": 50})  # whose process was killed
    assert f"\ntuning: {names[0]}: begun, epoch 5; the next run continues it\n" in str(Lab("toy.yaml").status())
    chosen = with_values(ablation, arm, {"model.lr": 0.002})
    monkeypatch.setattr(Tuning, "tuned", [chosen])
    (cell,) = cells_of(ablation, [chosen])
    cell.fail(failure)
    _forget_failures(ablation, [arm])
    assert cell.state() == "missing"


@pytest.mark.parametrize("sizes", [[5], [3, 7], [2, 3, 3]])
def test_a_larger_part_of_a_grid_has_the_candidates_of_the_smaller_part(sizes):
    space = {f"model.k{i}": tuple(range(size)) for i, size in enumerate(sizes)}
    parts = [{str(one) for one in _candidates(space, budget)} for budget in range(1, math.prod(sizes) + 1)]
    assert all(few < more for few, more in itertools.pairwise(parts))
    grid = [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]
    assert [*_candidates(space, len(grid))] == grid
    drawn = sorted(random.Random(0).sample(range(len(grid)), 3))  # as ever: a file's candidates are not tuned again
    assert [*_candidates(space, 3)] == [grid[i] for i in drawn]


def test_a_part_of_a_grid_is_drawn_without_the_grid():
    start = time.process_time()
    assert len(_candidates({f"model.k{i}": tuple(range(10)) for i in range(12)}, 4)) == 4
    assert time.process_time() - start < 1


@pytest.mark.rare
def test_killed_and_shared_tuning_ends_as_if_undisturbed_and_its_evidence_gives_the_same_report(toy, lab, monkeypatch):
    for drawn in ("figures", "panels"):  # most of a report's time; that of the tuning stays
        monkeypatch.setattr(f"vitlab.ablation.report.write.{drawn}", lambda *found: {})
    write(lab, {**SPACE, "seeds": [100], "halving": 2})
    for _ in range(3):
        before = sum(lab.counts().values())
        process = lab.start(sleep=0.1)
        while sum(lab.counts().values()) <= before:
            assert process.poll() is None
            time.sleep(0.02)
        process.kill()
        process.communicate()
    both = [lab.start(sleep=0.05), lab.start(sleep=0.05)]
    for process in both:
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
    assert toy().verify().is_green
    report = toy().report()
    page = report.files[1].read_text()
    toy().export("kept")
    versions = sorted((lab.path / "kept/tune/history").iterdir())  # of the files that candidates ran under
    assert versions
    for path in versions:
        assert path.read_bytes() == (toy().ablation.directory / "tune/history" / path.name).read_bytes()
    again = Lab("kept").report()
    assert again.files[1].read_text() == page and again.files[2].read_bytes() == report.files[2].read_bytes()
    assert Lab("kept").verify().is_green
    for arm in ("none", "learned"):  # what the toy's closed form says of the chosen rate
        (config,) = configs(lab, f"{arm}/s*").values()
        right = accuracy({**DEFAULTS, **flat(config)}, config["trainer"]["max_epochs"] - 1)
        mine = report.results[(report.results["pos_embed"] == arm) & (report.results["metric"] == "acc1")]
        assert mine["value"].tolist() == [round(right * IMAGES) / IMAGES]
    measured = [line for line in lab.counts() if line.startswith("val") and "/tune/" in line]
    assert len(measured) == 2  # four candidates of each arm, two after one epoch, one after two
    for arm in ("none", "learned"):
        mine = [t for t in Tuning(toy().ablation, toy()._known()).trials if t.arm == arm]
        assert sorted(t.stopped for t in mine) == [0, 1, 1, 2]
        first = {t.stopped == 1: [u.score_at(1) for u in mine if (u.stopped == 1) == (t.stopped == 1)] for t in mine}
        assert max(first[True]) <= min(first[False])
    assert "the best 1 in 2 of an arm's candidates go on; 6 of 8 were stopped" in page
    drawn = pd.read_csv(report.files[1].parent / "figures/tuning.csv")
    assert len(drawn) == 8 and (drawn["stopped"] > 0).sum() == 6 and (drawn["to_best"] <= 0).all()
    assert page.count("stopped after epoch 1 at") == 4 and page.count("| chosen |") == 2


@pytest.mark.rare
def test_predictions_of_candidates_may_be_gone_if_that_is_allowed_but_nothing_else_of_them(toy, lab, tmp_path):
    write(lab, {"model.lr": [0.001, 0.002], "seeds": [100]})
    assert not toy().run().failed and toy().verify().is_green
    gone = sorted(lab.path.glob("runs/ablations/toy/tune/*/s*/predictions"))[0]
    shutil.rmtree(gone)
    found = toy().verify()
    assert found.missing == {"tune": "1 of 4 candidates have no predictions"} and not found.problems
    assert "tune: 1 of 4 candidates have no predictions\n" in str(found) and not found.is_green
    with pytest.raises(UsageError, match="1 of 4 candidates have no predictions; --allow_missing accepts"):
        toy().export("kept")
    toy().export("kept", allow_missing=True)
    assert not Lab("kept").verify().is_green
    assert "missing, as allowed: tune (1 of 4 candidates" in str(allowed := Lab("kept").verify(allow_missing=True))
    assert allowed.is_green
    results = gone.parent / "results.json"
    results.write_text(results.read_text().replace('"acc1": 0.', '"acc1": 0.9'))
    assert "not as it was recorded: metrics, result" in str(toy().verify(allow_missing=True))
    measured = next(lab.path.glob("runs/ablations/toy/none/s*/predictions"))
    shutil.rmtree(measured)
    assert "there is no val.parquet of predictions" in str(toy().verify(allow_missing=True))


@pytest.mark.rare
def test_tpe_candidates_learn_from_earlier_ones_and_need_optuna_only_once(toy, lab, monkeypatch):
    pytest.importorskip("optuna")
    space = {"model.lr": {"low": "1e-4", "high": "1e-2", "log": True}, "model.sd": [0.01, 0.02]}
    write(lab, {**space, "search": "tpe", "budget": 5, "seeds": [100], "halving": 2})
    assert not toy().run().failed
    found = {
        arm: [t for t in Tuning(toy().ablation, toy()._known()).trials if t.arm == arm] for arm in ("none", "learned")
    }
    assert all(len({str(t.values) for t in mine}) == 5 for mine in found.values())
    assert [t.values for t in found["none"]][:2] == [t.values for t in found["learned"]][:2]  # at random, for all alike
    assert any(t.stopped for t in found["none"]) and found["none"][0].score() == found["none"][0].score()
    monkeypatch.setitem(sys.modules, "optuna", None)  # what was suggested lies beside the trials
    assert "found by Optuna's TPE" in toy().report().files[1].read_text()
    shutil.rmtree("runs")
    with pytest.raises(UsageError, match=r"pip install 'vitlab\[tune\]'"):
        toy().run()


@pytest.mark.rare
def test_an_arm_that_diverges_or_stays_below_the_floor_is_given_up_and_the_others_are_measured(toy, lab, monkeypatch):
    lab.change()
    content = yaml.safe_load((lab.path / "toy.yaml").read_text())
    tune = {"model.lr": [0.001, 0.002], "seeds": [100], "floor": 0.55}
    (lab.path / "toy.yaml").write_text(yaml.safe_dump({**content, "tune": tune}))
    monkeypatch.setenv("TOY", '{"learned 100": "diverge"}')
    assert sorted(toy().run().failed) == ["learned", "none"]
    assert len(configs(lab, "rope2d/s*")) == 1 and not configs(lab, "learned/s*") and not configs(lab, "none/s*")
    status, plan = str(toy().status()), str(toy().plan())
    assert "tuning: learned is given up: all of its candidates diverged" in status and "2 done, 4 given up" in status
    assert "2 seeds = 6 cells (2 done, 4 given up)" in plan and "; 0 arms are not tuned yet" in plan
    assert "for 0 cells" in plan and "given up none: its best candidate" in plan
    said = []
    submit_cells(toy().ablation, RunOptions(1), said.append)
    assert said == ["every cell is done; nothing to submit"]
    report = toy().report()
    page, drawn = report.files[1].read_text(), pd.read_csv(report.files[1].parent / "figures/tuning.csv")
    assert len(drawn) == 6 and drawn.groupby("arm")["diverged"].sum().to_dict() == {
        "learned": 2,
        "none": 0,
        "rope2d": 0,
    }
    assert "a triangle at the bottom diverged" in page
    assert "| learned | all | given up | all of its candidates diverged |" in page
    assert "`tune.floor` is 0.55" in page and page.count("| diverged |") == 2


def test_what_only_reads_files_suggests_no_candidate_and_needs_no_optuna(toy, lab, monkeypatch):
    write(lab, {**SPACE, "search": "tpe", "budget": 2, "seeds": [100]})
    monkeypatch.setitem(sys.modules, "optuna", None)
    ablation = read_ablation("toy.yaml")
    arms = [built({"model": {}}, arm) for arm in ablation.arms]
    assert Tuning(ablation, arms).trials == [] and "tuning: 0 of 4 candidates are over" in str(toy().status())
    assert not lab.files("") and Tuning(ablation, []).given_up == {}
    with pytest.raises(UsageError, match=r"`tune\.search: tpe` needs Optuna: pip install 'vitlab\[tune\]'"):
        suggest(ablation, arms)
    monkeypatch.setattr(candidates, "_suggest", lambda tune, sign, past: {"model.lr": 0.001 * 2 ** len(past)})
    suggest(ablation, arms)
    assert [trial.values for trial in Tuning(ablation, arms).trials] == [{"model.lr": 0.001}] * 2
    monkeypatch.setattr(Cell, "state", lambda cell: "diverged")
    suggest(ablation, arms)
    assert [trial.values["model.lr"] for trial in Tuning(ablation, arms).trials] == [0.001, 0.002] * 2


def test_a_budget_below_the_grid_takes_the_same_part_for_every_arm(toy, lab):
    write(lab, {**SPACE, "model.weight_decay": [0.02, 0.1], "budget": 3, "seeds": [7]})
    tune = read_ablation("toy.yaml").tune
    assert len(tune.candidates) == 3 and tune == read_ablation("toy.yaml").tune
    assert all(set(c) == {"model.lr", "model.weight_decay"} for c in tune.candidates)


@pytest.mark.parametrize(("every", "expected"), [(None, [5, 10]), (3, [6, 12]), (8, [8, 16]), (20, [])])
def test_halving_compares_at_epochs_that_validate(every, expected):
    arm = built({"trainer": {"max_epochs": 20, "check_val_every_n_epoch": every}})
    asked = [SimpleNamespace(tune=SimpleNamespace(halving=share)) for share in (2, None)]
    assert [Candidates(ablation, arm).rungs for ablation in asked] == [expected, []]


@pytest.mark.parametrize(("metric", "logged"), [("acc1", "val/acc1"), ("val_acc", "val_acc")])
def test_evidence_keeps_the_column_by_which_candidates_were_compared(tmp_path, metric, logged):
    run = RunDir(tmp_path)
    row = {"step": 10, "epoch": 0, logged: 0.5, "lr": 0.1}
    run.metrics.write_text(json.dumps(row) + "\n")
    _thin(run.metrics)
    assert run.rows() == [{"step": 10, "epoch": 0, logged: 0.5}]
    parts = {"ablation": SimpleNamespace(primary=metric), "resolved": built({})}
    assert Cell.validations(SimpleNamespace(**parts, run=run)) == [(1, 0.5)]


@pytest.mark.parametrize(
    ("trainer", "steps", "told"),
    [
        ({"max_epochs": -1, "max_steps": 1000}, 1000, "`trainer.max_steps: 1000` ends the arm none: leave it out"),
        ({"max_epochs": 100, "max_steps": 500}, 500, "`trainer.max_steps: 500` ends the arm none: leave it out"),
        ({"max_epochs": -1, "max_steps": -1, "max_time": "00:01:00:00"}, None, "no `trainer.max_epochs` ends the arm"),
        ({"max_epochs": 100, "max_steps": 5000}, 1700, None),
        ({"max_epochs": 100}, None, None),
    ],
)
def test_halving_where_no_number_of_epochs_ends_a_training_is_refused(toy, lab, trainer, steps, told):
    write(lab, {**SPACE, "halving": 2})
    ablation = read_ablation("toy.yaml")
    length = {"steps": steps} if steps else {}
    arms = [Resolved(ablation.arms[0], {"trainer": trainer}, {}, {}, (), 1.0, "", length=length)]
    with pytest.raises(UsageError, match=told) if told else contextlib.nullcontext():
        _refuse_halving(ablation, arms)


def trial(name, values, state, arm="arm", sign=1, **more):
    cell = SimpleNamespace(ablation=SimpleNamespace(sign=sign, primary="loss"), state=lambda: state)
    cell.validations = lambda: list(enumerate(values, 1))
    cell.value_at = lambda epoch: Cell.value_at(cell, epoch)
    cell.result = lambda: {"loss": values[-1]}
    return Trial(arm, {"model.lr": name}, (cell,), **more)


def test_of_five_candidates_the_best_three_stay_where_half_go_on():
    five = [trial(str(value), [value], "missing") for value in (0.1, 0.5, 0.2, 0.4, 0.3)]
    assert [t.stopped for t in halved(five, [1], 2, 1)] == [1, 0, 1, 0, 0]


@pytest.mark.parametrize("sign", [1, -1])
def test_a_candidate_goes_on_where_it_is_in_the_better_half_of_those_that_came_as_far(sign):
    """Of five three go on, and of four two: one was stopped before the first epoch, and another there."""

    def fate(*values, others=(0.2, 0.4, 0.6), state="missing"):
        before = [trial("b", [sign * x] * 4, "done", sign=sign) for x in others]
        before += [trial("s", [sign * 0.9] * 4, "missing", sign=sign, stopped=1)]  # trained on before halving was asked
        before += [trial("s", [sign * 0.1] * 4, "missing", sign=sign, stopped=2), trial("n", [], "diverged", sign=sign)]
        last = trial("l", [sign * x for x in values], state, sign=sign)
        *same, found = _in_turn([*before, last], [2, 4], 2, sign)
        assert same == before
        return found.until, found.stopped

    assert fate(0.9) == (2, 0)  # it has not come to epoch 2 yet
    assert fate(0.9, 0.3) == (4, 0) and fate(0.9, 0.15) == (0, 2) == fate(0.9, 0.05)
    assert fate(0.1, 0.6, 0.1, 0.5) == (0, 0) and fate(0.1, 0.6, 0.1, 0.3) == (0, 4)
    assert fate(0.1, 0.2) == (4, 0)  # a tie is not worse
    assert fate(0.9, 0.15, others=()) == (4, 0) and fate(0.9, 0.05, others=()) == (0, 2)  # half of two
    assert fate(0.1, 0.05, state="diverged") == (0, 0)


def test_the_report_shows_each_candidate_beside_the_best_of_its_arm_where_it_was_stopped():
    tune = SimpleNamespace(
        search="grid", budget=4, seeds=(7, 8), halving=2, floor=0.6, space={"model.lr": (1, 2, 4, 8)}
    )
    tune.is_at_border = lambda key, value: value == 1
    ablation = SimpleNamespace(sign=-1, tune=tune, primary="loss", axes={"x": {"a": {}, "b": {}}}, baseline={"x": "a"})
    ablation.arms = [SimpleNamespace(name=name, levels={"x": name}) for name in "ab"]
    ablation.best = lambda values: Ablation.best(ablation, values)
    a, b, nan = {"arm": "a", "sign": -1}, {"arm": "b", "sign": -1}, math.nan
    tried = [
        trial(1, [0.9, 0.5, 0.45, 0.40], "done", **a),
        trial(2, [0.7, 0.55], "missing", **a, stopped=2),
        trial(4, [0.6], "diverged", **a),
        trial(8, [0.8, 0.6, nan], "done", **a),
        trial(1, [0.9, 0.8], "missing", **b, stopped=1),
        trial(2, [0.5, 0.35, 0.31, 0.3125], "done", **b),
        trial(4, [0.7, 0.6, 0.5, 0.5], "done", **b),
        trial(8, [nan], "done", **b),
    ]
    tuning = tuning_with(ablation, tried)
    results = SimpleNamespace(ablation=ablation, tuning=tuning)
    (section,) = tuning_section(results)
    how = "Every arm tried the same 4 candidates on the validation split, seeds 7, 8."
    halving = "the best 1 in 2 of an arm's candidates go on; 2 of 8 were stopped."
    assert section.sentences[0] == how and section.sentences[1].endswith(halving)
    assert section.sentences[2:] == [
        "An arm whose best candidate does not reach 0.6 is given up.",
        "a: the best `model.lr`, 1, is at the border of the search space.",
    ]
    shown = ["0.4000", "stopped after epoch 2 at 0.5500", "diverged", "-"]
    shown += ["stopped after epoch 1 at 0.9000", "0.3125", "0.5000", "-"]
    marks, lrs = ["chosen", "", "", "", "", "chosen", "", ""], ["1", "2", "4", "8"] * 2
    rows = [list(row) for row in zip("aaaabbbb", lrs, shown, marks, strict=True)]
    assert section.tables == [[["arm", "model.lr", "val loss", ""], *rows]]

    drawn = responses(results)["tuning"]
    found = pd.DataFrame(drawn.rows)
    assert found["value"].tolist() == pytest.approx([0.4, 0.55, nan, 0.9, 0.3125, 0.5], nan_ok=True)
    assert found["to_best"].tolist() == pytest.approx([0, 0.05, nan, 0.4, 0, 0.1875], nan_ok=True)
    assert found["stopped"].tolist() == [0, 2, 0, 1, 0, 0] and found.index[found["chosen"]].tolist() == [0, 4]
    assert found["diverged"].tolist() == [False, False, True, False, False, False]
    assert "(n = 2 seeds)" in drawn.title and "a cross was stopped" in drawn.title and "a triangle" in drawn.title
    lines = drawn.figure.axes[0].get_lines()
    at = {
        mark: [(*line.get_xdata(), *line.get_ydata()) for line in lines if line.get_marker() == mark] for mark in "xv"
    }
    assert at["v"] == [(2 - 0.15, 0.0)]  # the first of two arms, at the third value
    assert [place for each in at["x"] for place in each] == pytest.approx([1 - 0.15, 0.05, 0.15, 0.4])
    rings = [(*line.get_xdata(), *line.get_ydata()) for line in lines if line.get_markersize() == 9]
    assert rings == [(-0.15, 0.0), (1.15, 0.0)]
    paths = [line.get_xydata().tolist() for line in lines if len(line.get_xdata()) > 1 and line.get_ls() != "--"]
    best = [[[-0.15, 0], [0.85, 0.05]], [[0.15, 0.4], [1.15, 0], [2.15, 0.1875]]]
    assert [np.allclose(path, line) for path, line in zip(paths[-2:], best, strict=True)] == [True, True], paths


def tuning_with(ablation, tried):
    """The tuning of arms with these candidates."""
    found = Tuning(ablation, [])
    vars(found)["trials"] = tried
    return found


def test_of_equal_candidates_the_first_is_chosen():
    ablation = SimpleNamespace(sign=-1, tune=SimpleNamespace(floor=None, budget=4))
    tried = [SimpleNamespace(arm="none", score=lambda x=x: x, is_over=True) for x in (0.7, 0.5, 0.5, 0.6)]
    assert tuning_with(ablation, tried).chosen["none"] is tried[1]


def test_a_candidate_that_ended_before_the_others_wait_for_each_other_counts_with_its_last_validation():
    ended, going = trial("ended", [0.2, 0.5], "done"), trial("going", [0.1, 0.3, 0.4, 0.4], "missing")
    assert math.isnan(trial("begun", [0.1], "missing").score_at(4)) and ended.score_at(4) == 0.5
    assert [t.stopped for t in halved([ended, going], [4], 2, 1)] == [0, 4]
    assert [t.until for t in halved([ended, trial("begun", [0.1], "missing")], [4], 2, 1)] == [4, 4]


def test_an_arm_is_given_up_for_what_its_candidates_are(lab, monkeypatch):
    monkeypatch.chdir(lab.path)
    write(lab, {**SPACE, "budget": 2, "seeds": [100]})
    ablation = read_ablation("toy.yaml")
    of = {
        "diverged": [(True, math.nan)] * 2,
        "nan": [(False, math.nan)] * 2,
        "some": [(True, math.nan), (False, math.nan)],
    }
    tried = [
        SimpleNamespace(arm=arm, has_diverged=diverged, score=lambda score=score: score, is_over=True)
        for arm, ends in of.items()
        for diverged, score in ends
    ]
    none = "no candidate that was trained to its end has a number as its `acc1`"
    assert tuning_with(ablation, tried).given_up == {
        "diverged": "all of its candidates diverged",
        "nan": none,
        "some": none,
    }


def test_halving_by_a_metric_that_only_the_evaluation_measures_is_refused_before_candidates_train(toy, lab):
    write(lab, {**SPACE, "halving": 2}, metric={"primary": "acc1_macro"})
    with pytest.raises(UsageError, match=r"`tune\.halving` compares .* and `acc1_macro` is measured at their end"):
        toy().run()
    assert not lab.counts()


def test_a_learning_rate_of_1e_3_is_read_as_a_number(toy, lab):
    path = lab.path / "toy.yaml"
    text = path.read_text()
    path.write_text(text[: text.index("tune:")] + "tune: {model.lr: [1e-3, 2e-3, 4E-3], seeds: [7]}\n")
    assert [c["model.lr"] for c in read_ablation(path).tune.candidates] == [0.001, 0.002, 0.004]


def test_an_argument_of_a_part_that_is_a_word_is_tuned_and_one_of_what_has_none_refused(toy, lab):
    write(lab, {"model.pos_embed.scale": [0.1, 1.0], "seeds": [100]})
    arm = toy().ablation.arms[1]

    def made_of(part):
        config = {"model": {"class_path": "Classifier", "init_args": {"pos_embed": part}}, "trainer": {}}
        found = Tuning(toy().ablation, [Resolved(arm, config, {}, {}, (), 1.0, "")]).trials
        return [trial.cells[0].resolved for trial in found]

    made = made_of("learned")
    parts = [one.config["model"]["init_args"]["pos_embed"] for one in made]
    assert parts == [{"class_path": "learned", "init_args": {"scale": scale}} for scale in (0.1, 1.0)]
    assert [one.arm.overrides["model.pos_embed.scale"] for one in made] == [0.1, 1.0]
    for part in (None, 3, ["learned", "rope2d"]):
        with pytest.raises(
            UsageError, match=r"toy.yaml, line \d+: `model.pos_embed.scale`: `pos_embed` is .* learned, "
        ):
            made_of(part)


def test_a_choice_at_the_border_is_reported_only_for_numbers(toy, lab):
    write(lab, {**SPACE, "model.opt": ["adamw", "sgd"], "seeds": [7]})
    tune = read_ablation("toy.yaml").tune
    assert [tune.is_at_border("model.lr", x) for x in (0.001, 0.002, 0.008)] == [True, False, True]
    assert not tune.is_at_border("model.opt", "sgd")
    write(lab, {"model.lr": {"low": 1e-4, "high": 1e-2, "log": True}, "budget": 9, "seeds": [7]})
    tune = read_ablation("toy.yaml").tune
    assert [tune.is_at_border("model.lr", x) for x in (1.1e-4, 1e-3, 9e-3)] == [True, False, True]
    tried = [c["model.lr"] for c in tune.candidates]
    assert len(set(tried)) == 9 and all(1e-4 <= x <= 1e-2 for x in tried) and sorted(tried)[4] < 3e-3


WRONG = {
    "a key of the axis": ({"model.pos_embed": ["none", "learned"]}, "which the axis `pos_embed` sets"),
    "no budget": ({**SPACE, "budget": 0}, "`tune.budget` must be a whole number of at least 1"),
    "shared seeds": ({**SPACE, "seeds": [0, 100]}, "share 0: tuning needs seeds of its own"),
    "one value": ({"model.lr": [0.1]}, "two different values or more"),
    "no key": ({"budget": 2}, "names nothing to tune"),
    "a key of the ablation": ({"trainer.devices": [1, 2]}, "which the ablation sets: a cell runs on one device"),
    "a key without effect": ({"data.num_workers": [0, 2]}, "which changes no number: all candidates would be"),
    "one number twice": ({"model.lr": ["1e-3", 0.001]}, "two different values or more"),
    "a misspelt option": ({**SPACE, "buget": 2}, 'cannot tune `buget`; did you mean "budget"'),
    "a range in a grid": ({"model.lr": {"low": 1, "high": 2}, "search": "grid", "budget": 2}, "which has no grid"),
    "a range alone": ({"model.lr": {"low": 1, "high": 2}}, "as in budget: 16"),
    "a log of 0": ({"model.lr": {"low": 0, "high": 2, "log": True}, "budget": 2}, "must be like {low: 1e-4"),
    "another search": ({**SPACE, "search": "tpee"}, "`tune.search` must be one of grid, random, tpe, got 'tpee'"),
    "halves of one": ({**SPACE, "halving": 1}, "`tune.halving` must be a whole number from 2 to 16"),
    "the test split": ({**SPACE, "split": "test"}, "`tune.split` must be one of val, got 'test'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_in_tuning_is_reported_with_its_line(toy, lab, case):
    tune, words = WRONG[case]
    write(lab, tune)
    with pytest.raises(UsageError) as caught:
        read_ablation("toy.yaml")
    assert words in str(caught.value) and "toy.yaml, line " in str(caught.value)


@pytest.mark.parametrize("values", [[None, 0.1], [[0.9, 0.95], [0.9, 0.999]], [{"a": 1}, "b"], [True, False]])
def test_the_response_curve_takes_candidates_of_any_type(values):
    rows = [{"arm": "a", "k": v, "to_best": -0.1 * i, "stopped": i, "chosen": i == 0} for i, v in enumerate(values)]
    axes = Figure().subplots()
    arm = SimpleNamespace(name="a", levels={"x": "a"})
    ablation = SimpleNamespace(best=max, arms=[arm], axes={"x": {"a": {}}}, baseline={"x": "a"})
    _response(axes, SimpleNamespace(ablation=ablation), rows, "k", tuple(values))
    assert [label.get_text() for label in axes.get_xticklabels()] == [str(value) for value in values]
    (cross,) = [line for line in axes.get_lines() if line.get_marker() == "x"]  # the second was stopped
    assert cross.get_ydata() == [-0.1]


@pytest.mark.rare
def test_a_candidate_whose_loss_becomes_nan_in_a_real_training_loses_and_its_arm_is_measured(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(
        "trainer: {logger: false, max_epochs: 1, accelerator: cpu, gradient_clip_val: null}\n"
        "model: {init_args: {depth: 1, opt: sgd, warmup_epochs: 0, lr: 1000}}\n"  # of the probe, too
    )
    (tmp_path / "real.yaml").write_text(
        "name: real\nbase: [vit, small.yaml]\naxes: {model.pos_embed: [none, learned]}\nbaseline: {pos_embed: none}\n"
        "metric: {primary: acc1}\nseeds: 1\nclaims: [learned > none]\n"
        "tune: {model.lr: [0.01, 1000], budget: 2, seeds: [9]}\n"
    )
    done = subprocess.run([*VITLAB, "ablate", "run", "real.yaml", "--workers", "1"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    failed = [json.loads(path.read_text()) for path in tmp_path.glob("runs/ablations/real/tune/*/*.failed.json")]
    assert [failure["kind"] for failure in failed] == ["diverged", "diverged"]
    assert len([*tmp_path.glob("runs/ablations/real/[nl]*/*/done.json")]) == 2


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [
        ({"max_epochs": 8, "val_check_interval": 0.25}, [0, 0, 0, 1, 1]),
        ({"max_epochs": 8, "val_check_interval": 25}, [0, 0, 0, 1, 1]),
        ({"max_epochs": 8}, [1, 1, 1, 1, 2]),
        ({"max_epochs": 8, "val_check_interval": 1.0}, [1, 1, 1, 1, 2]),
    ],
)
def test_a_validation_within_an_epoch_is_not_after_it(tmp_path, trainer, expected):
    """Candidates were compared at the first validation of the epoch at whose end they wait, as in their warm-up."""
    run = RunDir(tmp_path)
    run.write("run.json", {"steps": 800})
    rows = [{"step": step, "epoch": (step - 1) // 100, "val/acc1": step / 1000} for step in (25, 50, 75, 100, 125)]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    resolved = built({"trainer": trainer})
    cell = SimpleNamespace(run=run, ablation=SimpleNamespace(primary="acc1"), resolved=resolved)
    assert Cell.validations(cell) == [(epochs, row["val/acc1"]) for epochs, row in zip(expected, rows, strict=True)]
