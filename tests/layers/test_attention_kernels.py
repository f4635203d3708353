"""Which kernel attention takes, and that it makes no difference to the result."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitlab.layers import kernels
from vitlab.layers.attention import Attention
from vitlab.layers.kernels import attend, prefers_sdpa, products, sdpa
from vitlab.layers.pos_embed import build_pos_embed

FLOAT, BFLOAT = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("device", "dtype", "queries", "gradients", "expected"),
    [  # of a CPU with matrix tiles
        ("cpu", FLOAT, (8, 6, 197), (True, False), True),
        ("cpu", FLOAT, (8, 6, 197), (False, False), True),
        ("cpu", FLOAT, (8, 6, 197), (True, True), False),  # of the bias
        ("cpu", BFLOAT, (8, 6, 197), (False, False), True),
        ("cpu", BFLOAT, (8, 6, 197), (True, False), False),
        ("cpu", BFLOAT, (8, 1, 1024), (True, False), True),
        ("cpu", torch.float16, (8, 6, 256), (True, False), False),
        ("cpu", torch.float64, (8, 6, 197), (True, False), True),
        ("cpu", FLOAT, (1, 1, 20000), (True, True), True),  # scores of 1.6 GB
        ("cuda", BFLOAT, (64, 3, 65), (True, True), True),
        ("meta", BFLOAT, (1, 3, 65), (True, True), True),
    ],
)
def test_the_kernel_follows_device_dtype_shape_and_gradients(device, dtype, queries, gradients, expected, monkeypatch):
    monkeypatch.setattr(kernels, "HAS_TILES", True)
    monkeypatch.setattr(kernels, "EMULATED", frozenset())
    assert prefers_sdpa(device, dtype, queries, *gradients) == expected


@pytest.mark.parametrize(
    ("dtype", "tokens", "expected"),
    [(BFLOAT, 197, False), (torch.float16, 784, False), (BFLOAT, 1024, True), (FLOAT, 197, True)],
)
def test_a_cpu_without_matrix_tiles_multiplies_in_half_precision(dtype, tokens, expected, monkeypatch):
    monkeypatch.setattr(kernels, "HAS_TILES", False)
    monkeypatch.setattr(kernels, "EMULATED", frozenset())
    assert prefers_sdpa("cpu", dtype, (8, 6, tokens), gradient=False) == expected


@pytest.mark.parametrize("gradient", [True, False])
def test_a_cpu_without_products_of_a_type_takes_the_fused_kernel(gradient, monkeypatch):
    monkeypatch.setattr(kernels, "HAS_TILES", False)
    monkeypatch.setattr(kernels, "EMULATED", frozenset({torch.float16}))
    assert prefers_sdpa("cpu", torch.float16, (8, 6, 197), gradient)
    assert not prefers_sdpa("cpu", BFLOAT, (8, 6, 197), gradient)
    assert not prefers_sdpa("cpu", torch.float16, (8, 6, 197), gradient, bias_gradient=True)


@pytest.mark.parametrize("scale", [None, 0.0, 0.3])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("rows", [1, 7])
def test_both_kernels_give_the_same_values_and_gradients(scale, with_bias, rows, monkeypatch):
    q, k, v = (torch.randn(2, 3, 7, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    bias = torch.randn(3, 7, 7, dtype=torch.float64, requires_grad=True) if with_bias else None
    inputs, results = [x for x in (q, k, v, bias) if x is not None], []
    for choice in (True, False):
        monkeypatch.setattr(kernels, "prefers_sdpa", lambda *_, choice=choice: choice)
        y = attend(q[:, :, :rows], k, v, None if bias is None else bias[:, :rows], scale)
        results.append((y, *torch.autograd.grad(y.square().sum(), inputs)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


BIASES = ["relpos", "alibi2d", "cpb", "fire"]


@pytest.mark.parametrize("pos_embed", BIASES)
def test_a_bias_takes_the_fused_kernel_of_a_cpu(pos_embed):
    position = build_pos_embed(pos_embed, (2, 3), 16, 2, 2, 1)
    attn = Attention(16, 2)
    attn.kernel = sdpa
    with torch.no_grad(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # raises where the kernel cannot
        attn(torch.randn(2, 7, 16), position, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("pos_embed", BIASES)
def test_a_bias_takes_the_fused_kernel_of_a_gpu_with_its_gradients(pos_embed):
    position = build_pos_embed(pos_embed, (14, 14), 64, 2, 2, 1).cuda()
    attn, x = Attention(64, 2).cuda(), torch.randn(2, 197, 64, device="cuda", requires_grad=True)
    inputs, results = [x, *attn.parameters(), *(p for p in position.parameters() if p.requires_grad)], []
    for attn.kernel, backend in ((products, SDPBackend.MATH), (sdpa, SDPBackend.EFFICIENT_ATTENTION)):
        with sdpa_kernel(backend):
            y = attn(x, position, 1)
            results.append((y, *torch.autograd.grad(y.square().sum(), inputs, allow_unused=True)))
    for one, other in zip(*results, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("pos_embed", ["none", "relpos", "alibi2d", "rope2d", "rope_mixed"])
@pytest.mark.parametrize("kernel", [products, sdpa])
def test_computing_the_first_row_alone_gives_the_first_row_of_all(pos_embed, kernel):
    position = build_pos_embed(pos_embed, (2, 3), 16, 2, 2, 1)
    attn = Attention(16, 2, qk_norm=True, value_skip=True)
    attn.kernel = kernel
    x = torch.randn(2, 7, 16)
    torch.testing.assert_close(attn(x, position, 1, first_only=True), attn(x, position, 1)[:, :1])


@pytest.mark.parametrize("qkv_bias", [True, False])
def test_computing_the_first_row_alone_costs_one_query_and_changes_no_gradient(qkv_bias):
    attn, position = Attention(16, 2, qkv_bias=qkv_bias).double(), build_pos_embed("none", (2, 3), 16, 2, 1, 1)
    attn.kernel = products  # the counter misses the fused kernel of a CPU
    x = torch.randn(3, 7, 16, dtype=torch.float64, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        short = attn(x, position, 0, first_only=True)
    keys_and_values, query_and_output, scores_and_sums = 7 * 16 * 32, 2 * 16 * 16, 2 * 7 * 16
    assert counter.get_total_flops() == 2 * 3 * (keys_and_values + query_and_output + scores_and_sums)
    of = [x, *attn.parameters()]
    pairs = zip(*(torch.autograd.grad(y.square().sum(), of) for y in (short, attn(x, position, 0)[:, :1])), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_autocast_decides_the_precision_of_queries_in_float32(monkeypatch):
    asked = []
    monkeypatch.setattr(kernels, "prefers_sdpa", lambda *arguments: bool(asked.append(arguments)))
    q = torch.randn(1, 1, 5, 4)
    with torch.autocast("cpu", torch.bfloat16):  # T2T's first token layer scales its windows in float32
        attend(q, q, q)
    assert asked == [("cpu", torch.bfloat16, (1, 1, 5), False, False)]


def test_training_and_inference_take_the_kernel_that_the_rule_names(monkeypatch):
    asked = []
    monkeypatch.setattr(kernels, "prefers_sdpa", lambda *arguments: bool(asked.append(arguments)))
    attn, position = Attention(16, 2), build_pos_embed("relpos", (2, 3), 16, 2, 1, 1)
    for gradient in (True, False):
        with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(gradient):
            attn(torch.randn(3, 7, 16), position, 0)
    assert asked == [("cpu", torch.bfloat16, (3, 2, 7), trains, trains) for trains in (True, False)]
