"""Facts about the processes of this machine, and the settings of this one."""

import contextlib
import ctypes
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SETTINGS = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS", "CUBLAS_WORKSPACE_CONFIG", "OMP_NUM_THREADS")  # Lightning sets them


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


@dataclass
class AsItWas:
    """What :func:`as_it_was` puts back.

    Args:
        random: Whether random numbers go on where they were before.
    """

    random: bool = True


@contextlib.contextmanager
def as_it_was() -> Iterator[AsItWas]:
    """Put back random numbers, their seed, threads and deterministic algorithms of this process.

    A run is built with its own seed and settings, as if it had the process for itself. What the caller of the library
    draws or trains afterwards must not depend on that.

    Example:
        >>> import torch
        >>> before = torch.get_rng_state()
        >>> with as_it_was():
        ...     _ = torch.manual_seed(7)
        >>> torch.equal(torch.get_rng_state(), before)
        True
    """
    import numpy as np
    import torch

    variables = {name: os.environ.get(name) for name in SETTINGS}
    drawn = torch.get_rng_state(), np.random.get_state(), random.getstate()
    seed, on_gpus = torch.initial_seed(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    kept = AsItWas()
    try:
        yield kept
    finally:
        for name, value in variables.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        now = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        if now != deterministic:
            torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
        torch.backends.cudnn.benchmark = benchmark
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if kept.random:
            if on_gpus is None:
                torch.manual_seed(seed)  # of GPUs that were not in use, and draw from it when they are
            else:
                torch.cuda.set_rng_state_all(on_gpus)
            torch.set_rng_state(drawn[0])
            np.random.set_state(drawn[1])
            random.setstate(drawn[2])
