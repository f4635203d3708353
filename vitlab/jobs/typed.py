"""What was typed for a run: its settings and its command, alone because training, tables and pages all ask for it."""

import shlex
from collections.abc import Mapping
from typing import Any

from vitlab.config.arguments import config_paths
from vitlab.config.keys import key_of
from vitlab.config.yaml_files import read_own
from vitlab.objects import as_yaml
from vitlab.runs.directory import RunDir
from vitlab.runs.records import Record
from vitlab.shipped import as_typed

RESUMED = ", resumed with "  # between a command and what each resume changed; files keep it all as one text


def first_settings(run: RunDir) -> dict[str, Any] | None:
    """Return what the command line of a run's first attempt has set; None where it was not kept."""
    path = run.path / "overrides.yaml"
    return read_own(path) if path.is_file() else None


def settings_so_far(run: RunDir, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the command lines of all attempts of a run have set, given its record."""
    found = first_settings(run) or {}
    for change in record.get("changes", []):
        found |= change
    return found


def command_of(facts: Record, overrides: dict[str, Any] | None) -> str:
    """Return the command that started the run, without its name and data folder, and what resumes changed."""
    configs = facts.get("configs") or config_paths(facts["argv"])  # an older vitlab wrote argv alone
    start = ["vitlab fit", *(f"--config {shlex.quote(as_typed(name))}" for name in configs), *_weights(facts)]
    start += _words(overrides or {})
    changes = [" ".join(words) for change in facts.get("changes", []) if (words := _words(change))]
    return RESUMED.join([" ".join(start), *changes])


def _weights(facts: Record) -> list[str]:
    """Return the flags that say which weights a run started from."""
    named = {name: facts.get(name) for name in ("init_from", "resize", "init_grid")}
    return [f"--{name} {shlex.quote(str(value))}" for name, value in named.items() if value]


def _words(settings: dict[str, Any]) -> list[str]:
    return [shlex.quote(f"--{key}={as_yaml(value)}") for key, value in settings.items() if key_of(key).table]
