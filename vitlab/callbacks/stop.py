"""Save and stop gracefully when a signal arrives."""

import math
import signal
import threading
import time
from types import FrameType
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from vitlab.callbacks.checkpoint import Checkpoint
from vitlab.callbacks.loops import within_step
from vitlab.errors import Stopped
from vitlab.runs import guard
from vitlab.runs.interrupt import STOPPING, TWICE


class StopOnSignal(Callback):
    """On SIGTERM, SIGUSR1, SIGINT or SIGHUP, finish the current step or validation batch, save, and exit.

    All processes do so together. The handlers only set a flag. A validation is interrupted, and repeated when the run
    resumes. Where batches before it wait for the rest of their accumulated step, both are finished first. A second
    Ctrl-C, or a second SIGTERM within five seconds, stops at once without saving. Only the main thread has handlers: a
    training in another, such as that of a sweep agent, replaces none.

    Args:
        checkpoint: Callback that saves the state; None exits without saving.

    Example:
        >>> stop = StopOnSignal(checkpoint=None)
        >>> stop.received  # None until a signal arrives
    """

    def __init__(self, checkpoint: Checkpoint | None) -> None:
        self.checkpoint = checkpoint
        self.received: int | None = None
        self._when = 0.0
        self._begun = False  # whether a step of this attempt is done
        self._handled: list[int] = []
        self._original: dict[int, Any] = {}
        self._shared_batches = 0.0  # validation batches that every process has; of a loader without a length unknown

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Remember the signal handlers before training; only in the main thread may they be replaced."""
        is_main = threading.current_thread() is threading.main_thread()
        self._original = {number: signal.getsignal(number) for number in STOPPING if is_main}

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Restore these handlers: Lightning has just replaced them."""
        for number, handler in self._original.items():
            signal.signal(number, handler)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Install handlers that set a flag."""
        for number, handler in self._original.items():
            if number != signal.SIGHUP or handler != signal.SIG_IGN:  # nohup
                signal.signal(number, self._receive)
                self._handled.append(number)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Exit once the step is saved: what belongs to it, such as a validation, has yet to end."""
        if not self._begun:
            self._begun = True
            guard.enter(None)  # from now on a signal waits for the step, to save it
        if not within_step(trainer):
            self._exit_once_saved(trainer)

    def on_validation_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
        """Count the batches that every process has: only during these can processes communicate."""
        batches = _over_processes(trainer, float(sum(trainer.num_val_batches)), "min")
        self._shared_batches = batches if trainer.world_size == 1 or math.isfinite(batches) else 0

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Interrupt the validation, save and exit; one within an accumulated step ends, and so does the step."""
        is_own = trainer.state.fn == "fit" and not trainer.sanity_checking and batch_idx < self._shared_batches
        if not is_own or within_step(trainer):
            return
        if number := self._signal(trainer):
            if self.checkpoint is not None:
                self.checkpoint.save_between(trainer, pl_module)
            raise Stopped(number)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Exit once the finished epoch is saved: its module and EarlyStopping have yet to end it."""
        self._exit_once_saved(trainer)

    def _exit_once_saved(self, trainer: L.Trainer) -> None:
        if number := self._signal(trainer):
            if self.checkpoint is None:
                raise Stopped(number)
            self.checkpoint.ends_with = Stopped(number)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Restore the original signal handlers; Lightning has already removed its own."""
        for number in self._handled:
            signal.signal(number, self._original[number])
        self._handled = []

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Restore the original handlers: Lightning does not call teardown after an exception."""
        self.teardown(trainer, pl_module, "fit")

    def _receive(self, number: int, frame: FrameType | None) -> None:
        since = time.monotonic() - self._when
        if self.received is None:
            self.received, self._when = number, time.monotonic()
        elif since > TWICE and (number == signal.SIGINT or since < 5):
            raise Stopped(number)

    def _signal(self, trainer: L.Trainer) -> int:
        """Return a signal that any process has received, 0 if none has."""
        return int(_over_processes(trainer, float(self.received or 0), "max"))


def _over_processes(trainer: L.Trainer, value: float, how: str) -> float:
    if trainer.world_size == 1:
        return value
    tensor = torch.tensor(value, device=trainer.strategy.root_device)
    return float(trainer.strategy.reduce(tensor, reduce_op=how))
