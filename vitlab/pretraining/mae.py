"""Masked autoencoder: pre-training without labels by predicting hidden patches."""

import math
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn
from torchmetrics import MetricCollection

from vitlab.class_paths import choice_text, name_and_args
from vitlab.data.base import ImageData
from vitlab.errors import UsageError
from vitlab.layers.block import Block
from vitlab.layers.linear import Linear
from vitlab.layers.pos_embed.added import SinCos2d
from vitlab.models import build
from vitlab.models.old_names import upgrade
from vitlab.ranges import check_arguments
from vitlab.tasks.arguments import TaskArgs
from vitlab.tasks.base import Task
from vitlab.tasks.meter import Meter, in_32_bits
from vitlab.tokenizers.patch import PatchEmbed, cut_patches

SQUARES = "`mask_block` above 1 needs a data set of vitlab, which numbers the images of a batch: leave it out"
GRID = "changes the grid, on which `model: {}` hides tokens"


class MAE(Task):
    """Train a Vision Transformer to predict hidden patches: masked autoencoder, He et al. 2022 (arXiv:2111.06377).

    The network sees the visible tokens; a light decoder fills the other places with a trained vector, adds fixed sines
    and cosines, and predicts the hidden pixels. The loss is their mean squared error. Labels are not used. Which tokens
    are hidden depends only on (seed, epoch, image), in evaluation only on the image. Data that are not of vitlab do not
    number their images: there it depends on the step, in evaluation on the place in the batch, so that the loss of
    another batch size is another one.

    Tokens of overlapping windows, as in T2T, contain pixels of their neighbors. For them the pixels are hidden instead:
    a trained patch covers them before the first split, and the network sees all tokens, as in SimMIM, Xie et al. 2022
    (arXiv:2111.09886). Steps take longer than with MAE, because no token is left out, and the network is trained on
    covered images, which it never sees later. SimMIM itself uses the mean absolute error and a linear decoder.

    Args:
        mask_ratio: Share of hidden tokens, above 0 and below 1.
        mask_block: Side of the squares that are hidden together, in tokens; 1 hides single tokens.
        hide: Leave out tokens, or cover pixels; null leaves out tokens of tokenizer patch, and covers pixels otherwise.
        decoder_dim: Token width of the decoder.
        decoder_depth: Number of blocks of the decoder; with 0 it has only its linear layers.
        decoder_heads: Attention heads of the decoder; divides decoder_dim.
        norm_pix: Whether each target patch is normalized to mean 0 and variance 1.
        **task: Passed to :class:`Task`.

    Example:
        >>> net = {"img_size": 8, "in_chans": 1, "patch_size": 2, "embed_dim": 16, "depth": 1, "num_heads": 2}
        >>> task = MAE(decoder_dim=8, decoder_depth=1, decoder_heads=2, **net)
        >>> task.pixel_loss(torch.randn(2, 1, 8, 8), torch.arange(16).expand(2, -1)).shape, task.num_kept
        (torch.Size([]), 4)
    """

    takes_native = False
    reads_labels = False
    forward_passes = None  # a share of the network, which sees few tokens, and a decoder

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
        check_arguments(mask_block=mask_block, decoder_dim=decoder_dim)
        check_arguments(decoder_depth=decoder_depth, decoder_heads=decoder_heads)
        if decoder_dim % 4 or decoder_dim % (decoder_heads if decoder_depth else 1):  # its parts know other names
            rule = "must be divisible by 4, for its positions, and by `decoder_heads`"
            raise ValueError(f"`decoder_dim` {rule}, got {decoder_dim} and {decoder_heads} heads")
        refuse_supervised("MAE", task)
        _refuse_pooling(task)
        super().__init__(num_outputs=0, measured=MetricCollection({}), **task)
        net, n = self.net, self.net.grid_size[0] * self.net.grid_size[1]
        net.pools_nothing = True  # type: ignore[assignment]  # so that weights that pool otherwise fit, too
        self.num_kept = int(n * (1 - mask_ratio) + 1e-6)
        if not 0 < self.num_kept < n:
            raise ValueError(f"`mask_ratio` must hide some of {n} tokens and keep some, got {mask_ratio}")
        if net.img_size[0] % net.grid_size[0] or net.img_size[1] % net.grid_size[1]:
            raise ValueError(f"`model: MAE`: the grid of tokens {net.grid_size} must divide `img_size`, {net.img_size}")
        patches = isinstance(net.tokenizer, PatchEmbed)
        self.leaves_out = patches if hide is None else hide == "tokens"
        if self.leaves_out and not patches:
            raise ValueError("`hide: tokens` is for patches: tokens of overlapping windows show pixels of hidden ones")
        patch = (net.in_chans, *(side // cells for side, cells in zip(net.img_size, net.grid_size, strict=True)))
        if norm_pix and math.prod(patch) == 1:
            raise ValueError("`norm_pix` needs patches of several values, and one value has no spread: set it to false")
        if self.leaves_out:  # refuse methods that cannot leave out tokens now
            net.positions(torch.empty(1, net.in_chans, *net.img_size), torch.zeros(1, 1, dtype=torch.long))
        self.cover = None if self.leaves_out else nn.Parameter(torch.zeros(patch))  # 0: the mean after normalization
        self.decoder = Decoder(net, math.prod(patch), decoder_dim, decoder_depth, decoder_heads, self.leaves_out)

    def check_training(self, trainer: Any, data: Any) -> None:
        """Refuse squares of hidden tokens with data that do not number their images."""
        if self.hparams["mask_block"] > 1 and not isinstance(data, ImageData):
            raise UsageError(SQUARES)

    def check_augmentation(self, data: Any) -> None:
        """Refuse mixed and erased images, whose pixels it would learn to predict."""
        if (mix := getattr(data, "mix", None)) and (mix.mixing or mix.erasing):
            flags = "`data.mixup`, `data.cutmix` and `data.random_erasing`"
            raise ValueError(f"{flags} change the pixels that `model: MAE` predicts: set them to 0")

    def check_images(self, data: Any) -> None:
        """Refuse images whose size grows, and with it the grid, on which tokens are hidden."""
        sizes = getattr(getattr(data, "pipeline", None), "sizes", None)
        if sizes is not None and sizes.steps[1:]:
            raise ValueError(f"`data.img_size_schedule` {GRID.format('MAE')}: leave it out")

    def step_loss(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean squared error of the hidden pixels of a training batch."""
        return self.pixel_loss(batch[0], self._order(batch[0])), {}

    def pixel_loss(self, images: Tensor, order: Tensor) -> Tensor:
        """Return the loss of ``(B, C, H, W)`` images; ``order``, ``(B, N)``, lists visible tokens first."""
        hidden, predicted = order[:, self.num_kept :], in_32_bits(self._predict(images, order))  # and the pixels
        rows = torch.arange(len(images), device=images.device)[:, None]
        patches = cut_patches(images, self.net.grid_size)[rows, hidden]  # (B, N - K, C, p, p)
        targets = patches.flatten(2).to(predicted.dtype)
        if self.hparams["norm_pix"]:
            mean, std = _mean_and_std(targets)
            targets = (targets - mean) / std
        return (predicted[rows, hidden] - targets).square().mean()

    @torch.no_grad()
    def fill(self, images: Tensor, order: Tensor, seen: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Replace hidden patches of images by predictions; also return which tokens were hidden, ``(B, N)`` bool.

        With ``norm_pix`` each hidden patch keeps its own mean and standard deviation, which are not predicted.

        Args:
            images: ``(B, C, H, W)``.
            order: ``(B, N)`` token indices of each image, visible ones first.
            seen: ``(B, C, H, W)`` input of the network; None is ``images``.
        """
        grid, patches = self.net.grid_size, cut_patches(images, self.net.grid_size)
        predicted = self._predict(images if seen is None else seen, order)
        if self.hparams["norm_pix"]:
            mean, std = _mean_and_std(patches.flatten(2))
            predicted = predicted * std + mean
        is_hidden = self._is_hidden(order)
        patches = torch.where(is_hidden[..., None, None, None], predicted.view_as(patches), patches)
        return joined(patches, grid), is_hidden

    def _is_hidden(self, order: Tensor) -> Tensor:
        return torch.zeros_like(order, dtype=torch.bool).scatter(1, order[:, self.num_kept :], True)

    def _predict(self, images: Tensor, order: Tensor) -> Tensor:
        """Predict all patches, ``(B, N, C p p)``, from the visible tokens."""
        if self.cover is None:
            predicted: Tensor = self.decoder(self.net.forward_features(images, keep=order[:, : self.num_kept]), order)
            return predicted
        seen = covered(images, self._is_hidden(order), self.cover, self.net.grid_size)
        predicted = self.decoder(self.net.forward_features(seen))
        return predicted

    def _evaluate(self, batch: tuple[Tensor, Tensor], meter: Meter) -> None:  # type: ignore[override]
        images = batch[0]
        meter.update(images, images, self.pixel_loss(images, self._order(images)))

    def _order(self, images: Tensor) -> Tensor:
        """Return the token indices of each image in random order, ``(B, N)``, on the device of ``images``."""
        data, grid = getattr(self.trainer, "datamodule", None), self.net.grid_size
        if (step := getattr(data, "step", None)) is not None and len(step.indices) == len(images):
            order = torch.from_numpy(step.shuffled(grid, self.hparams["mask_block"]))
        elif self.hparams["mask_block"] > 1:
            raise UsageError(SQUARES)
        else:  # in training seeded by the step, in evaluation by the place in the batch
            generator = None if self.trainer.training else torch.Generator().manual_seed(0)
            order = torch.rand(len(images), grid[0] * grid[1], generator=generator).argsort(dim=1)
        cuda = images.device.type == "cuda"  # pinned memory makes the copy asynchronous
        return order.pin_memory().to(images.device, non_blocking=True) if cuda else order.to(images.device)


class Decoder(nn.Module):
    """Predict the pixels of each patch from tokens: a linear layer, fixed positions, blocks, a linear layer.

    With width 512, 8 blocks and 16 heads of He et al. 2022 (arXiv:2111.06377) it has 26.0 M parameters for a ViT-B/16.

    Args:
        net: The encoder, a :class:`vitlab.models.vit.VisionTransformer`.
        values: Number of values in a patch, C p p.
        dim: Token width.
        depth: Number of blocks.
        num_heads: Attention heads of each block.
        fills: Whether the input has only visible tokens, so that a trained vector fills the places of the others.
    """

    def __init__(self, net: Any, values: int, dim: int, depth: int, num_heads: int, fills: bool) -> None:
        super().__init__()
        self.num_prefix_tokens = net.num_prefix_tokens
        self.embed = Linear(net.num_features, dim)
        self.mask_token = nn.Parameter(build.init_token(1, dim)) if fills else None
        self.pos_embed = SinCos2d(net.grid_size, dim, style="mae")
        self.blocks = nn.ModuleList(Block(dim, num_heads) for _ in range(depth))
        self.norm, self.pred = nn.LayerNorm(dim, eps=1e-6), Linear(dim, values)
        self.apply(lambda module: build.init_weights(module, net.init_std))

    def forward(self, x: Tensor, order: Tensor | None = None) -> Tensor:
        """Map the tokens, ``(B, P + K, D)`` for the first K in ``order``, to all patches, ``(B, N, C p p)``."""
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
    """Replace the hidden patches, ``(B, N)`` bool, of ``(B, C, H, W)`` images by ``cover``, ``(C, p, p)``."""
    patches = cut_patches(images, grid_size)  # (B, N, C, p, p)
    return joined(torch.where(is_hidden[..., None, None, None], cover.to(images.dtype), patches), grid_size)


def joined(patches: Tensor, grid_size: tuple[int, int]) -> Tensor:
    """Join ``(B, N, C, p, p)`` patches to ``(B, C, H, W)`` images."""
    return patches.unflatten(1, grid_size).permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)


def _mean_and_std(values: Tensor) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(values, dim=2, keepdim=True)
    return mean, (variance + 1e-6).sqrt()


def refuse_supervised(name: str, task: TaskArgs) -> None:
    """Refuse arguments that have no meaning for a task without labels."""
    parts = upgrade(task)
    task = {**task, **name_and_args("tokenizer", parts.get("tokenizer", "patch"))[1]}  # type: ignore[typeddict-item]
    for key, why in (("flexi_patch", GRID.format(name)), ("metrics", f"need outputs, and `model: {name}` has none")):
        if task.get(key):
            raise ValueError(f"`{key}` {why}: leave it out")


def _refuse_pooling(task: TaskArgs) -> None:
    """Refuse layers of the pooling, which MAE never calls."""
    if task.get("fc_norm"):
        where = "moves the last normalization behind the pooling, and `model: MAE` pools nothing"
        raise ValueError(f"`fc_norm` {where}: leave it out")
    if (pool := task.get("global_pool", "token")) not in ("token", "avg", "max"):
        layer = f"the layer of `global_pool: {choice_text(pool)}`"
        raise ValueError(f"`model: MAE` does not train {layer}: choose token, avg or max")
