"""Files are looked for by a pattern: as Path.glob does, but a folder that cannot be listed is not an empty one."""

import errno
import json
import os
import re

import pytest

from vitlab.errors import what_failed
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
