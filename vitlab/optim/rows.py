"""Layer decay for tensors that hold a slice for every block."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer


def slow_earlier_blocks(optimizer: Optimizer, net: Any, layer_decay: float) -> None:
    """Make ``optimizer`` update each slice of a tensor with one slice per block at the rate of that block.

    The group of the tensor has the rate of the last block. After each step, hooks scale the change of the other slices,
    which equals a lower rate for every optimizer whose steps are proportional to it: positions have no weight decay.

    Args:
        optimizer: Optimizer of the parameters of ``net``.
        net: The unwrapped network.
        layer_decay: As in :func:`param_groups`.

    Example:
        >>> from vitlab.models import VisionTransformer
        >>> from vitlab.optim import param_groups
        >>> net = VisionTransformer(img_size=32, embed_dim=48, depth=2, num_heads=3, pos_embed="relpos")
        >>> optimizer, table = torch.optim.SGD(param_groups(net, 1.0, 0.0, layer_decay=0.5)), net.pos_embed.bias_table
        >>> before, table.grad = table.detach().clone(), torch.ones_like(table)
        >>> slow_earlier_blocks(optimizer, net, 0.5)
        >>> optimizer.step()
        >>> (before - table).mean((1, 2)).tolist()
        [0.25, 0.5]
    """
    stacked = [] if layer_decay == 1.0 else [(p, axis) for p, axis in net.pos_embed.stacked_parameters()]
    before: list[Tensor] = []

    def keep(*call: Any) -> None:
        before[:] = [p.detach().clone() for p, _ in stacked]

    @torch.no_grad()
    def scale(*call: Any) -> None:
        for (p, axis), old in zip(stacked, before, strict=True):
            factors = row_scales(p, axis, layer_decay)
            if isinstance(p, DTensor):
                factors = distribute_tensor(factors, p.device_mesh, p.placements)
            p.lerp_(old, 1 - factors)

    if stacked:
        optimizer.register_step_pre_hook(keep)
        optimizer.register_step_post_hook(scale)


def row_scales(p: Tensor, axis: int, layer_decay: float) -> Tensor:
    """Return the learning rate of each value of a tensor with a slice per block, relative to the last block.

    Example:
        >>> row_scales(torch.zeros(3, 2), axis=0, layer_decay=0.5).tolist()
        [[0.25, 0.25], [0.5, 0.5], [1.0, 1.0]]
    """
    steps = torch.arange(p.shape[axis] - 1, -1, -1, dtype=p.dtype, device=p.device)
    return (layer_decay**steps).unflatten(0, (-1, *[1] * (p.ndim - 1 - axis))).expand(p.shape).contiguous()
