"""Explain in one line why a module or data of the user's own failed in the first step."""

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vitlab.interface import deals_samples, path_of
from vitlab.shipped import HERE
from vitlab.tasks.base import Task


def explain_mismatch(error: Exception, task: Any, data: Any) -> str | None:
    """Return where the first step failed and what a batch holds; None if it is not a mismatch of task and data.

    Args:
        error: The error of the first step.
        task: The LightningModule.
        data: The LightningDataModule.
    """
    if isinstance(task, Task) and deals_samples(data):
        return None
    what = " ".join(f"{type(error).__name__}: {error}".split())[:400]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)]
    if frames:
        return f"{frames[-1].filename}, line {frames[-1].lineno}, `{frames[-1].line}`: {what}"
    if not isinstance(error, TypeError | ValueError | LookupError | AttributeError | RuntimeError | AssertionError):
        return None
    if isinstance(task, Task):
        return (
            f"{type(task).__name__} takes batches of images (B, C, H, W) and targets (B,), and the first of "
            f"{path_of(data)} is {_first(data)}: {what}"
        )
    return f"{path_of(task)} does not train on {path_of(data)}: {what}"


def _is_own(file: str) -> bool:
    path = Path(file)
    return path.is_file() and "site-packages" not in path.parts and HERE not in path.parents


def _first(data: Any) -> str:
    try:
        return structure_of(next(iter(data.train_dataloader())))
    except Exception as error:  # the user's code may raise anything
        return f"not available ({type(error).__name__})"


def structure_of(batch: Any) -> str:
    """Return the structure of a batch in short.

    >>> import torch
    >>> shape_of({"image": torch.zeros(4, 3, 8, 8), "label": [1, 2]})
    '{image: tensor (4, 3, 8, 8), label: list}'
    """
    if isinstance(batch, Tensor):
        return f"tensor {tuple(batch.shape)}"
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{key}: {structure_of(value)}" for key, value in batch.items()) + "}"
    if isinstance(batch, list | tuple) and any(isinstance(part, Tensor) for part in batch):
        return f"({', '.join(map(structure_of, batch))})"
    return type(batch).__name__
