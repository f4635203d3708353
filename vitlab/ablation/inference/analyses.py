"""The analyses of the cells: curves over the seeds of an arm, from the tables of `vitlab analyze`."""

import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

import pandas as pd

from vitlab.ablation.execution.cells import table_of
from vitlab.ablation.inference.measured import CellResults
from vitlab.ablation.inference.words import Section, decimals, percent
from vitlab.analysis import ANALYSES, Curve
from vitlab.analysis.catalogue import Drawing, Rows, Tables
from vitlab.stats import interval


def curve_rows(results: CellResults) -> Rows:
    """Return a row for each arm and point of each curve: mean over seeds and its interval."""
    return [
        row
        for name in results.ablation.analyses
        if (curve := ANALYSES[name].curve)
        for arm, tables in _by_arm(results, _summaries(results, name, curve)).items()
        for row in _arm_rows(results, name, curve, arm, tables)
    ]


def tables_of(results: CellResults, name: str) -> Tables:
    """Return the tables of an analysis of all cells, in the form of today."""
    curve, found = ANALYSES[name].curve, {}
    for key, run in results.runs.items():
        table = table_of(run, name)
        if table is not None and curve:
            table = curve.older(table)
        if table is not None:
            found[key] = table
    return found


def drawing_of(results: CellResults, name: str, curve: Curve) -> Drawing | None:
    """Return the second figure of an analysis; None if it has none."""
    return curve.drawing(_by_arm(results, tables_of(results, name))) if curve.drawing else None


def _summaries(results: CellResults, name: str, curve: Curve) -> Tables:
    return {key: curve.summary(table).assign(seed=key[1]) for key, table in tables_of(results, name).items()}


def _by_arm(results: CellResults, tables: Tables) -> dict[str, list[pd.DataFrame]]:
    """Return the tables of each arm that has any, in the order of the arms."""
    found = {
        arm.name: [table for (name, _), table in tables.items() if name == arm.name] for arm in results.ablation.arms
    }
    return {arm: tables for arm, tables in found.items() if tables}


def _arm_rows(
    results: CellResults, name: str, curve: Curve, arm: str, tables: list[pd.DataFrame]
) -> Iterator[dict[str, Any]]:
    keys = [*curve.lines, curve.x]
    whole = pd.concat(tables).assign(**({} if curve.x else {"": 0.0}))
    measures = [name for name in curve.measures if name in whole]  # tables of before have fewer
    each = whole.astype(dict.fromkeys(measures, float)).groupby([*keys, "seed"], sort=False)[measures].mean()
    for point, part in each.groupby(keys, sort=False):
        *line, x = point if isinstance(point, tuple) else (point,)
        for measure in measures:
            values = part[measure].dropna().tolist()
            if not values:
                continue
            low, high = interval(values, results.ablation.stats.ci, exact=not any(values))  # no change at all is exact
            row = {"analysis": name, "arm": arm, "line": ", ".join(map(str, line)), "measure": measure, "x": float(x)}
            row |= {"n": len(values), "planned": len(results.ablation.seeds), "mean": sum(values) / len(values)}
            yield {**row, "low": low, "high": high, "half": (high - low) / 2}


def sections(results: CellResults, rows: Rows) -> list[Section]:
    """Return a section for each analysis, and one on those that could not be done."""
    found: list[Section] = []
    for name in results.ablation.analyses:
        mine, curve = [row for row in rows if row["analysis"] == name], ANALYSES[name].curve
        if mine and curve:
            ci = percent(results.ablation.stats.ci)
            words = [curve.words, f"Mean over seeds ± half of its {ci} t interval; not tested, not adjusted."]
            words += [curve.caution(tables_of(results, name)), _note(results, name)]
            tables = [_table(mine, curve, measure) for measure in dict.fromkeys(row["measure"] for row in mine)]
            found.append(Section(f"Analysis: {name}", [*filter(None, words)], tables))
    lost = [
        f"{name}: not done for {arm}: {text}"
        for name in results.ablation.analyses
        for arm, text in _not_done(results, name).items()
    ]
    if results.ablation.analyses and (lost or not found):
        found.append(Section("Analyses that were not done", lost or ["None has been done yet."]))
    return found


def _note(results: CellResults, name: str) -> str:
    """Return the beginning that the notes of all cells share, clause by clause: no number of a single cell."""
    noted = [run.note(name) for run in results.runs.values()]
    texts = [note["note"] for note, now in noted if "note" in note and not now.is_stale]
    clauses = [re.split(r", (?![^\[]*\])", re.split(", pos_embed=|; ", text)[0]) for text in texts]
    shared = [same[0] for same in itertools.takewhile(lambda same: len({*same}) == 1, zip(*clauses, strict=False))]
    return f"{', '.join(shared)}." if shared else ""


def _not_done(results: CellResults, name: str) -> dict[str, str]:
    """Return the cells that lack an analysis, and the arms that it does not apply to, with the reason."""
    found = {}
    for (arm, seed), run in results.runs.items():
        note, now = run.note(name)
        if not note or now.is_stale:
            failure = results.cells[arm, seed].cell.failure()
            why = f"{failure['kind']}: {failure['last']}" if failure else "`vitlab ablate run` will do it"
            found[f"{arm} s{seed}"] = why
        elif "not_done" in note:
            found[arm] = note["not_done"]
    return found


def _table(rows: Rows, curve: Curve, measure: str) -> list[list[str]]:
    mine = [row for row in rows if row["measure"] == measure]
    points = sorted({row["x"] for row in mine})
    head = [
        "arm",
        *(["line"] if curve.lines else []),
        "n",
        *(f"{curve.x} {x:g}" if curve.x else "value" for x in points),
    ]
    lines: dict[tuple[str, str], dict[float, dict[str, Any]]] = {}
    for row in mine:
        lines.setdefault((row["arm"], row["line"]), {})[row["x"]] = row
    table = [[f"{measure}: {head[0]}", *head[1:]]]
    digits = decimals([row["mean"] for row in mine], [row["half"] for row in mine])
    for (arm, line), cells in lines.items():
        least = min(cells.values(), key=lambda row: row["n"])
        start = [arm, *([line] if curve.lines else []), f"{least['n']}/{least['planned']}"]
        table.append([*start, *(_cell(cells[x], digits) if x in cells else "-" for x in points)])
    return table


def _cell(row: dict[str, Any], digits: int) -> str:
    return f"{row['mean']:z.{digits}f}" + ("" if math.isnan(row["half"]) else f" ± {row['half']:.{digits}f}")
