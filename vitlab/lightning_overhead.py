"""Workarounds for needless time that Lightning takes in every step, and when to delete each.

Each gain is the CPU time of a call, the minimum of thirty measurements on one core, times the calls in a step;
lightning 2.6.6, torch 2.14. `vitlab bench overhead` measures the remaining overhead of a step.
"""

import inspect
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from lightning.pytorch.profilers import PassThroughProfiler

F = TypeVar("F", bound=Callable[..., Any])


class FastHookName:
    """A LightningModule that sets the name of the current hook without a search among parameters.

    The Trainer sets ``_current_fx_name`` 44 times a step, and ``Module.__setattr__`` is slow to see that a string is
    neither parameter nor module. Gain: 0.07 ms. Delete it when the Trainer sets no attribute around each hook.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_current_fx_name":
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)


def with_cached_signature(function: F) -> F:
    """Return ``function`` with its signature computed once.

    The Trainer inspects the signature of ``training_step`` at every step. Gain: 0.01 ms. Delete it when the Trainer
    caches it.
    """
    function.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return function


def search_no_driver() -> None:
    """On a machine without a GPU, keep AdamW from a search for NVIDIA's driver in every step.

    It asks torch whether a GPU is recording its kernels, and Lightning has told torch to answer by opening the driver's
    library, which is not there. Gain: 0.03 ms. Delete it when Lightning leaves ``PYTORCH_NVML_BASED_CUDA_CHECK`` alone.
    """
    if torch.cuda.device_count() == 0:
        os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)


class Unprofiled(PassThroughProfiler):
    """A profiler that profiles nothing.

    Lightning's own opens and closes a generator around each of 18 hooks a step. Gain: 0.02 ms. Delete it when
    ``PassThroughProfiler.profile`` returns a context that does nothing.
    """

    nothing = nullcontext()

    def profile(self, action_name: str) -> Any:
        """Return a context that does nothing."""
        return self.nothing
