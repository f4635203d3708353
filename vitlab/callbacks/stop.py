"""Leaving a run in good order when the system or the user asks for it."""

import signal
import time
from types import FrameType
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from vitlab.callbacks.checkpoint import Checkpoint
from vitlab.errors import Stopped

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopOnSignal(Callback):
    """Finish the step, save, and leave, on SIGTERM, SIGUSR1 or SIGINT; all processes together.

    The handlers set a flag and nothing else. A second signal within five seconds ends the process at once. During a
    validation the flag waits for its end.

    Args:
        checkpoint: What saves the state; None leaves without saving.
    """

    def __init__(self, checkpoint: Checkpoint | None) -> None:
        self.checkpoint = checkpoint
        self.received: int | None = None
        self._when = 0.0
        self._before: dict[int, Any] = {}
        self._early: dict[int, Any] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Remember what a signal does before the first step."""
        self._early = {number: signal.getsignal(number) for number in SIGNALS}

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep it so: Lightning has just installed its own handlers."""
        for number, handler in self._early.items():
            signal.signal(number, handler)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Listen from now on, and only set a flag."""
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._receive)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save in the middle of an epoch and leave; the last batch leaves to the end of the epoch."""
        between_steps = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if batch_idx + 1 < trainer.num_training_batches and between_steps and self._asked(trainer):
            if self.checkpoint is not None:
                self.checkpoint.save(trainer, ["last"])
            raise Stopped(self.received or signal.SIGTERM)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save the complete epoch and leave."""
        if self._asked(trainer):
            if self.checkpoint is not None:
                self.checkpoint.save_epoch(trainer)
            raise Stopped(self.received or signal.SIGTERM)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Give the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and 0.5 < time.monotonic() - self._when < 5:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if self.received is None:
            self.received, self._when = number, time.monotonic()

    def _asked(self, trainer: L.Trainer) -> bool:
        mine = self.received is not None
        return trainer.strategy.reduce_boolean_decision(mine, all=False) if trainer.world_size > 1 else mine
