import errno
import json
import os
import re
import resource
import threading
from collections import OrderedDict, defaultdict
from pathlib import PosixPath
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vitlab.errors import UsageError
from vitlab.runs import generations
from vitlab.runs.before import check_room
from vitlab.runs.generations import WRITING, BackgroundCheckpointIO, rotate, sweep
from vitlab.runs.manifest import damage


def write(folder, number):
    files = BackgroundCheckpointIO()
    files.save_checkpoint({"w": torch.full((100,), number)}, folder / WRITING)
    assert files.wait() is None


def value(path):
    return int(torch.load(path, weights_only=True)["w"][0])


@pytest.mark.parametrize(
    ("found", "content"),
    [
        ("`threshold`, a numpy.float64,", {"epoch": 1, "threshold": np.float64(0.5)}),
        ("`callbacks.Seen.counts.1`, a numpy.ndarray,", {"callbacks": {"Seen": {"counts": [1, np.zeros(2)]}}}),
        (
            f"`Bars.root`, a {PosixPath.__module__}.PosixPath,",
            {"w": torch.ones(2), "Bars": {"a": None, "root": PosixPath("x")}},
        ),
        ("`Bars.seen`, a builtins.dict,", {"Bars": {"seen": {np.int64(3): 1}}}),
        ("`Bars`, a collections.defaultdict,", {"Bars": defaultdict(int)}),
    ],
)
def test_what_could_not_be_read_again_is_refused_by_name_before_it_is_written(tmp_path, found, content):
    content = {"state_dict": OrderedDict(w=torch.ones(2, device="meta")), **content}
    with pytest.raises(UsageError, match=f"^a checkpoint with {re.escape(found)} could not be read again") as told:
        BackgroundCheckpointIO().save_checkpoint(content, tmp_path / WRITING)
    assert "\n" not in str(told.value) and not [*tmp_path.iterdir()]


def test_two_generations_and_the_best_are_kept_with_their_checksums(tmp_path):
    for number in range(4):
        write(tmp_path, number)
        rotate(tmp_path, ["last", "best"] if number == 2 else ["last"], {"step": number})
    assert {p.name: value(p) for p in tmp_path.glob("*.ckpt")} == {"last.ckpt": 3, "previous.ckpt": 2, "best.ckpt": 2}
    entries = json.loads((tmp_path / "manifest.json").read_text())
    assert {name: entry["step"] for name, entry in entries.items()} == {
        "last.ckpt": 3,
        "previous.ckpt": 2,
        "best.ckpt": 2,
    }
    assert sorted(os.listdir(tmp_path)) == ["best.ckpt", "last.ckpt", "manifest.json", "previous.ckpt"]


def test_the_best_alone_leaves_the_one_before_the_last(tmp_path):
    for number, names in enumerate([["last"], ["last"], ["best"], ["best"]]):
        write(tmp_path, number)
        rotate(tmp_path, names, {"step": number})
    assert {p.name: value(p) for p in tmp_path.glob("*.ckpt")} == {"last.ckpt": 1, "previous.ckpt": 0, "best.ckpt": 3}
    steps = {name: entry["step"] for name, entry in json.loads((tmp_path / "manifest.json").read_text()).items()}
    assert steps == {"last.ckpt": 1, "previous.ckpt": 0, "best.ckpt": 3}


@pytest.mark.parametrize("moment", range(9))
def test_whenever_it_ends_every_file_is_whole_and_the_last_state_is_there(tmp_path, moment, monkeypatch):
    for number in (0, 1):
        write(tmp_path, number)
        rotate(tmp_path, ["last", "best"], {"step": number})
    calls = []

    def ends(function):
        def wrapped(*args):
            calls.append(args)
            if len(calls) > moment:
                raise KeyboardInterrupt
            return function(*args)

        return wrapped

    monkeypatch.setattr(os, "replace", ends(os.replace))
    monkeypatch.setattr(os, "link", ends(os.link))
    write(tmp_path, 2)
    try:
        rotate(tmp_path, ["last", "best"], {"step": 2})
    except KeyboardInterrupt:
        assert moment < 7
    else:
        assert moment >= 7
    monkeypatch.undo()
    assert {p.name for p in tmp_path.glob("*.ckpt")} == {"last.ckpt", "previous.ckpt", "best.ckpt"}
    assert all(damage(p) is None for p in tmp_path.glob("*.ckpt"))
    assert value(tmp_path / "last.ckpt") in (1, 2)
    sweep(tmp_path)
    write(tmp_path, 3)
    rotate(tmp_path, ["last"], {"step": 3})
    assert value(tmp_path / "previous.ckpt") in (1, 2)
    assert all(damage(p) is None for p in tmp_path.glob("*.ckpt"))


def test_a_damaged_last_does_not_push_out_the_good_one_before(tmp_path):
    for number in (0, 1):
        write(tmp_path, number)
        rotate(tmp_path, ["last"], {"step": number})
    (tmp_path / "last.ckpt").write_bytes(b"torn")
    write(tmp_path, 2)
    rotate(tmp_path, ["last"], {"step": 2})
    assert (value(tmp_path / "last.ckpt"), value(tmp_path / "previous.ckpt")) == (2, 0)


def test_checkpoints_of_one_size_and_time_are_told_apart_by_name(tmp_path):
    """As on a file system that counts whole seconds: the one before the last got the checksum of the best."""
    for number, name in enumerate(["best", "last", "last"]):
        write(tmp_path, number)
        os.utime(tmp_path / WRITING, (0, 0))
        rotate(tmp_path, [name], {"step": number})
    assert {p.name: value(p) for p in tmp_path.glob("*.ckpt")} == {"best.ckpt": 0, "previous.ckpt": 1, "last.ckpt": 2}
    assert all(damage(p) is None for p in tmp_path.glob("*.ckpt"))


def test_a_file_that_cannot_be_written_is_reported_and_removed(tmp_path):
    files = BackgroundCheckpointIO()
    files.finish = print  # as a callback that waits for it
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        files.save_checkpoint({"w": torch.zeros(300_000)}, tmp_path / WRITING)
        failure = files.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "File too large; it needs 1.2 MB" in failure
    assert str(tmp_path) in failure
    assert files.wait() is None
    assert not os.listdir(tmp_path)


def test_other_errors_of_saving_are_not_called_disk_errors(tmp_path, monkeypatch):
    def no_memory(*args):
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(generations, "refuse_objects", print)  # which saves, too, to memory
    monkeypatch.setattr(generations.torch, "save", no_memory)
    files = BackgroundCheckpointIO()
    files.finish = print
    files.save_checkpoint({}, tmp_path / WRITING)
    with pytest.raises(RuntimeError, match="CUDA error"):
        files.wait()


def test_a_checkpoint_written_in_the_background_holds_the_state_at_the_call(tmp_path, monkeypatch):
    go, save = threading.Event(), torch.save
    monkeypatch.setattr(generations, "refuse_objects", print)  # which saves, too, to memory
    monkeypatch.setattr(generations.torch, "save", lambda *args: go.wait(10) and save(*args))
    files, done, tied = BackgroundCheckpointIO(), [], torch.zeros(3)
    files.finish = lambda: done.append((tmp_path / WRITING).is_file())
    state = {"a": tied, "b": tied.detach(), "steps": [1]}
    files.save_checkpoint(state, tmp_path / WRITING)
    tied.add_(1)
    state["steps"].append(2)
    assert not done
    go.set()
    assert files.wait() is None
    assert done == [True]
    found = torch.load(tmp_path / WRITING, weights_only=True)
    assert (found["a"].sum(), found["steps"]) == (0, [1])
    assert found["a"].data_ptr() == found["b"].data_ptr()


def test_a_full_disk_or_a_file_in_place_of_a_folder_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"no room for the checkpoints: they need about 12,000,000.0 GB, .* are free"):
        check_room(tmp_path / "run", 10**15)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot write into .*: Not a directory"):
        check_room(tmp_path / "file" / "run", 10)
    check_room(tmp_path / "run", 10)
    assert os.listdir(tmp_path / "run") == []


def test_what_an_overwritten_run_leaves_free_is_room_for_its_successor(tmp_path, monkeypatch):
    """Its checkpoints, of which two names are one file, also where an earlier start has set them aside."""
    folder = tmp_path / ".overwritten/checkpoints"
    folder.mkdir(parents=True)
    (folder / "last.ckpt").write_bytes(bytes(10**6))
    os.link(folder / "last.ckpt", folder / "best.ckpt")
    monkeypatch.setattr(generations.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**5))
    check_room(tmp_path, 1, overwrite=True)  # needs 1.05 MB
    with pytest.raises(UsageError, match=r"they need about 1\.0 MB, 0\.1 MB are free"):
        check_room(tmp_path, 1)
    with pytest.raises(UsageError, match=r"they need about 1\.2 MB, 1\.1 MB are free"):
        check_room(tmp_path, 10**4, overwrite=True)


def test_a_checkpoint_that_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(OSError, match=r"it cannot be opened now.*last\.ckpt"):
        BackgroundCheckpointIO().load_checkpoint(tmp_path / "last.ckpt")


def test_a_folder_that_cannot_be_made_is_not_called_full(tmp_path):
    """Before, the line said that 0.0 MB are free, and to make room."""
    (tmp_path / "checkpoints").touch()
    files = BackgroundCheckpointIO()
    files.finish = print
    files.save_checkpoint({"w": torch.zeros(9)}, tmp_path / "checkpoints" / WRITING)
    said = files.wait() or ""
    assert "File exists; it needs 0.0 MB" in said and " 0.0 MB are free" not in said
    assert f"see that it can be read and written, then `vitlab fit --resume {tmp_path}`" in said


def test_a_failure_is_reported_even_if_the_disk_is_gone(tmp_path, monkeypatch):
    """Before, the question how much is free raised in the thread, and nobody learned that nothing was saved."""

    def gone(*words):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", gone)
    monkeypatch.setattr(generations.shutil, "disk_usage", gone)
    files = BackgroundCheckpointIO()
    files.finish = print
    files.save_checkpoint({"w": torch.zeros(9)}, tmp_path / WRITING)
    assert "Input/output error; it needs 0.0 MB. What was saved before is intact" in (files.wait() or "")
