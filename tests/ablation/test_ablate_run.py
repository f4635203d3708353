"""Runs of whole ablations with a stand-in for `vitlab fit`, killed and continued in every way."""

import contextlib
import fcntl
import json
import math
import os
import pty
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from vitlab.ablation.execution.cells import cells_of
from vitlab.ablation.execution.commands import stages
from vitlab.ablation.execution.identity import code_digest
from vitlab.ablation.execution.probe import known
from vitlab.ablation.execution.progress import Progress
from vitlab.ablation.execution.worker import _finished
from vitlab.ablation.file.spec import read_ablation
from vitlab.ablation.inference.measured import collect
from vitlab.runs.processes import is_running

pytestmark = pytest.mark.slow  # real processes, started and killed


def wait_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.02)


def test_a_run_does_every_cell_once_in_plain_lines_and_a_second_run_none(lab):
    code, out = lab()
    assert code == 0
    assert "6 done" in out
    assert "\x1b" not in out  # as there is no terminal
    lines = [line for line in out.splitlines() if line.startswith("done  ")]
    assert len(lines) == 6
    assert re.search(r"\[6/6, about 0\.0 min left, best 0\.\d{4} \(\w+/s\d-\w+\)\]$", lines[-1]), lines
    assert set(lab.counts().values()) == {1}
    assert len(lab.counts()) == 12  # fit and validate
    assert lab()[0] == 0
    assert sum(lab.counts().values()) == 12
    assert not lab.files(".claim.json")


@pytest.mark.rare
def test_added_seeds_and_arms_keep_the_old_cells(lab, undisturbed):
    lab.change(arms=("none", "learned"), seeds=1)
    assert lab()[0] == 0
    lab.change()
    assert lab()[0] == 0
    assert set(lab.counts().values()) == {1}
    assert lab.results() == undisturbed


@pytest.mark.rare
@pytest.mark.parametrize("moment", [0.5, 0.1, 1.1])
def test_after_a_kill_of_the_whole_command_the_results_are_those_of_an_undisturbed_run(lab, undisturbed, moment):
    process = lab.start(sleep=0.15)
    wait_for(lambda: lab.counts())
    time.sleep(moment)
    process.kill()
    process.communicate()
    assert len(lab.files("/done.json")) < 6
    assert lab()[0] == 0
    assert lab.results() == undisturbed
    measured = [n for line, n in lab.counts().items() if line.startswith("val")]
    assert len(measured) == 6
    assert not lab.files(".claim.json")


@pytest.mark.rare
def test_processes_of_a_killed_command_are_ended_before_its_cell_continues(lab):
    process = lab.start(sleep=30)
    wait_for(lambda: [p for p in lab.files(".claim.json") if '"child_started": "' in p.read_text()])
    claim = json.loads(next(p for p in lab.files(".claim.json") if "child_started" in p.read_text()).read_text())
    process.kill()
    process.communicate()
    assert is_running(claim["child"])  # it lives on: it has a process group of its own
    assert lab()[0] == 0
    assert not is_running(claim["child"])


def test_a_killed_cell_continues_from_its_checkpoint(lab, undisturbed):
    killed = []

    def kill():
        wait_for(lambda: lab.files("/checkpoints/last.ckpt"))
        claim = json.loads(lab.files("/checkpoints/last.ckpt")[0].parents[1].with_suffix(".claim.json").read_text())
        os.killpg(claim["child"], signal.SIGKILL)
        killed.append(claim["child"])

    killer = threading.Thread(target=kill)
    killer.start()
    code, out = lab(sleep=0.25)
    killer.join()
    assert code == 0 and killed, out
    attempts = [json.loads(p.read_text())["attempts"] for p in lab.files("/run.json")]
    assert sorted(attempts)[-1] == 2
    assert lab.results() == undisturbed


@pytest.mark.rare
def test_two_commands_share_a_directory(lab, undisturbed):
    first, second = lab.start(sleep=0.05), lab.start(sleep=0.05)
    for process in (first, second):
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
    assert set(lab.counts().values()) == {1}
    assert lab.results() == undisturbed


@pytest.mark.rare
def test_finished_cells_get_only_the_analyses_that_they_lack(lab, undisturbed):
    assert lab()[0] == 0
    before = lab.counts()
    lab.change(analyses=("resolution",))
    assert "6 done; 6 of those done lack an analysis" in lab("status")[1]
    assert lab()[0] == 0
    lab.change(analyses=("resolution", "position"), keep="weights")  # position does not apply to the arm `none`
    assert lab()[0] == 0
    new = lab.counts() - before
    assert sorted(" ".join(line.split()[:2]) for line in new) == ["analyze position"] * 6 + ["analyze resolution"] * 6
    assert set(new.values()) == {1}
    assert lab()[0] == 0
    assert lab.counts() - before == new  # what does not apply is not tried again
    lab.change()
    assert lab.results() == undisturbed


@pytest.mark.parametrize("damaged", [False, True])
def test_a_primary_metric_of_an_analysis_is_told_where_a_cell_ends_and_in_the_table_of_progress(
    lab, finished, monkeypatch, damaged
):
    shutil.copytree(finished, lab.path, dirs_exist_ok=True)
    monkeypatch.chdir(lab.path)
    ablation = replace(read_ablation("toy.yaml"), primary="resolution/acc1@8")
    cell = next(c for c in cells_of(ablation, known(ablation)) if c.is_done())
    table = cell.run.path / "analysis/resolution.csv"
    value = math.nan if damaged else float(table.read_text().splitlines()[2].split(",")[5])
    if damaged:
        table.write_text("run,protocol\n")
    assert _finished(cell).text == f"resolution/acc1@8 {value:.4f}"
    assert [*Progress([cell], 1).values.values()] == pytest.approx([value], nan_ok=True)


def test_a_dry_run_names_what_is_left_of_a_cell_that_is_trained(lab, finished, monkeypatch):
    shutil.copytree(finished, lab.path, dirs_exist_ok=True)
    monkeypatch.chdir(lab.path)
    ablation = read_ablation("toy.yaml")
    cell = next(c for c in cells_of(ablation, known(ablation)) if c.is_done())
    assert stages(cell) == []
    for name in ("results.json", "analysis/notes.json"):
        (cell.run.path / name).unlink()
    assert [stage.name for stage in stages(cell)] == ["validate", "analyze"]  # a dry run said that it trains on


def test_a_dry_run_names_the_measurement_of_a_cell_that_was_measured_beside_the_laboratory(lab, finished, monkeypatch):
    shutil.copytree(finished, lab.path, dirs_exist_ok=True)
    monkeypatch.chdir(lab.path)
    ablation = read_ablation("toy.yaml")
    cell = next(c for c in cells_of(ablation, known(ablation)) if c.is_done())
    (cell.run.path / "done.json").unlink()
    assert stages(cell) == []  # it was killed before it was recorded
    (ablation.directory / "chain.jsonl").unlink()  # as if the laboratory had not opened the split
    assert [stage.name for stage in stages(cell)] == ["validate"]


@pytest.mark.rare
def test_a_failing_analysis_loses_no_number(lab):
    lab.change(analyses=("resolution", "cost"))
    code, out = lab()
    assert code == 1
    assert "analyze, exit code 1: RuntimeError: the toy cannot tell its cost" in out
    assert lab("status")[1].count("analyze, exit code 1: RuntimeError") == 6
    assert {line.split()[1]: 1 for line in lab.counts() if line.startswith("analyze")}.keys() == {
        "resolution,cost",
        "cost",
    }
    assert lab()[0] == 1
    lab.change(analyses=("resolution",))
    assert lab()[0] == 0


@pytest.mark.rare
def test_a_failing_cell_is_reported_and_the_others_go_on(lab):
    code, out = lab("run", toy={"learned 1": "fail"})
    assert code == 1
    assert "the toy broke" in out and "repeat it with" in out
    assert len(lab.files("/done.json")) == 5
    assert lab.counts()[next(k for k in lab.counts() if "fit" in k and "learned/s1" in k)] == 1  # not tried again
    assert lab("status")[1].count("the toy broke") == 1
    lab("report")
    report = (lab.path / "runs/ablations/toy/report/report.md").read_text()
    assert "| learned | 1/2 |" in report
    assert "the toy broke" in report
    assert "fewer than two seeds: no inference" in report.lower()
    assert lab("run")[0] == 1  # it stays failed
    assert lab("run", "--retry-failed")[0] == 0


def test_a_pre_empted_cell_is_tried_again_a_wrong_one_is_not(lab):
    code, out = lab("run", toy={"learned 1": "preempt once", "rope2d 0": "wrong"})
    assert code == 1
    assert "wrong input" in out
    fits = {k.split("/")[-2] + k.split("/")[-1][:2]: n for k, n in lab.counts().items() if k.startswith("fit")}
    assert fits["learneds1"] == 2
    assert fits["rope2ds0"] == 1
    done = [json.loads(path.read_text()) for path in lab.files("/done.json")]
    assert all(0 < one["device_seconds"] <= one["seconds"] for one in done)


@pytest.mark.rare
def test_a_hanging_cell_times_out_and_a_diverged_one_is_counted(lab):
    lab.change(timeout="6s", retries=0)
    code, out = lab("run", toy={"learned 1": "hang", "rope2d 0": "diverge"})
    assert code == 1
    assert "time-out" in out
    assert "1 diverged" in lab("status")[1]
    assert lab("report")[0] == 0
    page = (lab.path / "runs/ablations/toy/report/report.md").read_text()
    assert "in no mean and no test, which favors the arms that lost them: rope2d (1)." in page


@pytest.mark.rare
def test_ctrl_c_once_lets_running_cells_finish_and_twice_ends_them(lab, undisturbed):
    for presses in (1, 2):
        process = lab.start(sleep=0.4)
        wait_for(lambda: lab.files(".claim.json"))
        time.sleep(0.3)
        for _ in range(presses):
            process.send_signal(signal.SIGINT)
            time.sleep(0.2)
        out, err = process.communicate(timeout=300)
        assert process.returncode == 130, out + err
        assert not lab.files(".claim.json")
        assert presses == 2 or 0 < len(lab.files("/done.json")) < 6
    assert lab()[0] == 0
    assert lab.results() == undisturbed


@pytest.mark.rare
def test_random_kills_change_nothing(lab, undisturbed):
    rng = random.Random(0)
    for _ in range(4):
        process = lab.start(sleep=0.1)
        time.sleep(0.7 + rng.random())
        process.kill()
        process.communicate()
    done = {path.parent.name: path.stat().st_mtime_ns for path in lab.files("/done.json")}
    assert lab()[0] == 0
    assert lab.results() == undisturbed
    assert done.items() <= {path.parent.name: path.stat().st_mtime_ns for path in lab.files("/done.json")}.items()
    assert len([line for line in lab.counts() if line.startswith("val")]) == 6


@pytest.mark.rare
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.rare)])
def test_when_one_of_two_workers_is_killed_the_other_does_the_rest(lab, undisturbed, seed):
    lab.change(workers=1)
    first, second = lab.start(sleep=0.15), lab.start(sleep=0.15)
    wait_for(lambda: len(lab.files(".claim.json")) == 2)
    time.sleep(random.Random(seed).random())
    first.kill()
    first.communicate()
    _, err = second.communicate(timeout=300)
    assert second.returncode == 0, err
    assert lab()[0] == 0  # what the second had passed by while the first's training was still alive
    lab.change()
    assert lab.results() == undisturbed
    measured = {line: n for line, n in lab.counts().items() if line.startswith("val")}
    assert len(measured) == 6 and sum(measured.values()) <= 7  # a measurement that was killed is repeated
    trained = {line: n for line, n in lab.counts().items() if line.startswith("fit")}
    assert len(trained) == 6 and sum(trained.values()) <= 7


@pytest.mark.rare
def test_on_a_terminal_the_progress_table_is_redrawn_in_place(lab):
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    process = lab.start(sleep=0.5, terminal=slave)
    os.close(slave)
    shown = b""
    with contextlib.suppress(OSError):  # a terminal whose last process has ended
        while part := os.read(master, 65536):
            shown += part
    process.wait(timeout=300)
    text = shown.decode()
    assert process.returncode == 0, text
    assert text.count("mean acc1") >= 3 and "\x1b[" in text  # drawn again, in place
    assert re.search(r"s\d-\w+: host \S+, pid \d+", text)  # what runs
    assert re.search(r"6/6, about 0.0 min left, best 0\.\d{4}", text)
    assert text.count("done     ") >= 6


@pytest.mark.rare
def test_one_seed_prints_no_inference(lab):
    lab.change(seeds=1)
    assert lab()[0] == 0
    lab("report")
    report = (lab.path / "runs/ablations/toy/report/report.md").read_text()
    assert "n = 1: no inference" in report
    assert "supported" not in report and "higher" not in report


def test_arms_that_resolve_to_the_same_configuration_are_refused(lab):
    text = (lab.path / "toy.yaml").read_text().replace("model.pos_embed: learned", "model.pos_embed: none")
    (lab.path / "toy.yaml").write_text(text)
    code, out = lab()
    assert code == 2
    assert "the arms none and learned resolve to the same configuration" in out


def test_a_value_that_does_not_exist_is_refused_with_the_line_of_its_level(lab):
    lab.change(arms=("none", "lerned"), claims=())
    line = next(
        i for i, t in enumerate((lab.path / "toy.yaml").read_text().splitlines(), 1) if t.startswith("    lerned")
    )
    code, out = lab()
    assert code == 2
    assert out.splitlines()[1:] == [
        f"vitlab: toy.yaml, line {line}: the arm lerned cannot be built: "
        "`model.pos_embed` must be one of none, learned, sincos2d, rope2d"
    ]
    assert not lab.counts()


def test_the_plan_and_a_dry_run_start_no_cell(lab):
    code, out = lab("plan")
    assert code == 0
    assert "6 cells (6 missing)" in out
    code, out = lab("run", "--dry_run", "--only", "pos_embed=learned")
    assert out.count(" fit --config") == 2
    assert not lab.counts()


def test_cells_of_other_code_are_stale_and_count_only_if_accepted(finished, monkeypatch):
    monkeypatch.chdir(finished)
    ablation = read_ablation("toy.yaml")
    code = code_digest()
    now = [replace(arm, code="other") for arm in known(ablation)]
    assert {arm.code for arm in known(ablation)} == {code}
    assert {cell.state for cell in collect(ablation, now).cells.values()} == {"stale"}
    assert not collect(ablation, now).runs
    assert len(collect(ablation, now, accept_stale=True).runs) == 4


def test_the_status_imports_neither_torch_nor_pandas(lab):
    code = "import sys; from vitlab.cli.main import main; main(['ablate', 'status', 'toy.yaml']); "
    code += "assert not {'torch', 'lightning', 'pandas', 'scipy'} & set(sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=lab.path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "all      6 missing" in done.stdout
