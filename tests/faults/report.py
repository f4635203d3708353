"""Print the figures that `make faults` has collected; write them to the page that is named."""

import datetime
import json
import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
KILLS = ROOT / "benchmarks" / "faults-kills.json"  # which `make faults` adds to
NTH = """
## The n-th call fails

One call of a command to the file system fails with EIO, ENOSPC, ESTALE or EACCES, and the command is repeated.
Right is an exit 0 with all results saved, or an exit 1 or 2, no traceback, and a line that names the file, or a
folder that it is in; then the repetition ends with exit 0 and the numbers of a run that nothing disturbed. A site
is a call from one place of the code, for one file up to its numbers. Patched are Python's open, os.open, os.fsync,
os.replace, os.rename, os.link, os.unlink, os.utime, os.stat, os.mkdir, os.listdir, os.scandir, and write and flush of
files that Python opened. Not seen are calls of libraries in C++ and Rust (safetensors, pyarrow, torch.export), memory
maps, and the processes that a command starts.

"""
ELASTIC = """
## Elastic training

torchrun ends all processes of a group when one is lost, and starts them again; what the others had in memory is
gone. So training continues from the last checkpoint, and `--checkpoint.every_n_steps=1` loses at most one step a kill.
TorchFT's processes go on and heal the new one from a peer's memory, also on CPUs, and the global
batch can be kept by dividing each batch by the number of participants (`tests/faults/elastic.py`). It is not part
of `vitlab fit`: its quorum may change the number of processes at every step, while Lightning's strategy, the
loaders' shares, the metrics and the first process, which writes the run directory, are fixed for a training.
`--auto_resume` under torchrun is the answer for now.
"""


@cache
def commit():
    """Return the commit of the working tree, with a + if code has changed since."""
    line = ["git", "rev-parse", "--short=12", "HEAD"]
    name = subprocess.run(line, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    line = ["git", "diff", "--quiet", "HEAD", "--", "vitlab", "tests", "configs"]
    return name + "+" * subprocess.run(line, cwd=ROOT).returncode


def table(folder, kills=None):
    """Return the collected figures as markdown, with the kills of `make faults-quick` or all so far."""
    kills = kills or (quick if (quick := Path(folder) / "users").is_file() else KILLS)
    rows = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    plain, here = [row for row in rows if "nth" not in row], {row.get("commit") for row in rows}
    for scenario, found in (json.loads(kills.read_text()) if kills.is_file() else {}).items():
        left = f"{len(found['dead'])} dead ends, {found['unusable']} unusable, {len(found['diverged'])} diverged"
        now = sum(found.get("at", {}).get(name, 0) for name in here)
        share = f", of all commits so far; {now} of them for this page" if kills == KILLS else ""
        fault = f"{scenario}: {found['kills']} SIGKILLs from the first millisecond on, in {found['runs']} runs{share}"
        plain.append({"fault": fault, "found": left, "must": "0, 0, 0"})
    lines = ["| fault | found | must be |", "|---|---|---|"]
    lines += [f"| {row['fault']} | {row['found']} | {row['must']} |" for row in plain]
    phases = [(row["fault"].partition(" hangs")[0], row["cells"]) for row in rows if "cells" in row]
    return "\n".join(lines) + "\n" + failing([row for row in rows if "nth" in row]) + matrix(phases)


def failing(rows):
    """Return for each command which calls failed and how it ended, as a markdown table."""
    if not rows:
        return ""
    lines = ["| command | calls, sites | failed | of these | exit 0, 1, 2 | found |", "|---|---|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: (row["fault"].split(",")[0], row["fault"])):
        nth = row["nth"]
        ends = ", ".join(str(nth["ends"].get(code, 0)) for code in "012")
        counts = f"{nth['calls']:,}, {nth['sites']:,} | {nth['injected']:,} | {nth['how']}"
        lines.append(f"| `{row['fault']}` | {counts} | {ends} | {row['found']} |")
    total = sum(row["nth"]["injected"] for row in rows)
    return f"{NTH}{total:,} calls failed in all.\n\n" + "\n".join(lines) + "\n"


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
    how = (
        "Exit code and seconds. The limit of a phase without a signal was 4 s, the patience with a stopped process 2 s."
    )
    return (
        f"\n## The end of each phase\n\n{how} {sum(len(cells) for _, cells in phases)} cells.\n\n"
        + "\n".join(lines)
        + "\n"
    )


def commits(folder):
    """Return which commits the figures are of, as text; a + says that files had changed since."""
    counts = {}
    for path in Path(folder).glob("*.json"):
        counts.setdefault(json.loads(path.read_text())["commit"], []).append(path.stem)
    if len(counts) == 1:
        return f"commit {next(iter(counts))}"
    return "commits " + ", ".join(f"{name} ({len(stems)} tests)" for name, stems in counts.items())


def not_run(folder):
    """Return which tests of the catalogue have left no figure, as a paragraph."""
    line = [sys.executable, "-m", "pytest", "-o", "addopts=", "--collect-only", "-q", "-m", "faults", "tests/faults"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VITLAB_")}
    said = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True).stdout
    names = [text.partition("::")[2] for text in said.splitlines() if "::" in text]
    left = [name for name in names if not (Path(folder) / f"{name}.json").is_file()]
    if not left:
        return f"\nAll {len(names)} tests of the catalogue ran.\n"
    listed = "\n".join(f"- {name.replace('_', ' ')}" for name in left)
    head = f"{len(left)} of the {len(names)} tests of the catalogue were not run for this page, or were skipped:"
    return f"\n## Not run\n\n{head}\n\n{listed}\n"


def main(folder, page=""):
    """Print the table, and write the page if asked to."""
    text = table(folder)
    if page:
        head = (
            "# What faults and hostile files did\n\n"
            f"Measured by `make faults` until {datetime.date.today()}, {commits(folder)}, "
            f"{os.cpu_count()} CPU cores, Python {platform.python_version()}. The tests are in "
            "`tests/faults/`; processes are real and are killed with signals.\n\n"
        )
        Path(page).write_text(head + text + ELASTIC + not_run(folder))
    sys.stdout.write("\n" + text)


if __name__ == "__main__":
    main(*sys.argv[1:])
