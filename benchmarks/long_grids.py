"""Memory of training with 56 x 56 tokens on a CPU, by position embedding: what each block keeps for its gradient.

See ``COMMAND``. Each measurement is a forked process: the peak of a forward and a backward pass of one image.
"""

import multiprocessing
import sys
from pathlib import Path
from typing import Any, get_args

import torch
import torch._dynamo  # torch's checkpoint imports it at the first call, 70 MiB

from bench.memory import peak
from bench.report import machine_line
from vitlab.layers.pos_embed import PosEmbedName
from vitlab.models.vit import VisionTransformer
from vitlab.runs.machine import facts

COMMAND = "python benchmarks/long_grids.py benchmarks/long_grids.md"  # and names; all without
SIDE = 56  # tokens
HEADS = 3
DEPTHS = (1, 3)  # of which the last block computes the class token alone
UNIT = (SIDE**2 + 1) ** 2 * HEADS * 4 / 2**20  # MiB of L x L x heads float32


def measure(name: str, depth: int, grad_checkpoint: bool, results: Any) -> None:
    """Put the memory of one step beyond what the process had, in MiB."""
    before = peak()
    sizes: dict[str, Any] = {
        "img_size": 4 * SIDE,
        "patch_size": 4,
        "embed_dim": 64 * HEADS,
        "num_heads": HEADS,
        "num_classes": 10,
    }
    sizes |= {"depth": depth, "pos_embed": name, "grad_checkpoint": grad_checkpoint}
    net = VisionTransformer(**sizes).train()
    net(torch.randn(1, 3, 4 * SIDE, 4 * SIDE)).sum().backward()
    results.put(peak() - before)


def memory(name: str, depth: int, grad_checkpoint: bool) -> float:
    """Return the peak of one step in MiB, of a process of its own; NaN if it did not end well."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    process = context.Process(target=measure, args=(name, depth, grad_checkpoint, results))
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
        f"and in units of L x L x heads in float32 ({UNIT:.0f} MiB); the last column is the peak with",
        "`grad_checkpoint`, which computes each block again.",
        "",
        "| position embedding | 1 block | 3 blocks | a block more | in L x L x heads | 3 blocks, grad_checkpoint |",
        "|---|---|---|---|---|---|",
    ]
    for name in names:
        few, many = (memory(name, depth, False) for depth in DEPTHS)
        step = (many - few) / (DEPTHS[1] - DEPTHS[0])
        light = memory(name, DEPTHS[1], True)
        lines.append(f"| `{name}` | {few:.0f} | {many:.0f} | {step:.0f} | {step / UNIT:.1f} | {light:.0f} |")
        print(lines[-1], flush=True)
    Path(sys.argv[1]).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
