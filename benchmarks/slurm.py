"""What a real Slurm does to jobs of vitlab: starts one of two nodes on this machine, runs the catalog, stops it.

    make slurm                                          # all of it, and benchmarks/slurm.md
    python benchmarks/slurm.py preemption silent_node   # some of it, printed alone
    python benchmarks/slurm.py torchrun                 # two machines, network namespaces, which need no Slurm

Debian's packages slurm-wlm and munge are all that it needs; `docker run` of debian:12 with them does for CI elsewhere.
"""

import argparse
import datetime
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import nullcontext
from pathlib import Path

from cluster.catalog import CATALOG, STEPS, Lab, Seen, refusals
from cluster.daemons import missing_programs, running_cluster

ROOT = Path(__file__).parents[1]
HEAD = """\
# What a real Slurm did to jobs

Measured by `make slurm` on {date}, commit {commit}: {version}, two nodes on the loopback address of one machine, each
with eight declared cores and GPUs, which are empty files; jobs train {steps} steps on the CPU, one every two seconds.
*Equal* means: each step is recorded once, and the final weights are equal, to the bit, to those of an undisturbed job
with as many processes. Slurm holds a requeued job for the lifetime of a credential, 15 s here and 120 s by default.

| what happened | jobs | starts | found | must be |
|---|---|---|---|---|
"""


def main() -> int:
    """Run the catalog and return the exit code: 0 if everything was found as it must be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*CATALOG, "refusals"]
    parser.add_argument("scenario", nargs="*", help=f"{', '.join(names)} (default: all)")
    parser.add_argument("--page", type=Path, help="the page to write")
    options = parser.parse_args()
    if unknown := [name for name in options.scenario if name not in names]:
        parser.error(f"there is no scenario {unknown[0]!r}: choose {', '.join(names)}")
    chosen = options.scenario or names
    alone = set(chosen) <= {"torchrun"}
    if not alone and (missing := missing_programs()):
        print(f"skipped: this machine has no {', '.join(missing)}; on Debian: apt install slurm-wlm munge")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the daemons are stopped then, too
    rows: list[Seen] = []
    with (
        nullcontext() if alone else running_cluster() as cluster,
        tempfile.TemporaryDirectory(prefix="vitlab-slurm-") as folder,
    ):
        lab = Lab(cluster, Path(folder) / "work")
        version = cluster.ask("sinfo", "--version").strip() if cluster else "no Slurm"
        for name in chosen:
            begun = time.monotonic()
            try:
                found = refusals(lab) if name == "refusals" else [CATALOG[name](lab)]
            except (RuntimeError, TimeoutError):
                traceback.print_exc()
                found = [Seen(name, 0, 0, "did not end as it should, see above", "")]
            rows += found
            for row in found:
                print(f"{row.what}: {row.found} ({row.starts} starts, {time.monotonic() - begun:.0f} s)", flush=True)
    lines = [f"| {row.what} | {row.jobs} | {row.starts} | {row.found} | {row.must} |" for row in rows]
    if options.page:
        commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        facts = {"date": datetime.date.today(), "commit": commit.stdout.strip(), "version": version, "steps": STEPS}
        options.page.write_text(HEAD.format(**facts) + "\n".join(lines) + "\n")
    return 0 if all(row.found == row.must or re.match(r"exit [12]: ", row.found) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
