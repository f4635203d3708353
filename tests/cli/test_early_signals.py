"""A signal before the first step ends a run in good order too."""

import json
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from lightning.pytorch.plugins.environments import SLURMEnvironment

import vitlab.jobs.train.build
import vitlab.jobs.train.close
import vitlab.jobs.train.facts
import vitlab.jobs.train.fit
from vitlab.cli import fit as cli_fit
from vitlab.cli.main import main
from vitlab.config.options import FitOptions
from vitlab.data import Digits
from vitlab.errors import Stopped
from vitlab.jobs.train.build import build_job
from vitlab.jobs.train.start import telling_of_rest
from vitlab.runs.directory import RunDir
from vitlab.tasks import Classifier

CONFIG = str(Path(__file__).parents[2] / "configs" / "vit.yaml")
SETTINGS = ["--config", CONFIG, "--trainer.logger=false", "--trainer.max_epochs=1", "--data.subset=0.1"]
PLACES = {
    "building": (vitlab.jobs.train.build, "choose_run"),
    "data": (Digits, "read"),
    "describing": (vitlab.jobs.train.facts, "describe_groups"),
    "sanity check": (Classifier, "validation_step"),
    "first step": (Classifier, "on_train_batch_start"),
}


@pytest.mark.rare
@pytest.mark.parametrize(
    ("place", "number"),
    [
        *((place, signal.SIGUSR1) for place in PLACES),
        ("data", signal.SIGTERM),
        ("first step", signal.SIGTERM),
        ("building", signal.SIGINT),
        ("sanity check", signal.SIGINT),
    ],
)
def test_a_signal_before_the_first_step_leaves_what_can_be_continued(place, number, here, monkeypatch, capsys):
    owner, name = PLACES[place]
    usual = getattr(owner, name)

    def signalled(*arguments, **more):
        signal.raise_signal(number)
        return usual(*arguments, **more)

    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, signalled)
        assert main(["fit", *SETTINGS, "--name", "a"]) == (130 if number == signal.SIGINT else 75)
    assert before == [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    said = "".join(capsys.readouterr())
    assert f"stopped by {number.name}" in said
    assert "Traceback" not in said
    run = Path("runs/a")
    if place == "building":
        assert not run.exists()
    else:
        assert json.loads((run / "run.json").read_text())["status"] == "preempted"
        assert "continue with `vitlab fit --resume runs/a`" in said
    if number == signal.SIGUSR1:
        again = ["--resume", "a"] if run.exists() else [*SETTINGS, "--name", "a"]
        assert main(["fit", *again]) == 0
        assert json.loads((run / "run.json").read_text())["status"] == "done"


@pytest.mark.parametrize("status", ["done", "running"])
def test_a_signal_after_the_training_is_said_to_leave_its_results(status, tmp_path, caplog):
    run = RunDir(tmp_path / "a")
    run.write("run.json", {"status": status})
    job = SimpleNamespace(run=run, record=SimpleNamespace(started=True))
    with pytest.raises(Stopped) as stopped, telling_of_rest(job):
        raise Stopped(signal.SIGINT)
    assert stopped.value.said == (status == "done") == ("SIGINT: the training is done" in caplog.text)
    assert (f"`vitlab fit --resume {run.typed}` writes its weights and results" in caplog.text) == (status == "done")


def test_a_limit_of_time_after_the_training_is_not_said_to_be_a_signal(tmp_path, caplog):
    run = RunDir(tmp_path / "a")
    run.write("run.json", {"status": "done"})
    job = SimpleNamespace(run=run, record=SimpleNamespace(started=True))
    with pytest.raises(Stopped), telling_of_rest(job):
        raise Stopped(signal.SIGTERM, "waited 2 s in vain for weights and results to be written")
    assert "\nstopped: the training is done, and `vitlab fit --resume" in caplog.text


@pytest.mark.parametrize("started", [False, True])
def test_another_process_says_whether_a_signal_came_before_or_after_the_training(
    started, tmp_path, monkeypatch, capsys
):
    job = SimpleNamespace(run=RunDir(tmp_path), record=SimpleNamespace(started=started))

    def ends(options, rest):
        with telling_of_rest(job):
            raise Stopped(signal.SIGTERM)

    monkeypatch.setattr(cli_fit, "_fit", ends)
    assert cli_fit.main([]) == 75
    assert capsys.readouterr().err == f"vitlab: stopped by SIGTERM {'after' if started else 'before'} training\n"


@pytest.mark.rare
@pytest.mark.parametrize("name", ["log_summary", "save_weights"])
def test_a_run_that_a_signal_ended_after_its_training_gets_its_results_when_it_is_resumed(
    name, here, monkeypatch, capsys
):
    owner = vitlab.jobs.train.close if name == "save_weights" else vitlab.jobs.train.fit
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, lambda *arguments: signal.raise_signal(signal.SIGINT))
        assert main(["fit", *SETTINGS, "--name", "a"]) == 130
    said = "".join(capsys.readouterr())
    assert "done, and `vitlab fit --resume runs/a` writes its weights" in said and "after training" not in said
    assert not Path("runs/a/results.json").exists()
    assert main(["fit", "--resume", "a"]) == 0
    assert (
        json.loads(Path("runs/a/results.json").read_text())["val"] and Path("runs/a/weights/best.safetensors").exists()
    )


def test_lightning_neither_requeues_nor_listens_under_slurm(here, monkeypatch):
    for name, value in {"NTASKS": 1, "PROCID": 0, "LOCALID": 0, "NODEID": 0, "JOB_ID": 7, "JOB_NAME": "vit"}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    job = build_job(SETTINGS, FitOptions(name="a"))
    environment = job.trainer._accelerator_connector.cluster_environment
    assert isinstance(environment, SLURMEnvironment)
    assert not environment.auto_requeue
