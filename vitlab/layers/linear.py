"""The linear layer of tokens, computed by oneDNN on processors where torch's own is slow in float32."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from vitlab.layers.precision import float32_precision
from vitlab.runs.machine import cpu_fields

LEAST = 2**21  # products of two numbers, below which torch's layer is faster
LEAST_WEIGHT = 2**14  # numbers, of a compiled layer, whose choice must not depend on the batch
PLAIN = (Tensor, nn.Parameter)  # neither quantized nor sharded


def _leaves_half() -> bool:
    """Return whether torch leaves half of this CPU unused in float32: on AMD's, MKL takes its kernels for AVX2.

    From family 26 (Zen 5) on, AVX-512 is twice as fast, and oneDNN uses it. Features of the processor decide, not a
    measurement, as for attention (:func:`~vitlab.layers.kernels.prefers_sdpa`). ``ATEN_CPU_CAPABILITY=avx2`` keeps
    torch, and vitlab, to MKL.
    """
    cpu = cpu_fields()
    is_new = cpu.get("vendor_id") == "AuthenticAMD" and int(cpu.get("cpu family", 0)) >= 26
    has_both = torch.backends.mkl.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return is_new and has_both and torch.backends.cpu.get_cpu_capability() == "AVX512"


MKL_LEAVES_HALF = _leaves_half()


class Linear(nn.Linear):
    """torch's linear layer: its parameters, and its results to rounding, computed by :func:`linear_layer`.

    What compares classes instead of asking ``isinstance`` does not find it, such as torch's eager ``quantize_dynamic``;
    for that, set ``layer.__class__ = torch.nn.Linear``.

    Example:
        >>> Linear(8, 4)(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 4])
    """

    def forward(self, input: Tensor) -> Tensor:
        """Map ``(..., in_features)`` to ``(..., out_features)``."""
        return linear_layer(input, self.weight, self.bias)


LINEAR = (nn.Linear, Linear)  # the classes whose call is no more than a linear layer, whoever computes it


def linear_layer(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Map ``(..., in)`` by a ``weight``, ``(out, in)``, to ``(..., out)`` with the faster of two libraries.

    Example:
        >>> x, weight, bias = torch.randn(2, 5, 8), torch.randn(4, 8), torch.randn(4)
        >>> torch.allclose(linear_layer(x, weight, bias), F.linear(x, weight, bias), atol=1e-6)
        True
    """
    if MKL_LEAVES_HALF and prefers_onednn(x, weight, bias):
        y: Tensor = onednn_linear(x, weight, bias)
        return y
    return F.linear(x, weight, bias)


def prefers_onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Return whether oneDNN computes this layer where :data:`MKL_LEAVES_HALF`: a large one of a CPU, in float32.

    Example:
        >>> prefers_onednn(torch.zeros(2**12, 64), torch.zeros(64, 64)), prefers_onednn(*torch.zeros(2, 64, 64))
        (True, False)
    """
    return x.is_cpu and _is_worth_it(x, weight) and _takes(x, weight, bias)


def _is_worth_it(x: Tensor, weight: Tensor) -> bool:
    """Return whether a layer is large enough, rounds nothing, and is not watched by what knows torch's operators alone.

    Those that count, export or transform operators do not know oneDNN's; :func:`torch.compile` learns it from here.
    """
    if torch.compiler.is_compiling():
        return weight.numel() >= LEAST_WEIGHT and _rounds_nothing() and not torch.compiler.is_exporting()
    if torch.jit.is_tracing() or x.dim() < 2 or x.numel() * weight.shape[0] < LEAST:
        return False
    is_transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    is_watched = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack() > 0
    return not is_transformed and not is_watched and _rounds_nothing()


def _rounds_nothing() -> bool:
    return not torch.is_autocast_enabled("cpu") and _is_exact()


def _is_exact() -> bool:
    return torch.backends.mkldnn.enabled is True and float32_precision("cpu")["products"] == "ieee"


_is_exact.__dict__["_dynamo_marked_constant"] = True  # a constant: torch.compile cannot trace it


def _takes(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether oneDNN can compute this; what does not fit together is for torch to refuse, in its words."""
    fits = x.shape[-1:] == weight.shape[1:] and (bias is None or bias.shape == weight.shape[:1])
    return fits and all(map(_is_float32, (x, weight, bias)))


def _is_float32(t: Tensor | None) -> bool:
    return t is None or (type(t) in PLAIN and t.dtype is torch.float32 and t.is_cpu)


@torch.library.custom_op("vitlab::onednn_linear", mutates_args=(), device_types="cpu")
def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Map ``(..., in)`` to ``(..., out)`` by oneDNN, in float32.

    Example:
        >>> x, weight = torch.randn(5, 8), torch.randn(4, 8)
        >>> torch.allclose(onednn_linear(x, weight, None), x @ weight.T, atol=1e-6)
        True
    """
    if not x.numel():  # no products to add up, which oneDNN refuses: gradients of a compiled network without images
        return F.linear(x, weight, bias)
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


@onednn_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    (x, weight), (wants_x, wants_weight) = inputs[:2], ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if wants_weight else None, weight if wants_x else None)  # as torch: no more than it reads


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    """Map the gradient of the output, ``(..., out)``, to those of ``x``, ``weight`` and ``bias``: two such layers."""
    (x, weight), (wants_x, wants_weight, wants_bias) = ctx.saved_tensors, ctx.needs_input_grad
    rows = g.reshape(-1, g.shape[-1])  # which `is_grads_batched` knows, as it does not know `flatten`
    return (
        onednn_linear(g, weight.t(), None) if wants_x else None,
        _of_weight(rows, x.reshape(-1, x.shape[-1])) if wants_weight else None,
        rows.sum(dim=0) if wants_bias else None,
    )


def _of_weight(g: Tensor, x: Tensor) -> Tensor:
    """Map ``(N, out)`` and ``(N, in)`` to the gradient of the weight, ``(out, in)``.

    Its transpose is the same product; oneDNN takes up to a quarter longer for the one with more rows.
    """
    if g.shape[1] > x.shape[1]:
        transposed: Tensor = onednn_linear(x.t(), g.t(), None)
        return transposed.t().contiguous()
    gradient: Tensor = onednn_linear(g.t(), x.t(), None)
    return gradient


onednn_linear.register_autograd(_backward, setup_context=_keep)
