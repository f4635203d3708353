"""Graphs of any height and width: `vitlab export --dynamic size`."""

from pathlib import Path
from typing import get_args

import pytest
import torch

from vitlab.errors import UsageError
from vitlab.jobs.exported import ExportOptions
from vitlab.jobs.formats import FORMATS, both_outputs, largest_difference
from vitlab.jobs.graph_sizes import Side, check_images, open_sides, sizes_to_check
from vitlab.layers.pos_embed import PosEmbed, PosEmbedName
from vitlab.models.vit import VisionTransformer

TINY = {"img_size": [16, 24], "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 3}
TINY |= {"in_chans": 1, "init_std": 0.2, "t2t_kernels": [3, 3], "t2t_dim": 8}
NAMES = [*get_args(PosEmbedName), ["learned", "rope2d"]]
MISSING = {"liere": "linalg_matrix_exp", "string": "_linalg_solve_ex"}
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
    sides = open_sides(net, form)
    write(net, {}, folder / "net", sides=sides)
    sizes = sizes_to_check(net, sides)
    assert tuple(net.img_size) in sizes and len({h * w for h, w in sizes}) > 2
    assert largest_difference(both_outputs(net, read(folder / "net", {}), sides)) < 1e-5


@pytest.mark.parametrize(
    ("tokenizer", "name"),
    [pytest.param(*pair, marks=[] if pair == ("patch", "rope2d") else pytest.mark.rare) for pair in PAIRS],
)
def test_a_graph_of_torch_export_takes_any_size(tokenizer, name, tmp_path):
    check("pt2", net_of(tokenizer, name), tmp_path)


@pytest.mark.parametrize(
    ("tokenizer", "name"),
    [pytest.param(*pair, marks=[] if pair == ("t2t", "rope2d") else pytest.mark.rare) for pair in PAIRS],
)
def test_a_graph_of_onnx_takes_any_size(tokenizer, name, tmp_path):
    pytest.importorskip("onnxruntime")
    if isinstance(name, str) and name in MISSING:
        with pytest.raises(UsageError, match=f"ONNX has no {MISSING[name]}: use --to pt2"):
            check("onnx", net_of(tokenizer, name), tmp_path)
    else:
        check("onnx", net_of(tokenizer, name), tmp_path)


def test_the_page_says_which_pairs_are_written():
    page = (Path(__file__).parents[2] / "docs" / "runs.md").read_text()
    table = page.partition("| onnx, patches | onnx, T2T | pt2, patches | pt2, T2T |")[2].splitlines()[
        2 : 2 + len(NAMES)
    ]
    for name, row in zip(NAMES, table, strict=True):
        word = name if isinstance(name, str) else f"[{', '.join(name)}]"
        onnx = f"refused: ONNX has no `{MISSING[word]}`" if word in MISSING else "equal"
        assert row == f"| `{word}` | {onnx} | {onnx} | equal | equal |"


def test_the_sizes_that_a_tokenizer_takes_are_named():
    sides = open_sides(net_of("patch", "learned", patch_size=[4, 8]))
    assert [(side.multiple_of, side.least) for side in sides] == [(4, 4), (8, 8)]
    sides = open_sides(net_of("t2t", "learned", t2t_kernels=[7, 3, 3], img_size=32))
    assert [(side.multiple_of, side.least) for side in sides] == [(16, 32)] * 2  # one row would be a constant
    sides = open_sides(net_of("t2t", "learned", t2t_kernels=[7, 3, 3], t2t_padding="none", img_size=64))
    assert [(side.multiple_of, side.least) for side in sides] == [(16, 48)] * 2  # 32 leaves one window of 3


def test_a_size_between_the_steps_of_a_graph_is_refused():
    net = net_of("t2t", "learned", t2t_kernels=[7, 3, 3], img_size=(37, 48))
    with pytest.raises(UsageError, match="leaves multiples of 16 x 16 pixels open, not 37 x 48: leave the option out"):
        open_sides(net)


def test_a_graph_of_torch_export_has_two_rows_and_columns_at_least():
    sides = open_sides(net_of("patch", "learned", patch_size=[4, 8]), "pt2")
    assert [(side.multiple_of, side.least) for side in sides] == [(4, 8), (8, 16)]
    told = "`--dynamic size` leaves 2 or more rows and columns open, not 1 x 6: leave the option out"
    with pytest.raises(UsageError, match=told):
        open_sides(net_of("patch", "learned", img_size=[4, 24]), "pt2")
    assert open_sides(net_of("patch", "learned", img_size=[4, 24]))[0].least == 4


@pytest.mark.rare
@pytest.mark.parametrize(("tokenizer", "side"), [("patch", 8), ("t2t", 32)])
def test_two_rows_are_written_at_any_size(tokenizer, side, tmp_path):
    check("pt2", net_of(tokenizer, "learned", t2t_kernels=[7, 3, 3], img_size=side), tmp_path)


def test_a_tokenizer_of_one_size_is_refused():
    net = net_of("patch", "learned")
    net.tokenizer = torch.nn.Flatten()
    with pytest.raises(UsageError, match=r"`--dynamic size` needs a tokenizer with `grid_of\(size\)`: .*Flatten takes"):
        open_sides(net)


class OfOneGrid(PosEmbed):
    """A table of the grid's size that nothing resizes."""

    def __init__(self, grid_size, embed_dim):
        super().__init__(grid_size)
        self.weight = torch.nn.Parameter(torch.zeros(grid_size[0] * grid_size[1], embed_dim))

    def forward(self, x):
        return x + self.weight


def test_a_part_of_ones_own_that_takes_one_size_is_named_with_its_line():
    told = r"does not take images of 4 x 28 pixels; leave the option out \(.*test_export_sizes.py, line \d+, `return x"
    with pytest.raises(UsageError, match=told):
        open_sides(net_of("patch", f"{__name__}.OfOneGrid"))


@pytest.mark.parametrize("form", ["safetensors", "timm"])
def test_dynamic_sizes_are_only_for_graphs(form, tmp_path):
    with pytest.raises(UsageError, match=f"`--dynamic size` is for graphs: use --to onnx or pt2, got {form}"):
        ExportOptions(form, tmp_path / "net", dynamic="size")
    with pytest.raises(UsageError, match="`dynamic` must be one of batch, size, got 'sizes'"):
        ExportOptions(form, tmp_path / "net", dynamic="sizes")


@pytest.mark.parametrize(
    ("shape", "sides", "told"),
    [
        ((2, 3, 40, 32), None, "net.onnx takes images of 3 x 32 x 32, got 3 x 40 x 32; export it with --dynamic size"),
        ((2, 1, 32, 32), None, "net.onnx takes images of 3 x 32 x 32, got 1 x 32 x 32"),
        ((3, 32, 32), None, r"net.onnx takes a batch of images, \(B, C, H, W\), got 3 dimensions"),
        ((2, 3, 40, 34), 8, "heights of 16 to 64 in steps of 8 and widths of 16 to 64 in steps of 8, got 3 x 40 x 34"),
        ((2, 3, 8, 32), 8, "net.onnx takes images of 3 channels, heights of 16 to 64 in steps of 8 .*, got 3 x 8 x 32"),
        ((2, 3, 32, 72), 8, "got 3 x 32 x 72"),
        ((2, 1, 32, 32), 8, "takes images of 3 channels, .*, got 1 x 32 x 32"),
    ],
)
def test_images_that_a_graph_was_not_made_for_are_refused_in_one_line(shape, sides, told):
    sides = sides and [Side(sides, 16, 64)] * 2
    with pytest.raises(UsageError, match=f"{told}$") as refused:
        check_images(shape, 3, (32, 32), sides, "net.onnx")
    assert "\n" not in str(refused.value)
    check_images((5, 3, 32, 32), 3, (32, 32), sides, "net.onnx")


@pytest.mark.parametrize(
    ("form", "opset", "told"),
    [
        ("onnx", 11, "`--opset` must be 18 to 23, which torch writes, got 11"),
        ("onnx", 30, "`--opset` must be 18 to 23, which torch writes, got 30"),
        ("pt2", 20, "`--opset` is for --to onnx, got pt2"),
    ],
)
def test_a_version_of_onnx_that_torch_does_not_write_is_refused(form, opset, told, tmp_path):
    with pytest.raises(UsageError, match=f"{told}$"):
        ExportOptions(form, tmp_path / "net", opset=opset)
