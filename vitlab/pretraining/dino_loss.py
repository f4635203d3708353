"""Self-distillation: projection head, targets of the teacher, and losses."""

import math
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.models import start


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
            layers += [nn.Linear(a, b), nn.GELU()]
        self.mlp = nn.Sequential(*layers[:-1])
        self.prototypes = nn.Parameter(nn.init.trunc_normal_(torch.empty(prototypes, proj_dim), std=0.02))
        self.length = None if is_fixed else nn.Parameter(torch.ones(prototypes))
        self.apply(lambda module: start.init_weights(module, 0.02))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(..., D)`` to ``(..., K)`` in at least float32."""
        scores = F.linear(F.normalize(self.mlp(x), dim=-1), F.normalize(self.prototypes, dim=-1))
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


def koleo(features: Tensor, eps: float = 1e-8) -> Tensor:
    """Return minus the mean log distance from each of ``(B, D)`` normalized features to its nearest neighbor.

    The Kozachenko-Leonenko estimate of entropy, Sablayrolles et al. 2019 (arXiv:1806.03198), as in DINOv2.

    >>> round(koleo(torch.tensor([[1.0, 0.0], [0.0, 3.0]])).item(), 4)  # -log(sqrt(2))
    -0.3466
    """
    x = F.normalize(features if features.dtype.itemsize > 2 else features.float(), dim=1, eps=eps)
    near = (x.detach() @ x.detach().T).fill_diagonal_(-1).argmax(dim=1)
    return -(F.pairwise_distance(x, x[near], eps=eps) + eps).log().mean()
