"""A table of records and what belongs to it in one file, written whole or not at all."""

import contextlib
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np


def write(path: Path, header: Any, rows: np.ndarray) -> None:
    """Write records, and a header of plain values."""
    content = io.BytesIO()
    text = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    np.savez_compressed(content, rows=rows, header=text)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", suffix=".tmp", delete=False) as file:
        try:
            file.write(content.getvalue())
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(file.name)
            raise


def read(path: Path) -> tuple[Any, np.ndarray]:
    """Return header and records; a damaged file, of which zip keeps a CRC, raises all kinds of errors."""
    stored = np.load(io.BytesIO(path.read_bytes()), allow_pickle=False)
    return json.loads(stored["header"].tobytes()), stored["rows"]


def cache() -> Path:
    """Return the folder of what can be found out again."""
    return Path(os.environ.get("VITLAB_CACHE") or Path.home() / ".cache" / "vitlab")
