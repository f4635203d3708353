"""The fast path of the T2T tokenizer: convolutions and views instead of windows, with the same parameters.

Nothing here is needed to understand the network: :mod:`vitlab.tokenizers.t2t` is the reference, and tests compare the
two.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.layers.kernels import attend
from vitlab.layers.linear import LINEAR
from vitlab.layers.plain import is_plain
from vitlab.layers.precision import product_dtype, without_autocast
from vitlab.layers.recompute import recomputed
from vitlab.tokenizers.splits import Side, Split
from vitlab.tokenizers.token_layers import TokenAttention, TokenMlp, TokenPerformer, TokenTransformer

Square = tuple[int, int, int]  # kernel, stride, padding: the splits supported here


def covers(splits: Sequence[Split], dilations: Sequence[Side], padding: str, layers: Sequence[Any]) -> list[str]:
    """Return the names of the options that need the reference; empty if the fast path supports all.

    Example:
        >>> covers([(7, 4, 2), (3, 2, 1)], [1, 1], "reflect", [TokenTransformer(147, 64, num_heads=4)])
        ['t2t_padding', 't2t_num_heads']
    """
    unsupported = {
        "t2t_kernels": any(not isinstance(side, int) for split in splits for side in split),
        "t2t_dilations": any(dilation not in (1, (1, 1)) for dilation in dilations),
        "t2t_padding": padding not in ("zero", "none"),
    }
    for layer in layers:  # all have the same options
        if isinstance(layer, TokenMlp):
            unsupported["t2t_attn"] = True
            continue
        attn = layer.attn if isinstance(layer, TokenTransformer) else layer
        unsupported["t2t_num_heads"] = getattr(attn, "num_heads", 1) > 1
        unsupported["t2t_value_skip"] = not attn.value_skip
        unsupported["t2t_norm_layer"] = type(layer.norm1) is not nn.LayerNorm or layer.norm1.bias is None
        unsupported["t2t_attn"] = bool(getattr(layer, "relu", False))
    return [name for name, is_unsupported in unsupported.items() if is_unsupported]


def goes_round_nothing(layer: nn.Module) -> bool:
    """Return whether the fast path of a token layer skips no hook, and no layer that a user has replaced.

    Example:
        >>> layer = TokenTransformer(147, 64)
        >>> before, hook = goes_round_nothing(layer), layer.attn.qkv.register_forward_hook(print)
        >>> before, goes_round_nothing(layer)
        (True, False)
    """
    if isinstance(layer, TokenTransformer):
        parts: list[Any] = [(layer, TokenTransformer), (layer.attn, TokenAttention), (layer.attn.qkv, *LINEAR)]
    elif isinstance(layer, TokenPerformer):
        parts = [(layer, TokenPerformer), (layer.kqv, *LINEAR), (layer.proj, *LINEAR)]
    else:
        return False
    return all(is_plain(*part) for part in [*parts, (layer.norm1, nn.LayerNorm)])


def fused_tokens(
    images: Tensor,
    splits: Sequence[Any],
    grids: Sequence[tuple[int, int]],
    layers: Sequence[Any],
    last: nn.Linear,
) -> Tensor:
    """Map ``(B, C, H, W)`` to ``(B, N, D)``: a token layer after each split, and ``last`` after the last one.

    Example:
        >>> from vitlab.tokenizers.t2t import T2TTokenizer
        >>> t2t, images = T2TTokenizer((32, 32), 3, embed_dim=8, fused=False).eval(), torch.randn(1, 3, 32, 32)
        >>> fast = fused_tokens(images, t2t.splits, t2t.grids, [t2t.attention1, t2t.attention2], t2t.project)
        >>> torch.allclose(fast, t2t(images), atol=1e-5)
        True
    """
    x = images
    for i, (split, layer) in enumerate(zip(splits[:-1], layers, strict=True)):
        x = layer_from_map(layer, x, split, is_image=i == 0)  # (B, h w, dim)
        x = x.unflatten(1, grids[i]).permute(0, 3, 1, 2)  # (B, dim, h, w), channels last
    return split_linear(x, splits[-1], last)


def layer_from_map(layer: TokenTransformer | TokenPerformer, x: Tensor, split: Square, is_image: bool) -> Tensor:
    """Map ``(B, C, h, w)`` to ``(B, N, dim)``, as ``layer(soft_split(x, *split))`` does.

    Example:
        >>> from vitlab.tokenizers.splits import soft_split
        >>> x, layer = torch.randn(1, 3, 32, 32), TokenTransformer(147, 64)
        >>> torch.allclose(layer_from_map(layer, x, (7, 4, 2), True), layer(soft_split(x, 7, 4, 2)), atol=1e-5)
        True
    """
    if isinstance(layer, TokenTransformer):
        attn = layer.attn
        qkv = split_norm_linear(x, split, layer.norm1, attn.qkv, is_image)[:, None]  # (B, 1, N, 3 dim)
        q, k, v = qkv.chunk(3, dim=-1)
        x = layer.dropout(v[:, 0] + attn.proj(attend(q, k, v, scale=attn.scale)[:, 0]))
    else:
        k, q, v = split_norm_linear(x, split, layer.norm1, layer.kqv, is_image).chunk(3, dim=-1)
        x = v + layer.dropout(attend_and_project(layer, q, k, v))
    return x + recomputed(layer.norm2, x, layer.mlp)


def attend_and_project(layer: TokenPerformer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Map three of ``(B, N, dim)`` to ``layer.proj(layer.attend(q, k, v))`` in fewer passes over the tokens.

    The common factor of the features cancels if the epsilon is scaled by its square; the projection acts on the
    context; the division acts on the features of the queries, which are half as wide as the values.

    Example:
        >>> layer, (q, k, v) = TokenPerformer(49, 8), torch.randn(3, 1, 9, 8)
        >>> torch.allclose(attend_and_project(layer, q, k, v), layer.proj(layer.attend(q, k, v)), atol=1e-5)
        True
    """
    dtype = torch.promote_types(v.dtype, torch.float32)
    with without_autocast(v):
        w, proj, bias = layer.w.to(dtype), layer.proj.weight.to(dtype), layer.proj.bias.to(dtype)
        directions = w.T.expand(len(q), -1, -1)
        q, k = q.to(dtype), k.to(dtype)
        q, k = (torch.baddbmm(x.square().sum(-1, keepdim=True) / -2, x, directions).exp_() for x in (q, k))
        context = k.transpose(-2, -1) @ v.to(dtype) @ proj.T  # (B, m, dim)
        total = k.sum(dim=-2, keepdim=True).transpose(-2, -1)  # (B, m, 1)
        return torch.baddbmm(bias, q / (q @ total + 1e-8 * len(w)), context).to(v.dtype)


def split_linear(x: Tensor, split: Square, linear: nn.Linear) -> Tensor:
    """Map ``(B, C, h, w)`` to ``(B, N, D)``, as ``linear(soft_split(x, *split))`` does.

    Example:
        >>> from vitlab.tokenizers.splits import soft_split
        >>> x, linear = torch.randn(1, 3, 32, 32), nn.Linear(147, 64)
        >>> torch.allclose(split_linear(x, (7, 4, 2), linear), linear(soft_split(x, 7, 4, 2)), atol=1e-5)
        True
    """
    k, s, p = split
    weight = linear.weight.unflatten(1, (-1, k, k))  # windows and kernels have the same order: channel, row, column
    return _tokens(F.conv2d(x, weight, linear.bias, stride=s, padding=p))


def split_norm_linear(x: Tensor, split: Square, norm: Any, linear: nn.Linear, is_image: bool) -> Tensor:
    """Map ``(B, C, h, w)`` to ``(B, N, D)``, as ``linear(norm(soft_split(x, *split)))`` does.

    Let m and r be the mean and inverse deviation of a window u, and W' the weight with its columns scaled by that of
    the normalization. Then W norm(u) + b = W' (r (u - m)) + shift. In half precision r (u - m) is made, in float32, and
    rounded: a product of half the width is faster than a convolution. In float32, W' (u - m) = W'' u, where W'' is W'
    minus the mean of each row. So a convolution with W'' needs no m, and r comes from two box filters of one channel.

    The result is as precise as normalizing first. Where an image is flat, r is large and W'' u is mostly rounding: so
    statistics of images are float64, and their convolution is one of each pixel minus the mean of its cell
    (:func:`_conv_by_cells`). On a GPU windows are made, as cuDNN may round to TensorFloat-32, 10 bits, before the mean
    is subtracted. After the first token layer no window is flat.

    Example:
        >>> from vitlab.tokenizers.splits import soft_split
        >>> x, norm, linear = torch.randn(1, 3, 32, 32), nn.LayerNorm(147), nn.Linear(147, 64)
        >>> y = split_norm_linear(x, (7, 4, 2), norm, linear, is_image=True)
        >>> torch.allclose(y, linear(norm(soft_split(x, 7, 4, 2))), atol=1e-5)
        True
    """
    k, dtype, wide = split[0], product_dtype(x), torch.promote_types(x.dtype, torch.float32)
    with without_autocast(x):
        weight = linear.weight.to(wide)
        shift = weight @ norm.bias.to(wide)  # (D,)
        shift = shift if linear.bias is None else shift + linear.bias
        weight = (weight * norm.weight).unflatten(1, (-1, k, k))
        if dtype.itemsize < 4 or (is_image and x.is_cuda):
            x = _windows(x.to(wide) if is_image else x, split)
            if is_image:  # exact where values are close: the mean of a flat window is off by more than they differ
                x = x - x[..., x.shape[2] // 2, None]
            x = F.layer_norm(x, [x.shape[2]], eps=norm.eps).to(dtype)
            return F.linear(x, weight.permute(0, 2, 3, 1).flatten(1).to(dtype), shift.to(dtype))
        weight = weight - weight.mean(dim=(1, 2, 3), keepdim=True)
        r = inverse_deviation(x.double() if is_image else x, split, norm.eps).to(wide)  # (B, 1, h', w')
        if is_image:
            return _conv_by_cells(x, weight, r, shift, split)
        y = F.conv2d(x, _channels_last(weight), stride=split[1], padding=split[2])  # (B, D, h', w')
        return _tokens(torch.addcmul(shift[:, None, None], y, r))


def _windows(x: Tensor, split: Square) -> Tensor:
    """Map ``(B, C, h, w)`` to its windows, ``(B, N, k k C)``, maybe a view: the channels of a pixel together."""
    k, s, p = split
    x = F.pad(x.permute(0, 2, 3, 1), (0, 0, p, p, p, p))
    if x.requires_grad:  # slices, as the gradient of unfold takes longer
        h, w = ((side - k) // s * s + 1 for side in x.shape[1:3])
        return torch.cat([x[:, i : i + h : s, j : j + w : s] for i in range(k) for j in range(k)], dim=3).flatten(1, 2)
    return x.contiguous().unfold(1, k, s).unfold(2, k, s).permute(0, 1, 2, 4, 5, 3).flatten(3).flatten(1, 2)


def _conv_by_cells(x: Tensor, weight: Tensor, r: Tensor, shift: Tensor, split: Square) -> Tensor:
    """Return r times the convolution of ``(B, C, h, w)``, plus shift, ``(B, N, D)``; every kernel must sum to 0.

    A window of k pixels with stride s consists of cells of s pixels, of which the last are cut off. The mean of each
    (cut) cell is subtracted from its pixels, and added back through the sum a_i of the kernel over the cell. As these
    sum to 0, only differences of means enter: sum_i a_i m_i = sum_i (a_0 + ... + a_i) (m_i - m_(i+1)). A flat window
    gives exact zeros.
    """
    k, s, p = split
    n = -(-k // s)  # cells on a side of a window
    h, w = ((side + 2 * p - k) // s + 1 for side in x.shape[2:])
    H, W = ((side + n - 1) * s for side in (h, w))
    x = F.pad(x, (p, W - p - x.shape[3], p, H - p - x.shape[2]))
    means = x.detach().mean(dim=1, keepdim=True)  # they cancel, so they need no gradient
    means = F.avg_pool2d(means, k - (n - 1) * s, s)
    x = x - means.repeat_interleave(s, dim=2).repeat_interleave(s, dim=3)
    y = _tokens(F.conv2d(x, _channels_last(weight), stride=s))
    r = r.flatten(1)[:, :, None]  # (B, N, 1)
    window_means = [means[:, 0, i : i + h, j : j + w].flatten(1) for i in range(n) for j in range(n)]
    steps = [(a - b)[:, :, None] * r for a, b in itertools.pairwise(window_means)]
    cell_weights = F.pad(weight.sum(dim=1), (0, n * s - k, 0, n * s - k)).unflatten(2, (n, s)).unflatten(1, (n, s))
    partial = cell_weights.sum(dim=(2, 4)).flatten(1).cumsum(dim=1)[:, :-1]  # (D, n n - 1)
    rest = torch.cat([*steps, torch.ones_like(r)], dim=2) @ torch.cat([partial.T, shift[None]])
    return rest.addcmul_(y, r)


def inverse_deviation(x: Tensor, split: Square, eps: float) -> Tensor:
    """Return ``1 / sqrt(variance + eps)`` of every zero-padded window of ``(B, C, h, w)``: ``(B, 1, h', w')``.

    Example:
        >>> inverse_deviation(torch.randn(1, 3, 32, 32), (7, 4, 2), eps=1e-5).shape
        torch.Size([1, 1, 8, 8])
    """
    k, s, p = split
    moments = torch.cat([x.sum(dim=1, keepdim=True), x.square().sum(dim=1, keepdim=True)], dim=1) / x.shape[1]
    mean, square = F.avg_pool2d(F.pad(moments, (p, p, p, p)), k, s).chunk(2, dim=1)
    return ((square - mean.square()).clamp(min=0) + eps).rsqrt()


def _channels_last(weight: Tensor) -> Tensor:
    return weight.contiguous(memory_format=torch.channels_last)  # so that the tokens come out channels last


def _tokens(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1).flatten(1, 2)  # (B, D, h, w), channels last, to (B, h w, D) without a copy
