"""Memory of training with 56 x 56 tokens on a CPU, by position embedding: what each block keeps for its gradient.

See ``COMMAND``. Each measurement is a forked process: the peak of a forward and a backward pass of one image. The time
is that of a step whose logits are computed a few queries at a time, relative to one that computes them as a whole;
both take turns in one process.
"""

import multiprocessing
import statistics
import sys
import time
from pathlib import Path
from typing import Any, get_args

import torch
import torch._dynamo  # torch's checkpoint imports it at the first call, 70 MiB

from bench.memory import peak
from bench.report import machine_line
from vitlab.layers import recompute
from vitlab.layers.pos_embed import PosEmbedName
from vitlab.models.vit import VisionTransformer
from vitlab.runs.machine import facts

COMMAND = "python benchmarks/long_grids.py benchmarks/long_grids.md"  # and names; all without
SIDE = 56  # tokens
HEADS = 3
ROUNDS = 5
DEPTHS = (1, 3)  # of which the last block computes the class token alone
UNIT = (SIDE**2 + 1) ** 2 * HEADS * 4 / 2**20  # MiB of L x L x heads float32


def measure(name: str, depth: int, grad_checkpoint: bool, results: Any) -> None:
    """Put the memory of one step beyond what the process had, in MiB."""
    before = peak()
    step(network(name, depth, grad_checkpoint))
    results.put(peak() - before)


def compare(name: str, depth: int, rounds: int, results: Any) -> None:
    """Put the CPU time of a step that computes a few queries at a time, relative to one of all: the median of pairs."""
    net, parts = network(name, depth, False), recompute.LONG
    step(net)
    ratios = []
    for i in range(rounds):
        spent = {}
        for few in (True, False) if i % 2 else (False, True):
            recompute.LONG = parts if few else sys.maxsize
            begun = time.process_time()
            step(net)
            spent[few] = time.process_time() - begun
        ratios.append(spent[True] / spent[False])
    results.put(statistics.median(ratios))


def step(net: VisionTransformer) -> None:
    """Go forward and back with one image."""
    net(torch.randn(1, 3, 4 * SIDE, 4 * SIDE)).sum().backward()
    net.zero_grad()


def network(name: str, depth: int, grad_checkpoint: bool) -> VisionTransformer:
    """Return a network of ``depth`` blocks on 56 x 56 tokens."""
    sizes: dict[str, Any] = {
        "img_size": 4 * SIDE,
        "patch_size": 4,
        "embed_dim": 64 * HEADS,
        "num_heads": HEADS,
        "num_classes": 10,
    }
    sizes |= {"depth": depth, "pos_embed": name, "grad_checkpoint": grad_checkpoint}
    return VisionTransformer(**sizes).train()


def apart(function: Any, *args: Any) -> float:
    """Return what a function puts, in a process of its own; NaN if that did not end well."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    process = context.Process(target=function, args=(*args, results))
    process.start()
    process.join()
    return float(results.get()) if process.exitcode == 0 else float("nan")


def main() -> None:
    """Measure, and write the table."""
    torch.set_num_threads(1)
    names = sys.argv[2:] or get_args(PosEmbedName)
    lines = [
        f"`{' '.join([COMMAND, *sys.argv[2:]])}`",
        "",
        machine_line(facts()),
        "",
        f"One image of {SIDE} x {SIDE} tokens and a class token, width {64 * HEADS}, {HEADS} heads, float32. Peak of a",
        f"forward and a backward pass with {DEPTHS[0]} and {DEPTHS[1]} blocks, and what one block more costs, in MiB",
        f"and in units of L x L x heads in float32 ({UNIT:.0f} MiB); the column after it is the peak with",
        "`grad_checkpoint`, which computes each block again. The time is the CPU time of a step of 3",
        f"blocks, relative to one that computes all queries at once: the median of {ROUNDS} pairs.",
        "",
        "| position embedding | 1 block | 3 blocks | a block more | in L x L x heads | grad_checkpoint | time |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in names:
        few, many = (apart(measure, name, depth, False) for depth in DEPTHS)
        more = (many - few) / (DEPTHS[1] - DEPTHS[0])
        light, price = apart(measure, name, DEPTHS[1], True), apart(compare, name, DEPTHS[1], ROUNDS)
        lines.append(
            f"| `{name}` | {few:.0f} | {many:.0f} | {more:.0f} | {more / UNIT:.1f} | {light:.0f} | {price:.2f} |"
        )
        print(lines[-1], flush=True)
    Path(sys.argv[1]).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
