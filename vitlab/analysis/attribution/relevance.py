"""Layer-wise relevance propagation (LRP): a backward pass that hands down shares of an output in place of gradients."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitlab.analysis.attribution.caught import caught_maps, score_of
from vitlab.models.foreign import AnyNetwork, gradients_of
from vitlab.models.walk import Asked

Share = Callable[[Tensor], list[Tensor | None]]  # the relevance of what goes in, from that of what comes out
SAME = {  # what goes in has the relevance of what comes out
    *("layer_norm", "rms_norm", "batch_norm", "normalize", "softmax", "dropout", "gelu", "relu", "silu", "sigmoid"),
    *("tanh", "hardtanh", "softplus", "elu", "exp", "pow", "__pow__", "square", "sqrt", "rsqrt", "neg", "__neg__"),
    *("clamp", "to", "float", "type_as"),
}
SUMS = {"add": 1, "__add__": 1, "__radd__": 1, "__iadd__": 1, "sub": -1, "__sub__": -1, "__isub__": -1}
PRODUCTS = {"mul", "__mul__", "__rmul__", "__imul__", "div", "__truediv__", "__itruediv__"}
LIKE = {"to", "type_as"}  # a second tensor tells only how the first one is kept
TERMS = {"matmul", "__matmul__", "bmm", "einsum", "mean", "sum", "adaptive_avg_pool1d", "adaptive_avg_pool2d"}

MOVES = re.compile(  # nodes of a graph that only move values: their usual backward passes do as well
    "(_Shared|View|UnsafeView|ReshapeAlias|Transpose|T|Permute|Expand|Repeat|Select|Slice|Index|IndexSelect|Gather|Cat|"
    "Stack|Unbind|Split|SplitWithSizes|Unsqueeze|Squeeze|Clone|Alias|AsStrided|Roll|Flip|ConstantPadNd|ToCopy)"
    r"Backward\d*"
)


def relevant_maps(net: Asked, images: Tensor, classes: Tensor) -> list[Tensor]:
    """Return the relevance of each weight of attention for the classes' outputs, ``(B, A, L, L)`` for each block."""
    if isinstance(net, AnyNetwork):
        found, maps = _handed_down(net, images)
        slopes = gradients_of(score_of(found, classes, "LRP"), maps)
        return [slope for slope in slopes if slope is not None]
    with torch.no_grad():
        positions = net.positions(images)
        x = net.embed(images, positions)
    with frozen(net), torch.enable_grad(), caught_maps(net) as maps, Relevance():
        x.requires_grad_()
        for i in range(len(net.blocks)):
            x = net.run_block(i, x, positions)
        found = net.forward_head(net.norm(x))
    return list(torch.autograd.grad(found, maps, F.one_hot(classes, found.shape[1]).to(found)))


def _handed_down(net: AnyNetwork, images: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return scores and maps of a network of another library, computed so that relevance goes back between them."""
    with frozen(net), torch.enable_grad(), Relevance():
        return net.graded_attention(images.detach().requires_grad_())


def shares_relevance(net: AnyNetwork) -> bool:
    """Return whether each operation between the maps of a network of another library and its outputs has a rule of LRP.

    Example:
        >>> shares_relevance(AnyNetwork(nn.Sequential(nn.Flatten(), nn.Linear(12, 2)), "a", (2, 2), 3))
        False
    """
    if net.reads is None:
        return False
    value = next(net.parameters())
    scores, maps = _handed_down(net, torch.zeros(1, net.in_chans, *net.img_size).to(value))
    return bool(maps) and has_rules(scores, maps)


@contextmanager
def frozen(net: nn.Module) -> Iterator[None]:
    """Inside a ``with`` block, no parameter takes a gradient."""
    needed = [parameter for parameter in net.parameters() if parameter.requires_grad]
    try:
        for parameter in needed:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in needed:
            parameter.requires_grad_()


class Relevance(TorchFunctionMode):
    """Inside a ``with`` block, operations on tensors that need a gradient get backward passes that carry relevance.

    The rules of Chefer et al. 2021 (arXiv:2012.09838): a linear layer shares by its positive products alone, and its
    bias has none; a product of matrices gives half to each factor, by its terms; a sum gives to each part by its terms,
    scaled so that both have together what the sum of the image had; norms, activations and softmax pass it on. What
    only moves values (views, indices, concatenation) has its usual backward pass, which does the same. What needs no
    gradient has no relevance, so parameters must be frozen. What goes in has as much together as what comes out,
    but for outputs of a linear layer of which no product is above 0: theirs is lost.

    Example:
        >>> x, layer = torch.tensor([[1.0, 2.0, -1.0]], requires_grad=True), torch.nn.Linear(3, 1).requires_grad_(False)
        >>> _ = layer.weight.copy_(torch.tensor([[1.0, 1.5, 3.0]]))
        >>> with Relevance():
        ...     y = layer(x)
        >>> torch.autograd.grad(y, x, torch.ones_like(y))[0]  # of 1 + 3, and none for the product below 0
        tensor([[0.2500, 0.7500, 0.0000]])
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute ``func``, with the backward pass of its rule where it has one."""
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in LIKE:
            args = (args[0], *(each.detach() if isinstance(each, Tensor) else each for each in args[1:]))
        inputs = [each for each in args if isinstance(each, Tensor)]
        if not torch.is_grad_enabled() or not any(each.requires_grad for each in inputs):
            return func(*args, **kwargs)
        if name == "multi_head_attention_forward" and _is_plain(args, kwargs):
            with self:
                return _attention(*args)
        args = (args[0].clone(), *args[1:]) if name in SAME or name.startswith("__i") else args  # nothing in place

        def compute(*own: Tensor) -> Tensor:
            given = iter(own)
            return func(*(next(given) if isinstance(each, Tensor) else each for each in args), **kwargs)

        share = _rule(name, inputs, compute)
        return compute(*inputs) if share is None else _Shared.apply(compute, share, *inputs)


class _Shared(torch.autograd.Function):
    """The values of an operation, and the shares of its relevance."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Tensor], share: Share, *inputs: Tensor) -> Tensor:
        ctx.share = share
        return compute(*inputs)

    @staticmethod
    def backward(ctx: Any, relevance: Tensor) -> Any:
        return None, None, *ctx.share(relevance)


def _rule(name: str, inputs: list[Tensor], compute: Callable[..., Tensor]) -> Share | None:
    """Return how an operation of this name shares relevance; None if its gradient is a share already."""
    carry = [each.requires_grad for each in inputs]
    x = [each.detach() for each in inputs]
    if name == "linear" and carry[1:] == [False] * (len(x) - 1):
        return lambda relevance: [_of_linear(x[0], x[1], relevance), *[None] * (len(x) - 1)]
    if name in TERMS:
        return lambda relevance: _by_terms(x, carry, compute, relevance)
    if name in SUMS and len(x) == 2 and all(carry):
        return lambda relevance: _of_sum(x[0], SUMS[name] * x[1], relevance)
    if name in SAME or name in PRODUCTS or name in SUMS:
        count = sum(carry)
        return lambda relevance: [
            (relevance / count).sum_to_size(each.shape) if has else None for each, has in zip(x, carry, strict=True)
        ]
    return None


def has_rules(output: Tensor, inputs: Sequence[Tensor]) -> bool:
    """Return whether each operation of a forward pass in the mode has a rule, from ``inputs`` to an ``output``.

    Example:
        >>> x = torch.ones(1, 3, requires_grad=True)
        >>> with Relevance():
        ...     y, z = x.softmax(1)[:, :2].sum(), x.sin().sum()
        >>> has_rules(y, [x]), has_rules(z, [x])
        (True, False)
    """
    ends = {(each * 1).grad_fn.next_functions[0][0] for each in inputs}  # type: ignore[union-attr]
    leads: dict[Any, bool] = {None: False}  # whether a node comes after an input
    stack: list[Any] = [output.grad_fn]
    after: list[Any] = []
    while stack:
        node = stack[-1]
        if node in leads:
            stack.pop()
            continue
        before = [each for each, _ in node.next_functions]
        if node in ends:
            leads[node] = True
        elif missing := [each for each in before if each not in leads]:
            stack += missing
            continue
        else:
            leads[node] = any(leads[each] for each in before)
            after += [node] if leads[node] else []
        stack.pop()
    return all(MOVES.fullmatch(node.name().rpartition("::")[2]) for node in after)


def _is_plain(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether :func:`_attention` computes the same: no masks, nothing added to the keys, one width."""
    extra = (*args[7:10], *(kwargs.get(name) for name in ("key_padding_mask", "attn_mask", "use_separate_proj_weight")))
    return not any(isinstance(each, Tensor) or each for each in extra) and args[0].ndim == 3


def _attention(
    query: Tensor, key: Tensor, value: Tensor, width: int, heads: int, weight: Tensor, bias: Tensor | None,
    bias_k: None, bias_v: None, zeros: bool, dropout: float, out_weight: Tensor, out_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute what :class:`torch.nn.MultiheadAttention` does, one operation at a time, so that each has its rule.

    Returns:
        The ``(L, B, D)`` output, and ``(B, A, L, S)`` weights.
    """
    biases = [None] * 3 if bias is None else bias.chunk(3)
    each = zip((query, key, value), weight.chunk(3), biases, strict=True)
    q, k, v = (F.linear(x, w, b).unflatten(2, (heads, -1)).permute(1, 2, 0, 3) for x, w, b in each)
    weights = (q * (width // heads) ** -0.5 @ k.transpose(2, 3)).softmax(dim=3)
    return F.linear((weights @ v).permute(2, 0, 1, 3).flatten(2), out_weight, out_bias), weights


def _of_linear(x: Tensor, weight: Tensor, relevance: Tensor) -> Tensor:
    above, below = x.clamp(min=0), x.clamp(max=0)
    raising, lowering = weight.clamp(min=0), weight.clamp(max=0)
    each = _over(relevance, above @ raising.T + below @ lowering.T)
    return above * (each @ raising) + below * (each @ lowering)


def _by_terms(
    x: list[Tensor], carry: list[bool], compute: Callable[..., Tensor], relevance: Tensor
) -> list[Tensor | None]:
    """Share by the terms of something that is linear in each of its inputs, evenly between these."""
    with torch.enable_grad():
        own = [each.detach().requires_grad_(has) for each, has in zip(x, carry, strict=True)]
        value = compute(*own)
        needed = [each for each in own if each.requires_grad]
        gradients = iter(torch.autograd.grad(value, needed, _over(relevance, value.detach())))
    return [each * next(gradients) / len(needed) if has else None for each, has in zip(x, carry, strict=True)]


def _of_sum(a: Tensor, b: Tensor, relevance: Tensor) -> list[Tensor | None]:
    each = _over(relevance, a + b)
    parts = [(a * each), (b * each)]
    totals = [part.flatten(1).sum(dim=1) for part in parts]  # of each image
    size = totals[0].abs() + totals[1].abs()
    found: list[Tensor | None] = []
    for part, total, of in zip(parts, totals, (a, b), strict=True):
        factor = _over(_over(total.abs(), size) * relevance.flatten(1).sum(dim=1), total)
        found.append((part * factor.view(-1, *[1] * (part.ndim - 1))).sum_to_size(of.shape))
    return found


def _over(a: Tensor, b: Tensor) -> Tensor:
    """Divide; 0 where ``b`` is 0."""
    return torch.where(b == 0, 0.0, a / (b + b.sign() * 1e-9))
