"""Multi-head self-attention, and how another one takes its place."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.class_paths import ClassSpec, build_choice
from vitlab.errors import UsageError
from vitlab.layers.channels import Ghost, SqueezeExcite
from vitlab.layers.kernels import KERNELS, attend
from vitlab.layers.linear import Linear, linear_layer
from vitlab.layers.norm import NormChoice, build_norm
from vitlab.layers.pos_embed import PosEmbed
from vitlab.layers.pos_embed.checked import bias_of
from vitlab.layers.recompute import by_queries, is_long
from vitlab.layers.resample import Grid
from vitlab.ranges import check_arguments

AttnName = Literal["softmax", "gated"]
AttnChoice = AttnName | str | ClassSpec


class Place(NamedTuple):
    """Where a block stands in its network.

    Args:
        layer: Index of the block, from 0.
        depth: Number of blocks.
        grid_size: Patch tokens per column and per row, (h, w), at the image size of the network.
        num_prefix_tokens: Number of prefix tokens P, which come first.

    Example:
        >>> Place(layer=2, depth=12).layer
        2
    """

    layer: int = 0
    depth: int = 1
    grid_size: Grid = (0, 0)
    num_prefix_tokens: int = 0


class AttnArgs(TypedDict):
    """What a block offers to its attention, besides width, heads and :class:`Place`.

    >>> offered: AttnArgs = {"qkv_bias": True, "dropout": 0.0, "norm_layer": "layernorm", "norm_eps": 1e-6}
    """

    qkv_bias: bool
    dropout: float
    norm_layer: NormChoice
    norm_eps: float


class Attention(nn.Module):
    """Multi-head self-attention, Vaswani et al. 2017 (arXiv:1706.03762).

    ``kernel`` can be set at any time: one of :mod:`vitlab.layers.kernels`; ``attend`` picks the faster one.

    A subclass overrides the steps that it changes: :meth:`score` computes logits from rotated queries and keys,
    :meth:`weigh` turns them into weights, :meth:`mix` applies these to the values, and :meth:`project` maps the result
    to the output. Each step receives the position embedding, whose ``grid_size`` is that of the current images.

    Args:
        dim: Token width D.
        num_heads: Number of heads A; divides ``dim``.
        qkv_bias: Whether the query, key and value projections have a bias.
        qk_norm: Whether to normalize queries and keys per head, Dehghani et al. 2023 (arXiv:2302.05442).
        qk_scale: Factor on the logits; ``None`` is ``(dim / num_heads) ** -0.5``.
        value_skip: Whether the values are added to the output, as T2T-ViT does between its splits.
        dropout: Dropout rate of the output, 0 to 1.
        norm_layer: Kind of the normalization that ``qk_norm`` adds.
        norm_eps: Epsilon of that normalization.
        se_reduction: Reduction factor of a :class:`SqueezeExcite` after the projection; 0 leaves it out.
        ghost: Whether half of the query, key and value channels are scaled copies of the other half.
        attn_dropout: Dropout rate of the attention weights, 0 to 1.
        attn_gate: Whether the sigmoid of a linear map of the tokens gates each output channel before the projection,
            Qiu et al. 2025 (arXiv:2505.06708).

    Example:
        >>> attention, positions = Attention(16, num_heads=2), PosEmbed()
        >>> attention(torch.randn(3, 5, 16), positions, layer=0).shape
        torch.Size([3, 5, 16])
        >>> attention.weights(torch.randn(3, 5, 16), positions, layer=0).shape
        torch.Size([3, 2, 5, 5])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        qk_scale: float | None = None,
        value_skip: bool = False,
        dropout: float = 0.0,
        norm_layer: NormChoice = "layernorm",
        norm_eps: float = 1e-6,
        se_reduction: int = 0,
        ghost: bool = False,
        attn_dropout: float = 0.0,
        attn_gate: bool = False,
    ) -> None:
        super().__init__()
        if num_heads < 1 or dim % num_heads:
            raise ValueError(f"`num_heads` must divide `embed_dim`, got num_heads={num_heads} and embed_dim={dim}")
        check_arguments(attn_dropout=attn_dropout)
        self.num_heads, self.value_skip, self.attn_dropout = num_heads, value_skip, attn_dropout
        head_dim = dim // num_heads
        self.qk_scale = head_dim**-0.5 if qk_scale is None else qk_scale
        self.qkv = Ghost(dim, 3, dim, qkv_bias) if ghost else Linear(dim, 3 * dim, bias=qkv_bias)
        self.q_norm = build_norm(norm_layer, head_dim, norm_eps) if qk_norm else nn.Identity()
        self.k_norm = build_norm(norm_layer, head_dim, norm_eps) if qk_norm else nn.Identity()
        self.gate = Linear(dim, dim) if attn_gate else None
        self.proj = Linear(dim, dim)
        self.se_layer = SqueezeExcite(dim, se_reduction) if se_reduction else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.kernel: Callable[..., Tensor] = attend

    def forward(self, x: Tensor, pos_embed: PosEmbed, layer: int, first_only: bool = False) -> Tensor:
        """Map ``(B, L, D)`` to ``(B, L, D)``; with ``first_only`` to ``(B, 1, D)``, the output of the first token."""
        q, k, v = (self._first_qkv if first_only else self._qkv)(x, pos_embed, layer)
        y = self.project(self.mix(q, k, v, pos_embed, layer).transpose(1, 2).flatten(2), x)
        return y + v.transpose(1, 2).flatten(2)[:, : y.shape[1]] if self.value_skip else y

    def mix(self, q: Tensor, k: Tensor, v: Tensor, pos_embed: PosEmbed, layer: int) -> Tensor:
        """Map rotated queries ``(B, A, L, d)``, keys and values to ``(B, A, L, d)``, the values by :meth:`weigh`."""
        rate = self.attn_dropout if self.training else 0.0
        if self.is_softmax:  # which kernels know

            def attend_from(q: Tensor, positions: PosEmbed) -> Tensor:
                bias = self.position_bias(q, k, positions, layer)
                return self.kernel(q, k, v, bias, self.qk_scale, **({"dropout": rate} if rate else {}))

            if is_long(k) and self._splits(pos_embed):
                return by_queries(lambda q, tokens: attend_from(q, pos_embed.of_queries(tokens)), q, k.shape[2])
            return attend_from(q, pos_embed)
        weights = self.weigh(q, k, pos_embed, layer)
        return (F.dropout(weights, rate) if rate else weights) @ v

    def weigh(self, q: Tensor, k: Tensor, pos_embed: PosEmbed, layer: int) -> Tensor:
        """Return the weights of rotated queries and keys, ``(B, A, L, L)``: the softmax of :meth:`score`."""
        return self.score(q, k, pos_embed, layer).softmax(dim=-1)

    def score(self, q: Tensor, k: Tensor, pos_embed: PosEmbed, layer: int) -> Tensor:
        """Return the logits of rotated queries and keys, ``(B, A, L, L)``: scaled products plus the position bias."""
        logits = q @ k.transpose(-2, -1) * self.qk_scale
        bias = self.position_bias(q, k, pos_embed, layer)
        return logits if bias is None else logits + bias

    def project(self, y: Tensor, x: Tensor) -> Tensor:
        """Map the mixed values ``(B, L, D)`` to the output; ``x`` is the input, which gates read."""
        y = y if self.gate is None else y * self.gate(x[:, : y.shape[1]]).sigmoid()
        return self.dropout(self.se_layer(self.proj(y)))

    @property
    def is_softmax(self) -> bool:
        """Whether the weights are those that a kernel computes, and not those of a subclass."""
        cls = type(self)
        return cls.weigh is Attention.weigh and cls.score is Attention.score and "weigh" not in vars(self)

    def weights(self, x: Tensor, pos_embed: PosEmbed, layer: int) -> Tensor:
        """Return the attention weights of :meth:`forward`, ``(B, A, L, L)``; each row of a softmax sums to 1."""
        q, k, _ = self._qkv(x, pos_embed, layer)
        return self.weigh(q, k, pos_embed, layer)

    def logits(self, x: Tensor, pos_embed: PosEmbed, layer: int, keys: Tensor | None = None) -> Tensor:
        """Return the logits of :meth:`weights`, ``(B, A, L, L)``: scaled products plus the position bias.

        With ``keys``, ``(B, L, D)``, the queries of ``x`` meet the keys of these tokens at the same positions. Of a
        ``weigh`` of one's own they are what it gets from :meth:`score`, maps of several calls one after the other.

        Raises:
            UsageError: A ``weigh`` of one's own gets no logits from :meth:`score`.
        """
        q, k, _ = self._qkv(x, pos_embed, layer)
        k = k if keys is None else self._qkv(keys, pos_embed, layer)[1]
        if type(self).weigh is Attention.weigh:
            return self.score(q, k, pos_embed, layer)
        found: list[Tensor] = []

        def caught(*args: Any, **kwargs: Any) -> Tensor:
            found.append(type(self).score(self, *args, **kwargs))
            return found[-1]

        self.__dict__["score"] = caught
        try:
            self.weigh(q, k, pos_embed, layer)
        finally:
            del self.__dict__["score"]
        if not found:
            what = f"the logits of {type(self).__name__} are not known, as its `weigh` does not call `self.score`"
            raise UsageError(f"{what}: compute them there, or give it a `logits(x, pos_embed, layer, keys=None)`")
        return torch.cat(found, dim=1)

    def _qkv(self, x: Tensor, pos_embed: PosEmbed, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, ``(B, A, L, d)`` each."""
        q, k, v = self._heads(self.qkv(x), 3)
        q, k = self.q_norm(q), self.k_norm(k)
        if pos_embed.rotates_stacked:
            q, k = pos_embed.rotate(torch.stack([q, k]), layer)
            return q, k, v
        return pos_embed.rotate(q, layer), pos_embed.rotate(k, layer), v

    def _first_qkv(self, x: Tensor, pos_embed: PosEmbed, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the first token's query, ``(B, A, 1, d)``, and all keys and values."""
        if not isinstance(self.qkv, nn.Linear):
            q, k, v = self._qkv(x, pos_embed, layer)
            return q[:, :, :1], k, v
        widths = [x.shape[2], 2 * x.shape[2]]
        (q_weight, kv_weight), bias = self.qkv.weight.split(widths), self.qkv.bias
        q_bias, kv_bias = (None, None) if bias is None else bias.split(widths)
        (q,) = self._heads(linear_layer(x[:, :1], q_weight, q_bias), 1)
        k, v = self._heads(linear_layer(x, kv_weight, kv_bias), 2)
        return self.q_norm(q), pos_embed.rotate(self.k_norm(k), layer), v  # a prefix token has no rotation

    def _heads(self, x: Tensor, count: int) -> list[Tensor]:
        parts = x.unflatten(2, (count, self.num_heads, -1)).unbind(2)  # one gradient, in the layout of x
        return [part.transpose(1, 2) for part in parts]  # (B, A, L, d) each

    def _splits(self, pos_embed: PosEmbed) -> bool:
        """Return whether some queries can be computed without the others; a kernel of one's own may want all."""
        is_ours = self.kernel in KERNELS and type(self).position_bias is Attention.position_bias
        return is_ours and pos_embed.splits_queries and pos_embed.order is None

    def position_bias(self, q: Tensor, k: Tensor, pos_embed: PosEmbed, layer: int) -> Tensor | None:
        """Return the position bias of the logits of ``q``, which holds all queries or only the first ones, or None."""
        related = pos_embed.relate(q * self.qk_scale, k, layer) if pos_embed.relates else None
        return bias_of(pos_embed, pos_embed.bias(layer), related, q, k)


ATTENTIONS: Mapping[AttnName, Callable[..., Attention]] = {
    "softmax": Attention,
    "gated": partial(Attention, attn_gate=True),
}


def build_attn(attn: AttnChoice, dim: int, num_heads: int, place: Place, **offered: Unpack[AttnArgs]) -> nn.Module:
    """Build the attention of a block: by a word, or a module of a class path that maps ``(B, L, D)`` to itself.

    It is called with tokens, position embedding and index of the block. A class receives, of ``dim``, ``num_heads``,
    the fields of :class:`Place` and what is ``offered``, those that its constructor has.

    Example:
        >>> offered: AttnArgs = {"qkv_bias": True, "dropout": 0.0, "norm_layer": "layernorm", "norm_eps": 1e-6}
        >>> spec = {"class_path": "softmax", "init_args": {"qk_norm": True}}
        >>> build_attn(spec, 16, 2, Place(), **offered).q_norm.normalized_shape
        (8,)
    """
    known = {"dim": dim, "num_heads": num_heads, **place._asdict(), **offered}
    module: nn.Module = build_choice("attn", attn, ATTENTIONS, nn.Module, known)
    return module
