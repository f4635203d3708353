"""The two layers that mix tokens between the soft splits of T2T-ViT."""

import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from vitlab.layers.block import Mlp

T2TAttn = Literal["performer", "transformer"]


def build_token_layer(t2t_attn: T2TAttn, in_dim: int, t2t_dim: int, norm_eps: float) -> nn.Module:
    """Build the token layer called ``t2t_attn``.

    Example:
        >>> build_token_layer("performer", in_dim=147, t2t_dim=64, norm_eps=1e-5)(torch.randn(1, 9, 147)).shape
        torch.Size([1, 9, 64])
    """
    match t2t_attn:
        case "performer":
            return TokenPerformer(in_dim, t2t_dim, norm_eps)
        case "transformer":
            return TokenTransformer(in_dim, t2t_dim, norm_eps)
    raise ValueError(f"`t2t_attn` must be one of {', '.join(get_args(T2TAttn))}, got {t2t_attn!r}")


class TokenAttention(nn.Module):
    """Attention with one head that narrows its tokens; the values, not the input, are added to the result.

    Args:
        in_dim: Width of the tokens that come in.
        dim: Width of the tokens that leave.

    Example:
        >>> TokenAttention(49, 64).weights(torch.randn(1, 9, 49)).shape
        torch.Size([1, 1, 9, 9])
    """

    def __init__(self, in_dim: int, dim: int) -> None:
        super().__init__()
        self.scale = in_dim**-0.5  # the published weights were trained with the input's width, not the keys'
        self.qkv = nn.Linear(in_dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(B, N, in_dim)`` to ``(B, N, dim)``."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)  # three of (B, N, dim)
        return v + self.proj((q @ k.transpose(-2, -1) * self.scale).softmax(dim=-1) @ v)

    def weights(self, x: Tensor) -> Tensor:
        """Return the map that :meth:`forward` applies to the values, ``(B, 1, N, N)``; each row sums to 1."""
        q, k, _ = self.qkv(x)[:, None].chunk(3, dim=-1)
        return (q @ k.transpose(-2, -1) * self.scale).softmax(dim=-1)


class TokenTransformer(nn.Module):
    """Token layer with softmax attention, Yuan et al. 2021 (arXiv:2101.11986).

    Args:
        in_dim: Width of the tokens that come in.
        dim: Width of the tokens that leave, and of the MLP.
        norm_eps: Epsilon of both normalisations.

    Example:
        >>> TokenTransformer(49, 64)(torch.randn(1, 9, 49)).shape
        torch.Size([1, 9, 64])
    """

    def __init__(self, in_dim: int, dim: int, norm_eps: float = 1e-5) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(in_dim, eps=norm_eps)
        self.attn = TokenAttention(in_dim, dim)
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp = Mlp(dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(B, N, in_dim)`` to ``(B, N, dim)``."""
        x = self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TokenPerformer(nn.Module):
    """Token layer with linear attention, Yuan et al. 2021 (arXiv:2101.11986).

    The attention is that of Choromanski et al. 2021 (arXiv:2009.14794) with shorter rows of ``w``, the
    frozen random features. Other features are another function, so they are saved with the weights. Dropout is 0.1 as
    in the published models, whatever the rest of the network uses.

    Args:
        in_dim: Width of the tokens that come in.
        dim: Width of the tokens that leave, and of the MLP; at least 2.
        norm_eps: Epsilon of both normalisations.

    Example:
        >>> TokenPerformer(49, 64)(torch.randn(1, 9, 49)).shape
        torch.Size([1, 9, 64])
    """

    def __init__(self, in_dim: int, dim: int, norm_eps: float = 1e-5) -> None:
        super().__init__()
        if dim < 2:
            raise ValueError(f"`t2t_dim` must be at least 2 for t2t_attn='performer', got {dim}")
        self.norm1 = nn.LayerNorm(in_dim, eps=norm_eps)
        self.kqv = nn.Linear(in_dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim), nn.Dropout(0.1))
        self.dropout = nn.Dropout(0.1)
        m = dim // 2
        self.w: Tensor
        self.register_buffer("w", nn.init.orthogonal_(torch.empty(m, dim)) * math.sqrt(m))  # w w^T = m I

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(B, N, in_dim)`` to ``(B, N, dim)``."""
        k, q, v = self.kqv(self.norm1(x)).chunk(3, dim=-1)  # three of (B, N, dim); the keys come first
        x = v + self.dropout(self.proj(self.attend(q, k, v)))
        return x + self.mlp(self.norm2(x))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Map three of ``(B, N, dim)`` to ``(B, N, dim)``: linear attention over positive random features.

        At least float32 throughout. In float16 the features overflow and the epsilon is 0, hence 0 / 0; in bfloat16
        they are off by per cents. Autocast would cast the products back, so it is switched off here.
        """
        dtype = torch.promote_types(v.dtype, torch.float32)
        with torch.autocast(autocast_device(v), enabled=False):
            q, k = self.features(q.to(dtype)), self.features(k.to(dtype))  # (B, N, m)
            context = k.transpose(-2, -1) @ v.to(dtype)  # (B, m, dim)
            total = k.sum(dim=-2, keepdim=True).transpose(-2, -1)  # (B, m, 1)
            return (q @ context / (q @ total + 1e-8)).to(v.dtype)

    def features(self, x: Tensor) -> Tensor:
        """Map ``(B, N, dim)`` to ``(B, N, m)`` positive features ``exp(w x - |x|^2 / 2) / sqrt(m)``."""
        w = self.w.to(x.dtype)
        return torch.exp(x @ w.T - x.square().sum(dim=-1, keepdim=True) / 2) / math.sqrt(len(w))


def autocast_device(x: Tensor) -> str:
    """Return the device whose autocast reaches ``x``: the meta device has none to switch off.

    Example:
        >>> autocast_device(torch.empty(1, device="meta"))
        'cpu'
    """
    return "cpu" if x.device.type == "meta" else x.device.type
