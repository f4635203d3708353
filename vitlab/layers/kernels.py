"""From queries, keys and values to the mixed values: two ways, and which of them is faster where."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.layers.precision import EMULATED, product_dtype

HAS_TILES = torch.cpu._is_amx_tile_supported()  # of this machine's processor; torch has no public name for it


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, scale: float | None = None, dropout: float = 0.0
) -> Tensor:
    """Map queries ``(B, A, L, d)``, keys and values to ``(B, A, L, d)`` with the faster of two kernels.

    Example:
        >>> q, k, v = torch.randn(3, 2, 4, 5, 8)  # 2 images, 4 heads, 5 tokens, 8 channels
        >>> attend(q, k, v).shape
        torch.Size([2, 4, 5, 8])
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    gradients = v.requires_grad, bias is not None and bias.requires_grad
    if torch.compiler.is_exporting() or prefers_sdpa(q.device.type, product_dtype(v), q.shape[:3], *gradients):
        return sdpa(q, k, v, bias, scale, dropout)
    return products(q, k, v, bias, scale, dropout)


def sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, dropout: float = 0.0) -> Tensor:
    """Map queries ``(B, A, L, d)``, keys and values to ``(B, A, L, d)`` without storing the logits (fused kernel).

    A bias of three dimensions gets a fourth: torch has no fused kernel for a mask of three.

    Example:
        >>> q, k, v = torch.randn(3, 2, 4, 5, 8)
        >>> torch.allclose(sdpa(q, k, v, None, 0.5), products(q, k, v, None, 0.5), atol=1e-5)
        True
    """
    bias = bias[None] if bias is not None and bias.dim() == 3 else bias
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=scale)


def products(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, dropout: float = 0.0) -> Tensor:
    """Map queries ``(B, A, L, d)``, keys and values to ``(B, A, L, d)`` with two matrix products and a softmax.

    Example:
        >>> q, k, v = torch.zeros(2, 4, 5, 8), torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 8)
        >>> torch.allclose(products(q, k, v, None, 1.0)[:, :, 0], v.mean(dim=2), atol=1e-5)  # a zero query: the mean
        True
    """
    logits = (q * scale) @ k.transpose(-2, -1)  # there are fewer queries than logits to scale
    weights = (logits if bias is None else logits + bias).softmax(dim=-1)
    return (F.dropout(weights, dropout) if dropout else weights) @ v


def prefers_sdpa(
    device: str, dtype: torch.dtype, queries: Sequence[int], gradient: bool, bias_gradient: bool = False
) -> bool:
    """Return whether the fused kernel is faster than :func:`products` for ``(B, A, L)`` queries.

    It is, except in two cases on a CPU: in half precision its backward pass is slow, without matrix tiles (AMX) its
    forward pass, too, unless the processor lacks such products (:data:`~vitlab.layers.precision.EMULATED`), and it has
    to store the logits for the gradient of a bias. ``vitlab bench attention`` measures this on a processor. It is
    also preferred where the logits would take more than 1 GiB.

    Features of the processor decide, not a measurement: the two round differently, so a run that is resumed, or trained
    by several processes, must take one way, however busy the machine is.

    Example:
        >>> prefers_sdpa("cpu", torch.float32, (8, 6, 197), gradient=True)
        True
    """
    B, A, L = queries
    if device != "cpu" or B * A * L * L * dtype.itemsize > 2**30:
        return True
    is_slow = dtype.itemsize < 4 and L < 1024 and (gradient or not HAS_TILES) and dtype not in EMULATED
    return not bias_gradient and not is_slow


KERNELS = (attend, sdpa, products)  # each query of them is computed without the others
