"""List the ablations, and compare several side by side."""

import csv
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitlab.ablation.file import spec
from vitlab.ablation.inference.words import chance, decimals, span
from vitlab.ablation.lab import exported
from vitlab.errors import UsageError
from vitlab.runs.directory import RUNS
from vitlab.runs.records import read_json
from vitlab.shipped import find_shipped
from vitlab.tables import columns, markdown_lines

NAMES = ("metric", "verdict", "test", "claim", "setting", "baseline", "lr_scheduler", "analysis", "line", "measure")
ARM_HEAD = ("n", "mean", "interval", "difference to its baseline", "adjusted p", "verdict")
CLAIM_HEAD = ("where", "n", "adjusted p", "verdict")
CAUTION = "Arms of different ablations are not tested against each other: images, steps or code may differ."


def list_ablations() -> str:
    """Return a line for each ablation in ``runs/ablations``: arms, finished cells, registration, report."""
    rows = ablation_rows()
    words = [[_word(value) for value in row.values()] for row in rows]
    return columns([["ablation", "arms", "cells done", "last cell", "registered", "report"], *words], right=[1, 2])


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)


def ablation_rows() -> list[dict[str, Any]]:
    """Return what :func:`list_ablations` shows, with numbers in full.

    Raises:
        UsageError: There is no ablation.
    """
    rows = []
    for folder in sorted((RUNS / "ablations").glob("*/")):
        done = sorted(folder.glob("*/s*-*/done.json"))
        row: dict[str, Any] = {"ablation": folder.name, "arms": len({path.parent.parent.name for path in done})}
        row |= {"cells": len(done), "ended": max((str(_read(path).get("ended", "")) for path in done), default=None)}
        marks = {"registered": "registered.json", "report": "report/report.md"}
        rows.append({**row, **{name: (folder / file).is_file() for name, file in marks.items()}})
    if not rows:
        raise UsageError(f"there is no ablation in {RUNS / 'ablations'}; start one with `vitlab ablate run FILE`")
    return rows


def compare_ablations(names: Sequence[str]) -> str:
    """Return a page with the arms and claims of several ablations, from their reports.

    Args:
        names: Each a file, a name in ``runs/ablations``, a folder with a ``summary.csv``, or one of exported evidence.

    Raises:
        UsageError: One has no report yet.
    """
    rows = compared_rows(names)
    parts = [f"# {', '.join(names)}", "", CAUTION]
    arms = [row for row in rows if row["kind"] == "arm"]
    for metric in dict.fromkeys(row["metric"] for row in arms):
        mine = [row for row in arms if row["metric"] == metric]
        is_min = any(row.get("mode") == "min" for row in mine)
        sign = -1 if is_min else 1
        mine.sort(key=lambda row: -math.inf if row["mean"] is None else sign * row["mean"], reverse=True)
        digits = {name: max(4, decimals(_means(mine, name))) for name in names}
        lines = [[row["ablation"], row["arm"], *_arm_cells(row, digits[row["ablation"]])] for row in mine]
        parts += ["", f"## {metric}", "", *markdown_lines([["ablation", "arm", *ARM_HEAD], *lines])]
    if claims := [row for row in rows if row["kind"] == "claim"]:
        lines = [[row["ablation"], f"`{row['claim']}`", *_claim_cells(row)] for row in claims]
        parts += ["", "## Claims", "", *markdown_lines([["ablation", "claim", *CLAIM_HEAD], *lines])]
    return "\n".join(parts)


def _means(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """Return the means of an ablation's arms."""
    return [row["mean"] for row in rows if row["ablation"] == name and row["mean"] is not None]


def _arm_cells(row: Mapping[str, Any], digits: int) -> list[str]:
    """Return what :data:`ARM_HEAD` names of an arm."""
    mean, low, high, difference = (_number(row, key) for key in ("mean", "low", "high", "difference"))
    numbers = ["-" if math.isnan(x) else f"{x:z.{digits}f}" for x in (mean, difference)]
    p = chance(_number(row, "adjusted_p"))
    return [_seeds(row), numbers[0], span(low, high, digits), numbers[1], p, row.get("verdict") or "-"]


def _claim_cells(row: Mapping[str, Any]) -> list[str]:
    """Return what :data:`CLAIM_HEAD` names of a claim, with the p that decided its verdict."""
    test = "equivalence_p" if row["verdict"] == "equivalent" else "adjusted_p"
    if "~" in row["claim"]:
        test = "excess_p" if row["verdict"] == "refuted" else "equivalence_p"
    return [row.get("setting") or "-", _seeds(row), chance(_number(row, test)), row["verdict"] or "-"]


def _seeds(row: Mapping[str, Any]) -> str:
    """Return how many of the planned seeds there are."""
    return "/".join("-" if (count := row.get(key)) is None else f"{count:.0f}" for key in ("n", "planned"))


def _number(row: Mapping[str, Any], key: str) -> float:
    """Return a number of a row; NaN if it has none."""
    value = row.get(key)
    return math.nan if value is None else float(value)


def compared_rows(names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows that :func:`compare_ablations` shows, with all their columns and numbers in full."""
    return [{"ablation": name, **_typed(row)} for name in names for row in _read_rows(name)]


def _typed(row: dict[str, str]) -> dict[str, Any]:
    """Return a row with numbers as numbers; a name such as 010, of an arm or a level, stays text."""
    keys = list(row)
    names = {*NAMES, *keys[: keys.index("metric")]}  # axes stand before the metric
    return {key: text or None if key in names else _value(text) for key, text in row.items()}


def _value(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    try:
        return float(text)
    except ValueError:
        return text or None


def _read_rows(name: str) -> list[dict[str, str]]:
    folders = [Path(name), Path(name) / "report", RUNS / "ablations" / name / "report"]
    if Path(name).is_file():
        folders = [(exported(Path(name)) or spec.read_ablation(name).directory) / "report"]
    elif shipped := find_shipped(name, "experiments"):
        folders.append(spec.read_ablation(str(shipped)).directory / "report")
    found = next((folder / "summary.csv" for folder in folders if (folder / "summary.csv").is_file()), None)
    if not found:
        raise UsageError(f"{_without_report(name)}; `vitlab ablate list` lists all ablations")
    with found.open() as file:
        rows = list(csv.DictReader(file))
    if lost := [key for key in ("kind", "metric", "mean") if rows and key not in rows[0]]:
        raise UsageError(f"{found} is not of `vitlab ablate report`: it has no column `{lost[0]}`")
    return rows


def _without_report(name: str) -> str:
    """Return what to do about an ablation that has no report: its file writes one, if there is such an ablation."""
    places = [place for place in (Path(name), RUNS / "ablations" / name) if place.is_dir()]
    files = [file for place in places for file in (place / "cv.yaml", place / "ablation.yaml") if file.is_file()]
    if not places and not Path(name).is_file() and not find_shipped(name, "experiments"):
        return f'there is no ablation, file or folder "{name}"'
    file = str(files[0]) if files else "FILE" if places else name
    return f"{name} has no report: `vitlab ablate report {shlex.quote(file)}` writes it"


def _read(path: Path) -> dict[str, object]:
    try:
        return dict(read_json(path))
    except UsageError:  # a damaged file does not hide the others
        return {}
