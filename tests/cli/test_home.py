"""Without a home directory, or with one that cannot be written, caches go elsewhere."""

import os
import pwd
import tempfile
from pathlib import Path

import pytest

from vitlab.cli.main import main

CACHES = ("MPLCONFIGDIR", "WANDB_CACHE_DIR")


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    """Nothing that says where caches lie, and what the command sets forgotten."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for name in (*CACHES, "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        os.environ.pop(name, None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_caches_stay_in_a_home_that_can_be_written(tmp_path):
    os.environ["HOME"] = str(tmp_path / "home")
    main(["--version"])
    assert not set(CACHES) & set(os.environ) and not list(tmp_path.iterdir())


def test_caches_go_to_a_temporary_folder_if_home_cannot_be_written_and_no_other_is_named(monkeypatch, tmp_path):
    os.environ |= {"HOME": "/", "WANDB_CACHE_DIR": "mine"}
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != Path("/"))
    main(["--version"])
    assert Path(os.environ["MPLCONFIGDIR"]).parent == tmp_path and Path(os.environ["MPLCONFIGDIR"]).is_dir()
    assert os.environ["WANDB_CACHE_DIR"] == "mine"


def test_caches_go_to_a_temporary_folder_where_a_file_has_the_name_of_theirs(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".config").touch()
    os.environ["HOME"] = str(tmp_path / "home")
    main(["--version"])
    assert Path(os.environ["MPLCONFIGDIR"]).is_dir() and "WANDB_CACHE_DIR" not in os.environ


def test_a_user_without_a_home_gets_a_temporary_one(monkeypatch, tmp_path):
    def unknown(number):
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    del os.environ["HOME"]
    main(["--version"])
    assert Path(os.environ["HOME"]).parent == tmp_path and Path.home().is_dir()
