"""A linear probe of the classes of pixels from patch tokens: dense tasks, where positions matter most."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy import special
from torch import Tensor

from vitlab.analysis.catalogue import Analysis
from vitlab.analysis.figures import bare, grid_of_axes, picture
from vitlab.analysis.probes import without_positions
from vitlab.analysis.subject import Finding, Subject
from vitlab.data.files.sets import FileImages, Images
from vitlab.data.files.splits import SplitName
from vitlab.data.loading.order import fixed_order
from vitlab.errors import UsageError
from vitlab.interface import own_ratio_of
from vitlab.models.foreign import AnyNetwork
from vitlab.models.walk import Asked, all_finite, placed_tokens
from vitlab.stats import ROUNDING

UNLABELED = 255  # in a mask: a pixel that is ignored
SUFFIXES = (".png", ".npy", ".tif", ".tiff", ".bmp", ".gif")  # of masks: without loss
_MODES = ("1", "L", "P", "I", "I;16")
_STEPS, _SHOWN = 200, 6
_RESULT = NDArray[np.int64]


class Masked(NamedTuple):
    """Images of a split that have a mask.

    Args:
        images: The images.
        masks: ``(n, H, W)`` class of each pixel of the network's input, or :data:`UNLABELED`.
    """

    images: Images
    masks: NDArray[np.uint8]


class Counts(NamedTuple):
    """Pixels of each image and class, ``(n, K)`` each.

    Args:
        both: Of the class, and predicted to be.
        true: Of the class.
        said: Predicted to be of the class.
    """

    both: _RESULT
    true: _RESULT
    said: _RESULT

    def ious(self) -> NDArray[np.float64]:
        """Return intersection over union of each class over all images, NaN where no pixel is of the class.

        >>> one = np.array([[6, 2]])
        >>> Counts(both=np.array([[6, 1]]), true=np.array([[7, 2]]), said=np.array([[7, 2]])).ious().tolist()
        [0.75, 0.3333333333333333]
        """
        return _ious(*(part.sum(axis=0) for part in self))

    def intervals(self) -> NDArray[np.float64]:
        """Return ``(K + 1, 2)`` 95 % intervals over images of :meth:`ious` and, last, of their mean.

        A jackknife with Student's t. The degrees of freedom are those of the images that have the class, and in the
        mean those of Welch and Satterthwaite. A class that one image has is NaN; in the mean, its distance from the
        others stands for its error. NaN, too, where nothing varies.
        """
        n, seen, ious = len(self.true), (self.true > 0).sum(axis=0), self.ious()
        without = _ious(*(part.sum(axis=0) - part for part in self))
        known = ~np.isnan(without)
        with np.errstate(invalid="ignore", divide="ignore"):
            means = np.nansum(without, axis=1) / known.sum(axis=1)
            left = np.column_stack([without, means])
            errors = np.sqrt((n - 1) / n * np.square(left - left.mean(axis=0)).sum(axis=0))
            own = np.square(np.where(np.isnan(errors[:-1]), ious - ious.mean(), errors[:-1]))
            freedom = own.sum() ** 2 / (own**2 / np.maximum(seen - 1, 1)).sum()
        values = np.append(ious, ious.mean())
        half = special.stdtrit(np.append(seen - 1, min(n - 1, freedom)), 0.975) * errors
        half[~(errors > ROUNDING * values)] = np.nan
        return np.clip(np.column_stack([values - half, values + half]), 0, 1)


def _ious(both: NDArray[Any], true: NDArray[Any], said: NDArray[Any]) -> NDArray[np.float64]:
    with np.errstate(invalid="ignore"):
        return np.where(true > 0, both / (true + said - both), np.nan)


@Analysis(
    reading="How well a linear layer tells the class of each pixel from the token of its patch, as intersection over "
    "union: compare with the majority class of each patch, with tokens without positions, and with the place alone.",
    limits="Finer borders than a patch; a decoder, which sees neighbors, does better.",
)
def analyze_segmentation(subject: Subject) -> Finding:
    """Probe patch tokens for the classes of masks (``--masks DIR``), on validation images.

    Example:
        >>> import dataclasses
        >>> folder = Path("masks")
        >>> folder.mkdir()
        >>> analyze_segmentation(dataclasses.replace(subject, masks=folder))
        Traceback (most recent call last):
            ...
        vitlab.errors.UsageError: segmentation needs images with names, as of files, and those of model have none
    """
    if subject.masks is None:
        raise UsageError(
            "segmentation needs masks: --masks DIR, with class numbers as pixels, in a/b.png for the image a/b.jpg"
        )
    fit, held_out = (_masked(subject, split, Path(subject.masks)) for split in ("train", "val"))
    labeled = [part.masks[part.masks != UNLABELED] for part in (fit, held_out)]
    classes = 1 + max(int(part.max(initial=0)) for part in labeled)
    if len(np.unique(labeled[0])) < 2:
        rule = f"must have two classes or more, beside {UNLABELED}, which is ignored: number them from 0"
        raise UsageError(f"{subject.masks}: the masks of training images {rule}")
    layer, grid = _layer(subject)
    cells = _cells(grid, held_out.masks.shape[1:])
    nets: dict[str, Asked] = {"tokens": subject.net}
    nets |= {} if isinstance(subject.net, AnyNetwork) else {"without positions": without_positions(subject.net)}
    found: dict[str, NDArray[np.int64]] = {}
    for name, net in nets.items():
        known, asked = (_tokens(net, subject, part.images, layer) for part in (fit, held_out))
        found[name] = _predict(known, fit.masks, asked, cells, classes)
    votes = np.stack([(fit.masks == k).sum(axis=0) for k in range(classes)])
    found["place alone"] = np.broadcast_to(votes.argmax(axis=0), held_out.masks.shape)
    found["majority of patches"] = _shares(held_out.masks, cells, classes).argmax(axis=2)[:, cells]
    table = pd.DataFrame([row for of, said in found.items() for row in _rows(of, held_out.masks, said, classes)])
    means = table[table["class"] == "mean"].set_index("of")
    ends = means["iou_low"].map("{:.3f}".format) + " to " + means["iou_high"].map("{:.3f}".format)
    ends = (" (" + ends + ")").where(means["iou_low"].notna(), "")
    words = ", ".join(f"{of} {iou:.3f}{ends[of]}" for of, iou in means["iou"].items())
    note = (
        f"mIoU of {words}; {len(fit.masks)} training and {len(held_out.masks)} validation images with masks, {classes} "
        f"classes, softmax regression on tokens that leave block {layer}, intervals by a jackknife over images"
    )
    return Finding(table, _figure(subject, held_out, found["tokens"]), note)


def mask_of(folder: Path, name: str) -> Path | None:
    """Return the mask of an image, which has its name and a suffix of :data:`SUFFIXES`; None if there is none.

    >>> mask_of(Path("no-such-folder"), "cat/1.jpg") is None
    True
    """
    return next((file for end in SUFFIXES if (file := (folder / name).with_suffix(end)).is_file()), None)


def read_mask(path: Path) -> Image.Image:
    """Return a mask as gray image of class numbers; 255 is ignored.

    Raises:
        UsageError: It cannot be read, is in color, or has other numbers than 0 to 255.
    """
    try:
        if path.suffix == ".npy":
            values = np.load(path, allow_pickle=False)
        else:
            with Image.open(path) as image:
                if image.mode not in _MODES:
                    raise UsageError(f"{path} must hold class numbers, gray or palette, and is {image.mode}")
                values = np.asarray(image).astype(np.int64)
    except (OSError, ValueError, SyntaxError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{path} cannot be read: {error}") from None
    if values.ndim != 2 or values.dtype.kind not in "biu" or not values.size:
        raise UsageError(f"{path} must hold height x width class numbers, got {values.shape} {values.dtype}")
    if len(wrong := values[(values < 0) | (values > UNLABELED)]):
        raise UsageError(f"{path} has the class {wrong[0]}: 0 to 254 are classes, and 255 is ignored")
    return Image.fromarray(values.astype(np.uint8))


def softmax_regression(x: Tensor, shares: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights ``(D, K)`` and bias ``(K,)`` of a linear layer with the least cross-entropy, by L-BFGS.

    The penalty is ``|w|^2 / 2`` beside the sum over rows, the usual one of a logistic regression.

    Args:
        x: ``(n, D)`` features, of about unit variance.
        shares: ``(n, K)`` shares of the classes in each row.
        weights: ``(n,)`` weight of each row, at most 1.

    >>> x = torch.tensor([[-1.0], [-0.9], [1.0], [1.1]])
    >>> w, b = softmax_regression(x, torch.eye(2)[[0, 0, 1, 1]], torch.ones(4))
    >>> (x @ w + b).argmax(dim=1).tolist()
    [0, 0, 1, 1]
    """
    D, K = x.shape[1], shares.shape[1]
    w, b = (torch.zeros(*shape, device=x.device, requires_grad=True) for shape in ((D, K), (K,)))
    total = weights.sum()
    solver = torch.optim.LBFGS([w, b], max_iter=_STEPS, tolerance_grad=1e-6, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        solver.zero_grad()
        each = -(shares * (x @ w + b).log_softmax(dim=1)).sum(dim=1)
        value = ((each * weights).sum() + w.square().sum() / 2) / total
        value.backward()
        return value

    with torch.enable_grad():
        solver.step(loss)
    return w.detach(), b.detach()


def _masked(subject: Subject, split: SplitName, folder: Path) -> Masked:
    """Return up to ``num_images`` images of a split with their masks, cut as the images are."""
    if not folder.is_dir():
        raise UsageError(f"`--masks` must be a folder, got {folder}")
    if subject.has_no_data or own_ratio_of(subject.data):
        raise UsageError(f"segmentation needs images of a data set, all of one size, and {subject.name} has none")
    next(iter(subject.batches(split, limit=1)))  # reads the split, or says why not
    images = subject.data.splits[split]
    if not images.names:
        raise UsageError(f"segmentation needs images with names, as of files, and those of {subject.name} have none")
    order = fixed_order(len(images)).tolist()
    pairs = ((i, file) for i in order if (file := mask_of(folder, images.names[i])))
    chosen = sorted(pair for pair, _ in zip(pairs, range(subject.num_images), strict=False))
    if not chosen:
        first = Path(images.names[0]).with_suffix(SUFFIXES[0])
        raise UsageError(f"`--masks {folder}` has no mask of a {split} image, such as {folder / first}")
    masks = np.stack([_cut(subject, images, i, file) for i, file in chosen])
    return Masked(images.take(np.array([i for i, _ in chosen])), masks)


def _cut(subject: Subject, images: Images, i: int, file: Path) -> NDArray[np.uint8]:
    """Return a mask as ``(H, W)`` of the network's input: resized and cut as its image, to the nearest pixel."""
    mask = read_mask(file)
    size = images.known["size"][i].tolist() if isinstance(images, FileImages) else list(images.pixels(i).shape[:2])
    if [mask.height, mask.width] != size:
        raise UsageError(
            f"{file} has {mask.height} x {mask.width} pixels, and its image {images.names[i]} {size[0]} x {size[1]}"
        )
    crop = subject.data.pipeline.center((1.0,))  # a border is ignored
    crop.filter = Image.Resampling.NEAREST
    cut = crop(mask)
    height, width = subject.data.img_size
    return np.asarray(cut if cut.size == (width, height) else cut.resize((width, height), Image.Resampling.NEAREST))


def _layer(subject: Subject) -> tuple[int, tuple[int, int]]:
    """Return the block whose tokens are read, and their grid."""
    images, _ = next(iter(subject.batches("val", limit=1)))
    with torch.no_grad():
        layers = placed_tokens(subject.net, images[:1])
    usable = [k for k, found in enumerate(layers) if found is not None and k > 0]
    asked = usable[-1:] if subject.layer is None else [k for k in usable if k == subject.layer + 1]
    if not asked:
        raise UsageError(f"segmentation needs tokens with a place in the image, and {subject.kind} shows none there")
    return asked[0] - 1, layers[asked[0]][1]  # type: ignore[index]


def _predict(
    known: Iterable[Tensor], masks: NDArray[np.uint8], asked: Iterable[Tensor], cells: NDArray[np.int64], classes: int
) -> NDArray[np.int64]:
    """Return the ``(n, H, W)`` classes that a linear layer on tokens predicts.

    Args:
        known: ``(B, N, D)`` tokens of the images that have these masks.
        masks: ``(m, H, W)`` class of each pixel.
        asked: ``(B, N, D)`` tokens of other images.
        cells: ``(H, W)`` patch of each pixel.
        classes: Number of classes.
    """
    x, counts = torch.cat(list(known)).flatten(0, 1), torch.from_numpy(_shares(masks, cells, classes)).flatten(0, 1)
    there, most = counts.sum(dim=1) > 0, np.bincount(cells.flatten()).max()
    x, counts = x[there], counts[there].float()
    mean, std = x.mean(dim=0), x.std(dim=0)
    std = torch.where(std > 1e-6 * (1 + mean.abs()), std, torch.inf)  # features without variance say nothing
    labeled = counts.sum(dim=1)
    w, b = softmax_regression((x - mean) / std, counts / labeled[:, None], labeled / int(most))
    return torch.cat([((part - mean) / std @ w + b).argmax(dim=2) for part in asked]).numpy()[:, cells]


def _tokens(net: Asked, subject: Subject, images: Images, layer: int) -> Iterator[Tensor]:
    """Yield ``(B, N, D)`` patch tokens that leave a block."""
    for batch, _ in subject.prepared(images):
        with torch.no_grad():
            found = placed_tokens(net, batch)[layer + 1]
        assert found is not None
        yield all_finite(found[0].float().cpu(), "tokens")


def _cells(grid: tuple[int, int], size: Sequence[int]) -> NDArray[np.int64]:
    """Return the ``(H, W)`` number of the patch of each pixel.

    >>> _cells((1, 2), (2, 4)).tolist()
    [[0, 0, 1, 1], [0, 0, 1, 1]]
    """
    (h, w), (height, width) = grid, size
    return (np.arange(height) * h // height)[:, None] * w + np.arange(width) * w // width


def _shares(masks: NDArray[np.uint8], cells: NDArray[np.int64], classes: int) -> NDArray[np.int64]:
    """Return ``(n, N, K)`` pixels of each class in each patch.

    >>> _shares(np.array([[[0, 1, 1, 255]]], dtype=np.uint8), np.array([[0, 0, 1, 1]]), 2).tolist()
    [[[1, 1], [0, 1]]]
    """
    n, patches = len(masks), int(cells.max()) + 1
    image = np.arange(n)[:, None, None]
    place = (image * patches + cells) * (UNLABELED + 1) + masks
    counts = np.bincount(place.flatten(), minlength=n * patches * (UNLABELED + 1))
    return counts.reshape(n, patches, UNLABELED + 1)[:, :, :classes]


def count(masks: NDArray[np.uint8], said: NDArray[np.int64], classes: int) -> Counts:
    """Return the pixels of each image and class, without ignored ones.

    >>> count(np.array([[[0, 1, 1, 255]]], dtype=np.uint8), np.array([[[0, 0, 1, 1]]]), 2).both.tolist()
    [[1, 1]]
    """
    there = masks != UNLABELED
    pairs = [masks == said, there, there]
    values = [masks, masks, said]
    found = [np.stack([(which & (value == k)).sum(axis=(1, 2)) for k in range(classes)], axis=1)
             for which, value in zip(pairs, values, strict=True)]  # fmt: skip
    return Counts(*found)


def _rows(of: str, masks: NDArray[np.uint8], said: NDArray[np.int64], classes: int) -> list[dict[str, Any]]:
    """Return the intersection over union of each class and their mean, with 95 % intervals over images."""
    counts = count(masks, said, classes)
    there = np.flatnonzero(counts.true.sum(axis=0))
    counts = Counts(*(part[:, there] for part in counts))
    ious, pixels = counts.ious(), counts.true.sum(axis=0)
    named = [*map(str, there), "mean"], [*ious, ious.mean()], counts.intervals(), [*pixels, pixels.sum()]
    return [
        {"of": of, "class": name, "iou": float(iou), "iou_low": float(low), "iou_high": float(high), "pixels": int(n)}
        for name, iou, (low, high), n in zip(*named, strict=True)
    ]


def _figure(subject: Subject, held_out: Masked, said: NDArray[np.int64]) -> Any:
    """Draw the first images, their masks, and what the tokens say."""
    from matplotlib import colormaps
    from matplotlib.patches import Patch

    chosen = np.arange(min(_SHOWN, len(held_out.masks)))
    pixels = subject.pixels_of(held_out.images.take(chosen))
    palette = colormaps["tab20"](np.arange(256) % 20)[:, :3]
    palette[UNLABELED] = 1.0
    figure, axes = grid_of_axes(3, len(chosen), size=1.3)
    for k in chosen:
        picture(axes[0, k], pixels[k])
        for ax, values in ((axes[1, k], held_out.masks[k]), (axes[2, k], said[k])):
            ax.imshow(palette[values], interpolation="nearest")
            bare(ax)
    for ax, name in zip(axes[:, 0], ("image", "mask", "tokens say"), strict=True):
        ax.set_ylabel(name, fontsize=8)
    words: dict[Any, list[str]] = {}  # more than 20 classes share colors
    for k in np.union1d(held_out.masks[chosen], said[chosen]).tolist():
        words.setdefault(tuple(palette[k]), []).append("ignored" if k == UNLABELED else str(k))
    keys = [Patch(facecolor=color, edgecolor="0.5", label=", ".join(of)) for color, of in words.items()]
    columns = min(len(keys), max(2, 2 * len(chosen)))
    figure.legend(handles=keys, loc="outside lower left", ncols=columns, title="class", fontsize=7, frameon=False)
    return figure
