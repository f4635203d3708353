"""Images of different sizes whose tokens share the rows of one batch: their positions, and the forward pass."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self
from weakref import WeakSet

import torch
from torch import Tensor
from torch.func import functional_call

from vitlab.interface import own_parts
from vitlab.layers.channels import SqueezeExcite
from vitlab.layers.custom import PerToken, spare
from vitlab.layers.drop_path import DropPath
from vitlab.layers.plain import goes_around
from vitlab.layers.pos_embed.base import PosEmbed
from vitlab.layers.pos_embed.placed import placed
from vitlab.layers.resample import Grid
from vitlab.models.hooks import modes_kept
from vitlab.packed_batch import PackedBatch
from vitlab.tokenizers.patch import PatchEmbed
from vitlab.tokenizers.splits import pair

_compared = WeakSet[Any]()  # networks with parts of the user's that were found to keep images apart


class PackedPosEmbed(PosEmbed):
    """Apply a position embedding to rows that hold several images: NaViT, Dehghani et al. 2023 (arXiv:2307.06304).

    Images with the same grid go through the method together, at that grid, so each is encoded as it would be alone.
    Rows are as long as the longest image; shorter images share a row. Attention stays within an image: the bias between
    tokens of different images is minus infinity.

    Args:
        pos_embed: The position embedding of the network.
        grids: Rows and columns of the patches of each image.
        num_prefix_tokens: Number of prefix tokens P of each image, before its patches.
        device: Device of the tokens.

    >>> packed = PackedPosEmbed(PosEmbed(), [(2, 3), (1, 2), (3, 1)], num_prefix_tokens=1)
    >>> packed.owner  # the image of each token: one row for image 0, one for images 2 and 1
    tensor([[0, 0, 0, 0, 0, 0, 0],
            [2, 2, 2, 2, 1, 1, 1]])
    """

    def __init__(
        self,
        pos_embed: PosEmbed,
        grids: Sequence[Grid],
        num_prefix_tokens: int,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.relates = pos_embed.relates
        lengths = [num_prefix_tokens + h * w for h, w in grids]
        starts, self.shape = lay_out(lengths)
        first_tokens, first_patches = torch.tensor(starts), torch.tensor([0, *lengths]).cumsum(0)[:-1]
        first_patches -= num_prefix_tokens * torch.arange(len(grids))
        by_grid: dict[Grid, list[int]] = {}
        for image, grid in enumerate(grids):
            by_grid.setdefault(grid, []).append(image)
        self.groups, owner = [], torch.full((self.shape[0] * self.shape[1],), len(grids))
        for grid, members in by_grid.items():
            images, n = torch.tensor(members), grid[0] * grid[1]
            tokens = first_tokens[images, None] + torch.arange(num_prefix_tokens + n)
            patches = first_patches[images, None] + torch.arange(n)
            owner[tokens] = images[:, None]
            self.groups.append(_Group(placed(pos_embed.at(grid)), tokens.to(device), patches.to(device)))
        self.ranks = torch.tensor([i for members in by_grid.values() for i in members]).argsort().to(device)
        self.owner = owner.view(self.shape).to(device)
        same_image = self.owner[:, None, :, None] == self.owner[:, None, None]
        self.mask = torch.zeros(same_image.shape, device=device).masked_fill_(~same_image, -torch.inf)  # (R, 1, L, L)

    def for_batch(self) -> Self:
        """Return this method with what it draws for the images of each grid."""
        return self.view(groups=[group._replace(part=group.part.for_batch()) for group in self.groups])

    def forward(self, x: Tensor) -> Tensor:
        """Map the ``(1, T, D)`` patch tokens of all images to ``(1, T, D)``, now ordered by grid."""
        parts = [group.part(_pick(x, group.patches)) for group in self.groups]
        return torch.cat([part.flatten(0, 1) for part in parts])[None]

    def prepend(self, prefix: Sequence[Tensor], x: Tensor) -> Tensor:
        """Pack the tokens that :meth:`forward` returned into ``(R, L, D)`` rows, prefix tokens before each image."""
        parts = x[0].split([group.patches.numel() for group in self.groups])
        images = [part.unflatten(0, group.patches.shape) for part, group in zip(parts, self.groups, strict=True)]
        return self._rows([super(PackedPosEmbed, self).prepend(prefix, part) for part in images])

    def enter(self, x: Tensor, layer: int) -> Tensor:
        """Map the ``(R, L, D)`` tokens that enter block ``layer`` to ``(R, L, D)``."""
        return self._map_images(x, lambda part, y: part.enter(y, layer))

    def leave(self, x: Tensor, layer: int) -> Tensor:
        """Map the ``(R, L, D)`` tokens that leave block ``layer`` to ``(R, L, D)``."""
        return self._map_images(x, lambda part, y: part.leave(y, layer))

    def rotate(self, x: Tensor, layer: int) -> Tensor:
        """Map ``(R, A, L, d)`` queries or keys of block ``layer`` to ``(R, A, L, d)``."""

        def rotate(part: PosEmbed, y: Tensor) -> Tensor:
            rotated = part.rotate(heads := y.transpose(1, 2), layer)
            return y if rotated is heads else rotated.transpose(1, 2)

        return self._map_images(x.transpose(1, 2), rotate).transpose(1, 2)

    def bias(self, layer: int) -> Tensor:
        """Return ``(R, A or 1, L, L)``: the method's bias within an image, minus infinity between images."""
        biases = self._within([group.part.bias(layer) for group in self.groups])
        return self.mask if biases is None else self.mask + biases

    def relate(self, q: Tensor, k: Tensor, layer: int) -> Tensor | None:
        """Return the method's bias by scaled ``(R, A, L, d)`` queries and keys, ``(R, A, L, L)``, or None."""

        def of(group: _Group, x: Tensor) -> Tensor:
            return _pick(x.transpose(1, 2), group.tokens).transpose(1, 2)

        return self._within([group.part.relate(of(group, q), of(group, k), layer) for group in self.groups])

    def of_images(self, x: Tensor, read: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply ``read`` to the ``(n, P + N, D)`` tokens of the images of each grid, and return ``(B, ...)``."""
        return torch.cat([read(_pick(x, group.tokens)) for group in self.groups]).index_select(0, self.ranks)

    def _map_images(self, x: Tensor, fn: Callable[[PosEmbed, Tensor], Tensor]) -> Tensor:
        """Apply ``fn`` to the ``(R, L, ...)`` tokens, grid by grid; return ``x`` itself if ``fn`` changes nothing."""
        parts = []
        for group in self.groups:
            if (y := fn(group.part, tokens := _pick(x, group.tokens))) is tokens:
                return x
            parts.append(y)
        return self._rows(parts)

    def _rows(self, parts: list[Tensor]) -> Tensor:
        flat = torch.cat([part.flatten(0, 1) for part in parts])
        places = torch.cat([group.tokens.flatten() for group in self.groups])
        empty = flat.new_zeros(self.shape[0] * self.shape[1], *flat.shape[1:])
        return empty.index_copy(0, places, flat).unflatten(0, self.shape)

    def _within(self, parts: Sequence[Tensor | None]) -> Tensor | None:
        """Place the biases of each grid, ``(A, N, N)`` or ``(n, A, N, N)``, in rows: ``(R, A, L, L)``, or None."""
        whole: Tensor | None = None
        for part, group in zip(parts, self.groups, strict=True):
            if part is not None:
                if whole is None:
                    whole = part.new_zeros(*self.shape, self.shape[1], part.shape[-3])
                rows, columns = group.tokens // self.shape[1], group.tokens % self.shape[1]
                where = (rows[:, :, None], columns[:, :, None], columns[:, None])
                whole = whole.index_put(where, part.movedim(-3, -1).expand(len(rows), -1, -1, -1))
        return None if whole is None else whole.permute(0, 3, 1, 2)


class _Group(NamedTuple):
    """Images of one grid: the method at it, and indices of their ``(n, P + N)`` tokens and ``(n, N)`` patches."""

    part: PosEmbed
    tokens: Tensor
    patches: Tensor


def _pick(x: Tensor, places: Tensor) -> Tensor:
    """Return the tokens of ``(R, L, ...)`` rows at flat indices ``(n, N)``, ``(n, N, ...)``."""
    return x.flatten(0, 1).index_select(0, places.flatten()).unflatten(0, places.shape)


def lay_out(lengths: Sequence[int]) -> tuple[list[int], tuple[int, int]]:
    """Pack images into rows as long as the longest: return where each begins, and number and length of the rows.

    Longest image first, each into the first row that has room.

    >>> lay_out([3, 5, 2])
    ([5, 0, 8], (2, 5))
    """
    length, starts = max(lengths), [0] * len(lengths)
    used: list[int] = []  # tokens of each row
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        row = next((r for r, n in enumerate(used) if n + lengths[i] <= length), len(used))
        if row == len(used):
            used.append(0)
        starts[i] = row * length + used[row]
        used[row] += lengths[i]
    return starts, (len(used), length)


def forward_packed(net: Any, images: PackedBatch) -> Tensor:
    """Map B packed images of any sizes to ``(B, K)`` outputs, the same as for each image alone.

    Example:
        >>> import torch
        >>> from vitlab.models import VisionTransformer
        >>> net = VisionTransformer(img_size=32, num_classes=10, embed_dim=48, depth=2, num_heads=3)
        >>> net(PackedBatch.of([torch.randn(3, 32, 32), torch.randn(3, 16, 48)], patch=16)).shape
        torch.Size([2, 10])
    """
    pos_embed: PackedPosEmbed = net.positions(images)
    x = net.embed(images, pos_embed)  # (R, L, D)
    for i in range(len(net.blocks)):
        x = net.run_block(i, x, pos_embed)
    outputs: Tensor = net.head(net.fc_norm(pos_embed.of_images(net.norm(x), net.pool)))
    return outputs


def packed_images(net: Any, images: Sequence[Tensor]) -> PackedBatch:
    """Return a list of ``(C, H, W)`` images of any sizes as one batch for ``net``.

    Raises:
        ValueError: The list is empty, an image has another shape or size than patches fill, or ``net`` cannot take it.

    Example:
        >>> import torch
        >>> from vitlab.models import VisionTransformer
        >>> net = VisionTransformer(img_size=32, num_classes=10, embed_dim=48, depth=1, num_heads=3)
        >>> net([torch.randn(3, 32, 32), torch.randn(3, 16, 48)]).shape
        torch.Size([2, 10])
    """
    for i, image in enumerate(images):
        if not isinstance(image, Tensor) or image.ndim != 3 or image.shape[0] != net.in_chans:
            got = tuple(image.shape) if isinstance(image, Tensor) else type(image).__name__
            raise ValueError(f"a list holds ({net.in_chans}, height, width) images, got {got} as number {i}")
    if not images:
        raise ValueError("a list of images must hold at least one")
    (patch, across), in_chans = pair("patch_size", net.patch_size), net.in_chans
    check_packed(net, in_chans, (patch, across))
    if patch != across:
        raise ValueError(f"a list of images is cut into square patches, but the network has {patch} x {across}")
    for image in images:
        net.tokenizer.grid_of(image.shape[1:])  # names the nearest size that patches fill
    return PackedBatch.of(images, patch)


def packed_positions(net: Any, images: PackedBatch) -> PackedPosEmbed:
    """Return the position embedding of ``net`` for packed images.

    Raises:
        ValueError: The network cannot take packed images, see :func:`check_packed`.

    Example:
        >>> import torch
        >>> from vitlab.models import VisionTransformer
        >>> net = VisionTransformer(img_size=32, embed_dim=48, depth=1, num_heads=3)
        >>> packed_positions(net, PackedBatch.of([torch.randn(3, 32, 16)], patch=16)).owner
        tensor([[0, 0, 0]])
    """
    check_packed(net, images.patches.shape[1], tuple(images.patches.shape[2:]))
    return PackedPosEmbed(net.pos_embed, images.grids, net.num_prefix_tokens, device=images.device)


def check_packed(net: Any, in_chans: int, patch: tuple[int, ...]) -> None:
    """Raise a ValueError if ``net`` cannot take packed images with patches of ``in_chans`` channels and this size.

    A network with parts of the user's is tried once, on three small images, two of which share a row.

    Example:
        >>> from vitlab.models import VisionTransformer
        >>> check_packed(VisionTransformer(embed_dim=48, depth=1, num_heads=3), in_chans=3, patch=(16, 16))
    """
    what, tokenizer = "images of their own sizes", net.tokenizer
    if not isinstance(tokenizer, PatchEmbed) or goes_around(type(tokenizer), PatchEmbed, "forward"):
        name = type(tokenizer).__name__
        raise ValueError(f"{what} are cut into patches, but {name} makes its tokens otherwise: use tokenizer=patch")
    if tokenizer.flexi_patch:
        raise ValueError(f"{what} are cut into patches of one size, but `flexi_patch` draws others: leave it out")
    if (in_chans, patch) != (net.in_chans, tokenizer.patch_size):
        sizes = [f"{c} x {h} x {w}" for c, (h, w) in ((in_chans, patch), (net.in_chans, tokenizer.patch_size))]
        raise ValueError(f"{what} are cut into patches of {sizes[0]}, but the network takes {sizes[1]}")
    if any(isinstance(module, SqueezeExcite) for module in net.modules()):
        raise ValueError(f"{what} share rows, but `se_reduction` averages over rows: leave it out")
    if net.training and any(isinstance(module, PerToken) for module in net.modules()):
        raise ValueError(f"{what} share rows, whose statistics `norm_layer` would mix: choose layernorm or rmsnorm")
    if drops_rows(net):
        raise ValueError(f"{what} share rows, but `drop_path_subset` drops rows: leave it out")
    if net not in _compared and patch[0] == patch[1] and (own := own_parts(net)):
        _compared.add(net)  # before it is tried, which comes here again
        if _mixes_images(net):
            _compared.discard(net)
            names = ", ".join(dict.fromkeys(type(part).__name__ for part in own))
            way_out = "act on each token alone, or add `pos_embed.bias(layer)` to the logits of attention"
            raise ValueError(f"{what} share rows, but parts of your own mix those of a row ({names}): {way_out}")


def _mixes_images(net: Any) -> bool:
    """Return whether an image has other outputs in a row that it shares; False where a part fails or draws numbers.

    The weights are random, so that nothing hides behind zeros. Those of the network and global generators stay.
    """
    rng, side, long = torch.Generator().manual_seed(0), net.patch_size, net.num_prefix_tokens + 4
    if (weight := next(net.parameters())).is_meta:
        return False
    kind: dict[str, Any] = {"dtype": torch.promote_types(weight.dtype, torch.float32), "device": weight.device}
    sizes = [(side, side * long), (side, side * 2), (side * 2, side)]  # the last two are as long as the first
    images = [torch.randn(net.in_chans, *size, generator=rng).to(**kind) for size in sizes]
    fork = torch.random.fork_rng([weight.device] if weight.is_cuda else [])
    with torch.no_grad(), modes_kept(net), fork, torch.autocast(weight.device.type, enabled=False):
        net = spare(net, [*net.parameters(), *net.buffers()]).eval()
        _compared.add(net)
        try:
            state = _drawn_state(net, rng, kind)
            batches = [*[image[None] for image in images], *[image[None] for image in images]]
            alone, again = torch.cat([functional_call(net, state, (x,), tie_weights=False) for x in batches]).chunk(2)
            packed = functional_call(net, state, (PackedBatch.of(images, side),), tie_weights=False)
        except Exception:  # foreign code can raise anything, and does so again where it matters
            return False
        return torch.equal(alone, again) and bool((packed - alone).abs().max() > 5e-3 * alone.abs().max())


def _drawn_state(net: Any, rng: torch.Generator, kind: dict[str, Any]) -> dict[str, Tensor]:
    """Return random parameters, and copies of the buffers, as a pass may change them."""
    state = {name: each.clone().to(**kind) if each.is_floating_point() else each for name, each in net.named_buffers()}
    for name, each in net.named_parameters():
        drawn = torch.randn(each.shape, generator=rng).to(**kind)
        state[name] = drawn * each[0].numel() ** -0.5 if each.ndim > 1 else each.to(**kind) + drawn / 2
    return state


def drops_rows(net: Any) -> bool:
    """Return whether blocks leave out a part of the batch in training.

    Example:
        >>> from vitlab.models import VisionTransformer
        >>> drops_rows(VisionTransformer(embed_dim=48, depth=2, num_heads=3, drop_path_rate=0.1, drop_path_subset=True))
        True
    """
    return any(isinstance(module, DropPath) and module.subset and module.rate for module in net.blocks.modules())
