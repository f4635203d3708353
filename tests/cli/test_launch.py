import json
import os
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import lightning as L
import pytest
import yaml
from torch import distributed as dist
from torch.distributed.run import get_args_parser

from vitlab.cli.main import main
from vitlab.errors import UsageError
from vitlab.jobs.evaluate import _run
from vitlab.runs.launch import is_first, launched_devices
from vitlab.tasks import Classifier

CONFIG = str(Path(__file__).parents[2] / "configs" / "t2t.yaml")
CODE = "import sys; from vitlab.runs.launch import agree; print(agree(sys.argv[1]))"


def test_the_tasks_of_a_slurm_step_take_the_name_of_the_first(tmp_path):
    def ask(rank):
        slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "3", "SLURM_PROCID": str(rank)}
        words = [sys.executable, "-c", CODE, f"name-{rank}"]
        done = subprocess.run(words, cwd=tmp_path, env=os.environ | slurm, capture_output=True, text=True, timeout=600)
        return done.stdout.strip()

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(ask, [2, 1, 0])) == ["name-0"] * 3


def test_a_single_process_keeps_its_name(monkeypatch):
    from vitlab.runs.launch import agree

    for word in ("TORCHELASTIC_RUN_ID", "SLURM_STEP_ID"):
        monkeypatch.delenv(word, raising=False)
    assert agree("mine") == "mine"


@pytest.mark.parametrize(
    ("devices", "num_nodes", "expected"),
    [
        ("auto", 1, {"devices": 4, "num_nodes": 2}),
        (4, 2, {"num_nodes": 2}),
        (2, 1, "`trainer.devices` must be torchrun's --nproc_per_node or be left out, got 2, 4"),
        ("auto", 3, "`trainer.num_nodes` must be torchrun's --nnodes"),
    ],
)
def test_torchrun_says_how_many_devices_there_are(monkeypatch, devices, num_nodes, expected):
    assert launched_devices(devices, num_nodes) == {}
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    if isinstance(expected, dict):
        assert launched_devices(devices, num_nodes) == expected
    else:
        with pytest.raises(UsageError, match=expected):
            launched_devices(devices, num_nodes)


def lines_over_ssh(tmp_path):
    """Return what the lines of the docs start on each machine: words of torchrun."""
    page = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()
    block = page.partition("test_launch.py -->\n```sh\n")[2].partition("```")[0]
    (tmp_path / "ssh").write_text("""#!/bin/sh\necho "$@" >> said""")
    (tmp_path / "ssh").chmod(0o755)
    own = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert not subprocess.run(["bash", "-c", block], cwd=tmp_path, env=own, check=True, stderr=subprocess.PIPE).stderr
    said = sorted((tmp_path / "said").read_text().splitlines())
    assert [line.split(" torchrun ")[0] for line in said] == [f"node{i} cd {tmp_path} &&" for i in range(2)]
    return [shlex.split(line.split(" torchrun ")[1]) for line in said]


def pods(tmp_path):
    """Return what Kubernetes starts in each pod: words of torchrun."""
    service, job = yaml.safe_load_all((Path(__file__).parents[2] / "docs" / "kubernetes.yaml").read_text())
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    name = service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]} and pod["subdomain"] == name
    assert f"--master_addr={job['metadata']['name']}-0.{name}" in container["args"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4 and container["command"] == ["torchrun"]
    words = [[word.replace("$(JOB_COMPLETION_INDEX)", str(i)) for word in container["args"]] for i in range(2)]
    assert spec["completions"] == spec["parallelism"] == len(words)
    return words


@pytest.mark.parametrize("started", [lines_over_ssh, pods])
def test_ssh_and_kubernetes_start_one_run_on_two_machines(started, here, capsys):
    found = [get_args_parser().parse_args(words) for words in started(here)]
    assert [node.node_rank for node in found] == [0, 1]
    first, second = found
    assert (
        first.module and first.training_script == "vitlab" and first.training_script_args == second.training_script_args
    )
    assert (first.nnodes, first.nproc_per_node) == ("2", "4")
    words = [*first.training_script_args, "--trainer.accelerator=cpu", "--dry_run"]
    assert {"--trainer.accelerator=gpu", "--trainer.devices=4", "--trainer.num_nodes=2", "--auto_resume"} <= set(words)
    assert main(words) == 0, capsys.readouterr().err


@pytest.mark.rare
def test_torchrun_trains_one_run_that_has_no_name(tmp_path):
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "vitlab", "fit"]
    words += ["--config", CONFIG, "--trainer.max_epochs=1", "--trainer.logger=false", "--data.subset=0.2"]
    words += ["--trainer.accelerator=cpu"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert json.loads((run / "run.json").read_text())["world_size"] == 2
    assert json.loads((run / "results.json").read_text())["val"]["n"] == 288


MEET = """
import os, signal, sys, time
import torch.distributed as dist
from vitlab.runs.launch import join_group_store
again, rank = os.environ["TORCHELASTIC_RESTART_COUNT"] == "1", os.environ["RANK"]
join_group_store()
time.sleep(2 if again and rank == "1" else 0)  # process 0 looks for its address before it stands there
dist.init_process_group("gloo")
dist.barrier()
if again:
    open(f"met{rank}", "w").close()
    time.sleep(2 if rank == "0" else 0)  # it keeps the store, and the other may still be in the barrier
elif rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
else:
    time.sleep(60)
"""


@pytest.mark.rare
def test_a_group_that_torchrun_starts_again_does_not_look_for_the_one_before(tmp_path):
    (tmp_path / "meet.py").write_text(MEET)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max_restarts=1"]
    done = subprocess.run([*words, "meet.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.glob("met?")) == ["met0", "met1"]


def test_a_process_that_waits_in_vain_names_the_missing_one(monkeypatch):
    from torch.distributed import TCPStore

    from vitlab.runs import launch

    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "3", "RANK": "0"}
    for name, value in {**group, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agent.port)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launch, "PATIENCE", 0.1)
    with pytest.raises(UsageError, match="process 0 waited 0 s in vain for process 1 to join"):
        launch.join_group_store()


@pytest.mark.rare
def test_a_group_that_torchrun_starts_again_continues_its_run(tmp_path):
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max_restarts=3"]
    words += ["-m", "vitlab", "fit", "--config", CONFIG, "--trainer.max_epochs=6", "--trainer.logger=false"]
    words += ["--data.subset=0.2", "--trainer.accelerator=cpu", "--model.depth=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=log, stderr=subprocess.STDOUT)
    killed = set()
    end = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < end:
        saved = list((tmp_path / "runs").glob("*/checkpoints/last.ckpt"))
        workers = [int(w) for w in _children(process.pid) if w not in killed]
        if saved and len(workers) == 2 and not killed:
            killed |= {str(worker) for worker in workers}
            os.kill(workers[0], signal.SIGKILL)
        time.sleep(0.1)
    said = (tmp_path / "log").read_text()
    assert process.wait(60) == 0, said
    runs = [path for path in (tmp_path / "runs").iterdir() if path.name[0] != "."]
    assert len(runs) == 1 and len(killed) == 2, said
    record = json.loads((runs[0] / "run.json").read_text())
    assert record["status"] == "done" and record["attempts"] >= 2, record
    assert {json.loads(line)["epoch"] for line in (runs[0] / "metrics.jsonl").read_text().splitlines()} == set(range(6))


def _children(pid):
    return subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False).stdout.split()


GLOO = RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:4711")


@pytest.mark.parametrize("connected", [False, True])
def test_a_measurement_does_not_blame_the_images_for_another_process(monkeypatch, connected):
    """The first process said that the task takes batches of images, and the second had said what was wrong."""
    monkeypatch.setattr("vitlab.runs.launch.is_connected", lambda: connected)
    monkeypatch.setattr("vitlab.jobs.evaluate.in_step", lambda error: True)
    told = SimpleNamespace(test=Mock(side_effect=GLOO))
    cli = SimpleNamespace(trainer=told, model=L.LightningModule(), datamodule=L.LightningDataModule())
    with pytest.raises(RuntimeError if connected else UsageError, match="closed by peer"):
        _run(cli, "test", None)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (GLOO, 1, "another process of this command has ended, or cannot be reached: see what it has said"),
        (UsageError("a mistake"), 2, "a mistake"),
        (UsageError("found by all"), 2, ""),
    ],
)
def test_of_several_processes_of_a_command_one_says_what_is_wrong(monkeypatch, capsys, error, code, said):
    monkeypatch.setattr("vitlab.runs.launch.is_connected", lambda: True)
    monkeypatch.setattr("vitlab.runs.launch.first_to_say", lambda text: text == "a mistake")
    monkeypatch.setattr("vitlab.cli.main._command", lambda args: Mock(side_effect=error))
    assert main(["test", "last"]) == code
    assert capsys.readouterr().err == (said and f"vitlab: {said}\n")


def test_a_process_that_lightning_has_started_is_not_the_first(monkeypatch):
    """Both told that a file of the user's had changed."""
    for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert is_first()
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert not is_first()
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("RANK", "4")  # of torchrun, on the second machine
    assert not is_first()


@pytest.mark.slow
def test_a_mistake_that_fit_finds_in_its_group_is_said(tmp_path, monkeypatch, capsys):
    """Of two processes none said it: the ending of the training and the command both asked whether others had."""
    monkeypatch.chdir(tmp_path)

    def fail(self, batch, batch_idx):
        raise ValueError("the images are wrong")

    monkeypatch.setattr(Classifier, "training_step", fail)
    small = ["--config=vit.yaml", "--data.subset=0.1", "--model.depth=1", "--name=wrong"]
    code = main(["fit", *small, *(f"--trainer.{word}" for word in ("strategy=ddp", "devices=1", "accelerator=cpu"))])
    assert dist.is_initialized()
    dist.destroy_process_group()
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("vitlab: ")]
    assert code == 2 and len(said) == 1 and "the images are wrong" in said[0]
