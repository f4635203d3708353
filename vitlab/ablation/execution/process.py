"""Run a vitlab command in a separate process."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitlab.ablation.execution.gpus import Slot, visible_devices
from vitlab.ablation.execution.identity import code_digest
from vitlab.ablation.execution.warm import Child, Server
from vitlab.ablation.file.settings import Execution
from vitlab.config.environment import NAME
from vitlab.errors import printable
from vitlab.runs.lock import HeldLock
from vitlab.runs.processes import start_time

TIMEOUT, STOPPED = -1000, -1001  # instead of an exit code
KINDS = (  # kinds of failure and their patterns, in the last lines of a log or the error of a run
    ("diverged", r"FloatingPointError|loss is (nan|inf)|diverged"),
    ("out of memory", r"out of memory|MemoryError|Cannot allocate memory"),
    ("disk full", r"No space left on device|Disk quota exceeded"),
)
PATIENCE = 60.0  # seconds to save in
VITLAB = [sys.executable, "-m", "vitlab"]
READ_AT_START = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONPATH", "PYTHONHASHSEED", "LD_LIBRARY_PATH", "LD_PRELOAD")


def child_environment(slot: Slot, **more: str) -> dict[str, str]:
    """Return the environment of a child: its share of the cores (OMP_NUM_THREADS at most), its device."""
    env = {k: v for k, v in os.environ.items() if k != "VITLAB_RUN_DIR" and not NAME.fullmatch(k)}
    threads, asked = max(1, core_count() // slot.workers), env.get("OMP_NUM_THREADS", "")
    env["OMP_NUM_THREADS"] = str(min(threads, int(asked) or threads) if asked.isdigit() else threads)
    if slot.device is not None:
        env["CUDA_VISIBLE_DEVICES"] = slot.device
    return {**env, **more}


def core_count() -> int:
    """Return the number of cores that this process may use, which on a cluster are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def worker_count(workers: int | str, per_gpu: int) -> int:
    """Return the number of cells to work on at a time."""
    if workers != "auto":
        return int(workers)
    return len(visible_devices()) * per_gpu or max(1, core_count() // 2)


@dataclass(frozen=True)
class Seat:
    """What a command works with, and how long it may.

    Args:
        slot: Its share of the host; it inherits the lock, and so holds the slot as long as it runs.
        claim: The claim that it works under, whose lock it inherits, too.
        stop: Polled; true ends the command.
    """

    slot: Slot
    claim: HeldLock | None = None
    stop: Callable[[], bool] = lambda: False


def run_in_slot(
    words: list[str], log: Path, run: Execution, seat: Seat, more: Mapping[str, str] = {}
) -> tuple[int, list[str]]:
    """Run a command to its end on the GPU of a slot; return its exit code and the last lines of its output.

    It runs in its own process group, so that Ctrl-C does not reach it.

    Args:
        words: The command.
        log: File to append its output to.
        run: How the file of the ablation says to run: its `timeout` and `fork`.
        seat: What it works with.
        more: Variables of its environment beside those of this process.
    """
    env, claim = child_environment(seat.slot, **more), seat.claim
    fds = [fd for fd in (claim.fd if claim else None, seat.slot.fd) if fd is not None]
    deadline = time.monotonic() + run.timeout if run.timeout else None
    with log.open("ab") as out:
        began = out.tell()
        child = _start(words, env, out.fileno(), fds, run.fork)
        if claim:
            claim.note(child=child.pid, child_started=start_time(child.pid))
        code = _wait(child, deadline, lambda: seat.stop() or bool(claim and claim.lost))
    with log.open("rb") as written:
        written.seek(began)
        lines = written.read().decode(errors="replace").splitlines()[-40:]
    return code, lines


def failure_kind(code: int, lines: list[str], record: Mapping[str, Any]) -> str:
    """Return what ended a command, from the error that the run recorded and the last lines that it printed."""
    if code == TIMEOUT:
        return "time-out"
    told = [*lines, str(record.get("error", ""))] if record.get("status") == "failed" else lines
    for kind, pattern in KINDS:
        if any(re.search(pattern, line, re.IGNORECASE) for line in told):
            return kind
    if code == 0:
        return "no result"
    return {75: "pre-empted", 2: "wrong input", -9: "killed", 137: "killed"}.get(code, f"exit code {code}")


def _start(
    words: list[str], env: Mapping[str, str], out: int, fds: list[int], fork: bool
) -> "subprocess.Popen[bytes] | Child":
    """Start a command in a session of its own, with the locks that it inherits.

    With ``fork``, a command of this Python's vitlab is forked from a process that has imported it.
    """
    if fork and words[:3] == VITLAB and sys.platform == "linux":
        server = _server(env)
        try:
            return server.start(words[3:], env, out, fds)
        except OSError:
            if not _warned:
                _warned.append(f"cells start as new processes, which is slower, as forking failed: {server.why()}")
                sys.stderr.write(f"vitlab: {printable(_warned[0])}\n")
    return subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=out,
        env=dict(env),
        start_new_session=True,
        pass_fds=fds,
    )


_servers: dict[tuple[str | None, ...], Server] = {}
_warned: list[str] = []  # warn once
_mutex = threading.Lock()


def _server(env: Mapping[str, str]) -> Server:
    """Return the process that forks for commands of an environment; what a child cannot change must be equal.

    That is also the code that it has imported, and the directory in which it began, where Python looks first.
    """
    key = *(env.get(name) for name in READ_AT_START), os.getcwd(), code_digest()
    with _mutex:
        if key not in _servers or _servers[key].has_ended():
            _servers[key] = Server(env)
        return _servers[key]


def _wait(child: "subprocess.Popen[bytes] | Child", deadline: float | None, stop: Callable[[], bool]) -> int:
    while True:
        with suppress(subprocess.TimeoutExpired):
            return child.wait(timeout=0.2)
        if deadline and time.monotonic() > deadline:
            _end(child)
            return TIMEOUT
        if stop():
            _end(child)
            return STOPPED


def _end(child: "subprocess.Popen[bytes] | Child") -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with suppress(subprocess.TimeoutExpired):
            child.wait(timeout=PATIENCE)
            return
