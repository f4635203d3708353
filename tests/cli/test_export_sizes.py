"""Graphs of any height and width: `vitlab export --dynamic size`."""

from functools import partial
from typing import get_args

import pytest
import torch

from vitlab.errors import UsageError
from vitlab.jobs.export import export
from vitlab.jobs.formats import FORMATS, largest_difference, open_sides, sizes_to_check
from vitlab.layers.pos_embed import PosEmbedName
from vitlab.models.vit import VisionTransformer

TINY = {"img_size": [16, 24], "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 3}
TINY |= {"in_chans": 1, "init_std": 0.2, "t2t_kernels": [3, 3], "t2t_dim": 8}
NAMES = [*get_args(PosEmbedName), ["learned", "rope2d"]]
MISSING = {"liere": "linalg_matrix_exp", "string": "_linalg_solve_ex"}
QUICK = [("patch", "learned"), ("t2t", "rope2d")]
PAIRS = [(tokenizer, name) for tokenizer in ("patch", "t2t") for name in NAMES]


def net_of(tokenizer, pos_embed, **more):
    torch.manual_seed(0)
    net = VisionTransformer(**TINY | more, tokenizer=tokenizer, pos_embed=pos_embed).eval()
    for name, p in net.named_parameters():
        if p.ndim < 2 or name.startswith("pos_embed."):
            torch.nn.init.normal_(p, std=0.3)
    return net


def check(form, net, folder):
    write, read = FORMATS[form]
    sides = open_sides(net)
    write(net, {}, folder / "net", sides=sides)
    sizes = sizes_to_check(net, sides)
    assert tuple(net.img_size) in sizes and len({h * w for h, w in sizes}) > 2
    assert largest_difference(net, read(folder / "net", {}), sides) < 1e-5


@pytest.mark.parametrize(
    ("tokenizer", "name"),
    [pytest.param(*pair, marks=pytest.mark.slow if pair in QUICK else pytest.mark.rare) for pair in PAIRS],
)
def test_a_graph_of_torch_export_takes_any_size(tokenizer, name, tmp_path):
    check("pt2", net_of(tokenizer, name), tmp_path)


@pytest.mark.parametrize(
    ("tokenizer", "name"),
    [pytest.param(*pair, marks=pytest.mark.slow if pair in QUICK else pytest.mark.rare) for pair in PAIRS],
)
def test_a_graph_of_onnx_takes_any_size(tokenizer, name, tmp_path):
    pytest.importorskip("onnxruntime")
    if isinstance(name, str) and name in MISSING:
        with pytest.raises(UsageError, match=f"ONNX has no {MISSING[name]}: use --to pt2"):
            check("onnx", net_of(tokenizer, name), tmp_path)
    else:
        check("onnx", net_of(tokenizer, name), tmp_path)


def test_the_sizes_that_a_tokenizer_takes_are_named():
    sides = open_sides(net_of("patch", "learned", patch_size=[4, 8]))
    assert [(side.multiple_of, side.least) for side in sides] == [(4, 4), (8, 8)]
    sides = open_sides(net_of("t2t", "learned", t2t_kernels=[7, 3, 3], t2t_padding="none", img_size=64))
    assert [(side.multiple_of, side.least) for side in sides] == [(16, 32)] * 2  # 16 leaves no window of 3


def test_a_tokenizer_of_one_size_is_refused():
    net = net_of("patch", "learned")
    net.tokenizer = torch.nn.Flatten()
    with pytest.raises(UsageError, match=r"`--dynamic size` needs a tokenizer with `grid_of\(size\)`: .*Flatten takes"):
        open_sides(net)


@pytest.mark.parametrize("form", ["safetensors", "timm"])
def test_only_graphs_leave_sizes_open(form, tmp_path):
    refused = partial(export, None, None, form, tmp_path / "net", False)
    with pytest.raises(UsageError, match=f"`--dynamic size` is for graphs: use --to onnx or pt2, got {form}"):
        refused("size")
    with pytest.raises(UsageError, match="`dynamic` must be one of batch, size, got 'sizes'"):
        refused("sizes")
