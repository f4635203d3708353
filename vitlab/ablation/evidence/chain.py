"""The chain of an ablation's records: each holds the hash of the one before, so that the last hash covers all.

One line of ``chain.jsonl`` for each event: a version of the file, a registration, an opening of the
evaluated split, a measured cell with the hashes of its files, a cell's analyses, a report (a look). Whoever changes a
line, or a file that a line holds the hash of, has to write every later line again; the last hash, printed by
``verify``, ``report`` and ``export``, is then another one. Kept elsewhere (a paper, a commit, a message), it tells of
the change.
"""

import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from vitlab.errors import named
from vitlab.runs.directory import RunDir
from vitlab.runs.manifest import file_digest
from vitlab.runs.matching import matching
from vitlab.runs.records import now_utc, split_metrics

FILE = "chain.jsonl"
NO_RECORD = "0" * 64  # before the first


@dataclass(frozen=True)
class Chain:
    """The records of a chain and what breaks it.

    Args:
        records: The records, oldest first.
        head: The hash of the last; of none, zeros.
        broken: Why it is no chain; empty if it is one.
    """

    records: tuple[Mapping[str, Any], ...] = ()
    head: str = NO_RECORD
    broken: str = ""

    def of(self, kind: str) -> list[Mapping[str, Any]]:
        """Return the records of a kind."""
        return [record for record in self.records if record["kind"] == kind]

    def measured(self, split: str) -> dict[str, list[Mapping[str, Any]]]:
        """Return the records of each cell that was measured on a split, oldest first.

        A record of 0.2.0 or before names no split: it is the one that was opened last for its cell.
        """
        opened: dict[str, str] = {}
        found: dict[str, list[Mapping[str, Any]]] = {}
        for record in self.records:
            if record["kind"] == "opened":
                opened[record["cell"]] = record["split"]
            elif record["kind"] == "cell":
                cell = record["cell"]
                if record.get("split", opened.get(cell, split)) == split:
                    found.setdefault(cell, []).append(record)
        return found

    def sentence(self) -> str:
        """Return the sentence that names its head."""
        return f"head of the chain of {len(self.records)} records: {self.head}"


def append(directory: Path, kind: str, **facts: Any) -> str:
    """Append a record, and return its hash; workers of one ablation append one after another.

    Args:
        directory: Of the ablation, or of its tuning.
        kind: What happened: ``version``, ``registered``, ``opened``, ``cell``, ``analyses`` or ``look``.
        facts: The rest of the record.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with named(directory / FILE), (directory / FILE).open("a+b") as file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        last, end = _last_line(file)
        file.truncate(end)  # a process ended while it wrote: what it did is recorded again
        previous = _hash(last) if last else NO_RECORD
        line = json.dumps({"kind": kind, **facts, "time": now_utc(), "previous": previous}, sort_keys=True).encode()
        file.write(line + b"\n")
        file.flush()
        os.fsync(file.fileno())
    return _hash(line)


def count_reading(directory: Path, cell: str, split: str) -> None:
    """Record an evaluation on the evaluated split, whatever its outcome.

    Args:
        directory: Of the ablation.
        cell: Name of the cell.
        split: The split.
    """
    with named(readings := directory / "readings.jsonl"), readings.open("a") as file:
        file.write(json.dumps({"cell": cell, "split": split, "time": now_utc()}) + "\n")
    append(directory, "opened", cell=cell, split=split)


def _last_line(file: BinaryIO) -> tuple[bytes, int]:
    """Return the last whole line of a file without its end, empty if there is none, and where it ends.

    Only the end of the file is read: of 10,000 cells the chain has tens of megabytes.
    """
    size = file.seek(0, os.SEEK_END)
    start, text, step = size, b"", 1 << 14
    while start and text.count(b"\n") < 2:
        length = min(step, start)
        start = file.seek(start - length)
        text = file.read(length) + text
        step *= 2
    end = text.rfind(b"\n") + 1
    return text[:end].rpartition(b"\n")[0].rpartition(b"\n")[2], start + end


class Reader:
    """Reads what is appended to a chain from now on; the workers of one call are threads, and share it.

    Args:
        directory: Of the ablation.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        self._place = self._path.stat().st_size if self._path.is_file() else 0
        self._turn = threading.Lock()

    def new(self) -> list[Mapping[str, Any]]:
        """Return the records since the last call; lines that cannot be read are left to :func:`read_chain`."""
        found: list[Mapping[str, Any]] = []
        with self._turn, suppress(OSError), self._path.open("rb") as file:
            file.seek(self._place)
            text = file.read()
            text = text[: text.rfind(b"\n") + 1]
            self._place += len(text)
            for line in text.splitlines():
                with suppress(ValueError):
                    record = json.loads(line)
                    found += [record] if isinstance(record, dict) else []
        return found


def read_chain(directory: Path) -> Chain | None:
    """Return the chain of an ablation, None if it has none: its cells are of an older version."""
    try:
        lines = (directory / FILE).read_bytes().splitlines()
    except FileNotFoundError:
        return None
    records: list[Mapping[str, Any]] = []
    previous = NO_RECORD
    for i, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            kind, claimed = record["kind"], record["previous"]
        except (ValueError, KeyError, TypeError):
            return Chain(tuple(records), previous, f"{FILE}, line {i}: it cannot be read")
        if claimed != previous:
            return Chain(tuple(records), previous, f"{FILE}, line {i} ({kind}) does not follow the line before it")
        records.append(record)
        previous = _hash(line)
    return Chain(tuple(records), previous)


def hashes_of(run: RunDir, split: str) -> dict[str, Any]:
    """Return the hashes of everything that a cell's result stands on.

    Args:
        run: The run directory of a measured cell.
        split: The split that it was measured on.
    """
    result = run.measured(split)
    predictions = run.predictions(split)
    return {
        "config": file_digest(run.config),
        "data": file_digest(run.path / "data.json"),
        "weights": result.get("sha256"),
        "result": _hash(json.dumps(result, sort_keys=True).encode()),  # with the hash of the weights' file
        "metrics": _hash(json.dumps(split_metrics(result), sort_keys=True).encode()),
        "predictions": table_digest(predictions) if predictions.is_file() else None,
        "environment": environment_of(run),
    }


def analyses_of(run: RunDir) -> dict[str, str]:
    """Return the hash of each table of a cell's analyses."""
    return {path.name: file_digest(path) for path in matching(run.path / "analysis", "*.csv")}


def environment_of(run: RunDir) -> str:
    """Return the versions that trained a cell, as it recorded them; empty if it did not."""
    record = run.record
    known = {"python": record.get("python"), **record.get("versions", {})}
    return ", ".join(f"{name} {text}" for name, text in known.items() if text and name != "vitlab")


def table_digest(path: Path) -> str:
    """Return the hash of a table of predictions; without the probabilities, which evidence leaves out."""
    import numpy as np
    import pandas as pd

    table = pd.read_parquet(path).drop(columns=["probability", "probabilities"], errors="ignore")
    digest = hashlib.sha256()
    for name in sorted(table.columns):
        column = table[name]
        digest.update(f"{name}\n".encode())
        if pd.api.types.is_numeric_dtype(column):  # whatever its width
            kind = np.int64 if pd.api.types.is_integer_dtype(column) else np.float64
            digest.update(np.ascontiguousarray(column.to_numpy(kind)).tobytes())
        else:
            digest.update(json.dumps([str(x) for x in column]).encode())
    return digest.hexdigest()


def _hash(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()
