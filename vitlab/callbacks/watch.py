"""Processes of one run that look after each other: when one is lost the others end, and say which."""

import json
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from vitlab.errors import Stopped
from vitlab.runs.launch import CONNECTED
from vitlab.runs.processes import is_running

LOG = logging.getLogger("vitlab")
SILENT = "VITLAB_RANK_TIMEOUT"
BEAT = 1.0  # seconds between two looks
FROZEN = 5.0  # seconds without a look after which this process itself was stopped, as by Ctrl-Z
ALONE = 20.0  # seconds that a process without its launcher has to save and leave
LEAVING = 5.0  # seconds that the processes this one has started have to leave after it was stopped or has failed


class Watch(Callback):
    """End this process when another of its run was killed, stopped or lost, and when its launcher has died.

    A dead process closes its connections, which gloo and NCCL report without a name or, where it hangs, after the
    time-out of the group. Here each process counts in a store of its own and reads the others' counts from a thread,
    so one that computes or saves is not taken for a dead one. ``VITLAB_RANK_TIMEOUT`` is the silence in seconds after
    which a process counts as lost (30).

    Args:
        on_loss: Called by the first process that is left, before it ends, with what has happened.

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
        self._silent: int | None = None  # the rank of a process that is lost
        self._answered = 0.0  # when the store last did
        self._server: dist.TCPStore | None = None
        self._children: list[subprocess.Popen[bytes]] = []

    def setup(self, trainer: Any, pl_module: L.LightningModule, stage: str) -> None:
        """Start watching; the processes have met."""
        CONNECTED.set()
        if trainer.world_size == 1:
            return
        self.rank, self.world = trainer.global_rank, trainer.world_size
        self._take_children(trainer)
        if self.rank == 0:
            self._server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = trainer.strategy.broadcast(self._server.port if self._server else None)
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        self.store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=self.patience))
        self.store.set(self._key(self.rank), json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        trainer.strategy.barrier("vitlab watch")
        self.peers = {r: json.loads(self.store.get(self._key(r))) for r in range(self.world) if r != self.rank}
        self._thread.start()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Stop watching, once all have come to the end."""
        if self._thread.is_alive():
            with suppress(Exception):  # the store may have ended first
                trainer.strategy.barrier("vitlab end")
            self._say_bye()
            self._stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Leave, and leave no process behind; if what failed was talking to a lost one, the thread names it first."""
        have_met = self._thread.is_alive()
        if have_met:
            if isinstance(exception, RuntimeError) and _is_about_peers(exception):
                self._thread.join(self.patience + 10)  # it ends this process, too
            elif isinstance(exception, Stopped | KeyboardInterrupt):  # all leave together
                self._say_bye()
            self._stop()
        self._take_children(trainer)
        self._end_children(LEAVING if have_met else 0)  # before that they have nothing to put in order

    def _take_children(self, trainer: Any) -> None:
        """Look after the processes that Lightning has started; it would kill this one soon after one of them fails."""
        started = getattr(trainer.strategy.launcher, "procs", [])
        self._children += started
        started.clear()

    def _end_children(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        for child in self._children:
            try:
                child.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()  # also what is stopped

    def _say_bye(self) -> None:
        with suppress(Exception):  # the store may have ended first
            self.store.set(f"bye{self.rank}", "1")

    def _stop(self) -> None:
        """End the thread: an interpreter that ends during one of its calls to the store is aborted by C++."""
        self._end.set()
        self._thread.join(5)

    def _key(self, rank: int) -> str:
        return f"process{rank}"

    def _watch(self, parent: int) -> None:
        """Look at the launcher and at the clock; a call to the store of a frozen process returns to nobody."""
        self._answered = last = time.monotonic()
        asking = threading.Thread(target=self._ask, daemon=True)
        asking.start()
        while not self._end.wait(BEAT):
            now = time.monotonic()
            self._answered += now - last if now - last > FROZEN else 0.0  # this process was stopped itself
            last = now
            if os.getppid() != parent:
                return self._leave_alone() if "TORCHELASTIC_RUN_ID" in os.environ else self._leave(0)
            if self._silent is None and now - self._answered > self.patience + 2 * BEAT:
                self._silent = 0  # the store is the first process's
            if self._silent is not None and not self._end.is_set():
                return self._leave(self._silent)
        asking.join(5)

    def _ask(self) -> None:
        """Count in the store, and read what the others have counted."""
        counts: dict[int, tuple[int, float]] = {}
        count = 0
        last = time.monotonic()
        while not self._end.wait(BEAT):
            now = time.monotonic()
            if now - last > FROZEN:
                counts = {}
            count += 1
            self._silent = self._lost(counts, count)
            self._answered = last = time.monotonic()
            if self._silent is not None:
                return

    def _lost(self, counts: dict[int, tuple[int, float]], count: int) -> int | None:
        """Return the rank of a process that is gone or silent; None if all are there."""
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
        except Exception:  # the store is the first process's: it kept silent for as long as we wait
            return None if self._end.is_set() else 0
        return None

    def _said_bye(self, rank: int) -> bool:
        try:
            return self.store.check([f"bye{rank}"])
        except Exception:  # the store has gone with the first process
            return self._end.is_set()

    def _leave(self, lost: int) -> None:
        peer = self.peers.get(lost, {"pid": "?", "host": "?"})
        gone = peer["host"] == socket.gethostname() and not is_running(peer["pid"])
        what = "has ended" if gone else f"has not answered for {self.patience:.0f} s"
        self.loss = f"process {lost} of {self.world} (rank {lost}, pid {peer['pid']} on {peer['host']}) {what}"
        if self.rank == min(r for r in range(self.world) if r != lost):
            with suppress(Exception):
                self.on_loss(self.loss)
        self._end_children(0)
        os._exit(1)

    def _leave_alone(self) -> None:
        """End after torchrun, which has started all processes, in good order if they can."""
        os.kill(os.getpid(), signal.SIGTERM)
        self._end.wait(ALONE)
        os._exit(1)


def _is_about_peers(error: BaseException) -> bool:
    text = f"{type(error).__name__} {error}".lower()
    return any(word in text for word in ("gloo", "nccl", "connection", "socket", "distbackend", "timed out"))
