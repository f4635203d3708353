"""How long a worker of an ablation takes to find its next cell, and what it reads: many cells, many workers.

    python benchmarks/many_cells.py                             # 10,000 cells, 100 workers, 1 ms for each call
    python benchmarks/many_cells.py --cells 1000 --workers 10 --latency 0

The workers are processes with the queue of `vitlab ablate run`; a cell sleeps instead of training, and leaves the files
of a cell that was trained. Each call that opens, looks at, locks, renames or removes a file waits as over a network,
and so do those that read or write a claim.
"""

import argparse
import builtins
import fcntl
import io
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from vitlab.ablation.evidence import chain
from vitlab.ablation.execution.cells import Cell, Resolved
from vitlab.ablation.execution.pool import Interrupts, Pool
from vitlab.ablation.file.spec import read_ablation
from vitlab.tables import table

FILE = """\
name: queue
base: vit
axes:
  size: {{{levels}}}
seeds: {seeds}
baseline: {{size: a0}}
metric: {{primary: acc1}}
"""
CALLS = {
    os: (
        *("stat", "lstat", "open", "rename", "replace", "unlink", "mkdir", "scandir", "listdir", "utime"),
        *("pread", "pwrite"),
    ),
    io: ("open",),
    fcntl: ("flock",),
}


def main() -> int:
    """Run the workers, print the table, and return 1 if a cell was taken twice or never."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=10_000, help="a multiple of 100")
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--latency", type=float, default=1e-3, help="seconds of a call of the file system")
    parser.add_argument("--work", type=float, default=2.0, help="seconds that a cell takes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        levels = ", ".join(f"a{i}: {{model.embed_dim: {2 * i + 2}}}" for i in range(100))
        Path("queue.yaml").write_text(FILE.format(levels=levels, seeds=options.cells // 100))
        ablation = read_ablation("queue.yaml")
        known = [Resolved(a, {"model": dict(a.overrides), "data": {}}, {}, {}, (), 1.0, "code") for a in ablation.arms]
        cells = [Cell(ablation, arm, seed) for seed in ablation.seeds for arm in known]
        for cell in cells:  # their identities are no work of the queue
            cell.name  # noqa: B018
        context = multiprocessing.get_context("fork")
        rows: multiprocessing.Queue[dict[str, float]] = context.Queue()
        began = time.monotonic()
        workers = [context.Process(target=_work, args=(options, cells, rows)) for _ in range(options.workers)]
        for worker in workers:
            worker.start()
        found = [rows.get() for _ in workers]
        for worker in workers:
            worker.join()
        wall = time.monotonic() - began
        read = chain.read_chain(next(Path("runs").rglob(chain.FILE)).parent)
        taken = Counter(record["cell"] for record in read.of("cell")) if read else Counter()
    takes = sum(row["takes"] for row in found)
    row = {
        "cells": f"{options.cells:,}",
        "workers": str(options.workers),
        "latency": f"{1e3 * options.latency:g} ms",
        "a take": f"{1e3 * sum(each['seconds'] for each in found) / takes:.0f} ms",
        "its calls": f"{sum(each['calls'] for each in found) / takes:.0f}",
        "its CPU time": f"{1e3 * sum(each['cpu'] for each in found) / takes:.1f} ms",
        "start of a worker": f"{sum(each['start'] for each in found) / len(found):.0f} s",
        "twice": str(sum(count - 1 for count in taken.values())),
        "never": str(options.cells - len(taken)),
        "busy": f"{options.work * options.cells / options.workers / wall:.0%}",
    }
    print(table([row], {name: f"{{{name}}}" for name in row}))
    return int(len(taken) != options.cells or max(taken.values()) > 1)


def _work(options: argparse.Namespace, cells: list[Cell], rows: "multiprocessing.Queue[dict[str, float]]") -> None:
    calls = Counter[str]()
    for module, names in CALLS.items():
        for name in names:
            _delay(module, name, options.latency, calls)
    builtins.open = io.open
    began = time.monotonic()
    pool = Pool(cells, 1, None, Interrupts(print))
    row = {"start": time.monotonic() - began, "takes": 0.0, "seconds": 0.0, "calls": 0.0, "cpu": 0.0}
    while True:
        before, began, cpu = calls.total(), time.monotonic(), time.process_time()
        taken = pool._take()
        row["seconds"] += time.monotonic() - began
        row["cpu"] += time.process_time() - cpu
        row["calls"] += calls.total() - before
        if taken is None:
            break
        row["takes"] += 1
        cell, claim = taken
        time.sleep(options.work)
        result = {"acc1": 0.5, "checkpoint": f"{cell.ablation.checkpoint}.ckpt", "n": 1}
        cell.run.write("results.json", {cell.ablation.evaluate: result})
        chain.append(cell.ablation.directory, "cell", cell=cell.name, id=cell.id)
        cell.run.write("done.json", {"cell": cell.name, "parts": cell.parts})
        claim.release()
    rows.put(row)


def _delay(module: object, name: str, seconds: float, calls: Counter[str]) -> None:
    real = getattr(module, name)

    def slow(*args, **options):  # type: ignore[no-untyped-def]
        calls[name] += 1
        time.sleep(seconds)
        return real(*args, **options)

    setattr(module, name, slow)


if __name__ == "__main__":
    sys.exit(main())
