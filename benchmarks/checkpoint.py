"""How long training waits for a checkpoint of ViT-S with Adam's moments: written in its way, and in the background.

Both kinds in turn, twelve times: ``python benchmarks/checkpoint.py benchmarks/checkpoint.md``.
"""

import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

import vitlab
from vitlab.runs.generations import WRITING, WholeFiles, keep, tensor_bytes

ROUNDS = 12


def main() -> None:
    """Measure, and write the table."""
    net = vitlab.create_model("vit_s16")
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.zeros(1, 3, 224, 224)).sum().backward()
    optimizer.step()
    content = {"state_dict": net.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    waits: dict[str, list[float]] = {"until it is on the disk": [], "in the background": []}
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for step in range(2 * ROUNDS):
            kind = list(waits)[step % 2]
            files = WholeFiles()
            files.finish = partial(keep, Path(folder), ["last"], {"step": step})
            started = time.perf_counter()
            files.save_checkpoint(content, Path(folder) / WRITING)
            if step % 2 == 0:
                files.wait()
            waits[kind].append(time.perf_counter() - started)
            files.wait()
    ratio = statistics.median(a / b for a, b in zip(*waits.values(), strict=True))
    lines = [
        "# What training waits for a checkpoint",
        "",
        f"ViT-S with Adam's moments, {tensor_bytes(content) / 1e6:.0f} MB; both kinds in turn, {ROUNDS} times, on one "
        f"machine with {torch.get_num_threads()} threads: `python benchmarks/checkpoint.py FILE`.",
        "",
        "| written | median, s | shortest | longest |",
        "|---|---|---|---|",
        *(f"| {k} | {statistics.median(v):.2f} | {min(v):.2f} | {max(v):.2f} |" for k, v in waits.items()),
        "",
        f"The background makes the wait {ratio:.1f} times shorter (median of pairs); it costs the host a copy of the "
        "state in memory while it writes.",
    ]
    Path(sys.argv[1]).write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
