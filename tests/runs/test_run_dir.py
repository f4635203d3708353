import pytest

from vitlab.runs.directory import atomic_write, write_text


def test_a_file_keeps_its_content_until_the_next_one_is_whole(tmp_path):
    path = tmp_path / "new" / "a.csv"
    write_text(path, "first", sync=True)
    with pytest.raises(OSError), atomic_write(path) as beside:
        assert beside.parent == path.parent and beside.suffix == ".csv"
        beside.write_text("half")
        raise OSError
    assert path.read_text() == "first" and list(path.parent.iterdir()) == [path]
