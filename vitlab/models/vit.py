"""The Vision Transformer: image -> tokens -> + position -> blocks -> head."""

from collections.abc import Collection, Sequence
from functools import partial
from typing import ClassVar, Unpack, get_args

import torch
from torch import Tensor, nn

from vitlab.class_paths import word_of
from vitlab.layers.attention import AttnChoice, Place
from vitlab.layers.block import BlockArgs, BlockChoice
from vitlab.layers.mlp import ActChoice, MlpChoice
from vitlab.layers.norm import NormArgs, NormChoice, build_norm
from vitlab.layers.pool import AttentionPoolArgs, PoolChoice, PoolName, build_pool
from vitlab.layers.pos_embed import PosEmbed, PosEmbedChoice, build_pos_embed
from vitlab.layers.pos_embed.placed import placed
from vitlab.layers.recompute import checkpoint
from vitlab.layers.resample import ResizePolicy, same_size
from vitlab.models import build
from vitlab.models.features import IntermediateArgs, Tokens, block_outputs
from vitlab.models.first_token import class_token_is_enough, first_token
from vitlab.models.old_names import OLD, OldArgs, moved
from vitlab.models.packed_batch import drops_rows, forward_packed, packed_images, packed_positions
from vitlab.named_kwargs import Named
from vitlab.packed_batch import PackedBatch
from vitlab.ranges import check_arguments
from vitlab.tokenizers.build import TokenizerChoice, build_tokenizer
from vitlab.tokenizers.patch import PatchEmbed
from vitlab.tokenizers.splits import pair


class VisionTransformer(Named, nn.Module):
    """Vision Transformer, Dosovitskiy et al. 2021 (arXiv:2010.11929).

    With ``tokenizer="t2t"`` it is the Tokens-to-Token ViT of Yuan et al. 2021 (arXiv:2101.11986). Tokenizer, position
    embedding, block, attention, MLP and pooling are parts: each is a word, a class path, or a mapping with
    ``class_path`` and ``init_args``, which are options that this part alone understands.

    Args:
        img_size: Side of the square images, or their height and width, in pixels.
        in_chans: Number of image channels C.
        num_classes: Number of outputs K; 0 returns the pooled features.
        tokenizer: How images become tokens: patches, the splits of T2T-ViT, overlapping convolutions, or a class path.
        patch_size: Side of a patch, or its height and width, in pixels; divides img_size. For tokenizer patch.
        embed_dim: Token width D of the backbone.
        depth: Number of blocks.
        num_heads: Attention heads A of every block; divides embed_dim.
        mlp_ratio: Hidden width of every MLP, in units of embed_dim.
        qkv_bias: Whether the query, key and value projections have a bias.
        block: Block of the backbone: plain; dense, which appends channels; or a class path.
        attn: Attention of every block: softmax; gated, by a sigmoid of the tokens; or a class path.
        act_layer: Activation of every MLP: a name, a class of torch.nn or a class path; gelu is exact.
        mlp_layer: MLP of every block: mlp, swiglu (gated by act_layer; take silu), ghost, or a class path.
        norm_layer: Normalization in the backbone: a name, a class of torch.nn or a class path.
        norm_eps: Epsilon of every normalization, the tokenizer's included.
        pos_embed: Position embedding: a name, the class path of a :class:`PosEmbed`, or a list of several.
        class_token: Whether to prepend a class token.
        reg_tokens: Number of register tokens, Darcet et al. 2024 (arXiv:2309.16588).
        global_pool: What the head reads: token (class token), avg, max or map (attention) of patches, or a class path.
        pre_norm: Whether the tokens are normalized before the first block, as in CLIP.
        fc_norm: Whether to normalize after pooling instead of before it.
        head_hidden: Width of a hidden tanh layer in the head, as in the pre-training of ViT; 0 is a linear head.
        init_std: Std of initial linear and convolution weights, not of positions; 0.1 suits narrow nets and short runs.
        layer_scale: Initial value of a trained factor on every residual branch; None leaves it out.
        dropout: Dropout rate after the position embedding and after each linear layer except qkv, 0 to 1.
        drop_path_rate: Share of samples whose branch the last block drops; grows linearly from 0, which depth=1 keeps.
        drop_path_subset: Whether a fixed number of samples is dropped and their branches are not computed: faster.
        grad_checkpoint: Whether training recomputes each block in the backward pass: less memory, more time.
        **old: Options of parts, by the names that they had as arguments, see :data:`vitlab.models.old_names.OLD`.

    Example:
        >>> gated = {"class_path": "gated", "init_args": {"qk_norm": True}}
        >>> net = VisionTransformer(img_size=32, patch_size=4, num_classes=10, embed_dim=48, num_heads=3, attn=gated)
        >>> net(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    old_names: ClassVar[Collection[str]] = OLD

    predicts_labels = False  # whether each output is a label for itself, and not a class among others

    def __init__(
        self,
        img_size: int | Sequence[int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        tokenizer: TokenizerChoice = "patch",
        patch_size: int | Sequence[int] = 16,
        embed_dim: int = 384,
        depth: int = 12,
        num_heads: int = 6,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        block: BlockChoice = "plain",
        attn: AttnChoice = "softmax",
        act_layer: ActChoice = "gelu",
        mlp_layer: MlpChoice = "mlp",
        norm_layer: NormChoice = "layernorm",
        norm_eps: float = 1e-6,
        pos_embed: PosEmbedChoice = "learned",
        class_token: bool = True,
        reg_tokens: int = 0,
        global_pool: PoolChoice = "token",
        pre_norm: bool = False,
        fc_norm: bool = False,
        head_hidden: int = 0,
        init_std: float = 0.02,
        layer_scale: float | None = None,
        dropout: float = 0.0,
        drop_path_rate: float = 0.0,
        drop_path_subset: bool = False,
        grad_checkpoint: bool = False,
        **old: Unpack[OldArgs],
    ) -> None:
        super().__init__()
        check_arguments(in_chans=in_chans, embed_dim=embed_dim, depth=depth, num_heads=num_heads, mlp_ratio=mlp_ratio)
        check_arguments(num_classes=num_classes, reg_tokens=reg_tokens, head_hidden=head_hidden, init_std=init_std)
        check_arguments(norm_eps=norm_eps, dropout=dropout, drop_path_rate=drop_path_rate)
        global_pool = word_of("global_pool", global_pool, get_args(PoolName)) or global_pool
        build.check_pool(global_pool, class_token)
        tokenizer, pos_embed, block, attn = moved(tokenizer, pos_embed, block, attn, **old)
        self.img_size, self.in_chans, self.num_classes = pair("img_size", img_size), in_chans, num_classes
        self.embed_dim, self.num_heads, self.head_hidden, self.init_std = embed_dim, num_heads, head_hidden, init_std
        self.num_prefix_tokens, self.global_pool = int(class_token) + reg_tokens, global_pool
        self.grad_checkpoint = grad_checkpoint
        self.skips_unread_tokens = False  # whether forward omits from the last block what the head does not read
        init = build.WeightInit(int(torch.randint(2**62, (), device="cpu")), init_std)
        norms: NormArgs = {"norm_layer": norm_layer, "norm_eps": norm_eps}
        with init.part("tokenizer"):
            built = build_tokenizer(
                tokenizer, self.img_size, in_chans, embed_dim, patch_size=patch_size, norm_eps=norm_eps
            )
            self.tokenizer = built.apply(init.weights)
        self.grid_size, (height, width) = tuple(self.tokenizer.grid_size), pair("patch_size", self.tokenizer.patch_size)
        self.patch_size = height if height == width else (height, width)  # pixels from one token to the next
        self.cls_token = init.tokens("cls_token", int(class_token), embed_dim)
        self.reg_token = init.tokens("reg_token", reg_tokens, embed_dim)
        with init.part("pos_embed"):
            sizes = (self.grid_size, embed_dim, num_heads, depth, self.num_prefix_tokens)
            self.pos_embed = build_pos_embed(pos_embed, *sizes)
        shared: BlockArgs = {
            "attn": attn,
            "mlp_ratio": mlp_ratio,
            "qkv_bias": qkv_bias,
            "act_layer": act_layer,
            "mlp_layer": mlp_layer,
            **norms,
            "layer_scale": layer_scale,
            "dropout": dropout,
            "drop_path_rate": drop_path_rate,
            "drop_path_subset": drop_path_subset,
        }
        place = Place(0, depth, self.grid_size, self.num_prefix_tokens)
        self.blocks, self.num_features = build.build_blocks(
            block, embed_dim, num_heads, place, self.pos_embed, init, **shared
        )
        self.norm_pre = build_norm(dim=embed_dim, **norms) if pre_norm else nn.Identity()
        final: list[nn.Module] = [build_norm(dim=self.num_features, **norms), nn.Identity()]
        self.norm, self.fc_norm = final[::-1] if fc_norm else final
        with init.part("attn_pool"):
            by_attention: AttentionPoolArgs = {"mlp_ratio": mlp_ratio, "act_layer": act_layer, **norms}
            dim, prefix = self.num_features, self.num_prefix_tokens
            self.attn_pool = build_pool(global_pool, dim, num_heads, prefix, self.grid_size, **by_attention)
            if self.attn_pool is not None:
                self.attn_pool.apply(init.weights)
        with init.part("head"):
            self.head = build.build_head(self.num_features, head_hidden, num_classes).apply(init.weights)
        self.dropout = nn.Dropout(dropout)

    def forward(self, images: Tensor | PackedBatch | list[Tensor] | tuple[Tensor, ...]) -> Tensor:
        """Map ``(B, C, H, W)`` images, or B images of any sizes, packed or as a list, to ``(B, K)`` outputs."""
        if isinstance(images, list | tuple):
            images = packed_images(self, images)
        if isinstance(images, PackedBatch):
            return forward_packed(self, images)
        if self.skips_unread_tokens and self.reads_class_token_only():
            return self.forward_head(first_token(self, images))
        return self.forward_head(self.forward_features(images))

    def forward_features(self, images: Tensor, keep: Tensor | None = None) -> Tensor:
        """Map ``(B, C, H, W)`` images to ``(B, P + N, D)`` normalized tokens, prefix tokens first.

        ``keep``, ``(B, K)`` indices of patch tokens, drops all others after the tokenizer: ``(B, P + K, D)``.
        """
        pos_embed = self.positions(images, keep)
        x = self.embed(images, pos_embed)
        for i in range(len(self.blocks)):
            x = self.run_block(i, x, pos_embed)
        return self.norm(x)

    def forward_head(self, x: Tensor) -> Tensor:
        """Map ``(B, P + N, D)`` tokens to ``(B, K)`` outputs."""
        return self.head(self.fc_norm(self.pool(x)))

    def embed(self, images: Tensor | PackedBatch, pos_embed: PosEmbed | None = None) -> Tensor:
        """Map ``(B, C, H, W)`` images to the ``(B, P + N, D)`` tokens that enter the first block."""
        pos_embed = pos_embed or self.positions(images)
        x = pos_embed(pos_embed.tokens(self.tokenizer(images)))  # (B, N, D)
        prefix = [token for token in (self.cls_token, self.reg_token) if token is not None]
        return self.norm_pre(self.dropout(pos_embed.prepend(prefix, x)))  # (B, P + N, D)

    def run_block(self, i: int, x: Tensor, pos_embed: PosEmbed | None = None, first_only: bool = False) -> Tensor:
        """Map the ``(B, L, D)`` tokens that enter block ``i`` to those that leave it, or to the first of them."""
        args = (x, pos_embed or self.pos_embed, i, *([True] if first_only else []))  # own blocks have no `first_only`
        if self.grad_checkpoint and torch.is_grad_enabled():
            return checkpoint(self.blocks[i], *args)
        return self.blocks[i](*args)

    @property
    def pos_embed_resize(self) -> ResizePolicy | None:
        """How positions are resampled for images of another size: the ``resize`` of :attr:`pos_embed`."""
        return self.pos_embed.chosen_policy

    @pos_embed_resize.setter
    def pos_embed_resize(self, policy: ResizePolicy | None) -> None:
        self.pos_embed.chosen_policy = policy

    def positions(self, images: Tensor | PackedBatch, keep: Tensor | None = None) -> PosEmbed:
        """Return the position embedding for one batch: ``(B, C, H, W)`` images, or packed images of any sizes.

        It is for the grid of these images, and holds what the method draws for a batch (``for_batch``). With ``keep``,
        ``(B, K)`` indices of patch tokens, it is that of these tokens at their original positions.

        Its parameters are those of ``pos_embed``, at another size resampled as its ``resize`` says; gradients flow to
        them.

        Raises:
            ValueError: The tokenizer or the position embedding does not support that size, or a subset of the tokens.

        Example:
            >>> net = VisionTransformer(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=10)
            >>> net.positions(torch.randn(1, 3, 48, 40)).grid_size, net(torch.randn(1, 3, 48, 40)).shape
            ((6, 5), torch.Size([1, 10]))
        """
        if isinstance(images, PackedBatch):
            return packed_positions(self, images).for_batch()
        size = tuple(images.shape[2:])
        if images.ndim != 4 or images.shape[1] != self.in_chans:
            raise ValueError(f"images must be (B, {self.in_chans}, height, width), got {tuple(images.shape)}")
        if keep is None:
            return placed(self._at(size)).for_batch()
        build.check_kept(keep, images, self.training and drops_rows(self))
        return placed(self._at(size).kept(keep)).for_batch()

    def _at(self, size: tuple[int, ...]) -> PosEmbed:
        """Return the position embedding at the grid of images of this height and width."""
        tokenizer, is_usual = self.tokenizer, same_size(size, self.img_size)
        if is_usual and not (isinstance(tokenizer, PatchEmbed) and tokenizer.patch != tokenizer.patch_size):
            return self.pos_embed
        if not hasattr(tokenizer, "grid_of"):
            name, (H, W), got = type(tokenizer).__name__, self.img_size, f"{size[0]} x {size[1]}"
            raise ValueError(f"{name} takes only images of {H} x {W}, got {got}: it has no `grid_of(size)`")
        return self.pos_embed.at(tokenizer.grid_of(size))

    def pool(self, x: Tensor) -> Tensor:
        """Pool ``(B, P + N, D)`` tokens to ``(B, D)``: the class token, a function of patch tokens, or of all.

        Example:
            >>> VisionTransformer(embed_dim=48, depth=1, num_heads=3).pool(torch.randn(2, 197, 48)).shape
            torch.Size([2, 48])
        """
        patches = x[:, self.num_prefix_tokens :]  # (B, N, D)
        match self.global_pool:
            case "token":
                return x[:, 0]
            case "avg":
                return patches.mean(dim=1)
            case "max":
                return patches.amax(dim=1)
        assert self.attn_pool is not None
        pooled: Tensor = self.attn_pool(patches if self.global_pool == "map" else x)
        return pooled

    def reads_class_token_only(self) -> bool:
        """Return whether the outputs depend only on the class token after the last block, which can then be shorter.

        Example:
            >>> VisionTransformer(img_size=32, embed_dim=48, depth=1, num_heads=3).reads_class_token_only()
            True
        """
        return self.global_pool == "token" and class_token_is_enough(self)

    def forward_intermediates(
        self, images: Tensor, indices: int | Sequence[int] | None = None, **options: Unpack[IntermediateArgs]
    ) -> list[Tokens] | tuple[Tensor, list[Tokens]]:
        """Return normalized tokens and the outputs of chosen blocks: :func:`vitlab.models.features.block_outputs`."""
        return block_outputs(self, images, indices, **options)

    def get_intermediate_layers(
        self,
        images: Tensor,
        n: int | Sequence[int] = 1,
        reshape: bool = False,
        return_prefix_tokens: bool = False,
        norm: bool = False,
    ) -> list[Tokens]:
        """Return the outputs of the last ``n`` blocks, or of those with indices ``n``, as DINO's code calls it.

        They are ``(B, N, D)`` patch tokens, or with ``reshape`` maps; DINO's code sets ``norm``, timm's does not.
        """
        options: IntermediateArgs = {"return_prefix_tokens": return_prefix_tokens, "norm": norm}
        options |= {"output_fmt": "NCHW" if reshape else "NLC", "intermediates_only": True}
        outputs = block_outputs(self, images, n, **options)
        assert isinstance(outputs, list)
        return outputs

    def stages(self) -> list[list[nn.Parameter]]:
        """Return the parameters by stage, from input to output: embedding with all positions, each block, head.

        What a subclass adds belongs to the head.

        Example:
            >>> len(VisionTransformer(img_size=32, embed_dim=48, depth=4, num_heads=3).stages())
            6
        """
        prefix = [token for token in (self.cls_token, self.reg_token) if token is not None]
        pool = [] if self.attn_pool is None else list(self.attn_pool.parameters())
        embedding = [*self.tokenizer.parameters(), *prefix, *self.pos_embed.parameters(), *self.norm_pre.parameters()]
        head = [*self.norm.parameters(), *pool, *self.fc_norm.parameters(), *self.head.parameters()]
        stages = [embedding, *(list(block.parameters()) for block in self.blocks), head]
        known = {id(p) for stage in stages for p in stage}
        head += [p for p in self.parameters() if id(p) not in known]
        return stages

    def no_weight_decay(self) -> set[str]:
        """Return the names of the parameters that must not decay, in the form that timm's optimizers expect.

        Only weights of linear and convolution layers and of torch's attention decay: not biases, norms, class and
        register tokens, scales, matrices that a part holds by itself, or any parameter of the position embedding.

        Example:
            >>> net = VisionTransformer(img_size=32, embed_dim=48, depth=1, num_heads=3)
            >>> "cls_token" in net.no_weight_decay(), "blocks.0.mlp.fc1.weight" in net.no_weight_decay()
            (True, False)
        """
        decays = {id(weight) for module in self.modules() for weight in build.projections(module)}
        decays -= {id(p) for p in self.pos_embed.parameters()}
        return {name for name, p in self.named_parameters() if id(p) not in decays}

    def reset_head(self, num_classes: int) -> None:
        """Replace the head by a new one with ``num_classes`` outputs K; 0 returns the pooled features.

        Example:
            >>> net = VisionTransformer(img_size=32, embed_dim=48, depth=1, num_heads=3)
            >>> net.reset_head(10)
            >>> net.head
            Linear(in_features=48, out_features=10, bias=True)
        """
        check_arguments(num_classes=num_classes)
        head = build.build_head(self.num_features, self.head_hidden, num_classes)
        head.apply(partial(build.init_weights, std=self.init_std))
        weight = next(self.blocks.parameters())
        self.num_classes, self.head = num_classes, head.to(weight.device, weight.dtype).train(self.training)

    def start_step(self, step: int) -> None:
        """Draw the patch size of a training step, if the network has patches of several sizes.

        Example:
            >>> flexi = {"class_path": "patch", "init_args": {"flexi_patch": [8, 12, 16]}}
            >>> net = VisionTransformer(img_size=48, tokenizer=flexi, embed_dim=48, depth=1, num_heads=3)
            >>> net.start_step(0)
            >>> net.tokenizer.patch in [(8, 8), (12, 12), (16, 16)]
            True
        """
        if hasattr(self.tokenizer, "draw"):
            self.tokenizer.draw(step)
