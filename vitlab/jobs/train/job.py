"""What the steps of ``vitlab fit`` hand on: what was built, and what its training has reached."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import lightning as L
import numpy as np
from jsonargparse import Namespace
from numpy.typing import NDArray

from vitlab.callbacks.checkpoint import Checkpoint
from vitlab.callbacks.deadline import Deadline
from vitlab.callbacks.record import RunRecord
from vitlab.callbacks.watch import Watch
from vitlab.config.options import FitOptions
from vitlab.config.yaml_files import parse_own
from vitlab.interface import batches_of_a_step, images_of_batch
from vitlab.jobs.terminal import say
from vitlab.runs.directory import RunDir
from vitlab.runs.records import Ending

GIVEN = "the object given to vitlab.fit"  # as `init_from` of run.json


@dataclass(frozen=True)
class ImagesBefore:
    """The images that the initial weights of a training were trained on; by default, nothing is known of any.

    Args:
        source: The weights, as the user named them.
        mean: Mean by which the images were normalized, of each channel.
        std: Standard deviation by which they were normalized.
        seen: Fingerprints of those whose labels were read.
    """

    source: str = ""
    mean: Sequence[float] = ()
    std: Sequence[float] = ()
    seen: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))


@dataclass
class Job:
    """A training that is ready to start.

    Args:
        task: The LightningModule.
        data: The LightningDataModule.
        trainer: The Trainer.
        config: The resolved configuration.
        config_text: The same as text, as ``config.yaml`` holds it.
        arguments: The arguments of the command line that gave it.
        options: Options of the run.
        run: The run directory.
        resumed: Whether the run is continued.
        recipe: Name shared by runs that differ only in the seed.
        record: The callback that writes the run's record.
        watch: The callback that watches the processes of the run.
        deadline: The callback that ends a run that hangs.
        wandb_id: Identity of the W&B run.
        wandb_line: Line of the header about W&B; None if it is not used.
        keeper: The callback that saves checkpoints; None if none are saved.
        facts: Facts about the network: parameters, multiply-adds, tokens.
        said: Lines about it that the terminal has shown, before the run had a log.
        before: The images of the initial weights, read before ``--overwrite`` may remove their run.
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
    watch: Watch
    deadline: Deadline
    wandb_id: str
    wandb_line: str | None
    keeper: Checkpoint | None
    facts: dict[str, Any]
    said: list[str] = field(default_factory=list)
    before: ImagesBefore = field(default_factory=ImagesBefore)

    def say(self, text: str) -> None:
        """Print a line, and keep it for the log."""
        self.said.append(text)
        say(text)

    @cached_property
    def stored_config(self) -> dict[str, Any]:
        """The configuration in plain values, as ``config.yaml`` holds it."""
        return dict(parse_own(self.config_text))

    @property
    def batch(self) -> int | None:
        """Images per optimizer step over all processes; None if unknown."""
        size = images_of_batch(self.data, self.trainer)
        return size * batches_of_a_step(self.trainer) if isinstance(size, int) else None


@dataclass
class Reached:
    """What a training has reached, read from the files that it has written.

    Args:
        best: Row of the best validation, with its epoch and step; empty if there is none.
        ending: Why the training ended; None if the run does not say.
    """

    best: dict[str, Any]
    ending: Ending | None

    @classmethod
    def of(cls, job: Job) -> "Reached":
        """Return what a job has reached, once its training has ended without an error."""
        keeper = job.keeper
        rows = [row for row in job.run.rows() if keeper and keeper.monitor in row and row["epoch"] == keeper.best_epoch]
        if keeper and keeper.best_step is not None:
            rows = [row for row in rows if row["step"] == keeper.best_step]
        return cls(rows[-1] if rows else {}, job.run.record.get("ending"))
