"""The token layers of T2T-ViT, between the soft splits: with softmax, with linear attention, and without attention."""

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from vitlab.layers.linear import Linear
from vitlab.layers.mlp import ActChoice, Mlp, build_act
from vitlab.layers.norm import NormChoice, build_norm
from vitlab.layers.precision import without_autocast
from vitlab.layers.recompute import recomputed
from vitlab.ranges import check_arguments, check_word

T2TAttn = Literal["performer", "performer_relu", "transformer", "none"]


def build_token_layer(
    t2t_attn: T2TAttn,
    in_dim: int,
    t2t_dim: int,
    norm_eps: float,
    *,
    t2t_num_heads: int = 1,
    t2t_mlp_ratio: float = 1.0,
    t2t_qkv_bias: bool | None = None,
    t2t_qk_scale: float | None = None,
    t2t_value_skip: bool = True,
    t2t_act_layer: ActChoice = "gelu",
    t2t_norm_layer: NormChoice = "layernorm",
    t2t_dropout: float | None = None,
    t2t_features: int | None = None,
) -> "TokenPerformer | TokenTransformer | TokenMlp":
    """Build the token layer called ``t2t_attn``; refuse options that it does not have.

    Args:
        t2t_attn: Attention: linear with exponential or ReLU features, softmax, or none: each token by itself.
        in_dim: Width of the input tokens.
        t2t_dim: Width of the output tokens.
        norm_eps: Epsilon of the normalizations.
        t2t_num_heads: Heads of the token layers' softmax attention; divides t2t_dim. For t2t_attn transformer.
        t2t_mlp_ratio: Hidden width of the token layers' MLP, in units of t2t_dim.
        t2t_qkv_bias: Whether queries, keys and values of the token layers have a bias; None: only in performers.
        t2t_qk_scale: Factor on the logits; None is (input width // heads) ** -0.5, as published. For transformer.
        t2t_value_skip: Whether token layers add the values to the output of attention, as published.
        t2t_act_layer: Activation of the token layers' MLP, given like act_layer.
        t2t_norm_layer: Normalization in the token layers, given like norm_layer.
        t2t_dropout: Dropout rate after attention and MLP, 0 to 1; None is 0.1 in performers, 0 otherwise.
        t2t_features: Random features m of performers; None is half of t2t_dim.

    Example:
        >>> build_token_layer("performer", in_dim=147, t2t_dim=64, norm_eps=1e-5)(torch.randn(1, 9, 147)).shape
        torch.Size([1, 9, 64])
    """
    check_word("t2t_attn", t2t_attn, get_args(T2TAttn))
    softmax = t2t_attn == "transformer"
    for name, value, default, is_used in (
        ("t2t_num_heads", t2t_num_heads, 1, softmax),
        ("t2t_qk_scale", t2t_qk_scale, None, softmax),
        ("t2t_value_skip", t2t_value_skip, True, t2t_attn != "none"),
        ("t2t_features", t2t_features, None, t2t_attn in ("performer", "performer_relu")),
    ):
        if value != default and not is_used:
            raise ValueError(f"`{name}` has no meaning for t2t_attn={t2t_attn!r}, got {value}")
    check_arguments(t2t_dropout=t2t_dropout, t2t_features=t2t_features)
    if not math.isfinite(t2t_mlp_ratio) or int(t2t_dim * t2t_mlp_ratio) < 1:
        raise ValueError(f"`t2t_mlp_ratio` must give the MLP at least one channel, got {t2t_mlp_ratio}")
    given = {"qkv_bias": t2t_qkv_bias, "dropout": t2t_dropout}  # each layer has a default of its own
    own: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    own |= {"mlp_ratio": t2t_mlp_ratio, "act_layer": t2t_act_layer, "norm_layer": t2t_norm_layer, "norm_eps": norm_eps}
    if t2t_attn == "none":
        return TokenMlp(in_dim, t2t_dim, **own)
    own["value_skip"] = t2t_value_skip
    if softmax:
        return TokenTransformer(in_dim, t2t_dim, num_heads=t2t_num_heads, qk_scale=t2t_qk_scale, **own)
    return TokenPerformer(in_dim, t2t_dim, features=t2t_features, relu=t2t_attn == "performer_relu", **own)


class TokenAttention(nn.Module):
    """Softmax attention with narrower output tokens, and a residual connection from the values, not the input.

    Args:
        in_dim: Width of the input tokens.
        dim: Width of the output tokens.
        num_heads: Number of heads A; divides ``dim``.
        qkv_bias: Whether the query, key and value projections have a bias.
        qk_scale: Factor on the logits; None is ``(in_dim // num_heads) ** -0.5``, as in the published weights.
        value_skip: Whether the values are added.

    Example:
        >>> TokenAttention(49, 64).weights(torch.randn(1, 9, 49)).shape
        torch.Size([1, 1, 9, 9])
    """

    def __init__(
        self,
        in_dim: int,
        dim: int,
        *,
        num_heads: int = 1,
        qkv_bias: bool = False,
        qk_scale: float | None = None,
        value_skip: bool = True,
    ) -> None:
        super().__init__()
        if num_heads < 1 or dim % num_heads:
            raise ValueError(f"`t2t_num_heads` must divide `t2t_dim`, got {num_heads} and {dim}")
        if qk_scale is None and in_dim < num_heads:
            raise ValueError(f"`t2t_num_heads` must be at most {in_dim}, the values of a window, got {num_heads}")
        self.num_heads, self.value_skip = num_heads, value_skip
        # the published weights were trained with the width of the input, not of the keys
        self.scale = (in_dim // num_heads) ** -0.5 if qk_scale is None else qk_scale
        self.qkv = Linear(in_dim, 3 * dim, bias=qkv_bias)
        self.proj = Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(B, N, in_dim)`` to ``(B, N, dim)``."""
        q, k, v = self._heads(x)
        y = self.proj(((q @ k.transpose(-2, -1) * self.scale).softmax(dim=-1) @ v).transpose(1, 2).flatten(2))
        return v.transpose(1, 2).flatten(2) + y if self.value_skip else y

    def weights(self, x: Tensor) -> Tensor:
        """Return the attention weights of :meth:`forward`, ``(B, A, N, N)``; each row sums to 1."""
        q, k, _ = self._heads(x)
        return (q @ k.transpose(-2, -1) * self.scale).softmax(dim=-1)

    def _heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, ``(B, A, N, dim / A)`` each."""
        q, k, v = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return q, k, v


class TokenTransformer(nn.Module):
    """Token layer with softmax attention, Yuan et al. 2021 (arXiv:2101.11986).

    Args:
        in_dim: Width of the input tokens.
        dim: Width of the output tokens.
        num_heads: Number of heads A; divides ``dim``.
        mlp_ratio: Hidden width of the MLP, in units of ``dim``.
        qkv_bias: Whether the query, key and value projections have a bias.
        qk_scale: Factor on the logits; None is ``(in_dim // num_heads) ** -0.5``.
        value_skip: Whether the values are added to the output of attention.
        act_layer: Activation of the MLP.
        norm_layer: Kind of both normalizations.
        norm_eps: Epsilon of both normalizations.
        dropout: Dropout rate after attention and in the MLP, 0 to 1.

    Example:
        >>> TokenTransformer(49, 64)(torch.randn(1, 9, 49)).shape
        torch.Size([1, 9, 64])
    """

    def __init__(
        self,
        in_dim: int,
        dim: int,
        norm_eps: float = 1e-5,
        *,
        num_heads: int = 1,
        mlp_ratio: float = 1.0,
        qkv_bias: bool = False,
        qk_scale: float | None = None,
        value_skip: bool = True,
        act_layer: ActChoice = "gelu",
        norm_layer: NormChoice = "layernorm",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        heads = {"num_heads": num_heads, "qkv_bias": qkv_bias, "qk_scale": qk_scale, "value_skip": value_skip}
        self.norm1 = build_norm(norm_layer, in_dim, norm_eps)
        self.attn = TokenAttention(in_dim, dim, **heads)  # type: ignore[arg-type]
        self.norm2 = build_norm(norm_layer, dim, norm_eps)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), act_layer, dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(B, N, in_dim)`` to ``(B, N, dim)``."""
        x = self.dropout(self.attn(self.norm1(x)))
        return x + recomputed(self.norm2, x, self.mlp)


class TokenMlp(nn.Module):
    """Token layer without attention: the values of :class:`TokenTransformer` and its MLP, each token by itself.

    It shows what attention between the splits is worth: no other step of the tokenizer lets distant windows see each
    other. A wider MLP, by ``mlp_ratio``, makes up for the parameters and FLOPs of the attention.

    Args:
        in_dim: Width of the input tokens.
        dim: Width of the output tokens.
        mlp_ratio: Hidden width of the MLP, in units of ``dim``.
        qkv_bias: Whether the projection to the values has a bias.
        act_layer: Activation of the MLP.
        norm_layer: Kind of both normalizations.
        norm_eps: Epsilon of both normalizations.
        dropout: Dropout rate after the values and in the MLP, 0 to 1.

    Example:
        >>> TokenMlp(49, 64, mlp_ratio=2.0)(torch.randn(1, 9, 49)).shape
        torch.Size([1, 9, 64])
    """

    def __init__(
        self,
        in_dim: int,
        dim: int,
        norm_eps: float = 1e-5,
        *,
        mlp_ratio: float = 1.0,
        qkv_bias: bool = False,
        act_layer: ActChoice = "gelu",
        norm_layer: NormChoice = "layernorm",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.norm1 = build_norm(norm_layer, in_dim, norm_eps)
        self.value = Linear(in_dim, dim, bias=qkv_bias)
        self.norm2 = build_norm(norm_layer, dim, norm_eps)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), act_layer, dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(B, N, in_dim)`` to ``(B, N, dim)``."""
        x = self.dropout(self.value(self.norm1(x)))
        return x + recomputed(self.norm2, x, self.mlp)


class TokenPerformer(nn.Module):
    """Token layer with linear attention, Yuan et al. 2021 (arXiv:2101.11986).

    The attention is that of Choromanski et al. 2021 (arXiv:2009.14794) with shorter rows of ``w``, the frozen random
    features. They are saved with the weights, because other features give another function. Dropout is 0.1 by
    default, as in the published models.

    Args:
        in_dim: Width of the input tokens.
        dim: Width of the output tokens, at least 2.
        mlp_ratio: Hidden width of the MLP, in units of ``dim``.
        qkv_bias: Whether the query, key and value projections have a bias.
        value_skip: Whether the values are added to the output of attention.
        act_layer: Activation of the MLP.
        norm_layer: Kind of both normalizations.
        norm_eps: Epsilon of both normalizations.
        dropout: Dropout rate after attention and after the MLP, 0 to 1.
        features: Number of random features m; None is ``dim // 2``.
        relu: Whether features are ``relu(w x) / sqrt(m) + 0.001``, their generalized attention, not exponentials.

    Example:
        >>> TokenPerformer(49, 64)(torch.randn(1, 9, 49)).shape
        torch.Size([1, 9, 64])
    """

    def __init__(
        self,
        in_dim: int,
        dim: int,
        norm_eps: float = 1e-5,
        *,
        mlp_ratio: float = 1.0,
        qkv_bias: bool = True,
        value_skip: bool = True,
        act_layer: ActChoice = "gelu",
        norm_layer: NormChoice = "layernorm",
        dropout: float = 0.1,
        features: int | None = None,
        relu: bool = False,
    ) -> None:
        super().__init__()
        m = dim // 2 if features is None else features
        if dim < 2 or m < 1:
            raise ValueError(f"`t2t_dim` must be at least 2 for t2t_attn='performer', got {dim} and {m} features")
        hidden = int(dim * mlp_ratio)
        self.value_skip, self.relu = value_skip, relu
        self.norm1 = build_norm(norm_layer, in_dim, norm_eps)
        self.kqv = Linear(in_dim, 3 * dim, bias=qkv_bias)
        self.proj = Linear(dim, dim)
        self.norm2 = build_norm(norm_layer, dim, norm_eps)
        self.mlp = nn.Sequential(
            Linear(dim, hidden), build_act(act_layer, hidden), Linear(hidden, dim), nn.Dropout(dropout)
        )
        self.dropout = nn.Dropout(dropout)
        self.w: Tensor
        self.register_buffer("w", random_features(m, dim))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(B, N, in_dim)`` to ``(B, N, dim)``."""
        k, q, v = self.kqv(self.norm1(x)).chunk(3, dim=-1)  # three of (B, N, dim); the keys come first
        y = self.dropout(self.proj(self.attend(q, k, v)))
        x = v + y if self.value_skip else y
        return x + recomputed(self.norm2, x, self.mlp)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Map three of ``(B, N, dim)`` to ``(B, N, dim)``: linear attention over positive random features.

        Computed at least in float32. In float16 the features overflow and the epsilon is 0, hence 0 / 0; in bfloat16
        they are off by several percent. Autocast would cast the products back, so it is switched off here.
        """
        dtype = torch.promote_types(v.dtype, torch.float32)
        with without_autocast(v):
            q, k = self.features(q.to(dtype)), self.features(k.to(dtype))  # (B, N, m)
            context = k.transpose(-2, -1) @ v.to(dtype)  # (B, m, dim)
            total = k.sum(dim=-2, keepdim=True).transpose(-2, -1)  # (B, m, 1)
            return (q @ context / (q @ total + 1e-8)).to(v.dtype)

    def features(self, x: Tensor) -> Tensor:
        """Map ``(B, N, dim)`` to ``(B, N, m)`` positive features: ``exp(w x - |x|^2 / 2) / sqrt(m)``, or ``relu``."""
        w = self.w.to(x.dtype)
        if self.relu:
            return torch.relu(x @ w.T) / math.sqrt(len(w)) + 1e-3
        return torch.exp(x @ w.T - x.square().sum(dim=-1, keepdim=True) / 2) / math.sqrt(len(w))


def random_features(m: int, dim: int) -> Tensor:
    """Return ``(m, dim)`` random features: orthogonal rows of length sqrt(min(m, dim)), in blocks of ``dim`` rows.

    Example:
        >>> w = random_features(32, 64)
        >>> torch.allclose(w @ w.T, 32 * torch.eye(32), atol=1e-4)
        True
    """
    if m <= dim:
        return nn.init.orthogonal_(torch.empty(m, dim)) * math.sqrt(m)
    rows = [nn.init.orthogonal_(torch.empty(min(dim, m - start), dim)) for start in range(0, m, dim)]
    return torch.cat(rows) * math.sqrt(dim)
