"""Batches that travel to a GPU ahead of time."""

import pytest
import torch

from vitlab.data.known import FakeData
from vitlab.data.loading.loader import Prefetch
from vitlab.data.loading.order import TrainOrder
from vitlab.data.loading.pipeline import Pipeline
from vitlab.data.loading.tensor_loader import TensorLoader


def _loader(n=40, batch_size=4):
    images = torch.randint(256, (n, 3, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return TensorLoader(images, torch.arange(n), TrainOrder(n, batch_size, seed=0), (8, 8), pad=1)


class _Still(Prefetch):
    """Prefetch without a device: it notes when a batch leaves and when it is handed out."""

    def _send(self, batch, stream):
        self.log.append(("sent", batch[2].indices[0]))
        return batch, None

    def _receive(self, batch, sent):
        self.log.append(("received", batch[2].indices[0]))
        return batch


@pytest.fixture
def still(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    loader = _Still(_loader(), torch.device("cuda"))
    loader.log = []
    return loader


def _same(found, expected):
    found, expected = list(found), list(expected)
    assert len(found) == len(expected) > 0
    for (x, y, _), (a, b, _) in zip(found, expected, strict=True):
        assert torch.equal(x.cpu(), a) and torch.equal(y.cpu(), b)


def test_every_batch_comes_once_in_order_and_two_are_prefetched(still):
    _same(still, _loader())
    kinds = [kind for kind, _ in still.log]
    assert kinds == ["sent", "sent"] + ["sent", "received"] * 8 + ["received"] * 2
    assert [i for kind, i in still.log if kind == "sent"] == [i for kind, i in still.log if kind == "received"]


def test_a_resumed_epoch_counts_delivered_batches_not_prefetched_ones(still):
    batches = iter(still)
    for _ in range(3):
        next(batches)
    assert still.state_dict() == {"epoch": 0, "batches": 3}
    still.load_state_dict(still.state_dict())
    _same(still, list(_loader())[3:])


def test_on_a_cpu_nothing_is_prefetched():
    data = FakeData(n=40, batch_size=4, num_workers=0)
    for augment in ("crop-flip", "3-augment"):
        data.pipeline = Pipeline((32, 32), (32, 32), augment, 1.0, 1.0, "bilinear")
        assert not isinstance(data.train_dataloader(), Prefetch)


@pytest.mark.gpu
def test_batches_on_a_gpu_are_those_of_the_loader():
    device = torch.device("cuda")
    loader = Prefetch(_loader(n=4096, batch_size=256), device)
    found = []
    for images, labels, step in loader:
        assert images.device.type == labels.device.type == "cuda"
        torch.cuda._sleep(10**6)  # the device is busy while later batches travel
        found.append((images.clone(), labels.clone(), step))
    _same(found, _loader(n=4096, batch_size=256))


@pytest.mark.gpu
@pytest.mark.parametrize("augment", ["crop-flip", "3-augment"])
def test_photos_and_policies_are_prefetched_and_resident_sets_are_not(augment):
    pipeline = Pipeline((32, 32), (32, 32), augment, 1.0, 1.0, "bilinear")
    data = FakeData(n=40, batch_size=4, num_workers=0)
    data.build("train")
    order = TrainOrder(len(data.splits["train"]), 4, seed=0)
    loader = pipeline.loader(data.splits["train"], order, data.mean, 0, torch.device("cuda"), print)
    assert isinstance(loader, Prefetch) == (augment == "3-augment")
