"""Classification with a trained network as teacher."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.interface import class_names
from vitlab.models.create import library_network, stated_classes
from vitlab.models.load import load_network
from vitlab.models.vit import VisionTransformer
from vitlab.models.weights_file import facts_beside, read_weights
from vitlab.notebook import check_classes
from vitlab.runs.directory import RunDir
from vitlab.runs.find import file_of_weights, find_run
from vitlab.shipped import LIBRARIES, card_beside
from vitlab.tasks.arguments import ClassifierArgs
from vitlab.tasks.classifier import Classifier
from vitlab.tasks.sizes import check_size

_NO_WEIGHTS = (
    "`model: Distillation` does not support weights of images: leave them out, of a table by --data.weight_column=null"
)


class Teacher(nn.Module):
    """A frozen classifier that accepts images normalized for another network.

    Args:
        net: The network; maps ``(B, C, H, W)`` images to ``(B, K)`` logits.
        mean: Mean of each channel in its own normalization, for values in [0, 1].
        std: Standard deviation of each channel in its own normalization.
        size: Channels, height and width of its images; height and width are None if it takes any.
        classes: Names of its classes, or their number if the names are unknown.
        arrays: Whether it was trained on arrays as stored: mean and std are in their units, and not for [0, 1].
        value_range: Values of files of over 8 bits that its training mapped to 0 and 1; None if those of each file.
    """

    def __init__(
        self,
        net: nn.Module,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        size: tuple[int, int | None, int | None],
        classes: list[str] | int,
        arrays: bool = False,
        value_range: list[float] | None = None,
    ) -> None:
        super().__init__()
        self.net = net
        self.mean, self.std, self.size, self.classes = mean, std, size, classes
        self.arrays, self.value_range = arrays, value_range
        self.scale, self.shift = torch.ones(()), torch.zeros(())
        self.eval().requires_grad_(False)

    def align_with_data(self, data: Any) -> None:
        """Accept images normalized by ``data`` from now on; refuse data of another image size, classes or units.

        What data of a user's own do not tell is not compared; without a mean and std, images stay as they are.
        """
        size = (getattr(data, "in_chans", None), *(getattr(data, "img_size", None) or (None, None)))
        if any(None not in (own, given) and own != given for own, given in zip(self.size, size, strict=True)):
            takes, has = ("x".join("any" if n is None else str(n) for n in s) for s in (self.size, size))
            is_size = size[0] is None or size[0] == self.size[0]
            way = "set `data.img_size`" if is_size else "take a teacher of as many channels"
            raise ValueError(f"`model.teacher` takes images of {takes}, the data has {has}; {way}")
        names = class_names(data)
        count = self.classes if isinstance(self.classes, int) else len(self.classes)
        given = len(names) or getattr(data, "num_classes", None) or count
        others = bool(names) and isinstance(self.classes, list) and self.classes != names
        if count != given or others:
            raise ValueError(
                f"`model.teacher` was trained for other classes than those of the data: it has {count}, the data "
                f"{given}" + ("" if count != given else ", of other names or order")
            )
        self._check_schedule(data)
        numbers = (getattr(data, "mean", ()), getattr(data, "std", ()), self.mean, self.std)
        if not all(len(values) for values in numbers):
            return
        self._check_units(data)
        data_mean, data_std, mean, std = (torch.tensor(v, dtype=torch.float64).view(-1, 1, 1) for v in numbers)
        self.scale, self.shift = (data_std / std).float(), ((data_mean - mean) / std).float()

    def _check_schedule(self, data: Any) -> None:
        """Refuse a schedule of image sizes that the network does not take."""
        steps = getattr(getattr(getattr(data, "pipeline", None), "sizes", None), "steps", [])
        if None in self.size or not steps[1:]:
            return
        try:
            if not isinstance(self.net, VisionTransformer):
                raise ValueError(f"{type(self.net).__name__} takes images of one size; leave the schedule out")
            for _, size in steps:
                check_size(self.net, size)
        except ValueError as error:
            raise ValueError(f"`model.teacher` does not take each size of `data.img_size_schedule`: {error}") from error

    def _check_units(self, data: Any) -> None:
        """Refuse pictures where arrays of other values are known, or the reverse, and another range of values."""
        arrays = getattr(data, "arrays", self.arrays)
        mean, std = (data.mean, data.std) if arrays else (self.mean, self.std)
        if arrays != self.arrays and (far := _outside_0_to_1(mean, std)):
            kinds = f"arrays as stored, with {far}", "pictures, with values in [0, 1]"
            theirs, ours = kinds if self.arrays else kinds[::-1]
            way = "scale them to [0, 1], as pictures are" if arrays else "give arrays in its units"
            raise ValueError(f"`model.teacher` takes {theirs}, and the data has {ours}; {way}, or take another teacher")
        given = getattr(getattr(data, "decoding", None), "value_range", self.value_range)
        if not arrays and not self.arrays and self.value_range and list(given or ()) != list(self.value_range):
            raise ValueError(
                f"`model.teacher` was trained with `data.value_range` {list(self.value_range)}, and that of the data "
                f"is {given and list(given)}; set it to the teacher's"
            )

    def forward(self, images: Tensor) -> Tensor:
        """Map ``(B, C, H, W)`` images in the normalization of the data to ``(B, K)`` logits."""
        scale, shift = self.scale.to(images), self.shift.to(images)
        return self.net(torch.addcmul(shift, images, scale)).float()

    def digest(self) -> str:
        """Return the sha256 of the weights."""
        sha = hashlib.sha256()
        for name, value in self.net.state_dict().items():
            sha.update(name.encode() + value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return sha.hexdigest()


def _outside_0_to_1(mean: Sequence[float], std: Sequence[float]) -> str | None:
    """Return mean and std of the first channel whose values cannot all lie in [0, 1]: there std^2 <= mean (1 - mean).

    A std of 1 is that of a constant channel.
    """
    for m, s in zip(mean, std, strict=True):
        if not 0 <= m <= 1 or (s != 1 and s**2 > m * (1 - m) + 1e-4):
            return f"mean {m:.4g} and std {s:.4g}"
    return None


def read_teacher(source: str) -> Teacher:
    """Build a teacher with its weights.

    Args:
        source: A run or one of its files, a file that ``vitlab export`` wrote, ``vitlab:NAME``, or ``timm:NAME``,
            ``hf:NAME``, ``torchvision:NAME``.
    """
    if source.startswith(LIBRARIES):
        net = library_network(source)
        if not (facts := getattr(net, "pretrained_cfg", None)):
            raise ValueError(f"`model.teacher`: {source} does not say how its images are prepared")
        channels, height, width = facts["input_size"]
        takes_any = source.startswith("timm:") and not facts.get("fixed_input_size")
        size = (channels, None, None) if takes_any else (channels, height, width)
        named = stated_classes(source)
        classes = named if len(named) == net.num_classes else net.num_classes
        return Teacher(net, tuple(facts["mean"]), tuple(facts["std"]), size, classes)
    path, facts = _find_weights(source)
    kind, outputs = (facts.get("targets") or {}).get("kind", "class"), facts.get("class_names")
    if kind != "class" or isinstance(outputs, str):
        what = outputs if isinstance(outputs, str) else f"targets of kind {kind}"
        raise ValueError(f"`model.teacher` must be a classifier, and {path} predicts {what}")
    file = read_weights(path)
    if own := ", ".join(file.own.values()):
        raise ValueError(
            f"`model.teacher` must be a network that `vitlab export --to safetensors` takes, and the answers of {path} "
            f"come from {own}"
        )
    if "num_classes" not in file.arguments:
        raise ValueError(f"`model.teacher` must be a classifier, and {path} does not state its number of classes")
    network = load_network(path)
    classes = list(facts["class_names"]) or network.num_classes  # data of a user's own may not name them
    network.skips_unread_tokens = True
    size = (network.in_chans, *network.img_size)
    units = {"arrays": facts.get("arrays", False), "value_range": facts.get("value_range")}
    mean, std = (tuple(facts.get(name, ())) for name in ("mean", "std"))  # a card of a user's own data has none
    return Teacher(network, mean, std, size, classes, **units)


def _find_weights(source: str) -> tuple[Path, dict[str, Any]]:
    """Return the file of weights, with the mean, std, units and class names of its training data."""
    path = file_of_weights(source)
    exported = facts_beside(path)
    if exported.get("format") == "safetensors":
        return path, {**exported["images"], "class_names": exported["outputs"], "targets": exported.get("targets")}
    if form := exported.get("format"):
        way_out = "give its run, or what `vitlab export --to safetensors` writes of it"
        raise ValueError(f"`model.teacher`: {path} is exported for other programs ({form}): {way_out}")
    if not RunDir.around(path).config.is_file():
        raise ValueError(
            f"`model.teacher`: {path} is not in a run, and has no {card_beside(path).name} of `vitlab export`"
        )
    run, checkpoint = find_run(str(path))
    check_classes(run.path)
    return checkpoint, run.data


class Distillation(Classifier):
    """Train on labels and on a frozen teacher's outputs for the same images, Touvron et al. 2021 (arXiv:2012.12877).

    Hard: cross-entropy with the teacher's top class. Soft: ``tau ** 2`` times the Kullback-Leibler divergence of both
    softmax outputs at temperature ``tau``, Hinton et al. 2015 (arXiv:1503.02531), averaged over images; the authors'
    code also divides by the number of classes. One head learns from both, as in the paper's runs without a distillation
    token, which this network does not have. The teacher sees the student's augmented and mixed images, converted to the
    mean and standard deviation that it was trained with. Arrays are taken as stored: they must have the units of the
    teacher's.

    Args:
        teacher: A run, one of its checkpoints or weights, a file from `vitlab export`, vitlab:NAME, or timm:NAME,
            hf:NAME, torchvision:NAME.
        distill: Whether the student learns the teacher's top class (hard) or all its probabilities (soft).
        distill_alpha: Weight of the teacher in the loss, 0 to 1.
        distill_tau: Temperature of soft distillation, above 0; null is 3.
        **task: Passed to :class:`Classifier`.

    Example:
        >>> size = {"img_size": 8, "in_chans": 1, "patch_size": 2, "embed_dim": 16, "depth": 2, "num_heads": 2}
        >>> task = Distillation(teacher="runs/first", num_classes=10, **size)
        >>> task.hparams["distill"]
        'hard'
    """

    takes_native = False

    def __init__(
        self,
        teacher: str,
        distill: Literal["soft", "hard"] = "hard",
        distill_alpha: float = 0.5,
        distill_tau: float | None = None,
        **task: Unpack[ClassifierArgs],
    ) -> None:
        if teacher == "last":
            raise ValueError("`teacher` must name its run: when this run is resumed, `last` is another run")
        if not 0 <= distill_alpha <= 1:
            raise ValueError(f"`distill_alpha` must be 0 to 1, got {distill_alpha}")
        if distill_tau is not None and (distill == "hard" or distill_tau <= 0):
            raise ValueError(f"`distill_tau` must be above 0 and is only for `distill=soft`, got {distill_tau}")
        super().__init__(**task)
        if self.kind == "multilabel":
            raise ValueError("`model: Distillation` needs one class for each image, and the data has several labels")
        self._teacher: tuple[Teacher, ...] = ()  # a tuple keeps it out of state dict, optimizer and weight average
        self._teacher_logits = torch.empty(0)  # of the current batch, (B, K)

    def setup(self, stage: str) -> None:
        """Read the teacher, which only training needs."""
        super().setup(stage)
        if stage == "fit":
            self.find_teacher(getattr(self.trainer, "datamodule", None))

    @property
    def teacher(self) -> Teacher:
        """The teacher, once it is read."""
        return self._teacher[0]

    def find_teacher(self, data: Any) -> None:
        """Read the teacher; refuse one that does not match the images or classes of ``data``, and weights of images."""
        if getattr(data, "sample_weights", None) is not None:
            raise ValueError(_NO_WEIGHTS)
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
            self._teacher_logits = self.teacher(batch[0])
        return super().training_step(batch, batch_idx)

    def train_loss(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the weighted sum of the loss on the labels and the loss on the teacher's logits."""
        alpha = self.hparams["distill_alpha"]
        if weights is not None:
            raise ValueError(_NO_WEIGHTS)
        loss = super().train_loss(outputs, targets)
        return (1 - alpha) * loss + alpha * self.distill_loss(outputs, self._teacher_logits)

    def distill_loss(self, outputs: Tensor, teacher_logits: Tensor) -> Tensor:
        """Return the hard or soft distillation loss of ``(B, K)`` logits."""
        if self.hparams["distill"] == "hard":
            return F.cross_entropy(outputs, teacher_logits.argmax(dim=1))
        tau = self.hparams["distill_tau"] or 3.0
        ours, theirs = F.log_softmax(outputs.float() / tau, dim=1), F.log_softmax(teacher_logits / tau, dim=1)
        return F.kl_div(ours, theirs, reduction="batchmean", log_target=True) * tau**2
