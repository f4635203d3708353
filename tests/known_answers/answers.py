"""What each analysis must say of the networks of `zoo`, and what it must say of any network."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from zoo import DECISIVE, EMPTY, build

from vitlab.analysis import ANALYSES
from vitlab.analysis.positions import spread_of_layers
from vitlab.analysis.subject import Finding, Subject
from vitlab.errors import UsageError


@cache
def ask(analysis: str, network: str) -> Finding | UsageError:
    """Return what an analysis finds in a network, or why it refuses it."""
    try:
        return ANALYSES[analysis].measure(build(network))
    except UsageError as error:
        return error


@dataclass(frozen=True)
class Answer:
    """One question with a known answer."""

    analysis: str
    network: str
    true: str
    say: Callable[[pd.DataFrame, Subject], tuple[str, bool]]  # what the table says, and whether that is true

    @property
    def said(self) -> tuple[str, bool]:
        """What the analysis says of the network, and whether it is right."""
        finding = ask(self.analysis, self.network)
        if isinstance(finding, UsageError):
            return f"refused: {finding}", False
        return self.say(finding.table, build(self.network))


ANSWERS: list[Answer] = []


def known(analysis: str, *networks: str, true: str) -> Callable[[Any], Any]:
    """Register a function of a table (and a subject) as the answer to one question about some networks."""

    def register(say: Callable[..., tuple[str, bool]]) -> Callable[..., tuple[str, bool]]:
        for network in networks:
            ANSWERS.append(Answer(analysis, network, true, say))
        return say

    return register


def best_patches(table: pd.DataFrame, **of: str) -> pd.Series:
    """Return the patch that each image's map names, by map, as numbers of the 4 x 4 grid."""
    for column, value in of.items():
        table = table[table[column] == value]
    table = table.reset_index(drop=True)
    best = table.loc[table.groupby(["image", "map"])["weight"].idxmax()]
    return 4 * best["row"] + best["column"]


INVARIANT = ("no_positions", "no_positions_t2t", "shuffle_invariant", "constant")


@known("scramble", *INVARIANT, true="no output changes")
def _(table, subject):
    most = float(table["change_most"].max())
    return f"at most {most:.1e}, {table['flipped'].max():.0%} flipped", most < 1e-5 and table["flipped"].max() == 0


@known("scramble", "with_positions", true="accuracy falls")
def _(table, subject):
    before, after = table["acc1_low"].iloc[0], table["acc1_high"].iloc[-1]
    return f"{table['acc1'].iloc[0]:.2f} to {table['acc1'].iloc[-1]:.2f}", before > after


@known("scramble_image", "shuffle_invariant", "constant", "no_positions", true="no output changes")
def _(table, subject):
    most = float(table["change_most"].max())
    return f"at most {most:.1e}", most < 1e-5


@known("shift", "shuffle_invariant", "no_positions", true="whole patches around the border change nothing")
def _(table, subject):
    whole = table[(table["fill"] == "circular") & (table["pixels"] % 2 == 0)]
    return f"{whole['agreement'].min():.2f} agree", whole["agreement"].min() == 1


@known("shift", "constant", true="no shift changes anything")
def _(table, subject):
    return f"{table['agreement'].min():.2f} agree", table["agreement"].min() == 1


@known("displacement", "no_positions", "no_positions_t2t", "constant", "uniform", true="no knowledge of position")
def _(table, subject):
    layers = spread_of_layers(table)["spread"]
    inside = ((table["position_low"] <= 1e-9) & (table["position_high"] >= -1e-9)).mean()
    return f"spread {layers.max():.3f}, {inside:.0%} of intervals hold 0", layers.max() < 0.01 and inside > 0.9


@known("displacement", "previous_patch", true="the patch to the left, nothing else")
def _(table, subject):
    logit = table.set_index(["dy", "dx"])["position"]
    rest = logit.drop(index=[(0, -1)])
    return f"{tuple(map(int, logit.idxmax()))}", logit.idxmax() == (0, -1) and rest.std() < 1e-3 < logit.max()


@known("displacement", "with_positions", true="some knowledge of position")
def _(table, subject):
    layers = spread_of_layers(table)["spread"]
    return f"spread {layers.max():.3f}", layers.max() > 0.02


@known("distance", "previous_patch", true="1 patch; more where there is none to the left")
def _(table, subject):
    ys, xs = np.meshgrid(np.arange(3), np.arange(5), indexing="ij")
    border = np.hypot(ys[:, :, None] - ys.flatten(), xs[:, :, None] - xs.flatten())[:, 0].mean()  # evenly to all
    true = 0.8 * 1 + 0.2 * border
    return f"{table['distance'].iloc[0]:.4f}", abs(table["distance"].iloc[0] - true) < 1e-3


@known("distance", "uniform", true="the mean over all pairs")
def _(table, subject):
    off = (table["distance"] - table["uniform"]).abs().max()
    return f"off by {off:.1e}", off < 1e-5


@known("entropy", "uniform", true="ln 17, of 16 patches and the class token")
def _(table, subject):
    return f"{table['entropy'].mean():.4f}", (table["entropy"] - np.log(17)).abs().max() < 1e-5


@known("entropy", "previous_patch", true="0 where there is a patch to the left, ln 15 elsewhere: a fifth of ln 15")
def _(table, subject):
    return f"{table['entropy'].iloc[0]:.4f}", abs(table["entropy"].iloc[0] - np.log(15) / 5) < 1e-3


@known("attention", "dead_heads", true="heads 0 and 2 at patch 3, head 1 at patch 9")
def _(table, subject):
    found = [best_patches(table, map=f"head {i}").unique().tolist() for i in range(3)]
    return str(found), found == [[EMPTY], [DECISIVE], [EMPTY]]


@known("heads", "dead_heads", true="heads 0 and 2 give all to patch 3, head 1 to patch 9")
def _(table, subject):
    found = [int(part["weight"].argmax()) for _, part in table.groupby("head")]
    least = table.groupby("head")["weight"].max().min()
    return f"{found}, at least {least:.4f}", found == [EMPTY, DECISIVE, EMPTY] and least > 0.999


@known("heads", "uniform", true="1/17 in every patch, of 16 and the class token")
def _(table, subject):
    off = (table["weight"] - 1 / 17).abs().max()
    return f"off by {off:.1e}", off < 1e-6


@known("sanity", "with_positions", true="attention lies before the head, and no map is that of random blocks")
def _(table, subject):
    mean = table.set_index(["random", "map"])["correlation"]
    before, most = mean["the head"][["attention", "rollout"]].min(), mean["all blocks"].max()
    return f"{before:.3f} with a random head, at most {most:.2f} with random blocks", before > 0.999 and most < 0.5


@known("sanity", "previous_patch", true="a table outside the blocks decides: rollout stays until it is random, too")
def _(table, subject):
    of = table[table["map"] == "rollout"].set_index("random")
    low, high = of["correlation_low"]["all blocks"], of["correlation_high"]["tokenizer too"]
    return f"above {low:.2f}, then below {high:.2f}", low > 0.5 > high


@known("attribution", "dead_heads", true="maps of outputs and gradient x attention name patch 9; LRP it or nothing")
def _(table, subject):
    right = {name: (best_patches(table, map=name) == DECISIVE).mean() for name in table["map"].unique()}
    good = [name for name, share in right.items() if share == 1]
    wanted = {"occlusion", "integrated gradients", "GradientSHAP", "SmoothGrad", "gradient x attention"}
    others = table[(table["map"] == "LRP") & (4 * table["row"] + table["column"] != DECISIVE)]["weight"].abs().max()
    right = wanted <= set(good) and not {"attention", "rollout"} & set(good) and others < 1e-6
    return "patch 9: " + ", ".join(good), right


@known("attribution", "one_patch", true="all maps name patch 9 in every image, and every other patch has 0")
def _(table, subject):
    right = {name: (best_patches(table, map=name) == DECISIVE).mean() for name in table["map"].unique()}
    others = table[4 * table["row"] + table["column"] != DECISIVE]["weight"].abs().max()
    least = min(right.values())
    return f"patch 9 in {least:.0%}, others at most {others:.1e}", least == 1 and len(right) == 4 and others < 1e-6


@known("faithfulness", "one_patch", true="all maps are evidence under every filling that changes patch 9")
def _(table, subject):
    rows = table[(table["kind"] == "MoRF") & (table["share"] == 0) & (table["map"] != "random")]
    return f"at least {rows['above_random_low'].min():.3f}", (rows["above_random_low"] > 0).all()


@known("shift", "one_patch", true="one pixel up keeps half the patch; agreement falls with the distance")
def _(table, subject):
    near, far = (table[table["pixels"] == pixels]["agreement"].mean() for pixels in (1, 4))
    return f"{near:.2f}, then {far:.2f}", 1 > near > far


@known("attribution", "shortcut", true="in the mean over images, occlusion is strongest at the corner")
def _(table, subject):
    mean = table[table["map"] == "occlusion"].groupby(["row", "column"])["weight"].mean()
    return f"{tuple(map(int, mean.idxmax()))}", mean.idxmax() == (0, 0)


@known("faithfulness", "dead_heads", true="attention and rollout name a patch that does nothing, under every filling")
def _(table, subject):
    found = table[table["kind"] == "MoRF"].groupby("map")["first_above_random_low"].agg(["min", "max"])
    good, bad = found.index[found["min"] > 0], found.index[found["max"] <= 0]
    return "evidence: " + ", ".join(good), {"attention", "rollout"} <= set(bad) and {"occlusion"} <= set(good)


@known("faithfulness", "shortcut", true="occlusion is evidence under the mean color, which is no class's brightness")
def _(table, subject):
    mine = table[(table["kind"] == "MoRF") & (table["map"] == "occlusion")].drop_duplicates("filling")
    low = mine.set_index("filling")["gain_low"]["mean color"]  # another filling may leave an image in its class
    return f"gain at least {low:.2f}", low > 0


@known("calibration", "calibrated", "overconfident", true="the error by construction is in the interval")
@torch.no_grad()
def _(table, subject):
    note = ask("calibration", "overconfident" if subject is build("overconfident") else "calibrated").note
    low, high = (float(end) for end in note.split("[")[1].split("]")[0].split(","))
    true = 0.0
    if subject is build("overconfident"):  # half of the distance of what is said from one half
        said = torch.cat(
            [subject.net(images).softmax(dim=1).amax(dim=1) for images, _ in subject.batches("train", 10**6)]
        )
        true = float((0.5 * (said - 0.5)).square().mean().sqrt())
    return f"[{low:.3f}, {high:.3f}] for {true:.3f}", low <= true <= high


@known("rollout", "uniform", true="equal weights of all patches")
def _(table, subject):
    spread = table.groupby("image")["weight"].std().max()
    return f"spread {spread:.1e}", spread < 1e-6


@known("position", "cells_in_tokens", true="all cells at right angles")
def _(table, subject):
    other = table[(table["row"] != table["other_row"]) | (table["column"] != table["other_column"])]["cosine"]
    return f"at most {other.abs().max():.1e}", other.abs().max() < 1e-6


@known("probe", "cells_in_tokens", true="every cell is read")
def _(table, subject):
    first = table[(table["layer"] == 0) & (table["images"] == "validation")]
    return f"{first['accuracy'].iloc[0]:.3f}", first["accuracy"].iloc[0] == 1


@known("probe", "constant", true="chance, 1 of 16; nothing beyond no positions")
def _(table, subject):
    return f"{table['accuracy'].max():.3f}", table["accuracy"].max() <= 1 / 16 + 1e-9 and (table["excess"] == 0).all()


@known("fewshot", "random_features", "constant", true="chance, 1 of 10, in 90% of the intervals")
@known("knn", "random_features", true="chance, 1 of 10, in 90% of the intervals")
def _(table, subject):
    held = ((table["acc1_low"] <= 0.1) & (table["acc1_high"] >= 0.1)).mean()
    means = f"{table['acc1'].min():.3f} to {table['acc1'].max():.3f}"
    return f"{means}, {held:.0%} of intervals hold 0.1", held >= 0.9 and table["acc1"].max() < 0.25


@known("fewshot", "with_positions", true="better with more labels, and far above chance")
def _(table, subject):
    means = table.groupby("shots")["acc1"].mean()
    return f"{means.iloc[0]:.2f} to {means.iloc[-1]:.2f}", means.iloc[-1] > means.iloc[0] > 0.3


@known("cka", "twin_without_difference", true="each layer is equal to its copy")
def _(table, subject):
    twins = table[(table["against"] != "itself") & (table["layer"] == table["other_layer"])]["cka"]
    return f"{twins.min():.4f}", abs(twins.min() - 1) < 1e-6


@known("cka", "twin_of_another_seed", true="alike, and not the same")
def _(table, subject):
    twins = table[(table["against"] != "itself") & (table["layer"] == table["other_layer"])]
    return f"{twins['cka'].min():.2f} to {twins['cka'].max():.2f}", twins["cka_high"].max() < 0.99


@known("cka", "constant", true="not defined")
def _(table, subject):
    return f"{table['cka'].isna().mean():.0%} undefined", bool(table["cka"].isna().all())


@known("confusion", "shuffle_invariant", "dead_heads", "one_patch", true="no mistake")
def _(table, subject):
    return f"recall {table['recall'].min():.2f}", table["recall"].min() == 1


@known("confusion", "constant", true="one class for all")
def _(table, subject):
    return f"recall {table['recall'].tolist()}", table["recall"].sum() == 1


@known("errors", "shuffle_invariant", "dead_heads", "one_patch", true="no mistake")
def _(table, subject):
    return f"{len(table)} mistakes", len(table) == 0


@known("resolution", "with_positions", true="at its own size, its own accuracy")
def _(table, subject):
    own = table[(table["size"] == 8) & (table["protocol"] == "resize")]["acc1"]
    _, labels = subject.labeled()
    true = float((subject.outputs().argmax(dim=1) == labels).float().mean())
    return f"{own.iloc[0]:.4f}", bool(np.isclose(own, true).all())


@known("pca", "shuffle_invariant", true="one component, the brightness of a patch")
def _(table, subject):
    first = table[table["layer"] == 0].sort_values(["image", "row", "column"])
    patches = F.avg_pool2d(subject.shown(int(first["image"].nunique())), 2).flatten().numpy()
    ranks = np.corrcoef(first["red"].rank(), pd.Series(patches).rank())[0, 1]
    return f"share {table['share'].min():.4f}, rank correlation {ranks:.4f}", abs(ranks) > 0.999 and first[
        "share"
    ].min() > 0.99


@known("pca", "constant", true="no component")
def _(table, subject):
    colors = table[["red", "green", "blue"]].to_numpy()
    return f"at most {np.abs(colors).max():.1e}", bool((colors == 0).all())


@known("filters", "shuffle_invariant", true="one component, the mean of the four pixels")
def _(table, subject):
    first = table[table["component"] == 0]
    off = (first["weight"].abs() - 0.5).abs().max() + first["weight"].std()
    return f"share {first['share'].min():.4f}, off by {off:.1e}", off < 1e-5 and abs(first["share"].min() - 1) < 1e-6


@known("cost", "with_positions", true="all parameters, counted")
def _(table, subject):
    count = table[table["quantity"] == "parameters"]["value"]
    true = sum(p.numel() for p in subject.net.parameters())
    return f"{count.max():.0f}", count.max() == true


@known("splits", "no_positions_t2t", true="two soft splits' features are shown")
@known("token_layers", "no_positions_t2t", true="attention between the splits, in cells")
def _(table, subject):
    return f"{len(table)} rows", len(table) > 0


ALWAYS: dict[str, Callable[[pd.DataFrame, Subject], None]] = {}


def always(*analyses: str) -> Callable[[Any], Any]:
    """Register what holds for any network: a function of table and subject that asserts it."""

    def register(check: Callable[[pd.DataFrame, Subject], None]) -> Callable[[pd.DataFrame, Subject], None]:
        ALWAYS.update(dict.fromkeys(analyses, check))
        return check

    return register


def check_intervals(table: pd.DataFrame) -> None:
    """Every ``x`` lies between its ``x_low`` and ``x_high``; a band without an ``x`` has its ends in order."""
    for low in (name for name in table if name.endswith("_low")):
        name = low.removesuffix("_low")
        columns = [column for column in (low, name, name + "_high") if column in table]
        assert (np.diff(table[columns].dropna().to_numpy(float), axis=1) >= -1e-6).all(), name


@always("attention", "heads", "rollout")
def _(table, subject):
    sums = table.groupby([name for name in ("image", "map", "layer", "head") if name in table])["weight"].sum()
    assert (table["weight"] >= 0).all() and (sums <= 1 + 1e-5).all()


@always("entropy")
def _(table, subject):
    assert (table["entropy"] >= -1e-6).all() and (table["entropy"] <= table["uniform"] + 1e-5).all()


@always("distance")
def _(table, subject):
    h, w = subject.net.grid_size
    assert (table["distance"] >= 0).all() and (table["distance"] <= np.hypot(h - 1, w - 1)).all()


@always("scramble", "scramble_image")
def _(table, subject):
    whole = table[table["blocks"] == 1]
    assert (whole["flipped"] == 0).all() and (whole["change_most"] < 1e-6).all()


@always("shift")
def _(table, subject):
    still = table[table["pixels"] == 0]
    assert (still["agreement"] == 1).all() and (still["change_most"] < 1e-6).all()


@always("confusion")
def _(table, subject):
    counts = table[[name for name in table if name.startswith("as ")]].to_numpy()
    assert (counts.sum(axis=1) == table["images"]).all()


@always("errors")
def _(table, subject):
    assert (table["target"].astype(str) != table["prediction"].astype(str)).all()


@always("cka")
def _(table, subject):
    itself = table[(table["against"] == "itself") & (table["layer"] == table["other_layer"])]["cka"].dropna()
    assert (itself.sub(1).abs() < 1e-6).all() and (table["cka"].dropna() <= 1 + 1e-6).all()


@always("probe")
def _(table, subject):
    assert table["accuracy"].between(0, 1).all() and (table["r2"].dropna() <= 1 + 1e-6).all()


@always("position")
def _(table, subject):
    assert (table["cosine"].dropna().abs() <= 1 + 1e-5).all()


@always("calibration")
def _(table, subject):
    assert table["accuracy"].between(0, 1).all() and table["confidence"].between(0, 1).all()


@always("cost")
def _(table, subject):
    assert (table["value"] >= 0).all()
