"""How far an ablation is, from its files alone."""

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from vitlab.ablation.file.spec import Ablation
from vitlab.ablation.work.cells import Cell, Resolved, State
from vitlab.runs import lock

ORDER = ("done", "running", "failed", "diverged", "stale", "missing")


def status_lines(ablation: Ablation, resolved: list[Resolved | None]) -> list[str]:
    """Return a line for each arm and one for each cell that runs or has failed."""
    lines, waiting = [], 0
    width = max(len(arm.name) for arm in ablation.arms)
    total: Counter[State | str] = Counter()
    for arm, facts in zip(ablation.arms, resolved, strict=True):
        cells = [Cell(ablation, facts, seed) for seed in ablation.seeds] if facts else []
        states = [cell.state() for cell in cells] or ["missing"] * len(ablation.seeds)
        counts = Counter(states)
        total += counts
        waiting += sum(cell.is_done() and not cell.is_finished() for cell in cells)
        lines.append(f"{arm.name:<{width}}  {_counts(counts)}")
        for cell, state in zip(cells, states, strict=False):
            if state == "running":
                lines.append(f"  s{cell.seed}  {running_words(cell)}")
            elif failure := cell.failure():
                lines.append(f"  s{cell.seed}  {failure['stage']}, {failure['kind']}: {failure['last']}")
    text = f"; {waiting} of those done miss an analysis" if waiting else ""
    return [*lines, f"{'all':<{width}}  {_counts(total)}{text}"]


def _counts(counts: Mapping[Any, int]) -> str:
    return ", ".join(f"{counts[state]} {state}" for state in ORDER if counts.get(state))


def running_words(cell: Cell) -> str:
    """Return who works on a cell, for how long, and how far it is."""
    claim = lock.read(cell.claim) or {}
    seconds = max(0.0, time.time() - claim.get("started", time.time()))
    rows = cell.run.rows()
    epochs = cell.resolved.config.get("trainer", {}).get("max_epochs") or 0
    where = f"host {claim.get('host', '?')}, pid {claim.get('pid', '?')}, {seconds:.0f} s"
    if not rows:
        return f"{where}, starting"
    epoch = rows[-1]["epoch"] + 1
    left = f", about {seconds * (epochs - epoch) / epoch:.0f} s left" if epochs >= epoch else ""
    return f"{where}, step {rows[-1]['step']}, epoch {epoch}/{epochs}{left}"
