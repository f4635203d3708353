"""``vitlab bench overhead``: what Lightning and a task add to a step of a bare loop."""

import logging
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from vitlab.bench.pairs import Work, compare, interleave
from vitlab.tasks.classifier import Classifier

Batches = DataLoader[tuple[Tensor, Tensor]]
_NET: dict[str, Any] = {"img_size": 8, "in_chans": 1, "patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 1}


class _Module(L.LightningModule):
    """The least that Lightning trains."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.parameters(), fused=True)


def measure(rounds: int, budget: float, steps: int = 300) -> list[dict[str, Any]]:
    """Return milliseconds a step of a bare loop, of a plain Trainer and of a task, and what they add to the loop."""
    samples: Any = [(torch.randn(8, 1, 8, 8), torch.arange(8) % 3)] * steps
    batches: Batches = DataLoader(samples, batch_size=None)
    task = Classifier(num_classes=3, **_NET)
    works = {
        "bare loop": _loop(Classifier(num_classes=3, **_NET).net, batches),
        "plain Trainer": _fit(_Module(Classifier(num_classes=3, **_NET).net), batches),
        "Classifier": _fit(task, batches),
    }
    times = interleave(works, rounds, budget, warmups=1)
    rows = []
    for name, row in compare(times, "bare loop").items():
        added = sorted(1e3 * (a - b) / steps for a, b in zip(times[name], times["bare loop"], strict=True))
        row |= {"step_ms": 1e3 * row["seconds"] / steps, "added_ms": added[len(added) // 2]}
        row |= {"least_ms": added[0], "most_ms": added[-1]}
        rows.append({"loop": name, **row})
    return rows


def too_much(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a sentence if a task adds more than 1.75 times what a plain Trainer does, each at its best."""
    least = {row["loop"]: row["least_ms"] for row in rows}
    ours, plain = least["Classifier"], least["plain Trainer"]
    if ours > 1.75 * plain:
        yield f"Classifier adds {ours:.2f} ms to a step, a plain Trainer {plain:.2f}: more than 1.75 times as much"


def _loop(net: nn.Module, batches: Batches) -> Work:
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)

    def work() -> None:
        for images, targets in batches:
            F.cross_entropy(net(images), targets).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return work


def _fit(module: L.LightningModule, batches: Batches) -> Work:
    off: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)

    def work() -> None:
        log = logging.getLogger("lightning.pytorch")
        level = log.level
        log.setLevel(logging.ERROR)
        with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
            warnings.simplefilter("ignore")
            trainer = L.Trainer(
                max_epochs=1, accelerator="cpu", enable_model_summary=False, default_root_dir=folder, **off
            )
            trainer.fit(module, batches)
        log.setLevel(level)

    return work
