import copy
import math
from types import SimpleNamespace

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from timm.loss import BinaryCrossEntropy
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.training import QUIET
from vitlab.callbacks.ema import EMA
from vitlab.data import Digits
from vitlab.interface import batches_of_a_step, images_of_batch
from vitlab.layers.precision import norm_of_gradients
from vitlab.optim import describe_groups
from vitlab.tasks import Classifier, LinearProbe
from vitlab.tasks.optimizer import build_optimizer, clip_or_skip

TINY = {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 8, "depth": 1, "num_heads": 2, "num_classes": 3}

NAMES = [name for name, _ in Classifier(**TINY).net.named_parameters()]


def fit(task, callbacks=(), repeats=1, form=lambda images: images, **trainer):
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(12 // repeats, 1, 8, 8, generator=generator), torch.arange(12 // repeats) % 3
    loader = DataLoader(form(TensorDataset(images.repeat(repeats, 1, 1, 1), labels.repeat(repeats))), batch_size=4)
    runner = L.Trainer(**QUIET | {"max_epochs": 2, "log_every_n_steps": 1} | trainer, callbacks=list(callbacks))
    runner.fit(task, loader, loader)
    return runner


class Keep(L.Callback):
    def __init__(self):
        self.weights = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.weights.append(copy.deepcopy(pl_module.net.head.weight.data))


def test_the_average_is_the_recursion_with_its_warmup():
    task, keep, ema = Classifier(**TINY), Keep(), EMA(decay=0.6)
    expected = task.net.head.weight.data.clone()
    fit(task, [keep, ema])
    for step, weight in enumerate(keep.weights, start=1):
        decay = min(0.6, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * weight
    torch.testing.assert_close(task.net.head.weight.data, expected)  # the average is what is left at the end


def test_validation_measures_the_averaged_weights():
    seen = {}

    class Look(L.Callback):
        def on_validation_batch_end(self, trainer, pl_module, *rest):
            if not trainer.sanity_checking:
                seen["validated"] = pl_module.net.head.weight.data.clone()

    task = Classifier(**TINY)
    fit(task, [EMA(decay=0.9), Look()])
    assert torch.equal(seen["validated"], task.net.head.weight.data)


@pytest.mark.filterwarnings(
    "ignore:You're using the WeightAveraging callback, but", "ignore:.*does not have many workers"
)
@pytest.mark.rare
def test_after_a_training_with_an_average_each_network_is_measured_with_its_own_weights(tmp_path):
    loader = DataLoader(TensorDataset(torch.randn(6, 1, 8, 8), torch.arange(6) % 3), batch_size=6)

    class Save(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.save_checkpoint(tmp_path / "kept.ckpt")

    def loss_of(task):
        images, labels = loader.dataset[:]
        return pytest.approx(F.cross_entropy(task.eval()(images), labels).item())

    task, other = Classifier(**TINY), Classifier(**TINY)
    trainer = fit(task, [EMA(decay=0.9), Save()])
    with torch.no_grad():
        average, own = loss_of(task), loss_of(other)
    for measured, expected in ((other, own), (task, average)):
        (val,), (test,) = (call(measured, loader, verbose=False) for call in (trainer.validate, trainer.test))
        assert val["val/loss"] == expected and test["test/loss"] == expected
    trainer = fit(other.train(), [EMA(decay=0.9)])
    (test,) = trainer.test(other, loader, ckpt_path=tmp_path / "kept.ckpt", verbose=False, weights_only=True)
    assert test["test/loss"] == average


def test_the_average_is_of_the_network_whose_sizes_come_from_the_data():
    small = {"patch_size": 2, "embed_dim": 8, "depth": 1, "num_heads": 2}

    def end_of(task=None):
        torch.manual_seed(3)  # draws the network here, or where the task takes its sizes
        task = task or Classifier(**small, img_size=8, in_chans=1, num_classes=10)
        trainer = L.Trainer(max_steps=3, limit_val_batches=1, callbacks=[EMA(decay=0.5)], **QUIET)
        trainer.fit(task, Digits(subset=0.1, batch_size=16))
        return task.state_dict()

    torch.testing.assert_close(end_of(Classifier(**small)), end_of(), rtol=0, atol=0)


def test_a_decay_of_one_is_refused():
    with pytest.raises(ValueError, match="`decay` of EMA must be at least 0 and below 1, got 1"):
        EMA(decay=1)


@pytest.mark.parametrize("opt", ["adamw", "sgd", "lamb", "nadamw", "muon"])
def test_optimizers_keep_the_groups(opt):
    task = Classifier(**TINY, opt=opt, pos_embed_lr_mult=3, lr=0.01)
    optimizer = fit(task).optimizers[0]
    assert {g["weight_decay"] for g in optimizer.param_groups} == {0.0, 0.05}
    rates = sorted({g["initial_lr"] for g in optimizer.param_groups})
    assert rates == pytest.approx([0.01, 0.03])


class WithMore(Classifier):
    """A classifier with layers of its own after the network."""

    def __init__(self, **task):
        super().__init__(**task)
        self.after, self.gain, self.still = nn.Linear(3, 3), nn.Parameter(torch.ones(3, 3)), nn.Linear(3, 3)
        self.still.requires_grad_(False)

    def train_loss(self, outputs, targets, weights=None):
        return super().train_loss(self.still(self.after(outputs)) @ self.gain, targets, weights)


def test_what_a_subclass_of_a_task_adds_is_trained_at_the_peak_rate():
    task = WithMore(lr=0.1, weight_decay=0.2, layer_decay=0.5, **TINY)
    before = {name: value.clone() for name, value in task.state_dict().items()}
    rows = describe_groups(task.net, task.optimizer_groups(), 0.1, 0.5, task)
    found = {row["name"]: (row["lr_scale"], row["weight_decay"]) for row in rows}
    assert {name: row for name, row in found.items() if name.startswith(("after", "gain", "still"))} == {
        "after.weight": (1, 0.2),
        "after.bias": (1, 0),
        "gain": (1, 0),
    }
    fit(task, max_epochs=1)
    changed = {name for name, value in task.state_dict().items() if not torch.equal(value, before[name])}
    assert changed >= {"after.weight", "after.bias", "gain", "net.head.weight"}
    assert not {"still.weight", "still.bias"} & changed
    assert [group["lr"] for group in task.optimizer_groups(4.0)][-2:] == pytest.approx([0.4, 0.4])  # of a larger batch


def test_groups_that_lack_a_trained_parameter_are_refused():
    class Forgets(WithMore):
        def optimizer_groups(self, factor=1.0):
            return super().optimizer_groups(factor)[:-1]

    with pytest.raises(ValueError, match=r"`optimizer_groups` of Forgets must .* and gain is in 0 groups: put it into"):
        fit(Forgets(**TINY))


ADAMC = {"class_path": "timm.optim.AdamWLegacy", "init_args": {"corrected_weight_decay": True}}


@pytest.mark.parametrize("opt", ["adamc", "lionc", "sgdc", "nadamc", "lambcd", ADAMC])
def test_corrected_weight_decay_of_an_earlier_layer_follows_its_own_rate(opt):
    task = Classifier(**TINY | {"depth": 4}, opt=opt, lr=0.01, layer_decay=0.1, weight_decay=0.5)
    optimizer = build_optimizer(opt, task.optimizer_groups(), 0.01)
    first, last = (task.net.blocks[i].attn.qkv.weight for i in (0, 3))
    before = [p.detach().clone() for p in (first, last)]
    for p in task.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    decayed = [(1 - p.detach() / old).median().item() for p, old in zip((first, last), before, strict=True)]
    assert decayed == pytest.approx([0.01 * 0.1**4 * 0.5, 0.01 * 0.1 * 0.5], rel=0.1)  # lr^2 / max_lr, at the peak


def test_rates_among_the_arguments_relate_to_the_last_layer_and_one_of_zero_decays_nothing():
    with pytest.warns(FutureWarning, match="adamw_lr"):
        task = Classifier(**TINY, lr=0.01, layer_decay=0.1, opt={"class_path": "muon", "init_args": {"adamw_lr": 0.02}})
        optimizer = build_optimizer(task.hparams["opt"], task.optimizer_groups(), 0.01)
    assert {group["fallback_lr_scale"] for group in optimizer.param_groups} == {2.0}
    still = Classifier(**TINY, opt="adamc", freeze=["tokenizer", "cls_token"], pos_embed="learned", pos_embed_lr_mult=0)
    fit(still, max_epochs=1)
    assert all(p.isfinite().all() for p in still.parameters())


@pytest.mark.parametrize("opt", ["muon", "adamuon", "timm.optim.Muon"])
def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest(opt):
    wide = {"in_chans": 4, "num_classes": 6}  # of shapes that timm would give to Muon
    task = Classifier(**TINY | wide, opt=opt, pos_embed="learned")
    repeated = lambda data: TensorDataset(data.tensors[0].expand(-1, 4, -1, -1), data.tensors[1])  # noqa: E731
    state = fit(task, form=repeated).optimizers[0].state
    of_muon = {name for name, p in task.net.named_parameters() if "momentum_buffer" in state[p]}
    assert of_muon == {name for name, p in task.net.named_parameters() if name.startswith("blocks.") and p.ndim == 2}
    assert all(
        "exp_avg" in state[p] for p in (task.net.head.weight, *task.net.tokenizer.parameters(), task.net.cls_token)
    )


def test_an_unknown_optimizer_names_the_closest():
    with pytest.raises(ValueError, match="got 'adamww'; did you mean \"adamw\""):
        Classifier(**TINY, opt="adamww")
    with pytest.raises(ValueError, match=r"must not need second derivatives.* got adahessian"):
        Classifier(**TINY, opt="adahessian")


@pytest.mark.parametrize(("scale", "factor"), [("none", 1), ("linear", 2), ("sqrt", math.sqrt(2))])
def test_the_learning_rate_grows_with_the_batch(scale, factor):
    assert Classifier(**TINY, lr_scale=scale, lr_batch=512).batch_factor(1024) == pytest.approx(factor)


@pytest.mark.parametrize(
    ("data", "of_loader", "found"),
    [
        ({"batch_size": 16}, 16, 32),  # of a loader of the user's, which each process has
        ({"batch_size": 16}, 8, 16),  # and one that divides its batch
        ({"batch_size": 16}, None, 32),  # before it is set up
        ({"batch_size": 16, "deals_samples": True}, 8, 16),
        ({}, 16, None),
    ],
)
def test_the_batch_of_two_processes_counts_the_images_of_both(data, of_loader, found):
    trainer = SimpleNamespace(world_size=2, train_dataloader=SimpleNamespace(batch_size=of_loader))
    assert images_of_batch(SimpleNamespace(**data), trainer) == found
    trainer.world_size = 1
    assert images_of_batch(SimpleNamespace(**data), trainer) == data.get("batch_size")


def test_a_step_accumulates_at_most_the_batches_of_an_epoch():
    task = Classifier(**TINY, lr_scale="linear", lr_batch=3, lr=0.1)
    trainer = fit(task, max_epochs=1, accumulate_grad_batches=100)
    assert batches_of_a_step(trainer) == 3
    assert task.peak_rate() == pytest.approx(0.3)
    assert {group["initial_lr"] for group in trainer.optimizers[0].param_groups} == {task.peak_rate()}


class Stream(IterableDataset):
    """Images whose number is not known before the last one has come."""

    def __init__(self, images):
        self.images = images

    def __iter__(self):
        return iter(self.images)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(("accumulated", "batches"), [(1, [1, 1, 1]), (2, [2, 2, 1]), (3, [3, 3, 3]), (100, [3, 3, 3])])
def test_a_step_takes_the_mean_gradient_of_its_batches_however_many_they_are(accumulated, batches, is_stream):
    """The three batches are the same one, whose gradient is that of each step."""
    task, norms = Classifier(**TINY, opt="SGD", lr=1e-9), []

    class Norms(L.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            norms.append(float(norm_of_gradients(pl_module)))

    form = Stream if is_stream else lambda images: images
    trainer = fit(task, [Norms()], repeats=3, form=form, max_epochs=1, max_steps=3, accumulate_grad_batches=accumulated)
    images, labels = next(iter(trainer.train_dataloader))
    task.train_loss(task.net(images), labels).backward()
    assert norms == pytest.approx([float(norm_of_gradients(task))] * math.ceil(3 / accumulated), rel=1e-4)
    assert is_stream or [batches_of_a_step(trainer, batch) for batch in range(3)] == batches


def test_asking_for_the_batches_of_a_step_sets_up_no_images():
    """It is asked when a failure is explained, perhaps that of the images."""

    def setup_data():
        raise OSError("No space left on device")

    state, loop = SimpleNamespace(fn="fit"), SimpleNamespace(setup_data=setup_data)
    facts = {"accumulate_grad_batches": 2, "num_training_batches": math.inf, "train_dataloader": None}
    assert batches_of_a_step(SimpleNamespace(**facts, state=state, fit_loop=loop)) == 2


def test_frozen_parts_stay_and_a_rule_without_a_match_is_refused():
    task = Classifier(**TINY, freeze=["tokenizer", "blocks.0.attn"])
    before = {k: v.clone() for k, v in task.net.state_dict().items()}
    fit(task)
    changed = {k for k, v in task.net.state_dict().items() if not torch.equal(v, before[k])}
    assert not [k for k in changed if k.startswith(("tokenizer.", "blocks.0.attn."))]
    assert "blocks.0.mlp.fc1.weight" in changed
    with pytest.raises(ValueError, match="`freeze` must name parts of the network, got 'block'; it has"):
        Classifier(**TINY, freeze=["block"])


def test_a_network_that_is_frozen_as_a_whole_is_refused():
    parts = ["tokenizer", "cls_token", "pos_embed", "blocks", "norm", "head"]
    parts = [one for one in parts if any(f"{name}.".startswith(f"{one}.") for name in NAMES)]
    with pytest.raises(ValueError, match=r"`freeze` must leave a parameter to train, got .*'head'"):
        Classifier(**TINY, freeze=parts)


def test_a_linear_probe_keeps_frozen_what_freeze_names():
    with pytest.raises(ValueError, match=r"`freeze` must leave a parameter to train, got \['head'\]"):
        LinearProbe(**TINY, freeze=["head"])
    task = LinearProbe(**TINY, freeze=["head.bias", "blocks"])
    assert [name for name, p in task.named_parameters() if p.requires_grad] == ["net.head.weight"]


def test_adamw_that_is_told_to_loop_over_tensors_is_not_fused():
    task = Classifier(**TINY, opt={"class_path": "adamw", "init_args": {"foreach": True}})
    group = build_optimizer(task.hparams["opt"], task.optimizer_groups(), 1e-3).param_groups[0]
    assert group["foreach"] and not group["fused"]


class Filter(nn.Module):
    """A filter of frequencies, Rao et al. 2021 (arXiv:2107.00645), whose parameter is complex."""

    def __init__(self, dim):
        super().__init__()
        self.filter = nn.Parameter(torch.randn(3, dim, dtype=torch.complex64))

    def forward(self, x, pos_embed, layer):
        return torch.fft.irfft(torch.fft.rfft(x, dim=1) * self.filter, n=x.shape[1], dim=1)


def test_complex_parameters_are_trained_by_adamw_which_torch_does_not_fuse_for_them():
    task = Classifier(**TINY, attn=f"{__name__}.Filter", nan_loss="skip")
    filters = task.net.blocks[0].attn.filter
    before, average = filters.detach().clone(), EMA(decay=0.5)
    fit(task, [average], max_epochs=1, gradient_clip_val=1.0)
    moved = filters.detach() - before
    assert moved.real.all() and moved[1:].imag.all() and moved.abs().max() < 0.1


def test_binary_cross_entropy_of_bfloat16_outputs_rounds_no_target():
    task, labels = Classifier(**TINY, loss="bce", label_smoothing=0.1), torch.arange(6) % 3
    outputs = torch.randn(6, 3).bfloat16()
    assert task.train_loss(outputs, labels).dtype == torch.float32
    torch.testing.assert_close(task.train_loss(outputs, labels), task.train_loss(outputs.float(), labels))


def test_a_linear_probe_moves_the_head_alone():
    task = LinearProbe(**TINY, dropout=0.5)
    before = {k: v.clone() for k, v in task.net.state_dict().items()}
    fit(task)
    changed = {k for k, v in task.net.state_dict().items() if not torch.equal(v, before[k])}
    assert changed == {"head.weight", "head.bias"}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_binary_cross_entropy_is_timms(smoothing):
    task = Classifier(**TINY, loss="bce", label_smoothing=smoothing)
    outputs, labels = torch.randn(5, 3), torch.tensor([0, 1, 2, 1, 0])
    theirs = BinaryCrossEntropy(smoothing=smoothing)(outputs, labels)
    dense = F.one_hot(labels, 3).float() * (1 - smoothing) + smoothing / 3
    torch.testing.assert_close(task.train_loss(outputs, labels), F.binary_cross_entropy_with_logits(outputs, dense))
    torch.testing.assert_close(task.train_loss(outputs, labels), theirs, rtol=0.1, atol=0.02)


def test_a_compiled_network_has_the_same_names():
    task = Classifier(**TINY, compile=True)
    compiled = []
    for part in (task.net.tokenizer, *task.net.blocks):
        part.compile = lambda **_: compiled.append(None)
    fit(task)
    assert len(compiled) == 1 + len(task.net.blocks)
    assert not [name for name in task.state_dict() if "_orig_mod" in name]


BOTH = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Norms(L.Callback):
    def __init__(self):
        self.norms = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.norms.append(float(pl_module.grad_norm))


def scaled(device="cpu", **scaler):
    return [MixedPrecision("16-mixed", device, torch.amp.GradScaler(device, **scaler))]


@pytest.mark.parametrize("device", BOTH)
@pytest.mark.parametrize("opt", ["adamw", {"class_path": "SGD", "init_args": {"fused": True}}])
def test_gradients_are_clipped_without_the_factor_of_a_float16_scaler(device, opt):
    seen = {}
    for plugins in ([], scaled(device)):
        torch.manual_seed(0)
        task, norms = Classifier(opt=opt, lr=0.1, warmup_epochs=0, **TINY), Norms()
        before = task.net.head.weight.data.clone()
        fit(
            task,
            [norms],
            max_epochs=1,
            gradient_clip_val=0.1,
            plugins=plugins,
            accelerator=device.replace("cuda", "gpu"),
        )
        seen[bool(plugins)] = torch.tensor(norms.norms), task.net.head.weight.data.cpu() - before
    (norms, moved), (of_scaled, moved_scaled) = seen[False], seen[True]
    torch.testing.assert_close(of_scaled, norms, rtol=0.05, atol=0)  # the rounding of float16; the factor is 65,536
    assert (moved_scaled - moved).norm() < 0.05 * moved.norm()


class Broken(Classifier):
    """Its loss is finite; the gradient of some batches is not: that of the square root of 0."""

    batches = (1,)

    def train_loss(self, outputs, targets, weights=None):
        zero = self.net.head.bias - self.net.head.bias.detach()
        bad = self.trainer.fit_loop.epoch_loop.batch_idx in self.batches
        return super().train_loss(outputs, targets) + (zero.sqrt().sum() if bad else 0.0)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize(("accumulated", "steps"), [(1, [False, True, False]), (2, [True, True, False])])
def test_a_step_of_infinite_gradients_is_skipped_and_its_images_are_counted(record, algorithm, accumulated, steps):
    task, keep = Broken(nan_loss="skip", warmup_epochs=0, **TINY), Keep()
    weight, clip = task.net.head.weight.data.clone(), {"gradient_clip_algorithm": algorithm, "gradient_clip_val": 0.5}
    fit(task, [keep, record], max_epochs=1, accumulate_grad_batches=accumulated, **clip)
    assert [torch.equal(*pair) for pair in zip([weight, *keep.weights], keep.weights, strict=False)] == steps
    assert task.net.head.weight.isfinite().all()
    skipped = 4 * accumulated
    assert (int(record.epoch_sums["n"]), int(record.epoch_sums["skipped"])) == (12 - skipped, skipped)
    assert 0 < record.epoch_sums["loss"] / (12 - skipped) < 2


@pytest.mark.parametrize(
    ("algorithm", "limit"), [("value", 0.01), ("norm", 0.01), (None, 0.01), ("value", 0), ("norm", None)]
)
def test_gradients_are_clipped_as_torch_does_and_their_norm_is_that_before(algorithm, limit, monkeypatch):
    monkeypatch.setattr(Classifier, "trainer", SimpleNamespace(precision_plugin=SimpleNamespace(scaler=None)))
    task = Classifier(**TINY)
    optimizer = torch.optim.SGD(task.parameters(), lr=0.1)
    for p in task.parameters():
        p.grad = torch.randn_like(p)
    task.net.cls_token.grad = None  # of a part that this step did not use
    grads = [p.grad.clone() for p in task.parameters() if p.grad is not None]
    norm = torch.cat([grad.flatten() for grad in grads]).norm()
    clip_or_skip(task, optimizer, limit, algorithm)
    scale = 1.0 if not limit or algorithm == "value" else limit / norm
    most = limit if limit and algorithm == "value" else math.inf
    found = [p.grad for p in task.parameters() if p.grad is not None]
    torch.testing.assert_close(found, [(grad * scale).clamp(-most, most) for grad in grads])
    torch.testing.assert_close(task.grad_norm, norm)


def test_an_overflow_of_a_float16_scaler_is_skipped_and_lowers_its_factor(record):
    task, plugins = Classifier(nan_loss="skip", **TINY), scaled(init_scale=2.0**126)
    fit(task, [record], max_epochs=1, plugins=plugins)
    assert plugins[0].scaler.get_scale() == 2.0**123 and int(record.epoch_sums["skipped"]) == 12
