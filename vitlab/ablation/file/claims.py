"""Claims: statements that an ablation supports or refutes.

``A > B``, ``A ~ B within M``, ``gap(A, B | s) < gap(A, B | t)`` or with ``>`` or ``~``, each optionally with
``on METRIC``, ``| axis=level`` and ``over AXIS, AXIS``: the mean over these axes. A and B are levels of one axis;
B may be a number.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vitlab.ablation.file.schema import File, meant
from vitlab.errors import UsageError
from vitlab.runs.records import bounds_of

SIDE = r"(?:[\w.-]+=)?[\w.-]+"
CONDITION = r"[\w.-]+=[\w.-]+"
WITHIN = r"(?:\s+within\s+(?P<margin>[\d.eE-]+))?"
COMPARISON = re.compile(rf"(?P<a>{SIDE})\s*(?P<sign>[>~])\s*(?P<b>{SIDE}){WITHIN}")
GAP = re.compile(
    rf"gap\(\s*(?P<a>{SIDE})\s*,\s*(?P<b>{SIDE})\s*\|\s*(?P<s>{CONDITION})\s*\)\s*(?P<sign>[<>~])\s*"
    rf"gap\(\s*(?P<a2>{SIDE})\s*,\s*(?P<b2>{SIDE})\s*\|\s*(?P<t>{CONDITION})\s*\){WITHIN}"
)
FORMS = (
    "A > B, A ~ B within M, gap(A, B | s) < gap(A, B | t), gap(...) ~ gap(...) within M, each with `on METRIC`, "
    "`| axis=level`, `over AXIS`"
)
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
    sign: str  # >, < or ~ between a and b, or between their difference under `first` and that under `second`
    margin: float | None
    metric: str | None = None  # None: the primary one
    where: Mapping[str, str] = field(default_factory=dict)  # axis: level; other axes give one verdict per level
    first: str = ""  # gap: levels of `gap_axis` in the order of the text; shown is the first gap minus the second
    second: str = ""
    gap_axis: str = ""  # empty unless it compares gaps
    over: tuple[str, ...] = ()  # axes: one verdict on the mean over their levels

    @property
    def is_gap(self) -> bool:
        """Whether it compares two gaps: the difference of a and b at two levels of ``gap_axis``."""
        return bool(self.gap_axis)

    @property
    def direction(self) -> int:
        """The sign of the differences that support it: -1 of ``<``, otherwise 1."""
        return -1 if self.sign == "<" else 1

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
    return _Reader(file, f"claims/{index}", text, axes).claim()


@dataclass(frozen=True)
class _Reader:
    """Reads a claim.

    Args:
        file: The file that it stands in.
        place: Its dotted place there.
        text: The claim; anything but a string is refused.
        axes: Of each axis, its levels.
    """

    file: File
    place: str
    text: Any
    axes: Mapping[str, Mapping[str, Any]]

    def claim(self) -> Claim:
        """Return the claim."""
        if not isinstance(self.text, str):
            raise self.mistake(f"a claim is one of {FORMS}, got {self.text!r}")
        body, metric = _cut(self.text, ON)
        body, named = _cut(body, OVER)
        over = tuple(re.split(r"\s*,\s*", named)) if named else ()
        if unknown := [name for name in over if name not in self.axes]:
            hint = meant(unknown[0], self.axes)
            raise self.mistake(f"a claim goes over `{unknown[0]}`, which is not an axis{hint}")
        outside = re.sub(r"\([^)]*\)", lambda found: "." * len(found[0]), body)
        cut = outside.find("|")
        condition = body[cut + 1 :] if cut >= 0 else ""
        body = body[:cut] if cut >= 0 else body
        pairs = [self.condition(part.strip()) for part in condition.split(",") if part.strip()]
        if found := GAP.fullmatch(body.strip()):
            claim = self.gap(found)
        elif found := COMPARISON.fullmatch(body.strip()):
            claim = self.comparison(found)
        else:
            raise self.mistake(f"cannot read the claim {self.text!r}; a claim is one of {FORMS}")
        sets = [axis for axis in (claim.axis, claim.gap_axis, *over, *(axis for axis, _ in pairs)) if axis]
        if doubles := [axis for axis in sets if sets.count(axis) > 1]:
            raise self.mistake(f"the claim sets `{doubles[0]}` twice, got {self.text!r}")
        if claim.a == claim.b or (claim.is_gap and claim.first == claim.second):
            raise self.mistake(f"the claim compares arms with themselves, got {self.text!r}")
        return replace(claim, metric=metric, where=dict(pairs), over=over)

    def comparison(self, found: re.Match[str]) -> Claim:
        """Return the claim of a match of :data:`COMPARISON`, without metric and conditions."""
        axis, a = self.level(found["a"])
        number = _number(found["b"])
        levels = self.axes[axis]
        is_level = found["b"] in levels or number in map(_number, levels) or not math.isfinite(number)
        b = self.level_of(axis, found["b"]) if is_level else number
        return Claim(self.text, axis, a, b, found["sign"], self.margin(found))

    def gap(self, found: re.Match[str]) -> Claim:
        """Return the claim of a match of :data:`GAP`, without metric and conditions."""
        axis, a = self.level(found["a"])
        b = self.level_of(axis, found["b"])
        if (found["a2"], found["b2"]) != (found["a"], found["b"]):
            raise self.mistake(f"both gaps must be between the same two levels, got {self.text!r}")
        (axis_s, s), (axis_t, t) = (self.condition(found[key]) for key in "st")
        if axis_s != axis_t or axis_s == axis:
            raise self.mistake(f"the gaps must differ in the level of one other axis, got {self.text!r}")
        return Claim(self.text, axis, a, b, found["sign"], self.margin(found), first=s, second=t, gap_axis=axis_s)

    def margin(self, found: re.Match[str]) -> float | None:
        """Return the margin of a claim with ``~``; None of another."""
        if (found["sign"] == "~") != bool(found["margin"]):
            raise self.mistake(f"`~` needs `within M`, and `<` and `>` must not have it, got {self.text!r}")
        margin = _number(found["margin"]) if found["margin"] else None
        if margin is not None and not margin > 0:
            raise self.mistake(f"the margin must be a number above 0, got {found['margin']!r}")
        return margin

    def condition(self, text: str) -> tuple[str, str]:
        """Return the axis and the level of ``axis=level``."""
        if not re.fullmatch(CONDITION, text):
            raise self.mistake(f"expected axis=level after `|`, got {text!r}")
        return self.level(text)

    def level_of(self, axis: str, text: str) -> str:
        """Return the level of an axis that a text names."""
        other, level = self.level(text if "=" in text else f"{axis}={text}")
        if other != axis:
            raise self.mistake(f"a claim compares levels of one axis, and `{text}` is not of `{axis}`")
        return level

    def level(self, text: str) -> tuple[str, str]:
        """Return the axis and the level that a text names, with its axis or alone."""
        axis, _, level = text.rpartition("=")
        if axis and axis not in self.axes:
            raise self.mistake(f"a claim names `{axis}`, which is not an axis{meant(axis, self.axes)}")
        found = [name for name in ([axis] if axis else self.axes) if level in self.axes[name]]
        if not found:
            known = [name for levels in self.axes.values() for name in levels]
            where = f" of `{axis}`" if axis else ""
            raise self.mistake(f"a claim names `{level}`, which is not a level{where}{meant(level, known)}")
        if len(found) > 1:
            raise self.mistake(f"`{level}` is a level of {' and '.join(found)}: write {found[0]}={level}")
        return found[0], level

    def mistake(self, text: str) -> UsageError:
        """Return a mistake in the claim, with its place."""
        return self.file.mistake(self.place, text)


def refuse_impossible(
    file: File, claims: Sequence[Claim], axes: Mapping[str, Mapping[str, Any]], primary: str, margin: float | None
) -> None:
    """Refuse numbers that a metric cannot have by its name, such as a level that the file lacks, or one in percent.

    Raises:
        UsageError: A number is outside the range of its metric, or a margin is as wide as this range.
    """
    for i, claim in enumerate(claims):
        metric, b = claim.metric or primary, claim.b
        if isinstance(b, float) and not bounds_of(metric)[0] <= b <= bounds_of(metric)[1]:
            levels = [*axes[claim.axis]]
            is_level = any(math.isfinite(_number(name)) for name in levels)
            way = f"; `{claim.axis}` has the levels {', '.join(levels)}" if is_level else _of_percent(metric, b)
            file.refuse(f"claims/{i}", f"{claim.text!r}: {_range(metric)}, and is never {b:g}{way}")
    margins = {f"claims/{i}": (claim.metric or primary, claim.margin) for i, claim in enumerate(claims)}
    for where, (metric, given) in ({"stats/margin": (primary, margin)} | margins).items():
        low, high = bounds_of(metric)
        if given and given >= high - low:
            way = _of_percent(metric, given)
            file.refuse(where, f"{_range(metric)}, so a margin must be below {high - low:g}, got {given:g}{way}")


def _range(metric: str) -> str:
    ends = zip(("from", "to"), bounds_of(metric), strict=True)
    return f"{metric} is a number {' '.join(f'{word} {end:g}' for word, end in ends if math.isfinite(end))}"


def _of_percent(metric: str, number: float) -> str:
    return f"; {number:g} % are {number / 100:g}" if bounds_of(metric) == (0, 1) and 1 < number <= 100 else ""


def _number(text: str) -> float:
    """Return a number; NaN for anything else."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _cut(text: str, pattern: str) -> tuple[str, str | None]:
    found = re.search(pattern, text)
    return (text[: found.start()] + text[found.end() :], found[1]) if found else (text, None)
