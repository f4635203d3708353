"""One cell of posbench: train a network with a position embedding, and read each test split once."""

import math
import random
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitlab.analysis.shift import DIRECTIONS, shifted
from vitlab.class_paths import name_and_args
from vitlab.errors import UsageError, named_line
from vitlab.layers.pos_embed import PosEmbed
from vitlab.models.vit import VisionTransformer
from vitlab.optim import param_groups, warmed_up
from vitlab.position_bench.pictures import CELLS, QUESTIONS, Split, as_floats
from vitlab.position_bench.protocol import classes_of_photos
from vitlab.tasks.optimizer import build_optimizer

Method = Any  # a name, a class path, or a mapping of class_path and init_args


class NotFinite(UsageError):
    """A training has diverged, or a network answers with numbers that are not finite: its cell has no score."""


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


def _precision(protocol: Mapping[str, Any], device: torch.device) -> Any:
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
        with _precision(protocol, device):
            outputs = net(as_floats(images.to(device)))
        loss = loss_of(outputs.float(), labels.to(device))
        if not torch.isfinite(loss):
            raise NotFinite(f"the loss of {training}, seed {seed}, rate {rate:g} is {loss.item()} at step {step + 1}")
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), recipe["clip"])
        optimizer.step()
    return net.eval()


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


def feature_likeness(net: VisionTransformer, protocol: Mapping[str, Any], test: Split) -> float:
    """Return the mean cosine of the pooled features of photos before and after a shift by half a token."""
    shift = protocol["test"]["shift"]
    images = as_floats(test.images[: shift["images"]])
    half = shift["pixels"][0]
    pairs = zip(images.split(500), shifted(images, half, half, shift["fill"]).split(500), strict=True)
    device, found = next(net.parameters()).device, []
    with torch.no_grad():
        for pair in pairs:
            before, after = (net.fc_norm(net.pool(net.forward_features(x.to(device)))) for x in pair)
            found.append(F.cosine_similarity(before, after).cpu())
    return float(torch.cat(found).mean())


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
    return dict.fromkeys(["few"] if training == "few" else ["accuracy", "sizes", "shift"], test.labels.numpy())


@contextmanager
def _trying(method: Method) -> Iterator[None]:
    """Say in one line what a method raises inside a ``with`` block."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        lacks = isinstance(method, str) and re.search(r"missing \d+ required .*argument", str(error))
        way_out = f"; give {method} as '{{class_path: {method}, init_args: {{...}}}}'" if lacks else ""
        raise UsageError(f"{method!r} cannot be trained: {named_line(error)}{way_out}") from error


def check_method(method: Method, protocol: Mapping[str, Any]) -> float:
    """Try a method on one batch before anything is trained, and return the CPU seconds of a training of photos.

    Raises:
        UsageError: It cannot be built or trained, changes the number of tokens, returns NaN or is too slow.
    """
    with _trying(method):
        device = bench_device(protocol)
        net = bench_network_of(method, protocol, "photos", 0).train().to(device)
        if not isinstance(net.pos_embed, PosEmbed):
            raise UsageError(f"{method!r} is not a PosEmbed")
        images = _images_of(protocol, device)
        net(images).square().mean().backward()
        for mode in ("train", "eval"):  # a method may do other things when it is tested
            with torch.no_grad():
                out = net.train(mode == "train")(images)
            if not torch.isfinite(out).all():
                raise UsageError(f"{method!r} returns numbers that are not finite in {mode} mode")
        net.train()
        seconds = _seconds_of_step(net, images, protocol, 2)
    photos = protocol["trainings"]["photos"]
    seconds *= photos["images"] * photos["epochs"] / len(images)
    limit = protocol["limit_cpu_seconds"]
    if limit is not None and seconds > limit:
        raise UsageError(
            f"{method!r} is too slow: a training of photos would take {seconds:.0f} CPU seconds, of {limit}"
        )
    return seconds


def _seconds_of_step(net: VisionTransformer, images: Tensor, protocol: Mapping[str, Any], steps: int) -> float:
    """Return the seconds of a forward and backward pass: of CPU time, or by the clock on another device."""
    gpu = images.device.type == "cuda"
    clock = time.perf_counter if gpu else time.process_time
    if gpu:
        torch.cuda.synchronize()
    start = clock()
    for _ in range(steps):
        with _precision(protocol, images.device):
            outputs = net(images)
        outputs.float().square().mean().backward()
    if gpu:
        torch.cuda.synchronize()
    return (clock() - start) / steps


def _images_of(protocol: Mapping[str, Any], device: torch.device) -> Tensor:
    """Return a batch of noise of the size of photos."""
    return torch.randn(protocol["recipe"]["batch_size"], 3, *[protocol["network"]["img_size"]] * 2, device=device)


def price_lines(method: Method, protocol: Mapping[str, Any]) -> list[str]:
    """Return what the cells of a method would take: images of each training, measured images a second, hours.

    Measured are a few steps of each kind of network on noise, on the GPU where there is one. Reading test splits and
    further learning rates at a border come on top.

    Raises:
        UsageError: It cannot be built or trained.
    """
    device = torch.device("cuda" if protocol.get("device") == "cuda" and torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)  # as the cells are trained
    lines, total = [], 0.0
    rates, seeds = protocol["tuning"]["rates"], len(protocol["seeds"])
    for training, recipe in protocol["trainings"].items():
        networks = seeds + len(rates.get(training, ()))
        with _trying(method):
            net = bench_network_of(method, protocol, training, 0).train().to(device)
        size = recipe.get("batch_size", protocol["recipe"]["batch_size"])
        if device.type == "cpu":
            size = min(size, max(2, 100 * 32**2 // math.prod(net.img_size)))  # a step of seconds, not of minutes
        images = torch.randn(size, net.in_chans, *net.img_size, device=device)
        with _trying(method):
            _seconds_of_step(net, images, protocol, 1)
            speed = size / _seconds_of_step(net, images, protocol, 2)
        shown = recipe["images"] * recipe["epochs"]
        hours = networks * shown / speed / 3600
        total += hours
        lines.append(f"  {training:<7} {networks} networks x {shown:,} images, {speed:,.0f} images/s: {hours:,.1f} h")
    where = torch.cuda.get_device_name() if device.type == "cuda" else "one core of this machine"
    kind = "hours" if device.type == "cuda" else "CPU hours"
    return [f"{name_and_args('pos_embed', method)[0]}, measured on {where}:", *lines, f"  in all  {total:,.1f} {kind}"]


def cost_of(method: Method, protocol: Mapping[str, Any]) -> dict[str, float]:
    """Measure a training step of a method and of ``none`` in turn.

    Returns:
        Seconds a step (of the CPU, or by the clock on a GPU), and seconds and kept activations relative to ``none``.
    """
    images = _images_of(protocol, device := bench_device(protocol))
    nets = [bench_network_of(each, protocol, "photos", 0).train().to(device) for each in (method, "none")]
    kept = [_activations(net, images) for net in nets]
    rounds = [[_seconds_of_step(net, images, protocol, 3) for net in nets] for _ in range(6)]
    mine, none = np.median(rounds, axis=0)
    return {"step_cpu_seconds": float(mine), "time": float(mine / none), "memory": kept[0] / kept[1]}


def _activations(net: VisionTransformer, images: Tensor) -> int:
    """Return the bytes that the forward pass keeps for the backward pass; a tensor kept twice counts once."""
    sizes: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x.detach()  # an output as it is would keep its graph for good

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        outputs = net(images)
    found = sum(sizes.values())
    del outputs  # alive until here, so that no storage was used twice
    return found
