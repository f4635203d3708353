"""What a trained network answers to the images of a test, read once, and how often it is right."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitlab.analysis.shift import DIRECTIONS, shifted
from vitlab.errors import UsageError, named_line
from vitlab.models.vit import VisionTransformer
from vitlab.position_bench.pictures import CELLS, QUESTIONS, Split, as_floats
from vitlab.position_bench.protocol import TASKS


class NotFinite(UsageError):
    """A training has diverged, or a network answers with numbers that are not finite: its cell has no score."""


def outputs_by_question(outputs: Tensor) -> dict[str, Tensor]:
    """Return the part of ``(B, K)`` outputs that answers each question about generated images."""
    return dict(zip(QUESTIONS, outputs.split(list(QUESTIONS.values()), dim=1), strict=True))


@torch.no_grad()
def outputs_of_images(net: VisionTransformer, images: Tensor) -> Tensor:
    """Return ``(N, K)`` outputs on the CPU, in batches of 250.

    Raises:
        NotFinite: Outputs are not finite: the class of the largest would be one that the network never chose.
        UsageError: There are more or fewer outputs than images.
    """
    device = next(net.parameters()).device
    outputs = torch.cat([net(as_floats(part.to(device))).cpu() for part in images.split(250)])
    if len(outputs) != len(images):
        raise UsageError(f"the network gives {len(outputs)} outputs for {len(images)} images")
    if lost := int((~outputs.isfinite()).any(dim=1).sum()):
        raise NotFinite(f"the outputs of {lost} of {len(outputs)} images are not finite")
    return outputs


def bench_predictions_of(
    net: VisionTransformer, protocol: Mapping[str, Any], training: str, test: Split
) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Read the test split of a trained network once, for every task that reads this training.

    Returns:
        Predicted classes of each task, images last; and tasks that do not apply, with the reason.
    """
    if training == "glyphs":
        parts = outputs_by_question(outputs_of_images(net, test.images))
        return _tasks_of({name: _classes(part) for name, part in parts.items()}), {}
    if training == "few":
        return {"few": _classes(outputs_of_images(net, test.images))}, {}
    found, refused = {"accuracy": _classes(outputs_of_images(net, test.images))}, {}
    sizes, shift = protocol["test"]["sizes"], protocol["test"]["shift"]
    photos = as_floats(test.images[: sizes["images"]])
    try:
        found["sizes"] = np.stack(
            [_classes(outputs_of_images(net, F.interpolate(photos, size, mode="bilinear"))) for size in sizes["sizes"]]
        )
    except Exception as error:  # a method may not take another grid, and says so in any way
        refused["sizes"] = str(error) if isinstance(error, UsageError) else named_line(error, 200)
    images = as_floats(test.images[: shift["images"]])
    found["shift"] = np.stack(
        [
            _classes(outputs_of_images(net, shifted(images, pixels * dy, pixels * dx, shift["fill"])))
            for pixels in shift["pixels"]
            for dy, dx in DIRECTIONS.values()
        ]
    )
    return found, refused


def _tasks_of(answers: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the answers to the tasks of generated images: a place is right if its row and its column are."""
    place = answers["row"] * CELLS + answers["column"]
    return {"place": place, "offset": answers["offset"], "far": answers["far"]}


def _classes(outputs: Tensor) -> NDArray[Any]:
    return smallest(outputs.argmax(dim=1).numpy(), outputs.shape[1])


def smallest(classes: NDArray[Any], count: int) -> NDArray[Any]:
    """Return numbers below ``count`` in the smallest type that holds all of these.

    Example:
        >>> [smallest(np.array([3]), count).dtype.name for count in (10, 256, 1000)]
        ['uint8', 'uint8', 'uint16']
    """
    return classes.astype(np.min_scalar_type(count - 1))


def accuracy_of(net: VisionTransformer, training: str, split: Split) -> float:
    """Return the share of right answers to images; to generated ones, its mean over the questions."""
    outputs = outputs_of_images(net, split.images)
    parts = outputs_by_question(outputs).values() if training == "glyphs" else [outputs]
    answers = split.labels.view(len(outputs), -1).T
    right = [(part.argmax(1) == answer).float().mean() for part, answer in zip(parts, answers, strict=True)]
    return float(torch.stack(right).mean())


def scores_of(predictions: Mapping[str, NDArray[Any]], labels: Mapping[str, NDArray[Any]]) -> dict[str, float]:
    """Return the share of right answers of each task, the mean over its sizes or shifts.

    Example:
        >>> scores_of({"few": np.array([1, 2], np.uint8)}, {"few": np.array([1, 1])})
        {'few': 0.5}
    """
    return {name: float((x == labels[name][: x.shape[-1]]).mean()) for name, x in predictions.items()}


def answers_of(training: str, test: Split) -> dict[str, NDArray[Any]]:
    """Return the right answers of each task that reads a training."""
    if training == "glyphs":
        return _tasks_of(dict(zip(QUESTIONS, test.labels.T.numpy(), strict=True)))
    return {task: test.labels.numpy() for task, (_, reads) in TASKS.items() if reads == training}
