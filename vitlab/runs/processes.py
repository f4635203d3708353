"""Facts about the processes of this machine."""

import contextlib
import ctypes
import multiprocessing
import os
import time
from pathlib import Path


def is_running(pid: int) -> bool:
    """Return whether a process exists, even if stopped; a zombie does not count."""
    stat = _stat(pid)
    if stat is not None:
        return stat[0] not in ("Z", "X")
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return pid > 0


def state(pid: int | None) -> str | None:
    """Return the system's letter for the state of a process: T is stopped, D waits for a disk, Z is a zombie."""
    found = _stat(pid) if pid else None
    return found[0] if found else None


def start_time(pid: int) -> str | None:
    """Return the start time of a process in ticks since boot; None if the system does not provide it."""
    stat = _stat(pid)
    return stat[19] if stat else None


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its multiprocessing children, including those that ended."""
    ended, ticks = os.times()[2:4], os.sysconf("SC_CLK_TCK")
    stats = [stat for child in multiprocessing.active_children() if child.pid and (stat := _stat(child.pid))]
    return time.process_time() + sum(ended) + sum(int(stat[11]) + int(stat[12]) for stat in stats) / ticks


def keep_freed_memory() -> None:
    """Keep freed memory in this process, so that the next training step need not ask the system for it again.

    A step frees all its activations. glibc would return their pages, and the system would clear each of them before it
    is used again: a tenth of the time of a small network on a CPU. Without glibc nothing is changed.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD: a mapping of its own only above 32 MiB, the most that glibc takes
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: nothing below 2 GiB is returned


def _stat(pid: int) -> list[str] | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
