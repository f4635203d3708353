"""What a run is, part by part, and what two runs differ in: the run, code, machine, data, network, config, numbers."""

from collections.abc import Mapping
from typing import Any

from vitlab.config.keys import differing_keys, flatten
from vitlab.errors import UsageError, megabytes
from vitlab.jobs.listing import Row, config_of_run, parsed_yaml, status_of_run
from vitlab.jobs.results import command_of, split_metrics
from vitlab.runs.directory import RunDir
from vitlab.runs.manifest import read_manifest

PARTS = ("run", "code", "machine", "data", "network", "config", "numbers", "files")
_RUN = ("started", "ended", "attempts", "seed", "init_from", "resize", "steps", "error")
_CODE = ("commit", "dirty", "diff", "python")
_MACHINE = ("host", "devices", "world_size", "threads", "peak_memory")
_CHANCE = ("started", "ended", "attempts", "peak_memory")  # differ between any two runs


def about(run: RunDir) -> dict[str, Row]:
    """Return the facts of a run by part; numbers of weights that are no longer there are left out.

    Example:
        >>> found = about(RunDir("runs/first"))
        >>> found["run"]["status"], found["config"]["model.pos_embed"], found["data"]["splits.val.n"]
        ('done', 'sincos2d', 288)
    """
    record: dict[str, Any] = dict(run.record)
    changes = run.path / "overrides.yaml"
    command = (
        command_of(run.record, parsed_yaml(changes) if changes.is_file() else None) if record.get("argv") else None
    )
    ending = record.get("ending") or {}
    found: dict[str, Row] = {
        "run": {"status": status_of_run(run, record), "ending": ending.get("text"), "command": command},
        "code": {name: record.get(name) for name in _CODE},
        "machine": {name: record.get(name) for name in _MACHINE},
        "data": flatten(run.read("data.json")),
        "network": flatten(run.read("model.json")),
        "config": config_of_run(run) if run.config.is_file() else {},
        "numbers": _numbers(run),
        "files": _files(run),
    }
    found["run"] |= {name: record.get(name) for name in _RUN}
    found["code"] |= {f"version of {name}": version for name, version in (record.get("versions") or {}).items()}
    return {part: {name: v for name, v in row.items() if v is not None} for part, row in found.items()}


def _numbers(run: RunDir) -> Row:
    """Return the results of each split, with the checkpoint and, if it is not the present one, a sentence."""
    found: Row = {}
    for split in ("val", "test"):
        if result := dict(run.stored).get(split):
            assert isinstance(result, dict)
            now = run.standing(split, result)
            if not now.is_stale:
                facts = {name: result[name] for name in ("n", "epoch") if name in result}
                found |= {f"{split}.{name}": value for name, value in {**split_metrics(result), **facts}.items()}
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
        return differing_keys([a, b])
    keys = dict.fromkeys([*a, *b]) if part != "files" else ()
    return [key for key in keys if key not in _CHANCE and a.get(key) != b.get(key)]


def _difference(part: str, a: Any, b: Any) -> Mapping[str, float]:
    both = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (a, b))
    return {"difference": b - a} if part == "numbers" and both else {}
