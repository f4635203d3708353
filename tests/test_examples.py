"""Attentions that are written outside of vitlab, against slow versions of the papers and their authors' code."""

import importlib
import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from vitlab.analysis import rollout
from vitlab.analysis.attribution.caught import caught_maps
from vitlab.analysis.attribution.maps import methods_of
from vitlab.cli.main import main
from vitlab.errors import UsageError
from vitlab.layers.pos_embed import PosEmbed, build_pos_embed
from vitlab.models import VisionTransformer
from vitlab.models.walk import all_attention_maps, attention_logits, attention_maps, heads_of
from vitlab.tasks import Classifier

FOLDER = Path(__file__).parents[1] / "examples"
sys.path.append(str(FOLDER))

cope, differential, relative_values = map(importlib.import_module, ("cope", "differential", "relative_values"))
linear, p_rope, rope_plus = map(importlib.import_module, ("linear", "p_rope", "rope_plus"))
FILES = sorted(FOLDER.glob("*.py"))
PATHS = ["differential.Differential", "cope.CoPE", "relative_values.RelativeValues", "linear.Linear"]
TINY = {"img_size": 12, "in_chans": 1, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}


def randomized(module: nn.Module) -> nn.Module:
    """Return a module whose parameters are all random, in float64: what starts at zero hides mistakes."""
    for p in module.parameters():
        nn.init.normal_(p, std=0.5)
    return module.double().eval()


def parts(attn, x):
    """Return queries, keys and values of each image, head and token."""
    q, k, v = attn.qkv(x).unflatten(2, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
    return q, k, v


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_example_is_short(path):
    assert path.read_text().count("\n") <= 60


def test_differential_attention_is_the_formula_of_the_paper():
    attn, x = randomized(differential.Differential(8, 2, layer=3)), torch.randn(2, 5, 8, dtype=torch.float64)
    q, k, v = parts(attn, x)
    start = 0.8 - 0.6 * math.exp(-0.3 * 3)
    l1, l2, l3, l4 = attn.lambdas.tolist()
    one, other = (sum(a * b for a, b in zip(*pair, strict=True)) for pair in ((l1, l2), (l3, l4)))
    lam = math.exp(one) - math.exp(other) + start
    y = torch.zeros(2, 5, 8, dtype=torch.float64)
    for b in range(2):
        for a in range(2):
            for i in range(5):
                first = torch.stack([q[b, a, i, :2] @ k[b, a, j, :2] / math.sqrt(2) for j in range(5)]).softmax(0)
                second = torch.stack([q[b, a, i, 2:] @ k[b, a, j, 2:] / math.sqrt(2) for j in range(5)]).softmax(0)
                head = sum((first[j] - lam * second[j]) * v[b, a, j] for j in range(5))
                head = head / (head.square().mean() + 1e-5).sqrt() * attn.head_norm.weight
                y[b, i, 4 * a : 4 * a + 4] = (1 - start) * head
    torch.testing.assert_close(attn(x, PosEmbed(), 3), attn.proj(y), rtol=0, atol=1e-5)


def test_contextual_positions_are_the_formula_of_the_paper():
    attn, x = randomized(cope.CoPE(8, 2, positions=3)), torch.randn(2, 5, 8, dtype=torch.float64)
    q, k, v = (each.detach() for each in parts(attn, x))
    y, clamped = torch.zeros(2, 5, 8, dtype=torch.float64), 0
    for b in range(2):
        for a in range(2):
            for i in range(5):
                plain = [float(q[b, a, i] @ k[b, a, j]) / math.sqrt(4) for j in range(5)]
                gates, logits = [1 / (1 + math.exp(-s)) for s in plain], []
                for j in range(5):
                    at = min(sum(gates[j:]), 2.0)
                    clamped += at == 2.0
                    low, high = math.floor(at), math.ceil(at)
                    z = [float(q[b, a, i] @ attn.table[:, n].detach()) for n in range(3)]
                    logits.append(plain[j] + (1 - (at - low)) * z[low] + (at - low) * z[high])
                weights = torch.tensor(logits, dtype=torch.float64).softmax(0)
                y[b, i, 4 * a : 4 * a + 4] = sum(weights[j] * v[b, a, j] for j in range(5))
    assert 0 < clamped < 100
    torch.testing.assert_close(attn(x, PosEmbed(), 0), attn.proj(y), rtol=0, atol=1e-5)


@pytest.mark.parametrize("grid", [(2, 3), (4, 2)])
def test_relative_keys_and_values_are_the_formula_of_the_paper(grid):
    attn = randomized(relative_values.RelativeValues(8, 2, grid_size=(2, 3), num_prefix_tokens=1))
    cells = [None, *((r, c) for r in range(grid[0]) for c in range(grid[1]))]
    L = len(cells)
    x = torch.randn(2, L, 8, dtype=torch.float64)
    q, k, v = parts(attn, x)

    def row(i, j):
        if cells[i] is None or cells[j] is None:
            return 15
        dy = max(-1, min(1, cells[i][0] - cells[j][0]))
        dx = max(-2, min(2, cells[i][1] - cells[j][1]))
        return (dy + 1) * 5 + dx + 2

    y = torch.zeros(2, L, 8, dtype=torch.float64)
    for b in range(2):
        for a in range(2):
            for i in range(L):
                logits = [q[b, a, i] @ (k[b, a, j] + attn.keys[row(i, j)]) / 2 for j in range(L)]
                weights = torch.stack(logits).softmax(0)
                mixed = sum(weights[j] * (v[b, a, j] + attn.values[row(i, j)]) for j in range(L))
                y[b, i, 4 * a : 4 * a + 4] = mixed
    torch.testing.assert_close(attn(x, PosEmbed(grid), 0), attn.proj(y), rtol=0, atol=1e-5)


def test_linear_attention_is_the_formula_of_the_paper_and_refuses_what_acts_on_logits():
    attn, x = randomized(linear.Linear(8, 2)), torch.randn(2, 5, 8, dtype=torch.float64)
    q, k, v = parts(attn, x)
    q, k = (torch.where(each > 0, each + 1, each.exp()) for each in (q, k))
    y = torch.zeros(2, 2, 5, 4, dtype=torch.float64)
    for i in range(5):
        weights = torch.stack([(q[:, :, i] * k[:, :, j]).sum(-1) for j in range(5)])
        y[:, :, i] = (weights[..., None] * v.movedim(2, 0)).sum(0) / weights.sum(0)[..., None]
    torch.testing.assert_close(attn(x, PosEmbed(), 0), attn.proj(y.transpose(1, 2).flatten(2)))
    torch.testing.assert_close((attn.weights(x, PosEmbed(), 0) @ v), y)
    with pytest.raises(ValueError, match="has no logits for Alibi2d to act on"):
        attn(x, build_pos_embed("alibi2d", (1, 5), 8, 2, 1, 0).double(), 0)


def fading():
    """Return the class of docs/bring_your_own.md."""
    page = (FOLDER.parent / "docs" / "bring_your_own.md").read_text()
    space = {}
    exec(re.search(r"```python\n# myattention\.py\n(.*?)```", page, re.DOTALL)[1], space)
    return space["Fading"]


@pytest.mark.parametrize(
    "attn",
    [fading()(8, 2, num_prefix_tokens=1), relative_values.RelativeValues(8, 2, grid_size=(3, 3), num_prefix_tokens=1)],
    ids=lambda attn: type(attn).__name__,
)
def test_distances_need_all_tokens_of_one_image_in_their_places(attn):
    net = VisionTransformer(**TINY | {"embed_dim": 8, "depth": 1}).eval()
    net.blocks[0].attn = attn
    assert net(torch.randn(2, 1, 12, 12)).shape == (2, 3)
    with pytest.raises(ValueError, match="needs all tokens of one"):
        net([torch.randn(1, 12, 12), torch.randn(1, 8, 12)])
    with pytest.raises(ValueError, match="needs all tokens of one"):
        net.forward_features(torch.randn(2, 1, 12, 12), torch.tensor([[3, 1], [0, 8]]))


@pytest.mark.slow
def test_weights_are_dropped_in_training_and_refused_where_there_are_none():
    attn, x = relative_values.RelativeValues(8, 2, (2, 3), 1, attn_dropout=0.5), torch.randn(2, 7, 8)
    evaluated = attn.eval()(x, PosEmbed((2, 3)), 0)
    draws = [attn.train()(x, PosEmbed((2, 3)), 0) for _ in range(400)]
    assert not torch.equal(draws[0], draws[1])
    torch.testing.assert_close(torch.stack(draws).mean(0), evaluated, rtol=0, atol=0.15)
    with pytest.raises(ValueError, match=r"no weights to drop: leave attn_dropout=0\.5 out"):
        VisionTransformer(**TINY, attn={"class_path": "linear.Linear", "init_args": {"attn_dropout": 0.5}})


def test_the_imaginary_part_of_rotated_products_gives_more_heads():
    attn, x = randomized(rope_plus.RoPEPlus(16, 2)), torch.randn(2, 6, 16, dtype=torch.float64)
    position = build_pos_embed("rope2d", (2, 3), 16, 2, 1, 0).double()
    q, k, v = parts(attn, x)
    y, angles = [], position._angles(position._cells(), 100.0).double()  # (L, d / 2)
    q, k = (torch.view_as_complex(each.unflatten(-1, (-1, 2)).contiguous()) for each in (q, k))
    products = (q[:, :, :, None] * k[:, :, None].conj() * torch.exp(1j * (angles[:, None] - angles))).sum(-1)
    for logits in (products.real, products.imag):
        y.append((logits / 8**0.5).softmax(-1) @ v)
    expected = attn.proj(torch.cat(y, dim=1).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attn(x, position, 0), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
def test_the_lowest_frequencies_do_not_rotate(p):
    ours, whole = p_rope.PRoPE((2, 3), 16, 1, p=p), build_pos_embed("rope2d", (2, 3), 16, 1, 1, 1)
    x = torch.randn(1, 1, 7, 16)
    pairs = torch.arange(16) // 2 % 4 < 4 * p  # of the four frequencies of each axis, the highest first
    torch.testing.assert_close(ours.rotate(x, 0), torch.where(pairs, whole.rotate(x, 0), x))
    assert (ours.at((4, 5)).rotate(torch.ones(1, 1, 21, 16), 0)[..., ~pairs] == 1).all()


ROTATIONS = [{"attn": "rope_plus.RoPEPlus", "pos_embed": "rope2d"}, {"pos_embed": "p_rope.PRoPE"}]


@pytest.mark.slow
@pytest.mark.parametrize("parts", ROTATIONS)
def test_more_rotations_train_at_any_size_and_are_exported(parts):
    task = Classifier(num_classes=3, attn_dropout=0.1, **{k: v for k, v in TINY.items() if k != "num_classes"}, **parts)
    task.net(torch.randn(2, 1, 16, 20)).square().sum().backward()
    assert all(p.grad is not None for p in task.net.blocks[0].parameters())
    net, images = task.net.eval(), torch.randn(2, 1, 12, 12)
    torch.testing.assert_close(torch.export.export(net, (images,)).module()(images), net(images))
    heads = 4 if "attn" in parts else 2
    assert attention_maps(net, images, 0).shape == (2, heads, 10, 10)


# Made once by the code of the authors, in float64, from random weights without biases, of two heads. iRPE's ran as
# published; the other two classes were typed from it, without the branches that are not used here.
THEIRS = {
    "differential": "microsoft/unilm 3aca927, MultiheadDiffAttn, angles of zero, no mask; its softmax is in float32",
    "cope": "facebookresearch/RAM 5420e20, ContextPosSelfAttn with cope_nodiv, as the paper has it, no mask",
    "relative_values": "microsoft/Cream 4a13c40, iRPE: product, contextual, on keys and values, ratio 2, a class token",
}


@pytest.mark.parametrize("name", THEIRS)
def test_an_example_computes_what_its_authors_code_computes(name):
    kept = json.loads((Path(__file__).parent / "goldens" / "attentions.json").read_text())[name]
    layer, position = kept.pop("layer", 0), PosEmbed((2, 3))
    attn = {
        "differential": lambda: differential.Differential(8, 2, layer=layer, qkv_bias=False),
        "cope": lambda: cope.CoPE(8, 2, positions=3, qkv_bias=False),
        "relative_values": lambda: relative_values.RelativeValues(8, 2, (2, 3), 1, qkv_bias=False),
    }[name]().double()
    x, y = (torch.tensor(kept.pop(key), dtype=torch.float64).view(2, -1, 8) for key in "xy")
    kept = {"proj": torch.eye(8).flatten().tolist(), **kept}
    named = {"qkv": attn.qkv.weight, "proj": attn.proj.weight, "norm": getattr(attn, "head_norm", attn.proj).weight}
    nn.init.zeros_(attn.proj.bias)
    with torch.no_grad():
        for key, values in kept.items():
            p = named.get(key, getattr(attn, key, None))
            p.copy_(torch.tensor(values, dtype=torch.float64).view_as(p))
    torch.testing.assert_close(attn(x, position, layer), y, rtol=0, atol=1e-5)


def test_every_example_adds_the_bias_of_a_position_embedding():
    position, x = build_pos_embed("relpos", (2, 3), 8, 2, 1, 1), torch.randn(1, 7, 8)
    nn.init.normal_(position.bias_table)
    for cls in (differential.Differential, cope.CoPE):
        attn = cls(8, 2)
        assert (attn(x, position, 0) - attn(x, PosEmbed(), 0)).abs().max() > 1e-3


def test_what_cancels_in_differential_attention_is_no_share_and_has_no_rollout():
    net, images = randomized(VisionTransformer(**TINY, attn=PATHS[0])), torch.randn(2, 1, 12, 12, dtype=torch.float64)
    assert "rollout" not in methods_of(net) and {"attention", "gradient rollout"} <= {*methods_of(net)}
    with pytest.raises(UsageError, match=r"layer \d has negative weights of attention, down to -.*: look at"):
        rollout(all_attention_maps(net, images))
    assert "rollout" in methods_of(randomized(VisionTransformer(**TINY, attn="cope.CoPE")))


@pytest.mark.parametrize("path", PATHS)
def test_analyses_see_the_weights_that_the_network_uses(path):
    net, images = randomized(VisionTransformer(**TINY, attn=path)), torch.randn(2, 1, 12, 12, dtype=torch.float64)
    with caught_maps(net) as maps:
        outputs = net(images)
    assert [tuple(each.shape) for each in maps] == [(2, 2, 10, 10)] * 2
    for layer in range(2):
        torch.testing.assert_close(maps[layer], attention_maps(net, images, layer))
    torch.testing.assert_close(net(images), outputs, rtol=0, atol=1e-12 if path == "linear.Linear" else 0)
    if path in ("differential.Differential", "linear.Linear"):  # one has two maps of logits, the other none
        with pytest.raises(ValueError, match="are not known, as its `weigh` does not call"):
            next(attention_logits(net, images))
    else:
        for logits, weights in zip(attention_logits(net, images), maps, strict=True):
            torch.testing.assert_close(logits.softmax(dim=-1), weights)
    assert torch.autograd.grad(outputs.sum(), [p for p in net.parameters() if p.requires_grad]) is not None


@pytest.mark.parametrize("path", PATHS)
def test_a_task_with_any_example_computes_what_its_network_does(path):
    sizes = {name: value for name, value in TINY.items() if name != "num_classes"}
    task = randomized(Classifier(num_classes=3, attn=path, **sizes))
    images = torch.randn(2, 1, 12, 12, dtype=torch.float64)
    expected = task.net.forward_head(task.net.forward_features(images))
    torch.testing.assert_close(task(images), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("weights", [None, nn.Parameter(torch.zeros(3))], ids=["none", "a parameter"])
def test_an_attention_without_weights_to_show_is_refused_by_name(weights):
    class Own(nn.Module):
        def forward(self, x, pos_embed, layer):
            return x

    net = VisionTransformer(**TINY)
    net.blocks[1].attn = Own()
    if weights is not None:
        net.blocks[1].attn.weights = weights
    assert heads_of(net) == [2, 0]
    with pytest.raises(ValueError, match="Own does not show its weights: give it weights"):
        attention_maps(net, torch.randn(1, 1, 12, 12), 0)
    with pytest.raises(ValueError, match="Own does not show its weights"), caught_maps(net):
        pass


WAYS = [*([f"--model.attn={path}"] for path in PATHS), ["--model.attn=rope_plus.RoPEPlus", "--model.pos_embed=rope2d"]]
WAYS += [["--model.pos_embed=p_rope.PRoPE"], ["--model.pos_embed=coordinates.Coordinates"]]
SIZE = ["--model.patch_size=2", "--model.depth=1", "--model.embed_dim=16", "--model.num_heads=2"]
SHORT = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=2", "--trainer.accelerator=cpu"]


OFTEN = (WAYS[3], WAYS[-1])  # an attention and a position embedding


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [way if way in OFTEN else pytest.param(way, marks=pytest.mark.rare) for way in WAYS],
    ids=lambda way: way[0].partition("=")[2],
)
def test_every_example_is_trained_analyzed_and_exported_by_the_commands(way, here, capsys, hasty):
    key, path = way[0].removeprefix("--model.").split("=")
    trust = ["--trust_imports", path.split(".")[0]]
    run = ["fit", "--model=Classifier", "--data=Digits", *way, *SIZE, *SHORT, "--name=own"]
    assert main([*run, *trust]) == 0
    assert main(["test", "own", *trust]) == 0
    assert main(["analyze", "attention", "own", "--quick", *trust]) == 0
    assert main(["export", "own", "--to", "pt2", *trust]) == 0
    assert main(["export", "own", "--to", "timm", *trust]) == 2
    assert f"does not have `{key}: {path}`" in capsys.readouterr().err


@pytest.mark.rare
def test_examples_are_compared_in_an_ablation(here, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{FOLDER}:{FOLDER.parent}")  # of the processes that train the cells
    net = {name: value for name, value in TINY.items() if name not in ("img_size", "in_chans", "num_classes")}
    base = {
        "model": {"class_path": "Classifier", "init_args": net | {"patch_size": 2}},
        "data": {"class_path": "Digits"},
        "trainer": {"max_epochs": 1, "limit_train_batches": 2, "accelerator": "cpu", "logger": False},
    }
    Path("tiny.yaml").write_text(yaml.safe_dump(base))
    ways = {each[0].rpartition(".")[2].lower(): dict(flag[2:].split("=") for flag in each) for each in WAYS}
    lab = {"name": "own", "base": "tiny.yaml", "axes": {"part": {"softmax": {}, **ways}}, "seeds": 2}
    lab |= {"baseline": {"part": "softmax"}, "metric": {"primary": "acc1"}, "run": {"workers": 2}}
    lab["trust_imports"] = sorted({next(iter(way.values())).split(".")[0] for way in ways.values()})
    Path("own.yaml").write_text(yaml.safe_dump(lab))
    trust = ["--trust_imports", ",".join(lab["trust_imports"])]
    assert main(["ablate", "run", "own.yaml", *trust]) == 0
    assert main(["ablate", "report", "own.yaml", *trust]) == 0
    report = Path("runs/ablations/own/report/report.md").read_text()
    assert all(f"| {name} |" in report for name in ("softmax", *ways))
