"""The base of all tasks: network, optimizer, schedule, and the sums behind its metrics."""

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, Unpack

import lightning as L
import torch
from torch import Tensor
from torchmetrics import MetricCollection

from vitlab import interface
from vitlab.class_paths import ClassSpec
from vitlab.interface import Weighted, loss_and_sums, skipped_unless, trained
from vitlab.layers.compiled import CompileMode, compile_parts, mark_batch
from vitlab.models.arguments import NetworkArgs
from vitlab.models.build import projections
from vitlab.models.old_names import OLD
from vitlab.models.vit import VisionTransformer
from vitlab.named_kwargs import Named
from vitlab.optim import ScheduleName, param_groups, slow_earlier_blocks
from vitlab.packed_batch import PackedBatch
from vitlab.tasks.meter import Meter, add_metrics, in_32_bits
from vitlab.tasks.optimizer import (
    accumulate_from_the_start,
    as_part_of_step,
    build_optimizer,
    check_groups,
    check_recipe,
    clip_or_skip,
    complete_step,
    freeze_parts,
    groups_outside,
)
from vitlab.tasks.schedule import SchedulerSpec, build_scheduler, schedule, step_plateaus, step_scheduler
from vitlab.tasks.sizes import check_forms, take_sizes, weights_seen


class Task(Named, L.LightningModule):
    """Train a Vision Transformer, by default with AdamW, linear warm-up and a cosine schedule, both by step.

    Args:
        num_outputs: Number of outputs of the network.
        measured: Metrics of the task, in addition to the loss.
        metrics: More metrics: a list of classes of torchmetrics, by name, or of your own, by class path.
        opt: Optimizer: adamw (fused), any name that timm knows, such as lamb, sgd or muon, a class of torch.optim or a
            class path; with arguments, as in {class_path: adamw, init_args: {betas: [0.9, 0.95]}}.
        lr_scheduler: Schedule between warm-up and cool-down: cosine, linear, constant, step {every: 30, gamma: 0.1}
            epochs, or wsd, linear over the last share {decay: 0.2}; or a class, which then sets all rates.
        lr: Peak learning rate of the last layer, for the global batch of the config.
        lr_scale: Whether to scale `lr`, `min_lr` and `warmup_lr` with the global batch divided by `lr_batch`, linearly
            or by its square root.
        lr_batch: Global batch for which `lr` holds; used by `lr_scale`.
        min_lr: Learning rate at the end of the schedule and in the cool-down, for a peak of `lr`; scaled with it.
        warmup_epochs: Epochs of linear warm-up from ``warmup_lr``; they replace the start of the schedule.
        warmup_lr: Learning rate of the first step, for a peak of `lr`; scaled with it.
        cooldown_epochs: Epochs at ``min_lr`` after the schedule, part of ``trainer.max_epochs``.
        weight_decay: Weight decay of linear and convolution weights, as `opt` applies it: decoupled by adamw, added to
            the gradient by sgd and Adam; nothing else decays.
        layer_decay: Learning rate of each stage relative to the next.
        pos_embed_lr_mult: Factor on the learning rate of the position embedding, if it trains anything.
        head_lr_mult: Factor on the learning rate of the head, which is new in fine-tuning.
        freeze: Parts of the network not to train, as prefixes of parameter names, such as tokenizer or blocks.0; their
            dropout, drop path and running statistics of batch normalizations go on.
        nan_loss: Whether a loss or gradient that is not finite stops the run, or only its step is skipped; skip makes
            each step wait for the device.
        compile: Whether to compile the network block by block, or a mode of torch.compile (true: default).
        **vit: Passed to :class:`VisionTransformer`.
    """

    _built_from = (VisionTransformer,)
    old_names = OLD
    kind = "number"  # kind of targets: numbers (number), classes (class) or several labels (multilabel)
    reads_labels = True  # whether the loss compares with them
    takes_crops, takes_native = False, True  # several crops of each image, and images of their own sizes
    forward_passes: float | None = 3  # that a training step costs per image, two of them backward; None: unknown
    monitor: tuple[Literal["min", "max"], str]  # what the best epoch minimizes or maximizes
    _stream_seed: int | None  # of dropout and drop path, see seed_step; None before a training
    grad_norm: Tensor | None  # of the last step if it was measured; on the device
    _summed: int | None  # the step whose last batch is in the sums; an optimizer may ask for its loss again

    def __init__(
        self,
        num_outputs: int,
        measured: MetricCollection,
        metrics: Sequence[str | ClassSpec] = (),
        opt: str | ClassSpec = "adamw",
        lr_scheduler: ScheduleName | str | SchedulerSpec = "cosine",
        lr: float = 1e-3,
        lr_scale: Literal["none", "linear", "sqrt"] = "none",
        lr_batch: int = 512,
        min_lr: float = 1e-5,
        warmup_epochs: float = 5.0,
        warmup_lr: float = 1e-6,
        cooldown_epochs: float = 0.0,
        weight_decay: float = 0.05,
        layer_decay: float = 1.0,
        pos_embed_lr_mult: float = 1.0,
        head_lr_mult: float = 1.0,
        freeze: Sequence[str] = (),
        nan_loss: Literal["stop", "skip"] = "stop",
        compile: bool | CompileMode = False,
        **vit: Unpack[NetworkArgs],
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["num_outputs", "measured"], logger=False)
        self.net = VisionTransformer(num_classes=num_outputs, **vit)
        self.net.skips_unread_tokens = True
        freeze_parts(self.net, freeze)
        all_metrics = add_metrics(measured, metrics, self.kind, num_outputs)
        self.val_meter, self.test_meter = Meter(all_metrics), Meter(all_metrics)
        self.sets_own_peak = check_recipe(self)  # refuse a wrong recipe now, not at the first step
        self.train_sums: dict[str, Tensor | int] = {}  # until the record of a run takes them
        self.grad_norm = self._stream_seed = self._summed = None

    def forward(self, images: Tensor) -> Tensor:
        """Map ``(B, C, H, W)`` images to ``(B, K)`` outputs."""
        return self.in_units(self.net(images))

    def in_units(self, outputs: Tensor) -> Tensor:
        """Convert outputs of the network to the units of the targets."""
        return outputs

    def check_training(self, trainer: Any, data: Any) -> None:
        """Refuse a trainer, or a batch of ``data``, that the task cannot be trained with."""

    def check_augmentation(self, data: Any) -> None:
        """Refuse a new run with augmentation that has no meaning for the task; older runs go on."""

    def check_targets(self) -> None:
        """Refuse to train on targets of another kind than the task expects."""

    def check_images(self, data: Any) -> None:
        """Refuse to train on images that the task does not support."""

    def setup(self, stage: str) -> None:
        """Take sizes that were not given from the data, and refuse a trainer, targets or images that do not fit."""
        if (data := getattr(self.trainer, "datamodule", None)) is not None:
            self.take_sizes(data)
        if stage == "fit":
            self._stream_seed, self._summed, self.train_sums = None, None, {}
            self.check_training(self.trainer, data)
            self.check_targets()
            check_forms(self, data)
            self.check_images(data)

    def take_sizes(self, data: Any) -> None:
        """Rebuild the network for the sizes and targets of ``data`` that were not given, as the commands do.

        Raises:
            ValueError: The network was built for other sizes, and its weights have been changed since.
        """
        take_sizes(self, data)

    def on_built(self) -> None:
        """Remember the state of the initial weights; the metaclass calls this once the constructor has returned."""
        self._built = weights_seen(self)

    def is_as_built(self) -> bool:
        """Return whether all weights are still the initial ones."""
        return self._built == weights_seen(self)

    def as_targets(self, targets: Tensor) -> Tensor:
        """Convert targets of the data to the form that losses and metrics expect."""
        return targets

    def train_loss(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the mean loss of a training batch, with optional ``(B,)`` weights of the samples."""
        raise NotImplementedError

    def eval_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of an evaluation batch."""
        raise NotImplementedError

    def train_measures(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return training metrics of a batch, as sums over its samples."""
        return {}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["stream_seed"], checkpoint["own"] = self._stream_seed, interface.own_answer(self)
        data: Any = getattr(self.trainer, "datamodule", None)
        if hasattr(data, "preparation"):
            checkpoint["images"] = data.preparation()  # with which `vitlab.load` prepares others

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if (seed := checkpoint.get("stream_seed")) is not None:  # checkpoints before 0.2.0 have none
            self._stream_seed = seed

    def on_fit_start(self) -> None:
        compile_parts(self, self.hparams["compile"])
        if self._stream_seed is None:  # not resumed; some strategies load a checkpoint only after this
            self._stream_seed = torch.initial_seed()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        mark_batch(self.hparams["compile"], self.device)
        seed_step(self._stream_seed, self.current_epoch, batch_idx, self.global_rank, self.device)
        self.net.start_step(self.global_step)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        (loss, measures), n = loss_and_sums(self, batch), len(batch[0])
        sums: dict[str, Any] = {"loss": in_32_bits(loss.detach()) * n, **measures, "n": n}
        if self.hparams["nan_loss"] == "skip":
            sums = skipped_unless(loss.detach().isfinite(), sums)
        if self._summed != self.global_step:
            for name, value in sums.items():  # on the device: nothing waits for the GPU until they are read
                self.train_sums[name] = self.train_sums.get(name, 0) + in_32_bits(value)
        if isinstance(batch[0], PackedBatch):  # processes have different numbers of images: weigh each image the same
            loss = loss * n / self.trainer.strategy.reduce(loss.new_tensor(n), reduce_op="mean")
        return as_part_of_step(self._trainer, loss, batch_idx)

    def step_loss(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean loss and the training metrics of a batch, the latter as sums over its samples."""
        images, targets = batch[0], self.as_targets(batch[1])
        outputs = self.net(images)
        loss = self.train_loss(outputs, targets, *([batch.weights] if isinstance(batch, Weighted) else []))
        return loss, self.train_measures(outputs.detach(), targets)

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        mark_batch(self.hparams["compile"], self.device)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self._evaluate(batch, self.val_meter)

    def on_validation_epoch_end(self) -> None:
        interface.log_alike(self, values := self.val_meter.read("val/"))
        if self.trainer.state.fn == "fit":
            step_plateaus(self.trainer.lr_scheduler_configs, values, self.current_epoch, self.trainer.sanity_checking)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self._evaluate(batch, self.test_meter)

    def on_test_epoch_end(self) -> None:
        interface.log_alike(self, self.test_meter.read("test/"))

    def predict_step(self, batch: tuple[Tensor, Tensor] | Tensor, batch_idx: int) -> Tensor:
        return self(batch if isinstance(batch, Tensor) else batch[0])

    def _evaluate(self, batch: tuple[Tensor, Tensor], meter: Meter) -> Tensor:
        outputs, targets = in_32_bits(self.net(batch[0])), self.as_targets(batch[1])
        loss, own = self.eval_loss(outputs, targets), interface.answers_itself(self)  # the loss is of what is trained
        outputs = in_32_bits(self(batch[0])) if own else self.in_units(outputs)
        meter.update(outputs, targets, loss)
        return outputs

    def configure_optimizers(self) -> Any:
        accumulate_from_the_start(self.trainer, steps_are_counted=True)
        if self.trainer.train_dataloader is None:  # Lightning does it later, and the batches of an epoch are asked here
            self.trainer.fit_loop.setup_data()
        factor = self.batch_factor(self._global_batch())
        check_groups(self, groups := self.optimizer_groups(factor))
        optimizer = build_optimizer(self.hparams["opt"], groups, self.peak_rate(), trained(self))
        slow_earlier_blocks(optimizer, trained(self), self.hparams["layer_decay"])
        scheduler = build_scheduler(self, optimizer, self.trainer.estimated_stepping_batches, self._schedule())
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        step_scheduler(scheduler, self.current_epoch, self.global_step, metric)

    def sum_of_learning_rates(self, plans: Sequence[Sequence[float]] = ()) -> float | None:
        """Return the sum of the learning rates of all steps, about how far Adam can move a weight; None if unknown.

        Args:
            plans: Of a run that was resumed with more steps, where each schedule began and how many steps it was for.
        """
        steps, total = float(self.trainer.estimated_stepping_batches), 0.0
        plans = plans or [(0, steps)]
        for (begin, planned), end in zip(plans, [*(later for later, _ in plans[1:]), steps], strict=True):
            if interface.redefines(self, "configure_optimizers") or not (factor := self._schedule(planned)):
                return None
            total += sum(factor(step) for step in range(int(begin), int(end)))
        return self.peak_rate() * total

    def peak_rate(self) -> float:
        """Return the largest learning rate of the last layer."""
        return self.hparams["lr"] * self.batch_factor(self._global_batch())

    def _schedule(self, planned: float | None = None) -> Callable[[float], float] | None:
        trainer = self.trainer
        steps = float(trainer.estimated_stepping_batches if planned is None else planned)
        batches = float(trainer.num_training_batches)
        per_epoch = max(1, math.ceil(batches / trainer.accumulate_grad_batches)) if math.isfinite(batches) else batches
        return schedule(self.hparams, steps, per_epoch)

    def _global_batch(self) -> int:
        size = interface.images_of_batch(getattr(self.trainer, "datamodule", None), self.trainer)
        return (self.hparams["lr_batch"] if size is None else size) * interface.batches_of_a_step(self.trainer)

    def batch_factor(self, batch: int) -> float:
        """Return the factor on the learning rate for a global batch of ``batch`` images."""
        return (batch / self.hparams["lr_batch"]) ** {"none": 0, "linear": 1, "sqrt": 0.5}[self.hparams["lr_scale"]]

    def on_after_backward(self) -> None:
        """Complete the last step of an epoch, if its batches were not known to be fewer."""
        complete_step(self)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        self._summed = self.global_step
        if gradient_clip_val or self.hparams["nan_loss"] == "skip":  # 0 turns it off, as in Lightning
            clip_or_skip(self, optimizer, gradient_clip_val, gradient_clip_algorithm)

    def optimizer_groups(self, factor: float = 1.0) -> list[dict[str, Any]]:
        """Return the parameter groups: those of the network, and what a task has beside it, at the peak rate.

        Args:
            factor: Scales every rate.
        """
        names = ("weight_decay", "layer_decay", "pos_embed_lr_mult", "head_lr_mult")
        recipe = {name: self.hparams[name] for name in names}
        groups = param_groups(trained(self), self.hparams["lr"] * factor, **recipe)
        return [*groups, *groups_outside(self, groups, factor)]

    def decaying(self) -> list[torch.nn.Parameter]:
        """Return the weights that decay outside the network: those of linear layers and convolutions."""
        return [weight for module in self.modules() for weight in projections(module)]


def seed_step(seed: int | None, epoch: int, batch: int, rank: int, device: torch.device) -> None:
    """Make dropout and drop path depend only on (seed, epoch, batch, rank), so that a resumed run draws the same."""
    key = f"{seed}:{epoch}:{batch}:{rank}".encode()
    step_seed = int.from_bytes(hashlib.blake2b(key, digest_size=7).digest())
    torch.default_generator.manual_seed(step_seed)  # without a GPU, torch.manual_seed queues a call at every step
    if device.type == "cuda":
        torch.cuda.manual_seed(step_seed)
