"""A training step hands work to the device and never waits for a number to come back."""

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from tests.training import QUIET
from vitlab.callbacks.ema import EMA
from vitlab.tasks import Classifier

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "repeat_interleave")
VIT = {"img_size": 8, "in_chans": 1, "patch_size": 4, "embed_dim": 8, "depth": 2, "num_heads": 2}
PLAIN = {**VIT, "drop_path_rate": 0.2, "dropout": 0.1}
T2T = {**VIT, "tokenizer": "t2t", "t2t_kernels": [3, 3], "t2t_dim": 4, "drop_path_rate": 0.5, "drop_path_subset": True}


class Watch(TorchDispatchMode):
    """Refuse every operation whose result the processor has to read before it can go on."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in WAITS or (name == "repeat_interleave" and "self_int" in str(func)), f"{func} waits"
        return func(*args, **(kwargs or {}))


class Steps(Callback):
    """Watch everything between a batch's start and its end."""

    def __init__(self, enter, leave):
        self.enter, self.leave, self.count = enter, leave, 0

    def on_train_batch_start(self, *_):
        self.enter()

    def on_train_batch_end(self, *_):
        self.leave()
        self.count += 1


def train(task, steps, accelerator="cpu"):
    batches = DataLoader([(torch.randn(8, 1, 8, 8), torch.arange(8) % 3)] * 4, batch_size=None)
    how = QUIET | {"accelerator": accelerator}
    trainer = L.Trainer(max_epochs=1, devices=1, gradient_clip_val=1.0, callbacks=[EMA(), steps], **how)
    trainer.fit(task, batches)


@pytest.mark.parametrize("vit", [PLAIN, T2T])
def test_no_step_reads_a_number_back_from_the_device(vit):
    watch = Watch()
    steps = Steps(watch.__enter__, lambda: watch.__exit__(None, None, None))
    train(Classifier(num_classes=3, **vit), steps)
    assert steps.count == 4


def test_a_step_that_reads_its_loss_is_detected():
    class Reads(Classifier):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss / max(1.0, float(loss))

    watch = Watch()
    with pytest.raises(AssertionError, match="_local_scalar_dense"):
        train(Reads(num_classes=3, **PLAIN), Steps(watch.__enter__, lambda: watch.__exit__(None, None, None)))
    watch.__exit__(None, None, None)


@pytest.mark.gpu
@pytest.mark.parametrize("vit", [PLAIN, T2T])
def test_no_step_waits_for_the_gpu(vit):
    def watch(mode):
        return lambda: torch.cuda.set_sync_debug_mode(mode)

    try:
        steps = Steps(watch("error"), watch("default"))
        train(Classifier(num_classes=3, **vit), steps, "gpu")
        assert steps.count == 4
    finally:
        torch.cuda.set_sync_debug_mode("default")
