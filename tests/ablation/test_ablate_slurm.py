"""Workers as array jobs: the environment and the commands of SLURM are stand-ins, the script is run as it is."""

import os
import signal
import subprocess
import time
from types import SimpleNamespace

import pytest

from vitlab.ablation.execution.cells import Cell
from vitlab.ablation.execution.slurm import task_count
from vitlab.ablation.lab import Lab
from vitlab.errors import UsageError

SETTINGS = {"partition": "gpu", "time": "02:00:00", "array_parallelism": 4, "gpus": 0, "cpus_per_task": 1}
STAND_INS = {
    "sbatch": '[ "$1" = --test-only ] && exit; echo "$@" >> "$DESK/sbatch"; expr 70 + "$(wc -l < "$DESK/sbatch")"',
    "scontrol": 'case $1 in show) echo "MaxArraySize  = ${MOST:-1001}";; *) echo "$@" >> "$DESK/asked";; esac',
    "squeue": 'cat "$DESK/queue" 2>/dev/null',
    "srun": 'while [[ $1 == -* ]]; do shift; done; exec "$@"',
    "nvidia-smi": "exit 1",
}


@pytest.fixture
def login(lab, monkeypatch):
    """A login node, inside an interactive allocation, with the toy."""
    (lab.path / "bin").mkdir()
    for name, body in STAND_INS.items():
        (lab.path / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (lab.path / "bin" / name).chmod(0o755)
    monkeypatch.chdir(lab.path)
    monkeypatch.setenv("PATH", str(lab.path / "bin"), prepend=os.pathsep)
    monkeypatch.setenv("DESK", str(lab.path))
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    for name in ("SLURMD_NODENAME", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    lab.change(executor="slurm", slurm=SETTINGS)
    return lab


def toy():
    return Lab("toy.yaml", trust_command=True)


def submitted(lab):
    path = lab.path / "sbatch"
    return [line.split(" ")[1:-1] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.slow
def test_a_login_node_trains_nothing_and_submits_no_more_than_there_are_cells(login):
    said = []
    assert toy().run(say=said.append).submitted and said[0].startswith("submitted 4 workers as 71; logs in ")
    assert not login.counts() and not (login.path / "runs/ablations/toy/arms").exists()
    text = (login.path / "runs/ablations/toy/slurm/workers.sbatch").read_text()
    wanted = ("array=0-3", "partition=gpu", "time=02:00:00", "signal=USR1@120", "ntasks-per-node=1", "requeue")
    assert set(wanted) <= {line.removeprefix("#SBATCH --") for line in text.splitlines()} and "gpus" not in text
    assert (
        toy().commands() == text and subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    )
    with pytest.raises(
        UsageError, match=r"line \d+: a plan trains each arm for 20 steps, and this is not a SLURM node"
    ):
        toy().plan()
    (login.path / "queue").write_text("71_0\n")  # again, two cells: the one that is missing
    toy().run(only=["pos_embed=none"], say=said.append)
    (login.path / "queue").write_text("71_0\n71_1\n71_2\n72_0")
    toy().run(say=said.append)
    assert submitted(login) == [["--array=0-3"], ["--array=0-0"]] and "72_0" not in said[-1] and "71_0" in said[-1]
    script = (login.path / "runs/ablations/toy/slurm/workers.sbatch").read_text()
    assert "ablate run" in script and "--only pos_embed=none" in script
    login.change(executor="slurm", per_gpu=2, slurm={**SETTINGS, "gpus": 1, "array_parallelism": 400})
    (login.path / "queue").unlink()
    toy().run()
    assert submitted(login)[-1] == ["--array=0-2"]  # six cells, two on each GPU


def test_a_dry_run_has_a_task_for_each_cell_that_is_asked_for_and_missing(login, monkeypatch):
    login.change(seeds=3, executor="slurm", workers=20, slurm={k: SETTINGS[k] for k in ("time", "gpus")})
    monkeypatch.setattr(
        "vitlab.ablation.running.known", lambda ablation: [SimpleNamespace(arm=a) for a in ablation.arms]
    )
    monkeypatch.setattr(Cell, "is_finished", lambda cell: cell.seed == 0)
    assert "array=0-5\n" in toy().commands()
    text, said = toy().commands(only=["pos_embed=none"]), []
    assert "array=0-1\n" in text and "--only pos_embed=none" in text
    monkeypatch.setattr(Cell, "is_finished", lambda cell: True)
    assert toy().commands(say=said.append) == "" and said == ["every cell is done; nothing to submit"]
    with pytest.raises(UsageError, match="the levels of pos_embed are none, learned, rope2d"):
        toy().run(only=["pos_embed=nine"])


def test_a_dry_run_prints_the_words_and_the_number_of_tasks_that_are_submitted(login):
    settings = {"time": "02:00:00", "gpus": 4}
    login.change(seeds=10, executor="slurm", workers=20, slurm=settings)
    file = login.path / "toy.yaml"
    file.write_text(file.read_text() + "tune: {model.lr: [0.1, 0.2], seeds: [100, 101]}\n")
    toy().run(only=["pos_embed=none"], fail_fast=True, tune_only=True)
    script = (login.path / "runs/ablations/toy/slurm/workers.sbatch").read_text()
    assert "--only pos_embed=none --fail_fast --tune_only --trust_command" in script
    assert submitted(login) == [["--array=0-0"]]  # four cells, one on each of four GPUs
    assert toy().commands(only=["pos_embed=none"], fail_fast=True, tune_only=True) == script
    assert "array=0-4\n" in toy().commands() and "--tune_only" not in toy().commands()  # 20 workers are five tasks
    login.change(executor="slurm")
    with pytest.raises(
        UsageError, match=r"`--tune_only` trains the candidates of `tune`, which toy.yaml does not have"
    ):
        toy().commands(tune_only=True)


def test_array_parallelism_is_a_number_of_tasks_whatever_these_train_at_a_time(login):
    login.change(seeds=10, executor="slurm", slurm={"time": "02:00:00", "gpus": 4, "array_parallelism": 7})
    ablation = toy().ablation
    assert [task_count(ablation, cells) for cells in (1, 4, 5, 28, 30)] == [1, 1, 2, 7, 7]
    submitits = {"slurm_time": "02:00:00", "gpus_per_node": 4, "slurm_array_parallelism": 7}
    login.change(seeds=10, executor="slurm", slurm=submitits)
    assert [task_count(toy().ablation, cells) for cells in (1, 4, 5, 28, 30)] == [1, 1, 2, 7, 7]
    login.change(seeds=10, executor="slurm", workers=8, slurm={"time": "02:00:00", "gpus": 4})
    assert [task_count(toy().ablation, cells) for cells in (1, 5, 30)] == [1, 2, 2]


def test_more_tasks_than_the_site_allows_become_chained_arrays(login, monkeypatch):
    monkeypatch.setenv("MOST", "3")
    login.change(seeds=3, executor="slurm", workers=8, slurm={k: SETTINGS[k] for k in ("time", "gpus")})
    toy().run()
    assert submitted(login) == [
        ["--array=0-2"],
        ["--array=0-2", "--dependency=after:71"],
        ["--array=0-1", "--dependency=after:72"],
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"partitoin": "gpu"}, '`partitoin`; did you mean "partition"'),
        ({"time": 7200}, "`time` must be a limit that sbatch takes, got 7200; write it in quotes"),
        ({"time": None}, "`time` must be a limit"),
        ({"nodes": 2}, "`nodes` must be 1, got 2: a cell trains on one device"),
        ({"array_parallelism": "many"}, "`array_parallelism` must be a whole number of at least 1, got 'many'"),
        ({"sbatch": {"array": "0-9"}}, "`sbatch.array` is set by vitlab"),
    ],
)
def test_a_setting_that_slurm_does_not_take_is_reported_with_its_line(login, change, words):
    login.change(executor="slurm", slurm={**SETTINGS, **change})
    with pytest.raises(UsageError) as error:
        toy().run()
    assert "toy.yaml, line " in str(error.value) and words in str(error.value)
    assert not submitted(login)


def test_without_slurm_nothing_is_trained_locally_instead(login, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError, match="there is no sbatch on this machine"):
        toy().run()
    assert not login.counts() and not list(login.path.rglob("*.sbatch"))


@pytest.mark.rare
def test_a_worker_that_is_warned_saves_is_requeued_and_continues(login, undisturbed, monkeypatch):
    toy().run()
    script = login.path / "runs/ablations/toy/slurm/workers.sbatch"
    task = {"SLURMD_NODENAME": "n1", "SLURM_ARRAY_JOB_ID": "71", "SLURM_ARRAY_TASK_ID": "2", "SLURM_JOB_ID": "74"}
    env = {**os.environ, **task, "TOY_STARTS": str(login.starts), "PYTHONPATH": str(login.toy.parents[2])}

    def started(**more):
        words = ["bash", str(script)]
        login.processes.append(subprocess.Popen(words, env={**env, **more}, stdout=subprocess.DEVNULL))
        return login.processes[-1]

    shell = started(TOY_SLEEP="0.5")
    while not list((login.path / "runs/ablations/toy").glob("*/s0-*/checkpoints/last.ckpt")):
        time.sleep(0.05)
    (worker,) = subprocess.check_output(["pgrep", "-P", str(shell.pid)], text=True).split()
    os.kill(int(worker), signal.SIGUSR1)
    assert shell.wait(60) == 0
    assert (login.path / "asked").read_text() == "requeue 71_2\n"  # not 71, which would be the whole array
    fits = sum(n for line, n in login.counts().items() if line.startswith("fit"))
    assert not login.files("/done.json") and fits == 1
    shell = started()
    assert shell.wait(60) == 0
    assert (login.path / "asked").read_text() == "requeue 71_2\n"
    assert login.results() == undisturbed
    assert sum(n for line, n in login.counts().items() if line.startswith("fit")) == 7  # six cells, one of them twice
    assert toy().commands() == "" and toy().run().submitted and submitted(login) == [["--array=0-3"]]  # all are done
