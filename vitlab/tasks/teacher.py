"""A trained network that another one learns from."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitlab.models.create import timm_model
from vitlab.models.load import load_network
from vitlab.models.weights_file import read_weights
from vitlab.runs.directory import find_run


class Teacher(nn.Module):
    """A frozen classifier, with what it expects of its images.

    Args:
        net: The network; maps ``(B, C, H, W)`` images to ``(B, K)`` logits.
        mean: Mean of each channel that its images were normalized with, of values in [0, 1].
        std: Standard deviation of each channel, likewise.
        size: Channels, height and width of the images it takes; height and width are None where any will do.
        classes: Names of its classes, or their number where the names are unknown.
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
        """Take images as ``data`` normalizes them from now on, or refuse what cannot be taken."""
        size = (data.in_chans, *data.img_size)
        if any(mine not in (None, given) for mine, given in zip(self.size, size, strict=True)):
            takes, has = ("x".join("any" if n is None else str(n) for n in s) for s in (self.size, size))
            raise ValueError(f"`model.teacher` takes images of {takes}, the data has {has}; set `data.img_size`")
        known = data.class_names if isinstance(self.classes, list) else len(data.class_names)
        if self.classes != known:
            mine = self.classes if isinstance(self.classes, int) else len(self.classes)
            raise ValueError(
                f"`model.teacher` was trained for other classes than those of the data: it has {mine}, the data "
                f"{len(data.class_names)}" + ("" if mine != len(data.class_names) else ", of other names or order")
            )
        columns = [torch.tensor(v, dtype=torch.float64).view(-1, 1, 1) for v in (data.mean, data.std)]
        mean, std = (torch.tensor(v, dtype=torch.float64).view(-1, 1, 1) for v in (self.mean, self.std))
        self.scale, self.shift = (columns[1] / std).float(), ((columns[0] - mean) / std).float()

    def forward(self, images: Tensor) -> Tensor:
        """Map ``(B, C, H, W)`` images, normalized as the data does it, to ``(B, K)`` logits."""
        scale, shift = self.scale.to(images), self.shift.to(images)
        return self.net(torch.addcmul(shift, images, scale)).float()

    def digest(self) -> str:
        """Return a checksum of the weights."""
        sha = hashlib.sha256()
        for name, value in self.net.state_dict().items():
            sha.update(name.encode() + value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return sha.hexdigest()


def read_teacher(source: str) -> Teacher:
    """Build the network that ``source`` names, with its weights.

    Args:
        source: A run or one of its files, a file that ``vitlab export`` wrote, or ``timm:NAME``.
    """
    if source.startswith("timm:"):
        net: Any = timm_model(source, pretrained=True)
        facts = net.pretrained_cfg
        channels, height, width = facts["input_size"]
        size = (channels, height, width) if facts.get("fixed_input_size") else (channels, None, None)
        return Teacher(net, tuple(facts["mean"]), tuple(facts["std"]), size, net.num_classes)
    path, facts = _facts(source)
    if "num_classes" not in read_weights(path).arguments:
        raise ValueError(f"`model.teacher` must be a classifier, and {path} does not say how many classes it knows")
    network = load_network(path)
    network.skips_unread_tokens = True
    size = (network.in_chans, *network.img_size)
    return Teacher(network, tuple(facts["mean"]), tuple(facts["std"]), size, list(facts["class_names"]))


def _facts(source: str) -> tuple[Path, dict[str, Any]]:
    """Return the file of weights, and how the images of its training were prepared."""
    path, beside = Path(source), Path(f"{source}.json")
    if path.is_file() and beside.is_file():
        exported = json.loads(beside.read_text())
        if exported.get("format") == "safetensors":
            images = exported["images"]
            return path, {"mean": images["mean"], "std": images["std"], "class_names": exported["outputs"]}
    run, checkpoint = find_run(source)
    return checkpoint, dict(run.data)
