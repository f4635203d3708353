"""What a method costs: whether it can be trained in time, its price before, and its time and memory after."""

import math
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitlab.class_paths import name_and_args
from vitlab.errors import UsageError, named_line
from vitlab.layers.custom import check_complete, spare
from vitlab.layers.pos_embed import PosEmbed
from vitlab.models.vit import VisionTransformer
from vitlab.position_bench.methods import Method
from vitlab.position_bench.training import bench_device, bench_network_of, bench_precision


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
        images, before = _images_of(protocol, device), spare(net)
        net(images).square().mean().backward()
        check_complete(before, net)
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
        with bench_precision(protocol, images.device):
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
