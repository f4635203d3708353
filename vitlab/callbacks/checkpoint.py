"""Which states of a run are kept, and how they reach the disk whole."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Literal

import lightning as L
from lightning.pytorch import callbacks

from vitlab.errors import UsageError


class Checkpoint(callbacks.Checkpoint):
    """Keep ``checkpoints/last.ckpt`` and, of the best epoch on validation data, ``checkpoints/best.ckpt``.

    Lightning's ``ModelCheckpoint`` writes over the only good file; this one writes beside it, syncs and renames, so
    that both names hold a whole checkpoint whenever the process ends. ``manifest.json`` holds their checksums.

    Args:
        monitor: Metric that tells which epoch is the best; null takes the task's own.
        mode: Whether the best epoch has the smallest or the largest value; null takes the task's own.
        every_n_epochs: Epochs between two checkpoints; the last epoch is always kept.
    """

    def __init__(
        self,
        monitor: str | None = None,
        mode: Literal["min", "max"] | None = None,
        every_n_epochs: int = 1,
    ) -> None:
        if every_n_epochs < 1:
            raise ValueError(f"`checkpoint.every_n_epochs` must be at least 1, got {every_n_epochs}")
        self.monitor = monitor
        self.mode = mode
        self.every_n_epochs = every_n_epochs
        self.best_score: float | None = None
        self.best_epoch: int | None = None
        self.directory = Path("checkpoints")

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        """Fill in the task's own choice and the place of the run."""
        mode, monitor = pl_module.monitor
        self.monitor = self.monitor or monitor
        self.mode = self.mode or mode
        self.directory = Path(trainer.default_root_dir) / "checkpoints"

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save after the epoch's validation, when the epoch is complete."""
        epoch = trainer.current_epoch
        is_last = epoch + 1 == trainer.max_epochs or trainer.should_stop
        if getattr(trainer, "fast_dev_run", False) or ((epoch + 1) % self.every_n_epochs and not is_last):
            return
        improved = self._improved(trainer)
        if improved:
            self.best_epoch = epoch
        self._save(trainer, ["last", "best"] if improved else ["last"])

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuse a metric that does not exist before the first step, not after the first epoch."""
        if trainer.sanity_checking and self.monitor not in trainer.callback_metrics:
            known = ", ".join(sorted(k for k in trainer.callback_metrics if k.startswith("val/")))
            raise UsageError(f"`checkpoint.monitor` must be one of {known}, got {self.monitor}")

    def state_dict(self) -> dict[str, Any]:
        """Return the best epoch so far."""
        return {"best_score": self.best_score, "best_epoch": self.best_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the best epoch so far."""
        self.best_score, self.best_epoch = state_dict["best_score"], state_dict["best_epoch"]

    def _improved(self, trainer: L.Trainer) -> bool:
        if self.monitor not in trainer.callback_metrics:
            return False  # no validation so far: there is a last state, and no best
        score = float(trainer.callback_metrics[self.monitor])
        if self.best_score is None or (score < self.best_score if self.mode == "min" else score > self.best_score):
            self.best_score = score
            return True
        return False

    def _save(self, trainer: L.Trainer, names: list[str]) -> None:
        written = self.directory / ".writing"
        trainer.save_checkpoint(written, weights_only=False)  # on every process: some strategies gather
        if not trainer.is_global_zero:
            return
        digest = file_digest(written, sync=True)
        entry = {"sha256": digest, "size": written.stat().st_size, "epoch": trainer.current_epoch}
        entry["step"] = trainer.global_step
        for name in names[1:]:  # the same file under a second name: last.ckpt is replaced, never written into
            link = self.directory / ".link"
            link.unlink(missing_ok=True)
            os.link(written, link)
            os.replace(link, self.directory / f"{name}.ckpt")
        os.replace(written, self.directory / f"{names[0]}.ckpt")
        manifest = self.directory / "manifest.json"
        entries = json.loads(manifest.read_text()) if manifest.is_file() else {}
        written.write_text(json.dumps({**entries, **{f"{name}.ckpt": entry for name in names}}, indent=1) + "\n")
        os.replace(written, manifest)
        descriptor = os.open(self.directory, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def file_digest(path: Path, sync: bool = False) -> str:
    """Return the sha256 of a file, after forcing it to the disk if ``sync``."""
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()
