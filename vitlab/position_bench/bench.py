"""Measure a position embedding against the published evidence, and say how it stands."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from vitlab.config.trust import trust
from vitlab.errors import UsageError
from vitlab.layers.pos_embed import POS_EMBEDS
from vitlab.position_bench.cells import Bench, published
from vitlab.position_bench.judging import (
    TaskVerdict,
    best_of_families,
    judge,
    ranks,
    score_interval,
    score_text,
    with_interval,
)
from vitlab.position_bench.methods import label_of, method_of
from vitlab.position_bench.protocol import TASKS, chance_of_tasks, guessing_bounds, read_protocol
from vitlab.position_bench.running import CellRunner
from vitlab.runs.processes import as_it_was
from vitlab.stats import contrast
from vitlab.tables import columns

_PHRASES = {  # a verdict before what it is against
    "better": "better than",
    "worse": "worse than",
    "equal": "equal to",
    "undecided": "undecided against",
    "both at chance": "both at chance, as",
}


class Judged(NamedTuple):
    """What posbench says of a method.

    Args:
        method: Its name.
        scores: Of each task, the score of each seed.
        verdicts: Against what the protocol claims, Holm over all of them.
        families: Against the best measured method of each family, Holm over all of these.
        cost: CPU seconds a step, and time and memory relative to ``none``.
        notes: What limits the comparison.
        lost: Cells without a score, as their training diverged, and why; their tasks, which need every seed, have no
            verdict.
    """

    method: str
    scores: dict[str, list[float]]
    verdicts: list[TaskVerdict]
    families: list[TaskVerdict]
    cost: dict[str, float]
    notes: list[str]
    lost: Mapping[str, str] = {}

    def __str__(self) -> str:
        return "\n".join(judged_lines(self))

    def of_task(self, task: str) -> list[TaskVerdict]:
        """Return the verdicts on a task."""
        return [verdict for verdict in (*self.verdicts, *self.families) if verdict.task == task]


class Anchor(NamedTuple):
    """What training the anchor, a published cell, again says of a comparison with published cells.

    Args:
        notes: What limits it.
        is_paired: Whether equal seeds are pairs, as they are where a machine repeats the published bits.
    """

    notes: Sequence[str] = ()
    is_paired: bool = True


SAME_MACHINE = Anchor()  # what is compared was all trained here


@as_it_was()
def posbench(
    method: Any,
    *,
    data: str | Path | None = None,
    folder: str | Path = "posbench",
    anchors: bool = False,
    protocol: str | None = None,
    trust_imports: str | tuple[str, ...] | list[str] = (),
    say: Callable[[str], None] = print,
) -> Judged:
    """Train a position embedding on the tasks of posbench, and compare it with published methods.

    What is complete in ``folder`` is not trained again, so a run that was stopped continues.

    Args:
        method: A name such as ``rope2d``, a class path, a :class:`vitlab.PosEmbed` or its class.
        data: Folder that holds CIFAR-10, as torchvision leaves it.
        folder: Where the cells are kept.
        anchors: Whether to train ``none`` and ``learned`` here instead of reading their published cells. They are, too,
            under a protocol of which these are not published.
        protocol: File or name of another protocol, such as ``t2t``.
        trust_imports: Packages of yours that a class path may import.
        say: Receives a line for each cell.

    Raises:
        UsageError: The method is not a PosEmbed or cannot be measured, or the images are not those of the protocol.
    """
    trust(trust_imports)
    chosen = method_of(method)
    label = label_of(chosen)
    bench = Bench(Path(folder), Path(data) if data else None, read_protocol(protocol), say)
    bench.check_kept(label, chosen)
    references = published(protocol)
    for name in references.complete():
        references.check_kept(name)
    anchors = anchors or not all(map(references.is_complete, bench.protocol["claims"]["against"]))
    anchor = SAME_MACHINE if anchors else check_anchor(bench, references)
    lost = CellRunner(bench, chosen).run()
    if anchors:
        references = bench
        for name in bench.protocol["claims"]["against"]:
            for cell, why in CellRunner(bench, name).run().items():
                raise UsageError(f"no verdict against {name}, whose cell {cell} has no score: {why}")
    note_look(bench, label)
    return compare_with(bench, label, references, anchor)._replace(lost=lost)


def check_anchor(bench: Bench, known: Bench) -> Anchor:
    """Train the published anchor cell of ``known`` again, and return what its difference means for the comparison."""
    anchor = bench.protocol["anchor"]
    name, cell = anchor["method"], f"{anchor['training']}-{anchor['seed']}"
    theirs = known.record(name, cell)
    if theirs is None:
        return Anchor(["the anchor cell is not published yet: give --anchors to train none and learned here"])
    torch.set_num_threads(1)
    CellRunner(bench, name, f"anchor.{name}").run_cell(anchor["training"], anchor["seed"], theirs["rate"])
    mine = bench.predictions(f"anchor.{name}", cell)
    if all(np.array_equal(mine[task], x) for task, x in known.predictions(name, cell).items()):
        return SAME_MACHINE
    task = anchor["training"]
    score, values = bench.record(f"anchor.{name}", cell)["scores"][task], known.scores(name)[task]  # type: ignore[index]
    spread = contrast([values], [1.0])
    half = (spread.interval(0.95)[1] - spread.value) * (len(values) + 1) ** 0.5
    is_inside = abs(score - spread.value) <= half
    where = f"{'inside' if is_inside else 'OUTSIDE'} the interval of a further seed"
    where = where if spread.is_testable else "whose seeds show no spread to judge that by"
    advice = "" if is_inside else "; do not trust the comparison: --anchors trains none and learned here"
    note = (
        f"this machine does not repeat the published bits: the anchor scores {score:.4f} here and "
        f"{theirs['scores'][task]:.4f} there, {where}, so seeds are not taken as pairs{advice}"
    )
    return Anchor([note], is_paired=False)


def compare_with(bench: Bench, label: str, references: Bench, anchor: Anchor = SAME_MACHINE) -> Judged:
    """Return the verdicts on the complete cells of a method; all that the protocol claims against are in references."""
    claims = bench.protocol["claims"]
    mine = bench.scores(label)
    measured = {name: references.scores(name) for name in references.complete()}
    validation = {name: references.validation(name) for name in measured}
    best = best_of_families(bench.protocol["families"], validation, label)
    against = {name: measured[name] for name in claims["against"] if name != label}
    rest = {name: measured[name] for name in best.values() if name not in claims["against"]}
    guessing = guessing_bounds(bench.protocol)
    verdicts, families = (
        judge(mine, x, claims["alpha"], claims["margin"], anchor.is_paired, guessing) for x in (against, rest)
    )
    cost = {k: v for k, v in (bench.record(label, "cost") or {}).items() if isinstance(v, float)}
    return Judged(label, mine, verdicts, families, cost, [*anchor.notes, *_not_applicable(bench, label)])


def _not_applicable(bench: Bench, label: str) -> list[str]:
    """Return why a method cannot do a task, of each such task once."""
    reasons: dict[str, str] = {}
    for kept in bench.results(label):
        reasons = kept["not_applicable"] | reasons  # of the first seed
    return [f"{task} is not applicable: {why}" for task, why in reasons.items()]


def note_look(bench: Bench, label: str) -> None:
    """Note that the test results of a method are looked at."""
    with (bench.folder / label / "looks.txt").open("a") as file:
        file.write(time.strftime("%Y-%m-%dT%H:%M:%SZ\n", time.gmtime()))


def judged_lines(judged: Judged) -> list[str]:
    """Return what a terminal shows of a verdict."""
    rows = []
    for task, (text, training) in TASKS.items():
        if task not in judged.scores:
            is_lost = any(cell.partition("-")[0] == training for cell in judged.lost)
            rows.append([f"  {task}", "no score" if is_lost else "not applicable", f"({text})"])
            continue
        words = ", ".join(
            f"{_PHRASES[v.word]} {v.against} ({100 * v.difference:+.1f})"
            for v in judged.of_task(task)
            if v.word != "not applicable"
        )
        rows.append([f"  {task}", score_text(judged.scores[task]), words])
    lines = [f"{judged.method}: score of each task, mean of seeds with its 95 % interval"]
    lines += columns(rows).splitlines()
    if judged.cost:
        lines.append(
            f"  cost      {judged.cost['time']:.2f} x the CPU time and {judged.cost['memory']:.2f} x the "
            "activations of none"
        )
    lost = [
        f"{cell} has no score, and without every seed its tasks have none: {why}" for cell, why in judged.lost.items()
    ]
    return lines + [f"  note: {note}" for note in (*judged.notes, *lost)]


def judged_rows(judged: Judged) -> list[dict[str, Any]]:
    """Return a row for each task of a verdict and what it was compared with, numbers in full, for programs."""
    rows = []
    for task, values in judged.scores.items():
        low, high = score_interval(values)
        score = {"method": judged.method, "task": task, "score": float(np.mean(values)), "low": low, "high": high}
        against = [{"against": v.against, "difference": v.difference, "verdict": v.word} for v in judged.of_task(task)]
        rows += [score | verdict for verdict in against or [{}]]
    return rows


def list_rows(bench: Bench) -> list[dict[str, Any]]:
    """Return a row for each measured method and task, numbers in full, for programs."""
    rows = []
    for name in bench.complete():
        for task, values in bench.scores(name).items():
            low, high = score_interval(values) if values else (None, None)
            score = float(np.mean(values)) if values else None
            rows.append({"method": name, "task": task, "score": score, "low": low, "high": high, "seeds": len(values)})
    return rows


def measured_words(bench: Bench) -> str:
    """Return how many methods are measured, and with how many seeds."""
    seeds = len(bench.protocol["seeds"])
    return f"{len(bench.complete())} of {len(POS_EMBEDS)} methods are measured, {seeds} seeds each"


def list_lines(bench: Bench) -> list[str]:
    """Return where the methods stand that are measured, and which are not."""
    complete = bench.complete()
    scores, numbers = {name: bench.scores(name) for name in complete}, range(1, len(TASKS) + 1)
    lines = [f"{measured_words(bench)}: % right, 95 % interval"]
    if complete:
        rows = [["", *TASKS], ["chance", *(f"{100 * x:.1f}" for x in chance_of_tasks(bench.protocol).values())]]
        rows += [[name, *(score_text(mine.get(task)) for task in TASKS)] for name, mine in scores.items()]
        lines += columns(rows, right=numbers).splitlines()
    if len(complete) > 1:
        tables = {task: ranks(scores, task) for task in TASKS}
        rows = [["", *TASKS]]
        for name in complete:
            places = [tables[task].get(name) for task in TASKS]
            rows.append([name, *("n/a" if place is None else with_interval(*place) for place in places)])
        lines += ["rank, mean over seeds with its 95 % interval", *columns(rows, right=numbers).splitlines()]
    if left := [name for name in POS_EMBEDS if name not in complete]:
        lines.append(f"not measured: {', '.join(left)}")
    return lines
