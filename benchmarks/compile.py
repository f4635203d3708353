"""How long torch takes to compile a network, and how fast its training step is then: whole, and part by part.

Steps of all three kinds in turn: see ``COMMAND``.
"""

import os
import statistics
import sys
import time
from pathlib import Path

import torch

import vitlab
from vitlab.layers.compiled import compile_parts

COMMAND = "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 TORCHINDUCTOR_COMPILE_THREADS=1 python benchmarks/compile.py"
ROUNDS = 15
CASES = (("vit_s16", 96, 8), ("t2t_vit_7", 96, 8))  # network, side of the images, batch


def seconds(net: torch.nn.Module, images: torch.Tensor) -> tuple[float, float]:
    """Return the CPU seconds, the compiler's among them, and the seconds of one forward and backward pass."""
    cpu, clock = sum(os.times()[:4]), time.perf_counter()
    net.zero_grad()
    net(images).sum().backward()
    return sum(os.times()[:4]) - cpu, time.perf_counter() - clock


def rows(name: str, side: int, batch: int) -> list[str]:
    """Measure one network and return its lines of the table."""
    nets, images = {}, torch.randn(batch, 3, side, side)
    for kind in ("plain", "whole", "part by part"):
        torch.manual_seed(0)
        nets[kind] = vitlab.create_model(name, img_size=side, num_classes=10, drop_path_rate=0.1).train()
    nets["whole"].compile()
    compile_parts(nets["part by part"])
    first = {kind: seconds(net, images) for kind, net in nets.items()}
    rounds = [{kind: seconds(net, images)[1] for kind, net in nets.items()} for _ in range(ROUNDS)]
    lines = []
    for kind, (cpu, _) in first.items():
        speeds = sorted(each["plain"] / each[kind] for each in rounds)
        spread = f"[{speeds[1]:.2f}, {speeds[-2]:.2f}]"
        lines.append(f"| {name} | {kind} | {cpu:.1f} | {statistics.median(speeds):.2f} {spread if lines else ''} |")
    return lines


def main() -> None:
    """Measure, and write the table."""
    text = [
        "# What compiling costs and gives",
        "",
        f"Forward and backward of a batch of 8 images of 96 x 96 pixels with stochastic depth, torch "
        f"{torch.__version__}, threads: {torch.get_num_threads()}. The first step compiles; nothing was in torch's "
        f"caches. Then {ROUNDS} steps of all kinds in turn: speed relative to plain, the median of the rounds, and "
        "the range of the rounds without the fastest and the slowest. "
        f"`{COMMAND} FILE`.",
        "",
        "| network | compiled | first step, CPU s | speed of later steps |",
        "|---|---|---|---|",
    ]
    for case in CASES:
        text += rows(*case)
    Path(sys.argv[1]).write_text("\n".join(text) + "\n")
    print("\n".join(text))


if __name__ == "__main__":
    main()
