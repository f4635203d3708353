"""Print the figures that `make faults` has collected, and write benchmarks/faults.md."""

import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def table(folder):
    """Return the collected figures as a markdown table."""
    rows = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    lines = ["| fault | found | must be |", "|---|---|---|"]
    return "\n".join(lines + [f"| {r['fault']} | {r['found']} | {r['must']} |" for r in rows]) + "\n"


def main(folder):
    """Write the page."""
    commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    text = table(folder)
    page = (
        "# What faults and hostile files did\n\n"
        f"Measured by `make faults` on {datetime.date.today()}, commit {commit.strip()}, "
        f"{os.cpu_count()} CPU cores, Python {platform.python_version()}. The tests are in "
        "`tests/faults/`; processes are real and are killed with signals.\n\n"
    )
    (ROOT / "benchmarks" / "faults.md").write_text(page + text)
    sys.stdout.write("\n" + text)


if __name__ == "__main__":
    main(sys.argv[1])
