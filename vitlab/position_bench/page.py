"""Publish what is measured: evidence, one figure, and the table of a page; alone, since it draws."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vitlab.analysis.figures import COLORS
from vitlab.analysis.typeset import INCHES, figure_bytes, printed
from vitlab.layers.pos_embed import POS_EMBEDS
from vitlab.position_bench.answers import answers_of, smallest
from vitlab.position_bench.bench import compare_with, measured_words
from vitlab.position_bench.cells import Bench
from vitlab.position_bench.judging import TaskVerdict, score_interval, score_text
from vitlab.position_bench.protocol import TASKS, chance_of_tasks
from vitlab.runs.atomic import atomic_write, write_text
from vitlab.tables import markdown_lines

BEGIN, END = "<!-- posbench: written by `vitlab posbench --evidence` -->", "<!-- posbench: end -->"
_VERDICT_COLORS = {"better": COLORS[2], "worse": COLORS[1], "": COLORS[0]}  # against `none`


def write_bench_page(bench: Bench, target: Path) -> list[Path]:
    """Copy the complete methods of a bench to ``target/evidence``, and draw and tabulate them.

    The page is ``target/README.md``: what lies between its two marks is written again, the rest stays.

    Args:
        bench: The folder of cells, with the data, whose answers are published.
        target: Folder of the page.
    """
    evidence = target / "evidence"
    evidence.mkdir(parents=True, exist_ok=True)
    complete = bench.complete()
    is_own = evidence.resolve() == bench.folder.resolve()
    for name in () if is_own else complete:
        shutil.rmtree(evidence / name, ignore_errors=True)  # cells of an earlier protocol may have had other names
        shutil.copytree(bench.folder / name, evidence / name)
    answers = {
        k: v
        for training in bench.protocol["trainings"]
        for k, v in answers_of(training, bench.pictures.of(training).test).items()
    }
    with atomic_write(evidence / "answers.npz") as beside:
        np.savez_compressed(beside, **{k: smallest(v, int(v.max()) + 1) for k, v in answers.items()})  # type: ignore[arg-type]
    figure, page = target / "posbench.svg", target / "README.md"
    if complete:
        write_text(figure, figure_bytes(draw_scores(bench, complete), "svg").decode())
    old = page.read_text() if page.is_file() else f"# posbench\n\n{BEGIN}\n{END}\n"
    before, after = old.split(BEGIN)[0], old.split(END)[-1]
    write_text(page, before + BEGIN + "\n" + "\n".join(page_lines(bench, complete)) + "\n" + END + after)
    return [evidence, *([figure] if complete else []), page]


def page_lines(bench: Bench, complete: list[str]) -> list[str]:
    """Return the generated part of the page: figure, scores and verdicts."""
    lines = ["", f"{measured_words(bench)}."]
    lines += ["", "![Methods by tasks, with intervals](posbench.svg)", ""] if complete else []
    rows = [["method", *TASKS, "time", "memory"]]
    for name in complete:
        scores, cost = bench.scores(name), bench.record(name, "cost") or {}
        cells = [score_text(scores.get(task)) for task in TASKS]
        rows.append([name, *cells, f"{cost['time']:.2f}", f"{cost['memory']:.2f}"])
    rows.append(["chance", *(f"{100 * x:.1f}" for x in chance_of_tasks(bench.protocol).values()), "", ""])
    lines += markdown_lines(rows)
    against, verdicts = bench.protocol["claims"]["against"], _verdicts(bench, complete)
    if not verdicts:
        return lines
    for other in against:
        names = [name for name in complete if name not in (other, "none")]
        if not names:
            continue
        rows = [["method", *TASKS]]
        for name in names:
            found = {v.task: v for v in verdicts[name] if v.against == other}
            rows.append([name, *(_claim_cell(found[task]) for task in TASKS)])
        lines += ["", f"Against `{other}`, Holm over each method's {_claim_counts(verdicts, names)}:", ""]
        lines += markdown_lines(rows)
    if left := [name for name in POS_EMBEDS if name not in complete]:
        lines += ["", f"Not measured yet: {', '.join(left)}."]
    return lines


def _claim_cell(verdict: TaskVerdict) -> str:
    return "n/a" if verdict.word == "not applicable" else f"{verdict.word} {100 * verdict.difference:+.1f}"


def _claim_counts(verdicts: Mapping[str, Sequence[TaskVerdict]], names: Sequence[str]) -> str:
    """Return how many claims the family of each method has, and those of fewer."""
    counts = {name: sum(v.word != "not applicable" for v in verdicts[name]) for name in names}
    most = max(counts.values())
    fewer = ", ".join(f"`{name}`: {count}" for name, count in counts.items() if count < most)
    return f"{most} claims" + (f" ({fewer})" if fewer else "")


def draw_scores(bench: Bench, complete: list[str]) -> Figure:
    """Draw a panel for each task: the score of each method with its 95 % interval, its seeds, and that of ``none``.

    The color is the verdict against ``none``: better, worse or neither.
    """
    figure = Figure(figsize=(INCHES["page"], 0.9 + 0.32 * len(complete)), layout="constrained")
    panels = figure.subplots(2, (len(TASKS) + 1) // 2, sharey=True).ravel()
    better_or_worse = {
        (name, v.task): v.word
        for name, found in _verdicts(bench, complete).items()
        for v in found
        if v.against == "none" and v.word in _VERDICT_COLORS
    }
    scores = {name: bench.scores(name) for name in complete}
    for ax, (task, (text, training)) in zip(panels, TASKS.items(), strict=False):
        for y, name in enumerate(complete):
            if values := scores[name].get(task):
                low, high = score_interval(values)
                color = _VERDICT_COLORS[better_or_worse.get((name, task), "")]
                ax.plot([100 * low, 100 * high], [y, y], color=color, linewidth=1.5)
                ax.plot([100 * x for x in values], [y + 0.3] * len(values), ".", color="0.6", markersize=1.5)
                ax.plot(100 * np.mean(values), y, "o", color=color, markersize=3)
            else:
                ax.text(0.5, y, "n/a", transform=ax.get_yaxis_transform(), ha="center", va="center")
        if base := scores.get("none", {}).get(task):
            ax.axvline(100 * np.mean(base), color="0.6", linewidth=0.8, linestyle=":")
        ax.set_title(task)
        ax.set_xlabel(f"% right: {text}")
        if training == "glyphs":  # from nothing to all right, so that noise at chance looks small
            ax.set_xlim(-5, 105)
        ax.set_yticks(range(len(complete)), complete)
        ax.spines[["top", "right"]].set_visible(False)
    _draw_key(panels[-1])
    panels[0].set_ylim(len(complete) - 0.4, -0.6)
    return printed(figure, INCHES["page"])


def _draw_key(ax: Axes) -> None:
    """Say in the empty panel what colors and marks mean."""
    ax.set_axis_off()
    texts = {"better": "better than none", "worse": "worse than none", "": "neither is shown"}
    for place, (word, text) in zip((0.95, 0.8, 0.65), texts.items(), strict=True):
        ax.plot(0.02, place, "o", color=_VERDICT_COLORS[word], markersize=3, transform=ax.transAxes)
        ax.text(0.1, place, text, transform=ax.transAxes, va="center")
    for place, text in zip(
        (0.45, 0.3, 0.15), ("bars: 95 % intervals", "small dots: seeds", "dotted: none"), strict=True
    ):
        ax.text(0.0, place, text, transform=ax.transAxes, va="center")


def _verdicts(bench: Bench, complete: list[str]) -> dict[str, list[TaskVerdict]]:
    """Return the verdicts on each method but ``none``; empty where a method is missing that all are compared with."""
    if not all(name in complete for name in bench.protocol["claims"]["against"]):
        return {}
    return {name: compare_with(bench, name, bench).verdicts for name in complete if name != "none"}
