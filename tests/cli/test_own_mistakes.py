"""Mistakes in modules, data and parts of one's own are told in one line."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader

import vitlab
from tests.cli.own import BARS, FACTS, NET, SHORT, VIT, one_line, save_digit
from tests.training import QUIET
from vitlab.cli.main import main
from vitlab.config.parser import VitlabCLI
from vitlab.errors import UsageError, in_own_code
from vitlab.interface import answering
from vitlab.jobs.formats import Plain
from vitlab.jobs.predict import _OwnPreparation
from vitlab.jobs.train.endings import explain_mismatch
from vitlab.jobs.train.facts import model_facts

pytestmark = pytest.mark.usefixtures("userpkg")


class Misspelt(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.layer = nn.Linear(dim, width)  # noqa: F821

    def forward(self, x):
        return self.layer(x)


class Misfit(nn.Module):
    def forward(self, x):
        return x @ torch.zeros(3, 4)


@pytest.mark.parametrize(
    ("part", "told"),
    [
        ("Misspelt", r"test_own_mistakes\.py, line \d+, `self\.layer = .*`: NameError: name 'width' is not defined"),
        ("Misfit", r"fails in or after .*Misfit: .*test_own_mistakes\.py, line \d+, `return x @ .*`: RuntimeError"),
    ],
)
def test_a_mistake_in_a_part_of_ones_own_is_told_with_its_line(part, told, capsys):
    own = [f"--model.mlp_layer={__name__}.{part}", "--trust_imports", __name__]
    assert main(["fit", "--config", "vit", *own, "--dry_run"]) == 2
    said = capsys.readouterr().err
    assert re.search(told, said) and said.count("\n") == 1


def test_a_size_that_data_learn_in_their_setup_is_asked_for_as_one_that_they_lack():
    given: dict[str, Any] = {}
    cli = SimpleNamespace(config=SimpleNamespace(model=SimpleNamespace(class_path="vitlab.tasks.Classifier")))
    cli.given_links = lambda: given
    data = SimpleNamespace(num_classes=None)
    with pytest.raises(UsageError, match=r"does not define `num_classes`: set --model\.num_classes"):
        VitlabCLI._reader(cli, "num_classes")(data)
    given["num_classes"] = 3
    assert VitlabCLI._reader(cli, "num_classes")(data) == 3
    data.num_classes = 10
    assert VitlabCLI._reader(cli, "num_classes")(data) == 10


def test_a_network_may_give_the_side_of_its_images():
    """`self.img_size = 8` in a network of one's own ended `fit` in a traceback."""
    task = L.LightningModule()
    task.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    task.net.img_size, data = 8, SimpleNamespace(img_size=(4, 4), in_chans=1)
    facts = model_facts(task, data)
    assert (facts["img_size"], facts["in_chans"], facts["macs"]) == ([8, 8], 1, 192)
    task.net.img_size, task.net.in_chans, data = (), 0, SimpleNamespace(img_size=(8, 8), in_chans=1)  # any
    assert model_facts(task, data) == facts
    data = SimpleNamespace(img_size=8, in_chans=1, eval_transform=lambda image: torch.zeros(1, *image.size))
    assert _OwnPreparation(data).blank().shape == (1, 8, 8)  # in place of a picture that cannot be read


class Sided(L.LightningModule):
    def __init__(self, img_size: int) -> None:
        super().__init__()


def test_a_network_may_take_the_side_of_its_images():
    cli = SimpleNamespace(config=SimpleNamespace(model=SimpleNamespace(class_path=f"{__name__}.Sided")))
    assert VitlabCLI._reader(cli, "img_size")(SimpleNamespace(img_size=(8, 8))) == 8
    assert VitlabCLI._reader(cli, "img_size")(SimpleNamespace(img_size=8)) == 8
    with pytest.raises(UsageError, match=r"has images of 8 x 6 pixels; Sided takes one int as `img_size`: let it take"):
        VitlabCLI._reader(cli, "img_size")(SimpleNamespace(img_size=(8, 6)))


def test_what_needs_vitlabs_own_classes_is_refused_in_one_line(capsys, monkeypatch):
    assert main(["fit", *NET, *BARS, *SHORT, "--name=own"]) == 0
    capsys.readouterr()
    save_digit(Path("pictures"))
    for words, answer in {
        ("export", "own", "--to=safetensors"): "is for networks of vitlab, got userpkg.net.Net: use --to onnx or pt2",
        ("export", "own", "--to=pt2"): "let userpkg.data.Bars have `img_size` and `in_chans`; see docs/bring_your_own",
        ("predict", "own", "pictures"): "userpkg.data.Bars has no `eval_transform(image)`, which maps a PIL image",
        ("embed", "own", "pictures"): "userpkg.net.Net has no `embed(images)`, which returns features (B, D)",
        ("predict", "own", "picture.png"): "picture.png",
    }.items():
        assert main([*words, "--trust_imports=userpkg"]) == 2
        assert answer in one_line(capsys)
    for name, count in (("one", 64), ("both", 128)):
        assert main(["predict", "own", "--trust_imports=userpkg", f"--output={name}.csv"]) == 0
        rows = Path(f"{name}.csv").read_text().splitlines()
        assert len(rows) == 1 + count and rows[:65] == Path("one.csv").read_text().splitlines()
        both = lambda data: [data.test_dataloader(), data.val_dataloader()]  # noqa: E731
        monkeypatch.setattr("userpkg.data.Bars.predict_dataloader", both)
    assert len(vitlab.Run("own").predict()) == 128
    net, transform = vitlab.load("own", trust_imports=["userpkg"])
    assert net(torch.zeros(1, 1, 8, 8)).shape == (1, 10)
    with pytest.raises(ValueError, match="has no `eval_transform"):
        transform(Image.new("L", (8, 8)))


class Tuples(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Linear(4, 2)

    def forward(self, images):
        return self.layers(images.flatten(1)), None


def test_outputs_other_than_a_tensor_and_a_missing_forward_are_refused_in_one_line():
    with pytest.raises(ValueError, match=r"must return a tensor .B, K., got a tuple: return the outputs alone"):
        Plain(Tuples(), 1, (2, 2))
    with pytest.raises(ValueError, match=r"has neither `forward.images.` nor a `net` with one"):
        answering(L.LightningModule())


WRONG = {
    "loaders of the module alone": (["--model=userpkg.Net"], "missing: --data; a module's own loaders are not used"),
    "a module without a training step": (
        ["--model=userpkg.wrong.NoStep", *BARS],
        "cannot be trained without `training_step`",
    ),
    "hyper-parameters that no checkpoint may hold": (["--model=userpkg.wrong.SavesObject", *BARS], 'ignore=["loss"]'),
    "data with a path that no checkpoint may hold": (
        [*NET, "--data=userpkg.wrong.SavesPath"],
        "userpkg.wrong.SavesPath saves `root`, a PosixPath, as a hyper-parameter",
    ),
    "several outputs": (
        ["--model=userpkg.wrong.Several", *BARS],
        "`forward` of userpkg.wrong.Several must return a tensor (B, K), got a tuple: return the outputs alone",
    ),
    "several outputs by other names": (
        ["--model=userpkg.wrong.Scores", *BARS],
        "got a dict: return the outputs alone, or as `logits`",
    ),
    "several outputs of the network": (
        ["--model=userpkg.wrong.SeveralOfNet", *BARS],
        "`net` of userpkg.wrong.SeveralOfNet must return a tensor (B, K), got a tuple: give the module a `forward",
    ),
    "batches of another form": ([*NET, "--data=userpkg.wrong.Dicts"], "net.py, line"),
    "batches that a task of vitlab does not take": (
        [*VIT, *FACTS, "--data=userpkg.wrong.Dicts"],
        "userpkg.wrong.Dicts for train is {image: tensor (16, 1, 8, 8), label: tensor (16,)}",
    ),
    "two loaders for validation": (
        [*VIT, *FACTS, "--data=userpkg.wrong.TwoLoaders"],
        "Classifier takes one loader for validation, one for tests, and userpkg.wrong.TwoLoaders gives several",
    ),
    "weights that only data of vitlab can give": (
        [*VIT, *FACTS, *BARS, "--model.class_weights=balanced"],
        "vitlab: `class_weights: balanced` needs a data set of vitlab",
    ),
    "data that do not say their size": ([*VIT, *BARS], "Bars does not define `data.img_size`: set --model.img_size"),
    "a position embedding that is none": (
        [*VIT, "--data=Digits", "--model.pos_embed=userpkg.Net"],
        "`model.pos_embed`: userpkg.Net must be a subclass of vitlab.layers.pos_embed.base.PosEmbed",
    ),
    "a metric of another task": (
        [*VIT, "--data=Digits", "--model.metrics=[{class_path: F1Score, init_args: {task: binary}}]"],
        "`model.metrics`: F1Score does not take outputs (B, 10) and class targets",
    ),
    "an argument that no optimizer takes": (
        [*VIT, "--data=Digits", "--model.opt=torch.optim.SGD", "--model.opt.init_args.momentun=0.9"],
        '`model.opt`: torch.optim.sgd.SGD takes no argument `momentun`; did you mean "momentum"?',
    ),
    "a metric whose good end is not known": ([*NET, *BARS, "--checkpoint.monitor=val_acc"], "`checkpoint.mode`"),
}


@pytest.mark.parametrize(("arguments", "answer"), WRONG.values(), ids=WRONG)
def test_a_module_that_cannot_be_trained_is_refused_in_one_line_and_leaves_nothing(arguments, answer, capsys):
    assert main(["fit", *arguments, *SHORT, "--name=wrong", "--trust_imports=userpkg"]) == 2
    assert answer in one_line(capsys)
    assert not Path("runs/wrong").exists()


def test_an_array_in_the_state_of_a_callback_is_refused_at_the_first_save(capsys):
    words = [*NET, *BARS, "--trainer.callbacks+=userpkg.wrong.Counts", *SHORT, "--name=counts"]
    assert main(["fit", *words, "--trust_imports=userpkg"]) == 2
    shown = capsys.readouterr()
    assert (
        "a checkpoint with `callbacks.Counts.seen`, a numpy.ndarray, could not be read again" in shown.out + shown.err
    )
    assert not [*Path("runs/counts/checkpoints").glob("*.ckpt")]


@pytest.mark.parametrize(("model", "says"), [(VIT, "for test is {image: tensor (16, 1, 8, 8)"), (NET, "net.py, line")])
def test_a_batch_that_a_test_does_not_take_is_named_in_one_line(model, says, capsys):
    words = [*model, *FACTS[: None if model is VIT else 0], "--data=userpkg.wrong.OtherTests"]
    assert main(["fit", *words, *SHORT, "--name=other", "--trust_imports=userpkg"]) == 0
    capsys.readouterr()
    assert main(["test", "other", "--trust_imports=userpkg"]) == 2
    assert says in one_line(capsys)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DataLoader worker exited")]
)
def test_a_lack_of_memory_in_own_code_is_no_mistake_of_it(error):
    try:
        raise error  # here, in code that is not vitlab's
    except RuntimeError as raised:
        assert in_own_code(raised) and explain_mismatch(raised, L.LightningModule(), None, "test") is None


class TwoSamples(L.LightningDataModule):
    def __init__(self, *samples):
        super().__init__()
        self.samples = samples

    def train_dataloader(self):
        return DataLoader(self.samples, batch_size=2)

    val_dataloader = train_dataloader


@pytest.mark.parametrize(
    ("sample", "found"),
    [
        (
            (torch.zeros(1, 8, 8), 2),
            r"is \(tensor \(2, 1, 8, 8\), tensor \(2,\)\): IndexError: Target 2 is out of bounds",
        ),
        ((torch.zeros(1, 8, 8).byte(), 1), r"is \(tensor \(2, 1, 8, 8\) uint8, tensor \(2,\)\): RuntimeError"),
        (
            (torch.zeros(1, 8, 8), torch.tensor(1).int()),
            r"tensor \(2,\) int32\): RuntimeError: expected (target|scalar)",
        ),
        ((Image.new("L", (8, 8)), 1), r"for train cannot be loaded: TypeError: default_collate"),
    ],
    ids=["classes from 1", "bytes", "32 bits", "pictures"],
)
def test_a_batch_that_does_not_fit_is_shown_beside_what_the_task_takes(sample, found):
    data, net = TwoSamples(sample, sample), {"img_size": 8, "in_chans": 1, "patch_size": 4, "embed_dim": 8, "depth": 1}
    task = vitlab.Classifier(num_classes=2, num_heads=2, **net)
    with pytest.raises((IndexError, RuntimeError, TypeError)) as raised:
        L.Trainer(**QUIET, max_steps=1).fit(task, data)
    error = raised.value.with_traceback(raised.value.__traceback__.tb_next)  # without this test, code of one's own
    told = explain_mismatch(error, task, data)
    assert (
        "takes batches of images (B, C, H, W), float32, and classes (B,), int64 from 0 to 1, and the first of" in told
    )
    assert re.search(found, told)
