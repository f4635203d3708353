"""Why a training has ended: told by the trainer that has just come to its end."""

import re
import signal
from types import SimpleNamespace

import pytest
from lightning.pytorch.callbacks import EarlyStopping, Timer
from tiny import batches, fit, loader, task, trainer

from vitlab.callbacks.checkpoint import Checkpoint
from vitlab.callbacks.reasons import broken_off
from vitlab.callbacks.record import RunRecord
from vitlab.errors import Stopped
from vitlab.jobs.train.endings import cut_short
from vitlab.runs.directory import RunDir


class Ask(Timer):
    """Asks for the end after a step; it has no limit of its own."""

    def on_train_batch_end(self, trainer, *args):
        trainer.should_stop = True


def stop(**options):
    return EarlyStopping("val/loss", **options)


ENDINGS = [
    ([], {}, "finished", "all 2 epochs"),
    ([], {"max_epochs": 0}, "finished", "no epoch, as trainer.max_epochs=0 asks"),
    ([], {"max_steps": 0}, "steps", "trainer.max_steps=0"),
    ([], {"max_steps": 4}, "steps", "trainer.max_steps=4"),
    ([], {"fast_dev_run": 2}, "steps", "trainer.fast_dev_run=2"),
    ([], {"max_epochs": -1, "max_steps": 4}, "steps", "trainer.max_steps=4"),
    (
        [],
        {"max_epochs": 1, "max_time": {"microseconds": 1}},
        "time",
        r"0:\d\d:\d\d have passed; epoch 1 of 1 was the last",
    ),
    ([], {"max_epochs": 9, "max_time": {"microseconds": 1}}, "time", "0:00:00 have passed; epoch 1 of 9 was the last"),
    (
        [stop(patience=2, min_delta=9.0)],
        {"max_epochs": 9},
        "early stop",
        r"val/loss has not improved since epoch 1 \(1\.\d+\), patience 2; epoch 3 of 9 was the last",
    ),
    ([stop(stopping_threshold=99)], {}, "early stop", "val/loss has reached 99; epoch 1 of 2 was the last"),
    ([stop(divergence_threshold=0)], {}, "early stop", "val/loss is beyond 0; epoch 1 of 2 was the last"),
    ([stop()], {}, "finished", "all 2 epochs"),
    ([Ask()], {}, "asked for", "a callback or the module has set trainer.should_stop; epoch 1 of 2 was the last"),
]


@pytest.mark.parametrize(("callbacks", "options", "why", "text"), ENDINGS, ids=[f"{e[2]} {e[1]}" for e in ENDINGS])
def test_the_record_says_why_a_run_came_to_its_end(tmp_path, callbacks, options, why, text):
    run = RunDir(tmp_path)
    run.write("run.json", {"status": "running"})
    run.write("model.json", {"flops": 0})
    fit(tmp_path, RunRecord(run, lambda trainer, task: None), *callbacks, model=task(warmup_epochs=0), **options)
    ending = run.record["ending"]
    assert run.record["status"] == "done"
    assert ending["why"] == why
    assert re.fullmatch(text, ending["text"]), ending["text"]


def test_a_resume_that_trains_nothing_tells_the_same_end_and_loses_no_row(tmp_path):
    run = RunDir(tmp_path)
    run.write("run.json", {"status": "running"})
    run.write("model.json", {"flops": 0})
    for parts, limits in ([], {"max_time": {"microseconds": 1}}), ([stop(stopping_threshold=99)], {}):
        found, limits = [], {"max_epochs": 9, "val_check_interval": 2, **limits}  # both end within the first epoch
        for resume in {}, {"ckpt_path": tmp_path / "checkpoints/last.ckpt", "weights_only": True}:
            at_work = trainer(tmp_path, RunRecord(run, lambda trainer, task: None), *parts, Checkpoint(), **limits)
            at_work.fit(task(), batches(), loader(batch=6), **resume)
            rows = [(row["step"], row.get("train/loss")) for row in run.rows()]
            found.append((run.record["ending"]["why"], run.record["ending"]["text"].partition("; ")[2], rows))
        assert found[0] == found[1] and found[0][1] == "epoch 1 of 9 was the last"


BROKEN = [
    (Stopped(signal.SIGUSR1), "signal", "SIGUSR1"),
    (KeyboardInterrupt(), "signal", "SIGINT"),
    (Stopped(signal.SIGTERM, "process 0 hangs"), "error", "process 0 hangs"),
    (RuntimeError("a\nb"), "error", "RuntimeError: a b"),
]


@pytest.mark.parametrize(("error", "why", "text"), BROKEN, ids=[f"{b[1]} {b[2]}" for b in BROKEN])
def test_an_interrupted_run_says_what_interrupted_it(error, why, text):
    assert broken_off(error) == {"why": why, "text": text}


def test_a_process_that_ends_without_its_main_thread_records_why_and_when(tmp_path):
    run = RunDir(tmp_path)
    run.take_over()
    cut_short(SimpleNamespace(run=run, record=RunRecord(run, print)), "stopped by SIGTERM", "signal")
    run.fence.close()
    assert run.record["status"] == "preempted" and run.record["ended"]
    assert run.record["ending"] == {"why": "signal", "text": "stopped by SIGTERM"}
