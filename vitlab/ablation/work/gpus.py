"""The GPUs of a host, shared by all that run cells on it: a slot is a lock file, held as long as a cell is at work."""

import fcntl
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

WAIT = 0.5  # seconds between two looks whether a slot is free


@dataclass(frozen=True)
class Slot:
    """A share of a GPU.

    Args:
        device: The GPU as CUDA_VISIBLE_DEVICES names it; None where there is none.
        fd: The lock, which the processes at work inherit; None where there is no GPU.
    """

    device: str | None = None
    fd: int | None = None


@lru_cache(maxsize=1)
def _listed() -> dict[str, str]:
    """Return the UUID of each GPU by its number, as `nvidia-smi` lists them; empty where it is not there."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return dict(re.findall(r"^GPU (\d+): .*\(UUID: (GPU-[\w-]+)\)", done.stdout, re.MULTILINE))


def visible_devices() -> list[str]:
    """Return the devices that this process may use: numbers, UUIDs or MIG names; those after a -1 are hidden."""
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        return list(_listed())
    names = [name.strip() for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",")]
    names = names[: names.index("-1")] if "-1" in names else names
    return [name for name in names if name]


def one_name(device: str) -> str:
    """Return the name that a device has on this host, however it is written: a UUID, or the beginning of one."""
    listed = _listed()
    return listed.get(device) or next((uuid for uuid in listed.values() if uuid.startswith(device)), device)


@contextmanager
def slot(shares: int, stop: Callable[[], bool] = lambda: False) -> Iterator[Slot | None]:
    """Hold a slot of a GPU that no other process of this host holds, and wait for one; None if ``stop`` says so.

    Args:
        shares: How many cells may share a GPU; the first of every GPU are taken before the second of any.
        stop: Asked again and again.
    """
    devices = visible_devices()
    if not devices:
        yield Slot()
        return
    place = Path(tempfile.gettempdir()) / f"vitlab-gpus-{os.getuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    while not stop():
        for share in range(shares):
            for device in devices:
                name = re.sub(r"[^\w.-]", "_", one_name(device))
                fd = os.open(place / f"{name}.{share}", os.O_CREAT | os.O_RDWR, 0o600)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    os.close(fd)
                    continue
                try:
                    yield Slot(device, fd)
                finally:
                    os.close(fd)  # it ends with the last process that has it
                return
        time.sleep(WAIT)
    yield None
