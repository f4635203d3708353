"""Tabulate finished runs, averaged over seeds."""

import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitlab.class_paths import choice_text
from vitlab.config.keys import class_and_arguments
from vitlab.config.yaml_files import read_own
from vitlab.errors import UsageError, trusting
from vitlab.jobs.typed import RESUMED, command_of, first_settings
from vitlab.models.sizes import PUBLISHED
from vitlab.runs.directory import RunDir
from vitlab.runs.manifest import read_manifest
from vitlab.runs.records import parameters_of, split_metrics
from vitlab.tables import percent_factor, table

_COLUMNS = {
    "command": "{typed}",
    "tokens": "{tokenizer}",
    "positions": "{pos_embed}",
    "parameters": "{parameters_m:.2f} M",
    "MACs": "{macs_m:.1f} M",
    "data": "{data}{train}",
    "epochs": "{epochs}",
    "seeds": "{seeds}",
    "test accuracy": "{accuracy}{images}{of}",
    "published": "{published}",
    "measured on": "{places}",
}
_SAME = ("command", "data", "train_n", "epochs", "parameters")  # in the runs of a row
_ALSO = ("checkpoint", "splits", "recipe")  # in the runs of a row too; records of an older vitlab lack the last two
_NEEDED = (*_SAME, "seed", "acc1", "hardware", "commit")


def record(run: RunDir) -> dict[str, Any]:
    """Return the record of one run for a table; refuse a run without a test result of its present weights."""
    measured = run.measured("test")
    if "acc1" not in measured:
        if (now := run.standing("test")).is_stale:
            raise UsageError(f"{run.path}: its test result was {now.text}")
        why = without_accuracy(run) or f"; run `{trusting(f'vitlab test {run.typed}', run.path)}` first"
        raise UsageError(f"{run.path} has no accuracy on its test split{why}")
    facts, model, data = run.record, run.model, run.data
    splits: dict[str, Any] = dict(data.get("splits") or {})  # unknown of data that are not vitlab's
    config = read_own(run.config)
    _, network = class_and_arguments(config, "model")  # of a network of the user's, anything
    return {
        "command": command_of(facts, first_settings(run)),
        "recipe": facts.get("recipe", "").rpartition("-")[2] or None,  # a resume has another name before its hash
        "seed": facts["seed"],
        "acc1": measured["acc1"],
        "n": int(measured["n"]) if "n" in measured else None,  # an own module need not count them
        **({"checkpoint": measured["checkpoint"]} if run.standing("test").kind == "other" else {}),
        "tokenizer": _choice(network, "tokenizer"),
        "pos_embed": _choice(network, "pos_embed"),
        "parameters": parameters_of(model),
        "macs": model.get("macs"),
        "data": data["data"],
        "train_n": splits.get("train", {}).get("n"),
        "splits": {name: facts["hash"] for name, facts in splits.items() if "hash" in facts},
        **_length(run, config["trainer"]),
        "hardware": f"{facts['world_size']} x {facts['devices'][0]}",
        "commit": f"{(facts['commit'] or 'unknown')[:7]}{'+' if facts['dirty'] else ''}",
    }


def _choice(network: Mapping[str, Any], name: str) -> str | None:
    return choice_text(network[name]) if name in network else None


def without_accuracy(run: RunDir) -> str:
    """Return what a test measured in place of an accuracy, and what shows it; empty if there was no test.

    Example:
        >>> without_accuracy(RunDir("runs/first"))
        ''
    """
    found = run.measured("test")
    if not found or "acc1" in found:
        return ""
    names = ", ".join(split_metrics(found)) or "nothing"
    return f": its test measured {names}, see `vitlab runs show {run.typed}`"


def _length(run: RunDir, trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the epochs of a run, None without a limit, and apart how many were trained if it ended before.

    Of a run that has not ended, they say how many its last checkpoint has begun; of one that steps limit, the steps.
    """
    last, ending = read_manifest(run.checkpoints).get("last.ckpt", {}), run.record.get("ending")
    why = ending["why"] if ending else None
    planned = None if trainer["max_epochs"] == -1 else trainer["max_epochs"]
    saved, step = last.get("epoch"), last.get("step")
    if planned is None or why == "steps":
        return {"epochs": planned, **({} if step is None else {"steps": step})}
    if saved is not None and run.record.get("status", "done") != "done":
        return {"epochs": f"{saved + 1} of {planned}"}
    if saved is None or why == "finished":
        return {"epochs": planned}
    trained = saved + 1
    if step and (steps := run.record.get("steps")) and trainer.get("max_steps", -1) == -1:  # it may end within an epoch
        trained = min(max(round(planned * step / steps, 1), saved), trained)
    return {"epochs": planned} if trained == planned else {"epochs": planned, "trained": trained}


def check_record(one: Any) -> dict[str, Any]:
    """Return a record that was read from a file; refuse anything else.

    Raises:
        ValueError: It is not what :func:`record` returns.
    """
    if missing := [key for key in _NEEDED if not isinstance(one, dict) or key not in one]:
        raise ValueError(f"a line has no `{missing[0]}`; `vitlab results --keep` writes such files")
    return one | {"epochs": None if one["epochs"] == -1 else one["epochs"]}  # as once were those without a limit


def markdown(records: list[dict[str, Any]]) -> str:
    """Return the records as a table, in the order of each command's first run.

    Rows that are told apart by their images alone show the hashes of their splits, and those of one command whose
    config was edited in between their recipes.
    """
    rows = [_row(runs) for runs in _grouped(records)]
    alike: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        alike.setdefault(tuple(row[key] for key in _SAME), []).append(row)
    for same in alike.values():
        is_edited = len({row.get("recipe") for row in same}) > 1
        for row in same:
            if len(same) > 1 and row.get("splits"):
                row["data"] += f" {' '.join(split_hash[:8] for split_hash in row['splits'].values())}"
            if is_edited and row.get("recipe"):
                row["typed"] += f", recipe {row['recipe']}"
    return table(rows, _COLUMNS)


def rows_in_full(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the same table with their numbers in full: mean accuracy, its interval, each seed's.

    Where some seeds ended before others, ``trained`` or ``steps`` is None and ``trained_by_seed`` has the numbers.

    Example:
        >>> runs = [record(RunDir("runs/first"))]
        >>> [(row["seeds"], row["acc1_by_seed"].keys() == {"0"}) for row in rows_in_full(runs)]
        [([0], True)]
    """
    rows = []
    for runs in _grouped(records):
        values = [run["acc1"] for run in runs]
        low, high = _bounds(values) or (None, None)
        own = {key: value for key, value in runs[0].items() if key not in ("seed", "acc1", "hardware", "commit")}
        own |= {name: None for name in ("tokenizer", "pos_embed") if own.get(name) == "-"}  # of records of before
        row = {**own, "seeds": [run["seed"] for run in runs], "acc1": statistics.mean(values)}
        row |= {"acc1_low": low, "acc1_high": high, "published": _published(own["command"]), "places": _places(runs)}
        rows.append({**row, **_lengths(runs), "acc1_by_seed": {str(run["seed"]): run["acc1"] for run in runs}})
    return rows


def _lengths(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the epochs or steps that the runs of a row were trained for, apart by seed where they differ."""
    found: dict[str, Any] = {}
    for name, planned in (("trained", runs[0]["epochs"]), ("steps", None)):
        if any(name in run for run in runs):
            values = [run.get(name, planned) for run in runs]
            found[name] = values[0] if len(set(values)) == 1 else None
            if found[name] is None:
                found[f"{name}_by_seed"] = {str(run["seed"]): n for run, n in zip(runs, values, strict=True)}
    return found


def _grouped(records: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the runs of each row: those of one command on the same images, one of each seed."""
    groups: dict[tuple[Any, ...], dict[Any, dict[str, Any]]] = {}
    for i, one in enumerate(records):
        seed = one["seed"] if type(one["seed"]) is int else f"none, run {i}"  # without a seed, each run is another
        same = (*(one[key] for key in _SAME), *(str(one.get(key)) for key in _ALSO))
        groups.setdefault(same, {})[seed] = one  # a later run replaces an earlier one of the same seed
    return [list(group.values()) for group in groups.values()]


def _places(runs: list[dict[str, Any]]) -> list[str]:
    return sorted({f"{run['hardware']}, commit {run['commit']}" for run in runs})


def _row(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return runs[0] | {
        "typed": f"`{runs[0]['command'].replace(RESUMED, f'`{RESUMED}`')}`",
        "parameters_m": runs[0]["parameters"] / 1e6,
        "macs_m": runs[0]["macs"] / 1e6 if runs[0].get("macs") else None,
        "epochs": _trained(runs),
        "seeds": len(runs),
        "train": "" if runs[0]["train_n"] is None else f", {runs[0]['train_n']:,} images",
        "images": "" if runs[0].get("n") is None else f" of {runs[0]['n']:,}",
        "of": f", with {runs[0]['checkpoint']}" if "checkpoint" in runs[0] else "",
        "accuracy": _accuracy([run["acc1"] for run in runs]),
        "published": _published(runs[0]["command"]) or "-",
        **{name: runs[0].get(name) or "-" for name in ("tokenizer", "pos_embed")},
        "places": "; ".join(_places(runs)),
    }


def _trained(runs: list[dict[str, Any]]) -> str:
    """Return the epochs of a row's runs, as ``2 to 5 of 80`` where some ended early, or their steps."""
    planned = runs[0]["epochs"]
    if steps := [run["steps"] for run in runs if "steps" in run]:
        return f"{_span(steps)} step{'' if steps == [1] else 's'}"
    if all("trained" not in run for run in runs):
        return "-" if planned is None else str(planned)
    return " of ".join(
        [_span([run.get("trained", planned) for run in runs]), *([] if planned is None else [str(planned)])]
    )


def _span(values: list[float]) -> str:
    return " to ".join(f"{n:g}" for n in dict.fromkeys((min(values), max(values))))


def _bounds(values: list[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of a mean accuracy; None from one seed, or where all agree."""
    from vitlab.stats import interval  # scipy, where there is more than one seed

    if len(values) < 2:
        return None
    low, high = interval(values, within=(0.0, 100 / percent_factor(values)))
    return None if math.isnan(low) else (low, high)


def _accuracy(values: list[float]) -> str:
    factor = percent_factor(values)
    mean, bounds = f"{factor * statistics.mean(values):.1f} %", _bounds(values)
    return f"{mean} [{factor * bounds[0]:.1f}, {factor * bounds[1]:.1f}]" if bounds else mean


def _published(command: str) -> str | None:
    """Return the published accuracy of an unchanged recipe; None if there is none."""
    config = command.removeprefix("vitlab fit --config ")
    facts = PUBLISHED.get(Path(config).stem)
    return f"{facts.top1:.1f} %, {facts.source}" if facts and facts.top1 and " " not in config else None
