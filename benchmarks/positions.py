"""What each position embedding costs: speed of ViT-S/16 beside the one without, memory, and the time to compile.

On a GPU networks are compiled and run in bfloat16: see ``COMMAND``. Steps of all take turns.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import get_args

import torch

import vitlab
from bench.report import machine_line
from vitlab.layers.compiled import compile_parts
from vitlab.layers.pos_embed import PosEmbedName
from vitlab.runs.machine import facts

COMMAND = "python benchmarks/positions.py"
ROUNDS = 15


class Contender:
    """A network with one position embedding, and what its steps have cost."""

    def __init__(self, name: str, side: int, device: str) -> None:
        torch.manual_seed(0)
        self.name, self.device, self.seconds = name, device, list[float]()
        self.net = vitlab.create_model("vit_s16", img_size=side, num_classes=1000, pos_embed=name).train().to(device)
        if device == "cuda":
            compile_parts(self.net)

    def step(self, images: torch.Tensor) -> float:
        """Take a forward and a backward pass; return its seconds."""
        begin = self._clock()
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            loss = self.net(images).float().square().mean()
        loss.backward()
        self.net.zero_grad()
        return self._clock() - begin

    def warm_up(self, images: torch.Tensor) -> None:
        """Take the first steps, of which the first compiles, and note the memory of the next."""
        self.first = self.step(images)
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.step(images)
        self.memory = torch.cuda.max_memory_allocated() / 2**30 if self.device == "cuda" else float("nan")

    def _clock(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--side", type=int, default=96, help="height and width of the images, in pixels")
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()
    images = torch.randn(args.batch, 3, args.side, args.side, device=args.device)
    all_of_them = [Contender(name, args.side, args.device) for name in get_args(PosEmbedName)]
    for one in all_of_them:
        one.warm_up(images)
    for i in range(ROUNDS):
        for one in all_of_them[:: 1 if i % 2 else -1]:
            one.seconds.append(one.step(images))
    text = [
        "# What a position embedding costs",
        "",
        f"ViT-S/16, training steps (forward and backward) of {args.batch} images of {args.side} x {args.side} pixels; "
        f"steps of all took turns, {ROUNDS} rounds. Speed is relative to `none`: the median of the rounds, and what "
        f"all but one at either end lie between. {machine_line(facts(args.device))}. "
        f"`{COMMAND} FILE --device {args.device} --side {args.side} --batch {args.batch}`.",
        "",
        "| `pos_embed` | speed | images a second | memory, GiB | first step, s |",
        "|---|---|---|---|---|",
    ]
    base = next(one for one in all_of_them if one.name == "none")
    for one in all_of_them:
        ratios = sorted(a / b for a, b in zip(base.seconds, one.seconds, strict=True))
        spread = f"{statistics.median(ratios):.2f} [{ratios[1]:.2f}, {ratios[-2]:.2f}]"
        memory = "-" if one.memory != one.memory else f"{one.memory:.2f}"
        rate = args.batch / statistics.median(one.seconds)
        text.append(f"| `{one.name}` | {spread} | {rate:.1f} | {memory} | {one.first:.1f} |")
    args.file.write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
