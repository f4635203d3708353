"""How far an ablation is, from its files alone."""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vitlab.ablation.file.spec import Ablation
from vitlab.ablation.work.cells import Cell, Resolved, State, others
from vitlab.runs import lock

if TYPE_CHECKING:
    import pandas as pd

ORDER = ("done", "running", "failed", "diverged", "damaged", "stale", "missing")


@dataclass
class Status:
    """How far each cell is; as text, a line for each arm and one for each cell that runs or has failed."""

    rows: list[dict[str, Any]]  # arm, seed, state, what is to be said of it
    lines: list[str]
    failed: list[str] = field(default_factory=list)  # the cells that the call which returns this could not finish
    code: int = 0  # of a signal that ended this call: 130, or 75 where it can go on later
    submitted: bool = False

    def __str__(self) -> str:
        return "\n".join(self.lines)

    @property
    def interrupted(self) -> bool:
        """Whether a signal ended the call that returns this."""
        return self.code > 0

    @property
    def cells(self) -> "pd.DataFrame":
        """A row for each cell: arm, its levels, seed, state, and what is to be said of it."""
        import pandas as pd

        return pd.DataFrame(self.rows)


def status_of(ablation: Ablation, resolved: list[Resolved | None]) -> Status:
    """Return how far every cell is."""
    lines, waiting = [], 0
    rows: list[dict[str, Any]] = []
    width = max(len(arm.name) for arm in ablation.arms)
    total: Counter[State | str] = Counter()
    for arm, facts in zip(ablation.arms, resolved, strict=True):
        cells = [Cell(ablation, facts, seed) for seed in ablation.seeds] if facts else []
        states = [cell.state() for cell in cells] or ["missing"] * len(ablation.seeds)
        counts = Counter(states)
        total += counts
        waiting += sum(state == "done" and not c.is_finished() for c, state in zip(cells, states, strict=False))
        lines.append(f"{arm.name:<{width}}  {_counts(counts)}")
        words = [_words(cell, state) for cell, state in zip(cells, states, strict=False)] or [""] * len(states)
        for seed, state, text in zip(ablation.seeds, states, words, strict=True):
            rows.append({"arm": arm.name, **arm.levels, "seed": seed, "state": state, "note": text})
            lines += [f"  s{seed}  {text}"] if text else []
    text = f"; {waiting} of those done miss an analysis" if waiting else ""
    text += other_words(ablation, resolved)
    return Status(rows, [*lines, f"{'all':<{width}}  {_counts(total)}{text}"])


def other_words(ablation: Ablation, resolved: list[Resolved | None]) -> str:
    """Return how many finished runs are no cells of the present plan, and why; empty if there are none."""
    counts = Counter(others(ablation, resolved).values())
    kinds = ", ".join(f"{n} of other {part}" for part, n in counts.items())
    return f"; beside them finished cells that are not of this plan: {kinds}" if counts else ""


def _words(cell: Cell, state: str) -> str:
    if state == "running":
        return running_words(cell)
    if state == "damaged":
        return cell.damage()
    failure = cell.failure()
    return f"{failure['stage']}, {failure['kind']}: {failure['last']}" if failure else ""


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
