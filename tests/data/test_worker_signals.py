"""Signals to a whole group of processes, as clusters and terminals send them."""

import multiprocessing
import os
import signal
import time

import numpy as np
import pytest
from PIL import Image

from vitlab.data.image_folder import ImageFolder


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_workers_survive_what_stops_a_run_and_end_with_it(tmp_path, monkeypatch, number):
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path / "cache"))
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(12):
            image = Image.fromarray(np.full((20, 20, 3), 10 * i, np.uint8))
            image.save(tmp_path / "photos" / name / f"{i}.png")
    data = ImageFolder(str(tmp_path / "photos"), img_size=8, batch_size=1, num_workers=1)
    data.setup("fit")
    loader = data.train_dataloader()
    loader.sampler.set_epoch(0)
    batches = iter(loader)
    next(batches)
    (worker,) = multiprocessing.active_children()
    os.kill(worker.pid, number)
    time.sleep(0.1)
    assert len(list(batches)) == len(loader) - 1 > 4, "more than what was prefetched"
    assert worker.is_alive()
    del batches, loader
    worker.join(10)
    assert worker.exitcode == 0
