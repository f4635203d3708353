"""The soft split, and the soft split with the linear map after it as one convolution, which writes no windows."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Split = tuple[int, int, int]  # kernel, stride, padding


def soft_split(x: Tensor, kernel: int, stride: int, padding: int) -> Tensor:
    """Map ``(B, C, h, w)`` to ``(B, N, C kernel kernel)``: overlapping windows in raster order, zeros outside."""
    return F.unfold(x, kernel, stride=stride, padding=padding).transpose(1, 2)


def split_linear(x: Tensor, split: Split, linear: nn.Linear) -> Tensor:
    """Map ``(B, C, h, w)`` to ``(B, N, D)``, as ``linear(soft_split(x, *split))`` does."""
    k, s, p = split
    weight = linear.weight.unflatten(1, (-1, k, k))  # a window is in the order of a kernel: channel, row, column
    return _tokens(F.conv2d(x, weight, linear.bias, stride=s, padding=p))


def split_norm_linear(x: Tensor, split: Split, norm: nn.LayerNorm, linear: nn.Linear, is_image: bool) -> Tensor:
    """Map ``(B, C, h, w)`` to ``(B, N, D)``, as ``linear(norm(soft_split(x, *split)))`` does.

    With mean m and inverse deviation r of a window u, and W' the weight with its columns scaled by the normalisation's,
    W norm(u) + b is r W' (u - m) + shift; and W' (u - m) = (W' less the mean of each of its rows) u. So the convolution
    needs no m, and r comes from two box filters of one channel.

    The precision is that of normalising first. An image is flat in places, where r is large and the difference of the
    two means cancels: its statistics are float64 and its convolution float32, under autocast too. The value of a corner
    pixel, which changes nothing else, is taken off: a background, a frame, a bar becomes exact zeros. After the first
    token layer no window is flat: float32 statistics, and autocast may choose bfloat16 for the convolution, but not
    float16, which values that are not normalised yet can overflow.
    """
    if is_image and x.is_cuda:  # cuDNN may round to TensorFloat-32, 10 bits, before the mean is subtracted
        return linear(norm(soft_split(x, *split)))
    k, s, p = split
    device, wide = x.device.type, torch.promote_types(x.dtype, torch.float32)
    narrow = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    dtype = torch.bfloat16 if narrow is torch.bfloat16 and not is_image else wide
    out = x.dtype
    if is_image:
        corner = x[:, :, 0, 0].detach().mean(dim=1, dtype=wide)
        x, p = F.pad(x.to(wide), (p, p, p, p)) - corner[:, None, None, None], 0
    with torch.autocast(device, enabled=False):
        weight = linear.weight.to(wide)
        shift = weight @ norm.bias.to(wide)  # (D,)
        shift = shift if linear.bias is None else shift + linear.bias
        weight = weight * norm.weight
        weight = (weight - weight.mean(dim=1, keepdim=True)).unflatten(1, (-1, k, k))
        weight = weight.to(dtype, memory_format=torch.channels_last)  # so that the tokens come out channels last
        y = F.conv2d(x.to(dtype), weight, stride=s, padding=p)  # (B, D, h', w')
        r = inverse_deviation(x.to(torch.float64 if is_image else wide), (k, s, p), norm.eps).to(wide)
        return _tokens(torch.addcmul(shift[:, None, None], y, r).to(out))


def inverse_deviation(x: Tensor, split: Split, eps: float) -> Tensor:
    """Return ``1 / sqrt(variance + eps)`` of every window of ``(B, C, h, w)``, zeros outside: ``(B, 1, h', w')``."""
    k, s, p = split
    moments = torch.cat([x.mean(dim=1, keepdim=True), x.square().mean(dim=1, keepdim=True)], dim=1)
    mean, square = F.avg_pool2d(F.pad(moments, (p, p, p, p)), k, s).chunk(2, dim=1)
    return ((square - mean.square()).clamp(min=0) + eps).rsqrt()


def _tokens(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1).flatten(1, 2)  # (B, D, h, w), channels last, to (B, h w, D) without a copy
