"""Workers as an array job: what reaches `sbatch`."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from vitlab.ablation.file.spec import read
from vitlab.ablation.work.slurm import script, submit
from vitlab.errors import UsageError

DelayedSubmission = pytest.importorskip("submitit").core.utils.DelayedSubmission


@pytest.fixture
def ablation(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text("{}\n")
    slurm = {"partition": "gpu", "time": "02:00:00", "array_parallelism": 4, "gpus_per_node": 1}
    axes = {"a": {"x": {"model.lr": 1.0}, "y": {"model.lr": 2.0}}}
    content = {"name": "toy", "base": "base.yaml", "axes": axes, "baseline": {"a": "x"}, "metric": {"primary": "acc1"}}
    Path("toy.yaml").write_text(yaml.safe_dump({**content, "run": {"executor": "slurm", "slurm": slurm}}))
    return read("toy.yaml")


def test_a_dry_run_prints_the_script(ablation):
    text = script(ablation, "toy.yaml", 2)
    assert text.startswith("#!/bin/bash")
    for line in ("--array=0-3%4", "--partition=gpu", "--time=02:00:00", "--gpus-per-node=1", "--job-name=toy"):
        assert f"#SBATCH {line}" in text, text
    command = next(line for line in text.splitlines() if line.startswith("srun"))
    assert command.endswith(f"-m vitlab ablate run {Path('toy.yaml').resolve()} --workers 1")
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def test_a_setting_that_slurm_does_not_know_is_told_with_its_line(ablation):
    Path("toy.yaml").write_text(Path("toy.yaml").read_text().replace("partition", "partitoin"))
    with pytest.raises(UsageError, match=r'toy.yaml, line \d+: .* `partitoin`; did you mean "partition"'):
        script(read("toy.yaml"), "toy.yaml", 2)


def test_without_slurm_the_way_out_is_said(ablation, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError, match="executor: local"):
        submit(ablation, "toy.yaml", 2, print)


def test_the_array_has_the_settings_of_the_file(ablation, monkeypatch, tmp_path):
    for name, answer in (("sbatch", "Submitted batch job 77"), ("srun", ""), ("sacct", "")):
        fake = tmp_path / "bin" / name
        fake.parent.mkdir(exist_ok=True)
        fake.write_text(f"#!/bin/sh\necho {answer}\n")
        fake.chmod(fake.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    said = []
    submit(ablation, "toy.yaml", 2, said.append)
    assert "4 workers as 77" in said[0]
    script = next((tmp_path / "runs/ablations/toy/slurm").glob("*.sh")).read_text()
    for line in ("--array=0-3%4", "--partition=gpu", "--time=02:00:00", "--gpus-per-node=1", "--job-name=toy"):
        assert f"#SBATCH {line}" in script, script
    assert sys.executable in script
    task = next((tmp_path / "runs/ablations/toy/slurm").glob("*_submitted.pkl"))
    delayed = DelayedSubmission.load(task)
    assert (delayed.function, delayed.args[0][1:5]) == (subprocess.check_call, ["-m", "vitlab", "ablate", "run"])
