"""Files are looked for by a pattern: as Path.glob does, but a folder that cannot be listed is not an empty one."""

import errno
import json
import os
import re
from pathlib import Path

import pytest
import torch

from vitlab.errors import what_failed
from vitlab.runs.directory import RunDir
from vitlab.runs.fence import Fence
from vitlab.runs.generations import WRITING, sweep
from vitlab.runs.manifest import NAME, read_manifest
from vitlab.runs.matching import matching
from vitlab.runs.shards import sweep_shards

PATTERNS = ("*.ckpt", "*/*.json", "*/s*-*/done.json", "none/s0-a/done.json", ".writing*", "*", "gone/*")


@pytest.fixture
def unlisted(monkeypatch):
    """Lets the system refuse to list a folder."""

    def refuse(folder, number):
        def failing(call):
            def listed(place="."):
                if os.fspath(place) == str(folder):
                    raise OSError(number, os.strerror(number), str(place))
                return call(place)

            return listed

        for name in ("listdir", "scandir"):
            monkeypatch.setattr(os, name, failing(getattr(os, name)))

    return refuse


@pytest.mark.parametrize("pattern", PATTERNS)
def test_what_is_found_is_what_glob_finds(tmp_path, pattern):
    for name in ("last.ckpt", ".writing-a", "none/s0-a/done.json", "none/s1-b/done.json", "none/x.json", "run.json/a"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert matching(tmp_path, pattern) == sorted(tmp_path.glob(pattern))
    assert matching(tmp_path / "gone", pattern) == []


@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE, errno.EIO])
def test_a_folder_that_cannot_be_listed_is_an_error_that_names_it(tmp_path, unlisted, number):
    (tmp_path / "none" / "s0-a").mkdir(parents=True)
    unlisted(tmp_path / "none", number)
    with pytest.raises(OSError, match=re.escape(os.strerror(number))) as caught:
        matching(tmp_path, "*/s*-*/done.json")
    assert what_failed(caught.value) == f"{tmp_path / 'none'}: {os.strerror(number)}"


def test_checkpoints_that_cannot_be_listed_keep_their_shards_and_checksums(tmp_path, unlisted):
    (tmp_path / "last.ckpt").touch()
    (tmp_path / "shards-1").mkdir()
    (tmp_path / NAME).write_text(json.dumps({"last.ckpt": {"sha256": "0"}, WRITING: {"sha256": "1"}}))
    unlisted(tmp_path, errno.EACCES)
    for work in (lambda: sweep_shards(tmp_path, {}), lambda: sweep(tmp_path)):
        with pytest.raises(PermissionError):
            work()
    assert "last.ckpt" in read_manifest(tmp_path) and (tmp_path / "shards-1").is_dir()


@pytest.fixture
def unseen(monkeypatch):
    """Makes pathlib that of Python 3.14, where a file that cannot be looked at is none, and lets the system fail so."""
    monkeypatch.setattr(Path, "is_file", lambda path: os.path.isfile(path))
    monkeypatch.setattr(Path, "exists", lambda path: os.path.exists(path))
    real = os.stat

    def refuse(hidden):
        def status(place, *words, **more):
            if str(place) == str(hidden):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(place))
            return real(place, *words, **more)

        monkeypatch.setattr(os, "stat", status)

    return refuse


def test_a_file_that_cannot_be_looked_at_now_is_not_taken_for_gone(tmp_path, unseen):
    run = RunDir(tmp_path / "run")
    run.checkpoints.mkdir(parents=True)
    for name in ("last.ckpt", "best.ckpt"):
        torch.save({"a": torch.zeros(2)}, run.checkpoints / name)
    run.metrics.write_text('{"step": 1}\n')
    for hidden, work in (
        (run.metrics, lambda: Fence(run.path).take_over({})),  # and would begin metrics.jsonl anew
        (run.metrics, lambda: Fence(run.path).read_rows()),
        (run.metrics, run.rows),
        (run.checkpoints / "last.ckpt", run.last_checkpoint),  # and would go on from another
        (run.config, run.has_begun),  # and would start anew
    ):
        unseen(hidden)
        with pytest.raises(OSError, match=re.escape(str(hidden))):
            work()
    unseen("nothing")
    assert run.rows() == [{"step": 1}] and run.last_checkpoint() == run.checkpoints / "last.ckpt"
