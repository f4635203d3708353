"""``vitlab bench overhead``: the time that Lightning, a task and `vitlab fit` add to a step of a bare loop."""

import io
import logging
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader

from bench.pairs import Work, compare, interleave
from vitlab.callbacks.console import Console
from vitlab.callbacks.ema import EMA
from vitlab.callbacks.record import RunRecord
from vitlab.callbacks.stop import StopOnSignal
from vitlab.runs.directory import RunDir
from vitlab.tasks.classifier import Classifier
from vitlab.tasks.optimizer import build_optimizer

Batches = DataLoader[tuple[Tensor, Tensor]]
_NET: dict[str, Any] = {"img_size": 8, "in_chans": 1, "patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 1}


class _Module(L.LightningModule):
    """A minimal LightningModule: only network, loss and optimizer of a task."""

    def __init__(self, task: Classifier) -> None:
        super().__init__()
        self.net, self.loss, self.groups = task.net, task.train_loss, task.optimizer_groups()
        self.lr = task.hparams["lr"]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return build_optimizer("adamw", self.groups, self.lr)


def measure(rounds: int, budget: float, steps: int = 300) -> list[dict[str, Any]]:
    """Return milliseconds per step of each loop and its overhead over the bare one, without start-up.

    The loops: bare, a plain Trainer, a task, and a task with what `vitlab fit` adds: sums of metrics and metrics.jsonl,
    the bar of a terminal, handling of signals, and an average of the weights. Network, loss and optimizer are the same.
    """
    samples: Any = [(torch.randn(8, 1, 8, 8), torch.arange(8) % 3)] * steps
    batches: Batches = DataLoader(samples, batch_size=None)
    first: Batches = DataLoader(samples[:1], batch_size=None)
    task, full = (Classifier(num_classes=3, **_NET) for _ in range(2))
    fits: dict[str, Callable[[Batches], Work]] = {
        "bare loop": lambda data: _loop(task, data),
        "plain Trainer": lambda data: _fit(_Module(task), data),
        "Classifier": lambda data: _fit(task, data),
        "vitlab fit": lambda data: _fit(full, data, complete=True),
    }
    works = {(name, i): fit(data) for name, fit in fits.items() for i, data in enumerate((first, batches))}
    both = interleave({f"{name} {i}": work for (name, i), work in works.items()}, rounds, budget, warmups=1)
    short, long = ({name: both[f"{name} {i}"] for name in fits} for i in (0, 1))
    times = {name: [max(1e-9, b - a) for a, b in zip(short[name], long[name], strict=True)] for name in fits}
    best = {name: min(long[name]) - min(short[name]) for name in fits}  # least disturbed by other work on the machine
    rows = []
    for name, row in compare(times, "bare loop").items():
        added = [1e3 * (a - b) / (steps - 1) for a, b in zip(times[name], times["bare loop"], strict=True)]
        row |= {"step_ms": 1e3 * row["seconds"] / (steps - 1), "added_ms": statistics.median(added)}
        row["least_ms"] = 1e3 * (best[name] - best["bare loop"]) / (steps - 1)
        rows.append({"loop": name, **row})
    return rows


def too_much(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a sentence if `vitlab fit` adds more than 2.5 times the overhead of a plain Trainer, each at its best."""
    least = {row["loop"]: row["least_ms"] for row in rows}
    ours, plain = least["vitlab fit"], least["plain Trainer"]
    if ours > 2.5 * plain > 0:  # below 0 the machine was too busy to tell; 1.6 was seen
        yield f"vitlab fit adds {ours:.2f} ms to a step, a plain Trainer {plain:.2f}: more than 2.5 times as much"


def _loop(task: Classifier, batches: Batches) -> Work:
    net, loss = task.net, task.train_loss
    optimizer = build_optimizer("adamw", task.optimizer_groups(), task.hparams["lr"])

    def work() -> None:
        for images, targets in batches:
            loss(net(images), targets).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return work


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _fit(module: L.LightningModule, batches: Batches, complete: bool = False) -> Work:
    off: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_model_summary"), False)

    def work() -> None:
        log = logging.getLogger("lightning.pytorch")
        level = log.level
        log.setLevel(logging.ERROR)
        with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder, redirect_stderr(_Terminal()):
            warnings.simplefilter("ignore")
            callbacks = _callbacks(folder) if complete else []
            options = {**off, "callbacks": callbacks, "enable_progress_bar": complete}
            trainer = L.Trainer(max_epochs=1, accelerator="cpu", default_root_dir=folder, **options)
            trainer.fit(module, batches)
        log.setLevel(level)

    return work


def _callbacks(folder: str) -> list[Callback]:
    run = RunDir(folder)
    record = RunRecord(run, lambda trainer, task: run.write("model.json", {"flops": 0}))
    return [EMA(), record, Console(record), StopOnSignal(None)]
