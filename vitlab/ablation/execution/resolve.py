"""Resolve the arms of an ablation, each by its probe, and refuse what cannot be trained or compared."""

import re
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from vitlab.ablation.execution.cells import Resolved
from vitlab.ablation.execution.commands import command, fit_args
from vitlab.ablation.execution.gpus import slot
from vitlab.ablation.execution.identity import code_digest, json_digest
from vitlab.ablation.execution.probe import OF_EVALUATION, measured_in_training, probed
from vitlab.ablation.execution.process import Seat, failure_kind, run_in_slot
from vitlab.ablation.file.arms import Arm, read_adjust
from vitlab.ablation.file.schema import meant
from vitlab.ablation.file.spec import Ablation
from vitlab.analysis import ANALYSES
from vitlab.errors import one_line
from vitlab.runs.atomic import write_json


def resolve(ablation: Ablation, workers: int, stop: Callable[[], bool] = lambda: False) -> list[Resolved]:
    """Resolve every arm, from stored probes where possible; return none if ``stop`` returned true."""
    command(ablation)  # refuses what is not trusted: no arm's mistake
    code = code_digest(own=ablation.trust_imports)
    with ThreadPoolExecutor(workers) as pool:
        probes = [pool.submit(probed, ablation, arm, code, workers, stop) for arm in ablation.arms]
    if stop():
        return []
    _refuse_mistakes(ablation, [probe.exception() for probe in probes])
    resolved = [arm for probe in probes if (arm := probe.result())]
    _refuse_equal(ablation, resolved)
    _refuse_metrics(ablation, resolved)
    _refuse_halving(ablation, resolved)
    _refuse_candidates(ablation, resolved, workers, stop)
    return resolved


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
    error = one_line(next(error for error in errors if error), 2000)
    others = f" (nor can {', '.join(arm.name for arm in bad[1:])})" if len(bad) > 1 else ""
    raise ablation.file.mistake(
        _blamed(ablation, bad, error), f"the arm {bad[0].name} cannot be built{others}: {error}"
    )


def _blamed(ablation: Ablation, bad: list[Arm], error: str) -> str:
    """Return the place in the file that most likely makes the arms bad: a level, a key of ``adjust``, or all axes.

    It is one whose arms are exactly the bad ones; else one whose arms are all bad and which sets what the error names.
    """
    places: list[tuple[str, Mapping[str, str], Mapping[str, Any]]] = [
        (f"axes/{axis}/{level}", {axis: level}, values)
        for axis, levels in ablation.axes.items()
        for level, values in levels.items()
    ]
    for i, (those, values) in enumerate(read_adjust(ablation.file, ablation.axes)):
        places.append((f"adjust/{i}/set/{_named_in(error, values)}".removesuffix("/"), those, values))
    found = []
    for place, of, sets in places:
        arms = [arm for arm in ablation.arms if of.items() <= dict(arm.levels).items()]
        are_all, is_named = arms == bad, bool(_named_in(error, sets))
        if are_all or (is_named and bad[0] in arms and all(arm in bad for arm in arms)):
            found.append((not are_all, not is_named, place))
    return min(found, key=lambda one: one[:2])[2] if found else "axes"


def _named_in(error: str, sets: Mapping[str, Any]) -> str:
    """Return the first of dotted keys whose last word a message has; "" if it has none."""
    keys = (key for key in sets if key != "config")
    return next((key for key in keys if re.search(rf"\b{re.escape(key.rpartition('.')[2])}\b", error)), "")


def _refuse_equal(ablation: Ablation, resolved: list[Resolved]) -> None:
    seen: dict[tuple[str, str], str] = {}
    for arm in resolved:
        other = seen.setdefault((arm.fingerprint, json_digest(arm.data)), arm.name)
        if other != arm.name:
            raise ablation.file.mistake(
                "axes",
                f"the arms {other} and {arm.name} resolve to the same configuration and images",
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
            hint = meant(name, there)
            if any(name in measured_in_training(arm.config) for arm in resolved):
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
        steps = int(arm.trainer.get("max_steps") or -1)
        if not arm.epochs or 0 < steps <= arm.length.get("steps", steps):
            given = f"`trainer.max_steps: {steps}` ends" if steps > 0 else "no `trainer.max_epochs` ends"
            text = f"`tune.halving` compares after a quarter and half of the epochs, and {given} the arm {arm.name}"
            raise ablation.file.mistake("tune/halving", f"{text}: leave it out, or give the length as max_epochs alone")


def _refuse_candidates(ablation: Ablation, resolved: list[Resolved], workers: int, stop: Callable[[], bool]) -> None:
    """Refuse what `tune` names and an arm cannot take, before candidates of others are trained."""
    if ablation.tune is None or ablation.run.command:  # a program of one's own may take other keys
        return
    samples = ablation.tune.samples()
    digest = json_digest([samples, *((arm.fingerprint, arm.code) for arm in resolved)])
    if (tried := ablation.directory / "arms" / f"tune-{digest}.json").is_file():
        return
    with ThreadPoolExecutor(workers) as pool:
        asked = [(arm, values) for values in samples for arm in ablation.arms]
        answers = [pool.submit(_try_candidate, ablation, arm, values, workers, stop) for arm, values in asked]
    for (arm, values), answer in zip(asked, answers, strict=True):
        if text := answer.result():
            shown = ", ".join(f"{key} = {value}" for key, value in values.items())
            where = f"tune/{_named_in(text, values)}".removesuffix("/")
            raise ablation.file.mistake(where, f"the arm {arm.name} cannot be built with {shown}: {text}")
    if not stop():
        write_json(tried, {"candidates": samples})


def _try_candidate(
    ablation: Ablation, arm: Arm, values: Mapping[str, Any], workers: int, stop: Callable[[], bool]
) -> str:
    """Return why a candidate is wrong input, found by a dry run; "" if it is not."""
    tried = replace(arm, overrides={**arm.overrides, **values})
    with tempfile.TemporaryDirectory() as folder, slot(workers, ablation.run.per_gpu, stop) as own:
        if own is None:
            return ""
        given = fit_args(ablation, tried, 0, Path(folder) / "overrides.yaml", {"trainer.logger": False})
        words = [*command(ablation), "fit", *given, "--dry_run", "--quiet"]
        code, lines = run_in_slot(words, Path(folder) / "log", ablation.run, Seat(own, stop=stop))
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
