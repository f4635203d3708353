"""Store records with a header in one file, written atomically."""

import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from vitlab.runs.atomic import atomic_write


def write_rows(path: Path, header: Any, rows: np.ndarray) -> None:
    """Write records, with a header of plain values."""
    text = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    with atomic_write(path) as beside, beside.open("wb") as file:
        np.savez_compressed(file, rows=rows, header=text)
        file.flush()
        os.fsync(file.fileno())


def read_rows(path: Path) -> tuple[Any, np.ndarray]:
    """Return header and records of a file; a damaged one can raise any error."""
    return rows_in(path.read_bytes())


def rows_in(content: bytes) -> tuple[Any, np.ndarray]:
    """Return header and records of a file's content; a damaged one can raise any error."""
    stored = np.load(io.BytesIO(content), allow_pickle=False)
    return json.loads(stored["header"].tobytes()), stored["rows"]


def cache() -> Path:
    """Return the cache folder, which can be deleted at any time."""
    return Path(os.environ.get("VITLAB_CACHE") or Path.home() / ".cache" / "vitlab")
