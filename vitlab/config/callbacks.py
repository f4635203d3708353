"""Keep Lightning's loggers, callbacks and profilers inside the run directory; refuse those that break its record."""

from pathlib import Path, PurePath
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import callbacks
from lightning.pytorch.plugins import AsyncCheckpointIO

from vitlab.callbacks.checkpoint import usual_mode
from vitlab.config.parser import class_at
from vitlab.errors import UsageError
from vitlab.tasks.base import Task

_REFUSED: dict[type, str] = {
    callbacks.LearningRateFinder: (
        "changes the learning rate that config.yaml records; compare rates with `tune` in an ablation, set `model.lr`"
    ),
    callbacks.BatchSizeFinder: (
        "changes the batch size that config.yaml records; `vitlab bench model` shows what fits, set `data.batch_size`"
    ),
    callbacks.StochasticWeightAveraging: (
        "averages the weights after the last checkpoint, so they are never saved; use --trainer.callbacks+=EMA"
    ),
    callbacks.ProgressBar: "would stand beside the bar and the table of epochs that vitlab shows; leave it out",
    AsyncCheckpointIO: "finishes a checkpoint after vitlab has verified it; leave it out",
}
_FOLDERS = ("dirpath", "save_dir", "root_dir", "dir", "exclude_batches_path")  # arguments that name a folder,
_NAMES = ("filename", "name", "version", "sub_dir", "checkpoint_name")  # and arguments that name a file in it


def trainer_parts(trainer: Namespace, *groups: str) -> list[Namespace]:
    """Return what groups of the trainer's configuration name by their classes, such as its callbacks."""
    given = [trainer.get(group) for group in groups]
    listed = [part for one in given for part in (one if isinstance(one, list) else [one])]
    return [part for part in listed if isinstance(part, Namespace)]


def redirect_into_run(trainer: Namespace, run: Path) -> None:
    """Make Lightning's loggers, callbacks and profilers write into the run directory, under the names they were given.

    Args:
        trainer: The trainer's part of a parsed configuration; it is changed.
        run: The run directory.
    """
    for part in trainer_parts(trainer, "logger", "callbacks", "profiler"):
        if part.class_path.startswith("lightning."):
            for arguments in (part.get("init_args"), part.get("dict_kwargs")):
                _redirect(arguments or {}, run)


def _redirect(arguments: Any, run: Path) -> None:
    for name, value in list(arguments.items()):
        if isinstance(value, dict | Namespace):
            _redirect(value, run)
        elif name in (*_FOLDERS, *_NAMES) and isinstance(value, str | PurePath):
            inner = Path(*[part for part in Path(value).parts if part not in ("/", "..")])
            arguments[name] = str(run / inner if name in _FOLDERS else inner)
        elif name == "tracking_uri" and not str(value).startswith(("http:", "https:")):
            arguments[name] = value and f"file:{(run / 'mlruns').absolute()}"


def check_callbacks(trainer: Namespace, task: type) -> None:
    """Refuse callbacks that train something other than the record says, or nothing.

    Args:
        trainer: The trainer's part of a parsed configuration.
        task: Class of the module that it trains.
    """
    if trainer.get("barebones"):
        raise UsageError("`trainer.barebones` keeps no record and no checkpoint; `vitlab bench model` measures speed")
    averages: list[str] = []
    for part in trainer_parts(trainer, "callbacks", "plugins"):
        cls = class_at(part.class_path)
        for kind, why in _REFUSED.items():
            if issubclass(cls, kind):
                raise UsageError(f"`{cls.__name__}` {why}")
        averages += [cls.__name__] if issubclass(cls, callbacks.WeightAveraging) else []
        if len(averages) > 1:
            raise UsageError(
                f"`trainer.callbacks` has two averages of the weights, {' and '.join(averages)}, and each would "
                "put its own into the network of the other: keep one"
            )
        if issubclass(cls, callbacks.BackboneFinetuning) and issubclass(task, Task):
            raise UsageError(
                f"`{cls.__name__}` trains the `backbone` of a module, and {task.__name__} has none: "
                "--model=LinearProbe trains the head alone, --model.layer_decay the lower blocks less"
            )


def check_monitors(trainer: Any, task: Any) -> None:
    """Refuse a callback of Lightning whose metric is never measured, or that takes the smallest value for the best.

    Args:
        trainer: The trainer; ``min`` is the default of its callbacks, whatever they monitor.
        task: The module that it trains.
    """
    for part in trainer.callbacks:
        if not isinstance(part, callbacks.EarlyStopping | callbacks.ModelCheckpoint):
            continue
        if part.mode == "min" and usual_mode(trainer, task, part.monitor) == "max":
            raise UsageError(
                f"`mode` of `{type(part).__name__}` must be max for {part.monitor}, whose largest value is the best, "
                "got min, which is Lightning's default: set `mode: max`"
            )
        is_read = isinstance(part, callbacks.EarlyStopping) and part.strict and str(part.monitor).startswith("val/")
        if is_read and isinstance(task, Task) and trainer.limit_val_batches == 0:
            raise UsageError(
                f"`monitor` of `{type(part).__name__}` must be measured, and `trainer.limit_val_batches=0` leaves out "
                f"validation, got {part.monitor}: leave one of them out"
            )
