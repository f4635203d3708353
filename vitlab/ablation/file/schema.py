"""The keys of an ablation's file, and their line numbers for error messages."""

import re
import sys
from pathlib import Path
from typing import Any

import yaml

from vitlab.config.guesses import ABLATION_KEYS
from vitlab.config.yaml_files import parse_yaml, read_yaml_text
from vitlab.errors import UsageError, did_you_mean

KEYS: dict[str, tuple[str, ...]] = {  # "": the file itself; others: the section of that name
    "": (
        *("name", "base", "axes", "exclude", "adjust", "seeds", "baseline", "evaluate", "checkpoint", "metric"),
        *("match", "analyses", "stats", "claims", "run", "wandb", "tune", "trust_imports"),
    ),
    "metric": ("primary", "mode", "secondary"),
    "match": ("within", "steps", "params", "flops", "pos_to_content", "on_violation"),
    "stats": ("test", "ci", "margin", "sd", "seeds_max"),
    "run": ("executor", "workers", "per_gpu", "timeout", "retries", "keep", "slurm", "command", "fork"),
    "wandb": ("project", "mode"),
}
CHOICES: dict[str, tuple[Any, ...]] = {
    "evaluate": ("val", "test"),
    "checkpoint": ("last", "best"),
    "metric.mode": ("max", "min"),
    "match.on_violation": ("warn", "fail"),
    "stats.test": ("auto", "paired", "welch"),
    "run.executor": ("local", "slurm"),
    "run.fork": (True, False),
    "run.keep": ("all", "weights", "none"),
    "wandb.mode": ("online", "offline", "disabled"),
}
MOST = sys.float_info.max
NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")


class File:
    """A YAML file whose mistakes are reported with their line.

    Args:
        path: The file.
        is_evidence: Whether it is that of exported evidence, which is read as it is: what it names may be missing.
    """

    def __init__(self, path: str | Path, is_evidence: bool = False) -> None:
        self.path, self.is_evidence = Path(path), is_evidence
        if not self.path.is_file():
            raise UsageError(f"there is no file {self.path}")
        text = read_yaml_text(self.path)
        self.content = parse_yaml(text, str(self.path))
        self.root = yaml.compose(text, Loader=yaml.SafeLoader)  # for line numbers
        if not isinstance(self.content, dict):
            raise UsageError(f"{self.path}: expected keys such as `name:` and `axes:`, got {self.content!r}")

    def mistake(self, where: str, text: str) -> UsageError:
        """Return the mistake ``text`` about the dotted place ``where``, with file and line."""
        return UsageError(f"{self.path}, line {self.line(where.split('/'))}: {text}")

    def refuse(self, where: str, text: str) -> None:
        """Raise the mistake ``text``, which an older vitlab took: evidence that has it is read as it is."""
        if not self.is_evidence:
            raise self.mistake(where, text)

    def line(self, place: list[str]) -> int:
        """Return the line of a place in the file, or of its closest existing parent."""
        node, line = self.root, 1
        for part in place:
            if isinstance(node, yaml.MappingNode):
                found = [(k, v) for k, v in node.value if k.value == part]
                if not found:
                    return line
                line, node = found[0][0].start_mark.line + 1, found[0][1]
            elif isinstance(node, yaml.SequenceNode) and part.isdigit() and int(part) < len(node.value):
                node = node.value[int(part)]
                line = node.start_mark.line + 1
        return line

    def check_keys(self) -> None:
        """Refuse unknown keys, and values that are not among their choices."""
        for section, known in KEYS.items():
            content = self.content if not section else self.content.get(section)
            if content is None:
                continue
            if not isinstance(content, dict):
                raise self.mistake(section, f"`{section}` must have keys ({', '.join(known)}), got {content!r}")
            for key in content:
                if key not in known:
                    ours = None if section else ABLATION_KEYS.get(key)
                    hint = f"; {ours}" if ours else did_you_mean(str(key), known) or f"; known are {', '.join(known)}"
                    raise self.mistake(f"{section}/{key}".lstrip("/"), f"unknown key `{key}`{hint}")
        for name, choices in CHOICES.items():
            section, _, key = name.rpartition(".")
            content = self.content.get(section) or {} if section else self.content
            if key in content and (value := content[key]) not in choices:
                got = "no value" if value is None else repr(value)
                raise self.mistake(
                    name.replace(".", "/"), f"`{name}` must be one of {', '.join(map(str, choices))}, got {got}"
                )

    def number(self, name: str, default: Any, lowest: float, highest: float = float("inf"), whole: bool = False) -> Any:
        """Return the number at the dotted ``name``; refuse anything else."""
        section, _, key = name.rpartition(".")
        value = as_number((self.content.get(section) or {}).get(key, default))
        if value is default:
            return default
        kind = int if whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kind) or not lowest <= value <= min(highest, MOST):
            what = "a whole number" if whole else "a number"
            span = f"of at least {lowest:g}" if highest == float("inf") else f"from {lowest:g} to {highest:g}"
            raise self.mistake(name.replace(".", "/"), f"`{name}` must be {what} {span}, got {value!r}")
        return value

    def texts(self, name: str, example: str) -> tuple[str, ...]:
        """Return the strings at the dotted ``name``, a list or a single one; refuse anything else."""
        section, _, key = name.rpartition(".")
        value = (self.content.get(section) or {} if section else self.content).get(key)
        found = [value] if isinstance(value, str) else value or []
        if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
            raise self.mistake(name.replace(".", "/"), f"`{name}` must be a list, as in {example}, got {value!r}")
        return tuple(dict.fromkeys(found))


def as_number(value: Any) -> Any:
    """Return 1e-3 as a number; YAML 1.1 reads it as a string and expects 1.0e-3."""
    is_text = isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value)
    return float(value) if is_text else value


def check_level_name(file: File, where: str, name: Any) -> str:
    """Return ``name`` if it can be part of a directory name."""
    if isinstance(name, bool) or name is None:
        text = "YAML reads an unquoted on, off, yes, no, true, false, null or ~ as a value"
        raise file.mistake(where, f"{text}: quote the name, as in 'on' (a value needs no quotes)")
    if not NAME.fullmatch(str(name)):
        raise file.mistake(where, f"a name consists of a-z 0-9 _ . - and starts with a letter or digit, got {name!r}")
    return str(name)


def level_names(values: list[Any]) -> list[Any]:
    """Return names for levels that are given as values: classes by name, with arguments where names collide.

    >>> level_names(["none", 0.5, "mypkg.Coordinates", {"class_path": "mypkg.Wave"}, ["learned", "rope2d"]])
    ['none', '0.5', 'coordinates', 'wave', 'learned_rope2d']
    """
    names = [_value_name(value, is_long=False) for value in values]
    return [_value_name(v, is_long=True) if names.count(n) > 1 else n for n, v in zip(names, values, strict=True)]


def _value_name(value: Any, is_long: bool) -> Any:
    if isinstance(value, bool | int | float):
        return str(value).lower()
    if isinstance(value, list):
        return "_".join(str(_value_name(one, is_long)) for one in value)
    if not isinstance(value, str) and not (isinstance(value, dict) and "class_path" in value):
        return value
    path = value if isinstance(value, str) else str(value["class_path"])
    if isinstance(value, str) and not re.fullmatch(r"([A-Za-z_]\w*\.)*[A-Z]\w*", path):
        return value
    args = value.get("init_args") or {} if is_long and isinstance(value, dict) else {}
    words = [path.rpartition(".")[2], *(f"{name}{arg}" for name, arg in args.items())]
    return re.sub(r"[^a-z0-9_.]+", "_", "_".join(words).lower())
