"""Networks whose answers are known: planted by hand, trained until they classify, or calibrated by construction.

Each builder returns a :class:`Subject`: a network and the images to ask about it. Images are gray, 8 x 8 pixels in
4 x 4 patches unless a builder says otherwise.
"""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.analysis.subject import Subject
from vitlab.data.base import ImageData, Part
from vitlab.data.files.sets import Statistics, TensorImages
from vitlab.data.known import Digits
from vitlab.models.vit import VisionTransformer

SMALL: dict[str, Any] = {"img_size": (8, 8), "in_chans": 1, "num_classes": 10, "patch_size": 2}
SMALL |= {"embed_dim": 32, "depth": 2, "num_heads": 4, "init_std": 0.1, "mlp_ratio": 2.0}
DECISIVE, EMPTY = 9, 3  # patches of the planted networks: the one that decides, and one whose value is zero
MEAN, STD = 0.5, 0.25  # of the pixels of planted images


class Given(ImageData):
    """Images and classes that are given, split by the usual shares; a pixel of 0 to 255 becomes -2 to 2."""

    def __init__(self, pixels: Tensor, labels: Tensor, **data: Any) -> None:
        names = [str(k) for k in range(int(labels.max()) + 1)]
        size = (pixels.shape[2], pixels.shape[3])
        super().__init__(native_size=size, in_chans=pixels.shape[1], class_names=names, **data)
        self.given = TensorImages(pixels, labels)

    def read(self, part: Part) -> TensorImages:
        return self.given

    def statistics(self) -> Statistics:
        return (MEAN,), (STD,)


def train(net: VisionTransformer, data: ImageData, epochs: int, seed: int = 0) -> VisionTransformer:
    """Train with AdamW on the training split; 1,150 digits take a fifth of a second an epoch."""
    data.setup("fit")
    everything = [batch for batch, _ in zip(_batches(data), range(10**6), strict=False)]
    images, labels = (torch.cat(part) for part in zip(*everything, strict=True))
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.05)
    steps = epochs * (len(images) // 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    rng = torch.Generator().manual_seed(seed)
    net.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(images), generator=rng).split(64)[: len(images) // 64]:
            optimizer.zero_grad()
            F.cross_entropy(net(images[rows]), labels[rows]).backward()
            optimizer.step()
            schedule.step()
    return net.eval()


def _batches(data: ImageData):
    return Subject(VisionTransformer(**sized(data)), data).batches("train", limit=10**6)


def sized(data: ImageData, **changes: Any) -> dict[str, Any]:
    """Return the arguments of a small network for a data set."""
    return {**SMALL, "img_size": data.img_size, "in_chans": data.in_chans, "num_classes": data.num_classes, **changes}


def accuracy(subject: Subject) -> float:
    """Return the share of right answers on the validation split."""
    images, labels = subject.labeled()
    with torch.no_grad():
        return float((subject.net(images).argmax(dim=1) == labels).float().mean())


def trained(seed: int = 0, epochs: int = 15, img_size: int = 8, **changes: Any) -> Subject:
    """A network that was trained on the digits until it classifies them."""
    data = Digits(batch_size=64, img_size=img_size)
    arguments = sized(data, **changes)
    torch.manual_seed(seed)
    net = train(VisionTransformer(**arguments), data, epochs, seed)
    subject = Subject(net, data, arguments, name=f"seed {seed}", num_images=288)
    assert accuracy(subject) > 0.6, "the network has not learned, so its answers say nothing"
    return subject


def no_positions() -> Subject:
    """Trained without positions: the outputs are the same for any order of the tokens."""
    return trained(pos_embed="none", epochs=40)


def no_positions_t2t() -> Subject:
    """T2T trained without positions: windows know their neighbors, the backbone no order; 16 x 16 pixels."""
    return trained(epochs=6, img_size=16, tokenizer="t2t", t2t_kernels=[3, 3], t2t_dim=8, pos_embed="none")


def with_positions() -> Subject:
    """Trained with a learned table, as most users have it."""
    return trained(pos_embed="learned")


def twin_of_another_seed() -> Subject:
    """Two networks of one recipe whose seeds differ; the other one is ``other``."""
    subject = copy.copy(build("with_positions"))
    subject.other, subject._known = trained(seed=1), {}
    return subject


def twin_without_difference() -> Subject:
    """A network and its copy."""
    subject, twin = copy.copy(build("with_positions")), copy.copy(build("with_positions"))
    twin.net, twin._known = copy.deepcopy(twin.net), {}
    subject.other, subject._known = twin, {}
    return subject


def noise(count: int = 600, size: tuple[int, int] = (8, 8), classes: int = 10) -> Given:
    """Random images of random classes."""
    rng = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (count, 1, *size), generator=rng, dtype=torch.uint8)
    return Given(pixels, torch.randint(classes, (count,), generator=rng), batch_size=64)


def random_features() -> Subject:
    """Random weights, and classes that were drawn without a look at the images."""
    data = noise()
    arguments = sized(data)
    torch.manual_seed(0)
    return Subject(randomized(VisionTransformer(**arguments)), data, arguments, num_images=400, split="train")


@torch.no_grad()
def randomized(net: VisionTransformer) -> VisionTransformer:
    """Draw what starts at zero or one, too."""
    for name, parameter in net.named_parameters():
        if parameter.ndim < 2 or name.startswith("pos_embed."):
            torch.nn.init.normal_(parameter, std=0.5)
    return net.eval()


@torch.no_grad()
def constant() -> Subject:
    """Every image and every patch has the same features."""
    data = Digits(batch_size=64)
    arguments = sized(data, pos_embed="none")
    torch.manual_seed(0)
    net = randomized(VisionTransformer(**arguments))
    net.tokenizer.proj.weight.zero_()
    return Subject(net, data, arguments, num_images=288)


@torch.no_grad()
def previous_patch() -> Subject:
    """The only head looks one patch to the left, whatever the image shows; 6 x 10 pixels, 3 x 5 patches."""
    data = noise(size=(6, 10))
    arguments = sized(data, depth=1, num_heads=1, class_token=False, global_pool="avg", pos_embed="relpos")
    torch.manual_seed(0)
    net = randomized(VisionTransformer(**arguments))
    dim = net.embed_dim
    net.blocks[0].attn.qkv.weight[: 2 * dim].zero_()
    net.blocks[0].attn.qkv.bias[: 2 * dim].zero_()
    h, w = net.grid_size
    table = torch.zeros(2 * h - 1, 2 * w - 1)
    table[h - 1, w - 2] = 50.0  # key minus query: no row, one column to the left
    net.pos_embed.bias_table.copy_(table.flip(0, 1).flatten()[None, :, None])
    return Subject(net, data, arguments, num_images=64)


@torch.no_grad()
def uniform() -> Subject:
    """Queries and keys are zero: every head attends evenly to all tokens."""
    data = Digits(batch_size=64)
    arguments = sized(data)
    torch.manual_seed(0)
    net = randomized(VisionTransformer(**arguments))
    for block in net.blocks:
        block.attn.qkv.weight[: 2 * net.embed_dim].zero_()
        block.attn.qkv.bias[: 2 * net.embed_dim].zero_()
    return Subject(net, data, arguments, num_images=64)


@torch.no_grad()
def cells_in_tokens() -> Subject:
    """A table of one-hot vectors, so long that every token tells its cell."""
    data = Digits(batch_size=64)
    arguments = sized(data, embed_dim=48)
    torch.manual_seed(0)
    net = VisionTransformer(**arguments).eval()
    net.pos_embed.weight.zero_()[0, :, :16] = 20 * torch.eye(16)
    return Subject(net, data, arguments, num_images=288)


@torch.no_grad()
def dead_heads() -> Subject:
    """The class token reads the brightness of patch 9 by head 1; heads 0 and 2 look at patch 3, whose value is zero.

    Only patch 9 changes the outputs. Two of three heads, and so the mean of their attention, show patch 3.
    """
    data = two_classes_by_patch()
    arguments = sized(data, embed_dim=24, depth=1, num_heads=3)
    net = VisionTransformer(**arguments).eval()
    for parameter in net.parameters():
        parameter.zero_()
    attn, cells = net.blocks[0].attn, slice(4, 20)  # features: 0 brightness, 1 and 2 constant, 4 to 19 the cell
    net.tokenizer.proj.weight[0] = 1.0 / 4
    net.pos_embed.weight[0, :, cells] = 4 * torch.eye(16)
    net.blocks[0].norm1.weight.fill_(1)
    for head, patch in ((0, EMPTY), (1, DECISIVE), (2, EMPTY)):
        query, key = attn.qkv.bias[head * 8 : head * 8 + 8], attn.qkv.weight[24 + head * 8]
        query[0] = 60.0
        key[4 + patch] = 10.0
    attn.qkv.weight[48 + 8, 0] = 1.0  # the value of head 1: brightness
    attn.proj.weight[0, 8] = 1.0
    net.cls_token[..., 1] = 0.5
    net.norm.weight.fill_(1)
    net.head.weight[0, 0], net.head.weight[1, 0] = -2.0, 2.0
    return Subject(net, data, arguments, num_images=48)


def two_classes_by_patch(patch: int = DECISIVE, count: int = 600) -> Given:
    """Digits of no particular class; one patch is bright in class 1 and dark in class 0."""
    source = Digits(batch_size=64)
    pixels = source.read(None).images[:count].clone()
    rng = torch.Generator().manual_seed(0)
    labels = torch.randint(2, (count,), generator=rng)
    top, left = 2 * (patch // 4), 2 * (patch % 4)
    levels = labels * 150 + torch.randint(80, (count,), generator=rng)
    pixels[:, 0, top : top + 2, left : left + 2] = levels[:, None, None].to(torch.uint8)
    return Given(pixels, labels, batch_size=64)


class OnePatch(torch.nn.Module):
    """Reads the brightness of one patch of 2 x 2 pixels: no layers, no head, no weights."""

    def forward(self, images: Tensor) -> Tensor:
        top, left = 2 * (DECISIVE // 4), 2 * (DECISIVE % 4)
        brightness = images[:, :, top : top + 2, left : left + 2].mean(dim=(1, 2, 3))
        return torch.stack([-brightness, brightness], dim=1)


def one_patch() -> Subject:
    """No Vision Transformer but a plain module: only patch 9 changes its outputs."""
    return Subject(OnePatch(), two_classes_by_patch(), name="one patch", num_images=48)


def shortcut() -> Subject:
    """Trained on images whose class only the first patch tells: the corner is the shortcut."""
    data = two_classes_by_patch(patch=0)
    arguments = sized(data)
    torch.manual_seed(0)
    net = train(VisionTransformer(**arguments), data, epochs=20)
    subject = Subject(net, data, arguments, num_images=48)
    assert accuracy(subject) > 0.95, "the network has not found the shortcut"
    return subject


@torch.no_grad()
def brightness_net(**changes: Any) -> VisionTransformer:
    """A network of two classes that reads the mean over patches of a monotone function of their brightness."""
    arguments = {**SMALL, "num_classes": 2, "embed_dim": 4, "depth": 1, "num_heads": 1, "class_token": False}
    net = VisionTransformer(**{**arguments, "global_pool": "avg", "pos_embed": "none", **changes}).eval()
    for parameter in net.parameters():
        parameter.zero_()
    net.norm.weight.fill_(1)
    net.tokenizer.proj.weight[0], net.tokenizer.proj.weight[1] = 1 / 4, -1 / 4
    net.tokenizer.proj.bias[2], net.tokenizer.proj.bias[3] = 1, -1
    net.head.weight[:, 0] = torch.tensor([-1.0, 1.0])
    return net


def shuffle_invariant() -> Subject:
    """The mean over patches of a function of each: no order of patches changes the outputs."""
    data = brightness_images(lambda probability, rng: probability.argmax(dim=1))
    return Subject(brightness_net(), data, sized(data, pos_embed="none"), num_images=400, split="train")


def brightness_images(draw: Callable[[Tensor, torch.Generator], Tensor], count: int = 2000, seed: int = 0) -> Given:
    """Images of any brightness, labeled by ``draw`` from the ``(N, 2)`` probabilities of :func:`brightness_net`."""
    rng = torch.Generator().manual_seed(seed)
    base = torch.randint(20, 235, (count, 1, 1, 1), generator=rng)
    pixels = (base + torch.randint(-20, 21, (count, 1, 8, 8), generator=rng)).clamp(0, 255).to(torch.uint8)
    with torch.no_grad():
        outputs = brightness_net()((pixels.float() / 255 - MEAN) / STD)
    return Given(pixels, draw(outputs.softmax(dim=1), rng), batch_size=64)


def _by_probability(probability: Tensor, rng: torch.Generator) -> Tensor:
    return torch.multinomial(probability, 1, generator=rng)[:, 0]


def calibrated(seed: int = 0) -> Subject:
    """The classes are drawn from the probabilities that the network says: its calibration error is 0."""
    data = brightness_images(_by_probability, seed=seed)
    return Subject(brightness_net(), data, sized(data, pos_embed="none"), num_images=400, split="train")


def overconfident(seed: int = 0) -> Subject:
    """The classes are drawn from probabilities half way between those that the network says and one half."""
    data = brightness_images(lambda p, rng: _by_probability(0.5 * p + 0.25, rng), seed=seed)
    return Subject(brightness_net(), data, sized(data, pos_embed="none"), num_images=400, split="train")


ZOO: dict[str, Callable[[], Subject]] = {
    made.__name__: made
    for made in (
        no_positions,
        no_positions_t2t,
        with_positions,
        twin_of_another_seed,
        twin_without_difference,
        random_features,
        constant,
        previous_patch,
        uniform,
        cells_in_tokens,
        dead_heads,
        one_patch,
        shortcut,
        shuffle_invariant,
        calibrated,
        overconfident,
    )
}


@cache
def build(name: str) -> Subject:
    """Return the subject of a name; it is built once in a process."""
    return ZOO[name]()
