"""Classification with the help of a trained network."""

from typing import Any, Literal, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.tasks.arguments import ClassifierArgs
from vitlab.tasks.classifier import Classifier
from vitlab.tasks.teacher import Teacher, read_teacher


class Distillation(Classifier):
    """Train on labels and on what a frozen teacher says of the same images, Touvron et al. 2021 (arXiv:2012.12877).

    Hard: cross-entropy with the teacher's first choice. Soft: ``tau ** 2`` times the Kullback-Leibler divergence of
    both softmax outputs at temperature ``tau``, Hinton et al. 2015 (arXiv:1503.02531), a mean over images; the authors'
    code divides by the number of classes once more. One head learns from both, as in the paper's runs without its
    distillation token, which this network does not have. The teacher sees the student's images, augmented and mixed,
    as it was trained to see them: other means and standard deviations are accounted for.

    Args:
        teacher: A run, one of its checkpoints or weights, a file from `vitlab export`, or timm:NAME.
        distill: Whether the student learns the teacher's first choice or all its probabilities.
        distill_alpha: Share of the teacher in the loss, 0 to 1.
        distill_tau: Temperature of soft distillation, above 0; null is 3.
        **task: Passed to :class:`Classifier`.

    Example:
        >>> size = {"img_size": 8, "in_chans": 1, "patch_size": 2, "embed_dim": 16, "depth": 2, "num_heads": 2}
        >>> task = Distillation(teacher="runs/first", num_classes=10, **size)
        >>> task.hparams["distill"]
        'hard'
    """

    def __init__(
        self,
        teacher: str,
        distill: Literal["soft", "hard"] = "hard",
        distill_alpha: float = 0.5,
        distill_tau: float | None = None,
        **task: Unpack[ClassifierArgs],
    ) -> None:
        if teacher == "last":
            raise ValueError("`teacher` must name its run: `last` is another one when this run is continued")
        if not 0 <= distill_alpha <= 1:
            raise ValueError(f"`distill_alpha` must be 0 to 1, got {distill_alpha}")
        if distill_tau is not None and (distill == "hard" or distill_tau <= 0):
            raise ValueError(f"`distill_tau` must be above 0 and is for `distill=soft` alone, got {distill_tau}")
        super().__init__(**task)
        if self.kind == "multilabel":
            raise ValueError("`model: Distillation` learns one class of each image, and the data has several labels")
        self._teacher: tuple[Teacher, ...] = ()  # in a tuple, it is no part of state dict, optimizer and average
        self._advice = torch.empty(0)  # what the teacher says of a batch, (B, K)

    def setup(self, stage: str) -> None:
        """Read the teacher; only training needs it."""
        super().setup(stage)
        if stage == "fit":
            self.find_teacher(getattr(self.trainer, "datamodule", None))

    @property
    def teacher(self) -> Teacher:
        """The teacher, once it is read."""
        return self._teacher[0]

    def find_teacher(self, data: Any) -> None:
        """Read the teacher and refuse one that does not know the images or classes of ``data``."""
        teacher = read_teacher(self.hparams["teacher"])
        if data is not None:
            teacher.align_with_data(data)
        self._teacher = (teacher,)
        self._digest = teacher.digest()

    def on_fit_start(self) -> None:
        super().on_fit_start()
        teacher = self.teacher.to(device=self.device).to(next(self.net.parameters()).dtype)
        if self.hparams["compile"]:
            teacher.compile()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["teacher"] = self._digest

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        if self._teacher and checkpoint.get("teacher") != self._digest:
            raise ValueError(
                f"`model.teacher` {self.hparams['teacher']} has other weights than when this run began; put them back, "
                "or start a new run"
            )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        with torch.no_grad():
            self._advice = self.teacher(batch[0])
        return super().training_step(batch, batch_idx)

    def train_loss(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the loss on the labels and on the teacher's advice for the batch, in their shares."""
        alpha = self.hparams["distill_alpha"]
        if weights is not None:
            raise ValueError(
                "`model: Distillation` has no weights of images: leave them aside by --data.weight_column=null"
            )
        return (1 - alpha) * super().train_loss(outputs, targets) + alpha * self.distill_loss(outputs, self._advice)

    def distill_loss(self, outputs: Tensor, advice: Tensor) -> Tensor:
        """Return how far ``(B, K)`` logits are from the teacher's."""
        if self.hparams["distill"] == "hard":
            return F.cross_entropy(outputs, advice.argmax(dim=1))
        tau = self.hparams["distill_tau"] or 3.0
        ours, theirs = F.log_softmax(outputs.float() / tau, dim=1), F.log_softmax(advice / tau, dim=1)
        return F.kl_div(ours, theirs, reduction="batchmean", log_target=True) * tau**2
