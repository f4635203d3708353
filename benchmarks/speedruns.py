"""Time to a stated accuracy: recipes trained from start to end by their command, once a seed, and tested.

``python benchmarks/speedruns.py CONFIG GOAL [--data.root DIR ...]`` trains the seeds of 0 to 4 that are missing under
``runs/speedruns`` and writes ``benchmarks/speedruns.json`` and ``.md``. GOAL is an accuracy in percent. With ``ideas``
in place of GOAL it trains the recipe for half as long, then with one change at a time, and validates.
"""

import contextlib
import ctypes
import itertools
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
from bench.report import machine_line
from vitlab.runs.machine import facts
from vitlab.tables import table

HERE = Path(__file__).parent
SEEDS = range(5)
SHORT = ["--trainer.max_epochs=4", "--trainer.check_val_every_n_epoch=4", "--data.img_size_schedule=[[0,20],[2,28]]"]
IDEAS = {  # of configs/fashion_mnist_speedrun.yaml
    "the recipe": [],
    "AdamW for all, at 0.003": ["--model.opt=adamw", "--model.lr=3e-3"],
    "28 x 28 in every epoch": ["--data.img_size_schedule=null"],
    "a cosine in place of the line": ["--model.lr_scheduler=cosine"],
    "weights not averaged": ["--trainer.callbacks=null"],
    "16 tokens": ["--model.t2t_kernels=[3,3,3]", "--model.t2t_strides=[2,2,2]", "--model.t2t_dim=[16,48]"],
}


def trained(config: str, seed: int, words: list[str], name: str) -> dict[str, Any]:
    """Train as a user does and return what the run's process took from start to end."""
    folder = f"runs/speedruns/{Path(config).stem}-{name}"
    before, begin = _cpu_seconds(), time.perf_counter()
    vitlab_command("fit", "--config", config, f"--seed_everything={seed}", f"--run_dir={folder}", *words)
    with contextlib.suppress(ChildProcessError):  # processes that the run's first one did not wait for
        while True:
            os.wait()
    seconds, cpu = time.perf_counter() - begin, _cpu_seconds() - before
    record = vitlab.Run(folder).record
    commit = str(record.get("commit")) + ("+" if record.get("dirty") else "")
    row = {"config": config, "seed": seed, "folder": folder, "seconds": seconds, "cpu": cpu}
    return row | {"commit": commit, "machine": machine_line(facts())}


def vitlab_command(*words: str) -> None:
    """Run a command of vitlab in a process of its own: W&B's server of this one would never end."""
    subprocess.run([sys.executable, "-m", "vitlab", *words], env=os.environ | {"WANDB_MODE": "offline"}, check=True)


def _cpu_seconds() -> float:
    """Return what all descendants that were waited for have used; on Linux orphans become children of this process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime


def main(config: str, goal: str, *words: str) -> None:
    """Measure the seeds or ideas that are missing, and write the numbers and the table."""
    file = HERE / "speedruns.json"
    rows = json.loads(file.read_text()) if file.is_file() else []
    ideas = IDEAS if goal == "ideas" else {None: []}
    for seed, (idea, change) in itertools.product(SEEDS[: 2 if goal == "ideas" else None], ideas.items()):
        if any((row["config"], row["seed"], row.get("idea")) == (config, seed, idea) for row in rows):
            continue
        if idea is None:
            row = {"goal": float(goal)} | trained(config, seed, list(words), str(seed))
            run = vitlab.Run(row["folder"])
            losses = run.metrics.dropna(subset="train/loss").groupby("epoch")["train/loss"].mean()
            vitlab_command("test", row["folder"])
            row |= {"acc1": run.results["test"]["acc1"], "losses": losses.round(4).tolist()}
        else:
            name = f"idea{list(IDEAS).index(idea)}-{seed}"
            row = {"idea": idea, "change": change} | trained(config, seed, [*words, *SHORT, *change], name)
            row |= {"val_acc1": float(vitlab.Run(row["folder"]).metrics["val/acc1"].dropna().iloc[-1])}
        rows.append(row)
        file.write_text(json.dumps(rows, indent=1) + "\n")
    write(rows)


def write(rows: list[dict[str, Any]]) -> None:
    """Write the tables: a row for each recipe, and one for each idea."""
    lines = []
    runs, ideas = [row for row in rows if "acc1" in row], [row for row in rows if "idea" in row]
    for config in dict.fromkeys(row["config"] for row in runs):
        own = [row for row in runs if row["config"] == config]
        accuracies = [row["acc1"] * 100 for row in own]
        lines.append(own[0] | {"n": len(own), "losses": ", ".join(f"{loss:.2f}" for loss in own[0]["losses"])})
        lines[-1] |= {"median": statistics.median(accuracies), "least": min(accuracies), "most": max(accuracies)}
        lines[-1] |= {"wall": statistics.median(row["seconds"] for row in own) / 60}
        lines[-1] |= {"cpu": statistics.median(row["cpu"] for row in own) / 60, "commit": own[0]["commit"][:12]}
    columns = {"recipe": "`{config}`", "goal": "{goal:g} %", "accuracy, %": "{median:.2f} [{least:.2f}, {most:.2f}]"}
    columns |= {"seeds": "{n}", "minutes": "{wall:.2f}", "CPU minutes": "{cpu:.2f}", "commit": "{commit}"}
    logs = "\n".join(f"- `{line['config']}`, seed 0: {line['losses']}; {line['machine']}" for line in lines)
    text = f"""# Time to a stated accuracy

How soon a ViT or a T2T-ViT reaches an accuracy. Can you beat it? The time of a run goes from the start of its process
to the end, with imports, data, checkpoints and validation. Accuracy is that of the last epoch on the whole test split,
from one view of each image. A goal is reached if the median of five seeds reaches it. The table shows
medians, and the least and the largest accuracy.

{table(lines, columns)}

The mean training loss of each epoch, and the machine:

{logs}

Again: `python benchmarks/speedruns.py CONFIG GOAL --data.root DIR` with `speedruns.json` moved away.
{_ideas(ideas)}"""
    (HERE / "speedruns.md").write_text(text)
    sys.stdout.write(text)


def _ideas(rows: list[dict[str, Any]]) -> str:
    """Return the section on what each idea is worth; nothing before one was measured."""
    if not rows:
        return ""
    lines = []
    for idea in dict.fromkeys(row["idea"] for row in rows):
        own = [row for row in rows if row["idea"] == idea]
        accuracies = ", ".join(f"{row['val_acc1'] * 100:.2f}" for row in own)
        flags = " ".join(own[0]["change"])
        lines.append({"idea": idea, "flags": f"`{flags}`" if flags else "", "accuracies": accuracies})
        lines[-1] |= {"cpu": f"{statistics.mean(row['cpu'] for row in own) / 60:.2f}"}
    columns = {"idea": "{idea}", "flags": "{flags}", "accuracy, %": "{accuracies}", "CPU minutes": "{cpu}"}
    return f"""
## What each idea is worth

`{rows[0]["config"]}` for four epochs (`{" ".join(SHORT)}`), then with one change at a time. Accuracy on the
3,000 validation images, one number for each of two seeds (the images alone give it a standard error of 0.5 to 0.7), and
the mean CPU time. Nothing else is tuned again for a change, and differences below one point
may be chance. `python benchmarks/speedruns.py CONFIG ideas --data.root DIR`.

{table(lines, columns)}
"""


if __name__ == "__main__":
    main(*sys.argv[1:])
