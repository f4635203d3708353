"""The progress of an ablation, from its files."""

import math
import time
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vitlab.ablation.execution.cells import Cell, Resolved, State, cells_of, identity_parts
from vitlab.ablation.execution.identity import code_digest, versions_in_use
from vitlab.ablation.file.spec import Ablation
from vitlab.runs import lock
from vitlab.runs.directory import RunDir
from vitlab.runs.matching import matching

if TYPE_CHECKING:
    import pandas as pd

PARTS = ("config", "data", "code", "environment")  # of an identity
OTHER_CODE = {"code", "environment"}  # those that may differ in a stale cell
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


def status_of(ablation: Ablation, measured: Sequence[Resolved], lost: Container[str] = ()) -> Status:
    """Return the state of every cell: those of arms that the tuning has ``lost`` are given up, of others missing."""
    lines, waiting = [], 0
    rows: list[dict[str, Any]] = []
    width = max(len(arm.name) for arm in ablation.arms)
    total: Counter[State | str] = Counter()
    known = {arm.name: arm for arm in measured}
    for arm in ablation.arms:
        unknown = "given up" if arm.name in lost else "missing"
        found: list[tuple[State | str, str]] = [(unknown, "")] * len(ablation.seeds)
        if facts := known.get(arm.name):
            cells = [Cell(ablation, facts, seed) for seed in ablation.seeds]
            states = [cell.state() for cell in cells]
            found = [(state, state_text(cell, state)) for cell, state in zip(cells, states, strict=True)]
            waiting += sum(s == "done" and not cell.is_finished() for cell, s in zip(cells, states, strict=True))
        counts = Counter(state for state, _ in found)
        total += counts
        lines.append(f"{arm.name:<{width}}  {_counts(counts)}")
        for seed, (state, text) in zip(ablation.seeds, found, strict=True):
            rows.append({"arm": arm.name, **arm.levels, "seed": seed, "state": state, "note": text})
            lines += [f"  s{seed}  {text}"] if text else []
    text = f"; {waiting} of those done lack an analysis" if waiting else ""
    text += foreign_cells_text(ablation, measured)
    return Status(rows, [*lines, f"{'all':<{width}}  {_counts(total)}{text}"])


def foreign_cells_text(ablation: Ablation, resolved: Sequence[Resolved]) -> str:
    """Return how many finished runs are not cells of the present plan, and why; empty if there are none."""
    counts = Counter(" and ".join(parts) for parts in _outside_the_plan(ablation, resolved))
    kinds = ", ".join(
        f"{n} with other {parts}" if parts else f"{n} of arms that the file no longer has"
        for parts, n in counts.items()
    )
    return f"; also finished cells that are not in this plan: {kinds}" if counts else ""


def _outside_the_plan(ablation: Ablation, resolved: Sequence[Resolved]) -> list[list[str]]:
    """Return of each finished run that is no cell of the present plan which parts of its identity differ.

    There are no such parts where the file no longer has the arm. Runs that stand for a stale cell of the plan are left
    out: they are counted there.
    """
    cells = cells_of(ablation, resolved)
    planned, by_seed = {cell.name for cell in cells}, {cell.name.rpartition("-")[0]: cell for cell in cells}
    probed, names = {arm.name for arm in resolved}, {arm.name for arm in ablation.arms}
    present = _present(ablation) if probed < names and not ablation.is_evidence else {}
    found: list[list[str]] = []
    for path in matching(ablation.directory, "*/s*-*/done.json"):
        arm, parts = path.parent.parent.name, identity_parts(RunDir(path.parent))
        name = f"{arm}/{path.parent.name}"
        cell = by_seed.get(name.rpartition("-")[0])
        if arm not in names:
            found.append([])
        elif arm not in probed:  # nothing else is known of an arm that was not built since
            found.append([key for key in present if parts.get(key) != present[key]] or ["config"])
        elif cell is None:
            found.append(["seed"])
        elif name not in planned:
            differing = [key for key in PARTS if parts.get(key) != cell.parts.get(key)]
            stale = cell.stale() if {*differing} & OTHER_CODE and cell.state() == "stale" else None
            if not stale or stale.path != path.parent:
                found.append(differing)
    return found


def count_of_other_code(ablation: Ablation) -> int:
    """Return how many cells of the file's arms other code or versions have finished; of evidence, none."""
    if ablation.is_evidence:
        return 0
    now, names = _present(ablation), {arm.name for arm in ablation.arms}
    paths = [path for path in matching(ablation.directory, "*/s*-*/done.json") if path.parent.parent.name in names]
    found = [identity_parts(RunDir(path.parent)) for path in paths]
    return sum(any(parts.get(key) != value for key, value in now.items()) for parts in found)


def _present(ablation: Ablation) -> dict[str, str]:
    """Return the parts of an identity that are known before a probe."""
    return {"code": code_digest(own=ablation.trust_imports), "environment": versions_in_use()}


def state_text(cell: Cell, state: str) -> str:
    """Return who trains a cell and how far, why it has failed, or that its process is gone; empty if all is said."""
    if state == "running":
        return running_text(cell)
    if state == "damaged":
        return cell.damage()
    if text := cell.failure_text():
        return text
    if state == "missing" and not cell.outlived() and (rows := cell.run.rows()):
        return f"begun, {_epoch(cell, rows)}; the next run continues it"
    return cell.outlived()


def _epoch(cell: Cell, rows: list[dict[str, Any]]) -> str:
    return f"epoch {rows[-1]['epoch'] + 1}" + (f"/{cell.resolved.epochs}" if cell.resolved.epochs else "")


def _counts(counts: Mapping[Any, int]) -> str:
    return ", ".join(f"{counts[state]} {state}" for state in ORDER if counts.get(state))


def running_text(cell: Cell) -> str:
    """Return which process trains a cell, for how long, and its progress."""
    claim = lock.read(cell.claim) or {}
    seconds = max(0.0, time.time() - claim.get("started", time.time()))
    rows = cell.run.rows()
    epochs = cell.resolved.epochs
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
