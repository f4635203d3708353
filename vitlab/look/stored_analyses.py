"""The stored analyses of runs: figures side by side, and of two runs the differences of their numbers."""

import base64
import gzip
import io
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pandas as pd
from PIL import Image

from vitlab.analysis import ANALYSES, Analysis
from vitlab.look.analysis_page import data_url
from vitlab.look.charts import pair_chart
from vitlab.runs.directory import RunDir

FIGURES, DRAWINGS, TABLES = 2_000_000, 600_000, 900_000  # bytes of all PNG, compressed SVG and csv files of a page
SHOWN = 8  # differences of an analysis on the page; its csv has all
NO_KEYS = {"run", "n", "images", "draws", "low", "high", "metric"}  # how much was measured and its name, not what


def findings_of(runs: dict[str, RunDir]) -> list[dict[str, Any]]:
    """Return the analyses that any of the runs has noted, each with what every run found.

    Args:
        runs: Run directories by name.

    Example:
        >>> findings_of({"first": RunDir("runs/not-analyzed")})
        []
    """
    names = [name for name in ANALYSES if any(run.note(name)[0] for run in runs.values())]
    left, room, rooms = len(names) * len(runs), FIGURES, {"table": TABLES, "svg": DRAWINGS}
    found = []
    for name in names:
        own = ANALYSES[name]
        one: dict[str, Any] = {"name": name, "how": own.reading, "lacks": own.limits, "runs": [], "files": {}}
        for run_name, run in runs.items():
            shown = _of_run(run_name, run, name, room // max(1, left))
            room, left = room - shown.pop("size"), left - 1
            for kind, free in rooms.items():
                if (text := shown[kind]) is not None and len(text) <= free:
                    one["files"].setdefault(run_name, {})[kind], rooms[kind] = text, free - len(text)
            one["runs"].append(shown)
        one["differences"] = _differences(own, *one["runs"]) if len(runs) == 2 else None
        found.append(one)
    return found


def _of_run(run_name: str, run: RunDir, name: str, most: int) -> dict[str, Any]:
    """Return note, figure and table of one analysis of one run, unless they are of other weights."""
    (note, now), folder = run.note(name), run.path / "analysis"
    one: dict[str, Any] = {"run": run_name, "src": "", "size": 0, "table": None, "svg": None}
    if not note:
        return {**one, "note": f"Not measured: `vitlab analyze {name} {run.typed}` does it"}
    if "note" not in note:
        return {**one, "note": f"Not done: {note.get('not_done', '')}"}
    if now.is_stale:
        return {**one, "note": f"Left out: {now.text}"}
    one["note"] = note["note"] + (f"; {now.text}" if now.text and now.kind != "gone" else "")
    table, svg, png = (folder / f"{name}.{kind}" for kind in ("csv", "svg", "png"))
    one["table"] = table.read_text() if table.is_file() else None
    if svg.is_file():
        one["svg"] = base64.b64encode(gzip.compress(svg.read_bytes(), mtime=0)).decode()
    if png.is_file():
        content = thinned(png, most)
        one["note"] += f"; drawn smaller than {png}" if len(content) < png.stat().st_size else ""
        one |= {"src": data_url(content), "size": len(content)}
    return one


def thinned(png: Path, most: int) -> bytes:
    """Return a PNG image in at most so many bytes: as it is, or with 64 colors and fewer pixels, down to 320 across.

    Example:
        >>> Image.effect_noise((900, 900), 90).save("noise.png")
        >>> len(thinned(Path("noise.png"), 100_000)) <= 100_000 < Path("noise.png").stat().st_size
        True
    """
    content = png.read_bytes()
    if len(content) <= most:
        return content
    image = Image.open(io.BytesIO(content)).convert("RGB")
    width, smallest = image.width, min(320, image.width)
    while True:
        small = image.resize((width, max(1, image.height * width // image.width)), Image.Resampling.LANCZOS)
        small.quantize(64).save(file := io.BytesIO(), "PNG", optimize=True)
        if len(file.getvalue()) <= most or width == smallest:
            return file.getvalue()
        width = max(smallest, width * 4 // 5)


def _differences(own: Analysis, a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any] | None:
    """Return the differences of two runs' tables for the page; None if the tables have no common rows."""
    if a["table"] is None or b["table"] is None:
        return None
    first, second = (own.read(io.StringIO(one["table"])) for one in (a, b))
    found = contrast_tables(first, second, (*own.curve.lines, own.curve.x) if own.curve else ())
    if not len(found):
        return None
    names = a["run"], b["run"]
    first = found[found["measure"] == found["measure"].iloc[0]]  # the others stand in the csv
    by_size = first.reindex(first["difference"].abs().sort_values(ascending=False).index)
    rows = by_size.head(SHOWN).to_dict("records")
    for row in rows:
        row["higher"] = names[int(row["difference"] > 0)] if row["difference"] else "neither"
    columns = {"first": names[0], "second": names[1]}
    columns |= {f"{key}_{end}": f"{name} {end}" for key, name in tuple(columns.items()) for end in ("low", "high")}
    text = found.rename(columns=columns).to_csv(index=False, float_format="%.6g")
    return {
        "names": names, "rows": rows, "count": len(first), "apart": int(first["apart"].sum()), "csv": text,
        "others": [name for name in found["measure"].unique() if name != rows[0]["measure"]],
        "chart": pair_chart(str(rows[0]["measure"]), rows, names),
        "has_intervals": bool(found["first_low"].notna().any()),
    }  # fmt: skip


def contrast_tables(first: pd.DataFrame, second: pd.DataFrame, places: Collection[str] = ()) -> pd.DataFrame:
    """Return where two tables of one analysis measure the same: both values with intervals, and second minus first.

    What is measured are the columns with an interval (``_low``, ``_high``), or ``value``; what stands before the first
    of them says where, but for what changes a measure in neither table. Rows without a number in both are left out.
    Two intervals are ``apart`` if they do not overlap.

    Args:
        first: The table of one run.
        second: That of the other.
        places: Columns that say where although they hold numbers with decimals, as the lines of a curve may.

    Example:
        >>> a = pd.DataFrame({"head": [0, 1], "distance": [1.5, 2.0], "distance_low": [1.4, 1.8]})
        >>> a["distance_high"] = 2 * a["distance"] - a["distance_low"]
        >>> b = a.assign(distance=[1.0, 2.5], distance_low=[0.9, 2.1], distance_high=[1.1, 2.9])
        >>> contrast_tables(a, b)[["where", "difference", "apart"]].values.tolist()
        [['head 0', -0.5, True], ['head 1', 0.5, False]]
    """
    common = [name for name in first if name in second]
    measures = [name for name in common if f"{name}_low" in common] or [name for name in common if name == "value"]
    before = common[: common.index(measures[0])] if measures else []
    keys = [name for name in before if all(_is_key(name, table, places) for table in (first, second))]
    rows: list[dict[str, Any]] = []
    if keys:
        sides = [table.assign(**{key: table[key].map(str) for key in keys}) for table in (first, second)]
        both = sides[0].drop_duplicates(keys).merge(sides[1].drop_duplicates(keys), on=keys)
        for measure in measures:
            which = _varying(both, keys, measure)
            measured = both.dropna(subset=[f"{measure}_x", f"{measure}_y"])
            for row in (measured.drop_duplicates(which) if which else measured.head(1)).to_dict("records"):
                rows.append({"where": _where(row, which), "measure": measure, **_values(row, measure)})
    columns = ["where", "measure", "first", "first_low", "first_high", "second", "second_low", "second_high"]
    return pd.DataFrame(rows, columns=[*columns, "difference", "apart"])


def _varying(both: pd.DataFrame, keys: list[str], measure: str) -> list[str]:
    """Return the keys without those of several values along which a measure is the same, in both tables."""
    values = [f"{measure}{suffix}{side}" for suffix in ("", "_low", "_high") for side in ("_x", "_y")]
    values = [name for name in values if name in both]
    kept = list(keys)
    for key in keys:
        rest = [name for name in kept if name != key]
        others = both.drop_duplicates(rest) if rest else both.head(1)
        if len(others) < len(both) and len(both.drop_duplicates([*rest, *values])) == len(others):
            kept = rest
    return kept


def _is_key(name: str, table: pd.DataFrame, places: Collection[str]) -> bool:
    if name == "images":
        return not pd.api.types.is_numeric_dtype(table[name])
    if name in NO_KEYS:
        return False
    return name == "share" or name in places or not pd.api.types.is_float_dtype(table[name])


def _where(row: dict[str, Any], keys: list[str]) -> str:
    named = [f"{key.replace('_', ' ')} {row[key]}" if _is_number(row[key]) else row[key] for key in keys]
    return ", ".join(named) or "everywhere"


def _is_number(text: str) -> bool:
    return text.lstrip("-").replace(".", "", 1).isdigit()


def _values(row: dict[str, Any], measure: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, suffix in (("first", "_x"), ("second", "_y")):
        found[name] = row[f"{measure}{suffix}"]
        found |= {f"{name}_{end}": row.get(f"{measure}_{end}{suffix}", float("nan")) for end in ("low", "high")}
    apart = found["first_high"] < found["second_low"] or found["second_high"] < found["first_low"]
    return {**found, "difference": found["second"] - found["first"], "apart": bool(apart)}
