"""A task computes what its network computes, whatever a user has done to the network."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as every_module
from torch.nn.utils import parametrizations

from vitlab.layers import recompute
from vitlab.layers.attention import Attention
from vitlab.layers.block import Block
from vitlab.layers.pos_embed import PosEmbed
from vitlab.layers.pos_embed.rotary import RoPE2d
from vitlab.models import VisionTransformer
from vitlab.packed_batch import PackedBatch
from vitlab.tasks import Classifier

SIZE = {"img_size": 16, "in_chans": 3, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2}
T2T = {"tokenizer": "t2t", "t2t_kernels": [3, 3], "t2t_strides": [2, 2], "t2t_dim": 16, "t2t_dropout": 0.0}
IMAGES = (4, 3, 16, 16)


class LoRA(nn.Linear):
    """A linear layer with a low-rank update, written as a subclass, as LoRA-like libraries do."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__(inner.in_features, inner.out_features, bias=inner.bias is not None)
        self.load_state_dict(inner.state_dict())
        self.down, self.up = nn.Linear(inner.in_features, 4, bias=False), nn.Linear(4, inner.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.up(self.down(x))


class Around(nn.Module):
    """A wrapper that is no linear layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Tensor, **kwargs: object) -> Tensor:
        return 1.5 * self.inner(*args, **kwargs)


class OtherTokens(nn.Module):
    """What an activation of one's own may do: read other tokens, as a global response normalization does."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.norm(dim=1, keepdim=True) + 1) if x.ndim == 3 else x


class TurnsAll(PosEmbed):
    """Turns the class token, too."""

    def rotate(self, x: Tensor, layer: int) -> Tensor:
        angle = torch.arange(x.shape[2], dtype=x.dtype) + 1
        cos, sin, (a, b) = angle.cos()[:, None], angle.sin()[:, None], x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class TurnsMore(RoPE2d):
    """A method of vitlab with other angles, none of them zero."""

    def cos_sin(self, layer: int) -> tuple[Tensor, Tensor]:
        cos, sin = super().cos_sin(layer)
        return -sin, cos


class Biased(PosEmbed):
    """A bias on the row of the class token."""

    def bias(self, layer: int) -> Tensor:
        return torch.linspace(-3, 3, 2 * 17 * 17).sin().mul(3).view(2, 17, 17)


class Broadcast(PosEmbed):
    """One bias for all queries."""

    def bias(self, layer: int) -> Tensor:
        return torch.linspace(-3, 3, 17)[None]


class ByQuery(PosEmbed):
    """A bias that depends on query and number of the query."""

    def relate(self, q: Tensor, layer: int) -> Tensor:
        table = torch.linspace(-9, 9, 17 * 17 * q.shape[-1]).sin().view(17, 17, -1)
        return torch.einsum("bhid,ijd->bhij", q, table.to(q))


class EntersAndLeaves(PosEmbed):
    """Moves tokens on their way into and out of each block."""

    def enter(self, x: Tensor, layer: int) -> Tensor:
        return x + x.roll(1, dims=1)

    def leave(self, x: Tensor, layer: int) -> Tensor:
        return x + 0.5 * x.mean(dim=1, keepdim=True)


class OwnAttention(nn.Module):
    """An attention that knows nothing of a shortcut, and mixes tokens after the softmax."""

    def __init__(self, inner: Attention) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, pos_embed: PosEmbed, layer: int) -> Tensor:
        y = self.inner(x, pos_embed, layer)
        return y + y.mean(dim=1, keepdim=True)


class OwnBlock(Block):
    """A block that mixes tokens after its MLP."""

    def forward(self, x: Tensor, pos_embed: PosEmbed, layer: int, first_only: bool = False) -> Tensor:
        y = super().forward(x, pos_embed, layer)
        return y + y.cumsum(dim=1).flip(1)


def task_of(**changes: object) -> Classifier:
    """Return a task whose parameters are all random, so that nothing hides behind a zero."""
    torch.manual_seed(0)
    task = Classifier(num_classes=5, **SIZE | changes)
    with torch.no_grad():
        for p in task.parameters():
            p.normal_(std=0.3)
    return task.eval()


def alone(task: Classifier) -> VisionTransformer:
    """Return the network of a task as one that no task has touched."""
    net = copy.deepcopy(task.net)
    net.skips_unread_tokens = net.tokenizer.fused = False
    return net


class Whole(nn.Module):
    """The network of a task, without its shortcut: for layers that cannot be copied."""

    def __init__(self, task: Classifier) -> None:
        super().__init__()
        self.net = task.net

    def forward(self, images: Tensor) -> Tensor:
        self.net.tokenizer.fused = False
        y = self.net.forward_head(self.net.forward_features(images))
        self.net.tokenizer.fused = True
        return y


def check(task: Classifier, net: VisionTransformer | None = None) -> Tensor:
    """Compare outputs in evaluation, and gradients in training, with those of the network by itself."""
    net, images = alone(task) if net is None else net, torch.randn(*IMAGES, requires_grad=True)
    expected, found = net(images), task(images)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.detach().std()))
    task.train(), net.train()
    gradients = []
    for part in (net, task):
        of = [images, *(p for p in part.parameters() if p.requires_grad)]
        gradients.append(torch.autograd.grad(part(images).square().mean(), of, allow_unused=True))
    for one, other in zip(*gradients, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5 * max(1.0, float(one.abs().max())))
    return expected


LINEARS = [f"blocks.{i}.{name}" for i in (0, 1) for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]
PERFORMER = [f"tokenizer.{name}" for name in ("attention1.kqv", "attention1.proj", "attention1.mlp.0", "project")]
SOFTMAX = [f"tokenizer.{name}" for name in ("attention1.attn.qkv", "attention1.attn.proj", "attention1.mlp.fc1")]
PLACES = [({}, name) for name in (*LINEARS, "head")] + [(T2T, name) for name in PERFORMER]
PLACES += [(T2T | {"t2t_attn": "transformer"}, name) for name in SOFTMAX]
NORMS = [({}, name) for name in ("blocks.1.norm1", "blocks.1.norm2", "norm", "tokenizer.proj", "tokenizer", "blocks.1")]
NORMS += [(T2T, name) for name in ("tokenizer.attention1.norm1", "tokenizer.attention1.norm2", "tokenizer.attention1")]
NORMS += [(T2T | {"t2t_attn": "transformer"}, "tokenizer.attention1.attn")]


def ids(value: object) -> str | None:
    return (
        value
        if isinstance(value, str)
        else "-".join(str(v) for v in value.values()) or "patch"
        if isinstance(value, dict)
        else None
    )


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", [LoRA, Around])
@pytest.mark.parametrize(("changes", "name"), PLACES, ids=ids)
def test_a_custom_linear_layer_is_called(changes, name, wrapped):
    task = task_of(**changes)
    before = alone(task)(torch.ones(*IMAGES))
    task.net.set_submodule(name, wrapped(task.net.get_submodule(name)))
    assert (alone(task)(torch.ones(*IMAGES)) - before).abs().max() > 1e-3  # or it could be left out unseen
    check(task)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["after", "before", "backward"])
@pytest.mark.parametrize(("changes", "name"), PLACES + NORMS, ids=ids)
def test_a_hook_acts_in_every_shortcut(changes, name, kind, monkeypatch):
    monkeypatch.setattr(recompute, "LEAST", 1)
    task, calls = task_of(**changes), []
    module = task.net.get_submodule(name)
    match kind:
        case "after":
            hook = lambda module, args, y: calls.append(1) or 2 * y + y.mean(dim=1, keepdim=True)  # noqa: E731
            module.register_forward_hook(hook)
        case "before":
            hook = lambda module, args: calls.append(1) or (1.5 * args[0], *args[1:])  # noqa: E731
            module.register_forward_pre_hook(hook)
        case "backward":
            hook = lambda module, gx, gy: calls.append(1) or tuple(g if g is None else 3 * g for g in gx)  # noqa: E731
            module.register_full_backward_hook(hook)
    net = alone(task)
    check(task, net)
    assert len(calls) % 2 == 0 and calls  # as often in one as in the other


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, T2T, T2T | {"t2t_attn": "transformer"}], ids=ids)
@pytest.mark.parametrize("kind", ["after", "before"])
def test_a_global_hook_acts(changes, kind, monkeypatch):
    monkeypatch.setattr(recompute, "LEAST", 1)
    task = task_of(**changes)
    seen: dict[bool, list[str]] = {}

    def note(module: nn.Module) -> None:
        seen.setdefault(module.training, []).append(type(module).__name__)

    if kind == "after":
        handle = every_module.register_module_forward_hook(
            lambda m, args, y: (note(m), 1.1 * y)[1] if isinstance(m, nn.Linear | nn.LayerNorm | nn.Conv2d) else None
        )
    else:
        handle = every_module.register_module_forward_pre_hook(
            lambda m, args: (note(m), (1.1 * args[0],))[1] if isinstance(m, nn.Linear | nn.LayerNorm) else None
        )
    with handle:
        net, images = alone(task), torch.randn(*IMAGES)
        expected = net(images)
        names, seen[False] = seen[False], []
        torch.testing.assert_close(task(images), expected, rtol=0, atol=1e-5 * float(expected.detach().std()))
        assert seen[False] == names
        check(task)


@pytest.mark.parametrize("changes", [{}, T2T, T2T | {"t2t_attn": "transformer"}], ids=ids)
def test_a_hook_changes_gradients_of_what_is_computed_twice(changes, monkeypatch):
    task = task_of(**changes).train()
    for module in task.net.modules():
        if isinstance(module, nn.LayerNorm | nn.GELU):
            module.register_forward_hook(lambda module, args, y: 2 * y)
    images, params = torch.randn(*IMAGES), list(task.parameters())
    kept = torch.autograd.grad(task(images).square().mean(), params)
    monkeypatch.setattr(recompute, "LEAST", 1)
    again = torch.autograd.grad(task(images).square().mean(), params)
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


@pytest.mark.parametrize("way", ["weight_norm", "orthogonal", "old_weight_norm", "pruned", "patched"])
@pytest.mark.parametrize("changes", [{}, T2T, T2T | {"t2t_attn": "transformer"}], ids=ids)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_every_parametrized_layer_acts(changes, way, monkeypatch):
    monkeypatch.setattr(recompute, "LEAST", 1)
    task = task_of(**changes)
    for module in list(task.net.modules()):
        if isinstance(module, nn.Linear | nn.Conv2d):
            match way:
                case "weight_norm":
                    parametrizations.weight_norm(module)
                case "orthogonal" if isinstance(module, nn.Linear):
                    parametrizations.orthogonal(module)
                case "old_weight_norm":
                    nn.utils.weight_norm(module)
                case "pruned":
                    nn.utils.prune.l1_unstructured(module, "weight", 0.5)
                case "patched" if isinstance(module, nn.Linear):
                    module.forward = Patched(module)
    net = Whole(task)
    check(task, net)


class Patched:
    """A forward that somebody has put into a layer."""

    def __init__(self, module: nn.Linear) -> None:
        self.module = (module,)

    def __call__(self, x: Tensor) -> Tensor:
        return 1.5 * F.linear(x, self.module[0].weight, self.module[0].bias).clamp(-3, 3)


@pytest.mark.parametrize("method", [TurnsAll, TurnsMore, Biased, Broadcast, ByQuery, EntersAndLeaves])
def test_a_custom_position_embedding_acts(method):
    task = task_of(pos_embed="none")
    sizes = {"head_dim": 16, "num_prefix_tokens": 1} if method is TurnsMore else {}
    task.net.pos_embed = method((4, 4), **sizes)
    check(task)


def test_a_method_that_was_patched_acts():
    task = task_of(pos_embed="none")
    task.net.pos_embed.rotate = lambda x, layer: x * torch.arange(x.shape[2])[:, None].cos()
    check(task)


def test_custom_attention_and_blocks_act():
    task = task_of()
    task.net.blocks[1].attn = OwnAttention(task.net.blocks[1].attn)
    check(task)
    task = task_of()
    task.net.blocks[1].__class__ = OwnBlock
    check(task)


def test_a_custom_kernel_acts():
    def near(q, k, v, bias=None, scale=1.0):  # each query attends to its neighbors, by number
        rows, columns = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
        far = (rows - columns + k.shape[2] - q.shape[2]).abs() > 2
        return (q @ k.transpose(-2, -1) * scale).masked_fill(far, -math.inf).softmax(-1) @ v

    task = task_of()
    for block in task.net.blocks:
        block.attn.kernel = near
    check(task)


@pytest.mark.parametrize("changes", [{"norm_layer": "BatchNorm1d"}, {"act_layer": f"{__name__}.OtherTokens"}])
def test_layers_that_read_other_tokens_get_them(changes):
    if "norm_layer" in changes:
        task = task_of(**changes)
        task.net.train()(torch.randn(*IMAGES))  # other statistics than 0 and 1
        task.net.eval()
    else:
        task = task_of()
        for block in task.net.blocks:
            block.mlp.act = OtherTokens()
    check(task)


@pytest.mark.rare
@pytest.mark.parametrize("changes", [{}, T2T], ids=ids)
@pytest.mark.parametrize("wrapped", [LoRA, None])
def test_compiled_networks_are_the_network(changes, wrapped):
    torch.compiler.reset()
    task = task_of(**changes)
    if wrapped:
        for name in ("blocks.1.attn.qkv", "blocks.1.mlp.fc1"):
            task.net.set_submodule(name, wrapped(task.net.get_submodule(name)))
    net, images = alone(task), torch.randn(*IMAGES)
    task.net.compile(fullgraph=True, backend="eager")
    torch.testing.assert_close(task(images), net(images), rtol=0, atol=1e-5 * float(net(images).detach().std()))


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def gathered(task: nn.Module, images: Tensor) -> list[Tensor]:
    loss = task(images).square().mean()
    loss.backward()
    grads = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in task.parameters()]
    return [loss.detach(), *grads]


SHARDED = [({}, name) for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2", "norm1", "norm2", "attn", "mlp", "")]
SHARDED = [(changes, f"blocks.1.{name}".rstrip(".")) for changes, name in SHARDED]
SHARDED += [({}, "tokenizer.proj"), ({}, "norm"), ({}, "head"), (T2T, "tokenizer.attention1.kqv"), ({}, "every linear")]
SHARDED += [(T2T, "tokenizer.project"), (T2T, "every linear"), (T2T | {"t2t_attn": "transformer"}, "every linear")]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # torch warns of views, and nothing changes them
@pytest.mark.parametrize(("changes", "name"), SHARDED, ids=ids)
@pytest.mark.parametrize("all_else", [False, True])
def test_a_layer_that_is_sharded_alone_is_the_layer(changes, name, all_else, mesh, monkeypatch):
    monkeypatch.setattr(recompute, "LEAST", 1)
    task, images = task_of(**changes).train(), torch.randn(*IMAGES)
    expected = gathered(copy.deepcopy(task), images)
    linears = [module for module in task.net.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    for module in linears if name == "every linear" else [task.net.get_submodule(name)]:
        fully_shard(module, mesh=mesh)
    if all_else:
        for module in (*task.net.blocks, task.net):
            if not isinstance(module, FSDPModule):
                fully_shard(module, mesh=mesh)
    for one, other in zip(gathered(task, images), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_network_sharded_by_block_keeps_its_shortcut(mesh):
    task = task_of()
    for module in (*task.net.blocks, task.net):
        fully_shard(module, mesh=mesh)
    assert task.net.reads_class_token_only()
    fully_shard((other := task_of()).net.blocks[1].attn.qkv, mesh=mesh)
    assert not other.net.reads_class_token_only()


def test_packed_images_go_through_the_layers_of_a_user():
    task = task_of()
    task.net.tokenizer.proj.register_forward_hook(lambda module, args, y: 2 * y + 1)
    task.net.blocks[1].attn.qkv = LoRA(task.net.blocks[1].attn.qkv)
    images = torch.randn(*IMAGES)
    torch.testing.assert_close(task.net(PackedBatch.of(list(images), patch=4)), alone(task)(images), rtol=0, atol=1e-4)


def test_resized_patch_kernels_do_not_bypass_a_custom_layer():
    class Own(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    task = task_of(flexi_patch=[2, 4])
    task.net.tokenizer.eval_patch = (2, 2)
    images = torch.randn(*IMAGES)
    once = task(images)
    task.net.tokenizer.proj.register_forward_hook(lambda module, args, y: 2 * y)
    assert not torch.allclose(task(images), once)
    task.net.tokenizer.proj.__class__ = Own
    with pytest.raises(
        ValueError, match=r"`flexi_patch` resizes the kernel of a Conv2d, but `tokenizer\.proj` is a Own"
    ):
        task(images)
