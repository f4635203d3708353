"""Recompute the numbers of every cell from its predictions, and report disagreements."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from vitlab.ablation.execution.cells import Cell, Resolved
from vitlab.ablation.execution.identity import json_digest
from vitlab.ablation.file.spec import Ablation
from vitlab.ablation.inference import linear
from vitlab.ablation.inference.measured import unreadable

CLOSE = 2e-6  # tolerance for float32 sums in another order


@dataclass(frozen=True)
class Verified:
    """The result of a verification; as text, a line for each cell that disagrees."""

    checked: int
    problems: dict[str, list[str]]  # cell: what is wrong
    numbers: int  # recomputed ones
    note: str = ""  # what could not be recomputed

    @property
    def is_green(self) -> bool:
        """Whether every number agrees with its predictions."""
        return not self.problems and self.checked > 0

    def __str__(self) -> str:
        lines = [f"{name}: {'; '.join(words)}" for name, words in self.problems.items()]
        ending = f"{len(self.problems)} of them disagree" if self.problems else "all agree"
        ending = ending if self.checked else "there was nothing to verify"
        lines += [self.note] if self.note else []
        return "\n".join([*lines, f"{self.checked} cells, {self.numbers} numbers recomputed: {ending}"])


def verify_evidence(ablation: Ablation, resolved: list[Resolved], cells: Sequence[Cell]) -> Verified:
    """Recompute every number of the finished cells from their predictions, refit the gate, and compare."""
    problems: dict[str, list[str]] = {}
    checked = numbers = 0
    for cell in cells:
        state = cell.state()
        if state not in ("done", "damaged"):
            if text := cell.outlived():
                checked, problems[cell.name] = checked + 1, [text]
            continue
        words, count = ([cell.damage()], 0) if state == "damaged" else _check(cell)
        checked, numbers = checked + 1, numbers + count
        if words:
            problems[cell.name] = words
    fits, wrong, note = linear.check(ablation, resolved)
    return Verified(checked, problems | ({linear.FILE: wrong} if wrong else {}), numbers + fits, note)


def _check(cell: Cell) -> tuple[list[str], int]:
    words = [text] if (text := unreadable(cell.run, cell.ablation)) else []
    if json_digest(cell.run.read("data.json")) != cell.parts["data"]:
        words.append("data.json differs from the plan: it was trained on other images")
    try:
        seed = yaml.safe_load(cell.run.config.read_text())["seed_everything"]
        words += [f"config.yaml has seed {seed}"] if seed != cell.seed else []
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        words.append(f"config.yaml cannot be read: {' '.join(str(error).split())[:200]}")
    path = cell.run.path / "predictions" / f"{cell.ablation.evaluate}.parquet"
    if words or not path.is_file():
        return words or [f"there is no {path.name} of predictions"], 0
    found, stated = _numbers(path), cell.run.measured(cell.ablation.evaluate)
    both = {name: (value, stated[name]) for name, value in found.items() if name in stated}
    words += [f"{n} is {b:.6g}, its predictions give {a:.6g}" for n, (a, b) in both.items() if not _agree(a, b)]
    return words, len(both)


def _agree(a: float, b: float) -> bool:
    return abs(a - b) <= CLOSE or (a != a and b != b)


def _numbers(path: Path) -> dict[str, Any]:
    """Return the metrics computed from a table of predictions."""
    table = pd.read_parquet(path)
    found = {"n": float(len(table))}
    if "target" in table:
        return {**found, "acc1": float((table["target"] == table["prediction"]).mean())}
    targets = sorted(name for name in table.columns if name.startswith("target_"))
    gaps = [np.abs(table[name] - table[name.replace("target", "prediction")]) for name in targets]
    return {**found, "mae": float(np.mean(gaps))} if gaps else found
