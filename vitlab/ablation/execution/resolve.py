"""Resolve an arm by a probe: ``vitlab fit`` parses and builds it, and trains it for a few steps."""

import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from vitlab.ablation.execution.cells import Resolved, images_per_step
from vitlab.ablation.execution.commands import command, fit_args, overrides, start_args
from vitlab.ablation.execution.gpus import WAIT, Slot, slot
from vitlab.ablation.execution.identity import code_digest, initial_weights_digest, json_digest, versions_in_use
from vitlab.ablation.execution.process import TIMEOUT, failure_kind, run_in_slot
from vitlab.ablation.file.arms import Arm
from vitlab.ablation.file.spec import Ablation
from vitlab.analysis import ANALYSES
from vitlab.config.keys import flatten
from vitlab.config.yaml_files import parse_own
from vitlab.errors import UsageError, did_you_mean, one_line
from vitlab.runs import lock
from vitlab.runs.atomic import write_text
from vitlab.runs.directory import RunDir

if TYPE_CHECKING:
    from vitlab.config.parser import VitlabCLI

PROBE: dict[str, Any] = {  # settings of a probe, and the default that a config has otherwise
    "trainer.max_steps": (20, -1),
    "trainer.limit_val_batches": (1, None),
    "trainer.enable_checkpointing": (False, None),
}
OF_EVALUATION = {"acc1_macro", "f1_macro"}  # metrics that no row of a training has
START = "vitlab.ablation.execution.start.Start"  # a callback


def build_arm(ablation: Ablation, arm: Arm) -> "VitlabCLI":
    """Build task, data and trainer of an arm with the first seed, in this process, on the CPU and without a logger."""
    from vitlab.config.parser import VitlabCLI
    from vitlab.jobs.terminal import open_terminal

    open_terminal()
    settings = {**overrides(ablation, arm, ablation.seeds[0]), "trainer.logger": False, "trainer.accelerator": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder) / "overrides.yaml"
        given.write_text(yaml.safe_dump(settings, sort_keys=False))
        return VitlabCLI(fit_args(ablation, arm, given))


def resolve(ablation: Ablation, workers: int, stop: Callable[[], bool] = lambda: False) -> list[Resolved]:
    """Resolve every arm, from stored probes where possible; return none if ``stop`` returned true."""
    if None in known(ablation):
        command(ablation)  # refuses what is not trusted: no arm's mistake
    code = code_digest(own=ablation.trust_imports)
    with ThreadPoolExecutor(workers) as pool:
        probes = [pool.submit(_probe, ablation, arm, code, workers, stop) for arm in ablation.arms]
    if stop():
        return []
    _refuse_mistakes(ablation, [probe.exception() for probe in probes])
    resolved = [arm for probe in probes if (arm := probe.result())]
    _refuse_equal(ablation, resolved)
    _refuse_metrics(ablation, resolved)
    _refuse_halving(ablation, resolved)
    _refuse_candidates(ablation, resolved, workers, stop)
    return resolved


def known(ablation: Ablation) -> list[Resolved | None]:
    """Return the arms from stored probes, None for those without; start nothing."""
    code = code_digest(own=ablation.trust_imports)
    paths = [_cache(ablation, arm, code) for arm in ablation.arms]
    return [_load(arm, path, code) for arm, path in zip(ablation.arms, paths, strict=True)]


def _refuse_mistakes(ablation: Ablation, errors: list[BaseException | None]) -> None:
    """Report the first arm that cannot be built, with the line of the level that causes it, and name the others.

    Raises:
        UsageError: An arm cannot be built.
        OSError: A file of its probe cannot be read or written, which is no mistake of the ablation's file.
    """
    if failed := next((error for error in errors if isinstance(error, OSError)), None):
        raise failed
    bad = [arm for arm, error in zip(ablation.arms, errors, strict=True) if error]
    if not bad:
        return
    levels = [(axis, level) for axis, levels in ablation.axes.items() for level in levels]
    blamed = [f"axes/{a}/{level}" for a, level in levels if [m for m in ablation.arms if m.levels[a] == level] == bad]
    error = next(error for error in errors if error)
    others = f" (nor can {', '.join(arm.name for arm in bad[1:])})" if len(bad) > 1 else ""
    raise ablation.file.mistake(
        (blamed or ["axes"])[0], f"the arm {bad[0].name} cannot be built{others}: {one_line(error, 2000)}"
    )


def _refuse_equal(ablation: Ablation, resolved: list[Resolved]) -> None:
    seen: dict[tuple[str, str], str] = {}
    for arm in resolved:
        other = seen.setdefault((arm.fingerprint, json_digest(arm.data)), arm.arm.name)
        if other != arm.arm.name:
            raise ablation.file.mistake(
                "axes",
                f"the arms {other} and {arm.arm.name} resolve to the same configuration and images",
            )


def _refuse_metrics(ablation: Ablation, resolved: list[Resolved]) -> None:
    """Refuse a metric that no cell has."""
    known = [set(arm.metrics) for arm in resolved if arm.metrics]
    asked = [("metric/primary", ablation.primary), *(("metric/secondary", name) for name in ablation.secondary)]
    asked += [(f"claims/{i}", claim.metric) for i, claim in enumerate(ablation.claims) if claim.metric]
    for where, name in asked:
        if ablation.is_analyzed(name) and (text := _not_of_analysis(name, resolved)):
            raise ablation.file.mistake(where, f"`{name}`: {text}")
        if known and not ablation.is_analyzed(name) and not any(name in names for names in known):
            there = sorted(set.union(*known))
            hint = did_you_mean(name, there) or f"; there are {', '.join(there)}"
            if any(name in _in_training(arm.config) for arm in resolved):
                hint = "; a callback measures it in training, no evaluation does: `analyses: [knn]` has `knn/acc1@20`"
            raise ablation.file.mistake(where, f"no arm measures a metric `{name}`{hint}")


def _refuse_halving(ablation: Ablation, resolved: list[Resolved]) -> None:
    """Refuse halving by a metric that is not measured while candidates train, and where no epochs end a training."""
    if not ablation.tune or not ablation.tune.halving:
        return
    if ablation.primary in OF_EVALUATION:
        text = f"`tune.halving` compares candidates while they train, and `{ablation.primary}` is measured at their end"
        raise ablation.file.mistake("tune/halving", f"{text}: leave it out, or choose by acc1")
    for arm in resolved:
        trainer = arm.config.get("trainer") or {}
        epochs, steps = int(trainer.get("max_epochs") or 0), int(trainer.get("max_steps") or -1)
        if epochs <= 0 or 0 < steps <= arm.length.get("steps", steps):
            given = f"`trainer.max_steps: {steps}` ends" if steps > 0 else "no `trainer.max_epochs` ends"
            text = f"`tune.halving` compares after a quarter and half of the epochs, and {given} the arm {arm.arm.name}"
            raise ablation.file.mistake("tune/halving", f"{text}: leave it out, or give the length as max_epochs alone")


def _refuse_candidates(ablation: Ablation, resolved: list[Resolved], workers: int, stop: Callable[[], bool]) -> None:
    """Refuse what `tune` names and an arm cannot take, before candidates of others are trained."""
    if ablation.tune is None or ablation.run.command:  # a program of one's own may take other keys
        return
    samples, place = ablation.tune.samples(), ablation.directory / "arms"
    tried = f"tune-{json_digest([samples, *((arm.fingerprint, arm.code) for arm in resolved)])}.json"
    if (place / tried).is_file():
        return
    with ThreadPoolExecutor(workers) as pool:
        asked = [(arm, values) for values in samples for arm in ablation.arms]
        answers = [pool.submit(_try_candidate, ablation, arm, values, workers, stop) for arm, values in asked]
    for (arm, values), answer in zip(asked, answers, strict=True):
        if text := answer.result():
            key = next((key for key in values if re.search(rf"\b{key.rpartition('.')[2]}\b", text)), "")
            shown = ", ".join(f"{key} = {value}" for key, value in values.items())
            where = f"tune/{key}".removesuffix("/")
            raise ablation.file.mistake(where, f"the arm {arm.name} cannot be built with {shown}: {text}")
    if not stop():
        RunDir(place).write(tried, {"candidates": samples})


def _try_candidate(
    ablation: Ablation, arm: Arm, values: Mapping[str, Any], workers: int, stop: Callable[[], bool]
) -> str:
    """Return why a candidate is wrong input, found by a dry run; "" if it is not."""
    tried = replace(arm, overrides={**arm.overrides, **values})
    with tempfile.TemporaryDirectory() as folder, slot(workers, ablation.run.per_gpu, stop) as own:
        if own is None:
            return ""
        given, log = Path(folder) / "overrides.yaml", Path(folder) / "log"
        given.write_text(yaml.safe_dump({**overrides(ablation, tried, 0), "trainer.logger": False}, sort_keys=False))
        words = [*command(ablation), "fit", *fit_args(ablation, arm, given), "--dry_run", "--quiet"]
        code, lines = run_in_slot(words, log, ablation.run, own, stop=stop)
    return lines[-1].removeprefix("vitlab: ") if lines and failure_kind(code, lines, {}) == "wrong input" else ""


def _not_of_analysis(named: str, resolved: list[Resolved]) -> str:
    """Return why an analysis gives a metric of no arm; "" if it does, or if it does not say which it gives."""
    name, metric = named.split("/", 1)
    if not ANALYSES[name].metrics:
        can = ", ".join(name for name, one in ANALYSES.items() if one.metrics)
        return f"the analysis {name} gives a cell no number to compare; these do: {can}"
    given = ANALYSES[name].metric_names
    if not given or any(fnmatchcase(metric, one) for one in given):
        known, at = _numbers(name, resolved), re.search("@([^/]*)", metric)
        if not known or not at or at[1] in map(str, known):
            return ""
        return f"the analysis {name} does not measure it at {at[1]}: it does at {', '.join(map(str, known))}"
    return f"the analysis {name} does not measure it; it measures {', '.join(f'{name}/{one}' for one in given)}"


def _numbers(name: str, resolved: list[Resolved]) -> list[int]:
    """Return the numbers that may follow the ``@`` in metrics of an analysis; none if those of an arm are unknown."""
    if (numbers := ANALYSES[name].numbers) is None:
        return []
    asked: list[Any] = [(a.model.get("img_size"), a.model.get("grid"), a.start.get("token_steps")) for a in resolved]
    if not all(map(all, asked)):  # of a network of another library, or a probe of an older version
        return []
    return sorted({number for places in asked for number in numbers(*map(tuple, places))})


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


def _probe(ablation: Ablation, arm: Arm, code: str, workers: int, stop: Callable[[], bool]) -> Resolved | None:
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
                    facts = _run_probe(ablation, arm, place, own, claim, stop)
                    RunDir(cache.parent).write(cache.name, facts)
        finally:
            shutil.rmtree(place, ignore_errors=True)
            claim.release()
    return found


def _run_probe(
    ablation: Ablation, arm: Arm, place: Path, own: Slot, claim: lock.HeldLock, stop: Callable[[], bool]
) -> dict[str, Any]:
    settings = {**overrides(ablation, arm, 0), **{key: value for key, (value, _) in PROBE.items()}}
    settings["trainer.logger"] = False
    given = place / "overrides.yaml"
    write_text(given, yaml.safe_dump(settings, sort_keys=False))
    run = RunDir(place / "run")
    words = [*command(ablation), "fit", *fit_args(ablation, arm, given), *start_args(arm, ablation.seeds[0])]
    words += ["--run_dir", str(run.path), "--quiet"]
    if not ablation.run.command:
        whole = _given(ablation, arm, "trainer.max_steps", -1) or -1
        words.append(f"--trainer.callbacks+={json.dumps({'class_path': START, 'init_args': {'max_steps': whole}})}")
    started = time.perf_counter()
    code, lines = run_in_slot(words, place / "log", ablation.run, own, claim, stop)
    seconds = time.perf_counter() - started
    if code and not (ablation.tune and failure_kind(code, lines, run.record) == "diverged"):  # its candidates may not
        if code == TIMEOUT:
            raise UsageError(f"20 steps of {arm.name} took longer than `run.timeout`, {ablation.run.timeout:.0f} s")
        text = lines[-1].removeprefix("vitlab: ") if lines else f"exit code {code}"
        named = r"add --trust_imports (\S+)( \(in Python, [^)]*\))?"
        raise UsageError(re.sub(named, r"name it in `trust_imports` of this file: \1", text))
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
        "groups": json.loads(groups.read_text()) if (groups := run.path / "param_groups.json").is_file() else [],
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
    val -= {f"{name}{suffix}" for name in _in_training(config) for suffix in ("", "_images")}
    found = val or train | ({"acc5"} if "acc1" in train else set())
    return sorted(found | (OF_EVALUATION if "acc1" in found else set()))


def _in_training(config: Mapping[str, Any]) -> set[str]:
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
