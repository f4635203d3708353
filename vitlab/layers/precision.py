"""Switch off autocast where it would hurt, unscale and measure gradients, and query how a device rounds float32."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from vitlab.errors import UsageError

ROUNDING = ("cuda",)  # devices that may round float32 operands to TensorFloat-32, 10 bits


def _emulated() -> frozenset[torch.dtype]:
    """Return the types whose products this machine's CPU lacks, as torch tells; none where its build does not tell."""
    asked = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    mkldnn = torch.ops.mkldnn
    return frozenset(dtype for dtype, name in asked.items() if hasattr(mkldnn, name) and not getattr(mkldnn, name)())


EMULATED = _emulated()  # half precision that this CPU multiplies number by number, tens of times slower than float32


def half_precision(precision: str) -> torch.dtype | None:
    """Return the half-precision type that a value of Lightning's ``trainer.precision`` asks for; None if none.

    Example:
        >>> half_precision("bf16-mixed"), half_precision("32-true")
        (torch.bfloat16, None)
    """
    name = str(precision).partition("-")[0]
    return {"bf16": torch.bfloat16, "16": torch.float16}.get(name)


def check_average(name: str, precision: str) -> None:
    """Refuse to average weights of 16 bits, of which the average would hardly move: a step is below their rounding.

    Args:
        name: What keeps the average.
        precision: Value of Lightning's ``trainer.precision``.

    Raises:
        UsageError: The weights have 16 bits.

    Example:
        >>> check_average("EMA", "bf16-mixed")
        >>> check_average("EMA", "bf16-true")
        Traceback (most recent call last):
        vitlab.errors.UsageError: EMA needs weights of 32 bits: set --trainer.precision=bf16-mixed, got bf16-true
    """
    if half_precision(precision) and precision.endswith("-true"):
        mixed = precision.replace("true", "mixed")
        raise UsageError(f"{name} needs weights of 32 bits: set --trainer.precision={mixed}, got {precision}")


def unscale(trainer: Any, optimizer: torch.optim.Optimizer) -> None:
    """Divide gradients by the factor of a float16 scaler before they are measured or clipped, unless that is done.

    Lightning leaves it to the step of optimizers that can do it, the fused ones of torch.

    Args:
        trainer: Lightning's trainer.
        optimizer: An optimizer that is about to step.

    Example:
        >>> from types import SimpleNamespace
        >>> unscale(SimpleNamespace(precision_plugin=SimpleNamespace(scaler=None)), torch.optim.SGD([torch.zeros(1)]))
    """
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is None or all(p.grad is None for group in optimizer.param_groups for p in group["params"]):
        return  # of a step without a loss: the scaler is not asked to go on
    if scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
        scaler.unscale_(optimizer)


def norm_of_gradients(module: torch.nn.Module) -> Tensor:
    """Return the norm of all gradients together; of shards, a sharded tensor.

    Example:
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> layer.weight.grad = torch.tensor([[3.0, 4.0]])
        >>> norm_of_gradients(layer)
        tensor(5.)
    """
    return torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])


def full_tensor(value: Tensor) -> Tensor:
    """Return the whole tensor of which each process has a shard; any other as it is.

    Example:
        >>> full_tensor(torch.ones(2))
        tensor([1., 1.])
    """
    whole: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value  # without importing DTensor
    return whole


def without_autocast(x: Tensor) -> torch.autocast:
    """Return a context without autocast for the device of ``x``; the meta device has none, and gets the CPU's.

    Example:
        >>> with without_autocast(torch.empty(1, device="meta")):
        ...     torch.is_autocast_enabled("cpu")
        False
    """
    return torch.autocast(_device(x), enabled=False)


def autocast_again(x: Tensor) -> Callable[[], torch.autocast]:
    """Return what makes contexts with the autocast that the device of ``x`` has now, to compute something again later.

    Example:
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     again = autocast_again(torch.zeros(1))
        >>> with again():
        ...     torch.is_autocast_enabled("cpu")
        True
    """
    device = _device(x)
    return partial(torch.autocast, device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the type in which a matrix product of ``x`` is computed: under autocast that of autocast.

    Example:
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     product_dtype(torch.zeros(1))
        torch.bfloat16
    """
    is_cast = torch.is_autocast_enabled(_device(x)) and x.dtype is not torch.float64
    return torch.get_autocast_dtype(_device(x)) if is_cast else x.dtype


def _device(x: Tensor) -> str:
    return "cpu" if x.device.type == "meta" else x.device.type


def float32_precision(device: str) -> dict[str, str]:
    """Return how a device rounds the operands of float32 products and convolutions: ieee (not at all), tf32 or bf16.

    Example:
        >>> float32_precision("cpu")
        {'products': 'ieee', 'convolutions': 'ieee'}
    """
    backends: Any = torch.backends
    kinds = (
        (backends.cuda.matmul, backends.cudnn.conv)
        if device == "cuda"
        else (backends.mkldnn.matmul, backends.mkldnn.conv)
    )
    words = (str(kind.fp32_precision) for kind in kinds)
    return dict(zip(("products", "convolutions"), ("ieee" if word == "none" else word for word in words), strict=True))


def convolutions_round() -> bool:
    """Return whether a GPU rounds operands of float32 convolutions but not of products, which is torch's default.

    Example:
        >>> convolutions_round() and float32_precision("cuda")["products"] != "ieee"
        False
    """
    precision = float32_precision("cuda")
    return precision["convolutions"] == "tf32" and precision["products"] == "ieee"


convolutions_round.__dict__["_dynamo_marked_constant"] = True  # a constant: torch.compile cannot trace it


def convolves_as_products(x: Tensor) -> bool:
    """Return whether a convolution of ``x`` is as precise as the matrix product that it would replace.

    Example:
        >>> convolves_as_products(torch.zeros(1))
        True
    """
    device = x.device.type
    if device not in ROUNDING or x.dtype is not torch.float32 or torch.is_autocast_enabled(device):
        return True
    return not convolutions_round()


def let_convolutions_follow() -> None:
    """Make float32 convolutions on a GPU as precise as products (``torch.set_float32_matmul_precision``), process-wide.

    Example:
        >>> let_convolutions_follow()
        >>> convolutions_round()
        False
    """
    if convolutions_round():
        torch.backends.cudnn.allow_tf32 = False
