import hashlib
import json
import os
import shutil

import pytest
import torch
from safetensors.torch import save_file

from vitlab.config.trust import trust
from vitlab.runs import standing as module
from vitlab.runs.directory import RunDir
from vitlab.runs.manifest import file_digest


def saved(run, **contents):
    """Write checkpoints with these contents, and the manifest that goes with them."""
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    entries = {}
    for stem, content in contents.items():
        path = run.checkpoints / f"{stem}.ckpt"
        path.write_bytes(content)
        status = path.stat()
        entries[path.name] = {
            "sha256": hashlib.sha256(content).hexdigest(),
            "size": status.st_size,
            "modified": status.st_mtime_ns,
        }
    (run.checkpoints / "manifest.json").write_text(json.dumps(entries))


def measured(run, stem, split="test", acc1=0.5, **more):
    digest = file_digest(run.checkpoints / f"{stem}.ckpt")
    run.update("results.json", **{split: {"acc1": acc1, "checkpoint": f"{stem}.ckpt", "sha256": digest, **more}})


def test_a_number_belongs_to_the_checkpoint_until_another_takes_its_name(tmp_path):
    run = RunDir(tmp_path / "a")
    saved(run, best=b"one", last=b"one")
    measured(run, "best")
    assert run.standing("test") == module.Standing("current") and run.measured("test")["acc1"] == 0.5
    saved(run, best=b"two", last=b"two", previous=b"one")  # a resume: the old file is there under another name
    why = f"measured before it went on; run `vitlab test {run.path}`"
    assert run.standing("test") == module.Standing("stale", why) and run.measured("test") == {}
    (row,) = run.results["stale"]
    assert "test" not in run.results and (row["split"], row["acc1"], row["why"]) == ("test", 0.5, why)
    saved(run, best=b"one", last=b"two")  # the best epoch is still the old one
    assert run.standing("test").kind == "current"


def test_a_number_of_another_checkpoint_is_shown_with_a_note(tmp_path):
    run = RunDir(tmp_path / "a")
    saved(run, best=b"one", last=b"two")
    measured(run, "last")
    assert run.standing("test").text == f"measured with last.ckpt; `vitlab test {run.path}` measures best.ckpt"
    assert run.measured("test")["acc1"] == 0.5
    saved(run, best=b"two", last=b"two")
    assert run.standing("test").kind == "current"


def test_no_checkpoint_is_read_that_the_manifest_knows_and_a_copy_only_once(tmp_path, monkeypatch):
    run = RunDir(tmp_path / "a")
    saved(run, best=b"one")
    measured(run, "best")
    reads = []
    monkeypatch.setattr(module, "file_digest", lambda path: reads.append(path) or file_digest(path))
    assert run.standing("test").kind == "current" and reads == []
    shutil.copytree(run.path, tmp_path / "b", copy_function=shutil.copyfile)  # as `cp -r`: other times
    for _ in range(2):
        module._of_content.cache_clear()  # another process
        assert RunDir(tmp_path / "b").standing("test").kind == "current"
    assert len(reads) == 1 and module._read(tmp_path / "b" / "checkpoints" / ".digests.json").keys() == {"best.ckpt"}
    (tmp_path / "b" / "checkpoints" / "best.ckpt").write_bytes(b"two")  # as long as the one before
    assert RunDir(tmp_path / "b").standing("test").is_stale


def test_files_of_one_size_and_one_time_are_told_apart(tmp_path):
    run = RunDir(tmp_path / "a")
    saved(run, best=b"one", last=b"two")
    measured(run, "last")
    for stem in ("best", "last"):
        os.utime(run.checkpoints / f"{stem}.ckpt", ns=(10**18, 10**18))  # `touch` at one tick of the clock
    assert [run.standing("test").kind for _ in range(2)] == ["other", "other"]


@pytest.mark.parametrize("digest", [None, "0"])
def test_a_result_without_a_checksum_is_shown_with_a_note(tmp_path, digest):
    run = RunDir(tmp_path / "a")
    saved(run, best=b"one")
    run.write("results.json", {"test": {"acc1": 0.5, "checkpoint": "best.ckpt", "sha256": digest}})
    assert run.standing("test").kind == "unknown" and "maybe of older weights" in run.standing("test").text
    assert run.measured("test")["acc1"] == 0.5


def test_weights_identify_their_checkpoint_after_it_was_deleted(tmp_path):
    run = RunDir(tmp_path / "a")
    saved(run, best=b"one")
    measured(run, "best")
    digest = file_digest(run.checkpoints / "best.ckpt")
    shutil.rmtree(run.checkpoints)
    assert run.standing("test").kind == "gone" and run.measured("test")
    run.weights.mkdir()
    for origin, kind in ((digest, "current"), ("1" * 64, "stale")):
        save_file({"x": torch.zeros(1)}, run.weights / "best.safetensors", metadata={"checkpoint": origin})
        assert run.standing("test").kind == kind
    save_file({"x": torch.zeros(1)}, run.weights / "best.safetensors", metadata={"format": "pt"})  # an older vitlab
    assert run.standing("test").kind == "gone"


def test_the_command_that_measures_again_is_that_of_the_split_and_the_variation(tmp_path):
    run = RunDir(tmp_path / "a")
    saved(run, best=b"one")
    measured(run, "best", "val")
    old = {"split": "test", "acc1": 0.1, "checkpoint": "best.ckpt", "sha256": "1" * 64}
    run.update("results.json", variations=[{**old, "overrides": {"model.pos_embed": "none"}}])
    (stale,) = run.results["stale"]
    assert stale["why"].endswith(f"run `vitlab test {run.path} --model.pos_embed=none`")
    assert "variations" not in run.results
    sentence = "positions: rescale from 4 x 4 to 8 x 8, norm of a position x 1.00"  # as it was once stored
    for split, overrides, typed in (
        ("test", {"data.fold": None, "data.subset": 0.5}, "--data.fold=null --data.subset=0.5"),
        ("test", {"resize": sentence}, "--resize=rescale"),
        ("test", {"resize": "positions: trained with A, the model has B", "model.lr": 1}, "--model.lr=1"),
        ("test", {"resize": "interpolate", "no_antialias": True}, "--resize=interpolate --no_antialias"),
        ("test with training images", {}, "--with_training_images"),
    ):
        run.update("results.json", variations=[{**old, "split": split, "overrides": overrides}])
        assert run.results["stale"][0]["why"].endswith(f"run `vitlab test {run.path} {typed}`")
    saved(run, best=b"two")
    assert run.standing("val").text.endswith(f"run `vitlab validate {run.path}`")
    trust(["userpkg"])  # as on a command line that needs it
    assert run.standing("val").text.endswith(f"run `vitlab validate {run.path} --trust_imports userpkg`")


def test_an_analysis_of_other_weights_is_known_as_such(tmp_path):
    run = RunDir(tmp_path / "a")
    saved(run, best=b"one")
    note = {"note": "x", "checkpoint": "best.ckpt", "sha256": file_digest(run.checkpoints / "best.ckpt")}
    run.write("analysis/notes.json", {"errors": note, "position": {"not_done": "there is no table"}})
    assert run.note("errors")[1].kind == run.note("position")[1].kind == "current" and run.note("cka")[0] == {}
    saved(run, best=b"two")
    assert run.note("errors")[1].text.endswith(f"run `vitlab analyze errors {run.path}`")
    assert run.note("position")[1].kind == "current"
