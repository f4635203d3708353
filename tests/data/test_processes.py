"""Real processes: two ranks see together what one sees alone."""

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from vitlab.data import FakeData

_SCRIPT = """
import json, sys, warnings
import lightning as L, torch
from vitlab.data import Digits

class Watch(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)
        self.seen = {"train": [], "test": []}

    def note(self, split, batch):
        self.seen[split].append([round(x, 3) for x in batch[0].flatten(1).double().sum(1).tolist()])

    def training_step(self, batch, batch_idx):
        self.note("train", batch)
        return self.layer(batch[0].flatten(1)).mean()

    def test_step(self, batch, batch_idx):
        self.note("test", batch)

    def on_fit_end(self):
        self.write("train")

    def on_test_end(self):
        self.write("test")

    def write(self, split):
        with open(f"{self.trainer.world_size}-{self.trainer.global_rank}-{split}.json", "w") as file:
            json.dump(self.seen[split], file)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

torch.set_num_threads(1)
for devices, strategy in ((2, "ddp_fork"), (1, "ddp")):  # forks before this process has trained, for one import of all
    L.seed_everything(7)
    module, data = Watch(), Digits(batch_size=100, augment="crop-flip")
    trainer = L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, max_epochs=2, logger=False,
                        enable_checkpointing=False, enable_progress_bar=False, use_distributed_sampler=False,
                        limit_val_batches=0)
    trainer.fit(module, datamodule=data)
    trainer.test(module, datamodule=data, verbose=False)
"""


@pytest.mark.slow
def test_two_ranks_train_on_the_same_batches_as_one_and_test_every_image_once(tmp_path):
    env = {key: value for key, value in os.environ.items() if key not in ("PL_GLOBAL_SEED", "LOCAL_RANK", "NODE_RANK")}
    command, env = [sys.executable, "-c", _SCRIPT], {**env, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=env, cwd=tmp_path, timeout=600, capture_output=True)
    alone, first, second = (
        {split: json.loads((tmp_path / f"{name}-{split}.json").read_text()) for split in ("train", "test")}
        for name in ("1-0", "2-0", "2-1")
    )
    assert len(alone["train"]) == 2 * 11
    for step, parts in zip(alone["train"], zip(first["train"], second["train"], strict=True), strict=True):
        assert step == parts[0] + parts[1]
    tested = [value for rank in (first, second) for batch in rank["test"] for value in batch]
    assert len(tested) == 359 and sorted(tested) == sorted(v for batch in alone["test"] for v in batch)


@pytest.mark.parametrize("split, n, line", [
    ("val", 13, "val split has 2 images for 3 processes: use at most 2 processes (--trainer.devices=2)"),
    ("test", 5, "test split has 1 image for 3 processes: use at most 1 process (--trainer.devices=1)"),
])  # fmt: skip
def test_more_processes_than_images_of_an_evaluation_are_refused_before_one_waits(split, n, line):
    for rank in range(3):
        data = FakeData(n=n, native_size=8, num_classes=1, batch_size=3)
        place = {"global_rank": rank, "world_size": 3, "strategy": SimpleNamespace(root_device=torch.device("cpu"))}
        data.trainer = SimpleNamespace(**place)
        with pytest.raises(ValueError, match=re.escape(line)):
            getattr(data, f"{split}_dataloader")()
