import copy
import math

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import average_precision_score, f1_score
from torch.utils.data import DataLoader, TensorDataset

from tests.training import QUIET
from vitlab.data.files.sets import TensorImages
from vitlab.errors import UsageError
from vitlab.layers.precision import half_precision
from vitlab.tasks import Classifier, Regressor
from vitlab.tasks.base import seed_step
from vitlab.tasks.classifier import balanced
from vitlab.tasks.multi_task import Head, Hits
from vitlab.tasks.regressor import Errors

TINY = {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 8, "depth": 1, "num_heads": 2}


def fit(task, targets, callbacks=(), **trainer):
    images = torch.randn(len(targets), 1, 8, 8)
    loader = DataLoader(TensorDataset(images, targets), batch_size=4)
    runner = L.Trainer(**QUIET | {"max_epochs": 1, "log_every_n_steps": 1} | trainer, callbacks=list(callbacks))
    runner.fit(task, loader, loader)
    return runner, images, loader


def test_validation_metrics_are_those_of_the_whole_set_at_once():
    torch.manual_seed(0)
    targets = torch.randint(0, 7, (10,))  # 4 + 4 + 2: a mean of batch means would be wrong
    task = Classifier(num_classes=7, **TINY)
    trainer, images, _ = fit(task, targets)
    task.eval()
    with torch.no_grad():
        logits = task(images)
    metrics = trainer.callback_metrics
    assert metrics["val/n"] == 10
    assert metrics["val/loss"].item() == pytest.approx(F.cross_entropy(logits, targets).item(), rel=1e-5)
    assert metrics["val/acc1"].item() == pytest.approx((logits.argmax(1) == targets).float().mean().item())
    top5 = (logits.topk(5).indices == targets[:, None]).any(1).float().mean().item()
    assert metrics["val/acc5"].item() == pytest.approx(top5)


class Outputs(L.Callback):
    """Keep what a task returns for each validation batch."""

    def __init__(self):
        self.kept = []

    def on_validation_batch_end(self, trainer, pl_module, outputs, *rest):
        self.kept.append(outputs)


@pytest.mark.parametrize(("kind", "precision"), [("class", "bf16-true"), ("class", "16-true"), ("number", "bf16-true")])
def test_an_evaluation_is_summed_in_32_bits_where_weights_have_16(kind, precision):
    """Lightning converts a task by `.to(dtype)`, which torchmetrics heeds, other than `.bfloat16()`."""
    images, targets = torch.randn(293, 1, 8, 8).to(half_precision(precision)), torch.arange(293) % 10
    if kind == "class":
        task = Classifier(num_classes=10, **TINY)
    else:
        targets = targets.float()
        task = Regressor(targets={"kind": "number", "names": ["age"], "mean": [4.5], "std": [3.0]}, **TINY)
    trainer = L.Trainer(precision=precision, callbacks=[seen := Outputs()], **QUIET)
    (found,) = trainer.validate(task, DataLoader(TensorDataset(images, targets), batch_size=7), verbose=False)
    outputs = torch.cat(seen.kept)
    assert found["val/n"] == 293 and outputs.dtype == torch.float32
    if kind == "class":
        expected = {"acc1": (outputs.argmax(1) == targets).float().mean(), "loss": F.cross_entropy(outputs, targets)}
    else:
        error = outputs[:, 0] - targets
        expected = {"mae": error.abs().mean(), "loss": (error / 3).square().mean()}
    for name, value in expected.items():
        assert found[f"val/{name}"] == pytest.approx(float(value), rel=1e-4), name


def test_what_an_evaluation_has_read_goes_on_in_a_training():
    """`trainer.validate` computes in inference mode, and the validation of a training does not."""
    meter = Classifier(num_classes=3, **TINY).val_meter
    for measuring in (torch.inference_mode, torch.no_grad):
        with measuring():
            meter.update(torch.eye(3), torch.arange(3), torch.ones(()))
            assert meter.read("")["n"] == 3


def test_the_sums_of_training_steps_are_over_all_images_and_read_once(record):
    task = Classifier(num_classes=3, **TINY)
    fit(task, torch.randint(0, 3, (10,)), callbacks=[record])
    sums = record.epoch_sums
    assert sums["n"] == 10
    assert 0 <= sums["acc1"] <= 10
    assert sums["loss"] / 10 == pytest.approx(math.log(3), rel=0.3)
    assert task.train_sums == {}


class Twice(torch.optim.SGD):
    """Asks for the loss twice in a step, as sharpness-aware minimization does."""

    def step(self, closure=None):
        for _ in range(2):
            with torch.enable_grad():
                loss = closure()
        super().step()
        return loss


def test_an_image_counts_once_in_a_step_whose_optimizer_asks_twice(record):
    once, twice = (Classifier(num_classes=3, opt=opt, lr=1e-9, **TINY) for opt in ("SGD", f"{__name__}.Twice"))
    twice.load_state_dict(once.state_dict())
    found = []
    for task in (once, twice, twice):  # a training after another begins anew
        torch.manual_seed(0)
        fit(task, torch.arange(10) % 3, [record], max_epochs=-1, max_steps=2)
        found.append(dict(record.epoch_sums))
    assert found[0]["n"] == 8
    assert found[1] == pytest.approx(found[0], rel=1e-4) and found[2] == pytest.approx(found[0], rel=1e-4)


class Plain(L.LightningModule):
    """A module of a user's."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(64, 3)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0].flatten(1)), batch[1])

    def configure_optimizers(self):
        return Twice(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader` but have no `validation_step`")
def test_an_optimizer_that_asks_twice_cannot_accumulate_as_it_gets_the_gradient_of_the_last_batch(record):
    refusal = r"`trainer.accumulate_grad_batches` must be 1 for Twice, got 2: .*last batch .* raise `data.batch_size`"
    task, targets = Classifier(num_classes=3, opt=f"{__name__}.Twice", **TINY), torch.arange(10) % 3
    before = copy.deepcopy(task.net.state_dict())
    for module, callbacks in ((task, []), (Plain(), [record])):
        with pytest.raises(UsageError, match=refusal):
            fit(module, targets, callbacks, accumulate_grad_batches=2, num_sanity_val_steps=0)
    torch.testing.assert_close(task.net.state_dict(), before, rtol=0, atol=0)
    fit(task, targets[:4], accumulate_grad_batches=2)  # a step has no more than one


def test_a_step_whose_second_gradient_is_not_finite_is_skipped_and_its_images_are_counted(record):
    task = Classifier(num_classes=3, opt=f"{__name__}.Twice", nan_loss="skip", **TINY)
    loss, bias, calls = task.train_loss, task.net.head.bias, []

    def breaks(*given):
        calls.append(1)
        return loss(*given) + ((bias - bias.detach()).sqrt().sum() if len(calls) == 4 else 0.0)

    task.train_loss = breaks
    fit(task, torch.arange(10) % 3, [record], max_epochs=1)
    assert (int(record.epoch_sums["n"]), int(record.epoch_sums["skipped"])) == (6, 4)


def test_an_image_without_finite_outputs_is_not_one_of_the_first_class():
    nan, inf = float("nan"), float("inf")
    task = Classifier(num_classes=7, metrics=["F1Score"], **TINY)
    outputs, targets = torch.eye(7)[:4], torch.tensor([0, 1, 0, 3])
    outputs[[0, 2]], outputs[3, 3] = torch.tensor([[nan] * 7, [inf] + [0.0] * 6]), 9.0
    task.val_meter.update(outputs, targets, torch.tensor(nan))
    found = task.val_meter.read("")
    assert (found["acc1"], found["acc5"]) == (0.5, 0.5) and found["loss"].isnan()
    labels = Classifier(num_classes=2, loss="bce", targets={"kind": "multilabel"}, **TINY)
    labels.val_meter.update(torch.full((3, 2), nan), torch.tensor([[1, 0], [0, 1], [0, 0]]), torch.tensor(nan))
    assert labels.val_meter.read("")["f1_micro"] == 0
    hits = Hits([Head("pet", ["cat", "dog"], slice(0, 2)), Head("coat", ["red", "gray"], slice(2, 4))])
    hits.update(torch.tensor([[nan, nan, 1.0, 0.0], [1.0, 0.0, 1.0, 0.0]]), torch.zeros(2, 2))
    assert hits.compute() == {"acc1": 0.75, "acc1/pet": 0.5, "acc1/coat": 1.0}


def test_the_accuracy_of_several_targets_is_their_mean_however_many_images_have_each():
    hits = Hits([Head(name, ["0", "1"], slice(2 * k, 2 * k + 2)) for k, name in enumerate(("pet", "coat", "none"))])
    nan, outputs = float("nan"), torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0, 1.0]])
    for _ in range(2):
        hits.update(outputs.expand(2, 6), torch.tensor([[1.0, nan, nan], [1.0, nan, nan]]))
    hits.update(outputs, torch.tensor([[nan, 0.0, nan]]))
    found = hits.compute()
    assert (found["acc1"], found["acc1/pet"], found["acc1/coat"]) == (0.5, 1, 0) and found["acc1/none"].isnan()


def test_label_smoothing_acts_in_training_alone():
    task = Classifier(num_classes=3, label_smoothing=0.5, **TINY)
    logits, labels = torch.tensor([[9.0, 0.0, 0.0]]), torch.tensor([0])
    assert task.train_loss(logits, labels) > 1
    assert task.eval_loss(logits, labels) < 0.01


def test_mixed_targets_count_as_their_largest_share():
    task = Classifier(num_classes=3, **TINY)
    shares = torch.tensor([[0.7, 0.3, 0.0], [0.1, 0.1, 0.8], [0.2, 0.7, 0.1]])
    logits = torch.tensor([[5.0, 0.0, 0.0], [5.0, 0.0, 0.0], [0.0, 5.0, 0.0]])
    assert task.train_measures(logits, shares)["acc1"] == 2
    assert torch.isfinite(task.train_loss(logits, shares))


def test_a_regressor_takes_labels_and_numbers():
    task = Regressor(num_targets=1, **TINY)
    trainer, images, _ = fit(task, torch.arange(10))
    task.eval()
    with torch.no_grad():
        error = (task(images)[:, 0] - torch.arange(10)).abs().mean()
    assert trainer.callback_metrics["val/mae"].item() == pytest.approx(error.item(), rel=1e-5)
    fit(Regressor(num_targets=2, **TINY), torch.randn(8, 2))
    with pytest.raises(UsageError, match="the data have 1 number for each image, and the network predicts 3"):
        fit(Regressor(num_targets=3, **TINY), torch.randn(8))


def test_hyper_parameters_are_primitives_and_complete():
    task = Classifier(num_classes=3, lr=0.1, **TINY)
    assert task.hparams["num_classes"] == 3
    assert task.hparams["embed_dim"] == 8
    assert "measured" not in task.hparams
    assert all(isinstance(v, int | float | str | list | tuple | None) for v in task.hparams.values())


def test_the_learning_rate_follows_the_schedule_by_step():
    task = Classifier(num_classes=3, lr=0.1, min_lr=0.01, warmup_epochs=1, warmup_lr=0.02, cooldown_epochs=1, **TINY)
    rates = []

    class Rates(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    fit(task, torch.randint(0, 3, (16,)), max_epochs=4, callbacks=[Rates()])  # 4 steps an epoch
    cosine = [0.01 + 0.09 * 0.5 * (1 + math.cos(math.pi * t / 12)) for t in range(4, 12)]
    assert rates == pytest.approx([0.02, 0.04, 0.06, 0.08, *cosine, *[0.01] * 4])


def test_the_first_and_the_last_rate_are_scaled_with_the_peak():
    rates, ends = [], {"lr": 0.1, "warmup_lr": 0.02, "min_lr": 0.01, "warmup_epochs": 1, "cooldown_epochs": 1}

    class Rates(L.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            rates.append(optimizer.param_groups[0]["lr"])

    task = Classifier(num_classes=3, lr_scale="linear", **ends, **TINY)
    fit(task, torch.randint(0, 3, (20,)), max_epochs=3, accumulate_grad_batches=2, callbacks=[Rates()])
    rise, fall = [0.04, 0.28 / 3, 0.44 / 3], [0.11, 0.065, 0.0320577]  # of 5 batches an epoch has 3 steps
    assert rates == pytest.approx([*rise, *fall, *[0.02] * 3], rel=1e-5)


def test_dropout_depends_on_seed_epoch_and_batch_alone():
    drawn = {}

    def draw(seed, noise):
        numbers = []

        class Draw(L.Callback):
            def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
                torch.rand(noise)  # another arm draws another amount
                numbers.append(torch.rand(1).item())

            def on_before_zero_grad(self, trainer, pl_module, optimizer):
                numbers.append(torch.rand(1).item())

        L.seed_everything(seed, verbose=False)
        fit(Classifier(num_classes=3, **TINY), torch.randint(0, 3, (8,)), callbacks=[Draw()])
        return numbers[::2]

    drawn["a"], drawn["b"], drawn["c"] = draw(0, 0), draw(0, 5), draw(1, 0)
    assert drawn["a"] == drawn["b"] != drawn["c"]


def test_each_seed_epoch_batch_and_process_draws_another_dropout():
    def drawn(*key):
        seed_step(*key, torch.device("cpu"))
        return torch.rand(1).item()

    keys = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (11, 0, 0, 0), (1, 10, 0, 0)]
    assert len({drawn(*key) for key in keys}) == len(keys) and drawn(*keys[0]) == drawn(*keys[0])


@pytest.mark.slow
def test_a_training_that_a_process_resumes_draws_the_same_dropout(tmp_path):
    """A step changes `torch.initial_seed`, so that it is another one when the same process goes on."""

    def fitted(task, epochs, **how):
        trainer = L.Trainer(max_epochs=epochs, log_every_n_steps=1, **QUIET)
        images = torch.randn(12, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        loader = DataLoader(TensorDataset(images, torch.arange(12) % 3), batch_size=4)
        trainer.fit(task, loader, loader, **how)
        return trainer

    still = {"lr_scheduler": "constant", "lr": 1e-3, "min_lr": 1e-3, "warmup_epochs": 0}  # whatever the number of steps
    task = Classifier(num_classes=3, dropout=0.5, **still, **TINY)
    start = copy.deepcopy(task.state_dict())
    L.seed_everything(1, verbose=False)
    fitted(task, 2)
    whole = copy.deepcopy(task.state_dict())
    task.load_state_dict(start)
    L.seed_everything(1, verbose=False)
    fitted(task, 1).save_checkpoint(tmp_path / "first.ckpt")
    fitted(task, 2, ckpt_path=tmp_path / "first.ckpt")
    torch.testing.assert_close(task.state_dict(), whole, rtol=0, atol=0)
    old = torch.load(tmp_path / "first.ckpt", weights_only=True)
    assert old.pop("stream_seed") == 1
    torch.save(old, tmp_path / "old.ckpt")
    L.seed_everything(1, verbose=False)
    fitted(task, 2, ckpt_path=tmp_path / "old.ckpt")  # as the command resumes it
    torch.testing.assert_close(task.state_dict(), whole, rtol=0, atol=0)


def test_one_class_is_no_classification():
    with pytest.raises(ValueError, match="needs two classes, and the data has one"):
        Classifier(num_classes=1, **TINY)


def test_a_schedule_without_an_end_is_refused():
    with pytest.raises(ValueError, match=r"`trainer.max_epochs` or `trainer.max_steps` must be set"):
        fit(Classifier(num_classes=3, **TINY), torch.randint(0, 3, (8,)), max_epochs=-1)


def test_clipping_works_with_the_fused_optimizer():
    task, norms = Classifier(num_classes=3, **TINY), []

    class Norms(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in pl_module.parameters()])))

    fit(task, torch.randint(0, 3, (8,)), [Norms()], gradient_clip_val=1e-3)
    assert norms == pytest.approx([1e-3] * 2, rel=1e-3)


LABELS = {"kind": "multilabel"}


def test_labels_have_a_loss_and_metrics_of_their_own_and_probabilities_as_outputs():
    torch.manual_seed(0)
    labels = torch.tensor([[1, 0, 1], [0, 0, 1], [1, 1, 0], [0, 1, 0], [0, 0, 0]], dtype=torch.uint8)
    task = Classifier(num_classes=3, loss="bce", targets=LABELS, label_smoothing=0.2, **TINY)
    trainer, images, _ = fit(task, labels)
    task.eval()
    with torch.no_grad():
        logits = task.net(images)
        assert torch.equal(task(images), logits.sigmoid())
    metrics, right = trainer.callback_metrics, labels.float()
    assert metrics["val/loss"].item() == pytest.approx(
        F.binary_cross_entropy_with_logits(logits, right).item(), rel=1e-5
    )
    ap = [average_precision_score(labels[:, k], logits[:, k]) for k in range(3)]
    assert metrics["val/map"].item() == pytest.approx(np.mean(ap))
    chosen = logits > 0
    for average in ("macro", "micro"):
        expected = f1_score(labels, chosen, average=average, zero_division=0)
        assert metrics[f"val/f1_{average}"].item() == pytest.approx(expected)
    assert task.monitor == ("max", "val/map")
    loss = F.binary_cross_entropy_with_logits(logits, right * 0.8 + 0.1)
    assert task.train_loss(logits, task.as_targets(labels)).item() == pytest.approx(loss.item())


def test_the_monitor_of_a_subclass_is_kept():
    class ByLoss(Classifier):
        monitor = ("min", "val/loss")

    assert ByLoss(num_classes=3, **TINY).monitor == ("min", "val/loss")
    assert ByLoss(num_classes=3, loss="bce", targets=LABELS, **TINY).monitor == ("min", "val/loss")
    assert Classifier(num_classes=3, **TINY).monitor == ("max", "val/acc1")


def test_a_label_that_a_split_lacks_is_left_out_of_the_mean_precision_without_a_warning():
    task = Classifier(num_classes=3, loss="bce", targets=LABELS, **TINY)
    labels = torch.tensor([[1, 0, 0], [0, 1, 0], [1, 0, 0], [0, 1, 0]])
    torch.nn.init.constant_(task.net.head.bias, 5.0)  # so that all labels are found
    trainer, images, _ = fit(task, labels)
    logits = task.eval().net(images).detach()
    ap = [average_precision_score(labels[:, k], logits[:, k]) for k in range(2)]
    assert trainer.callback_metrics["val/map"].item() == pytest.approx(np.mean(ap))
    assert trainer.callback_metrics["val/f1_macro"].item() == pytest.approx(2 / 3)
    task.val_meter.update(logits.sigmoid(), 0 * labels, torch.zeros(()))
    none = task.val_meter.read("")
    assert none["map"].isnan() and none["f1_macro"].isnan() and none["f1_micro"] == 0


def test_weights_of_images_and_classes_weigh_the_training_loss_alone():
    logits, targets = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 0, 1])
    weights, of_classes = torch.rand(6), torch.tensor([1.0, 2.0, 5.0])
    for loss in ("ce", "bce"):
        plain = Classifier(num_classes=3, loss=loss, **TINY)
        one_by_one = torch.stack([plain.train_loss(logits[i : i + 1], targets[i : i + 1]) for i in range(6)])
        assert torch.allclose(plain.train_loss(logits, targets, weights), (one_by_one * weights).mean())
        assert torch.allclose(plain.train_loss(logits, targets, torch.ones(6)), plain.train_loss(logits, targets))
    task = Classifier(num_classes=3, label_smoothing=0, class_weights=[1, 2, 5], **TINY)
    each = F.cross_entropy(logits, targets, reduction="none")
    assert torch.allclose(task.train_loss(logits, targets), (each * of_classes[targets]).mean())
    assert torch.allclose(task.eval_loss(logits, targets), each.mean())
    assert "loss_weights" not in task.state_dict()
    task = Classifier(num_classes=3, label_smoothing=0, class_weights=[1, 2, 5], loss="bce", **TINY)
    one_hot = F.one_hot(targets, 3)
    each = -(of_classes * one_hot * F.logsigmoid(logits) + (1 - one_hot) * F.logsigmoid(-logits)).mean(1)
    assert torch.allclose(task.train_loss(logits, targets), each.mean())
    assert torch.allclose(task.train_loss(logits, targets, weights), (each * weights).mean())
    numbers, values = torch.randn(6, 2), torch.randn(6, 2)
    task = Regressor(num_targets=2, **TINY)
    expected = ((numbers - values) ** 2).mean(1)
    assert torch.allclose(task.train_loss(numbers, values, weights), (expected * weights).mean())


def test_class_shares_train_and_are_no_targets_of_an_evaluation():
    """Each share was compared with a class number: the accuracy was 0."""
    task, shares, logits = Classifier(num_classes=2, **TINY), torch.eye(2), torch.randn(2, 2)
    assert task.train_loss(logits, shares).isfinite()
    with pytest.raises(ValueError, match=r"give targets \(2, 2\): let them give `targets.argmax\(1\)`"):
        task.eval_loss(logits, shares)
    with pytest.raises(ValueError, match=r"give targets \(2, 1\): let them give `targets\[:, 0\]`"):
        task.eval_loss(logits, shares[:, :1])


def test_images_without_a_class_are_no_wrong_answers_of_an_evaluation():
    """The loss leaves out -100, and each counted as a wrong answer in the accuracy."""
    task, classes, logits = Classifier(num_classes=2, **TINY), torch.tensor([1, -100, 0]), torch.randn(3, 2)
    assert task.train_loss(logits, classes).isfinite()
    with pytest.raises(ValueError, match=r"class numbers from 0 to 1, and .* give -100: let them leave out images"):
        task.eval_loss(logits, classes)


@pytest.mark.parametrize(
    ("found", "told"), [(None, "None"), (torch.zeros(()), r"a tensor \(\)"), ((torch.zeros(()), None), "tuple")]
)
def test_a_step_loss_that_returns_something_else_is_named(found, told, monkeypatch):
    """The data were blamed: `cannot unpack non-iterable NoneType object`."""
    task = Classifier(num_classes=2, **TINY)
    monkeypatch.setattr(task, "step_loss", lambda batch: found)
    with pytest.raises(ValueError, match=rf"`Classifier.step_loss` returned {told}: return the mean loss of the batch"):
        task.training_step((torch.zeros(2, 1, 8, 8), torch.zeros(2)), 0)


def test_classes_and_labels_without_images_weigh_nothing_and_one():
    classes = torch.tensor([4, 4, 1, 4, 2, 2])  # six images of three classes
    torch.testing.assert_close(balanced(classes, 6), torch.tensor([0, 2.0, 1.0, 0, 2 / 3, 0]))
    labels = torch.tensor([[0, 1, 1], [0, 0, 1], [0, 0, 1], [0, 0, 0]])
    torch.testing.assert_close(balanced(labels, 3), torch.tensor([1.0, 3.0, 1 / 3]))  # negatives of each positive


def test_balanced_weights_come_from_the_training_split():
    class Data(L.LightningDataModule):
        splits = {"train": TensorImages(torch.zeros(6, 1, 8, 8), torch.tensor([0, 0, 0, 0, 2, 2]))}  # noqa: RUF012

        def train_dataloader(self):
            images = self.splits["train"]
            return DataLoader(TensorDataset(images.images, images.labels), batch_size=2)

        val_dataloader = train_dataloader

    task = Classifier(num_classes=3, class_weights="balanced", **TINY)
    L.Trainer(max_steps=1, **QUIET).fit(task, datamodule=Data())
    assert task.loss_weights.tolist() == [0.75, 0.0, 1.5]
    with pytest.raises(ValueError, match="`class_weights: balanced` needs a data set of vitlab"):
        fit(Classifier(num_classes=3, class_weights="balanced", **TINY), torch.zeros(4, dtype=torch.long))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"targets": LABELS}, "`loss: ce` is for one class per image, .*: use --model.loss=bce"),
        ({"class_weights": [1, 2]}, r"`class_weights` must be balanced or 3 numbers from 0, not all 0, got \[1, 2\]"),
        ({"class_weights": [1, 2, -1]}, "not all 0"),
    ],
)
def test_options_that_do_not_fit_the_targets_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Classifier(num_classes=3, **settings, **TINY)


def test_r2_leaves_out_a_target_that_does_not_vary():
    errors = Errors(["a", "b"], [0.0, 0.0], [1.0, 1.0])
    errors.update(
        torch.tensor([[1.0, 5.0], [2.0, 5.5], [3.0, 6.0]]), torch.tensor([[1.0, 5.0], [2.0, 5.0], [4.0, 5.0]])
    )
    found = errors.compute()
    assert found["r2"] == found["r2/a"] == pytest.approx(1 - 1 / (14 / 3)) and found["r2/b"].isnan()
    far = Errors(["a"], [0.0], [1.0])  # varies little, far from the mean of training
    far.update(torch.tensor([[19.5], [21.0]]), torch.tensor([[19.0], [21.0]]))
    assert far.compute()["r2"] == pytest.approx(1 - 0.25 / 2, abs=1e-4)
