import pytest
import torch
from tiny import IMAGES, NETWORK, loader, task, trainer
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset
from torchmetrics import MetricCollection

from vitlab.callbacks.predictions import Predictions
from vitlab.data.files.decode import ImageError
from vitlab.data.files.sets import TensorImages
from vitlab.data.loading.order import EvalOrder
from vitlab.data.loading.sample_loader import SampleLoader
from vitlab.look.live import LivePage
from vitlab.tasks import Regressor
from vitlab.tasks.meter import Meter


def kept(folder, model, batches, stage="validate"):
    predictions = Predictions()
    for _ in range(2):  # the second counts alone
        getattr(trainer(folder, predictions), stage)(model, batches, verbose=False)
    return predictions.table(batches)


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_every_image_has_its_class_and_the_probability_that_the_network_gives_it(tmp_path, stage):
    model = task()
    table = kept(tmp_path, model, loader(batch=5), stage)  # the last batch is smaller
    with torch.no_grad():
        probability, prediction = model.eval()(IMAGES).softmax(dim=1).max(dim=1)
    assert table["index"].tolist() == list(range(12))
    assert table["target"].tolist() == [0, 1, 2] * 4
    assert table["prediction"].tolist() == prediction.tolist()
    assert table["probability"].tolist() == pytest.approx(probability.tolist())


def test_predictions_follow_the_order_of_the_split_not_of_the_loader(tmp_path):
    class Backwards(torch.utils.data.Sampler):
        indices = range(11, -1, -1)

        def __iter__(self):
            return iter(self.indices)

        def __len__(self):
            return 12

    data = TensorDataset(IMAGES, torch.arange(12) % 3)
    backwards = kept(tmp_path, task(), DataLoader(data, batch_size=4, sampler=Backwards()))
    forwards = kept(tmp_path, task(), DataLoader(data, batch_size=4))
    assert backwards.drop(columns="probability").equals(forwards.drop(columns="probability"))
    assert backwards["probability"].tolist() == pytest.approx(forwards["probability"].tolist())


@pytest.mark.parametrize(
    "returned", [torch.tensor(0.5), {"loss": torch.tensor(0.5)}, None], ids=["loss", "dict", "none"]
)
def test_what_a_step_of_the_users_returns_is_no_prediction_unless_the_task_has_measured_it(tmp_path, returned):
    """A loss, as in Lightning's examples, ended `validate` with an IndexError."""
    model = task()
    own = model.validation_step
    model.validation_step = lambda batch, batch_idx: (own(batch, batch_idx), returned)[1]
    assert kept(tmp_path, model, loader()).empty
    model.validation_step = lambda batch, batch_idx: own(batch, batch_idx) * 2  # the metrics are of others
    assert kept(tmp_path, model, loader()).empty


def test_a_step_that_returns_the_outputs_of_half_its_images_leaves_no_table(tmp_path):
    model, predictions = task(), Predictions()
    own = model.validation_step
    model.validation_step = lambda batch, batch_idx: [own([part[i::2] for part in batch], batch_idx) for i in (0, 1)][1]
    (found,) = trainer(tmp_path, predictions).validate(model, loader(), verbose=False)
    assert (found["val/n"], len(predictions.table(loader()))) == (12, 6)
    assert predictions.table(loader(), found["val/n"]).empty and len(predictions.table(loader(), 6)) == 6


@pytest.mark.parametrize("form", ["with indices", "dict"])
def test_targets_are_those_that_the_task_measured_wherever_a_step_of_the_users_takes_them_from(tmp_path, form):
    """They were the second part of each batch: indices as classes, so that `ablate verify` accused honest cells."""
    model, page, predictions = task(), LivePage(), Predictions()
    own, names = model.validation_step, ("image", "index", "label")
    rows = [(image, torch.tensor(i % 2), torch.tensor(i % 3)) for i, image in enumerate(IMAGES)]
    data = [dict(zip(names, row, strict=True)) if form == "dict" else row for row in rows]
    image, _, label = names if form == "dict" else range(3)
    model.validation_step = lambda batch, batch_idx: own((batch[image], batch[label]), batch_idx)
    at_work = trainer(tmp_path, page, predictions)
    (found,) = at_work.validate(model, batches := DataLoader(data, batch_size=4), verbose=False)
    for table in (predictions.table(batches), page._table(at_work)):
        assert table["target"].tolist() == [0, 1, 2] * 4
        assert (table["target"] == table["prediction"]).mean() == pytest.approx(found["val/acc1"])


def test_a_measurement_after_the_training_leaves_the_page_as_it_is(tmp_path):
    """It was one of a running training, which loads itself again and again."""
    (tmp_path / "config.yaml").write_text("")
    page = LivePage()
    trainer(tmp_path, page).validate(task(), loader(), verbose=False)
    assert page.losses == [] and not (tmp_path / "look.html").exists()


@pytest.mark.parametrize("sampler", ["drawn at random", "listed", "of batches"])
def test_an_image_has_its_own_index_or_none_where_the_order_that_was_drawn_is_unknown(tmp_path, sampler):
    places, data = [11, 4, 0, 7, 2, 9], TensorDataset(IMAGES, torch.arange(12) % 3)
    samplers = {
        "drawn at random": {"sampler": SubsetRandomSampler(places), "batch_size": 4},
        "listed": {"sampler": places, "batch_size": 4},
        "of batches": {"batch_sampler": [places[:4], places[4:]]},
    }
    table = kept(tmp_path, task(), DataLoader(data, **samplers[sampler]))
    if sampler == "drawn at random":
        assert table["index"].tolist() == [-1] * 6
    else:
        assert table["index"].tolist() == sorted(places)
        assert table["target"].tolist() == [place % 3 for place in sorted(places)]


class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(IMAGES, torch.arange(12) % 3, strict=True)


@pytest.mark.parametrize("others", [[], [0], [1]], ids=["alone", "one without a batch", "one with batches"])
def test_samples_without_numbers_have_an_index_in_a_single_process_alone(tmp_path, monkeypatch, others):
    """Each process counted its own from 0, and `analyze errors` and pages showed others for half of them."""
    copies = lambda own: [own, *(own.head(12 * n) for n in others)]  # noqa: E731
    monkeypatch.setattr("vitlab.callbacks.predictions.of_all", copies)
    table = kept(tmp_path, task(), DataLoader(Stream(), batch_size=5))
    assert table["index"].tolist() == ([-1] * 24 if others == [1] else list(range(12)))
    assert table["target"].tolist() == [0, 1, 2] * (len(table) // 3)


def test_a_regression_keeps_its_numbers_as_they_are(tmp_path):
    torch.manual_seed(1)
    model = Regressor(num_targets=2, **{name: value for name, value in NETWORK.items() if name != "num_classes"})
    targets = torch.randn(12, 2)
    table = kept(tmp_path, model, DataLoader(TensorDataset(IMAGES, targets), batch_size=4))
    assert list(table) == ["index", "target_0", "prediction_0", "target_1", "prediction_1"]
    assert table[["target_0", "target_1"]].to_numpy() == pytest.approx(targets.numpy())
    with torch.no_grad():
        assert table["prediction_1"].tolist() == pytest.approx(model.eval()(IMAGES)[:, 1].tolist(), abs=1e-6)


def test_predictions_keep_their_image_when_a_file_becomes_unreadable():
    class Images(TensorImages):
        def image(self, i):
            if i == 2:
                raise ImageError("2.png", "damaged")
            return super().image(i)

    images = Images(torch.zeros(6, 1, 8, 8, dtype=torch.uint8), torch.arange(6))
    loader, predictions = SampleLoader(images, EvalOrder(6, 3), None, 0, lambda error: None), Predictions()
    for batch in loader:
        Meter(MetricCollection({})).update(outputs := torch.eye(6)[batch[1]], batch[1], torch.zeros(()))
        predictions.on_validation_batch_end(None, None, outputs, batch, 0)
    table = predictions.table(loader)
    assert table["index"].tolist() == table["target"].tolist() == [0, 1, 3, 4, 5]
