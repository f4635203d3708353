"""The pre-norm transformer block and its small parts."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitlab.layers.attention import Attention
from vitlab.layers.mlp import ActChoice, Mlp, MlpName, build_act
from vitlab.layers.norm import NormChoice, build_norm
from vitlab.layers.pos_embed import PosEmbed
from vitlab.layers.recompute import recomputed


class LayerScale(nn.Module):
    """Scale each channel by a trained factor, Touvron et al. 2021 (arXiv:2103.17239).

    Args:
        dim: Token width D.
        layer_scale: Value all factors start at.

    Example:
        >>> LayerScale(3, layer_scale=0.1)(torch.ones(1, 3)).tolist()[0][0]
        0.10000000149011612
    """

    def __init__(self, dim: int, layer_scale: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), layer_scale))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(..., D)`` to ``(..., D)``."""
        return x * self.gamma


class DropPath(nn.Module):
    """Drop a residual branch for a random share of samples: stochastic depth, Huang et al. 2016 (arXiv:1603.09382).

    A sample's branch is either dropped or kept and scaled up, so that the expected value does not change. By default
    each sample is drawn independently and all branches are computed. With ``subset``, as in Oquab et al. 2024
    (arXiv:2304.07193), a fixed number of samples is drawn and only their branches are computed.

    Args:
        rate: Share of samples whose branch is dropped in training, in [0, 1).
        subset: Whether to draw a fixed number of samples and compute only their branches.

    Example:
        >>> x = DropPath(0.5)(torch.zeros(1000, 1, 1), torch.ones_like)  # in training: 0 or 2, 1 on average
        >>> sorted(set(x.flatten().tolist()))
        [0.0, 2.0]
    """

    def __init__(self, rate: float, subset: bool = False) -> None:
        super().__init__()
        self.rate = rate
        self.subset = subset

    def forward(self, x: Tensor, branch: Callable[[Tensor], Tensor], owner: Tensor | None = None) -> Tensor:
        """Map ``(B, L, D)`` to ``x + branch(x)``, cut to the first token if ``branch`` returns only that.

        ``owner``, ``(B, L)``, is the image of each token where images share a row: each image is dropped or kept.
        """
        if self.training and self.rate and self.subset:
            return self._forward_subset(x, branch)
        y = branch(x)
        if self.training and self.rate:
            mask = self._keep_mask(y if owner is None else y.flatten(0, 1))  # no more images than tokens
            y = y * ((mask if owner is None else mask[owner, 0]) / (1 - self.rate))
        return x[:, : y.shape[1]] + y

    def _keep_mask(self, y: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # bernoulli_ would compile a graph for each rate
            return (torch.rand(len(y), 1, 1, device=y.device) < 1 - self.rate).to(y.dtype)
        return y.new_empty(len(y), 1, 1).bernoulli_(1 - self.rate)

    def _forward_subset(self, x: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        num_kept = max(1, round(len(x) * (1 - self.rate)))
        rows = torch.randperm(len(x), device=x.device)[:num_kept]
        y = branch(x[rows])
        return x[:, : y.shape[1]].index_add(0, rows, y.to(x.dtype), alpha=len(x) / num_kept)

    def extra_repr(self) -> str:
        """Show the arguments when the module is printed."""
        return f"rate={self.rate:.3g}, subset={self.subset}"


class Block(nn.Module):
    """Pre-norm transformer block: attention, then an MLP, each with a residual connection.

    Args:
        dim: Token width D.
        num_heads: Number of attention heads A; divides ``dim``.
        mlp_ratio: Hidden width of the MLP, in units of ``dim``.
        qkv_bias: Whether the query, key and value projections have a bias.
        qk_norm: Whether to normalize queries and keys.
        qk_scale: Factor on the attention logits; ``None`` is ``(dim / num_heads) ** -0.5``.
        value_skip: Whether attention adds the values to its output.
        act_layer: Activation of the MLP.
        mlp_layer: Variant of the MLP: mlp (two layers), swiglu (gated) or ghost (cheap channels).
        norm_layer: Kind of normalization.
        norm_eps: Epsilon of every normalization.
        layer_scale: Initial value of both :class:`LayerScale`; ``None`` leaves them out.
        dropout: Dropout rate after each linear layer except qkv, 0 to 1.
        drop_path_rate: Share of samples for which a branch of this block is dropped in training, 0 to 1.
        drop_path_subset: Whether a fixed number of samples is dropped, whose branches are not computed.
        se_reduction: Reduction factor of a squeeze-excite gate after attention; 0 leaves the gate out.
        ghost: Whether half of the query, key and value channels are scaled copies of the other half.
        attn_dropout: Dropout rate of the attention weights, 0 to 1.
        attn_gate: Whether the sigmoid of a linear map of the tokens gates the output of attention.
        dense: ``(growth, in_dim)`` of DenseNet-style blocks, Huang et al. 2017 (arXiv:1608.06993): ``growth`` new
            channels are appended to the input, and an input of width ``in_dim`` is first brought to ``dim`` by a linear
            layer and an activation. 0 turns either off.

    Example:
        >>> block = Block(16, num_heads=2, layer_scale=1e-5)
        >>> block(torch.randn(3, 5, 16), PosEmbed(), layer=0).shape
        torch.Size([3, 5, 16])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        qk_scale: float | None = None,
        value_skip: bool = False,
        act_layer: ActChoice = "gelu",
        mlp_layer: MlpName = "mlp",
        norm_layer: NormChoice = "layernorm",
        norm_eps: float = 1e-6,
        layer_scale: float | None = None,
        dropout: float = 0.0,
        drop_path_rate: float = 0.0,
        drop_path_subset: bool = False,
        se_reduction: int = 0,
        ghost: bool = False,
        attn_dropout: float = 0.0,
        attn_gate: bool = False,
        dense: tuple[int, int] = (0, 0),
    ) -> None:
        super().__init__()
        growth, in_dim = dense
        self.transition = nn.Sequential(nn.Linear(in_dim, dim), build_act(act_layer, dim)) if in_dim else None
        self.dense_linear = nn.Linear(dim, growth) if growth else None
        self.norm1 = build_norm(norm_layer, dim, norm_eps)
        heads: dict[str, Any] = {"qkv_bias": qkv_bias, "qk_norm": qk_norm, "qk_scale": qk_scale, "ghost": ghost}
        norms: dict[str, Any] = {"norm_layer": norm_layer, "norm_eps": norm_eps}
        output: dict[str, Any] = {"value_skip": value_skip, "dropout": dropout, "se_reduction": se_reduction}
        output |= {"attn_dropout": attn_dropout, "attn_gate": attn_gate}
        self.attn = Attention(dim, num_heads, **heads, **norms, **output)
        self.ls1 = nn.Identity() if layer_scale is None else LayerScale(dim, layer_scale)
        self.norm2 = build_norm(norm_layer, dim, norm_eps)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), act_layer, dropout, mlp_layer)
        self.ls2 = nn.Identity() if layer_scale is None else LayerScale(dim, layer_scale)
        self.drop_path = DropPath(drop_path_rate, drop_path_subset)

    def forward(self, x: Tensor, pos_embed: PosEmbed, layer: int, first_only: bool = False) -> Tensor:
        """Map ``(B, L, D)`` to ``(B, L, D)``; ``layer`` is the index of this block, from 0.

        With ``first_only`` return only the first token, ``(B, 1, D)``, and skip ``pos_embed.leave``.
        """
        x = x if self.transition is None else self.transition(x)
        x = pos_embed.enter(x, layer)
        owner = pos_embed.owner
        shared = first_only or getattr(self.attn, "gate", None) is not None
        attn = partial(self.attn, pos_embed=pos_embed, layer=layer, **({"first_only": True} if first_only else {}))
        y = self.drop_path(x, lambda x: self.ls1(recomputed(self.norm1, x, attn, shared)), owner)
        y = self.drop_path(y, lambda x: self.ls2(recomputed(self.norm2, x, self.mlp)), owner)
        if self.dense_linear is not None:
            y = torch.cat([x[:, : y.shape[1]], self.dense_linear(y)], dim=2)
        return y if first_only else pos_embed.leave(y, layer)
