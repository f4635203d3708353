"""How an ablation's file is read: sections as objects that say what each key may be, and mistakes with their line."""

import math
import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import field, fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import yaml

from vitlab.config.guesses import ABLATION_KEYS
from vitlab.config.yaml_files import parse_yaml, read_yaml_text
from vitlab.errors import UsageError, did_you_mean
from vitlab.ranges import MOST_SEED

MOST = sys.float_info.max
T = TypeVar("T")


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

    def check_keys(self, keys: Mapping[str, Collection[str]]) -> None:
        """Refuse unknown keys, by those of each section; of the file itself, by those of ``""``."""
        for section, known in keys.items():
            content = self.content if not section else self.content.get(section)
            if content is None:
                continue
            if not isinstance(content, dict):
                raise self.mistake(section, f"`{section}` must have keys ({', '.join(known)}), got {content!r}")
            for key in content:
                if key not in known:
                    ours = None if section else ABLATION_KEYS.get(key)
                    hint = f"; {ours}" if ours else meant(key, known)
                    raise self.mistake(f"{section}/{key}".lstrip("/"), f"unknown key `{key}`{hint}")

    def section(self, name: str, kind: type[T]) -> T:
        """Return a section as an object of a dataclass: what the file does not give has the default of its field.

        A field is read as :func:`checked` or :func:`number` say, or is one of the words of its ``Literal``, or a
        boolean.
        """
        given, hints = self.content.get(name) or {}, get_type_hints(kind)
        found = {}
        for one in fields(kind):  # type: ignore[arg-type]
            if one.name in given:
                read, place = one.metadata.get("read"), f"{name}.{one.name}"
                found[one.name] = read(self, place) if read else self.choice(place, get_args(hints[one.name]))
        return kind(**found)

    def value(self, name: str, default: Any = None) -> Any:
        """Return what the file gives at the dotted ``name``, or the default."""
        section, _, key = name.rpartition(".")
        return (self.content.get(section) or {} if section else self.content).get(key, default)

    def wrong(self, name: str, rule: str) -> UsageError:
        """Return the mistake that the value at the dotted ``name`` breaks a rule, such as ``must be a name``."""
        return self.mistake(name.replace(".", "/"), f"`{name}` {rule}, got {self.value(name)!r}")

    def choice(self, name: str, words: tuple[Any, ...] = (), default: Any = None) -> Any:
        """Return the word at the dotted ``name``; refuse any but those given, or those of a boolean."""
        words = words or (True, False)
        if (value := self.value(name, default)) in words:
            return value
        got = "no value" if value is None else repr(value)
        text = f"`{name}` must be one of {', '.join(map(str, words))}, got {got}"
        raise self.mistake(name.replace(".", "/"), text)

    def texts(self, name: str, example: str) -> tuple[str, ...]:
        """Return the strings at the dotted ``name``, a list or a single one; refuse anything else."""
        value = self.value(name)
        found = [value] if isinstance(value, str) else value or []
        if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
            raise self.wrong(name, f"must be a list, as in {example}")
        return tuple(dict.fromkeys(found))


Read = Callable[[File, str], Any]  # of a file and the dotted name of a key that it gives: the value, or a mistake


def checked(read: Read, default: Any = None) -> Any:
    """Return a field of a section whose value is what ``read`` returns."""
    return field(default=default, metadata={"read": read})


def number(default: Any, lowest: float, highest: float = math.inf, whole: bool = False, or_word: str = "") -> Any:
    """Return a field of a section that is a number in a range, its default, or a word."""

    def read(file: File, name: str) -> Any:
        value = as_number(file.value(name))
        if value is default or (or_word and value == or_word):
            return value
        kind = int if whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kind) or not lowest <= value <= min(highest, MOST):
            what = "a whole number" if whole else "a number"
            span = f"of at least {lowest:g}" if highest == math.inf else f"from {lowest:g} to {highest:g}"
            raise file.wrong(name, f"must be {what} {span}")
        return value

    return checked(read, default)


def meant(word: object, names: Collection[str]) -> str:
    """Return what a wrong word may mean, or else what there is: the end of a message.

    >>> meant("lerned", ["none", "learned"]), meant(3, ["none", "learned"])
    ('; did you mean "learned"?', '; there are none, learned')
    """
    return did_you_mean(str(word), names) or f"; there are {', '.join(names)}"


def are_seeds(value: Any) -> bool:
    """Return whether a value is a list of different seeds."""
    is_list = isinstance(value, list) and all(type(seed) is int and 0 <= seed <= MOST_SEED for seed in value)
    return is_list and 0 < len(set(value)) == len(value)


def as_number(value: Any) -> Any:
    """Return 1e-3 as a number; YAML 1.1 reads it as a string and expects 1.0e-3."""
    is_text = isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value)
    return float(value) if is_text else value
