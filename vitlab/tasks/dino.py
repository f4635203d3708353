"""Pre-training without labels: a student that learns what its own average says of other crops of an image."""

import copy
from collections.abc import Sequence
from typing import Any, Literal, Unpack

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric, MetricCollection

from vitlab.models import start
from vitlab.tasks import dino_loss as losses
from vitlab.tasks.arguments import TaskArgs
from vitlab.tasks.base import Task
from vitlab.tasks.mae import beside_network, covered, refuse_supervised
from vitlab.tasks.meter import Meter


class DINO(Task):
    """Train a Vision Transformer by self-distillation without labels, Caron et al. 2021 (arXiv:2104.14294).

    The student sees two large and several small crops of an image, from data with ``augment: [MultiCrop]``; the
    teacher, the student's moving average, sees the large ones; the student learns the teacher's view of every other
    crop. `net` is the teacher, which is what is measured, saved, analyzed and started from; `student` is trained.
    Defaults are those of the authors' code; ``centering: sinkhorn`` and `koleo_weight` are DINOv2's, Oquab et al. 2023
    (arXiv:2304.07193). Gradients are clipped by their norm together; the authors clip each parameter's.

    With `ibot_weight` some tokens of the large crops are hidden from the student, which predicts the teacher's view of
    them: iBOT, Zhou et al. 2022 (arXiv:2111.07832), with one head for both. They are hidden in the pixels, under a
    trained patch: for patches the same as iBOT's vector in their token's place, where a patch has as many values as a
    token; T2T's overlapping windows would show them else. iBOT hides rectangles, here it is squares.

    Centers and Sinkhorn's sums are over all processes, so that two of them take the step of one on the same global
    batch, but for rounding; KoLeo's nearest neighbors, as DINOv2's, are those of each process.

    Args:
        prototypes: Outputs K of the head.
        proj_hidden: Width of the head's two hidden layers.
        proj_dim: Width of the head's bottleneck.
        norm_last_layer: Whether the prototypes' lengths stay 1; the authors train them for small networks.
        freeze_last_layer: Epochs in which the prototypes are not trained.
        momentum_teacher: Share of the teacher that the first step keeps; rises to 1 by a cosine.
        student_temp: Temperature of the student.
        teacher_temp: Temperature of the teacher after its warm-up.
        warmup_teacher_temp: Temperature of the teacher in the first epoch.
        warmup_teacher_temp_epochs: Epochs from the one to the other, in equal steps.
        centering: Whether a running mean is subtracted from the teacher's outputs, or Sinkhorn-Knopp spreads them.
        center_momentum: Share of the mean that a step keeps.
        weight_decay_end: Weight decay at the end, by a cosine from `weight_decay`; null keeps it.
        ibot_weight: Weight of iBOT's loss on hidden tokens; 0 hides none.
        mask_share: Least and largest share of tokens hidden in half of the large crops; the others are whole.
        mask_block: Side of the squares that are hidden together, in tokens.
        koleo_weight: Weight of KoLeo, which spreads the features; 0 leaves it out.
        **task: Passed to :class:`Task`.

    Example:
        >>> net = {"img_size": 8, "in_chans": 1, "patch_size": 2, "embed_dim": 16, "depth": 1, "num_heads": 2}
        >>> task = DINO(prototypes=32, proj_hidden=16, proj_dim=8, **net)
        >>> crops = [torch.randn(3, 1, 8, 8)] * 2 + [torch.randn(3, 1, 4, 4)]
        >>> task.loss_of(crops, teacher_temp=0.04).shape, task(crops[0]).shape
        (torch.Size([]), torch.Size([3, 16]))
    """

    monitor = None  # type: ignore[assignment]  # a small loss may be a collapse: the last epoch counts
    takes_crops = True
    center: Tensor
    patch_center: Tensor

    def __init__(
        self,
        prototypes: int = 65536,
        proj_hidden: int = 2048,
        proj_dim: int = 256,
        norm_last_layer: bool = True,
        freeze_last_layer: int = 1,
        momentum_teacher: float = 0.996,
        student_temp: float = 0.1,
        teacher_temp: float = 0.04,
        warmup_teacher_temp: float = 0.04,
        warmup_teacher_temp_epochs: int = 0,
        centering: Literal["mean", "sinkhorn"] = "mean",
        center_momentum: float = 0.9,
        weight_decay_end: float | None = None,
        ibot_weight: float = 0.0,
        mask_share: Sequence[float] = (0.1, 0.5),
        mask_block: int = 1,
        koleo_weight: float = 0.0,
        **task: Unpack[TaskArgs],
    ) -> None:
        start.check_at_least(1, prototypes=prototypes, proj_hidden=proj_hidden, proj_dim=proj_dim)
        refuse_supervised("DINO", task)
        if len(mask_share) != 2 or mask_share[0] > mask_share[1]:
            raise ValueError(f"`mask_share` must be the least and the largest share, as in [.1, .5], got {mask_share}")
        super().__init__(num_outputs=0, measured=MetricCollection({"entropy": MeanMetric()}), **task)
        if weight_decay_end is not None and not self.hparams["weight_decay"]:
            raise ValueError("`weight_decay_end` needs a `weight_decay` above 0 to begin with")
        self.student = net = self.net
        self.head = losses.ProjectionHead(net.num_features, prototypes, proj_hidden, proj_dim, norm_last_layer)
        self.net, self.teacher_head = copy.deepcopy(net), copy.deepcopy(self.head)
        self.net.requires_grad_(False), self.teacher_head.requires_grad_(False)
        sides = [divmod(side, cells) for side, cells in zip(net.img_size, net.grid_size, strict=True)]
        if ibot_weight and any(rest for _, rest in sides):
            raise ValueError(f"`ibot_weight` needs images {net.img_size} that the grid {net.grid_size} divides")
        patch = torch.zeros(net.in_chans, *(side for side, _ in sides))
        self.cover = nn.Parameter(patch) if ibot_weight else None  # the mean of normalized images
        self.register_buffer("center", torch.zeros(prototypes))
        self.register_buffer("patch_center", torch.zeros(prototypes) if ibot_weight else None)
        self._is_new = True

    def setup(self, stage: str) -> None:
        """Refuse data that do not give crops, and crops that the tokens do not fit."""
        super().setup(stage)
        data: Any = getattr(self.trainer, "datamodule", None)
        crops = getattr(getattr(data, "pipeline", None), "crops", None)
        if stage != "fit":
            return
        if crops is None:
            raise ValueError("`model: DINO` learns from crops: --data.augment=MultiCrop, of data of vitlab")
        try:
            self.net.positions(torch.empty(1, self.net.in_chans, *crops.local_size))
        except ValueError as error:
            raise ValueError(f"`data.augment`: local_size of MultiCrop: {error}") from None
        if data.batch_size // self.trainer.world_size < 2 and self.hparams["koleo_weight"]:
            raise ValueError("`koleo_weight` needs two images a process: a larger `data.batch_size`")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self._is_new = False

    def on_fit_start(self) -> None:
        """Begin a new run with the student where the teacher is, which `--init_from` may have filled."""
        super().on_fit_start()
        if self._is_new:
            self.student.load_state_dict(self.net.state_dict())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if (end := self.hparams["weight_decay_end"]) is not None:
            decay = losses.cosine(self.hparams["weight_decay"], end, self.global_step, self._steps())
            for group in self.optimizers(use_pl_optimizer=False).param_groups:  # type: ignore[union-attr]
                group["weight_decay"] = decay if group["weight_decay"] else 0.0

    def step_loss(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a batch of crops."""
        data: Any = getattr(self.trainer, "datamodule", None)
        crops, hidden = data.pipeline.crops.split(batch[0]), None
        if self.cover is not None:
            share, block = self.hparams["mask_share"], self.hparams["mask_block"]
            seen = [data.step.hidden(self.net.grid_size, block, view, *share) for view in (0, 1)]
            hidden = torch.stack([torch.from_numpy(one) for one in seen]).to(batch[0].device)
        return self.loss_of(crops, self.teacher_temp_of(self.current_epoch), hidden), {}

    def teacher_temp_of(self, epoch: int) -> float:
        """Return the teacher's temperature in an epoch, counted from 0."""
        first, last = self.hparams["warmup_teacher_temp"], self.hparams["teacher_temp"]
        n = self.hparams["warmup_teacher_temp_epochs"]
        return last if epoch >= n else first + (last - first) * epoch / max(n - 1, 1)

    def loss_of(self, crops: Sequence[Tensor], teacher_temp: float, hidden: Tensor | None = None) -> Tensor:
        """Return the loss of crops, two large ``(B, C, H, W)`` first; ``(2, B, N)`` tells which tokens are hidden."""
        h, B, P = self.hparams, len(crops[0]), self.net.num_prefix_tokens
        large = torch.cat(tuple(crops[:2]))
        self.net.eval(), self.teacher_head.eval()  # without dropout and drop path
        with torch.no_grad():
            tokens = self.net.forward_features(large)
            known = self.teacher_head(self._pooled(self.net, tokens))
            targets = self._targets(known, teacher_temp, self.center).unflatten(0, (2, B))
        if hidden is None or self.cover is None:
            seen = self.student.forward_features(large)
        else:
            seen = self.student.forward_features(covered(large, hidden.flatten(0, 1), self.cover, self.net.grid_size))
        features = [self._pooled(self.student, seen)]
        if len(crops) > 2:
            features.append(self._pooled(self.student, self.student.forward_features(torch.cat(tuple(crops[2:])))))
        scores = self.head(torch.cat(features)).unflatten(0, (-1, B))  # (V, B, K)
        loss = losses.crop_loss(scores, targets, h["student_temp"])
        if hidden is not None and self.cover is not None:
            mask = hidden.flatten(0, 1)
            shares = mask / mask.sum(dim=1, keepdim=True, dtype=scores.dtype).clamp_min(1)
            with torch.no_grad():
                known = self.teacher_head(tokens[:, P:])
                wanted = self._targets(known, teacher_temp, self.patch_center, mask)
            weights = shares[mask] / len(mask)
            found = losses.patch_loss(self.head(seen[:, P:][mask]), wanted, weights, h["student_temp"])
            loss = loss + h["ibot_weight"] * found
        if h["koleo_weight"]:
            loss = loss + h["koleo_weight"] * sum(losses.koleo(part) for part in features[0].split(B))
        return loss

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Take the optimizer's step, and let the teacher follow."""
        momentum = losses.cosine(self.hparams["momentum_teacher"], 1.0, self.global_step, self._steps())
        super().optimizer_step(*args, **kwargs)
        self.follow(momentum)

    @torch.no_grad()
    def follow(self, momentum: float) -> None:
        """Let the teacher be ``momentum`` of itself and the rest of the student."""
        for teacher, student in ((self.net, self.student), (self.teacher_head, self.head)):
            torch._foreach_lerp_(list(teacher.parameters()), list(student.parameters()), 1 - momentum)
            for mine, theirs in zip(teacher.buffers(), student.buffers(), strict=True):
                mine.copy_(theirs)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Leave the prototypes as they are in the first epochs."""
        if self.current_epoch < self.hparams["freeze_last_layer"]:
            for p in (self.head.prototypes, self.head.length):
                if p is not None:
                    p.grad = None  # which leaves weights and moments alone

    def optimizer_groups(self, factor: float = 1.0) -> list[dict[str, Any]]:
        """Return the groups of the student, and those of its head, which has the peak rate."""
        return [*super().optimizer_groups(factor), *beside_network(self, ("net.", "student.", "teacher_head."), factor)]

    def log_dict(self, values: Any, *args: Any, **how: Any) -> None:  # type: ignore[override]
        """Call the loss of whole images what it is, and nothing to choose an epoch by."""
        super().log_dict(
            {name.replace("/loss", "/cross_entropy"): value for name, value in values.items()}, *args, **how
        )

    def _evaluate(self, batch: tuple[Tensor, Tensor], meter: Meter) -> None:  # type: ignore[override]
        with torch.no_grad():
            known = self.teacher_head(self._pooled(self.net, self.net.forward_features(batch[0])))
            scores = self.head(self._pooled(self.student, self.student.forward_features(batch[0])))
        targets = F.softmax((known - self.center) / self.hparams["teacher_temp"], dim=1)
        found = -(targets * F.log_softmax(scores / self.hparams["student_temp"], dim=1)).sum(dim=1).mean()
        meter.update(torch.special.entr(targets).sum(dim=1), torch.ones(len(targets), device=targets.device), found)

    def _targets(self, scores: Tensor, temperature: float, center: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the teacher's probabilities of ``(..., K)`` scores, at ``mask`` alone; the center moves on."""
        wanted = scores if mask is None else scores[mask]
        if self.hparams["centering"] == "sinkhorn":
            return losses.sinkhorn(wanted, temperature)
        targets = F.softmax((wanted - center) / temperature, dim=-1)
        world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        mean = losses.over_processes(scores.flatten(0, -2).mean(dim=0)) / world
        center.lerp_(mean.to(center.dtype), 1 - self.hparams["center_momentum"])
        return targets

    def _pooled(self, net: Any, tokens: Tensor) -> Tensor:
        return net.fc_norm(net.pool(tokens))

    def _steps(self) -> float:
        return float(self.trainer.estimated_stepping_batches)
