"""One training of posbench: a network with a position embedding, as the protocol says."""

import random
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.errors import UsageError
from vitlab.models.vit import VisionTransformer
from vitlab.optim import param_groups, warmed_up
from vitlab.position_bench.answers import NotFinite, outputs_by_question
from vitlab.position_bench.methods import Method
from vitlab.position_bench.pictures import QUESTIONS, Split, as_floats
from vitlab.position_bench.protocol import classes_of_photos
from vitlab.tasks.optimizer import build_optimizer


def bench_network_of(method: Method, protocol: Mapping[str, Any], training: str, seed: int) -> VisionTransformer:
    """Build the network of a cell; parts that two methods share start with the same values.

    Args:
        method: The position embedding.
        protocol: The registered protocol.
        training: ``photos``, ``few`` or ``glyphs``.
        seed: What all initial values follow from.
    """
    glyphs = training == "glyphs"
    chans, outputs = (1, sum(QUESTIONS.values())) if glyphs else (3, classes_of_photos(protocol))
    own = {name: value for name, value in protocol["trainings"][training].items() if name in ("img_size", "patch_size")}
    _seed(seed)
    return VisionTransformer(**protocol["network"] | own, in_chans=chans, num_classes=outputs, pos_embed=method)


def _seed(seed: int) -> None:
    """Seed all that a method may draw from."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def bench_device(protocol: Mapping[str, Any]) -> torch.device:
    """Return where a protocol trains: on the CPU unless it names another device.

    Raises:
        UsageError: This machine has none.
    """
    device = torch.device(protocol.get("device", "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("this protocol trains on a GPU, and there is none here; --price says what it would take")
    return device


def bench_precision(protocol: Mapping[str, Any], device: torch.device) -> Any:
    """Return the context in which a network computes."""
    half = protocol["recipe"]["precision"] == "bf16"
    return torch.autocast(device.type, torch.bfloat16) if half else nullcontext()


def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy, summed over the questions if there are several.

    Args:
        outputs: ``(B, K)``.
        labels: ``(B,)`` classes or ``(B, 4)`` answers.
    """
    if labels.ndim == 1:
        return F.cross_entropy(outputs, labels)
    parts = outputs_by_question(outputs).values()
    losses = [F.cross_entropy(part, label) for part, label in zip(parts, labels.T, strict=True)]
    return torch.stack(losses).sum()


def batches_of(split: Split, batch_size: int, epochs: int, seed: int, flip: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield training batches; order and flips follow from the seed alone, so that methods can be paired."""
    rng = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(len(split.labels), generator=rng)
        turned = torch.rand(len(order), generator=rng) < 0.5
        for part in range(0, len(order) - batch_size + 1, batch_size):
            chosen = order[part : part + batch_size]
            images = split.images[chosen]
            if flip:
                images = torch.where(turned[chosen].view(-1, 1, 1, 1), images.flip(3), images)
            yield images, split.labels[chosen]


def train_network(
    method: Method, protocol: Mapping[str, Any], training: str, seed: int, rate: float, split: Split
) -> VisionTransformer:
    """Train one network as the protocol says.

    Args:
        method: The position embedding.
        protocol: The registered protocol.
        training: ``photos``, ``few`` or ``glyphs``.
        seed: Seed of initial values and of the order of images.
        rate: Peak learning rate.
        split: The training images.

    Raises:
        NotFinite: The loss is not a number.
        UsageError: The protocol trains on a device that is not there.
    """
    recipe = protocol["recipe"] | protocol["trainings"][training]
    device = bench_device(protocol)
    net = bench_network_of(method, protocol, training, seed).train().to(device)
    optimizer = build_optimizer(recipe["opt"], param_groups(net, rate, recipe["weight_decay"]), rate, net)
    peaks = [group["lr"] for group in optimizer.param_groups]
    size = min(recipe["batch_size"], len(split.labels))
    steps = recipe["epochs"] * (len(split.labels) // size)
    _seed(seed)  # of what a method draws in training
    for step, (images, labels) in enumerate(batches_of(split, size, recipe["epochs"], seed, training != "glyphs")):
        factor = warmed_up(step + 1, recipe["warmup"] * steps, steps + 1)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * factor
        with bench_precision(protocol, device):
            outputs = net(as_floats(images.to(device)))
        loss = loss_of(outputs.float(), labels.to(device))
        if not torch.isfinite(loss):
            raise NotFinite(f"the loss of {training}, seed {seed}, rate {rate:g} is {loss.item()} at step {step + 1}")
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), recipe["clip"])
        optimizer.step()
    return net.eval()
