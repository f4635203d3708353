"""The plan of an ablation: cells, fairness, detectable effect, time, memory and disk; whether its arms start alike."""

import hashlib
import math
import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from vitlab.ablation.execution.cells import Cell, Resolved, cells_of, images_per_step
from vitlab.ablation.execution.commands import build_arm
from vitlab.ablation.execution.status import counts_text
from vitlab.ablation.execution.tuning import Tuning
from vitlab.ablation.file.arms import Arm
from vitlab.ablation.file.spec import Ablation
from vitlab.ablation.inference.answers import are_pairs
from vitlab.ablation.inference.audit import fair_facts, mismatches, reference
from vitlab.ablation.inference.baselines import arm_questions
from vitlab.ablation.inference.looks import planned_look
from vitlab.ablation.inference.measured import CellResults, collect
from vitlab.ablation.inference.verdicts import claim_questions
from vitlab.ablation.inference.words import deviations, exploratory
from vitlab.errors import preview
from vitlab.jobs.terminal import terminal_as_it_was
from vitlab.runs.processes import as_it_was
from vitlab.runs.records import parameters_of
from vitlab.stats import detectable, levels
from vitlab.tables import columns, records

Tensors = dict[str, tuple[tuple[int, ...], str]]  # of each tensor: shape, hash of its values


@dataclass
class Plan:
    """The plan of an ablation; as text, the lines that the command prints."""

    arms: pd.DataFrame  # one row per arm: its cost and differences from the arm that it must match
    unlike: dict[str, list[str]]  # arm: how it does not match
    lines: list[str]
    is_refused: bool  # arms do not match, and `match.on_violation` is fail
    starts: list[str] = field(default_factory=list)  # with `check`: comparison of initial weights
    same_start: bool | None = None

    def __str__(self) -> str:
        return "\n".join([*self.lines, *self.starts])

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The arms with how each does not match, for programs."""
        return [{**row, "unlike": "; ".join(self.unlike.get(row["arm"], []))} for row in records(self.arms)]


def plan_of(ablation: Ablation, resolved: list[Resolved], workers: int) -> Plan:
    """Return the plan of the cells of resolved arms."""
    tuning = Tuning(ablation, resolved)
    tuned, lost = {arm.name: arm for arm in tuning.tuned}, tuning.given_up
    cells = cells_of(ablation, [tuned.get(arm.name, arm) for arm in resolved if arm.name not in lost])
    states: Counter[str] = Counter(cell.state() for cell in cells)
    states["given up"] = len(lost) * len(ablation.seeds)
    grid = " x ".join(f"{len(levels)} {axis}" for axis, levels in ablation.axes.items())
    size = f"{len(ablation.arms)} arms x {len(ablation.seeds)} seeds = {states.total()} cells"
    split, limits = ablation.split_of(ablation.primary), dict.fromkeys(cell.limit for cell in cells if cell.limit)
    part = f", the evaluation on a part of its images: {', '.join(limits)}" if limits else ""
    lines = [
        f"{ablation.name}: {grid} = {size} ({counts_text(states)})",
        f"measured: {ablation.primary} of the {ablation.checkpoint} checkpoint on the {split} split{part}",
        "",
        *_table(resolved),
        "",
    ]
    unfair = mismatches(ablation, resolved)
    lines += [f"mismatch {name}: {'; '.join(words)}" for name, words in unfair.items()]
    lines += _power(collect(ablation, resolved))
    left = [cell for cell in cells if not cell.is_finished()]
    if tune := ablation.tune:
        open_ = [arm for arm in resolved if arm.name not in (*tuned, *lost)]
        over = Counter(trial.arm for trial in tuning.trials if trial.is_over)
        lines.append(f"tuning   {tune.budget} candidates per arm ({tune.search}); {len(open_)} arms are not tuned yet")
        lines += [f"given up {name}: {why}; it is not measured" for name, why in lost.items()]
        untried = {arm.name: range(over[arm.name], tune.budget) for arm in open_}
        left += [Cell(ablation, arm, seed) for arm in open_ for seed in tune.seeds for _ in untried[arm.name]]
    lines += _cost(ablation, left, workers)
    rows = [{"arm": r.name, **r.arm.levels, **fair_facts(r)} for r in resolved]
    return Plan(pd.DataFrame(rows), unfair, lines, bool(unfair) and ablation.match.on_violation == "fail")


def _cost(ablation: Ablation, left: list[Cell], workers: int) -> list[str]:
    """Return the time, memory and disk that the cells will need, estimated from each arm's probe."""
    new = [cell.resolved for cell in left if not cell.is_done()]
    training = [arm.length.get("steps", 0) * images_per_step(arm.config) / arm.images_per_second for arm in new]
    starts = [c.resolved.start_seconds * (2 * (not c.is_done()) + bool(c.missing_analyses())) for c in left]
    seconds = (sum(t for t in training if math.isfinite(t)) + sum(starts)) / workers
    share = sum(starts) / workers / seconds if seconds else 0
    text = f"about {seconds / 60:.1f} min for {len(left)} cells, {workers} at a time ({share:.0%} start-up)"
    text += "; plus validation" + (" and analyses" if ablation.analyses else "")
    peaks = {kind: max(arm.peak_memory.get(kind, 0) for arm in new) for kind in ("host", "cuda")} if new else {}
    memory = ", ".join(f"{peak / 2**30:.2g} GiB of {kind}" for kind, peak in peaks.items() if peak)
    disk = f"disk     about {sum(map(_bytes, new)) / 2**20:.0f} MiB in {ablation.directory}"
    return [f"time     {text}", *([f"memory   {memory} per cell"] if memory else []), disk]


def _bytes(arm: Resolved) -> float:
    return (parameters_of(arm.model) or 0) * (2 * 12 + 2 * 4)  # float32, Adam


def _table(resolved: list[Resolved]) -> list[str]:
    rows = [["arm", "parameters", "pos_embed", "MFLOP", "tokens", "steps", "sum(lr)", "of pos_embed", "img/s"]]
    for arm in resolved:
        f = fair_facts(arm)
        position = f["sum_lr_pos_embed"]
        mflop = f"{f['flops'] / 1e6:.3g}" if f["flops"] else "?"
        rows.append(
            [
                arm.name,
                f"{f['parameters'] or 0:,}",
                f"{f['pos_embed parameters']:,}",
                mflop,
                str(f["tokens"] or "?"),
                str(f["steps"] or "?"),
                f"{f['sum_lr']:.3g}",
                f"{position:.3g}" if position is not None else "-",
                f"{f['images_per_second']:.0f}",
            ]
        )
    return columns(rows).splitlines()


def _power(results: CellResults) -> list[str]:
    ablation, looks = results.ablation, planned_look(results.ablation)
    n = len(looks.seeds)
    if len(ablation.seeds) < 2:
        return ["power    n = 1: no inference; set `seeds: 3` to explore, 5 for a main result"]
    if n < 2:
        return [f"power    the error was spent, at {looks.most} seeds: no further seed enters a test"]
    compared = [*arm_questions(results, ablation.primary).values()]
    m = len({q.key for q in (*compared, *(asked.question for asked in claim_questions(results) if asked.question))})
    if not m:
        return ["power    nothing is compared: no arm has a baseline, and there is no claim"]
    is_paired = all(are_pairs(results, [arm for arm, _ in q.terms]) for q in compared)
    smallest = detectable(n, levels(looks.times, ablation.stats.alpha / m)[-1], is_paired)
    unit, test = ("the paired differences", "paired t") if is_paired else ("a run", "Welch's t")
    text = f"{n} seeds detect a difference of {deviations(smallest)} of {unit} with 80 % power"
    text = f"power    {text} ({test}{f', strictest of {m} comparisons' if m > 1 else ''})"
    few = f"; {words}, and more seeds detect smaller ones" if (words := exploratory(n)) else ""
    if not (sd := ablation.stats.sd or _spread(results)):
        return [text + few]
    value = f"{smallest * sd * (math.sqrt(2) if is_paired else 1):.3g}"
    return [f"{text}: {value} if runs have sd {sd:.2g}" + (" and no correlation" if is_paired else "") + few]


def _spread(results: CellResults) -> float | None:
    values = [results.values(arm, results.ablation.primary) for arm in results.ablation.arms]
    variances = [statistics.variance(x) for x in values if len(x) > 1]
    return math.sqrt(statistics.mean(variances)) if variances else None


def check_lines(ablation: Ablation) -> tuple[list[str], bool]:
    """Compare the initial weights of each arm with those of equal name and shape in the arm to match.

    Weights that an arm is given by `init_from` are named, and not compared.

    Returns:
        A line for each arm, and whether all of them are equal.
    """
    given = {arm.name: arm.weights(ablation.seeds[0]) for arm in ablation.arms}
    starts = {arm.name: _start(ablation, arm) for arm in ablation.arms if not given[arm.name]}
    lines, is_alike = [], True
    for arm in ablation.arms:
        if source := given[arm.name]:
            lines.append(f"init     {arm.name}: weights of {source}, not compared")
            continue
        matched, start = reference(ablation, arm) or arm, starts[arm.name]
        if source := given[matched.name]:
            lines.append(f"init     {arm.name}: {len(start)} tensors, not compared with the weights of {source}")
            continue
        if matched is arm:
            lines.append(f"init     {arm.name}: {len(start)} tensors")
            continue
        other = starts[matched.name]
        shared = [key for key, (shape, _) in start.items() if key in other and other[key][0] == shape]
        differing = [key for key in shared if start[key] != other[key]]
        own = [key for key in start if key not in shared]
        text = f"{len(shared)} tensors of the same name and shape as in {matched.name}, "
        text += f"{len(differing)} DIFFER INITIALLY: {preview(differing, 4)}" if differing else "all equal initially"
        lines.append(f"init     {arm.name}: {text}" + (f"; only here: {_few(own)}" if own else ""))
        is_alike = is_alike and not differing
    return lines, is_alike


@terminal_as_it_was()
@as_it_was()
def _start(ablation: Ablation, arm: Arm) -> Tensors:
    """Return the initial weights of an arm with the first seed: of its network, or of a module that is one itself."""
    import torch

    task = build_arm(ablation, arm).model
    state = getattr(task, "net", task).state_dict()
    return {
        k: (tuple(v.shape), hashlib.sha256(v.flatten().view(torch.uint8).numpy().tobytes()).hexdigest())
        for k, v in state.items()
        if isinstance(v, torch.Tensor)  # and not what a module keeps beside them
    }


def _few(names: list[str]) -> str:
    return preview(dict.fromkeys(".".join(name.split(".")[:2]) for name in names), 4)
