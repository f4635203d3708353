"""Detect a training that hangs, and report where; the guard of the command ends it."""

import faulthandler
import multiprocessing
import signal
import statistics
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import lightning as L
from lightning.pytorch.callbacks import Callback

from vitlab.callbacks.checkpoint import Checkpoint
from vitlab.errors import loader_timed_out
from vitlab.runs.guard import RECORDING, Guard, at_most, obeyed
from vitlab.runs.processes import state

Phase = Literal["loader", "step", "validation loader", "validation batch", "end"]
REPEATED = ("loader", "validation loader", "validation batch")  # what a resume does again from a consistent state
TIMES = 20.0  # a phase hangs after this multiple of its median duration
FIRST = 6.0  # the first phase of a kind, which may compile, hangs after this multiple of the floor
LATER = 1.25  # in a step, processes that wait for another allow this much more, so that it reports first
GRACE = 20.0  # seconds that the main thread has to stop


class Deadline(Callback):
    """End a run whose step, validation batch, loader or end hangs; ``look`` is for the guard of the command.

    The limit of a phase is 20 times its median duration, at least ``floor``. The error names the phase, or the hook
    that hangs between two batches, and stopped workers of the loader; the stacks of all threads go to ``train.log``. If
    a single process hangs in its loader or in a batch of a validation, its state is consistent and is saved. The run
    exits with code 75: try again.

    Args:
        stacks: File for the stacks of all threads.
        floor: Smallest limit of a phase in seconds; 0 turns the checks off.
        checkpoint: Callback that saves the state; None exits without saving.
    """

    def __init__(self, stacks: Path, floor: float, checkpoint: Checkpoint | None) -> None:
        self.stacks, self.floor, self.checkpoint = stacks, floor, checkpoint
        self.phase: str | None = None  # a Phase, or the name of the hook that hangs
        self.hung: str | None = None
        self._since = 0.0
        self._times: dict[str, deque[float]] = {}
        self._place = ""
        self._alone = True
        self._module: Any = None
        self._others: set[Any] = set()  # child processes of others, not to be killed

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Remember which process this is, and child processes that are not workers of this run: it has none yet."""
        self._others = {*multiprocessing.active_children()}
        self._alone, self._module = trainer.world_size == 1, pl_module
        self._place = f"process {trainer.global_rank} of {trainer.world_size} (rank {trainer.global_rank})"

    def on_train_start(self, *args: Any) -> None:
        """Enter the first phase of the training: wait for a batch."""
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
        obeyed()
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

    def stop(self) -> None:
        """Stop checking."""
        self.phase = None

    def _enter(self, phase: Phase) -> None:
        now = time.monotonic()
        if self.phase is not None:
            self._times.setdefault(self.phase, deque(maxlen=64)).append(now - self._since)
        self._since, self.phase = now, phase

    def limit(self, phase: str) -> float:
        """Return the limit of a phase in seconds."""
        times = list(self._times.get(phase, ()))
        limit = max(self.floor, TIMES * statistics.median(times)) if len(times) > 1 else FIRST * self.floor
        return limit if self._alone or "loader" in phase else LATER * limit

    def look(self, guard: Guard, now: float, frozen: float) -> None:
        """End the run if its phase has taken too long; called in a thread, see :attr:`Guard.looks`."""
        if frozen:
            self._since += frozen
        phase, seconds = self.phase, now - max(self._since, guard.moved)
        if not self.floor or not phase or self.hung or guard.phase == "save" or seconds <= self.limit(phase):
            return  # a checkpoint that is written has a limit of its own
        if "loader" in phase:  # so begins what is between two batches, hooks of an epoch among it
            self.phase = phase = self._module._current_fx_name or phase
        at_most(RECORDING, self._write_stacks)
        self.hung = f"{self._place} hangs: its {phase} has taken {seconds:.0f} s{_workers()}"
        guard.end(f"{self.hung}; the stacks of its threads are in {self.stacks}", GRACE)

    def _write_stacks(self) -> None:
        with self.stacks.open("a") as file:
            faulthandler.dump_traceback(file, all_threads=True)


def _workers() -> str:
    names = {"T": "stopped", "t": "stopped", "D": "waiting for a disk or a network file system", "Z": "dead"}
    stuck = [
        f"{child.pid} is {names[s]}" for child in multiprocessing.active_children() if (s := state(child.pid)) in names
    ]
    return f"; of the loader's workers, process {', '.join(stuck)}" if stuck else ""
