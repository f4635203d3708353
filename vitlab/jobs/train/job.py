"""What is built before a training begins."""

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
    """A training that can begin.

    Args:
        task: The LightningModule.
        data: The LightningDataModule.
        trainer: The Trainer.
        config: The resolved configuration.
        arguments: The arguments of the command line that gave it.
        options: What belongs to the run rather than to its configuration.
        run: The run directory.
        resumed: Whether the run is continued.
        recipe: Name of what runs of the same configuration share, whatever their seeds.
        record: The callback that writes the run's record.
        wandb_id: Identity of the W&B run.
        wandb_line: What the header says of W&B; None where it takes no part.
        keeper: The callback that saves checkpoints; None where none are saved.
        facts: What is known of the network: parameters, multiply-adds, tokens.
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
        """Images of a step of the optimizer over all processes; None where the data do not say it."""
        size = getattr(self.data, "batch_size", None)
        return size * self.trainer.accumulate_grad_batches if isinstance(size, int) else None
