"""Blocks, attentions, MLPs and poolings of one's own, by their class paths."""

import inspect
import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from vitlab.cli.main import main
from vitlab.errors import RunFailed, UsageError
from vitlab.jobs.formats import FORMATS, both_outputs
from vitlab.jobs.train.build import check_bits
from vitlab.layers import Attention, Mlp
from vitlab.layers.block import Block
from vitlab.layers.pos_embed import PosEmbed
from vitlab.models import VisionTransformer
from vitlab.models.cost import count_macs, macs_of_modules
from vitlab.models.load import load_network, load_weights
from vitlab.packed_batch import PackedBatch
from vitlab.tasks import Classifier

HERE = __name__
OF_A_CLASS = ("tokenizer", "attn", "block", "mlp_layer", "global_pool", "act_layer", "norm_layer")
TINY = {"img_size": 8, "in_chans": 1, "patch_size": 2, "embed_dim": 8, "depth": 2, "num_heads": 2}


class Parallel(nn.Module):
    """Attention and MLP side by side, Wang and Komatsuzaki 2021, as in ViT-22B."""

    def __init__(self, dim, num_heads, mlp_ratio, layer, grid_size, scale: float = 1.0):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(dim), Attention(dim, num_heads)
        self.mlp, self.scale, self.seen = Mlp(dim, int(dim * mlp_ratio)), scale, (layer, grid_size)

    def forward(self, x, pos_embed, layer):
        x = pos_embed.enter(x, layer)
        y = self.norm(x)
        return pos_embed.leave(x + self.scale * (self.attn(y, pos_embed, layer) + self.mlp(y)), layer)


class Wide(Attention):
    def __init__(self, dim, num_heads, casts: bool = False):
        super().__init__(dim, num_heads)
        self.casts = casts
        self.double()

    def forward(self, x, pos_embed, layer, **how):
        return super().forward(x.double() if self.casts else x, pos_embed, layer, **how).to(x.dtype)


class Narrow(Block):
    """Works on half of the channels, as a bottleneck."""

    def __init__(self, dim, num_heads, **kwargs):
        super().__init__(dim // 2, num_heads, **kwargs)
        self.down, self.up = nn.Linear(dim, dim // 2), nn.Linear(dim // 2, dim)

    def forward(self, x, pos_embed, layer):
        return x + self.up(super().forward(self.down(x), pos_embed, layer))


def test_a_block_that_is_narrow_inside_leaves_the_width_of_the_network_as_it_is():
    net = VisionTransformer(**TINY, block=f"{HERE}.Narrow", num_classes=3)
    assert net.num_features == 8 and net(torch.randn(2, 1, 8, 8)).shape == (2, 3)


class OneHead(Attention):
    """Sets an argument that it also passes on."""

    def __init__(self, dim, **kwargs):
        super().__init__(dim, num_heads=1, **kwargs)


class Fading(Attention):
    def __init__(self, dim, num_heads, start: float = 0.1, **attention):
        super().__init__(dim, num_heads, **attention)


class Steeper(Fading):
    """One without a constructor of its own."""


class Slow:
    """A mixin."""

    def __init__(self, rate: float = 1.0, **others):
        super().__init__(**others)


class SlowlyFading(Slow, Fading):
    def __init__(self, dim, num_heads, **fading):
        super().__init__(dim=dim, num_heads=num_heads, **fading)


class Scaled(Block):
    def __init__(self, dim, num_heads, scale: float = 1.0, **block):
        super().__init__(dim, num_heads, **block)


class ScaledTwice(Scaled):
    def __init__(self, dim, num_heads, twice: float = 1.0, **scaled):
        super().__init__(dim, num_heads, **scaled)


def test_parameters_of_64_bits_that_do_not_go_with_the_others_are_refused_before_a_training():
    trainer = SimpleNamespace(precision="32-true", precision_plugin=SimpleNamespace(forward_context=nullcontext))
    attn = {"class_path": f"{HERE}.Wide", "init_args": {"casts": True}}
    check_bits(Classifier(num_classes=3, attn=attn, **TINY), trainer)
    task = Classifier(num_classes=3, attn=f"{HERE}.Wide", **TINY)
    with pytest.raises(UsageError, match=r"64 bits, blocks\.0\.attn\.qkv\.weight, .* --trainer.precision=64-true$"):
        check_bits(task, trainer)
    assert task.net.blocks[0].training
    trainer.precision = "64-true"
    check_bits(task, trainer)


class Convolution(nn.Module):
    """A block without attention: it mixes the patches by a convolution of their grid."""

    def __init__(self, dim, num_prefix_tokens):
        super().__init__()
        self.num_prefix_tokens, self.conv = num_prefix_tokens, nn.Conv2d(dim, dim, 3, padding=1)

    def forward(self, x, pos_embed, layer):
        prefix, patches = x.tensor_split([self.num_prefix_tokens], dim=1)
        y = self.conv(patches.transpose(1, 2).unflatten(2, pos_embed.grid_size)).flatten(2).transpose(1, 2)
        return torch.cat([prefix + y.mean(dim=1, keepdim=True), patches + y], dim=1)


class StateSpace(nn.Module):
    """A block without attention: a state of each channel decays along the tokens, in both directions."""

    def __init__(self, dim):
        super().__init__()
        self.norm, self.proj, self.decay = nn.LayerNorm(dim), nn.Linear(2 * dim, dim), nn.Parameter(torch.zeros(dim))

    def forward(self, x, pos_embed, layer):
        x = pos_embed.enter(x, layer)
        y, n = self.norm(x), torch.arange(x.shape[1], device=x.device)
        powers = self.decay.sigmoid() ** (n[:, None] - n).clamp(min=0)[..., None]  # (L, L, D)
        powers = powers * (n[:, None] >= n)[..., None]
        both = torch.cat([torch.einsum("ijd,bjd->bid", each, y) for each in (powers, powers.transpose(0, 1))], dim=-1)
        return pos_embed.leave(x + self.proj(both), layer)


class Linear(nn.Module):
    """Linear attention, which has no weights to show."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads, self.qkv = num_heads, nn.Linear(dim, 3 * dim)

    def forward(self, x, pos_embed, layer):
        q, k, v = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = (pos_embed.rotate(each, layer).softmax(-1) for each in (q, k))
        return (q @ (k.transpose(-2, -1) @ v)).transpose(1, 2).flatten(2)


class Twice(nn.Module):
    """An MLP of one layer."""

    def __init__(self, dim, hidden_dim, factor: float = 2.0):
        super().__init__()
        self.layer, self.hidden, self.factor = nn.Linear(dim, dim), hidden_dim, factor

    def forward(self, x):
        return self.factor * self.layer(x)


class Experts(nn.Module):
    """Two small networks; which of them a token goes to depends on its values, which the meta device does not have."""

    def __init__(self, dim, hidden_dim):
        super().__init__()
        self.router = nn.Linear(dim, 2)
        self.experts = nn.ModuleList(Mlp(dim, hidden_dim) for _ in range(2))

    def forward(self, x):
        tokens, out = x.flatten(0, -2), torch.zeros_like(x.flatten(0, -2))
        gates, chosen = self.router(tokens).softmax(-1).max(-1)
        for i, expert in enumerate(self.experts):
            if len(rows := (chosen == i).nonzero()[:, 0]):
                out[rows] = gates[rows, None] * expert(tokens[rows])
        return out.view_as(x)


class ClassAndMean(nn.Module):
    """The class token plus the mean of the patches."""

    def __init__(self, num_prefix_tokens):
        super().__init__()
        self.num_prefix_tokens = num_prefix_tokens

    def forward(self, x):
        return x[:, 0] + x[:, self.num_prefix_tokens :].mean(dim=1)


class Normalized(nn.Module):
    """The mean of all tokens, normalized over the images of a batch, of which training needs two."""

    def __init__(self, dim):
        super().__init__()
        self.norm = nn.BatchNorm1d(dim)

    def forward(self, x):
        return self.norm(x.mean(dim=1))


class Center(nn.Module):
    """The mean of the inner patches of the grid."""

    def __init__(self, num_prefix_tokens, grid_size):
        super().__init__()
        self.num_prefix_tokens, self.grid = num_prefix_tokens, grid_size

    def forward(self, x):
        return x[:, self.num_prefix_tokens :].unflatten(1, self.grid)[:, 1:-1, 1:-1].mean((1, 2))


class Listed(nn.Module):
    """Layers that the module does not know."""

    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(8, 8)]

    def forward(self, x, *positions):
        return x


class NoSuper(Listed):
    def __init__(self):
        self.side = 8


class OfOneToken(nn.Module):
    def forward(self, x):
        return x


OWN = {
    "block": {"class_path": f"{HERE}.Parallel", "init_args": {"scale": 0.5}},
    "attn": f"{HERE}.Linear",
    "mlp_layer": {"class_path": f"{HERE}.Twice", "init_args": {"factor": 3.0}},
    "global_pool": f"{HERE}.ClassAndMean",
}


@pytest.mark.parametrize("part", OWN)
@pytest.mark.parametrize("pos_embed", ["learned", "rope2d", "relpos", "conv"])
def test_a_custom_part_trains_and_is_rebuilt_from_its_file(part, pos_embed, tmp_path):
    if (part, pos_embed) == ("attn", "relpos"):
        pos_embed = "alibi2d"  # linear attention has no logits to add a trained bias to
    arguments = TINY | {"embed_dim": 16, part: OWN[part], "pos_embed": pos_embed}
    task, images = Classifier(num_classes=3, **arguments), torch.randn(2, 1, 8, 8)
    task.train()
    loss = task.training_step((images, torch.tensor([0, 2])), 0)
    unused = [name for name, p in task.net.named_parameters() if _gradient(loss, p) is None]
    assert not unused
    net = task.net.eval()
    torch.testing.assert_close(task(images), net.forward_head(net.forward_features(images)), rtol=0, atol=1e-6)
    assert net(torch.randn(2, 1, 12, 8)).shape == (2, 3)
    torch.save({"hyper_parameters": dict(task.hparams), "state_dict": net.state_dict()}, tmp_path / "last.ckpt")
    assert torch.equal(load_network(tmp_path / "last.ckpt")(images), net.eval()(images))


def _gradient(loss, p):
    return torch.autograd.grad(loss, p, retain_graph=True, allow_unused=True)[0] if p.requires_grad else p


class ZeroBranch(nn.Module):
    """An MLP whose last layer starts at 0, and at 2 with a bias."""

    def __init__(self, dim, hidden_dim):
        super().__init__()
        self.first, self.last = nn.Linear(dim, hidden_dim), nn.Linear(hidden_dim, dim)

    def forward(self, x):
        return self.last(self.first(x).relu())


class ZeroBranchAtLast(ZeroBranch):
    def reset_parameters(self):
        nn.init.zeros_(self.last.weight)
        nn.init.constant_(self.last.bias, 2.0)


def test_a_part_with_a_start_of_its_own_keeps_it_and_changes_no_other():
    nets = []
    for part in (ZeroBranch, ZeroBranchAtLast):
        torch.manual_seed(0)
        nets.append(VisionTransformer(**TINY, mlp_layer=f"{HERE}.{part.__name__}"))
    mlp = nets[1].blocks[1].mlp
    assert not mlp.last.weight.any() and mlp.last.bias.tolist() == [2.0] * 8
    states = [{k: v for k, v in net.state_dict().items() if ".last." not in k} for net in nets]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("own", [Fading, Steeper, SlowlyFading])
def test_an_attention_that_passes_its_arguments_on_gets_those_of_every_base_class(own):
    args = {"qkv_bias": False, "dropout": 0.1, "norm_layer": "rmsnorm", "mlp_ratio": 2.0, "layer_scale": 1e-4}
    attn = {"class_path": f"{HERE}.{own.__name__}", "init_args": {"qk_norm": True}}
    net = VisionTransformer(**TINY, block=f"{HERE}.ScaledTwice", attn=attn, drop_path_rate=0.2, **args)
    block = net.blocks[1]
    assert type(block.attn) is own and block.attn.qkv.bias is None and block.attn.dropout.p == 0.1
    assert isinstance(block.attn.q_norm, nn.RMSNorm)
    assert block.mlp.fc1.out_features == 16 and block.drop_path.rate == 0.2 and block.ls1.gamma.numel() == 8


def test_a_part_receives_what_its_constructor_asks_for():
    net = VisionTransformer(**TINY, block=OWN["block"], global_pool=OWN["global_pool"])
    assert [block.seen for block in net.blocks] == [(0, (4, 4)), (1, (4, 4))]
    assert net.blocks[1].scale == 0.5 and net.attn_pool.num_prefix_tokens == 1
    assert VisionTransformer(**TINY, mlp_layer=OWN["mlp_layer"]).blocks[0].mlp.hidden == 32
    assert list(net.state_dict())[-2:] == ["head.weight", "head.bias"]


@pytest.mark.parametrize("block", ["Convolution", "StateSpace"])
def test_a_block_without_attention_trains_takes_any_size_and_is_exported(block):
    task, images = Classifier(num_classes=3, block=f"{HERE}.{block}", **TINY), torch.randn(2, 1, 8, 8)
    loss = task.train().training_step((images, torch.tensor([0, 2])), 0)
    assert all(_gradient(loss, p) is not None for p in task.net.blocks.parameters())
    net = task.net.eval()
    assert net(torch.randn(2, 1, 12, 8)).shape == (2, 3)
    torch.testing.assert_close(torch.export.export(net, (images,)).module()(images), net(images))


def test_a_custom_block_sees_the_grid_of_the_image():
    net = VisionTransformer(**TINY, block=f"{HERE}.Convolution", num_classes=3)
    for size in ((8, 8), (4, 12)):
        images = torch.randn(2, 1, *size)
        x = net.embed(images, position := net.positions(images))
        y = net.blocks[0](x, position, 0)
        grid = x[:, 1:].transpose(1, 2).unflatten(2, (size[0] // 2, size[1] // 2))
        torch.testing.assert_close(y[:, 1:] - x[:, 1:], net.blocks[0].conv(grid).flatten(2).transpose(1, 2))


def test_images_in_rows_go_through_a_parallel_block():
    net = VisionTransformer(**TINY, block=OWN["block"], pos_embed="relpos", num_classes=3).eval()
    images = [torch.randn(1, 8, 4), torch.randn(1, 4, 8), torch.randn(1, 8, 8)]
    alone = torch.cat([net(image[None]) for image in images])
    torch.testing.assert_close(net(PackedBatch.of(images, patch=2)), alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"attn": "Conv3d"}, "`attn` must be one of softmax, gated, or a class path such as mypkg.Mine, got 'Conv3d'"),
        ({"block": "nowhere.Block"}, '`block`: the class path "nowhere.Block" is not imported'),
        ({"global_pool": f"{HERE}.OfOneToken"}, r"must map tokens \(B, L, 8\) to \(B, 8\), but gave \(2, 17, 8\)"),
        ({"mlp_layer": {"class_path": "mlp", "init_args": {"mlp_layer": 3}}}, r"`mlp_layer\.mlp_layer` must be one of"),
        ({"attn": f"{HERE}.OneHead"}, "`attn`: .*OneHead refuses its arguments: .* argument 'num_heads'"),
        *(({key: f"{HERE}.Listed"}, f"`{key}`: neither .* would have `layers` of .*Listed") for key in OF_A_CLASS),
        *(({key: f"{HERE}.NoSuper"}, f"`{key}`: `__init__` of .*NoSuper must call `super") for key in OF_A_CLASS),
    ],
)
def test_a_mistake_is_named_with_the_way_out(wrong, told):
    with pytest.raises(ValueError, match=told):
        VisionTransformer(**TINY | wrong)


def test_a_pooling_that_asks_for_the_grid_gets_it_and_is_tried_at_it():
    net = VisionTransformer(**TINY | {"img_size": (8, 6)}, global_pool=f"{HERE}.Center", num_classes=3)
    assert net.attn_pool.grid == (4, 3) and net(torch.randn(2, 1, 8, 6)).shape == (2, 3)
    pool = {"class_path": f"{HERE}.Center", "init_args": {"grid_size": [4, 4]}}
    with pytest.raises(ValueError, match=r"`global_pool`: .*Center does not take \(B, 10, 8\) tokens: .*Error: "):
        VisionTransformer(**TINY | {"img_size": 6}, global_pool=pool)


def test_what_a_part_costs_that_needs_two_images_in_training_is_counted_in_evaluation():
    net = VisionTransformer(**TINY, global_pool=f"{HERE}.Normalized", drop_path_rate=0.5, drop_path_subset=True)
    net.blocks[0].eval()
    modes = [module.training for module in net.modules()]
    assert count_macs(net) == count_macs(VisionTransformer(**TINY))
    assert [module.training for module in net.modules()] == modes


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["patch", "t2t"])
@pytest.mark.parametrize("pos_embed", ["learned", "rope2d", "relpos"])
def test_what_a_part_costs_that_reads_values_is_counted_in_a_pass_of_an_image(tokenizer, pos_embed):
    size = TINY | {"img_size": 16, "tokenizer": tokenizer, "pos_embed": pos_embed, "dropout": 0.1}
    size |= {"global_pool": "map" if tokenizer == "patch" else "token"}  # by a trained query, which enters a layer
    usual, own = (VisionTransformer(**size, mlp_layer=layer) for layer in ("mlp", f"{HERE}.Experts"))
    state, fused = torch.get_rng_state(), getattr(own.tokenizer, "fused", None)
    mine, others = macs_of_modules(own), macs_of_modules(usual)
    assert torch.equal(state, torch.get_rng_state()) and fused == getattr(own.tokenizer, "fused", None)
    tokens = own.num_prefix_tokens + 64 if tokenizer == "patch" else own.num_prefix_tokens + own.grid_size[0] ** 2
    router = tokens * TINY["embed_dim"] * 2
    for layer in range(TINY["depth"]):  # each token goes to one expert as wide as the usual MLP
        assert mine[f"blocks.{layer}.mlp"] == others[f"blocks.{layer}.mlp"] + router
        assert mine[f"blocks.{layer}.attn"] == others[f"blocks.{layer}.attn"]
    assert mine["tokenizer"] == others["tokenizer"] and mine[""] == others[""] + TINY["depth"] * router


@pytest.mark.slow
@pytest.mark.rare
def test_a_run_with_a_part_that_reads_values_is_trained_tested_and_analyzed(here, monkeypatch, capsys):
    source = inspect.getsource(Experts)
    (here / "ownexperts.py").write_text(
        f"import torch\nfrom torch import nn\nfrom vitlab.layers import Mlp\n\n{source}"
    )
    monkeypatch.syspath_prepend(".")
    trust, own = ["--trust_imports", "ownexperts"], ["--config", "vit", "--model.mlp_layer=ownexperts.Experts"]
    run = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=2", "--trainer.accelerator=cpu", "--name=own"]
    assert main(["fit", *own, *run, "--trainer.logger=false", *trust]) == 0
    assert main(["test", "own", *trust]) == 0
    assert main(["analyze", "cost,attention", "own", "--quick", *trust]) == 0
    capsys.readouterr()
    for form in ("onnx", "pt2"):
        assert main(["export", "own", "--to", form, *trust]) == 2
        said = capsys.readouterr()
        told = (
            rf"vitlab: `--to {form}`: torch cannot make a graph of ownexperts.Experts: .*ownexperts\.py, line \d+, `if"
        )
        assert re.match(told, said.err) and said.err.count("\n") == 1 and not said.out
    assert not list((here / "runs" / "own" / "export").iterdir())
    assert main(["export", "own", "--to", "safetensors", *trust]) == 0


class Longest(nn.Module):
    """The longest token of each image: Python's loop makes a graph for one number of images alone."""

    def forward(self, x):
        return torch.cat([tokens.index_select(0, tokens.norm(dim=-1).argmax()[None]) for tokens in x])


def test_a_pooling_that_reads_values_is_built_on_the_meta_device_to_read_its_weights():
    net = VisionTransformer(**TINY, num_classes=3, global_pool=f"{HERE}.Longest")
    with torch.device("meta"):
        assert VisionTransformer(**TINY, num_classes=3, global_pool=f"{HERE}.Longest").head.weight.is_meta
    assert net(torch.randn(2, 1, 8, 8)).shape == (2, 3)


class Linspace(PosEmbed):
    """Its constructor reads values, as for rates that grow by layer."""

    def __init__(self, grid_size, depth):
        super().__init__(grid_size)
        self.rates = [rate.item() for rate in torch.linspace(0, 1, depth)]


def test_weights_of_a_part_whose_constructor_reads_values_are_read_at_another_size(tmp_path):
    arguments = TINY | {"num_classes": 3, "pos_embed": f"{HERE}.Linspace"}
    torch.save(
        {"hyper_parameters": arguments, "state_dict": VisionTransformer(**arguments).state_dict()}, tmp_path / "a"
    )
    larger = VisionTransformer(**arguments | {"img_size": 12})
    load_weights(larger, tmp_path / "a")
    assert torch.equal(larger.head.weight, load_network(tmp_path / "a").head.weight)


@pytest.mark.slow
def test_a_graph_that_takes_one_number_of_images_or_one_size_is_refused(tmp_path):
    fixed = VisionTransformer(**TINY, num_classes=3, global_pool=f"{HERE}.Longest").eval()
    pytest.importorskip("onnxruntime")
    write, read = FORMATS["onnx"]
    write(fixed, {}, tmp_path / "fixed.onnx")
    with pytest.raises(RunFailed, match="the file fails on a batch of 1 images of 8 x 8 pixels; nothing was written: "):
        both_outputs(fixed, read(tmp_path / "fixed.onnx", {}))


@pytest.mark.slow
def test_a_run_with_a_custom_block_is_described_tested_and_analyzed(here, monkeypatch):
    (here / "ownblock.py").write_text(
        "from torch import nn\n\n\nclass Shift(nn.Module):\n    def __init__(self, dim):\n        super().__init__()\n"
        "        self.layer = nn.Linear(dim, dim)\n\n    def forward(self, x, pos_embed, layer):\n"
        "        return x + self.layer(x.roll(1, dims=1))\n"
    )
    monkeypatch.syspath_prepend(".")
    monkeypatch.setattr("vitlab.analysis.subject.printed", lambda figure, *_: figure)  # seconds of typesetting
    size = ["--model.patch_size=2", "--model.depth=2", "--model.embed_dim=16", "--model.num_heads=2"]
    run = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=2", "--trainer.accelerator=cpu", "--name=own"]
    trust = ["--trust_imports", "ownblock"]
    own = ["--model=Classifier", "--data=Digits", "--model.block=ownblock.Shift", "--model.compile=false"]
    assert main(["fit", *own, *size, *run, *trust]) == 0
    assert main(["test", "own", *trust]) == 0
    assert main(["analyze", "cost,calibration", "own", "--quick", *trust]) == 0
    assert main(["analyze", "attention", "own", "--quick", *trust]) == 2
    assert main(["look", "own", *trust]) in (0, 2)
