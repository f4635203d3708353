"""What a training draws, random numbers and the batches of its loaders: in a checkpoint, and back for a resume."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from vitlab.runs.launch import of_all


class Draws:
    """The random states of all processes and the positions of their training loaders.

    Lightning restores no random numbers, and a loader too early if the schedule has asked for the number of steps.
    """

    def __init__(self) -> None:
        self._random: list[dict[str, Any]] = []  # by process, of the resumed checkpoint
        self._loaders: list[list[dict[str, Any]]] = []  # the same, of each loader
        self._before: dict[str, Any] | None = None  # random states before the validation that runs now

    @contextmanager
    def repeated(self, trainer: Any) -> Iterator[None]:
        """Inside a ``with`` block, a validation; what is saved in it, or after its error, has the random states of now.

        A resume from that repeats the validation.
        """
        self._before = random_states(trainer.strategy.root_device)
        yield
        self._before = None

    def state(self, trainer: Any) -> dict[str, Any]:
        """Return what a checkpoint holds of the draws of all processes; every process must call it."""
        before = self._before if trainer.validating else None
        loaders = getattr(trainer.fit_loop._combined_loader, "flattened", ())
        states = [loader.state_dict() for loader in loaders if hasattr(loader, "state_dict")]
        own = before or random_states(trainer.strategy.root_device), states
        of_each = of_all(own) if trainer.world_size > 1 else [own]
        return {"random_states": [drawn for drawn, _ in of_each], "loader_states": [places for _, places in of_each]}

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Keep the draws of a checkpoint for :meth:`restore`."""
        of_several = checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader", [])
        of_first = [checkpoint["train_loader"]] if "train_loader" in checkpoint else of_several  # before 0.2.0
        self._loaders = checkpoint.get("loader_states", [of_first])
        self._random = checkpoint.get("random_states", [])

    def restore(self, trainer: Any) -> None:
        """Set loaders to their places, and random states to theirs: a loader draws when it begins."""
        loop, states, device = trainer.fit_loop, self._random, trainer.strategy.root_device
        own = states[trainer.global_rank] if len(states) == trainer.world_size else None
        stateful = [loader for loader in loop._combined_loader.flattened if hasattr(loader, "load_state_dict")]
        of_each = self._loaders  # those of the first process on another number of them
        mine = of_each[trainer.global_rank if len(of_each) == trainer.world_size else 0] if of_each else []
        restored = list(zip(stateful, mine, strict=False))
        self._loaders, self._random = [], []
        if not (own or restored):
            return
        for loader, state in restored:
            loader.load_state_dict(state)
        if own:
            set_random_states(own, device)
        begins = not loop.restarted_mid_epoch
        goes_on = restored and not loop.epoch_loop._num_ready_batches_reached()
        if begins or goes_on:
            iter(loop._data_fetcher)  # Lightning's iterator began before, with other states
        if own and not begins:
            set_random_states(own, device)


def random_states(device: torch.device) -> dict[str, Any]:
    """Return the states of the random numbers of torch, NumPy and Python in this process, as a checkpoint holds them.

    Example:
        >>> states = random_states(torch.device("cpu"))
        >>> drawn = torch.rand(3), random.random()
        >>> set_random_states(states, torch.device("cpu"))
        >>> torch.equal(torch.rand(3), drawn[0]), random.random() == drawn[1]
        (True, True)
    """
    drawn: Any = np.random.get_state()
    name, key, *rest = drawn
    states = {"torch": torch.get_rng_state(), "numpy": [name, key.tolist(), *rest], "python": random.getstate()}
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Restore what :func:`random_states` has returned."""
    torch.set_rng_state(states["torch"])
    np.random.set_state(tuple(states["numpy"]))
    random.setstate(states["python"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
