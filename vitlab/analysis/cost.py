"""The cost of a network: parameters, multiply-adds, time and memory."""

import resource
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from matplotlib.ticker import EngFormatter, MaxNLocator
from torch import Tensor, nn

from vitlab.analysis.catalogue import Analysis, Curve
from vitlab.analysis.figures import COLORS, finish, one_axes
from vitlab.analysis.subject import Finding, Subject
from vitlab.models.cost import macs_of_modules
from vitlab.models.foreign import AnyNetwork
from vitlab.models.walk import Asked

BATCHES = (1, 8, 64)
PARTS = 8  # of a foreign network, the largest
SECONDS = 0.3  # of measurement for each batch size


def parameters_by_part(net: Asked) -> dict[str, int]:
    """Return the number of parameters of each part: of a foreign network, of each module in it.

    A parameter that stands in several places counts once, in the first of its parts.
    """
    if isinstance(net, AnyNetwork):
        found = _parameters(net, {name: [child] for name, child in net.net.named_children()})
        return _largest(found, found.pop("the rest") + sum(found.values()))
    blocks: list[Any] = list(net.blocks)  # of one's own, some may have no `attn` or `mlp`
    parts = {"attention": "attn", "mlp": "mlp"}
    of_blocks = {part: [m for block in blocks if (m := getattr(block, at, None))] for part, at in parts.items()}
    return _parameters(net, {"tokenizer": [net.tokenizer], "positions": [net.pos_embed], **of_blocks})


def _parameters(net: nn.Module, parts: Mapping[str, Sequence[nn.Module]]) -> dict[str, int]:
    """Return the number of parameters in the modules of each part, and of "the rest"."""
    left, counts = set(net.parameters()), dict[str, int]()
    for part, modules in parts.items():
        own = left & set(nn.ModuleList(modules).parameters())
        left -= own
        counts[part] = sum(p.numel() for p in own)
    return counts | {"the rest": sum(p.numel() for p in left)}


def macs_by_part(net: Asked) -> dict[str, int]:
    """Return the multiply-adds per image in each part; adding positions counts as none."""
    found = macs_of_modules(net)
    if isinstance(net, AnyNetwork):
        return _largest({name: found.get(name, 0) for name, _ in net.net.named_children()}, found[""])
    blocks = range(len(net.blocks))
    counts = {
        "tokenizer": found["tokenizer"],
        "attention": sum(found.get(f"blocks.{i}.attn", 0) for i in blocks),
        "mlp": sum(found.get(f"blocks.{i}.mlp", 0) for i in blocks),
    }
    return {**counts, "the rest": found[""] - sum(counts.values())}


def _largest(counts: dict[str, int], total: int) -> dict[str, int]:
    kept = {part: n for part, n in sorted(counts.items(), key=lambda pair: -pair[1])[:PARTS] if n}
    kept = {part: n for part, n in counts.items() if part in kept}
    return kept | {"the rest": total - sum(kept.values())}


@torch.no_grad()
def images_per_second(net: Asked, images: Tensor) -> float:
    """Return the images per second of the network for batches of ``images``."""
    net(images)
    _wait(images)
    start, runs = time.perf_counter(), 0
    while runs == 0 or time.perf_counter() - start < SECONDS:
        net(images)
        _wait(images)
        runs += 1
    return runs * len(images) / (time.perf_counter() - start)


@Analysis(
    reading="Parameters and multiply-adds by part, and images per second.",
    limits="Speed on another or a busy machine.",
    curve=Curve(
        measures={"value": "value"},
        lines=("quantity", "of"),
        words="Speed needs an idle machine.",
    ),
)
def analyze_cost(subject: Subject) -> Finding:
    """Count parameters and multiply-adds by part, and measure images per second and memory.

    Example:
        >>> finding = analyze_cost(subject)
        >>> list(finding.table.columns)
        ['quantity', 'of', 'value']
    """
    net, device = subject.net, subject.device
    parts = {"parameters": parameters_by_part(net), "multiply-adds": macs_by_part(net)}
    rows = [{"quantity": q, "of": part, "value": n} for q, counts in parts.items() for part, n in counts.items()]
    rows += [{"quantity": q, "of": "all", "value": sum(counts.values())} for q, counts in parts.items()]
    image = next(subject.batches(limit=1))[0]
    for batch in BATCHES:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        speed = images_per_second(net, image.expand(batch, -1, -1, -1).contiguous())
        rows.append({"quantity": "images per second", "of": f"batch {batch}", "value": speed})
        rows.append({"quantity": "peak memory, MiB", "of": f"batch {batch}", "value": _peak(device) / 2**20})
    table = pd.DataFrame(rows, dtype=object)  # counts stay whole numbers
    figure, axes = one_axes(columns=3, width=3.4, height=3.0)
    for i, (ax, (quantity, counts)) in enumerate(zip(axes, parts.items(), strict=False)):
        ax.barh(list(counts), list(counts.values()), color=COLORS[i])
        ax.invert_yaxis()
        finish(ax, f"{quantity}, {sum(counts.values()):,} in all", "", legend=False)
        ax.xaxis.set_major_locator(MaxNLocator(nbins=3))
        ax.xaxis.set_major_formatter(EngFormatter(sep=" "))
    speed_table = table[table["quantity"] == "images per second"]
    speeds = speed_table["value"].astype(float)
    axes[2].plot(BATCHES, speeds.to_numpy(), marker="o", color=COLORS[2])
    axes[2].set_xscale("log", base=2)
    axes[2].set_xticks(BATCHES, [str(batch) for batch in BATCHES])
    axes[2].set_ylim(0, 1.08 * speeds.max())
    finish(axes[2], "batch size", "images per second", legend=False)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, threads: {torch.get_num_threads()}"
    memory = "of tensors on the device" if device.type == "cuda" else "of the whole process so far"
    note = f"{where}, {str(image.dtype).removeprefix('torch.')}; memory is the peak {memory}; an idle machine is needed"
    return Finding(table, figure, note)


def _wait(images: Tensor) -> None:
    if images.device.type == "cuda":
        torch.cuda.synchronize(images.device)


def _peak(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * 1024  # Linux counts in KiB
