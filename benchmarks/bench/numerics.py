"""``vitlab bench numerics``: compare the fast paths with plain float64, on ordinary and on flat images."""

from typing import Any

import torch
from torch import Tensor, nn

from bench.networks import Plain, ours

LIMIT = 1e-5  # of the largest logit, and of the norm of all gradients
MODELS = ("t2t_vit_7", "t2t_vit_t_14", "vit_ti16")


def images_of(size: int = 224) -> dict[str, Tensor]:
    """Return a normalized image of each kind; a photo where scikit-learn has its samples."""
    noise = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(0))
    bars = noise.clone()
    bars[:, :, : size // 4] = bars[:, :, -size // 4 :] = torch.tensor([-2.118, -2.036, -1.804])[:, None, None]
    white = torch.tensor([2.249, 2.429, 2.640])[:, None, None].expand(1, 3, size, size)
    halves = torch.where(torch.arange(size) < size // 2, -2.0, 2.4).expand(1, 3, size, size)
    kinds = {"random": noise, "white": white, "letterbox": bars, "equal channels": torch.full_like(noise, 2.4)}
    texture = 1e-3 * noise[:, :1]
    kinds |= {"gray": (2.2 + texture).expand_as(noise), "two grays": halves, "two textures": halves + texture}
    photos = _photos(size)
    return kinds if photos is None else {**kinds, "photo": photos}


def measure() -> list[dict[str, Any]]:
    """Return a row for each network and kind of image: differences of logits and gradients from float64."""
    rows = []
    for model in MODELS:
        net, plain, exact = ours(model), Plain(ours(model)), Plain(ours(model)).double()
        for kind, images in images_of().items():
            reference = results(exact, images.double())
            row = {"model": model, "images": kind, "limit": LIMIT}
            row["logits"], row["gradients"] = difference(results(net, images), reference)
            row["plain_logits"], row["plain_gradients"] = difference(results(plain, images), reference)
            rows.append({**row, "passes": _passes(row)})
    return rows


def _passes(row: dict[str, Any]) -> bool:
    """Whether the differences are within the limit, or no larger than those of the plain implementation."""
    pairs = (("logits", "plain_logits"), ("gradients", "plain_gradients"))
    return all(row[ours] <= max(row["limit"], row[plain]) for ours, plain in pairs)


def results(net: nn.Module, images: Tensor) -> list[Tensor]:
    """Return the logits of a network in evaluation, and the gradients of their mean square."""
    logits = net.eval()(images)
    return [logits.detach(), *torch.autograd.grad(logits.square().mean(), list(net.parameters()))]


def difference(found: list[Tensor], exact: list[Tensor]) -> tuple[float, float]:
    """Return how far logits are off, relative to the largest, and all gradients together, relative to their norm."""
    logits = ((found[0] - exact[0]).abs().max() / exact[0].abs().max()).item()
    error = torch.stack([(a - b).norm() for a, b in zip(found[1:], exact[1:], strict=True)]).norm()
    return logits, (error / torch.stack([g.norm() for g in exact[1:]]).norm()).item()


def _photos(size: int) -> Tensor | None:
    try:
        from sklearn.datasets import load_sample_images
    except ImportError:
        return None
    photos = torch.stack([torch.from_numpy(image.copy()) for image in load_sample_images().images])
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return ((photos[:1, :size, :size] / 255 - mean) / std).permute(0, 3, 1, 2).contiguous()
