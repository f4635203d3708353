"""Turn jsonargparse's messages about a wrong configuration into one clear line; read YAML files strictly."""

import copy
import re
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import yaml

from vitlab.config.guesses import VALUES, about_word, suggest_argument
from vitlab.config.trust import import_problem, may_import, not_allowed
from vitlab.errors import UsageError, did_you_mean

NODES = 100_000  # values in one file
DEPTH = 200  # values within values


def explain(
    message: str, keys: Iterable[str], class_names: Iterable[str], early: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Return a line with the rule that was broken, the value, and the closest valid name.

    Args:
        message: jsonargparse's message, of one or many lines.
        keys: Every dotted key that the parser takes, including those of the selected classes.
        class_names: Short names of the classes that a ``class_path`` can name.
        early: Keys that stand before the flag of their class, and that flag.
    """
    known = set(keys)
    found = re.search(r'Parser key "([\w.]+)"', message) or re.search(r"Group '([\w.]+)'", message)
    outer = found[1] if found else ""
    given = re.findall(r"Given value: (.*)", message)
    if (found := re.search(r"Importing '([^']+)' is not allowed", message)) and (not given or found[1] in str(given)):
        return not_allowed(found[1])
    if found := re.search(r"unrecognized arguments: --([^\s=]+)", message):
        key = found[1] if not outer or found[1].startswith(outer) else f"{outer}.{found[1]}"
        return f"there is no argument `--{key}`{_closest_key(key, known, early)}"
    if found := re.search(r"unrecognized arguments: (\S+)", message):
        return about_word(found[1], known)
    if found := re.search(r"[Oo]ption '([^'\n]+)' is not accepted|accept option '([^'\n]+)'", message):
        key = ".".join(part for part in (outer, found[1] or found[2]) if part)
        return f"there is no key `{key}`{_closest_key(key, known, early)}"
    if found := re.search(r"Expected a dot import path string: (\S+)", message):
        hint = "; leave out the space" if found[1] in (names := [*class_names]) else did_you_mean(found[1], names)
        return f'`{outer}`: there is no class "{found[1]}"{hint}'
    if outer in ("", "config") and (found := re.search(r"Path is not a file: '(.*)'", message)):  # it was one before
        return f"{found[1]}: it cannot be opened now"
    if found := re.search(r"the following arguments are required: (.*)", message):
        names = [f"--{outer}.{name}" if outer else name for name in found[1].split(", ")]
        if names == ["data"]:
            hint = "a module's own loaders are not used; put them into a LightningDataModule (docs/bring_your_own.md)"
            return f"missing: --data; {hint}"
        way_out = "" if outer else "; give a complete config, for example `--config configs/t2t.yaml`"
        return f"missing: {', '.join(names)}{way_out}"
    nested = re.search(r"Given value: NestedArg\(key='([^']*)', val='?(.*?)'?\)\s*$", message)
    if nested and "Problem with given class_path 'lightning.Lightning" in message:  # no class is known yet
        flag, what = f"--{outer}.{nested[1]}={nested[2]}", f"the class of `{outer}`"
        return f"`{flag}` must stand after what names {what}: put --config or --{outer} before it"
    if found := re.search(r"NestedArg\(key='([^']*[^\w.'][^']*)'", message):  # such as a key with a space
        key = f"{outer}.{found[1]}"
        return f"there is no key `{key}`{_closest_key(key, known, early)}"
    return _explain_value(message, outer) or re.sub(r"\s+", " ", message).strip()


def _explain_value(message: str, outer: str) -> str | None:
    if inner := re.findall(r'Parser key "([\w.]+)":\s+Expected a (.*?)\. Got value: (.*)', message):
        name, expected, value = inner[-1]
        key = name if name.startswith(outer) else f"{outer}.{name}"
        return _wrong_value(key, expected, value)
    heads = [*re.finditer(r'Parser key "([\w.]+)":\s+Does not .*\s+Subtypes: \[(.*)\]', message)]
    if len(heads) > 1 and (found := re.search(r"Given value: (.*)", message[heads[-1].end() :])):
        name = heads[-1][1]
        return _wrong_value(name if name.startswith(outer) else f"{outer}.{name}", heads[-1][2], found[1])
    if found := re.search(r"Subtypes: \[(.*)\](?s:.*)Given value: (.*)", message):
        value = _plain(found[2]).strip("'\" ")
        is_path = re.search(r"<class '\w+\.", found[1]) and all(part.isidentifier() for part in value.split("."))
        return not_allowed(value) if is_path and not may_import(value) else _wrong_value(outer, found[1], found[2])
    return None


def _closest_key(key: str, known: set[str], early: Mapping[str, str]) -> str:
    if key in known and key in early:
        return f" before its class: put it after {early[key]}"
    if key in known and key.startswith(("model.", "data.")):
        return f": other classes of `{key.split('.')[0]}` have it, but not the selected one"
    return suggest_argument(key, known)


def _wrong_value(key: str, expected: str, value: str) -> str:
    if why := import_problem(value.strip("'\"")):
        return f"`{key}`: {why}"
    choices = re.findall(r"'([^']*)'", expected.replace("<class 'NoneType'>", "")) if "Literal" in expected else []
    value = _plain(value)
    if choices:
        meant = f'; did you mean "{VALUES[value]}"?' if VALUES.get(value) in choices else did_you_mean(value, choices)
        return f'`{key}` must be one of {", ".join(choices)}, got "{value}"{meant}'
    kind = re.sub(r"<class '([\w.]+)'>", r"\1", expected).replace("typing.", "").replace("NoneType", "null")
    kind = re.sub(r"collections\.abc\.Sequence(\[(?:[^\[\]]|\[[^\]]*\])*\])?", "a list such as [3; 3]", kind)
    kind = kind.replace(", ", " or ").replace(";", ",")
    return f'`{key}` must be {kind}, got "{value}"'


def _plain(value: str) -> str:
    """Return a value as it was typed, where jsonargparse shows one of its own objects."""
    return re.sub(r"NestedArg\(key='[\w.]+', val='?(.*?)'?\)", r"\1", value)


def read_yaml(path: str | Path, flag: str = "--config") -> dict[str, Any]:
    """Read the file that ``flag`` names; unlike plain YAML, refuse a key that appears twice in a mapping."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"`{flag} {path}` cannot be read: {error}") from error
    content = parse_yaml(text, f"{flag} {path}")
    if not isinstance(content, dict):
        raise UsageError(f"`{flag} {path}` must contain keys and values, got {type(content).__name__}")
    return content


def read_yaml_text(path: str | Path) -> str:
    """Return the text of a YAML file; refuse one that is no text."""
    try:
        return Path(path).read_text()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not YAML: {error}") from error


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML in bounded time; refuse tags, deep nesting, and aliases that multiply."""
    return copy.deepcopy(_parsed(text, where))  # whoever asks may change it


@lru_cache(64)  # a command reads its file several times, and strict reading is slow
def _parsed(text: str, where: str) -> Any:
    depths = accumulate({"[": 1, "{": 1, "]": -1, "}": -1}.get(letter, 0) for letter in text)
    if max(depths, default=0) > DEPTH:  # parsing time grows with the square of the depth
        raise UsageError(f"`{where}`: values are nested too deeply")
    try:
        loader = _UniqueKeys(text)
        try:
            node = loader.get_single_node()
            if node is not None and _count(node, {}) > NODES:
                raise UsageError(f"`{where}`: its aliases expand to more than {NODES:,} values; write them out")
            return loader.construct_document(node) if node is not None else None
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        problem = problem.replace("could not determine a constructor for the tag", "tags are not supported, got")
        raise UsageError(f"`{where}`{line}: {problem}") from error
    except RecursionError as error:
        raise UsageError(f"`{where}`: values are nested too deeply") from error


def _count(node: yaml.Node, known: dict[int, int]) -> int:
    """Return the number of values in a node with its aliases expanded; above the limit for a node within itself."""
    if id(node) not in known:
        known[id(node)] = NODES + 1  # while it is counted: a node that contains itself expands forever
        parts = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else []
        parts = node.value if isinstance(node, yaml.SequenceNode) else parts
        known[id(node)] = min(1 + sum(_count(part, known) for part in parts), NODES + 1)
    return known[id(node)]


def parse_own(text: str) -> Any:
    """Return the content of YAML that vitlab has written: by libyaml, in a tenth of :func:`parse_yaml`'s time."""
    return yaml.load(text, Loader=yaml.CSafeLoader)


def yaml_text(content: Any) -> str:
    """Return values as YAML in which jsonargparse finds them again: for it, an unquoted 1e3 is a number.

    Example:
        >>> print(yaml_text({"names": ["1e3", "cat"], "lr": 1e-3}), end="")
        names:
        - '1e3'
        - cat
        lr: 0.001
    """
    return yaml.dump(content, Dumper=_Writer, sort_keys=False)


class _Writer(yaml.SafeDumper):
    pass


_Writer.add_multi_representer(Enum, lambda writer, value: writer.represent_data(value.value))  # in defaults
_Writer.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$"), [*"-+0123456789"]
)


class _UniqueKeys(yaml.SafeLoader):
    """A strict reader, for which a date such as 2026-11-23 is text, as it is for jsonargparse."""

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in kinds if tag != "tag:yaml.org,2002:timestamp"]
        for first, kinds in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue  # keys written here override merged ones
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
            if isinstance(key, str) and key != key.strip():
                problem = f"the key `{key}` begins or ends with a space"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            if not isinstance(key_node, yaml.ScalarNode):  # such as {{ lr }}, a gap that a template leaves
                problem = f"a key must be a word, got {key}"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            if found := seen.get(key) or seen.get(key_node.value):  # 1 and "1" name one level of an axis
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key `{key}` appears twice, in lines {found} and {line}", key_node.start_mark
                )
            seen |= {key: line, key_node.value: line}
        return super().construct_mapping(node, deep)
