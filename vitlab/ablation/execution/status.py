"""The progress of an ablation, from its files."""

import math
import time
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vitlab.ablation.execution.cells import Cell, Resolved, State, others
from vitlab.ablation.file.spec import Ablation
from vitlab.runs import lock

if TYPE_CHECKING:
    import pandas as pd

ORDER = ("done", "running", "failed", "diverged", "damaged", "stale", "given up", "missing")


@dataclass
class Status:
    """The state of each cell; as text, a line for each arm and for each running or failed cell."""

    rows: list[dict[str, Any]]  # arm, seed, state, note
    lines: list[str]
    failed: list[str] = field(default_factory=list)  # cells that this call could not finish
    code: int = 0  # exit code of a signal that ended this call: 130, or 75 if it can continue later
    submitted: bool = False

    def __str__(self) -> str:
        return "\n".join(self.lines)

    @property
    def interrupted(self) -> bool:
        """Whether a signal ended this call."""
        return self.code > 0

    @property
    def cells(self) -> "pd.DataFrame":
        """One row per cell: arm, its levels, seed, state and note."""
        import pandas as pd

        return pd.DataFrame(self.rows)


def status_of(ablation: Ablation, resolved: list[Resolved | None], lost: Container[str] = ()) -> Status:
    """Return the state of every cell; those of arms that the tuning has ``lost`` are given up."""
    lines, waiting = [], 0
    rows: list[dict[str, Any]] = []
    width = max(len(arm.name) for arm in ablation.arms)
    total: Counter[State | str] = Counter()
    for arm, facts in zip(ablation.arms, resolved, strict=True):
        cells = [Cell(ablation, facts, seed) for seed in ablation.seeds] if facts else []
        unknown = "given up" if arm.name in lost else "missing"
        states: list[State | str] = [cell.state() for cell in cells]
        states = states or [unknown] * len(ablation.seeds)
        counts = Counter(states)
        total += counts
        waiting += sum(state == "done" and not c.is_finished() for c, state in zip(cells, states, strict=False))
        lines.append(f"{arm.name:<{width}}  {_counts(counts)}")
        words = [state_text(cell, state) for cell, state in zip(cells, states, strict=False)] or [""] * len(states)
        for seed, state, text in zip(ablation.seeds, states, words, strict=True):
            rows.append({"arm": arm.name, **arm.levels, "seed": seed, "state": state, "note": text})
            lines += [f"  s{seed}  {text}"] if text else []
    text = f"; {waiting} of those done lack an analysis" if waiting else ""
    text += foreign_cells_text(ablation, resolved)
    return Status(rows, [*lines, f"{'all':<{width}}  {_counts(total)}{text}"])


def foreign_cells_text(ablation: Ablation, resolved: list[Resolved | None]) -> str:
    """Return how many finished runs are not cells of the present plan, and why; empty if there are none."""
    counts = Counter(" and ".join(parts) for parts in others(ablation, resolved).values())
    kinds = ", ".join(
        f"{n} with other {parts}" if parts else f"{n} of arms that the file no longer has"
        for parts, n in counts.items()
    )
    return f"; also finished cells that are not in this plan: {kinds}" if counts else ""


def state_text(cell: Cell, state: str) -> str:
    """Return who trains a cell and how far, why it has failed, or that its process is gone; empty if all is said."""
    if state == "running":
        return running_text(cell)
    if state == "damaged":
        return cell.damage()
    if failure := cell.failure():
        return f"{failure['stage']}, {failure['kind']}: {failure['last']}"
    if state == "missing" and not cell.outlived() and (rows := cell.run.rows()):
        return f"begun, {_epoch(cell, rows)}; the next run continues it"
    return cell.outlived()


def _epoch(cell: Cell, rows: list[dict[str, Any]]) -> str:
    epochs = cell.resolved.config.get("trainer", {}).get("max_epochs") or 0
    return f"epoch {rows[-1]['epoch'] + 1}" + (f"/{epochs}" if epochs > 0 else "")


def _counts(counts: Mapping[Any, int]) -> str:
    return ", ".join(f"{counts[state]} {state}" for state in ORDER if counts.get(state))


def running_text(cell: Cell) -> str:
    """Return which process trains a cell, for how long, and its progress."""
    claim = lock.read(cell.claim) or {}
    seconds = max(0.0, time.time() - claim.get("started", time.time()))
    rows = cell.run.rows()
    epochs = cell.resolved.config.get("trainer", {}).get("max_epochs") or 0
    where = f"host {claim.get('host', '?')}, pid {claim.get('pid', '?')}, {seconds:.0f} s"
    if not rows:
        return f"{where}, starting"
    epoch, left = rows[-1]["epoch"] + 1, ""
    if epochs >= epoch and cell.run.metrics.stat().st_mtime > claim.get("started", math.inf):  # a row is of this claim
        mine = [row for row in rows if row.get("attempt") == rows[-1].get("attempt")]
        begun = len({row["epoch"] for row in mine})
        known = next((row["seconds_left"] for row in reversed(mine) if "seconds_left" in row), None)
        left = f", about {seconds * (epochs - epoch) / begun if known is None else known:.0f} s left"
    return f"{where}, step {rows[-1]['step']}, {_epoch(cell, rows)}{left}"
