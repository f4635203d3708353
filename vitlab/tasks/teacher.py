"""The teacher of distillation: a frozen classifier and its preprocessing."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitlab.models.create import LIBRARIES, create_model, timm_model
from vitlab.models.load import load_network
from vitlab.models.weights_file import read_weights
from vitlab.runs.directory import find_run


class Teacher(nn.Module):
    """A frozen classifier that accepts images normalized for another network.

    Args:
        net: The network; maps ``(B, C, H, W)`` images to ``(B, K)`` logits.
        mean: Mean of each channel in its own normalization, for values in [0, 1].
        std: Standard deviation of each channel in its own normalization.
        size: Channels, height and width of its images; height and width are None if it takes any.
        classes: Names of its classes, or their number if the names are unknown.
    """

    def __init__(
        self,
        net: nn.Module,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        size: tuple[int, int | None, int | None],
        classes: list[str] | int,
    ) -> None:
        super().__init__()
        self.net = net
        self.mean, self.std, self.size, self.classes = mean, std, size, classes
        self.scale, self.shift = torch.ones(()), torch.zeros(())
        self.eval().requires_grad_(False)

    def align_with_data(self, data: Any) -> None:
        """Accept images normalized by ``data`` from now on; refuse data with another image size or other classes."""
        size = (data.in_chans, *data.img_size)
        if any(side not in (None, given) for side, given in zip(self.size, size, strict=True)):
            takes, has = ("x".join("any" if n is None else str(n) for n in s) for s in (self.size, size))
            raise ValueError(f"`model.teacher` takes images of {takes}, the data has {has}; set `data.img_size`")
        expected = data.class_names if isinstance(self.classes, list) else len(data.class_names)
        if self.classes != expected:
            count = self.classes if isinstance(self.classes, int) else len(self.classes)
            raise ValueError(
                f"`model.teacher` was trained for other classes than those of the data: it has {count}, the data "
                f"{len(data.class_names)}" + ("" if count != len(data.class_names) else ", of other names or order")
            )
        numbers = (data.mean, data.std, self.mean, self.std)
        data_mean, data_std, mean, std = (torch.tensor(v, dtype=torch.float64).view(-1, 1, 1) for v in numbers)
        self.scale, self.shift = (data_std / std).float(), ((data_mean - mean) / std).float()

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


def read_teacher(source: str) -> Teacher:
    """Build a teacher with its weights.

    Args:
        source: A run or one of its files, a file that ``vitlab export`` wrote, or ``timm:NAME``, ``hf:NAME``,
            ``torchvision:NAME``.
    """
    if source.startswith(LIBRARIES):
        is_timm = source.startswith("timm:")
        net: Any = timm_model(source, pretrained=True) if is_timm else create_model(source)
        if not (facts := getattr(net, "pretrained_cfg", None)):
            raise ValueError(f"`model.teacher`: {source} does not say how its images are prepared")
        channels, height, width = facts["input_size"]
        size = (channels, None, None) if is_timm and not facts.get("fixed_input_size") else (channels, height, width)
        return Teacher(net, tuple(facts["mean"]), tuple(facts["std"]), size, net.num_classes)
    path, facts = _find_weights(source)
    if "num_classes" not in read_weights(path).arguments:
        raise ValueError(f"`model.teacher` must be a classifier, and {path} does not state its number of classes")
    network = load_network(path)
    network.skips_unread_tokens = True
    size = (network.in_chans, *network.img_size)
    return Teacher(network, tuple(facts["mean"]), tuple(facts["std"]), size, list(facts["class_names"]))


def _find_weights(source: str) -> tuple[Path, dict[str, Any]]:
    """Return the file of weights, with the mean, std and class names of its training data."""
    path, description = Path(source), Path(f"{source}.json")
    if path.is_file() and description.is_file():
        exported = json.loads(description.read_text())
        if exported.get("format") == "safetensors":
            images = exported["images"]
            return path, {"mean": images["mean"], "std": images["std"], "class_names": exported["outputs"]}
    run, checkpoint = find_run(source)
    return checkpoint, dict(run.data)
