"""Recompute the numbers of every cell from its predictions, and compare what evidence holds with its records."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from vitlab.ablation.evidence.chain import Chain, analyses_of, environment_of, hashes_of, read_chain
from vitlab.ablation.evidence.protocol import registered
from vitlab.ablation.execution.cells import Cell, Resolved
from vitlab.ablation.execution.identity import json_digest
from vitlab.ablation.execution.tuning import Tuning
from vitlab.ablation.file.spec import Ablation
from vitlab.ablation.inference import linear
from vitlab.ablation.inference.measured import unreadable
from vitlab.class_metrics import classes_of_table, confusion, over_classes
from vitlab.config.yaml_files import parse_own
from vitlab.errors import one_line, preview
from vitlab.runs.records import split_metrics

CLOSE = 2e-6  # tolerance for float32 sums in another order; relative beyond 1
CHAIN = "the chain"  # what a problem of it is named by
Records = Mapping[str, Sequence[Mapping[str, Any]]]  # those of each cell on the evaluated split, oldest first


@dataclass
class Verified:
    """What a verification has found; as text, a line for each cell that disagrees."""

    checked: int = 0
    problems: dict[str, list[str]] = field(default_factory=dict)  # cell: what is wrong
    numbers: int = 0  # recomputed ones
    missing: dict[str, str] = field(default_factory=dict)  # planned cell: its state, if that is not allowed
    notes: list[str] = field(default_factory=list)  # what was not or cannot be checked
    head: str = ""  # the sentence about the chain's head

    def say(self, name: str, *words: str) -> None:
        """Add what is wrong with a cell."""
        self.problems.setdefault(name, []).extend(words)

    @property
    def is_green(self) -> bool:
        """Whether nothing disagrees or is missing; where no predictions are kept, :attr:`numbers` is 0 all the same."""
        return not self.problems and not self.missing and self.checked > 0

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The cells that disagree or are missing, and what was checked, for programs."""
        rows: list[dict[str, Any]] = [{"cell": name, "problem": "; ".join(x)} for name, x in self.problems.items()]
        rows += [{"cell": name, "problem": f"missing: {state}"} for name, state in self.missing.items()]
        whole = {"cell": "all", "problem": "" if self.is_green else "not verified"}
        return [*rows, {**whole, "cells": self.checked, "numbers": self.numbers}]

    def __str__(self) -> str:
        lines = [f"{name}: {'; '.join(words)}" for name, words in self.problems.items()]
        lines += [f"{name}: {state}" + ", and planned" * (name != "tune") for name, state in self.missing.items()]
        ending = f"{len(self.problems)} of them disagree" if self.problems else "all agree"
        ending = ending if self.numbers or self.problems else "none could be recomputed"
        ending = ending if self.checked or self.problems else "there was nothing to verify"
        ending += f"; {len(self.missing)} are missing (--allow_missing accepts that)" if self.missing else ""
        lines += [line for line in (*self.notes, self.head) if line]
        return "\n".join([*lines, f"{self.checked} cells, {self.numbers} numbers recomputed: {ending}"])


@dataclass
class _Part:
    """The main table of an ablation or its tuning, whose cells have a chain each.

    Args:
        found: Where what is wrong is told.
        ablation: Whose cells these are.
        planned: The cells of the plan.
        due: Those of them that must have a result.
        prefix: What comes before the names of candidates, ``tune/``.
        done: Those that have one, once they were looked at.
        bare: Names of candidates whose predictions are gone.
        untold: Names of cells that wrote no predictions, by their records.
    """

    found: Verified
    ablation: Ablation
    planned: Sequence[Cell]
    due: Sequence[Cell]
    prefix: str = ""
    done: list[Cell] = field(default_factory=list)
    bare: list[str] = field(default_factory=list)
    untold: list[str] = field(default_factory=list)

    @cached_property
    def chain(self) -> Chain | None:
        """The chain; None if an older version made the cells."""
        return read_chain(self.ablation.directory)

    @cached_property
    def records(self) -> Records:
        """The records of each cell on the evaluated split."""
        return self.chain.measured(self.ablation.evaluate) if self.chain else {}

    @property
    def recorded(self) -> list[str]:
        """The names of the cells in the chain, on whatever split."""
        return list(dict.fromkeys(record["cell"] for record in (self.chain.of("cell") if self.chain else ())))

    def named(self, name: str) -> str:
        """Return what a cell, or the chain, is called in problems."""
        return f"{self.prefix}{name}"

    def say(self, name: str, *words: str) -> None:
        """Add what is wrong with a cell, or with the chain."""
        self.found.say(self.named(name), *words)

    def is_kept(self, name: str) -> bool:
        """Return whether a recorded cell still lies there."""
        return (self.ablation.directory / name / "done.json").is_file()

    def look_at_cells(self) -> None:
        """Check each cell by itself, and note which are done."""
        self.done = [cell for cell in self.due if self._look_at(cell)]

    def _look_at(self, cell: Cell) -> bool:
        """Check a cell by itself; return whether it is done."""
        state, name, records = cell.state(), self.named(cell.name), self.records.get(cell.name, ())
        if state not in ("done", "damaged"):
            if text := cell.outlived():
                self.found.checked += 1
                self.say(cell.name, text)
            elif not (state == "diverged" and self.prefix):  # a diverged candidate is one that lost
                self.found.missing[name] = state
            return False
        if state == "done" and not _table(cell).is_file():
            if records and records[-1]["hashes"]["predictions"] is None:
                self.untold.append(name)
            elif self.prefix:
                self.bare.append(name)
        words, count = ([cell.damage()], 0) if state == "damaged" else _check(cell, name in (*self.bare, *self.untold))
        self.found.checked, self.found.numbers = self.found.checked + 1, self.found.numbers + count
        if words:
            self.say(cell.name, *words)
        return state == "done"

    def compare_targets(self) -> None:
        """Name the cells whose predictions are of other images than those of the rest, or of other classes of these."""
        groups: dict[str, dict[str, list[str]]] = {}
        for cell in self.done:
            path = _table(cell)
            if cell.name in self.found.problems or not path.is_file():
                continue
            table = pd.read_parquet(path)
            truth = [n for n in sorted(table.columns) if n in ("index", "target") or n.startswith("target_")]
            table = table[truth].sort_values("index", kind="stable") if "index" in truth else table[truth]
            content = json_digest(pd.util.hash_pandas_object(table.astype(float), index=False).tolist())
            groups.setdefault(cell.parts["data"], {}).setdefault(content, []).append(cell.name)
        for kinds in groups.values():
            usual = max(kinds, key=lambda kind: len(kinds[kind]))
            for kind, names in kinds.items():
                for name in names if kind != usual else []:
                    self.say(name, f"its images or their targets are not those of {kinds[usual][0]}")

    def compare_environments(self) -> None:
        """Name the cells that other versions trained than the rest."""
        environments = {cell.name: environment_of(cell.run) for cell in self.done}
        if len(set(environments.values())) < 2:
            return
        usual = Counter(environments.values()).most_common(1)[0][0]
        names = [name for name, text in environments.items() if text != usual]
        if self.chain is None:  # when a cell's identity did not hold its environment
            self.found.notes.append(f"trained in other environments than the rest: {', '.join(names)}")
            return
        for name in names:
            self.say(name, f"trained with {environments[name]}, the rest with {usual}")

    def compare_chain(self) -> None:
        """Compare every file that a record of the chain holds the hash of."""
        ablation, chain = self.ablation, self.chain
        signed = [cell for cell in self.done if cell.run.read("done.json").get("record")]
        if chain is None:
            if signed:
                self.say(CHAIN, "chain.jsonl is gone, and the cells name their records in it")
            elif self.done and not self.prefix:
                self.found.notes.append(
                    "there is no chain of records (an older version made these cells): predictions that were exchanged "
                    "together with their results cannot be told"
                )
            return
        if chain.broken:
            self.say(CHAIN, chain.broken)
        tables = {record["cell"]: record["tables"] for record in chain.of("analyses")}
        for cell in self.done:
            if cell.name not in self.records:
                again = "; to measure it again, remove its done.json and `vitlab ablate run`"
                way = "" if ablation.is_evidence or self.prefix else again
                self.say(cell.name, f"the chain has no record of it on {ablation.evaluate}{way}")
                continue
            last, now = self.records[cell.name][-1]["hashes"], hashes_of(cell.run, ablation.evaluate)
            tables_now = analyses_of(cell.run)
            gone = ("predictions",) if self.named(cell.name) in self.bare else ()
            changed = [name for name in last if last[name] != now.get(name) and name not in gone]
            changed += [n for n, h in tables.get(cell.name, {}).items() if tables_now.get(n) != h]
            if changed:
                self.say(cell.name, f"not as it was recorded: {', '.join(changed)}")
        self._count_again()
        if not self.prefix:
            noted = [record["digest"] for record in chain.of("registered")]
            if noted and registered(ablation).get("digest") != noted[-1]:
                self.say(CHAIN, "registered.json is not the registration that was recorded")

    def _count_again(self) -> None:
        """Tell of cells that were measured with several weights, and of those that lie there no more.

        A file of weights has other bytes after each training, so results are compared by what all records tell of them:
        metrics (not in those of 0.2.0 or before) and predictions.
        """
        for name, mine in self.records.items():
            hashes = [record["hashes"] for record in mine]
            if len({each["result"] for each in hashes}) > 1:
                keys = [key for key in ("metrics", "predictions") if all(each.get(key) for each in hashes)]
                keys = keys or ["result"]
                kinds = len({tuple(each[key] for key in keys) for each in hashes})
                words = f"{kinds} different results" if kinds > 1 else "equal results"
                self.found.notes.append(f"{self.named(name)}: measured {len(mine)} times, with {words}")
        gone = [self.named(name) for name in self.recorded if not self.is_kept(name)]
        lost = [name for name in gone if name in self.found.missing or not self.ablation.is_evidence or self.prefix]
        self.found.missing |= dict.fromkeys(lost, "measured and recorded, but its folder is gone")
        if others := [name for name in gone if name not in lost]:
            self.found.notes.append(f"recorded, but not in this plan and not exported: {', '.join(others)}")

    def name_outsiders(self) -> None:
        """Say which recorded cells lie there and are in no plan, such as those of a seed that the file dropped."""
        planned = {cell.name for cell in self.planned}
        if there := [self.named(name) for name in self.recorded if name not in planned and self.is_kept(name)]:
            self.found.notes.append(f"recorded, but not in this plan: {', '.join(there)}")

    def name_the_rest(self) -> None:
        """Say what of a result nothing recomputes."""
        stated = {name for c in self.done for name in split_metrics(c.run.measured(c.ablation.evaluate))}
        rest = sorted(stated - {"acc1", "mae", "acc1_macro", "f1_macro"})
        rest += [f"the analyses {', '.join(self.ablation.analyses)}"] if self.done and self.ablation.analyses else []
        if rest:
            self.found.notes.append(f"not recomputed, as predictions do not tell: {', '.join(rest)}")


def verify_evidence(ablation: Ablation, resolved: list[Resolved], allow_missing: bool = False) -> Verified:
    """Recompute every number of the finished cells from their predictions, refit the gate, and compare.

    Args:
        ablation: The ablation.
        resolved: Its arms, as they were probed.
        allow_missing: Whether planned cells and predictions of candidates may be missing; they are named all the same.
    """
    tuning, found = Tuning(ablation, resolved), Verified()
    cells = tuning.cells
    main = _Part(found, ablation, cells, cells)
    parts = [main]
    if planned := tuning.candidates:
        due = [cell for trial in tuning.trials if not trial.stopped for cell in trial.cells]  # halving leaves no result
        parts.append(_Part(found, planned[0].ablation, planned, due, "tune/"))
    for part in parts:
        part.look_at_cells()
    there = {cell.arm.name for cell in cells} | {*tuning.given_up}
    found.missing |= {arm.name: "not built or not tuned" for arm in ablation.arms if arm.name not in there}
    fits, wrong, note = linear.check(ablation, resolved)
    found.numbers += fits
    found.notes += [note] if note else []
    main.compare_targets()
    main.compare_environments()
    for part in parts:
        part.compare_chain()
        part.name_outsiders()
    main.name_the_rest()
    if limits := dict.fromkeys(cell.limit for cell in main.done if cell.limit):
        found.notes.append(f"measured on a part of the {ablation.evaluate} split, as planned: {', '.join(limits)}")
    if untold := [name for part in parts for name in part.untold]:
        found.notes.append(f"cannot be recomputed, as the task writes no predictions: {preview(untold)}")
    if bare := parts[-1].bare:
        found.missing["tune"] = f"{len(bare)} of {len(parts[-1].done)} candidates have no predictions"
    if allow_missing and found.missing:
        found.notes.append(f"missing, as allowed: {', '.join(f'{k} ({v})' for k, v in found.missing.items())}")
        found.missing = {}
    if wrong:
        found.say(linear.FILE, *wrong)
    found.head = main.chain.sentence() if main.chain else ""
    return found


def _check(cell: Cell, is_bare: bool = False) -> tuple[list[str], int]:
    words = [text] if (text := unreadable(cell.run, cell.ablation)) else []
    data = cell.run.read("data.json")
    if json_digest(data) != cell.parts["data"]:
        words.append("data.json differs from the plan: it was trained on other images")
    try:
        seed = parse_own(cell.run.config.read_text())["seed_everything"]
        words += [f"config.yaml has seed {seed}"] if seed != cell.seed else []
        changed = cell.changed_settings()
        words += [f"it was trained with other settings than planned: {changed}"] if changed else []
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        words.append(f"config.yaml cannot be read: {one_line(error)}")
    path = _table(cell)
    if words or not path.is_file():
        return words or ([] if is_bare else [f"there is no {path.name} of predictions"]), 0
    found, stated = (
        told_by_predictions(path, len(data.get("class_names") or [])),
        cell.run.measured(cell.ablation.evaluate),
    )
    both = {name: (value, stated[name]) for name, value in found.items() if name in stated}
    words += [f"{n} is {b:.9g}, its predictions give {a:.9g}" for n, (a, b) in both.items() if not _agree(a, b)]
    planned = (data.get("splits") or {}).get(cell.ablation.evaluate, {}).get("n")
    if planned is not None and (found["n"] > planned if cell.limit else found["n"] != planned):
        words.append(f"predictions of {found['n']:.0f} images, the split has {planned}")
    return words, len(both)


def _table(cell: Cell) -> Path:
    return cell.run.predictions(cell.ablation.evaluate)


def _agree(a: float, b: float) -> bool:
    return abs(a - b) <= CLOSE * max(1.0, abs(a), abs(b)) or (a != a and b != b)


def told_by_predictions(path: Path, classes: int = 0) -> dict[str, Any]:
    """Return the metrics computed from a table of predictions.

    Args:
        path: The table.
        classes: The number of classes, for the means over them; 0 takes that of the probabilities, if there are any.
    """
    table = pd.read_parquet(path)
    found = {"n": float(len(table))}
    if "target" in table:
        found["acc1"] = float((table["target"] == table["prediction"]).mean())
        both, classes = table[["target", "prediction"]].to_numpy(), classes or classes_of_table(table)
        if classes and len(table) and both.min() >= 0 and both.max() < classes:
            found |= over_classes(confusion(both[:, 0], both[:, 1], classes))
        return found
    means: dict[str, list[float]] = {"acc1": [], "mae": []}
    for name in (name for name in table.columns if name.startswith("target_")):
        there = table[table[name].notna()]  # an empty target does not count, nor one that is empty throughout
        truth, answer = there[name], there[name.replace("target", "prediction")]
        if name.replace("target", "probability") in table:  # of the class that is predicted
            means["acc1"] += [float((truth == answer).mean())] if len(there) else []
        else:
            means["mae"] += [float((truth - answer).abs().mean())] if len(there) else []
    return found | {name: float(np.mean(each)) for name, each in means.items() if each}
