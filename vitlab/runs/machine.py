"""What a measurement was made on."""

import functools
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).resolve().parents[1]
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "sve", "asimd")
_PACKAGES = ("torch", "lightning", "timm", "torchvision", "vit-pytorch", "transformers")


def facts(device: str = "cpu") -> dict[str, Any]:
    """Return device, CPU and its vector units, versions, threads, load and commit."""
    import torch  # here: whoever asks for the processor's name alone need not wait for it

    named = _cpu_fields()
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
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
        "commit": _commit(),
    }


def cpu_name() -> str:
    """Return what the processor calls itself, or its architecture."""
    return _cpu_fields().get("model name", platform.machine())


def _cpu_fields() -> dict[str, str]:
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fields = (line.split(":", 1) for line in info.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in fields}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the commit of the code, with a mark where the code differs from it; saved measurements may."""
    commit = git("rev-parse", "--short=12", "HEAD")
    return f"{commit}-dirty" if git("status", "--porcelain", "--", ".") else commit


def git(*words: str) -> str | None:
    """Return what git says of the checkout that vitlab runs from; None where it is installed from a package.

    An installed vitlab may lie within the checkout of somebody else's repository, which says nothing of it.
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
