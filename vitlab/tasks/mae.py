"""Pre-training without labels: images with most of their parts hidden, and the network that fills them in."""

import math
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn
from torchmetrics import MetricCollection

from vitlab.layers.block import Block
from vitlab.layers.pos_embed.sincos import SinCos2d
from vitlab.models import start
from vitlab.tasks.arguments import TaskArgs
from vitlab.tasks.base import Task
from vitlab.tasks.meter import Meter
from vitlab.tokenizers.patch import PatchEmbed, cut_patches


class MAE(Task):
    """Train a Vision Transformer to fill in hidden parts of images: masked autoencoder, He et al. 2022.

    arXiv:2111.06377. The network sees the tokens that are not hidden; a light decoder puts a trained vector in the
    place of each other one, adds fixed sines and cosines, and predicts the hidden pixels; the loss is their mean
    squared error. Labels are not looked at. Which tokens are hidden depends on (seed, epoch, image) alone, in
    evaluation on the image alone.

    Tokens of overlapping windows, as T2T's, tell of their neighbors' pixels. There the pixels themselves are hidden,
    before the first split, under a trained patch, and the network sees all tokens, as in SimMIM, Xie et al. 2022
    (arXiv:2111.09886): a step takes longer by the tokens that MAE leaves out, and the network learns with patches in
    its input that are in no image. SimMIM's own loss is the mean absolute error of a linear decoder.

    Args:
        mask_ratio: Share of the tokens that are hidden, above 0 and below 1.
        mask_block: Side of the squares that are hidden together, in tokens; 1 hides each by itself.
        hide: Leave tokens out, or cover pixels; null leaves out tokens where they are patches, and covers pixels else.
        decoder_dim: Token width of the decoder.
        decoder_depth: Number of the decoder's blocks; 0 leaves its linear layers.
        decoder_heads: Attention heads of each; divides decoder_dim.
        norm_pix: Whether each patch that is to be predicted has mean 0 and variance 1.
        **task: Passed to :class:`Task`.

    Example:
        >>> net = {"img_size": 8, "in_chans": 1, "patch_size": 2, "embed_dim": 16, "depth": 1, "num_heads": 2}
        >>> task = MAE(decoder_dim=8, decoder_depth=1, decoder_heads=2, **net)
        >>> task.pixel_loss(torch.randn(2, 1, 8, 8), torch.arange(16).expand(2, -1)).shape, task.num_kept
        (torch.Size([]), 4)
    """

    monitor: tuple[Literal["min", "max"], str] = ("min", "val/loss")

    def __init__(
        self,
        mask_ratio: float = 0.75,
        mask_block: int = 1,
        hide: Literal["tokens", "pixels"] | None = None,
        decoder_dim: int = 512,
        decoder_depth: int = 8,
        decoder_heads: int = 16,
        norm_pix: bool = True,
        **task: Unpack[TaskArgs],
    ) -> None:
        start.check_at_least(1, mask_block=mask_block, decoder_dim=decoder_dim, decoder_heads=decoder_heads)
        start.check_at_least(0, decoder_depth=decoder_depth)
        refuse_supervised("MAE", task)
        super().__init__(num_outputs=0, measured=MetricCollection({}), **task)
        net, n = self.net, self.net.grid_size[0] * self.net.grid_size[1]
        self.num_kept = int(n * (1 - mask_ratio) + 1e-6) if 0 < mask_ratio < 1 else 0
        if not 0 < self.num_kept < n:
            raise ValueError(f"`mask_ratio` must leave some of {n} tokens and hide some, got {mask_ratio}")
        if net.img_size[0] % net.grid_size[0] or net.img_size[1] % net.grid_size[1]:
            raise ValueError(f"`model: MAE` needs images {net.img_size} that the tokens' grid {net.grid_size} divides")
        patches = isinstance(net.tokenizer, PatchEmbed)
        self.leaves_out = patches if hide is None else hide == "tokens"
        if self.leaves_out and not patches:
            raise ValueError("`hide: tokens` is for patches: tokens of overlapping windows show what others hide")
        patch = (net.in_chans, *(side // cells for side, cells in zip(net.img_size, net.grid_size, strict=True)))
        if self.leaves_out:  # what cannot be is refused now
            net.positions(torch.empty(1, net.in_chans, *net.img_size), torch.zeros(1, 1, dtype=torch.long))
        self.cover = None if self.leaves_out else nn.Parameter(torch.zeros(patch))  # the mean of normalized images
        self.decoder = Decoder(net, math.prod(patch), decoder_dim, decoder_depth, decoder_heads, self.leaves_out)

    def step_loss(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean squared error of the hidden pixels of a training batch."""
        return self.pixel_loss(batch[0], self._order(batch[0])), {}

    def pixel_loss(self, images: Tensor, order: Tensor) -> Tensor:
        """Return the loss of ``(B, C, H, W)`` images, of whose ``(B, N)`` tokens in ``order`` the first are seen."""
        hidden, predicted = order[:, self.num_kept :], self._predicted(images, order)
        rows = torch.arange(len(images), device=images.device)[:, None]
        targets = (
            cut_patches(images, self.net.grid_size)[rows, hidden].flatten(2).to(predicted.dtype)
        )  # (B, N - K, Cpp)
        if self.hparams["norm_pix"]:
            mean, spread = _mean_and_spread(targets)
            targets = (targets - mean) / spread
        return (predicted[rows, hidden] - targets).square().mean()

    @torch.no_grad()
    def fill(self, images: Tensor, order: Tensor, seen: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return ``(B, C, H, W)`` images with hidden patches as predicted, and which of the ``(B, N)`` were hidden.

        Where the task normalizes patches, each hidden one keeps its own mean and spread, which are not predicted.

        Args:
            images: ``(B, C, H, W)``.
            order: ``(B, N)`` tokens of each, of which the first are seen.
            seen: ``(B, C, H, W)`` that the network sees instead; None for the images.
        """
        grid, patches = self.net.grid_size, cut_patches(images, self.net.grid_size)
        found = self._predicted(images if seen is None else seen, order)
        if self.hparams["norm_pix"]:
            mean, spread = _mean_and_spread(patches.flatten(2))
            found = found * spread + mean
        is_hidden = self._is_hidden(order)
        return joined(torch.where(is_hidden[..., None, None, None], found.view_as(patches), patches), grid), is_hidden

    def _is_hidden(self, order: Tensor) -> Tensor:
        return torch.zeros_like(order, dtype=torch.bool).scatter(1, order[:, self.num_kept :], True)

    def _predicted(self, images: Tensor, order: Tensor) -> Tensor:
        """Return the ``(B, N, C p p)`` that the decoder makes of the tokens that are seen."""
        if self.cover is None:
            found: Tensor = self.decoder(self.net.forward_features(images, keep=order[:, : self.num_kept]), order)
            return found
        seen = covered(images, self._is_hidden(order), self.cover, self.net.grid_size)
        found = self.decoder(self.net.forward_features(seen))
        return found

    def optimizer_groups(self, factor: float = 1.0) -> list[dict[str, Any]]:
        """Return the groups of the network, and those of the decoder, which has the peak rate."""
        return [*super().optimizer_groups(factor), *beside_network(self, ("net.",), factor)]

    def _evaluate(self, batch: tuple[Tensor, Tensor], meter: Meter) -> None:  # type: ignore[override]
        images = batch[0]
        meter.update(images, images, self.pixel_loss(images, self._order(images)))

    def _order(self, images: Tensor) -> Tensor:
        """Return the ``(B, N)`` tokens of a batch in a random order, on its device."""
        data, grid = getattr(self.trainer, "datamodule", None), self.net.grid_size
        if (step := getattr(data, "step", None)) is not None and len(step.indices) == len(images):
            order = torch.from_numpy(step.shuffled(grid, self.hparams["mask_block"]))
        elif self.hparams["mask_block"] > 1:
            raise ValueError("`mask_block` above 1 needs data of vitlab, which say what images a batch has")
        else:  # the numbers of the step, or in evaluation of the place in the batch
            drawn = None if self.trainer.training else torch.Generator().manual_seed(0)
            order = torch.rand(len(images), grid[0] * grid[1], generator=drawn).argsort(dim=1)
        cuda = images.device.type == "cuda"  # whose copies wait for pageable memory
        return order.pin_memory().to(images.device, non_blocking=True) if cuda else order.to(images.device)


class Decoder(nn.Module):
    """Map tokens to the pixels of each patch: a linear layer, blocks over fixed positions, a linear layer.

    With the numbers of He et al. 2022 (arXiv:2111.06377), 512, 8 and 16, it has 26.0 M parameters behind a ViT-B/16.

    Args:
        net: The network in front, a :class:`vitlab.models.vit.VisionTransformer`.
        values: Numbers in a patch.
        dim: Token width.
        depth: Number of blocks.
        num_heads: Attention heads of each.
        fills: Whether the tokens that come in lack hidden ones, in whose place a trained vector is put.
    """

    def __init__(self, net: Any, values: int, dim: int, depth: int, num_heads: int, fills: bool) -> None:
        super().__init__()
        self.num_prefix_tokens = net.num_prefix_tokens
        self.embed = nn.Linear(net.num_features, dim)
        self.mask_token = nn.Parameter(start.init_token(1, dim)) if fills else None
        self.pos_embed = SinCos2d(net.grid_size, dim, style="mae")
        self.blocks = nn.ModuleList(Block(dim, num_heads) for _ in range(depth))
        self.norm, self.pred = nn.LayerNorm(dim, eps=1e-6), nn.Linear(dim, values)
        self.apply(lambda module: start.init_weights(module, net.init_std))

    def forward(self, x: Tensor, order: Tensor | None = None) -> Tensor:
        """Map ``(B, P + K, D)`` tokens, the first K of ``(B, N)`` in ``order``, to ``(B, N, C p p)`` of the raster."""
        prefix, x = self.embed(x).tensor_split([self.num_prefix_tokens], dim=1)
        if order is not None and self.mask_token is not None:
            missing = self.mask_token.to(x.dtype).expand(len(x), order.shape[1] - x.shape[1], -1)
            rows = torch.arange(len(x), device=x.device)[:, None]
            x = torch.cat([x, missing], dim=1)[rows, order.argsort(dim=1)]
        x = torch.cat([prefix, self.pos_embed(x)], dim=1)
        for i, block in enumerate(self.blocks):
            x = block(x, self.pos_embed, i)
        predicted: Tensor = self.pred(self.norm(x))[:, self.num_prefix_tokens :]
        return predicted if predicted.dtype.itemsize > 2 else predicted.float()


def covered(images: Tensor, is_hidden: Tensor, cover: Tensor, grid_size: tuple[int, int]) -> Tensor:
    """Return ``(B, C, H, W)`` images with ``cover``, ``(C, p, p)``, on the patches of ``(B, N)`` hidden tokens."""
    patches = cut_patches(images, grid_size)  # (B, N, C, p, p)
    return joined(torch.where(is_hidden[..., None, None, None], cover.to(images.dtype), patches), grid_size)


def joined(patches: Tensor, grid_size: tuple[int, int]) -> Tensor:
    """Return the ``(B, C, H, W)`` images of ``(B, N, C, p, p)`` patches."""
    return patches.unflatten(1, grid_size).permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)


def _mean_and_spread(values: Tensor) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(values, dim=2, keepdim=True)
    return mean, (variance + 1e-6).sqrt()


def beside_network(task: Task, networks: tuple[str, ...], factor: float) -> list[dict[str, Any]]:
    """Return the groups of what a task trains outside its networks, at the peak rate; matrices alone decay."""
    found = []
    for decays in (True, False):
        new = [p for k, p in task.named_parameters() if not k.startswith(networks) and (p.ndim == 2) == decays]
        decay = task.hparams["weight_decay"] if decays else 0.0
        found += [{"params": new, "lr": task.hparams["lr"] * factor, "weight_decay": decay}] if new else []
    return found


def refuse_supervised(name: str, task: TaskArgs) -> None:
    """Refuse arguments that a task without labels has no use for."""
    for key, why in (
        ("flexi_patch", f"changes the grid that `model: {name}` hides parts of"),
        ("metrics", f"measure outputs, and `model: {name}` has none"),
    ):
        if task.get(key):
            raise ValueError(f"`{key}` {why}: leave it out")
    if name == "MAE" and task.get("global_pool") == "map":
        raise ValueError("`global_pool: map` would be left untrained by `model: MAE`: choose token, avg or max")
