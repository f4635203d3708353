"""Everything that is built before a training starts."""

from dataclasses import dataclass, field
from typing import Any

import lightning as L
from jsonargparse import Namespace

from vitlab.callbacks.checkpoint import Checkpoint
from vitlab.callbacks.record import RunRecord
from vitlab.config.options import FitOptions
from vitlab.runs.directory import RunDir


@dataclass
class Job:
    """A training that is ready to start.

    Args:
        task: The LightningModule.
        data: The LightningDataModule.
        trainer: The Trainer.
        config: The resolved configuration.
        arguments: The arguments of the command line that gave it.
        options: Options of the run.
        run: The run directory.
        resumed: Whether the run is continued.
        recipe: Name shared by runs that differ only in the seed.
        record: The callback that writes the run's record.
        wandb_id: Identity of the W&B run.
        wandb_line: Line of the header about W&B; None if it is not used.
        keeper: The callback that saves checkpoints; None if none are saved.
        facts: Facts about the network: parameters, multiply-adds, tokens.
    """

    task: Any
    data: Any
    trainer: L.Trainer
    config: Namespace
    config_text: str
    arguments: list[str]
    options: FitOptions
    run: RunDir
    resumed: bool
    recipe: str
    record: RunRecord
    wandb_id: str
    wandb_line: str | None
    keeper: Checkpoint | None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def batch(self) -> int | None:
        """Images per optimizer step over all processes; None if unknown."""
        size = getattr(self.data, "batch_size", None)
        return size * self.trainer.accumulate_grad_batches if isinstance(size, int) else None
