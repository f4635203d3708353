import random
from types import SimpleNamespace

import lightning as L
import matplotlib
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import WandbLogger
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

from vitlab.callbacks.attention_maps import AttentionMaps, draw_maps
from vitlab.callbacks.ema import EMA
from vitlab.cli.main import main
from vitlab.models.walk import attention_maps
from vitlab.tasks import Classifier

TINY = {"img_size": 8, "patch_size": 2, "in_chans": 1, "embed_dim": 8, "depth": 2, "num_heads": 2, "num_classes": 3}
IMAGES = torch.randn(12, 1, 8, 8, generator=torch.Generator().manual_seed(0))


class Kept(WandbLogger):
    """Keep the pictures instead of starting W&B."""

    experiment = None

    def __init__(self):
        super().__init__(offline=True)
        self.pictures = []

    def log_image(self, key, images, step=None, caption=None):
        self.pictures.append((step, images[0], caption[0]))

    def log_metrics(self, *args, **kwargs):
        pass

    log_hyperparams = save = finalize = log_graph = log_metrics


def fit(*callbacks, epochs=4, **network):
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    task, logger = Classifier(**{**TINY, "dropout": 0.2, **network}), Kept()
    loader = DataLoader(TensorDataset(IMAGES, torch.arange(12) % 3), batch_size=4, shuffle=True)
    held_out = DataLoader(TensorDataset(IMAGES, torch.arange(12) % 3), batch_size=6)
    options = {"max_epochs": epochs, "enable_checkpointing": False, "enable_progress_bar": False}
    options |= {"enable_model_summary": False, "accelerator": "cpu", "log_every_n_steps": 1}
    trainer = L.Trainer(**options, logger=logger, callbacks=list(callbacks))
    trainer.fit(task, loader, held_out)
    return task, logger.pictures


def test_a_picture_comes_every_n_epochs_and_shows_the_heads_of_the_validated_weights():
    task, pictures = fit(AttentionMaps(every_n_epochs=2, num_images=3), EMA(decay=0.5))
    assert [(step, caption) for step, _, caption in pictures] == [
        (3 * epoch - 1, f"class token, layer 1, epoch {epoch}; each map has its own range") for epoch in (2, 4)
    ]
    task.eval()
    expected = attention_maps(task.net, IMAGES[:3], 1)[:, :, 0, 1:].view(3, 2, 4, 4)  # the average is what is left
    assert np.array_equal(pictures[-1][1], draw_maps(IMAGES[:3], expected).permute(1, 2, 0).numpy())
    assert not any(module._forward_pre_hooks for module in task.net.modules())


def test_each_patch_of_a_map_has_its_color_beside_its_image():
    maps = torch.rand(2, 3, 4, 4)
    picture = draw_maps(IMAGES[:2], maps).permute(1, 2, 0).numpy()
    assert picture.shape == (2 * 98 + 2, 4 * 98 + 2, 3)
    for image, head, y, x in ((0, 0, 0, 0), (1, 2, 3, 1), (0, 1, 2, 3)):
        pixel = picture[2 + 98 * image + 24 * y + 12, 2 + 98 * (head + 1) + 24 * x + 12]
        color = matplotlib.colormaps["viridis"](float(maps[image, head, y, x] / maps[image, head].max()))
        assert pixel.tolist() == [round(255 * part) for part in color[:3]]
    gray = (IMAGES[1, 0, 5, 6] - IMAGES[1].min()) / (IMAGES[1].max() - IMAGES[1].min())
    assert picture[2 + 98 + 12 * 5 + 6, 2 + 12 * 6 + 6, 0] == round(255 * float(gray))


@pytest.mark.slow
@pytest.mark.parametrize("network", [{}, {"tokenizer": "t2t", "t2t_kernels": (3, 3), "t2t_strides": (2, 1)}])
def test_attention_maps_change_neither_weights_nor_random_numbers(network):
    runs = []
    for callbacks in ([], [AttentionMaps()]):
        task, pictures = fit(*callbacks, epochs=2, **network)
        assert len(pictures) == 2 * len(callbacks)
        state = (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate())
        runs.append((task.state_dict(), state))
    assert runs[0][1] == runs[1][1]
    assert all(torch.equal(weight, runs[1][0][name]) for name, weight in runs[0][0].items())


def test_only_the_first_process_draws():
    logger = Kept()
    trainer = SimpleNamespace(current_epoch=0, sanity_checking=False, loggers=[logger])
    trainer.check_val_every_n_epoch, trainer.num_training_batches, trainer.val_check_batch = 1, 3, 3
    trainer.fit_loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_idx=2, _batches_that_stepped=2))
    trainer.state = SimpleNamespace(fn="fit")
    task = Classifier(**TINY).eval()
    for trainer.is_global_zero in (False, True):
        AttentionMaps().on_validation_batch_end(trainer, task, None, (IMAGES, None), 0)
        assert len(logger.pictures) == trainer.is_global_zero
    with pytest.raises(ValueError, match="needs batches that begin with images, got a dict: leave it out"):
        AttentionMaps().on_validation_batch_end(trainer, task, None, {"image": IMAGES}, 0)


@pytest.mark.parametrize(
    ("arguments", "network", "message"),
    [
        ({"every_n_epochs": 0}, {}, "`every_n_epochs` of AttentionMaps must be at least 1, got 0"),
        ({"num_images": 0}, {}, "`num_images` of AttentionMaps must be at least 1, got 0"),
        ({"layer": 2}, {}, r"`layer` of AttentionMaps must lie in -2..1, got 2"),
        ({}, {"class_token": False, "global_pool": "avg"}, "analyze attention RUN --query ROW,COLUMN"),
    ],
)
def test_attention_maps_without_a_fitting_network_or_logger_are_refused(arguments, network, message):
    with pytest.raises(ValueError, match=message):
        fit(AttentionMaps(**arguments), **network)


def test_attention_maps_refuse_a_users_own_network_in_training_alone():
    trainer, own = L.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu"), L.LightningModule()
    own.net = torch.nn.Linear(2, 2)
    AttentionMaps().setup(trainer, own, "test")  # nothing is drawn
    with pytest.raises(ValueError, match="shows a network of vitlab, and LightningModule has none"):
        AttentionMaps().setup(trainer, own, "fit")


@pytest.mark.slow
def test_an_offline_run_holds_the_pictures(tmp_path):
    few = ["--trainer.max_epochs=4", "--data.subset=0.2", "--quiet", f"--run_dir={tmp_path / 'run'}"]
    callback = ["--trainer.callbacks=AttentionMaps", "--trainer.callbacks.every_n_epochs=2"]
    assert main(["fit", "--config", "configs/vit.yaml", *few, *callback]) == 0
    files = list((tmp_path / "run" / "wandb").glob("offline-run-*/files/media/images/attention_*.png"))
    assert len(files) == 2
    for file in files:
        with Image.open(file) as picture:
            assert picture.size == (4 * 98 + 2, 4 * 98 + 2)  # four images, each with three heads
            assert np.asarray(picture).std() > 20


@pytest.mark.slow
def test_attention_maps_of_a_run_without_class_token_are_refused_in_one_line(tmp_path, capsys):
    arguments = ["--model.class_token=false", "--model.global_pool=avg", "--trainer.logger=false"]
    arguments += [f"--run_dir={tmp_path / 'run'}", "--trainer.callbacks=AttentionMaps"]
    assert main(["fit", "--config", "configs/vit.yaml", *arguments]) == 2
    error = capsys.readouterr().err
    assert "`model.class_token` is false" in error and error.count("\n") == 1
