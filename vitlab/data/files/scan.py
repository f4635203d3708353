"""Decode every file once, so that broken ones are known before training, and remember what was seen."""

import contextlib
import hashlib
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from vitlab.data.files.decode import ImageError, decode_bytes, header

Facts = np.ndarray  # one record of this type for each file
_FACTS = np.dtype(
    [
        ("bytes", "i8"),
        ("modified", "i8"),  # nanoseconds, or whatever else changes with the content
        ("readable", "?"),
        ("digest", "u8", 2),  # of the file's bytes
        ("kind", "S16"),  # format and mode, such as JPEG RGB
        ("size", "i4", 2),  # height and width as stored, in pixels
        ("moments", "f4", (2, 4)),  # mean and mean square of red, green, blue and luma, of values in [0, 1]
    ]
)
_LEVELS = np.arange(256) / 255


class Store(Protocol):
    """Where encoded images lie, each under a name."""

    place: str  # tells stores apart

    def path(self, file: str) -> str:
        """Return what a person calls a file."""

    def read(self, file: str) -> bytes:
        """Return the bytes of a file, or raise an OSError."""

    def stamp(self, file: str) -> tuple[int, int]:
        """Return two numbers that change with a file, its size first, or raise an OSError."""

    def identity(self, file: str) -> bytes:
        """Return what decides to which split a file belongs."""


class Folder:
    """Files under a folder; a relative path is both name and identity.

    Args:
        root: The folder.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.place = root, os.fspath(root.resolve())

    def path(self, file: str) -> str:
        """Return the path."""
        return os.fspath(self.root / file)

    def read(self, file: str) -> bytes:
        """Return the bytes of a file, or raise an OSError."""
        return (self.root / file).read_bytes()

    def stamp(self, file: str) -> tuple[int, int]:
        """Return size in bytes and time of the last change in nanoseconds."""
        status = os.stat(self.root / file)
        return status.st_size, status.st_mtime_ns

    def identity(self, file: str) -> bytes:
        """Return the relative path."""
        return os.fsencode(file)


def scan(store: Store, files: list[str], num_workers: int = 0) -> tuple[Facts, dict[str, str]]:
    """Return a record for each file, in their order, and the reason for each that cannot be read.

    What is known of files whose stamp is unchanged comes from a cache in `VITLAB_CACHE`, by default ~/.cache/vitlab; a
    cache that cannot be written costs time and nothing else.
    """
    known = _load(store)
    facts = np.zeros(len(files), dtype=_FACTS)
    reasons: dict[str, str] = {}
    todo = []
    for i, file in enumerate(files):
        with contextlib.suppress(OSError):  # a file that has vanished is found unreadable below
            facts[i]["bytes"], facts[i]["modified"] = store.stamp(file)
        record, reason = known.get(file, (None, ""))
        if record is not None and all(record[name] == facts[i][name] for name in ("bytes", "modified")):
            facts[i] = record
            if reason:
                reasons[file] = reason
        else:
            todo.append(i)
    if todo:
        batches = DataLoader(
            _Looks(store, [files[i] for i in todo]),
            batch_size=64,
            num_workers=num_workers if len(todo) > 256 else 0,  # below, starting workers takes longer than looking
            collate_fn=list,
            generator=torch.Generator(),
        )
        for i, (look, reason) in zip(todo, (look for batch in batches for look in batch), strict=True):
            for name in ("readable", "digest", "kind", "size", "moments"):
                facts[i][name] = look[name]
            if reason:
                reasons[files[i]] = reason
        known |= {file: (facts[i], reasons.get(file, "")) for i, file in enumerate(files)}
        _save(store, known)
    return facts, reasons


class _Looks(Dataset[tuple[np.ndarray, str]]):
    def __init__(self, store: Store, files: list[str]) -> None:
        self.store, self.files = store, files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[np.ndarray, str]:
        file = self.files[index]
        record = np.zeros((), dtype=_FACTS)
        try:
            data = self.store.read(file)
        except OSError as error:
            return record, error.strerror or str(error)
        record["digest"] = np.frombuffer(hashlib.blake2b(data, digest_size=16).digest(), dtype="u8")
        try:
            image = decode_bytes(data, "", shrink=224)
        except ImageError as error:
            return record, error.reason
        record["readable"] = True
        record["kind"], record["size"] = header(data)
        record["moments"] = moments(image)
        return record, ""


def moments(image: Image.Image) -> np.ndarray:
    """Return mean and mean square of red, green, blue and luma of an RGB image, of values in [0, 1]."""
    counts = np.array([*image.histogram(), *image.convert("L").histogram()], dtype=np.float64).reshape(4, 256)
    counts /= image.width * image.height
    return np.stack([counts @ _LEVELS, counts @ _LEVELS**2])


def _cache_file(store: Store) -> Path:
    folder = Path(os.environ.get("VITLAB_CACHE") or Path.home() / ".cache" / "vitlab")
    name = hashlib.blake2b(os.fsencode(store.place), digest_size=12).hexdigest()
    return folder / f"scan-{name}.npz"


def _load(store: Store) -> dict[str, tuple[np.ndarray, str]]:
    try:
        stored = np.load(io.BytesIO(_cache_file(store).read_bytes()), allow_pickle=False)
        facts = stored["facts"]
        files, reasons = json.loads(stored["names"].tobytes())
        if facts.dtype != _FACTS or len(files) != len(facts):
            return {}
        return {file: (fact, reasons.get(file, "")) for file, fact in zip(files, facts, strict=True)}
    except Exception:  # absent, of an earlier version or torn: look again
        return {}


def _save(store: Store, known: dict[str, tuple[np.ndarray, str]]) -> None:
    facts = np.array([fact for fact, _ in known.values()], dtype=_FACTS)
    names = json.dumps([list(known), {file: reason for file, (_, reason) in known.items() if reason}])
    target = _cache_file(store)
    with contextlib.suppress(OSError):
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, suffix=".tmp", delete=False) as file:
            np.savez_compressed(file, facts=facts, names=np.frombuffer(names.encode(), dtype=np.uint8))
        os.replace(file.name, target)
