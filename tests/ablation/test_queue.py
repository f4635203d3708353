"""What many workers read of many cells: not all of them at every take."""

import errno
import json
import os
from types import SimpleNamespace

import pytest

from tests.ablation.made_up import built
from vitlab.ablation.evidence import chain
from vitlab.ablation.evidence.protocol import stored_versions
from vitlab.ablation.execution import probe, worker
from vitlab.ablation.execution.cells import Cell
from vitlab.ablation.execution.commands import Stage
from vitlab.ablation.execution.gpus import Slot
from vitlab.ablation.execution.pool import Interrupts, Pool
from vitlab.ablation.execution.process import Seat
from vitlab.ablation.execution.progress import Progress, begun
from vitlab.ablation.execution.worker import CODE, CellOutcome, _failed
from vitlab.ablation.file.spec import read_ablation
from vitlab.errors import UsageError
from vitlab.runs.directory import RunDir

FILE = """\
name: many
base: vit
axes:
  size: {a: {model.embed_dim: 8}, b: {model.embed_dim: 16}}
seeds: 30
baseline: {size: a}
metric: {primary: acc1}
"""


@pytest.fixture
def cells(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "many.yaml").write_text(FILE)
    ablation = read_ablation("many.yaml")
    arms = [built({"model": dict(arm.overrides), "data": {}}, arm) for arm in ablation.arms]
    return [Cell(ablation, arm, seed) for seed in ablation.seeds for arm in arms]


def _finish(cell, claim):
    split, name = cell.ablation.evaluate, f"{cell.ablation.checkpoint}.ckpt"
    cell.run.write("results.json", {split: {"acc1": 0.5, "checkpoint": name}})
    chain.append(cell.ablation.directory, "cell", cell=cell.name)
    cell.run.write("done.json", {"cell": cell.name})
    claim.release()


@pytest.mark.parametrize("text", ["", "x" * 40_000], ids=["short", "longer than a read"])
def test_the_chain_continues_after_its_last_whole_line(tmp_path, text):
    for i in range(3):
        chain.append(tmp_path, "opened", cell=f"{i}{text}")
    with (tmp_path / chain.FILE).open("a") as file:
        file.write('{"kind": "opened", "cell": "torn')
    chain.append(tmp_path, "opened", cell="last")
    read = chain.read_chain(tmp_path)
    assert not read.broken and [record["cell"][:4].rstrip("x") for record in read.records] == ["0", "1", "2", "last"]


def test_a_reader_returns_each_new_record_once_and_whole(tmp_path):
    chain.append(tmp_path, "opened", cell="before")
    reader = chain.Reader(tmp_path)
    assert reader.new() == []
    chain.append(tmp_path, "cell", cell="a")
    with (tmp_path / chain.FILE).open("a") as file:
        file.write('{"kind": "cell", "cell": ')
        file.flush()
        assert [record["cell"] for record in reader.new()] == ["a"]
        file.write(json.dumps("b") + "}\n")
    assert [record["cell"] for record in reader.new()] == ["b"]


def test_a_chain_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    def full(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/{chain.FILE}'"):
        chain.append(tmp_path, "opened", cell="first")


@pytest.mark.parametrize("call", ["_take", "_tell"])
def test_a_disk_that_fails_between_two_cells_ends_the_run_with_its_error(cells, monkeypatch, call):
    def fails(*words):
        raise OSError(errno.EIO, "Input/output error", "done.json")

    monkeypatch.setattr("vitlab.ablation.execution.pool.process_cell", lambda *words: CellOutcome("done"))
    monkeypatch.setattr(Pool, call, fails)
    with pytest.raises(OSError, match=r"done\.json"):
        Pool(cells, 2, None, Interrupts(print)).run_all()


def test_a_mistake_of_ours_in_a_worker_is_no_success(cells, monkeypatch):
    monkeypatch.setattr(Pool, "_take", lambda pool: {}[None])
    with pytest.raises(KeyError):
        Pool(cells, 2, None, Interrupts(print)).run_all()


def test_the_time_of_a_cell_is_that_of_all_its_attempts_but_for_the_last_minute_of_one_that_is_killed(
    cells, monkeypatch
):
    clock = iter(range(0, 10_000, 50))  # seconds, at each look
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: next(clock)))

    def attempt(looks, killed=False):
        def run_in_slot(words, log, run, seat, more):
            assert [seat.stop() for _ in range(looks)] == [False] * looks
            if killed:
                monkeypatch.setattr(Cell, "note_seconds", lambda cell, seconds: None)  # the worker is gone, too
            return 0, []

        with monkeypatch.context() as patch:
            patch.setattr(worker.process, "run_in_slot", run_in_slot)
            worker._run(cells[0], Stage("fit", ["vitlab", "fit"]), Seat(Slot()))

    note = Cell.note_seconds
    attempt(1)
    assert cells[0].device_seconds() == 100
    attempt(3, killed=True)  # at 50, 100, 150
    monkeypatch.setattr(Cell, "note_seconds", note)
    assert cells[0].device_seconds() == 100 + 100
    attempt(0)
    assert cells[0].device_seconds() == 100 + 100 + 50 and cells[1].device_seconds() == 0


def test_a_change_of_the_code_fails_one_cell_in_one_line_and_the_next_call_tries_it_again(cells, monkeypatch):
    def outdated(cell, *more):
        return _failed(cell, Stage("fit", ["vitlab", "fit"]), 0, CODE, ["the code has changed"])

    monkeypatch.setattr("vitlab.ablation.execution.pool.process_cell", outdated)
    said = []
    pool = Pool(cells, 1, said.append, Interrupts(print))
    pool.run_all()
    assert said == [f"failed   {cells[0].name}: fit, other code: the code has changed"]
    assert cells[0].failure() and cells[0].name in pool.failed
    Pool(cells, 1, None, Interrupts(print))
    assert not cells[0].failure()


def test_files_of_other_content_are_damaged_or_as_if_they_were_not_there(cells):
    arm, path = cells[0].resolved.arm, cells[0].ablation.directory / "arms.json"
    for text in ("null", "[1]", '{"length": 1}', "{"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        assert probe._load(arm, path, "") is None
    cells[0].run.write("run.json", {"status": "running"})
    cells[0].run.write_text("metrics.jsonl", '{"a": 1}\n')
    assert cells[0].damage().endswith("metrics.jsonl is damaged: a row has no `step`")
    (path.parent / "history").mkdir()
    (path.parent / "history/one.json").write_text('{"time": ""}')
    with pytest.raises(UsageError, match=r"one\.json is damaged: it has no `texts`"):
        stored_versions(cells[0].ablation)


def test_progress_shows_the_last_known_state_while_the_disk_does_not_answer(cells, monkeypatch):
    progress = Progress(cells, 1)

    def fails(of):
        raise OSError(errno.ESTALE, "Stale file handle", "done.json")

    cells[0].run.write("run.json", {"status": "running"})
    monkeypatch.setattr(Cell, "is_finished", fails)
    progress._next = 0.0
    assert progress.update() == {cell.name: "missing" for cell in cells}
    progress._states[cells[0].name] = "running"
    monkeypatch.setattr(RunDir, "rows", fails)
    assert str(progress.table().renderables[1]) == f"{cells[0].name}: done.json: Stale file handle"


def test_one_worker_takes_cells_in_their_order(cells):
    pool = Pool(cells, 1, None, Interrupts(print))
    for cell in cells[:4]:
        taken, claim = pool._take()
        assert taken is cell
        _finish(taken, claim)


@pytest.mark.slow
def test_twenty_workers_take_every_cell_once_and_check_few(cells, monkeypatch):
    pools = [Pool(cells, 1, None, Interrupts(print)) for _ in range(20)]
    looks, real = [], Cell.is_finished
    monkeypatch.setattr(Cell, "is_finished", lambda cell: looks.append(cell.name) or real(cell))
    names = []
    while any(taken := [pool._take() for pool in pools]):
        for cell, claim in filter(None, taken):
            names.append(cell.name)
            _finish(cell, claim)
    assert sorted(names) == sorted(cell.name for cell in cells)
    assert len(looks) < 7 * len(cells)  # 40 a cell where every take begins with the first


def test_a_start_reads_no_files_of_cells_that_have_none(cells, monkeypatch):
    looks, real = [], Cell.is_done
    monkeypatch.setattr(Cell, "is_done", lambda cell: looks.append(cell.name) or real(cell))
    pool = Pool(cells, 1, None, Interrupts(print))
    assert not looks and set(pool.progress.update().values()) == {"missing"}
    _finish(*pool._take())
    looks.clear()
    states = Pool(cells, 1, None, Interrupts(print)).progress.update()
    assert set(looks) == {cells[0].name} and states[cells[0].name] == "done"
    assert [cell.name for cell in begun(cells)] == [cells[0].name]
