import pytest

from vitlab.errors import UsageError
from vitlab.runs.directory import RunDir, atomic_write, write_text


def test_a_file_keeps_its_content_until_the_next_one_is_whole(tmp_path):
    path = tmp_path / "new" / "a.csv"
    write_text(path, "first", sync=True)
    with pytest.raises(OSError), atomic_write(path) as beside:
        assert beside.parent == path.parent and beside.suffix == ".csv"
        beside.write_text("half")
        raise OSError
    assert path.read_text() == "first" and list(path.parent.iterdir()) == [path]


def test_a_run_that_kept_weights_alone_is_used_by_them(tmp_path):
    run = RunDir(tmp_path)
    with pytest.raises(UsageError, match="has no checkpoint yet"):
        run.checkpoint()
    run.weights.mkdir()
    for name in ("last", "best"):
        (run.weights / f"{name}.safetensors").write_bytes(b"")
        assert run.checkpoint().name == f"{name}.safetensors"
