"""Supervise the processes of one run: if one is lost, the others end and report which."""

import json
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from vitlab.errors import Stopped
from vitlab.runs.guard import Guard, at_most, end_process
from vitlab.runs.interrupt import FROZEN, beats
from vitlab.runs.launch import is_about_peers
from vitlab.runs.processes import is_running, state

LOG = logging.getLogger("vitlab")
SILENT = "VITLAB_RANK_TIMEOUT"
BEAT = 1.0  # seconds between two checks
ALONE = 20.0  # seconds that a process has to save and exit once its launcher is gone
LEAVING = 5.0  # seconds that the others have to exit after a process of the run has ended
RECORDING = 10.0  # seconds for the last line and record of a run that has lost a process


class Watch(Callback):
    """End this process when another process of its run was killed, stopped or lost, or its launcher has died.

    Gloo and NCCL report a dead process without its rank, and one that hangs only after the time-out of the group. Here
    a thread of each process increments a counter in a separate store and reads the counters of the others, so a process
    that computes or saves is not mistaken for a dead one. A process is lost after ``VITLAB_RANK_TIMEOUT`` seconds of
    silence (30).

    Args:
        on_loss: Function that the first remaining process calls with the error before it ends.

    Example:
        >>> Watch(on_loss=print).patience  # seconds
        30.0
    """

    def __init__(self, on_loss: Callable[[str], None]) -> None:
        self.on_loss = on_loss
        self.patience = float(os.environ.get(SILENT) or 30.0)
        self.loss: str | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(os.getppid(),), daemon=True)
        self._lost_rank: int | None = None  # rank of a lost process
        self._answered = 0.0  # time of the last answer of the store
        self._server: dist.TCPStore | None = None
        self._children: list[subprocess.Popen[bytes]] = []
        self._connected = False  # whether all watch each other
        self._launcher = int(os.environ.get("VITLAB_LAUNCHER") or 0)
        self._stopped: dict[int, float] = {}  # processes that are stopped before that, and since when
        self._gone: tuple[str, float] | None = None  # one that has ended before, and when this was seen

    def setup(self, trainer: Any, pl_module: L.LightningModule, stage: str) -> None:
        """Start watching: all processes are connected."""
        if trainer.world_size == 1:
            self._connected = True
            return
        self.rank, self.world = trainer.global_rank, trainer.world_size
        self.adopt_children(trainer)
        if self.rank == 0:
            self._server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = trainer.strategy.broadcast(self._server.port if self._server else None)
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        self.store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=self.patience))
        self.store.set(f"process{self.rank}", json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        trainer.strategy.barrier("vitlab watch")
        self.peers = {r: json.loads(self.store.get(f"process{r}")) for r in range(self.world) if r != self.rank}
        self._thread.start()
        self._connected = True

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Stop watching, once all processes have finished."""
        if self._thread.is_alive():
            with suppress(Exception):  # the store may have ended first
                trainer.strategy.barrier("vitlab end")
            self._say_bye()
            self._stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """End all child processes; if communication with a lost process failed, let the thread report it first."""
        connected = self._thread.is_alive()
        if connected:
            if is_about_peers(exception):
                self._thread.join(self.patience + 10)  # the thread ends this process
            elif isinstance(exception, Stopped | KeyboardInterrupt):  # all processes leave together
                self._say_bye()
            self._stop()
        self.adopt_children(trainer)
        self._end_children(LEAVING if connected else 0)  # earlier they have nothing to save

    def adopt_children(self, trainer: Any) -> list[subprocess.Popen[bytes]]:
        """Take over the processes that Lightning has started: it would kill this one when one of them fails."""
        started = getattr(trainer.strategy.launcher, "procs", [])
        self._children += [child for child in started if child not in self._children]
        started.clear()
        return self._children

    def look(self, guard: Guard, now: float, frozen: float) -> None:
        """End this process if another of this machine is lost before all watch each other; see :attr:`Guard.looks`."""
        if self._connected:
            return
        if self._launcher and not is_running(self._launcher):  # it would wait in vain
            end_process(1)
        if frozen:
            self._stopped.clear()
        if lost := self._lost_before(guard.children(), now):
            guard.leave(f"{lost}; the run ends", 1, "error")

    def _lost_before(self, children: Sequence[subprocess.Popen[bytes]], now: float) -> str | None:
        """Return which process of the run on this machine has ended or is stopped."""
        for rank, child in enumerate(children, 1):
            if child.poll() is not None and self._gone is None:
                ended = f"a signal ({-child.returncode})" if child.returncode < 0 else f"exit code {child.returncode}"
                self._gone = f"process {rank} (rank {rank}, pid {child.pid}) has ended with {ended}", now
        if self._gone is not None and now - self._gone[1] > LEAVING:
            return self._gone[0]
        pids = {rank: child.pid for rank, child in enumerate(children, 1)} or {0: self._launcher}
        for rank, pid in pids.items():
            if state(pid) not in ("T", "t"):
                self._stopped.pop(pid, None)
            elif now - self._stopped.setdefault(pid, now) > self.patience:
                return f"process {rank} (rank {rank}, pid {pid}) is stopped for {self.patience:.0f} s"
        return None

    def _end_children(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        for child in self._children:
            try:
                child.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()  # works for stopped processes, too

    def _say_bye(self) -> None:
        with suppress(Exception):  # the store may have ended first
            self.store.set(f"bye{self.rank}", "1")

    def _stop(self) -> None:
        """End the thread: C++ aborts an interpreter that exits while the thread calls the store."""
        self._end.set()
        self._thread.join(5)

    def _watch(self, parent: int) -> None:
        """Check the launcher and the time of the last answer; another thread asks the store, which may never answer."""
        self._answered = time.monotonic()
        poll = threading.Thread(target=self._poll, daemon=True)
        poll.start()
        for now, frozen in beats(self._end, BEAT):
            if frozen:
                self._answered += frozen
            if os.getppid() != parent:
                return self._leave_after_launcher() if "TORCHELASTIC_RUN_ID" in os.environ else self._leave(0)
            if self._lost_rank is None and now - self._answered > self.patience + 2 * BEAT:
                self._lost_rank = 0  # which holds the store
            if self._lost_rank is not None and not self._end.is_set():
                return self._leave(self._lost_rank)
        poll.join(5)

    def _poll(self) -> None:
        """Increment the counter of this process, and read those of the others.

        Its clock begins anew after each answer: by that of ``beats``, a store that is slow would look like a process
        that was stopped itself, and no other would ever be lost.
        """
        counts: dict[int, tuple[int, float]] = {}
        count = 0
        last = time.monotonic()
        while not self._end.wait(BEAT):
            if time.monotonic() - last > FROZEN:
                counts = {}
            count += 1
            self._lost_rank = self._find_lost(counts, count)
            self._answered = last = time.monotonic()
            if self._lost_rank is not None:
                return

    def _find_lost(self, counts: dict[int, tuple[int, float]], count: int) -> int | None:
        """Return the rank of a process that has ended or is silent; None if there is none."""
        for rank, peer in self.peers.items():
            here = peer["host"] == socket.gethostname()
            if here and not is_running(peer["pid"]) and not self._said_bye(rank):
                return rank
        try:
            self.store.set(f"count{self.rank}", str(count))
            for rank in self.peers:
                seen = int(self.store.get(f"count{rank}")) if self.store.check([f"count{rank}"]) else 0
                before, when = counts.get(rank, (-1, time.monotonic()))
                counts[rank] = (seen, time.monotonic() if seen != before else when)
                if time.monotonic() - counts[rank][1] > self.patience and not self._said_bye(rank):
                    return rank
        except Exception:  # rank 0 holds the store, and has not answered for ``patience``
            return None if self._end.is_set() else 0
        return None

    def _said_bye(self, rank: int) -> bool:
        try:
            return self.store.check([f"bye{rank}"])
        except Exception:  # the store ended with rank 0
            return self._end.is_set()

    def _leave(self, lost: int) -> None:
        peer = self.peers.get(lost, {"pid": "?", "host": "?"})
        gone = peer["host"] == socket.gethostname() and not is_running(peer["pid"])
        what = "has ended" if gone else f"has not answered for {self.patience:.0f} s"
        self.loss = f"process {lost} of {self.world} (rank {lost}, pid {peer['pid']} on {peer['host']}) {what}"
        if self.rank == min(r for r in range(self.world) if r != lost):
            at_most(RECORDING, partial(self.on_loss, self.loss))
        end_process(1, self._children)

    def _leave_after_launcher(self) -> None:
        """Exit after torchrun has died: gracefully within ``ALONE`` seconds, then by force."""
        os.kill(os.getpid(), signal.SIGTERM)
        self._end.wait(ALONE)
        end_process(1, self._children)
