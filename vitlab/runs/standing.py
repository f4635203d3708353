"""Whether a stored number belongs to the weights that lie in the run now; all readers of ``results.json`` ask here."""

import json
import os
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vitlab.runs.manifest import NAME, file_digest, noted, read_manifest
from vitlab.runs.matching import is_there

CHOICE = ("best", "last", "previous")  # which checkpoint of a run is used, in this order
KNOWN = ".digests.json"  # checksums of files that the manifest does not know by size and time, such as copies


class Standing(NamedTuple):
    """How a stored number stands to the weights of its run.

    Args:
        kind: ``current``; ``other``, of another checkpoint of the run as it lies there; ``gone``, of a checkpoint that
            was deleted and cannot be compared; ``unknown``, of a result without a checksum; or ``stale``.
        text: What to say beside the number, or in its place if it is stale; empty if it is current.

    Example:
        >>> standing(Path("runs/first"), {"checkpoint": "best.ckpt", "sha256": 64 * "0"}, "vitlab test first")
        Standing(kind='stale', text='measured before it went on; run `vitlab test first`')
    """

    kind: Literal["current", "other", "gone", "unknown", "stale"]
    text: str = ""

    @property
    def is_stale(self) -> bool:
        """Whether the number is not that of the checkpoint it names, as it lies there now."""
        return self.kind == "stale"


def standing(run: Path, result: Mapping[str, Any], again: str, read: bool = True) -> Standing:
    """Compare the checksum that a result was stored with to those of the run's checkpoints.

    No checkpoint is read whose size and time are those in the manifest.

    Args:
        run: The run directory.
        result: What was stored, with ``checkpoint``, a file name, and its ``sha256``.
        again: The command that measures again.
        read: Whether to read a checkpoint of another size or time, such as a copy; else the answer is ``unknown``.
    """
    name, digest = str(result.get("checkpoint", "")), str(result.get("sha256"))
    if not re.fullmatch("[0-9a-f]{64}", digest):
        return Standing(
            "unknown", f"measured without noting the checkpoint's checksum, maybe of older weights; `{again}` tells"
        )
    used = next((stem for stem in CHOICE if is_there(run / "checkpoints" / f"{stem}.ckpt")), None)
    used = used or next((stem for stem in CHOICE if _present(run, stem)), None)
    if used is None:
        return Standing("gone", "measured with a checkpoint that was deleted: nothing is left to compare it with")
    compared = [run / "checkpoints" / f"{stem}.ckpt" for stem in (used, Path(name).stem)]
    if not read and any(is_there(path) and not _noted(path) for path in compared):
        show = shlex.join(["vitlab", "runs", "show", str(run)])
        text = f"not compared: {used}.ckpt is not the file that its manifest notes; `{show}` reads it"
        return Standing("unknown", text)
    if digest == _present(run, used):
        return Standing("current")
    named = _present(run, Path(name).stem)
    if digest == named:
        return Standing("other", f"measured with {name}; `{again}` measures {used}.ckpt")
    if named is None:
        return Standing("stale", f"measured with {name}, which was deleted; run `{again}`")
    return Standing("stale", f"measured before it went on; run `{again}`")


def checksum(path: Path) -> str | None:
    """Return the sha256 of a checkpoint, for weights that of the checkpoint they were taken from; None if unknown."""
    return _origin(path) if path.suffix == ".safetensors" else _digest(path)


def _present(run: Path, stem: str) -> str | None:
    """Return the checksum of a checkpoint as it lies there; if it was deleted, what weights or manifest tell of it."""
    path = run / "checkpoints" / f"{stem}.ckpt"
    if is_there(path):
        return _digest(path)
    weights = run / "weights" / f"{stem}.safetensors"
    return _origin(weights) or read_manifest(path.parent).get(path.name, {}).get("sha256")


def _origin(weights: Path) -> str | None:
    """Return the checksum of the checkpoint that a safetensors file was written from; older files do not tell."""
    from safetensors import SafetensorError, safe_open

    with suppress(OSError, SafetensorError), safe_open(weights, framework="numpy") as file:
        return (file.metadata() or {}).get("checkpoint")
    return None


def _noted(path: Path) -> str | None:
    """Return the sha256 that is noted for a checkpoint as it lies there, by its size and time; None if none is."""
    known = _read(path.with_name(KNOWN)).get(path.name, {})  # by name: `touch` gives several files one time
    entry = noted(path, read_manifest(path.parent)) or noted(path, {path.name: known})
    return entry["sha256"] if entry else None


def _digest(path: Path) -> str:
    """Return the sha256 of a checkpoint: the manifest's, if the file is the one written, else of its content."""
    if digest := _noted(path):
        return digest
    status = path.stat()
    known = path.with_name(KNOWN)
    digest = _of_content(path, status.st_size, status.st_mtime_ns)
    there = {name: entry for name, entry in _read(known).items() if path.with_name(name).is_file()}
    entry = {"sha256": digest, "size": status.st_size, "modified": status.st_mtime_ns}
    beside = known.with_name(f"{KNOWN}.{os.getpid()}")
    with suppress(OSError):  # a run that is read-only here
        if not path.with_name(NAME).is_file():
            return digest  # not a folder of vitlab's
        beside.write_text(json.dumps({**there, path.name: entry}, indent=1) + "\n")
        os.replace(beside, known)
    return digest


@lru_cache(256)
def _of_content(path: Path, size: int, modified: int) -> str:
    return file_digest(path)


def _read(path: Path) -> dict[str, dict[str, Any]]:
    with suppress(OSError, ValueError):
        content = json.loads(path.read_text())
        return {name: entry for name, entry in content.items() if isinstance(entry, dict) and "sha256" in entry}
    return {}
