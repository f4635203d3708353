"""The analyses of the cells: curves over the seeds of an arm, from the tables of `vitlab analyze`."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd

from vitlab.ablation.verdict.measured import Results, table_of
from vitlab.ablation.verdict.words import Section
from vitlab.stats import interval

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Curve:
    """How to read the table of an analysis as curves."""

    x: str  # the column of the horizontal axis; "" for single numbers, which are a table alone
    measures: tuple[str, ...]
    lines: tuple[str, ...] = ()  # columns with one curve per value
    words: str = ""


CURVES = {
    "resolution": Curve("size", ("acc1",), ("protocol", "policy"), "Accuracy at other image sizes; `none` is the part "
    "that positions do not explain."),
    "scramble": Curve("blocks", ("acc1", "flipped", "change_mean"), (), "Tokens change places in blocks "
    "before they get positions."),
    "scramble_image": Curve("blocks", ("acc1", "flipped", "change_mean"), (), "Patches of the image change "
    "places; for overlapping tokenizers that changes the tokens too."),
    "shift": Curve("pixels", ("acc1", "flipped", "change_mean"), ("fill",), "The image moves; mean of "
    "four directions."),
    "displacement": Curve("layer", ("spread",), (), "Standard deviation of a head's mean logit over displacements, "
    "each image's tokens shuffled before positions, less the noise of the images: 0 knows nothing of position. Mean of "
    "the heads."),
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
        for arm in results.ablation.arms
        for row in _arm_rows(results, name, arm.name)
    ]


def _arm_rows(results: Results, name: str, arm: str) -> Iterator[dict[str, Any]]:
    curve = CURVES[name]
    tables = []
    for seed in results.ablation.seeds:
        run = results.runs.get((arm, seed))
        table = table_of(run, name) if run else None
        if table is not None and not (
            name == "displacement" and "position" not in table
        ):  # of before the null: content
            tables.append(_SUMMARIES.get(name, pd.DataFrame.copy)(table).assign(seed=seed))
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


def _spread(table: pd.DataFrame) -> pd.DataFrame:
    """Return the spread of a head's logits over displacements beyond noise, for each layer."""
    table = table.assign(noise=table["error"] ** 2)
    heads = table.groupby(["layer", "head"]).agg(
        position=("position", lambda x: x.var(ddof=0)), noise=("noise", "mean")
    )
    spread = (heads["position"] - heads["noise"]).clip(lower=0) ** 0.5
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
    found = {}
    for arm in results.ablation.arms:
        runs = [results.runs.get((arm.name, seed)) for seed in results.ablation.seeds]
        tables = [t for run in runs if run and (t := table_of(run, "displacement")) is not None]
        tables = [table for table in tables if "position" in table]
        if tables:
            found[arm.name] = pd.concat(tables).groupby(["layer", "dy", "dx"])["position"].mean().reset_index()
    return found


def sections(results: Results, rows: Rows) -> list[Section]:
    """Return a section for each analysis, and one on those that could not be done."""
    found: list[Section] = []
    for name in results.ablation.analyses:
        mine = [row for row in rows if row["analysis"] == name]
        if mine:
            ci = f"{results.ablation.stats.ci:.0%}"
            notes = sorted(set(_notes(results, name, "note")))
            words = [CURVES[name].words, f"Mean over seeds ± half of its {ci} t interval; not tested, not adjusted."]
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
