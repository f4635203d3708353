"""Build the parts of a network: argument checks, initial weights, blocks and head."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, get_args

import torch
from torch import Tensor, nn

from vitlab.layers.block import Block
from vitlab.layers.pool import PoolName
from vitlab.layers.pos_embed import PosEmbed
from vitlab.layers.pos_embed.added import AddedPosEmbed
from vitlab.layers.pos_embed.conv import ConvPosEmbed


@contextmanager
def isolated_rng(root: int, part: str) -> Iterator[None]:
    """Draw random numbers that depend only on ``root`` and the name of the part, not on what other parts have drawn.

    So two networks with the same seed start equal in every part that they share.

    Example:
        >>> with isolated_rng(7, "head"):
        ...     first = torch.rand(3)
        >>> with isolated_rng(7, "head"):
        ...     print(torch.equal(torch.rand(3), first))
        True
    """
    key = hashlib.blake2b(f"{root}:{part}".encode(), digest_size=7).digest()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int.from_bytes(key))
        yield


def start_step(net: Any, step: int) -> None:
    """Draw the patch size of a training step, if the network has patches of several sizes.

    Example:
        >>> from vitlab.models import VisionTransformer
        >>> net = VisionTransformer(img_size=48, flexi_patch=[8, 12, 16], embed_dim=48, depth=1, num_heads=3)
        >>> net.start_step(0)
        >>> net.tokenizer.patch in [(8, 8), (12, 12), (16, 16)]
        True
    """
    if hasattr(net.tokenizer, "draw"):
        net.tokenizer.draw(step)


def init_token(count: int, embed_dim: int) -> Tensor:
    """Return ``(1, count, embed_dim)`` initial values of prefix tokens.

    Example:
        >>> init_token(1, 384).shape
        torch.Size([1, 1, 384])
    """
    return nn.init.trunc_normal_(torch.empty(1, count, embed_dim), std=0.02)


def init_weights(module: nn.Module, std: float) -> None:
    """Initialize a linear layer or convolution: truncated normal weights, zero bias.

    Example:
        >>> _ = nn.Sequential(nn.Linear(8, 8), nn.GELU()).apply(lambda module: init_weights(module, std=0.02))
    """
    if isinstance(module, nn.Linear | nn.Conv2d):
        nn.init.trunc_normal_(module.weight, std=std)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def build_blocks(
    part: Any, init: Any, depth: int, drop_path_rate: float, dense: Any, embed_dim: int, **block: Any
) -> tuple[nn.ModuleList, int]:
    """Build the blocks, and return them with the width of the tokens that leave the last.

    Args:
        part: Function from the name of a block to the context it is built in, see :func:`isolated_rng`.
        init: Function that initializes the weights of a module.
        depth: Number of blocks.
        drop_path_rate: Drop path rate of the last block; grows linearly from 0.
        dense: Blocks per stage, channels that each adds, and the position embedding; None is one stream.
        embed_dim: Width of the tokens that enter.
        **block: Arguments of every block.

    Example:
        >>> part, init = partial(isolated_rng, 0), lambda module: None
        >>> build_blocks(part, init, 3, 0.0, ((2, 1), 8, PosEmbed()), 16, num_heads=2)[1]  # 16, 24, 32 halved, 24
        24
    """
    stages, growth, pos_embed = dense or ((depth,), 0, None)
    if pos_embed is not None:
        _check_dense(stages, growth, depth, pos_embed)
    blocks, dim, halved = nn.ModuleList(), embed_dim, set(accumulate(stages))
    for i in range(depth):
        in_dim, dim = (dim, dim // 2) if i in halved else (0, dim)
        rate = drop_path_rate * i / max(1, depth - 1)
        with part(f"blocks.{i}"):
            blocks.append(Block(dim, drop_path_rate=rate, dense=(growth, in_dim), **block).apply(init))
        dim += growth
    return blocks, dim


def _check_dense(stages: Sequence[int], growth: int, depth: int, pos_embed: PosEmbed) -> None:
    if not stages or min(stages) < 1 or sum(stages) != depth or growth < 1:
        raise ValueError(
            f"`dense_blocks` must be numbers of blocks that sum to `depth`, and `dense_growth` at least 1, got "
            f"{list(stages)}, {depth} and {growth}"
        )
    for p in pos_embed.modules():
        rotates = isinstance(p, PosEmbed) and not hasattr(p, "parts") and type(p).rotate is not PosEmbed.rotate
        if rotates or (isinstance(p, AddedPosEmbed) and p.join != "stem") or isinstance(p, ConvPosEmbed):
            name = type(p).__name__
            raise ValueError(
                f"`dense_blocks` change the width from block to block, which {name} of `pos_embed` does not support"
            )


def build_head(embed_dim: int, head_hidden: int, num_classes: int) -> nn.Module:
    """Build a linear head, or one with a hidden tanh layer; without classes, the identity.

    Example:
        >>> build_head(384, head_hidden=0, num_classes=10)
        Linear(in_features=384, out_features=10, bias=True)
    """
    if not num_classes:
        return nn.Identity()
    if not head_hidden:
        return nn.Linear(embed_dim, num_classes)
    return nn.Sequential(nn.Linear(embed_dim, head_hidden), nn.Tanh(), nn.Linear(head_hidden, num_classes))


def reset_head(net: Any, num_classes: int) -> None:
    """Replace the head by a new one with ``num_classes`` outputs K; 0 returns the pooled features.

    Example:
        >>> from vitlab.models import VisionTransformer
        >>> net = VisionTransformer(img_size=32, embed_dim=48, depth=1, num_heads=3)
        >>> net.reset_head(10)
        >>> net.head
        Linear(in_features=48, out_features=10, bias=True)
    """
    check_at_least(0, num_classes=num_classes)
    head = build_head(net.num_features, net.head_hidden, num_classes).apply(partial(init_weights, std=net.init_std))
    weight = next(net.blocks.parameters())
    net.num_classes, net.head = num_classes, head.to(weight.device, weight.dtype).train(net.training)


def check_at_least(least: int, **values: int) -> None:
    """Raise a ValueError that names the first value below ``least``.

    Example:
        >>> check_at_least(1, depth=12)
    """
    for name, value in values.items():
        if value < least:
            raise ValueError(f"`{name}` must be at least {least}, got {value}")


def check_rates(**values: float) -> None:
    """Raise a ValueError that names the first rate outside [0, 1).

    Example:
        >>> check_rates(dropout=0.1)
    """
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ValueError(f"`{name}` must be at least 0 and below 1, got {value}")


def check_pool(global_pool: str, class_token: bool) -> None:
    """Refuse an unknown pooling, and pooling by a class token where there is none.

    Example:
        >>> check_pool("avg", class_token=False)
    """
    if global_pool not in get_args(PoolName):
        raise ValueError(f"`global_pool` must be one of {', '.join(get_args(PoolName))}, got {global_pool!r}")
    if global_pool == "token" and not class_token:
        raise ValueError("`global_pool='token'` needs `class_token=True`; without one use 'avg', 'max' or 'map'")


def check_policy(policy: str | None, allowed: Sequence[str]) -> None:
    """Refuse a resize policy that the position embedding does not have.

    Example:
        >>> check_policy("rescale", ["extrapolate", "rescale"])
    """
    if policy is not None and policy not in allowed:
        choices = f"one of {', '.join(allowed)} or null" if allowed else "null: there is nothing to resize"
        raise ValueError(f"`pos_embed_resize` must be {choices} for this position embedding, got {policy!r}")


def check_spread(init_std: float) -> None:
    """Refuse an ``init_std`` that is not above 0.

    Example:
        >>> check_spread(0.02)
    """
    if init_std <= 0:
        raise ValueError(f"`init_std` must be above 0, got {init_std}")
