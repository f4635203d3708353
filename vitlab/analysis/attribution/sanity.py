"""Sanity check of maps: when weights are randomized, a map that shows the network must change."""

import copy

import pandas as pd
import torch
from scipy.stats import rankdata
from torch import Tensor

from vitlab.analysis.attribution.maps import methods_of, predicted
from vitlab.analysis.catalogue import Analysis, Curve
from vitlab.analysis.figures import curves, finish, one_axes
from vitlab.analysis.intervals import over_draws
from vitlab.analysis.subject import Finding, Subject
from vitlab.errors import UsageError
from vitlab.models.vit import VisionTransformer
from vitlab.models.walk import Asked

MOST = 16  # images
DRAWS = 5  # of random weights
STAGES = ("the head", "half the blocks", "all blocks", "tokenizer too")  # what is random, each with those before


def randomized(net: Asked, blocks: int, tokens: bool = False, seed: int = 0) -> Asked:
    """Return a copy whose head and last ``blocks`` blocks have random weights of the same mean and standard deviation.

    The head is all that follows the blocks, with norms and attention pooling.

    Args:
        net: The network.
        blocks: How many blocks, counted from the head.
        tokens: Whether tokenizer and positions are random, too.
        seed: Seed of the weights.

    Example:
        >>> from vitlab.models.vit import VisionTransformer
        >>> net = VisionTransformer(img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2)
        >>> other = randomized(net, blocks=1)
        >>> [bool((a.attn.qkv.weight == b.attn.qkv.weight).all()) for a, b in zip(net.blocks, other.blocks)]
        [True, False]
    """
    net, generator = copy.deepcopy(net).eval(), torch.Generator().manual_seed(seed)
    head = [p for part in (net.head, net.norm) if part is not None for p in part.parameters()]
    if isinstance(net, VisionTransformer):
        known = {id(p) for p in head}
        head += [p for p in net.stages()[-1] if id(p) not in known]
    parts = [*list(net.blocks)[len(net.blocks) - blocks :], *([net] if tokens else [])]
    for parameter in (*head, *(p for part in parts for p in part.parameters())):
        draw = torch.randn(parameter.shape, generator=generator).to(parameter)
        spread = parameter.detach().std() if parameter.numel() > 1 else 0.0
        parameter.data = draw * spread + parameter.detach().mean()
    return net


def by_stage(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table with the number of the stage, for a curve from the head to the tokenizer."""
    return table.assign(stage=table["random"].map(STAGES.index))


@Analysis(
    reading="How similar a map stays while weights are randomized from the head down: a map that does not change "
    "shows the image, not the network.",
    limits="Faithfulness: a map that does change may still be wrong.",
    curve=Curve(
        x="stage",
        x_label=f"random weights: {', '.join(f'{i} {stage}' for i, stage in enumerate(STAGES))}",
        measures={"correlation": "rank correlation"},
        lines=("map",),
        words="Similarity of a map to itself as weights are randomized.",
        summary=by_stage,
    ),
)
def analyze_sanity(subject: Subject) -> Finding:
    """Compare each map with that of a network whose weights become random from the head down.

    The cascading randomization of Adebayo et al. 2018 (arXiv:1810.03292), by rank correlation of the patches, in the
    mean over several draws of the weights: a single draw may invert a map, or leave it unchanged.

    Example:
        >>> finding = analyze_sanity(subject)
        >>> list(finding.table.columns)[:4]
        ['map', 'random', 'blocks', 'correlation']
    """
    net, depth = subject.net, len(subject.net.blocks)
    images = torch.cat([batch for batch, _ in subject.batches(limit=min(subject.num_images, MOST))])
    classes = predicted(subject, images, "sanity")
    if net.head is None:
        raise UsageError(f"sanity starts at the head, and {subject.kind} does not end in a linear layer")
    stages = dict(zip(STAGES, ((0, False), (-(-depth // 2), False), (depth, False), (depth, True)), strict=True))
    methods = methods_of(net)
    own = {name: method(net, images, classes) for name, method in methods.items()}
    rows = []
    for step, (stage, (blocks, tokens)) in enumerate(stages.items()):
        alike: dict[str, list[Tensor]] = {name: [] for name in own}
        for seed in range(DRAWS):
            other = randomized(net, blocks, tokens, seed)
            for name, method in methods.items():
                alike[name].append(rank_correlation(own[name], method(other, images, classes)))
        for name, each in alike.items():
            found = over_draws("correlation", torch.stack(each).numpy(), (-1, 1))
            counts = {"n": len(images), "draws": DRAWS}
            rows.append({"map": name, "random": stage, "blocks": blocks, **found, **counts, "step": step})
    table = pd.DataFrame(rows)
    figure, (axes,) = one_axes()
    curves(axes, table, "step", "correlation", by="map")
    axes.axhline(0, color="0.7", linewidth=0.8, zorder=0)
    axes.set_xticks(range(len(stages)), list(stages), fontsize=7)
    finish(axes, "random weights in", "rank correlation of maps")
    table = table.drop(columns="step")
    if len(images) < 2:
        unknown = "whether maps stay similar with all blocks random is not known"
        return Finding(table, figure, f"{DRAWS} draws of weights; one image, which has no interval: {unknown}")
    last = table[table["random"] == "all blocks"]
    same = ", ".join(last[last["correlation_low"] > 0.5]["map"]) or "none"
    over = f"{DRAWS} draws of weights and {len(images)} images, 95 % intervals over both"
    note = f"{over}; still similar (above 1/2) with all blocks random: {same}"
    return Finding(table, figure, note)


def rank_correlation(a: Tensor, b: Tensor) -> Tensor:
    """Map two ``(B, N)`` maps to Spearman's correlation of each pair, ``(B,)``; a constant map has none, 0.

    Example:
        >>> rank_correlation(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[2.0, 4.0, 9.0]])).round(decimals=3)
        tensor([1.], dtype=torch.float64)
    """
    x, y = (torch.from_numpy(rankdata(one.double().cpu().numpy(), axis=1)) for one in (a, b))
    x, y = x - x.mean(dim=1, keepdim=True), y - y.mean(dim=1, keepdim=True)
    return (x * y).sum(dim=1) / (x.norm(dim=1) * y.norm(dim=1)).clamp(min=1e-12)
