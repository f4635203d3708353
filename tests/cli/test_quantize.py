"""`vitlab export --to onnx-int8`: a graph with weights in eight bits, and what it changes on the validation images."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch import nn

import vitlab
from vitlab.cli.main import main
from vitlab.errors import UsageError
from vitlab.jobs import formats
from vitlab.jobs.quantize import answered_by, measure_both, quantize
from vitlab.jobs.restore import network_of, restore
from vitlab.jobs.terminal import open_terminal
from vitlab.runs.directory import RunDir

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
REPOSITORY = Path(__file__).parents[2]
SHORT = ["--trainer.max_epochs=4", "--trainer.logger=false", "--model.warmup_epochs=0", "--quiet"]
WIDE = ["--model.embed_dim=96", "--model.depth=2", "--model.lr=0.003"]


@pytest.fixture(autouse=True)
def terminal():
    """Without a warning of Lightning, as in every command."""
    open_terminal()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("int8") / "run"
    config = ["--config", str(REPOSITORY / "configs" / "vit.yaml"), "--run_dir", str(folder)]
    assert main(["fit", *config, *SHORT, *WIDE]) == 0
    return folder


@pytest.fixture(scope="module")
def exported(run):
    """The files of float32 and of int8."""
    paths = [run / "export" / name for name in ("best.onnx", "best.int8.onnx")]
    for path, form in zip(paths, ("onnx", "onnx-int8"), strict=True):
        assert main(["export", str(run), "--to", form, "--check", "--quiet"]) == 0 and path.is_file()
    return paths


def validation_of(run):
    """Return the batches of images and labels."""
    data = restore(RunDir(run), run / "checkpoints" / "best.ckpt").datamodule
    data.setup("validate")
    return list(data.iterate_batches(data.val_dataloader()))


def classes(net, batches):
    with torch.no_grad():
        return torch.cat([net(images).argmax(dim=1) for images, _ in batches])


@pytest.mark.rare
def test_int8_is_small_and_its_card_says_what_it_answers_differently(run, exported):
    plain, small = exported
    assert sorted(path.name for path in small.parent.iterdir()) == sorted(
        [f"{path.name}{more}" for path in exported for more in ("", ".json")]
    )
    assert small.stat().st_size < 0.35 * plain.stat().st_size
    graph = onnx.load(small).graph
    kinds = [node.op_type for node in graph.node]
    assert not graph.value_info  # with stale ones onnxruntime warns at each call
    assert kinds.count("MatMulInteger") == 2 * 4 + 1  # four of each block, and the head
    card, batches = json.loads(Path(f"{small}.json").read_text()), validation_of(run)
    labels = torch.cat([targets for _, targets in batches])
    own, other = (classes(vitlab.load(source).net, batches) for source in (run, small))
    found = card["quantized"]
    assert found["run"]["n"] == len(labels) and found["run"]["acc1"] > 0.6  # it has learned
    assert found["run"]["acc1"] == pytest.approx(float((own == labels).float().mean()))
    assert found["int8"]["acc1"] == pytest.approx(float((other == labels).float().mean()), abs=1.01 / len(labels))
    assert abs(found["other_class"] - int((own != other).sum())) <= 1  # batches have one scale for activations
    assert 0 < abs(found["int8"]["loss"] - found["run"]["loss"]) < 0.02
    assert card["measured"]["val"]["acc1"] == found["run"]["acc1"]  # that of the weights
    assert card["precision"] == "32-true"


@pytest.mark.rare
def test_the_answers_of_the_graph_are_the_ones_that_are_measured(run):
    checkpoint = run / "checkpoints" / "best.ckpt"
    net = network_of(restore(RunDir(run), checkpoint).model)
    with torch.no_grad():
        same, wrong = (measure_both(RunDir(run), checkpoint, lambda images, s=s: s * net(images)) for s in (1, -1))
    assert same.int8 == pytest.approx(same.run) and same.other_class == 0
    assert wrong.int8["acc1"] < 0.1 < 0.6 < wrong.run["acc1"] and wrong.other_class == wrong.run["n"]
    after = json.loads((run / "results.json").read_text())
    assert after["val"]["acc1"] == wrong.run["acc1"] and not after.get("variations")


@pytest.mark.rare
def test_int8_predicts_photos(run, exported, tmp_path):
    for i, image in enumerate(np.random.default_rng(0).integers(256, size=(5, 8, 8), dtype=np.uint8)):
        Image.fromarray(image).save(tmp_path / f"{i}.png")
    tables = []
    for path in exported:
        assert main(["predict", "--ckpt_path", str(path), str(tmp_path), "-o", str(tmp_path / "t.csv"), "--quiet"]) == 0
        tables.append(pd.read_csv(tmp_path / "t.csv"))
    own, other = (table["probability_1"] for table in tables)
    assert (own - other).abs().max() < 0.05 and not own.equals(other)


@pytest.mark.rare
def test_weights_have_seven_bits_and_a_scale_for_each_channel(run, exported):
    """More than seven overflow the sum of two products in 16 bits, where a processor has no VNNI."""
    graph = onnx.load(exported[1]).graph
    weights = [onnx.numpy_helper.to_array(t) for t in graph.initializer if t.data_type == onnx.TensorProto.INT8]
    large = [weight for weight in weights if weight.ndim == 2]
    assert large and all(weight.min() >= -64 and weight.max() <= 64 for weight in large)
    scales = {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer if t.name.endswith("_scale")}
    assert {10, 96, 192, 288} == {scale.size for scale in scales.values()}


@pytest.mark.rare
@pytest.mark.parametrize("more", [["--dynamic", "size"], ["--opset", "20"]])
def test_int8_goes_with_the_options_of_graphs(run, more, tmp_path):
    path = tmp_path / "float32.onnx"  # whatever the file is called
    assert main(["export", str(run), "--to", "onnx-int8", "-o", str(path), "--check", "--quiet", *more]) == 0
    assert [file.name for file in sorted(tmp_path.iterdir())] == [path.name, f"{path.name}.json"]
    assert "MatMulInteger" in {node.op_type for node in onnx.load(path).graph.node}
    net, _ = vitlab.load(path)
    size = (16, 12) if "size" in more else (8, 8)
    assert net(torch.rand(3, 1, *size)).isfinite().all()


@pytest.fixture(scope="module")
def regression(tmp_path_factory):
    """A run that predicts how bright an image is, from 0 to 1000."""
    folder = tmp_path_factory.mktemp("int8-number")
    rng, rows = np.random.default_rng(0), ["path,target"]
    for i in range(160):
        level = rng.uniform()
        np.save(folder / f"{i}.npy", level + rng.normal(0, 0.1, (8, 8)))
        rows.append(f"{i}.npy,{1000 * level}")
    (folder / "table.csv").write_text("\n".join(rows))
    words = ["--config", str(REPOSITORY / "configs" / "vit.yaml"), "--run_dir", str(folder / "run"), *SHORT, *WIDE]
    words += ["--data=Table", f"--data.path={folder / 'table.csv'}", "--data.num_workers=0", "--model=Regressor"]
    assert main(["fit", *words]) == 0
    return folder / "run"


@pytest.mark.rare
def test_numbers_are_measured_in_their_own_units(regression):
    checkpoint = regression / "checkpoints" / "best.ckpt"
    net = network_of(restore(RunDir(regression), checkpoint).model)
    with torch.no_grad():
        found = measure_both(RunDir(regression), checkpoint, net)
    assert found.int8 == pytest.approx(found.run, rel=1e-4) and found.other_class is None
    assert main(["export", str(regression), "--to", "onnx-int8", "--check", "--quiet"]) == 0
    card = json.loads((regression / "export" / "best.int8.onnx.json").read_text())["quantized"]
    assert card["int8"]["mae"] == pytest.approx(card["run"]["mae"], rel=0.1)


@pytest.mark.rare
def test_weights_beside_a_graph_are_refused(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(formats, "_HUGE", 1000)
    assert main(["export", str(run), "--to", "onnx-int8", "-o", str(tmp_path / "net.onnx")]) == 2
    error = capsys.readouterr().err
    assert "for graphs that hold their weights, below 1.5 GB: use --to onnx" in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


class Around(nn.Module):
    """A task that asks a part of its network, not the network that is exported."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Linear(2, 2)

    def forward(self, images):
        return self.layers(images)


def test_a_task_that_goes_around_the_exported_network_is_refused():
    task, one = Around(), torch.ones(1, 2)
    around = r"Around does not call `forward` of .*Around in validation"
    with pytest.raises(UsageError, match=around), answered_by(task, torch.neg):
        task.layers(one)
    with answered_by(task, torch.neg):
        assert task(one).tolist() == [[-1, -1]]
    assert torch.equal(task(one), task.layers(one))  # as it was
    several = "a graph takes images of one size, and the run's data has batches of builtins.list"
    with pytest.raises(UsageError, match=several), answered_by(task, torch.neg):
        task([one])


@pytest.mark.rare
def test_an_export_changes_no_number_of_the_run(run):
    kept = {path: path.read_bytes() for path in (run / "results.json", *run.glob("predictions/*"))}
    checkpoint = str(run / "checkpoints" / "last.ckpt")
    assert main(["export", checkpoint, "--to", "onnx-int8", "-o", str(run / "last.onnx"), "--quiet"]) == 0
    assert {path: path.read_bytes() for path in (run / "results.json", *run.glob("predictions/*"))} == kept


def test_onnxruntime_says_nothing_about_constants_that_it_does_not_fold(tmp_path, capfd):
    constants = [onnx.helper.make_node("Constant", [], [name], value=onnx.numpy_helper.from_array(np.array(value)))
                 for name, value in (("one", 1), ("half", np.float32(0.5)))]  # fmt: skip
    nodes = [("CastLike", ["one", "half"], ["like"]), ("Mul", ["images", "like"], ["y"]), ("MatMul", ["y", "w"], ["z"])]
    nodes = [*constants, *(onnx.helper.make_node(*node) for node in nodes)]
    ends = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, 4]) for name in ("images", "z")]
    weights = onnx.numpy_helper.from_array(np.eye(4, dtype=np.float32), "w")
    graph = onnx.helper.make_graph(nodes, "small", ends[:1], ends[1:], [weights])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(model, tmp_path / "a.onnx")
    quantize(tmp_path / "a.onnx", tmp_path / "b.onnx")
    assert "MatMulInteger" in {node.op_type for node in onnx.load(tmp_path / "b.onnx").graph.node}
    assert capfd.readouterr() == ("", "")
