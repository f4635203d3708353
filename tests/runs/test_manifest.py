import errno
import json
import os
from pathlib import Path

import pytest
import torch

from vitlab.errors import UsageError
from vitlab.runs import manifest
from vitlab.runs.directory import RunDir
from vitlab.runs.find import find_run
from vitlab.runs.manifest import LOG, check_whole, damage, file_digest, first_whole


@pytest.fixture
def run(tmp_path):
    """A run directory with two generations, as a training leaves them."""
    run = RunDir(tmp_path / "run")
    run.checkpoints.mkdir(parents=True)
    run.config.write_text("{}\n")
    entries = {}
    for number, name in enumerate(("previous.ckpt", "last.ckpt")):
        path = run.checkpoints / name
        torch.save({"w": torch.full((2000,), number)}, path)
        entries[name] = {"sha256": file_digest(path), "size": path.stat().st_size, "step": number}
    (run.checkpoints / "manifest.json").write_text(json.dumps(entries))
    return run


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.fixture
def lines(monkeypatch):
    """What is told."""
    lines = []
    monkeypatch.setattr(LOG, "warning", lambda text, *args: lines.append(text % args))
    return lines


def test_intact_files_are_used_without_a_message(run, lines):
    assert run.last_checkpoint() == run.checkpoints / "last.ckpt"
    assert not lines


@pytest.mark.parametrize("harm", ["truncated", "flipped", "empty", "gone"])
def test_the_previous_generation_is_used_and_both_are_named(run, lines, harm):
    last = run.checkpoints / "last.ckpt"
    match harm:
        case "truncated":
            last.write_bytes(last.read_bytes()[:-100])
        case "flipped":
            flip(last, last.stat().st_size // 2)
        case "empty":
            last.write_bytes(b"")
        case "gone":
            last.unlink()
    assert run.last_checkpoint() == run.checkpoints / "previous.ckpt"
    assert len(lines) == (harm != "gone")
    assert all(str(last) in line and "previous.ckpt instead" in line for line in lines)


def test_every_flipped_byte_is_found_with_or_without_a_manifest(run, tmp_path):
    last = run.checkpoints / "last.ckpt"
    alone = tmp_path / "alone.ckpt"
    data = last.read_bytes()
    for at in range(100, len(data), len(data) // 40):
        last.write_bytes(data)
        flip(last, at)
        assert damage(last) is not None
    start = data.index(torch.full((2000,), 1).numpy().tobytes())
    alone.write_bytes(data)
    assert damage(alone) is None
    flip(alone, start + 9)  # in the middle of the weights
    assert "is damaged" in damage(alone)


def test_without_an_intact_checkpoint_resuming_is_an_error_and_never_a_new_start(run):
    for path in run.checkpoints.glob("*.ckpt"):
        flip(path, 500)
    with pytest.raises(UsageError, match="no intact checkpoint is left"):
        run.last_checkpoint()
    assert run.has_checkpoint()


def test_a_requested_damaged_file_is_refused_and_an_intact_one_named(run):
    last = run.checkpoints / "last.ckpt"
    flip(last, 500)
    with pytest.raises(UsageError, match=r"last.ckpt is damaged: .*sha256.*; .*previous.ckpt is intact"):
        find_run(str(last))
    check_whole(run.checkpoints / "previous.ckpt")


def test_a_kill_between_two_renames_leaves_known_files(run):
    manifest = run.checkpoints / "manifest.json"
    entries = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**entries, ".writing": {"sha256": "0" * 64, "size": 1}}))
    (run.checkpoints / "previous.ckpt").unlink()
    (run.checkpoints / "previous.ckpt").hardlink_to(run.checkpoints / "last.ckpt")
    assert damage(run.checkpoints / "previous.ckpt") is None


def test_a_manifest_that_cannot_be_read_leaves_the_checksums_of_the_parts(run):
    (run.checkpoints / "manifest.json").write_text("{torn")
    assert first_whole([run.checkpoints / "last.ckpt"]) == run.checkpoints / "last.ckpt"


@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE, errno.EIO])
def test_no_file_is_called_whole_whose_checksum_cannot_be_read(run, monkeypatch, number):
    path, read = run.checkpoints / "manifest.json", Path.read_text

    def fails(file, *words, **more):
        if file == path:
            raise OSError(number, os.strerror(number), str(file))
        return read(file, *words, **more)

    assert damage(run.checkpoints / "last.ckpt") is None
    monkeypatch.setattr(Path, "read_text", fails)
    assert damage(run.checkpoints / "last.ckpt") == f"{path}: {os.strerror(number)}"
    monkeypatch.undo()
    path.write_text("{torn")
    assert damage(run.checkpoints / "last.ckpt").startswith(f"{path} is damaged: ")


def test_no_other_checkpoint_takes_the_place_of_one_that_cannot_be_opened_now(tmp_path, monkeypatch):
    best, last = tmp_path / "best.ckpt", tmp_path / "last.ckpt"
    for path in (best, last):
        torch.save({"a": torch.zeros(2)}, path)
    entries = {path.name: {"sha256": file_digest(path), "size": path.stat().st_size} for path in (best, last)}
    (tmp_path / "manifest.json").write_text(json.dumps(entries))

    def fails(number):
        def digest(path):
            if path == best:
                raise OSError(number, os.strerror(number), str(path))
            return file_digest(path)

        return digest

    monkeypatch.setattr(manifest, "file_digest", fails(errno.ESTALE))
    with pytest.raises(OSError, match=r"Stale file handle.*best\.ckpt"):
        first_whole([best, last])
    monkeypatch.setattr(manifest, "file_digest", fails(errno.EIO))
    assert first_whole([best, last]) == last
