"""Registration and history: every version of the file and its configs that cells ran under."""

import difflib
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitlab.ablation.evidence import chain
from vitlab.ablation.execution.identity import json_digest
from vitlab.ablation.file.spec import Ablation
from vitlab.config.yaml_files import read_yaml_text
from vitlab.errors import UsageError, preview
from vitlab.runs.atomic import write_json
from vitlab.runs.machine import git
from vitlab.runs.matching import matching
from vitlab.runs.records import now_utc, read_json
from vitlab.shipped import HOME

SHOWN = 40  # changed lines of a version that a report prints


def texts(ablation: Ablation) -> dict[str, str]:
    """Return the file and every config that it names, by names that hold on other machines.

    Of exported evidence, the configs are those of its last version: what lies on the reader's machine is not its own.
    """
    found = {"the file": ablation.file.path.read_text()}
    if ablation.is_evidence:
        return {**next((version["texts"] for version in reversed(_kept(ablation))), {}), **found}
    for name in dict.fromkeys([*ablation.base, *(p for arm in ablation.arms for p in arm.configs)]):
        found[_name(Path(name), ablation.file.path.parent)] = read_yaml_text(name)
    return found


def _name(path: Path, folder: Path) -> str:
    """Return the name of a config, however the path of the file beside it was typed."""
    for place in (HOME, folder):
        if path.resolve().is_relative_to(place.resolve()):
            return path.resolve().relative_to(place.resolve()).as_posix()
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)  # as the file writes it


def is_same(before: Mapping[str, str], after: Mapping[str, str]) -> bool:
    """Return whether two versions have the same texts; older ones name a config as its path was typed."""
    return _renamed(before, after) == dict(after)


def _renamed(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """Return the texts of a version, with configs of another path called as the later version calls them."""
    names = {Path(name).name: name for name in after if name not in before}
    return {name if name in after else names.get(Path(name).name, name): text for name, text in before.items()}


def record_version(ablation: Ablation) -> str:
    """Store the present version if it is new, and return its digest."""
    present, kept = texts(ablation), _kept(ablation)
    if same := [version["digest"] for version in kept if is_same(version["texts"], present)]:
        return str(old) if (old := registered(ablation).get("digest")) in same else same[0]
    name = json_digest(present)
    facts = {"time": now_utc(), "commit": git("rev-parse", "HEAD"), "texts": present}
    write_json(ablation.directory / "history" / f"{name}.json", facts)
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
        write_json(ablation.directory / "registered.json", facts)
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
    kept, present = _kept(ablation), texts(ablation)
    if not kept and ablation.is_evidence:
        return []
    if not kept or not is_same(kept[-1]["texts"], present):
        kept.append({"time": "now", "texts": present, "digest": json_digest(present)})
    return kept


def _kept(ablation: Ablation) -> list[dict[str, Any]]:
    """Return the versions in ``history/``, oldest first."""
    kept = []
    for path in matching(ablation.directory / "history", "*.json"):
        version = read_json(path)
        if lost := [name for name in ("time", "texts") if name not in version]:
            raise UsageError(f"{path} is damaged: it has no `{lost[0]}`")
        kept.append({**version, "digest": path.stem})
    return sorted(kept, key=lambda version: (version["time"], version["digest"]))


def sentences(ablation: Ablation) -> list[str]:
    """Return the report's sentences on the registration, and every change since the first version, line by line."""
    kept, old = stored_versions(ablation), registered(ablation)
    words = []
    if old:
        there = f"{old['cells_done']} cells were done" if old["cells_done"] else "before any cell was done"
        tried = old.get("candidates", 0)
        there += f", AFTER {tried} candidates of the tuning were tried" if tried else ""
        words.append(f"registered at {old['time']}, commit {old['commit']}, digest {old['digest']}; {there}")
        digests = [version["digest"] for version in kept]
        later = kept[digests.index(old["digest"]) :] if old["digest"] in digests else []
        is_kept = bool(later) and all(is_same(later[0]["texts"], version["texts"]) for version in later)
        words.append("nothing has changed since" if is_kept or not kept else "CHANGED since, see below")
    else:
        words.append("not registered: `vitlab ablate register` freezes claims and protocol before the first cell")
    for before, after in itertools.pairwise(kept):
        if is_same(before["texts"], after["texts"]):
            continue
        changed = _changes(before["texts"], after["texts"])
        words.append(f"changed, {after['time']}: {preview([f'`{line}`' for line in changed], SHOWN)}")
    return words


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    lines = []
    before = _renamed(before, after)
    for name in dict.fromkeys([*before, *after]):
        old, new = (text.get(name, "").splitlines() for text in (before, after))
        part = [d for d in difflib.unified_diff(old, new, n=0, lineterm="") if not d.startswith(("---", "+++", "@@"))]
        lines += [f"{name}: {line.replace('`', chr(39))}" for line in part]
    return lines
