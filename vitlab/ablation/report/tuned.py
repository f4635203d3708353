"""The tuning of each arm: a table of candidates, and the response to each value."""

import math
from typing import Any

from matplotlib.axes import Axes

from vitlab.ablation.execution.tuning import Tuning
from vitlab.ablation.file.settings import Range, Tune
from vitlab.ablation.inference.measured import CellResults
from vitlab.ablation.inference.words import Section, decimals
from vitlab.ablation.report.drawings import Drawn, arm_style, draw, legend
from vitlab.analysis.catalogue import Rows

SEARCHED = {"grid": "the same {n} candidates", "random": "the same {n} candidates, drawn at random"}
SEARCHED["tpe"] = "{n} candidates, each found by Optuna's TPE from those before it (Bergstra et al. 2011)"


def tuning_section(results: CellResults) -> list[Section]:
    """Return the candidates and choices of each arm; empty without tuning."""
    ablation, tune, tuning = results.ablation, results.ablation.tune, results.tuning
    if tune is None:
        return []
    words = _rules(tuning, tune) + [f"{text} of the search space." for text in tuning.border_words()]
    words += [f"{arm} is not measured: {why}." for arm, why in tuning.given_up.items()]
    rows, digits = [], decimals(t.last_score() for t in tuning.trials)
    for t in tuning.trials:
        shown = f"{t.score():.{digits}f}" if t.score() == t.score() else "diverged" if t.has_diverged else "-"
        if t.stopped:
            shown = f"stopped after epoch {t.stopped} at {t.last_score():.{digits}f}"
        mark = "chosen" if tuning.chosen.get(t.arm) is t else ""
        rows.append([t.arm, *(str(t.values[key]) for key in tune.space), shown, mark])
    return [Section("Tuning", words, [[["arm", *tune.space, f"val {ablation.primary}", ""], *rows]])]


def _rules(tuning: Tuning, tune: Tune) -> list[str]:
    """Return the declared rules of the tuning, and how far it is while it is not over."""
    how, seeds = SEARCHED[tune.search].format(n=tune.budget), ", ".join(map(str, tune.seeds))
    tried, count = tuning.trials, len(tuning.ablation.arms) * tune.budget
    over = sum(t.is_over for t in tried)
    verb, left = ("tried", "") if over == count else ("tries", f"; {over} of {count} are over so far")
    words = [f"Every arm {verb} {how} on the validation split, seeds {seeds}{left}."]
    if tune.halving:
        those = "of all that come so far" if tune.search == "tpe" else "of an arm's candidates"
        words.append(
            f"Successive halving: after a quarter and after half of the epochs the best 1 in {tune.halving} {those} go "
            f"on; {sum(t.stopped > 0 for t in tried)} of {len(tried)} were stopped."
        )
    if tune.floor is not None:
        words.append(f"An arm whose best candidate does not reach {tune.floor} is given up.")
    return words


def responses(results: CellResults) -> dict[str, Drawn]:
    """Return the figure of what the candidates gave; nothing without tuning."""
    ablation, tune = results.ablation, results.ablation.tune
    if tune is None:
        return {}
    tuning, chosen = results.tuning, results.tuning.chosen
    rows: Rows = []
    for t in tuning.trials:
        value, others = t.last_score(), tuning.by_arm[t.arm]
        at = [other.score_at(t.stopped) if t.stopped else other.score() for other in others]
        if math.isfinite(value):  # of a candidate that was stopped: beside the best of its arm at that epoch
            to_best = value - ablation.best(score for score in at if score == score)
            state = {"value": value, "to_best": to_best, "stopped": t.stopped, "chosen": chosen.get(t.arm) is t}
            rows.append({"arm": t.arm, **t.values, **state, "diverged": False})
        elif t.has_diverged:
            lost = {"value": math.nan, "to_best": math.nan, "stopped": 0, "chosen": False, "diverged": True}
            rows.append({"arm": t.arm, **t.values, **lost})
    if not rows:
        return {}

    def paint(*axes: Axes) -> None:
        for ax, key in zip(axes, tune.space, strict=True):
            _response(ax, results, rows, key, tune.space[key])
            ax.margins(y=0.12)
            ax.axhline(0, color="0.4", lw=0.8, ls="--", zorder=0)
        axes[0].set_ylabel(f"val {ablation.primary}, less the arm's best")
        legend(axes[-1])

    n = f"{len(tune.seeds)} seed{'s' * (len(tune.seeds) > 1)}"
    title = f"Tuning: each candidate's val {ablation.primary} to the best of its arm (n = {n}); the ring is the choice"
    title += "; a cross was stopped early, beside the best at that epoch" if any(r["stopped"] for r in rows) else ""
    title += "; a triangle at the bottom diverged" if any(r["diverged"] for r in rows) else ""
    return {"tuning": Drawn(title, draw(3.0, paint, title, columns=len(tune.space)), rows)}


def _response(ax: Axes, results: CellResults, rows: Rows, key: str, space: Any) -> None:
    """Draw each candidate of each arm over one key, and a line through the best at each value of a grid.

    The values of a grid stand side by side, and the arms beside each other at each of them.
    """
    is_range = isinstance(space, Range)
    numbers = all(isinstance(row[key], int | float) and not isinstance(row[key], bool) for row in rows)
    rows = rows if numbers else [{**row, key: str(row[key])} for row in rows]  # lists and null among them
    values: list[Any] = sorted({row[key] for row in rows}) if numbers else list(dict.fromkeys(map(str, space)))
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    for i, arm in enumerate(arms):
        color, mark, dashes = arm_style(results.ablation, arm)
        shift = 0.6 * (i - (len(arms) - 1) / 2) / len(arms)
        place = {v: v if is_range and numbers else values.index(v) + shift for v in values}
        mine = [row for row in rows if row["arm"] == arm]
        shown: Any = {"color": color, "ls": dashes, "lw": 0.7}
        for row in mine:
            if row.get("diverged"):
                low: Any = {"transform": ax.get_xaxis_transform(), "clip_on": False, "mfc": "none", "mec": color}
                ax.plot([place[row[key]]], [0.0], "v", ms=6, **low)
                continue
            form: Any = {"mew": 1.1} if row["stopped"] else {"mew": 0, "alpha": 0.8}
            ax.plot([place[row[key]]], [row["to_best"]], "x" if row["stopped"] else mark, color=color, ms=4.5, **form)
            if row["chosen"]:
                ax.plot([place[row[key]]], [row["to_best"]], "o", mfc="none", mec=color, ms=9, mew=1.3)
        if not is_range:
            known = [r for r in mine if not r.get("diverged")]
            there = [v for v in values if any(r[key] == v for r in known)]
            line = [results.ablation.best(r["to_best"] for r in known if r[key] == v) for v in there]
            ax.plot([place[v] for v in there], line, **shown, alpha=0.6)
        ax.plot([], [], marker=mark, ms=3.5, label=arm, **shown)
    if not is_range:
        ax.set_xticks(range(len(values)), [f"{v:g}" if numbers else str(v) for v in values], fontsize=8)
        ax.minorticks_off()
    elif numbers and min(values) > 0 and max(values) / min(values) >= 8:
        ax.set_xscale("log")
    ax.set_xlabel(key)
