"""The cache of remote images on this disk, with a store in memory: what is damaged, wrong, in the way or gone."""

import os
from pathlib import Path

import fsspec
import numpy as np
import pytest
from PIL import Image

from vitlab.cli.main import main
from vitlab.data import Packed
from vitlab.data.files import archive
from vitlab.data.files.ranges import Ranges

SIZE = 1000
NAMES = ["a", "b", "c"]


@pytest.fixture
def asked(monkeypatch):
    """The number of ranges of each request."""
    memory, counts = fsspec.filesystem("memory"), []
    fetch = type(memory).cat_ranges

    def counted(self, paths, *rest, **kwargs):
        counts.append(len(paths))
        return fetch(self, paths, *rest, **kwargs)

    monkeypatch.setattr(type(memory), "cat_ranges", counted)
    for name in ("one", "two"):
        memory.pipe_file(f"/{name}.bin", bytes(range(250)) * 1200)
    return counts


def _read(asked, budget=1e6, shard="one"):
    """Return how many ranges a run asks for to read all images, whose bytes are right."""
    rows = np.array([[0, 100_000 * i, SIZE] for i in range(3)])
    store = Ranges([f"memory://{shard}.bin"], NAMES, rows, [1], budget / 1e9)
    asked.clear()
    store.expect(NAMES)
    assert [store.read(name) for name in NAMES] == [bytes(range(250)) * 4] * 3
    return sum(asked)


def _kept():
    return sorted((archive.cache() / "ranges").glob("*/*"))


@pytest.mark.parametrize("damage", [lambda x: x[:-3], lambda x: x[:-1] + b"?", lambda x: b""])
def test_a_range_that_was_damaged_is_fetched_and_kept_again(asked, damage):
    assert [_read(asked), _read(asked)] == [3, 0]
    _kept()[1].write_bytes(damage(_kept()[1].read_bytes()))
    assert [_read(asked), _read(asked)] == [1, 0]


def test_what_fits_is_kept_and_an_unused_shard_makes_room(asked):
    few = 2 * (SIZE + 4)  # bytes
    assert [_read(asked, few), _read(asked, few), len(_kept())] == [3, 1, 2]
    assert [_read(asked, few, "two"), len(_kept())] == [3, 2]  # the first was used a moment ago
    _kept()[0].with_suffix(".99").write_bytes(b"?")  # of a process that was killed
    os.utime(_kept()[0].parent, (0, 0))
    assert [_read(asked, few, "two"), _read(asked, few, "two"), len(_kept())] == [3, 1, 2]
    (archive.cache() / "ranges" / "bytes").write_text("")
    assert [_read(asked, 1e6, "two"), _read(asked, 1e6, "two"), len(_kept())] == [1, 0, 3]
    assert int((archive.cache() / "ranges" / "bytes").read_text()) == 3 * (SIZE + 4)


def test_a_disk_that_is_full_is_told_once(asked, monkeypatch):
    monkeypatch.setattr(Path, "write_bytes", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.warns(UserWarning, match="takes no more images, which are fetched anew: .*No space left") as told:
        assert _read(asked) == 3
    assert len(told) == 1 and not _kept()


def test_a_wrong_answer_to_a_pack_is_not_kept(tmp_path):
    rng, memory = np.random.default_rng(0), fsspec.filesystem("memory")
    for i in range(8):
        (place := tmp_path / "photos" / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (9, 9, 3), dtype=np.uint8)).save(place / f"{i}.png")
    assert main(["pack", str(tmp_path / "photos"), str(tmp_path / "packed"), "--size=9", "--num_workers=0"]) == 0
    content = {file.name: file.read_bytes() for file in (tmp_path / "packed").iterdir()}
    for name, data in content.items():
        memory.pipe_file(f"/packed/{name}", data)
    (shard,) = (name for name in content if name.endswith(".bin"))
    store = Packed("memory://packed", cache_gb=1, img_size=9, batch_size=2, num_workers=0).store
    memory.pipe_file(f"/packed/{shard}", content[shard][:-1] + bytes([content[shard][-1] ^ 1]))
    last = max(store.number, key=lambda file: store.rows[store.number[file]]["offset"])
    for _ in range(2):
        with pytest.raises(OSError, match="differs from what was packed"):
            store.read(last)
    memory.pipe_file(f"/packed/{shard}", content[shard])
    assert store.read(last)
