"""Registration and history: every version of the file and its configs that cells ran under."""

import difflib
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitlab.ablation.evidence import chain
from vitlab.ablation.execution.identity import json_digest
from vitlab.ablation.file.spec import Ablation
from vitlab.errors import UsageError
from vitlab.runs.directory import RunDir
from vitlab.runs.machine import git
from vitlab.runs.matching import matching
from vitlab.runs.records import now_utc, read_json
from vitlab.shipped import HOME

SHOWN = 40  # changed lines of a version that a report prints


def texts(ablation: Ablation) -> dict[str, str]:
    """Return the file and every config that it names, by names that hold on other machines."""
    found = {"the file": ablation.file.path.read_text()}
    for name in dict.fromkeys([*ablation.base, *(p for arm in ablation.arms for p in arm.configs)]):
        path = Path(name)
        found[str(path.relative_to(HOME)) if path.is_relative_to(HOME) else name] = path.read_text()
    return found


def record_version(ablation: Ablation) -> str:
    """Store the present version if it is new, and return its digest."""
    present = texts(ablation)
    name = json_digest(present)
    folder = RunDir(ablation.directory / "history")
    if not (folder.path / f"{name}.json").is_file():
        folder.write(f"{name}.json", {"time": now_utc(), "commit": git("rev-parse", "HEAD"), "texts": present})
        chain.append(ablation.directory, "version", digest=name)
    return name


def register(ablation: Ablation, done: int) -> dict[str, Any]:
    """Freeze claims and protocol; refuse if another version is registered and a cell or candidate of it was started.

    Args:
        ablation: The ablation to register.
        done: Number of cells that are already done.

    Raises:
        UsageError: Another version is registered, and a cell or candidate of it was started.
    """
    old = registered(ablation)
    name = record_version(ablation)
    tried = _started(ablation.directory / "tune")
    if old and old["digest"] != name and not tried and not _started(ablation.directory):
        old = {}  # a mistake that was found before a cell started
    if old and old["digest"] != name:
        text = f"{ablation.name} was registered at {old['time']} and has changed since; choose another `name`"
        raise UsageError(text)
    if not old:
        facts = {"digest": name, "time": now_utc(), "commit": git("rev-parse", "HEAD"), "cells_done": done}
        facts |= {"candidates": tried} if tried else {}
        chain.append(ablation.directory, "registered", digest=name)
        RunDir(ablation.directory).write("registered.json", facts)
    return registered(ablation)


def _started(directory: Path) -> int:
    """Return the number of cells of a folder that were started, even if they lie there no more."""
    there = {path.parent.relative_to(directory).as_posix() for path in matching(directory, "*/s*-*/run.json")}
    there |= {
        path.relative_to(directory).as_posix().removesuffix(".failed.json")
        for path in matching(directory, "*/s*-*.failed.json")
    }
    known = chain.read_chain(directory)
    return len(there | {record["cell"] for record in (known.records if known else ()) if "cell" in record})


def registered(ablation: Ablation) -> dict[str, Any]:
    """Return the registration; empty if there is none."""
    return read_json(ablation.directory / "registered.json")


def stored_versions(ablation: Ablation) -> list[dict[str, Any]]:
    """Return the stored versions, oldest first, and the present one if it is not the last."""
    kept = [{**read_json(path), "digest": path.stem} for path in matching(ablation.directory / "history", "*.json")]
    kept.sort(key=lambda version: (version["time"], version["digest"]))
    try:
        present = texts(ablation)
    except FileNotFoundError:  # exported evidence without its configs
        return kept
    if not kept or json_digest(present) != kept[-1]["digest"]:
        kept.append({"time": "now", "texts": present, "digest": json_digest(present)})
    return kept


def sentences(ablation: Ablation) -> list[str]:
    """Return the report's sentences on the registration, and every change since the first version, line by line."""
    kept, old = stored_versions(ablation), registered(ablation)
    words = []
    if old:
        there = f"{old['cells_done']} cells were done" if old["cells_done"] else "before any cell was done"
        tried = old.get("candidates", 0)
        there += f", AFTER {tried} candidates of the tuning were tried" if tried else ""
        words.append(f"registered at {old['time']}, commit {old['commit']}, digest {old['digest']}; {there}")
        later = [version["digest"] for version in kept]
        later = later[later.index(old["digest"]) :] if old["digest"] in later else later
        words.append("nothing has changed since" if {*later} <= {old["digest"]} else "CHANGED since, see below")
    else:
        words.append("not registered: `vitlab ablate register` freezes claims and protocol before the first cell")
    for before, after in itertools.pairwise(kept):
        changed = list(_changes(before["texts"], after["texts"]))
        more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
        words.append(f"changed, {after['time']}: " + ", ".join(f"`{line}`" for line in changed[:SHOWN]) + more)
    return words


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    lines = []
    for name in dict.fromkeys([*before, *after]):
        old, new = (text.get(name, "").splitlines() for text in (before, after))
        part = [d for d in difflib.unified_diff(old, new, n=0, lineterm="") if not d.startswith(("---", "+++", "@@"))]
        lines += [f"{name}: {line.replace('`', chr(39))}" for line in part]
    return lines
