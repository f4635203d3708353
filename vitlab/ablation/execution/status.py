"""The progress of an ablation, from its files."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vitlab.ablation.execution.cells import Cell, Resolved, State, cells_of, identity_parts
from vitlab.ablation.execution.identity import code_digest, versions_in_use
from vitlab.ablation.execution.progress import epoch_text, running_text
from vitlab.ablation.execution.tuning import Tuning
from vitlab.ablation.file.spec import Ablation
from vitlab.runs.directory import RunDir
from vitlab.runs.matching import matching

if TYPE_CHECKING:
    import pandas as pd

PARTS = ("config", "data", "code", "environment")  # of an identity
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


def status_of(tuning: Tuning) -> Status:
    """Return how far the tuning is, and the state of every cell: of an arm that is not known yet, it is missing."""
    ablation, measured = tuning.ablation, tuning.tuned
    lines, waiting = _tuning_lines(tuning), 0
    rows: list[dict[str, Any]] = []
    width = max(len(arm.name) for arm in ablation.arms)
    total: Counter[State | str] = Counter()
    known = {arm.name: arm for arm in measured}
    for arm in ablation.arms:
        unknown = "given up" if arm.name in tuning.given_up else "missing"
        found: list[tuple[State | str, str]] = [(unknown, "")] * len(ablation.seeds)
        if facts := known.get(arm.name):
            cells = [Cell(ablation, facts, seed) for seed in ablation.seeds]
            states = [cell.state() for cell in cells]
            found = [(state, _state_text(cell, state)) for cell, state in zip(cells, states, strict=True)]
            waiting += sum(s == "done" and not cell.is_finished() for cell, s in zip(cells, states, strict=True))
        counts = Counter(state for state, _ in found)
        total += counts
        lines.append(f"{arm.name:<{width}}  {counts_text(counts)}")
        for seed, (state, text) in zip(ablation.seeds, found, strict=True):
            rows.append({"arm": arm.name, **arm.levels, "seed": seed, "state": state, "note": text})
            lines += [f"  s{seed}  {text}"] if text else []
    words = [counts_text(total), *([f"{waiting} of those done lack an analysis"] if waiting else [])]
    words += filter(None, [foreign_cells_text(ablation, measured)])
    return Status(rows, [*lines, f"{'all':<{width}}  {'; '.join(words)}"])


def _state_text(cell: Cell, state: str) -> str:
    """Return who trains a cell and how far, why it has failed, or that its process is gone; empty if all is said."""
    if state == "running":
        return running_text(cell)
    if state == "damaged":
        return cell.damage()
    if text := cell.failure_text():
        return text
    if state == "missing" and not cell.outlived() and (rows := cell.run.rows()):
        return f"begun, {epoch_text(cell, rows)}; the next run continues it"
    return cell.outlived()


def _tuning_lines(tuning: Tuning) -> list[str]:
    """Return how many candidates are over, what others do, arms given up, and choices at a border."""
    ablation, tune = tuning.ablation, tuning.ablation.tune
    if tune is None:
        return []
    over, stopped = sum(t.is_over for t in tuning.trials), sum(t.stopped > 0 for t in tuning.trials)
    early = f", {stopped} of them stopped early" if stopped else ""
    texts = {cell.name: _state_text(cell, cell.state()) for cell in tuning.due if not cell.is_waiting()}
    words = [f"{over} of {len(ablation.arms) * tune.budget} candidates are over{early}"]
    words += [f"{name}: {text}" for name, text in texts.items() if text]
    words += [f"{arm} is given up: {why}" for arm, why in tuning.given_up.items()]
    return [f"tuning: {text}" for text in (*words, *tuning.border_words())]


def foreign_cells_text(ablation: Ablation, resolved: Sequence[Resolved]) -> str:
    """Return how many finished runs are not cells of the present plan, and why; empty if there are none."""
    counts = Counter(" and ".join(parts) for parts in _outside_the_plan(ablation, resolved))
    kinds = ", ".join(
        f"{n} with other {parts}" if parts else f"{n} of arms that the file no longer has"
        for parts, n in counts.items()
    )
    return f"also finished cells that are not in this plan: {kinds}" if counts else ""


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
            stale = cell.stale() if cell.state() == "stale" else None
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


def counts_text(counts: Mapping[Any, int]) -> str:
    """Return how many cells are in each state, without the states of none.

    >>> counts_text({"missing": 2, "done": 1, "failed": 0})
    '1 done, 2 missing'
    """
    return ", ".join(f"{counts[state]} {state}" for state in ORDER if counts.get(state))
