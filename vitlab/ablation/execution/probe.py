"""Probe an arm: ``vitlab fit`` parses and builds it, and trains it for a few steps. What that gave is kept."""

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from vitlab.ablation.execution.cells import Resolved, images_per_step
from vitlab.ablation.execution.commands import command, fit_args, overrides, start_args
from vitlab.ablation.execution.gpus import WAIT, slot
from vitlab.ablation.execution.identity import code_digest, initial_weights_digest, json_digest, versions_in_use
from vitlab.ablation.execution.process import TIMEOUT, Seat, failure_kind, run_in_slot
from vitlab.ablation.file.arms import Arm
from vitlab.ablation.file.spec import Ablation
from vitlab.config.keys import flatten
from vitlab.config.yaml_files import parse_own
from vitlab.errors import UsageError
from vitlab.runs import lock
from vitlab.runs.atomic import write_json
from vitlab.runs.directory import RunDir

PROBE: dict[str, Any] = {  # settings of a probe, and the default that a config has otherwise
    "trainer.max_steps": (20, -1),
    "trainer.limit_val_batches": (1, None),
    "trainer.enable_checkpointing": (False, None),
}
OF_EVALUATION = {"acc1_macro", "f1_macro"}  # metrics that no row of a training has
START = "vitlab.ablation.execution.start.Start"  # a callback


def known(ablation: Ablation) -> list[Resolved]:
    """Return the arms that have a stored probe; start nothing."""
    code = code_digest(own=ablation.trust_imports)
    paths = [_cache(ablation, arm, code) for arm in ablation.arms]
    found = [_load(arm, path, code) for arm, path in zip(ablation.arms, paths, strict=True)]
    return [arm for arm in found if arm]


def _cache(ablation: Ablation, arm: Arm, code: str) -> Path:
    texts = [Path(path).read_text() for path in (*ablation.base, *arm.configs)]
    source = arm.weights(ablation.seeds[0])
    start = [initial_weights_digest(source)] if source else []
    inputs = json.dumps(
        [command(ablation), texts, overrides(ablation, arm, 0), code, versions_in_use(), *start], default=str
    )
    key = hashlib.sha256(inputs.encode()).hexdigest()[:10]
    return ablation.directory / "arms" / f"{arm.name}-{key}.json"


def _load(arm: Arm, path: Path, code: str) -> Resolved | None:
    """Return an arm from its stored probe; None if it is missing or damaged.

    Raises:
        OSError: The file cannot be read now. None in its place would leave the cells of the arm out of a report.
    """
    try:
        facts = json.loads(path.read_text())
        length = facts.pop("length")  # a probe of an older version has none
        more = {"environment": versions_in_use(), "code": code, "length": length}
        return Resolved(arm=arm, **{**facts, **more, "groups": tuple(facts["groups"])})
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, KeyError, AttributeError):
        return None


def discard_probe(ablation: Ablation, data: str) -> None:
    """Delete the probes that read images with this digest, as these have changed."""
    for path in (ablation.directory / "arms").glob("*.json"):
        with suppress(ValueError, KeyError, TypeError):
            if json_digest(json.loads(path.read_text())["data"]) == data:
                path.unlink()


def probed(ablation: Ablation, arm: Arm, code: str, workers: int, stop: Callable[[], bool]) -> Resolved | None:
    """Return an arm from its stored probe, or probe it; None if ``stop`` returned true.

    Raises:
        UsageError: It cannot be built, or does not train.
        OSError: A file of its probe cannot be read or written.
    """
    cache = _cache(ablation, arm, code)
    while not (found := _load(arm, cache, code)) and not stop():
        claim = lock.take(cache.with_suffix(".claim"))
        if claim is None:
            time.sleep(WAIT)  # another `run` is probing it
            continue
        place = cache.with_suffix(f".{os.getpid()}")
        place.mkdir(parents=True, exist_ok=True)
        try:
            with slot(workers, ablation.run.per_gpu, stop) as own:
                if own and not _load(arm, cache, code):  # another process may have just finished it
                    facts = _run_probe(ablation, arm, place, Seat(own, claim, stop))
                    write_json(cache, facts)
        finally:
            shutil.rmtree(place, ignore_errors=True)
            claim.release()
    return found


def _run_probe(ablation: Ablation, arm: Arm, place: Path, seat: Seat) -> dict[str, Any]:
    """Train an arm for a few steps in a folder, and return what is stored of it."""
    changes = {**{key: value for key, (value, _) in PROBE.items()}, "trainer.logger": False}
    given = fit_args(ablation, arm, 0, place / "overrides.yaml", changes)
    run = RunDir(place / "run")
    words = [*command(ablation), "fit", *given, *start_args(arm, ablation.seeds[0])]
    words += ["--run_dir", str(run.path), "--quiet"]
    if not ablation.run.command:
        whole = _given(ablation, arm, "trainer.max_steps", -1) or -1
        words.append(f"--trainer.callbacks+={json.dumps({'class_path': START, 'init_args': {'max_steps': whole}})}")
    started = time.perf_counter()
    code, lines = run_in_slot(words, place / "log", ablation.run, seat)
    seconds = time.perf_counter() - started
    if code and not (ablation.tune and failure_kind(code, lines, run.record) == "diverged"):  # its candidates may not
        if code == TIMEOUT:
            raise UsageError(f"20 steps of {arm.name} took longer than `run.timeout`, {ablation.run.timeout:.0f} s")
        text = lines[-1].removeprefix("vitlab: ") if lines else f"exit code {code}"
        named = r"add --trust_imports (\S+)( \(in Python, [^)]*\))?"
        raise UsageError(re.sub(named, r"name it in `trust_imports` of this file: \1", text))
    return _facts(ablation, arm, run, seconds)


def _facts(ablation: Ablation, arm: Arm, run: RunDir, seconds: float) -> dict[str, Any]:
    """Return what a probe of so many seconds tells of an arm: the fields of :class:`Resolved`."""
    config = parse_own(run.config.read_text())
    for key, (_, default) in PROBE.items():
        section, _, name = key.partition(".")
        config[section][name] = _given(ablation, arm, key, default)
    config["trainer"]["callbacks"] = [
        part for part in config["trainer"].get("callbacks") or [] if part.get("class_path") != START
    ] or None
    rows = run.rows()
    rates = [row["images_per_second"] for row in rows if "images_per_second" in row]
    steps = max((row["step"] for row in rows), default=0)
    return {
        "config": config,
        "data": run.data,
        "model": run.model,
        "groups": run.groups,
        "images_per_second": rates[-1] if rates else float("nan"),
        "start_seconds": max(0.0, seconds - (steps * images_per_step(config) / rates[-1] if rates else 0.0)),
        "metrics": _metrics(rows, config),
        "start": run.read("start.json"),
        "length": run.read("length.json") or _about(config, run.data),
        "peak_memory": run.record.get("peak_memory") or {},
    }


def _about(config: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, float]:
    """Return about how many steps a program of `run.command` takes, which records nothing of it."""
    epochs = int(config["trainer"].get("max_epochs") or 0)
    return {"steps": max(0, epochs) * (data["splits"]["train"]["n"] // images_per_step(config))}


def _metrics(rows: list[dict[str, Any]], config: Mapping[str, Any]) -> list[str]:
    """Return the metrics that a probe logged and an evaluation does: of the validation, or else of the training."""
    keys = {key for row in rows for key in row}
    val, train = ({k.removeprefix(split) for k in keys if k.startswith(split)} for split in ("val/", "train/"))
    own = {key.removeprefix("val_") for key in keys if key.startswith("val_")}  # of a module that uses no slash
    val |= {f"{split}_{name}" for split in ("val", "test") for name in own}
    val -= {f"{name}{suffix}" for name in measured_in_training(config) for suffix in ("", "_images")}
    found = val or train | ({"acc5"} if "acc1" in train else set())
    return sorted(found | (OF_EVALUATION if "acc1" in found else set()))


def measured_in_training(config: Mapping[str, Any]) -> set[str]:
    """Return the metrics that the callbacks say they measure while a network is trained, and no evaluation does."""
    found: set[str] = set()
    for part in config["trainer"].get("callbacks") or []:
        from vitlab.config.parser import class_at  # imports torch, which most plans need not

        with suppress(ImportError, AttributeError, ValueError):  # of `run.command`, maybe not importable here
            found |= {*class_at(str(part.get("class_path"))).measured_in_training}
    return found


def _given(ablation: Ablation, arm: Arm, key: str, default: Any) -> Any:
    value = default
    for path in (*ablation.base, *arm.configs):
        value = flatten(yaml.safe_load(Path(path).read_text()) or {}).get(key, value)
    return flatten(arm.overrides).get(key, value)
