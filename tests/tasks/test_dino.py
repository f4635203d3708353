"""Self-distillation: its loss against formulas, its schedules, its crops, its runs."""

import cmath
import colorsys
import contextlib
import json
import math
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.training import QUIET, failing_at
from vitlab.ablation.execution.cells import Resolved
from vitlab.ablation.inference.audit import fair_facts
from vitlab.cli.main import main
from vitlab.data import Digits
from vitlab.data.loading.crops import MultiCrop, cut_batch, recolor
from vitlab.data.loading.order import Step, TrainOrder
from vitlab.data.loading.streams import uniforms
from vitlab.errors import UsageError
from vitlab.pretraining import DINO
from vitlab.pretraining.dino import cosine, koleo
from vitlab.runs.directory import RunDir
from vitlab.tasks import Classifier
from vitlab.tasks.schedule import build_scheduler

ROOT = Path(__file__).parents[2]
TINY = {"img_size": 8, "in_chans": 2, "patch_size": 2, "embed_dim": 16, "depth": 1, "num_heads": 2}
HEAD = {"prototypes": 12, "proj_hidden": 10, "proj_dim": 6}
WITHOUT_SMALL = {"class_path": "MultiCrop", "init_args": {"local_crops": 0}}
T2T = {"tokenizer": "t2t", "t2t_kernels": [3, 3], "t2t_strides": [1, 2], "t2t_dim": 8}


def head_slowly(head, x):
    """The paper's head, for one vector."""
    first, _, second, _, third = head.mlp
    h = F.gelu(x @ first.weight.T + first.bias)
    h = F.gelu(h @ second.weight.T + second.bias) @ third.weight.T + third.bias
    h = h / h.square().sum().sqrt()
    length = 1 if head.length is None else head.length
    return length * ((head.prototypes / head.prototypes.square().sum(1, keepdim=True).sqrt()) @ h)


def teacher_slowly(task, rows, temperature, center):
    """Probabilities of the teacher, of a list of vectors of scores."""
    if task.hparams["centering"] == "mean":
        return [((row - center) / temperature).softmax(0) for row in rows]
    q = torch.stack([(row / temperature).exp() for row in rows])
    q = q / q.sum()
    for _ in range(3):
        q = q / q.sum(0, keepdim=True) / q.shape[1]
        q = q / q.sum(1, keepdim=True) / q.shape[0]
    return list(q * q.shape[0])


def slowly(task, crops, temperature, hidden):
    """The loss, one image and one token at a time."""
    h, B, n = task.hparams, len(crops[0]), task.net.grid_size[0] * task.net.grid_size[1]
    pooled = lambda net, tokens: net.fc_norm(net.pool(tokens[None]))[0]  # noqa: E731
    known = [[task.net.forward_features(crops[v][b : b + 1])[0] for b in range(B)] for v in (0, 1)]
    seen = []
    for v, crop in enumerate(crops):
        images = crop.clone()
        for b in range(B):
            for i in range(n if v < 2 and hidden is not None else 0):
                if hidden[v, b, i]:
                    y, x, p = i // task.net.grid_size[1], i % task.net.grid_size[1], task.cover.shape[1]
                    images[b, :, y * p : y * p + p, x * p : x * p + p] = task.cover
        seen.append([task.student.forward_features(images[b : b + 1])[0] for b in range(B)])
    rows = [head_slowly(task.teacher_head, pooled(task.net, known[v][b])) for v in (0, 1) for b in range(B)]
    targets = teacher_slowly(task, rows, temperature, task.center)
    terms = []
    for q in (0, 1):
        for v in range(len(crops)):
            for b in range(B):
                if v != q:
                    scores = head_slowly(task.head, pooled(task.student, seen[v][b])) / h["student_temp"]
                    terms.append(-(targets[q * B + b] * scores.log_softmax(0)).sum())
    loss = torch.stack(terms).mean()
    if hidden is not None:
        every = [(v, b, i) for v in (0, 1) for b in range(B) for i in range(n) if hidden[v, b, i]]
        rows = [head_slowly(task.teacher_head, known[v][b][1 + i]) for v, b, i in every]
        wanted = teacher_slowly(task, rows, temperature, task.patch_center)
        for (v, b, i), target in zip(every, wanted, strict=True):
            scores = head_slowly(task.head, seen[v][b][1 + i]) / h["student_temp"]
            term = -(target * scores.log_softmax(0)).sum() / hidden[v, b].sum() / (2 * B)
            loss = loss + h["ibot_weight"] * term
    for v in (0, 1) if h["koleo_weight"] else ():
        x = [f / f.norm() for f in (pooled(task.student, tokens) for tokens in seen[v])]
        near = [min((x[a] - x[b]).norm() for b in range(B) if a != b) for a in range(B)]
        loss = loss - h["koleo_weight"] * sum(d.log() for d in near) / B
    return loss


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"centering": "sinkhorn", "koleo_weight": 0.1, "pos_embed": "rope2d", "global_pool": "avg"},
        {"ibot_weight": 0.7, "norm_last_layer": False},
        {"ibot_weight": 1.0, "centering": "sinkhorn", **T2T},
    ],
    ids=str,
)
def test_loss_and_gradients_equal_formulas(arguments):
    torch.manual_seed(0)
    task = DINO(**TINY | HEAD | arguments).double()
    task.eval()
    for module in (task.net, task.teacher_head, task.head):  # a teacher that is not the student
        for p in module.parameters():
            torch.nn.init.normal_(p, std=0.3)
    torch.nn.init.normal_(task.center, std=0.1)
    hidden = None
    if task.cover is not None:
        torch.nn.init.normal_(task.cover), torch.nn.init.normal_(task.patch_center, std=0.1)
        hidden = torch.rand(2, 3, 16) < 0.3
        hidden[0, 0] = False  # a view that is whole
    crops = [torch.randn(3, 2, 8, 8).double() for _ in range(2)] + [torch.randn(3, 2, 4, 4).double() for _ in range(2)]
    slow, before = slowly(task, crops, 0.07, hidden), task.center.clone()
    fast = task.loss_of(crops, 0.07, hidden)
    torch.testing.assert_close(fast, slow, atol=1e-9, rtol=1e-9)
    trained = [p for p in task.parameters() if p.requires_grad]
    ours, theirs = (torch.autograd.grad(x, trained, allow_unused=True, materialize_grads=True) for x in (fast, slow))
    torch.testing.assert_close(ours, theirs, atol=1e-7, rtol=1e-7)
    grouped = [p for group in task.optimizer_groups() for p in group["params"]]
    assert {id(p) for p in grouped} == {id(p) for p in trained}
    assert all(p.ndim > 1 for group in task.optimizer_groups() if group["weight_decay"] for p in group["params"])
    if task.hparams["centering"] == "mean":
        images = torch.cat(crops[:2])
        mean = torch.stack([head_slowly(task.teacher_head, x) for x in task.net(images)]).mean(0)
        torch.testing.assert_close(task.center, 0.9 * before + 0.1 * mean)


def test_schedules_are_those_published():
    steps = np.arange(40)
    published = 0.4 + 0.5 * (0.04 - 0.4) * (1 + np.cos(np.pi * steps / len(steps)))
    np.testing.assert_allclose([cosine(0.04, 0.4, i, 40) for i in steps], published, rtol=1e-12)
    task = DINO(**TINY, **HEAD, warmup_teacher_temp=0.04, teacher_temp=0.07, warmup_teacher_temp_epochs=30)
    published = np.concatenate([np.linspace(0.04, 0.07, 30), np.full(10, 0.07)])
    np.testing.assert_allclose([task.teacher_temp_of(epoch) for epoch in range(40)], published, rtol=1e-12)
    before = [p.clone() for p in task.net.parameters()]
    for p in task.student.parameters():
        torch.nn.init.normal_(p)
    task.follow(0.75)
    for old, teacher, student in zip(before, task.net.parameters(), task.student.parameters(), strict=True):
        torch.testing.assert_close(teacher, 0.75 * old + 0.25 * student)


def test_the_momentum_of_the_teacher_and_the_weight_decay_go_on_with_every_step():
    weights, decays = [], []

    class Seen(L.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            decays.append(max(group["weight_decay"] for group in optimizer.param_groups))

        def on_train_batch_end(self, trainer, pl_module, *args):
            nets = pl_module.net, pl_module.student
            weights.append([net.blocks[0].mlp.fc1.weight.detach().clone() for net in nets])

    recipe = {"opt": "SGD", "lr": 1.0, "warmup_epochs": 0, "weight_decay": 0.1, "weight_decay_end": 0.5}
    task = DINO(**{**TINY, "in_chans": 1}, **HEAD, **recipe, momentum_teacher=0.5)
    trainer = L.Trainer(max_epochs=2, limit_train_batches=2, limit_val_batches=0, callbacks=[Seen()], **QUIET)
    trainer.fit(task, Digits(batch_size=8, img_size=8, augment=[WITHOUT_SMALL]))
    assert decays == pytest.approx([0.1, 0.158579, 0.3, 0.441421], abs=1e-6)  # of 4 steps
    before = weights[0][0]
    for (teacher, student), momentum in zip(weights[1:], (0.573223, 0.75, 0.926777), strict=True):
        torch.testing.assert_close(teacher, momentum * before + (1 - momentum) * student, atol=1e-7, rtol=1e-5)
        assert (teacher - student).abs().max() > 1e-4
        before = teacher


def test_the_entropy_of_an_evaluation_is_that_of_the_centered_teacher():
    task = DINO(**TINY | HEAD)
    torch.nn.init.ones_(task.teacher_head.prototypes), torch.nn.init.ones_(task.head.prototypes)
    task.center[0] = 10.0  # so the teacher never answers prototype 0, and the other 11 equally
    task._evaluate((torch.randn(3, 2, 8, 8), None), task.val_meter)
    found = task.val_meter.read("val/")
    assert float(found["val/entropy"]) == pytest.approx(np.log(11), rel=1e-5)
    assert float(found["val/cross_entropy"]) == pytest.approx(np.log(12), rel=1e-5)


def test_the_published_head_has_its_parameters():
    with torch.device("meta"):
        task = DINO()
    assert (
        sum(p.numel() for p in task.head.parameters())
        == 384 * 2048 + 2048 + 2048**2 + 2048 + 2048 * 256 + 256 + 256 * 65536
    )


def test_crops_and_masks_depend_on_seed_epoch_and_image_alone():
    crops = MultiCrop((8, 8), "bicubic", local_crops=2, local_size=4)
    images, found = torch.randint(0, 256, (32, 3, 12, 10), dtype=torch.uint8), {}
    for world in (1, 2):
        for rank in range(world):
            order = TrainOrder(32, 8, seed=3, rank=rank, world=world)
            order.set_epoch(2)
            for step in order.steps():
                made = crops(images[step.indices], step.seeds)
                masks = step.hidden((4, 4), 1, 0, 0.1, 0.5)
                for i, *one in zip(step.indices.tolist(), made, masks, strict=True):
                    wanted = found.setdefault(i, one)
                    torch.testing.assert_close(one[0], wanted[0], atol=5e-6, rtol=0)
                    assert (one[1] == wanted[1]).all()
    counts = np.array([mask.sum() for _, mask in found.values()])
    assert counts.max() <= 8
    assert 6 < (counts == 0).sum() < 26
    crops = MultiCrop((224, 70), "bicubic")
    assert crops.local_size == (96, 30)  # 3/7, as published


def test_half_of_the_masks_hide_a_share_that_is_uniform_and_each_view_has_its_own():
    step = Step(np.arange(4000), np.arange(4000, dtype=np.uint64), None)
    first, second = (step.hidden((10, 11), 1, view, 0.1, 0.5) for view in (0, 1))
    shares = first.mean(axis=1)
    some = shares[shares > 0]
    assert abs(len(some) / 4000 - 0.5) < 0.03
    assert abs(some.mean() - 0.3) < 0.01 and some.min() < 0.11 and 0.49 < some.max() <= 0.5
    both = first[first.any(axis=1) & second.any(axis=1)], second[first.any(axis=1) & second.any(axis=1)]
    assert abs(len(both[0]) / 4000 - 0.25) < 0.03  # one view does not decide on the other
    assert abs((both[0] & both[1]).mean() - 0.09) < 0.01  # nor do its places


def recolored(image, strength=1.0, **drawn):
    """One image recolored by these random numbers, and by others that change nothing."""
    draws = np.array([0.9, 0.7, 0.2, 0.8, 0.3, 0.9, 1.0, 0.9, 1.0])
    for place, value in drawn.items():
        draws[int(place[1:])] = value
    return recolor(image[None], draws[None], strength, blur=1.0, solarize=0.2)[0]


def test_each_change_of_colors_has_its_random_number_and_its_known_result():
    image = torch.tensor([[[1.0, 0.2]], [[0.5, 0.4]], [[0.0, 0.6]]])  # two pixels
    torch.testing.assert_close(recolored(image), image, atol=1e-5, rtol=0)
    grays = torch.tensor([[[0.5925, 0.363]]]).expand(3, 1, 2)  # .299 red + .587 green + .114 blue
    torch.testing.assert_close(recolored(image, u5=0.1), grays, atol=1e-5, rtol=0)
    sun = torch.tensor([[[0.0, 0.2]], [[0.5, 0.4]], [[0.0, 0.4]]])
    torch.testing.assert_close(recolored(image, u8=0.1), sun, atol=1e-5, rtol=0)
    dark = torch.tensor([[[0.6, 0.12]], [[0.3, 0.24]], [[0.0, 0.36]]])  # times 1 - .4
    torch.testing.assert_close(recolored(image, u0=0.7, u1=0, u2=0.5, u3=0.5, u4=0.5), dark, atol=1e-5, rtol=0)
    flat = torch.tensor([[[0.7911, 0.3111]], [[0.4911, 0.4311]], [[0.1911, 0.5511]]])  # .6 color + .4 mean gray, .47775
    torch.testing.assert_close(recolored(image, u0=0.7, u1=0.5, u2=0, u3=0.5, u4=0.5), flat, atol=1e-5, rtol=0)
    pale = torch.tensor([[[0.9185, 0.2326]], [[0.5185, 0.3926]], [[0.1185, 0.5526]]])  # .8 color + .2 gray
    torch.testing.assert_close(recolored(image, u0=0.7, u1=0.5, u2=0.5, u3=0, u4=0.5), pale, atol=1e-5, rtol=0)
    vivid = torch.tensor([[[0.9195, 0.1345]], [[0.5267, 0.3585]], [[0.1195, 0.5825]]])  # 1.4 color - .4 mean gray, cut,
    torch.testing.assert_close(recolored(image, u0=0.7, u1=0.5, u2=1, u3=0, u4=0.5), vivid, atol=1e-4, rtol=0)  # pale
    gray = torch.tensor([[[0.84, 0.408], [0.744, 0.408]]])  # times 1.4, at most 1, then .6 gray + .4 mean gray, .6
    made = recolored(torch.tensor([[[1.0, 0.2], [0.6, 0.2]]]), u0=0.7, u1=1, u2=0)
    torch.testing.assert_close(made, gray, atol=1e-5, rtol=0)
    point = torch.zeros(1, 25, 31)
    point[0, 12, 15] = 1.0
    for u7, sigma in ((1.0, 2.0), (0.5, 1.05)):
        blurred = recolored(point, u6=0.0, u7=u7)
        for y, x in ((12, 15), (14, 15), (12, 19)):
            expected = np.exp(-((y - 12) ** 2 + (x - 15) ** 2) / (2 * sigma**2)) / (2 * np.pi * sigma**2)
            assert blurred[0, y, x] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("strength", "u4", "turn"), [(1, 1, 36), (1, 0.25, -18), (5, 0.75, 90), (50, 0.75, 90)])
def test_hue_turns_as_in_colorsys(strength, u4, turn):
    image = torch.tensor([[[0.6, 0.45]], [[0.5, 0.4]], [[0.4, 0.5]]])
    made = recolored(image, strength, u0=0.7, u1=0.5, u2=0.5, u3=0.5, u4=u4)
    for before, after in zip(image.flatten(1).T.tolist(), made.flatten(1).T.tolist(), strict=True):
        y, i, q = colorsys.rgb_to_yiq(*before)
        turned = complex(i, q) * cmath.exp(1j * math.radians(turn))
        np.testing.assert_allclose(after, colorsys.yiq_to_rgb(y, turned.real, turned.imag), atol=0.006)


def test_strong_jitter_reaches_black_twice_as_bright_and_the_opposite_hue_and_stays_in_range():
    green = torch.tensor([0.0, 1.0, 0.0])[:, None, None]
    opposite = torch.tensor([1.0, 0.174, 1.0])[:, None, None]  # 2 * .587 - green
    for strength in (5, 50):
        assert not recolored(green, strength, u0=0.7, u1=0, u2=0.5, u3=0.5, u4=0.5).any()
        made = recolored(green * 0.4, strength, u0=0.7, u1=0.75, u2=0.5, u3=0.5, u4=0.5)
        torch.testing.assert_close(made, green * 0.6, atol=1e-5, rtol=0)
        made = recolored(green, strength, u0=0.7, u1=0.5, u2=0.5, u3=0.5, u4=1.0)
        torch.testing.assert_close(made, opposite, atol=1e-5, rtol=0)


def test_each_crop_draws_its_colors_by_itself_and_as_often_as_published():
    crops, seeds = MultiCrop((6, 6), "bilinear", local_crops=1, local_size=4), np.arange(2000, dtype=np.uint64)
    rows = np.full((2000, 3, 1, crops.values), 230, dtype=np.uint8)  # cut before
    means = torch.stack([crop.mean(dim=(1, 2, 3)) for crop in crops.split(crops(torch.from_numpy(rows[:, :1]), seeds))])
    np.testing.assert_allclose((means < 0.5).float().mean(dim=1), [0, 0.2, 0], atol=0.03)  # solarized
    assert abs(np.corrcoef(means) - np.eye(3)).max() < 0.1
    rows[:, 1] = 100
    made = crops.split(crops(torch.from_numpy(rows), seeds))
    grays = [(crop[:, 0] - crop[:, 1]).abs().amax(dim=(1, 2)) < 0.01 for crop in made]
    np.testing.assert_allclose([one.float().mean() for one in grays], [0.2] * 3, atol=0.03)
    rows[..., ::2], rows[..., 1::2] = 0, 76  # stripes, too dark to be solarized
    made = crops.split(crops(torch.from_numpy(rows[:, :1]), seeds))
    ranges = [(crop[..., 1] - crop[..., 0]).amax(dim=(1, 2)) for crop in made]
    blurred = np.array([(one < 0.08).float().mean() for one in ranges])  # without blur at least .3 * .6 * .6
    np.testing.assert_allclose(blurred / blurred[0], [1, 0.1, 0.5], atol=0.04)
    assert blurred[0] > 0.6


@pytest.mark.parametrize("native", [(20, 30), (9, 7), (5, 4)])  # made smaller, both ways, and larger
def test_the_batch_cuts_what_antialiased_resizing_makes_of_each_box(native):
    part = MultiCrop((8, 6), "bilinear").parts[0]
    images, seeds = torch.rand(5, 1, *native), np.arange(5, dtype=np.uint64)
    made = cut_batch(images, part, seeds)
    for image, crop, draws in zip(images, made, uniforms(seeds, 23), strict=True):
        top, left, height, width = part.box(native, draws)
        piece = image[None, :, top : top + height, left : left + width]
        wanted = F.interpolate(piece, (8, 6), mode="bilinear", antialias=True)[0]
        torch.testing.assert_close(crop, wanted.flip(2) if draws[22] < 0.5 else wanted, atol=2e-3, rtol=0)


def test_large_and_small_crops_have_the_shares_of_the_image_that_were_asked_for_and_floats_stay_as_they_are():
    crops = MultiCrop((8, 8), "bilinear", 1, 4, global_scale=(0.5, 0.7), local_scale=(0.1, 0.2), colors=0)
    for part, ends in zip(crops.parts, [(0.5, 0.7), (0.5, 0.7), (0.1, 0.2)], strict=True):
        for draw, share in zip((0, 1), ends, strict=True):
            draws = np.where(np.arange(23) < 10, draw, 0.5)  # of the area, then of the aspect ratio and the place
            _, _, height, width = part.box((3000, 3000), draws)
            assert height * width / 9e6 == pytest.approx(share, rel=2e-3)
    images, seeds = torch.randint(0, 256, (3, 2, 12, 10), dtype=torch.uint8), np.arange(3, dtype=np.uint64)
    torch.testing.assert_close(crops(images / 255, seeds), crops(images, seeds))


def test_the_network_gets_crops_normalized_as_whole_images_are():
    whole = {"colors": 0, "local_crops": 0, "global_scale": [1.0, 1.0]}
    data = Digits(batch_size=16, augment=[{"class_path": "MultiCrop", "init_args": whole}])
    data.setup("fit")
    images, _, step = next(iter(data.train_dataloader()))
    made = data.pipeline.crops.split(data.on_after_batch_transfer((images, None, step), 0)[0])
    wanted = data.pipeline.normalize(images, data.statistics())
    for crop in made:
        assert torch.minimum((crop - wanted).abs(), (crop.flip(3) - wanted).abs()).amax() < 1e-4


def test_options_that_contradict_dino_are_refused_by_name():
    for arguments, line in (
        ({"mask_share": [0.5, 0.1]}, "`mask_share` must be the least and the largest"),
        ({"teacher_temp": 0.0}, r"`model.teacher_temp` must be in \(0, 1000\]"),
        ({"momentum_teacher": float("nan")}, "momentum_teacher"),
        ({"weight_decay": 0.0, "weight_decay_end": 0.4}, "`weight_decay_end` needs"),
        ({"flexi_patch": [2, 4]}, "`flexi_patch`"),
    ):
        with pytest.raises(ValueError, match=line):
            DINO(**TINY | HEAD | arguments)
    for arguments, line in (({"local_crops": -1}, "local_crops"), ({"global_scale": [0.4]}, "global_scale")):
        with pytest.raises(ValueError, match=line):
            MultiCrop((8, 8), "bicubic", **arguments)
    with pytest.raises(ValueError, match=r"MultiCrop cannot be combined with .*`data.img_size_schedule`"):
        Digits(augment=["MultiCrop"], img_size=8, img_size_schedule=[[0, 4], [1, 8]])


def test_what_does_not_go_with_crops_is_refused_by_lightnings_trainer_too():
    crops = {"batch_size": 16, "augment": [{"class_path": "MultiCrop", "init_args": {"local_size": 4}}]}
    for task, data, line in (
        (Classifier(**TINY), Digits(**crops), "MultiCrop yields crops, which `model: Classifier` does not take"),
        (DINO(**TINY | HEAD), Digits(**crops, mixup=1.0), "`data.mixup`, .* do not work on crops: set them to 0"),
    ):
        with pytest.raises(ValueError, match=line):
            L.Trainer(max_steps=1, accelerator="cpu", barebones=True).fit(task, data)


@pytest.fixture
def digits():
    return [
        "fit", "--config", str(ROOT / "configs/pretrain/dino_digits.yaml"), "--trainer.logger=false",
        "--trainer.max_epochs=2",
        "--trainer.callbacks=null", "--model.depth=1", "--trainer.log_every_n_steps=1", "--model.ibot_weight=1",
    ]  # fmt: skip


def rows_of(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if "/" in k or k in ("step", "grad_norm")} for row in rows]


@pytest.mark.slow
@pytest.mark.rare
def test_a_run_stopped_in_mid_epoch_goes_on_to_the_same_numbers_and_its_teacher_starts_others(here, capsys, digits):
    digits += ["--checkpoint.every_n_steps=1", "--model.drop_path_rate=0.2", "--model.weight_decay_end=0.4"]
    assert main([*digits, "--name", "whole"]) == 0
    with failing_at(DINO, 24):  # of 17 an epoch
        assert main([*digits, "--name", "cut"]) != 0
    assert main(["fit", "--resume", "runs/cut"]) == 0
    runs = [here / "runs" / name for name in ("whole", "cut")]
    assert rows_of(runs[0]) == rows_of(runs[1])
    assert {"val/cross_entropy", "val/entropy"} <= set(rows_of(runs[0])[-1])
    states = [torch.load(run / "checkpoints/last.ckpt", weights_only=True) for run in runs]
    assert all(torch.equal(a, states[1]["state_dict"][name]) for name, a in states[0]["state_dict"].items())
    assert {"center", "patch_center", "teacher_head.prototypes"} <= set(states[0]["state_dict"])
    decays = [group["weight_decay"] for group in states[0]["optimizer_states"][0]["param_groups"]]
    assert max(decays) == pytest.approx(cosine(0.04, 0.4, 33, 34))
    assert min(decays) == 0
    assert main(["validate", "runs/whole", "--trainer.callbacks=null"]) == 0
    assert main(["export", "runs/whole", "--to", "safetensors", "-o", "net.safetensors"]) == 0
    teacher = {k[4:]: v for k, v in states[0]["state_dict"].items() if k.startswith("net.")}
    from safetensors.torch import load_file

    assert all(torch.equal(v, teacher[k]) for k, v in load_file("net.safetensors").items())
    capsys.readouterr()
    new = ["fit", "--config", "vit", "--init_from", "runs/whole", "--model.pos_embed=sincos2d", "--name", "fine"]
    new += ["--model.depth=1", "--model.pos_embed_lr_mult=1", "--trainer.logger=false", "--trainer.max_epochs=1"]
    assert main(new) == 0
    assert "left out what lies outside the network" in capsys.readouterr().out
    assert main([*new, "--name", "other", "--data.augment=MultiCrop"]) == 2
    assert "MultiCrop yields crops, which `model: Classifier` does not take" in capsys.readouterr().err
    assert main([*digits, "--data.augment=none"]) == 2
    assert "`model: DINO` learns from crops" in capsys.readouterr().err
    assert main([*digits, '--data.augment=[{"class_path": "MultiCrop", "init_args": {"local_size": 5}}]']) == 2
    assert "patches of 2 x 2 do not fill images of 5 x 5" in capsys.readouterr().err
    no_small = '--data.augment=[{"class_path": "MultiCrop", "init_args": {"local_size": 5, "local_crops": 0}}]'
    assert main([*digits, no_small, "--dry_run"]) == 0
    assert "trained on 2 crops of 8x8, evaluated" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize("config", ["dino_digits", "mae_digits"])
def test_two_processes_take_the_steps_of_one(config, tmp_path):
    words = [sys.executable, "-m", "vitlab", "fit", "--config", str(ROOT / f"configs/pretrain/{config}.yaml")]
    words += ["--trainer.logger=false", "--trainer.max_epochs=1", "--trainer.log_every_n_steps=1", "--model.depth=1"]
    words += [
        "--trainer.callbacks=null",
        *(["--model.ibot_weight=1", "--model.koleo_weight=0"] if "dino" in config else []),
    ]
    for name, more in (("one", []), ("two", ["--trainer.devices=2", "--trainer.strategy=ddp"])):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        full = [*words, "--name", name, *more]
        done = subprocess.run(full, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    one, two = (rows_of(tmp_path / "runs" / name) for name in ("one", "two"))
    assert len(one) == len(two) > 10
    for ours, theirs in zip(one, two, strict=True):
        for key in ours:
            assert ours[key] == pytest.approx(theirs[key], rel=1e-3), key


def test_nearest_neighbors_of_koleo_are_found_in_32_bits_under_autocast():
    similar = torch.randn(1, 64) + 0.05 * torch.randn(64, 64)  # as early in training
    expected = koleo(similar)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(koleo(similar), expected)


class Twice(torch.optim.SGD):
    """Asks for the loss twice in a step, as sharpness-aware minimization does."""

    losses: list[float] = []  # noqa: RUF012

    def step(self, closure=None):
        self.losses += [float(closure()) for _ in range(2)]
        super().step()


def test_centers_move_once_a_batch_where_an_optimizer_asks_twice(monkeypatch):
    monkeypatch.setattr(Twice, "losses", [])
    tasks = []
    for opt in ("SGD", f"{__name__}.Twice"):
        torch.manual_seed(0)
        size = {**TINY, "in_chans": 1, "init_std": 0.3}
        tasks.append(
            task := DINO(**size, **HEAD, opt=opt, lr=1e-9, warmup_epochs=0, momentum_teacher=1.0, ibot_weight=1.0)
        )
        data = Digits(batch_size=8, img_size=8, augment=[WITHOUT_SMALL])
        L.Trainer(max_steps=3, limit_val_batches=0, **QUIET).fit(task, data)
    once, twice = tasks
    torch.testing.assert_close(
        (twice.center, twice.patch_center), (once.center, once.patch_center), rtol=1e-4, atol=1e-7
    )
    assert once.center.abs().max() > 1e-3
    for first, second in zip(Twice.losses[::2], Twice.losses[1::2], strict=True):
        assert first == pytest.approx(second, rel=1e-6)


def test_a_batch_that_is_not_finite_leaves_the_centers_as_they_are():
    task = DINO(**TINY, **HEAD, ibot_weight=1.0, nan_loss="skip")
    good = [torch.randn(3, 2, 8, 8) for _ in range(2)]
    bad, hidden = [crop.clone() for crop in good], torch.ones(2, 3, 16, dtype=torch.bool)
    bad[0][0, 0, 0, 0] = torch.nan
    assert task.loss_of(good, 0.04, hidden).isfinite()
    before = task.center.clone(), task.patch_center.clone()
    assert before[0].any() and before[1].any()
    assert not task.loss_of(bad, 0.04, hidden).isfinite()
    assert torch.equal(task.center, before[0]) and torch.equal(task.patch_center, before[1])
    assert task.loss_of(good, 0.04, hidden).isfinite()


@pytest.mark.parametrize(("precision", "mixed"), [("bf16-true", "bf16-mixed"), ("16-true", "16-mixed")])
def test_a_teacher_of_16_bits_is_refused_as_it_would_hardly_follow(precision, mixed):
    task, trainer = DINO(**{**TINY, "in_chans": 1}, **HEAD), L.Trainer(precision=precision, max_steps=1, **QUIET)
    line = f"the teacher of `model: DINO` needs weights of 32 bits: set --trainer.precision={mixed}, got {precision}"
    with pytest.raises(ValueError, match=re.escape(line)):
        trainer.fit(task, Digits(batch_size=8, augment=["MultiCrop"]))


@pytest.mark.slow
def test_a_dry_run_refuses_what_the_teacher_and_nearest_neighbors_cannot_have(here, capsys):
    words = ["fit", "--config", "pretrain/dino_digits", "--model.depth=1", "--trainer.callbacks=null", "--dry_run"]
    for more, line in (
        (["--trainer.precision=bf16-true"], "the teacher of `model: DINO` needs weights of 32 bits"),
        (["--data.batch_size=1", "--model.koleo_weight=0.1"], "`koleo_weight` needs two images per process"),
    ):
        assert main([*words, *more]) == 2
        assert line in capsys.readouterr().err


@pytest.mark.slow
def test_rates_and_parts_of_a_run_are_those_of_the_student(here):
    words = ["model.depth=2", "model.embed_dim=16", "model.num_heads=2", "model.pos_embed=relpos", "model.lr=0.1"]
    words += ["model.layer_decay=0.5", "trainer.callbacks=null", "trainer.logger=false", "trainer.max_steps=1"]
    assert main(["fit", "--config", "pretrain/dino_digits", *(f"--{word}" for word in words)]) == 0
    run = RunDir(next(Path("runs").iterdir()).absolute())
    state, record = torch.load(run.path / "checkpoints/last.ckpt", weights_only=True)["state_dict"], run.record
    groups = tuple(json.loads((run.path / "param_groups.json").read_text()))
    assert [(row["block"], row["lr_scale"]) for row in groups if "bias_table" in row["name"]] == [(0, 0.25), (1, 0.5)]
    facts = fair_facts(Resolved(None, {"model": {}}, {}, {}, groups, 1.0, "", length=record))
    for part in ("tokenizer", "pos_embed", "blocks"):
        size = sum(value.numel() for name, value in state.items() if name.startswith(f"student.{part}."))
        assert facts[f"{part} parameters"] == size > 0
    assert facts["pos_embed_lr_scale"] == 0.5 and facts["sum_lr_pos_embed"] == record["sum_of_learning_rates_pos_embed"]


@pytest.mark.parametrize("monitor", [{}, {"monitor": "val/cross_entropy"}, {"monitor": "val/loss"}], ids=str)
def test_a_plateau_schedule_follows_the_names_that_dino_logs(monitor):
    task = DINO(lr_scheduler={"class_path": "ReduceLROnPlateau", **monitor}, **TINY | HEAD)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    config = types.SimpleNamespace(**build_scheduler(task, optimizer, 100))
    task._trainer = types.SimpleNamespace(  # of Lightning, after a validation
        lr_scheduler_configs=[config], state=types.SimpleNamespace(fn="fit"), current_epoch=0, sanity_checking=False
    )
    logged = {}
    task.log_dict = logged.update
    task._evaluate((torch.randn(3, 2, 8, 8), None), task.val_meter)
    wrong = "val/loss" in monitor.values()
    with pytest.raises(UsageError, match=r"val/cross_entropy, .*got val/loss") if wrong else contextlib.nullcontext():
        task.on_validation_epoch_end()
    assert {*logged} == {"val/cross_entropy", "val/entropy", "val/n"}
    assert wrong or config.scheduler.best == float(logged["val/cross_entropy"])


def test_a_second_training_of_a_task_goes_on_with_its_student():
    task = DINO(**{**TINY, "in_chans": 1}, **HEAD)
    task.on_fit_start()
    with torch.no_grad():
        task.student.blocks[0].mlp.fc1.weight.add_(1.0)
    before = task.student.blocks[0].mlp.fc1.weight.clone()
    task.on_fit_start()
    assert torch.equal(task.student.blocks[0].mlp.fc1.weight, before)


def test_a_task_with_given_weights_goes_on_with_its_student():
    task, given = (DINO(**{**TINY, "in_chans": 1}, **HEAD) for _ in range(2))
    with torch.no_grad():
        given.student.blocks[0].mlp.fc1.weight.add_(1.0)
    task.load_state_dict(given.state_dict())
    task.on_fit_start()
    assert torch.equal(task.student.blocks[0].mlp.fc1.weight, given.student.blocks[0].mlp.fc1.weight)


def test_no_gradient_of_frozen_prototypes_is_measured():
    seen = []

    class Seen(L.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            head = pl_module.head
            seen.append([p.grad is None for p in (head.prototypes, head.mlp[0].weight, pl_module.student.norm.weight)])

    task = DINO(**{**TINY, "in_chans": 1}, **HEAD)
    trainer = L.Trainer(max_epochs=2, limit_train_batches=1, limit_val_batches=0, callbacks=[Seen()], **QUIET)
    trainer.fit(task, Digits(batch_size=8, augment=[{"class_path": "MultiCrop", "init_args": {"local_crops": 0}}]))
    assert seen == [[True, False, False], [False, False, False]]
