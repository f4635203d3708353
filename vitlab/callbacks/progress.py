"""A run that hangs is noticed, told and left, in time."""

import faulthandler
import logging
import multiprocessing
import os
import signal
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import lightning as L
from lightning.pytorch.callbacks import Callback

from vitlab.callbacks.checkpoint import Checkpoint
from vitlab.errors import Stopped, exit_code
from vitlab.runs.processes import state

LOG = logging.getLogger("vitlab")
Phase = Literal["loader", "step", "validation loader", "validation batch"]
TIMES = 20.0  # a phase hangs after so many times its median,
FIRST = 6.0  # and the first of its kind, which may compile, after so many times the floor
LATER = 1.25  # of several processes those that wait in a step for another let it speak first
LOOK = 1.0  # seconds between two looks
FROZEN = 5.0  # seconds without a look after which this process itself was stopped, as by Ctrl-Z
GRACE = 20.0  # seconds that the main thread has to leave
WAKE = signal.SIGURG  # which nobody else sends, and which does nothing where nobody listens


class Progress(Callback):
    """End a run whose step, validation batch or loader does not come to an end; a thread looks.

    A phase may take 20 times its median and never less than ``floor``. What hangs is named, with the states of the
    loader's workers; the stacks of all threads go to ``train.log``. Where a single process waits for its loader or
    validates, the state is whole and is saved. The run leaves with exit code 75: try again.

    Args:
        stacks: The file for them.
        floor: Seconds that a phase may take at least; 0 for no limit.
        checkpoint: What saves the state; None leaves without saving.
        on_hang: Called with what hangs if the process has to end without its main thread.
    """

    def __init__(
        self,
        stacks: Path,
        floor: float,
        checkpoint: Checkpoint | None,
        on_hang: Callable[[str], None] = lambda what: None,
    ) -> None:
        self.stacks, self.floor, self.checkpoint, self.on_hang = stacks, floor, checkpoint, on_hang
        self.phase: Phase | None = None
        self.hung: str | None = None
        self._since = 0.0
        self._times: dict[str, deque[float]] = {}
        self._end = threading.Event()
        self._place = ""
        self._alone = True
        self._others: set[Any] = set()  # children that are not of this run

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Know whom not to end: the workers of this run are not there yet."""
        self._others = {*multiprocessing.active_children()}

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin to look."""
        self._begin(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin to look."""
        self._begin(trainer)
        self._enter("loader")

    def on_train_batch_start(self, *args: Any) -> None:
        """A batch is there."""
        self._enter("step")

    def on_train_batch_end(self, *args: Any) -> None:
        """The next batch is waited for."""
        self._enter("loader")

    def on_validation_start(self, *args: Any) -> None:
        """The first batch is waited for."""
        self._enter("validation loader")

    def on_validation_batch_start(self, *args: Any) -> None:
        """A batch is there."""
        self._enter("validation batch")

    def on_validation_batch_end(self, *args: Any) -> None:
        """The next batch is waited for."""
        self._enter("validation loader")

    def on_validation_end(self, *args: Any) -> None:
        """Training goes on."""
        self._enter("loader")

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Save what is whole, and let no worker that hangs hold the process up."""
        phase = self.phase
        self.stop()
        timed_out = "DataLoader timed out" in str(exception)  # torch's own limit came first
        if self.hung is None and not timed_out:
            return
        for worker in multiprocessing.active_children():
            if worker.daemon and worker not in self._others:
                worker.kill()  # also one that is stopped
        if self._alone and phase != "step" and self.checkpoint is not None and not trainer.sanity_checking:
            with suppress(Exception):
                self.checkpoint.save_between(trainer, pl_module)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Look no more."""
        self.stop()

    def _begin(self, trainer: L.Trainer) -> None:
        if self.floor and not self._place:
            self._alone = trainer.world_size == 1
            self._place = f"process {trainer.global_rank} of {trainer.world_size} (rank {trainer.global_rank})"
            if threading.current_thread() is threading.main_thread():
                signal.signal(WAKE, self._wake)
            threading.Thread(target=self._watch, daemon=True).start()

    def stop(self) -> None:
        """Look no more, whatever has ended the run."""
        self.phase = None
        self._end.set()

    def _enter(self, phase: Phase) -> None:
        now = time.monotonic()
        if self.phase is not None:
            self._times.setdefault(self.phase, deque(maxlen=64)).append(now - self._since)
        self._since, self.phase = now, phase

    def limit(self, phase: str) -> float:
        """Return how many seconds a phase may take."""
        times = list(self._times.get(phase, ()))
        most = max(self.floor, TIMES * statistics.median(times)) if len(times) > 1 else FIRST * self.floor
        return most if self._alone or "loader" in phase else LATER * most

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._end.wait(LOOK):
            now = time.monotonic()
            self._since += now - last if now - last > FROZEN else 0.0
            last = now
            phase, seconds = self.phase, now - self._since
            if phase and seconds > self.limit(phase):
                return self._tell(phase, seconds)

    def _tell(self, phase: str, seconds: float) -> None:
        self.hung = f"{self._place} hangs: its {phase} has taken {seconds:.0f} s{_workers()}"
        LOG.error("\n%s; the stacks of its threads are in %s", self.hung, self.stacks)
        with suppress(OSError), self.stacks.open("a") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        signal.pthread_kill(threading.main_thread().ident or 0, WAKE)
        if not self._end.wait(GRACE):  # in C, or in the kernel
            with suppress(Exception):
                self.on_hang(self.hung)
            os._exit(exit_code(Stopped(signal.SIGTERM)))

    def _wake(self, number: int, frame: FrameType | None) -> None:
        if self.hung is not None and not self._end.is_set():
            raise Stopped(signal.SIGTERM, self.hung)


def _workers() -> str:
    names = {"T": "stopped", "t": "stopped", "D": "waiting for a disk or a network file system", "Z": "dead"}
    found = [
        f"{child.pid} is {names[s]}" for child in multiprocessing.active_children() if (s := state(child.pid)) in names
    ]
    return f"; of the loader's workers, process {', '.join(found)}" if found else ""
