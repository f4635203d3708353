"""Weights & Biases in trouble never troubles a training."""

from types import SimpleNamespace
from unittest import mock

import pytest
import wandb
from jsonargparse import Namespace

from vitlab.errors import UsageError
from vitlab.jobs.train.start import as_before_if_refused
from vitlab.jobs.train.wandb import LOG, SafeWandbLogger, place_loggers
from vitlab.runs.directory import RunDir
from vitlab.runs.run_lock import locked


@pytest.fixture
def lines(monkeypatch):
    """What is told."""
    lines = []
    monkeypatch.setattr(LOG, "warning", lambda text, *args: lines.append(text % args))
    return lines


@pytest.fixture
def logger(tmp_path, monkeypatch, lines):
    """A logger that would talk to a server."""
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setattr(wandb, "teardown", lambda: None)
    return SafeWandbLogger(project="p", save_dir=tmp_path, id="x")


def test_a_run_stays_offline_if_the_server_cannot_be_reached(logger, monkeypatch, lines):
    modes = []

    def init(**words):
        modes.append(words.get("mode"))
        if len(modes) == 1:
            raise wandb.errors.CommError("context deadline exceeded")
        return mock.MagicMock(spec=wandb.Run)

    monkeypatch.setattr(wandb, "init", init)
    logger.log_metrics({"a": 1.0}, step=1)
    logger.log_metrics({"a": 2.0}, step=2)
    assert modes[1:] == ["offline"]
    assert ["stays offline: context deadline" in line for line in lines] == [True]
    assert logger.experiment.log.call_count == 2


def test_training_continues_without_wandb_if_it_cannot_start(logger, monkeypatch, lines):
    def refuse(**words):
        raise OSError("no space left")

    monkeypatch.setattr(wandb, "init", refuse)
    logger.log_metrics({"a": 1.0}, step=1)
    logger.experiment.log({"a": 1})
    assert sum("continues without" in line for line in lines) == 1


def test_a_wandb_service_that_dies_is_reported_once(logger, monkeypatch, lines):
    run = mock.MagicMock(spec=wandb.Run)
    run.log.side_effect = BrokenPipeError("the service has died")
    monkeypatch.setattr(wandb, "init", lambda **words: run)
    for step in range(3):
        logger.log_metrics({"a": 1.0}, step=step)
    logger.finalize("success")
    assert run.log.call_count == 1
    assert sum("metrics.jsonl has the metrics: the service has died" in line for line in lines) == 1


@pytest.mark.parametrize(
    ("mode", "told"), [("disabled", "disabled"), ("offline", "offline; upload it with `wandb sync")]
)
def test_the_header_says_what_becomes_of_the_metrics(tmp_path, monkeypatch, mode, told):
    monkeypatch.setenv("WANDB_MODE", mode)
    args = Namespace(project="p", name=None, offline=False, log_model=False, save_dir=None)
    logger = Namespace(class_path="lightning.pytorch.loggers.WandbLogger", init_args=args)
    line = place_loggers(Namespace(trainer=Namespace(logger=logger)), RunDir(tmp_path / "a"), "1")
    assert line is not None and line.startswith(told)


def new_job(run):
    record = SimpleNamespace(has_stepped=lambda trainer: False)
    return SimpleNamespace(run=run, resumed=False, trainer=None, record=record)


def test_a_new_run_that_is_refused_after_wandb_has_begun_leaves_nothing(tmp_path):
    run = RunDir(tmp_path / "runs" / "new")
    with pytest.raises(UsageError), locked(run), as_before_if_refused(new_job(run)):
        run.take_over()
        run.write("model.json", {})
        fence = run.fence
        try:
            raise UsageError("`checkpoint.monitor` must be one of val/loss")
        finally:
            (run.path / "wandb").mkdir()  # as W&B does, which is told the end
            (run.path / "wandb" / "debug.log").touch()
    assert not run.path.exists() and not fence._kept


def test_a_new_run_that_is_refused_keeps_what_lay_in_its_directory(tmp_path):
    run = RunDir(tmp_path / "runs")
    (run.path / ".git").mkdir(parents=True)
    (run.path / ".git" / "HEAD").touch()
    with pytest.raises(UsageError), locked(run), as_before_if_refused(new_job(run)):
        run.take_over()
        run.write("model.json", {})
        raise UsageError("`checkpoint.monitor` must be one of val/loss")
    assert [path.name for path in run.path.iterdir()] == [".git"] and (run.path / ".git" / "HEAD").exists()


def test_a_run_that_another_process_has_just_started_is_not_removed(tmp_path):
    run = RunDir(tmp_path)
    run.write("run.json", {})
    with pytest.raises(UsageError), as_before_if_refused(new_job(run)):
        raise UsageError("another process has just started a run")  # before this one has taken the directory over
    assert (run.path / "run.json").is_file()
