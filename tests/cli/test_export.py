import json
import os
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

import vitlab
from vitlab.cli import export
from vitlab.cli.main import main
from vitlab.errors import UsageError
from vitlab.jobs import formats
from vitlab.jobs.export import _unit
from vitlab.jobs.formats import FORMATS, both_outputs, largest_difference
from vitlab.jobs.restore import restore
from vitlab.models.load import load_weights
from vitlab.models.vit import VisionTransformer
from vitlab.models.weights_file import check_readable, read_weights
from vitlab.runs.directory import RunDir
from vitlab.tasks import Regressor

REPOSITORY = Path(__file__).parents[2]
TINY = ["--trainer.max_epochs=1", "--trainer.logger=false", "--model.depth=2", "--data.subset=0.2", "--quiet"]
DINOV3 = {
    "class_path": "rope2d",
    "init_args": {"coordinates": "normalized", "pairs": "half", "axes": "yx", "jitter": 2.0},
}
SHARED = {"class_path": "relpos", "init_args": {"join": "every_layer_shared"}}
REGISTERS = {"class_path": "rope2d", "init_args": {"register_theta": 10}}
GRAPHS = [pytest.param("onnx", marks=pytest.mark.rare), "pt2"]


def train(folder, config):
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        assert main(["fit", "--config", str(REPOSITORY / "configs" / config), "--name", "run", *TINY]) == 0
    return folder / "runs" / "run"


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    return train(tmp_path_factory.mktemp("vit"), "vit.yaml")


@pytest.fixture(scope="module")
def t2t(tmp_path_factory):
    return train(tmp_path_factory.mktemp("t2t"), "t2t.yaml")


def network(run):
    return restore(RunDir(run), run / "checkpoints" / "best.ckpt").model.net


def outputs(net, images):
    with torch.no_grad():
        return net(images)


@pytest.mark.parametrize("form", ["safetensors", "timm", *GRAPHS])
def test_a_vit_is_exported_and_checked(vit, form, tmp_path, capsys):
    path = tmp_path / "new" / f"vit{export.SUFFIXES[form]}"
    assert main(["export", str(vit), "--to", form, "-o", str(path), "--check"]) == 0
    shown = capsys.readouterr().out
    assert "largest difference of outputs" in shown and str(path) in shown
    assert sorted(os.listdir(path.parent)) == [path.name, f"{path.name}.json"]  # nothing half-written


@pytest.mark.rare
def test_large_weights_lie_beside_the_graph(vit, tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "_HUGE", 1000)
    path = tmp_path / "vit.onnx"
    assert main(["export", str(vit), "--to", "onnx", "-o", str(path), "--check", "--quiet"]) == 0
    assert sorted(os.listdir(tmp_path)) == ["vit.onnx", "vit.onnx.data", "vit.onnx.json"]
    assert largest_difference(both_outputs(network(vit), FORMATS["onnx"][1](path, {}))) < 1e-4  # where it lies now


@pytest.mark.parametrize(
    "form", ["safetensors", *(pytest.param(form, marks=pytest.mark.rare) for form in ("onnx", "pt2"))]
)
def test_a_t2t_vit_with_a_performer_is_exported_and_checked(t2t, form, tmp_path):
    path = tmp_path / f"t2t{export.SUFFIXES[form]}"
    assert main(["export", str(t2t), "--to", form, "-o", str(path), "--check", "--quiet"]) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"tokenizer": "t2t", "t2t_attn": "transformer", "pos_embed": "sincos1d"}, marks=pytest.mark.rare),
        pytest.param({"tokenizer": "conv", "pos_embed": "conv"}, marks=pytest.mark.rare),
        pytest.param({"pos_embed": "rope2d", "qk_norm": True, "norm_layer": "rmsnorm"}, marks=pytest.mark.rare),
        pytest.param({"pos_embed": "rope_mixed", "layer_scale": 0.5}, marks=pytest.mark.rare),
        pytest.param({"pos_embed": "relpos", "reg_tokens": 2}, marks=pytest.mark.rare),
        pytest.param({"pos_embed": "alibi2d", "class_token": False, "global_pool": "avg"}, marks=pytest.mark.rare),
        pytest.param({"pos_embed": "factorized", "global_pool": "map"}, marks=pytest.mark.rare),
        pytest.param(
            {"pos_embed": "sincos2d", "global_pool": "max", "act_layer": "gelu_tanh", "head_hidden": 8},
            marks=pytest.mark.rare,
        ),
    ],
    ids=lambda arguments: "-".join(str(value) for value in arguments.values()),
)
def test_every_kind_of_network_becomes_a_graph_for_any_batch_size(arguments, tmp_path):
    tiny = {"img_size": [8, 16], "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 3}
    kernels = {"t2t_kernels": [3, 3], "t2t_strides": [2, 2], "t2t_dim": 8}
    net = randomized(VisionTransformer(**tiny, **kernels, **arguments))
    write, read = FORMATS["onnx"]  # by way of the graph that pt2 saves
    write(net, {}, tmp_path / "net.onnx")
    assert largest_difference(both_outputs(net, read(tmp_path / "net.onnx", {}))) < 1e-4


@pytest.mark.rare
@pytest.mark.parametrize("form", ["onnx", "pt2"])
def test_exports_keep_the_epsilon_of_performers(form, tmp_path):
    """Where all features are small, the 1e-8 in the denominator decides; optimizers of graphs took it for 0."""
    net = VisionTransformer(
        [8, 16], tokenizer="t2t", t2t_kernels=[3, 3], t2t_dim=8, embed_dim=16, depth=1, num_heads=2, num_classes=3
    )
    net = randomized(net)
    layer = net.tokenizer.attention1
    with torch.no_grad():
        layer.kqv.weight.mul_(5)
        k, q, _ = layer.kqv(layer.norm1(torch.randn(2, 32, 27))).chunk(3, dim=-1)
        products = layer.features(q) @ layer.features(k).sum(dim=1, keepdim=True).transpose(1, 2)
    assert products.median() < 1e-8
    write, read = FORMATS[form]
    write(net, {}, tmp_path / f"net.{form}")
    assert largest_difference(both_outputs(net, read(tmp_path / f"net.{form}", {}))) < 1e-4


def randomized(net):
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return net.eval()


def scaled(method):
    return {"class_path": method, "init_args": {"scale": 0.2}}


@pytest.mark.parametrize(
    "arguments",
    [
        {"norm_eps": 1e-3},
        {"norm_layer": "rmsnorm", "qk_norm": True, "norm_eps": 1e-2},
        {"act_layer": "silu", "qkv_bias": False, "reg_tokens": 3},
        {"act_layer": "gelu_tanh", "layer_scale": 0.5, "mlp_ratio": 1.5},
        {"class_token": False, "global_pool": "avg", "pos_embed": "sincos2d"},
        {"global_pool": "map", "pos_embed": "factorized", "norm_eps": 1e-2},
        {"global_pool": "max", "pos_embed": "none", "act_layer": "relu"},
        {"pos_embed": "sincos1d", "pos_embed_trainable": True, "qk_scale": 8**-0.5},
        {"pos_embed": "rope2d", "layer_scale": 0.5, "reg_tokens": 2},
        {"pos_embed": "rope_mixed", "global_pool": "avg", "class_token": False, "fc_norm": True},
        {"pos_embed": ["learned", "rope2d"], "mlp_layer": "swiglu", "act_layer": "silu", "qk_norm": True},
        {"pos_embed": scaled("learned")},
        {"pos_embed": scaled("sincos2d")},
        {"pos_embed": [scaled("learned"), "rope2d"]},
        {"global_pool": {"class_path": "avg"}, "act_layer": {"class_path": "relu"}},
        {"pos_embed": "rope2d", "mlp_layer": {"class_path": "swiglu"}, "act_layer": {"class_path": "silu"}},
        {"pos_embed": "rope2d", "global_pool": "map", "class_token": False},
        {"pos_embed": DINOV3, "norm_layer": "rmsnorm", "norm_eps": 1e-2},
        {"pos_embed": "relpos", "global_pool": "avg"},
        {"pos_embed": SHARED, "layer_scale": 0.5},
        {"pos_embed": ["learned", "relpos"], "mlp_layer": "swiglu", "act_layer": "silu"},
        {"pre_norm": True},
        {"num_classes": 0},
        {"num_classes": 0, "pos_embed": "rope2d", "global_pool": "avg"},
    ],
    ids=lambda arguments: "-".join(str(value) for value in arguments.values()),
)
def test_timm_builds_and_loads_what_was_exported(arguments, tmp_path):
    tiny = {"img_size": [8, 16], "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 3}
    net = randomized(VisionTransformer(**tiny | arguments))
    network = formats.network_arguments(net)
    write, read = FORMATS["timm"]
    code = write(net, network, tmp_path / "net.safetensors")["timm"]
    assert largest_difference(both_outputs(net, read(tmp_path / "net.safetensors", network))) < 1e-5
    import timm.models

    theirs = eval(code, {"timm": timm, "torch": torch, "partial": partial}).eval()  # as printed for the user
    theirs.load_state_dict(load_file(tmp_path / "net.safetensors"))
    assert largest_difference(both_outputs(net, theirs)) < 1e-5
    if arguments.get("pos_embed") == "factorized":  # timm stores its sums alone
        return
    (tmp_path / "net.safetensors.json").write_text(json.dumps({"network": network}))
    again = VisionTransformer(**tiny | arguments).eval()
    load_weights(again, tmp_path / "net.safetensors")
    assert largest_difference(both_outputs(net, again)) < 1e-5


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (
            {"tokenizer": "t2t", "t2t_kernels": [3, 3], "t2t_dim": 8},
            "`tokenizer: t2t(t2t_kernels=[3, 3], t2t_dim=8)`; use --to safetensors, onnx or pt2",
        ),
        ({"pos_embed": "rope2d", "act_layer": "relu"}, "timm's Eva does not have `act_layer: relu`"),
        ({"pos_embed": REGISTERS, "reg_tokens": 4}, "timm's Eva does not have `pos_embed: rope2d(register_theta=10)`"),
        ({"pos_embed": "relpos", "reg_tokens": 1}, "timm's Beit does not have `reg_tokens: 1`"),
        ({"pos_embed": ["rope2d", "relpos"]}, "`pos_embed: rope2d + relpos`"),
        ({"pos_embed": "alibi2d"}, "`pos_embed: alibi2d`"),
        ({"pos_embed_join": "every_layer_shared"}, "`pos_embed: learned(join=every_layer_shared)`"),
        ({"qk_scale": 0.3}, "`attn: softmax(qk_scale=0.3)`"),
        ({"pre_norm": True, "pos_embed": "none"}, "set it to 0, add a table of positions, or use pre_norm=False"),
        ({"pos_embed": "rope2d", "global_pool": "map"}, "timm's Eva does not have `global_pool: map` of patches alone"),
        ({"head_hidden": 4, "tokenizer": "conv"}, "`tokenizer: conv` and `head_hidden: 4`"),
    ],
)
def test_what_timm_cannot_build_is_refused_with_the_reason(arguments, named, tmp_path):
    tiny = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 3}
    net = randomized(VisionTransformer(**tiny, **arguments))
    with pytest.raises(ValueError, match=r"(does not have|has no bias) .*; use --to safetensors, onnx or pt2") as error:
        FORMATS["timm"][0](net, formats.network_arguments(net), tmp_path / "net.safetensors")
    assert named in str(error.value)
    assert not os.listdir(tmp_path)


def test_exports_for_timm_have_a_class_position_of_zeros(vit, tmp_path, capsys):
    path = tmp_path / "vit.safetensors"
    assert main(["export", str(vit), "--to", "timm", "-o", str(path)]) == 0
    assert "largest difference of outputs" in capsys.readouterr().out  # timm's network is always compared
    table = load_file(path)["pos_embed"]
    assert table.shape == (1, 17, 48)
    assert not table[:, 0].any()
    assert torch.equal(table[:, 1:], network(vit).pos_embed.weight)


def test_safetensors_hold_the_arguments_of_their_network(vit, tmp_path):
    path = tmp_path / "vit.safetensors"
    assert main(["export", str(vit), "--to", "safetensors", "-o", str(path), "--quiet"]) == 0
    with safe_open(path, framework="pt") as file:
        arguments = json.loads(file.metadata()["hyper_parameters"])
    model = VisionTransformer(**arguments).eval()
    assert load_weights(model, path) == []
    model.skips_unread_tokens = True  # as the network of a run does
    images = torch.randn(3, 1, 8, 8)
    assert torch.equal(outputs(model, images), outputs(network(vit), images))
    assert path.stat().st_mode & 0o777 == (tmp_path / "vit.safetensors.json").stat().st_mode & 0o777


def test_the_json_beside_a_file_describes_images_and_outputs(vit, tmp_path):
    path = tmp_path / "vit.safetensors"
    assert main(["export", str(vit / "checkpoints" / "last.ckpt"), "--to", "safetensors", "-o", str(path)]) == 0
    facts = json.loads((tmp_path / "vit.safetensors.json").read_text())
    data = json.loads((vit / "data.json").read_text())
    assert facts["images"]["shape"] == ["batch", 1, 8, 8]
    assert (facts["images"]["mean"], facts["images"]["std"]) == (data["mean"], data["std"])
    assert facts["outputs"] == [str(digit) for digit in range(10)]
    assert facts["checkpoint"]["file"] == "last.ckpt" and len(facts["checkpoint"]["sha256"]) == 64
    assert VisionTransformer(**facts["network"]).img_size == (8, 8)


def test_by_default_the_file_is_written_into_the_run(vit, capsys):
    assert main(["export", str(vit), "--to", "safetensors"]) == 0
    assert (vit / "export" / "best.safetensors").is_file()
    assert str(vit / "export" / "best.safetensors") in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [2e-4, float("nan")])
def test_a_file_with_different_outputs_fails_the_check_and_is_removed(vit, wrong, tmp_path, monkeypatch, capsys):
    write, read = FORMATS["safetensors"]

    def distorted(path, arguments):
        model = read(path, arguments)
        return lambda images: model(images) + wrong * (torch.arange(len(images)) == 4)[:, None]  # in one image of five

    monkeypatch.setitem(FORMATS, "safetensors", (write, distorted))
    path = tmp_path / "vit.safetensors"
    path.write_text("earlier")
    assert main(["export", str(vit), "--to", "safetensors", "-o", str(path), "--check"]) == 1
    assert "outputs differ by" in capsys.readouterr().err
    assert path.read_text() == "earlier" and os.listdir(tmp_path) == [path.name]
    assert main(["export", str(vit), "--to", "safetensors", "-o", str(path)]) == 0
    monkeypatch.setattr("vitlab.jobs.export.own_parts", lambda net: [net])  # it may keep numbers outside of its weights
    assert main(["export", str(vit), "--to", "safetensors", "-o", str(path)]) == 1


@pytest.mark.rare
def test_a_graph_is_loaded_with_its_transform_and_says_which_sizes_it_takes(vit, tmp_path):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    net, images = network(vit), torch.randn(3, 1, 12, 16, generator=torch.Generator().manual_seed(0))
    for dynamic, opset in (("size", "20"), ("batch", "23")):
        path = tmp_path / f"{dynamic}.onnx"
        words = ["--to", "onnx", "-o", str(path), "--dynamic", dynamic, "--opset", opset]
        assert main(["export", str(vit), *words]) == 0
        assert [found.version for found in onnx.load(path).opset_import if found.domain == ""] == [int(opset)]
        graph, transform = vitlab.load(path)
        picture = transform(Image.new("L", (11, 9)))[None]
        torch.testing.assert_close(graph(picture), outputs(net, picture), atol=1e-5, rtol=0)
        if dynamic == "size":
            torch.testing.assert_close(graph(images), outputs(net, images), atol=1e-5, rtol=0)
            step = net.tokenizer.patch_size[0]
            sizes = f"heights of {step} to 8192 in steps of {step} and widths of {step} to 8192 in steps of {step}"
            assert json.loads(Path(f"{path}.json").read_text())["images"]["sizes"] == sizes
            images = images[..., :-1]
        with pytest.raises(UsageError, match=r"takes images of 1 .*, got 1 x 12 x 1[56]"):
            graph(images)


def test_an_error_is_told_where_the_folder_of_the_export_cannot_be_removed(vit, tmp_path, monkeypatch, capsys):
    def refuses(path, *more, **named):
        raise PermissionError(13, "Permission denied", str(path))

    def reads_nothing(*words):
        for name in ("unlink", "rmdir", "chmod"):
            monkeypatch.setattr(os, name, refuses)
        raise OSError(5, "Input/output error", "weights")

    monkeypatch.setattr("vitlab.jobs.export.restore", reads_nothing)
    code = main(["export", str(vit), "--to", "safetensors", "-o", str(tmp_path / "out/a.safetensors")])
    monkeypatch.undo()
    assert code == 1 and capsys.readouterr().err == "vitlab: weights: Input/output error\n"


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_is_named_with_the_way_to_install_it(vit, package, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["export", str(vit), "--to", "onnx"]) == 2
    error = capsys.readouterr().err
    assert f"needs {package}: pip install 'vitlab[export]'" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "torchscript"], "torchscript"),
        ([], "--to"),
        (["--to", "onnx", "-o", "vit.pt"], "`--output` must end with .onnx, got vit.pt"),
        (["--to", "timm", "-o", "vit.timm"], "`--output` must end with .safetensors, got vit.timm"),
        (["--to", "pt2", "-o", "/dev/null/vit.pt2"], "cannot be written"),
    ],
)
def test_wrong_input_is_refused_in_one_line(vit, arguments, message, capsys):
    assert main(["export", str(vit), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("vitlab: ") and error.count("\n") == 1


def test_numbers_are_compared_in_standard_deviations_of_their_targets(here, monkeypatch, capsys):
    rng = np.random.default_rng(0)
    targets = rng.normal([3e5, 0], [1e5, 1e-6], (60, 2))
    np.savez("prices.npz", images=rng.normal(size=(60, 8, 8)), targets=targets)
    words = ["--model=Regressor", "--data=Arrays", "--data.path=prices.npz", "--name=prices", *TINY]
    words += ["--data.batch_size=8"]
    assert main(["fit", "--config", str(REPOSITORY / "configs" / "vit.yaml"), *words]) == 0
    write, read = FORMATS["safetensors"]
    for wrong, code in (([0.25, 0.0], 0), ([0.0, 2e-9], 1), ([50.0, 0.0], 1)):

        def distorted(path, arguments, wrong=wrong):
            model = read(path, arguments)
            return lambda images: model(images) + torch.tensor(wrong)

        monkeypatch.setitem(FORMATS, "safetensors", (write, distorted))
        assert main(["export", "prices", "--to", "safetensors", "--check"]) == code
        shown = capsys.readouterr()
        assert " standard deviations of the targets, " in (shown.err if code else shown.out)


@pytest.mark.parametrize(
    ("stated", "unit"),
    [({"mean": [0.0], "std": [2.0]}, "standard deviations of"), ({}, "in the unit of"), (None, "in the unit of")],
)
def test_the_check_of_numbers_says_in_which_unit_it_is(stated, unit):
    targets = None if stated is None else {"kind": "number", "names": ["age"], **stated}
    task = Regressor(targets=targets, img_size=8, in_chans=1, patch_size=4, embed_dim=8, depth=1, num_heads=2)
    assert _unit(task) == (task.target_std, f" {unit} the targets")
    assert _unit(torch.nn.Linear(1, 1)) == (1.0, "")


def test_parameters_that_a_part_shares_are_written_apart(tmp_path):
    net = VisionTransformer(img_size=8, in_chans=1, num_classes=3, patch_size=4, embed_dim=8, depth=1, num_heads=1)
    net.norm.other = net.head.bias
    formats._write_safetensors(net, {}, tmp_path / "a.safetensors")
    kept = load_file(tmp_path / "a.safetensors")
    assert torch.equal(kept["norm.other"], kept["head.bias"]) and kept.keys() == net.state_dict().keys()


class Keeps(torch.nn.LayerNorm):
    def get_extra_state(self):
        return {"calls": 3}


def test_safetensors_have_the_tensors_of_a_part_alone(tmp_path):
    net = VisionTransformer(img_size=8, in_chans=1, num_classes=3, patch_size=4, embed_dim=8, depth=1, num_heads=1)
    net.norm = Keeps(8)
    formats._write_safetensors(net, {}, tmp_path / "a.safetensors")
    assert load_file(tmp_path / "a.safetensors").keys() == net.state_dict().keys() - {"norm._extra_state"}


def test_what_an_export_is_not_for_is_said_before_the_work(vit, here, capsys):
    os.mkdir("weights.safetensors")
    assert main(["export", str(vit), "--to", "safetensors", "-o", "weights.safetensors"]) == 2
    assert "`--output weights.safetensors` is a directory: name a file" in capsys.readouterr().err
    Path("net.onnx").touch()
    for read in (read_weights, check_readable):
        with pytest.raises(ValueError, match=r"^net\.onnx is a graph, which gives predictions alone: name the run"):
            read(Path("net.onnx"))


def test_what_an_exported_file_reaches_is_not_stored_as_the_runs(vit, capsys):
    assert main(["export", str(vit), "--to", "safetensors", "--quiet"]) == 0
    before = (vit / "results.json").read_text()
    assert main(["validate", str(vit / "export" / "best.safetensors")]) == 0
    assert "best.safetensors is an export, and no checkpoint" in " ".join(capsys.readouterr().out.split())
    assert (vit / "results.json").read_text() == before
