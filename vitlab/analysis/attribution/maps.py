"""Attribution maps: ten estimates of which patches an output depends on, ``(B, N)`` each."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.analysis.attribution.caught import graded_maps, plain_maps, score_of
from vitlab.analysis.attribution.relevance import relevant_maps, shares_relevance
from vitlab.analysis.catalogue import Analysis
from vitlab.analysis.head_attention import TINY, maps_of_images, rollout
from vitlab.analysis.parts import read_out
from vitlab.analysis.subject import Finding, Subject
from vitlab.errors import UsageError
from vitlab.interface import own_parts
from vitlab.layers.attention import Attention
from vitlab.models.foreign import AnyNetwork
from vitlab.models.vit import VisionTransformer
from vitlab.models.walk import Asked, all_finite, attentions, graded_tokens, outputs, probabilities
from vitlab.resized import resize_images

STEPS = 32  # of the path of integrated gradients
FINER = (4, 6)  # times as many, in powers of equal places, where these miss some: they reach below 1e-14 of the path
MISSED = 0.03  # share of an output's difference that integrated gradients may miss
SAMPLES = 16  # of noise in SmoothGrad, and of plain images in GradientSHAP
NOISE = 0.15  # standard deviation of SmoothGrad's noise, in units of an image's range


def last_attention(net: Asked, images: Tensor, classes: Tensor) -> Tensor:
    """Return the attention of the head's token in the last block, averaged over heads, for no particular class."""
    return read_out(net, plain_maps(net, images)[-1].mean(dim=1), images)


def attention_rollout(net: Asked, images: Tensor, classes: Tensor) -> Tensor:
    """Return :func:`vitlab.analysis.rollout` to the head's token, for no particular class."""
    return read_out(net, rollout(plain_maps(net, images)), images)


def gradient_attention(net: Asked, images: Tensor, classes: Tensor) -> Tensor:
    """Return the relevance of Chefer et al. 2021, "Generic attention-model explainability" (arXiv:2103.15679).

    Maps times their gradients, negative products set to 0, averaged over heads, accumulated over the layers: R + A R.

    Example:
        >>> net = VisionTransformer(img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=3).eval()
        >>> gradient_attention(net, torch.randn(2, 3, 8, 8), torch.tensor([0, 2])).shape
        torch.Size([2, 4])
    """
    maps, gradients = graded_maps(net, images, classes)
    return _added_up(net, maps, gradients, images)


def _added_up(net: Asked, maps: list[Tensor], gradients: list[Tensor], images: Tensor) -> Tensor:
    total = torch.eye(maps[0].shape[-1]).to(maps[0]).expand(len(maps[0]), -1, -1)
    for attention, gradient in zip(maps, gradients, strict=True):
        total = total + (attention * gradient).clamp(min=0).mean(dim=1) @ total
    return read_out(net, total, images)


def lrp(net: Asked, images: Tensor, classes: Tensor) -> Tensor:
    """Return the transformer attribution of Chefer et al. 2021, "beyond attention visualization" (arXiv:2012.09838).

    As :func:`gradient_attention`, with the relevance that :class:`~.relevance.Relevance` hands down to each weight of
    attention in place of the weight.

    Example:
        >>> net = VisionTransformer(img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=3).eval()
        >>> lrp(net, torch.randn(2, 3, 8, 8), torch.tensor([0, 2])).shape
        torch.Size([2, 4])
    """
    _, gradients = graded_maps(net, images, classes)
    return _added_up(net, relevant_maps(net, images, classes), gradients, images)


def gradient_rollout(net: Asked, images: Tensor, classes: Tensor) -> Tensor:
    """Return rollout of maps weighted by their gradients, negative values set to 0 (Gildenblat 2020, vit-explain)."""
    maps, gradients = graded_maps(net, images, classes)
    weighted = ((a * g).mean(dim=1, keepdim=True).clamp(min=0) for a, g in zip(maps, gradients, strict=True))
    return read_out(net, rollout(weighted), images)


def grad_cam(net: Asked, images: Tensor, classes: Tensor) -> Tensor:
    """Return Grad-CAM of Selvaraju et al. 2017 (arXiv:1610.02391) on the last layer whose cells reach the output.

    Channels of a layer, each times the mean of its gradient over the cells, added up, negative sums cut off. Of a
    network that reads a class token this is what enters the last block; of a convolution the last block's feature map,
    brought to the grid by interpolation.

    Example:
        >>> net = VisionTransformer(img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=3).eval()
        >>> grad_cam(net, torch.randn(2, 3, 8, 8), torch.tensor([0, 2])).shape
        torch.Size([2, 4])
    """
    with torch.enable_grad():
        found, layers = graded_tokens(net, images)
        score = score_of(found, classes, "Grad-CAM")
        gradients = torch.autograd.grad(score, [x for x, _ in layers], allow_unused=True)
    for (x, as_map), gradient in zip(reversed(layers), reversed(gradients), strict=True):
        if gradient is None or not (slopes := as_map(gradient)).any():
            continue
        seen = (as_map(x.detach()) * slopes.mean(dim=(2, 3), keepdim=True)).sum(dim=1, keepdim=True).clamp(min=0)
        return resize_images(seen, net.grid_size, "bilinear").flatten(1)
    return images.new_zeros(len(images), net.grid_size[0] * net.grid_size[1])  # no cell changes the output


def smooth_grad(net: Asked, images: Tensor, classes: Tensor) -> Tensor:
    """Return the size of SmoothGrad, Smilkov et al. 2017 (arXiv:1706.03825): the mean gradient of noisy copies.

    The noise is the same for all images, in units of each one's range, so that no image's map depends on others.
    """
    draw, total = torch.Generator().manual_seed(0), torch.zeros_like(images)
    spread = NOISE * (images.amax(dim=(1, 2, 3), keepdim=True) - images.amin(dim=(1, 2, 3), keepdim=True))
    for _ in range(SAMPLES):
        noise = torch.randn(1, *images.shape[1:], generator=draw).to(images)
        total += _gradient(net, images + spread * noise, classes, "SmoothGrad") / SAMPLES
    return by_patch(net, total.abs())


def integrated_gradients(net: Asked, images: Tensor, classes: Tensor) -> Tensor:
    """Return the integrated gradients of Sundararajan et al. 2017 (arXiv:1703.01365) from the mean color, by patch.

    A patch has the sum over its pixels; all of them add up to the output minus that of the mean color. Where equal
    steps miss some of it, more steps, shorter toward the mean color, replace them if they miss less: a network that
    normalizes its pixels, as T2T does, changes its output within a thousandth of the path.
    """
    found = by_patch(net, images * _mean_gradient(net, images, classes, STEPS))
    off = missed(net, images, classes, found)
    if (again := off > MISSED).any():
        rest, of = images[again], classes[again]
        finer = by_patch(net, rest * _mean_gradient(net, rest, of, STEPS * FINER[0], FINER[1]))
        is_better = missed(net, rest, of, finer) < off[again]
        found[again] = torch.where(is_better[:, None], finer, found[again])
    return found


def _mean_gradient(net: Asked, images: Tensor, classes: Tensor, steps: int, power: int = 1) -> Tensor:
    """Return the mean gradient on the path from the mean color, at the powers of equal places, ``(B, C, H, W)``."""
    total = torch.zeros_like(images)
    for step in range(steps):
        length = ((step + 1) / steps) ** power - (step / steps) ** power
        place = ((step + 0.5) / steps) ** power
        total += _gradient(net, images * place, classes, "integrated gradients") * length
    return total


def missed(net: Asked, images: Tensor, classes: Tensor, values: Tensor) -> Tensor:
    """Return what sums of ``(B, N)`` integrated gradients miss of the output minus that of the mean color, ``(B,)``.

    It is a share of that difference, or of the spread of all classes' outputs where this is larger.
    """
    whole, plain = outputs(net, images), outputs(net, torch.zeros_like(images[:1]))
    due = (whole - plain).gather(1, classes[:, None])[:, 0]
    return (values.sum(dim=1) - due).abs() / torch.maximum(due.abs(), whole.std(dim=1, correction=0)).clamp(min=1e-12)


def gradient_shap(net: Asked, images: Tensor, classes: Tensor) -> Tensor:
    """Return GradientSHAP, Lundberg and Lee 2017 (arXiv:1705.07874) by expected gradients (arXiv:1906.10670), by patch.

    As :func:`integrated_gradients`, from images of one color each, drawn with mean and spread of the training pixels,
    each at one place of its path. All patches add up, nearly, to the output minus its mean over these.
    """
    total = torch.zeros_like(images)
    for start, place in plain_starts(images):
        along = start + (images - start) * place
        total += (images - start) * _gradient(net, along, classes, "GradientSHAP") / SAMPLES
    return by_patch(net, total)


def plain_starts(images: Tensor) -> Iterator[tuple[Tensor, float]]:
    """Yield where the paths of GradientSHAP start, ``(1, C, 1, 1)``, each with the share of the path that is gone.

    Pixels are normalized, so colors are drawn from a standard normal distribution; each with its opposite.

    Example:
        >>> starts, shares = zip(*plain_starts(torch.zeros(2, 3, 8, 8)))
        >>> float(sum(starts).abs().max()) < 1e-6, sum(shares) / len(shares)
        (True, 0.5)
    """
    draw = torch.Generator().manual_seed(0)
    half = torch.randn(SAMPLES // 2, images.shape[1], generator=draw)
    places = torch.randperm(SAMPLES, generator=draw)
    for color, place in zip(torch.cat([half, -half]), places.tolist(), strict=True):
        yield color.to(images)[None, :, None, None], (place + 0.5) / SAMPLES


def _gradient(net: Asked, images: Tensor, classes: Tensor, name: str) -> Tensor:
    """Return the gradient of the classes' outputs by the pixels, ``(B, C, H, W)``."""
    with torch.enable_grad():
        x = images.detach().requires_grad_()
        return torch.autograd.grad(score_of(net(x), classes, name), x)[0]


def occlusion(net: Asked, images: Tensor, classes: Tensor, side: int = 1) -> Tensor:
    """Return the decrease of the class's or label's probability when a patch gets the mean color, for each patch.

    After Zeiler and Fergus 2014 (arXiv:1311.2901).

    Args:
        net: The network.
        images: Normalized ``(B, C, H, W)`` images.
        classes: The class of each image, ``(B,)``.
        side: Patches that are covered together, a square of so many a side: fewer passes; all have the value of theirs.
    """
    (h, w), device = net.grid_size, images.device
    y, x = torch.meshgrid(torch.arange(h, device=device) // side, torch.arange(w, device=device) // side, indexing="ij")
    owner, found = (y * -(-w // side) + x).flatten(), []  # the square of each patch
    masks = cells(net, F.one_hot(owner).T.to(images))
    for image, k in zip(images, classes, strict=True):
        covered = torch.cat([image[None], image * (1 - masks)])
        share = probabilities(net, outputs(net, covered))[:, k]
        found.append((share[0] - share[1:])[owner])
    return torch.stack(found)


def cells(net: Asked, values: Tensor) -> Tensor:
    """Map ``(B, N)`` values of patches to ``(B, 1, H, W)``: each pixel has its patch's."""
    return F.interpolate(values.unflatten(1, net.grid_size)[:, None], net.img_size, mode="nearest")


def by_patch(net: Asked, pixels: Tensor) -> Tensor:
    """Map ``(B, C, H, W)`` values of pixels to their sums over each patch of :func:`cells`, ``(B, N)``."""
    (h, w), (H, W), gray = net.grid_size, net.img_size, pixels.sum(dim=1, keepdim=True)
    if H % h == 0 and W % w == 0:
        return F.adaptive_avg_pool2d(gray, net.grid_size).flatten(1) * (H * W / (h * w))
    owner = cells(net, torch.arange(h * w, device=pixels.device, dtype=torch.float32)[None]).long().flatten()
    return gray.new_zeros(len(gray), h * w).index_add_(1, owner, gray.flatten(1))


METHODS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "attention": last_attention,
    "rollout": attention_rollout,
    "gradient rollout": gradient_rollout,
    "gradient x attention": gradient_attention,
    "LRP": lrp,
    "Grad-CAM": grad_cam,
    "SmoothGrad": smooth_grad,
    "integrated gradients": integrated_gradients,
    "GradientSHAP": gradient_shap,
    "occlusion": occlusion,
}


OF_ATTENTION = ("attention", "rollout", "gradient rollout", "gradient x attention", "LRP")  # need its weights
SIGNED = ("integrated gradients", "GradientSHAP", "occlusion")  # a patch can speak against the class


def methods_of(net: Asked) -> dict[str, Callable[[Any, Tensor, Tensor], Tensor]]:
    """Return the maps that a network has: of attention if all blocks let it be caught, Grad-CAM if a layer has cells.

    Maps of attention need a head that reads the class token alone, or patches by their mean or by attention, and
    rollout weights that are not negative, as those of differential attention are. LRP needs a rule for each operation:
    a network of another library has it where all of them have one, and one with parts of a user where it can be tried.

    Example:
        >>> from torch import nn
        >>> list(methods_of(AnyNetwork(nn.Sequential(nn.Flatten(), nn.Linear(12, 2)), "a", (2, 2), 3)))
        ['SmoothGrad', 'integrated gradients', 'GradientSHAP', 'occlusion']
    """
    missing = set[str]()
    if isinstance(net, AnyNetwork):
        if net.reads is None:
            missing |= {*OF_ATTENTION}
        elif not shares_relevance(net):
            missing.add("LRP")
        if not any(stage.has_cells for stage in net.stages):
            missing.add("Grad-CAM")
    elif net.global_pool not in ("token", "avg", "map") or not _lets_maps_be_caught(net):
        missing |= {*OF_ATTENTION}
    else:
        if _has_negative_weights(net):
            missing.add("rollout")
        if not _hands_down(net):
            missing.add("LRP")
    return {name: method for name, method in METHODS.items() if name not in missing}


def _lets_maps_be_caught(net: VisionTransformer) -> bool:
    """Return whether each block applies a map of attention that can be caught; one of one's own is tried."""
    if not all(isinstance(getattr(block, "attn", None), Attention) for block in net.blocks):
        return False
    if not own_parts(net.blocks):
        return True
    try:
        return bool(plain_maps(net, _noise(net)))
    except UsageError:
        return False


def _has_negative_weights(net: VisionTransformer) -> bool:
    """Return whether attention of one's own has negative weights, as two images of noise show."""
    if all(attention.is_softmax for attention in attentions(net)):
        return False
    return any(float(maps.min()) < -TINY for maps in plain_maps(net, _noise(net)))


def _hands_down(net: VisionTransformer) -> bool:
    """Return whether LRP takes what parts of the user's own compute; noise tells it."""
    try:
        return not own_parts(net) or bool(relevant_maps(net, _noise(net), torch.tensor([0, 0])))
    except Exception:  # what a part computes can be anything
        return False


def _noise(net: VisionTransformer) -> Tensor:
    noise = torch.randn(2, net.in_chans, *net.img_size, generator=torch.Generator().manual_seed(0))
    return noise.to(next(net.parameters()))


def predicted(subject: Subject, images: Tensor, name: str) -> Tensor:
    """Return the predicted class of each image, ``(B,)``; refuse a network without scores of classes."""
    if not subject.scores_classes:
        numbers = ", ".join(subject.data.targets.get("names", ())) if subject.net.num_classes > 1 else ""
        what = f"predicts {numbers}" if numbers else "has no classification head"
        raise UsageError(f"{name} needs class scores, and {subject.name} {what}")
    return all_finite(outputs(subject.net, images)).argmax(dim=1)


@Analysis(
    reading="Which patches the score of the predicted class depends on, by up to ten methods side by side.",
    limits="Which method is right where they disagree: read `faithfulness` and `sanity` first.",
)
def analyze_attribution(subject: Subject) -> Finding:
    """Show the maps of :func:`methods_of` for the predicted class; those that have a sign are drawn beside the images.

    Example:
        >>> finding = analyze_attribution(subject)
        >>> sorted(finding.table["map"].unique())[:3]
        ['Grad-CAM', 'GradientSHAP', 'LRP']
    """
    images = subject.shown()
    classes = predicted(subject, images, "attribution")
    named = {name: method(subject.net, images, classes) for name, method in methods_of(subject.net).items()}
    titles = [f"as {subject.called(k)}"[:24] for k in classes.tolist()]
    what = "likeliest label" if subject.data.targets["kind"] == "multilabel" else "predicted class"
    note, off = f"maps of the {what}", missed(subject.net, images, classes, named["integrated gradients"])
    if (off > MISSED).any():
        note += f"; integrated gradients miss up to {float(off.max()):.0%} of what they should add up to"
    return maps_of_images(subject, images, named, note, titles, SIGNED)
