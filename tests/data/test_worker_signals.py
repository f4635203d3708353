"""Signals to all processes of a run, as clusters and terminals send them."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image

from vitlab.data.image_folder import ImageFolder

GROUP = """
import os, signal, sys, time
from vitlab.data.image_folder import ImageFolder

data = ImageFolder("photos", img_size=8, batch_size=1, num_workers=1)
data.setup("fit")
loader = data.train_dataloader()
loader.sampler.set_epoch(0)
batches = iter(loader)
next(batches)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: None)  # after the fork: the worker has none of these
    os.killpg(0, number)
    time.sleep(0.1)
print(len(list(batches)) == len(loader) - 1 > 4)
"""


@pytest.fixture
def photos(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(12):
            image = Image.fromarray(np.full((20, 20, 3), 10 * i, np.uint8))
            image.save(tmp_path / "photos" / name / f"{i}.png")
    return tmp_path / "photos"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT])
def test_a_worker_ignores_signals_that_ask_a_run_to_save(photos, number):
    data = ImageFolder(str(photos), img_size=8, batch_size=1, num_workers=1)
    others = set(multiprocessing.active_children())  # of tests before
    data.setup("fit")
    loader = data.train_dataloader()
    loader.sampler.set_epoch(0)
    batches = iter(loader)
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - others
    os.kill(worker.pid, number)
    time.sleep(0.1)
    assert len(list(batches)) == len(loader) - 1 > 4, "more than what was prefetched"
    del batches, loader
    worker.join(120)
    assert worker.exitcode == 0


@pytest.mark.rare
def test_a_signal_to_the_whole_group_ends_no_worker_and_the_worker_ends_with_its_owner(photos):
    words = [sys.executable, "-c", GROUP]
    done = subprocess.run(words, cwd=photos.parent, start_new_session=True, capture_output=True, text=True, timeout=600)
    assert done.stdout == "True\n", done.stderr
    assert done.returncode == 0
