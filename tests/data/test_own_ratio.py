"""Photos at their own aspect ratio, as many in a step as a budget of patches holds."""

import json
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from vitlab import load
from vitlab.cli.main import main
from vitlab.data import Digits, ImageFolder
from vitlab.data.loading.order import EvalOrder, TrainOrder
from vitlab.data.loading.own_ratio import OwnRatio, OwnRatioCropFlip, Tokens
from vitlab.errors import UsageError
from vitlab.packed_batch import PackedBatch
from vitlab.pretraining import MAE
from vitlab.tasks import Classifier
from vitlab.tasks.sizes import check_forms

TINY = {"img_size": 32, "in_chans": 3, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
NATIVE = {"img_size": 32, "native_patch": 8, "num_workers": 0}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Forty photos of many shapes; those of class b are bright below, those of a above."""
    root, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for i in range(40):
        folder = root / "ab"[i % 2]
        folder.mkdir(exist_ok=True)
        pixels = rng.integers(0, 120, (12 + 3 * i % 50, 90 - 2 * i, 3), np.uint8)
        half = np.s_[: len(pixels) // 2] if i % 2 == 0 else np.s_[len(pixels) // 2 :]
        pixels[half] += 120
        Image.fromarray(pixels).save(folder / f"{i}.png")
    return str(root)


def test_an_image_keeps_its_shape_in_at_most_so_many_patches():
    rng, own = np.random.default_rng(0), OwnRatio(16, (224, 224), "bicubic")
    for height, width in rng.integers(1, 3000, (300, 2)).tolist():
        h, w = own.grid((height, width))
        assert (1 <= h * w <= 196 and own.grid((width, height)) == (w, h)) or (h * w == 196 and h == w)
        assert h <= max(1, round(height / 16)) and w <= max(1, round(width / 16))
        if min(h, w) > 4:
            assert 0.8 < (h / w) / (height / width) < 1.25
    assert own.grid((1, 10**6)) == (1, 196) and own.grid((224, 224)) == (14, 14)
    assert own.grid((80, 728)) == (4, 42) and own.grid((728, 80)) == (42, 4)  # 4.64 x 42.24 was rounded to 5 x 42
    assert own.grid((128, 400)) == (8, 24)  # 7.92 x 24.75


@pytest.mark.parametrize("world", [1, 3])
def test_every_step_of_every_process_keeps_within_its_budget_of_patches(world):
    counts = np.random.default_rng(0).integers(1, 17, 200)
    orders = [TrainOrder(200, 12, 7, rank, world, tokens=Tokens(counts, 16)) for rank in range(world)]
    seen = []
    for epoch in range(5):
        steps = []
        for order in orders:
            order.set_epoch(epoch)
            steps.append([step.indices for step in order.steps()])
            assert len(steps[-1]) == len(order)
            assert [s.indices.tolist() for s in order.steps(2)] == [s.tolist() for s in steps[-1][2:]]
        every = np.concatenate([indices for own in steps for indices in own])
        assert len(set(every.tolist())) == len(every)
        assert max(counts[indices].sum() for own in steps for indices in own) <= 12 // world * 16
        seen.append(counts[every].sum() / counts.sum())
    assert min(seen) > 0.8  # an epoch loses less than what steps leave empty


@pytest.mark.parametrize("world", [1, 2, 3])
def test_evaluation_takes_every_image_once_and_as_many_steps_in_each_process(world):
    counts = np.r_[np.full(20, 16), np.full(40, 1), np.full(3, 9)]
    orders = [EvalOrder(63, 6, rank, world, Tokens(counts, 16)) for rank in range(world)]
    steps = [[step.indices for step in order.steps()] for order in orders]
    assert sorted(np.concatenate([i for own in steps for i in own]).tolist()) == list(range(63))
    assert {len(own) for own in steps} == {len(order) for order in orders} == {len(steps[0])}
    assert max(counts[i].sum() for own in steps for i in own) <= 6 // world * 16


def test_a_process_with_small_images_cuts_its_largest_batches_until_it_has_as_many_as_others():
    orders = [EvalOrder(60, 4, rank, 2, Tokens(np.tile([16, 1], 30), 16)) for rank in range(2)]
    large, small = ([step.indices.tolist() for step in order.steps()] for order in orders)
    assert large == [[i, i + 2] for i in range(0, 60, 4)]
    assert len(small) == 15 and [i for step in small for i in step] == [*range(1, 60, 2)]
    assert {len(step) for step in small} <= {1, 2, 3, 4}


def test_an_unreadable_image_is_replaced_by_another_of_no_more_patches():
    counts = np.array([4, 1, 2, 3, 4, 2])
    order = TrainOrder(6, 2, seed=0, tokens=Tokens(counts, 4))
    for index, partner, others in ((0, 3, {1, 2, 4, 5}), (3, 2, {1, 5}), (2, 4, {1, 5}), (1, 0, set())):
        drawn = [order.stand_ins(index, seed, partner) for seed in range(20)]
        assert all(set(one) <= others and len(set(one)) == len(one) for one in drawn)
        assert set().union(*drawn) == others


def test_an_image_is_resized_to_its_patches_whole_or_cropped():
    own = OwnRatio(8, (32, 32), "bicubic")
    image = Image.effect_noise((60, 20), 50)
    assert own.tokens(np.array([[20, 60], [60, 20], [16, 8]], dtype=np.int32)).counts.tolist() == [14, 14, 2]
    assert own(image) == image.resize((56, 16), Image.Resampling.BICUBIC)  # 2.3 x 6.9 patches
    assert OwnRatioCropFlip(own, 0.5)(image, 0).size == (56, 16)


def test_packed_batches_hold_the_images_as_read_one_by_one(photos):
    data = ImageFolder(photos, **NATIVE, batch_size=2)
    data.setup("fit")
    images, labels, step = next(iter(data.val_dataloader()))
    split = data.splits["val"]
    assert isinstance(images, PackedBatch) and len(images) == len(labels) == len(step.indices) > 1
    normal, _ = data.on_after_batch_transfer((images, labels, step), 0)
    mean, std = (torch.tensor(values)[:, None, None] for values in data.statistics())
    for i, image in zip(step.indices, normal.images(), strict=True):
        whole = data.pipeline.own_ratio(split.image(i))
        expected = (torch.from_numpy(np.array(whole)).permute(2, 0, 1) / 255 - mean) / std
        torch.testing.assert_close(image, expected, atol=1e-5, rtol=1e-5)


def test_each_image_counts_the_same_in_the_gradient_of_two_processes(monkeypatch):
    torch.manual_seed(0)
    task, images = Classifier(**TINY, num_classes=3), [torch.randn(3, 8 * n, 8) for n in (1, 2, 3, 1, 1)]
    strategy = SimpleNamespace(reduce=lambda n, reduce_op: torch.tensor(5 / 2))  # the mean of one and four images
    monkeypatch.setattr(Classifier, "trainer", SimpleNamespace(strategy=strategy))
    batches = [(PackedBatch.of(images[own], 8), torch.arange(5)[own] % 3) for own in (slice(1), slice(1, 5), slice(5))]
    *losses, whole = [task.training_step(batch, 0) for batch in batches]
    torch.testing.assert_close(sum(losses) / 2, whole / 2)
    assert task.train_sums["n"] == 10 and torch.isclose(task.train_sums["loss"], 10 * whole / 2)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"augment": ["crop-flip", "rotate90"]}, "rotate90"),
        ({"cutmix": 1.0, "repeats": 2}, "leave out `data.cutmix`, `data.repeats`"),
        ({"img_size_schedule": [[0, 16], [1, 32]]}, "leave out `data.img_size_schedule`"),
        ({"sampling": "balanced"}, "leave out `data.sampling`"),
        ({"native_patch": 5}, "must divide `data.img_size`, got 5"),
    ],
    ids=str,
)
def test_data_without_native_sizes_say_why(photos, settings, said):
    with pytest.raises(ValueError, match=r"`data\.(native_patch|augment)`") as refused:
        ImageFolder(photos, **{**NATIVE, **settings})
    assert said in str(refused.value)
    with pytest.raises(ValueError, match="these all have"):
        Digits(native_patch=4)


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (lambda: Classifier(**{**TINY, "patch_size": 16}), "patches of 3 x 8 x 8, but the network takes 3 x 16 x 16"),
        (lambda: Classifier(**TINY | {"tokenizer": "t2t", "t2t_dim": 8}), "T2TTokenizer makes its tokens otherwise"),
        (lambda: Classifier(**TINY, compile=True), "`model.compile`"),
        (lambda: MAE(**TINY, decoder_dim=16, decoder_depth=1, decoder_heads=2), "MAE"),
    ],
)
def test_tasks_that_cannot_take_native_sizes_say_why_before_anything_is_written(photos, task, said):
    data, trainer = ImageFolder(photos, **NATIVE), L.Trainer(accelerator="cpu", barebones=True)
    trainer.datamodule, built = data, task()
    built.trainer = trainer
    for refuse in (lambda: check_forms(built, data), lambda: built.setup("fit")):
        with pytest.raises(UsageError, match=r"`data\.native_patch`") as refused:
            refuse()
        assert said in str(refused.value)


@pytest.mark.rare
def test_a_run_learns_and_a_stop_in_the_middle_of_an_epoch_changes_nothing(photos, here, capsys, monkeypatch):
    step = Classifier.training_step

    def fail_at_17(self, *batch):
        if self.global_step == 17:
            raise RuntimeError("the power fails")
        return step(self, *batch)

    fit = ["fit", "--model=Classifier", "--data=ImageFolder", f"--data.root={photos}", "--data.native_patch=8"]
    fit += ["--data.img_size=32", "--data.batch_size=2", "--data.num_workers=1", "--data.augment=crop-flip"]
    fit += ["--data.crop_scale=0.8"]
    fit += ["--trainer.max_epochs=6", "--model.patch_size=8", "--model.pos_embed=[learned, rope2d]", "--model.depth=1"]
    fit += ["--model.embed_dim=16", "--model.num_heads=2", "--model.drop_path_rate=0.1", "--model.lr=0.005"]
    fit += ["--model.init_std=0.1", "--trainer.logger=false", "--checkpoint.every_n_steps=8", "--model.warmup_epochs=1"]
    assert main([*fit, "--name=whole"]) == 0
    assert "at their own aspect ratio, up to 16 patches of 8x8" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr(Classifier, "training_step", fail_at_17)
        with pytest.raises(RuntimeError):
            main([*fit, "--name=cut"])
    assert main(["fit", "--resume=cut"]) == 0
    assert main(["validate", "whole"]) == 0
    assert main(["predict", "whole", photos, "--output=table.csv"]) == 0
    assert main(["export", "whole", "--to=safetensors", "--output=net.safetensors", "--quiet"]) == 0
    assert main(["predict", "net.safetensors", photos, "--output=exported.csv"]) == 0
    mine, theirs = (pd.read_csv(f"{name}.csv") for name in ("table", "exported"))
    assert list(mine) == list(theirs)
    assert np.allclose(*(table.select_dtypes("number") for table in (mine, theirs)), atol=1e-5)
    run, file = (load(name) for name in ("whole", "net.safetensors"))
    tall = Image.new("RGB", (16, 64), "red")
    assert run.transform(tall).shape == file.transform(tall).shape == (3, 64, 16)
    assert main(["export", "whole", "--to=timm", "--output=timm.safetensors", "--quiet"]) in (0, 2)
    assert main(["export", "whole", "--to=pt2", "--output=net.pt2", "--quiet"]) == 0
    assert main(["export", "whole", "--to=onnx-int8", "--output=net.onnx", "--quiet"]) == 2
    assert "is measured on images of one size, got `data.native_patch`: use --to onnx" in capsys.readouterr().err
    card = json.loads(Path("net.pt2.json").read_text())
    assert card["measured"] == {} and "native_patch" not in card["images"]  # a graph takes one size
    whole, cut = (load_file(here / f"runs/{name}/weights/last.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    rows = [json.loads(line) for line in (here / "runs/whole/metrics.jsonl").read_text().splitlines()]
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert losses[-1] < 0.8 * losses[0]
    table = (here / "table.csv").read_text().splitlines()
    assert len(table) == 41
