"""Build task, data and trainer of ``vitlab fit`` in a run directory."""

import os
from contextlib import suppress
from functools import partial
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.model_helpers import is_overridden

from vitlab.callbacks.checkpoint import Checkpoint
from vitlab.callbacks.console import Console
from vitlab.callbacks.deadline import Deadline
from vitlab.callbacks.ema import EMA
from vitlab.callbacks.record import RunRecord
from vitlab.callbacks.stop import StopOnSignal
from vitlab.callbacks.watch import Watch
from vitlab.config.arguments import config_paths
from vitlab.config.callbacks import check_callbacks, check_monitors, redirect_into_run, trainer_parts
from vitlab.config.explain import user_mistakes
from vitlab.config.keys import flatten_as_typed, recipe_name
from vitlab.config.options import FitOptions
from vitlab.config.parser import VitlabCLI, class_at
from vitlab.config.strategies import FullyShard, check_shards, check_strategy
from vitlab.config.yaml_files import parse_own, yaml_text
from vitlab.data.base import ImageData
from vitlab.data.listed import Listed
from vitlab.errors import UsageError, one_line, preview
from vitlab.interface import has_grid, hparams_of, is_loadable, network, path_of
from vitlab.jobs.stored import naming_place_of_data, training_args
from vitlab.jobs.terminal import lightning_quieted, open_terminal, say
from vitlab.jobs.train.choose import choose_run, initial_weights, run_to_continue
from vitlab.jobs.train.continued import check_continued
from vitlab.jobs.train.describe import header
from vitlab.jobs.train.endings import building, lost_process
from vitlab.jobs.train.facts import model_facts, write_facts
from vitlab.jobs.train.initial import LibraryImages, load_first_weights
from vitlab.jobs.train.job import Job
from vitlab.jobs.train.wandb import SafeWandbLogger, new_id, place_loggers
from vitlab.layers.custom import spare
from vitlab.lazy import quick_imports
from vitlab.models.cost import count_all_parameters
from vitlab.models.hooks import modes_kept
from vitlab.models.old_names import new_name
from vitlab.runs.directory import RunDir
from vitlab.runs.launch import is_leader
from vitlab.shipped import LIBRARIES
from vitlab.tasks.base import Task
from vitlab.tasks.distillation import Distillation
from vitlab.tasks.optimizer import accumulate_from_the_start
from vitlab.tasks.sizes import check_crops, check_forms

LOOK = {  # by class path, as a configuration names them: `vitlab.look` imports this room, and not the other way round
    "moments": "vitlab.look.moments.Moments",
    "page": "vitlab.look.live.GrowingPage",
    "asked": "vitlab.look.live.LivePage",
}


def build_job(arguments: list[str], options: FitOptions) -> Job:
    """Build the job that ``arguments`` configure, with its initial weights, without writing anything.

    Args:
        arguments: Arguments of the configuration.
        options: Options of the run, which tell whether one is continued.

    Raises:
        UsageError: The configuration is wrong, or not that of the run to continue.
    """
    options.check()
    run = run_to_continue(options)
    open_terminal(options.quiet or not is_leader())  # else each process would say what the first one says
    with building(), naming_place_of_data(run, arguments, ["data.root"]), quick_imports():  # and the user's code
        cli = FitCLI(training_args(run, arguments, auto=not options.resume), options, run)
    if cli.moved and run is None:
        moved = ", ".join(f"model.{name} -> model.{new_name(name)}" for name in cli.moved)
        cli.job.say(f"note   options moved: {moved}")
    load_first_weights(cli.job)
    return cli.job


def check_job(arguments: list[str], options: FitOptions) -> None:
    """Check what :func:`build_job` would build; the GPUs may be elsewhere, and the images, too.

    Raises:
        UsageError: The configuration is wrong, or not that of the run to continue.
    """
    options.check()
    run = run_to_continue(options)
    with lightning_quieted(), patch.dict(os.environ):  # which a job inherits
        CheckedCLI(training_args(run, arguments, auto=not options.resume), options, run)


def rehearse(job: Job) -> None:
    """Set up the data and print the header, as a dry run does, which downloads nothing."""
    if isinstance(job.data, ImageData) and (absent := job.data.absent()):
        say(f"dry run: task and network can be built; not here: {absent}, which training would download")
        return
    with user_mistakes():
        job.data.prepare_data()
        job.data.setup("fit")
        batches, limit = sized_len(job.data.train_dataloader()), job.trainer.limit_train_batches
        if is_overridden("val_dataloader", job.data, L.LightningDataModule):
            job.data.val_dataloader()
        if isinstance(job.task, Task):
            job.task.check_targets()
            job.task.check_images(job.data)
        if isinstance(job.task, Distillation):
            job.task.find_teacher(job.data)
    job.task.trainer, job.trainer.datamodule = job.trainer, job.data  # type: ignore[attr-defined]  # as in a training
    if batches is not None and isinstance(job.data, ImageData):  # of each process, on which batch and rate depend
        job.trainer.fit_loop.max_batches = min(batches, limit if isinstance(limit, int) else int(batches * limit))
    say(header(job) + "\n\ndry run: everything can be built; nothing was written")


def check_module(task: L.LightningModule, data: Any) -> None:
    """Refuse a module that cannot be trained, or data or a module whose hyper-parameters could not be read again.

    Raises:
        UsageError: The module lacks a step or an optimizer, or hyper-parameters hold objects.
    """
    for name in ("training_step", "configure_optimizers"):
        if not is_overridden(name, task, L.LightningModule):
            raise UsageError(f"{path_of(task)} cannot be trained without `{name}`; see docs/bring_your_own.md")
    saved = [(path_of(each), *pair) for each in (task, data) for pair in hparams_of(each).items()]
    for owner, name, value in saved:
        if not is_loadable(value):
            raise UsageError(
                f"{owner} saves `{name}`, a {type(value).__name__}, as a hyper-parameter, but checkpoints only "
                f'hold numbers, strings and tensors: use save_hyperparameters(ignore=["{name}"])'
            )


def check_bits(task: Any, trainer: L.Trainer) -> None:
    """Refuse parameters of 64 bits, of a part of the user's, that the rest of a network of vitlab cannot compute with.

    Raises:
        UsageError: A pass of one image fails; none is tried where the precision makes all weights alike.
    """
    net: Any = network(task)
    wide = [name for name, p in net.named_parameters() if p.dtype == torch.float64]
    if not wide or not has_grid(task) or str(trainer.precision) in ("64-true", "16-true", "bf16-true"):
        return
    try:
        with modes_kept(net), torch.no_grad(), torch.random.fork_rng(), trainer.precision_plugin.forward_context():
            spare(net).eval()(torch.zeros(1, net.in_chans, *net.img_size))
    except RuntimeError as error:
        raise UsageError(
            f"parameters of 64 bits, {preview(wide)}, and the others do not go together ({one_line(error)}): make them "
            "float32, as by `.float()` in the constructor of their part, or train with --trainer.precision=64-true"
        ) from error


class FitCLI(VitlabCLI):
    """Build task, data and trainer for training in a run directory; ``job`` holds them.

    LightningCLI calls, in this order: the parser; :meth:`before_instantiate_classes`, which chooses run directory and
    loggers; the constructors of data and task; :meth:`instantiate_trainer`, which adds vitlab's callbacks;
    :meth:`after_instantiate_classes`, which makes the job.

    Args:
        args: Arguments of the configuration.
        options: Options of the run.
        run: The run to continue, or None for a new one.
    """

    def __init__(self, args: list[str], options: FitOptions, run: RunDir | None) -> None:
        self.options = options
        self.resumed = run is not None
        self.run = run or RunDir(".")
        self.wandb_id = new_id()
        self.library_images: LibraryImages | None = None  # unless the initial weights are not of a library
        self.keeper: Checkpoint | None = None  # unless nothing is saved
        super().__init__(args)

    def after_instantiate_classes(self) -> None:
        """Make the job of data, task and trainer."""
        if self.library_images:
            self.library_images.prepare(self.datamodule, self.config.data.init_args)
            self.config_text = self._as_text()
        check_module(self.model, self.datamodule)
        check_forms(self.model, self.datamodule)
        with user_mistakes():
            self._check_trainer()
        if isinstance(self.datamodule, Listed) and not getattr(self.model, "reads_labels", True):
            self.datamodule.note_unread_weights()
        self.job = Job(
            task=self.model,
            data=self.datamodule,
            trainer=self.trainer,
            config=self.config,
            config_text=self.config_text,
            arguments=self.arguments,
            options=self.options,
            run=self.run,
            resumed=self.resumed,
            recipe=self.recipe,
            record=self.record,
            watch=self.watch,
            deadline=self.deadline,
            wandb_id=self.wandb_id,
            wandb_line=self.wandb_line,
            keeper=self.keeper,
            facts=model_facts(self.model, self.datamodule),  # before a strategy changes the network
        )

    def _check_trainer(self) -> None:
        """Refuse processes or a precision that data, task or an average cannot have, and what stops at the worst epoch.

        Task and average refuse it in their ``setup``, too, for a Trainer of the user's; here nothing is written yet.
        """
        if isinstance(self.datamodule, ImageData):
            self.datamodule.check_processes(self.trainer.world_size)
        if isinstance(self.model, Task):
            self.model.check_training(self.trainer, self.datamodule)
        if isinstance(self.trainer.strategy, FullyShard):
            check_shards(self.model)
        check_bits(self.model, self.trainer)
        for part in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(part, EMA):
                part.check_training(self.trainer)
        if not self.resumed:  # an older run goes on as it is
            check_monitors(self.trainer, self.model)
            if isinstance(self.model, Task):
                self.model.check_augmentation(self.datamodule)

    def before_instantiate_classes(self) -> None:
        """Choose the run directory and point the loggers to it, without writing anything."""
        check_callbacks(self.config.trainer, class_at(self.config.model.class_path))
        source, data = self.options.init_from or "", self.config.data
        if not self.resumed and source.startswith(LIBRARIES) and issubclass(class_at(data.class_path), ImageData):
            self.library_images = LibraryImages.of(source, data, self.given_settings())
        self.config_text = self._as_text()
        values = flatten_as_typed(parse_own(self.config_text))
        if self.resumed:
            check_continued(self.run, self.config, values)
        else:
            configs = config_paths(self.arguments)
            self.run = choose_run(self.options, configs, self.config.seed_everything, self.config_text)
            self.options.init_from = initial_weights(self.options.init_from, self.run)
        self.recipe = recipe_name(config_paths(self.arguments), values)
        with suppress(UsageError):  # a damaged record is rewritten later
            self.wandb_id = self.run.record.get("wandb_id") or self.wandb_id
            self.recipe = self.run.record.get("recipe") or self.recipe
        redirect_into_run(self.config.trainer, self.run.path)
        self.wandb_line = place_loggers(self.config, self.run, self.wandb_id)

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Build the trainer with vitlab's callbacks and the run directory as its root."""
        self.record = RunRecord(self.run, self._describe)
        saves = self.config.trainer.enable_checkpointing is not False
        self.keeper = keeper = self.config_init.checkpoint if saves else None
        console = Console(self.record, quiet=self.options.quiet)
        self.watch = Watch(partial(lost_process, self.run))
        self.deadline = Deadline(self.run.path / "train.log", self.options.deadline, keeper)
        self.added_callbacks = [
            self.record,
            self.watch,
            self.deadline,
            console,
            StopOnSignal(keeper),
            *([keeper] if keeper else []),
            *self._look_callbacks(),
        ]
        trainer = super().instantiate_trainer(default_root_dir=str(self.run.path), **kwargs)
        accumulate_from_the_start(trainer)
        for logger in trainer.loggers:
            if isinstance(logger, SafeWandbLogger):
                logger.set_group(self.recipe, self.config.seed_everything)
        environment = trainer._accelerator_connector.cluster_environment
        if isinstance(environment, SLURMEnvironment):
            environment.auto_requeue = False  # StopOnSignal saves, and the batch script requeues
        hparams = hparams_of(self._get(self.config_init, "model"))
        check_strategy(self.config.trainer.strategy, trainer, hparams.get("opt"))
        return trainer

    def _look_callbacks(self) -> list[Any]:
        """Return the callbacks of ``vitlab.look``, if it is installed, that the configuration does not name itself.

        They keep moments of a small network while it trains, and write its page.
        """
        given = trainer_parts(self.config.trainer, "callbacks")
        named = {part.class_path: part.get("init_args") or {} for part in given}
        share, found = named.get(LOOK["moments"], {}).get("share"), list[Any]()
        with suppress(ModuleNotFoundError):  # the core trains without what shows runs
            if LOOK["moments"] not in named:
                found.append(class_at(LOOK["moments"])())
            if LOOK["asked"] not in named and LOOK["page"] not in named:
                found.append(class_at(LOOK["page"])(**({} if share is None else {"share": share})))
        return found

    def _as_text(self) -> str:
        """Return the configuration to store, with the linked values that the data cannot provide."""
        parser: Any = self.parser
        content = parser.content(self.config, skip_none=False, skip_validation=True)  # which parsing has made
        links = {} if issubclass(class_at(self.config.data.class_path), ImageData) else self.given_links()
        content["model"]["init_args"] = {**content["model"].get("init_args", {}), **links}
        return yaml_text(content)

    def _describe(self, trainer: L.Trainer, task: L.LightningModule) -> None:
        if (
            not has_grid(task) and count_all_parameters(network(task)) > self.job.facts["parameters_total"]
        ):  # built in its `setup`
            self.job.facts = model_facts(task, self.datamodule)
        say(header(self.job), wrap=True)
        write_facts(self.job)


class CheckedCLI(FitCLI):
    """The checks of :class:`FitCLI`, without weights and trainer; of the constructors only where the data are here."""

    has_data = False

    def instantiate_classes(self) -> None:
        """Check values; build data and task on the meta device, if the data can be built."""
        self.check_values()
        try:
            with torch.device("meta"):
                super().instantiate_classes()
            check_module(self.model, self.datamodule)
            check_crops(self.model, self.datamodule)
        except Exception as error:  # foreign code can raise anything on the meta device
            if self.has_data and isinstance(error, UsageError):
                raise

    def after_instantiate_classes(self) -> None:
        """Make no job."""

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Return none: the devices may be elsewhere."""
        return None

    def _reader(self, name: str) -> Any:
        read = super()._reader(name)

        def noted(data: Any) -> Any:
            self.has_data = True
            return read(data)

        return noted
