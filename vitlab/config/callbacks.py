"""Parts of Lightning that do not go together with a run directory are refused; where the others write lies in it."""

from pathlib import Path, PurePath
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import callbacks
from lightning.pytorch.plugins import AsyncCheckpointIO

from vitlab.config.parser import class_of
from vitlab.errors import UsageError

_REFUSED: dict[type, str] = {
    callbacks.LearningRateFinder: (
        "trains with another rate than config.yaml says; compare rates with `tune` in an ablation, and set `model.lr`"
    ),
    callbacks.BatchSizeFinder: (
        "trains with another batch than config.yaml says; `vitlab bench model` shows what fits, set `data.batch_size`"
    ),
    callbacks.StochasticWeightAveraging: (
        "averages the weights after the last checkpoint is written, so nothing keeps them; use --trainer.callbacks+=EMA"
    ),
    AsyncCheckpointIO: "writes states later than vitlab looks whether they are whole; leave it out",
}
_NEED_A_LOGGER = (callbacks.LearningRateMonitor, callbacks.DeviceStatsMonitor)


_PLACES = ("dirpath", "save_dir", "root_dir", "dir", "exclude_batches_path")  # arguments that say where to write,
_NAMES = ("filename", "name", "version", "sub_dir", "checkpoint_name")  # and under which names in it


def keep_inside(trainer: Namespace, run: Path) -> None:
    """Let loggers, callbacks and profilers of Lightning write into the run directory alone, under the names they say.

    Args:
        trainer: The trainer's part of a parsed configuration; it is changed.
        run: The run directory.
    """
    for group in ("logger", "callbacks", "profiler"):
        given = trainer.get(group)
        for part in given if isinstance(given, list) else [given]:
            if isinstance(part, Namespace) and str(part.get("class_path")).startswith("lightning."):
                for arguments in (part.get("init_args"), part.get("dict_kwargs")):
                    _keep_inside(arguments or {}, run)


def _keep_inside(arguments: Any, run: Path) -> None:
    for name, value in list(arguments.items()):
        if isinstance(value, dict | Namespace):
            _keep_inside(value, run)
        elif name in (*_PLACES, *_NAMES) and isinstance(value, str | PurePath):
            inner = Path(*[part for part in Path(value).parts if part not in ("/", "..")])
            arguments[name] = str(run / inner if name in _PLACES else inner)
        elif name == "tracking_uri" and not str(value).startswith(("http:", "https:")):
            arguments[name] = value and f"file:{(run / 'mlruns').absolute()}"


def check_callbacks(trainer: Namespace) -> None:
    """Refuse what would train something else than the record says, or has nothing to write to.

    Args:
        trainer: The trainer's part of a parsed configuration.
    """
    for given in (trainer.get("callbacks"), trainer.get("plugins")):
        for part in given if isinstance(given, list) else [given]:
            if not isinstance(part, Namespace):
                continue
            cls = class_of(part.class_path)
            for kind, why in _REFUSED.items():
                if issubclass(cls, kind):
                    raise UsageError(f"`{cls.__name__}` {why}")
            if issubclass(cls, _NEED_A_LOGGER) and trainer.get("logger") is False:
                raise UsageError(
                    f"`{cls.__name__}` writes to a logger, and there is none: add --trainer.logger=CSVLogger "
                    "(the learning rate is in metrics.jsonl in any case)"
                )
