import base64
import html
import io
import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import lightning as L
import matplotlib
import numpy as np
import pandas as pd
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from PIL import Image, ImageFont

import vitlab
from vitlab.analysis import ANALYSES
from vitlab.analysis.attribution.maps import METHODS, analyze_attribution, methods_of, occlusion
from vitlab.analysis.head_attention import analyze_attention
from vitlab.analysis.subject import Subject
from vitlab.analysis.views.token_layers import token_layer_maps
from vitlab.callbacks.ema import EMA
from vitlab.cli.main import main
from vitlab.config.keys import differences
from vitlab.data import Digits, ImageFolder
from vitlab.data.loading.transforms import to_tensor
from vitlab.errors import UsageError
from vitlab.jobs.view import View
from vitlab.layers.attention import Attention
from vitlab.look.charts import line_chart, matrix_chart, pair_chart
from vitlab.look.command import page_about
from vitlab.look.diagram import architecture, levels_of, steps_of
from vitlab.look.facts import (
    Shown,
    config_of,
    environment,
    first_words,
    logged_curves,
    outcome_facts,
    paired,
    predictions_of,
)
from vitlab.look.listed import has_images, listed
from vitlab.look.live import GrowingPage, LivePage, sparkline
from vitlab.look.page import SCRIPTS, render
from vitlab.look.stored_analyses import _differences, contrast_tables, findings_of
from vitlab.look.viewer import BUDGET, packed, pictures_of, pooled, pools, shape_of
from vitlab.look.written import MARK
from vitlab.models.create import create_model
from vitlab.models.walk import attention_maps
from vitlab.runs.atomic import write_text
from vitlab.runs.directory import LOCK, RunDir
from vitlab.runs.lock import take
from vitlab.runs.same_images import same_images
from vitlab.tasks import Classifier

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"
FONT = Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf"
HOSTILE = "<img src=x onerror=alert(1)></script>"
NODE = shutil.which("node")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SMALL = {
    "img_size": (8, 8),
    "in_chans": 1,
    "num_classes": 10,
    "patch_size": 2,
    "embed_dim": 16,
    "depth": 2,
    "num_heads": 2,
}


OF_OUTPUTS = ["Grad-CAM", "SmoothGrad", "integrated gradients", "GradientSHAP", "occlusion"]


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch):
    """Let maps of gradients take few steps: no test here asks how exact they are."""
    monkeypatch.setattr("vitlab.analysis.attribution.maps.STEPS", 2)
    monkeypatch.setattr("vitlab.analysis.attribution.maps.SAMPLES", 2)


@pytest.fixture
def few_classes(monkeypatch):
    """Let pages have the maps of one class beside the predicted one."""
    monkeypatch.setattr("vitlab.look.viewer.MOST_CLASSES", 1)


def small_subject(name="small", **changes):
    torch.manual_seed(0)
    return Subject(vitlab.VisionTransformer(**{**SMALL, **changes}), Digits(), name=name)


def test_the_page_of_a_run_begins_with_status_model_data_and_whether_numbers_are_current(tmp_path):
    assert first_words(RunDir(tmp_path)) == ["unknown", "unknown", "unknown", "not measured yet"]
    run = measured(tmp_path / "run", [True, False])
    tokenizer = {"class_path": "t2t", "init_args": {"t2t_dim": 32}}
    write_text(run.config, json.dumps({"model": {"class_path": "a.Mine", "init_args": {"tokenizer": tokenizer}}}))
    run.write("run.json", {"status": "running"})
    run.write("model.json", {"parameters": 1_500_000})
    run.write("data.json", {"data": "my.Set", "splits": {"train": {"n": 1200}}, "class_names": ["a", "b"],
                            "mean": [], "std": []})  # fmt: skip
    assert first_words(run)[0] == dict(environment(run))["status"] == vitlab.Run(run.path).status == "killed"
    trains = take(run.path / LOCK)
    words = first_words(run)
    assert dict(environment(run))["status"] == vitlab.Run(run.path).status == "running"
    trains.release()
    assert words[:3] == ["running", "Mine, tokenizer t2t, 1.5 M parameters", "Set, 1,200 training images, 2 classes"]
    assert words[2] in render("page", {"run": run}, [])


def measured(folder, right, names=("a", HOSTILE)):
    """A run directory with predictions of two classes."""
    (folder / "predictions").mkdir(parents=True)
    target = np.arange(len(right)) % 2
    table = {"index": range(len(right)), "target": target, "prediction": np.where(right, target, 1 - target)}
    pd.DataFrame({**table, "probability": 0.75}).to_parquet(folder / "predictions" / "val.parquet")
    run = RunDir(folder)
    (folder / "config.yaml").write_text(f"model:\n  depth: {int(sum(right))}\n")
    facts = {"class_names": list(names), "mean": [0.5], "std": [0.5], "splits": {"val": {"n": len(right), "hash": "a"}}}
    run.write("data.json", facts)
    return run


def on_page(run):
    return Shown(run.path.name, run, run.read("data.json"), predictions_of(run))


def outcome(run):
    return outcome_facts(on_page(run))


@pytest.mark.parametrize("fact", [config_of, first_words])
def test_a_page_says_which_configuration_is_damaged(fact, tmp_path):
    run = RunDir(tmp_path)
    run.config.write_text("model: [")
    with pytest.raises(UsageError, match=r"config\.yaml is damaged"):
        fact(run)


def test_a_thousand_classes_are_a_table_of_the_most_frequent_confusions(tmp_path):
    names = [f"class {k}" for k in range(998)]
    shown = outcome(measured(tmp_path / "run", [True] * 9 + [False] * 6, ["cat", HOSTILE, *names]))["matrix"]
    assert "<svg" not in shown and "<img" not in shown
    assert shown.count("<td>cat</td>") == 2 and "<td>3 of 8</td>" in shown and "<td>3 of 7</td>" in shown
    assert "2 of 2 pairs of classes that are confused" in shown


def test_the_drawing_has_the_shapes_that_pass_through_t2t():
    with torch.device("meta"):
        net = create_model("t2t_vit_14")
    shapes = [step.shape for step in steps_of(net)]
    assert shapes[:7] == ["3 x 224 x 224", "3136 x 147", "3136 x 64", "784 x 576", "784 x 64", "196 x 576", "196 x 384"]
    assert shapes[-4:] == ["197 x 384", "197 x 384", "384", "1000"]
    for level in levels_of(net):  # `make pages`
        place = ROOT / f"docs/images/t2t_vit_14{'' if level == 'network' else f'_{level}'}.svg"
        assert architecture(net, "t2t_vit_14", level, key="drawn") == place.read_text()
    drawing = architecture(net, HOSTILE)
    assert "56 x 56" in drawing and "<img" not in drawing
    assert f"{sum(p.numel() for p in net.parameters()):,} parameters" in drawing


@pytest.mark.slow
def test_a_drawing_opens_the_steps_that_a_network_has():
    """In a T2T network each level has the shapes of its tensors; what it adds stands as often as the formula says."""
    net = create_model("t2t_vit_t_14", img_size=64).train()
    drawn = {level: architecture(net, level=level) for level in levels_of(net)}
    assert [*drawn] == ["network", "tokens", "block", "head"] and net.training
    for text in ("256 x 147", "1 x 256 x 256", "64 x 16 x 16", "64 x 576", "16 x 384"):  # Yuan et al., table 1, at 64
        assert text in drawn["tokens"], text
    assert drawn["tokens"].count("<circle") == 4 and drawn["block"].count("<circle") == 2
    assert drawn["block"].count("6 x 17 x 17") == 2 and drawn["block"].count("6 x 17 x 64") == 4
    assert "17 x 1152" in drawn["block"] and ">1000<" in drawn["head"]
    hooks = [hook for module in net.modules() for hook in module._forward_hooks]
    assert hooks == []


@pytest.mark.parametrize("tokenizer", ["patch", "t2t"])
def test_a_drawing_leaves_each_part_in_its_mode(tokenizer):
    net = small_subject(tokenizer=tokenizer).net.train()
    for frozen in (net.blocks[0].attn, net.tokenizer):
        frozen.eval()
    modes = [module.training for module in net.modules()]
    for level in levels_of(net):
        architecture(net, level=level)
        assert [module.training for module in net.modules()] == modes, level


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        ({"pos_embed": "rope2d"}, ["RoPE2d rotates"]),
        ({"pos_embed": "alibi2d"}, ["adds to the scores"]),
        (
            {"attn": {"class_path": "gated", "init_args": {"qk_norm": True}}},
            ["norm of each head", "gated by the tokens"],
        ),
        ({"layer_scale": 0.1, "mlp_layer": "swiglu"}, ["layer scale", "gated"]),
        ({"block": {"class_path": "dense", "init_args": {"dense_blocks": [2], "dense_growth": 8}}}, ["concatenate"]),
        ({"tokenizer": "t2t"}, ["block 1 of 2"]),
    ],
)
def test_a_drawing_of_a_block_shows_what_this_block_has(words, texts):
    plain = architecture(small_subject().net, level="block")
    drawing = architecture(small_subject(**words).net, level="block")
    assert all(text in drawing for text in texts)
    assert "tokenizer" in words or all(text not in plain for text in texts)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("t2t_vit_t_24", {}),
        ("vit_s16", {"pos_embed": "rope2d", "layer_scale": 0.1}),
        ("vit_l16", {"img_size": 2048, "pos_embed": "alibi2d"}),
        ("t2t_vit_14", {"img_size": (1700, 500), "t2t_kernels": [31, 3, 3]}),
    ],
)
def test_no_text_of_a_drawing_is_cut_or_lies_on_another(name, words):
    """In DejaVu Sans, broader than what most systems show; 14 pixels are 7 pt where 904 are the width of a page."""
    with torch.device("meta"):
        net = create_model(name, **words)
    face = {size: ImageFont.truetype(str(FONT), size) for size in (12, 14)}
    for level in levels_of(net):
        drawing = ElementTree.fromstring(architecture(net, name, level))
        assert int(drawing.get("width")) in (452, 904) and len(drawing.findall(f".//{SVG}rect")) > 3
        for group in [drawing, *drawing.findall(f".//{SVG}g")]:
            boxes = [[float(r.get(k)) for k in ("x", "y", "width", "height")] for r in group.iterfind(f"{SVG}rect")]
            spans = []
            for text in group.iterfind(f"{SVG}text"):
                x, y, kind = float(text.get("x")), float(text.get("y")), text.get("class")
                width = float(text.get("textLength") or face[12 if kind == "s" else 14].getlength(text.text))
                spans.append((y, x - width * (kind == "n"), x + width * (kind != "n"), text.text))
            for y, left, right, words_there in spans[1 if group is drawing else 0 :]:  # without the title
                (inside,) = [b for b in boxes if b[0] < left < b[0] + b[2] and b[1] < y < b[1] + b[3]]
                assert right <= inside[0] + inside[2] - 6, words_there
            for a, b in combinations(spans, 2):
                assert abs(a[0] - b[0]) > 12 or a[2] + 4 < b[1] or b[2] + 4 < a[1], (a, b)


def test_a_level_that_a_network_lacks_is_refused():
    with pytest.raises(UsageError, match="level must be one of network, block, head for this network, got 'tokens'"):
        architecture(small_subject().net, level="tokens")


def unpacked(one, *shape):
    codes = np.frombuffer(base64.b64decode(one["text"]), "<u2").reshape(shape)
    return one["low"] + codes * (one["high"] - one["low"]) / 65535


@pytest.mark.slow
def test_the_viewer_holds_the_weights_of_every_layer_and_head():
    subject = small_subject()
    (first, _), images = pictures_of(subject, count=2, has_gradients=False), subject.shown(2)
    cells, token = unpacked(first["cells"], 2, 2, 16, 16), unpacked(first["token"], 2, 2, 16)
    for layer in range(2):
        maps = attention_maps(subject.net, images, layer)[0]
        for found, expected in ((cells[layer], maps[:, 1:, 1:]), (token[layer], maps[:, 0, 1:])):
            assert found == pytest.approx(expected.numpy(), abs=float(maps.max()) / 65535)
    assert set(first["colors"]) == {"0", "1", "2"} and first["said"].endswith("%")


@pytest.mark.rare
@pytest.mark.slow
def test_the_viewer_stores_occlusion_and_attention_only_once():
    subject = small_subject()
    images, (first, _) = subject.shown(2), pictures_of(subject, count=2)
    names = ["rollout", "gradient rollout", "gradient x attention", "LRP", "Grad-CAM", "SmoothGrad"]
    names += ["integrated gradients", "GradientSHAP", "occlusion"]
    assert list(first["maps"]) == names  # of attention every layer and head is there
    classes = subject.net(images).argmax(dim=1)
    for name in names:
        expected = METHODS[name](subject.net, images, classes)[0].detach()
        error = float(expected.max() - expected.clamp(max=0).min()) / 65535
        assert unpacked(first["maps"][name], 16) == pytest.approx(expected.numpy(), abs=error + 1e-9)
        assert first["maps"][name]["signed"] == (name in ("integrated gradients", "GradientSHAP", "occlusion"))
    mean = small_subject(class_token=False, global_pool="avg")
    assert list(pictures_of(mean, count=1)[0]["maps"]) == ["attention that the head reads", *names]
    assert (
        packed(torch.tensor([-3.0, -1.0]))["high"] == -1.0 and unpacked(packed(torch.zeros(3)), 3).tolist() == [0] * 3
    )


class Convolution(torch.nn.Module):
    """A block without attention."""

    def __init__(self, dim, num_prefix_tokens):
        super().__init__()
        self.prefix, self.conv = num_prefix_tokens, torch.nn.Conv2d(dim, dim, 3, padding=1)

    def forward(self, x, pos_embed, layer):
        y = self.conv(x[:, self.prefix :].transpose(1, 2).unflatten(2, pos_embed.grid_size)).flatten(2).transpose(1, 2)
        return x + torch.cat([y.mean(dim=1, keepdim=True), y], dim=1)


class LinearAttention(torch.nn.Module):
    """An attention that has heads and no weights."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads, self.qkv = num_heads, torch.nn.Linear(dim, 3 * dim)

    def forward(self, x, pos_embed, layer):
        q, k, v = self.qkv(x).softmax(dim=-1).chunk(3, dim=-1)
        return q @ (k.transpose(-2, -1) @ v)


@pytest.mark.rare
@pytest.mark.slow
@pytest.mark.parametrize("words", [{"block": Convolution}, {"attn": LinearAttention}], ids=str)
def test_a_network_without_attention_has_a_page_of_maps_from_outputs(words):
    subject = small_subject(**words)
    assert shape_of(subject, 1)["unseen"].startswith("no attention") and shape_of(subject, 1)["depth"] == 0
    assert list(methods_of(subject.net)) == OF_OUTPUTS
    page = render("own", {}, [subject], 1)
    (shown,) = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])
    (one,) = shown["pictures"]
    assert "cells" not in one and list(one["maps"]) == OF_OUTPUTS and one["colors"]
    finding = analyze_attribution(subject)
    assert set(finding.table["map"]) == set(OF_OUTPUTS)


class OneThenTwo(Attention):
    def __init__(self, dim: int, num_heads: int, layer: int):
        super().__init__(dim, num_heads if layer else 1)


def test_a_page_says_that_layers_have_other_numbers_of_heads():
    own, usual = small_subject(attn=OneThenTwo), small_subject()
    assert shape_of(usual, 1)["unseen"] == "" and shape_of(own, 1)["depth"] == 0
    assert shape_of(own, 1)["unseen"].startswith("the layers have 1, 2 heads")
    assert "cells" not in pictures_of(own, count=1, has_gradients=False)[0]


@pytest.mark.rare
def test_the_viewer_has_maps_of_other_classes_and_of_the_token_layers_of_t2t():
    splits = {"t2t_kernels": [3, 3, 3], "t2t_strides": [1, 2, 1], "t2t_dim": 16, "t2t_attn": "performer"}
    torch.manual_seed(0)
    subject = Subject(vitlab.VisionTransformer(**SMALL | {"tokenizer": "t2t", **splits}), Digits())
    images, (first, _) = subject.shown(2), pictures_of(subject, count=2)
    assert len(first["targets"]) == 9 and first["class"] not in first["targets"]
    k = next(k for k, one in first["targets"].items() if one["name"] == "3")
    expected = METHODS["gradient x attention"](subject.net, images, torch.tensor([k, k]))[0].detach()
    found = unpacked(first["targets"][k]["maps"]["gradient x attention"], 16)
    assert found == pytest.approx(expected.numpy(), abs=float(expected.max()) / 65535)
    assert "rollout" not in first["targets"][k]["maps"]  # of no class
    maps = token_layer_maps(subject.net.tokenizer, images[:1])
    assert [each["key"] for each in shape_of(subject, 2)["splits"]] == [[8, 8, 1], [4, 4, 1]]
    for packed_map, each in zip(first["splits"], maps, strict=True):
        found = unpacked(packed_map, *each.shape[1:])
        assert found == pytest.approx(each[0].numpy(), abs=float(each.max()) / 65535)
    labels = [int(subject.class_names.index(one["target"])) for one in pictures_of(subject, count=2)]
    assert labels == subject.shown_classes(2)


@pytest.mark.slow
def test_occlusion_of_many_patches_covers_neighbors_together(monkeypatch, few_classes):
    subject = small_subject()
    monkeypatch.setattr("vitlab.look.viewer.PASSES", 12)  # for three pictures: squares of 2 x 2 of 4 x 4 patches
    name, found = list(pictures_of(subject, count=3)[0]["maps"].items())[-1]
    assert name == "occlusion, 2 x 2 patches together" and found["signed"]
    values = unpacked(found, 4, 4)
    image = subject.shown(1)
    covered = image.clone()
    covered[:, :, :4, 4:] = 0
    before, after = (subject.net(x).softmax(dim=1).detach() for x in (image, covered))
    expected = float((before - after)[0, before.argmax()])
    assert values[:2, 2:] == pytest.approx(np.full((2, 2), expected), abs=1e-5)
    odd = occlusion(subject.net, image, before.argmax(dim=1), side=3).view(4, 4)
    assert len(odd.unique()) <= 4 and (odd[:3, :3] == odd[0, 0]).all() and odd[3, 3] != odd[0, 0]


def in_chromium(page, *flags, seconds=5):
    """Return the finished process of a headless browser that has printed a page after so many seconds of its clock."""
    usual = ["--headless", "--no-sandbox", "--disable-gpu", f"--virtual-time-budget={1000 * seconds}", "--dump-dom"]
    words = [str(CHROMIUM), *usual, *flags, page.as_uri()]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)


def in_node(work, script="viewer", **given):
    """Return what JavaScript with the functions of a script in a constant of its name says of ``given``."""
    parts = "".join((ROOT / "vitlab" / "look" / f"{name}.js").read_text() for name in ("common", script))
    text = f"const location = {{ hash: '' }};{parts}const {script} = module.exports, given = {json.dumps(given)};{work}"
    done = subprocess.run([str(NODE), "-"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    return json.loads(done.stdout)


ASK = """
const { pages, asked } = given;
viewer.load(pages);
console.log(JSON.stringify(asked.map(([net, state, layer]) => {
  Object.assign(viewer.state, { at: null, head: -1, map: "attention" }, state);
  return { values: Array.from(viewer.shown(net, layer)[0]), text: viewer.number(viewer.shown(net, layer)[0][0]),
    range: viewer.range(pages.map((_, n) => viewer.shown(n, layer)[0])),
    zero: [viewer.share(0, [0, 0], true), viewer.share(0, [-1, 1], true), viewer.share(0, [0, 0], false)] };
})));
"""


POINT = """
viewer.load([given.page]);
console.log(JSON.stringify(given.points.map((at) => {
  const shown = (map) => { Object.assign(viewer.state, { at, map, layer: 1, head: 1 }); return viewer.rows(); };
  return ["attention", "T2T token layer 1"].map((map) =>
    shown(map).map((row) => [row.value, row.from]).concat([viewer.layered(0)]));
})));
"""


@pytest.mark.slow
@pytest.mark.skipif(NODE is None, reason="needs Node.js")
def test_each_patch_that_is_pointed_at_shows_the_attention_of_the_cell_that_it_is_in(monkeypatch):
    """On a grid of 5 x 7 patches, which cells of 4 x 4 and of 2 x 2 do not divide, and on 10 x 14, T2T's first grid."""
    net = vitlab.VisionTransformer(
        **SMALL | {"img_size": (10, 14), "tokenizer": "t2t"}, t2t_kernels=[3, 3, 3], t2t_strides=[1, 2, 1], t2t_dim=4
    )
    monkeypatch.setattr("vitlab.look.viewer.POOLS", ((4, 2),))
    subject, image = Subject(net, Digits(img_size=(10, 14))), torch.rand(1, 1, 10, 14)
    subject.pictures = image
    page = {"shape": shape_of(subject, 1), "pictures": pictures_of(subject, count=1, has_gradients=False)}
    points = [[(y + 0.5) / 5, (x + 0.5) / 7] for y in range(5) for x in range(7)]
    found = in_node(POINT, page=page, points=points)
    maps = attention_maps(net, image, 1)[0, 1, 1:, 1:].double().view(5, 7, 5, 7)
    first = token_layer_maps(net.tokenizer, image)[0][0].double().view(10, 14, 10, 14)

    def mean_of_cells(maps, side):  # each patch has the mean of the patches whose rows and columns // side are its own
        means = maps.clone()
        for y, x in np.ndindex(*maps.shape[:2]):
            rows, columns = slice(y - y % side, y - y % side + side), slice(x - x % side, x - x % side + side)
            means[y, x] = maps[rows, columns].mean(dim=(0, 1))
        return means

    for i, seen in enumerate((maps, first)):
        own = mean_of_cells(mean_of_cells(seen, 4).permute(2, 3, 0, 1), 2).permute(2, 3, 0, 1).flatten(2).numpy()
        for (y, x), said in zip(points, found, strict=True):
            expected, values = own[int(y * seen.shape[0]), int(x * seen.shape[1])], [row[0] for row in said[i][:-1]]
            np.testing.assert_allclose(values, expected, rtol=0, atol=float(seen.max()) / 65535)
    assert (
        found[34][0][0][1] == "row 4 column 4-6" and found[34][1][0][1] == "row 8-9 column 12-13"
    )  # the last are small
    assert found[0][0][-1] == ""
    assert found[0][1][-1].startswith("T2T token layer 1: seen from 4 x 4 patches together, and mapped for 2 x 2, ")


def values_of(*shape):
    """Codes of different numbers, and the numbers."""
    values = torch.arange(math.prod(shape)).reshape(shape) / math.prod(shape)
    return packed(values), values.double().numpy()


SAVE = """
viewer.load([given.page]);
console.log(JSON.stringify(given.asked.map((state) => {
  Object.assign(viewer.state, { at: null, head: 0, layer: 0, epoch: -1, target: -1, map: "attention" }, state);
  return viewer.rows();
})));
"""


@pytest.mark.skipif(NODE is None, reason="needs Node.js")
def test_the_saved_map_says_of_which_epoch_class_and_place_its_numbers_are():
    """Of a network without a class token that kept epochs 1 and 2 of one picture."""
    (cells, seen), (token, then), (places, cosines) = values_of(6, 6), values_of(2, 1, 6), values_of(2, 6, 6)
    (rollout, reached), (_, of_class) = values_of(6), values_of(2, 6)
    maps = {"rollout": rollout, "LRP": packed(torch.from_numpy(of_class[0]))}
    other = {"name": "clock", "maps": {"LRP": packed(torch.from_numpy(of_class[1]))}}
    one = {"cells": cells, "maps": maps, "colors": {}, "said": "watch, 85%", "class": 1, "targets": {"3": other}}
    moments = {"epochs": [1, 2], "count": 1, "said": [["a, 5%"], ["b, 6%"]], "token": token, "positions": places}
    shape = {"depth": 1, "heads": 1, "grid": [2, 3], "query": 1, "key": 1, "ratio": 1.5, "splits": [], "name": "n"}
    page = {"shape": shape, "pictures": [one, one], "moments": moments}
    marked, cosine = {"at": [0.75, 0.5]}, {"map": "cosine of positions"}
    cases = [
        ({}, seen[4], "now", "row 1 column 1", ""),
        (marked, seen[4], "now", "row 1 column 1", ""),
        ({"at": [0.1, 0.9]}, seen[2], "now", "row 0 column 2", ""),
        ({"epoch": 1, **marked}, then[0, 0], 1, "what the head reads", ""),
        ({"epoch": 2}, then[1, 0], 2, "what the head reads", ""),
        ({"epoch": 2, "picture": 1}, seen[4], "now", "row 1 column 1", ""),
        ({"map": "rollout", **marked}, reached, "now", "", ""),
        ({"map": "rollout", "epoch": 1}, reached, "now", "", ""),
        ({"map": "LRP"}, of_class[0], "now", "", "predicted"),
        ({"map": "LRP", "target": 1}, of_class[0], "now", "", "watch"),
        ({"map": "LRP", "target": 3}, of_class[1], "now", "", "clock"),
        ({"map": "LRP", "target": 7}, of_class[0], "now", "", "predicted"),
        ({"map": "rollout", "target": 3}, reached, "now", "", ""),
        (cosine, cosines[1, 4], 2, "row 1 column 1", ""),
        ({**cosine, "epoch": 1, "at": [0.1, 0.9]}, cosines[0, 2], 1, "row 0 column 2", ""),
        ({**cosine, "epoch": 1, "picture": 1}, cosines[0, 4], 1, "row 1 column 1", ""),
    ]
    asked = [{"picture": 0, **state} for state, *_ in cases]
    for (state, values, *words), rows in zip(cases, in_node(SAVE, page=page, asked=asked), strict=True):
        assert [row["value"] for row in rows] == pytest.approx(values, abs=2e-5), state
        assert {(row["epoch"], row["from"], row["class"]) for row in rows} == {tuple(words)}, state
        assert [(row["row"], row["column"]) for row in rows] == [(n // 3, n % 3) for n in range(6)]


def test_a_network_whose_first_token_is_a_register_has_no_map_of_the_class_token():
    both = pictures_of(small_subject(reg_tokens=1), count=1, has_gradients=False)[0]
    register = pictures_of(
        small_subject(class_token=False, reg_tokens=1, global_pool="avg"), count=1, has_gradients=False
    )[0]
    assert "token" in both and "token" not in register and "cells" in register


@pytest.mark.rare
@pytest.mark.slow
@pytest.mark.skipif(NODE is None, reason="needs Node.js")
def test_the_mean_of_heads_that_the_viewer_shows_is_the_mean_of_heads():
    subjects = [small_subject(), small_subject("other", pos_embed="none")]
    with torch.no_grad():  # one head looks at few tokens, the other at all alike
        for block in subjects[0].net.blocks:
            block.attn.qkv.weight[:8] *= 60
            block.attn.qkv.weight[16:24] *= 60
    pages = [{"shape": shape_of(each, 6), "pictures": pictures_of(each, count=6)} for each in subjects]
    places = [None, [0.1, 0.1], [0.6, 0.9]]
    asked = [
        [n, {"picture": i, "at": at, "head": head}, layer]
        for n in range(2)
        for i in range(6)
        for at in places
        for head in (-1, 1)
        for layer in range(2)
    ]
    best = 0
    for (n, state, layer), found in zip(asked, in_node(ASK, pages=pages, asked=asked), strict=True):
        both = [attention_maps(each.net, each.shown(6), layer)[state["picture"]].double() for each in subjects]
        rows = [0 if state["at"] is None else 1 + {0.1: 0, 0.6: 2 * 4 + 3}[state["at"][0]]] * 2
        means = [
            (m.mean(dim=0) if state["head"] < 0 else m[state["head"]])[row, 1:]
            for m, row in zip(both, rows, strict=True)
        ]
        assert found["values"] == pytest.approx(means[n].tolist(), abs=1 / 65535)
        assert float(found["text"]) == pytest.approx(found["values"][0], rel=6e-3)
        assert found["range"] == pytest.approx([0, max(float(m.max()) for m in means)], abs=1 / 65535)  # of both runs
        assert found["zero"] == [0.5, 0.5, 0]  # a difference of nothing is white, not the darkest purple
        best += int(np.argmax(found["values"])) == int(means[n].argmax())
    assert best >= 0.97 * len(asked)  # but for ties within the 16 bits


def test_many_patches_share_cells_so_that_twelve_pictures_of_a_small_vit_fit():
    query, key = pools((14, 14), 12 * 12 * 6, BUDGET)  # of layers and heads
    assert (query, key) == (2, 2)
    size = 2 * 12 * 6 * (14 // query) ** 2 * (14 // key) ** 2 * 12
    assert size * 4 / 3 < 6_000_000
    maps = torch.rand(1, 1, 196, 196)
    expected = maps.view(7, 2, 7, 2, 7, 2, 7, 2).mean(dim=(1, 3, 5, 7)).view(1, 1, 49, 49)
    torch.testing.assert_close(pooled(maps, (14, 14), 2, 2), expected)


@pytest.mark.slow
def test_names_of_classes_and_runs_are_shown_as_text_whatever_they_contain(tmp_path, few_classes):
    run = measured(tmp_path / "one", [True] * 6 + [False] * 4)
    page = render(HOSTILE, {HOSTILE: run}, [small_subject(HOSTILE)], pictures=2)
    assert "<img src=x" not in page and "onerror=alert(1)&gt;" in page
    assert page.count("</script>") == page.count("<script") == 3
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r'(src|href)="https?:', page)


def test_runs_are_compared_image_by_image_and_by_what_differs(tmp_path):
    a = measured(tmp_path / "a", [True] * 14 + [False] * 6)
    b = measured(tmp_path / "b", [True] * 4 + [False] * 10 + [True] * 4 + [False] * 2)
    found = paired(on_page(a), on_page(b))
    assert (found["only_a"], found["only_b"], found["difference"]) == (10, 4, pytest.approx(-0.3))
    assert found["low"] < -0.3 < found["high"] and 0.1 < found["p"] < 0.3
    page = render("both", {"a": a, "b": b})
    assert "McNemar" in page and "<td>model.depth</td><td>14</td><td>8</td>" in page
    assert outcome(a)["accuracy"] == 0.7 and len(outcome(a)["wrong"]) == 6
    assert differences([{"x": "1"}, {"x": "1", "y": "2"}]) == [("y", ["-", "2"])]


@pytest.mark.parametrize(("paths", "hashes", "are_same"), [
    (["cat/1.png", "dog/2.png", "cat/3.png", "dog/4.png"], "aa", True),
    (["cat/1.png", "dog/2.png", "cat/3.png", "dog/5.png"], "aa", False),
    (["/x/cat/1.png", "/x/dog/2.png", "/x/cat/3.png", "/x/dog/4.png"], "ab", True),  # as in another folder below
    (list("0123"), "ab", False),  # rows of arrays
    (["test/0", "test/1", "test/2", "test/3"], "ab", False),  # of data sets of the library `datasets`
    (["test/0", "test/1", "test/2", "test/3"], "aa", True),
    (None, "aa", True),
    (None, "ab", False),
    (None, "", False),
])  # fmt: skip
def test_only_the_same_images_are_compared_image_by_image(paths, hashes, are_same, tmp_path):
    """Splits of another seed, or of another folder, have the same places and the same number of each class."""
    runs = [measured(tmp_path / name, [True, False, name == "a", True]) for name in "ab"]
    first = ["/home/y" + path.removeprefix("/x") for path in paths] if paths and paths[0][0] == "/" else paths
    first = [path.replace("5", "4") for path in first] if first else None
    for run, given, split_hash in zip(runs, (first, paths), hashes or (None, None), strict=True):
        file = run.path / "predictions" / "val.parquet"
        table = pd.read_parquet(file)
        (table.assign(path=given) if given else table).to_parquet(file)
        known = {"hash": split_hash} if split_hash else {}
        run.write("data.json", {**run.read("data.json"), "splits": {"val": {"n": 4, **known}}})
    assert (paired(*map(on_page, runs)) is not None) == are_same
    assert listed([*map(on_page, runs)])["without"] == ([] if are_same else ["b"])


def test_test_splits_without_a_hash_are_the_same_by_the_same_rule_and_validation_images():
    table = pd.DataFrame({"index": [0, 1], "target": [0, 1]})

    def known(seed, subset, val):
        return {"data": "Digits", "splits": {"val": {"hash": val}}, "split_rule": {"seed": seed, "subset": subset}}

    answers = [same_images("test", (table, table), (known(0, 1.0, "a"), known(*other)))
               for other in ((0, 0.5, "a"), (1, 1.0, "a"), (0, 1.0, "b"))]  # fmt: skip
    assert answers == [True, False, False] and same_images("test", (table, table), ({}, {})) is None


def test_predictions_are_listed_beside_pictures_of_their_own_images_or_of_none():
    """A regression, or a run that is not measured yet, may stand first on the page, with other images."""
    table = pd.DataFrame({"index": [0, 1], "target": [0, 1], "prediction": [0, 1], "probability": 0.5})
    other, own = small_subject("a"), small_subject("b")
    own.data = Digits(split_seed=1)
    hashes = {"a": other.images("val").split_hash, "b": own.images("val").split_hash}
    known = {name: {"data": "Digits", "split_rule": one.data.split_rule(), "splits": {"val": {"hash": hashes[name]}}}
             for name, one in (("a", other), ("b", own))}  # fmt: skip
    asked = [(other, "a"), (own, "b"), (other, "b"), (own, "a")]
    for split in ("val", "test"):  # which has no hash
        assert [has_images(one, (split, table), known[name]) for one, name in asked] == [True, True, False, False]
    assert has_images(own, ("val", table.assign(index=-1)), known["b"]) is None  # of several processes
    first, run = Shown("a", RunDir("a"), {}, None, other), Shown("b", RunDir("b"), {}, ("val", table), own)
    sheets = [listed(runs)["sheet"] for runs in ([run], [first, run], [first, replace(run, subject=None)])]
    assert sheets[0] and sheets == [sheets[0], sheets[0], ""]


@pytest.mark.slow
def test_mistakes_have_pictures_while_the_folder_of_a_run_has_the_images_that_were_measured(tmp_path):
    def subject():
        return Subject(small_subject().net, ImageFolder(str(tmp_path / "photos"), in_chans=1, num_workers=0), name="a")

    def add(names):
        for name in names:
            Image.new("L", (8, 8), 9 * len([*tmp_path.rglob("*.png")])).save(tmp_path / "photos" / name)

    for name in "ab":
        (tmp_path / "photos" / name).mkdir(parents=True)
    add([f"{name}/{k}.png" for k in range(9) for name in "ab"])
    first, run = subject(), measured(tmp_path / "run", [True, False], "ab")
    table = pd.read_parquet(run.predictions("val")).assign(path=first.images("val").names[:2])
    table.to_parquet(run.predictions("val"))
    assert has_images(first, ("val", table), {}) and "Worst mistakes" in (page := render("a", {"a": run}, [first], 0))
    assert "data:image/jpeg" in page and "no longer those" not in page
    add([f"a/new{k}.png" for k in range(9)])
    page = render("a", {"a": run}, [subject()], 0)
    assert "Worst mistakes" not in page and "data:image/jpeg" not in page
    assert "The images of val are no longer those that were measured" in page and "vitlab validate" in page
    for file in tmp_path.rglob("[2-9].png"):
        file.unlink()
    assert has_images(subject(), ("val", table), {}) is False


def test_images_that_have_become_unreadable_are_told_in_one_line(tmp_path, monkeypatch):
    """It was a traceback."""
    for path in [tmp_path / name / f"{k}.png" for name in "ab" for k in range(9)]:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"no image")
    run = measured(tmp_path / "run", [True, False], "ab")
    subject = Subject(small_subject().net, ImageFolder(str(tmp_path), img_size=8, in_chans=1, num_workers=0))
    monkeypatch.setattr("vitlab.jobs.find_subject.subject_at", lambda *args: (subject, run.path, {}))
    monkeypatch.setattr("vitlab.look.command._run_of", lambda source: run)
    with pytest.raises(UsageError, match=r"files cannot be read, .* leave them out by --data\.max_unreadable"):
        page_about(["run"], View(shown=0), [])


@pytest.fixture(scope="module")
def twenty(tmp_path_factory):
    """Runs with predictions and curves, run k with 5 + k of 24 right and one not measured, and their page."""
    place, runs = tmp_path_factory.mktemp("twenty"), {}
    for k in range(20):
        name = f"run {k}" if k else HOSTILE
        run = runs[name] = measured(place / f"{k}", [True] * (5 + k) + [False] * (19 - k))
        rows = [{"step": step, "train/loss": 2 / (step + k + 1), "val/loss": 3.0 - k / 10} for step in range(3)]
        run.metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (place / "7" / "predictions" / "val.parquet").unlink()
    return runs, render("20 runs", runs)


@pytest.mark.slow
def test_twenty_runs_begin_with_a_table_of_them_and_each_is_compared_with_one(twenty):
    runs, page = twenty
    at = [page.index(text) for text in ('id="overview"', 'id="plots"', 'id="against"', 'id="each"', 'id="run0"')]
    assert at == sorted(at) and page.count('<details class="card each">') == 20 and "<img src=x" not in page
    head, body = page[at[0] : at[1]].split("<tbody>")
    assert re.findall('button">([^<]*)<', head)[-1] == "depth" and body.count("<tr ") == 20
    assert '<a href="#run4">run 4</a></td><td data-value="0.375">37.50 %</td>' in body
    lines = json.loads(re.search(r'id="metrics">(.*?)</script>', page, re.S)[1])
    assert list(lines) == ["train/loss", "val/loss"] and all(list(each) == list(runs) for each in lines.values())
    pairs = json.loads(re.search(r'id="pairsof">(.*?)</script>', page, re.S)[1])
    assert len(pairs) == 19 * 18 / 2 and "bootstrap" not in page
    few = render("3 runs", dict(list(runs.items())[:3]))
    assert 'id="overview"' not in few and '<h2 id="run2">run 2</h2>' in few


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_in_a_browser_the_table_of_twenty_runs_sorts_and_points_and_opens_cards(twenty, tmp_path):
    work = """<script>
onerror = (text) => { document.body.dataset.failed = text; };
setTimeout(() => {
  const at = (id) => document.getElementById(id), first = (id) => at(id).tBodies[0].rows[0].cells[0].textContent;
  const facts = [innerHeight * 2 > at("plots").getBoundingClientRect().top];
  const heads = at("overview").querySelectorAll("th button");
  heads[1].click(); facts.push(first("overview"));
  heads[1].click(); facts.push(first("overview"));
  facts.push(at("overview").tBodies[0].rows[19].cells[0].textContent); // what was not measured is last both ways
  facts.push(first("paired"), at("paired").tBodies[0].rows[0].cells[1].textContent);
  at("against").value = "run 19"; at("against").onchange();
  facts.push(at("paired").tBodies[0].rows[0].cells[1].textContent, at("paired").tBodies[0].rows.length);
  at("overview").tBodies[0].rows[3].onpointerenter();
  facts.push(document.querySelectorAll("#overview tr.on").length);
  facts.push(plots.every((one) => one.made.series.filter((s) => s._focus).length === 2));
  at("keys").querySelector("button").click();
  facts.push(plots.every((one) => !one.made.series[1].show && one.made.series[2].show));
  facts.push(document.querySelectorAll("#plots .u-legend").length);
  location.hash = "#run5";
  setTimeout(() => {
    facts.push(Array.from(document.querySelectorAll(".each"), (each) => each.open).indexOf(true));
    document.body.dataset.said = JSON.stringify(facts);
  }, 100);
}, 300);
</script></body>"""
    (tmp_path / "page.html").write_text(twenty[1].replace("</body>", work))
    done = in_chromium(tmp_path / "page.html", "--window-size=1200,900")
    assert "data-failed" not in done.stdout
    said = json.loads(html.unescape(re.search('data-said="([^"]*)"', done.stdout)[1]))
    assert said == [True, "run 19", HOSTILE, "run 7", "run 19", "+0.7917", "-0.0417", 18, 1, True, True, 0, 5]


def with_table(run, name, table, note="12 images"):
    (run.path / "analysis").mkdir(exist_ok=True)
    table.to_csv(run.path / f"analysis/{name}.csv", index=False)
    Image.effect_noise((600, 500), 90).save(run.path / f"analysis/{name}.png")
    run.update("analysis/notes.json", **{name: {"note": note}})


@pytest.mark.slow
def test_analyses_of_two_runs_stand_side_by_side_with_the_sign_of_their_difference(tmp_path, monkeypatch):
    a, b = (measured(tmp_path / name, [True] * 6 + [False] * 4) for name in "ab")
    heads = pd.DataFrame({"layer": [0, 0, 1], "head": [0, 1, 0], "distance": [1.0, 2.0, 3.0], "uniform": 2.1})
    low, high = heads["distance"] - 0.25, heads["distance"] + 0.25
    with_table(a, "distance", heads.assign(distance_low=low, distance_high=high))
    with_table(b, "distance", heads.assign(distance=[2.0, 2.25, 2.0], distance_low=[1.75, 2, 1.75], distance_high=2.25))
    with_table(b, "entropy", heads.rename(columns={"distance": "entropy"}))
    monkeypatch.setattr("vitlab.look.stored_analyses.FIGURES", 300_000)
    distance, entropy = findings_of({"a": a, HOSTILE: b})
    rows = [(r["where"], r["difference"], r["apart"], r["higher"]) for r in distance["differences"]["rows"]]
    assert rows == [
        ("layer 0, head 0", 1.0, True, HOSTILE),
        ("layer 1, head 0", -1.0, True, "a"),
        ("layer 0, head 1", 0.25, False, HOSTILE),
    ]
    table = pd.read_csv(io.StringIO(distance["differences"]["csv"]))
    assert list(table[[f"{HOSTILE}", "a"]].diff(axis=1)["a"].round(6)) == [-1.0, -0.25, 1.0]
    assert "analyze entropy" in entropy["runs"][0]["note"] and entropy["differences"] is None
    shown = [base64.b64decode(one["src"].partition(",")[2]) for one in (*distance["runs"], entropy["runs"][1])]
    assert sum(map(len, shown)) <= 300_000 and all(map(len, shown))  # thinned, and none is dropped
    assert "drawn smaller than" in distance["runs"][0]["note"]
    assert all("table" in files for files in distance["files"].values()) and len(distance["files"]) == 2
    monkeypatch.setattr("vitlab.look.stored_analyses.TABLES", len(distance["files"]["a"]["table"]))  # room for one
    monkeypatch.setattr("vitlab.look.stored_analyses.FIGURES", 10**9)
    first, second = ("table" in findings_of({"a": a, HOSTILE: b})[0]["files"].get(name, ()) for name in ("a", HOSTILE))
    assert first and not second
    page = render("two", {"a": a, HOSTILE: b})
    assert "<td><b>-1</b></td><td>a</td>" in page and "<img src=x" not in page


RANGES = [(0.9876, 0.9881), (1e-5, 3e-5), (1000, 1010), (0.0, 1.0), (-2.0, 3e4), (2.2901, 2.3026), (-7e-4, -6.9e-4)]


def stand_at(drawing, edge):
    """Assert that labels of the vertical axis are different, and stand where their numbers would be drawn."""
    found = [(float(y), float(text)) for y, text in re.findall(rf'<text x="{edge}" y="([^"]+)"[^>]*>([^<]+)<', drawing)]
    heights, numbers = np.array(found).T
    assert 2 <= len(found) <= 6 and len(set(numbers)) == len(found)
    return heights - 4, numbers


@pytest.mark.parametrize(("low", "high"), RANGES)
def test_ticks_of_a_chart_are_different_and_true_to_where_they_stand(low, high):
    drawing = line_chart("loss", {"a": [(1_234_567.0, low), (1_234_570.0, high)]})
    heights, numbers = stand_at(drawing, 47)
    assert heights == pytest.approx(190 - (numbers - low) / (high - low) * 155, abs=0.3)
    assert 'y="206">1234567<' in drawing and 'class="r">1234570<' in drawing
    row = dict.fromkeys(("first_low", "first_high", "second_low", "second_high"), math.nan)
    chart = pair_chart("a", [row | {"where": "a", "first": low, "second": high}], ("a", "b"))
    ends = [float(text) for text in re.findall(r'<text x="\d+" y="75"[^>]*>([^<]+)<', chart)]
    assert ends == pytest.approx([low, high], abs=(high - low) / 1000)


@pytest.mark.parametrize("value", [1e-4, 0.0, 2.3, -5e20])
def test_a_flat_line_has_an_axis_on_which_it_can_be_read(value):
    _, numbers = stand_at(line_chart("lr", {"a": [(0.0, value), (1.0, value)]}), 47)
    assert min(numbers) <= value <= max(numbers)


PLOTS = """
console.log(JSON.stringify(given.ranges.map(([min, max, log]) => {
  curves.curve.log = log;
  const made = { scales: { x: { min: 0, max: 1 }, y: { min, max } } };
  return curves.plotDrawing("loss", ["a"], [[0, 1], [min, max]], made);
}).concat([curves.tickLabels([1000, 1002, null, 1004]), curves.tickLabels([1e-5, 1e-3, 0.1])])));
"""


@pytest.mark.skipif(NODE is None, reason="needs Node.js")
def test_ticks_of_a_saved_curve_are_different_and_true_to_where_they_stand():
    logs = [(1e-5, 3e-5), (0.9876, 0.9881), (2e-7, 500.0), (3.0, 40.0)]
    ranges = [(*each, False) for each in RANGES] + [(*each, True) for each in logs]
    *drawings, plain, log = in_node(PLOTS, "curves", ranges=ranges)
    assert (plain, log) == (["1000", "1002", None, "1004"], ["0.00001", "0.001", "0.1"])
    for (low, high, is_log), drawing in zip(ranges, drawings, strict=True):
        heights, numbers = stand_at(drawing, 55)
        scale = np.log if is_log else np.array
        share = (scale(numbers) - scale(low)) / (scale(high) - scale(low))
        assert heights == pytest.approx(200 - share * 170, abs=0.3)


HIDDEN = """
const names = ["a", "b", "c"], data = [[0, 1, 2], [0.1, 0.2, 0.3], [0.4, null, 0.6], [0.7, 0.8, 0.9]];
const made = { scales: { x: { min: 0, max: 1 }, y: { min: 0, max: 1 } } };
curves.curve.hidden.add("a");
console.log(JSON.stringify([curves.plotRows(names, data, made), curves.plotDrawing("loss", names, data, made)]));
"""


@pytest.mark.skipif(NODE is None, reason="needs Node.js")
def test_a_saved_curve_has_the_runs_and_the_steps_that_are_shown():
    rows, drawing = in_node(HIDDEN, "curves")
    assert [tuple(row.values()) for row in rows] == [("b", 0, 0.4), ("c", 0, 0.7), ("c", 1, 0.8)]
    assert re.findall(">([abc])</text>", drawing) == ["b", "c"] and drawing.count("<path") == 3  # and the axes
    colors = re.findall(r'stroke="(#[0-9A-F]{6})"', drawing)
    assert colors == re.findall(r'fill="(#[0-9A-F]{6})"', drawing) and len({*colors}) == 2


def test_each_metric_has_a_chart_and_what_is_no_metric_has_none(tmp_path):
    rows = [
        {"step": 5, "epoch": 0, "train/loss": 2.0, "lr": 0.1, "grad_norm": 1.5, "images_per_second": 99.0},
        {"step": 9, "epoch": 0, "val/loss": 1.0, "val/mae": 3.0, "val/lrap": 0.5, "val_acc": 0.25, "note": "x"},
    ]
    runs = {name: RunDir(tmp_path / name) for name in "abcd"}
    for run in runs.values():
        run.path.mkdir()
        run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert {chart: [*lines] for chart, lines in logged_curves({"a": runs["a"]}).items()} == {
        "loss": ["train/loss", "val/loss"], "lr": ["lr"], "grad_norm": ["grad_norm"],
        "acc": ["val_acc"], "lrap": ["val/lrap"], "mae": ["val/mae"],
    }  # fmt: skip
    many = logged_curves(runs)
    assert [*many] == ["train/loss", "val/loss", "lr", "grad_norm", "val/lrap", "val/mae", "val_acc"]
    assert all([*lines] == [*"abcd"] for lines in many.values())


ROWS = """
const cells = given.row.map(([textContent, value]) => ({ textContent, dataset: value ? { value } : {} }));
const heads = given.heads.map((textContent) => ({ textContent, title: "" })), rows = [{ cells }];
console.log(JSON.stringify(overview.rowsOf({ querySelectorAll: () => heads, tBodies: [{ rows }] })));
"""


@pytest.mark.skipif(NODE is None, reason="needs Node.js")
def test_the_saved_table_of_runs_has_the_interval_and_not_what_its_column_sorts_by():
    row = [
        ["a"],
        ["37.50 %", "0.375"],
        ["20.00 to 58.00 %", "0.375"],
        ["accuracy, 24 of val"],
        ["done"],
        ["1,000", "1000"],
    ]
    heads = ["run", "result", "95 % over images", "of", "status", "parameters"]
    (found,) = in_node(ROWS, "overview", heads=heads, row=row)
    assert list(found.values()) == ["a", "0.375", "20.00 to 58.00 %", "accuracy, 24 of val", "done", "1000"]


def test_what_is_not_finite_is_left_out_of_a_chart_and_no_probability_of_the_list():
    drawing = line_chart("loss", {"a": [(0.0, 1.0), (1.0, math.nan), (2.0, 3.0)], "b": [(0.0, math.inf)]})
    assert drawing.count("<circle") == 2 and "nan" not in drawing and "inf" not in drawing
    table = pd.DataFrame({"index": [0, 1], "target": 0, "prediction": 0, "probability": [math.nan, 0.25]})
    found = listed([Shown("a", RunDir("a"), {}, ("val", table))])
    assert found["runs"]["a"]["probability"] == [None, 0.25]


def test_the_scripts_of_a_page_which_share_their_names_have_each_function_once():
    text = "".join((ROOT / "vitlab" / "look" / name).read_text() for name in SCRIPTS)
    names = re.findall(r"^(?:async )?function (\w+)", text, re.M)
    assert len(names) > 60 and sorted(set(names)) == sorted(names)


def test_charts_show_every_point_and_a_flat_line_does_not_fail():
    drawing = line_chart(HOSTILE, {"a": [(0.0, 1.0), (1.0, 1.0)], HOSTILE: [(0.0, 1.0)]})
    assert drawing.count("<circle") == 3 and "<img" not in drawing
    assert line_chart("none", {}) == "" and sparkline([]) == ""
    assert "cat predicted as dog: 3 of 4" in matrix_chart([[1, 3], [0, 2]], ["cat", "dog"])


@pytest.mark.parametrize(("n", "labels"), [(2, 2), (42, 42), (46, 23), (60, 30)])
def test_rows_of_a_confusion_matrix_have_labels_where_there_is_room(n, labels):
    drawing = matrix_chart(np.eye(n, dtype=int).tolist(), [f"class {k}" for k in range(n)])
    heights = [int(y) for y in re.findall(r'<text x="96" y="(\d+)"', drawing)]
    assert len(heights) == labels and min(np.diff(heights)) >= 10 and ">class 0<" in drawing


class _Trainer:
    """What a page that grows asks of a trainer."""

    is_global_zero, sanity_checking, state = True, False, SimpleNamespace(fn="fit")

    def __init__(self, folder):
        self.default_root_dir = str(folder)


@pytest.mark.slow
def test_a_page_grows_within_its_share_of_the_time_and_never_over_a_page_of_somebody(tmp_path, monkeypatch):
    clock, cost, wrote, busy = [0.0], [2.0], [], [1]
    monkeypatch.setattr("vitlab.look.live.now", lambda: np.array([clock[0], clock[0] / busy[0]]))
    monkeypatch.setattr("vitlab.look.live.is_small", lambda *_: True)

    def write(page, trainer, task, is_last):
        clock[0] += cost[0]
        wrote.append((clock[0], is_last))
        write_text(tmp_path / "look.html", MARK)

    monkeypatch.setattr("vitlab.look.live.LivePage.write", write)
    page, trainer = GrowingPage(share=0.01), _Trainer(tmp_path)

    def validate(seconds):
        clock[0] += seconds
        page.on_validation_start(trainer, None)
        page.on_validation_end(trainer, None)

    for _ in range(3000):
        validate(1.0)
    page.on_fit_end(trainer, None)
    times = [at for at, _ in wrote]
    assert 499 < times[0] < 510 and 90 < times[1] - times[0] < 110  # what it cost is known then
    assert all(2.0 * (i + 1) <= 0.01 * at for i, at in enumerate(times[:-1])) and len(times) > 10
    assert [is_last for _, is_last in wrote] == [False] * (len(wrote) - 1) + [True]
    clock[0], busy[0] = 0.0, 5  # others have four fifths of the processor, so a page takes long
    page, cost[0], wrote[:] = GrowingPage(share=0.01), 10.0, []
    for _ in range(10000):
        validate(1.0)
    times = [at for at, _ in wrote]
    assert times[0] > 2500 and all(10.0 * (i + 1) <= 0.01 * at for i, at in enumerate(times))
    (tmp_path / "look.html").write_text("<html>a page of vitlab look</html>")
    validate(1e6)
    assert len(wrote) == len(times)
    (tmp_path / "look.html").unlink()
    monkeypatch.setattr("vitlab.look.live.LivePage.write", lambda *_: 1 / 0)
    validate(1e6)  # an error ends the page, and not the training
    assert page.share == 0
    with pytest.raises(ValueError, match=r"`share` of GrowingPage must lie in 0..1, got 2"):
        GrowingPage(share=2)


@pytest.mark.parametrize("callback", [LivePage, GrowingPage])
def test_the_page_of_a_run_that_fails_does_not_reload(callback, tmp_path):
    page, place = callback(), tmp_path / "look.html"
    page.written = 1  # by a page that grows
    write_text(place, f'{MARK}<meta http-equiv="refresh" content="9">v1; the run goes on and this page reloads itself.')
    page.on_exception(_Trainer(tmp_path), None, RuntimeError())
    assert place.read_text() == f"{MARK}v1."


@pytest.mark.slow
def test_an_image_of_one_color_and_a_run_that_was_never_validated_have_a_page(tmp_path, few_classes):
    run = RunDir(tmp_path)
    run.metrics.write_text('{"step": 1, "train/loss": 2.0}\n')
    subject = small_subject()
    subject.pictures = torch.zeros(1, 1, 8, 8)
    page = render("one", {"one": run}, [subject], 1)
    (shown,) = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1], parse_constant=pytest.fail)  # no NaN
    assert unpacked(shown["pictures"][0]["maps"]["integrated gradients"], 16).tolist() == [0] * 16
    assert "not measured yet" in page and '"train/loss"' in page and "listed-images" not in page


@pytest.mark.parametrize("order", [1, -1], ids=["page first", "average first"])
def test_under_ema_a_growing_page_shows_the_weights_that_are_validated(order, tmp_path, monkeypatch):
    shown, seen = [], []

    class Spy(Callback):
        def on_validation_batch_end(self, trainer, pl_module, *_):
            if not trainer.sanity_checking:
                seen[trainer.current_epoch :] = [pl_module.net.head.weight.detach().clone()]

        def on_train_epoch_start(self, trainer, pl_module):
            assert not seen or not torch.equal(pl_module.net.head.weight, seen[-1])  # it goes on with its own

    def draw(name, runs, subjects, *_):
        shown.append(subjects[0].net.head.weight.detach().clone())
        return "a page"

    monkeypatch.setattr("vitlab.look.page.render", draw)
    (tmp_path / "config.yaml").write_text("")
    page = LivePage(pictures=1)
    page.share_of_pictures = float("inf")
    words = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    words |= {"enable_model_summary": False, "limit_train_batches": 2, "limit_val_batches": 1, "max_epochs": 2}
    callbacks = [page, EMA(decay=0.5), Spy()][::order]
    trainer = L.Trainer(**words, callbacks=callbacks, default_root_dir=tmp_path)
    torch.manual_seed(0)
    trainer.fit(Classifier(**SMALL), datamodule=Digits(batch_size=16))
    assert len(seen) == 2 and len(shown) == 3  # of each validation, and at the end
    for mine, true in zip(shown, [*seen, seen[-1]], strict=True):
        assert torch.equal(mine, true)


@pytest.mark.parametrize(("words", "flag"), [(["-o", "a.html"], "-o FILE"), (["--diagram", "a.svg"], "--diagram FILE")])
def test_a_page_that_cannot_be_written_is_refused_before_it_is_drawn(words, flag, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.access", lambda *_: False)  # a read-only file system
    monkeypatch.setattr("vitlab.look.command.page_about", None)
    monkeypatch.setattr("vitlab.look.command._drawing", None)
    assert main(["look", "t2t_vit_7", *words]) == 2
    assert capsys.readouterr().err == f"vitlab: cannot write into .; choose another file with {flag}\n"


@pytest.mark.parametrize(("flag", "file", "ending"), [("--diagram", "a.png", ".svg"), ("-o", "a.pdf", ".html")])
def test_a_file_of_another_kind_than_is_written_is_refused(flag, file, ending, capsys):
    assert main(["look", "t2t_vit_7", flag, file]) == 2
    assert capsys.readouterr().err == f"vitlab: `{flag}` must end with {ending}, which it writes, got {file}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["vit_s_16", "--diagram", "a.svg"], "`--diagram` draws one network, got 2: t2t_vit_7 vit_s_16"),
        (["--level", "block"], "`--level block` is of a drawing: add --diagram FILE; a page has all levels"),
        (
            ["--diagram", "a.svg", "-o", "b.html"],
            "`--diagram` writes the drawing alone, to a.svg: leave out -o b.html",
        ),
    ],
)
def test_what_a_drawing_would_leave_out_is_refused(words, said, capsys):
    assert main(["look", "t2t_vit_7", *words]) == 2
    assert capsys.readouterr().err == f"vitlab: {said}\n"


@pytest.mark.slow
def test_a_run_writes_its_page_while_it_trains_and_look_adds_pictures(tmp_path, monkeypatch, capsys, few_classes):
    monkeypatch.chdir(tmp_path)
    words = ["--trainer.max_epochs=2", "--data.subset=0.3", "--trainer.logger=false", "--model.drop_path_rate=0.1"]
    callback = "--trainer.callbacks=[{class_path: vitlab.look.live.LivePage}]"
    halfway = {}
    monkeypatch.setattr("vitlab.look.live.OF_PICTURES", 1e9)  # an epoch takes less than a page here
    monkeypatch.setattr(
        "vitlab.look.live.write_text", lambda path, text: (halfway.setdefault("page", text), write_text(path, text))
    )
    config = str(ROOT / "configs" / "vit.yaml")
    assert main(["fit", "--config", config, "--run_dir", "runs/live", *words, callback]) == 0
    assert re.search("val/loss +[▁▂▃▄▅▆▇█]{2} ", capsys.readouterr().out)
    page = Path("runs/live/look.html").read_text()
    assert "http-equiv" not in page and "train/loss" in page
    assert "http-equiv" in halfway["page"]
    for each in (page, halfway["page"]):  # pictures, and what the validation of this very epoch said
        (shown,) = json.loads(re.search(r'id="data">(.*?)</script>', each, re.S)[1])
        assert len(shown["pictures"]) == 4 and set(shown["pictures"][0]["maps"]) == {"rollout"}
        assert "images of val, 95 % interval" in each and each.count('alt="image ') == 12 and len(each) < 1_000_000
    rows = [json.loads(line) for line in Path("runs/live/metrics.jsonl").read_text().splitlines()]
    accuracy = [row["val/acc1"] for row in rows if "val/acc1" in row][-1]
    assert f'<div class="big">{100 * accuracy:.2f} %</div>' in page
    monkeypatch.setattr("vitlab.look.live.FIRST", 0.0)  # a page without being asked for, in a run that short
    halfway.clear()
    assert main(["fit", "--config", config, "--run_dir", "runs/grown", *words, "--quiet"]) == 0
    grown = Path("runs/grown/look.html").read_text()
    assert "http-equiv" in halfway["page"] and "http-equiv" not in grown and 'id="data"' in grown
    rows = [json.loads(line) for line in Path("runs/grown/metrics.jsonl").read_text().splitlines()]
    last = [row["val/acc1"] for row in rows if "val/acc1" in row][-1]  # not written by itself: the first page took long
    assert f'<div class="big">{100 * last:.2f} %</div>' in grown
    off = "--trainer.callbacks=[{class_path: vitlab.look.moments.Moments, init_args: {share: 0}}]"
    assert main(["fit", "--config", config, "--run_dir", "runs/off", *words, "--quiet", off]) == 0
    assert not Path("runs/off/look.html").exists() and not Path("runs/off/moments").exists()
    path = "runs/{}/checkpoints/last.ckpt"
    of = [torch.load(path.format(name), weights_only=True)["state_dict"] for name in ("live", "grown", "off")]
    assert all(torch.equal(one[key], of[2][key]) for one in of[:2] for key in one)  # training does not notice a page
    assert main(["look", "live", "--pictures", "3"]) == 0  # a page that training wrote is replaced
    assert ' class="vl"' in Path("runs/live/look.html").read_text()
    assert main(["look", "live"]) == 2
    assert "runs/live/look.html exists; replace it with --overwrite" in capsys.readouterr().err
    assert main(["look", "t2t_vit_7", "--img_size", "64", "--diagram", "new/drawing.svg"]) == 0
    assert "3 x 64 x 64" in Path("new/drawing.svg").read_text()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_in_a_browser_the_page_has_no_errors_and_pointing_changes_the_map(tmp_path):
    subjects = [small_subject(), small_subject(HOSTILE, pos_embed="none")]
    page = render("two", {"a": measured(tmp_path / "a", [True, False] * 5)}, subjects, 3)
    (tmp_path / "inner.txt").write_text(page)
    wrapper = """<body><script>
const said = [];
for (const width of [390, 1200]) {
  const frame = document.createElement("iframe");
  frame.style = "width:" + width + "px;height:900px;border:0";
  frame.srcdoc = PAGE;
  document.body.append(frame);
  frame.onload = () => {
    const page = frame.contentWindow, doc = frame.contentDocument, stage = doc.querySelector("canvas.stage[tabindex]");
    const shot = () => Array.from(doc.querySelectorAll(".stage, .heads canvas")).map((c) => c.toDataURL()).join();
    const first = shot(), box = stage.getBoundingClientRect();
    const at = {clientX: box.left + box.width * 0.6, clientY: box.top + box.height * 0.3};
    stage.dispatchEvent(new page.PointerEvent("pointermove", at));
    const numbers = Array.from(doc.querySelectorAll(".number")).map((each) => each.textContent).join("|");
    stage.dispatchEvent(new page.PointerEvent("pointerdown", at));
    const pointed = shot();
    stage.dispatchEvent(new page.KeyboardEvent("keydown", {key: "ArrowRight"}));
    const moved = shot();
    stage.dispatchEvent(new page.KeyboardEvent("keydown", {key: "Escape"}));
    const select = doc.getElementById("map"), back = shot();
    select.value = "gradient x attention"; select.onchange();
    const graded = stage.toDataURL(), other = shot() !== back;
    doc.querySelector(".heads canvas").click();
    const said_head = doc.getElementById("head").value + select.value;
    const box_of_block = doc.querySelector('.vl a[href="#net0-block"]');
    const left = box_of_block.dispatchEvent(new page.MouseEvent("click", {bubbles: true, cancelable: true}));
    const opened = Array.from(doc.querySelectorAll("details:has(.vl)"), (each) => each.open);
    document.body.dataset.opened = [left, ...opened].join();
    const tile = said_head === "0attention" && stage.toDataURL() !== graded;
    said.push([width, first !== pointed, pointed !== moved, back === first, other, tile,
      doc.documentElement.scrollWidth <= width, doc.querySelectorAll("img[src=x]").length].join(" "));
    document.body.dataset.said = said.sort().join(";");
    document.body.dataset.numbers = numbers;
  };
}
</script></body>"""
    text = json.dumps(page).replace("</", "<\\/").replace("<!--", "<\\!--")
    (tmp_path / "wrapper.html").write_text(wrapper.replace("PAGE", text))
    done = in_chromium(tmp_path / "wrapper.html", "--enable-logging=stderr", seconds=8)
    assert 'data-said="1200 true true true true true true 0;390 true true true true true true 0"' in done.stdout, (
        done.stdout[-300:]
    )
    assert "Uncaught" not in done.stderr
    assert 'data-opened="false,true,false,false,false"' in done.stdout  # the block of the first of two; no hash is left
    numbers = re.search('data-numbers="([^"]*)"', done.stdout)[1].split("|")  # one for each network
    difference, weights = numbers.pop(), [float(text.split(": ")[1]) for text in numbers]
    assert float(difference.split(": ")[1]) == pytest.approx(weights[1] - weights[0], abs=1e-4)
    for subject, text in zip(subjects, numbers, strict=True):
        table = analyze_attention(subject).table.query(
            "image == 0 and map == 'mean of heads' and row == 1 and column == 2"
        )
        assert text.startswith("row 1, column 2: ")
        assert float(text.split(": ")[1]) == pytest.approx(table["weight"].item(), abs=1e-3)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_in_a_browser_oblong_images_and_their_maps_keep_their_shape(tmp_path):
    net = vitlab.VisionTransformer(**SMALL | {"img_size": (8, 24)})
    page = render("oblong", {}, [Subject(net, Digits(img_size=(8, 24)), name="oblong")], 2)
    work = """<script>
setTimeout(() => {
  const shape = (each) => (each.getBoundingClientRect().width / each.getBoundingClientRect().height).toFixed(2);
  document.body.dataset.shapes = [...document.querySelectorAll("#stages canvas")].map(shape).join();
}, 500);
</script>"""
    (tmp_path / "page.html").write_text(page + work)
    done = in_chromium(tmp_path / "page.html", seconds=4)
    shapes = re.search('data-shapes="([^"]+)"', done.stdout)[1].split(",")
    assert len(shapes) > 2 and {float(shape) for shape in shapes} == {3.0}


@pytest.mark.rare
def test_a_page_of_a_small_vit_with_twelve_pictures_is_under_8_mb(monkeypatch):
    monkeypatch.setattr("vitlab.look.viewer.PASSES", 12)  # of occlusion: as many bytes
    noise = torch.randn(12, 3, 224, 224, generator=torch.Generator().manual_seed(0))  # compresses worst
    net = create_model("vit_s16")
    page = render("ViT-S", {}, [Subject(net, lambda image: to_tensor(image.resize((224, 224))) / 255, pictures=noise)])
    (shown,) = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])
    assert len(shown["pictures"]) == 12 and (shown["shape"]["depth"], shown["shape"]["heads"]) == (12, 6)
    assert 2e6 < len(page.encode()) < 8e6


def test_the_page_counts_the_differences_of_the_measure_that_it_shows():
    first = pd.DataFrame(
        {"layer": [0, 1, 2], "a": 0.0, "a_low": -1.0, "a_high": 1.0, "b": 0.0, "b_low": -1.0, "b_high": 1.0}
    )
    second = first.assign(
        a=[0.1, 0.2, 5.0], a_low=[0.0, 0.1, 4.0], a_high=[0.2, 0.3, 6.0], b=9.0, b_low=8.0, b_high=10.0
    )
    one, other = ({"run": name, "table": table.to_csv(index=False)} for name, table in (("x", first), ("y", second)))
    found = _differences(ANALYSES["distance"], one, other)
    assert (len(found["rows"]), found["count"], found["apart"], found["others"]) == (3, 3, 1, ["b"])
    assert [row["where"] for row in found["rows"]] == ["layer 2", "layer 1", "layer 0"]
    assert found["csv"].count("\n") == 5 and not found["csv"].startswith(",")  # b is the same everywhere


def test_classes_are_compared_by_the_names_that_they_have():
    for names in (["cat", "None", "NA"], ["01", "1", "2"], ["1.5", "2.5", "3.50"], ["null", "nan", "-0"]):
        texts = [
            "class,images,recall,recall_low,recall_high\n"
            + "".join(
                f'"{name}",9,{recall},{recall - 0.1},{recall + 0.1}\n'
                for name, recall in zip(names, recalls, strict=True)
            )
            for recalls in ((0.25, 0.5, 0.75), (0.5, 0.5, 0.25))
        ]
        found = _differences(
            ANALYSES["confusion"], *({"run": run, "table": text} for run, text in zip("ab", texts, strict=True))
        )
        shown = {row["where"].removeprefix("class "): row["difference"] for row in found["rows"]}
        assert shown == dict(zip(names, (0.25, 0.0, -0.5), strict=True)), names


def test_a_number_of_the_whole_table_is_one_difference_and_what_is_not_known_is_none():
    cells = pd.DataFrame({"row": [0, 0, 1, 1], "column": [0, 1, 0, 1], "cosine": [0.1, 0.2, 0.3, 0.4]})
    first = cells.assign(ratio=0.2, ratio_low=0.1, ratio_high=0.3)
    first = first.assign(height=cells["row"] + 0.0, height_low=cells["row"] - 0.1, height_high=cells["row"] + 0.1)
    second = first.assign(ratio=0.5, ratio_low=0.4, ratio_high=0.6, height=[float("nan")] * 2 + [3.0] * 2)
    found = contrast_tables(first, second)[["where", "measure", "difference", "apart"]].values.tolist()
    assert found == [["everywhere", "ratio", pytest.approx(0.3), True], ["row 1", "height", 2.0, False]]
