"""Data that are not vitlab's: analyses take images and targets from their loaders; and the probe of any network."""

import dataclasses

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from vitlab.analysis import (
    analyze_attention,
    analyze_confusion,
    analyze_errors,
    analyze_probe,
    analyze_scramble_image,
    analyze_shift,
)
from vitlab.analysis.outcomes.outcome import outcome_of
from vitlab.analysis.pictures import LoadedImages
from vitlab.analysis.subject import Subject
from vitlab.errors import UsageError
from vitlab.models.vit import VisionTransformer
from vitlab.tasks import Regressor


class Halves(L.LightningDataModule):
    """Images that are bright on the left (class 0) or on the right; those of validation say what they are, but one."""

    class_names = ("left", "right")

    def __init__(self, targets=lambda labels: labels, form=tuple):
        super().__init__()
        self.targets, self.form, self.set_up = targets, form, []

    def setup(self, stage):
        self.set_up.append(stage)

    def loader(self, seed, wrong):
        rng = torch.Generator().manual_seed(seed)
        labels = torch.randint(2, (20,), generator=rng)
        images = torch.rand(20, 1, 8, 8, generator=rng)
        for image, label in zip(images, labels, strict=True):
            image[:, :, :4] += 1 - label
            image[:, :, 4:] += label
        labels[:wrong] = 1 - labels[:wrong]
        return DataLoader(TensorDataset(images, self.targets(labels)), batch_size=8)

    def train_dataloader(self):
        return self.loader(0, 0)

    def val_dataloader(self):
        return self.loader(1, 1)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return self.form((2 * batch[0], batch[1]))  # as Lightning gives it to the network


class Sides(nn.Module):
    def forward(self, images):
        return torch.stack([images[..., :4].sum(dim=(1, 2, 3)), images[..., 4:].sum(dim=(1, 2, 3))], dim=1)


def test_custom_data_are_analyzed_with_the_images_and_classes_of_their_loaders():
    data = Halves()
    subject = Subject(Sides(), data, name="own", split="val")
    assert subject.class_names == ["left", "right"] and subject.classifies
    images, labels = subject.labeled()
    expected = list(data.val_dataloader())
    torch.testing.assert_close(images, 2 * torch.cat([batch[0] for batch in expected]))
    assert torch.equal(labels, torch.cat([batch[1] for batch in expected]))
    assert data.set_up == ["fit"]
    wrong = analyze_errors(subject).table
    assert len(wrong) == 1 and wrong["image"].tolist() == ["image 0"]
    assert analyze_confusion(subject).note.startswith("20 images of val")
    shown = subject.pixels(subject.shown(2))
    assert shown.shape == (2, 8, 8, 1) and 0 <= float(shown.min()) < float(shown.max()) <= 1
    assert subject.shown_classes(2) == labels[[next(j for j in range(20) if torch.equal(images[j], one)) for one in
                                               subject.shown(2)]].tolist()  # fmt: skip


class Raw(Halves):
    """Leaves the batches to the module."""

    on_after_batch_transfer = L.LightningDataModule.on_after_batch_transfer


class Asking(Halves):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        noise = torch.randn_like(batch[0]) if self.trainer.training or not self.trainer.validating else 0
        return batch[0] + noise, batch[1]


class Hooked(L.LightningModule):
    """Changes batches on their way, and keeps those that it gets; with noise in training."""

    def __init__(self):
        super().__init__()
        self.net, self.register, self.seen = Sides(), nn.Parameter(torch.zeros(())), []

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch[0] - 0.5, batch[1]

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return [each.to(device) for each in (3 * batch[0], batch[1])]

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0].square() + self.register.expand(()) + (torch.rand(()) if self.training else 0), batch[1]

    def validation_step(self, batch, batch_idx):
        self.seen.append(batch[0])


@pytest.mark.filterwarnings("ignore:You have overridden")
@pytest.mark.parametrize("cls", [Raw, Halves, Asking])
def test_images_of_an_analysis_are_those_that_a_validation_measures(cls):
    """Hooks of the module did nothing, and of the data failed where they asked the trainer."""
    data, task = cls(), Hooked()
    trainer = L.Trainer(accelerator="cpu", barebones=True)
    trainer.validate(task, data, verbose=False)
    found = Subject(Sides(), LoadedImages(data, task, trainer)).labeled()[0]
    torch.testing.assert_close(found, torch.cat(task.seen), atol=0, rtol=0)
    assert not found.requires_grad and trainer.state.stage is None
    again = Subject(Sides(), data, task=task.train())
    torch.testing.assert_close(again.labeled()[0], found, atol=0, rtol=0)
    assert task.training


def test_numbers_of_custom_data_are_compared_in_their_own_unit():
    class One(nn.Module):
        def forward(self, images):
            return images.mean(dim=(2, 3))

    subject = Subject(One(), Halves(lambda labels: 3.0 * labels), name="own")
    table = analyze_errors(subject).table
    assert list(table) == ["image", "target/value 1", "prediction/value 1", "error"] and len(table) == 20
    assert set(table["target/value 1"]) == {0.0, 3.0}
    with pytest.raises(UsageError, match="predicts numbers"):
        analyze_confusion(subject)


class Ages(L.LightningDataModule):
    """Images whose brightness, from -1 to 1, is an age of 380 to 420 years."""

    targets = {"kind": "number", "names": ["age"], "mean": [400.0], "std": [20.0]}  # noqa: RUF012

    def val_dataloader(self):
        ages = torch.linspace(380, 420, 9)
        images = ((ages - 400) / 20).view(-1, 1, 1, 1).expand(-1, 1, 8, 8)
        return DataLoader(TensorDataset(images, ages), batch_size=4)


class Brightness(nn.Module):
    def __init__(self, factor=1.0, added=0.0):
        super().__init__()
        self.factor, self.added = factor, added

    def forward(self, images):
        return self.factor * images.mean(dim=(2, 3)) + self.added


class Years(L.LightningModule):
    """A module of one's own, which answers in years."""


def test_numbers_of_custom_data_that_say_their_scale_are_compared_in_it():
    sizes = {"img_size": 8, "in_chans": 1, "patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 2}
    own = Subject(Brightness(20.0, 400.0), Ages(), task=Years())
    learned = Subject(Brightness(), Ages(), task=Regressor(targets=Ages.targets, **sizes))
    for subject in (own, learned, Subject(Brightness(), Ages())):
        found = outcome_of(subject)
        assert found.names == ["age"] and float(found.targets.max()) == 420
        torch.testing.assert_close(found.outputs, found.targets, atol=1e-3, rtol=0)


class Sights(L.LightningDataModule):
    class_names = ("sun", "sea", "sky")

    def __init__(self, as_type, **facts):
        super().__init__()
        self.as_type = as_type
        if facts:
            self.targets = facts

    def val_dataloader(self):
        there = torch.tensor([[1, 0, 1], [0, 0, 1], [1, 1, 0], [0, 0, 0]])
        images = (2.0 * there - 1)[:, None, :, None].expand(-1, 1, 3, 3)
        return DataLoader(TensorDataset(images, there.to(self.as_type)), batch_size=2)


class Rows(nn.Module):
    def forward(self, images):
        return 8 * images.mean(dim=3)[:, 0]


@pytest.mark.parametrize("as_type", [torch.float32, torch.int64, torch.bool])
def test_columns_of_zeros_and_ones_are_labels_unless_the_data_say_otherwise(as_type):
    subject = Subject(Rows(), Sights(as_type))
    assert subject.net.predicts_labels and not subject.classifies and subject.class_names == ["sun", "sea", "sky"]
    assert outcome_of(subject).names == subject.class_names and not outcome_of(subject).wrong().any()
    unnamed = Sights(as_type, kind="multilabel", names=["a", "b", "c"])
    unnamed.class_names = None
    assert Subject(Rows(), unnamed).class_names == ["a", "b", "c"]
    numbers = Subject(Rows(), Sights(as_type, kind="number", names=["a", "b", "c"]))
    assert (outcome_of(numbers).kind, outcome_of(numbers).names) == ("number", ["a", "b", "c"])


def test_a_batch_without_images_and_targets_is_named():
    with pytest.raises(UsageError, match=r"must give images \(B, C, H, W\) and targets .* and give a dict"):
        Subject(Sides(), Halves(form=lambda pair: dict(zip("ab", pair, strict=True))))
    subject = Subject(Sides(), Halves(lambda labels: labels + 5), name="own")
    with pytest.raises(UsageError, match="neither classes nor numbers"):
        analyze_errors(subject)


def test_pictures_without_classes_are_shifted_and_scrambled_and_their_predictions_compared():
    transform = lambda image: torch.full((1, 8, 8), image.getpixel((0, 0)) / 255)  # noqa: E731
    subject = Subject(Sides(), transform, pictures=torch.rand(6, 1, 8, 8), name="own")
    shift = analyze_shift(subject)
    assert "acc1" not in shift.table and "no accuracy is measured" in shift.note
    half = shift.table.query("fill == 'circular' and pixels == 4 and direction == 'left'")
    assert half["flipped"].item() == 1  # by half of the image: the other side is the bright one
    assert set(shift.table.query("pixels == 0")["agreement"]) == {1.0}
    scrambled = analyze_scramble_image(subject)
    assert "acc1" not in scrambled.table and scrambled.table["flipped"].between(0, 1).all()


class Blocks(nn.Module):
    """Two convolutions of 2 x 2 and of 1 x 1, which have no border; with ``table``, positions are added between."""

    def __init__(self, table):
        super().__init__()
        self.conv, self.table = nn.Conv2d(3, 8, 2, stride=2), nn.Parameter(torch.zeros(8, 4, 4))
        self.more, self.head = nn.Conv2d(8, 16, 1), nn.Linear(16, 2)
        if table:
            nn.init.normal_(self.table, std=5)

    def forward(self, images):
        return self.head(self.more(self.conv(images) + self.table).mean(dim=(2, 3)))


class Skies(L.LightningDataModule):
    """Images with a bright upper half: the content tells where a token is."""

    def loader(self, seed):
        images = torch.rand(64, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
        images[:, :, :4] += 2
        return DataLoader(TensorDataset(images, torch.arange(64) % 2), batch_size=32)

    def train_dataloader(self):
        return self.loader(0)

    def val_dataloader(self):
        return self.loader(1)


@pytest.mark.slow
@pytest.mark.parametrize("knows", [False, True])
def test_the_probe_of_a_foreign_network_finds_positions_and_not_content(knows):
    torch.manual_seed(0)
    table = analyze_probe(Subject(Blocks(knows), Skies(), name="own", num_images=64)).table
    assert list(table.columns)[:4] == ["images", "positions", "layer", "accuracy"]
    assert set(table["images"]) == {"validation", "rolled", "noise"}
    after = table[table["of"] == "more"].set_index("images")
    assert after.loc["validation", "excess_low"] > 0  # the sky tells the row
    for name in ("rolled", "noise"):
        if knows:
            assert after.loc[name, "accuracy"] > 0.95
        else:
            assert abs(after.loc[name, "excess"]) < 0.03
    assert np.allclose(after["chance"], 1 / 16)


def test_the_probe_of_pictures_alone_reads_noise():
    torch.manual_seed(0)
    subject = Subject(Blocks(True), lambda image: torch.zeros(3, 8, 8), pictures=torch.rand(2, 3, 8, 8), num_images=64)
    table = analyze_probe(subject).table
    assert set(table["images"]) == {"noise"}
    flat = nn.Sequential(nn.Flatten(), nn.Linear(192, 5), nn.Linear(5, 2))
    with pytest.raises(UsageError, match=r"a place in the image, and model \(Sequential\) shows none"):
        analyze_probe(Subject(flat, lambda image: torch.zeros(3, 8, 8), pictures=torch.rand(2, 3, 8, 8)))


def test_arrays_of_five_channels_are_drawn_in_gray():
    net = VisionTransformer(img_size=8, in_chans=5, patch_size=4, embed_dim=16, depth=1, num_heads=2, num_classes=3)
    subject = Subject(net, lambda image: torch.zeros(5, 8, 8), pictures=torch.randn(2, 5, 8, 8))
    assert set(analyze_attention(subject).table["image"]) == {0, 1}
    assert subject.pixels(subject.shown()).shape == (2, 8, 8, 1)


def test_a_changed_copy_of_a_subject_has_outputs_of_its_own():
    subject = Subject(Sides(), Halves(), num_images=16)
    assert len(subject.outputs()) == 16 and len(dataclasses.replace(subject, num_images=8).outputs()) == 8
