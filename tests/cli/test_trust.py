"""What a foreign file may do, and how it is told."""

import json
import os
import shutil
import stat
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from jsonargparse import Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from PIL import Image

from vitlab import errors
from vitlab.cli.main import main
from vitlab.config.callbacks import redirect_into_run
from vitlab.config.secret import redact, refuse_secrets
from vitlab.config.yaml_files import parse_yaml
from vitlab.data.known import Digits
from vitlab.errors import UsageError
from vitlab.jobs.train.endings import _refuse, explain_exception, explain_mismatch
from vitlab.runs.directory import RunDir
from vitlab.tasks import Classifier

CONFIG = str(Path(__file__).parents[2] / "configs" / "vit.yaml")
FIT = ["fit", "--config", CONFIG, "--trainer.logger=false", "--model.depth=1", "--data.subset=0.1"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run."""
    folder = tmp_path_factory.mktemp("finished")
    assert main([*FIT, "--trainer.max_epochs=1", "--run_dir", str(folder / "a")]) == 0
    return folder / "a"


@pytest.fixture
def run(finished, tmp_path):
    """A copy of it that a test may harm."""
    return Path(shutil.copytree(finished, tmp_path / "a"))


@pytest.mark.parametrize(
    "secret",
    ["github_pat_11ABCDEFG0abcdefghijkl_mnop", "glpat-AbCdEfGhIjKlMnOpQrSt", "sk-proj-AbCdEfGhIjKlMnOpQrStUvWx"],
)
def test_keys_of_well_known_services_are_refused_and_hidden(secret):
    with pytest.raises(UsageError, match=r"`data\.note` looks like a secret"):
        refuse_secrets({"data.note": f"use {secret}"})
    assert redact(f"--note={secret} --x=1") == "--note=*** --x=1"


@pytest.mark.parametrize("value", [{"api_key": "abc"}, [{"deep": {"api_key": "abc"}}], {"a": ["hf_" + "x" * 30]}])
def test_secrets_deep_in_values_are_refused(value):
    with pytest.raises(UsageError, match="looks like a secret"):
        refuse_secrets({"trainer.logger.config": value})
    refuse_secrets({"model.class_token": True, "data.names": ["token", {"class_token": True}]})


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
HOSTILE = {
    "bomb": (BOMB, "aliases expand to more than 100,000 values"),
    "itself": ("a: &a [*a]\n", "aliases expand to more than"),
    "deep": ("a: " + "[" * 5000 + "]" * 5000 + "\n", "nested too deeply"),
    "template": ("a: {{ lr }}\n", "line 1: a key must be a word, got {'lr': None}"),
    "tag": ("a: !!python/object/apply:os.system [ls]\n", "tags are not supported, got"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_yaml_is_one_line_in_bounded_time(tmp_path, capsys, kind):
    text, told = HOSTILE[kind]
    path = tmp_path / "hostile.yaml"
    path.write_text(text)
    start = time.monotonic()
    with pytest.raises(UsageError):
        parse_yaml(text, "here")
    assert time.monotonic() - start < 2
    for words in (["fit", "--config", str(path)], [*FIT, f"--model.lr={text}", "--dry_run"]):
        assert main(words) == 2
        said = capsys.readouterr()
        assert told in said.err and said.err.count("\n") == 1 and "Traceback" not in said.out + said.err


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("t2t-attn", 'there is no key `model.t2t-attn`; did you mean "model.t2t_attn"'),
        ("w\N{CYRILLIC SMALL LETTER A}rmup_epochs", 'did you mean "model.warmup_epochs"'),
        ("warmup_epochs ", "the key `warmup_epochs ` begins or ends with a space"),
    ],
)
def test_a_key_that_looks_like_another_is_named(tmp_path, capsys, key, told):
    content = yaml.safe_load(Path(CONFIG).read_text())
    content["model"]["init_args"][key] = 1
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(content, allow_unicode=True))
    assert main(["fit", "--config", str(tmp_path / "mine.yaml"), "--dry_run"]) == 2
    said = capsys.readouterr().err
    assert told in said and said.count("\n") == 1


ALIGN = "indent it like its neighbors, with spaces"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("model:\n    depth: 2\n  lr: 1\n", f"line 3: its indentation fits no line before it: {ALIGN}"),
        ("  depth: 2\nlr: 1\n", f"line 2: its indentation fits no line before it: {ALIGN}"),
        ("claims:\n  - a > b\n - b > c\n", f"line 3: its indentation fits no line before it: {ALIGN}"),
        ("claims:\n  - a > b\n  lr: 1\n", f"line 3: its indentation fits no line before it: {ALIGN}"),
        ("model:\n  depth: 2\n    lr: 1\n", f"line 3: .* or this one is indented too far: {ALIGN}"),
        ("model\n  depth: 2\n", f"line 2: the line before lacks `: ` after its key, or .*: {ALIGN}"),
        ("name: mine: one\n", "line 1: it has `: ` twice: put quotes around the value"),
        ("model:\n\tdepth: 2\n", f"line 2: it has a tab where only spaces may stand: {ALIGN}"),
        ("a: [1\nb: 2\n", "line 2: a bracket that opens in line 1 is not closed, or a comma is missing"),
        ("a: 'x\nb: 2\n", "line 3: a quote that opens in line 1 is not closed"),
    ],
)
def test_wrong_indentation_is_told_with_the_way_out(text, told):
    with pytest.raises(UsageError, match=f"^`mine.yaml` {told}$"):
        parse_yaml(text, "mine.yaml")


def test_merge_keys_are_read_and_overridden():
    assert parse_yaml("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\n", "here") == {
        "a": {"x": 1, "y": 2},
        "b": {"x": 1, "y": 3},
    }
    for text in ("x: 1\nx: 2\n", "1: 1\n'1': 2\n", "true: 1\nTrue: 2\n"):
        with pytest.raises(UsageError, match="appears twice, in lines 1 and 2"):
            parse_yaml(text, "here")
    assert parse_yaml("day: 2026-11-23", "here") == {"day": "2026-11-23"}


def test_what_was_read_from_yaml_may_be_changed():
    parse_yaml("a: {b: [1]}", "here")["a"]["b"].append(2)
    assert parse_yaml("a: {b: [1]}", "here") == {"a": {"b": [1]}}


def test_every_flipped_bit_of_weights_is_found_or_changes_nothing(run):
    import torch

    from vitlab.models.weights_file import read_weights

    path = run / "weights" / "last.safetensors"
    whole, data = read_weights(path), path.read_bytes()
    silent = 0
    for i in range(200):
        harmed = bytearray(data)
        harmed[i * len(data) // 200] ^= 1 << i % 8
        path.write_bytes(harmed)
        try:
            read = read_weights(path)
        except ValueError:
            continue
        same = all(torch.equal(whole.state_dict[k], read.state_dict[k]) for k in whole.state_dict)
        silent += not same or read.arguments != whole.arguments
    assert silent == 0


def test_verify_names_what_is_damaged(run, capsys):
    assert main(["verify", str(run)]) == 0
    said = capsys.readouterr().out
    assert "whole    weights/last.safetensors" in said and "whole    checkpoints/last.ckpt" in said
    assert said.endswith("none damaged\n")
    for name in ("weights/last.safetensors", "checkpoints/last.ckpt"):
        harmed = bytearray((run / name).read_bytes())
        harmed[-100] ^= 1
        (run / name).unlink()  # best has the same file
        (run / name).write_bytes(harmed)
    (run / "model.json").write_text("{")
    (run / "trained_on.npy").write_bytes((run / "trained_on.npy").read_bytes()[:-100])
    (run / "predictions").mkdir(exist_ok=True)
    (run / "predictions/test.parquet").write_bytes(b"PAR1, then nothing")
    assert main(["verify", str(run)]) == 1
    said = capsys.readouterr().out
    for name in (
        "weights/last.safetensors",
        "checkpoints/last.ckpt",
        "model.json",
        "trained_on.npy",
        "predictions/test.parquet",
    ):
        assert f"DAMAGED  {name}: " in said
    assert "whole    config.yaml" in said and said.endswith("5 damaged\n")


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only to root")
def test_a_read_only_run_is_measured_and_what_was_not_saved_is_reported(run, capsys):
    for path in [run, *run.rglob("*")]:
        path.chmod(path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
    assert main(["validate", str(run)]) == 1  # a script must not believe that it is recorded
    assert "val/acc1" in capsys.readouterr().out


def test_a_result_that_cannot_be_saved_is_printed_all_the_same(run, capsys, monkeypatch):
    from vitlab.jobs import evaluate

    def read_only(*given):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(evaluate, "_write", read_only)
    assert main(["validate", str(run)]) == 1  # a script must not believe that it is recorded
    said = "".join(capsys.readouterr())
    assert "val/acc1" in said and "could not be saved" in said and "Read-only file system" in said


def test_an_analysis_says_at_once_that_its_folder_cannot_be_written(run, capsys):
    (run / "analysis").write_text("a file")
    assert main(["analyze", "cost", str(run)]) == 2
    assert "analysis; choose another folder with --output" in capsys.readouterr().err


@pytest.mark.parametrize("file", ["results.json", "model.json", "config.yaml"])
def test_a_damaged_record_is_one_line_before_the_work(run, capsys, file):
    (run / file).write_text('{"grid": 3, "val": ')
    assert main(["validate", str(run)]) == 2
    said = capsys.readouterr()
    assert f"{file} is damaged" in said.err and said.err.count("\n") == 1


@pytest.mark.parametrize("text", ["", "trainer: {max_epochs: 2}", "data: {init_args: {}}", "data: [1]"])
def test_a_configuration_that_was_cut_off_is_one_line(run, capsys, text):
    (run / "config.yaml").write_text(text)
    assert main(["export", str(run), "--to", "safetensors"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"vitlab: {run}/config.yaml names no class of `data`") and error.count("\n") == 1


def test_a_damaged_configuration_is_one_line_with_and_without_weights(run, capsys):
    (run / "config.yaml").write_text("a: [")
    assert main(["export", str(run), "--to", "safetensors"]) == 2
    assert capsys.readouterr().err.startswith(f"vitlab: {run}/config.yaml is damaged: ")
    for path in (*run.glob("checkpoints/*"), *run.glob("weights/*")):
        path.unlink()
    assert main(["analyze", "cost", str(run)]) == 2
    assert capsys.readouterr().err.startswith(f"vitlab: {run} has no checkpoint any more: the run is done")


def test_a_foreign_profiler_or_callback_writes_nothing_when_a_run_is_measured(run, tmp_path):
    config = yaml.safe_load((run / "config.yaml").read_text())
    outside = tmp_path / "outside"
    profiler = {"dirpath": str(outside), "filename": "authorized_keys"}
    config["trainer"]["profiler"] = {"class_path": "lightning.pytorch.profilers.SimpleProfiler", "init_args": profiler}
    callbacks = [{"class_path": name, "init_args": {"dirpath": str(outside)}} for name in ("ModelCheckpoint",)]
    config["trainer"]["callbacks"] = [*callbacks, {"class_path": "EMA"}]
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert main(["test", str(run)]) == 0
    assert not outside.exists()


def test_loggers_of_a_configuration_write_only_into_the_run(tmp_path):
    def part(path, **arguments):
        return Namespace(class_path=f"lightning.pytorch.{path}", init_args=Namespace(**arguments))

    trainer = Namespace(
        profiler=part("profilers.SimpleProfiler", dirpath="/outside", filename="../authorized_keys"),
        callbacks=[
            part("callbacks.ModelCheckpoint", dirpath="../outside", monitor="val/loss"),
            Namespace(class_path="my.X"),
        ],
        logger=[part("loggers.CSVLogger", save_dir="/", name="../../x", version=None), True],
    )
    trainer.logger[0].dict_kwargs = {"settings": {"root_dir": "/outside"}, "tracking_uri": "file:///outside"}
    redirect_into_run(trainer, tmp_path)
    profiler, callback, logger = trainer.profiler.init_args, trainer.callbacks[0].init_args, trainer.logger[0]
    assert (profiler.dirpath, profiler.filename) == (str(tmp_path / "outside"), "authorized_keys")
    assert (callback.dirpath, callback.monitor) == (str(tmp_path / "outside"), "val/loss")
    assert (logger.init_args.save_dir, logger.init_args.name, logger.init_args.version) == (str(tmp_path), "x", None)
    assert logger.dict_kwargs["settings"]["root_dir"] == str(tmp_path / "outside")
    assert logger.dict_kwargs["tracking_uri"] == f"file:{tmp_path}/mlruns"


EVIL = "\x1b]0;title\x07"


def _harmed(value, name=""):
    if isinstance(value, dict):
        return {key: _harmed(part, key) for key, part in value.items()}
    if isinstance(value, list):
        return [_harmed(part, name) for part in value]
    return value + EVIL if isinstance(value, str) and name not in ("kind", "sha256", "checkpoint", "hash") else value


@pytest.mark.rare
def test_escape_codes_of_a_foreign_run_do_not_reach_the_terminal(run, tmp_path, capsys):
    def harm(folder, *files):
        for file in files:
            path = folder / f"{file}.json"
            path.write_text(json.dumps(_harmed(json.loads(path.read_text()))))

    assert main(["test", str(run), "--quiet"]) == 0
    harm(run, "run", "results")
    (run / "overrides.yaml").write_text(yaml.safe_dump({"model.depth": EVIL}))
    renamed, image = run.rename(tmp_path / f"evil{EVIL}"), tmp_path / f"{EVIL}.png"
    Image.new("L", (8, 8)).save(image)
    run = str(renamed)
    asked = [["results", run], ["verify", run], ["validate", run], ["test", run], ["analyze", "confusion,cost", run]]
    for words in [*asked, ["predict", run, str(image)], ["export", run, "--to=safetensors"]]:
        if words[0] == "predict":  # classes of the data itself are not the run's to change
            harm(renamed, "data")
        capsys.readouterr()
        code, said = main(words), capsys.readouterr()
        assert code == 0 or "the checkpoint has the classes" in said.err, said.err
        assert said.out + said.err and "\x1b" not in said.out + said.err, words


def test_what_a_part_raises_in_a_task_of_vitlab_is_one_line_with_its_place():
    task = Classifier(img_size=8, in_chans=1, num_classes=10, patch_size=4, embed_dim=8, depth=1, num_heads=1)
    try:
        raise RuntimeError("my backward\nis broken")
    except RuntimeError as error:
        line = explain_mismatch(error, task, Digits())
    assert line.startswith(f"{__file__}, line ") and line.endswith("RuntimeError: my backward is broken")


def test_a_resume_after_a_parameter_was_renamed_names_the_keys(tmp_path):
    record, trainer = SimpleNamespace(started=False), SimpleNamespace(global_step=5)
    job = SimpleNamespace(trainer=trainer, run=RunDir(tmp_path), record=record)
    error = RuntimeError('Error(s) in loading state_dict for Net:\n\tMissing key(s) in state_dict: "pos_embed.freqs". ')
    told = r'does not fit the network of the configuration: Missing key\(s\) in state_dict: "pos_embed.freqs"'
    with pytest.raises(UsageError, match=told):
        _refuse(job, error)


def test_a_proposed_command_trusts_the_classes_of_its_own_run(tmp_path, monkeypatch):
    monkeypatch.setattr(errors, "TRUSTED", ["mine", "runs/ablations/a/parts.py", "runs/ablations/a/parts.py"])
    assert errors.trusting("vitlab test a", tmp_path).endswith(" --trust_imports mine,runs/ablations/a/parts.py")
    (tmp_path / "parts.py").touch()
    assert errors.trusting("vitlab test a", tmp_path) == f"vitlab test a --trust_imports mine,{tmp_path}/parts.py"


def test_only_running_out_of_memory_is_reported_as_such(tmp_path):
    run = RunDir(tmp_path)
    for error in (
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
        RuntimeError("unable to mmap: Cannot allocate memory (12)"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried"),
    ):
        told = str(explain_exception(error, run, 64, 1))
        assert told.startswith("out of memory with data.batch_size=64, 64 in each process; lower `data.batch_size`")
    assert explain_exception(RuntimeError("cannot allocate a task to this worker"), run, 64, 1) is None


def test_a_metric_that_a_schedule_or_early_stopping_waits_for_in_vain_is_told_in_a_line(tmp_path):
    for kind, who in ((RuntimeError, "Early stopping"), (MisconfigurationException, "ReduceLROnPlateau")):
        told = f"{who} conditioned on metric `val/nope` which is not available."
        assert explain_exception(kind(told), RunDir(tmp_path), 64, 1) == told


SHARED = "unable to allocate shared memory(shm) for file </torch_1_2_0>: No space left on device (28)"
BUS = "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers are out of..."
KILLED = "DataLoader worker (pid 7) is killed by signal: Killed. "
RAISED = "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback ...\nRuntimeError: "


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (RAISED + SHARED, "shared memory (/dev/shm), through which the loader's processes pass batches, is full"),
        (BUS, "shared memory (/dev/shm)"),
        (KILLED, "DataLoader worker (pid 7) is killed by signal: Killed: out of memory, or hanging"),
        (RAISED + "The size of tensor a must match", None),  # the user's own code: its traceback is shown
    ],
)
def test_a_lost_loader_is_told_apart_from_an_error_raised_in_it(said, line, tmp_path, monkeypatch, capsys):
    def fail(args):
        raise RuntimeError(said)

    told = explain_exception(RuntimeError(said), RunDir(tmp_path), 64, 1)
    monkeypatch.setattr("vitlab.cli.evaluate.test", fail)
    if line is None:
        assert told is None
        with pytest.raises(RuntimeError):
            main(["test", "a"])
    else:
        assert told and told.startswith(line) and "(--data.num_workers), then `vitlab fit --resume" in told
        assert main(["test", "a"]) == 1 and capsys.readouterr().err.startswith(f"vitlab: {line}")


@pytest.mark.parametrize(("number", "first"), [(28, "Make room"), (5, "See that"), (116, "See that")])
def test_a_disk_that_fails_is_not_called_full(tmp_path, number, first):
    """Before, EIO and EACCES asked to make room, and ESTALE had no line with the way on."""
    said = explain_exception(OSError(number, os.strerror(number), "runs/a/data.json"), RunDir(tmp_path), 64, 1)
    assert said and said.startswith(f"runs/a/data.json: {os.strerror(number)}; ") and f"intact. {first}" in said
    assert said.endswith(f"`vitlab fit --resume {tmp_path}`")
