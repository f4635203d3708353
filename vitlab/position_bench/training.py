"""One cell of posbench: train a network with a position embedding, and read each test split once."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitlab.analysis.shift import DIRECTIONS, shifted
from vitlab.errors import UsageError
from vitlab.layers.pos_embed import PosEmbed
from vitlab.models.vit import VisionTransformer
from vitlab.optim import param_groups, warmed_up
from vitlab.position_bench.pictures import CELLS, QUESTIONS, Split
from vitlab.tasks.optimizer import build_optimizer

Method = Any  # a name, a class path, or a mapping of class_path and init_args


def bench_cpu_seconds() -> float:
    """Return the CPU seconds that this process has used."""
    return time.process_time()


def bench_network_of(method: Method, protocol: Mapping[str, Any], training: str, seed: int) -> VisionTransformer:
    """Build the network of a cell; parts that two methods share start with the same values.

    Args:
        method: The position embedding.
        protocol: The registered protocol.
        training: ``photos``, ``few`` or ``glyphs``.
        seed: What all initial values follow from.
    """
    chans, outputs = (1, sum(QUESTIONS.values())) if training == "glyphs" else (3, 10)
    torch.manual_seed(seed)
    return VisionTransformer(**protocol["network"], in_chans=chans, num_classes=outputs, pos_embed=method)


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


def outputs_by_question(outputs: Tensor) -> dict[str, Tensor]:
    """Return the part of ``(B, K)`` outputs that answers each question about generated images."""
    return dict(zip(QUESTIONS, outputs.split(list(QUESTIONS.values()), dim=1), strict=True))


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
        UsageError: The loss is not a number.
    """
    recipe = protocol["recipe"] | protocol["trainings"][training]
    net = bench_network_of(method, protocol, training, seed).train()
    optimizer = build_optimizer(recipe["opt"], _groups(net, rate, recipe), net)
    peaks = [group["lr"] for group in optimizer.param_groups]
    size = min(recipe["batch_size"], len(split.labels))
    steps = recipe["epochs"] * (len(split.labels) // size)
    torch.manual_seed(seed)  # of what a method draws in training
    for step, (images, labels) in enumerate(batches_of(split, size, recipe["epochs"], seed, training != "glyphs")):
        factor = warmed_up(step + 1, recipe["warmup"] * steps, steps + 1)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * factor
        loss = loss_of(net(images), labels)
        if not torch.isfinite(loss):
            raise UsageError(f"the loss of {training}, seed {seed}, rate {rate:g} is {loss.item()} at step {step + 1}")
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), recipe["clip"])
        optimizer.step()
    return net.eval()


def _groups(net: VisionTransformer, rate: float, recipe: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the groups of parameters; what lies outside of the blocks learns at a share of the rate."""
    blocks, groups = {id(p) for p in net.blocks.parameters()}, []
    for group in param_groups(net, rate, recipe["weight_decay"]):
        for inside, share in ((True, 1.0), (False, recipe["rest"])):
            params = [p for p in group["params"] if (id(p) in blocks) == inside]
            if params:
                groups.append(group | {"params": params, "lr": group["lr"] * share})
    return groups


@torch.no_grad()
def outputs_of_images(net: VisionTransformer, images: Tensor) -> Tensor:
    """Return ``(N, K)`` outputs, in batches of 250."""
    return torch.cat([net(part) for part in images.split(250)])


def bench_predictions_of(
    net: VisionTransformer, protocol: Mapping[str, Any], training: str, test: Split
) -> tuple[dict[str, NDArray[np.uint8]], dict[str, str]]:
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
    try:
        found["sizes"] = np.stack(
            [
                _classes(outputs_of_images(net, F.interpolate(test.images[: sizes["images"]], size, mode="bilinear")))
                for size in sizes["sizes"]
            ]
        )
    except Exception as error:  # a method may not take another grid, and says so in any way
        refused["sizes"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
    images = test.images[: shift["images"]]
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


def _classes(outputs: Tensor) -> NDArray[np.uint8]:
    return outputs.argmax(dim=1).numpy().astype(np.uint8)


def feature_likeness(net: VisionTransformer, protocol: Mapping[str, Any], test: Split) -> float:
    """Return the mean cosine of the pooled features of photos before and after a shift by half a token."""
    shift = protocol["test"]["shift"]
    images = test.images[: shift["images"]]
    with torch.no_grad():
        before, after = (net.pool(net.forward_features(x)) for x in (images, shifted(images, 2, 2, shift["fill"])))
    return float(F.cosine_similarity(before, after).mean())


def scores_of(predictions: Mapping[str, NDArray[np.uint8]], labels: Mapping[str, NDArray[Any]]) -> dict[str, float]:
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
    return dict.fromkeys(["few"] if training == "few" else ["accuracy", "sizes", "shift"], test.labels.numpy())


def check_method(method: Method, protocol: Mapping[str, Any]) -> float:
    """Try a method on one batch before anything is trained, and return the CPU seconds of a training of photos.

    Raises:
        UsageError: It cannot be built or trained, changes the number of tokens, returns NaN or is too slow.
    """
    try:
        net = bench_network_of(method, protocol, "photos", 0).train()
        if not isinstance(net.pos_embed, PosEmbed):
            raise UsageError(f"{method!r} is no PosEmbed")
        images = torch.randn(protocol["recipe"]["batch_size"], 3, *[protocol["network"]["img_size"]] * 2)
        before = net.tokenizer(images)
        after = net.pos_embed(before)
        if after.shape != before.shape:
            raise UsageError(f"{method!r} changes the tokens from {tuple(before.shape)} to {tuple(after.shape)}")
        out = net(images)
        if not torch.isfinite(out).all():
            raise UsageError(f"{method!r} returns numbers that are not finite")
        out.square().mean().backward()
        start = bench_cpu_seconds()
        for _ in range(2):
            net(images).square().mean().backward()
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{method!r} cannot be trained: {type(error).__name__}: {error}".splitlines()[0]) from error
    photos = protocol["trainings"]["photos"]
    seconds = (bench_cpu_seconds() - start) / 2 / len(images) * photos["images"] * photos["epochs"]
    if seconds > protocol["limit_cpu_seconds"]:
        limit = protocol["limit_cpu_seconds"]
        raise UsageError(
            f"{method!r} is too slow: a training of photos would take {seconds:.0f} CPU seconds, of {limit}"
        )
    return seconds


def cost_of(method: Method, protocol: Mapping[str, Any], rounds: int = 6) -> dict[str, float]:
    """Measure a training step of a method and of ``none`` in turn.

    Returns:
        CPU seconds a step, and CPU seconds and kept activations relative to ``none``.
    """
    images = torch.randn(protocol["recipe"]["batch_size"], 3, *[protocol["network"]["img_size"]] * 2)
    nets = [bench_network_of(each, protocol, "photos", 0).train() for each in (method, "none")]
    kept: list[int] = []
    for net in nets:
        kept.append(_activations(net, images))
    seconds = np.zeros((rounds, 2))
    for i in range(rounds):
        for j, net in enumerate(nets):
            start = bench_cpu_seconds()
            for _ in range(3):
                net(images).square().mean().backward()
            seconds[i, j] = (bench_cpu_seconds() - start) / 3
    mine, none = np.median(seconds, axis=0)
    return {"step_cpu_seconds": float(mine), "time": float(mine / none), "memory": kept[0] / kept[1]}


def _activations(net: VisionTransformer, images: Tensor) -> int:
    """Return the bytes that the forward pass keeps for the backward pass; a tensor kept twice counts once."""
    sizes: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        outputs = net(images)
    found = sum(sizes.values())
    del outputs  # alive until here, so that no storage was used twice
    return found
