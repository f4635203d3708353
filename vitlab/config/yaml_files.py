"""Read and write YAML: what users write strictly, what vitlab has written fast."""

import copy
import re
from enum import Enum
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

import yaml

from vitlab.errors import UsageError, one_line

NODES = 100_000  # values in one file
DEPTH = 200  # values within values
_FLOW = 500  # brackets of a configuration that is parsed by the fast parser
_EXPONENT = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$")  # YAML's numbers need a dot and a sign
_ALIGN = "indent it like its neighbors, with spaces"
_WORDS = {  # what PyYAML says, and what a reader can do; `opened` is the line where the part begins
    r"found character '\\t'.*": f"it has a tab where only spaces may stand: {_ALIGN}",
    r"expected .*, but found '(<block .*|\?|-)'": f"its indentation fits no line before it: {_ALIGN}",
    r"mapping values .*": f"the line before lacks `: ` after its key, or this one is indented too far: {_ALIGN}",
    r"expected ',' or .*": "a bracket that opens in line {opened} is not closed, or a comma is missing",
    r"found unexpected end of stream": "a quote that opens in line {opened} is not closed",
}


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
        raise UsageError(f"`{where}`{line}: {_problem(error)}") from error
    except RecursionError as error:
        raise UsageError(f"`{where}`: values are nested too deeply") from error


def _problem(error: yaml.YAMLError) -> str:
    """Return what is wrong, in words that say what to do where PyYAML's do not."""
    problem = " ".join(str(getattr(error, "problem", None) or error).split())
    mark = getattr(error, "problem_mark", None)
    if problem.startswith("mapping values") and mark and ": " in mark.buffer[mark.pointer - mark.column : mark.pointer]:
        return "it has `: ` twice: put quotes around the value"
    opened = mark.line + 1 if (mark := getattr(error, "context_mark", None)) else ""
    for pattern, words in _WORDS.items():
        if re.fullmatch(pattern, problem):
            return words.format(opened=opened)
    return problem.replace("could not determine a constructor for the tag", "tags are not supported, got")


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


def read_own(path: Path) -> dict[str, Any]:
    """Return the content of a YAML file of a run; the fast parser reads what cannot multiply.

    Raises:
        UsageError: It is no YAML, or not keys and values.
    """
    try:
        text = path.read_text()
        is_plain = "&" not in text and text.count("[") + text.count("{") <= _FLOW and yaml.__with_libyaml__
        content = parse_own(text) if is_plain else parse_yaml(text, str(path))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is damaged: {one_line(error)}") from error
    if not isinstance(content or {}, dict):
        raise UsageError(f"{path} is damaged: it must contain keys and values")
    return content or {}


def with_numbers(value: Any) -> Any:
    """Return what :func:`parse_yaml` has read as jsonargparse reads it: an unquoted 1e-6 is a number, in YAML a text.

    Example:
        >>> with_numbers({"eps": "1e-6", "betas": [0.9, "1.5e-1"], "name": "e1"})
        {'eps': 1e-06, 'betas': [0.9, 0.15], 'name': 'e1'}
    """
    if isinstance(value, dict):
        return {key: with_numbers(one) for key, one in value.items()}
    if isinstance(value, list):
        return [with_numbers(one) for one in value]
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


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
_Writer.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, [*"-+0123456789"])


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
