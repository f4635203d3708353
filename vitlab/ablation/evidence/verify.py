"""Recompute the numbers of every cell from its predictions, and compare what evidence holds with its records.

:func:`verify_evidence` reads files; :func:`verify_deep` runs programs: it repeats cells, and compares what they give.
"""

import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from vitlab.ablation.evidence.chain import Chain, analyses_of, environment_of, hashes_of, read_chain, table_digest
from vitlab.ablation.evidence.protocol import registered
from vitlab.ablation.execution import process
from vitlab.ablation.execution.cells import Cell, Resolved
from vitlab.ablation.execution.commands import evaluation, training
from vitlab.ablation.execution.gpus import Slot, slot
from vitlab.ablation.execution.identity import json_digest
from vitlab.ablation.execution.tuning import Tuning
from vitlab.ablation.file.spec import Ablation
from vitlab.ablation.inference import linear
from vitlab.ablation.inference.measured import unreadable
from vitlab.class_metrics import classes_of_table, confusion, over_classes
from vitlab.config.yaml_files import parse_own
from vitlab.errors import one_line, preview
from vitlab.runs.openings import note_opening
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
        ablation: Whose cells these are.
        prefix: What comes before their names.
        planned: The cells of the plan.
        due: Those of them that must have a result.
        done: Those that have one.
        bare: Names of candidates whose predictions are gone.
        untold: Names of cells that wrote no predictions, by their records.
    """

    ablation: Ablation
    prefix: str
    planned: Sequence[Cell]
    due: Sequence[Cell]
    done: Sequence[Cell] = ()
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

    def is_kept(self, name: str) -> bool:
        """Return whether a recorded cell still lies there."""
        return (self.ablation.directory / name / "done.json").is_file()


def verify_evidence(ablation: Ablation, resolved: list[Resolved], allow_missing: bool = False) -> Verified:
    """Recompute every number of the finished cells from their predictions, refit the gate, and compare.

    Args:
        ablation: The ablation.
        resolved: Its arms, as they were probed.
        allow_missing: Whether planned cells and predictions of candidates may be missing; they are named all the same.
    """
    tuning = Tuning(ablation, resolved)
    cells = tuning.cells
    found, parts = Verified(), [_Part(ablation, "", cells, cells)]
    if planned := tuning.candidates:
        due = [cell for trial in tuning.trials if not trial.stopped for cell in trial.cells]  # halving leaves no result
        parts.append(_Part(planned[0].ablation, "tune/", planned, due))
    for part in parts:
        part.done = [cell for cell in part.due if _look_at(found, part, cell)]
    there = {cell.arm.name for cell in cells} | {*tuning.given_up}
    found.missing |= {arm.name: "not built or not tuned" for arm in ablation.arms if arm.name not in there}
    main = parts[0]
    fits, wrong, note = linear.check(ablation, resolved)
    found.numbers += fits
    found.notes += [note] if note else []
    _compare_targets(found, main.done)
    _compare_environments(found, main)
    for part in parts:
        _compare_chain(found, part)
        _name_outsiders(found, part)
    _name_the_rest(found, main.done)
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


def _look_at(found: Verified, part: _Part, cell: Cell) -> bool:
    """Check a cell by itself; return whether it is done."""
    state, name, records = cell.state(), part.named(cell.name), part.records.get(cell.name, ())
    if state not in ("done", "damaged"):
        if text := cell.outlived():
            found.checked += 1
            found.say(name, text)
        elif not (state == "diverged" and part.prefix):  # a diverged candidate is one that lost
            found.missing[name] = state
        return False
    if state == "done" and not _table(cell).is_file():
        if records and records[-1]["hashes"]["predictions"] is None:
            part.untold.append(name)
        elif part.prefix:
            part.bare.append(name)
    words, count = ([cell.damage()], 0) if state == "damaged" else _check(cell, name in (*part.bare, *part.untold))
    found.checked, found.numbers = found.checked + 1, found.numbers + count
    if words:
        found.say(name, *words)
    return state == "done"


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


def _compare_targets(found: Verified, done: Sequence[Cell]) -> None:
    """Name the cells whose predictions are of other images, or of other classes of these, than those of the rest."""
    groups: dict[str, dict[str, list[str]]] = {}
    for cell in done:
        path = _table(cell)
        if cell.name in found.problems or not path.is_file():
            continue
        table = pd.read_parquet(path)
        named = [name for name in sorted(table.columns) if name in ("index", "target") or name.startswith("target_")]
        table = table[named].sort_values("index", kind="stable") if "index" in named else table[named]
        content = json_digest(pd.util.hash_pandas_object(table.astype(float), index=False).tolist())
        groups.setdefault(cell.parts["data"], {}).setdefault(content, []).append(cell.name)
    for kinds in groups.values():
        usual = max(kinds, key=lambda kind: len(kinds[kind]))
        for kind, names in kinds.items():
            for name in names if kind != usual else []:
                found.say(name, f"its images or their targets are not those of {kinds[usual][0]}")


def _compare_environments(found: Verified, part: _Part) -> None:
    """Name the cells that other versions trained than the rest."""
    environments = {cell.name: environment_of(cell.run) for cell in part.done}
    if len(set(environments.values())) < 2:
        return
    usual = Counter(environments.values()).most_common(1)[0][0]
    names = [name for name, text in environments.items() if text != usual]
    if part.chain is None:  # when a cell's identity did not hold its environment
        found.notes.append(f"trained in other environments than the rest: {', '.join(names)}")
        return
    for name in names:
        found.say(name, f"trained with {environments[name]}, the rest with {usual}")


def _compare_chain(found: Verified, part: _Part) -> None:
    """Compare every file that a record of the chain holds the hash of."""
    ablation, chain = part.ablation, part.chain
    signed = [cell for cell in part.done if cell.run.read("done.json").get("record")]
    if chain is None:
        if signed:
            found.say(part.named(CHAIN), "chain.jsonl is gone, and the cells name their records in it")
        elif part.done and not part.prefix:
            found.notes.append(
                "there is no chain of records (an older version made these cells): predictions that were exchanged "
                "together with their results cannot be told"
            )
        return
    if chain.broken:
        found.say(part.named(CHAIN), chain.broken)
    tables = {record["cell"]: record["tables"] for record in chain.of("analyses")}
    for cell in part.done:
        if cell.name not in part.records:
            again = "; to measure it again, remove its done.json and `vitlab ablate run`"
            way = "" if ablation.is_evidence or part.prefix else again
            found.say(part.named(cell.name), f"the chain has no record of it on {ablation.evaluate}{way}")
            continue
        last, now = part.records[cell.name][-1]["hashes"], hashes_of(cell.run, ablation.evaluate)
        gone = ("predictions",) if part.named(cell.name) in part.bare else ()
        changed = [name for name in last if last[name] != now.get(name) and name not in gone]
        changed += [n for n, h in tables.get(cell.name, {}).items() if analyses_of(cell.run).get(n) != h]
        if changed:
            found.say(part.named(cell.name), f"not as it was recorded: {', '.join(changed)}")
    _count_again(found, part)
    if not part.prefix:
        noted = [record["digest"] for record in chain.of("registered")]
        if noted and registered(ablation).get("digest") != noted[-1]:
            found.say(CHAIN, "registered.json is not the registration that was recorded")


def _count_again(found: Verified, part: _Part) -> None:
    """Tell of cells that were measured with several weights, and of those that lie there no more.

    A file of weights has other bytes after each training, so results are compared by what all records tell of them:
    metrics (not in those of 0.2.0 or before) and predictions.
    """
    for name, mine in part.records.items():
        hashes = [record["hashes"] for record in mine]
        if len({each["result"] for each in hashes}) > 1:
            keys = [key for key in ("metrics", "predictions") if all(each.get(key) for each in hashes)] or ["result"]
            kinds = len({tuple(each[key] for key in keys) for each in hashes})
            words = f"{kinds} different results" if kinds > 1 else "equal results"
            found.notes.append(f"{part.named(name)}: measured {len(mine)} times, with {words}")
    gone = [part.named(name) for name in part.recorded if not part.is_kept(name)]
    lost = [name for name in gone if name in found.missing or not part.ablation.is_evidence or part.prefix]
    found.missing |= dict.fromkeys(lost, "measured and recorded, but its folder is gone")
    if others := [name for name in gone if name not in lost]:
        found.notes.append(f"recorded, but not in this plan and not exported: {', '.join(others)}")


def _name_outsiders(found: Verified, part: _Part) -> None:
    """Say which recorded cells lie there and are in no plan, such as those of a seed that the file names no more."""
    planned = {cell.name for cell in part.planned}
    if there := [part.named(name) for name in part.recorded if name not in planned and part.is_kept(name)]:
        found.notes.append(f"recorded, but not in this plan: {', '.join(there)}")


def _name_the_rest(found: Verified, done: Sequence[Cell]) -> None:
    """Say what of a result nothing recomputes."""
    stated = {name for c in done for name in split_metrics(c.run.measured(c.ablation.evaluate))}
    rest = sorted(stated - {"acc1", "mae", "acc1_macro", "f1_macro"})
    rest += [f"the analyses {', '.join(done[0].ablation.analyses)}"] if done and done[0].ablation.analyses else []
    if rest:
        found.notes.append(f"not recomputed, as predictions do not tell: {', '.join(rest)}")


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


def verify_deep(found: Verified, cells: Sequence[Cell]) -> None:
    """Evaluate the kept weights of every cell again, and train one of them again; add what that shows.

    Args:
        found: What the verification of all cells has found.
        cells: Finished cells; which one is trained is drawn each time.
    """
    kept = [cell for cell in cells if (cell.run.checkpoints / f"{cell.ablation.checkpoint}.ckpt").is_file()]
    for cell in kept:
        if words := _again(cell, with_training=False):
            found.say(cell.name, f"its weights, evaluated again: {words}")
    found.notes.append(f"weights of {len(kept)} of {len(cells)} cells evaluated again")
    if cells:
        chosen = random.choice(cells)
        if words := _again(chosen, with_training=True):
            found.say(chosen.name, f"trained again: {words}")
        found.notes.append(f"trained again: {chosen.name}")


def _again(cell: Cell, with_training: bool) -> str:
    """Return how a repetition in a temporary folder differs; empty if it is equal to the bit."""
    split = cell.ablation.evaluate
    note_opening(cell.run.path, split, f"{cell.ablation.checkpoint}.ckpt", {"verify": "deep"})
    known = cell.run.record.get("threads")  # sums of a CPU depend on it in their last bits
    threads = {"OMP_NUM_THREADS": str(known)} if known else {}
    execution = replace(cell.ablation.run, fork=False)
    with tempfile.TemporaryDirectory() as folder:
        there = replace(cell, ablation=replace(cell.ablation, home=Path(folder), wandb=None))  # no run of its own there
        stages = [training(there), evaluation(there)] if with_training else [evaluation(there)]
        if not with_training:
            shutil.copytree(cell.run.path, there.run.path)
            for name in ("results.json", f"predictions/{split}.parquet"):
                (there.run.path / name).unlink(missing_ok=True)
        for stage in stages:
            with slot(1) as held:
                log, seat = Path(folder) / "log", process.Seat(held or Slot())
                code, lines = process.run_in_slot(stage.words, log, execution, seat, threads)
            if code:
                return f"it failed: {lines[-1] if lines else f'exit code {code}'}"
        return _differing(cell, there)


def _differing(cell: Cell, again: Cell) -> str:
    split = cell.ablation.evaluate
    tables = [c.run.predictions(split) for c in (cell, again)]
    old, new = cell.run.measured(split), again.run.stored.get(split) or {}
    name = cell.ablation.primary
    if all(path.is_file() for path in tables) and table_digest(tables[0]) != table_digest(tables[1]):
        return f"other predictions, {name} {new.get(name)} in place of {old.get(name)}"
    return "" if old.get(name) == new.get(name) else f"{name} {new.get(name)} in place of {old.get(name)}"
