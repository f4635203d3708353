import re
import sys

import pytest
from tiny import fit, loader, task, trainer

from vitlab.callbacks import console as shown
from vitlab.callbacks.console import Console, EvaluationConsole
from vitlab.callbacks.record import RunRecord
from vitlab.runs.directory import RunDir


@pytest.fixture
def lines(monkeypatch):
    """What is printed."""
    lines = []
    monkeypatch.setattr(shown.LOG, "info", lambda text, *more: lines.append(text % more))
    return lines


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
    fit(tmp_path, *recorded(tmp_path), enable_progress_bar=True)
    assert len(lines) == 2
    number = r"\d+\.\d{4}"
    assert re.fullmatch(
        rf"epoch   1/2  train/loss {number}  train/acc1 {number}  val/loss {number}  val/acc1 {number}.*"
        r" {2,6}[\d,]+ images/s  [ \d]\d:\d\d left",
        lines[0],
    ), lines[0]
    assert lines[1].endswith("0:00 left")


def test_an_epoch_of_which_no_step_was_left_after_a_resume_has_no_speed(tmp_path, lines):
    class Forgetful(RunRecord):
        def on_train_epoch_end(self, trainer, pl_module):
            self.row = {}  # as after a resume behind the last step

    record = Forgetful(RunDir(tmp_path), lambda trainer, task: None)
    RunDir(tmp_path).write("model.json", {"flops": 1000})
    fit(tmp_path, record, Console(record), enable_progress_bar=True)
    assert lines and not any("images/s" in line for line in lines)


def test_quiet_prints_nothing_and_without_a_terminal_there_is_no_bar(tmp_path, lines, capsys):
    fit(tmp_path, *recorded(tmp_path, quiet=True), enable_progress_bar=True)
    assert lines == [] and capsys.readouterr().err == ""


def test_the_bar_of_an_epoch_counts_its_batches_and_closes(tmp_path, lines, bars):
    fit(tmp_path, *recorded(tmp_path), enable_progress_bar=True)
    assert [(bar.desc, bar.total, bar.n) for bar in bars] == [("epoch 1/2", 3, 3), ("epoch 2/2", 3, 3)]
    assert all(bar.disable for bar in bars)  # tqdm's mark of a closed bar


def test_a_failure_leaves_no_half_bar_behind(tmp_path, bars):
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
