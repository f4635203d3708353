"""How tests train with Lightning's own Trainer, and how they cut a training off."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
QUIET |= {"accelerator": "cpu"}


@contextmanager
def failing_at(task: type[Any], step: int) -> Iterator[None]:
    """Inside this context, a training of a task fails where it begins a step, and its error may come through."""
    own = task.training_step

    def fail_or_step(module: Any, batch: Any, batch_idx: int) -> Any:
        if module.global_step == step:
            raise RuntimeError("killed")
        return own(module, batch, batch_idx)

    with pytest.MonkeyPatch.context() as patch, suppress(RuntimeError):
        patch.setattr(task, "training_step", fail_or_step)
        yield
