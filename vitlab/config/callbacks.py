"""Callbacks and plugins of Lightning that do not go together with a run directory: refused, with the way out."""

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
