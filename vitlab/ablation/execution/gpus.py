"""Share the GPUs of a host between processes of a user: slots are byte ranges of a lock file, held by running cells."""

import fcntl
import itertools
import math
import os
import re
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

WAIT = 0.5  # seconds between attempts to get a slot
WHOLE = 27720  # bytes of a GPU's lock, divisible by 2 to 12
HIDDEN = ("-1", "NoDevFiles")  # entries that hide themselves and all that follow; the second is SLURM's


@dataclass(frozen=True)
class Slot:
    """A share of a host for one command: of a GPU, if there is one, and of the cores.

    Args:
        device: The GPU as CUDA_VISIBLE_DEVICES names it; None without a GPU.
        fd: The lock, which child processes inherit; None without a GPU.
        workers: How many such commands share the cores.
    """

    device: str | None = None
    fd: int | None = None
    workers: int = 1


@lru_cache(maxsize=1)
def _listed() -> dict[str, str]:
    """Return the UUID of each GPU by its number, as `nvidia-smi` lists them; in place of one that is cut, its parts."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    found: dict[str, str] = {}
    for line in done.stdout.splitlines():
        if gpu := re.match(r"GPU (\d+): .*\(UUID: (GPU-[\w-]+)\)", line):
            found[gpu[1]] = gpu[2]
        elif part := re.match(r"\s+MIG .*\(UUID: (MIG-[\w/-]+)\)", line):
            if not (last := list(found)[-1]).startswith("MIG-"):
                del found[last]
            found[part[1]] = part[1]
    return found


def visible_devices() -> list[str]:
    """Return the devices that this process may use: numbers, UUIDs or MIG names; those after a -1 are hidden."""
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        return list(_listed())
    names = [name.strip() for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",")]
    names = names[: next((i for i, name in enumerate(names) if name in HIDDEN), None)]
    return list(dict.fromkeys(name for name in names if name))


def one_name(device: str) -> str:
    """Return the name that a device has on this host, however it is written: a UUID, or the beginning of one.

    Where nothing tells its UUID, a number means another GPU in each job of SLURM, which sees its own alone.
    """
    listed = _listed()
    found = listed.get(device) or next((uuid for uuid in listed.values() if uuid.startswith(device)), None)
    return found or (f"{os.environ['SLURM_JOB_ID']}.{device}" if "SLURMD_NODENAME" in os.environ else device)


def shares_per_gpu(workers: int, per_gpu: int) -> int:
    """Return into how many slots each GPU of this host is divided, so that so many workers have one each.

    A probe takes a slot like a cell, and so measures the speed of a cell among others.
    """
    return max(per_gpu, math.ceil(workers / max(1, len(visible_devices()))))


@contextmanager
def slot(workers: int, per_gpu: int = 1, stop: Callable[[], bool] = lambda: False) -> Iterator[Slot | None]:
    """Wait for a free slot of a GPU and hold it; yield None if ``stop`` returns true.

    A process that takes a whole GPU waits for every part of it. The first part of every GPU is used before the second
    of any.

    Args:
        workers: How many commands run at a time.
        per_gpu: How many of them at least share each GPU, as of :func:`shares_per_gpu`.
        stop: Polled while waiting.
    """
    devices, shares = visible_devices(), shares_per_gpu(workers, per_gpu)
    if not devices:
        yield Slot(workers=workers)
        return
    while not stop():
        for share, device in itertools.product(range(shares), devices):
            if (fd := _locked(device, share, shares)) is not None:
                try:
                    yield Slot(device, fd, workers)
                finally:
                    os.close(fd)  # the lock ends with the last process that has it open
                return
        time.sleep(WAIT)
    yield None


def _locked(device: str, share: int, shares: int) -> int | None:
    """Lock one of the equal shares of a GPU, and return the open file; None if it is taken.

    The lock is of this opening of the file and those that inherit it, not of this process; Linux alone.
    """
    place = Path(tempfile.gettempdir()) / f"vitlab-gpus-{os.getuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    fd = os.open(place / re.sub(r"[^\w.-]", "_", one_name(device)), os.O_CREAT | os.O_RDWR, 0o600)
    start, size = share * (WHOLE // shares), WHOLE // shares
    length = size if share < shares - 1 else WHOLE - start
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, start, length, 0))
    except OSError:
        os.close(fd)
        return None
    return fd
