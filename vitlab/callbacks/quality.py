"""Measure the quality of features during training: nearest neighbors, linear probe, rank."""

import warnings
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, EarlyStopping
from torch import Tensor

from vitlab.callbacks.loops import is_due, is_last
from vitlab.interface import deals_samples, log_alike
from vitlab.models.features import knn
from vitlab.models.vit import VisionTransformer
from vitlab.runs import guard

Measure = Literal["knn", "probe", "rankme"]
TINY = 1e-7  # added to the share of each singular value, as in the paper
ON_A_LINE = 1.5  # below this RankMe of features without their mean
ALIKE = 1e-3  # below this share of what they are, features do not differ by more than rounding


class FeatureQuality(Callback):
    """Measure pooled features at validation: ``val/knn``, ``val/probe`` and ``val/rankme``, for any task with a `net`.

    Features are the inputs of the head, for training and validation images without augmentation. Measuring draws no
    random numbers and does not train the network, so a resumed run measures the same; `checkpoint.monitor` can be any
    of them. Every process measures all images, with equal results. Under EMA the average is measured::

        trainer:
          callbacks:
            - {class_path: FeatureQuality, init_args: {every_n_epochs: 5}}

    knn is the accuracy of a vote of the nearest neighbors by cosine, weighted by exp(cosine / 0.07), Wu et al. 2018
    (arXiv:1805.01978); probe that of a logistic regression; rankme the exponential of the entropy of the singular
    values, Garrido et al. 2023 (arXiv:2210.02885), from 1 to the width of the features. A mean that all features share
    lowers it, so whether they have collapsed, of which a warning tells, is decided without it: see :func:`collapse`.

    Args:
        every_n_epochs: Epochs between two measurements: the first validation at or after each multiple measures. The
            last of `max_epochs` or `max_steps` is always measured, but not one after which another callback stops the
            training.
        measures: What to measure; knn and probe need classes.
        images: Largest number of images of each split, spread evenly over it. If it leaves out validation images,
            ``val/knn_images`` and so on say how many were measured.
        k: Number of neighbors that vote.

    Example:
        >>> FeatureQuality(every_n_epochs=5, measures=["rankme"]).every_n_epochs
        5
    """

    measured_in_training: tuple[str, ...] = get_args(Measure)  # as `val/...`; no evaluation has them
    needs_whole_weights = True  # in each process, which asks parts of the network

    def __init__(
        self,
        every_n_epochs: int = 5,
        measures: Sequence[Measure] = ("knn", "probe", "rankme"),
        images: int = 10_000,
        k: int = 20,
    ) -> None:
        for name, value in (("every_n_epochs", every_n_epochs), ("images", images), ("k", k)):
            if value < 1:
                raise ValueError(f"`{name}` of FeatureQuality must be at least 1, got {value}")
        self.every_n_epochs, self.measures, self.images, self.k = every_n_epochs, tuple(measures), images, k
        self.higher_is_better = [f"val/{name}" for name in self.measures]  # for the choice of the best epoch
        self._sets: dict[str, Any] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse foreign networks and data, knn or probe without classes, and stopping by what is seldom measured."""
        if stage != "fit":
            return
        self._sets = {}  # of the training before
        if not isinstance(getattr(pl_module, "net", None), VisionTransformer):
            raise ValueError(f"FeatureQuality measures a network of vitlab, and {type(pl_module).__name__} has none")
        others = [c for c in trainer.callbacks if isinstance(c, FeatureQuality) and c is not self]
        if twice := {*self.measures} & {name for other in others for name in other.measures}:
            raise ValueError(
                f"two FeatureQuality callbacks measure {', '.join(sorted(twice))}: leave it to one of them"
            )
        data = trainer.datamodule
        if not deals_samples(data) or not hasattr(data, "pipeline"):
            raise ValueError(f"FeatureQuality needs a data set of vitlab, got {type(data).__name__}")
        if (data.targets["kind"] != "class" or data.num_classes < 2) and {"knn", "probe"} & {*self.measures}:
            raise ValueError(
                "`knn` and `probe` of FeatureQuality need one class per image, of two or more: set `measures: [rankme]`"
            )
        every = self.every_n_epochs
        if (trainer.check_val_every_n_epoch or 1) >= every:  # every validation measures
            return
        for stop in trainer.callbacks:
            if isinstance(stop, EarlyStopping) and stop.monitor in self.higher_is_better:
                raise ValueError(
                    f"EarlyStopping reads `{stop.monitor}` at every validation, and FeatureQuality measures it every "
                    f"{every} epochs: set its `every_n_epochs: 1`, or `trainer.check_val_every_n_epoch: {every}`"
                )

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Measure before the first validation batch, when the average of EMA is in place."""
        if batch_idx or dataloader_idx or trainer.state.fn != "fit":
            return
        if not (trainer.sanity_checking or is_due(trainer, self.every_n_epochs) or is_last(trainer)):
            return
        most = min(self.images, 64) if trainer.sanity_checking else self.images  # the sanity check only needs the names
        values = self.measure(trainer, pl_module, most)
        named = {f"val/{k}": v for k, v in values.items()}
        log_alike(pl_module, named, batch_size=1, on_step=False, on_epoch=True)

    def measure(self, trainer: Any, task: Any, most: int) -> dict[str, float]:
        """Return the measures on at most ``most`` images of each split, and ``NAME_images`` where those are not all.

        They are NaN where any feature is not finite.
        """
        values: dict[str, float] = {}
        features, labels = self.features(trainer, task, "val", most)
        n = len(features)
        if {"knn", "probe"} & {*self.measures}:
            sets = *self.features(trainer, task, "train", most), features  # training features, labels, queries
            classify = {
                "knn": lambda: knn(*sets, self.k, int(sets[1].max()) + 1),
                "probe": lambda: probe(*sets),
            }
            known = all(part.isfinite().all() for part in (sets[0], features))  # else any class would be guessed
            for name in (name for name in classify if name in self.measures):
                values[name] = float((classify[name]() == labels).double().mean()) if known else float("nan")
                guard.goes_on()  # measuring belongs to the wait for the first batch of a validation
        if "rankme" in self.measures:
            values["rankme"] = rankme(features)
            if not trainer.sanity_checking and (how := collapse(features)):
                warnings.warn(f"the features have collapsed in epoch {trainer.current_epoch + 1}: {how}", stacklevel=2)
        limit = trainer.limit_val_batches
        if n == len(trainer.datamodule.splits["val"]) and isinstance(limit, float) and limit == 1.0:  # 1 is one batch
            return values  # of the images of the other metrics
        return values | {f"{name}_images": float(n) for name in values}

    @torch.no_grad()
    def features(self, trainer: Any, task: Any, split: Any, most: int) -> tuple[Tensor, Tensor]:
        """Return ``(n, D)`` pooled features of images of a split, and their ``(n,)`` targets."""
        data, net, device = trainer.datamodule, task.net, task.device
        if split not in self._sets:
            self._sets[split] = data.ready(data.splits[split])
        n, parts = len(data.splits[split]), []
        order = type(data.val_dataloader().sampler)(min(n, most), data.batch_size)
        order.indices = np.linspace(0, n - 1, min(n, most)).round().astype(np.int64)
        loader = data.pipeline.loader(self._sets[split], order, data.mean, data.num_workers, device, data.on_unreadable)
        with trainer.precision_plugin.forward_context():
            for pixels, labels, _ in loader:
                images = data.as_precise(data.pipeline.normalize(pixels.to(device), data.statistics()))
                parts.append((net.fc_norm(net.pool(net.forward_features(images))).float(), labels.to(device)))
                guard.goes_on()
        features, targets = (torch.cat(part) for part in zip(*parts, strict=True))
        return features, targets


def probe(features: Tensor, labels: Tensor, queries: Tensor, decay: float = 1e-4, steps: int = 100) -> Tensor:
    """Classify ``(m, D)`` queries by a logistic regression on ``(n, D)`` features: ``(m,)`` classes.

    Features are standardized; L-BFGS starts at zero, in float64.

    >>> probe(torch.tensor([[0.0], [1.0]]), torch.tensor([0, 1]), torch.tensor([[-1.0], [2.0]]))
    tensor([0, 1])
    """
    mean, std = features.double().mean(dim=0), features.double().std(dim=0).clamp_min(1e-6)
    x, y = ((part.double() - mean) / std for part in (features, queries))
    with torch.inference_mode(False), torch.enable_grad():
        x, labels = x.clone(), labels.clone()
        weight = x.new_zeros(x.shape[1] + 1, int(labels.max()) + 1, requires_grad=True)
        solver = torch.optim.LBFGS([weight], max_iter=steps, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            solver.zero_grad()
            loss = F.cross_entropy(x @ weight[1:] + weight[0], labels) + decay * weight[1:].square().sum()
            loss.backward()
            return loss

        solver.step(closure)
        return (y @ weight[1:].detach() + weight[0].detach()).argmax(dim=1)


def rankme(features: Tensor) -> float:
    """Return the smooth rank of ``(n, D)`` features, from 1 to min(n, D); NaN if any is not finite.

    >>> round(rankme(torch.eye(4)), 3), round(rankme(torch.ones(4, 4)), 3)
    (4.0, 1.0)
    """
    if not features.isfinite().all():
        return float("nan")
    values = torch.linalg.svdvals(features.double())
    shares = values / values.sum().clamp_min(TINY) + TINY
    return float((-(shares * shares.log()).sum()).exp())


def collapse(features: Tensor) -> str:
    """Return how ``(n, D)`` features have collapsed, to a point or a line; empty if they have not, or n is below 3.

    >>> collapse(torch.ones(4, 4)), collapse(torch.eye(4) + 10)
    ('all are alike', '')
    """
    features = features.double()
    differences = features - features.mean(dim=0)
    if len(features) < 3:  # which lie on a line anyway
        return ""
    if differences.norm() <= ALIKE * features.norm():
        return "all are alike"
    return "all lie close to one line" if rankme(differences) < ON_A_LINE else ""
