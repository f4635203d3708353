"""Repeat finished cells: evaluate their kept weights again, train one of them again, and compare what that gives."""

import random
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vitlab.ablation.evidence.chain import table_digest
from vitlab.ablation.evidence.verify import Verified
from vitlab.ablation.execution import process
from vitlab.ablation.execution.cells import Cell
from vitlab.ablation.execution.commands import evaluation, training
from vitlab.ablation.execution.gpus import Slot, slot
from vitlab.runs.openings import note_opening


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
