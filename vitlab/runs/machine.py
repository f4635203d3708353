"""Facts about this machine and the code, for records of measurements."""

import functools
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).resolve().parents[1]
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "sve", "asimd")
_PACKAGES = ("torch", "lightning", "timm", "torchvision", "vit-pytorch", "transformers")


def facts(device: str = "cpu") -> dict[str, Any]:
    """Return device, CPU and its vector units, versions, threads, load and commit."""
    import torch  # slow, and not needed for the CPU's name

    named = cpu_fields()
    words = named.get("flags", named.get("Features", "")).split()
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "cpu": cpu_name(),
        "flags": [flag for flag in _FLAGS if flag in words],
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": list(os.getloadavg()) if hasattr(os, "getloadavg") else [],
        "python": platform.python_version(),
        "platform": sys.platform,
        "versions": installed_versions(_PACKAGES),
        "commit": _commit(),
    }


def cpu_name() -> str:
    """Return the model name of the CPU, or its architecture."""
    return cpu_fields().get("model name", platform.machine())


def cpu_fields() -> dict[str, str]:
    """Return what Linux tells of the CPU, such as ``vendor_id``; nothing elsewhere.

    Example:
        >>> all(isinstance(value, str) for value in cpu_fields().values())
        True
    """
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    first, _, _ = info.partition("\n\n")  # of hundreds of cores, which say the same
    fields = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in fields}


def own_version() -> str:
    """Return vitlab's version; the package's face, which has it, is above all rooms.

    Example:
        >>> own_version()[0].isdigit()
        True
    """
    return str(sys.modules["vitlab"].__version__)


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed.

    Example:
        >>> list(installed_versions(["torch", "no-such-package"]))
        ['torch']
    """
    found = {}
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _commit() -> str | None:
    """Return the commit of the code, marked as dirty if the code differs from it."""
    commit = git("rev-parse", "--short=12", "HEAD")
    return f"{commit}-dirty" if uncommitted_code() else commit


def uncommitted_code() -> str | None:
    """Return the diff of vitlab's code, tests and pages aside, from its commit; None as for :func:`git`.

    Example:
        >>> isinstance(uncommitted_code(), str | None)
        True
    """
    return git("diff", "HEAD", "--no-ext-diff", "--", ".")


def git(*words: str) -> str | None:
    """Return the output of git for the checkout that vitlab runs from; None if vitlab is an installed package.

    An installed vitlab may lie inside the checkout of another repository, which does not count.
    """
    return _run_git(*words) if _is_checkout() else None


@functools.cache
def _is_checkout() -> bool:
    return _run_git("rev-parse", "--show-toplevel") == str(_PACKAGE.parent)


def _run_git(*words: str) -> str | None:
    try:
        return subprocess.run(
            ["git", "-C", str(_PACKAGE), *words], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
