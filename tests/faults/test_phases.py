"""Every phase has an end: processes that never come together, and data that take their time."""

import os
import random
import signal
import subprocess
import time

import pytest
from harness import TINY, until
from phases import PHASES, cells, matrix

WORDS = [*(word for word in TINY if word != "--quiet"), "--trainer.accelerator=cpu", "--trainer.strategy=ddp"]
PORTS = random.SystemRandom()  # a run in this process seeds the other, and both workers of pytest drew one port


def alone(folder, tasks, python, **more):
    """Start process 0 of several, as srun does where the nodes of the others did not boot."""
    counts = {"SLURM_NTASKS": tasks, "SLURM_NTASKS_PER_NODE": tasks, "SLURM_NNODES": 1}
    numbers = {"SLURM_JOB_ID": 7, "SLURM_STEP_ID": 0, "SLURM_PROCID": 0, "SLURM_LOCALID": 0, "SLURM_NODEID": 0}
    names = {"SLURM_NODELIST": "127.0.0.1", "SLURM_JOB_NAME": "job", "MASTER_ADDR": "127.0.0.1"}
    facts = {**counts, **numbers, **names, "MASTER_PORT": PORTS.randrange(20000, 60000), **more}
    facts |= {"VITLAB_LAUNCH": f"alone{time.monotonic_ns()}", "VITLAB_PYTHON": python.path}
    with (folder / "log").open("w") as log:
        return subprocess.Popen(
            [
                python.path,
                "-m",
                "vitlab",
                *WORDS,
                f"--trainer.devices={tasks}",
                "--data.batch_size=36",
                "--name",
                "a",
            ],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in facts.items()}},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


SHARE = float(os.environ.get("VITLAB_FAULTS_SHARE", 1))
SIGNALS = {"SIGTERM": [15], "SIGUSR1": [10], "SIGHUP": [1], "Ctrl-C twice": [2, 2]}
WAITING = [(tasks, sent) for tasks in (2, 3) for sent in SIGNALS]


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("tasks", "sent"), WAITING if SHARE == 1 else [(2, "SIGTERM"), (3, "Ctrl-C twice")])
def test_a_signal_ends_a_process_that_waits_for_others(tmp_path, note, python, tasks, sent):
    process = alone(tmp_path, tasks, python)
    said = tmp_path / "log"
    assert until(lambda: "waiting for" in said.read_text() or process.poll() is not None, seconds=80, every=0.1)
    started = time.monotonic()
    for number in SIGNALS[sent]:
        started = time.monotonic()
        process.send_signal(signal.Signals(number))
        time.sleep(0.6)
    code = process.wait(30)
    took = time.monotonic() - started
    others = "process 1 of 2" if tasks == 2 else "processes 1 to 2 of 3"
    must, most = (130, 2) if sent == "Ctrl-C twice" else (75, 10)
    note(f"{sent}, process 0 of {tasks} alone", f"exit {code} after {took:.1f} s", f"exit {must} in {most} s")
    assert f"waiting for {others} to join at" in said.read_text()
    assert (code, took < most) == (must, True), said.read_text()
    assert "Traceback" not in said.read_text()


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_the_wait_for_missing_processes_has_an_end(tmp_path, note, python):
    limit = 12 if SHARE == 1 else 6
    process = alone(tmp_path, 2, python, VITLAB_JOIN_TIMEOUT=limit)
    code = process.wait(100)
    said = (tmp_path / "log").read_text()
    note(
        f"process 1 of 2 never comes, VITLAB_JOIN_TIMEOUT={limit}",
        f"exit {code}, told: {'in vain for process 1' in said}",
        "exit 75, told",
    )
    assert code == 75
    assert f"waited {limit} s in vain for process 1 of 2 to join" in said and "Traceback" not in said


CELLS = cells() if SHARE == 1 else [cell for cell in cells(SHARE / 2) if cell[0] != "finishing W&B"]


@pytest.mark.faults
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("phase", dict.fromkeys(cell[0] for cell in CELLS))
def test_every_phase_ends_on_a_signal_or_at_its_limit(tmp_path, note, python, phase):
    found, wrong = matrix(tmp_path, [cell for cell in CELLS if cell[0] == phase], python)
    ends = {f"{sent}, {ranks}": f"{end['code']} after {end['seconds']} s" for (_, sent, ranks), end in found.items()}
    what = f"{phase} hangs, in C++ where it can: {len(found)} cells of signal and processes"
    note(what, f"{len(found) - len(wrong)} right", f"{len(found)}", cells=ends)
    assert not wrong, "\n".join(wrong)


def test_the_matrix_has_all_cells():
    assert len(cells()) == 84 and {cell[0] for cell in cells(0.01)} == {*PHASES}
