"""What runs are, from the small files of their directories: all at once, one part by part, and two compared."""

import fnmatch
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import ge, gt, le, lt
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from vitlab.config.keys import differences, dotted, flatten, flatten_with_classes, key_as_typed, key_of
from vitlab.config.yaml_files import read_own
from vitlab.errors import UsageError, did_you_mean, megabytes, one_line
from vitlab.jobs.typed import command_of, first_settings, settings_so_far
from vitlab.runs.directory import RunDir
from vitlab.runs.find import find_directory, some_runs
from vitlab.runs.manifest import last_saved, read_manifest
from vitlab.runs.records import MEASURED_BY, metrics_and_n, split_metrics
from vitlab.runs.run_lock import run_status
from vitlab.shipped import as_typed

Row = dict[str, Any]  # facts of a run by name: of its record, of its results (`test.acc1`), of its configuration
RECORD = ("started", "ended", "seed", "host", "commit", "recipe", "attempts", "init_from", "error")
NETWORK = ("parameters", "parameters_total", "macs", "tokens")
_OPERATORS = re.compile(r"([\w./@-]+)\s*(!=|<=|>=|==?|<|>)(.*)", re.DOTALL)
PARTS = ("run", "code", "machine", "data", "network", "config", "numbers", "files")  # of one run, in this order
_RUN = ("started", "ended", "attempts", "seed", "init_from", "resize", "error")
_CODE = ("commit", "dirty", "diff", "python")
_MACHINE = ("host", "devices", "world_size", "threads", "peak_memory")
_CHANCE = ("started", "ended", "attempts", "peak_memory")  # differ between any two runs
_NOTHING = 2, 0.0, ""  # is sorted behind numbers and text


class Condition(NamedTuple):
    """What ``--where`` asks of a run.

    Args:
        key: Name of a fact.
        operator: ``=``, ``!=``, ``<``, ``<=``, ``>`` or ``>=``.
        value: The value as typed; of ``=`` and ``!=`` also a pattern such as ``rope*``.

    Example:
        >>> condition = Condition.read("model.pos_embed=rope*")
        >>> condition.holds({"model.pos_embed": "rope2d"}), condition.holds({"model.pos_embed": "none"})
        (True, False)
        >>> Condition.read("seed==0").operator
        '='
        >>> Condition.read("test.acc1>=0.9").holds({"test.acc1": 0.95})
        True
    """

    key: str
    operator: str
    value: str

    @classmethod
    def read(cls, text: str) -> "Condition":
        """Return the condition that is written as KEY=VALUE, or with another operator.

        Raises:
            UsageError: The text is no condition.
        """
        if not (found := _OPERATORS.fullmatch(text.strip().removeprefix("--"))):
            raise UsageError(f'`--where` must be KEY=VALUE, or have !=, <, <=, > or >= in place of =, got "{text}"')
        key, operator, value = found.groups()
        return cls(key_as_typed(key), operator.replace("==", "="), value.strip())

    def holds(self, row: Mapping[str, Any]) -> bool:
        """Return whether the condition holds for a run; of what the run does not have, only ``!=`` holds.

        Raises:
            UsageError: A number of the run is to be ordered with text.
        """
        have = row.get(self.key)
        if have is None and self.key not in row:
            return self.operator == "!="
        if self.operator in ("=", "!="):
            return self._equals(have) == (self.operator == "=")
        pair = _comparable(have, self.value)
        if pair is None:
            if isinstance(have, int | float):
                raise UsageError(f"`--where {self.key}{self.operator}{self.value}` compares with a number")
            return False
        return bool({"<": lt, ">": gt, "<=": le, ">=": ge}[self.operator](*pair))  # none holds for NaN

    def _equals(self, have: Any) -> bool:
        wanted = _value(self.value)
        if have == wanted and isinstance(have, bool) == isinstance(wanted, bool):
            return True
        if have is None or isinstance(have, int | float):
            return False
        names = (str(have), str(have).rpartition(".")[2])  # a class by its whole path, or by its name
        return any(fnmatch.fnmatchcase(name, self.value) for name in names)


def _value(text: str) -> Any:
    with suppress(ValueError):
        return int(text) if text.isdecimal() else float(text)  # of 1e-3 YAML makes a text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _comparable(have: Any, text: str) -> tuple[Any, Any] | None:
    """Return two numbers, or two texts such as dates, that can be ordered."""
    try:
        wanted = float(text)
    except ValueError:
        return (have, text) if isinstance(have, str) else None
    try:
        return float(have), wanted
    except (TypeError, ValueError):  # a year orders dates; `auto` is no number
        return (have, text) if isinstance(have, str) and have[:1].isdigit() else None


def runs_at(places: Sequence[str]) -> list[RunDir]:
    """Return the runs that places name: runs, and folders with runs anywhere below them; without any, all of ``runs/``.

    Raises:
        UsageError: There is none at a place.
    """
    if not places:
        return some_runs()
    runs: dict[Path, RunDir] = {}
    for place in places:
        folder = Path(place).expanduser()
        inside = [RunDir(folder)] if (folder / "run.json").is_file() else list(_below(folder))
        for run in inside or [find_directory(place)]:
            runs.setdefault(run.path.resolve(), run)
    return list(runs.values())


def _below(folder: Path) -> Iterator[RunDir]:
    """Yield the runs anywhere below a folder, also through links; nothing within a run is one."""
    seen: set[tuple[int, int]] = set()
    for path, folders, files in os.walk(folder, followlinks=True):
        status = os.stat(path)
        place = status.st_dev, status.st_ino
        if "run.json" in files:
            yield RunDir(path)
        if "run.json" in files or place in seen:  # by two ways, or a link to a folder above
            folders.clear()
        seen.add(place)
        folders.sort()


def list_runs(
    places: Sequence[str] = (),
    where: Sequence[str] = (),
    sort: str | None = None,
    columns: Sequence[str] = (),
    reverse: bool = False,
) -> tuple[list[Row], dict[str, str]]:
    """Return the facts of runs, oldest first or sorted, and by path why some could not be read.

    Reads the JSON files of a run, and its ``config.yaml`` if a key of it is asked for; no checkpoint.

    Args:
        places: Runs and folders of runs; default: all of ``runs/``.
        where: Conditions, all of which must hold; see :class:`Condition`.
        sort: Fact to sort by, from low to high; runs without it come last, as do those where it is NaN.
        columns: Facts to read besides the usual ones.
        reverse: Whether to sort from high to low, or without ``sort`` from newest to oldest.

    Raises:
        UsageError: There is no run, or no run has a fact that is asked for.

    Example:
        >>> rows, _ = list_runs(where=["model.pos_embed=sincos2d"], sort="val.acc1")
        >>> [(row["run"], row["status"]) for row in rows if row["run"] == "first"]
        [('first', 'done')]
    """
    conditions = [Condition.read(text) for text in where]
    asked = [*(one.key for one in conditions), *([sort] if sort else []), *columns]
    rows: list[Row] = []
    damaged: dict[str, str] = {}
    runs = runs_at(places)
    for run in runs:
        try:
            rows.append(run_facts(run, asked) | {"run": _place(run, places)})
        except (UsageError, OSError) as error:
            damaged[str(run.path)] = one_line(error)
    for key in asked if rows else ():
        if not any(key in row for row in rows):
            known = {name for run, _ in zip(runs, range(20), strict=False) for name in _known_names(run)}
            hint = did_you_mean(key, known) or "; `vitlab runs show RUN --json` shows what a run has"
            raise UsageError(f"no run has `{key}`{hint}")
    rows = [row for row in rows if all(one.holds(row) for one in conditions)]
    rows.sort(key=lambda row: row.get("started") or "")
    if sort:
        rows.sort(key=lambda row: _order(row.get(sort)))
    if reverse:
        having = [row for row in rows if not sort or _order(row.get(sort)) != _NOTHING]
        rows = [*reversed(having), *rows[len(having) :]]
    return rows, damaged


def _place(run: RunDir, places: Sequence[str]) -> str:
    """Return the path of a run below the folder that was named, which tells cells apart; else its name."""
    folders = [Path(place).expanduser() for place in places]
    return next((str(run.path.relative_to(folder)) for folder in folders if folder in run.path.parents), run.name)


def _known_names(run: RunDir) -> Iterable[str]:
    try:
        return [*run_facts(run), *NETWORK, *config_of_run(run)]
    except (UsageError, OSError):
        return ()


def _order(value: Any) -> tuple[int, float, str]:
    """Return what sorts numbers before text, and both before nothing."""
    if isinstance(value, int | float) and value == value:
        return 0, float(value), ""
    return _NOTHING if value is None or isinstance(value, float) else (1, 0.0, str(value))


def record_of(run: RunDir) -> Row:
    """Return ``run.json`` with the status that is so; what runs or was killed has no end and no peak of memory yet."""
    record: Row = dict(run.record)
    record["status"] = run_status(run, record)
    of_earlier = ("ended", "peak_memory") if record["status"] in ("running", "killed") else ()  # of an older vitlab
    return {name: value for name, value in record.items() if name not in of_earlier}


def run_facts(run: RunDir, asked: Sequence[str] = ()) -> Row:
    """Return the facts of a run by name; those of network and configuration only where they are ``asked`` for."""
    record = record_of(run)
    row: Row = {"run": run.name, "path": str(run.path), "status": record["status"]}
    row |= {name: record[name] for name in RECORD if name in record} | _steps(run, record)
    row["config"] = "+".join(Path(as_typed(name)).stem for name in record.get("configs") or [])
    row["changed"] = " ".join(_changes(settings_so_far(run, record)))
    row |= results_of(run)
    if any(name in NETWORK for name in asked):
        model = run.model
        row |= {name: model[name] for name in NETWORK if name in model}
    if any(name not in row and name.partition(".")[0] not in MEASURED_BY for name in asked) and run.config.is_file():
        row |= {name: value for name, value in config_of_run(run).items() if name in asked}
    return row


def results_of(run: RunDir) -> Row:
    """Return the metrics of each split as ``SPLIT.NAME`` and how they stand to the weights as ``SPLIT``.

    Those of weights that are no longer there are None.
    """
    row: Row = {}
    for split, result in run.stored.items():
        if not isinstance(result, dict):
            continue
        now = run.standing(split, result, read=False)
        row[split] = now.kind
        row |= {f"{split}.{name}": None if now.is_stale else value for name, value in split_metrics(result).items()}
    return row


def config_of_run(run: RunDir) -> Row:
    """Return the configuration of a run: dotted keys as typed, and values; a class is ``model``, ``data`` and so on."""
    return flatten_with_classes(read_own(run.config))


def _changes(settings: Mapping[str, Any]) -> list[str]:
    """Return what the command line changed in a configuration, without what tables leave out."""
    return [f"{key}={value}" for key, value in dotted(dict(settings)).items() if key_of(key).table]


def head_metrics(rows: Iterable[Row]) -> list[str]:
    """Return a metric of each kind of result in the rows: ``acc1`` if there is one, else the first that is no loss.

    Example:
        >>> head_metrics([{"val": "current", "val.loss": 1.0, "val.acc1": 0.5}])
        ['val.acc1']
        >>> head_metrics([{"val.loss": 1.0, "val.acc": 0.5}, {"test.loss": 1.0, "test.trained_on": 8}])
        ['val.acc', 'test.loss']
    """
    found: dict[str, None] = {}
    for row in rows:
        for split in MEASURED_BY:
            names = [name for name in row if name.startswith(f"{split}.") and name != f"{split}.trained_on"]
            named = [f"{split}.acc1", *(name for name in names if not name.endswith("loss")), *names]
            found |= dict.fromkeys([name for name in named if name in names][:1])
    return sorted(found, key=lambda name: (not name.startswith("val."), name))


def _steps(run: RunDir, record: Mapping[str, Any]) -> Row:
    """Return the steps that were trained, and those that were planned."""
    trained = read_manifest(run.checkpoints).get("last.ckpt", {}).get("step")
    return {name: n for name, n in (("steps", trained), ("planned_steps", record.get("steps"))) if n is not None}


def about(run: RunDir) -> dict[str, Row]:
    """Return the facts of a run by part; numbers of weights that are no longer there are left out.

    Example:
        >>> found = about(RunDir("runs/first"))
        >>> found["run"]["status"], found["config"]["model.pos_embed"], found["data"]["splits.val.n"]
        ('done', 'sincos2d', 288)
    """
    record = record_of(run)
    command = command_of(run.record, first_settings(run)) if record.get("argv") else None
    ending = (record.get("ending") or {}).get("text")
    if record["status"] == "killed":  # which wrote no ending
        ending = f"{last_saved(run.checkpoints)} `{run.way_on}`"
    found: dict[str, Row] = {
        "run": {"status": record["status"], "ending": ending, "command": command},
        "code": {name: record.get(name) for name in _CODE},
        "machine": {name: record.get(name) for name in _MACHINE},
        "data": flatten(run.read("data.json")),
        "network": flatten(run.read("model.json")),
        "config": config_of_run(run) if run.config.is_file() else {},
        "numbers": _numbers(run),
        "files": _files(run),
    }
    found["run"] |= {name: record.get(name) for name in _RUN} | _steps(run, record)
    found["code"] |= {f"version of {name}": version for name, version in (record.get("versions") or {}).items()}
    return {part: {name: v for name, v in row.items() if v is not None} for part, row in found.items()}


def _numbers(run: RunDir) -> Row:
    """Return the results of each split, with the checkpoint and, if it is not the present one, a sentence."""
    found: Row = {}
    for split in MEASURED_BY:
        if result := run.stored.get(split):
            now = run.standing(split, result)
            if not now.is_stale:
                epoch = {"epoch": result["epoch"] + 1} if "epoch" in result else {}
                found |= {f"{split}.{name}": value for name, value in {**metrics_and_n(result), **epoch}.items()}
                found[f"{split}.checkpoint"] = result.get("checkpoint")
            if now.text and now.kind != "gone":
                found[f"{split}.note"] = now.text
    return found


def _files(run: RunDir) -> Row:
    """Return the bytes of the directory's parts, and of each checkpoint the epoch and step that it was saved in."""
    manifest = read_manifest(run.checkpoints)
    found: Row = {}
    for path in sorted(run.checkpoints.glob("*.ckpt")):
        entry = manifest.get(path.name, {})
        epoch = (
            f", saved in epoch {entry['epoch'] + 1}, step {entry['step']}" if {"epoch", "step"} <= entry.keys() else ""
        )
        found[f"checkpoints/{path.name}"] = f"{megabytes(path.stat().st_size)}{epoch}"
    sizes: dict[tuple[int, int], int] = {}  # a file has several names
    for path in run.path.rglob("*"):
        if path.is_file() and not path.is_symlink():
            status = path.stat()
            sizes[status.st_dev, status.st_ino] = status.st_size
    return {**found, "all files": megabytes(sum(sizes.values()))}


def differences_of(a: RunDir, b: RunDir) -> list[Row]:
    """Return what two runs differ in: rows of ``part``, ``key``, ``a``, ``b``, and ``difference`` of numbers.

    Raises:
        UsageError: Both are the same run.
    """
    if a.path.resolve() == b.path.resolve():
        raise UsageError(f"{a.path} and {b.path} are the same run; give two")
    left, right = about(a), about(b)
    rows = []
    for part in PARTS:
        for key in _differing(part, left[part], right[part]):
            pair = left[part].get(key), right[part].get(key)
            rows.append({"part": part, "key": key, "a": pair[0], "b": pair[1], **_difference(part, *pair)})
    return rows


def _differing(part: str, a: Row, b: Row) -> list[str]:
    if part == "config":
        return [key for key, _ in differences([a, b])]
    keys = dict.fromkeys([*a, *b]) if part != "files" else ()
    return [key for key in keys if key not in _CHANCE and a.get(key) != b.get(key)]


def _difference(part: str, a: Any, b: Any) -> Mapping[str, float]:
    both = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (a, b))
    return {"difference": b - a} if part == "numbers" and both else {}
