import re
import sys

import pytest
import torch
from lightning.pytorch.callbacks import Checkpoint
from tiny import batches, fit, loader, task, trainer

from vitlab.callbacks import console as shown
from vitlab.callbacks.checkpoint import Checkpoint as VitlabCheckpoint
from vitlab.callbacks.console import Console, EpochTable, EvaluationConsole
from vitlab.callbacks.record import RunRecord
from vitlab.errors import Stopped
from vitlab.runs.directory import RunDir


@pytest.fixture
def lines(monkeypatch):
    """What is printed."""
    lines = []
    monkeypatch.setattr(shown.LOG, "info", lambda text, **more: lines.append(text))
    return lines


@pytest.fixture
def screen(monkeypatch):
    """What a terminal shows of it."""
    screen = []
    monkeypatch.setattr(shown.LOG, "info", lambda text, extra: screen.extend(extra["on_terminal"].split("\n")))
    return screen


@pytest.fixture
def bars(monkeypatch):
    """The bars that a terminal shows."""
    bars = []

    class Bar(shown.tqdm):
        def __init__(self, **options):
            super().__init__(**options)
            bars.append(self)

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(shown, "tqdm", Bar)
    return bars


def recorded(folder, **options):
    RunDir(folder).write("model.json", {"flops": 1000})
    record = RunRecord(RunDir(folder), lambda trainer, task: None)
    return record, Console(record, **options)


def test_an_epoch_is_one_line_with_its_numbers_speed_and_time_left(tmp_path, lines):
    record, console = recorded(tmp_path)
    fit(tmp_path, record, console, enable_progress_bar=True)
    assert len(lines) == 2
    number = r"\d+\.\d{4}"
    assert re.fullmatch(
        rf"epoch   1/2  train/loss {number}  train/acc1 {number}  val/loss {number}  val/acc1 {number}.*"
        r" {2,6}[\d,]+ images/s  [ \d]\d:\d\d left",
        lines[0],
    ), lines[0]
    assert lines[1].endswith("0:00 left")
    speeds = [row["images_per_second"] for row in record.run.rows() if "images_per_second" in row]
    for line, first, second in zip(lines, speeds[::2], speeds[1::2], strict=True):  # of 8 images and of 4
        told = float(re.search(r"([\d,]+) images/s", line)[1].replace(",", ""))
        assert told == pytest.approx(12 / (8 / first + 4 / second), abs=1)


def test_a_terminal_of_80_columns_shows_every_number_below_its_name(tmp_path, screen, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    fit(tmp_path, *recorded(tmp_path), enable_progress_bar=True)
    names = "epoch  train/loss  train/acc1  val/loss  val/acc1  images/s     left"
    assert screen[0] == names and len(screen) == 3
    for row in screen[1:]:
        assert re.fullmatch(r" +[12]/2(?: +\d\.\d{4}){4} +[\d,]+ +0:\d\d", row), row
        assert all(row[end - 1] != " " and row[end:][:1].strip() == "" for end in ends(names)), row


def ends(names):
    return [found.end() for found in re.finditer(r"\S+", names)]


def test_a_narrow_terminal_keeps_losses_and_what_decides_the_best_epoch(tmp_path, screen, monkeypatch):
    monkeypatch.setenv("COLUMNS", "58")
    record, console = recorded(tmp_path)
    keeper = Checkpoint()
    keeper.monitor = "val/rank"

    def measured(trainer, task):
        record.validated |= {"val/knn": 0.5, "val/probe": 0.25, "val/rank": 12.5}

    record.on_validation_end = measured
    fit(tmp_path, record, console, keeper, enable_checkpointing=True, enable_progress_bar=True)
    assert screen[0].split() == ["epoch", "train/loss", "train/acc1", "val/knn", "val/rank", "left"]
    assert max(map(len, screen)) <= 58 and screen[1].split()[-2] == "12.5000"


def test_column_names_are_repeated_when_they_change_and_after_a_screen_of_rows():
    rows = EpochTable()
    first = rows.add({"epoch": "1", "train/loss": "2.5", "left": "0:09"}, 80).split("\n")
    assert first == ["epoch  train/loss  left", "    1         2.5  0:09"]
    validated = rows.add({"epoch": "2", "train/loss": "2.5", "val/loss": "1.5", "left": "0:08"}, 80).split("\n")
    assert validated[0] == "epoch  train/loss  val/loss  left"
    assert rows.add({"epoch": "3", "train/loss": "2.5", "left": "0:07"}, 80) == "    3         2.5            0:07"
    narrower = rows.add({"epoch": "4", "train/loss": "2.5", "left": "0:06"}, 30, ["val/loss"])
    assert narrower == "epoch  train/loss  left\n    4         2.5  0:06"
    more = [rows.add({"epoch": str(i), "train/loss": "2.5", "left": "0:05"}, 30, ["val/loss"]) for i in range(5, 50)]
    assert [5 + i for i, text in enumerate(more) if "epoch" in text] == [24, 44]


@pytest.mark.parametrize(("width", "kept"), [(200, "loss acc1 images/s left"), (62, "loss acc1 left"), (40, "left")])
def test_numbers_behind_a_bar_are_whole_and_the_time_left_is_always_there(tmp_path, bars, monkeypatch, width, kept):
    monkeypatch.setenv("COLUMNS", str(width))
    fit(tmp_path, *recorded(tmp_path), enable_progress_bar=True, log_every_n_steps=1)
    for bar in bars:
        assert re.fullmatch(r"(loss \d\.\d{3}  )?(acc1 \d\.\d{3}  )?([\d,]+ images/s  )?0:\d\d left", bar.postfix)
        assert " ".join(re.findall(r"loss|acc1|images/s|left", bar.postfix)) == kept
        drawn = str(bar) if width > 100 else bar.format_meter(**(bar.format_dict | {"ncols": width - 1}))
        assert drawn.endswith(bar.postfix) and len(drawn) < width


def test_an_epoch_without_steps_after_a_resume_has_no_speed(tmp_path, lines):
    class Forgetful(RunRecord):
        def on_train_epoch_end(self, trainer, pl_module):
            self._seconds = 0.0  # as after a resume behind the last step

    record = Forgetful(RunDir(tmp_path), lambda trainer, task: None)
    RunDir(tmp_path).write("model.json", {"flops": 1000})
    fit(tmp_path, record, Console(record), enable_progress_bar=True)
    assert lines and not any("images/s" in line for line in lines)


@pytest.mark.slow
def test_the_line_of_an_epoch_that_is_resumed_after_its_validation_has_its_metrics(tmp_path, lines):
    """They were in the rows alone."""

    class Stops(VitlabCheckpoint):
        def batch_ended(self, trainer):
            self.ends_with = Stopped(15) if trainer.fit_loop.epoch_loop.batch_idx == last_batch else None
            super().batch_ended(trainer)

    def run(folder, **given):
        options = {"max_epochs": 1, "val_check_interval": 4, "enable_progress_bar": True}
        at_work = trainer(folder, *recorded(folder), Stops(), **options)
        at_work.fit(task(), batches(size=2), loader(batch=6), **given)

    last_batch = None
    run(tmp_path / "whole")
    last_batch = 4  # of 0 to 5, after the validation
    with pytest.raises(Stopped):
        run(tmp_path / "cut")
    last_batch = None
    run(tmp_path / "cut", ckpt_path=tmp_path / "cut/checkpoints/last.ckpt", weights_only=True)
    whole, resumed = (re.sub(r" {2,6}[\d,]+ images/s.*", "", line) for line in lines)
    assert "val/loss" in whole and resumed == whole


def test_quiet_prints_nothing_and_without_a_terminal_there_is_no_bar(tmp_path, lines, capsys):
    fit(tmp_path, *recorded(tmp_path, quiet=True), enable_progress_bar=True)
    assert lines == [] and capsys.readouterr().err == ""


def test_the_bar_of_an_epoch_counts_its_batches_and_closes(tmp_path, lines, bars):
    fit(tmp_path, *recorded(tmp_path), enable_progress_bar=True)
    assert [(bar.desc, bar.total, bar.n) for bar in bars] == [("epoch 1/2", 3, 3), ("epoch 2/2", 3, 3)]
    assert all(bar.disable for bar in bars)  # tqdm's mark of a closed bar


@pytest.mark.slow
def test_the_bar_of_an_epoch_that_is_resumed_within_goes_on_where_it_was(tmp_path, lines, bars):
    fit(tmp_path, VitlabCheckpoint(every_n_steps=1), train=batches(), max_epochs=1, limit_train_batches=2)
    saved = torch.load(tmp_path / "checkpoints/previous.ckpt", weights_only=True)
    assert saved["global_step"] == 1
    seen = trainer(tmp_path, VitlabCheckpoint(), *recorded(tmp_path), enable_progress_bar=True)
    previous = tmp_path / "checkpoints/previous.ckpt"
    seen.fit(task(), batches(), loader(batch=6), ckpt_path=previous, weights_only=True)
    assert [(bar.desc, bar.initial, bar.n) for bar in bars] == [("epoch 1/2", 1, 3), ("epoch 2/2", 0, 3)]


def test_a_failure_leaves_no_unfinished_bar(tmp_path, bars):
    model = task()

    def breaks(*given):
        raise RuntimeError("broken")

    model.train_loss = breaks
    with pytest.raises(RuntimeError, match="broken"):
        fit(tmp_path, *recorded(tmp_path), model=model, enable_progress_bar=True)
    assert [bar.disable for bar in bars] == [True]


def test_an_evaluation_has_a_bar_over_all_its_batches(tmp_path, bars):
    evaluation = EvaluationConsole(quiet=False)
    trainer(tmp_path, evaluation, enable_progress_bar=True).test(task(), loader(), verbose=False)
    assert [(bar.total, bar.n) for bar in bars] == [(3, 3)] and evaluation.bar is None
