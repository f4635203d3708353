"""The Vision Transformer: image -> tokens -> + position -> blocks -> head."""

from collections.abc import Sequence
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitlab.layers.block import ActName, Block
from vitlab.layers.norm import NormName, build_norm
from vitlab.layers.pool import AttentionPool
from vitlab.layers.pos_embed import PosEmbed, PosEmbedJoin, PosEmbedName, build_pos_embed
from vitlab.layers.pos_embed.conv import ConvPosEmbed
from vitlab.models.sizes import SIZES
from vitlab.models.start import init_token, init_weights, own_numbers
from vitlab.tokenizers.build import TokenizerName, build_tokenizer
from vitlab.tokenizers.token_layers import T2TAttn

__all__ = ["SIZES", "VisionTransformer"]

PoolName = Literal["token", "avg", "max", "map"]


class VisionTransformer(nn.Module):
    """Vision Transformer, Dosovitskiy et al. 2021 (arXiv:2010.11929).

    With ``tokenizer="t2t"`` it is the Tokens-to-Token ViT of Yuan et al. 2021 (arXiv:2101.11986).

    Args:
        img_size: Side of the square images, or their height and width, in pixels.
        in_chans: Number of image channels C.
        num_classes: Number of outputs K; 0 returns the pooled features.
        tokenizer: How images become tokens: square patches, the splits of T2T-ViT, or overlapping convolutions.
        patch_size: Side of a patch, in pixels; divides height and width. For tokenizer patch.
        t2t_attn: Which token layers stand between the splits. For tokenizer t2t.
        t2t_kernels: Window side of each split or convolution, the first in pixels. For tokenizers t2t and conv.
        t2t_strides: Step of each split or convolution; None is half the window, rounded up. For t2t and conv.
        t2t_dim: Token width between the splits or convolutions. For tokenizers t2t and conv.
        embed_dim: Token width D of the backbone.
        depth: Number of blocks.
        num_heads: Attention heads A of every block; divides embed_dim.
        mlp_ratio: Hidden width of every MLP, in units of embed_dim.
        qkv_bias: Whether the query, key and value projections have a bias.
        qk_scale: Factor on the attention logits; None is (embed_dim / num_heads) ** -0.5.
        qk_norm: Whether to normalise queries and keys per head.
        act_layer: Activation of every MLP; gelu is the exact one.
        norm_layer: Kind of normalisation in the backbone.
        norm_eps: Epsilon of every normalisation, the tokenizer's included.
        pos_embed: How patch tokens come to know where they are.
        pos_embed_trainable: Whether the position embedding is trained; None is the method's own choice.
        pos_embed_join: Where positions act: once, or in each block with own or shared values; None: the method's own.
        rope_theta: Base of the rotary frequencies, above 1; None is the published value. For rope2d and rope_mixed.
        class_token: Whether to prepend a class token.
        reg_tokens: Number of register tokens, Darcet et al. 2024 (arXiv:2309.16588).
        global_pool: What the head reads: the class token, or the patch tokens' mean, maximum or attention pooling.
        head_hidden: Width of a hidden tanh layer in the head, as in ViT's pre-training; 0 is a linear head.
        init_std: Spread of the initial linear and convolution weights; narrow networks in short runs like 0.1.
        layer_scale: Initial value of a trained factor on every residual branch; None leaves it out.
        dropout: Share of values dropped after the positions and after each linear layer but qkv, 0 to 1.
        drop_path_rate: Share of samples for which a branch of the last block is dropped; grows linearly from 0.
        drop_path_subset: Whether a fixed number of samples is dropped and their branches are not computed: faster.
        grad_checkpoint: Whether training recomputes each block in the backward pass: less memory, more time.
    """

    def __init__(
        self,
        img_size: int | Sequence[int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        tokenizer: TokenizerName = "patch",
        patch_size: int = 16,
        t2t_attn: T2TAttn = "performer",
        t2t_kernels: Sequence[int] = (7, 3, 3),
        t2t_strides: Sequence[int] | None = None,
        t2t_dim: int = 64,
        embed_dim: int = 384,
        depth: int = 12,
        num_heads: int = 6,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        qk_scale: float | None = None,
        qk_norm: bool = False,
        act_layer: ActName = "gelu",
        norm_layer: NormName = "layernorm",
        norm_eps: float = 1e-6,
        pos_embed: PosEmbedName = "learned",
        pos_embed_trainable: bool | None = None,
        pos_embed_join: PosEmbedJoin | None = None,
        rope_theta: float | None = None,
        class_token: bool = True,
        reg_tokens: int = 0,
        global_pool: PoolName = "token",
        head_hidden: int = 0,
        init_std: float = 0.02,
        layer_scale: float | None = None,
        dropout: float = 0.0,
        drop_path_rate: float = 0.0,
        drop_path_subset: bool = False,
        grad_checkpoint: bool = False,
    ) -> None:
        super().__init__()
        _check_at_least(1, in_chans=in_chans, t2t_dim=t2t_dim, embed_dim=embed_dim, depth=depth)
        _check_at_least(0, num_classes=num_classes, reg_tokens=reg_tokens, head_hidden=head_hidden)
        _check_rates(dropout=dropout, drop_path_rate=drop_path_rate)
        _check_pool(global_pool, class_token)
        if init_std <= 0:
            raise ValueError(f"`init_std` must be above 0, got {init_std}")
        self.img_size, self.in_chans = _height_width(img_size), in_chans
        self.num_prefix_tokens = int(class_token) + reg_tokens
        self.global_pool = global_pool
        self.grad_checkpoint = grad_checkpoint
        part = partial(own_numbers, int(torch.randint(2**62, (), device="cpu")))
        init = partial(init_weights, std=init_std)
        attn, norm = (num_heads, mlp_ratio, qkv_bias, qk_norm, qk_scale), (act_layer, norm_layer, norm_eps)
        with part("tokenizer"):
            self.tokenizer = build_tokenizer(
                tokenizer,
                self.img_size,
                in_chans,
                embed_dim,
                patch_size=patch_size,
                t2t_attn=t2t_attn,
                t2t_kernels=t2t_kernels,
                t2t_strides=t2t_strides,
                t2t_dim=t2t_dim,
                norm_eps=norm_eps,
            ).apply(init)
        self.grid_size = self.tokenizer.grid_size
        with part("cls_token"):
            self.cls_token = nn.Parameter(init_token(1, embed_dim)) if class_token else None
        with part("reg_token"):
            self.reg_token = nn.Parameter(init_token(reg_tokens, embed_dim)) if reg_tokens else None
        with part("pos_embed"):
            self.pos_embed = build_pos_embed(
                pos_embed,
                self.grid_size,
                embed_dim,
                num_heads,
                depth,
                self.num_prefix_tokens,
                trainable=pos_embed_trainable,
                join=pos_embed_join,
                theta=rope_theta,
            )
        self.blocks = nn.ModuleList()
        for i in range(depth):
            rate = drop_path_rate * i / max(1, depth - 1)
            with part(f"blocks.{i}"):
                self.blocks.append(
                    Block(embed_dim, *attn, *norm, layer_scale, dropout, rate, drop_path_subset).apply(init)
                )
        self.norm = build_norm(norm_layer, embed_dim, norm_eps)
        with part("attn_pool"):
            pool = AttentionPool(embed_dim, num_heads, mlp_ratio, *norm).apply(init) if global_pool == "map" else None
        self.attn_pool = pool
        with part("head"):
            self.head = _build_head(embed_dim, head_hidden, num_classes).apply(init)
        self.dropout = nn.Dropout(dropout)

    def forward(self, images: Tensor) -> Tensor:
        """Map ``(B, C, H, W)`` images to ``(B, K)`` outputs; the last block is spared tokens that no one reads."""
        return self.forward_head(self.forward_features(images, self.reads_class_token_only()))

    def forward_features(self, images: Tensor, class_token_only: bool = False) -> Tensor:
        """Map ``(B, C, H, W)`` images to ``(B, P + N, D)`` normalised tokens, prefix tokens first, or to the first."""
        if images.shape[1:] != (self.in_chans, *self.img_size):
            expected = (self.in_chans, *self.img_size)
            raise ValueError(f"images must be (B, {', '.join(map(str, expected))}), got {tuple(images.shape)}")
        x = self.tokenizer(images)  # (B, N, D)
        x = self.pos_embed(x)
        B = x.shape[0]  # not len(x), which would fix the batch size of an exported graph
        prefix = [token.expand(B, -1, -1) for token in (self.cls_token, self.reg_token) if token is not None]
        x = self.dropout(torch.cat([*prefix, x], dim=1))  # (B, P + N, D)
        for i, block in enumerate(self.blocks):
            only_first = class_token_only and i == len(self.blocks) - 1
            if self.grad_checkpoint and torch.is_grad_enabled():
                x = checkpoint(block, x, self.pos_embed, i, only_first, use_reentrant=False)
            else:
                x = block(x, self.pos_embed, i, only_first)
        return self.norm(x)

    def reads_class_token_only(self) -> bool:
        """Return whether the outputs depend on the class token alone, as the last block leaves it."""
        leave = type(self.pos_embed).leave  # a convolution after the last block stays, so that it has gradients
        is_early = isinstance(self.pos_embed, ConvPosEmbed) and len(self.pos_embed.convs) < len(self.blocks)
        return self.global_pool == "token" and (is_early or leave is PosEmbed.leave)

    def forward_head(self, x: Tensor) -> Tensor:
        """Map ``(B, P + N, D)`` tokens to ``(B, K)`` outputs."""
        return self.head(self.pool(x))

    def pool(self, x: Tensor) -> Tensor:
        """Map ``(B, P + N, D)`` tokens to ``(B, D)``; all but the class token's way read patch tokens only."""
        patches = x[:, self.num_prefix_tokens :]  # (B, N, D)
        match self.global_pool:
            case "token":
                return x[:, 0]
            case "avg":
                return patches.mean(dim=1)
            case "max":
                return patches.amax(dim=1)
        assert self.attn_pool is not None  # map is what is left
        return self.attn_pool(patches)

    def stages(self) -> list[list[nn.Parameter]]:
        """Return the parameters from input to output: the embedding, each block, the head."""
        prefix = [token for token in (self.cls_token, self.reg_token) if token is not None]
        pool = [] if self.attn_pool is None else list(self.attn_pool.parameters())
        embedding = [*self.tokenizer.parameters(), *prefix, *self.pos_embed.parameters()]
        head = [*self.norm.parameters(), *pool, *self.head.parameters()]
        return [embedding, *(list(block.parameters()) for block in self.blocks), head]


def _build_head(embed_dim: int, head_hidden: int, num_classes: int) -> nn.Module:
    if not num_classes:
        return nn.Identity()
    if not head_hidden:
        return nn.Linear(embed_dim, num_classes)
    return nn.Sequential(nn.Linear(embed_dim, head_hidden), nn.Tanh(), nn.Linear(head_hidden, num_classes))


def _height_width(img_size: int | Sequence[int]) -> tuple[int, int]:
    sides = (img_size, img_size) if isinstance(img_size, int) else tuple(img_size)
    if len(sides) != 2 or min(sides) < 1:
        raise ValueError(f"`img_size` must be one side or [height, width], in pixels, got {img_size}")
    return sides


def _check_at_least(least: int, **values: int) -> None:
    for name, value in values.items():
        if value < least:
            raise ValueError(f"`{name}` must be at least {least}, got {value}")


def _check_rates(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ValueError(f"`{name}` must be at least 0 and below 1, got {value}")


def _check_pool(global_pool: str, class_token: bool) -> None:
    if global_pool not in get_args(PoolName):
        raise ValueError(f"`global_pool` must be one of {', '.join(get_args(PoolName))}, got {global_pool!r}")
    if global_pool == "token" and not class_token:
        raise ValueError("`global_pool='token'` needs `class_token=True`; without one use 'avg', 'max' or 'map'")
