"""The analyses of the cells: curves over the seeds of an arm, from the tables of `vitlab analyze`."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from vitlab.ablation.inference.measured import Results, table_of
from vitlab.ablation.inference.words import Section
from vitlab.stats import interval

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Curve:
    """How to read the table of an analysis as curves."""

    x: str  # the column of the horizontal axis; "" for single numbers, which are a table alone
    measures: tuple[str, ...]
    lines: tuple[str, ...] = ()  # columns with one curve per value
    words: str = ""


OLD_DISPLACEMENT = (
    "Its tables are of an earlier version, where a token met itself at the offset (0, 0), which is content: that "
    "offset is left out. All seeds share one draw of the shuffles, whose noise the interval does not hold."
)
CURVES = {
    "resolution": Curve("size", ("acc1",), ("protocol", "policy"), "Accuracy at other image sizes; `none` is the part "
    "that positions do not explain."),
    "scramble": Curve("blocks", ("acc1", "flipped", "change_mean"), (), "Tokens change places in blocks "
    "before they get positions."),
    "scramble_image": Curve("blocks", ("acc1", "flipped", "change_mean"), (), "Patches of the image change "
    "places; for overlapping tokenizers that changes the tokens too."),
    "shift": Curve("pixels", ("acc1", "flipped", "change_mean"), ("fill",), "The image moves; mean of "
    "four directions."),
    "displacement": Curve("layer", ("spread",), (), "Standard deviation over pairs of query and key of what their "
    "offset alone tells of a head's logit, tokens shuffled before positions, less the noise of the images: 0 knows "
    "nothing of position, and noise alone falls below 0 as often as above. Mean of the heads."),
    "probe": Curve("layer", ("accuracy", "excess", "r2"), ("images", "positions"), "Share of tokens whose cell a "
    "ridge regression tells, the excess over no positions, and R^2 of row and column."),
    "distance": Curve("layer", ("distance", "above_null"), (), "Mean attention distance in patches, and what of it is "
    "left of the same images with tokens in random places; mean of the heads."),
    "entropy": Curve("layer", ("entropy", "above_null"), (), "Entropy of attention in nats, and the same against "
    "tokens in random places; mean of the heads."),
    "fewshot": Curve("shots", ("acc1",), (), "Ridge regression on frozen features from a few labels a class."),
    "knn": Curve("k", ("acc1",), (), "The vote of the most similar training images."),
    "faithfulness": Curve("", ("gain", "first_above_random"), ("filling", "map"), "Area between the curves of the "
    "class's probability while a map's least and its most relevant patches go first (0: a random map), and what the "
    "patch named first does beyond a random one. Only what holds under every filling is evidence."),
    "sanity": Curve("blocks", ("correlation",), ("map", "random"), "How alike a map stays while weights "
    "become random."),
    "cka": Curve("other_layer", ("cka",), ("against", "layer"), "How alike two layers represent the same images."),
    "token_layers": Curve("layer", ("mean_distance",), (), "Mean distance of attention between the splits, in cells."),
    "position": Curve("", ("norm_ratio",), (), "Length of the table's vectors over that of the patch tokens."),
    "confusion": Curve("", ("recall", "precision", "f1"), ("class",), "Of each class."),
    "calibration": Curve("high", ("accuracy", "confidence"), (), "Share that is right in bins of the probability, by "
    "the upper end of the bin."),
    "cost": Curve("", ("value",), ("quantity", "of"), "Speed needs an idle machine."),
}  # fmt: skip


def curve_rows(results: Results) -> Rows:
    """Return a row for each arm and point of each curve: mean over seeds and its interval."""
    return [
        row
        for name in results.ablation.analyses
        if name in CURVES
        for arm, tables in _tables(results, name).items()
        for row in _arm_rows(results, name, arm, tables)
    ]


def _tables(results: Results, name: str) -> dict[str, list[pd.DataFrame]]:
    """Return the tables of each arm's seeds."""
    found: dict[str, list[pd.DataFrame]] = {arm.name: [] for arm in results.ablation.arms}
    read = displacements(results) if name == "displacement" else None
    for (arm, seed), run in results.runs.items():
        table = table_of(run, name) if read is None else read.get((arm, seed))
        if table is not None:
            found[arm].append(_SUMMARIES.get(name, pd.DataFrame.copy)(table).assign(seed=seed))
    return found


def _arm_rows(results: Results, name: str, arm: str, tables: list[pd.DataFrame]) -> Iterator[dict[str, Any]]:
    curve = CURVES[name]
    if not tables:
        return
    keys = [*curve.lines, curve.x]
    whole = pd.concat(tables).assign(**({} if curve.x else {"": 0.0}))
    measures = [name for name in curve.measures if name in whole]  # tables of before have fewer
    each = whole.astype(dict.fromkeys(measures, float)).groupby([*keys, "seed"], sort=False)[measures].mean()
    for point, part in each.groupby(keys, sort=False):
        *line, x = point if isinstance(point, tuple) else (point,)
        for measure in measures:
            values = part[measure].dropna().tolist()
            if not values:
                continue
            low, high = interval(values, results.ablation.stats.ci)
            row = {"analysis": name, "arm": arm, "line": ", ".join(map(str, line)), "measure": measure, "x": float(x)}
            row |= {"n": len(values), "planned": len(results.ablation.seeds), "mean": sum(values) / len(values)}
            yield {**row, "low": low, "high": high, "half": (high - low) / 2}


def displacements(results: Results) -> dict[tuple[str, int], pd.DataFrame]:
    """Return the tables of `displacement` by arm and seed; if one is of before, all without the offset (0, 0)."""
    read = {key: table_of(run, "displacement") for key, run in results.runs.items()}
    tables = {key: table for key, table in read.items() if table is not None and "position" in table}
    is_old = any("pairs" not in table for table in tables.values())
    return {key: _of_others(table) for key, table in tables.items()} if is_old else tables


def is_without_itself(results: Results) -> bool:
    """Return whether the offset (0, 0) is left out of `displacement`, for the sake of tables of before."""
    return any((table["pairs"] == 0).any() for table in displacements(results).values())


def _of_others(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table of `displacement` for pairs of different tokens: NaN and no pairs at the offset (0, 0).

    The mean that was taken from each head held that offset, as 1 / N of all N^2 pairs. Taking it out again moves
    all others by the same amount, and the share of their errors that came with it is independent of theirs.
    """
    h, w = table["dy"].max() + 1, table["dx"].max() + 1
    itself = (table["dy"] == 0) & (table["dx"] == 0)
    pairs = (h - table["dy"].abs()) * (w - table["dx"].abs())
    same = table[itself].set_index(["layer", "head"])
    heads = pd.MultiIndex.from_frame(table[["layer", "head"]])
    moved, error = (same[name].reindex(heads).to_numpy() / (h * w - 1) for name in ("position", "error"))
    changed = {
        "position": (table["position"] + moved).mask(itself),
        "error": (table["error"] ** 2 - error**2).clip(lower=0).mask(itself) ** 0.5,
    }
    return table.assign(**changed, pairs=pairs.mask(itself, 0))


def _spread(table: pd.DataFrame) -> pd.DataFrame:
    """Return the mean over heads of the spread of their logits over pairs beyond noise, for each layer.

    A variance below that of the noise gives a spread below 0: cut off at 0, noise would look like knowledge.
    """
    keys = [table["layer"], table["head"]]
    weights = table["pairs"] / table["pairs"].groupby(keys).transform("sum")
    beyond = (weights * (table["position"] ** 2 - table["error"] ** 2)).groupby(keys).sum()
    spread = np.sign(beyond) * beyond.abs() ** 0.5
    return spread.groupby("layer").mean().rename("spread").reset_index()


def _gains(table: pd.DataFrame) -> pd.DataFrame:
    """Return the gain of each map under each filling; tables of before had deletion and insertion by the mean color."""
    if "filling" in table:
        return table[table["kind"] == "MoRF"].drop_duplicates(["filling", "map"])
    areas = table.drop_duplicates(["kind", "map"]).pivot(index="map", columns="kind", values="area")
    gain = (areas["insertion"] - areas["deletion"]).rename("gain")  # an insertion curve is LeRF from right to left
    return gain.reset_index().assign(filling="mean color")


_SUMMARIES = {"displacement": _spread, "faithfulness": _gains}


def mean_profiles(results: Results) -> dict[str, pd.DataFrame]:
    """Return each arm's mean logit over heads and seeds at each layer and displacement."""
    found: dict[str, list[pd.DataFrame]] = {}
    for (arm, _), table in displacements(results).items():
        found.setdefault(arm, []).append(table)
    return {
        arm: pd.concat(found[arm]).groupby(["layer", "dy", "dx"])["position"].mean().reset_index()
        for arm in (arm.name for arm in results.ablation.arms)
        if arm in found
    }


def sections(results: Results, rows: Rows) -> list[Section]:
    """Return a section for each analysis, and one on those that could not be done."""
    found: list[Section] = []
    for name in results.ablation.analyses:
        mine = [row for row in rows if row["analysis"] == name]
        if mine:
            ci = f"{results.ablation.stats.ci:.0%}"
            notes = sorted(set(_notes(results, name, "note")))
            words = [CURVES[name].words, f"Mean over seeds ± half of its {ci} t interval; not tested, not adjusted."]
            if name == "displacement" and is_without_itself(results):
                words.append(OLD_DISPLACEMENT)
            tables = [_table(mine, measure) for measure in dict.fromkeys(row["measure"] for row in mine)]
            found.append((f"Analysis: {name}", [*words, *notes[:1]], tables))
    lost = [
        f"{name}: not done for {arm}: {text}"
        for name in results.ablation.analyses
        for arm, text in dict(zip(*_not_done(results, name), strict=True)).items()
    ]
    if results.ablation.analyses and (lost or not found):
        found.append(("Analyses that were not done", lost or ["None has been done yet."], []))
    return found


def _notes(results: Results, name: str, key: str) -> list[str]:
    noted = [run.note(name) for run in results.runs.values()]
    return [re.split(", pos_embed=|; ", note[key])[0] + "." for note, now in noted if key in note and not now.is_stale]


def _not_done(results: Results, name: str) -> tuple[list[str], list[str]]:
    arms, texts = [], []
    for (arm, seed), run in results.runs.items():
        note, now = run.note(name)
        if not note or now.is_stale:
            failure = results.cells[arm, seed].failure()
            texts.append(f"{failure['kind']}: {failure['last']}" if failure else "`vitlab ablate run` will do it")
            arms.append(f"{arm} s{seed}")
        elif "not_done" in note:
            arms, texts = [*arms, arm], [*texts, note["not_done"]]
    return arms, texts


def _table(rows: Rows, measure: str) -> list[list[str]]:
    mine = [row for row in rows if row["measure"] == measure]
    points = sorted({row["x"] for row in mine})
    curve = CURVES[mine[0]["analysis"]]
    head = [
        "arm",
        *(["line"] if curve.lines else []),
        "n",
        *(f"{curve.x} {x:g}" if curve.x else "value" for x in points),
    ]
    lines: dict[tuple[str, str], dict[float, dict[str, Any]]] = {}
    for row in mine:
        lines.setdefault((row["arm"], row["line"]), {})[row["x"]] = row
    table = [[f"{measure}: {head[0]}", *head[1:]]]
    for (arm, line), cells in lines.items():
        least = min(cells.values(), key=lambda row: row["n"])
        start = [arm, *([line] if curve.lines else []), f"{least['n']}/{least['planned']}"]
        table.append([*start, *(_cell(cells[x]) if x in cells else "-" for x in points)])
    return table


def _cell(row: dict[str, Any]) -> str:
    return f"{row['mean']:.4f}" + (f" ± {row['half']:.4f}" if row["n"] > 1 else "")
