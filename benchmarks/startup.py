"""CPU seconds until the first training step is done: `vitlab fit` beside a script that does as much by hand.

Both in turn: ``python benchmarks/startup.py FILE [ROUNDS]``.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.report import machine_line
from vitlab.runs.machine import facts
from vitlab.tables import table

ROOT = Path(__file__).parents[1]
# Both ends are the end of the first step; what a process has used until then is its own time and its children's.
FIRST_STEP = """
import os, resource, torch
step = torch.optim.AdamW.step
def first(*args, **more):
    step(*args, **more)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    os.write(3, str(sum(u.ru_utime + u.ru_stime for u in used)).encode())
    os._exit(0)
torch.optim.AdamW.step = first
"""
BY_HAND = """
import lightning
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from vitlab.models import VisionTransformer

digits = load_digits()
images, labels = torch.tensor(digits.images[:64, None], dtype=torch.float32) / 16, torch.tensor(digits.target[:64])
net = VisionTransformer(
    img_size=8, in_chans=1, num_classes=10, tokenizer="t2t", t2t_attn="performer", t2t_kernels=[3, 3, 3],
    t2t_strides=[1, 2, 1], t2t_dim=32, embed_dim=48, depth=3, num_heads=3, mlp_ratio=2.0, pos_embed="sincos1d",
)
optimizer = torch.optim.AdamW(net.parameters())
cross_entropy(net(images), labels).backward()
optimizer.step()
"""
FIT = f"""
import sys
from vitlab.cli.main import main
sys.exit(main(["fit", "--config", {str(ROOT / "configs" / "t2t.yaml")!r}, *sys.argv[1:]]))
"""
WAYS = {
    "by hand": (BY_HAND, []),
    "vitlab fit, W&B off": (FIT, ["--trainer.logger=false"]),
    "vitlab fit": (FIT, []),
}


def seconds(script: str, words: list[str]) -> float:
    """Return the CPU seconds of a fresh process until its first step is done."""
    read, write = os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
        line = ["bash", "-c", f'exec "$0" "$@" 3>&{write}', sys.executable, "-c", FIRST_STEP + script, *words]
        subprocess.run(line, cwd=folder, env=os.environ | settings, pass_fds=[write], capture_output=True, check=True)
    os.close(write)
    with open(read) as told:
        return float(told.read())


def main(path: str, rounds: int = 7) -> None:
    """Measure, and write the table."""
    taken: dict[str, list[float]] = {name: [] for name in WAYS}
    for turn in range(rounds):
        for name in list(WAYS)[:: 1 if turn % 2 else -1]:
            taken[name].append(seconds(*WAYS[name]))
    first = next(iter(taken.values()))
    rows = []
    for name, found in taken.items():
        ratios = [a / b for a, b in zip(found, first, strict=True)]
        rows.append({"who": name, "s": statistics.median(found), "median": statistics.median(ratios)})
        rows[-1] |= {"least": min(ratios), "most": max(ratios)}
    columns = {"": "{who}", "CPU s": "{s:.2f}", "times by hand": "{median:.2f} [{least:.2f}, {most:.2f}]"}
    text = f"""# Until the first training step

CPU seconds of a fresh process until the first step of `configs/t2t.yaml` is done, {rounds} processes of each kind in
turn, one thread: `python benchmarks/startup.py FILE`. "By hand" is a script that imports lightning, loads the digits of
scikit-learn, builds the same network with `vitlab.models` and takes one step.

{table(rows, columns)}

{machine_line(facts())}
"""
    Path(path).write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
