"""Build the parts of a network, and give them their first weights."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from vitlab.class_paths import build_choice
from vitlab.layers.attention import Place
from vitlab.layers.block import Block, BlockArgs, BlockChoice, BlockName
from vitlab.layers.custom import check_shaped
from vitlab.layers.dense_block import DenseBlock
from vitlab.layers.pool import PoolChoice
from vitlab.layers.pos_embed import PosEmbed
from vitlab.layers.pos_embed.added import AddedPosEmbed
from vitlab.layers.pos_embed.conv import ConvPosEmbed
from vitlab.layers.pos_embed.together import Together
from vitlab.named_kwargs import taken_by

PROJECTIONS = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)


BLOCKS: Mapping[BlockName, type[Block]] = {"plain": Block, "dense": DenseBlock}


class WeightInit(NamedTuple):
    """How the weights of a network are drawn.

    The random numbers of a part depend on ``root`` and its name alone, not on what other parts have drawn, so that two
    networks with the same seed start equal in every part that both build in the same way; a block is one part.

    Args:
        root: What the random numbers of every part follow from.
        std: Standard deviation of linear and convolution weights.

    Example:
        >>> init = WeightInit(0, 0.02)
        >>> with init.part("head"):
        ...     layer = nn.Linear(8, 8).apply(init.weights)
        >>> with init.part("head"):
        ...     print(torch.equal(nn.Linear(8, 8).apply(init.weights).weight, layer.weight))
        True
    """

    root: int
    std: float

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Draw the random numbers of the part of this name."""
        key = hashlib.blake2b(f"{self.root}:{name}".encode(), digest_size=7).digest()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int.from_bytes(key))
            yield

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
    embed_dim: int,
    num_heads: int,
    place: Place,
    pos_embed: PosEmbed,
    init: WeightInit,
    **shared: Unpack[BlockArgs],
) -> tuple[nn.ModuleList, int]:
    """Build the blocks, and return them with the width of the tokens that leave the last.

    Args:
        block: The block: plain; dense, see :class:`DenseBlock`; or a class path of a module that maps ``(B, L, D)``
            tokens, position embedding and index to ``(B, L, D)``. A class receives the arguments of :class:`Block` and
            the fields of :class:`Place` that its constructor has.
        embed_dim: Width D of the tokens that enter.
        num_heads: Attention heads A of every block.
        place: Where the first block stands.
        pos_embed: The position embedding, which with dense blocks must fit tokens of several widths.
        init: How weights are drawn.
        **shared: Arguments of every block. Their drop path rate is that of the last; it grows linearly from 0 in the
            first, also if that is the last.

    Example:
        >>> dense = {"class_path": "dense", "init_args": {"dense_blocks": [2, 1], "dense_growth": 8}}
        >>> place, init = Place(depth=3), WeightInit(0, 0.02)
        >>> build_blocks(dense, 16, 2, place, PosEmbed(), init)[1]  # 16, 24, 32 halved, 24
        24
    """
    blocks, width, last_rate = nn.ModuleList(), embed_dim, shared.pop("drop_path_rate", 0.0)
    for i in range(place.depth):
        here, rate = place._replace(layer=i), last_rate * i / max(1, place.depth - 1)
        offered = {"dim": embed_dim, "num_heads": num_heads, **shared, "drop_path_rate": rate, "place": here}
        with init.part(f"blocks.{i}"):
            new = build_choice("block", block, BLOCKS, nn.Module, {**here._asdict(), **offered})
            blocks.append(check_shaped("block", new).apply(init.weights))
        if isinstance(new, DenseBlock):
            _check_fits_widths(pos_embed)
            width = new.out_dim
    return blocks, width


def _check_fits_widths(pos_embed: PosEmbed) -> None:
    """Refuse a method that is built for tokens of a single width."""
    for p in pos_embed.modules():
        has_width = False
        if isinstance(p, PosEmbed) and not isinstance(p, Together):
            has_width = type(p).rotate is not PosEmbed.rotate or "head_dim" in taken_by(type(p))
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
