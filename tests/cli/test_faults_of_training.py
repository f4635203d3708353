import errno
import json
import logging
import multiprocessing
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.callbacks.checkpoint import Checkpoint
from vitlab.cli.main import main
from vitlab.errors import Diverged, RunFailed
from vitlab.jobs.terminal import close_log, log_to
from vitlab.jobs.train.endings import explained
from vitlab.jobs.train.facts import promises
from vitlab.runs.directory import RunDir
from vitlab.runs.generations import NotSaved
from vitlab.tasks import Classifier

CONFIG = [f"--config={Path(__file__).parents[2] / 'configs/vit.yaml'}", "--model.depth=1", "--trainer.logger=false"]
FIT = ["fit", *CONFIG, "--trainer.max_epochs=3", "--data.batch_size=32"]
SHORT = [*FIT, "--data.subset=0.3"]  # ten steps an epoch


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_samples(here, capsys, monkeypatch):
    loss = Classifier.train_loss

    def broken(self, outputs, targets):
        factor = float("nan") if self.trainer.global_step == 15 else 1.0  # the sixth batch of the second epoch
        return loss(self, outputs, targets) * factor

    monkeypatch.setattr(Classifier, "train_loss", broken)
    assert main([*SHORT, "--name", "nan"]) == 1
    out = capsys.readouterr().out
    assert "the loss is not finite in epoch 2, batch 6" in out
    assert re.search(r"; training samples (\d+, ){7}\d+ and 24 more; ", out)
    assert "lr 0.00" in out
    assert "in the step before" in out
    run = here / "runs" / "nan"
    assert json.loads((run / "run.json").read_text())["status"] == "failed"
    state = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    assert state["epoch"] == 0
    assert all(torch.isfinite(v).all() for v in state["state_dict"].values())


@pytest.mark.parametrize("opt", ["adamw", "sgd", "lamb", "muon"])
def test_a_step_that_is_not_finite_can_be_skipped(here, monkeypatch, opt):
    loss, weights = Classifier.train_loss, {}

    def broken(self, outputs, targets):
        weights[self.trainer.global_step] = self.net.head.weight.detach().clone()
        return loss(self, outputs, targets) * (float("nan") if self.trainer.global_step in (5, 8) else 1.0)

    monkeypatch.setattr(Classifier, "train_loss", broken)
    skip = ["--model.nan_loss=skip", f"--model.opt={opt}", "--trainer.max_epochs=1"]
    assert main([*SHORT, *skip, "--name", "skip", "--trainer.log_every_n_steps=1"]) == 0
    same = [step for step in range(9) if torch.equal(weights[step], weights[step + 1])]
    assert same in ([5, 8], [0, 5, 8])  # the first step of a warm-up may be too small to see
    rows = [json.loads(line) for line in (here / "runs/skip/metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "train/loss" in row]
    assert all(torch.isfinite(torch.tensor(row["train/loss"])) for row in trained)


def test_a_run_whose_every_loss_is_not_finite_stops_all_the_same(here, monkeypatch, capsys):
    monkeypatch.setattr(Classifier, "train_loss", lambda self, outputs, targets: outputs.sum() * float("nan"))
    assert main([*FIT, "--model.nan_loss=skip", "--name", "all"]) == 1
    assert "the loss is not finite in epoch 1, batch 11, near step 20" in capsys.readouterr().out


def test_each_row_has_speed_time_left_and_gradient_norm(here):
    assert main([*SHORT, "--name", "rows", "--trainer.gradient_clip_val=null", "--trainer.log_every_n_steps=4"]) == 0
    rows = [json.loads(line) for line in (here / "runs/rows/metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "train/loss" in row]
    assert len(trained) == 3 * 3
    for row in trained:
        assert row["images_per_second"] > 0
        assert 0 <= row["data_wait"] < 1
        assert row["grad_norm"] > 0
        assert "mfu" not in row  # of a CPU the peak is not known
    assert len({row["grad_norm"] for row in trained}) == len(trained)
    assert trained[0]["seconds_left"] > trained[-1]["seconds_left"] == 0


def test_weights_that_are_not_finite_are_never_saved(here, monkeypatch, capsys):
    def spoil(self, trainer, task):
        if trainer.current_epoch == 1:
            task.net.head.weight.data[0, 0] = float("inf")
        end(self, trainer, task)

    end = Checkpoint.on_train_epoch_end
    monkeypatch.setattr(Checkpoint, "on_train_epoch_end", spoil)
    assert main([*SHORT, "--name", "inf"]) == 1
    assert "the weights are not finite (first: net.head.weight)" in capsys.readouterr().out
    assert torch.load(here / "runs/inf/checkpoints/last.ckpt", weights_only=True)["epoch"] == 0


def test_running_out_of_memory_names_the_ways_out(here, monkeypatch, capsys):
    def full(self, outputs, targets):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Classifier, "train_loss", full)
    assert main([*FIT, "--name", "full"]) == 1
    assert (
        "out of GPU memory with data.batch_size=32, 32 on each GPU; lower `data.batch_size`" in capsys.readouterr().out
    )


def test_a_disk_that_fills_up_stops_the_run_and_leaves_what_was_saved(here, monkeypatch, capsys):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(self, trainer, task):
        if trainer.current_epoch == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        end(self, trainer, task)

    end = Checkpoint.on_train_epoch_end
    monkeypatch.setattr(Checkpoint, "on_train_epoch_end", fill)
    try:
        assert main([*SHORT, "--name", "disk"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    out = capsys.readouterr().out
    assert "the checkpoint could not be written into runs/disk/checkpoints: File too large; it needs" in out
    assert "vitlab fit --resume runs/disk" in out
    run = here / "runs" / "disk"
    assert json.loads((run / "run.json").read_text())["status"] == "failed"
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["best.ckpt", "last.ckpt", "manifest.json"]
    monkeypatch.setattr(Checkpoint, "on_train_epoch_end", end)
    assert main(["fit", "--resume", "disk"]) == 0
    assert torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["epoch"] == 2


def test_resume_and_test_skip_a_damaged_last_checkpoint(here, capsys):
    assert main([*FIT, "--name", "torn", "--data.subset=0.1"]) == 0
    folder = here / "runs" / "torn" / "checkpoints"
    for name in ("last", "best"):
        data = bytearray((folder / f"{name}.ckpt").read_bytes())
        data[len(data) // 2] ^= 1
        (folder / f"{name}.ckpt").unlink()
        (folder / f"{name}.ckpt").write_bytes(data)
    capsys.readouterr()
    assert main(["test", "torn"]) == 0
    told = capsys.readouterr()
    assert "best.ckpt is damaged" in told.out + told.err
    assert main(["test", "runs/torn/checkpoints/last.ckpt"]) == 2
    assert "previous.ckpt is intact" in capsys.readouterr().err
    assert main(["fit", "--resume", "torn", "--trainer.max_epochs=4"]) == 0
    told = capsys.readouterr()
    assert "last.ckpt is damaged" in told.out + told.err
    assert "using runs/torn/checkpoints/previous.ckpt instead" in told.out + told.err


def test_a_file_that_a_library_briefly_cannot_see_is_reported_like_any_unreadable_one(here, capsys, monkeypatch):
    assert main([*FIT, "--name", "a", "--data.subset=0.1", "--trainer.max_epochs=1"]) == 0
    capsys.readouterr()
    real = os.stat

    def fails_in(caller):
        def stat(path, **more):
            first = frame = sys._getframe(1)
            while frame is not None and caller not in frame.f_code.co_filename:
                frame = frame.f_back
            asks = any(word in first.f_code.co_filename for word in ("genericpath", "fsspec"))  # whether it is there
            if frame is not None and asks and "runs/a/c" in str(path):
                raise OSError(errno.EIO, "Input/output error", path)
            return real(path, **more)

        return stat

    for words, caller, file in (
        (["test", "a"], "/torch_io.py", "checkpoints/best.ckpt"),
        (["fit", "--resume", "a", "--trainer.max_epochs=2", "--quiet"], "/torch_io.py", "checkpoints/last.ckpt"),
        (["test", "a"], "jsonargparse/_paths.py", "config.yaml"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(os, "stat", fails_in(caller))
            assert main(words) in (1, 2), words
        told = capsys.readouterr().err
        assert told.startswith("vitlab: ") and told.count("\n") == 1
        assert f"runs/a/{file}: it cannot be opened now" in told
    assert main(["test", "a"]) == 0


def test_two_runs_do_not_share_a_directory(here, capsys):
    from vitlab.runs.directory import RunDir
    from vitlab.runs.run_lock import locked

    with locked(RunDir(here / "runs" / "mine")):
        assert main([*FIT, "--name", "mine"]) == 2
        assert f"process {os.getpid()} on " in capsys.readouterr().err
    assert not (here / "runs" / "mine").exists()
    (here / "runs" / "mine").mkdir()
    (here / "runs" / "mine" / ".lock").write_text(json.dumps({"host": socket.gethostname(), "pid": 2**22 + 1}))
    assert main([*FIT, "--name", "mine", "--data.subset=0.1", "--trainer.max_epochs=1"]) == 0
    with locked(RunDir(here / "runs" / "mine")):
        assert main(["fit", "--resume", "mine"]) == 2
        assert main([*FIT, "--name", "mine", "--overwrite"]) == 2
        assert "is training in runs/mine" in capsys.readouterr().err
        assert (here / "runs" / "mine" / "config.yaml").exists()


@pytest.mark.parametrize(("ratio", "kept"), [(None, "any number of processes"), (object(), "as many processes")])
@pytest.mark.parametrize(
    ("precision", "weights"), [("32-true", "bit-identical with 2 processes, "), ("bf16-mixed", "close, not bit-")]
)
def test_bits_are_promised_in_32_and_native_sizes_for_as_many_processes_alone(ratio, kept, precision, weights):
    device = {"strategy": SimpleNamespace(root_device=torch.device("cpu")), "precision": precision, "world_size": 2}
    trainer = SimpleNamespace(datamodule=SimpleNamespace(pipeline=SimpleNamespace(own_ratio=ratio)), **device)
    promised = promises(trainer)
    assert f"for {kept}" in promised["samples"] and promised["weights"].startswith(weights)


@pytest.fixture
def photos(here, monkeypatch):
    """Arguments of a run on 24 small photos in two classes."""
    monkeypatch.setenv("VITLAB_CACHE", str(here / "cache"))
    for name in ("cat", "dog"):
        (here / "photos" / name).mkdir(parents=True)
        for i in range(12):
            Image.fromarray(np.full((20 + i, 20, 3), 10 * i, np.uint8)).save(here / "photos" / name / f"{i}.png")
    words = ["fit", *CONFIG, "--trainer.max_epochs=2", "--name", "photos"]
    return [*words, "--data=ImageFolder", "--data.root=photos", "--data.img_size=8", "--data.batch_size=4"]


def during(monkeypatch, act, step=1):
    """Do something to a run while it trains."""
    loss = Classifier.train_loss

    def acting(self, outputs, targets):
        if self.trainer.global_step == step:
            act()
        return loss(self, outputs, targets)

    monkeypatch.setattr(Classifier, "train_loss", acting)


@pytest.mark.parametrize("allowed", [0, 24])
def test_files_that_vanish_are_named_and_counted(here, photos, monkeypatch, capsys, allowed):
    vanished = sorted((here / "photos" / "cat").iterdir())
    during(monkeypatch, lambda: [path.unlink(missing_ok=True) for path in vanished])
    code = main([*photos, "--data.num_workers=0", f"--data.max_unreadable={allowed}"])
    out = capsys.readouterr().out
    if allowed:
        assert code == 0
        unreadable = json.loads((here / "runs" / "photos" / "data.json").read_text())["unreadable"]
        assert unreadable
        assert all(Path(name).parent.name == "cat" and "No such file" in why for name, why in unreadable.items())
    else:
        assert code == 1
        assert "photos/cat/" in out and "No such file or directory; 1 unreadable" in out
        assert "--data.max_unreadable" in out
        assert json.loads((here / "runs" / "photos" / "run.json").read_text())["status"] == "failed"


def test_a_run_goes_on_once_a_file_that_has_become_unreadable_is_repaired(here, photos, monkeypatch, capsys):
    kept = {path: path.read_bytes() for path in Path("photos/cat").iterdir()}
    with monkeypatch.context() as patch:
        during(patch, lambda: [path.write_bytes(b"cut") for path in kept], step=2)
        assert main([*photos, "--data.num_workers=0", "--checkpoint.every_n_steps=1"]) == 1
    said = capsys.readouterr().out
    assert "repair the file, then `vitlab fit --resume" in said and "only a new run can leave it out" in said
    for path, content in kept.items():
        path.write_bytes(content)
    assert main(["fit", "--resume", "photos"]) == 0


@pytest.mark.rare  # torch raises wherever this process is when it learns of a worker's death, in another test even
def test_a_killed_data_worker_ends_the_run_with_one_line(here, photos, monkeypatch, capsys):
    others = set(multiprocessing.active_children())  # of tests before

    def kill():
        for worker in set(multiprocessing.active_children()) - others:
            os.kill(worker.pid, signal.SIGKILL)

    during(monkeypatch, kill)
    assert main([*photos, "--data.num_workers=1"]) == 1
    assert "Use fewer workers (--data.num_workers), then `vitlab fit --resume" in capsys.readouterr().out


@pytest.mark.rare
def test_parameters_whose_gradients_ddp_waits_for_are_named_once(here):
    (here / "unused.py").write_text(
        "import torch\nfrom vitlab import PosEmbed\n\n\nclass Gain(PosEmbed):\n    def __init__(self, grid_size):\n"
        "        super().__init__(grid_size)\n        self.gain = torch.nn.Parameter(torch.ones(()))\n"
    )
    own = ["--model.pos_embed=unused.Gain", "--trust_imports=unused", "--trainer.devices=2", "--trainer.max_epochs=1"]
    line = [sys.executable, "-m", "vitlab", "fit", "--config", "vit", "--trainer.logger=false", *own]
    done = subprocess.run(line, cwd=here, capture_output=True, text=True, timeout=200)
    said = done.stdout + done.stderr
    assert done.returncode == 1 and "Traceback" not in said, said
    assert said.count("the loss does not depend on net.pos_embed.gain, and DDP waits") == 1, said


@pytest.mark.parametrize("error", [Diverged("the loss is not finite"), NotSaved("a full disk")])
def test_of_several_processes_the_first_says_what_all_have_found(error, tmp_path, monkeypatch):
    """Each said it, and on as many devices it stood there as often."""
    said = []
    monkeypatch.setattr("vitlab.jobs.train.endings.print_error", said.append)
    for is_first in (True, False):
        trainer = SimpleNamespace(is_global_zero=is_first, world_size=2, global_step=3)
        job = SimpleNamespace(run=RunDir(tmp_path), batch=None, trainer=trainer)
        with pytest.raises(RunFailed), explained(job):
            raise error
    assert said == [f"\n{error}"]


def test_a_floating_point_error_of_own_code_is_raised_in_the_process_that_has_it(tmp_path):
    """It was taken for a loss that is not finite, which the first process tells: nobody told it."""
    trainer = SimpleNamespace(is_global_zero=False, world_size=2, global_step=3)
    job = SimpleNamespace(run=RunDir(tmp_path), batch=None, trainer=trainer, task=None)
    job.record = SimpleNamespace(started=True)
    with pytest.raises(FloatingPointError, match="divide"), explained(job), np.errstate(all="raise"):
        np.float64(1) / np.float64(0)


def test_of_several_processes_the_first_says_what_is_built(here, monkeypatch, capsys):
    words = ["fit", "--config=vit", "--trainer.logger=false", "--model.qk_norm=true", "--dry_run"]
    assert main(words) == 0
    assert "options moved: model.qk_norm" in capsys.readouterr().out
    monkeypatch.setenv("VITLAB_RUN_DIR", str(here / "runs/of the first"))
    assert main(words) == 0
    assert not capsys.readouterr().out


def test_a_log_that_cannot_be_closed_hides_no_error(tmp_path, monkeypatch):
    """Before, on a disk that is gone, `vitlab fit` ended with "Input/output error" alone, or below its own line."""

    def gone(handler):
        raise OSError(5, "Input/output error")

    log_to(tmp_path / "train.log")
    handlers = [h for h in logging.getLogger("vitlab").handlers if isinstance(h, logging.FileHandler)]
    monkeypatch.setattr(logging.FileHandler, "flush", gone)
    close_log()
    assert len(handlers) == 1 and handlers[0] not in logging.getLogger("vitlab").handlers
