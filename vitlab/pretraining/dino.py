"""Self-distillation: pre-training without labels, with the student's moving average as teacher."""

import copy
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, Unpack

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric, MetricCollection

from vitlab.layers.linear import Linear, linear_layer
from vitlab.layers.precision import check_average, without_autocast
from vitlab.models import build
from vitlab.pretraining.mae import covered, refuse_supervised
from vitlab.ranges import check_arguments
from vitlab.tasks.arguments import TaskArgs
from vitlab.tasks.base import Task
from vitlab.tasks.meter import Meter


class ProjectionHead(nn.Module):
    """Score features against prototypes, Caron et al. 2021 (arXiv:2104.14294): MLP, normalization, linear layer.

    The last layer has weight normalization (Salimans and Kingma 2016, arXiv:1602.07868): the lengths of its prototypes
    are fixed at 1 or trained.

    Args:
        dim: Width of the features.
        prototypes: Number of prototypes K.
        hidden: Width of the two hidden layers.
        proj_dim: Width of the prototypes.
        is_fixed: Whether the lengths of the prototypes are fixed at 1.
    """

    def __init__(self, dim: int, prototypes: int, hidden: int, proj_dim: int, is_fixed: bool = True) -> None:
        super().__init__()
        widths = (dim, hidden, hidden, proj_dim)
        layers: list[nn.Module] = []
        for a, b in pairwise(widths):
            layers += [Linear(a, b), nn.GELU()]
        self.mlp = nn.Sequential(*layers[:-1])
        self.prototypes = nn.Parameter(nn.init.trunc_normal_(torch.empty(prototypes, proj_dim), std=0.02))
        self.length = None if is_fixed else nn.Parameter(torch.ones(prototypes))
        self.apply(lambda module: build.init_weights(module, 0.02))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(..., D)`` to ``(..., K)`` in at least float32."""
        scores = linear_layer(F.normalize(self.mlp(x), dim=-1), F.normalize(self.prototypes, dim=-1))
        scores = scores if self.length is None else scores * self.length
        return scores if scores.dtype.itemsize > 2 else scores.float()


def cosine(begin: float, end: float, step: int, steps: float) -> float:
    """Return the value at ``step`` of a half cosine from ``begin`` to ``end``.

    >>> round(cosine(0.996, 1.0, 50, 100), 6)
    0.998
    """
    return end + (begin - end) * (1 + math.cos(math.pi * step / steps)) / 2


def over_processes(x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Return the sum (or another reduction) of a tensor over all processes."""
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(x := x.clone(), op)
    return x


def sinkhorn(scores: Tensor, temperature: float, rounds: int = 3) -> Tensor:
    """Map the teacher's ``(n, K)`` scores to targets that use all prototypes equally over all processes.

    Sinkhorn-Knopp, Cuturi 2013 (arXiv:1306.0895), as in SwAV, Caron et al. 2020 (arXiv:2006.09882), and DINOv2.

    >>> targets = sinkhorn(torch.randn(64, 8), 0.1, rounds=50)
    >>> torch.allclose(targets.sum(0), torch.full((8,), 8.0), atol=0.1), torch.allclose(targets.sum(1), torch.ones(64))
    (True, True)
    """
    scores = scores / temperature
    top = scores.amax() if len(scores) else scores.new_tensor(-torch.inf)
    q = (scores - over_processes(top, dist.ReduceOp.MAX)).exp()
    tiny = torch.finfo(q.dtype).tiny
    for _ in range(rounds):
        q = q / over_processes(q.sum(dim=0)).clamp_min(tiny)
        q = q / q.sum(dim=1, keepdim=True).clamp_min(tiny)
    return q


def crop_loss(scores: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Return the mean cross-entropy between each student crop and the teacher's other crops of the image.

    Args:
        scores: ``(V, B, K)`` of the student, the two large crops first.
        targets: ``(2, B, K)`` probabilities of the teacher for the large crops.
        temperature: Temperature of the student.
    """
    logs = F.log_softmax(scores / temperature, dim=-1)
    pairs = [-(q * logs[v]).sum(dim=-1).mean() for i, q in enumerate(targets) for v in range(len(logs)) if v != i]
    return torch.stack(pairs).mean()


def patch_loss(scores: Tensor, targets: Tensor, weights: Tensor, temperature: float) -> Tensor:
    """Return iBOT's cross-entropy at tokens hidden from the student, Zhou et al. 2022 (arXiv:2111.07832).

    Args:
        scores: ``(n, K)`` of the student, only at hidden tokens.
        targets: ``(n, K)`` probabilities of the teacher.
        weights: ``(n,)``: 1 / (number of hidden tokens of the image x number of images).
        temperature: Temperature of the student.
    """
    return -((targets * F.log_softmax(scores / temperature, dim=-1)).sum(dim=-1) * weights).sum()


def koleo(features: Tensor) -> Tensor:
    """Return minus the mean log distance from each of ``(B, D)`` normalized features to its nearest neighbor.

    The Kozachenko-Leonenko estimate of entropy, Sablayrolles et al. 2019 (arXiv:1806.03198), as in DINOv2.

    >>> round(koleo(torch.tensor([[1.0, 0.0], [0.0, 3.0]])).item(), 4)  # -log(sqrt(2))
    -0.3466
    """
    eps = 1e-8
    with without_autocast(features):  # neighbors of similar features differ by less than the rounding of 16 bits
        x = F.normalize(features if features.dtype.itemsize > 2 else features.float(), dim=1, eps=eps)
        near = (x.detach() @ x.detach().T).fill_diagonal_(-1).argmax(dim=1)
        return -(F.pairwise_distance(x, x[near], eps=eps) + eps).log().mean()


class DINO(Task):
    """Train a Vision Transformer by self-distillation without labels, Caron et al. 2021 (arXiv:2104.14294).

    The student sees two large and several small crops of an image, from data with ``augment: [MultiCrop]``. The
    teacher, the student's moving average, sees the large ones. For every crop the student predicts the teacher's output
    for the other large crops. `net` is the teacher, which is evaluated, saved and analyzed; `student` is trained.
    Defaults are those of the authors' code; ``centering: sinkhorn`` and `koleo_weight` are from DINOv2, Oquab et al.
    2023 (arXiv:2304.07193). Gradients are clipped by their total norm; the authors clip each parameter separately.

    With `ibot_weight` some tokens of the large crops are hidden from the student, which predicts the teacher's outputs
    for them: iBOT, Zhou et al. 2022 (arXiv:2111.07832), with one head for both losses. A trained patch covers their
    pixels, because overlapping windows of T2T would show them otherwise; for a patch with as many values as a token,
    this equals iBOT's mask token. iBOT hides rectangles; here they are squares.

    Centers and Sinkhorn's sums include all processes, so a step does not depend on their number except for rounding;
    nearest neighbors of KoLeo are searched within each process, as in DINOv2.

    Args:
        prototypes: Outputs K of the head.
        proj_hidden: Width of the two hidden layers of the head.
        proj_dim: Width of the bottleneck of the head.
        norm_last_layer: Whether the length of each prototype is fixed at 1; the authors train it for small networks.
        freeze_last_layer: Number of epochs at the start in which the prototypes are not trained.
        momentum_teacher: Momentum of the moving average at the start; rises to 1 by a cosine.
        student_temp: Temperature of the student.
        teacher_temp: Temperature of the teacher after its warm-up.
        warmup_teacher_temp: Temperature of the teacher in the first epoch.
        warmup_teacher_temp_epochs: Number of epochs of this warm-up, which is linear.
        centering: How the teacher avoids collapse: subtract a running mean of its outputs, or Sinkhorn-Knopp.
        center_momentum: Momentum of the running mean.
        weight_decay_end: Weight decay at the end, by a cosine from `weight_decay`; null keeps it constant.
        ibot_weight: Weight of iBOT's loss on hidden tokens; 0 turns it off.
        mask_share: Least and largest share of hidden tokens, in half of the large crops; the others have none.
        mask_block: Side of the squares that are hidden together, in tokens.
        koleo_weight: Weight of the KoLeo loss, which spreads the features; 0 turns it off.
        **task: Passed to :class:`Task`.

    Example:
        >>> net = {"img_size": 8, "in_chans": 1, "patch_size": 2, "embed_dim": 16, "depth": 1, "num_heads": 2}
        >>> task = DINO(prototypes=32, proj_hidden=16, proj_dim=8, **net)
        >>> crops = [torch.randn(3, 1, 8, 8)] * 2 + [torch.randn(3, 1, 4, 4)]
        >>> task.loss_of(crops, teacher_temp=0.04).shape, task(crops[0]).shape
        (torch.Size([]), torch.Size([3, 16]))
    """

    monitor = None  # type: ignore[assignment]  # a small loss may be a collapse: use the last epoch
    takes_crops = True
    forward_passes = None  # as many as there are crops, of their sizes
    reads_labels = False
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
        check_arguments(prototypes=prototypes, proj_hidden=proj_hidden, proj_dim=proj_dim)
        refuse_supervised("DINO", task)
        if len(mask_share) != 2 or mask_share[0] > mask_share[1]:
            raise ValueError(f"`mask_share` must be the least and the largest share, as in [.1, .5], got {mask_share}")
        super().__init__(num_outputs=0, measured=MetricCollection({"entropy": MeanMetric()}), **task)
        self.val_meter.loss_name = self.test_meter.loss_name = "cross_entropy"  # no criterion for the best epoch
        if weight_decay_end is not None and not self.hparams["weight_decay"]:
            raise ValueError("`weight_decay_end` needs a `weight_decay` above 0 to begin with")
        self.student = net = self.net
        self.head = ProjectionHead(net.num_features, prototypes, proj_hidden, proj_dim, norm_last_layer)
        self.net, self.teacher_head = copy.deepcopy(net), copy.deepcopy(self.head)
        self.net.requires_grad_(False), self.teacher_head.requires_grad_(False)
        sides = [divmod(side, cells) for side, cells in zip(net.img_size, net.grid_size, strict=True)]
        if ibot_weight and any(rest for _, rest in sides):
            raise ValueError(f"`ibot_weight`: the grid {net.grid_size} must divide `img_size`, got {net.img_size}")
        patch = torch.zeros(net.in_chans, *(side for side, _ in sides))
        self.cover = nn.Parameter(patch) if ibot_weight else None  # zero is the mean of normalized images
        self.register_buffer("center", torch.zeros(prototypes))
        self.register_buffer("patch_center", torch.zeros(prototypes) if ibot_weight else None)
        self._centers_before: dict[str, Tensor] = {}  # the present batch
        self._is_new = True

    def check_training(self, trainer: Any, data: Any) -> None:
        """Refuse weights of 16 bits, and single images per process where their nearest neighbors are asked for."""
        check_average("the teacher of `model: DINO`", str(trainer.precision))
        batch = getattr(data, "batch_size", None)  # loaders alone have none, nor crops
        if self.hparams["koleo_weight"] and batch is not None and batch // trainer.world_size < 2:
            raise ValueError("`koleo_weight` needs two images per process: use a larger `data.batch_size`")

    def check_images(self, data: Any) -> None:
        """Refuse data without crops, and crops that the tokenizer cannot divide into tokens."""
        crops = getattr(getattr(data, "pipeline", None), "crops", None)
        if crops is None and getattr(data, "arrays", False):
            raise ValueError("`model: DINO` learns from crops, and arrays are not cropped: use photos, or --model=MAE")
        if crops is None:
            raise ValueError("`model: DINO` learns from crops: set --data.augment=MultiCrop, with a data set of vitlab")
        try:
            if len(crops.parts) > 2:
                self.net.positions(torch.empty(1, self.net.in_chans, *crops.local_size))
        except ValueError as error:
            raise ValueError(f"`data.augment`: local_size of MultiCrop: {error}") from None

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self._is_new = False

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the weights of student and teacher; the training then goes on from both."""
        self._is_new = False
        return super().load_state_dict(*args, **kwargs)

    def on_fit_start(self) -> None:
        """Start the student of a new run with the weights of the teacher, which `--init_from` may have loaded."""
        super().on_fit_start()
        if self._is_new:
            self.student.load_state_dict(self.net.state_dict())
        self._is_new = False  # a second training goes on

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if (end := self.hparams["weight_decay_end"]) is not None:
            decay = cosine(self.hparams["weight_decay"], end, self.global_step, self._steps())
            for group in self.optimizers(use_pl_optimizer=False).param_groups:  # type: ignore[union-attr]
                group["weight_decay"] = decay if group["weight_decay"] else 0.0

    def step_loss(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a batch of crops."""
        data: Any = getattr(self.trainer, "datamodule", None)
        crops, hidden = data.pipeline.crops.split(batch[0]), None
        if self.cover is not None:
            share, block = self.hparams["mask_share"], self.hparams["mask_block"]
            masks = [data.step.hidden(self.net.grid_size, block, view, *share) for view in (0, 1)]
            hidden = torch.stack([torch.from_numpy(mask) for mask in masks]).to(batch[0].device)
        return self.loss_of(crops, self.teacher_temp_of(self.current_epoch), hidden), {}

    def teacher_temp_of(self, epoch: int) -> float:
        """Return the temperature of the teacher in an epoch, counted from 0."""
        first, last = self.hparams["warmup_teacher_temp"], self.hparams["teacher_temp"]
        n = self.hparams["warmup_teacher_temp_epochs"]
        return last if epoch >= n else first + (last - first) * epoch / max(n - 1, 1)

    def loss_of(self, crops: Sequence[Tensor], teacher_temp: float, hidden: Tensor | None = None) -> Tensor:
        """Return the loss of crops, two large ``(B, C, H, W)`` first; ``hidden``, ``(2, B, N)``, masks their tokens."""
        h, B, P = self.hparams, len(crops[0]), self.net.num_prefix_tokens
        large = torch.cat(tuple(crops[:2]))
        self.net.eval(), self.teacher_head.eval()  # without dropout and drop path
        with torch.no_grad():
            tokens = self.net.forward_features(large)
            teacher_scores = self.teacher_head(self._pooled(self.net, tokens))
            targets = self._targets(teacher_scores, teacher_temp, "center").unflatten(0, (2, B))
        if hidden is None or self.cover is None:
            seen = self.student.forward_features(large)
        else:
            seen = self.student.forward_features(covered(large, hidden.flatten(0, 1), self.cover, self.net.grid_size))
        features = [self._pooled(self.student, seen)]
        if len(crops) > 2:
            features.append(self._pooled(self.student, self.student.forward_features(torch.cat(tuple(crops[2:])))))
        scores = self.head(torch.cat(features)).unflatten(0, (-1, B))  # (V, B, K)
        loss = crop_loss(scores, targets, h["student_temp"])
        if hidden is not None and self.cover is not None:
            mask = hidden.flatten(0, 1)
            shares = mask / mask.sum(dim=1, keepdim=True, dtype=scores.dtype).clamp_min(1)
            with torch.no_grad():
                teacher_scores = self.teacher_head(tokens[:, P:])
                patch_targets = self._targets(teacher_scores, teacher_temp, "patch_center", mask)
            weights = shares[mask] / len(mask)
            on_patches = patch_loss(self.head(seen[:, P:][mask]), patch_targets, weights, h["student_temp"])
            loss = loss + h["ibot_weight"] * on_patches
        if h["koleo_weight"]:
            loss = loss + h["koleo_weight"] * sum(koleo(part) for part in features[0].split(B))
        return loss

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Take a step of the optimizer, then update the teacher."""
        momentum = cosine(self.hparams["momentum_teacher"], 1.0, self.global_step, self._steps())
        super().optimizer_step(*args, **kwargs)
        self.follow(momentum)

    @torch.no_grad()
    def follow(self, momentum: float) -> None:
        """Update the teacher: ``momentum`` times itself plus (1 - momentum) times the student."""
        for teacher, student in ((self.net, self.student), (self.teacher_head, self.head)):
            torch._foreach_lerp_(list(teacher.parameters()), list(student.parameters()), 1 - momentum)
            for old, new in zip(teacher.buffers(), student.buffers(), strict=True):
                old.copy_(new)

    def on_after_backward(self) -> None:
        """Freeze the prototypes in the first epochs, before anybody measures the gradient."""
        super().on_after_backward()
        if self.current_epoch < self.hparams["freeze_last_layer"]:
            for p in (self.head.prototypes, self.head.length):
                if p is not None:
                    p.grad = None  # so weights and moments do not change

    def decaying(self) -> list[nn.Parameter]:
        """Return the weights that decay outside the student, among them those of the head's last layer."""
        head = getattr(self, "head", None)  # none yet when the recipe is checked
        return [*super().decaying(), *([] if head is None else [head.prototypes])]

    def _evaluate(self, batch: tuple[Tensor, Tensor], meter: Meter) -> None:  # type: ignore[override]
        with torch.no_grad():
            teacher_scores = self.teacher_head(self._pooled(self.net, self.net.forward_features(batch[0])))
            scores = self.head(self._pooled(self.student, self.student.forward_features(batch[0])))
        targets = F.softmax((teacher_scores - self.center) / self.hparams["teacher_temp"], dim=1)
        loss = -(targets * F.log_softmax(scores / self.hparams["student_temp"], dim=1)).sum(dim=1).mean()
        meter.update(torch.special.entr(targets).sum(dim=1), torch.ones(len(targets), device=targets.device), loss)

    def _targets(self, scores: Tensor, temperature: float, name: str, mask: Tensor | None = None) -> Tensor:
        """Return the teacher's probabilities from ``(..., K)`` scores, only at ``mask`` if given; update the center.

        An optimizer that asks for the loss of a batch again gets the targets of before, and the center stays.
        """
        masked = scores if mask is None else scores[mask]
        if self.hparams["centering"] == "sinkhorn":
            return sinkhorn(masked, temperature)
        if self._summed == self.global_step:
            return F.softmax((masked - self._centers_before[name]) / temperature, dim=-1)
        center: Tensor = getattr(self, name)
        self._centers_before[name] = before = center.clone()
        world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        mean = over_processes(scores.flatten(0, -2).mean(dim=0)) / world
        mean = torch.where(mean.isfinite(), mean, center)  # of a step that `nan_loss` skips: NaN would stay for good
        center.lerp_(mean.to(center.dtype), 1 - self.hparams["center_momentum"])
        return F.softmax((masked - before) / temperature, dim=-1)

    def _pooled(self, net: Any, tokens: Tensor) -> Tensor:
        return net.fc_norm(net.pool(tokens))

    def _steps(self) -> float:
        return float(self.trainer.estimated_stepping_batches)
