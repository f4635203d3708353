"""Print the figures that `make faults` has collected; write them to the page that is named."""

import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
KILLS = ROOT / "benchmarks" / "faults-kills.json"  # which `make faults` adds to


def table(folder, kills=None):
    """Return the collected figures as a markdown table, with the kills of `make faults-quick` or all so far."""
    kills = kills or (quick if (quick := Path(folder) / "users").is_file() else KILLS)
    rows = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    for scenario, found in (json.loads(kills.read_text()) if kills.is_file() else {}).items():
        left = f"{len(found['dead'])} dead ends, {found['unusable']} unusable, {len(found['diverged'])} diverged"
        fault = f"{scenario}: {found['kills']} SIGKILLs from the first millisecond on, in {found['runs']} runs"
        rows.append({"fault": fault, "found": left, "must": "0, 0, 0"})
    lines = ["| fault | found | must be |", "|---|---|---|"]
    phases = [(row["fault"].partition(" hangs")[0], row["cells"]) for row in rows if "cells" in row]
    return "\n".join(lines + [f"| {r['fault']} | {r['found']} | {r['must']} |" for r in rows]) + "\n" + matrix(phases)


def matrix(phases):
    """Return what ended each phase and when, as a markdown table: a column for each signal and number of processes.

    Args:
        phases: Names of phases, and their cells: "SIGNAL, PROCESSES" and "CODE after SECONDS".
    """
    if not phases:
        return ""
    signals = list(dict.fromkeys(cell.partition(", ")[0] for _, cells in phases for cell in cells))
    lines = [f"| phase | processes | {' | '.join(signals)} |", f"|---|---|{'---|' * len(signals)}"]
    for phase, cells in phases:
        for ranks in dict.fromkeys(cell.partition(", ")[2] for cell in cells):
            ends = [cells.get(f"{sent}, {ranks}", "") for sent in signals]
            lines.append(f"| {phase} | {ranks} | {' | '.join(ends)} |")
    return "\n## The end of each phase\n\nExit code and seconds.\n\n" + "\n".join(lines) + "\n"


def main(folder, page=""):
    """Print the table, and write the page if asked to."""
    commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    text = table(folder)
    head = (
        "# What faults and hostile files did\n\n"
        f"Measured by `make faults` on {datetime.date.today()}, commit {commit.strip()}, "
        f"{os.cpu_count()} CPU cores, Python {platform.python_version()}. The tests are in "
        "`tests/faults/`; processes are real and are killed with signals.\n\n"
    )
    if page:
        Path(page).write_text(head + text)
    sys.stdout.write("\n" + text)


if __name__ == "__main__":
    main(*sys.argv[1:])
