"""Lightning callbacks: record, checkpoints, terminal output and supervision of a run."""

from typing import TYPE_CHECKING

from vitlab.lazy import lazy

if TYPE_CHECKING:
    from vitlab.callbacks.attention_maps import AttentionMaps
    from vitlab.callbacks.checkpoint import Checkpoint
    from vitlab.callbacks.console import Console
    from vitlab.callbacks.ema import EMA
    from vitlab.callbacks.predictions import Predictions
    from vitlab.callbacks.quality import FeatureQuality
    from vitlab.callbacks.record import RunRecord
    from vitlab.callbacks.stop import StopOnSignal
    from vitlab.callbacks.watch import Watch
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "EMA",
    "AttentionMaps",
    "Checkpoint",
    "Console",
    "FeatureQuality",
    "Predictions",
    "RunRecord",
    "StopOnSignal",
    "Watch",
]
