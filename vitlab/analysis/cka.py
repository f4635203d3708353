"""Similarity of the layers of one or two networks, by centered kernel alignment."""

import math
from collections.abc import Iterable

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from scipy import special
from torch import Tensor

from vitlab.analysis.catalogue import Analysis, Curve
from vitlab.analysis.figures import grid_of_axes, heat
from vitlab.analysis.probes import centered
from vitlab.analysis.subject import CkaTokens, Finding, Subject
from vitlab.errors import UsageError
from vitlab.models.foreign import AnyNetwork
from vitlab.models.walk import Asked, all_finite, block_tokens, prefix_counts

MOST = 256  # images: every pair of them is compared
LEAST = 10  # images
GROUPS = 20  # of images, at most, left out in turn
MOST_WRITTEN = 8  # layers up to which the figure shows numbers


def unbiased_hsic(k: Tensor, m: Tensor) -> Tensor:
    """Return the unbiased estimate of the Hilbert-Schmidt independence criterion of two ``(n, n)`` kernels.

    Song et al. 2012, "Feature selection via dependence maximization"; n is at least 4.
    """
    n = len(k)
    k, m = (kernel - kernel.diag().diag() for kernel in (k, m))
    sums = k.sum() * m.sum() / ((n - 1) * (n - 2)) - 2 / (n - 2) * (k.sum(dim=0) @ m.sum(dim=0))
    return ((k * m).sum() + sums) / (n * (n - 3))


def cka(k: Tensor, m: Tensor) -> float:
    """Return the centered kernel alignment of two ``(n, n)`` kernels: 1 is equal up to rotation and scale, 0 unrelated.

    Kornblith et al. 2019 (arXiv:1905.00414), with the estimator of Nguyen et al. 2021 (arXiv:2010.15327) that does not
    grow if there are more features than images.
    """
    return float(unbiased_hsic(k, m) / (unbiased_hsic(k, k) * unbiased_hsic(m, m)).sqrt())


def jackknife(k: Tensor, m: Tensor) -> tuple[float, int]:
    """Return the variance of :func:`cka` over images, left out in groups in turn (Efron and Stein 1981), and how many
    groups there are."""
    count = min(GROUPS, len(k) // 2)
    group = torch.arange(len(k)) % count
    values = torch.tensor([cka(k[kept][:, kept], m[kept][:, kept]) for i in range(count) for kept in [group != i]])
    return float((count - 1) / count * (values - values.mean()).square().sum()), count


def cka_interval(value: float, k: Tensor, m: Tensor) -> tuple[float, float]:
    """Return the 95 % interval over images of a :func:`cka` of two kernels.

    What pairs of images add to the variance, 2 / n(n - 1) where features are unrelated, is known, and the jackknife
    counts it twice (Efron and Stein 1981): it is counted once, and what single images add has Student's t.
    """
    pairs = 2 * max(0.0, 1 - value**2) ** 2 / (len(k) * (len(k) - 1))
    variance, groups = jackknife(k, m)
    normal, t = float(special.ndtri(0.975)), float(special.stdtrit(groups - 1, 0.975))
    half = (normal**2 * pairs + t**2 * max(variance - 2 * pairs, 0.0)) ** 0.5
    return max(value - half, min(value, 0.0)), min(value + half, max(value, 1.0))  # no similarity lies beyond


def of_images(tokens: Tensor, which: CkaTokens, prefix: int) -> Tensor:
    """Map ``(B, L, D)`` tokens to the features by which images are compared.

    Args:
        tokens: Tokens of which the first ``prefix`` show no patch.
        which: ``mean`` of the patches, ``class`` for the first token, or ``flattened``: all, cell by cell. The last,
            that of Raghu et al. 2021 (arXiv:2108.08810), is large for any two networks that leave a patch in its
            place: cell by cell they compare how bright the images are.
        prefix: Number of tokens that are not patches.

    Example:
        >>> tokens = torch.randn(4, 5, 16)
        >>> [list(of_images(tokens, which, prefix=1).shape) for which in ("mean", "class", "flattened")]
        [[4, 16], [4, 16], [4, 80]]
    """
    match which:
        case "mean":
            return tokens[:, prefix:].mean(dim=1)
        case "class":
            return tokens[:, 0]
    return tokens.flatten(1)


def linear_kernel(x: Tensor) -> Tensor:
    """Map ``(n, ...)`` features to their ``(n, n)`` scalar products, centered."""
    x = centered(x.flatten(1))
    return x @ x.T


def layer_kernels(net: Asked, batches: Iterable[tuple[Tensor, Tensor]], which: CkaTokens = "mean") -> list[Tensor]:
    """Return the linear kernels of the tokens before block 0 and after each block; see :func:`of_images`."""
    prefixes, parts = prefix_counts(net), []
    for images, _ in batches:
        layers = zip(block_tokens(net, images), prefixes, strict=True)
        parts.append([of_images(x, which, prefix).cpu() for x, prefix in layers])
    return [linear_kernel(all_finite(torch.cat(layer), "tokens")) for layer in zip(*parts, strict=True)]


@Analysis(
    reading="How similarly layers represent the same images, as the mean of their patch tokens (--tokens); 1 is equal "
    "up to rotation and scale. Before reading a difference between runs, compare two seeds of one recipe.",
    limits="Whether the network uses what two layers share; a few large components dominate the value.",
    curve=Curve(
        x="other_layer",
        measures={"cka": "cka"},
        lines=("against", "layer"),
        words="How similarly two layers represent the same images.",
    ),
)
def analyze_cka(subject: Subject) -> Finding:
    """Compare the layers of a run with each other, and with those of another run.

    Example:
        >>> finding = analyze_cka(subject)
        >>> list(finding.table.columns)
        ['layer', 'against', 'other_layer', 'cka', 'cka_low', 'cka_high']
    """
    _check_class_token(subject)
    limit = min(subject.num_images, MOST)
    own = layer_kernels(subject.net, subject.batches(limit=limit), subject.tokens)
    if len(own[0]) < LEAST:
        way = "set --num_images" if limit < LEAST else "the data has no more"
        raise ValueError(f"cka compares images and needs at least {LEAST}, got {len(own[0])}: {way}")
    pairs = {"itself": own}
    if (other := subject.rival) is not None:
        pairs[other.name] = layer_kernels(other.net, subject.batches_for(other, limit=limit), subject.tokens)
    values = {name: torch.tensor([[cka(k, m) for m in kernels] for k in own]) for name, kernels in pairs.items()}
    rows = [
        {"layer": i, "against": name, "other_layer": j, "cka": (value := float(values[name][i, j]))}
        | dict(zip(("cka_low", "cka_high"), cka_interval(value, own[i], kernels[j]), strict=True))
        for name, kernels in pairs.items()
        for i in range(len(own))
        for j in range(len(kernels))
    ]
    between = "--against another seed gives the noise floor"
    if other is not None:
        floor = [value for value in values[other.name].diagonal().tolist() if not math.isnan(value)] or [math.nan]
        between = f"layer for layer {min(floor):.2f} to {max(floor):.2f}, the noise floor if only the seed differs"
    same = [str(i) for i, value in enumerate(values["itself"].diagonal().tolist()) if math.isnan(value)]
    between += f"; after {', '.join(same)} blocks all images have the same features, alike to nothing" if same else ""
    mean = "mean over their places" if isinstance(subject.net, AnyNetwork) else "mean of their patch tokens"
    what = {"mean": mean, "class": "class token", "flattened": "all tokens, cell by cell"}
    note = f"{len(own[0])} validation images, {what[subject.tokens]}, unbiased linear CKA; {between}"
    return Finding(pd.DataFrame(rows), _figure(subject.name, values), note)


def _check_class_token(subject: Subject) -> None:
    for each in (subject, subject.rival) if subject.tokens == "class" else ():
        if each is not None and (each.net.cls_token is None or 0 in prefix_counts(each.net)):
            raise UsageError(
                f"cka of the class token needs networks that have one in each layer, and {each.name} does not; "
                "use --tokens mean or flattened"
            )


def _figure(name: str, values: dict[str, Tensor]) -> Figure:
    """Draw the CKA of the layers of a network, in rows, with those of each other one."""
    figure, axes = grid_of_axes(1, len(values), size=2.8, bar=True)
    for ax, (against, found) in zip(axes[0], values.items(), strict=True):
        shown = heat(ax, found.numpy(), f"{name} against {against}", vmin=0, vmax=1)
        ax.invert_yaxis()
        for set_ticks, count in zip((ax.set_yticks, ax.set_xticks), found.shape, strict=True):
            set_ticks(range(count), [str(i) for i in range(count)], fontsize=7)
        if max(found.shape) <= MOST_WRITTEN:
            for (i, j), value in np.ndenumerate(found.numpy()):
                ax.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=7, color="wk"[int(value > 0.5)])
        ax.set_xlabel("blocks passed" + ("" if against == "itself" else f", {against}"), fontsize=8)
    axes[0, 0].set_ylabel("blocks passed", fontsize=8)
    figure.colorbar(shown, ax=axes, shrink=0.8, label="CKA")
    return figure
