"""Detect a run that hangs, report where, and end it."""

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
from vitlab.errors import Stopped, exit_code, loader_timed_out
from vitlab.runs.interrupt import WAKE, beats
from vitlab.runs.processes import state

LOG = logging.getLogger("vitlab")
Phase = Literal["loader", "step", "validation loader", "validation batch", "end"]
REPEATED = ("loader", "validation loader", "validation batch")  # what a resume does again from a consistent state
TIMES = 20.0  # a phase hangs after this multiple of its median duration
FIRST = 6.0  # the first phase of a kind, which may compile, hangs after this multiple of the floor
LATER = 1.25  # in a step, processes that wait for another allow this much more, so that it reports first
LOOK = 1.0  # seconds between two checks
GRACE = 20.0  # seconds that the main thread has to leave


class Deadline(Callback):
    """End a run whose step, validation batch, loader or end hangs; a thread checks.

    The limit of a phase is 20 times its median duration, at least ``floor``. The error names the phase, or the hook
    that hangs between two batches, and stopped workers of the loader; the stacks of all threads go to ``train.log``. If
    a single process hangs in its loader or in a batch of a validation, its state is consistent and is saved. The run
    exits with code 75: try again.

    Args:
        stacks: File for the stacks of all threads.
        floor: Smallest limit of a phase in seconds; 0 turns the checks off.
        checkpoint: Callback that saves the state; None exits without saving.
        on_hang: Function called with the error if the process has to exit without its main thread.
    """

    def __init__(
        self,
        stacks: Path,
        floor: float,
        checkpoint: Checkpoint | None,
        on_hang: Callable[[str], None] = lambda what: None,
    ) -> None:
        self.stacks, self.floor, self.checkpoint, self.on_hang = stacks, floor, checkpoint, on_hang
        self.phase: str | None = None  # a Phase, or the name of the hook that hangs
        self.hung: str | None = None
        self._since = 0.0
        self._times: dict[str, deque[float]] = {}
        self._end = threading.Event()
        self._place = ""
        self._alone = True
        self._module: Any = None
        self._before: Any = None
        self._others: set[Any] = set()  # child processes of others, not to be killed

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Remember child processes that are not workers of this run, which has started none yet."""
        self._others = {*multiprocessing.active_children()}

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start checking."""
        self._begin(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start checking."""
        self._begin(trainer)
        self._enter("loader")

    def on_train_batch_start(self, *args: Any) -> None:
        """Enter the next phase: a batch has arrived."""
        self._enter("step")

    def on_train_batch_end(self, *args: Any) -> None:
        """Enter the next phase: wait for a batch."""
        self._enter("loader")

    def on_validation_start(self, *args: Any) -> None:
        """Enter the next phase: wait for a batch."""
        self._enter("validation loader")

    def on_validation_batch_start(self, *args: Any) -> None:
        """Enter the next phase: a batch has arrived."""
        self._enter("validation batch")

    def on_validation_batch_end(self, *args: Any) -> None:
        """Enter the next phase: wait for a batch."""
        self._enter("validation loader")

    def on_validation_end(self, *args: Any) -> None:
        """Enter the next phase: training waits for a batch."""
        self._enter("loader")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Enter the last phase, which begins after the last epoch was saved."""
        self._enter("end")

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Save the state if it is consistent, and kill workers that would block the exit."""
        phase = self.phase
        self.stop()
        if self.hung is None and not loader_timed_out(exception):  # or torch's own limit came first
            return
        self._kill_workers()
        if self._alone and phase in REPEATED and self.checkpoint is not None and not trainer.sanity_checking:
            with suppress(Exception):
                self.checkpoint.save_between(trainer, pl_module)

    def _kill_workers(self) -> None:
        """Kill the workers of the loader, unheard by torch's handler of SIGCHLD, which raises when one dies."""
        is_main = threading.current_thread() is threading.main_thread()
        handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL) if is_main else None
        for worker in multiprocessing.active_children():
            if worker.daemon and worker not in self._others:
                worker.kill()  # works for stopped workers, too
                worker.join(1)
        if is_main:
            signal.signal(signal.SIGCHLD, handler or signal.SIG_DFL)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Stop checking."""
        self.stop()

    def _begin(self, trainer: L.Trainer) -> None:
        if self.floor and not self._place:
            self._alone, self._module = trainer.world_size == 1, trainer.lightning_module
            self._place = f"process {trainer.global_rank} of {trainer.world_size} (rank {trainer.global_rank})"
            if threading.current_thread() is threading.main_thread():
                self._before = signal.signal(WAKE, self._wake)
            threading.Thread(target=self._watch, daemon=True).start()

    def stop(self) -> None:
        """Stop checking."""
        self.phase = None
        self._end.set()

    def _enter(self, phase: Phase) -> None:
        now = time.monotonic()
        if self.phase is not None:
            self._times.setdefault(self.phase, deque(maxlen=64)).append(now - self._since)
        self._since, self.phase = now, phase

    def goes_on(self) -> None:
        """Note that what other callbacks do within a phase goes on: its limit counts from now."""
        self._since = time.monotonic()

    def limit(self, phase: str) -> float:
        """Return the limit of a phase in seconds."""
        times = list(self._times.get(phase, ()))
        limit = max(self.floor, TIMES * statistics.median(times)) if len(times) > 1 else FIRST * self.floor
        return limit if self._alone or "loader" in phase else LATER * limit

    def _watch(self) -> None:
        for now, frozen in beats(self._end, LOOK):
            if frozen:
                self._since += frozen
            phase, seconds = self.phase, now - self._since
            if phase and seconds > self.limit(phase):
                return self._report(phase, seconds)

    def _report(self, phase: str, seconds: float) -> None:
        if "loader" in phase:  # so begins what is between two batches, hooks of an epoch among it
            self.phase = phase = self._module._current_fx_name or phase
        self.hung = f"{self._place} hangs: its {phase} has taken {seconds:.0f} s{_workers()}"
        LOG.error("\n%s; the stacks of its threads are in %s", self.hung, self.stacks)
        with suppress(OSError), self.stacks.open("a") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        signal.pthread_kill(threading.main_thread().ident or 0, WAKE)
        if not self._end.wait(GRACE):  # the main thread is in C code or in the kernel
            with suppress(Exception):
                self.on_hang(self.hung)
            os._exit(exit_code(Stopped(signal.SIGTERM)))

    def _wake(self, number: int, frame: FrameType | None) -> None:
        if self.hung is not None and not self._end.is_set():
            raise Stopped(signal.SIGTERM, self.hung)
        if callable(self._before):  # of the guard of the command
            self._before(number, frame)


def _workers() -> str:
    names = {"T": "stopped", "t": "stopped", "D": "waiting for a disk or a network file system", "Z": "dead"}
    stuck = [
        f"{child.pid} is {names[s]}" for child in multiprocessing.active_children() if (s := state(child.pid)) in names
    ]
    return f"; of the loader's workers, process {', '.join(stuck)}" if stuck else ""
