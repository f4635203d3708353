"""Folders of shards beside a checkpoint: read whole, checked, never run, and removed when nothing names them."""

import io
import os
import pickle

import pytest
import torch

from vitlab.models.weights_file import read_weights
from vitlab.runs.generations import WRITING, rotate
from vitlab.runs.manifest import damage
from vitlab.runs.shards import read_checkpoint, write_shards

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
WEIGHTS = {"net.head.weight": torch.arange(6.0).view(2, 3), "net.scale": torch.ones(2, dtype=torch.bfloat16)}


def saved(content):
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


@pytest.fixture
def checkpoint(tmp_path):
    """Two generations of a checkpoint, as rotate() leaves them, and the shards of a writing that was killed."""
    for step in range(3):
        name = f"shards-{step}"
        tensors = {f"state_dict.{key}": value + step for key, value in WEIGHTS.items()}
        moments = {"optimizer_0.net.scale.step": torch.tensor(float(step))}
        shards = {"folder": name, "files": write_shards(tensors | moments, tmp_path / name)}
        (tmp_path / WRITING).write_bytes(saved({"epoch": step, "shards": shards}))
        rotate(tmp_path, ["last"], {"step": step}, shards)
    (tmp_path / "shards-killed").mkdir()
    return tmp_path / "last.ckpt"


def test_sharded_weights_are_whole_and_unused_folders_are_removed(checkpoint):
    content = read_checkpoint(checkpoint)["state_dict"]
    assert content.keys() == WEIGHTS.keys()
    assert all(torch.equal(content[name], value + 2) for name, value in WEIGHTS.items())
    assert torch.equal(read_weights(checkpoint).state_dict["head.weight"], WEIGHTS["net.head.weight"] + 2)
    assert sorted(path.name for path in checkpoint.parent.glob("shards-*")) == ["shards-1", "shards-2", "shards-killed"]
    checkpoint.with_name(WRITING).write_bytes(saved({}))
    rotate(checkpoint.parent, ["last"], {"step": 3})
    assert [path.name for path in checkpoint.parent.glob("shards-*")] == ["shards-2"]


@pytest.mark.parametrize("kind", [torch.complex64, torch.complex128, torch.int16, torch.int8, torch.float8_e4m3fn])
def test_shards_of_every_type_that_is_written_are_read(tmp_path, kind):
    tensors = {"state_dict.net.turns": torch.tensor([1.0, 2.0]).to(kind)}
    shards = {"folder": "shards-a", "files": write_shards(tensors, tmp_path / "shards-a")}
    (tmp_path / "last.ckpt").write_bytes(saved({"shards": shards}))
    assert read_checkpoint(tmp_path / "last.ckpt")["state_dict"]["net.turns"].tolist() == [1, 2]


def test_a_damaged_or_missing_shard_is_reported(checkpoint):
    assert damage(checkpoint) is None
    shard = next((checkpoint.parent / "shards-2").glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert "has changed since it was written" in damage(checkpoint)
    shard.unlink()
    assert "is missing" in damage(checkpoint)
    with pytest.raises(ValueError, match=f"{shard.parent} is not a complete folder of shards"):
        read_weights(checkpoint)
    assert damage(checkpoint.with_name("previous.ckpt")) is None


class Evil:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_the_index_of_shards_cannot_run_code(checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shards-2" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match=r"posix.mkdir, which could run code"):
        read_checkpoint(checkpoint)
    with pytest.raises(ValueError, match="could run code"):
        read_weights(checkpoint)
    assert not (tmp_path / "executed").exists()
