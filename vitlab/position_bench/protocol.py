"""The registered protocol of posbench: it stands alone because everything else of the bench reads it."""

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from vitlab.shipped import HOME

TASKS = {  # score: what it says, the training that it reads
    "accuracy": ("photos, 8 x 8 tokens", "photos"),
    "sizes": ("the same network on larger and oblong grids", "photos"),
    "shift": ("the same network on shifted photos", "photos"),
    "few": ("a tenth of the photos", "few"),
    "place": ("the row and column of the mark, of 64 cells", "glyphs"),
    "offset": ("how far right of A is B, of 6", "glyphs"),
    "far": ("do the distant marks of a row match", "glyphs"),
}
CHANCE = {"accuracy": 0.1, "sizes": 0.1, "shift": 0.1, "few": 0.1, "place": 1 / 64, "offset": 1 / 6, "far": 0.5}
FOLDER = HOME / "experiments" / "posbench"


@cache
def registered_protocol() -> dict[str, Any]:
    """Return the protocol that the package ships.

    Example:
        >>> registered_protocol()["seeds"]
        [0, 1, 2, 3, 4]
    """
    return dict(yaml.safe_load((FOLDER / "protocol.yaml").read_text()))


def protocol_digest(protocol: dict[str, Any]) -> str:
    """Return the SHA-256 of what a protocol says, whatever its comments.

    Example:
        >>> protocol_digest({"seeds": [0]}) == protocol_digest({"seeds": [1]})
        False
    """
    return hashlib.sha256(json.dumps(protocol, sort_keys=True).encode()).hexdigest()


def digest_of_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
