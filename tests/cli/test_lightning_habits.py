"""What people who know LightningCLI type: it works and shows, or one line names the way out."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from PIL import Image

from vitlab.callbacks.checkpoint import Checkpoint
from vitlab.callbacks.quality import FeatureQuality
from vitlab.cli.main import main
from vitlab.config.callbacks import check_monitors
from vitlab.config.environment import with_environment
from vitlab.errors import UsageError
from vitlab.jobs.train.close import divergence
from vitlab.tasks import Classifier

pytestmark = pytest.mark.usefixtures("here")
TINY = ["--model=Classifier", "--model.patch_size=4", "--model.embed_dim=8", "--model.depth=1", "--model.num_heads=2"]
FIT = ["fit", *TINY, "--data=Digits", "--data.subset=0.2", "--trainer.accelerator=cpu", "--trainer.max_epochs=1"]


def one_line(capsys):
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert not Path("runs").exists()
    return told.err


STOP = ["--trainer.callbacks+=EarlyStopping"]
REFUSED = [
    (["--trainer.callbacks+=LearningRateFinder"], "set `model.lr`"),
    (["--trainer.callbacks+=BatchSizeFinder"], "set `data.batch_size`"),
    (["--trainer.callbacks+=StochasticWeightAveraging", "--trainer.callbacks.swa_lrs=0.1"], "callbacks+=EMA"),
    (
        ["--trainer.callbacks+=EMA", "--trainer.callbacks+=EMAWeightAveraging"],
        "two averages of the weights, EMA and EMAW",
    ),
    (["--trainer.callbacks+=RichProgressBar"], "beside the bar and the table of epochs"),
    (["--trainer.callbacks+=BackboneFinetuning"], "--model=LinearProbe trains the head alone"),
    (["--trainer.barebones=true"], "`vitlab bench model` measures speed"),
    (["--trainer.plugins=AsyncCheckpointIO"], "leave it out"),
    (["--trainer.logger=CSVLoger"], 'did you mean "CSVLogger"?'),
    ([*STOP, "--trainer.callbacks.monitor=val/acc1"], "which is Lightning's default: set `mode: max`"),
    (
        [*STOP, "--trainer.callbacks.monitor=val/loss", "--trainer.limit_val_batches=0"],
        "`trainer.limit_val_batches=0` leaves out validation, got val/loss: leave one of them out",
    ),
]


@pytest.mark.parametrize(("words", "way_out"), REFUSED, ids=[words[-1] for words, _ in REFUSED])
def test_what_a_run_directory_cannot_record_is_refused_with_an_alternative(words, way_out, capsys):
    assert main([*FIT, *words]) == 2
    assert way_out in one_line(capsys)


@pytest.mark.parametrize("cls", [EarlyStopping, ModelCheckpoint])
def test_a_callback_that_takes_the_lowest_accuracy_for_the_best_is_refused(cls):
    task = Classifier(num_classes=10, img_size=8, in_chans=1, patch_size=4, embed_dim=8, depth=1, num_heads=2)
    quality = FeatureQuality(measures=["knn"])
    for metric in ("val/acc1", "val/knn"):
        with pytest.raises(UsageError, match=rf"`mode` of `{cls.__name__}` must be max for {metric}, .*got min"):
            check_monitors(SimpleNamespace(callbacks=[quality, cls(monitor=metric)]), task)
    known = [cls(monitor="val/acc1", mode="max"), cls(monitor="val/loss"), cls(monitor="val/other"), Checkpoint()]
    check_monitors(SimpleNamespace(callbacks=known, limit_val_batches=1.0), task)


def test_a_logger_that_is_not_installed_is_named_in_one_line(capsys, monkeypatch):
    for name in ("_TENSORBOARD_AVAILABLE", "_TENSORBOARDX_AVAILABLE"):
        monkeypatch.setattr(f"lightning.fabric.loggers.tensorboard.{name}", False)
    assert main([*FIT, "--trainer.logger=TensorBoardLogger"]) == 2
    assert "Neither `tensorboard` nor `tensorboardX` is available" in one_line(capsys)


def test_loggers_monitors_profilers_and_early_stopping_work_by_name_and_are_shown(capsys):
    pytest.importorskip("psutil", reason="DeviceStatsMonitor needs it")
    callbacks = [
        "LearningRateMonitor",
        "DeviceStatsMonitor",
        "ModelSummary",
        "Timer",
        "ModelCheckpoint",
        "EarlyStopping",
    ]
    words = [*FIT, "--name=all", "--trainer.max_epochs=9", "--trainer.check_val_every_n_epoch=2"]
    words += ["--trainer.log_every_n_steps=1", "--trainer.logger=[CSVLogger, TensorBoardLogger]"]
    words += [*(f"--trainer.callbacks+={name}" for name in callbacks), "--trainer.callbacks.monitor=val/loss"]
    words += ["--trainer.callbacks.min_delta=9", "--trainer.callbacks.patience=1", "--trainer.profiler=advanced"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    logs = Path("runs/all/lightning_logs")
    (table,) = logs.glob("*/metrics.csv")
    assert {"train/loss", "val/acc1"} < set(table.read_text().splitlines()[0].split(","))
    assert (
        "lr-AdamW" in table.read_text() and "DeviceStatsMonitor.on_train_batch_start/cpu_percent" in table.read_text()
    )
    assert list(logs.glob("*/events.out.tfevents*")) and list(logs.glob("*/checkpoints/*.ckpt"))
    assert "Trainable params" in shown
    assert "FIT Profiler Report" in shown and "more lines are in train.log" in shown
    assert "Profile stats for: run_training_epoch" in Path("runs/all/train.log").read_text()
    assert ["val/loss" in line for line in shown.splitlines() if line.startswith("epoch ")] == [False, True] * 2
    assert "end   early stop: val/loss has not improved since epoch 2 (2." in shown
    assert json.loads(Path("runs/all/run.json").read_text())["ending"]["why"] == "early stop"


def printed(capsys, words):
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_print_config_prints_what_would_run_wherever_it_is_typed(capsys):
    Path("mine.yaml").write_text("trainer: {log_every_n_steps: 5}\n")
    words = [*FIT[1:], "--config=mine.yaml", "--model.pos_embed=rope2d"]
    last = printed(capsys, ["fit", *words, "--print_config"])
    assert last["model"]["init_args"]["pos_embed"] == "rope2d"
    assert last["trainer"]["log_every_n_steps"] == 5
    assert printed(capsys, ["fit", "--print_config", *words]) == last


MERGED = """
model: {class_path: Classifier}
data: {class_path: Digits}
trainer:
  callbacks:
  - {class_path: RichModelSummary, init_args: &base {max_depth: 3}}
  - {class_path: ModelSummary, init_args: {<<: *base}}
  - {class_path: ModelSummary, init_args: {max_depth: 5, <<: *base}}
"""


def test_explicit_keys_override_merge_keys_of_yaml(capsys):
    Path("mine.yaml").write_text(MERGED)
    found = printed(capsys, ["fit", "--config=mine.yaml", "--print_config"])["trainer"]["callbacks"]
    assert [one["init_args"]["max_depth"] for one in found] == [3, 3, 5]


def test_files_and_flags_override_environment_variables(monkeypatch):
    Path("mine.yaml").write_text("model: {init_args: {lr: 0.1}}\ntrainer: {max_epochs: 5}\n")
    values = {
        "PL_TRAINER__MAX_EPOCHS": "3",  # the file says it
        "PL_FIT__TRAINER__PRECISION": "bf16-mixed",
        "PL_MODEL": "Classifier",
        "PL_MODEL__INIT_ARGS__LR": "9",  # the file says it
        "PL_MODEL__DEPTH": "2",
        "PL_DATA": "Digits",  # a word says it
        "PL_SEED_EVERYTHING": "4",
        "PL_GLOBAL_SEED": "5",  # Lightning's own
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    words = ["--data=CIFAR10", "--config=mine.yaml"]
    used = ["--model=Classifier", "--model.depth=2", "--seed_everything=4"]
    assert with_environment(words)[0] == [*words, *used, "--trainer.precision=bf16-mixed"]
    monkeypatch.setenv("PL_CONFIG", "other.yaml")
    Path("other.yaml").write_text("trainer: {precision: 32-true}\n")
    assert with_environment(words)[0] == ["--config=other.yaml", *words, *used]


def test_an_environment_variable_without_effect_is_reported(monkeypatch):
    Path("mine.yaml").write_text("trainer: {max_epochs: 5}\n")
    monkeypatch.setenv("PL_TRAINER__MAX_EPOCHS", "3")
    monkeypatch.setenv("PL_TRAINER_PRECISION", "bf16-mixed")
    monkeypatch.setenv("PL_MODEL__DEPTH", "2")
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")
    words, told = with_environment(["--config=mine.yaml"])
    assert words == ["--config=mine.yaml", "--model.depth=2"]
    assert told == [
        "PL_TRAINER_PRECISION is not read: two underscores stand for a dot, as in PL_TRAINER__MAX_EPOCHS",
        "PL_TRAINER__MAX_EPOCHS is not used: a config file or the command line sets trainer.max_epochs",
    ]
    words, told = with_environment([], resumed=True)
    assert not words and len(told) == 3


def test_a_device_that_is_missing_names_the_way_out(capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    for device in ("gpu", "cuda"):
        assert main([*FIT, "--dry_run", f"--trainer.accelerator={device}"]) == 2
        assert "use auto, which takes what there is, or cpu" in capsys.readouterr().err


def test_an_exploding_loss_is_remarked_on(capsys):
    short = ["--trainer.logger=false", "--data.batch_size=32"]
    assert main([*FIT, *short, "--model.lr=20", "--model.warmup_epochs=0", "--name=wild"]) == 0
    assert "the loss exploded: val/loss" in (out := capsys.readouterr().out)
    assert "against 2.3 of guessing; model.lr=20 may be too large" in out
    assert main([*FIT, *short, "--name=calm"]) == 0
    assert "exploded" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["val/loss", "train/loss"])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"loss": "bce"},
        {"loss": "bce", "targets": {"kind": "multilabel"}, "label_smoothing": 0.0},
        {"class_weights": [1.0] * 11 + [9.0]},
    ],
    ids=str,
)
def test_an_exploded_loss_is_compared_with_that_of_equal_logits(arguments, name):
    size = {"img_size": 8, "in_chans": 1, "patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 1}
    task = Classifier(num_classes=12, **size, **arguments)
    labels = torch.eye(12) if "targets" in arguments else torch.arange(12)
    loss = (task.eval_loss if name == "val/loss" else task.train_loss)(torch.zeros(12, 12), labels)
    rows = [{name: 50.0}, {name: 999.0}]
    job: Any = SimpleNamespace(task=task, data=SimpleNamespace(num_classes=12), run=SimpleNamespace(rows=lambda: rows))
    weighted = "class_weights" in arguments and name == "train/loss"  # which depends on the images
    against = "50 of the start" if weighted else f"{loss:.3g} of guessing"
    assert divergence(job)[0].startswith(f"note  the loss exploded: {name} 999 against {against}")


@pytest.mark.parametrize(
    ("method", "name"),
    [(m, "val/loss") for m in ("eval_loss", "validation_step")]
    + [(m, "train/loss") for m in ("train_loss", "step_loss", "training_step")],
)
def test_a_loss_of_ones_own_is_compared_with_the_first_one(method, name):
    size = {"img_size": 8, "in_chans": 1, "patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 1}
    task = type("Own", (Classifier,), {method: lambda *given: None})(num_classes=12, **size)

    def told(last):
        run = SimpleNamespace(rows=lambda: [{name: 50.0}, {name: last}])
        return divergence(SimpleNamespace(task=task, data=SimpleNamespace(num_classes=12), run=run))

    assert told(49.0) == []
    assert told(999.0)[0].startswith(f"note  the loss exploded: {name} 999 against 50 of the start")


def test_a_run_takes_its_values_from_the_environment(monkeypatch, capsys):
    monkeypatch.setenv("PL_TRAINER__PRECISION", "bf16-true")
    monkeypatch.setenv("PL_DATA__BATCH_SIZE", "7")
    assert main([*FIT, "--dry_run"]) == 0
    assert "batch 7," in (out := capsys.readouterr().out) and "precision bf16-true" in out


PLUGINS = [
    "lightning.pytorch.plugins.environments.LightningEnvironment",
    "lightning.fabric.plugins.environments.SLURMEnvironment",
    "{class_path: MixedPrecision, init_args: {precision: bf16-mixed, device: cpu}}",
    "lightning.fabric.plugins.io.TorchCheckpointIO",
]


def test_plugins_and_environments_of_lightning_and_fabric_can_be_named(capsys):
    for name in PLUGINS:
        assert printed(capsys, [*FIT, f"--trainer.plugins={name}", "--print_config"])["trainer"]["plugins"]


def test_a_configuration_and_a_checkpoint_are_measured_like_their_run(capsys):
    Path("mine.yaml").write_text(yaml.safe_dump(printed(capsys, [*FIT, "--print_config"])))
    assert main(["fit", "--config=mine.yaml", "--name=a"]) == 0
    kept = Path("runs/a/checkpoints/last.ckpt").rename("kept.ckpt")
    lines = []
    for words in (["a", "--ckpt_path=best"], ["--config=mine.yaml", f"--ckpt_path={kept}"]):
        capsys.readouterr()
        assert main(["test", *words]) == 0
        lines.append(capsys.readouterr().out.splitlines()[0])
    assert lines[0] == lines[1]
    results = Path("runs/a/results.json").read_text()
    Path("digits").mkdir()
    Image.new("L", (8, 8), 128).save("digits/a.png")
    assert main(["predict", "--config=mine.yaml", f"--ckpt_path={kept}", "digits"]) == 0
    assert "mine.yaml and kept.ckpt; not saved in a run" in capsys.readouterr().out
    Path("mine.yaml").write_text(Path("mine.yaml").read_text().replace("embed_dim: 8", "embed_dim: 16"))
    for words, answer in (
        (["--config=mine.yaml", f"--ckpt_path={kept}"], "kept.ckpt does not fit the network of the configuration: "),
        ([f"--ckpt_path={kept}"], "; give its configuration too: --config FILE --ckpt_path FILE"),
        (["--config=mine.yaml"], "give a RUN, or --config FILE with --ckpt_path FILE"),
        (["a", "--config=mine.yaml"], "and no RUN"),
        (["--config=mine.yaml", "--ckpt_path=gone"], "there is no file gone"),
    ):
        capsys.readouterr()
        assert main(["test", *words]) == 2
        assert answer in (told := capsys.readouterr().err) and told.count("\n") == 1
    assert Path("runs/a/results.json").read_text() == results
