"""The analyses by name: an :class:`Analysis` stands beside each function, here or in a file of the user's."""

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from vitlab.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from io import StringIO

    import pandas as pd

    from vitlab.analysis.subject import Finding, Subject

Tables: TypeAlias = "dict[tuple[str, int], pd.DataFrame]"  # of each arm and seed
F = TypeVar("F", bound=Callable[..., Any])
Rows = list[dict[str, Any]]
Pair = tuple[int, int]  # along the height and the width
HERE = Path(__file__).parent
NAMES = ("class", "label", "target", "prediction")  # columns of names that a data set gives, such as 01 or None
ORDER = (  # in which they are read; others follow by name
    *("attention", "heads", "rollout", "attribution", "faithfulness", "sanity", "distance", "entropy"),
    *("position", "displacement", "scramble", "scramble_image", "shift", "resolution", "probe", "segmentation"),
    *("fewshot", "knn", "pca", "reconstruction", "cka", "filters", "cost", "token_layers", "splits"),
    *("errors", "labels", "confusion", "calibration"),
)
MAPS = (  # maps that `attribution` draws beside those of other analyses, see METHODS beside it
    *("gradientrollout", "gradientxattention", "lrp", "gradcam", "smoothgrad", "integratedgradients"),
    *("gradientshap", "occlusion"),
)


@dataclass(frozen=True)
class Drawing:
    """A figure to draw: ``paint`` receives its axes in row-major order; ``data`` are the numbers in it."""

    title: str
    paint: Callable[..., None]
    rows: int
    columns: int
    height: float  # inches below the title
    data: Rows


def each_line(curve: "Curve", rows: Rows) -> list[tuple[str, Rows]]:
    """Return title and rows of a panel for each measure and line."""
    parts = []
    for measure in curve.measures:
        for line in dict.fromkeys(row["line"] for row in rows):
            mine = [row for row in rows if (row["measure"], row["line"]) == (measure, line)]
            values = line.split(", ", len(curve.lines) - 1) if line else []
            parts.append(("\n".join(map(": ".join, zip(curve.lines, values, strict=False))), mine))
    return parts


@dataclass(frozen=True, kw_only=True)
class Curve:
    """How the tables of several runs are read together, as the report of an ablation does: in the mean over seeds.

    Args:
        measures: The columns that are averaged, each with the name of its axis.
        x: The column of the horizontal axis; "" for single numbers, which are a table alone.
        lines: Columns with one curve for each value.
        words: What is measured, for the report.
        x_label: The name of the horizontal axis; default: ``x``.
        log2: Whether the horizontal axis is logarithmic.
        summary: Makes the table with these columns from that of a run, where it has others.
        older: Makes a table of an earlier vitlab one of today; None leaves it out.
        caution: Returns a caveat about such tables; "" for none.
        panels: Returns title and rows of each panel of the figure.
        drawing: A second figure, given the tables of each arm.

    Example:
        >>> Curve(x="layer", measures={"norm": "norm of the tokens"}).lines
        ()
    """

    measures: Mapping[str, str]
    x: str = ""
    lines: tuple[str, ...] = ()
    words: str = ""
    x_label: str = ""
    log2: bool = False
    summary: "Callable[[pd.DataFrame], pd.DataFrame]" = lambda table: table
    older: "Callable[[pd.DataFrame], pd.DataFrame | None]" = lambda table: table
    caution: Callable[[Tables], str] = lambda tables: ""
    panels: "Callable[[Curve, Rows], list[tuple[str, Rows]]]" = each_line
    drawing: "Callable[[dict[str, list[pd.DataFrame]]], Drawing] | None" = None


@dataclass
class Analysis:
    """An analysis: what it measures and how to read it. As a decorator, it makes a function known as an analysis.

    ``vitlab analyze``, an ablation's ``analyses``, its report and ``vitlab look`` then find it by name: those of vitlab
    at once, those of your own file after it was imported (``--trust_imports my_analyses``).

    Args:
        reading: How to read the figure.
        limits: What it does not show.
        curve: How the report of an ablation averages its tables; None leaves it out there.
        metrics: The numbers that an ablation may name as metrics, such as ``resolution/acc1@12``, without ``NAME/``.
        name: Its name; default: the function's, without ``analyze_``.
        metric_names: The names of those numbers, with ``*`` for what depends on network and images, such as ``acc1@*``:
            others are refused before a cell is trained. None given, every name is taken.
        numbers: The whole numbers that may stand for that ``*`` after ``@``, given height and width of the images, rows
            and columns of the token grid, and pixels from one token to the next; None takes all.

    Example:
        >>> @Analysis(reading="The length of the class token.", limits="What it holds.")
        ... def analyze_class_token(subject: "Subject") -> "Finding": ...
        >>> ANALYSES["class_token"].limits
        'What it holds.'
    """

    reading: str
    limits: str
    curve: Curve | None = None
    metrics: "Callable[[pd.DataFrame], Mapping[str, float]] | None" = None
    name: str = ""
    metric_names: tuple[str, ...] = ()
    numbers: Callable[[Pair, Pair, Pair], list[int]] | None = None
    function: "Callable[[Subject], Finding]" = field(init=False, repr=False)

    def __call__(self, function: F) -> F:
        """Make a function known as this analysis.

        Raises:
            ValueError: Its name is that of another analysis, or cannot be the name of a file.
        """
        self.function = function
        self.name = self.name or function.__name__.removeprefix("analyze_")
        ANALYSES.add(self)
        return function

    def measure(self, subject: "Subject") -> "Finding":
        """Return what it finds."""
        return self.function(subject)

    def read(self, file: "Path | StringIO") -> "pd.DataFrame":
        """Return the table of a run from its csv. Names stay as they are written: a class may be 01, 1.50 or None.

        Example:
            >>> from io import StringIO
            >>> ANALYSES["confusion"].read(StringIO("class,recall\\n01,0.9\\n1,0.1\\nNA,1\\n"))["class"].tolist()
            ['01', '1', 'NA']
        """
        import pandas as pd

        lines = self.curve.lines if self.curve else ()
        names = dict.fromkeys((*NAMES, *lines), str)
        table = pd.read_csv(file, dtype=names, keep_default_na=False, na_values=[""])
        numbered = [name for name in lines if name in table and name not in NAMES and _are_numbers(table[name])]
        return table.assign(**{name: pd.to_numeric(table[name]) for name in numbered})


class Catalogue(Mapping[str, Analysis]):
    """All analyses by name. Names and limits of vitlab's own are read from their source, which imports nothing.

    >>> list(ANALYSES)[:2], ANALYSES.limits()["errors"]
    (['attention', 'heads'], 'Typical behavior: these images were selected for being wrong.')
    """

    def __init__(self) -> None:
        self._known: dict[str, Analysis] = {}

    @cached_property
    def _shipped(self) -> dict[str, tuple[str, str]]:
        """Module and limits of the analyses of vitlab, in the order of reading."""
        found: dict[str, tuple[str, str]] = {}
        for path in HERE.rglob("*.py"):
            module = ".".join((__package__, *path.relative_to(HERE).with_suffix("").parts))
            found |= {name: (module, limits) for name, limits in _written_in(path.read_text())}
        places = {name: place for place, name in enumerate(ORDER)}
        return {name: found[name] for name in sorted(found, key=lambda name: (places.get(name, len(places)), name))}

    def add(self, analysis: Analysis) -> None:
        """Make an analysis known; one of the same function replaces it, as in a notebook."""
        name, module = analysis.name, analysis.function.__module__
        if not re.fullmatch(r"[a-z]\w*", name) or name == "all":
            raise ValueError(
                f"`name` of an analysis must be lower-case letters, digits and _, and not all, got {name!r}"
            )
        other = self.module_of(name)
        if other not in ("", module):
            raise ValueError(f"{other} already has an analysis called {name}: give that of {module} another name")
        self._known[name] = analysis

    def module_of(self, name: str) -> str:
        """Return the module of an analysis, which is not imported for it; empty if there is no such analysis."""
        return self._known[name].function.__module__ if name in self._known else self._shipped.get(name, ("",))[0]

    def __getitem__(self, name: str) -> Analysis:
        if name not in self._known and name in self._shipped:
            import_module(self._shipped[name][0])
        return self._known[name]

    def __contains__(self, name: object) -> bool:
        return name in self._known or name in self._shipped

    def __iter__(self) -> Iterator[str]:
        return iter([*self._shipped, *(name for name in self._known if name not in self._shipped)])

    def __len__(self) -> int:
        return len({*self._shipped, *self._known})

    def limits(self) -> dict[str, str]:
        """Return what each analysis does not show."""
        return {name: self._known[name].limits if name in self._known else self._shipped[name][1] for name in self}


def _are_numbers(column: "pd.Series[str]") -> bool:
    """Return whether each text is a number as a table writes it, which 01 is not."""
    try:
        return all(f"{float(text):.6g}" == text and isfinite(float(text)) for text in column)
    except ValueError:
        return False


def _written_in(text: str) -> Iterator[tuple[str, str]]:
    """Yield name and limits of each analysis in a source."""
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    for node in functions:
        for call in node.decorator_list:
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "Analysis":
                said = {word.arg: word.value for word in call.keywords if word.arg in ("name", "limits")}
                words = {arg: ast.literal_eval(value) for arg, value in said.items()}
                yield words.get("name") or node.name.removeprefix("analyze_"), words["limits"]


ANALYSES = Catalogue()


def instead_of(name: str) -> str:
    """Return a hint on which analysis is meant by an unknown name; empty if nothing is near.

    Example:
        >>> instead_of("Grad-CAM"), instead_of("distnce")
        ('; it is a map of "attribution"', '; did you mean "distance"?')
    """
    is_map = re.sub(r"[-_ ]", "", name).lower() in MAPS
    return '; it is a map of "attribution"' if is_map else did_you_mean(name, ANALYSES)


def names_of(text: str) -> list[str]:
    """Return the analyses in ``NAME[,NAME...]``, or all of them for ``all``.

    Example:
        >>> names_of("attention,rollout")
        ['attention', 'rollout']
    """
    if text == "all":
        return list(ANALYSES)
    names = text.split(",")
    for name in names:
        if name not in ANALYSES:
            hint = instead_of(name) or f"; choose from all, {', '.join(ANALYSES)}"
            raise UsageError(f'no analysis called "{name}"{hint}')
    return names
