import pytest

from vitlab.errors import UsageError
from vitlab.runs.atomic import atomic_write, write_text
from vitlab.runs.directory import RunDir


def test_a_file_keeps_its_content_until_the_next_one_is_whole(tmp_path):
    path = tmp_path / "new" / "a.csv"
    write_text(path, "first", sync=True)
    with pytest.raises(OSError), atomic_write(path) as beside:
        assert beside.parent == path.parent and beside.suffix == ".csv"
        beside.write_text("half")
        raise OSError
    assert path.read_text() == "first" and list(path.parent.iterdir()) == [path]


def test_a_run_without_checkpoints_is_used_through_its_weights(tmp_path):
    run = RunDir(tmp_path)
    with pytest.raises(UsageError, match="has no checkpoint yet"):
        run.checkpoint()
    run.weights.mkdir()
    for name in ("last", "best"):
        (run.weights / f"{name}.safetensors").write_bytes(b"")
        assert run.checkpoint().name == f"{name}.safetensors"


@pytest.mark.parametrize(
    ("known", "kept"),
    [
        (None, [1, 2, 3]),
        (0, []),
        (24, [1, 2]),  # as large as it was at the checkpoint
        (20, [1, 2, 3]),  # edited
        (500, [1, 2, 3]),  # removed since, and begun again: its size says nothing
    ],
)
def test_no_row_of_a_step_that_is_repeated_stays(tmp_path, known, kept):
    run = RunDir(tmp_path)
    run.metrics.write_text("".join(f'{{"step": {step}}}\n' for step in (1, 2, 3, 4, 5)) + '{"st')
    run.drop_later_rows(known, 3)
    assert [row["step"] for row in run.rows()] == kept


def test_rows_whose_file_is_removed_before_they_are_cut_do_not_come_back(tmp_path):
    run = RunDir(tmp_path)
    run.metrics.write_text("".join(f'{{"step": {step}}}\n' for step in (1, 2, 3)))
    run.take_over()
    run.metrics.unlink()
    run.drop_later_rows(24, 2)
    run.append_row({"step": 3})
    assert [row["step"] for row in run.rows()] == [1, 2, 3]
