"""What ``vitlab fit`` does once its arguments are known: build, train, and close the run."""

import argparse
import json
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml
from lightning.pytorch.plugins.environments import SLURMEnvironment
from safetensors import SafetensorError
from safetensors.torch import save_file

from vitlab.callbacks.checkpoint import Checkpoint
from vitlab.callbacks.console import Console
from vitlab.callbacks.record import RunRecord, now_utc
from vitlab.callbacks.stop import StopOnSignal
from vitlab.callbacks.watch import Watch
from vitlab.config.arguments import config_paths
from vitlab.config.keys import check_same_config
from vitlab.config.parser import VitlabCLI, flatten, user_mistakes
from vitlab.config.strategies import check_strategy
from vitlab.errors import Stopped, UsageError, exit_code
from vitlab.jobs.describe import describe, header, model_facts
from vitlab.jobs.endings import told
from vitlab.jobs.terminal import close_log, complain, log_to, say
from vitlab.jobs.wandb import finish, place_loggers, protect
from vitlab.models.convert import load_weights
from vitlab.models.weights_file import check_readable
from vitlab.runs.choose import choose_run
from vitlab.runs.directory import RunDir, find_run, whole, write_text
from vitlab.runs.hold import leads, locked, prepare
from vitlab.runs.manifest import check_whole, file_digest
from vitlab.tasks.distillation import Distillation
from vitlab.tasks.teacher import timm_network


class FitCLI(VitlabCLI):
    """Build task, data and trainer for training in a run directory.

    Args:
        args: Arguments of the configuration.
        options: Options of the run.
        run: The run to continue, or None for a new one.
    """

    def __init__(self, args: list[str], options: argparse.Namespace, run: RunDir | None) -> None:
        self.options = options
        self.resumed = run is not None
        self.facts: dict[str, Any] = {}  # of the network
        self.run = run or RunDir(".")
        super().__init__(args)

    def before_instantiate_classes(self) -> None:
        """Choose the run directory, and send the loggers into it; nothing is written yet."""
        self.config_text = self.parser.dump(self.config, skip_none=False)
        if self.resumed:
            old, new = yaml.safe_load(self.run.config.read_text()), yaml.safe_load(self.config_text)
            check_same_config(self.run, flatten(old), flatten(new))
        else:
            configs = config_paths(self.arguments)
            self.run = choose_run(self.options, configs, self.config.seed_everything, self.config_text)
        self.wandb_id = self.run.read("run.json").get("wandb_id") or os.urandom(4).hex()
        self.wandb_line = place_loggers(self.config, self.run, self.wandb_id)

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Build the trainer with the run directory as its root and with what keeps, shows and saves the run."""
        self.record = RunRecord(self.run, self._describe)
        saves = self.config.trainer.enable_checkpointing is not False
        keeper = self.config_init.checkpoint if saves else None
        console = Console(self.record, quiet=self.options.quiet)
        watch = Watch(self._lost)
        self.added_callbacks = [self.record, watch, console, StopOnSignal(keeper), *([keeper] if keeper else [])]
        trainer = super().instantiate_trainer(default_root_dir=str(self.run.path), **kwargs)
        environment = trainer._accelerator_connector.cluster_environment
        if isinstance(environment, SLURMEnvironment):
            environment.auto_requeue = False  # StopOnSignal saves, and the batch script requeues
        check_strategy(self.config.trainer.strategy, trainer, self._get(self.config_init, "model").hparams["opt"])
        protect(trainer.loggers)
        return trainer

    def _describe(self, trainer: L.Trainer, task: L.LightningModule) -> None:
        write_text(self.run.config, self.config_text)  # first: what has one can be continued
        log_to(self.run.path / "train.log")
        say(header(self, trainer))
        describe(self, trainer)

    def _lost(self, what: str) -> None:
        complain(f"\n{what}; the run ends. Continue it with `vitlab fit --resume {self.run.path}`")
        if self.run.exists():
            self.run.update("run.json", status="failed", ended=now_utc(), error=what)


def train(cli: FitCLI, started: float) -> int:
    """Train, and return the exit code."""
    if cli.options.init_from:
        load_initial_weights(cli)
    cli.facts = model_facts(cli.model.net)  # before a strategy changes the network
    if cli.options.dry_run:
        with user_mistakes():
            cli.datamodule.prepare_data()
            cli.datamodule.setup("fit")
            if isinstance(cli.model, Distillation):
                cli.model.find_teacher(cli.datamodule)
        say(header(cli, cli.trainer) + "\n\ndry run: all of it can be built; nothing was written")
        return 0
    with locked(cli.run):
        return _train(cli, started)


def _train(cli: FitCLI, started: float) -> int:
    if leads():
        prepare(cli.run, cli.options.overwrite, cli.resumed, sum(p.nbytes for p in cli.model.parameters()))
    os.environ["VITLAB_RUN_DIR"] = str(cli.run.path.resolve())  # for the processes that the trainer starts
    code = 1
    try:
        code = _fit(cli)
    finally:
        del os.environ["VITLAB_RUN_DIR"]
        if cli.wandb_line:
            finish(failed=code != 0)
        close_log()
    if code == 0 and cli.trainer.is_global_zero and cli.config.trainer.enable_checkpointing is not False:
        try:
            close(cli, time.perf_counter() - started)
        except (OSError, SafetensorError) as error:
            what = f"the run is done, but its weights and results could not be written: {error}"
            complain(f"\n{what}; make room, then `vitlab fit --resume {cli.run.path}`")
            return 1
    return code


def _fit(cli: FitCLI) -> int:
    """Train to the end, or to whatever ends it before, and return the exit code."""
    is_new = not cli.run.exists()
    checkpoint = cli.run.last_checkpoint() if cli.resumed else None
    if checkpoint:
        with user_mistakes():
            check_readable(checkpoint)
    try:
        cli.trainer.fit(cli.model, datamodule=cli.datamodule, ckpt_path=checkpoint, weights_only=True)
    except Stopped as stopped:
        if cli.trainer.is_global_zero:
            when = "" if cli.record.started else " before the first step"
            way_on = f"; continue with `vitlab fit --resume {cli.run.path}`" if cli.run.config.is_file() else ""
            say(f"\nstopped by {signal.Signals(stopped.args[0]).name}{when}{way_on}")
        return exit_code(stopped)
    except Exception as error:
        if sentence := told(error, cli.run, cli.datamodule.batch_size, cli.trainer.world_size):
            complain(f"\n{sentence}")
            return 1
        if cli.record.started or not isinstance(error, ValueError):
            raise
        if is_new and cli.trainer.is_global_zero:
            shutil.rmtree(cli.run.path, ignore_errors=True)
        raise UsageError(" ".join(str(error).split())) from error
    return 0


def load_initial_weights(cli: FitCLI) -> None:
    """Start from the weights of another model, and say what was changed to make them fit."""
    source = cli.options.init_from
    with tempfile.TemporaryDirectory() as folder, user_mistakes():
        if source.startswith("timm:"):
            path = _fetch_timm(source.removeprefix("timm:"), Path(folder))
        else:
            path = Path(source) if Path(source).is_file() else find_run(source)[1]
            check_whole(path)
        sentences = load_weights(cli.model.net, path, cli.options.resize or "usual")
    for sentence in [f"weights of {source}", *sentences]:
        say(f"init   {sentence}")


def _fetch_timm(name: str, folder: Path) -> Path:
    state = timm_network(name).state_dict()
    save_file({key: value.contiguous() for key, value in state.items()}, folder / "timm.safetensors")
    return folder / "timm.safetensors"


def close(cli: FitCLI, seconds: float) -> None:
    """Write the weights and results of a finished run, and print them."""
    keeper: Checkpoint = cli.config_init.checkpoint
    if cli.config.trainer.fast_dev_run:
        return
    cli.run.write("data.json", cli.datamodule.fingerprint())  # again: files may have turned bad on the way
    for name in ("best", "last"):
        if (cli.run.checkpoints / f"{name}.ckpt").is_file():
            save_weights(cli.run.checkpoints / f"{name}.ckpt", cli.run.weights / f"{name}.safetensors")
    rows = [row for row in cli.run.rows() if "val/loss" in row]
    best = [row for row in rows if row["epoch"] == keeper.best_epoch]
    lines = []
    if best:
        path = cli.run.checkpoint()
        values = {k.removeprefix("val/"): v for k, v in best[-1].items() if k.startswith("val/")}
        cli.run.update("results.json", val={**values, **checkpoint_facts(path), "epoch": keeper.best_epoch})
        shown = ", ".join(f"{k} {v:.4f}" for k, v in values.items() if k != "n")
        lines.append(f"best epoch {best[-1]['epoch'] + 1}: {shown} on {values['n']:.0f} validation images")
    minutes, rest = divmod(round(seconds), 60)
    say("\n".join(["", *lines, f"took  {minutes}:{rest:02}", f"run   {cli.run.path}"]))
    say(f"next  vitlab test {cli.run.path}")


def checkpoint_facts(path: Path) -> dict[str, Any]:
    """Return what ties a result to the weights it was measured with."""
    averaged = "averaging_state" in torch.load(path, map_location="meta", weights_only=True, mmap=True)
    return {"checkpoint": path.name, "sha256": file_digest(path), "weights": "ema" if averaged else "raw"}


def save_weights(checkpoint: Path, path: Path) -> None:
    """Write the network of a checkpoint as safetensors."""
    content = torch.load(checkpoint, map_location="cpu", weights_only=True)
    weights = {k.removeprefix("net."): v.contiguous() for k, v in content["state_dict"].items() if k.startswith("net.")}
    metadata = {"format": "pt", "hyper_parameters": json.dumps(content["hyper_parameters"])}
    with whole(path) as beside:
        save_file(weights, beside, metadata=metadata)
