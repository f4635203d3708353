"""Images that grow while a network is trained."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file

from vitlab.cli.main import main
from vitlab.data import Digits, ImageFolder
from vitlab.errors import UsageError
from vitlab.jobs.train.facts import model_facts
from vitlab.tasks import Classifier

GROW = [[0, 4], [1, 6], [2, 8]]
TINY = {"in_chans": 1, "num_classes": 10, "embed_dim": 16, "depth": 1, "num_heads": 2}


def batch(data, epoch):
    loader = data.train_dataloader()
    loader.sampler.set_epoch(epoch)
    raw = next(iter(loader))
    return raw, data.on_after_batch_transfer(raw, 0)[0]


def test_an_epoch_has_its_size_and_the_images_that_it_has_without_a_schedule():
    settings = {"batch_size": 8, "augment": "crop-flip"}
    grown, plain = Digits(img_size_schedule=GROW, **settings), Digits(**settings)
    for epoch, side in ((0, 4), (1, 6), (2, 8), (7, 8)):
        (raw, _, step), images = batch(grown, epoch)
        (theirs, _, same), _ = batch(plain, epoch)
        assert torch.equal(raw, theirs) and (step.indices == same.indices).all()
        small = F.interpolate(raw.float(), (side, side), mode="bicubic", antialias=True).clamp(0, 255)
        small = small if side < 8 else raw.float()
        torch.testing.assert_close(images, (small / 255 - grown.mean[0]) / grown.std[0])
    assert next(grown.iterate_batches(grown.val_dataloader()))[0].shape[2:] == (8, 8)


@pytest.mark.slow
def test_photos_of_any_size_grow_too_whatever_the_number_of_workers(tmp_path):
    rng = np.random.default_rng(0)
    for i in range(12):
        folder = tmp_path / "ab"[i % 2]
        folder.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (40 + i, 60, 3), np.uint8)).save(folder / f"{i}.png")
    found = []
    for workers in (0, 1):
        data = ImageFolder(str(tmp_path), img_size=[32, 48], img_size_schedule=[[0, 16, 24], [2, 32, 48]],
                           batch_size=4, num_workers=workers, augment="crop-flip", random_erasing=0.5)  # fmt: skip
        found.append([batch(data, epoch)[1] for epoch in (1, 2)])
    assert [tuple(images.shape) for images in found[0]] == [(4, 3, 16, 24), (4, 3, 32, 48)]
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ([[0, 8], [1, 4]], "must not go down, got 8x8 and then 4x4 from epoch 1 on"),
        ([[1, 4], [2, 8]], r"must begin with epoch 0 .*, got \[1, 2\]"),
        ([[0, 4], [0, 8]], r".* its epochs must increase, got \[0, 0\]"),
        ([[0], [1, 8]], r"must be a list of \[epoch, side\] or \[epoch, height, width\]"),
        ([[0, 4], [1, 6]], "must end with `data.img_size`, 8x8, got 6x6"),
    ],
)
def test_impossible_schedules_of_sizes_are_refused(schedule, message):
    with pytest.raises(ValueError, match=f"`data.img_size_schedule` {message}"):
        Digits(img_size_schedule=schedule, batch_size=8).train_dataloader()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"patch_size": 4}, "patches of 4 x 4 do not fill images of 6 x 6; the nearest are 4 x 4, 4 x 8, 8 x 4, 8 x 8"),
        ({"patch_size": 2, "flexi_patch": [2, 4]}, "patches of 4 x 4 do not fill images of 6 x 6"),
        ({"tokenizer": "t2t", "t2t_kernels": [6, 2, 2], "t2t_strides": [1, 1, 1], "t2t_padding": "none"},
         "6 does not fit"),
    ],
)  # fmt: skip
def test_sizes_that_the_tokens_do_not_fit_are_refused_before_anything_is_written(model, message):
    data, task = Digits(img_size_schedule=GROW), Classifier(img_size=8, **TINY, **model)
    with pytest.raises(UsageError, match=message) as refused:
        model_facts(task, data)
    assert "`data.img_size_schedule`" in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("pos_embed", ["learned", "rope2d"])
def test_the_cost_of_a_step_is_that_of_its_size(pos_embed):
    task = Classifier(img_size=8, patch_size=2, pos_embed=pos_embed, **TINY)
    facts, epochs = model_facts(task, Digits(img_size_schedule=GROW)), []
    for epoch, side in GROW:
        own = Classifier(img_size=side, patch_size=2, pos_embed=pos_embed, **TINY)
        epochs.append([epoch, model_facts(own, Digits())["flops"]])
    assert facts["flops_from"] == epochs and facts["flops"] == epochs[-1][1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(["--model.patch_size=2", "--model.flexi_patch=[1, 2]", "--model.pos_embed=relpos"],
                     marks=pytest.mark.rare),
        ["--model.tokenizer=t2t", "--model.t2t_kernels=[3,3,3]", "--model.t2t_strides=[2,1,1]",
         "--model.pos_embed=learned"],
    ],
)  # fmt: skip
@pytest.mark.rare
def test_a_stop_in_the_middle_of_an_epoch_changes_nothing(here, model, capsys, monkeypatch):
    step = Classifier.training_step

    def fail_at_7(self, *batch):
        if self.global_step == 7:
            raise RuntimeError("the power fails")
        return step(self, *batch)

    fit = ["fit", "--model=Classifier", "--data=Digits", f"--data.img_size_schedule={GROW}", "--data.batch_size=256"]
    fit += ["--trainer.max_epochs=3"]
    fit += ["--data.augment=crop-flip", "--model.drop_path_rate=0.1", "--trainer.log_every_n_steps=1", *model]
    fit += ["--model.embed_dim=16", "--model.depth=1", "--model.num_heads=2", "--trainer.logger=false"]
    fit += ["--checkpoint.every_n_steps=3"]
    assert main([*fit, "--name=whole"]) == 0
    assert "trained at 4x4 for 1 epoch, at 6x6 for 1, then at 8x8" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr(Classifier, "training_step", fail_at_7)
        with pytest.raises(RuntimeError):
            main([*fit, "--name=cut"])  # after a checkpoint at step 6 of 12
    assert main(["fit", "--resume=cut"]) == 0
    whole, cut = (load_file(here / f"runs/{name}/weights/last.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    rows = [json.loads(line) for line in (here / "runs/cut/metrics.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows} >= {6, 7, 12}
