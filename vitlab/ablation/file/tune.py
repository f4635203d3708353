"""The section ``tune`` of an ablation's file: which values each arm may choose among, and at what cost."""

import itertools
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vitlab.ablation.file.schema import File
from vitlab.errors import did_you_mean

OPTIONS = ("budget", "seeds", "split", "per")


@dataclass(frozen=True)
class Tune:
    """What every arm tries before the measured seeds start: the same candidates, on seeds of their own.

    Args:
        candidates: Dotted keys and values, each a candidate.
        space: The values of each key, in the order of the file.
        seeds: Seeds of the trials, none of which is measured.
    """

    candidates: tuple[Mapping[str, Any], ...]
    space: Mapping[str, tuple[Any, ...]]
    seeds: tuple[int, ...]


def read_tune(file: File, axes: Mapping[str, Mapping[str, Any]], seeds: tuple[int, ...]) -> Tune | None:
    """Return the section; None where the file has none. A budget below the grid takes a random part of it."""
    content = file.content.get("tune")
    if content is None:
        return None
    if not isinstance(content, dict):
        raise file.mistake("tune", f"`tune` must have dotted keys with their values, and a budget, got {content!r}")
    space = {str(k): _numbers(v) for k, v in content.items() if k not in OPTIONS}
    for key, values in space.items():
        _check_key(file, axes, key, values)
    if not space:
        raise file.mistake("tune", "`tune` names nothing to tune, as in {model.lr: [1e-3, 2e-3, 4e-3]}")
    for name, only in (("split", "val"), ("per", "arm")):
        if content.get(name, only) != only:
            raise file.mistake(f"tune/{name}", f"`tune.{name}` must be {only}, got {content[name]!r}")
    grid = [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]
    budget = file.number("tune.budget", len(grid), 1, whole=True)
    own = content.get("seeds", [max(seeds) + 100])
    if not isinstance(own, list) or not own or any(type(s) is not int or s < 0 for s in own) or len({*own}) < len(own):
        raise file.mistake("tune/seeds", f"`tune.seeds` must be a list of different seeds, got {own!r}")
    if shared := sorted(set(own) & set(seeds)):
        text = f"`tune.seeds` and `seeds` share {', '.join(map(str, shared))}: no seed may choose and be measured"
        raise file.mistake("tune/seeds", text)
    chosen = sorted(random.Random(0).sample(range(len(grid)), min(budget, len(grid))))
    return Tune(tuple(grid[i] for i in chosen), {k: tuple(v) for k, v in space.items()}, tuple(own))


def _numbers(values: Any) -> Any:
    """Return values with 1e-3 as the number that it is everywhere but in YAML 1.1, which wants 1.0e-3."""
    is_number = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+").fullmatch
    return (
        [float(v) if isinstance(v, str) and is_number(v) else v for v in values] if isinstance(values, list) else values
    )


def _check_key(file: File, axes: Mapping[str, Mapping[str, Any]], key: str, values: Any) -> None:
    place = f"tune/{key}"
    if key.split(".")[0] not in ("model", "data", "trainer") or "." not in key:
        hint = did_you_mean(key, OPTIONS) or "; write a dotted key of a config, such as model.lr"
        raise file.mistake(place, f"`tune` cannot tune `{key}`{hint}")
    if not isinstance(values, list) or len({str(v) for v in values}) < max(2, len(values)):
        raise file.mistake(place, f"`{key}` needs a list of two different values or more, got {values!r}")
    for axis, levels in axes.items():
        if any(key in sets for sets in levels.values()):
            raise file.mistake(place, f"`tune` names `{key}`, which the axis `{axis}` sets: one would undo the other")
