"""Standard streams that are closed, or whose reader leaves; SLURM's variables without srun."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TINY = ["fit", "--config", str(Path(__file__).parents[2] / "configs" / "vit.yaml"), "--trainer.logger=false"]
TINY += ["--model.embed_dim=16", "--model.depth=1", "--model.num_heads=2", "--data.batch_size=32"]
TINY += ["--trainer.max_epochs=1", "--data.subset=0.2", "--name", "a"]


def shell(text, folder, **facts):
    line = ["bash", "-c", text, sys.executable, *TINY]
    return subprocess.run(line, cwd=folder, env={**os.environ, **facts}, capture_output=True, text=True, timeout=100)


@pytest.mark.rare
@pytest.mark.parametrize(
    "closed", ["2>&-", *(pytest.param(c, marks=pytest.mark.rare) for c in ("<&- >&- 2>&-", ">&-"))]
)
def test_training_needs_no_standard_stream(tmp_path, closed):
    done = shell(f'"$0" -m vitlab "$@" {closed}', tmp_path)
    assert done.returncode == 0, (tmp_path / "runs" / "a" / "train.log").read_text()
    assert "Traceback" not in (tmp_path / "runs" / "a" / "train.log").read_text()


@pytest.mark.rare
def test_a_closed_pipe_ends_no_training_and_prints_no_traceback(tmp_path):
    done = shell('"$0" -m vitlab "$@" | head -1; exit ${PIPESTATUS[0]}', tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Logging error" not in done.stderr and "Traceback" not in done.stderr
    assert (tmp_path / "runs" / "a" / "weights" / "last.safetensors").is_file()


@pytest.mark.rare
def test_one_process_in_a_job_of_several_tasks_is_refused_in_one_line(tmp_path):
    slurm = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "2", "SLURM_JOB_NAME": "job"}
    done = shell('"$0" -m vitlab "$@"', tmp_path, **slurm)
    assert done.returncode == 2
    assert "SLURM job has 2 tasks" in done.stderr and "srun" in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()
