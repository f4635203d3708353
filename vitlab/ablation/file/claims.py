"""Claims: statements that an ablation supports or refutes.

``A > B``, ``A ~ B within M``, ``gap(A, B | s) < gap(A, B | t)`` or ``>``, each optionally with ``on METRIC``,
``| axis=level`` and ``over AXIS, AXIS``: the mean over these axes. A and B are levels of one axis; B may be a number.
"""

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vitlab.ablation.file.schema import File
from vitlab.errors import did_you_mean

SIDE = r"(?:[\w.-]+=)?[\w.-]+"
CONDITION = r"[\w.-]+=[\w.-]+"
COMPARISON = re.compile(rf"(?P<a>{SIDE})\s*(?P<sign>[>~])\s*(?P<b>{SIDE})(?:\s+within\s+(?P<margin>[\d.eE-]+))?")
GAP = re.compile(
    rf"gap\(\s*(?P<a>{SIDE})\s*,\s*(?P<b>{SIDE})\s*\|\s*(?P<s>{CONDITION})\s*\)\s*(?P<sign>[<>])\s*"
    rf"gap\(\s*(?P<a2>{SIDE})\s*,\s*(?P<b2>{SIDE})\s*\|\s*(?P<t>{CONDITION})\s*\)"
)
FORMS = "A > B, A ~ B within M, gap(A, B | s) < gap(A, B | t), each with `on METRIC`, `| axis=level`, `over AXIS`"
WORD = r"(?<![\s,<>~])\s+"  # before a word of the claim; after a sign or a comma, the same word is a level
ON = WORD + r"on\s+(?!(?:within|over)\b)([^\s|]\S*)"
OVER = WORD + r"over\s+(?!within\b)([\w.-]+(?:\s*,\s*[\w.-]+)*)"


@dataclass(frozen=True)
class Claim:
    """A parsed claim."""

    text: str
    axis: str
    a: str
    b: str | float
    sign: str  # > or ~, or gap: the difference of a and b under `first` is smaller or larger than under `second`
    margin: float | None
    metric: str | None  # None: the primary one
    where: Mapping[str, str]  # axis: level; other axes give one verdict per level
    first: str = ""  # gap: levels of `gap_axis` in the order of the text; shown is the first gap minus the second
    second: str = ""
    gap_axis: str = ""
    is_larger: bool = False  # gap: whether the first is claimed to be the larger one
    over: tuple[str, ...] = ()  # axes: one verdict on the mean over their levels

    def settings(self, axes: Mapping[str, Mapping[str, Any]]) -> list[dict[str, str]]:
        """Return every combination of the other axes' levels that has a verdict of its own."""
        others = {n: list(levels) for n, levels in axes.items() if n not in (self.axis, self.gap_axis, *self.over)}
        for name, level in self.where.items():
            others[name] = [level]
        return _combinations(others)

    def averaged(self, axes: Mapping[str, Mapping[str, Any]]) -> list[dict[str, str]]:
        """Return every combination of levels that one verdict is the mean over; an empty one without ``over``."""
        return _combinations({name: list(axes[name]) for name in self.over})


def _combinations(axes: Mapping[str, list[str]]) -> list[dict[str, str]]:
    return [dict(zip(axes, levels, strict=True)) for levels in itertools.product(*axes.values())]


def parse_claim(file: File, index: int, text: Any, axes: Mapping[str, Mapping[str, Any]]) -> Claim:
    """Parse a claim; refuse unknown axes and levels."""
    place = f"claims/{index}"
    if not isinstance(text, str):
        raise file.mistake(place, f"a claim is one of {FORMS}, got {text!r}")
    body, metric = _cut(text, ON)
    body, named = _cut(body, OVER)
    over = tuple(re.split(r"\s*,\s*", named)) if named else ()
    if unknown := [name for name in over if name not in axes]:
        hint = did_you_mean(unknown[0], axes) or f"; there are {', '.join(axes)}"
        raise file.mistake(place, f"a claim goes over `{unknown[0]}`, which is not an axis{hint}")
    outside = re.sub(r"\([^)]*\)", lambda found: "." * len(found[0]), body)
    cut = outside.find("|")
    condition = body[cut + 1 :] if cut >= 0 else ""
    body = body[:cut] if cut >= 0 else body
    pairs = [_condition(file, place, part.strip(), axes) for part in condition.split(",") if part.strip()]
    if found := GAP.fullmatch(body.strip()):
        claim = _gap(file, place, text, found, metric, dict(pairs), axes)
    elif found := COMPARISON.fullmatch(body.strip()):
        claim = _comparison(file, place, text, found, metric, dict(pairs), axes)
    else:
        raise file.mistake(place, f"cannot read the claim {text!r}; a claim is one of {FORMS}")
    sets = [axis for axis in (claim.axis, claim.gap_axis, *over, *(axis for axis, _ in pairs)) if axis]
    if doubles := [axis for axis in sets if sets.count(axis) > 1]:
        raise file.mistake(place, f"the claim sets `{doubles[0]}` twice, got {text!r}")
    if claim.a == claim.b or (claim.sign == "gap" and claim.first == claim.second):
        raise file.mistake(place, f"the claim compares arms with themselves, got {text!r}")
    return replace(claim, over=over)


def _comparison(file: File, place: str, text: str, found: Any, metric: Any, where: Any, axes: Any) -> Claim:
    axis, a = _level(file, place, found["a"], axes)
    number = _number(found["b"])
    is_level = found["b"] in axes[axis] or not math.isfinite(number)
    b = _same_axis(file, place, axis, found["b"], axes) if is_level else number
    if (found["sign"] == "~") != bool(found["margin"]):
        raise file.mistake(place, f"`~` needs `within M`, and `>` must not have it, got {text!r}")
    margin = _number(found["margin"]) if found["margin"] else None
    if margin is not None and not margin > 0:
        raise file.mistake(place, f"the margin must be a number above 0, got {found['margin']!r}")
    return Claim(text, axis, a, b, found["sign"], margin, metric, where)


def _number(text: str) -> float:
    """Return a number; NaN for anything else."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _gap(file: File, place: str, text: str, found: Any, metric: Any, where: Any, axes: Any) -> Claim:
    axis, a = _level(file, place, found["a"], axes)
    b = _same_axis(file, place, axis, found["b"], axes)
    if (found["a2"], found["b2"]) != (found["a"], found["b"]):
        raise file.mistake(place, f"both gaps must be between the same two levels, got {text!r}")
    (axis_s, s), (axis_t, t) = (_condition(file, place, found[key], axes) for key in "st")
    if axis_s != axis_t or axis_s == axis:
        raise file.mistake(place, f"the gaps must differ in the level of one other axis, got {text!r}")
    return Claim(text, axis, a, b, "gap", None, metric, where, s, t, axis_s, found["sign"] == ">")


def _cut(text: str, pattern: str) -> tuple[str, str | None]:
    found = re.search(pattern, text)
    return (text[: found.start()] + text[found.end() :], found[1]) if found else (text, None)


def _condition(file: File, place: str, text: str, axes: Mapping[str, Mapping[str, Any]]) -> tuple[str, str]:
    if not re.fullmatch(CONDITION, text):
        raise file.mistake(place, f"expected axis=level after `|`, got {text!r}")
    return _level(file, place, text, axes)


def _same_axis(file: File, place: str, axis: str, text: str, axes: Mapping[str, Mapping[str, Any]]) -> str:
    other, level = _level(file, place, text if "=" in text else f"{axis}={text}", axes)
    if other != axis:
        raise file.mistake(place, f"a claim compares levels of one axis, and `{text}` is not of `{axis}`")
    return level


def _level(file: File, place: str, text: str, axes: Mapping[str, Mapping[str, Any]]) -> tuple[str, str]:
    axis, _, level = text.rpartition("=")
    if axis and axis not in axes:
        raise file.mistake(place, f"a claim names `{axis}`, which is not an axis{did_you_mean(axis, axes)}")
    found = [name for name in ([axis] if axis else axes) if level in axes[name]]
    if not found:
        known = [name for levels in axes.values() for name in levels]
        hint = did_you_mean(level, known) or f"; there are {', '.join(known)}"
        where = f" of `{axis}`" if axis else ""
        raise file.mistake(place, f"a claim names `{level}`, which is not a level{where}{hint}")
    if len(found) > 1:
        raise file.mistake(place, f"`{level}` is a level of {' and '.join(found)}: write {found[0]}={level}")
    return found[0], level
