"""How long a worker of an ablation takes to find its next cell, and what it reads: many cells, many workers.

    python benchmarks/many_cells.py --page benchmarks/many_cells.md  # 10,000 cells, 100 workers, 1 ms for each call
    python benchmarks/many_cells.py --cells 1000 --workers 10 --latency 0

The workers are processes with the queue of `vitlab ablate run`; a cell sleeps instead of training, and leaves the files
of a cell that was trained. Each call that opens, looks at, locks, renames or removes a file waits as over a network,
and so do those that read or write a claim.
"""

import argparse
import builtins
import datetime
import fcntl
import io
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
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
HEAD = """\
# Many cells, many workers

Simulated by `python benchmarks/many_cells.py --page FILE` on {date}, commit {commit}: {workers} processes on
one machine with {cores} cores share {cells} cells that do nothing for {work:g} s each; each call of the file system
takes {latency:g} ms longer, as over NFS. The machine was shared: its load was {load[0]:.1f} before, and
{load[1]:.1f} at the end with these workers. *A take* is the time until a worker has its next cell; its CPU time
is its own; the rest is waiting for files and for a core, of which these workers have few. With a core for each worker
a take would be its calls and its CPU time. *Busy* is the share of their time that workers spend in cells.

"""


def main() -> int:
    """Run the workers, print the table, and return 1 if a cell was taken twice or never."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=10_000, help="a multiple of 100")
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--latency", type=float, default=1e-3, help="seconds of a call of the file system")
    parser.add_argument("--work", type=float, default=2.0, help="seconds that a cell takes")
    parser.add_argument("--page", type=Path, help="the page to write")
    options = parser.parse_args()
    load = [os.getloadavg()[0]]
    page = options.page and options.page.resolve()
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
        rows: multiprocessing.Queue[Worker] = context.Queue()
        began = time.monotonic()
        workers = [context.Process(target=_work, args=(options, cells, rows)) for _ in range(options.workers)]
        for worker in workers:
            worker.start()
        found = [rows.get() for _ in workers]
        for worker in workers:
            worker.join()
        wall = time.monotonic() - began
        load.append(os.getloadavg()[0])
        read = chain.read_chain(next(Path("runs").rglob(chain.FILE)).parent)
        taken = Counter(record["cell"] for record in read.of("cell")) if read else Counter()
    takes = sorted(seconds for worker in found for seconds in worker.takes)
    cpu = sum(worker.cpu for worker in found) / len(takes)
    calls = sum(worker.calls.total() for worker in found) / len(takes)
    row = {
        "cells": f"{options.cells:,}",
        "workers": str(options.workers),
        "a take, median": f"{1e3 * statistics.median(takes):.0f} ms",
        "mean": f"{1e3 * statistics.mean(takes):.0f} ms",
        "slowest of 100": f"{1e3 * takes[int(0.99 * len(takes))]:.0f} ms",
        "its CPU time": f"{1e3 * cpu:.1f} ms",
        "its calls": f"{calls:.0f}",
        "with a core each": f"{1e3 * (calls * options.latency + cpu):.0f} ms",
        "files opened": f"{sum(worker.calls['open'] for worker in found) / len(takes):.1f}",
        "start of a worker": f"{statistics.median(worker.start for worker in found):.1f} s",
        "taken twice": str(sum(count - 1 for count in taken.values())),
        "never": str(options.cells - len(taken)),
        "busy": f"{options.work * options.cells / options.workers / wall:.0%}",
    }
    lines = table([row], {name: f"{{{name}}}" for name in row})
    print(lines, f"load {load[0]:.1f}, {load[1]:.1f}", sep="\n")
    if page:
        words = ["git", "rev-parse", "--short=12", "HEAD"]
        commit = subprocess.run(words, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()
        facts = {"date": datetime.date.today(), "commit": commit, "cores": os.cpu_count(), "load": load}
        facts |= {"cells": row["cells"], "workers": options.workers, "work": options.work}
        page.write_text(HEAD.format(**facts, latency=1e3 * options.latency) + lines + "\n")
    return int(len(taken) != options.cells or max(taken.values()) > 1)


@dataclass
class Worker:
    """What one worker has measured.

    Args:
        start: Seconds until it could take its first cell.
        takes: Seconds of each take.
        cpu: CPU seconds of all takes.
        calls: Calls of the file system in takes, by name.
    """

    start: float
    takes: list[float] = field(default_factory=list)
    cpu: float = 0.0
    calls: Counter[str] = field(default_factory=Counter)


def _work(options: argparse.Namespace, cells: list[Cell], rows: "multiprocessing.Queue[Worker]") -> None:
    calls = Counter[str]()
    for module, names in CALLS.items():
        for name in names:
            _delay(module, name, options.latency, calls)
    builtins.open = io.open
    began = time.monotonic()
    pool = Pool(cells, 1, None, Interrupts(print))
    worker = Worker(time.monotonic() - began)
    try:
        while _work_once(options, pool, worker, calls):
            pass
    finally:
        rows.put(worker)


def _work_once(options: argparse.Namespace, pool: Pool, worker: Worker, calls: Counter[str]) -> bool:
    """Take a cell and leave the files of a trained one; return whether there was one."""
    before, began, cpu = calls.copy(), time.monotonic(), time.process_time()
    taken = pool._take()
    if taken is None:  # a look at all cells that are left
        return False
    worker.takes.append(time.monotonic() - began)
    worker.cpu += time.process_time() - cpu
    worker.calls += calls - before
    cell, claim = taken
    time.sleep(options.work)
    result = {"acc1": 0.5, "checkpoint": f"{cell.ablation.checkpoint}.ckpt", "n": 1}
    cell.run.write("results.json", {cell.ablation.evaluate: result})
    chain.append(cell.ablation.directory, "cell", cell=cell.name, id=cell.id)
    cell.run.write("done.json", {"cell": cell.name, "parts": cell.parts})
    claim.release()
    return True


def _delay(module: object, name: str, seconds: float, calls: Counter[str]) -> None:
    real = getattr(module, name)

    def slow(*args, **options):  # type: ignore[no-untyped-def]
        calls[name] += 1
        time.sleep(seconds)
        return real(*args, **options)

    setattr(module, name, slow)


if __name__ == "__main__":
    sys.exit(main())
