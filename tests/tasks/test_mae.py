"""The masked autoencoder: its loss against a slow version, its masks, its parameters, its runs."""

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch

from tests.training import QUIET, failing_at
from vitlab.cli.main import main
from vitlab.data import Digits
from vitlab.data.loading.order import EvalOrder, TrainOrder
from vitlab.data.loading.streams import MASK, shuffled_indices, stream
from vitlab.errors import UsageError
from vitlab.jobs.train.facts import model_facts
from vitlab.pretraining import MAE

TINY = {"img_size": 8, "in_chans": 2, "patch_size": 2, "embed_dim": 16, "depth": 2, "num_heads": 2}
LIGHT = {"decoder_dim": 8, "decoder_depth": 2, "decoder_heads": 2}
T2T = {"tokenizer": "t2t", "t2t_kernels": [3, 3], "t2t_strides": [1, 2], "t2t_dim": 8}


def slowly(task, image, order):
    """The squared error of one image's hidden pixels, token by token."""
    net, (h, w), (C, H, W) = task.net, task.net.grid_size, image.shape
    p, q = H // h, W // w
    seen, hidden = order[: task.num_kept].tolist(), order[task.num_kept :].tolist()
    cells = {i: (slice(i // w * p, i // w * p + p), slice(i % w * q, i % w * q + q)) for i in range(h * w)}
    if task.leaves_out:
        found = net.forward_features(image[None], keep=order[None, : task.num_kept])[0]
        tokens = {i: task.decoder.embed(found[1 + n]) for n, i in enumerate(seen)}
        tokens |= dict.fromkeys(hidden, task.decoder.mask_token[0, 0])
    else:
        covered = image.clone()
        for i in hidden:
            covered[:, *cells[i]] = task.cover
        found = net.forward_features(covered[None])[0]
        tokens = {i: task.decoder.embed(found[1 + i]) for i in range(h * w)}
    table = task.decoder.pos_embed.formula((h, w)).float().double()
    x = torch.stack([task.decoder.embed(found[0]), *(tokens[i] + table[i] for i in range(h * w))])[None]
    for block in task.decoder.blocks:
        x = block(x, task.decoder.pos_embed, 0)
    predicted = task.decoder.pred(task.decoder.norm(x))[0, 1:]
    errors = []
    for i in hidden:
        target = torch.stack(
            [image[c, y, x] for c in range(C) for y in range(H)[cells[i][0]] for x in range(W)[cells[i][1]]]
        )
        if task.hparams["norm_pix"]:
            mean = target.sum() / len(target)
            target = (target - mean) / ((target - mean).square().sum() / (len(target) - 1) + 1e-6).sqrt()
        errors.append((predicted[i] - target).square())
    return torch.stack(errors).mean()


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"norm_pix": False, "pos_embed": "rope2d", "img_size": [6, 10], "patch_size": [2, 1]},
        T2T,
        {"hide": "pixels", "pos_embed": "conv", "img_size": [10, 4]},
    ],
    ids=str,
)
def test_loss_and_gradients_equal_a_slow_version(arguments):
    torch.manual_seed(0)
    task = MAE(**TINY | LIGHT | arguments).double().eval()
    if task.cover is not None:
        torch.nn.init.normal_(task.cover)
    n = math.prod(task.net.grid_size)
    assert task.num_kept == n // 4 > 1
    images = torch.randn(3, 2, *task.net.img_size, dtype=torch.float64)
    order = torch.stack([torch.randperm(n) for _ in range(3)])
    fast, slow = (
        task.pixel_loss(images, order),
        torch.stack([slowly(task, *pair) for pair in zip(images, order, strict=True)]).mean(),
    )
    torch.testing.assert_close(fast, slow, atol=1e-12, rtol=1e-12)
    trained = [p for p in task.parameters() if p.requires_grad]
    found, wanted = (
        torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True) for loss in (fast, slow)
    )
    torch.testing.assert_close(found, wanted, atol=1e-10, rtol=1e-10)
    grouped = [p for group in task.optimizer_groups() for p in group["params"]]
    assert {id(p) for p in grouped} == {id(p) for p in trained}
    assert len(grouped) == len(trained)


def test_the_vit_b16_has_the_parameters_of_the_papers_shapes():
    with torch.device("meta"):
        task = MAE(embed_dim=768, num_heads=12, pos_embed="sincos2d")
    fixed = 197 * (768 + 512)  # the authors' tables are parameters that are not trained
    assert sum(p.numel() for p in task.parameters()) + fixed == 111_907_840


def test_masks_depend_on_seed_epoch_and_image_alone_and_are_spread_evenly():
    found = {}
    for world, start in ((1, 0), (2, 0), (2, 3)):  # one process, two, and two that go on in mid-epoch
        for rank in range(world):
            order = TrainOrder(64, 8, seed=3, rank=rank, world=world)
            order.set_epoch(2)
            for step in order.steps(start):
                masks = step.shuffled((4, 6))
                for i, mask in zip(step.indices.tolist(), masks.tolist(), strict=True):
                    assert found.setdefault(i, mask) == mask
    assert len({tuple(mask) for mask in found.values()}) == 64
    order.set_epoch(3)
    assert all(found[s.indices[0]] != s.shuffled((4, 6)).tolist()[0] for s in order.steps())
    alone, shared = list(EvalOrder(64, 64).steps()), list(EvalOrder(64, 8, rank=1, world=2).steps())
    fixed = alone[0].shuffled((4, 6))
    assert len(np.unique(fixed, axis=0)) == 64
    assert all((step.shuffled((4, 6)) == fixed[step.indices]).all() for step in shared)
    many = shuffled_indices(stream(np.arange(4000), MASK), (4, 6))[:, :6]
    np.testing.assert_allclose(
        np.bincount(many.ravel(), minlength=24) / 4000, 0.25, atol=4 * (0.25 * 0.75 / 4000) ** 0.5
    )
    squares = shuffled_indices(stream(np.arange(50), MASK), (4, 6), block=2).reshape(50, 6, 4)
    assert all(len({(i // 6 // 2, i % 6 // 2) for i in four}) == 1 for image in squares for four in image)


def test_images_that_have_no_numbers_are_masked_anew_in_training_alone():
    task, images = MAE(**{**TINY, "img_size": [14, 10]}, **LIGHT, mask_ratio=0.7), torch.zeros(3, 2, 14, 10)
    assert task.num_kept == 10  # of 35, rounded down
    for training in (False, True):
        task._trainer = SimpleNamespace(training=training)
        first, second = (task._order(images) for _ in range(2))
        assert (first.sort(dim=1).values == torch.arange(35)).all() and len(first.unique(dim=0)) == 3
        assert torch.equal(first, second) == (not training)


def test_the_decoder_starts_as_wide_as_the_network():
    task = MAE(**TINY, **LIGHT, init_std=0.5)
    for layer in (task.decoder.embed, task.decoder.pred, task.net.blocks[0].mlp.fc1):
        assert 0.4 < layer.weight.std() < 0.6


def test_a_patch_of_one_value_has_no_spread():
    with pytest.raises(ValueError, match="`norm_pix` needs patches of several values"):
        MAE(**{**TINY, "in_chans": 1, "patch_size": 1})


def test_options_that_contradict_mae_are_refused_by_name():
    for arguments, line in (
        ({"mask_ratio": 0.0}, r"`model.mask_ratio` must be in \(0, 1\)"),
        ({"mask_ratio": 0.97}, "`mask_ratio` must hide some of 16 tokens"),
        ({"mask_ratio": float("nan")}, "mask_ratio"),
        ({"decoder_depth": -1}, r"^`decoder_depth` must be in \[0, 1000\], got -1"),
        ({"decoder_dim": 6, "decoder_heads": 2}, "`decoder_dim` must be divisible by 4, .* got 6 and 2 heads"),
        ({"decoder_dim": 8, "decoder_heads": 3}, "and by `decoder_heads`, got 8 and 3 heads"),
        ({"pos_embed": "conv"}, "ConvPosEmbed has a `leave`, which may mix neighboring tokens"),
        (T2T | {"hide": "tokens"}, "`hide: tokens` is for patches"),
        ({"flexi_patch": [2, 4]}, "`flexi_patch`"),
        ({"metrics": ["F1Score"]}, "`metrics`"),
        ({"global_pool": "map"}, "`global_pool: map`"),
        ({"global_pool": "avg", "fc_norm": True}, "`fc_norm` moves the last .*: leave it out"),
        ({"drop_path_rate": 0.1, "drop_path_subset": True}, "`drop_path_subset`"),
    ):
        with pytest.raises(ValueError, match=line):
            MAE(**TINY | LIGHT | arguments)


def test_images_that_grow_are_refused_by_name():
    schedule, line = [[0, 4], [1, 8]], "`data.img_size_schedule` changes the grid, on which `model: MAE` hides tokens"
    task, data = MAE(**{**TINY, "in_chans": 1}, **LIGHT), Digits(batch_size=8, img_size=8, img_size_schedule=schedule)
    for refuse in (lambda: L.Trainer(max_steps=1, **QUIET).fit(task, data), lambda: model_facts(task, data)):
        with pytest.raises(ValueError, match=line):
            refuse()


@pytest.mark.parametrize("key", ["mixup", "cutmix", "random_erasing"])
def test_images_that_are_mixed_or_erased_for_classes_are_refused(key, here, capsys):
    words = ["fit", "--config", "pretrain/mae_digits", "--trainer.logger=false", "--name=mae"]
    assert main([*words, f"--data.{key}=0.5"]) == 2 and not Path("runs").exists()
    assert "change the pixels that `model: MAE` predicts: set them to 0" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_on_mixed_images_that_an_older_vitlab_began_is_resumed(here, monkeypatch):
    words = ["fit", "--config", "pretrain/mae_digits", "--trainer.logger=false", "--trainer.max_steps=1", "--name=mae"]
    with monkeypatch.context() as older:
        older.setattr(MAE, "check_augmentation", lambda *_: None)
        assert main([*words, "--data.mixup=0.5"]) == 0
    assert main(["fit", "--resume", "mae", "--trainer.max_steps=2"]) == 0


def test_squares_of_hidden_tokens_are_refused_for_data_that_do_not_number_their_images():
    task = MAE(**{**TINY, "in_chans": 1}, **LIGHT, mask_block=2)
    task.check_training(None, Digits(batch_size=8))
    with pytest.raises(UsageError, match=r"^`mask_block` above 1 needs a data set of vitlab, .*: leave it out$"):
        task.check_training(None, None)


@pytest.mark.rare
def test_a_run_stopped_in_mid_epoch_goes_on_to_the_same_numbers_and_starts_a_classifier(here, capsys):
    fit = ["fit", "--config", "pretrain/mae_digits", "--trainer.logger=false", "--trainer.max_epochs=2"]
    fit += ["--model.depth=1"]
    fit += ["--trainer.log_every_n_steps=1", "--checkpoint.every_n_steps=1", "--model.drop_path_rate=0.3"]
    fit += ["--data.augment=crop-flip"]
    fit += ["--trainer.callbacks+=FeatureQuality", "--trainer.callbacks.images=100", "--checkpoint.monitor=val/knn"]
    assert main([*fit, "--name", "whole"]) == 0
    with failing_at(MAE, 30):  # of 17 an epoch
        assert main([*fit, "--name", "cut"]) != 0
    assert main(["fit", "--resume", "runs/cut"]) == 0
    curves = []
    for name in ("whole", "cut"):
        rows = [json.loads(line) for line in (here / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        curves.append([{k: v for k, v in row.items() if "/" in k or k in ("step", "grad_norm")} for row in rows])
    assert curves[0] == curves[1]
    assert {"val/loss", "val/knn", "val/probe", "val/rankme"} <= set(curves[0][-1])
    states = [
        torch.load(here / "runs" / name / "checkpoints/last.ckpt", weights_only=True) for name in ("whole", "cut")
    ]
    assert all(torch.equal(a, states[1]["state_dict"][name]) for name, a in states[0]["state_dict"].items())
    assert main(["test", "runs/whole"]) == 0
    capsys.readouterr()
    new = ["fit", "--config", "vit", "--init_from", "runs/whole", "--model.pos_embed=sincos2d"]
    new += ["--model.pos_embed_lr_mult=1"]
    assert main([*new, "--model.depth=1", "--trainer.logger=false", "--trainer.max_epochs=1", "--name", "fine"]) == 0
    assert "decoder" in capsys.readouterr().out
    shutil.rmtree("runs")


def test_the_loss_of_bfloat16_predictions_rounds_no_pixel():
    torch.manual_seed(0)
    task, images = MAE(**TINY | LIGHT).eval(), torch.randn(2, TINY["in_chans"], TINY["img_size"], TINY["img_size"])
    order, seen = torch.arange(task.net.grid_size[0] * task.net.grid_size[1]).repeat(2, 1), []
    predict = task._predict
    task._predict = lambda *given: seen.append(predict(*given).bfloat16()) or seen[-1]
    loss = task.pixel_loss(images, order)
    task._predict = lambda *given: seen[0].float()
    assert loss.dtype == torch.float32
    assert loss == task.pixel_loss(images, order)
