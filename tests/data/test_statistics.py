"""Statistics come from the training split alone, and travel with the checkpoint."""

from contextlib import nullcontext
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.data.files.decode import Decoding
from vitlab.data.files.scan import FACTS, moments
from vitlab.data.files.sets import FileImages, TensorImages
from vitlab.data.files.store import Folder
from vitlab.data.known import Digits, FakeData


class _Loud(FakeData):
    """Images of the splits in ``loud`` are white."""

    loud = ()

    def read(self, part):
        images = super().read(part)
        indices = self.rule.indices(images.ids, images.labels.numpy())
        loud = images.images.clone()
        for name in self.loud:
            loud[indices[name]] = 255
        return TensorImages(loud, images.labels, images.ids)


def _statistics(loud=(), **settings):
    data = _Loud(native_size=8, **settings)
    data.loud = loud
    data.setup("fit")
    return data.mean, data.std


def test_no_validation_or_test_image_is_in_any_statistic():
    assert _statistics() == _statistics(loud=("val", "test"))
    assert _statistics() != _statistics(loud=("train",))


def test_another_split_seed_and_another_subset_give_other_statistics():
    assert len({_statistics(), _statistics(split_seed=1), _statistics(subset=0.5), _statistics(fold="1/3")}) == 4


def test_fit_and_validate_pass_where_the_test_part_raises_and_test_raises():
    class Guarded(FakeData):
        has_test_split = True

        def read(self, part):
            if part == "test":
                raise RuntimeError("the test part was read")
            return super().read(part)

    data = Guarded(batch_size=8)
    for stage in ("fit", "validate"):
        data.setup(stage)
    list(data.iterate_batches(data.train_dataloader()))
    list(data.iterate_batches(data.val_dataloader()))
    data.fingerprint()
    data.state_dict()
    with pytest.raises(RuntimeError, match="the test part was read"):
        data.setup("test")


def test_the_statistics_of_a_checkpoint_take_precedence():
    trained = FakeData(batch_size=8)
    trained.setup("fit")
    later = FakeData(batch_size=8, split_seed=5)
    later.setup("test")
    later.load_state_dict(trained.state_dict())
    assert (later.mean, later.std) == (trained.mean, trained.std)
    assert set(later.splits) == {"test"}  # nothing else was read for them


def test_the_state_of_data_consists_of_plain_values(tmp_path):
    data = FakeData(batch_size=8)
    data.setup("fit")
    torch.save(data.state_dict(), tmp_path / "x.ckpt")
    assert torch.load(tmp_path / "x.ckpt", weights_only=True) == data.state_dict()


def test_a_checkpoint_of_other_classes_is_refused():
    data = Digits()
    state = data.state_dict()
    for names, told in (
        ([f"n{i}" for i in range(1000)], "1,000 of 1,000 only in the checkpoint: n0, n1, n2 and 997 more; 10 of 10 .*"),
        ([*data.class_names[:8], "x"], "1 of 9 only in the checkpoint: x; 2 of 10 only in the data: 8, 9"),
        (data.class_names[::-1], "the same in another order"),
    ):
        with pytest.raises(ValueError, match=rf"classes of other data \({told}\); choose data of the same classes"):
            data.load_state_dict({**state, "class_names": names})


def _trainer(batches=0, ended=False):
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.state.fn = "fit"
    progress = trainer.fit_loop.epoch_loop.batch_progress
    progress.current.ready, progress.is_last_batch = batches, ended
    return trainer


def test_a_run_is_not_continued_on_another_training_split():
    trained, other = FakeData(batch_size=8), FakeData(batch_size=8, split_seed=5)
    for data in (trained, other):
        data.setup("fit")
    other.trainer = _trainer()
    with pytest.raises(ValueError, match="start a new run"):
        other.load_state_dict(trained.state_dict())


def test_a_run_is_not_continued_on_other_validation_images():
    trained, other = FakeData(batch_size=8), FakeData(batch_size=8)
    for data in (trained, other):
        data.setup("fit")
    other.trainer, state = _trainer(), trained.state_dict()
    other.splits["val"] = other.splits["val"].take(np.arange(1, len(other.splits["val"])))
    with pytest.raises(ValueError, match=f"the best epoch so far was chosen on {trained.splits['val'].split_hash}"):
        other.load_state_dict(state)
    del state["val_hash"]  # of an earlier vitlab
    other.load_state_dict(state)


def test_an_epoch_is_not_continued_in_another_order_or_with_other_shares_of_packed_batches():
    trained, other = FakeData(batch_size=8), FakeData(batch_size=8)
    for data in (trained, other):
        data.setup("fit")
    train, other.trainer = other.splits["train"], _trainer()
    states = {}
    for where, place in {"within": (3, False), "at its end": (3, True), "before it": (0, False)}.items():
        trained.trainer = _trainer(*place)
        states[where] = trained.state_dict()
    for where, state in states.items():
        other.splits["train"], other.pipeline.own_ratio = train.take(np.arange(len(train))[::-1].copy()), None
        with pytest.raises(ValueError, match="another order") if where == "within" else nullcontext():
            other.load_state_dict(state)
        other.splits["train"] = train
        other.load_state_dict({**state, "world": 2})
        other.pipeline.own_ratio = object()
        with pytest.raises(ValueError, match="resume it on 2") if where == "within" else nullcontext():
            other.load_state_dict({**state, "world": 2})
    other.load_state_dict({key: states["within"][key] for key in ("class_names", "seed", "order", "split_hash")})


@pytest.mark.parametrize("changed", [{"repeats": 3}, {"sampling": "balanced"}, {}], ids=str)
def test_a_run_from_before_copies_were_spread_says_so_on_resume(changed):
    trained, later = FakeData(batch_size=8, **changed), FakeData(batch_size=8, **changed)
    for data in (trained, later):
        data.setup("fit")
    later.trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    later.trainer.state.fn = "fit"
    state = trained.state_dict()
    later.load_state_dict(state)
    assert not later.notes
    del state["order"]
    later.load_state_dict(state)
    assert [note for note in later.notes if "other partners" in note] == later.notes and len(later.notes) == len(
        changed
    )


def test_hashes_change_with_seed_and_data_and_not_with_batch_size_or_workers():
    def hashes(**settings):
        data = FakeData(**settings)
        data.setup("fit")
        return {name: facts["hash"] for name, facts in data.fingerprint()["splits"].items()}

    assert hashes() == hashes(batch_size=4, num_workers=0, augment="crop-flip")
    assert len({hashes()["train"], hashes(split_seed=1)["train"], hashes(n=65)["train"]}) == 3


def test_a_flat_channel_is_not_divided_by_zero():
    images = TensorImages(torch.full((4, 1, 2, 2), 51, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64))
    assert images.statistics() == ((pytest.approx(0.2),), (1.0,))


@pytest.mark.parametrize("augment", ["none", "rand-m9-mstd0.5-inc1"])
def test_prediction_sees_an_image_as_evaluation_does(augment):
    data = FakeData(n=100, native_size=12, img_size=20, augment=augment, num_workers=0)
    data.setup("test")
    (images, _), *_ = data.iterate_batches(data.test_dataloader())
    for i in range(len(images)):
        assert torch.allclose(data.eval_transform(data.splits["test"].image(i)), images[i], atol=1e-6)


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("augment", "mixup", "one of none, crop-flip, 3-augment, rotate90, original, a timm string"),
        ("augment", "rand-x9", "one of none, crop-flip, 3-augment, rotate90, original, a timm string"),
        ("batch_size", 0, r"in \[1, 1e6\], got 0"),
        ("num_workers", -1, r"in \[0, 1024\], got -1"),
        ("crop_pct", 1.5, r"in \(0, 1\], got 1.5"),
        ("crop_mode", "centre", "one of center, squash, border, box"),
        ("interpolation", "lanczos", "one of bilinear, bicubic"),
        ("mean", [0.5, 0.5], "a value for each of 3 channels"),
        ("img_size", [8], r"a side or \[height, width\]"),
    ],
)
def test_wrong_values_name_the_argument_and_the_rule(name, value, message):
    with pytest.raises(ValueError, match=rf"`data\.{name}` must .*{message}"):
        FakeData(**{name: value}, **({"std": value} if name == "mean" else {}))


def test_given_statistics_take_precedence_over_training_split_and_checkpoint():
    data = FakeData(mean=[0.5] * 3, std=[0.25] * 3)
    data.setup("fit")
    assert data.statistics() == ((0.5,) * 3, (0.25,) * 3) and data.fingerprint()["statistics_from"] == "given"
    data.load_state_dict({**data.state_dict(), "mean": [0.1] * 3, "std": [0.2] * 3})
    assert data.mean == (0.5,) * 3 and FakeData().mean != data.mean
    with pytest.raises(ValueError, match=r"belong together: give `data.std`"):
        FakeData(mean=[0.5] * 3)


def test_a_flat_color_of_files_is_not_divided_by_the_rounding_of_its_moments():
    records = np.zeros((3, 2), FACTS)
    records["moments"] = [[moments(Image.new("RGB", (3, 3), (gray, 255, 0)))] * 2 for gray in (31, 128, 200)]
    for facts in records:
        images = FileImages(Folder(Path()), ["a", "b"], torch.zeros(2), Decoding(), facts)
        assert images.statistics()[1] == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("unit, origin", [(1e-17, 0), (1, 0), (1e9, 0), (0.05, 101_325)])
def test_numbers_in_any_unit_are_normalized_and_flat_ones_are_not_divided_by_zero(unit, origin):
    values = torch.randn(40, 2, 4, 4, generator=torch.Generator().manual_seed(0)) * unit + origin
    values[:, 1] = 0.1 * unit + origin
    std = TensorImages(values, torch.zeros(40)).statistics()[1]
    assert std == pytest.approx((values[:, 0].double().std(correction=0).item(), 1.0), rel=1e-6, abs=0)
