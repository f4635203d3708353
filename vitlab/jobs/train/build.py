"""Build task, data and trainer of ``vitlab fit`` in a run directory."""

import os
from contextlib import suppress
from inspect import signature
from typing import Any

import lightning as L
import yaml
from jsonargparse import Namespace
from lightning.pytorch.plugins.environments import SLURMEnvironment

from vitlab.callbacks.console import Console
from vitlab.callbacks.progress import Progress
from vitlab.callbacks.record import RunRecord, now_utc
from vitlab.callbacks.stop import StopOnSignal
from vitlab.callbacks.watch import Watch
from vitlab.config.arguments import config_paths
from vitlab.config.callbacks import check_callbacks, redirect_into_run
from vitlab.config.keys import check_same_config, flatten_as_typed, recipe_name
from vitlab.config.options import FitOptions
from vitlab.config.parser import VitlabCLI, class_at, settings, user_mistakes
from vitlab.config.parts import as_mappings
from vitlab.config.strategies import check_strategy
from vitlab.data.base import ImageData
from vitlab.data.timm_images import images_of_timm
from vitlab.errors import UsageError
from vitlab.interface import deals_samples, recipe
from vitlab.jobs.rebuild import stored_config
from vitlab.jobs.terminal import print_error, say
from vitlab.jobs.train.describe import header
from vitlab.jobs.train.facts import check_crops, check_module, model_facts
from vitlab.jobs.train.files import describe
from vitlab.jobs.train.job import Job
from vitlab.jobs.train.wandb import SafeWandbLogger, place_loggers
from vitlab.models.old_names import new_name, upgrade
from vitlab.runs.choose import choose_run
from vitlab.runs.directory import RunDir
from vitlab.runs.manifest import last_saved
from vitlab.tasks.base import Task

MOMENTS = "vitlab.look.moments.Moments"  # by its path, as a configuration names it: what shows runs stands above


def build_job(arguments: list[str], options: FitOptions, run: RunDir | None) -> Job:
    """Build the job that ``arguments`` configure, without writing anything.

    Args:
        arguments: Arguments of the configuration.
        options: Options of the run.
        run: The run to continue, or None for a new one.
    """
    cli = FitCLI(arguments, options, run)
    if cli.moved and run is None:
        say("note   options moved: " + ", ".join(f"model.{name} -> model.{new_name(name)}" for name in cli.moved))
    return cli.job


class FitCLI(VitlabCLI):
    """Build task, data and trainer for training in a run directory; ``job`` holds them.

    Args:
        args: Arguments of the configuration.
        options: Options of the run.
        run: The run to continue, or None for a new one.
    """

    def __init__(self, args: list[str], options: FitOptions, run: RunDir | None) -> None:
        self.options = options
        self.resumed = run is not None
        self.run = run or RunDir(".")
        self.wandb_id = os.urandom(4).hex()
        self.known: dict[str, Any] = {}  # how images were prepared for the initial weights
        self.asked: set[str] = set()  # what of it is given
        super().__init__(args)
        self._prepare_as_the_weights()
        check_module(self.model)
        check_crops(self.model, self.datamodule)
        saves = self.config.trainer.enable_checkpointing is not False
        self.job = Job(
            task=self.model,
            data=self.datamodule,
            trainer=self.trainer,
            config=self.config,
            config_text=self.config_text,
            arguments=self.arguments,
            options=options,
            run=self.run,
            resumed=self.resumed,
            recipe=self.recipe,
            record=self.record,
            wandb_id=self.wandb_id,
            wandb_line=self.wandb_line,
            keeper=self.config_init.checkpoint if saves else None,
            facts=model_facts(self.model, self.datamodule),  # before a strategy changes the network
        )

    def before_instantiate_classes(self) -> None:
        """Choose the run directory and point the loggers to it, without writing anything."""
        check_callbacks(self.config.trainer)
        self._read_images_of_weights()
        self.config_text = self._as_text()
        values = flatten_as_typed(yaml.safe_load(self.config_text))
        if self.resumed:
            if old := stored_config(self.run):
                old_values = flatten_as_typed(self._in_parts(old))
                check_same_config(self.run, self._defaults_among(values) | old_values, values)
        else:
            configs = config_paths(self.arguments)
            self.run = choose_run(self.options, configs, self.config.seed_everything, self.config_text)
        self.recipe = recipe_name(config_paths(self.arguments), values)
        with suppress(UsageError):  # a damaged record is rewritten later
            self.wandb_id = self.run.record.get("wandb_id") or self.wandb_id
            self.recipe = self.run.record.get("recipe") or self.recipe
        redirect_into_run(self.config.trainer, self.run.path)
        self.wandb_line = place_loggers(self.config, self.run, self.wandb_id)

    def _read_images_of_weights(self) -> None:
        """Learn how images were prepared for timm's initial weights; resize and cut them so, unless told otherwise."""
        source, cls = self.options.init_from or "", class_at(self.config.data.class_path)
        if self.resumed or not source.startswith("timm:") or not issubclass(cls, ImageData):
            return
        with user_mistakes():
            taken = signature(cls).parameters
            self.known = {k: v for k, v in images_of_timm(source).items() if k in taken}
        given = [pair for content in self.contents for pair in flatten_as_typed(content).items()] + settings(
            self.arguments
        )
        self.asked = {key.split(".")[-1] for key, value in given if key.startswith("data.") and value is not None}
        for name in {"crop_mode", "interpolation"} & self.known.keys() - self.asked:
            self.config.data.init_args[name] = self.known[name]

    def _prepare_as_the_weights(self) -> None:
        """Take the rest of what timm's initial weights need, now that the images are known; say what differs."""
        if not self.known:
            return
        arguments = self.config.data.init_args
        for name, value in self.datamodule.take_images(self.known, self.asked).items():
            arguments[name] = value
        self.config_text = self._as_text()
        source, now = self.options.init_from, {name: arguments[name] for name in self.known}
        same = [f"{name} {value}" for name, value in self.known.items() if now[name] == value]
        others = [f"{k} {v} and not {now[k]}" for k, v in self.known.items() if k in self.asked and now[k] != v]
        self.datamodule.notes += [f"images as for the weights of {source}: {', '.join(same)}"] if same else []
        self.datamodule.notes += [f"the weights of {source} were trained with {', '.join(others)}"] if others else []

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Build the trainer with vitlab's callbacks and the run directory as its root."""
        self.record = RunRecord(self.run, self._describe)
        saves = self.config.trainer.enable_checkpointing is not False
        keeper = self.config_init.checkpoint if saves else None
        console = Console(self.record, quiet=self.options.quiet)
        watch = Watch(self._on_lost_process)
        progress = Progress(self.run.path / "train.log", self.options.deadline, keeper, self._on_hang)
        self.added_callbacks = [
            self.record,
            watch,
            progress,
            console,
            StopOnSignal(keeper),
            *([keeper] if keeper else []),
            *self._moments(),
        ]
        trainer = super().instantiate_trainer(default_root_dir=str(self.run.path), **kwargs)
        for logger in trainer.loggers:
            if isinstance(logger, SafeWandbLogger):
                logger.set_group(self.recipe, self.config.seed_everything)
        environment = trainer._accelerator_connector.cluster_environment
        if isinstance(environment, SLURMEnvironment):
            environment.auto_requeue = False  # StopOnSignal saves, and the batch script requeues
        check_strategy(self.config.trainer.strategy, trainer, recipe(self._get(self.config_init, "model")).get("opt"))
        return trainer

    def _moments(self) -> list[Any]:
        """Return the callback that keeps what a small network sees, unless the configuration names it."""
        given = self.config.trainer.get("callbacks")
        named = [part for part in (given if isinstance(given, list) else [given]) if isinstance(part, Namespace)]
        return [] if any(part.class_path == MOMENTS for part in named) else [class_at(MOMENTS)()]

    def _defaults_among(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the values that are defaults; an older run that lacks a key was trained with its default."""
        classes = {name: class_at(self.config[name].class_path) for name in ("model", "data")}
        taken = {
            f"{name}.{p.name}": p.default for name, cls in classes.items() for p in signature(cls).parameters.values()
        }
        plain = {key: list(value) if isinstance(value, tuple) else value for key, value in taken.items()}
        return {key: value for key, value in values.items() if key in plain and plain[key] == value}

    def _in_parts(self, stored: dict[str, Any]) -> dict[str, Any]:
        """Return the configuration of a run with the options of parts where they are now."""
        model = stored.get("model")
        if not issubclass(class_at(self.config.model.class_path), Task) or not isinstance(model, dict):
            return stored
        return {**stored, "model": {**model, "init_args": upgrade(model.get("init_args") or {})}}

    def _as_text(self) -> str:
        """Return the configuration to store, with the linked values that the data cannot provide."""
        content = yaml.safe_load(self.parser.dump(self.config, skip_none=False))
        links = {} if deals_samples(class_at(self.config.data.class_path)) else self.given_links()
        arguments = {**content["model"].get("init_args", {}), **links}
        as_mappings(arguments)
        content["model"]["init_args"] = arguments
        return yaml.safe_dump(content, sort_keys=False)

    def _describe(self, trainer: L.Trainer, task: L.LightningModule) -> None:
        say(header(self.job))
        describe(self.job)

    def _on_hang(self, what: str) -> None:
        print_error(f"{last_saved(self.run.checkpoints)} `vitlab fit --resume {self.run.path}`")
        if self.trainer.is_global_zero:
            self._record_failure("preempted", what)

    def _on_lost_process(self, what: str) -> None:
        print_error(f"\n{what}; the run ends. {last_saved(self.run.checkpoints)} `vitlab fit --resume {self.run.path}`")
        self._record_failure("failed", what)

    def _record_failure(self, status: str, what: str) -> None:
        if self.run.exists():
            ending = {"why": "error", "text": what}
            self.run.update("run.json", status=status, ended=now_utc(), error=what, ending=ending)
