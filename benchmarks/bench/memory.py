"""Peak memory of one case, in a separate process."""

import importlib
import json
import resource
import sys
from pathlib import Path

import torch

from bench.model import Case, step
from bench.networks import NETWORKS, PEERS, build


def peak() -> float:
    """Return the highest resident memory of this process so far, in MiB."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage may report the parent's peak
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def main(argv: list[str]) -> None:
    """Run two steps of ``MODEL MODE DTYPE BATCH CONTENDER [T2T_REPO]`` and write their memory beyond the imports."""
    model, mode, dtype, batch, contender, *t2t_repo = argv
    case = Case(model, "train" if mode == "train" else "fwd", dtype, int(batch))
    if contender in PEERS:
        importlib.import_module(contender)
    torch.optim.AdamW([torch.zeros(1)]).step()  # imports the compiler, tens of MiB
    before = peak()
    net = build(model, contender, *t2t_repo)
    side = NETWORKS[model].get("img_size", 224)
    work = step(net, torch.randn(case.batch, 3, side, side), case)
    work()
    work()
    sys.stdout.write(json.dumps({"mib": peak() - before}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
