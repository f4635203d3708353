"""Time to a stated accuracy: recipes trained from start to end by their command, once a seed, and tested.

``python benchmarks/speedruns.py CONFIG GOAL [--data.root DIR ...]`` trains the seeds of 0 to 4 that are missing under
``runs/speedruns`` and writes ``benchmarks/speedruns.json`` and ``.md``. GOAL is an accuracy in percent.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import vitlab
from vitlab.bench.report import machine_line
from vitlab.runs.machine import facts
from vitlab.tables import table

HERE = Path(__file__).parent
SEEDS = range(5)


def trained(config: str, seed: int, words: list[str]) -> dict[str, Any]:
    """Train as a user does, test, and return the accuracy and what the training's process took from start to end."""
    folder = f"runs/speedruns/{Path(config).stem}-{seed}"
    line = [
        sys.executable,
        "-m",
        "vitlab",
        "fit",
        "--config",
        config,
        f"--seed_everything={seed}",
        f"--run_dir={folder}",
    ]
    before, begin = _cpu_seconds(), time.perf_counter()
    subprocess.run(line + words, env=os.environ | {"WANDB_MODE": "offline"}, check=True)
    seconds, cpu = time.perf_counter() - begin, _cpu_seconds() - before
    run = vitlab.Run(folder)
    losses = run.metrics.dropna(subset="train/loss").groupby("epoch")["train/loss"].mean().round(4).tolist()
    times = {"seconds": seconds, "cpu": cpu, "acc1": run.test()["acc1"], "losses": losses}
    commit = str(run.record.get("commit")) + ("+" if run.record.get("dirty") else "")
    return {"config": config, "seed": seed} | times | {"commit": commit, "machine": machine_line(facts())}


def _cpu_seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime


def main(config: str, goal: str, *words: str) -> None:
    """Measure the seeds that are missing, and write the numbers and the table."""
    file = HERE / "speedruns.json"
    rows = json.loads(file.read_text()) if file.is_file() else []
    for seed in SEEDS:
        if not any((row["config"], row["seed"]) == (config, seed) for row in rows):
            rows.append({"goal": float(goal)} | trained(config, seed, list(words)))
            file.write_text(json.dumps(rows, indent=1) + "\n")
    write(rows)


def write(rows: list[dict[str, Any]]) -> None:
    """Write the table: a row for each recipe."""
    lines = []
    for config in dict.fromkeys(row["config"] for row in rows):
        own = [row for row in rows if row["config"] == config]
        accuracies = [row["acc1"] * 100 for row in own]
        lines.append(own[0] | {"n": len(own), "losses": ", ".join(f"{loss:.2f}" for loss in own[0]["losses"])})
        lines[-1] |= {"median": statistics.median(accuracies), "least": min(accuracies), "most": max(accuracies)}
        lines[-1] |= {"wall": statistics.median(row["seconds"] for row in own) / 60}
        lines[-1] |= {"cpu": statistics.median(row["cpu"] for row in own) / 60, "commit": own[0]["commit"][:12]}
    columns = {"recipe": "`{config}`", "goal": "{goal:g} %", "accuracy, %": "{median:.2f} [{least:.2f}, {most:.2f}]"}
    columns |= {"seeds": "{n}", "minutes": "{wall:.2f}", "CPU minutes": "{cpu:.2f}", "commit": "{commit}"}
    logs = "\n".join(f"- `{line['config']}`, seed 0: {line['losses']}; {line['machine']}" for line in lines)
    text = f"""# Time to a stated accuracy

How soon a ViT or a T2T-ViT gets there, to be beaten. A run counts from the start of its process to the end, with
imports, data, checkpoints and validation; accuracy is that of its last epoch on the whole test split, one look at each
image. A goal is reached if the median of five seeds reaches it. Medians; accuracy with its least and most.

{table(lines, columns)}

The mean training loss of each epoch, and the machine:

{logs}

Again: `python benchmarks/speedruns.py CONFIG GOAL --data.root DIR` with `speedruns.json` moved away.
"""
    (HERE / "speedruns.md").write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
