"""Build the parts of a network, and give them their first weights."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import accumulate
from typing import Any, NamedTuple, Unpack, get_type_hints

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from vitlab.class_paths import build_choice, name_and_args
from vitlab.layers.attention import Place
from vitlab.layers.block import Block, BlockArgs, BlockChoice, DenseBlock
from vitlab.layers.pool import PoolChoice
from vitlab.layers.pos_embed import PosEmbed
from vitlab.layers.pos_embed.added import AddedPosEmbed
from vitlab.layers.pos_embed.conv import ConvPosEmbed
from vitlab.layers.resample import Grid
from vitlab.named_kwargs import check_names, check_types, taken_by

PROJECTIONS = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)


@contextmanager
def isolated_rng(root: int, part: str) -> Iterator[None]:
    """Draw random numbers that depend only on ``root`` and the name of the part, not on what other parts have drawn.

    So two networks with the same seed start equal in every part that both build in the same way; a block is one part.

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


class Backbone(NamedTuple):
    """What all blocks of a network have in common.

    Args:
        embed_dim: Width of the tokens that enter.
        num_heads: Attention heads of every block.
        depth: Number of blocks.
        grid_size: Patch tokens per column and per row.
        num_prefix_tokens: Number of prefix tokens.

    Example:
        >>> Backbone(384, 6, 12).depth
        12
    """

    embed_dim: int
    num_heads: int
    depth: int
    grid_size: Grid = (0, 0)
    num_prefix_tokens: int = 0


class WeightInit(NamedTuple):
    """How the weights of a network are drawn.

    Args:
        root: What the random numbers of every part follow from, see :func:`isolated_rng`.
        std: Standard deviation of linear and convolution weights.

    Example:
        >>> init = WeightInit(0, 0.02)
        >>> with init.part("head"):
        ...     layer = nn.Linear(8, 8).apply(init.weights)
    """

    root: int
    std: float

    def part(self, name: str) -> AbstractContextManager[None]:
        """Return the context in which the part of this name is built."""
        return isolated_rng(self.root, name)

    def weights(self, module: nn.Module) -> None:
        """Initialize a linear layer or convolution, see :func:`init_weights`."""
        init_weights(module, self.std)

    def tokens(self, name: str, count: int, embed_dim: int) -> nn.Parameter | None:
        """Return the ``(1, count, embed_dim)`` prefix tokens of this name; None if there are none."""
        with self.part(name):
            return nn.Parameter(init_token(count, embed_dim)) if count else None


def init_token(count: int, embed_dim: int) -> Tensor:
    """Return ``(1, count, embed_dim)`` initial values of prefix tokens.

    Example:
        >>> init_token(1, 384).shape
        torch.Size([1, 1, 384])
    """
    return nn.init.trunc_normal_(torch.empty(1, count, embed_dim), std=0.02)


def init_weights(module: nn.Module, std: float) -> None:
    """Initialize a linear layer or convolution: truncated normal weights, zero bias.

    A class that is neither of torch nor of vitlab then initializes itself by its ``reset_parameters``, if it has one.

    Example:
        >>> _ = nn.Sequential(nn.Linear(8, 8), nn.GELU()).apply(lambda module: init_weights(module, std=0.02))
    """
    if isinstance(module, PROJECTIONS):
        _draw_weight(module, std)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    own: Any = getattr(type(module), "reset_parameters", None)
    if own is not None and own.__module__.partition(".")[0] not in ("torch", "vitlab"):
        own(module)


def _draw_weight(module: Any, std: float) -> None:
    """Draw the weight of a layer; a parametrization that has no inverse keeps what it was made of."""
    if not is_parametrized(module, "weight"):
        nn.init.trunc_normal_(module.weight, std=std)
    elif all(hasattr(step, "right_inverse") for step in module.parametrizations["weight"]):
        weight = nn.init.trunc_normal_(torch.empty_like(module.weight), std=std)
        with suppress(NotImplementedError):  # of an inverse that torch has not for all of its maps
            module.weight = weight


def projections(module: nn.Module) -> list[nn.Parameter]:
    """Return the weights of a linear layer, a convolution or torch's attention, which has several; none of others.

    Example:
        >>> [weight.ndim for weight in projections(nn.Conv1d(8, 8, 3))], projections(nn.LayerNorm(8))
        ([3], [])
    """
    if isinstance(module, nn.MultiheadAttention):
        names = ["in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"]
    else:
        names = ["weight"] if isinstance(module, PROJECTIONS) else []
    return [weight for name in names for weight in _stored(module, name)]


def _stored(module: nn.Module, name: str) -> list[nn.Parameter]:
    """Return the weight of this name or, where it is computed, the largest parameter that it is computed from."""
    if is_parametrized(module, name):
        found = list(module.parametrizations[name].parameters(recurse=False))  # type: ignore[index, union-attr]
    else:  # in place of `weight`, hooks of torch.nn.utils keep `weight_orig`, or `weight_g` and `weight_v`
        own = module.named_parameters(recurse=False)
        found = [p for key, p in own if key == name or key.startswith(f"{name}_")]
    return [max(found, key=Tensor.numel)] if found else []


def build_blocks(
    block: BlockChoice,
    sizes: Backbone,
    pos_embed: PosEmbed,
    drop_path_rate: float,
    init: WeightInit,
    **shared: Unpack[BlockArgs],
) -> tuple[nn.ModuleList, int]:
    """Build the blocks, and return them with the width of the tokens that leave the last.

    Args:
        block: The block: plain; dense, whose ``dense_blocks`` are numbers of blocks of stages between which the width
            is halved, each appending ``dense_growth`` channels; or a class path of a module that maps ``(B, L, D)``
            tokens, position embedding and index to ``(B, L, D)``. A class receives the arguments of :class:`Block` and
            the fields of :class:`Place` that its constructor has.
        sizes: Width, heads, number of blocks, grid and prefix tokens.
        pos_embed: The position embedding, which must fit tokens of several widths.
        drop_path_rate: Drop path rate of the last block; grows linearly from 0 in the first, also if that is the last.
        init: How weights are drawn.
        **shared: Arguments of every block.

    Example:
        >>> dense = {"class_path": "dense", "init_args": {"dense_blocks": [2, 1], "dense_growth": 8}}
        >>> sizes, init = Backbone(16, 2, 3), WeightInit(0, 0.02)
        >>> build_blocks(dense, sizes, PosEmbed(), 0.0, init)[1]  # 16, 24, 32 halved, 24
        24
    """
    word, args = name_and_args("block", block)
    blocks, dim, halved, growth = nn.ModuleList(), sizes.embed_dim, set[int](), 0
    if word == "dense":
        check_names(dense_stages, args, "block=dense")
        check_types(get_type_hints(dense_stages), args, "block")
        stages, growth = dense_stages(**args)
        _check_dense(stages, growth, sizes.depth, pos_embed)
        halved = set(accumulate(stages))
    for i in range(sizes.depth):
        rate = drop_path_rate * i / max(1, sizes.depth - 1)
        place = Place(i, sizes.depth, sizes.grid_size, sizes.num_prefix_tokens)
        with init.part(f"blocks.{i}"):
            if word == "dense":
                in_dim, dim = (dim, dim // 2) if i in halved else (0, dim)
                widths = {"growth": growth, "in_dim": in_dim}
                try:
                    new: nn.Module = DenseBlock(
                        dim, sizes.num_heads, **widths, drop_path_rate=rate, place=place, **shared
                    )
                except ValueError as error:
                    if dim == sizes.embed_dim or dim % sizes.num_heads == 0:
                        raise
                    what = f"the width of block {i}: choose another `dense_growth` than {growth}"
                    raise ValueError(f"{error}, {what}") from error
                dim += growth
            else:
                offered = {"dim": dim, "num_heads": sizes.num_heads, **shared, "drop_path_rate": rate, "place": place}
                new = build_choice("block", block, {"plain": Block}, nn.Module, {**place._asdict(), **offered})
            blocks.append(new.apply(init.weights))
    return blocks, dim


def dense_stages(dense_blocks: Sequence[int] = (), dense_growth: int = 64) -> tuple[Sequence[int], int]:
    """Return the arguments of a dense backbone: blocks per stage, and channels that each appends.

    Example:
        >>> dense_stages([3, 6, 6, 4])
        ([3, 6, 6, 4], 64)
    """
    return dense_blocks, dense_growth


def _check_dense(stages: Sequence[int], growth: int, depth: int, pos_embed: PosEmbed) -> None:
    if not stages or min(stages) < 1 or sum(stages) != depth or growth < 1:
        raise ValueError(
            f"`dense_blocks` must be numbers of blocks that sum to `depth`, and `dense_growth` at least 1, got "
            f"{list(stages)}, {depth} and {growth}"
        )
    for p in pos_embed.modules():
        rotates = isinstance(p, PosEmbed) and not hasattr(p, "parts") and type(p).rotate is not PosEmbed.rotate
        has_width = rotates or (isinstance(p, PosEmbed) and "head_dim" in taken_by(type(p)))
        if has_width or (isinstance(p, AddedPosEmbed) and p.join != "stem") or isinstance(p, ConvPosEmbed):
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
    if num_classes == 0:
        return nn.Identity()
    if not head_hidden:
        return nn.Linear(embed_dim, num_classes)
    return nn.Sequential(nn.Linear(embed_dim, head_hidden), nn.Tanh(), nn.Linear(head_hidden, num_classes))


def check_pool(global_pool: PoolChoice, class_token: bool) -> None:
    """Refuse pooling by a class token where there is none.

    Example:
        >>> check_pool("avg", class_token=False)
    """
    if global_pool == "token" and not class_token:
        raise ValueError("`global_pool='token'` needs `class_token=True`; without one use 'avg', 'max' or 'map'")


def check_kept(keep: Tensor, images: Tensor, drops_rows: bool) -> None:
    """Refuse what is no choice of patch tokens for each of ``(B, C, H, W)`` images, or meets what drops whole images.

    Args:
        keep: ``(B, K)`` indices of the patch tokens to keep, K at least 1.
        images: The images.
        drops_rows: Whether drop path computes the branches of some images only.

    Example:
        >>> check_kept(torch.tensor([[0, 3], [1, 2]]), torch.randn(2, 3, 32, 32), drops_rows=False)
    """
    if keep.ndim != 2 or len(keep) != len(images) or not keep.shape[1] or keep.dtype != torch.long:
        shape = f"({len(images)}, K) int64 indices of patch tokens, K at least 1"
        raise ValueError(f"`keep` must be {shape}, got {tuple(keep.shape)} of {keep.dtype}")
    if drops_rows:
        raise ValueError(
            "`drop_path_subset` drops images from the batch, but `keep` has other tokens for each: leave it out"
        )
