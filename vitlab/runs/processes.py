"""Facts about the processes of this machine."""

import contextlib
import ctypes
import os
from pathlib import Path


def is_running(pid: int) -> bool:
    """Return whether a process exists, even if stopped; a zombie does not count."""
    stat = proc_stat(pid)
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
    found = proc_stat(pid) if pid else None
    return found[0] if found else None


def start_time(pid: int) -> str | None:
    """Return the start time of a process in ticks since boot; None if the system does not provide it."""
    stat = proc_stat(pid)
    return stat[19] if stat else None


def proc_stat(pid: int) -> list[str] | None:
    """Return the fields of ``/proc/PID/stat`` behind the name, from the state on; None where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def keep_freed_memory() -> None:
    """Keep freed memory in this process, so that the next training step need not ask the system for it again.

    A step frees all its activations. glibc would return their pages, and the system would clear each of them before it
    is used again: a tenth of the time of a small network on a CPU. Without glibc nothing is changed.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD: a mapping of its own only above 32 MiB, the most that glibc takes
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: nothing below 2 GiB is returned
