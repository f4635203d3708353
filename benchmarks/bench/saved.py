"""The speed table of benchmarks/README.md, from the saved runs under ``benchmarks/``."""

import json
from pathlib import Path
from typing import Any

from bench.pairs import compare
from vitlab.errors import UsageError
from vitlab.tables import table

FILES = ("cpu-fp32.json", "cpu-bf16.json")
_COLUMNS = {
    "network": "{model}",
    "dtype": "{dtype}",
    "against": "{against}",
    "forward": "{fwd}",
    "training step": "{train}",
    "memory": "{memory}",
}


def speed_table(folder: Path) -> str:
    """Return one row per network and precision: our speed and memory relative to the fastest of the others."""
    found, rows = _read(folder), speed_rows(folder)
    keys = dict.fromkeys((row["model"], row["dtype"]) for row in rows if row["contender"] != "vitlab")
    lines = [_line([row for row in rows if (row["model"], row["dtype"]) == key]) for key in keys]
    machine = found[0]["machine"]
    busy = " The machine was shared: trust the ratios, not absolute img/s." if any(row["noisy"] for row in rows) else ""
    commits = ", ".join(dict.fromkeys(result["machine"]["commit"] for result in found))
    note = (
        f"Our speed and memory relative to `against`: medians of rounds in which all took turns [95 % interval]; "
        f"{machine['threads']} threads of {machine['cpu']}, torch {machine['versions']['torch']}, commit {commits}."
    )
    return f"{table(lines, _COLUMNS)}\n\n{note}{busy}"


def speed_rows(folder: Path) -> list[dict[str, Any]]:
    """Return what was measured of each network, mode and contender, of which :func:`speed_table` shows the ratios."""
    rows = [row for result in _read(folder) for row in result["rows"] if row.get("table", "model") == "model"]
    if not rows or any("all_seconds" not in row for row in rows):  # older runs kept no times
        raise UsageError(f"`make benchmarks` must first measure {' and '.join(FILES)}, into {folder}")
    return rows


def _read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / name).read_text()) for name in FILES if (folder / name).is_file()]


def _line(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Return the cells of one network and precision, in each mode against the one of the others that we beat least."""
    line, bests, shares = {"model": rows[0]["model"], "dtype": rows[0]["dtype"]}, [], []
    for mode in ("fwd", "train"):
        own = {row["contender"]: row for row in rows if row["mode"] == mode and "compiled" not in row["contender"]}
        others = [name for name in own if name != "vitlab"]
        if "vitlab" not in own or not others:
            continue
        times = {name: row["all_seconds"] for name, row in own.items()}
        found = {name: compare({who: times[who] for who in ("vitlab", name)}, name)["vitlab"] for name in others}
        bests.append(min(others, key=lambda name: found[name]["ratio"]))
        line[mode] = "{ratio:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]".format(**found[bests[-1]])
        if all("memory" in own[name] for name in ("vitlab", bests[-1])):
            shares.append(own["vitlab"]["memory"] / own[bests[-1]]["memory"])
    line["against"] = " / ".join(dict.fromkeys(bests))
    if len(shares) == 2:
        line["memory"] = "{:.2f} / {:.2f}".format(*shares)
    return line
