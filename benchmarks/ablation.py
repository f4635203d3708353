"""Seconds of a small ablation's cells, each command in a fresh process and in a fork: writes benchmarks/ablation.md.

python benchmarks/ablation.py [ROUNDS]
"""

import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from vitlab.ablation.execution import process
from vitlab.ablation.execution.gpus import Slot
from vitlab.ablation.file.settings import Execution
from vitlab.tables import table

CONFIG = "experiments/position_embeddings/probe_vit.yaml"
EMPTY = ["--trainer.limit_train_batches", "1", "--trainer.limit_val_batches", "1", "--trainer.max_epochs", "2"]
TICK = os.sysconf("SC_CLK_TCK")


def cpu() -> float:
    """Return the CPU seconds so far of everything that this process and its servers have started and waited for."""
    own = os.times()
    total = own.children_user + own.children_system
    for server in process._servers.values():
        fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
        total += sum(map(int, fields[13:15])) / TICK  # of its children
    return total


def stage(words: list[str], folder: Path, fork: bool) -> tuple[float, float]:
    """Return CPU and wall seconds of a command."""
    before, began = cpu(), time.perf_counter()
    run, seat = Execution(fork=fork), process.Seat(Slot(workers=2))
    code, lines = process.run_in_slot([*process.VITLAB, *words], folder / "log", run, seat)
    assert code == 0, lines
    return cpu() - before, time.perf_counter() - began


def main(rounds: int) -> None:
    """Measure in turns, and write the page."""
    found: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        stage(["--version"], folder, True)  # the one time that everything is imported
        for i in range(rounds):
            for fork in (True, False) if i % 2 else (False, True):
                if fork:  # it ends where nobody asks for a minute, as between two rounds here
                    stage(["--version"], folder, True)
                run = folder / "run"
                shutil.rmtree(run, ignore_errors=True)
                shutil.rmtree(folder / "empty", ignore_errors=True)
                start = ["fit", "--config", CONFIG, "--quiet", "--run_dir"]
                stages = {
                    "train: start-up alone": [*start, str(folder / "empty"), *EMPTY],
                    "train": [*start, str(run)],
                    "measure": ["test", str(run / "checkpoints/last.ckpt"), "--quiet"],
                    "analyze": ["analyze", "displacement", str(run / "checkpoints/last.ckpt"), "--quiet"],
                }
                for name, words in stages.items():
                    found.setdefault((name, fork), []).append(stage(words, folder, fork))
    rows = []
    for name in dict.fromkeys(name for name, _ in found):
        row = {"stage": name}
        for fork in (False, True):
            for i, unit in enumerate(("cpu", "wall")):
                row[f"{unit}{fork:d}"] = statistics.median(pair[i] for pair in found[name, fork])
        rows.append(row)
    whole = {key: sum(row[key] for row in rows[1:]) for key in rows[0] if key != "stage"}
    rows.append({"stage": "a cell: train, measure, analyze", **whole})
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    columns = {"": "{stage}", "process, CPU s": "{cpu0:.1f}", "fork, CPU s": "{cpu1:.1f}"}
    columns |= {"process, wall s": "{wall0:.1f}", "fork, wall s": "{wall1:.1f}"}
    model = next((x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")), "CPU: ?")
    text = [
        "# Cells of an ablation: each command in a process of its own, and in a fork",
        "",
        f"`python benchmarks/ablation.py {rounds}`, commit {commit.strip()}, {model.partition(': ')[2]}, "
        f"{process.core_count()} cores, Python {platform.python_version()}; medians of {rounds} cells "
        "each way, in turns.",
        f"The cell is `{CONFIG}`, two and a half seconds of training.",
        f"Load of the machine at the end: {os.getloadavg()[0]:.1f}; on a busy machine, CPU seconds say more.",
        "",
        table(rows, columns),
        "",
    ]
    Path("benchmarks/ablation.md").write_text("\n".join(text))
    sys.stdout.write("\n".join(text))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
