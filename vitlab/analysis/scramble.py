"""The effect of shuffling tokens, or patches of the image."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlab.analysis.catalogue import Analysis, Curve
from vitlab.analysis.figures import curves, dashed, finish, one_axes
from vitlab.analysis.intervals import over_draws, over_images
from vitlab.analysis.subject import Finding, Subject
from vitlab.errors import UsageError
from vitlab.layers.resample import Grid
from vitlab.models.hooks import changed_output
from vitlab.models.vit import VisionTransformer
from vitlab.models.walk import outputs
from vitlab.tokenizers.patch import cut_patches

REPEATS = 3  # permutations of each block size
MEASURES = {"acc1": "accuracy", "flipped": "share of other predictions", "change_mean": "change of an output"}
METRICS = ("acc1", "flipped")  # the first of them needs classes
SIZES = (0.0, math.inf)  # of changes
NO_CLASSES = "images without classes that the network knows, so predictions are compared and no accuracy is measured"


def permuted_blocks(grid_size: Grid, side: int, generator: torch.Generator) -> Tensor:
    """Return an order ``(N,)`` of a grid's cells in which blocks of ``side`` x ``side`` cells have changed places.

    Slot i gets cell ``order[i]``; inside a block nothing changes. ``side`` divides height and width.
    """
    h, w = grid_size
    cells = torch.arange(h * w).view(h // side, side, w // side, side).transpose(1, 2).reshape(-1, side * side)
    identity = torch.arange(len(cells))
    order = identity
    while len(cells) > 1 and torch.equal(order, identity):
        order = torch.randperm(len(cells), generator=generator)
    return cells[order].view(h // side, w // side, side, side).transpose(1, 2).reshape(-1)


def scramble_tokens(net: VisionTransformer, images: Tensor, order: Tensor) -> Tensor:
    """Map images to ``(B, K)`` outputs with the tokens in another order after the tokenizer, before positions.

    Example:
        >>> net = VisionTransformer(img_size=8, patch_size=2, embed_dim=16, depth=1, num_heads=2, pos_embed="none")
        >>> net = net.eval()
        >>> images, order = torch.randn(2, 3, 8, 8), torch.randperm(16)
        >>> torch.allclose(scramble_tokens(net, images, order), net(images), atol=1e-5)  # it knows no positions
        True
    """
    with changed_output(net.tokenizer, lambda x: x[:, order]):
        return outputs(net, images)


@contextmanager
def shuffled_tokens(net: VisionTransformer, seed: int = 0) -> Iterator[None]:
    """Shuffle the tokens of each image independently before they get positions.

    Where a token stands then says nothing of what it shows: what still depends on the place is knowledge of position.

    Example:
        >>> net = VisionTransformer(img_size=8, patch_size=2, embed_dim=16, depth=1, num_heads=2, pos_embed="none")
        >>> net, images = net.eval(), torch.randn(2, 3, 8, 8)
        >>> with shuffled_tokens(net):
        ...     outputs(net, images).shape
        torch.Size([2, 1000])
    """
    generator = torch.Generator().manual_seed(seed)

    def shuffle(x: Tensor) -> Tensor:
        order = torch.rand(x.shape[:2], generator=generator).argsort(dim=1).to(x.device)
        return x.gather(1, order[:, :, None].expand_as(x))

    with changed_output(net.tokenizer, shuffle):
        yield


def scramble_image(images: Tensor, order: Tensor, grid_size: Grid) -> Tensor:
    """Reorder the h x w patches of ``(B, C, H, W)`` images.

    Example:
        >>> scramble_image(torch.tensor([[[[1.0, 2.0, 3.0]]]]), torch.tensor([2, 0, 1]), (1, 3))
        tensor([[[[3., 1., 2.]]]])
    """
    size, (h, w) = images.shape[2:], grid_size
    if size[0] % h or size[1] % w or len(order) != h * w:
        what = f"{h} x {w} patches must divide the images and be as many as the order"
        raise ValueError(f"{what}, got images of {size[0]} x {size[1]} pixels and an order of {len(order)}")
    patches = cut_patches(images, grid_size)[:, order].unflatten(1, grid_size)  # (B, h, w, C, H / h, W / w)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(images.shape)


def labels_known(subject: Subject, name: str) -> bool:
    """Return whether accuracy can be measured, besides changes of predictions; refuse a network of numbers."""
    if not (subject.has_no_data or subject.is_elsewhere):
        subject.need_classes(name)
        return True
    if subject.net.num_classes < 2:
        raise UsageError(f"{name} compares predicted classes, and {subject.kind} has one output")
    return False


def changes_of(before: Tensor, after: Tensor, labels: Tensor | None) -> dict[str, NDArray[Any]]:
    """Compare ``(B, K)`` outputs image by image: right now, another prediction, change of the outputs; ``(B,)`` each.

    Without labels nothing is right. ``change_mean`` is that of an image's outputs in the mean, ``change_most`` its
    largest.
    """
    change, now = (after - before).abs().cpu(), after.argmax(dim=1)
    right = {} if labels is None else {"acc1": (now == labels).cpu().numpy()}
    return right | {
        "flipped": (now != before.argmax(dim=1)).cpu().numpy(),
        "change_mean": change.mean(dim=1).numpy(),
        "change_most": change.amax(dim=1).numpy(),
    }


def means_of(changes: dict[str, NDArray[Any]], over: Callable[..., dict[str, float]] = over_images) -> dict[str, float]:
    """Return the means over images of :func:`changes_of`, with intervals; ``over_several`` takes several of each."""
    means = (over(name, values, SIZES) for name, values in changes.items())
    return {key: value for found in means for key, value in found.items()}


def block_sides(grid_size: Grid) -> list[int]:
    """Return the sides of the square blocks that divide a grid, largest first, without the whole grid."""
    return [side for side in range(max(grid_size) - 1, 0, -1) if math.gcd(*grid_size) % side == 0]


def of_finest(table: pd.DataFrame) -> dict[str, float]:
    """Return accuracy and share of other predictions with the smallest blocks as metrics of an ablation."""
    finest = table[table["blocks"] == table["blocks"].max()]
    return {column: float(finest[column].mean()) for column in METRICS}


@Analysis(
    reading="Tokens are shuffled before they get positions: the loss of accuracy is what positions contribute; "
    "without positions nothing changes.",
    limits="The accuracy of a network trained on shuffled tokens.",
    curve=Curve(
        x="blocks",
        x_label="blocks that change places",
        log2=True,
        measures=MEASURES,
        words="Tokens change places in blocks before they get positions.",
    ),
    metrics=of_finest,
    metric_names=METRICS,
)
def analyze_scramble(subject: Subject) -> Finding:
    """Scramble the tokens after the tokenizer.

    Example:
        >>> finding = analyze_scramble(subject)
        >>> list(finding.table.columns)[:7]
        ['level', 'side', 'blocks', 'repeat', 'acc1', 'acc1_low', 'acc1_high']
    """
    has_labels = labels_known(subject, "scramble")
    net = subject.transformer("scramble", "tokens that can be shuffled before positions")
    return _measure(subject, "tokens", has_labels, lambda images, order: scramble_tokens(net, images, order))


@Analysis(
    reading="Patches of the image are shuffled before the tokenizer.",
    limits="The role of positions where the tokenizer's windows overlap, as the tokens change too: use `scramble` "
    "there.",
    curve=Curve(
        x="blocks",
        x_label="blocks that change places",
        log2=True,
        measures=MEASURES,
        words="Patches of the image change places; for overlapping tokenizers that changes the tokens too.",
    ),
    metrics=of_finest,
    metric_names=METRICS,
)
def analyze_scramble_image(subject: Subject) -> Finding:
    """Scramble patches of the image, before the tokenizer.

    Example:
        >>> finding = analyze_scramble_image(subject)
        >>> list(finding.table.columns)[:7]
        ['level', 'side', 'blocks', 'repeat', 'acc1', 'acc1_low', 'acc1_high']
    """
    has_labels = labels_known(subject, "scramble_image")
    net, grid = subject.net, subject.net.grid_size
    if any(pixels % side for pixels, side in zip(net.img_size, grid, strict=True)):
        raise UsageError(
            f"scramble_image needs a grid that divides the image, got {grid} for {net.img_size}: use scramble"
        )
    shuffled = lambda images, order: outputs(net, scramble_image(images, order, grid))  # noqa: E731
    return _measure(subject, "image", has_labels, shuffled)


def _measure(subject: Subject, level: str, has_labels: bool, run: Callable[[Tensor, Tensor], Tensor]) -> Finding:
    net, (images, classes), before = subject.net, subject.labeled(), subject.outputs()
    labels = classes if has_labels else None
    generator = torch.Generator().manual_seed(0)

    drawn: dict[int, list[Tensor]] = {1: [before]}  # number of blocks: outputs with each permutation
    h, w = net.grid_size
    unchanged = means_of(changes_of(before, before, labels))
    rows = [{"level": level, "side": max(h, w), "blocks": 1, "repeat": 0, **unchanged}]
    for side in block_sides((h, w)):
        blocks = h * w // side**2
        for repeat in range(REPEATS):
            order = permuted_blocks((h, w), side, generator).to(images.device)
            drawn.setdefault(blocks, []).append(run(images, order))
            found = means_of(changes_of(before, drawn[blocks][-1], labels))
            rows.append({"level": level, "side": side, "blocks": blocks, "repeat": repeat, **found})
    table, bands = pd.DataFrame(rows).assign(n=len(images)), []
    for blocks, each in drawn.items():
        now = torch.stack(each).argmax(dim=2)  # (permutations, n)
        band = over_draws("flipped", (now != before.argmax(dim=1)).cpu().numpy())
        if labels is not None:
            band |= over_draws("acc1", (now == labels).cpu().numpy())
        bands.append({"blocks": blocks, **band})
    shown = {name: MEASURES[name] for name in (METRICS if has_labels else METRICS[1:])}
    figure, axes = one_axes(columns=len(shown), width=4.0)
    for ax, (column, name) in zip(axes, shown.items(), strict=True):
        curves(ax, pd.DataFrame(bands), "blocks", column)
        ax.set_xscale("log", base=2)
        ax.set_xticks(sorted(table["blocks"].unique()), [str(n) for n in sorted(table["blocks"].unique())])
        ax.set_ylim(0, 1.05)
        finish(ax, f"shuffled blocks of {'tokens' if level == 'tokens' else 'the image'}", name, legend=False)
    if has_labels:
        dashed(axes[0], 1 / before.shape[1])
        axes[0].legend(fontsize=7, frameon=False)
    what = "validation images" if has_labels else NO_CLASSES
    note = f"{len(images)} {what}, {REPEATS} permutations each, bands over both; largest change of an output:"
    return Finding(table, figure, f"{note} {table['change_most'].max():.2g} averaged over images")
