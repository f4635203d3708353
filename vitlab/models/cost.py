"""Parameters, multiply-adds and tokens of a network, counted without running it where that is possible."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitlab.layers.custom import check_complete, spare
from vitlab.models.foreign import AnyNetwork
from vitlab.models.hooks import modes_kept
from vitlab.models.vit import VisionTransformer


def count_parameters(model: torch.nn.Module) -> int:
    """Return the number of trained values.

    Example:
        >>> count_parameters(torch.nn.Linear(3, 2))
        8
    """
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def count_all_parameters(model: torch.nn.Module) -> int:
    """Return the number of values of all parameters, also of those that are frozen.

    Example:
        >>> count_all_parameters(torch.nn.Linear(3, 2).requires_grad_(False))
        8
    """
    return sum(p.numel() for p in model.parameters())


def count_macs(model: VisionTransformer, img_size: tuple[int, int] | None = None) -> int:
    """Return the multiply-adds of a forward pass of one image in evaluation, at ``img_size`` if given; FLOPs are twice.

    Every matrix product counts, fused attention included, on the meta device, where T2T takes its reference path; where
    a part of the user's own reads values, in a pass of a black image. All tokens pass through the last block, as in
    published numbers, although ``forward`` may skip some. What a pass computes once for all its images counts whole,
    such as the rotations of ``liere`` and ``string``; see :func:`flop_counter`. Resampling positions to ``img_size``
    does not count: the network has the cost of one that was built for it.

    Example:
        >>> from vitlab.models import create_model
        >>> count_macs(create_model("vit_ti16"))
        1253683200
    """
    return macs_of_modules(model, img_size)[""]


def macs_of_modules(model: VisionTransformer | AnyNetwork, img_size: tuple[int, int] | None = None) -> dict[str, int]:
    """Return :func:`count_macs` of each module by name, such as ``blocks.0.attn``; the whole network is ``""``.

    Example:
        >>> from vitlab.models import create_model
        >>> macs = macs_of_modules(create_model("vit_ti16", depth=1))
        >>> macs["tokenizer"], macs["blocks.0.mlp"]
        (28901376, 58097664)
    """
    if isinstance(model, AnyNetwork):
        return _macs_of_any(model)
    value = next(model.parameters())
    images = torch.zeros(1, model.in_chans, *(img_size or model.img_size), dtype=value.dtype, device=value.device)
    with modes_kept(model):  # in training, a BatchNorm of the user's may refuse a batch of one image
        model.eval()
        found = _by_module(_counted(model, _AllTokens(model), images), "_AllTokens.model.")
        resampling = _by_module(_counted(model, _Resampling(model), images), "_Resampling.model.")[""]
    return found | {"": found[""] - resampling}


@contextmanager
def flop_counter() -> Iterator[FlopCounterMode]:
    """Yield torch's counter, which also counts solving linear equations and the matrix exponential.

    Attention and :class:`torch.nn.TransformerEncoderLayer` take the paths whose products it sees, on a CPU as well.

    An exponential counts as the five products of torch's Taylor polynomial of degree 18, Bader, Blanes and Casas 2019,
    "Computing the matrix exponential with an optimized Taylor polynomial approximation". The squarings that follow,
    one for each doubling of the norm beyond 3, depend on the weights and do not count.

    Example:
        >>> with flop_counter() as counter:
        ...     rotations = torch.matrix_exp(torch.zeros(3, 8, 8))
        >>> counter.get_total_flops() == 3 * 5 * 2 * 8**3
        True
    """
    linalg: Any = torch.ops.aten
    formulas = {linalg.linalg_matrix_exp: _exponential_flops, linalg._linalg_solve_ex: _solving_flops}
    is_fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=formulas) as counter:
            yield counter
    finally:
        torch.backends.mha.set_fastpath_enabled(is_fast)


def _exponential_flops(shape: Sequence[int], **_: Any) -> int:
    return 5 * 2 * math.prod(shape) * shape[-1]


def _solving_flops(shape: Sequence[int], right: Sequence[int], **_: Any) -> int:
    """Return the operations of an LU factorization, n^3 / 3 multiply-adds, and of n^2 for each right-hand side."""
    return 2 * math.prod(shape) * shape[-1] // 3 + 2 * math.prod(right) * shape[-1]


def _counted(model: VisionTransformer, part: torch.nn.Module, images: torch.Tensor) -> FlopCounterMode:
    """Return the counter of a pass of images through a module that holds the network."""
    try:
        with torch.no_grad(), flop_counter() as counter:
            call_on_meta(part, images.to("meta"))
    except Exception:  # such as a part of the user's own that reads values, which the meta device does not have
        state = {name: each.detach().clone() for name, each in _tensors(part)}  # a pass may change them
        with torch.no_grad(), _reference(model), flop_counter() as counter:
            _call(part, state, images)
    return counter


def call_on_meta(net: torch.nn.Module, images: torch.Tensor) -> Any:
    """Return the outputs of a network for images on the meta device, where its weights are for a while.

    Example:
        >>> call_on_meta(torch.nn.Linear(3, 2), torch.empty(1, 3, device="meta")).shape
        torch.Size([1, 2])
    """
    return _call(net, {name: torch.empty_like(each, device="meta") for name, each in _tensors(net)}, images)


def _call(net: torch.nn.Module, weights: dict[str, torch.Tensor], images: torch.Tensor) -> Any:
    """Return the outputs of a copy of a network with other weights: a part may keep something of its first call."""
    trial = spare(net, [each for _, each in _tensors(net)])
    outputs = functional_call(trial, weights, (images,), tie_weights=False)
    if isinstance(net, _AllTokens) and isinstance(trial, _AllTokens):  # a module of the user's may have other ways
        check_complete(net.model, trial.model)
    return outputs


def _tensors(net: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all parameters and buffers, those of a module with several names under the first alone.

    ``functional_call`` would replace the others once more, and leave its replacements behind.
    """
    for name, module in net.named_modules():
        yield from module.named_parameters(name, recurse=False, remove_duplicate=False)
        yield from module.named_buffers(name, recurse=False, remove_duplicate=False)


@contextmanager
def _reference(model: VisionTransformer) -> Iterator[None]:
    """Take the paths of the meta device, whose products are counted, and leave the random numbers as they were."""
    tokenizer: Any = model.tokenizer
    fused = getattr(tokenizer, "fused", None)
    with torch.random.fork_rng():
        try:
            if fused:
                tokenizer.fused = False
            yield
        finally:
            if fused:
                tokenizer.fused = True


def _macs_of_any(model: AnyNetwork) -> dict[str, int]:
    """Return the multiply-adds of a network that may not run on the meta device: of one pass of an image."""
    value = next(model.parameters(), torch.zeros(()))
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:  # the counter fails where a parameter itself enters a module
        parameter.requires_grad_(False)
    try:
        with torch.no_grad(), flop_counter() as counter:
            model(torch.zeros(1, model.in_chans, *model.img_size, dtype=value.dtype, device=value.device))
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
    return _by_module(counter, "AnyNetwork.net.")


def _by_module(counter: FlopCounterMode, prefix: str) -> dict[str, int]:
    """Return the multiply-adds that were counted, by the names of modules below ``prefix``; of all as ``""``."""
    macs = {name: sum(counts.values()) // 2 for name, counts in counter.get_flop_counts().items()}
    return {"": macs.get("Global", 0)} | {k.removeprefix(prefix): n for k, n in macs.items() if k.startswith(prefix)}


class _AllTokens(torch.nn.Module):
    def __init__(self, model: VisionTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.model.forward_head(self.model.forward_features(images))


class _Resampling(_AllTokens):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.model._at(tuple(images.shape[2:]))
        return images


def count_tokens(model: VisionTransformer) -> int:
    """Return the number of tokens L in every block: prefix tokens and patches.

    Example:
        >>> from vitlab.models import create_model
        >>> count_tokens(create_model("vit_ti16"))
        197
    """
    return model.num_prefix_tokens + model.grid_size[0] * model.grid_size[1]
