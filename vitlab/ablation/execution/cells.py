"""Cells: one arm with one seed, and their state, read from files."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from vitlab.ablation.evidence.chain import read_chain
from vitlab.ablation.execution.identity import effective, initial_weights_digest, json_digest
from vitlab.ablation.file.arms import Arm
from vitlab.ablation.file.spec import Ablation
from vitlab.analysis import ANALYSES
from vitlab.config.keys import class_and_arguments, key_as_typed, key_of
from vitlab.config.yaml_files import parse_own
from vitlab.errors import UsageError, one_line
from vitlab.runs import lock
from vitlab.runs.atomic import write_json
from vitlab.runs.directory import RunDir
from vitlab.runs.matching import is_there, matching
from vitlab.runs.records import read_json

if TYPE_CHECKING:
    import pandas as pd  # which `status` does not import

TRY = "tune"  # the level of an arm that names a candidate of the tuning
State = Literal["done", "running", "failed", "diverged", "missing", "stale", "damaged"]
Say = Callable[[str], None]  # prints a line about cells


def images_per_step(config: Mapping[str, Any]) -> int:
    """Return the images of an optimizer step of a resolved config, in all batches that it accumulates.

    A batch has 64 if a program of `run.command` does not define it.
    """
    batches = (config.get("trainer") or {}).get("accumulate_grad_batches") or 1
    return int(class_and_arguments(config, "data")[1].get("batch_size") or 64) * int(batches)


def validation_key(metric: str) -> str:
    """Return the column of metrics.jsonl that has a metric of the validation; modules of one's own may use no slash.

    >>> validation_key("acc1"), validation_key("val_acc")
    ('val/acc1', 'val_acc')
    """
    return metric if metric.startswith("val_") else f"val/{metric}"


@dataclass(frozen=True)
class Resolved:
    """An arm with its resolved config and the facts that its probe measured."""

    arm: Arm
    config: Mapping[str, Any]
    data: Mapping[str, Any]
    model: Mapping[str, Any]
    groups: tuple[Mapping[str, Any], ...]
    images_per_second: float
    code: str
    start_seconds: float = 12.0  # start-up of a command: imports, building the network, reading the data
    length: Mapping[str, float] = field(default_factory=dict)  # steps of a training, sum_of_learning_rates where known
    metrics: Sequence[str] = ()  # metrics of a run; empty if unknown
    start: Mapping[str, Any] = field(default_factory=dict)  # of the untrained network, see `start.Start`
    peak_memory: Mapping[str, int] = field(default_factory=dict)  # bytes, of host and device
    weights: Mapping[str, str] = field(default_factory=dict)  # hashes of initial weights, where these are elsewhere
    environment: str = ""  # versions that its cells run with; empty in evidence of 0.1, whose identities lack them

    @property
    def name(self) -> str:
        """The name of the arm."""
        return self.arm.name

    @property
    def trainer(self) -> Mapping[str, Any]:
        """The settings of its trainer."""
        return self.config.get("trainer") or {}

    @property
    def recipe(self) -> Mapping[str, Any]:
        """The arguments of its module: network, optimizer and schedule."""
        return class_and_arguments(self.config, "model")[1]

    @property
    def epochs(self) -> int:
        """The epochs of a training; 0 if it does not end by them."""
        return max(0, int(self.trainer.get("max_epochs") or 0))

    def steps_of_an_epoch(self, record: Mapping[str, Any]) -> int:
        """Return the steps that an epoch of a run has by its record; 0 where they are not known."""
        return max(0, record.get("steps", 0)) // self.epochs if self.epochs else 0

    @property
    def validates_within(self) -> bool:
        """Whether it is also validated within an epoch."""
        interval = self.trainer.get("val_check_interval")
        return not (interval is None or (isinstance(interval, float) and interval == 1.0))  # 1 is each batch

    @property
    def fingerprint(self) -> str:
        """The hash of the resolved config, without the seed."""
        start = {"init_from": self.arm.init_from} if self.arm.init_from else {}
        return json_digest({**effective(self.config), **start})

    def digest_of(self, source: str) -> str:
        """Return the hash of initial weights: as it was exported, or of the file."""
        return self.weights.get(source) or initial_weights_digest(source)


@dataclass(frozen=True)
class Cell:
    """One arm with one seed.

    By its files, it is trained (its run is done), then measured (on the split that the ablation asks for), then done
    (which ``done.json`` records), and finished once it has all analyses. Its state is the first of these that holds:

    - damaged: a file cannot be read, or somebody resumed it with other settings;
    - done;
    - running: a worker holds its claim;
    - diverged or failed: ``.failed.json`` beside the run says why;
    - stale: a run of the same configuration and data is done, with other code or versions;
    - missing.
    """

    ablation: Ablation
    resolved: Resolved
    seed: int
    until: int = 0  # epoch after which it waits for comparison with others; 0: train to the end

    @property
    def arm(self) -> Arm:
        """The arm."""
        return self.resolved.arm

    @property
    def parts(self) -> dict[str, str]:
        """The parts of the identity."""
        source = self.arm.weights(self.seed)
        start = {"init_from": self.resolved.digest_of(source)} if source else {}
        config = json_digest({**effective(self.resolved.config), "seed": self.seed, **start})
        parts = {"config": config, "data": json_digest(self.resolved.data), "code": self.resolved.code}
        return parts | ({"environment": self.resolved.environment} if self.resolved.environment else {})

    @cached_property
    def id(self) -> str:
        """The identity."""
        return json_digest(self.parts)

    @cached_property
    def name(self) -> str:
        """The readable name: arm, seed and identity."""
        return f"{self.arm.name}/s{self.seed}-{self.id}"

    @property
    def run(self) -> RunDir:
        """Its run directory."""
        return RunDir(self.ablation.directory / self.name)

    def sibling(self, suffix: str) -> Path:
        """Return the path of a file beside the run directory."""
        return self.run.path.with_name(self.run.path.name + suffix)

    @property
    def claim(self) -> Path:
        """The claim file of the worker that owns the cell."""
        return self.sibling(".claim.json")

    def result(self) -> dict[str, Any] | None:
        """Return the evaluation that the file asks for; None if it is missing, or its checkpoint is no longer there."""
        found = self.run.measured(self.ablation.evaluate)
        return found if found.get("checkpoint") == f"{self.ablation.checkpoint}.ckpt" else None

    def is_measured(self) -> bool:
        """Return whether it is evaluated; a result with an epoch comes from training, without predictions."""
        result = self.result() or {}
        return bool(result) and "epoch" not in result

    def is_from_beside(self) -> bool:
        """Return whether its result is of a command beside the laboratory, as ``vitlab test`` is, and not counted."""
        if self.is_done() or not self.is_measured():
            return False
        known, mine = read_chain(self.ablation.directory), (self.name, self.ablation.evaluate)
        return all((record["cell"], record["split"]) != mine for record in (known.of("opened") if known else ()))

    def drop_result_from_beside(self) -> None:
        """Remove the result of a command beside the laboratory, so that the cell is measured."""
        if self.is_from_beside():
            results = self.run.read("results.json")
            self.run.write("results.json", {k: v for k, v in results.items() if k != self.ablation.evaluate})

    def device_seconds(self) -> float:
        """Return how long its commands have run, those of attempts that were killed or set aside included."""
        with suppress(UsageError):
            return float(read_json(self.sibling(".seconds.json")).get("seconds", 0.0))
        return 0.0

    def note_seconds(self, seconds: float) -> None:
        """Note how long its commands have run, or nothing where the disk does not answer: no cell fails by it."""
        with suppress(OSError):
            write_json(self.sibling(".seconds.json"), {"seconds": round(seconds, 3)})

    def fail(self, facts: Mapping[str, Any]) -> None:
        """Record a failure, which :meth:`failure` then returns."""
        write_json(self.sibling(".failed.json"), facts)

    def failure(self) -> dict[str, Any]:
        """Return the record of a failure; empty if there is none."""
        path = self.sibling(".failed.json")
        return read_json(path) if is_there(path) and not self.is_finished() else {}

    def failure_text(self) -> str:
        """Return the stage at which it failed, the kind of failure and the last line; empty if it did not fail."""
        return f"{found['stage']}, {found['kind']}: {found['last']}" if (found := self.failure()) else ""

    def is_done(self) -> bool:
        """Return whether it is trained and measured, and recorded so; files of 0.2.0 or before name no splits."""
        done, split = self.run.read("done.json"), self.ablation.evaluate
        return bool(done) and split in done.get("splits", [split]) and self.result() is not None

    @property
    def limit(self) -> str:
        """The setting that leaves images out of its evaluation, such as ``trainer.limit_val_batches=2``; or nothing."""
        name = f"limit_{self.ablation.evaluate}_batches"
        value = self.resolved.trainer.get(name)
        return "" if value is None or (value == 1 and isinstance(value, float)) else f"trainer.{name}={value}"

    def value(self) -> float:
        """Return the primary metric, be it one of an analysis; NaN if there is none, or its table is damaged."""
        name = self.ablation.primary
        with suppress(ValueError, KeyError, TypeError):  # the report names such a table
            is_analyzed = self.ablation.is_analyzed(name)
            found = metrics_of(self.run, (name.partition("/")[0],)) if is_analyzed else self.result() or {}
            return float(found.get(name, math.nan))
        return math.nan

    def value_at(self, epoch: int) -> float | None:
        """Return the primary metric at the first validation after so many epochs; None before."""
        return next((value for epochs, value in self.validations() if epochs >= epoch), None)

    def validations(self) -> list[tuple[int, float]]:
        """Return the whole epochs trained and the primary metric of each validation so far."""
        key, arm = validation_key(self.ablation.primary), self.resolved
        steps = arm.steps_of_an_epoch(self.run.record) if arm.validates_within else 0
        rows = [row for row in self.run.rows() if key in row]
        return [(min(row["epoch"] + 1, row["step"] // steps) if steps else row["epoch"] + 1, row[key]) for row in rows]

    def is_waiting(self) -> bool:
        """Return whether it has reached the epoch where it must wait."""
        return self.until > 0 and self.value_at(self.until) is not None

    def missing_analyses(self) -> list[str]:
        """Return the analyses of the file that are neither done with the present weights nor known not to apply."""
        noted = {name: self.run.note(name) for name in self.ablation.analyses}
        return [name for name, (note, now) in noted.items() if not note or now.is_stale]

    def is_finished(self) -> bool:
        """Return whether there is nothing left to do."""
        return self.is_done() and not self.missing_analyses()

    def outlived(self) -> str:
        """Return why the evaluation does not count although there is one; empty if it counts or there is none."""
        found = self.run.stored.get(self.ablation.evaluate)
        now = self.run.standing(self.ablation.evaluate, found) if found else None
        return now.text if now and now.is_stale else ""

    def damage(self) -> str:
        """Return a message about an unreadable file, or about a resume that changed the cell; empty if all is well."""
        if not self.run.exists() and not is_there(self.sibling(".failed.json")):
            return ""
        try:
            _ = self.run.record, self.run.stored, self.run.read("done.json"), self.run.read("analysis/notes.json")
            rows, _ = self.run.rows(), read_json(self.sibling(".failed.json"))
        except (UsageError, ValueError) as error:
            return f"damaged: {error}" if isinstance(error, UsageError) else f"{self.run.metrics} is damaged: {error}"
        if not all("step" in row for row in rows):
            return f"damaged: {self.run.metrics} is damaged: a row has no `step`"
        changes = {k: v for change in self.run.record.get("changes", []) for k, v in change.items()}
        words = " ".join(f"--{key}={value}" for key, value in changes.items() if key_of(key).identity)
        return f"no cell of this file any more: it was resumed with {words}" if words else ""

    def changed_settings(self) -> str:
        """Return the keys that its run was trained with otherwise than planned; empty if all agree.

        The values of tuning are left out: they are in the plan as the file spells them.
        """
        try:
            ran = _settings(parse_own(self.run.config.read_text()))
        except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
            return f"config.yaml cannot be read: {one_line(error)}"
        planned = _settings(self.resolved.config)
        is_tuned = self.ablation.tune is not None or TRY in self.arm.levels
        own = [key_as_typed(key) for key in self.arm.overrides] if is_tuned else []
        keys = [key for key in sorted({*ran, *planned}) if ran.get(key) != planned.get(key)]
        keys = [key for key in keys if not any(f"{key}.".startswith(f"{name}.") for name in own)]
        return ", ".join(f"{key} {ran.get(key)}, not {planned.get(key)}" for key in keys)

    def set_aside(self) -> None:
        """Rename damaged files, so that the measurement, or if necessary the training, is repeated."""
        for name in ("results.json", "done.json", "analysis/notes.json"):
            path = self.run.path / name
            try:
                read_json(path) if name != "results.json" else self.run.stored
            except UsageError:
                path.rename(path.with_name(f"damaged-{path.name}"))
        with suppress(UsageError):
            read_json(self.sibling(".failed.json"))
            if not self.damage():
                return
        self.sibling(".failed.json").unlink(missing_ok=True)
        if self.damage():
            self.discard()

    def discard(self) -> None:
        """Rename the run, so that the training is repeated."""
        self.run.path.rename(self.run.path.with_name(f"damaged-{time.time_ns()}-{self.run.path.name}"))

    def state(self) -> State:
        """Return the state, from files."""
        if self.damage():
            return "damaged"
        if self.is_done():
            return "done"
        if self.claim.exists() and lock.is_alive(self.claim):
            return "running"
        if failure := self.failure():
            return "diverged" if failure["kind"] == "diverged" else "failed"
        return "stale" if self.stale() else "missing"

    def stale(self) -> RunDir | None:
        """Return the finished run with the same configuration and data but other code or versions, if there is one."""
        for path in matching(self.run.path.parent, f"s{self.seed}-*/done.json"):
            run = RunDir(path.parent)
            parts = identity_parts(run)
            same = all(parts.get(name) == self.parts[name] for name in ("config", "data"))
            if same and parts != self.parts:
                return run
        return None


def table_of(run: RunDir, name: str) -> "pd.DataFrame | None":
    """Return the table of an analysis of a run; None if there is none of its present weights."""
    path = run.path / "analysis" / f"{name}.csv"
    if run.note(name)[1].is_stale:
        return None
    if not is_there(path):
        return None
    table = ANALYSES[name].read(path)
    if "run" not in table or table.empty:
        return table
    return table[table["run"] == table["run"].iloc[0]]  # an older vitlab also kept those of --against here


def metrics_of(run: RunDir, names: tuple[str, ...]) -> dict[str, float]:
    """Return the numbers of a run's analyses that a file may name as metrics, such as `resolution/acc1@12`."""
    found: dict[str, float] = {}
    for name in names:
        metrics = ANALYSES[name].metrics
        if metrics and (table := table_of(run, name)) is not None:
            found |= {f"{name}/{metric}": value for metric, value in metrics(table).items()}
    return found


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a configuration can change a number, as a user types it; empty values are as absent ones."""
    return {key_as_typed(name): value for name, value in effective(config).items() if value not in (None, {}, [])}


def identity_parts(run: RunDir) -> dict[str, Any]:
    """Return the parts of a finished run's identity; a damaged one matches no cell."""
    with suppress(UsageError):
        parts = run.read("done.json").get("parts")
        return parts if isinstance(parts, dict) and "code" in parts else {"code": ""}
    return {"code": ""}


def cells_of(ablation: Ablation, resolved: Sequence[Resolved]) -> list[Cell]:
    """Return the cells, ordered by seed, so that an unfinished ablation already compares all arms."""
    return [Cell(ablation, arm, seed) for seed in ablation.seeds for arm in resolved]
