"""posbench: the images that its tasks show."""

import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from tests.posbench.planted import tiny
from vitlab.errors import UsageError
from vitlab.position_bench.answers import answers_of
from vitlab.position_bench.cells import Bench
from vitlab.position_bench.pictures import CELLS, OFFSETS, PIXELS, Split, as_floats, folder_photos, glyphs, photos


def test_the_answers_of_generated_images_can_be_read_from_them_and_not_from_their_tokens_alone():
    images, labels = glyphs(300, 9)
    cells = images[:, 0].view(-1, CELLS, PIXELS, CELLS, PIXELS).mean(dim=(2, 4)).flatten(1)
    a, b = cells.argmax(1), cells.argmin(1)
    assert torch.equal(a, labels[:, 0] * CELLS + labels[:, 1])
    assert answers_of("glyphs", Split(images, labels))["place"].tolist() == a.tolist()
    assert torch.equal(b % CELLS - a % CELLS, torch.tensor(OFFSETS)[labels[:, 2]])
    marks = images[:, 0].view(-1, CELLS, PIXELS, CELLS, PIXELS).permute(0, 1, 3, 2, 4).flatten(3)
    others = (marks.std(dim=3) > 1.6) & (cells.abs().view(-1, CELLS, CELLS) < 1.5)  # neither bright nor dark
    rows = [others[:, :, side].any(dim=2).float().argmax(dim=1) for side in (slice(2), slice(CELLS - 2, CELLS))]
    assert others.sum(dim=(1, 2)).eq(2).all()
    assert torch.equal(rows[1] - rows[0], torch.tensor(OFFSETS)[labels[:, 3]])


def test_photos_of_a_folder_come_class_by_class_in_turn_and_stay_on_disk(photos_of_three_classes, tmp_path):
    sizes = {"val": 3, "train": 18, "few": 6, "test": 12}
    found = folder_photos(photos_of_three_classes, sizes, 32, tmp_path / "kept", 3)
    assert {name: len(split.images) for name, split in found.items()} == sizes
    assert found["few"].labels.tolist() == [0, 1, 2] * 2 and found["val"].labels.tolist() == [0, 1, 2]
    assert found["train"].images.dtype == torch.uint8 and found["train"].images.shape[1:] == (3, 32, 32)
    pixels = found["few"].images[:, :, 16, 16].tolist()  # the first three photos of each class are for validation
    assert pixels == [[80 * k, 80 * k + i, 10] for i in (1, 2) for k in range(3)]
    for path in photos_of_three_classes.glob("*/*/*.png"):
        path.write_bytes(b"not read again")
    (photos_of_three_classes / "train" / "a" / ".DS_Store").write_bytes(b"of a Mac")
    again = folder_photos(photos_of_three_classes, sizes, 32, tmp_path / "kept", 3)
    assert torch.equal(again["test"].images, found["test"].images)
    with pytest.raises(UsageError, match="holds 24 images, and the protocol takes 100"):
        folder_photos(photos_of_three_classes, sizes | {"train": 97}, 32, tmp_path / "kept", 3)
    with pytest.raises(UsageError, match="there is no train"):
        folder_photos(tmp_path / "elsewhere", sizes, 32, tmp_path / "kept", 3)


def test_photos_that_are_not_those_of_the_protocol_are_one_line(photos_of_three_classes, tmp_path):
    sizes = {"val": 3, "train": 18, "few": 6, "test": 12}
    with pytest.raises(UsageError, match=r"train holds 3 classes, and the protocol has 2: `photos.classes`"):
        folder_photos(photos_of_three_classes, sizes, 32, tmp_path / "kept", 2)
    (photos_of_three_classes / "train" / "a" / "0.txt").write_text("of Krizhevsky")
    with pytest.raises(UsageError, match=r"a/0\.txt cannot be read as an image: .*; mend or remove it"):
        folder_photos(photos_of_three_classes, sizes, 32, tmp_path / "kept", 3)
    (photos_of_three_classes / "train" / "a" / "0.txt").unlink()
    whole = (photos_of_three_classes / "val" / "b" / "0.png").read_bytes()
    (photos_of_three_classes / "val" / "b" / "0.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UsageError, match=r"b/0\.png cannot be read as an image: .*; mend or remove it"):
        folder_photos(photos_of_three_classes, sizes, 32, tmp_path / "kept", 3)


def as_pngs(root, counts, shade=0, side=(32, 32), suffix="png"):
    """Save as many photos of each class in ``train`` and in ``test``, and return their folder."""
    for split in ("train", "test"):
        for k, count in enumerate(counts):
            (root / split / str(k)).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", side, (80 * k, i, shade)).save(root / split / str(k) / f"{i}.{suffix}")
    return root


def test_the_few_photos_are_the_first_of_training_and_none_is_of_validation(tmp_path):
    found = photos(as_pngs(tmp_path, [4, 4]), {"val": 2, "train": 5, "few": 3, "test": 1})
    mean, order = torch.tensor([0.4914, 0.4822, 0.4465]), [[80 * k, i, 0] for i in range(4) for k in range(2)]
    colors = {name: ((x[:, :, 0, 0] * 0.25 + mean) * 255).round().tolist() for name, (x, _) in found.items()}
    assert colors == {"val": order[:2], "train": order[2:7], "few": order[2:5], "test": order[:1]}
    assert found["few"].labels.tolist() == [0, 1, 0]


def test_another_folder_of_photos_is_refused_where_the_protocol_knows_its_digests(tmp_path):
    wrong, right = as_pngs(tmp_path / "wrong", [3, 3], shade=1), as_pngs(tmp_path / "right", [3, 3])
    settings = tiny() | {"validation": 2}
    settings["trainings"] |= {"photos": {"images": 4}, "few": {"images": 2}}
    settings["test"] |= {"photos": 6}
    digest = photos(right, {"val": 2, "train": 4, "few": 2, "test": 6})["train"].digest()
    checked = settings | {"digests": {"train": digest}}
    with pytest.raises(UsageError, match=r"of 'train' are not those of the protocol.*; `--data .*wrong` must be"):
        Bench(tmp_path / "cells", wrong, checked).pictures.of("photos")
    assert Bench(tmp_path / "cells", right, checked).pictures.of("photos").train.digest() == digest
    assert Bench(tmp_path / "others", wrong, settings).pictures.of("photos").train.digest() != digest, "without digests"


def test_cells_of_a_folder_have_one_set_of_images_where_the_protocol_has_no_digests(tmp_path):
    one, other = as_pngs(tmp_path / "one", [3, 3]), as_pngs(tmp_path / "other", [3, 3], shade=1)
    settings = tiny() | {"validation": 2}
    settings["trainings"] |= {"photos": {"images": 4}, "few": {"images": 2}}
    settings["test"] |= {"photos": 6}
    for _ in range(2):
        assert len(Bench(tmp_path / "cells", one, settings).pictures.of("photos").train.labels) == 4
    says = (
        r"of 'train' are not those of the cells in .*cells, by images.json there.*; give those, or another `--folder`"
    )
    with pytest.raises(UsageError, match=says):
        Bench(tmp_path / "cells", other, settings).pictures.of("photos")


@pytest.mark.parametrize(
    ("photos_of_yours", "says"),
    [
        (
            {"counts": [2, 2], "suffix": "jpg"},
            r"train must hold as many CLASS/\*\.png of each class, got 0, 0: this protocol",
        ),
        ({"counts": [2, 3]}, r"train must hold as many CLASS/\*\.png of each class, got 2, 3: this protocol"),
        ({"counts": []}, r"train must hold as many CLASS/\*\.png of each class, got 0: this protocol"),
        ({"counts": [2], "side": (40, 32)}, r"0\.png must have 32 x 32 pixels, got 40 x 32: this protocol"),
    ],
)
def test_photos_of_yours_in_place_of_cifar10_are_one_line(photos_of_yours, says, tmp_path):
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
    with pytest.raises(UsageError, match=says):
        photos(as_pngs(tmp_path, **photos_of_yours), {"val": 1, "train": 1, "few": 1, "test": 1})


def test_bytes_of_photos_become_the_floats_of_the_registered_protocol():
    images = torch.arange(2 * 3 * 4 * 4).view(2, 3, 4, 4).to(torch.uint8)
    mean = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
    assert torch.equal(as_floats(images), (images / 255 - mean) / 0.25)
    assert as_floats(images.float()).equal(images.float())


class Planted:
    """What runs a program when it is unpickled."""

    def __reduce__(self):
        return (pytest.fail, ("a file that nobody has checked was unpickled",))


def test_only_the_published_files_of_cifar10_are_unpickled(tmp_path, monkeypatch):
    folder, rng = tmp_path / "cifar-10-batches-py", np.random.default_rng(0)
    folder.mkdir()
    with pytest.raises(UsageError, match="lacks files of CIFAR-10 or holds damaged ones"):
        photos(tmp_path, {"val": 10, "train": 40, "few": 10, "test": 10})
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        batch = {b"data": rng.integers(0, 256, (10, 3072), dtype=np.uint8), b"labels": [*range(10)]}
        names = [f"{name}-{i}.png".encode() for i in range(10)]
        (folder / name).write_bytes(pickle.dumps({**batch, b"filenames": names}))
    (folder / "data_batch_planted").write_bytes(pickle.dumps(Planted()))
    monkeypatch.setattr("torchvision.datasets.CIFAR10", lambda root: None)  # their MD5 is that of the published ones
    found = photos(tmp_path, {"val": 10, "train": 40, "few": 10, "test": 10})
    assert len(found["train"].images) == 40 and len(found["test"].images) == 10
