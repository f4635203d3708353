"""Fashion-MNIST and CIFAR in their published formats, with invented images."""

import gzip
import os
import struct
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch

from vitlab.data.known import CIFAR10, CIFAR100, FashionMNIST

SHARED = Path(os.environ.get("VITLAB_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))


def _idx(array):
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


@pytest.fixture
def root(tmp_path):
    rng = np.random.default_rng(0)
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for prefix, n in (("train", 100), ("t10k", 30)):
        images = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        labels = (np.arange(n) % 10).astype(np.uint8)
        (raw / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(_idx(images)))
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(_idx(labels))
    return tmp_path


def test_compressed_and_plain_files_are_read_and_the_official_test_set_is_the_test_split(root):
    data = FashionMNIST(root=str(root), batch_size=10, val_share=0.1)
    data.setup("fit")
    assert set(data.splits) == {"train", "val"}
    data.setup("test")
    assert {name: len(images) for name, images in data.splits.items()} == {"train": 90, "val": 10, "test": 30}
    images, labels = next(data.iterate_batches(data.test_dataloader()))
    assert images.shape == (10, 1, 28, 28) and labels.tolist() == list(range(10))


def test_fit_does_not_need_the_test_files_and_test_does(root):
    (root / "FashionMNIST" / "raw" / "t10k-images-idx3-ubyte.gz").unlink()
    data = FashionMNIST(root=str(root), batch_size=10)
    data.setup("fit")
    data.setup("validate")
    with pytest.raises(ValueError, match="t10k-images-idx3-ubyte"):
        data.setup("test")


def test_a_missing_folder_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(ValueError, match=rf"FashionMNIST/raw/train-images.*{tmp_path}; --data\.download=true"):
        FashionMNIST(root=str(tmp_path))
    with pytest.raises(ValueError, match=rf"cifar-10-batches-py.*{tmp_path}; --data\.download=true"):
        CIFAR10(root=str(tmp_path))


@pytest.mark.parametrize(
    ("data", "error", "told"),
    [
        (CIFAR100, URLError("no network"), r"cifar-100-python \(170 MB\) cannot be downloaded: no network"),
        (FashionMNIST, RuntimeError("Error downloading a.gz:\nTried x"), r"raw \(31 MB\) .*: Error downloading a.gz"),
    ],
)
def test_a_failed_download_names_what_is_missing_and_the_way_out(data, error, told, tmp_path, monkeypatch):
    def published(root, download):
        raise error

    monkeypatch.setattr(f"torchvision.datasets.{data.__name__}", published)
    with pytest.raises(ValueError, match=told + r".*; download it on a machine with a network .* --data\.root"):
        data(root=str(tmp_path), download=True).prepare_data()


@pytest.mark.parametrize("damage", [lambda b: b[:500], lambda b: b"\1" + b[1:], lambda b: b[:4], lambda b: b""])
def test_damaged_files_are_refused_with_their_path(root, damage):
    path = root / "FashionMNIST" / "raw" / "train-labels-idx1-ubyte"
    path.write_bytes(damage(path.read_bytes())[:50])
    with pytest.raises(ValueError, match=r"train-labels-idx1-ubyte|labels"):
        FashionMNIST(root=str(root)).setup("fit")


@pytest.mark.slow
def test_the_published_images_have_the_published_statistics():
    if not (SHARED / "FashionMNIST").is_dir():
        pytest.skip("Fashion-MNIST is not here")
    data = FashionMNIST(root=str(SHARED))
    images = data.read("train")
    mean, std = images.statistics()
    assert len(images) == 60000 and abs(mean[0] - 0.2860) < 1e-4 and abs(std[0] - 0.3530) < 1e-4
    assert torch.bincount(data.read("test").labels).tolist() == [1000] * 10


def test_cifar_is_read_as_torchvision_reads_it(tmp_path, monkeypatch):
    class Published:
        def __init__(self, root, train, download=False):
            rng = np.random.default_rng(int(train))
            self.data = rng.integers(0, 256, (100 if train else 20, 32, 32, 3), dtype=np.uint8)
            self.targets = [i % 100 for i in range(len(self.data))]

    monkeypatch.setattr("torchvision.datasets.CIFAR100", Published)
    (tmp_path / "cifar-100-python").mkdir()
    data = CIFAR100(root=str(tmp_path), batch_size=10, val_share=0.1)
    data.setup("test")
    assert torch.equal(data.splits["test"].images[3, :, 5, 6], torch.from_numpy(Published("", False, 0).data[3, 5, 6]))
    assert data.num_classes == 100 and data.class_names[-1] == "worm" and data.in_chans == 3


def test_damaged_cifar_files_are_one_clear_error(tmp_path):
    (tmp_path / "cifar-10-batches-py").mkdir()
    with pytest.raises(ValueError, match=r"not found or corrupted; --data.download=true fetches what is missing"):
        CIFAR10(root=str(tmp_path)).setup("fit")


def test_a_label_that_no_class_has_is_refused(root):
    path = root / "FashionMNIST" / "raw" / "train-labels-idx1-ubyte"
    path.write_bytes(path.read_bytes()[:-1] + b"\x0b")
    with pytest.raises(ValueError, match="train has the label 11, above 9"):
        FashionMNIST(root=str(root)).setup("fit")
