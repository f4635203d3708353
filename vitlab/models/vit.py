"""The Vision Transformer: image -> tokens -> + position -> blocks -> head."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from vitlab.layers.mlp import ActChoice, MlpName
from vitlab.layers.norm import NormChoice, build_norm
from vitlab.layers.pool import AttentionPool, PoolName
from vitlab.layers.pos_embed import PosEmbed, PosEmbedChoice, PosEmbedJoin, build_pos_embed
from vitlab.layers.recompute import checkpoint
from vitlab.layers.resample import ResizePolicy
from vitlab.models import start
from vitlab.models.features import (
    forward_intermediates,
    forward_packed,
    get_intermediate_layers,
    pool,
    positions,
    reads_class_token_only,
)
from vitlab.models.parameters import no_weight_decay, stages
from vitlab.named_kwargs import Named
from vitlab.packed_batch import Packed
from vitlab.tokenizers.build import TokenizerChoice, build_tokenizer
from vitlab.tokenizers.splits import pair
from vitlab.tokenizers.t2t import T2TArgs, T2TTokenizer
from vitlab.tokenizers.token_layers import build_token_layer


class VisionTransformer(Named, nn.Module):
    """Vision Transformer, Dosovitskiy et al. 2021 (arXiv:2010.11929).

    With ``tokenizer="t2t"`` it is the Tokens-to-Token ViT of Yuan et al. 2021 (arXiv:2101.11986).

    Args:
        img_size: Side of the square images, or their height and width, in pixels.
        in_chans: Number of image channels C.
        num_classes: Number of outputs K; 0 returns the pooled features.
        tokenizer: How images become tokens: patches, the splits of T2T-ViT, overlapping convolutions, or a class path.
        patch_size: Side of a patch, or its height and width, in pixels; divides img_size. For tokenizer patch.
        flexi_patch: Patch sides that training draws from, step by step; kernels are resized from that of patch_size.
        embed_dim: Token width D of the backbone.
        depth: Number of blocks.
        num_heads: Attention heads A of every block; divides embed_dim.
        mlp_ratio: Hidden width of every MLP, in units of embed_dim.
        qkv_bias: Whether the query, key and value projections have a bias.
        qk_scale: Factor on the attention logits; None is (embed_dim / num_heads) ** -0.5.
        qk_norm: Whether to normalize queries and keys per head.
        value_skip: Whether the attention of every block adds the values to its output, as T2T's token layers do.
        act_layer: Activation of every MLP: a name, a class of torch.nn or a class path; gelu is exact.
        mlp_layer: MLP of every block: two linear layers; swiglu, gated by act_layer (take silu); or ghost.
        norm_layer: Normalization in the backbone: a name, a class of torch.nn or a class path.
        norm_eps: Epsilon of every normalization, the tokenizer's included.
        pos_embed: Position embedding: a name, the class path of a :class:`PosEmbed`, or a list of several.
        pos_embed_trainable: Whether the position embedding is trained; None is the default of the method.
        pos_embed_join: Where positions act: once, or in each block with own or shared values; None: method's default.
        pos_embed_resize: How positions are resampled for images of another size; None is the default of the method.
        rope_theta: Base of the rotary frequencies, above 1; None is the published value. For rope2d and rope_mixed.
        class_token: Whether to prepend a class token.
        reg_tokens: Number of register tokens, Darcet et al. 2024 (arXiv:2309.16588).
        global_pool: What the head reads: the class token, or the mean, maximum or attention pool of patch tokens.
        pre_norm: Whether the tokens are normalized before the first block, as in CLIP.
        fc_norm: Whether to normalize after pooling instead of before it.
        head_hidden: Width of a hidden tanh layer in the head, as in the pre-training of ViT; 0 is a linear head.
        init_std: Std of the initial linear and convolution weights; 0.1 suits narrow networks and short runs.
        se_reduction: Reduction factor of a squeeze-excite gate after every attention; 0 leaves it out.
        ghost: Whether half of the query, key and value channels are scaled copies of the rest; with mlp_layer ghost.
        dense_blocks: Blocks per stage of a dense backbone, where a block appends channels; None is a plain backbone.
        dense_growth: Channels that each block of a dense backbone appends; between stages the width is halved.
        layer_scale: Initial value of a trained factor on every residual branch; None leaves it out.
        attn_gate: Whether the sigmoid of a linear map of the tokens gates the output of every attention.
        attn_dropout: Dropout rate of the attention weights, 0 to 1.
        dropout: Dropout rate after the position embedding and after each linear layer except qkv, 0 to 1.
        drop_path_rate: Share of samples for which a branch of the last block is dropped; grows linearly from 0.
        drop_path_subset: Whether a fixed number of samples is dropped and their branches are not computed: faster.
        grad_checkpoint: Whether training recomputes each block in the backward pass: less memory, more time.
        **t2t: Arguments of :class:`vitlab.tokenizers.t2t.T2TTokenizer`, for tokenizers t2t and conv.

    Example:
        >>> net = VisionTransformer(img_size=32, patch_size=4, num_classes=10, embed_dim=48, depth=2, num_heads=3)
        >>> net(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    forward_intermediates = forward_intermediates
    get_intermediate_layers = get_intermediate_layers
    stages = stages
    start_step = start.start_step
    _built_from = (T2TTokenizer, build_token_layer)
    no_weight_decay = no_weight_decay
    pool = pool
    positions = positions
    reads_class_token_only = reads_class_token_only
    reset_head = start.reset_head

    def __init__(
        self,
        img_size: int | Sequence[int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        tokenizer: TokenizerChoice = "patch",
        patch_size: int | Sequence[int] = 16,
        flexi_patch: Sequence[int] | None = None,
        embed_dim: int = 384,
        depth: int = 12,
        num_heads: int = 6,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        qk_scale: float | None = None,
        qk_norm: bool = False,
        value_skip: bool = False,
        act_layer: ActChoice = "gelu",
        mlp_layer: MlpName = "mlp",
        norm_layer: NormChoice = "layernorm",
        norm_eps: float = 1e-6,
        pos_embed: PosEmbedChoice = "learned",
        pos_embed_trainable: bool | None = None,
        pos_embed_join: PosEmbedJoin | None = None,
        pos_embed_resize: ResizePolicy | None = None,
        rope_theta: float | None = None,
        class_token: bool = True,
        reg_tokens: int = 0,
        global_pool: PoolName = "token",
        pre_norm: bool = False,
        fc_norm: bool = False,
        head_hidden: int = 0,
        init_std: float = 0.02,
        se_reduction: int = 0,
        ghost: bool = False,
        dense_blocks: Sequence[int] | None = None,
        dense_growth: int = 64,
        layer_scale: float | None = None,
        attn_gate: bool = False,
        attn_dropout: float = 0.0,
        dropout: float = 0.0,
        drop_path_rate: float = 0.0,
        drop_path_subset: bool = False,
        grad_checkpoint: bool = False,
        **t2t: Unpack[T2TArgs],
    ) -> None:
        super().__init__()
        start.check_at_least(1, in_chans=in_chans, embed_dim=embed_dim, depth=depth)
        start.check_at_least(0, num_classes=num_classes, reg_tokens=reg_tokens)
        start.check_at_least(0, head_hidden=head_hidden, se_reduction=se_reduction)
        start.check_rates(attn_dropout=attn_dropout, dropout=dropout, drop_path_rate=drop_path_rate)
        start.check_pool(global_pool, class_token)
        start.check_spread(init_std)
        self.img_size, self.in_chans, self.num_classes = pair("img_size", img_size), in_chans, num_classes
        self.embed_dim, self.head_hidden, self.init_std = embed_dim, head_hidden, init_std
        self.num_prefix_tokens, self.global_pool = int(class_token) + reg_tokens, global_pool
        self.grad_checkpoint, self.pos_embed_resize = grad_checkpoint, pos_embed_resize
        self.skips_unread_tokens = False  # whether forward omits from the last block what the head does not read
        part = partial(start.isolated_rng, int(torch.randint(2**62, (), device="cpu")))
        init = partial(start.init_weights, std=init_std)
        with part("tokenizer"):
            patches: dict[str, Any] = {"patch_size": patch_size, "flexi_patch": flexi_patch, "norm_eps": norm_eps}
            self.tokenizer = build_tokenizer(tokenizer, self.img_size, in_chans, embed_dim, **patches, **t2t).apply(
                init
            )
        self.grid_size, (height, width) = tuple(self.tokenizer.grid_size), pair("patch_size", self.tokenizer.patch_size)
        self.patch_size = height if height == width else (height, width)  # pixels from one token to the next
        with part("cls_token"):
            self.cls_token = nn.Parameter(start.init_token(1, embed_dim)) if class_token else None
        with part("reg_token"):
            self.reg_token = nn.Parameter(start.init_token(reg_tokens, embed_dim)) if reg_tokens else None
        with part("pos_embed"):
            how: dict[str, Any] = {"trainable": pos_embed_trainable, "join": pos_embed_join, "theta": rope_theta}
            sizes = (self.grid_size, embed_dim, num_heads, depth, self.num_prefix_tokens)
            self.pos_embed = build_pos_embed(pos_embed, *sizes, **how)
        start.check_policy(pos_embed_resize, self.pos_embed.policies)
        self.blocks, self.num_features = start.build_blocks(
            part,
            init,
            depth,
            drop_path_rate,
            None if dense_blocks is None else (dense_blocks, dense_growth, self.pos_embed),
            embed_dim,
            num_heads=num_heads,
            mlp_ratio=mlp_ratio,
            qkv_bias=qkv_bias,
            qk_norm=qk_norm,
            qk_scale=qk_scale,
            value_skip=value_skip,
            act_layer=act_layer,
            mlp_layer=mlp_layer,
            norm_layer=norm_layer,
            norm_eps=norm_eps,
            se_reduction=se_reduction,
            ghost=ghost,
            layer_scale=layer_scale,
            attn_gate=attn_gate,
            attn_dropout=attn_dropout,
            dropout=dropout,
            drop_path_subset=drop_path_subset,
        )
        self.norm_pre = build_norm(norm_layer, embed_dim, norm_eps) if pre_norm else nn.Identity()
        norms: list[nn.Module] = [build_norm(norm_layer, self.num_features, norm_eps), nn.Identity()]
        self.norm, self.fc_norm = norms[::-1] if fc_norm else norms
        self.attn_pool: AttentionPool | None = None
        if global_pool == "map":
            layers: dict[str, Any] = {"act_layer": act_layer, "norm_layer": norm_layer, "norm_eps": norm_eps}
            with part("attn_pool"):
                self.attn_pool = AttentionPool(self.num_features, num_heads, mlp_ratio=mlp_ratio, **layers).apply(init)
        with part("head"):
            self.head = start.build_head(self.num_features, head_hidden, num_classes).apply(init)
        self.dropout = nn.Dropout(dropout)

    def forward(self, images: Tensor | Packed) -> Tensor:
        """Map ``(B, C, H, W)`` images, or B packed images of any sizes, to ``(B, K)`` outputs."""
        if isinstance(images, Packed):
            return forward_packed(self, images)
        return self.forward_head(self._tokens(images, self.skips_unread_tokens and self.reads_class_token_only()))

    def forward_features(self, images: Tensor, keep: Tensor | None = None) -> Tensor:
        """Map ``(B, C, H, W)`` images to ``(B, P + N, D)`` normalized tokens, prefix tokens first.

        ``keep``, ``(B, K)`` indices of patch tokens, drops all others after the tokenizer: ``(B, P + K, D)``.
        """
        return self._tokens(images, keep=keep)

    def forward_head(self, x: Tensor) -> Tensor:
        """Map ``(B, P + N, D)`` tokens to ``(B, K)`` outputs."""
        return self.head(self.fc_norm(self.pool(x)))

    def _tokens(self, images: Tensor, first_only: bool = False, keep: Tensor | None = None) -> Tensor:
        """Return normalized tokens; with ``first_only`` the last block computes only the first, ``(B, 1, D)``."""
        pos_embed = self.positions(images, keep)
        x, last = self.embed(images, pos_embed), len(self.blocks) - 1
        for i in range(last + 1):
            x = self.run_block(i, x, first_only and i == last, pos_embed)
        return self.norm(x)

    def embed(self, images: Tensor | Packed, pos_embed: PosEmbed | None = None) -> Tensor:
        """Map ``(B, C, H, W)`` images to the ``(B, P + N, D)`` tokens that enter the first block."""
        pos_embed = pos_embed or self.positions(images)
        x = pos_embed(pos_embed.tokens(self.tokenizer(images)))  # (B, N, D)
        prefix = [token for token in (self.cls_token, self.reg_token) if token is not None]
        return self.norm_pre(self.dropout(pos_embed.prepend(prefix, x)))  # (B, P + N, D)

    def run_block(self, i: int, x: Tensor, first_only: bool = False, pos_embed: PosEmbed | None = None) -> Tensor:
        """Map the ``(B, L, D)`` tokens that enter block ``i`` to those that leave it."""
        pos_embed = pos_embed or self.pos_embed
        if self.grad_checkpoint and torch.is_grad_enabled():
            return checkpoint(self.blocks[i], x, pos_embed, i, first_only)
        return self.blocks[i](x, pos_embed, i, first_only)
