"""Convolutions that stand for linear maps are as exact as these: TensorFloat-32, emulated on a CPU and on a GPU."""

import pytest
import torch
import torch.nn.functional as F

from tests.networks import randomized
from vitlab.layers import precision
from vitlab.layers.precision import convolutions_round, float32_precision, let_convolutions_follow
from vitlab.tokenizers.t2t import T2TTokenizer

BOTH = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def tf32(x):
    """Round to 10 bits behind the point, to the nearest."""
    return ((x.float().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


@pytest.fixture
def torchs_default(monkeypatch):
    """Convolutions round as they do on a GPU unless told otherwise; a CPU does what cuDNN would."""
    conv = F.conv2d

    def rounded(x, weight, *args, **kwargs):
        if x.dtype is torch.float32 and not x.is_cuda and torch.backends.cudnn.conv.fp32_precision == "tf32":
            x, weight = tf32(x), tf32(weight)
        return conv(x, weight, *args, **kwargs)

    before = torch.backends.cudnn.conv.fp32_precision == "tf32"
    torch.backends.cudnn.allow_tf32 = True
    monkeypatch.setattr(F, "conv2d", rounded)
    monkeypatch.setattr(precision, "ROUNDING", ("cpu", "cuda"))
    yield
    torch.backends.cudnn.allow_tf32 = before


def errors(device, t2t_attn):
    """Return how far tokens lie from float64's: those of the way that is taken, and those of the fast way."""
    torch.manual_seed(0)
    net = randomized(T2TTokenizer((64, 64), 3, 16, t2t_attn=t2t_attn, t2t_dim=16).to(device), 0.2)
    images = torch.randn(2, 3, 64, 64, device=device)
    with torch.no_grad():
        taken = net(images)
        fused = net.is_fused(images)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(precision, "ROUNDING", ())
            fast = net(images)
        exact = net.double()(images.double())
    return fused, float((taken - exact).abs().max()), float((fast - exact).abs().max())


@pytest.mark.parametrize("device", BOTH)
@pytest.mark.parametrize("t2t_attn", ["performer", "transformer"])
def test_the_fast_path_is_not_taken_where_only_convolutions_round(torchs_default, device, t2t_attn):
    assert convolutions_round()
    fused, taken, fast = errors(device, t2t_attn)
    assert not fused and taken < 2e-5 and fast > 2e-4


@pytest.mark.parametrize("device", BOTH)
@pytest.mark.parametrize("t2t_attn", ["performer", "transformer"])
def test_convolutions_follow_products(torchs_default, device, t2t_attn):
    let_convolutions_follow()
    assert float32_precision("cuda") == {"products": "ieee", "convolutions": "ieee"}
    fused, taken, fast = errors(device, t2t_attn)
    assert fused and taken == fast < 2e-5


def test_convolutions_may_round_where_products_do(torchs_default):
    torch.set_float32_matmul_precision("high")
    try:
        let_convolutions_follow()
        assert float32_precision("cuda") == {"products": "tf32", "convolutions": "tf32"} and not convolutions_round()
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.slow
def test_a_compiled_network_takes_the_same_path(torchs_default):
    net, images = T2TTokenizer((16, 16), 1, 8, t2t_kernels=(3, 3), t2t_dim=4).eval(), torch.randn(1, 1, 16, 16)
    with torch.no_grad():
        compiled = torch.compile(net, fullgraph=True, backend="eager")(images)
        assert torch.equal(compiled, net(images))
