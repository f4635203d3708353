import json
import math
import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from tests.training import QUIET
from vitlab.callbacks.ema import EMA
from vitlab.cli.main import main
from vitlab.data import Arrays, Digits
from vitlab.data.known import FakeData
from vitlab.jobs.train.facts import model_facts
from vitlab.models.vit import VisionTransformer
from vitlab.tasks import Classifier, Distillation
from vitlab.tasks import distillation as module
from vitlab.tasks.distillation import Teacher, read_teacher

TINY = {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 8, "depth": 1, "num_heads": 2, "num_classes": 10}
CONFIG = str(Path(__file__).parents[2] / "configs" / "t2t.yaml")
FIT = ["fit", "--config", CONFIG, "--trainer.logger=false", "--trainer.log_every_n_steps=1", "--data.batch_size=32"]
LEARN = [*FIT, "--model=Distillation", "--model.embed_dim=24", "--trainer.max_epochs=3", "--data.mixup=0.4"]
LEARN += ["--data.subset=0.3", f"--trainer.callbacks={json.dumps([{'class_path': 'EMA'}])}"]


def softmax(row, tau=1.0):
    powers = [math.exp(value / tau) for value in row]
    return [power / sum(powers) for power in powers]


def test_hard_distillation_is_half_labels_and_half_the_teachers_first_choice():
    task = Distillation("t", distill="hard", label_smoothing=0.0, **TINY)
    outputs, labels = torch.randn(3, 10), torch.tensor([4, 2, 9])
    task._teacher_logits = torch.randn(3, 10)
    total = 0.0
    for row, label, advice in zip(outputs.tolist(), labels.tolist(), task._teacher_logits.tolist(), strict=True):
        shares = softmax(row)
        total -= 0.5 * math.log(shares[label]) + 0.5 * math.log(shares[advice.index(max(advice))])
    assert task.train_loss(outputs, labels).item() == pytest.approx(total / 3, rel=1e-5)


@pytest.mark.parametrize(("tau", "used"), [(None, 3.0), (1.5, 1.5)])
def test_soft_distillation_is_a_divergence_at_a_temperature(tau, used):
    task = Distillation("t", distill="soft", distill_alpha=0.1, distill_tau=tau, label_smoothing=0.0, **TINY)
    outputs, labels = torch.randn(3, 10), torch.tensor([4, 2, 9])
    task._teacher_logits = 3 * torch.randn(3, 10)
    total = 0.0
    for row, label, advice in zip(outputs.tolist(), labels.tolist(), task._teacher_logits.tolist(), strict=True):
        pairs = zip(softmax(row, used), softmax(advice, used), strict=True)
        divergence = sum(theirs * math.log(theirs / ours) for ours, theirs in pairs)
        total += 0.9 * -math.log(softmax(row)[label]) + 0.1 * used**2 * divergence
    assert task.train_loss(outputs, labels).item() == pytest.approx(total / 3, rel=1e-5)


def digits_teacher(data):
    net = VisionTransformer(**TINY, dropout=0.5)
    torch.nn.init.normal_(net.head.weight)
    return Teacher(net, data.mean, data.std, (1, 8, 8), list(data.class_names))


@pytest.mark.slow
def test_the_teacher_is_no_part_of_what_is_trained_saved_and_averaged(monkeypatch, tmp_path):
    data = Digits(batch_size=64, mixup=0.5, subset=0.2)
    teacher = digits_teacher(data)
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    monkeypatch.setattr(module, "read_teacher", lambda source: teacher)
    task = Distillation("t", **TINY)
    trainer = L.Trainer(max_epochs=1, callbacks=[EMA()], **QUIET)
    trainer.fit(task, data)
    plain = Classifier(**TINY)
    assert task.state_dict().keys() == plain.state_dict().keys()
    trained = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
    assert trained == {id(p) for p in task.parameters()} == {id(p) for p in task.net.parameters()}
    assert not teacher.training
    assert all(torch.equal(before[name], value) for name, value in teacher.state_dict().items())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    content = torch.load(tmp_path / "x.ckpt", weights_only=True)
    assert content["state_dict"].keys() == plain.state_dict().keys()
    assert content["teacher"] == teacher.digest()
    teacher.net.head.bias.data[-1] += 1e-6
    assert content["teacher"] != teacher.digest()


def test_the_teacher_sees_the_students_images_as_it_was_trained_to_see_them():
    data = FakeData(native_size=8, in_chans=3)
    seen = []
    net = torch.nn.Identity()
    net.register_forward_pre_hook(lambda net, inputs: seen.append(inputs[0]))
    teacher = Teacher(net, (0.1, 0.2, 0.3), (0.5, 0.6, 0.7), (3, None, None), 10)
    teacher.align_with_data(data)
    raw = torch.rand(2, 3, 8, 8)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (data.mean, data.std))
    teacher((raw - mean) / std)
    own_mean, own_std = (torch.tensor(values).view(3, 1, 1) for values in (teacher.mean, teacher.std))
    torch.testing.assert_close(seen[0], (raw - own_mean) / own_std)


@pytest.mark.parametrize(
    ("size", "classes", "told"),
    [
        ((3, 8, 8), 10, "takes images of 3x8x8, the data has 1x8x8; take a teacher of as many channels"),
        ((1, 16, 8), 10, "takes images of 1x16x8, the data has 1x8x8; set `data.img_size`"),
        ((1, None, None), 9, "other classes than those of the data: it has 9, the data 10"),
        ((1, 8, 8), [f"class {i}" for i in range(9, -1, -1)], "of other names or order"),
    ],
)
def test_a_teacher_of_other_images_or_classes_is_refused(size, classes, told):
    with pytest.raises(ValueError, match=told):
        Teacher(torch.nn.Identity(), (0.5,), (0.5,), size, classes).align_with_data(
            Digits() if classes == 9 else FakeDigits()
        )


def test_a_schedule_of_sizes_needs_a_teacher_that_takes_each_of_them(monkeypatch):
    data = Digits(img_size_schedule=[[0, 6], [1, 8]])
    task = Distillation("t", **TINY | {"patch_size": 2})
    assert [epoch for epoch, _ in model_facts(task, data)["flops_from"]] == [0, 1]  # before the teacher is read
    any_size = Teacher(torch.nn.Identity(), data.mean, data.std, (1, None, None), 10)
    for teacher in (Teacher(task.net, data.mean, data.std, (1, 8, 8), 10), any_size):
        monkeypatch.setattr(module, "read_teacher", lambda source, teacher=teacher: teacher)
        task.find_teacher(data)
    patches_of_4, fixed = VisionTransformer(**TINY), torch.nn.Identity()
    for net, told in ((patches_of_4, "6"), (fixed, "Identity takes images of one size; leave the schedule out")):
        teacher = Teacher(net, data.mean, data.std, (1, 8, 8), 10)
        monkeypatch.setattr(module, "read_teacher", lambda source, teacher=teacher: teacher)
        with pytest.raises(ValueError, match=f"`model.teacher` does not take each size of .*schedule`: .*{told}"):
            task.find_teacher(data)


PICTURES, STORED = {"mean": (0.3,), "std": (0.37,)}, {"mean": (77.0,), "std": (94.0,), "arrays": True}


@pytest.mark.parametrize(
    ("theirs", "ours", "told"),
    [
        (PICTURES, STORED, r"pictures, .* \[0, 1\], and the data has arrays as stored, with mean 77 and std 94; scale"),
        (STORED, PICTURES, "arrays as stored, with mean 77 and std 94, and the data has pictures, .*; give"),
        (PICTURES, {"mean": (1e-3,), "std": (0.9,), "arrays": True}, "with mean 0.001 and std 0.9; scale"),
        (PICTURES, {"mean": (0.3,), "std": (0.47,), "arrays": True}, "with mean 0.3 and std 0.47; scale"),
        (PICTURES, {**PICTURES, "arrays": True}, None),
        (PICTURES, {"mean": (0.3,), "std": (0.45,), "arrays": True}, None),  # black and white have .4583, the most
        (PICTURES, {"mean": (0.5,), "std": (0.50005,), "arrays": True}, None),  # of 0 and 1, by the last digit
        (PICTURES, {"mean": (0.0,), "std": (1.0,), "arrays": True}, None),  # all black
        ({**PICTURES, "arrays": True}, STORED, None),  # units that nothing tells
        ({**PICTURES, "value_range": [0, 4095]}, PICTURES, r"`data.value_range` \[0, 4095\], .* data is None; set"),
        ({**PICTURES, "value_range": [0, 9]}, {**PICTURES, "value_range": (0, 8)}, r"of the data is \[0, 8\]; set"),
        ({**PICTURES, "value_range": [0, 9]}, {**PICTURES, "value_range": (0, 9)}, None),
        (PICTURES, {**PICTURES, "value_range": (0, 9)}, None),
        ({**PICTURES, "value_range": [0, 9]}, {**PICTURES, "arrays": True}, None),
    ],
)
def test_a_teacher_of_images_in_other_units_is_refused(theirs, ours, told):
    teacher = Teacher(torch.nn.Identity(), size=(1, 8, 8), classes=10, **theirs)
    data = SimpleNamespace(**{"arrays": False, **ours}, decoding=SimpleNamespace(value_range=ours.get("value_range")))
    with nullcontext() if told is None else pytest.raises(ValueError, match=f"^`model.teacher` .*{told}"):
        teacher.align_with_data(data)


def test_weights_of_images_are_refused_before_the_first_step(tmp_path):
    arrays = {"images": np.zeros((10, 8, 8)), "targets": np.arange(10) % 2, "weight": np.ones(10)}
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ValueError, match="does not support weights of images: leave them out"):
        Distillation(teacher="t", **TINY).find_teacher(Arrays(str(tmp_path / "a.npz")))


class FakeDigits(FakeData):
    def __init__(self):
        super().__init__(native_size=8, in_chans=1)


def test_data_of_ones_own_are_compared_as_far_as_they_are_told():
    images, teacher = torch.rand(2, 1, 8, 8), Teacher(torch.nn.Identity(), (0.2,), (0.5,), (1, 8, 8), ["a", "b"])
    teacher.align_with_data(SimpleNamespace(in_chans=1, img_size=(8, 8), num_classes=2))
    teacher.align_with_data(SimpleNamespace())
    assert torch.equal(teacher(images), images)
    with pytest.raises(ValueError, match="it has 2, the data 3"):
        teacher.align_with_data(SimpleNamespace(in_chans=1, img_size=(8, 8), num_classes=3))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"distill_alpha": 1.5}, "`distill_alpha` must be 0 to 1, got 1.5"),
        ({"distill_tau": 2.0}, "is only for `distill=soft`, got 2.0"),
        ({"distill": "soft", "distill_tau": 0.0}, "`distill_tau` must be above 0"),
        ({"teacher": "last"}, "must name its run"),
    ],
)
def test_a_wrong_option_of_distillation_is_refused_by_name(arguments, told):
    with pytest.raises(ValueError, match=told):
        Distillation(**{"teacher": "t", **TINY, **arguments})


@pytest.mark.slow
def test_a_network_of_timm_can_teach(monkeypatch):
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: create(name))
    net = read_teacher("timm:resnet18")
    assert (net.size, net.classes, net.mean) == ((3, None, None), 1000, (0.485, 0.456, 0.406))
    assert read_teacher("timm:vit_tiny_patch16_224").size == (3, 224, 224)


@pytest.mark.parametrize(
    ("outputs", "kind", "told"),
    [
        ("numbers", "number", "predicts numbers"),
        ("features", "feature", "predicts features"),
        (["a", "b"], "multilabel", "predicts targets of kind multilabel"),
        (["a", "b"], "class", None),
    ],
)
def test_only_an_exported_classifier_can_teach(outputs, kind, told, tmp_path):
    arguments = {**TINY, "num_classes": 2}
    save_file(VisionTransformer(**arguments).state_dict(), path := tmp_path / "net.safetensors",
              {"hyper_parameters": json.dumps(arguments)})  # fmt: skip
    card = {"format": "safetensors", "images": {"mean": [0.5], "std": [0.5], "arrays": True}, "outputs": outputs}
    Path(f"{path}.json").write_text(json.dumps({**card, "targets": {"kind": kind}}))
    if told is None:
        assert read_teacher(str(path)).classes == ["a", "b"] and read_teacher(str(path)).arrays
        Path(f"{path}.json").write_text(json.dumps({**card, "images": {}}))  # of data of a user's own
        assert (read_teacher(str(path)).mean, read_teacher(str(path)).std) == ((), ())
        return
    with pytest.raises(ValueError, match=f"must be a classifier, and .*net.safetensors {told}"):
        read_teacher(str(path))


def test_a_file_exported_for_other_programs_cannot_teach_and_says_what_can(tmp_path):
    path = tmp_path / "net.timm.safetensors"
    save_file({"patch_embed.proj.bias": torch.zeros(4)}, path)
    Path(f"{path}.json").write_text(json.dumps({"format": "timm", "images": {}}))
    with pytest.raises(ValueError, match=r"exported for other programs \(timm\): give its run, or .*--to safetensors"):
        read_teacher(str(path))


@pytest.fixture(scope="module")
def teacher_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distillation")
    assert (
        main([*FIT, "--trainer.max_epochs=1", "--data.subset=0.3", "--run_dir", str(folder / "teacher"), "--quiet"])
        == 0
    )
    return folder / "teacher"


@pytest.mark.slow
@pytest.mark.rare
def test_a_student_stopped_and_continued_is_the_same_to_the_bit(teacher_run, here, monkeypatch, capsys):
    learn = [*LEARN, f"--model.teacher={teacher_run}", "--model.distill=soft", "--model.drop_path_rate=0.2"]
    assert main([*learn, "--name", "whole"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("from"))
    assert f"teacher {teacher_run} (VisionTransformer, 0." in line
    assert line.endswith("M parameters), soft, 50% of the loss")
    step = Distillation.training_step

    def stop(self, batch, batch_idx):
        if self.trainer.global_step == 15:
            signal.raise_signal(signal.SIGTERM)
        return step(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(Distillation, "training_step", stop)
        assert main([*learn, "--name", "parts"]) == 75
    assert main(["fit", "--resume", "parts"]) == 0
    ours, theirs = (load_file(f"runs/{name}/weights/last.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert main(["test", "parts"]) == 0
    assert json.loads(Path("runs/parts/results.json").read_text())["test"]["n"] == 359


@pytest.mark.rare
@pytest.mark.slow
def test_a_run_does_not_continue_with_another_teacher(teacher_run, here, capsys):
    weights = teacher_run / "weights" / "best.safetensors"
    learn = [*LEARN, f"--model.teacher={weights}", "--data.subset=0.1"]
    assert main([*learn, "--name", "a", "--trainer.max_epochs=1"]) == 0
    before, kept = load_file(weights), weights.read_bytes()
    arguments = json.dumps(torch.load(teacher_run / "checkpoints" / "best.ckpt", weights_only=True)["hyper_parameters"])
    save_file({**before, "head.bias": before["head.bias"] + 1}, weights, {"hyper_parameters": arguments})
    assert main(["fit", "--resume", "a", "--trainer.max_epochs=2"]) == 2
    assert "has other weights than when this run began" in capsys.readouterr().err
    weights.write_bytes(kept)
    assert main(["fit", "--resume", "a", "--trainer.max_epochs=2"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("dry", [[], ["--dry_run"]])
def test_a_teacher_that_does_not_fit_is_refused_in_one_line(teacher_run, here, capsys, dry):
    assert main([*LEARN, f"--model.teacher={teacher_run}", "--data.img_size=16", "--data.mixup=0", *dry]) == 2
    assert "`model.teacher` takes images of 1x8x8, the data has 1x16x16" in capsys.readouterr().err
    assert not list(here.glob("runs/*"))
