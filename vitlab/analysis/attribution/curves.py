"""Faithfulness of a map: the effect of replacing its most, or its least, relevant patches first."""

from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from vitlab.analysis.attribution.maps import cells, methods_of, predicted
from vitlab.analysis.catalogue import Analysis, Curve
from vitlab.analysis.figures import COLORS, MARKERS, curves, finish
from vitlab.analysis.intervals import over_images
from vitlab.analysis.subject import Finding, Subject
from vitlab.errors import UsageError
from vitlab.models.walk import Asked, outputs, probabilities

SHARES = (0.0, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0)  # of the patches; the same from both ends
DRAWS = 2  # random orders, each from both ends
PICKS = 8  # random patches that the patch named first is compared with
MOST = 48  # images; each takes 750 forward passes, those of integrated gradients, and one for each patch
ORDERS = {"MoRF": 1, "LeRF": -1}  # most, or least, relevant first
Method = Callable[..., Tensor]
Values = dict[str, Tensor]  # (B,) of each map


def mean_color(net: Asked, images: Tensor) -> Tensor:
    """Return the mean color of the training images, 0 once normalized, which occlusion and integrated gradients use."""
    return torch.zeros_like(images)


def own_mean(net: Asked, images: Tensor) -> Tensor:
    """Return the mean color of each of the ``(B, C, H, W)`` images."""
    return images.mean(dim=(2, 3), keepdim=True).expand_as(images)


def blurred(net: Asked, images: Tensor) -> Tensor:
    """Return ``(B, C, H, W)`` images blurred by a Gaussian whose standard deviation is the side of a patch.

    After Fong and Vedaldi 2017 (arXiv:1704.03296). At the border the weights within the image sum to 1.

    Example:
        >>> from vitlab.models.vit import VisionTransformer
        >>> net = VisionTransformer(img_size=4, patch_size=2, embed_dim=16, depth=1, num_heads=2)
        >>> blurred(net, torch.ones(1, 3, 4, 4)).allclose(torch.ones(1, 3, 4, 4))
        True
    """
    weights = []
    for side, count in zip(net.img_size, net.grid_size, strict=True):
        at = torch.arange(side, device=images.device, dtype=images.dtype)
        weights.append((-0.5 * ((at[:, None] - at) * count / side).square()).softmax(dim=1))
    return weights[0] @ images @ weights[1].T


def another_image(net: Asked, images: Tensor) -> Tensor:
    """Return another one, at random, for each of the ``(B, C, H, W)`` images: its patches fill the same places."""
    if len(images) < 2:
        raise UsageError("patches of another image need at least two images, got one: give more images")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).to(images.device)
    return images[order.roll(1)[order.argsort()]]


FILLINGS: dict[str, Callable[[Asked, Tensor], Tensor]] = {  # of a patch that is taken away; none is neutral
    "mean color": mean_color,
    "own mean": own_mean,
    "blur": blurred,
    "another image": another_image,
}


def deleted(net: Asked, images: Tensor, values: Tensor, count: int, filling: Tensor | None = None) -> Tensor:
    """Return ``(B, C, H, W)`` images that have a filling in the ``count`` patches of the largest ``(B, N)`` values.

    Args:
        net: The network, whose grid is taken.
        images: Normalized images.
        values: A value of each patch; of equal ones the first in reading order goes first.
        count: How many patches are replaced.
        filling: Images whose patches replace them, ``(B, C, H, W)``; None is the mean color.

    Example:
        >>> from vitlab.models.vit import VisionTransformer
        >>> net = VisionTransformer(img_size=4, patch_size=2, embed_dim=16, depth=1, num_heads=2)
        >>> deleted(net, torch.ones(1, 1, 4, 4), torch.tensor([[0.0, 3.0, 1.0, 2.0]]), 2)[0, 0]
        tensor([[1., 1., 0., 0.],
                [1., 1., 0., 0.],
                [1., 1., 0., 0.],
                [1., 1., 0., 0.]])
    """
    best = values.argsort(dim=1, descending=True, stable=True)[:, :count]
    mask = cells(net, torch.zeros_like(values).scatter(1, best, 1.0)).bool()
    return torch.where(mask, torch.zeros_like(images) if filling is None else filling, images)


def probability(net: Asked, images: Tensor, classes: Tensor) -> Tensor:
    """Return the probability of each image's class, ``(B,)``."""
    return probabilities(net, outputs(net, images)).gather(1, classes[:, None])[:, 0].double().cpu()


class Replacing:
    """What happens to the probability of images' classes when their patches give way to a filling.

    Args:
        net: The network.
        images: Normalized ``(B, C, H, W)`` images.
        classes: The class of each image, ``(B,)``.
        filling: Images whose patches replace theirs, ``(B, C, H, W)``.
    """

    def __init__(self, net: Asked, images: Tensor, classes: Tensor, filling: Tensor) -> None:
        self.net, self.images, self.classes, self.filling = net, images, classes, filling
        self.whole, self.gone = (probability(net, each, classes) for each in (images, filling))  # (B,)

    def after(self, values: Tensor, count: int) -> Tensor:
        """Return the probability without the ``count`` patches of the largest ``(B, N)`` values, ``(B,)``."""
        changed = deleted(self.net, self.images, values.to(self.images), count, self.filling)
        return probability(self.net, changed, self.classes)

    def curve(self, values: Tensor) -> Tensor:
        """Return the probability at each of :func:`counts_of`, largest values first, ``(B, shares)``."""
        counts = counts_of(values.shape[1])[1:-1]
        return torch.stack([self.whole, *(self.after(values, count) for count in counts), self.gone], dim=1)

    def fall(self, values: Tensor) -> Tensor:
        """Return by how much the probability falls when the best patch alone goes, ``(B,)``."""
        return self.whole - self.after(values, 1)


def counts_of(patches: int) -> list[int]:
    """Return how many of so many patches are replaced in turn: what is nearest to :data:`SHARES`, from both ends alike.

    Example:
        >>> counts_of(4), counts_of(25)
        ([0, 1, 2, 3, 4], [0, 1, 2, 6, 12, 19, 23, 24, 25])
    """
    first = {round(share * patches) for share in SHARES if share < 0.5}
    return sorted(first | {round(patches / 2)} | {patches - count for count in first})


def area(probabilities: Tensor, patches: int) -> Tensor:
    """Return the area under ``(B, shares)`` curves of the shares of so many patches, ``(B,)``."""
    return torch.trapezoid(probabilities, torch.tensor(counts_of(patches)).double() / patches)


def gains(table: pd.DataFrame) -> pd.DataFrame:
    """Return the gain of each map under each filling; older tables have deletion and insertion by the mean color."""
    if "filling" in table:
        return table[table["kind"] == "MoRF"].drop_duplicates(["filling", "map"])
    areas = table.drop_duplicates(["kind", "map"]).pivot(index="map", columns="kind", values="area")
    gain = (areas["insertion"] - areas["deletion"]).rename("gain")  # an insertion curve is LeRF from right to left
    return gain.reset_index().assign(filling="mean color")


@Analysis(
    reading="The probability of the predicted class as patches are replaced, the most relevant first (MoRF, good: "
    "falls at once) or the least relevant first (LeRF, good: falls last), under four fillings. A map is evidence where "
    "it beats random patches both ways and the patch it names first does more than a random one; what holds under only "
    "some fillings depends on the filling.",
    limits="Completeness of a faithful map, and other fillings: images with replaced patches are unlike any in "
    "training.",
    curve=Curve(
        measures={"gain": "gain", "first_above_random": "first_above_random"},
        lines=("filling", "map"),
        words="Area between the curves of the class's probability as a map's least and its most relevant patches are "
        "replaced first (0: a random map), and what replacing the patch named first does beyond a random one. Only "
        "what holds under every filling is evidence.",
        summary=gains,
    ),
)
def analyze_faithfulness(subject: Subject) -> Finding:
    """Replace patches by several fillings, most or least relevant patches first.

    MoRF and LeRF are the orders of Samek et al. 2017 (arXiv:1509.06321): the class's probability should fall at once if
    the most relevant patches are replaced first, and late if the least relevant ones are. The area between both curves,
    which is 0 for random maps, is the symmetric relevance gain of Bluecher et al. 2024 (arXiv:2401.06654). An insertion
    curve (Petsiuk et al. 2018, arXiv:1806.07421) is LeRF from right to left.

    Under a filling a map is evidence if, by 95 % intervals over images, its MoRF and LeRF are better than those of
    random patches, and the patch it names first does more than a random patch. A map is better than another one if
    its gain is larger under every filling, by the intervals of the differences image by image.

    Example:
        >>> finding = analyze_faithfulness(subject)
        >>> list(finding.table.columns)[:6]
        ['filling', 'kind', 'map', 'against', 'share', 'probability']
    """
    net = subject.net
    images = torch.cat([batch for batch, _ in subject.batches(limit=min(subject.num_images, MOST))])
    classes = predicted(subject, images, "faithfulness")
    fillings = {name: fill(net, images) for name, fill in FILLINGS.items()}
    maps = {name: _in_parts(net, images, classes, method).cpu() for name, method in methods_of(net).items()}
    found = [_under(name, Replacing(net, images, classes, filling), maps) for name, filling in fillings.items()]
    table = pd.DataFrame([{**row, "n": len(images)} for rows in found for row in rows])
    note = (
        f"{len(images)} images, patches give way to {', '.join(fillings)}, most and least relevant first; "
        f"{verdict(table)}; 95 % intervals over images, not adjusted for {len(maps)} maps"
    )
    return Finding(table, _figure(table), note)


def _under(name: str, replacing: Replacing, maps: Values) -> list[dict[str, Any]]:
    """Return the rows of one filling: the curve of each map in both orders, and each pair of maps."""
    draws = torch.rand(DRAWS + 1, *next(iter(maps.values())).shape, generator=torch.Generator().manual_seed(0))
    _, images, patches = draws.shape
    curve, fall = replacing.curve, replacing.fall
    random = torch.stack([curve(sign * draw) for draw in draws[:-1] for sign in ORDERS.values()]).mean(dim=0)
    ranks = draws[-1].argsort(dim=1)
    any_patch = torch.stack([fall((ranks == i).float()) for i in range(min(PICKS, patches))]).mean(dim=0)
    lines = {kind: {m: curve(sign * values) for m, values in maps.items()} for kind, sign in ORDERS.items()}
    gains = {m: area(lines["LeRF"][m], patches) - area(lines["MoRF"][m], patches) for m in maps}
    firsts = {m: fall(values) - any_patch for m, values in maps.items()}
    rows = []
    for kind, sign in ORDERS.items():
        for m, line in {"random": random, **lines[kind]}.items():
            zeros = torch.zeros(images).double()
            facts = over_images("area", area(line, patches).numpy())
            facts |= over_images("above_random", (sign * (area(random, patches) - area(line, patches))).numpy())
            facts |= over_images("gain", gains.get(m, zeros).numpy())
            facts |= over_images("first_above_random", firsts.get(m, zeros).numpy())
            start = {"filling": name, "kind": kind, "map": m, "against": "random"}
            for count, column in zip(counts_of(patches), line.T, strict=True):
                mean = over_images("probability", column.numpy(), (0, 1))
                rows.append({**start, "share": count / patches, **mean, **facts})
    for m, other in permutations(maps, 2):
        difference = over_images("gain", (gains[m] - gains[other]).numpy())
        rows.append({"filling": name, "kind": "pair", "map": m, "against": other, **difference})
    return rows


def verdict(table: pd.DataFrame) -> str:
    """Return what the table of :func:`analyze_faithfulness` says: which maps are evidence, and which are better.

    Example:
        >>> facts = {"map": "a", "above_random_low": 0.1, "first_above_random_low": [0.1, 0.1, -0.1, -0.1]}
        >>> facts |= {"filling": ["blur", "blur", "own mean", "own mean"], "kind": ["MoRF", "LeRF"] * 2}
        >>> verdict(pd.DataFrame(facts))
        'evidence under every filling: none; DEPENDS ON THE FILLING: a (evidence under blur alone)'
    """
    lines = table[table["kind"].isin(ORDERS) & (table["map"] != "random")]
    beats = lines.assign(area=lines["above_random_low"] > 0, first=lines["first_above_random_low"] > 0)
    passed = beats.groupby(["map", "filling"], sort=False)[["area", "first"]].all().all(axis=1).unstack("filling")
    passed = passed[list(lines["filling"].unique())].loc[list(lines["map"].unique())]
    named_wrong = ~beats.groupby("map")["first"].any()
    always, never = passed.all(axis=1), ~passed.any(axis=1)
    said = [f"evidence under every filling: {_names(passed.index[always])}"]
    some = [
        f"{m} (evidence under {_names(passed.columns[row])} alone)" for m, row in passed[~always & ~never].iterrows()
    ]
    if some:
        said.append(f"DEPENDS ON THE FILLING: {', '.join(some)}")
    for is_wrong, why in (
        (True, "the patch named first does no more than a random one"),
        (False, "no better than random patches"),
    ):
        if len(lost := [m for m in passed.index[never] if named_wrong[m] == is_wrong]):
            said.append(f"NO EVIDENCE: {_names(lost)} ({why})")
    return "; ".join([*said, *_order(table[table["kind"] == "pair"])])


def _order(pairs: pd.DataFrame) -> list[str]:
    """Say which maps are better than which under every filling, and for which pairs the fillings contradict."""
    if not len(pairs):
        return []
    better = (pairs["gain_low"] > 0).groupby([pairs["map"], pairs["against"]], sort=False).agg(["all", "any"])
    than: dict[str, list[str]] = {}
    for m, other in better.index[better["all"]]:
        than.setdefault(m, []).append(other)
    said = [f"{m} than {_names(others)}" for m, others in sorted(than.items(), key=lambda pair: -len(pair[1]))]
    turned = [(m, o) for m, o in better.index if better["any"][m, o] and better["any"][o, m]]
    both = [f"{m} and {other}" for i, (m, other) in enumerate(turned) if (other, m) not in turned[:i]]
    found = [f"better under every filling: {', '.join(said) or 'none'}"]
    return found + ([f"WHICH IS BETTER DEPENDS ON THE FILLING: {', '.join(both)}"] if both else [])


def _names(names: Sequence[Any]) -> str:
    return ", ".join(names[:-1]) + " and " * (len(names) > 1) + names[-1] if len(names) else "none"


def _in_parts(net: Asked, images: Tensor, classes: Tensor, method: Method) -> Tensor:
    return torch.cat([method(net, x, k) for x, k in zip(images.split(16), classes.split(16), strict=True)])


def _figure(table: pd.DataFrame) -> Figure:
    """Draw gain and first patch of each map under each filling, and below them the curves."""
    fillings, maps = (list(table[name].unique()) for name in ("filling", "map"))
    maps = [name for name in maps if name != "random"]
    figure = Figure(figsize=(11, 5.4 + len(maps) / 2), layout="constrained")
    rows = figure.add_gridspec(2, 1, height_ratios=(len(maps) / 2, 5.4))
    above, below = rows[0], rows[1]
    names = {"gain": "area between LeRF and MoRF", "first_above_random": "fall by the first patch, less a random one's"}
    for ax, (column, label) in zip(above.subgridspec(1, 2).subplots(squeeze=False)[0], names.items(), strict=True):
        for i, filling in enumerate(fillings):
            part = table.query("kind == 'MoRF' and share == 0 and filling == @filling").set_index("map").loc[maps]
            ends = np.abs(part[[f"{column}_low", f"{column}_high"]].to_numpy().T - part[column].to_numpy())
            place: Any = np.arange(len(maps)) + (i - (len(fillings) - 1) / 2) * 0.17
            style: Any = {"fmt": MARKERS[i], "color": COLORS[i], "markersize": 4, "label": filling}
            ax.errorbar(part[column], place, xerr=np.nan_to_num(ends), **style)
        ax.axvline(0, color="0.5", linewidth=0.8, zorder=0)
        ax.set_yticks(range(len(maps)), maps)
        ax.set_ylim(len(maps) - 0.5, -0.5)
        finish(ax, label, "", legend=column == "gain")
    grid = below.subgridspec(len(ORDERS), len(fillings)).subplots(sharex=True, sharey=True, squeeze=False)
    for row, (kind, which) in zip(grid, (("MoRF", "most"), ("LeRF", "least")), strict=True):
        for ax, filling in zip(row, fillings, strict=True):
            part = table.query("kind == @kind and filling == @filling")
            curves(ax, part.drop(columns=["probability_low", "probability_high"]), "share", "probability", by="map")
            finish(ax, f"share replaced, {which} relevant first", "probability", legend=ax is grid[0, 0])
            ax.set_title(f"{filling}: {kind}", fontsize=8)
    grid[0, 0].set_ylim(0, 1.05 * table["probability"].max())
    return figure
