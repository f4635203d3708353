"""Arrays in memory: a file or a program's own, any number of channels, not square."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn

from vitlab.cli.main import main
from vitlab.data import Arrays
from vitlab.data.arrays import fold_column
from vitlab.data.record import Trained, measured


def _arrays(n=40, shape=(2, 6, 10)):
    rng = np.random.default_rng(0)
    return rng.normal(5, 3, (n, *shape)), rng.normal(0, 1, (n, 2))


def test_a_file_is_what_its_arrays_are_and_each_channel_is_normalized_by_the_training_split(tmp_path):
    images, targets = _arrays()
    np.savez(tmp_path / "all.npz", images=images, targets=targets, names=["up", "side"])
    np.save(tmp_path / "images.npy", images)
    np.save(tmp_path / "targets.npy", targets)
    sets = [
        Arrays(str(tmp_path / "all.npz"), batch_size=4),
        Arrays(str(tmp_path / "images.npy"), str(tmp_path / "targets.npy"), batch_size=4),
        Arrays(torch.from_numpy(images), targets, batch_size=4),
    ]
    assert sets[0].targets["names"] == ["up", "side"] and sets[1].targets["names"] == ["target_1", "target_2"]
    for data in sets:
        data.setup("fit")
        rows = [int(name) for name in data.splits["train"].names]
        assert len(rows) == 26 and np.allclose(data.mean, images[rows].mean((0, 2, 3)))
        assert np.allclose(data.std, images[rows].std((0, 2, 3)))
        batch, numbers = next(data.iterate_batches(data.val_dataloader()))
        first = int(data.splits["val"].names[0])
        mean, std = (np.array(x)[:, None, None] for x in data.statistics())
        assert np.allclose(batch[0], (images[first] - mean) / std, atol=1e-5) and batch.shape == (4, 2, 6, 10)
        assert np.allclose(numbers[0], targets[first])
        assert data.splits["train"].split_hash == sets[0].splits["train"].split_hash


def test_rows_keep_their_split_when_others_are_added():
    images, targets = _arrays(80)
    before, after = Arrays(images[40:], targets[40:]), Arrays(images, targets)
    of = [
        {images[int(n) + s].tobytes(): k for k, x in _built(d).items() for n in x.names}
        for d, s in ((before, 40), (after, 0))
    ]
    assert sum(of[0][key] != of[1][key] for key in of[0]) <= 8


def _built(data):
    data.setup("fit")
    data.setup("test")
    return data.splits


def test_groups_times_and_weights_are_those_of_a_table(tmp_path):
    images, _ = _arrays(shape=(6, 10))
    groups = np.arange(40) // 4
    np.savez(
        tmp_path / "a.npz", images=images, targets=np.arange(40) % 2, group=groups, time=-groups, weight=groups + 1.0
    )
    data = Arrays(str(tmp_path / "a.npz"), split_by="time")
    of = {name: {groups[int(n)] for n in split.names} for name, split in _built(data).items()}
    assert of == {"test": {0, 1}, "val": {2, 3}, "train": {4, 5, 6, 7, 8, 9}} and data.class_names == ["0", "1"]
    assert data.in_chans == 1 and data.sample_weights.mean().item() == pytest.approx(1)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((np.zeros((60, 100)), [1]), "must hold N x H x W or N x C x H x W numbers, and its images are 60 x 100"),
        ((np.zeros((5, 60, 100)),), "the data has no targets: save them together"),
        ((np.zeros((5, 60, 100)), np.zeros(4)), r"`targets` must have a value .* of 5 images, got .* \(4,\)"),
        ((np.zeros((5, 60, 100, 3)), np.zeros(5)), "channels before height"),
        ((np.full((5, 6, 6), np.nan), np.zeros(5)), "image 0 has values that are not finite"),
        (("nowhere.npz",), "there is no nowhere.npz"),
        ((np.zeros((2, 8, 8)), np.array(["a", None])), "the data, row 2: .* is empty; .* out of a table"),
        ((np.zeros((2, 8, 8)), np.array(["a", "a"]), "multilabel"), "one label, a; labels stand apart by ';'"),
    ],
)
def test_arrays_that_are_not_images_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Arrays(*arguments)


def test_folds_paths_and_bytes_of_arrays_are_read_as_in_a_table(tmp_path):
    images, fold = np.random.default_rng(0).random((40, 8, 8)), np.arange(40) % 4
    np.savez(tmp_path / "a.npz", images=images, targets=np.array([b"cat", b"dog"])[fold % 2], fold=fold, names="pet")
    data = Arrays(tmp_path / "a.npz", fold="3", batch_size=4)
    data.build("val")
    assert (data.class_names, len(data.splits["val"])) == (["cat", "dog"], 10)


def test_words_of_arrays_may_be_bytes(tmp_path):
    words = {"split": np.array(["train", "val", "test", "train"])[np.arange(40) % 4], "names": np.array(["pet"])}
    words |= {"fold": np.arange(40).astype(str), "group": np.arange(40).astype(str), "targets": words["split"]}
    images = np.random.default_rng(0).random((40, 8, 8))
    np.savez(tmp_path / "a.npz", images=images, **{name: values.astype("S") for name, values in words.items()})
    data = Arrays(tmp_path / "a.npz", batch_size=4)
    assert data.parts == {"train": "train", "val": "val", "test": "test"} and data.table.targets == ["pet"]
    assert (data.folds, data.table.groups) == (words["fold"].tolist(), words["group"].tolist())
    assert fold_column(str(tmp_path / "a.npz")).tolist() == words["fold"].tolist()
    with pytest.raises(ValueError, match="the data cannot be read: 'utf-8' codec can't decode byte 0xe9"):
        Arrays(images, np.array([b"a", b"\xe9"] * 20))


@pytest.mark.slow
def test_the_header_of_arrays_counts_in_singular_and_tells_what_a_task_leaves_out(here, capsys):
    np.savez("a.npz", images=np.random.default_rng(0).random((20, 8, 8)), targets=np.arange(20) / 3, weight=np.ones(20))
    words = ["fit", "--config", "vit", "--data=Arrays", "--data.path=a.npz", "--data.batch_size=4", "--dry_run"]
    words += ["--model.depth=1", "--model.embed_dim=8", "--model.num_heads=2", "--model.patch_size=4"]
    assert main([*words, "--model=MAE"]) == 0
    told = capsys.readouterr().out
    assert ", 1 block, " in told and ", 1 number each, " in told and "targets are 1 number (target_1)" in told
    assert "the column weight is not used: the loss reads no targets" in told and "in the training loss" not in told
    assert "rows are weighted in the training loss by the column weight" in Arrays("a.npz").notes
    assert main([*words, "--model=DINO", "--model.prototypes=8"]) == 2
    assert "`model: DINO` learns from crops, and arrays are not cropped" in capsys.readouterr().err


OF_TARGETS = [
    ({"targets": np.array([0.5, np.nan, 1.5, 2.5])}, "a.npz, row 2: the column target_1 is empty"),
    ({"targets": np.zeros((4, 2)), "names": ["a", "a"]}, "names a twice"),
    ({"targets": np.zeros((4, 2)), "names": ["a"]}, "has 1 `names` of 2 targets"),
    ({"targets": np.zeros(4), "names": "path"}, "no target can be called path"),
    ({"targets": np.zeros(4), "names": "weight", "weight": np.ones(4)}, "no target can be called weight"),
    (
        {"targets": np.zeros(4), "group": np.zeros((4, 2))},
        r"`group` must have a value for each of 4 images, got an array \(4, 2\)",
    ),
]


@pytest.mark.parametrize(("arrays", "message"), OF_TARGETS, ids=[message[:30] for _, message in OF_TARGETS])
def test_arrays_beside_the_images_are_refused_by_their_name(arrays, message, tmp_path):
    np.savez(tmp_path / "a.npz", images=np.zeros((4, 8, 8)), **arrays)
    with pytest.raises(ValueError, match=message):
        Arrays(str(tmp_path / "a.npz"))


@pytest.mark.parametrize("side", [40, 80])  # copied together, and one by one
def test_shifted_arrays_keep_their_values_and_get_the_mean_in_added_pixels(side):
    images = np.random.default_rng(0).random((20, 3, side, side)) * 10 + 300
    data = Arrays(images, np.arange(20.0), batch_size=13, augment="crop-flip")
    data.setup("fit")
    (batch, _) = next(data.iterate_batches(data.train_dataloader()))
    added = batch.abs() < 1e-4
    assert 0.02 < added.float().mean() < 0.3 and added.all(1).any()
    assert abs(batch[~added].std() - 1) < 0.02 and batch.abs().max() < 1.8


@pytest.mark.parametrize("channels", [1, 5])
def test_arrays_larger_than_the_input_are_seen_whole_as_prediction_sees_them(channels, tmp_path):
    images = np.random.default_rng(0).normal(1000, 200, (20, channels, 12, 18)).astype(np.float32)
    data = Arrays(images, np.arange(20.0) + 0.5, batch_size=4, img_size=8, num_workers=0, augment="crop-flip")
    data.setup("test")
    batch, _ = next(data.iterate_batches(data.test_dataloader()))
    np.save(tmp_path / "a.npy", images[int(data.splits["test"].names[0])])
    alone = data.eval_file(tmp_path / "a.npy")
    assert torch.allclose(batch[0], alone, atol=1e-5)
    assert data.preparation()["native_size"] == [12, 18] and data.pipeline.protocol()["crop"] == "none"
    assert next(data.iterate_batches(data.train_dataloader()))[0].shape == (4, channels, 8, 8)


def test_arrays_resized_to_one_column_keep_the_order_of_their_rows():
    images = np.arange(12.0, dtype=np.float32)[:, None].repeat(18, 1)[None, None].repeat(20, 0)
    data = Arrays(images, np.arange(20.0) + 0.5, batch_size=4, img_size=[6, 1], num_workers=0, augment="none")
    data.setup("test")
    rows = next(data.iterate_batches(data.test_dataloader()))[0][0, 0, :, 0]
    assert torch.allclose(rows, -rows.flip(0), atol=1e-5) and (rows[1:] > rows[:-1]).all()


def test_square_arrays_of_many_channels_and_four_pixels_are_no_photos():
    assert Arrays(np.random.default_rng(0).normal(size=(20, 8, 4, 4)), np.arange(20) % 2).img_size == (4, 4)


def test_a_run_that_saw_arrays_cut_is_measured_that_way_and_not_resumed():
    images = np.random.default_rng(0).normal(size=(20, 1, 12, 18)).astype(np.float32)
    now = Arrays(images, np.arange(20.0) + 0.5, img_size=8)
    facts, state = now.fingerprint() | {"seed": 0}, now.state_dict()
    with measured(Trained({**facts, "native_size": None}, None, "test")):
        assert Arrays(images, np.arange(20.0) + 0.5, img_size=8).pipeline.native_size is None
    now.trainer = SimpleNamespace(state=SimpleNamespace(fn=TrainerFn.FITTING))
    now.load_state_dict(state)
    with pytest.raises(ValueError, match="trained on crops of arrays of 12x18, which are now seen whole"):
        now.load_state_dict({name: value for name, value in state.items() if name != "whole_arrays"})
