"""Whatever state a run directory is in, a command that vitlab itself has printed leads on."""

import json
import os
import re
import shlex
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from vitlab.cli.main import main
from vitlab.data import Digits
from vitlab.runs import lock
from vitlab.runs.directory import RunDir
from vitlab.tasks import Classifier

pytestmark = pytest.mark.slow  # whole runs

CONFIG = str(Path(__file__).parents[2] / "configs" / "vit.yaml")
SMALL = ["--model.depth=1", "--data.subset=0.1", "--trainer.max_epochs=1"]
FIT = ["fit", "--config", CONFIG, "--trainer.logger=false", *SMALL]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory of its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def stop_in(monkeypatch, owner, name, words, number=signal.SIGTERM):
    """Run a command that gets a signal when it first calls a method."""
    usual = getattr(owner, name)

    def signalled(*arguments, **more):
        signal.raise_signal(number)
        return usual(*arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, signalled)
        return main(words)


def stopped_in_setup(monkeypatch, logger):
    words = ["fit", "--config", CONFIG, *SMALL, *(["--trainer.logger=false"] if not logger else []), "--name", "a"]
    assert stop_in(monkeypatch, Digits, "read", words) == 75


SELDOM = pytest.param(False, marks=pytest.mark.rare)


@pytest.mark.parametrize("logger", [SELDOM, True], ids=["alone", "with W&B"])
def test_a_run_is_recorded_before_data_and_loggers_are_touched(here, monkeypatch, capsys, logger):
    seen = {}

    def look(self, part):
        seen.update({p.name: p.read_text() for p in Path("runs/a").iterdir() if p.suffix in (".yaml", ".json")})
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Digits, "read", look)
    words = ["fit", "--config", CONFIG, *SMALL, *(["--trainer.logger=false"] if not logger else []), "--name", "a"]
    assert main(words) == 1
    assert yaml.safe_load(seen["config.yaml"])["trainer"]["max_epochs"] == 1
    record = json.loads(seen["run.json"])
    assert record["status"] == "running" and record["argv"][:2] == ["vitlab", "fit"]
    assert bool(record["wandb_id"]) == logger
    assert json.loads(Path("runs/a/run.json").read_text())["wandb_id"] == record["wandb_id"]


@pytest.mark.parametrize("logger", [SELDOM, True], ids=["alone", "with W&B"])
@pytest.mark.parametrize("way", [["--resume", "a"], [*FIT[1:], "--name", "a", "--auto_resume"]], ids=["resume", "auto"])
def test_a_run_that_a_signal_ended_during_setup_can_be_continued(here, monkeypatch, capsys, logger, way):
    stopped_in_setup(monkeypatch, logger)
    assert (
        "stopped by SIGTERM before the first step; continue with `vitlab fit --resume runs/a`"
        in capsys.readouterr().out
    )
    if logger and way[0] != "--resume":
        way = [word for word in way if "logger" not in word]
    assert main(["fit", *way]) == 0
    assert json.loads(Path("runs/a/run.json").read_text())["status"] == "done"


@pytest.mark.rare
def test_an_attempt_without_wandb_keeps_the_identity_of_the_run(here, monkeypatch):
    stopped_in_setup(monkeypatch, logger=True)
    known = RunDir("runs/a").record["wandb_id"]
    assert stop_in(monkeypatch, Digits, "read", ["fit", "--resume", "a", "--trainer.logger=false"]) == 75
    assert known and RunDir("runs/a").record["wandb_id"] == known


def test_auto_resume_is_one_command_for_start_middle_and_end(here, monkeypatch, capsys):
    words = [*FIT, "--name", "a", "--auto_resume", "--checkpoint.every_n_steps=1"]
    words += ["--trainer.callbacks+=EMA", "--trainer.callbacks.decay=0.9"]  # is not added a second time
    assert main(words) == 0
    first = load_file("runs/a/weights/last.safetensors")
    assert main(words) == 0
    again = load_file("runs/a/weights/last.safetensors")
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert json.loads(Path("runs/a/run.json").read_text())["attempts"] == 2
    assert main([*words, "--trainer.callbacks.decay=0.5"]) == main([*words, "--model.lr=0.5"]) == 2
    assert "model.lr: 0.002 -> 0.5" in capsys.readouterr().err
    assert main([*words, "--trainer.max_epochs=2"]) == 0
    assert {json.loads(line)["epoch"] for line in Path("runs/a/metrics.jsonl").read_text().splitlines()} == {0, 1}


def test_auto_resume_continues_with_the_stored_configuration_if_the_recipe_has_changed(here):
    shutil.copy(CONFIG, "mine.yaml")
    words = ["fit", "--config", "mine.yaml", *FIT[3:], "--name", "a", "--auto_resume"]
    assert main(words) == 0
    Path("mine.yaml").write_text(Path("mine.yaml").read_text().replace("lr: ", "lr: 7"))
    assert main([*words, "--trainer.max_epochs=2"]) == 0
    Path("mine.yaml").unlink()
    assert main([*words, "--trainer.max_epochs=2"]) == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "needs a run: give --name or --run_dir"),
        (["--name", "a", "--overwrite"], "leave one of them out"),
        (["--resume", "a"], "leave out --auto_resume"),
    ],
)
def test_auto_resume_refuses_what_contradicts_it(here, capsys, options, said):
    assert main([*FIT, "--auto_resume", *options]) == 2
    assert said in capsys.readouterr().err and not Path("runs").exists()


def test_a_resumed_start_has_the_weights_that_the_run_was_to_begin_with(here, monkeypatch, capsys):
    assert main([*FIT, "--name", "source"]) == 0
    grid = ",".join(map(str, RunDir("runs/source").model["grid"]))
    words = [*FIT, "--name", "a", "--init_from", "source", "--init_grid", grid]
    assert stop_in(monkeypatch, Digits, "read", words) == 75
    assert RunDir("runs/a").record["init_grid"] == grid
    capsys.readouterr()
    assert main(["fit", "--resume", "a"]) == 0
    assert "init   weights of source" in capsys.readouterr().out
    assert main(["fit", "--resume", "a", "--trainer.max_epochs=2"]) == 0  # from its own checkpoint
    assert "init " not in capsys.readouterr().out


def empty(run):
    shutil.rmtree(run)
    run.mkdir()


def wandb_only(run):
    empty(run)
    (run / "wandb").mkdir()
    (run / "wandb" / "debug.log").write_text("")


def record_only(run):
    empty(run)
    (run / "run.json").write_text('{"status": "preempted"}\n')


def torn_record(run):
    (run / "run.json").write_text('{"status": "run')


def torn_everything(run):
    for name in ("run", "results", "data", "model"):
        (run / f"{name}.json").write_text("\x00\x00\x00")


def torn_config(run):
    (run / "config.yaml").write_text("trainer:\n  max_ep")


def empty_config(run):
    (run / "config.yaml").write_text("")


def no_config(run):
    (run / "config.yaml").unlink()


def no_checkpoints(run):
    shutil.rmtree(run / "checkpoints")


def damaged_checkpoints(run):
    for path in (run / "checkpoints").glob("*.ckpt"):
        path.write_bytes(b"PK torn")


def no_config_no_checkpoints(run):
    no_config(run)
    no_checkpoints(run)


def empty_lock(run):
    (run / ".lock").write_text("")
    os.utime(run / ".lock", (time.time() - 5,) * 2)


def torn_lock(run):
    (run / ".lock").write_text('{"host": "no')
    os.utime(run / ".lock", (time.time() - 5,) * 2)


def lock_of_a_dead_host(run):
    (run / ".lock").write_text(json.dumps({"host": "gone", "pid": 1}))


def foreign_files(run):
    empty(run)
    (run / "thesis.tex").write_text("important")


STATES = [empty, wandb_only, record_only, torn_record, torn_everything, torn_config, empty_config, no_config]
STATES += [no_checkpoints, damaged_checkpoints, no_config_no_checkpoints, empty_lock, torn_lock, lock_of_a_dead_host]
STATES += [foreign_files]
RESUMED = {torn_record, torn_everything, no_checkpoints, empty_lock, torn_lock, lock_of_a_dead_host}
ALIKE = {empty, torn_record, empty_config, no_config_no_checkpoints, torn_lock}  # each to one that is tried often
WAYS = [
    pytest.param(way, state, marks=[pytest.mark.rare] if state in ALIKE else [])
    for way in ("start", "resume")
    for state in STATES
    if way == "start" or state not in RESUMED
]
WAYS += [pytest.param("auto", state, marks=pytest.mark.rare) for state in STATES]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that was stopped after its first epoch."""
    folder = tmp_path_factory.mktemp("trained")
    assert main([*FIT, "--run_dir", str(folder / "a")]) == 0
    return folder / "a"


def advice(said):
    """Return the words that an answer tells the user to type or to add, in their order."""
    told = [shlex.split(text)[1:] for text in re.findall(r"`(vitlab fit [^`]*)`", said)]
    return told + [[word] for word in re.findall(r"--(?:overwrite|auto_resume|name|run_dir)\b", said)]


@pytest.mark.parametrize(("way", "state"), WAYS, ids=lambda value: getattr(value, "__name__", value))
def test_every_state_of_a_run_directory_prints_how_to_continue(here, trained, monkeypatch, capsys, state, way):
    monkeypatch.setattr(lock, "DEAD", 4.0)
    run = Path("runs/a")
    shutil.copytree(trained, run)
    state(run)
    mine = run / "thesis.tex"
    words = {
        "start": [*FIT, "--name", "a"],
        "resume": ["fit", "--resume", "a"],
        "auto": [*FIT, "--name", "a", "--auto_resume"],
    }
    tried = [[*words[way], "--trainer.max_epochs=2"]]
    for attempt in tried:  # grows by what is printed
        code = main(attempt)
        told = capsys.readouterr()
        said = told.out + told.err
        assert code in (0, 2) and "Traceback" not in said, said
        if code == 0:
            assert way != "start" or state not in RESUMED or "--resume" in attempt  # what `--resume a` does is shown
            break
        assert told.err.count("\n") == 1
        for words in advice(said):
            if words[0] == "fit":
                new = [*words, "--trainer.max_epochs=2"]
                new = [str(trained / "config.yaml") if word == "FILE" else word for word in new]
            else:
                new = [*FIT, "--name", "b" if words[0] in ("--name", "--run_dir") else "a", "--trainer.max_epochs=2"]
                new += words if words[0] in ("--overwrite", "--auto_resume") else []
            if new not in tried and len(tried) < 6:
                tried.append(new)
    assert code == 0, f"{state.__name__}: nothing that was printed led on: {said}"
    assert mine.exists() == (state is foreign_files)  # nobody's files are deleted


def during(monkeypatch, act, step):
    """Do something while a run trains."""
    loss = Classifier.train_loss

    def acting(self, outputs, targets):
        if self.trainer.global_step == step:
            act()
        return loss(self, outputs, targets)

    monkeypatch.setattr(Classifier, "train_loss", acting)


@pytest.mark.parametrize("logger", [SELDOM, True], ids=["alone", "with W&B"])
@pytest.mark.parametrize("fate", ["deleted", "moved", "exchanged"])
def test_a_vanished_directory_ends_the_run_with_one_line(here, monkeypatch, capsys, fate, logger):
    def act():
        if fate == "deleted":
            shutil.rmtree("runs/a")
        else:
            Path("runs/a").rename("runs/b")
        if fate == "exchanged":
            Path("runs/a").mkdir()

    words = ["fit", "--config", CONFIG, "--model.depth=1", "--trainer.max_epochs=2", "--trainer.log_every_n_steps=1"]
    with monkeypatch.context() as patch:
        during(patch, act, step=6)
        assert main([*words, *(["--trainer.logger=false"] if not logger else []), "--name", "a"]) == 1
    told = "".join(capsys.readouterr())
    assert f"runs/a {'was replaced' if fate == 'exchanged' else 'disappeared'}" in told and "Traceback" not in told
    assert not Path("runs/a/checkpoints").exists() and not Path("runs/a/metrics.jsonl").exists()
    if fate == "moved":
        assert main(["fit", "--resume", "runs/b"]) == 0
    if fate == "deleted":
        assert main([*words, "--trainer.logger=false", "--name", "a", "--trainer.max_epochs=1", "--auto_resume"]) == 0
