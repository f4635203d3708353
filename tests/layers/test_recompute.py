"""What a block keeps for the backward pass, and that gradients do not change by it."""

import random
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.parametrizations import spectral_norm
from torch.nn.utils.parametrize import register_parametrization

from vitlab.layers import recompute
from vitlab.layers.pos_embed import PosEmbed
from vitlab.layers.recompute import recomputed
from vitlab.models import VisionTransformer

T2T = {"tokenizer": "t2t", "t2t_kernels": [3, 3], "t2t_strides": [2, 2], "t2t_dim": 16}
pytestmark = pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # of torch 2.10
NETWORKS = {
    "patch": {"tokenizer": "patch", "patch_size": 4},
    "t2t": T2T,
    "t2t-softmax": T2T | {"t2t_attn": "transformer"},
    "t2t-reflect": T2T | {"t2t_padding": "reflect"},  # the reference path
    "rmsnorm-swiglu": {"patch_size": 4, "norm_layer": "rmsnorm", "mlp_layer": "swiglu", "act_layer": "silu"},
    "gate-first-only": {"patch_size": 4, "attn_gate": True, "drop_path_rate": 0.5, "drop_path_subset": True},
    "own-act": {"patch_size": 4, "act_layer": "RReLU"},  # draws random numbers
    "checkpoint": {"patch_size": 4, "grad_checkpoint": True},
}


def network(**changes: object) -> VisionTransformer:
    torch.manual_seed(0)
    sizes = {"img_size": 16, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 3}
    return VisionTransformer(**sizes | changes)  # type: ignore[arg-type]


def gradients(net: nn.Module, cast: bool = False) -> list[Tensor]:
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        loss = net(torch.randn(4, 3, 16, 16)).float().square().mean()
    return [loss.detach(), *torch.autograd.grad(loss, list(net.parameters()))]


@pytest.mark.parametrize("cast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_are_the_same_to_the_bit(name, cast, monkeypatch):
    net = network(**NETWORKS[name])
    kept = gradients(net, cast)
    monkeypatch.setattr(recompute, "LEAST", 1)
    again = gradients(net, cast)
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


def living_bytes(net: nn.Module, cast: bool) -> int:
    """Return the bytes that a forward pass allocates and its backward pass still needs."""
    images = torch.randn(16, 3, 16, 16)
    with torch.profiler.profile(profile_memory=True) as profile, torch.autocast("cpu", torch.bfloat16, enabled=cast):
        loss = net(images).float().square().mean()
    assert loss.requires_grad  # the graph lives until here
    return sum(event.self_cpu_memory_usage for event in profile.key_averages())


@pytest.mark.slow
@pytest.mark.parametrize("cast", [False, True], ids=["fp32", "autocast"])
def test_a_block_keeps_ten_of_sixteen_tensors(cast, monkeypatch):
    nets = network(patch_size=4, depth=2), network(patch_size=4, depth=6)
    living_bytes(nets[0], cast)
    plain = living_bytes(nets[1], cast) - living_bytes(nets[0], cast)
    monkeypatch.setattr(recompute, "LEAST", 1)
    less = living_bytes(nets[1], cast) - living_bytes(nets[0], cast)
    assert less < (0.75 if cast else 0.68) * plain


def test_large_tensors_are_recomputed_and_small_ones_kept():
    linear, calls = nn.Linear(512, 4), []

    class Counted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(len(x))
            return nn.functional.gelu(x)

    recompute_types = (*recompute.CHEAP, Counted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recompute, "CHEAP", recompute_types)
        for rows in (1023, 1024):
            recomputed(Counted(), torch.randn(rows, 512, requires_grad=True), linear).sum().backward()
    assert calls == [1023, 1024, 1024]


def test_an_activation_in_place_is_kept(monkeypatch):
    monkeypatch.setattr(recompute, "LEAST", 1)
    x = torch.randn(4, 8, requires_grad=True)
    linear = nn.Linear(8, 2)
    recomputed(nn.SiLU(inplace=True), x * 1, linear).sum().backward()
    expected = torch.autograd.grad(linear(nn.functional.silu(x)).sum(), x)[0]
    assert torch.equal(x.grad, expected)


class Changing(nn.Linear):
    """A part that changes its input in place."""

    def __init__(self, change: Callable[[Tensor], object]) -> None:
        super().__init__(32, 32)
        self.change = change

    def forward(self, x: Tensor, *place: object, **positions: object) -> Tensor:
        self.change(x)
        return super().forward(x)


CHANGES = {
    "relu": F.relu_,
    "shift": lambda x: x[:, 1:, :4].copy_(x[:, :-1, :4].clone()),
    "mean": lambda x: x[:, 0].copy_(x[:, 1:].mean(1)),
}


@pytest.mark.parametrize("part", ["attn", "mlp"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_part_may_change_its_input_in_place(change, part, monkeypatch):
    net = network(patch_size=4)
    setattr(net.blocks[0], part, Changing(CHANGES[change]))
    kept = gradients(net)
    monkeypatch.setattr(recompute, "LEAST", 1)
    assert all(torch.equal(a, b) for a, b in zip(kept, gradients(net), strict=True))


@pytest.mark.parametrize("least", [1, 2**60])
def test_what_is_changed_in_place_after_it_was_kept_is_an_error(least, monkeypatch):
    monkeypatch.setattr(recompute, "LEAST", least)
    linear, x = nn.Linear(8, 2), torch.randn(4, 8, requires_grad=True)
    loss = recomputed(nn.GELU(), x, lambda y: linear(y).sigmoid().mul_(2)).sum()
    with pytest.raises(RuntimeError, match=r"inplace|in place after a layer had kept it for its gradient"):
        loss.backward()


def test_a_forward_pass_without_a_backward_pass_leaves_nothing(monkeypatch):
    monkeypatch.setattr(recompute, "LEAST", 1)
    linear, x, seen = nn.Linear(8, 2), torch.randn(4, 8, requires_grad=True), []
    loss = recomputed(nn.GELU(), x, lambda y: seen.append(z := linear(y).sigmoid()) or z)  # which sigmoid keeps
    alive = weakref.ref(seen.pop())
    del loss
    assert alive() is None


def test_inference_keeps_nothing_for_a_backward_pass():
    with torch.inference_mode():
        assert network()(torch.randn(2, 3, 16, 16)).shape == (2, 3)


@pytest.mark.parametrize("mode", [FakeTensorMode, lambda: torch.device("meta")], ids=["fake", "meta"])
def test_tensors_without_data_pass(mode, monkeypatch):
    monkeypatch.setattr(recompute, "LEAST", 1)
    with mode():
        linear, x = nn.Linear(8, 2), torch.empty(3, 8, requires_grad=True)
        recomputed(nn.GELU(), x, linear).sum().backward()
    assert x.grad.shape == (3, 8)


def test_second_derivatives_and_functional_transforms(monkeypatch):
    monkeypatch.setattr(recompute, "LEAST", 1)
    linear = nn.Linear(6, 6).double()
    x = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)

    def f(x: Tensor) -> Tensor:
        return recomputed(nn.GELU(), x, lambda y: linear(y).square().sum())

    assert torch.autograd.gradgradcheck(f, x)
    assert torch.allclose(torch.func.grad(f)(x), torch.autograd.grad(f(x), x)[0])


def test_checkpointed_blocks_keep_only_their_input(monkeypatch):
    plain = network(patch_size=4, depth=6, grad_checkpoint=True)
    before = living_bytes(plain, False)
    monkeypatch.setattr(recompute, "LEAST", 1)
    assert living_bytes(plain, False) == pytest.approx(before, rel=0.02)


def test_what_is_computed_again_has_the_autocast_of_the_forward_pass(monkeypatch):
    net, seen, layer_norm = network(**T2T), [], F.layer_norm
    monkeypatch.setattr(recompute, "LEAST", 1)

    def watched(*args: object, **kwargs: object) -> Tensor:
        seen.append(torch.is_autocast_enabled("cpu"))
        return layer_norm(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(F, "layer_norm", watched)
    with torch.autocast("cpu", torch.bfloat16):
        loss = net(torch.randn(4, 3, 16, 16)).square().mean()
    in_forward = len(seen)
    loss.backward()
    assert len(seen) > in_forward and all(seen[in_forward:])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_gpu_recomputes_nothing(name, dtype, monkeypatch):
    net, images = network(**NETWORKS[name]).cuda(), torch.randn(64, 3, 16, 16, device="cuda")
    monkeypatch.setattr(recompute, "LEAST", 1)
    monkeypatch.setattr(recompute, "saved_tensors_hooks", None)  # which hooks would need
    with torch.autocast("cuda", dtype, enabled=dtype is not None):
        loss = net(images).float().square().mean()
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(loss, list(net.parameters())))


def test_running_statistics_count_a_batch_once_where_blocks_are_checkpointed():
    nets = [network(patch_size=4, norm_layer="BatchNorm1d", grad_checkpoint=on) for on in (False, True)]
    for net in nets:
        gradients(net)
        gradients(net)
    for one, two in zip(*(net.named_buffers() for net in nets), strict=True):
        assert one[0] == two[0] and torch.equal(one[1], two[1])
    assert dict(nets[1].named_buffers())["blocks.0.norm1.norm.num_batches_tracked"] == 2


class Drawing(nn.Module):
    """Computes with what a pass changes: a buffer, a spectral norm, and numbers of three generators."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = spectral_norm(nn.Linear(dim, dim))
        self.register_buffer("turns", torch.ones(()))

    def forward(self, x: Tensor, *place: object, **positions: object) -> Tensor:
        if self.turns % 2 == 0:  # features that are drawn anew now and then
            x = x * torch.rand(())
        self.turns += 1
        return self.linear(x) * self.turns * random.random() * float(np.random.rand())


class NormedPositions(PosEmbed):
    """Acts within the blocks, with running statistics, and with a buffer that each batch computes of a parameter."""

    def __init__(self, grid_size: tuple[int, int], embed_dim: int) -> None:
        super().__init__(grid_size)
        self.norm, self.raw = nn.BatchNorm1d(embed_dim), nn.Parameter(torch.ones(embed_dim))
        self.register_buffer("table", None, persistent=False)

    def for_batch(self) -> "NormedPositions":
        self.table = self.raw.tanh()
        return self

    def leave(self, x: Tensor, layer: int) -> Tensor:
        return self.norm(x.mT).mT * self.table


def test_blocks_are_computed_again_with_the_buffers_and_random_numbers_that_they_had():
    parts = {"attn": f"{__name__}.Drawing", "pos_embed": f"{__name__}.NormedPositions"}
    found = []
    for on in (False, True):
        net = network(patch_size=4, grad_checkpoint=on, **parts)
        random.seed(0)
        np.random.seed(0)
        found.append([*gradients(net), *gradients(net), *dict(net.named_buffers()).values(), torch.rand(())])
        found[-1].append(torch.tensor([random.random(), float(np.random.rand())]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)) and recompute._state.off is False


class Scaled(nn.Module):
    """Draws, and is of a class that torch makes of this one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        register_parametrization(self, "scale", nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale * torch.tensor(random.random())


def test_a_parametrized_part_of_ones_own_draws_the_same_again():
    part, x = Scaled(), torch.ones(3, requires_grad=True)
    outputs = recompute.checkpoint(part, x)
    outputs.sum().backward()
    assert x.grad.equal(outputs.detach())


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor, *place: object, **positions: object) -> Tensor:
        self.seen = x.dtype
        return self.linear(x)


def test_parts_of_ones_own_receive_the_type_of_the_normalization_however_many_images_there_are(monkeypatch):
    monkeypatch.setattr(recompute, "LEAST", 1)
    net = network(patch_size=4, depth=2)
    net.blocks[0].attn, net.blocks[0].mlp = Own(), Own()
    net.blocks[1].mlp.fc1 = nn.Sequential(own := Own(), nn.Linear(32, 128))
    gradients(net, cast=True)
    assert [part.seen for part in (net.blocks[0].attn, net.blocks[0].mlp, own)] == [torch.float32] * 3
