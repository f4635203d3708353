"""The linear layer by oneDNN, for processors where torch's is slow: the same function, gradients and contracts."""

import copy
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, jvp, vmap
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from vitlab.layers import linear as module
from vitlab.layers.linear import Linear, linear_layer
from vitlab.models import VisionTransformer

pytestmark = pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="a torch without oneDNN")


@pytest.fixture
def calls(monkeypatch):
    """Act as a processor where MKL is slow; list the shapes that oneDNN is given."""
    shapes, real = [], module.onednn_linear

    def counted(x, weight, bias):
        shapes.append(tuple(x.shape))
        return real(x, weight, bias)

    monkeypatch.setattr(module, "onednn_linear", counted)
    monkeypatch.setattr(module, "MKL_LEAVES_HALF", True)
    return shapes


def gradients(layer, *tensors):
    wanted = [t for t in tensors if t is not None and t.requires_grad]
    return torch.autograd.grad(layer(*tensors).square().sum(), wanted)


@pytest.mark.parametrize("shape", [(7, 65, 147), (2, 3, 33, 147), (455, 147)])
@pytest.mark.parametrize(("bias", "frozen"), [(True, False), (False, False), (True, True)])
def test_values_and_gradients_are_those_of_torch(calls, shape, bias, frozen):
    x = torch.randn(shape, requires_grad=True)
    weight = (torch.randn(192, 147) / 12).requires_grad_(not frozen)
    offset = torch.randn(192).requires_grad_(not frozen) if bias else None
    exact = [None if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in (x, weight, offset)]
    torch.testing.assert_close(linear_layer(x, weight, offset).double(), F.linear(*exact), atol=1e-5, rtol=1e-5)
    for found, expected in zip(gradients(linear_layer, x, weight, offset), gradients(F.linear, *exact), strict=True):
        assert (found.double() - expected).abs().max() < 2e-6 * expected.abs().max()
    assert calls[0] == calls[1] == shape


def test_other_layouts_and_second_derivatives(calls):
    x, weight = torch.randn(147, 400, requires_grad=True), torch.randn(147, 192, requires_grad=True)

    def second(layer):
        (first,) = torch.autograd.grad(layer(x.t(), weight.t()).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [x, weight])

    for found, expected in zip(second(linear_layer), second(F.linear), strict=True):
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    assert len(calls) > 3


@pytest.mark.parametrize("frozen", ["x", "weight", "both"])
def test_no_more_is_kept_than_a_gradient_reads(calls, frozen):
    x, weight = torch.randn(455, 147), torch.randn(192, 147)
    x.requires_grad_(frozen == "weight")
    weight.requires_grad_(frozen == "x")
    bias, kept = torch.randn(192, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        y = linear_layer(x, weight, bias)
    assert kept == {"x": [x.shape], "weight": [weight.shape], "both": []}[frozen]
    with torch.no_grad():
        (weight if frozen == "x" else x).zero_()  # which nothing reads any more
    y.sum().backward()
    assert calls


@pytest.mark.parametrize(("width", "outputs"), [(146, 192), (147, 191)])
def test_torch_refuses_what_does_not_fit_together(calls, width, outputs):
    tensors = torch.randn(455, width), torch.randn(192, 147), torch.randn(outputs)
    messages = []
    for layer in (linear_layer, F.linear):
        with pytest.raises(RuntimeError) as caught:
            layer(*tensors)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert not calls


def test_several_gradients_are_computed_at_once(calls):
    x, weight, bias = torch.randn(455, 147), torch.randn(192, 147), torch.randn(192)
    tensors = [t.requires_grad_() for t in (x, weight, bias)]
    found, expected = (
        torch.autograd.grad(layer(*tensors).sum(dim=0), tensors, torch.eye(192)[:3], is_grads_batched=True)
        for layer in (linear_layer, F.linear)
    )
    for each, other in zip(found, expected, strict=True):
        torch.testing.assert_close(each, other, atol=1e-4, rtol=1e-5)
    assert calls


def test_a_network_computes_the_same_and_every_time_to_the_bit(calls):
    net = VisionTransformer(img_size=32, patch_size=4, embed_dim=96, depth=2, num_heads=3)
    images = torch.randn(8, 3, 32, 32)

    def step():
        net.zero_grad()
        loss = net(images).square().sum()
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in net.parameters())]

    ours, again = step(), step()
    assert len(calls) > 20
    assert all(map(torch.equal, ours, again))
    module.MKL_LEAVES_HALF = False  # the fixture undoes it
    for found, expected in zip(ours, step(), strict=True):
        assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


def under(context):
    def call(layer, x):
        with context():
            layer(x)

    return call


@contextmanager
def rounding():
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    yield
    torch.backends.mkldnn.matmul.fp32_precision = before


@contextmanager
def counting():
    with FlopCounterMode(display=False) as counter:
        yield
    assert counter.get_total_flops() == 2 * 3 * 65 * 256 * 192


def per_image(layer, x):
    weights = dict(layer.named_parameters())
    each = vmap(grad(lambda p, x: functional_call(layer, p, x).sum()), (None, 0))(weights, x)
    assert each["weight"].shape == (3, 192, 256)


class Watching(TorchFunctionMode):
    """What gives operators a backward pass of its own by their names, as the relevance of an analysis does."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert "onednn" not in str(func)
        return func(*args, **kwargs or {})


class Own(torch.Tensor):
    """A tensor of somebody's own, such as a quantized one."""


FOR_TORCH = {
    "few numbers": lambda layer, x: layer(x[:1, :20]),
    "a vector": lambda layer, x: linear_layer(torch.randn(2048), torch.randn(2048, 2048)),
    "float64": lambda layer, x: copy.deepcopy(layer).double()(x.double()),
    "autocast": under(partial(torch.autocast, "cpu", torch.bfloat16)),
    "rounded operands": under(rounding),
    "no oneDNN": under(partial(torch.backends.mkldnn.flags, enabled=False)),
    "counted FLOPs": under(counting),
    "operators known by their names": under(Watching),
    "gradients of each image": per_image,
    "forward derivatives": lambda layer, x: jvp(layer, (x,), (x,)),
    "another class of tensor": lambda layer, x: layer(x.as_subclass(Own)),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated", "ignore:TF32 acceleration on top of oneDNN")
@pytest.mark.parametrize("case", FOR_TORCH)
def test_torch_computes_what_onednn_must_not(calls, case):
    layer, x = Linear(256, 192), torch.randn(3, 65, 256)
    FOR_TORCH[case](layer, x)
    assert not calls
    layer(x)
    assert len(calls) == 1


@pytest.mark.slow
def test_a_compiled_layer_uses_it_at_any_size_and_an_exported_one_does_not(calls):
    layer = Linear(256, 192)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    module.onednn_linear = module.onednn_linear.__closure__[0].cell_contents  # dynamo must see the operator itself
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for size in (2, 5, 3, 0):
        x = torch.randn(size, 65, 256)
        torch.testing.assert_close(y := compiled(x), F.linear(x, layer.weight, layer.bias), atol=1e-5, rtol=1e-5)
        y.sum().backward()
    assert len(graphs) <= 2  # torch specializes on 0
    assert all("onednn_linear" in str(graph.code) for graph in graphs)
    exported = torch.export.export(layer, (torch.randn(2, 65, 256),))
    assert [str(node.target) for node in exported.graph.nodes if node.op == "call_function"] == ["aten.linear.default"]


def test_a_layer_is_torchs_to_those_who_ask(tmp_path):
    layer = Linear(4, 3)
    plain = nn.Linear(4, 3)
    plain.load_state_dict(layer.state_dict())
    assert isinstance(layer, nn.Linear)
    assert str(layer) == str(plain)
    assert torch.equal(copy.deepcopy(layer)(torch.ones(2, 4)), plain(torch.ones(2, 4)))


@pytest.mark.parametrize(
    ("cpu", "capability", "slow"),
    [
        ({"vendor_id": "AuthenticAMD", "cpu family": "26"}, "AVX512", True),
        ({"vendor_id": "AuthenticAMD", "cpu family": "26"}, "AVX2", False),  # torch is told to stay below AVX-512
        ({"vendor_id": "AuthenticAMD", "cpu family": "25"}, "AVX512", False),  # Zen 4 is as fast with AVX2
        ({"vendor_id": "GenuineIntel", "cpu family": "6"}, "AVX512", False),
        ({}, "DEFAULT", False),
    ],
)
def test_features_of_the_processor_decide(monkeypatch, cpu, capability, slow):
    monkeypatch.setattr(module, "cpu_fields", lambda: cpu)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert module._leaves_half() is slow
