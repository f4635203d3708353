"""The reconstructions of a masked autoencoder."""

import math

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from vitlab.analysis.catalogue import Analysis
from vitlab.analysis.figures import grid_of_axes, picture
from vitlab.analysis.intervals import over_images
from vitlab.analysis.subject import Finding, Subject
from vitlab.data.loading.streams import MASK, shuffled_indices, stream
from vitlab.errors import UsageError
from vitlab.tokenizers.patch import cut_patches

SHOWN = 6  # pictures


@Analysis(
    reading="Hidden patches as a masked autoencoder reconstructs them from the image, and from another image under "
    "the same mask: what both have in common does not come from the image.",
    limits="The quality of the features: use `knn` or a linear probe.",
)
def analyze_reconstruction(subject: Subject) -> Finding:
    """Show images, their masks, their reconstructions, and reconstructions from another image.

    The error is the mean squared error of hidden pixels, whose variance over the training images is 1. Two baselines:
    the same network under the same mask, which sees the picture before; and no network, but the mean of the pictures
    there, or each hidden patch's own mean where the task leaves that out of what is predicted.

    Example:
        >>> finding = analyze_reconstruction(mae_subject)
        >>> list(finding.table.columns)
        ['seen', 'error', 'error_low', 'error_high']
    """
    task = subject.task
    if getattr(task, "fill", None) is None:
        raise UsageError(f"reconstruction needs a checkpoint of a masked autoencoder (--model=MAE), not {subject.name}")
    images, _ = subject.labeled()
    others = _others(images, images)
    seeds = stream(np.arange(len(images)), MASK)
    order = torch.from_numpy(shuffled_indices(seeds, subject.net.grid_size, task.hparams["mask_block"])).to(
        images.device
    )
    errors: dict[str, list[Tensor]] = {"itself": [], "another picture": [], "nothing": []}
    mean, keeps_means = images.mean(dim=0, keepdim=True), task.hparams["norm_pix"]
    for part, own, other in zip(images.split(32), order.split(32), others.split(32), strict=True):
        filled, is_hidden = task.fill(part, own)
        for name, made in zip(errors, (filled, task.fill(part, own, other)[0], mean.expand_as(part)), strict=True):
            patches, found = (cut_patches(x, subject.net.grid_size).flatten(2) for x in (part, made))
            if name == "nothing" and keeps_means:
                found = patches.mean(dim=2, keepdim=True)
            errors[name].append((patches - found).square().mean(dim=2)[is_hidden].view(len(part), -1).mean(dim=1))
    measured = {name: torch.cat(each).cpu().numpy() for name, each in errors.items()}
    rows = [{"seen": name, **over_images("error", each, (0, math.inf))} for name, each in measured.items()]

    pictures = subject.shown(min(SHOWN, len(images)))
    own = order[: len(pictures)]
    filled, is_hidden = task.fill(pictures, own)
    gray = torch.where(_pixels_of(is_hidden, subject.net.grid_size, pictures), 0.0, pictures)
    columns = {"picture": pictures, "seen": gray, "filled in": filled}
    columns["from another"], _ = task.fill(pictures, own, _others(pictures, images))
    figure, axes = grid_of_axes(len(pictures), len(columns), size=1.5)
    for j, (title, values) in enumerate(columns.items()):
        for i, pixels in enumerate(subject.pixels(values).numpy()):
            picture(axes[i, j], pixels, title if i == 0 else "")
    kept = "; each hidden patch keeps its own mean and spread" if keeps_means else ""
    note = f"{len(images)} images, {task.num_kept} of {order.shape[1]} tokens seen{kept}"
    return Finding(pd.DataFrame(rows), figure, note)


def _others(pictures: Tensor, images: Tensor) -> Tensor:
    """Return for each picture one of the images, the one before its place or further back, that is not the same."""
    n, found = len(images), []
    for i, own in enumerate(pictures):
        back = (images[(i - k) % n] for k in range(1, n + 1))
        if (other := next((image for image in back if not torch.equal(image, own)), None)) is None:
            raise UsageError(f"reconstruction needs two images that differ (--num_images, --images), got {n}")
        found.append(other)
    return torch.stack(found)


def _pixels_of(is_hidden: Tensor, grid_size: tuple[int, int], images: Tensor) -> Tensor:
    mask = is_hidden.view(-1, 1, *grid_size).float()
    return torch.nn.functional.interpolate(mask, images.shape[2:], mode="nearest") > 0
