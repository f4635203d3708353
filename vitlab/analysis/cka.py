"""Similarity of the layers of one or two networks, by centered kernel alignment."""

from collections.abc import Iterable

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from vitlab.analysis.figures import grid_of_axes, heat
from vitlab.analysis.probes import centered
from vitlab.analysis.subject import Finding, Subject
from vitlab.models.walk import Asked, block_tokens

MOST = 256  # images: every pair of them is compared
QUANTILE = 2.776  # of Student's t with four degrees of freedom: a 95 % interval
GROUPS = 5  # of images, left out in turn
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
    grow where there are more features than images.
    """
    return float(unbiased_hsic(k, m) / (unbiased_hsic(k, k) * unbiased_hsic(m, m)).sqrt())


def jackknife(k: Tensor, m: Tensor) -> float:
    """Return the standard error of :func:`cka` over images: fifths left out in turn (Efron and Stein 1981)."""
    fifth = torch.arange(len(k)) % GROUPS
    values = torch.tensor([cka(k[kept][:, kept], m[kept][:, kept]) for i in range(GROUPS) for kept in [fifth != i]])
    return float(((GROUPS - 1) / GROUPS * (values - values.mean()).square().sum()).sqrt())


def linear_kernel(x: Tensor) -> Tensor:
    """Map ``(n, ...)`` features to their ``(n, n)`` scalar products, centered."""
    x = centered(x.flatten(1))
    return x @ x.T


def layer_kernels(net: Asked, batches: Iterable[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Return the linear kernels of the tokens before block 0 and after each block."""
    parts = [[tokens.cpu() for tokens in block_tokens(net, images)] for images, _ in batches]
    return [linear_kernel(torch.cat(layer)) for layer in zip(*parts, strict=True)]


def analyze_cka(subject: Subject) -> Finding:
    """Compare the layers of a run with each other, and with those of another run.

    Example:
        >>> finding = analyze_cka(subject)
        >>> list(finding.table.columns)
        ['layer', 'against', 'other_layer', 'cka', 'cka_low', 'cka_high']
    """
    limit = min(subject.num_images, MOST)
    own = layer_kernels(subject.net, subject.batches(limit=limit))
    if len(own[0]) < 2 * GROUPS:
        least = f"at least {2 * GROUPS}"
        raise ValueError(f"cka compares images with each other and needs {least}, got {len(own[0])}: --num_images")
    pairs = {"itself": own}
    if subject.other is not None:
        pairs[subject.other.name] = layer_kernels(subject.other.net, subject.batches(limit=limit))
    figure, axes = grid_of_axes(1, len(pairs), size=2.8, bar=True)
    rows = []
    for ax, (name, kernels) in zip(axes[0], pairs.items(), strict=True):
        values = torch.tensor([[cka(k, m) for m in kernels] for k in own])
        shown = heat(ax, values.numpy(), f"{subject.name} against {name}", vmin=0, vmax=1)
        ax.invert_yaxis()
        ax.set_xticks(range(len(kernels)), [str(j) for j in range(len(kernels))], fontsize=7)
        ax.set_yticks(range(len(own)), [str(i) for i in range(len(own))], fontsize=7)
        if max(values.shape) <= MOST_WRITTEN:
            for (i, j), value in np.ndenumerate(values.numpy()):
                ax.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=7, color="wk"[int(value > 0.5)])
        ax.set_xlabel("blocks passed" + ("" if name == "itself" else f", {name}"), fontsize=8)
        rows += [
            {"layer": i, "against": name, "other_layer": j, "cka": (value := float(values[i, j]))}
            | {"cka_low": value - (half := QUANTILE * jackknife(own[i], kernels[j])), "cka_high": value + half}
            for i in range(len(own))
            for j in range(len(kernels))
        ]
    axes[0, 0].set_ylabel("blocks passed", fontsize=8)
    figure.colorbar(shown, ax=axes, shrink=0.8, label="CKA")
    floor = values.diagonal()
    between = (
        "--against another seed gives the noise floor"
        if subject.other is None
        else f"layer for layer {floor.min():.2f} to {floor.max():.2f}, the noise floor if only the seed differs"
    )
    note = f"{len(own[0])} validation images, all tokens, weighted by their norm, unbiased linear CKA; {between}"
    return Finding(pd.DataFrame(rows), figure, note)
