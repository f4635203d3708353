"""The registered protocol of posbench: it stands alone because everything else of the bench reads it."""

import hashlib
import json
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from vitlab.config.yaml_files import read_yaml
from vitlab.errors import UsageError
from vitlab.shipped import HOME

TASKS = {  # score: what it says, the training that it reads
    "accuracy": ("photos, 8 x 8 tokens", "photos"),
    "sizes": ("the same network on larger and oblong grids", "photos"),
    "shift": ("the same network on shifted photos", "photos"),
    "few": ("a tenth of the photos", "few"),
    "place": ("the row and column of the mark, of 64 cells", "glyphs"),
    "offset": ("how far right of A is B, of 6", "glyphs"),
    "far": ("how far below the left border's mark the right one's is, of 6", "glyphs"),
}
_CHANCE = {"place": 1 / 64, "offset": 1 / 6, "far": 1 / 6}
FOLDER = HOME / "experiments" / "posbench"


@cache
def registered_protocol() -> dict[str, Any]:
    """Return the protocol that the package ships.

    Example:
        >>> registered_protocol()["seeds"]
        [0, 1, 2, 3, 4]
    """
    return dict(yaml.safe_load((FOLDER / "protocol.yaml").read_text()))


def read_protocol(name: str | None = None) -> dict[str, Any]:
    """Return a protocol: that of a file, or one that the package ships by its name, such as ``imagenet100``.

    A file with ``base: protocol`` states what differs from the registered one.

    Args:
        name: The file or the name; None is the registered one.

    Raises:
        UsageError: There is none, or it is incomplete.
    """
    if not name:
        return dict(registered_protocol())
    found = read_yaml(_file_of(name), "--protocol")
    if (base := found.pop("base", None)) not in (None, "protocol"):
        raise UsageError(f"`--protocol {name}`: `base` must be `protocol`, the registered one, got {base!r}")
    found = registered_protocol() | found if base else found
    if missing := sorted(set(registered_protocol()) - set(found)):
        raise UsageError(f"`--protocol {name}` lacks {', '.join(missing)}")
    return found


def evidence_of(name: str | None = None) -> Path:
    """Return the folder of the evidence of a protocol, which lies beside its file; nothing may be published yet.

    Args:
        name: As of :func:`read_protocol`; None is the registered one.

    Example:
        >>> evidence_of("t2t").relative_to(FOLDER).as_posix()
        't2t/evidence'
    """
    path = _file_of(name or "protocol")
    return path.parent / "evidence" if path == FOLDER / "protocol.yaml" else path.with_suffix("") / "evidence"


def _file_of(name: str) -> Path:
    path = next((each for each in (Path(name), FOLDER / f"{name}.yaml") if each.is_file()), None)
    if path is None:
        known = [each.stem for each in sorted(FOLDER.glob("*.yaml"))]
        raise UsageError(f"`--protocol {name}`: there is no such file, and vitlab ships {', '.join(known)}")
    return path


def classes_of_photos(protocol: Mapping[str, Any]) -> int:
    """Return the number of classes of a protocol's photos.

    Example:
        >>> classes_of_photos(registered_protocol())
        10
    """
    return int(protocol.get("photos", {}).get("classes", 10))


def chance_of_tasks(protocol: Mapping[str, Any]) -> dict[str, float]:
    """Return the score of guessing in each task.

    Example:
        >>> chance_of_tasks(registered_protocol())["few"]
        0.1
    """
    return {task: _CHANCE.get(task, 1 / classes_of_photos(protocol)) for task in TASKS}


def guessing_bounds(protocol: Mapping[str, Any]) -> dict[str, float]:
    """Return the score that guessing exceeds in one of 200 sets of test images, of each task.

    Example:
        >>> round(guessing_bounds(registered_protocol())["far"], 3)  # of 2,000 images
        0.188
    """
    return {
        task: chance + 2.576 * math.sqrt(chance * (1 - chance) / images_of_task(protocol, task))
        for task, chance in chance_of_tasks(protocol).items()
    }


def images_of_task(protocol: Mapping[str, Any], task: str) -> int:
    """Return how many test images a task reads.

    Example:
        >>> images_of_task(registered_protocol(), "far")
        2000
    """
    if task in ("sizes", "shift"):
        return int(protocol["test"][task]["images"])
    return int(protocol["test"]["glyphs" if TASKS[task][1] == "glyphs" else "photos"])


def best_rate(tried: Mapping[float, float]) -> float:
    """Return the learning rate of the highest validation accuracy, the smallest of equal ones.

    Example:
        >>> best_rate({0.02: 0.5, 0.01: 0.5, 0.04: 0.4})
        0.01
    """
    return max(sorted(tried), key=lambda rate: tried[rate])


def rates_left(tuning: Mapping[str, Any], training: str, tried: Mapping[float, float]) -> list[float]:
    """Return the learning rates that are still to be tried: those of the grid, then one beyond a best at its border.

    Args:
        tuning: What the protocol says of it.
        training: ``photos`` or ``glyphs``.
        tried: Validation accuracy of each rate.

    Example:
        >>> tuning = {"rates": {"photos": [0.01, 0.02, 0.04]}, "most": 6}
        >>> rates_left(tuning, "photos", {0.01: 0.5, 0.02: 0.4, 0.04: 0.3})
        [0.005]
    """
    if left := sorted(set(tuning["rates"][training]) - set(tried)):
        return left
    best, low, high = best_rate(tried), min(tried), max(tried)
    if best not in (low, high) or len(tried) >= tuning["most"]:
        return []
    return [best / 2 if best == low else best * 2]


def tuned_on(training: str) -> str:
    """Return the training whose learning rate serves a training.

    Example:
        >>> tuned_on("few")
        'photos'
    """
    return "photos" if training == "few" else training


def protocol_digest(protocol: dict[str, Any]) -> str:
    """Return the SHA-256 of what a protocol says, whatever its comments.

    Example:
        >>> protocol_digest({"seeds": [0]}) == protocol_digest({"seeds": [1]})
        False
    """
    return hashlib.sha256(json.dumps(protocol, sort_keys=True).encode()).hexdigest()
