import json

import pytest
import torch
from tiny import IMAGES, fit, loader, task

from vitlab.callbacks.record import RunRecord
from vitlab.errors import Stopped
from vitlab.runs.directory import RunDir


@pytest.fixture
def record(tmp_path):
    """A record in a directory that holds what a run has before its first step."""
    run = RunDir(tmp_path)
    run.write("run.json", {"status": "running", "attempts": 2})
    run.write("model.json", {"flops": 1000})
    return RunRecord(run, lambda trainer, task: None)


def test_rows_are_means_over_the_steps_since_the_last_and_the_epochs_end(record, tmp_path):
    fit(tmp_path, record)
    rows = record.run.rows()
    train, val = ([row for row in rows if f"{kind}/loss" in row] for kind in ("train", "val"))
    assert [(row["step"], row["epoch"]) for row in train] == [(2, 0), (3, 0), (5, 1), (6, 1)]  # 3 steps an epoch
    assert [(row["step"], row["epoch"]) for row in val] == [(3, 0), (6, 1)]
    assert {row["attempt"] for row in rows} == {3}
    assert all(0 <= row["data_wait"] < 1 and row["images_per_second"] > 0 for row in train)


def test_a_row_is_the_mean_of_the_losses_of_its_steps(record, tmp_path):
    model, losses = task(), []
    loss = model.train_loss

    def kept(*given):
        losses.append(loss(*given))
        return losses[-1]

    model.train_loss = kept
    fit(tmp_path, record, model=model, max_epochs=1)
    rows = [row["train/loss"] for row in record.run.rows() if "train/loss" in row]
    assert rows == pytest.approx([(losses[0] + losses[1]).item() / 2, losses[2].item()])


@pytest.mark.parametrize(
    ("ends", "status"), [(Stopped(15), "preempted"), (RuntimeError("broken"), "failed"), (None, "done")]
)
def test_the_status_says_how_a_run_has_ended(record, tmp_path, ends, status):
    model = task()
    if ends is not None:

        def breaks(*given):
            raise ends

        model.train_loss = breaks
        with pytest.raises(type(ends)):
            fit(tmp_path, record, model=model)
    else:
        fit(tmp_path, record)
    told = json.loads((tmp_path / "run.json").read_text())
    assert told["status"] == status and told["ended"] and told["peak_memory"]["host"] > 0
    assert ("broken" in told.get("error", "")) == (status == "failed")


def test_a_loss_that_is_not_finite_names_step_batch_and_rate(record, tmp_path):
    images = IMAGES.clone()
    images[5] = torch.nan  # of the second batch
    with pytest.raises(FloatingPointError, match=r"not finite in epoch 1, batch 2, near step 2, lr 0.0003"):
        fit(tmp_path, record, train=loader(images))


def test_a_row_cut_off_by_a_crash_is_dropped_before_the_next_one_is_written(record, tmp_path):
    record.run.metrics.write_text('{"step": 1, "train/loss": 2.0}\n{"step": 2, "trai')
    fit(tmp_path, record, max_epochs=1)
    lines = record.run.metrics.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 3]
