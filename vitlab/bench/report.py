"""Results as Markdown."""

from collections.abc import Iterator, Sequence
from typing import Any


def table(rows: Sequence[dict[str, Any]], columns: dict[str, str]) -> str:
    """Return rows as a Markdown table.

    Args:
        rows: What was measured.
        columns: Heading of each column and what is in it, a format string with the keys of a row.
    """
    lines = [list(columns), ["---"] * len(columns)]
    lines += [[_cell(text, row) for text in columns.values()] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def machine_line(facts: dict[str, Any]) -> str:
    """Return the machine in one line."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    load = ", ".join(f"{value:.1f}" for value in facts["load"])
    return (
        f"{facts['device']}; {facts['cpu']} ({', '.join(facts['flags'])}), {facts['cores']} cores, "
        f"{facts['threads']} threads, load {load}; {versions}; commit {facts['commit']}"
    )


def changes(rows: Sequence[dict[str, Any]], before: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a sentence for each ratio outside the interval that a saved run gives it."""
    keys = ("model", "mode", "dtype", "batch", "contender", "base")
    old = {tuple(row.get(key) for key in keys): row for row in before}
    for row in rows:
        known = old.get(tuple(row.get(key) for key in keys))
        if known and not known["interval"][0] <= row["ratio"] <= known["interval"][1]:
            low, high = known["interval"]
            name = " ".join(str(row[key]) for key in keys[:5])
            yield f"{name}: {row['ratio']:.2f}, it was {known['ratio']:.2f} [{low:.2f}, {high:.2f}]"


def _cell(text: str, row: dict[str, Any]) -> str:
    try:
        return text.format(**row)
    except (KeyError, TypeError, ValueError):  # not measured for this row
        return "-"
