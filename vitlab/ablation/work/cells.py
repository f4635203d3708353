"""Cells: one arm with one seed, and the files that tell how far it is."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from vitlab.ablation.file.spec import Ablation, Arm
from vitlab.ablation.work.identity import digest, effective
from vitlab.runs import lock
from vitlab.runs.directory import RunDir

State = Literal["done", "running", "failed", "diverged", "missing", "stale"]


def arguments(config: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    """Return what a resolved config gives to the class of a section, ``model`` or ``data``."""
    return config[section].get("init_args") or config[section]


def batch_size(config: Mapping[str, Any]) -> int:
    """Return the images of a step of a resolved config; 64 where `run.command` starts something that does not say."""
    return int(arguments(config, "data").get("batch_size") or 64)


@dataclass(frozen=True)
class Resolved:
    """An arm as the commands see it: what its probe left."""

    arm: Arm
    config: Mapping[str, Any]
    data: Mapping[str, Any]
    model: Mapping[str, Any]
    groups: tuple[Mapping[str, Any], ...]
    images_per_second: float
    code: str
    start_seconds: float = 12.0  # what a command needs beside its steps: to import torch, to build, to look at the data
    peak_memory: Mapping[str, int] = field(default_factory=dict)  # bytes, of the host and of the device

    @property
    def fingerprint(self) -> str:
        """The hash of the resolved config, without the seed."""
        return digest(effective(self.config))


@dataclass(frozen=True)
class Cell:
    """One arm with one seed."""

    ablation: Ablation
    resolved: Resolved
    seed: int

    @property
    def arm(self) -> Arm:
        """The arm."""
        return self.resolved.arm

    @property
    def parts(self) -> dict[str, str]:
        """What the identity is made of."""
        config = digest({**effective(self.resolved.config), "seed": self.seed})
        return {"config": config, "data": digest(self.resolved.data), "code": self.resolved.code}

    @cached_property
    def id(self) -> str:
        """The identity."""
        return digest(self.parts)

    @property
    def name(self) -> str:
        """The name that people read."""
        return f"{self.arm.name}/s{self.seed}-{self.id}"

    @property
    def run(self) -> RunDir:
        """Its run directory."""
        return RunDir(self.ablation.directory / self.name)

    def beside(self, suffix: str) -> Path:
        """Return a file of the laboratory next to the run directory."""
        return self.run.path.with_name(self.run.path.name + suffix)

    @property
    def claim(self) -> Path:
        """The file of the worker that owns it."""
        return self.beside(".claim.json")

    def result(self) -> dict[str, Any] | None:
        """Return the numbers that the file asks for; None if they have not been measured."""
        found = self.run.measured(self.ablation.evaluate)
        return found if found.get("checkpoint") == f"{self.ablation.checkpoint}.ckpt" else None

    def failure(self) -> dict[str, Any]:
        """Return how it failed; empty if it did not."""
        path = self.beside(".failed.json")
        return json.loads(path.read_text()) if path.is_file() and not self.is_finished() else {}

    def is_done(self) -> bool:
        """Return whether it is trained and measured."""
        return bool(self.run.read("done.json")) and self.result() is not None

    def missing_analyses(self) -> list[str]:
        """Return the analyses of the file that have neither been done nor turned out not to apply."""
        noted = self.run.read("analysis/notes.json")
        return [name for name in self.ablation.analyses if name not in noted]

    def is_finished(self) -> bool:
        """Return whether there is nothing left to do."""
        return self.is_done() and not self.missing_analyses()

    def state(self) -> State:
        """Return how far it is, from its files alone."""
        if self.is_done():
            return "done"
        if self.claim.exists() and lock.is_alive(self.claim):
            return "running"
        if failure := self.failure():
            return "diverged" if failure["kind"] == "diverged" else "failed"
        return "stale" if self.stale() else "missing"

    def stale(self) -> RunDir | None:
        """Return the finished run of the same configuration and data by other code, if there is one."""
        for path in sorted(self.run.path.parent.glob(f"s{self.seed}-*/done.json")):
            run = RunDir(path.parent)
            parts = run.read("done.json")["parts"]
            if {**parts, "code": ""} == {**self.parts, "code": ""} and parts["code"] != self.parts["code"]:
                return run
        return None


def cells_of(ablation: Ablation, resolved: list[Resolved]) -> list[Cell]:
    """Return the cells, one seed of every arm before the next: what is half done compares all arms."""
    return [Cell(ablation, arm, seed) for seed in ablation.seeds for arm in resolved]
