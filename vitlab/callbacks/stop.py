"""Leaving a run in good order when the system or the user asks for it."""

import signal
import time
from types import FrameType
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from vitlab.callbacks.checkpoint import Checkpoint
from vitlab.errors import Stopped
from vitlab.runs.interrupt import TWICE

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


class StopOnSignal(Callback):
    """Finish the step or the batch of a validation, save, and leave, on any of ``SIGNALS``; all processes together.

    The handlers set a flag and nothing else. A validation has no state: it is broken off, and made anew when the run
    goes on. A second Ctrl-C breaks off whatever goes on, without saving; so does a second SIGTERM within five seconds.

    Args:
        checkpoint: What saves the state; None leaves without saving.

    Example:
        >>> stop = StopOnSignal(checkpoint=None)
        >>> stop.received  # the number of the signal, once there was one
    """

    def __init__(self, checkpoint: Checkpoint | None) -> None:
        self.checkpoint = checkpoint
        self.received: int | None = None
        self._when = 0.0
        self._taken: list[int] = []
        self._early: dict[int, Any] = {}
        self._shared_batches = 0  # of a validation, that every process has

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
            if number != signal.SIGHUP or self._early.get(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, self._receive)
                self._taken.append(number)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save in the middle of an epoch and leave; the last batch leaves to its validation or the end of the epoch."""
        between_steps = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if batch_idx + 1 < trainer.num_training_batches and between_steps and (number := self._asked(trainer)):
            if self.checkpoint is not None:
                self.checkpoint.save(trainer, ["last"])
            raise Stopped(number)

    def on_validation_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
        """Count the batches that every process has: only there they can ask each other."""
        batches = float(sum(trainer.num_val_batches))
        self._shared_batches = int(_over_processes(trainer, batches, "min"))

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Break the validation off, save, and leave."""
        if trainer.sanity_checking or trainer.state.fn != "fit" or batch_idx >= self._shared_batches:
            return
        if number := self._asked(trainer):
            if self.checkpoint is not None:
                self.checkpoint.save_between(trainer, pl_module)
            raise Stopped(number)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save the complete epoch and leave."""
        if number := self._asked(trainer):
            if self.checkpoint is not None:
                self.checkpoint.save_epoch(trainer)
            raise Stopped(number)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Give the signals back: not to Lightning, which has given them up before."""
        for number in self._taken:
            signal.signal(number, self._early[number])
        self._taken = []

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Give the signals back: Lightning tears nothing down."""
        self.teardown(trainer, pl_module, "fit")

    def _receive(self, number: int, frame: FrameType | None) -> None:
        since = time.monotonic() - self._when
        if self.received is None:
            self.received, self._when = number, time.monotonic()
        elif since > TWICE and (number == signal.SIGINT or since < 5):
            raise Stopped(number)

    def _asked(self, trainer: L.Trainer) -> int:
        """Return the signal that a process has received, 0 if none has."""
        return int(_over_processes(trainer, float(self.received or 0), "max"))


def _over_processes(trainer: L.Trainer, value: float, how: str) -> float:
    if trainer.world_size == 1:
        return value
    tensor = torch.tensor(value, device=trainer.strategy.root_device)
    return float(trainer.strategy.reduce(tensor, reduce_op=how))
