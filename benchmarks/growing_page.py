"""What the page and the moments that a small network keeps by itself cost a training, of its time.

``python benchmarks/growing_page.py benchmarks/growing_page.md [SECONDS]`` trains ``configs/vit.yaml`` on the digits
until it has taken so many CPU seconds, with one thread, and times every call of the two callbacks from outside.
"""

import sys
import tempfile
import time
from functools import wraps
from pathlib import Path

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback

from vitlab.cli.main import main
from vitlab.look.live import GrowingPage, now
from vitlab.look.moments import Moments

SECONDS = 620.0
CONFIG = Path(__file__).parents[1] / "configs" / "vit.yaml"


class Ends(Callback):
    """End the training when the process has taken so many CPU seconds."""

    limit = SECONDS

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Ask for the end."""
        trainer.should_stop = time.process_time() > self.limit


def timed(callback: type[Callback]) -> np.ndarray:
    """Add up the seconds of all hooks of a callback, by the clock and on processors, from now on."""
    spent = np.zeros(2)

    def around(hook):
        @wraps(hook)
        def call(*args):
            begun = now()
            try:
                return hook(*args)
            finally:
                spent[:] += now() - begun

        return call

    for name, hook in list(vars(callback).items()):
        if name.startswith("on_"):
            setattr(callback, name, around(hook))
    return spent


def measure(limit: float) -> str:
    """Train, and return the lines of the page."""
    torch.set_num_threads(1)
    Ends.limit, begun = limit, now()
    spent = {"the page": timed(GrowingPage), "the moments": timed(Moments)}
    with tempfile.TemporaryDirectory() as folder:
        fit = ["fit", "--config", str(CONFIG), "--run_dir", f"{folder}/run", "--trainer.max_epochs=100000", "--quiet"]
        trust = ["--trust_imports=__main__", "--trainer.callbacks+=__main__.Ends"]
        assert main([*fit, *trust]) == 0
        kept, has_page = len(list(Path(folder).glob("run/moments/*.npz"))), Path(folder, "run/look.html").is_file()
    assert has_page, "the run was too short for a page"
    clock, cpu = now() - begun
    lines = [f"`python benchmarks/growing_page.py benchmarks/growing_page.md {limit:g}`, torch {torch.__version__}", ""]
    lines += ["| of a run of `configs/vit.yaml` on the digits | seconds by the clock | CPU seconds | share of CPU |"]
    lines += ["|---|---|---|---|", f"| all of it | {clock:.0f} | {cpu:.0f} | |"]
    for name, (wall, own) in spent.items():
        lines.append(f"| {name} | {wall:.2f} | {own:.2f} | {own / cpu:.2%} |")
    wall, own = sum(spent.values())
    lines.append(f"| both | {wall:.2f} | {own:.2f} | {own / cpu:.2%} |")
    words = f"{kept} validations are kept at the end. All hooks of both are timed from outside."
    return "\n".join([*lines, "", f"{words} Each of the two tries to stay within 1 % of the CPU time.", ""])


if __name__ == "__main__":
    page = measure(float(sys.argv[2]) if len(sys.argv) > 2 else SECONDS)
    Path(sys.argv[1]).write_text(page)
    print(page)
