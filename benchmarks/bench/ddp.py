"""``vitlab bench ddp``: images per second of two processes that average gradients, against one process alone."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench import process_of
from bench.model import Case, step
from bench.networks import ours
from bench.pairs import Work, compare, timed

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "static_graph": {"gradient_as_bucket_view": True, "static_graph": True},
    "bucket_cap_mb 100": {"gradient_as_bucket_view": True, "bucket_cap_mb": 100},
    "find_unused_parameters": {"find_unused_parameters": True},
}
_ALONE = "one process"
_APART = "two, gradients apart"
_WORLD = 2


def measure(rounds: int, budget: float, model: str = "cifar_vit", batch: int = 32) -> list[dict[str, Any]]:
    """Return a row for each setting of DDP: the speed of each of two processes, relative to a single process.

    Both take ``batch`` images a step, with one thread each: ideal is 1, and what two processes lose without exchanging
    anything, for they share the memory, is a row of its own.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = [str(Path(folder) / "store"), str(rounds), str(budget), model, str(batch)]
        words, environment = process_of("ddp")
        environment["OMP_NUM_THREADS"] = "1"
        others = [
            subprocess.Popen([*words, str(rank), *arguments], env=environment, stdout=subprocess.DEVNULL)
            for rank in range(1, _WORLD)
        ]
        try:
            first = subprocess.run([*words, "0", *arguments], env=environment, capture_output=True, text=True)
        finally:
            for other in others:
                other.kill() if sys.exc_info()[0] else other.wait()
    if first.returncode:
        raise RuntimeError(f"one of the two processes failed: {first.stderr.strip()[-500:]}")
    times: dict[str, list[float]] = json.loads(first.stdout.splitlines()[-1])
    found = compare(times, _ALONE)
    speeds = {name: (1 if name == _ALONE else _WORLD) * batch / row["seconds"] for name, row in found.items()}
    return [{"setting": name, **row, "images_per_second": speeds[name]} for name, row in found.items()]


def main(argv: list[str]) -> None:
    """Run as process ``RANK STORE ROUNDS BUDGET MODEL BATCH``; rank 0 writes the seconds of each step."""
    rank, store, rounds, budget, model, batch = int(argv[0]), argv[1], int(argv[2]), float(argv[3]), argv[4], argv[5]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=_WORLD)
    case = Case(model, "train", "fp32", int(batch))
    works = {_ALONE: _work(ours(model), case), _APART: _work(ours(model), case)}
    works |= {name: _work(DistributedDataParallel(ours(model), **options), case) for name, options in OPTIONS.items()}
    times: dict[str, list[float]] = {name: [] for name in works}
    start, go_on = time.perf_counter(), torch.ones(1)
    for i in range(rounds + 2):  # two are warm-ups
        for name in list(works)[:: -1 if i % 2 else 1]:
            dist.barrier()
            if name != _ALONE or rank == 0:
                times[name].append(timed(works[name]))
        go_on.fill_(i < 4 or time.perf_counter() - start < budget)
        dist.broadcast(go_on, 0)
        if not go_on:
            break
    if rank == 0:
        sys.stdout.write(json.dumps({name: seconds[2:] for name, seconds in times.items()}) + "\n")
    dist.destroy_process_group()


def _work(net: nn.Module, case: Case) -> Work:
    return step(net, torch.randn(case.batch, 3, *ours(case.model).img_size), case)


if __name__ == "__main__":
    main(sys.argv[1:])
