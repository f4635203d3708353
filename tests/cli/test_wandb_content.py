"""What W&B gets of a run: read out of the files that an offline run leaves to be sent."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from wandb.proto import wandb_internal_pb2

TINY = ["--model=Classifier", "--model.patch_size=4", "--model.embed_dim=8", "--model.depth=1", "--model.num_heads=2"]
FIT = ["fit", *TINY, "--data=Digits", "--data.subset=0.2", "--trainer.accelerator=cpu", "--trainer.max_epochs=2"]
WANDB = ["--trainer.logger=WandbLogger", "--trainer.logger.project=p", "--trainer.logger.log_model=all"]
BLOCK = 32768  # of the log format of LevelDB, in which W&B writes


def records(path):
    """Yield the records of a .wandb file."""
    content, place, record = path.read_bytes(), 7, b""
    while place + 7 <= len(content):
        if BLOCK - place % BLOCK < 7:
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + 7])
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found, record = wandb_internal_pb2.Record(), record
            found.ParseFromString(record)
            yield found
            record = b""


def read(folder):
    """Return what a run is, its configuration, its summary, and the aliases of its artifacts."""
    run, config, summary, artifacts = None, {}, {}, []
    for record in records(next(folder.glob("*.wandb"))):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run = record.run
        for item in record.config.update if kind == "config" else ():
            config[item.key or item.nested_key[0]] = json.loads(item.value_json)
        for item in record.summary.update if kind == "summary" else ():
            summary[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
        if kind == "request" and record.request.HasField("log_artifact"):
            artifacts.append(list(record.request.log_artifact.artifact.aliases))
        if kind == "artifact":
            artifacts.append(list(record.artifact.aliases))
    return run, config, summary, artifacts


@pytest.mark.rare
def test_wandb_holds_the_whole_result_of_a_run_and_its_test_joins_it(tmp_path):
    known = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}

    def vitlab(*words):
        command = [sys.executable, "-m", "vitlab", *words]
        done = subprocess.run(command, cwd=tmp_path, env=known, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr

    vitlab(*FIT, *WANDB, "--name=w", "--seed_everything=3")
    vitlab("test", "w")
    folder = tmp_path / "runs" / "w"
    record, data, results = (json.loads((folder / f"{n}.json").read_text()) for n in ("run", "data", "results"))
    first, second = (read(Path(path)) for path in sorted((folder / "wandb").glob("offline-run-*")))
    run, config, summary, artifacts = first
    assert run.run_id == second[0].run_id == record["wandb_id"]
    assert run.run_group == second[0].run_group == record["recipe"]
    assert list(run.tags) == ["seed 3"]
    facts = config["facts"]
    assert facts["parameters"] == json.loads((folder / "model.json").read_text())["parameters"] and facts["macs"] > 0
    assert facts["samples"] == {name: split["hash"] for name, split in data["splits"].items()}
    assert (facts["commit"] or "").startswith(record["commit"] or "")
    assert ("with changes" in (facts["commit"] or "")) == bool(record["dirty"])
    assert summary["best/val/acc1"] == results["val"]["acc1"]
    assert summary["best/epoch"] == results["val"]["epoch"] and summary["ending"] == "finished"
    assert len(artifacts) == 2 and all("latest" in aliases for aliases in artifacts)
    assert second[2]["test/acc1"] == results["test"]["acc1"]
    vitlab("fit", "--resume", "w", "--trainer.max_epochs=8")
    third = read(Path(sorted((folder / "wandb").glob("offline-run-*"))[-1]))
    assert third[0].run_id == record["wandb_id"]
    assert third[2]["test/acc1"] is None and third[2]["test/weights"] is None  # of weights that went on
    assert second[2]["test/weights"] == "best.ckpt"
