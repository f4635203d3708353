"""What W&B gets of a run: read out of the files that an offline run leaves to be sent."""

import json
import os
import shutil
import socket
import sqlite3
import struct
import subprocess
import sys
import time
import urllib.request
from contextlib import closing, suppress
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


AGENT = """import os, sys
import yaml
from wandb.wandb_agent import Agent

os.environ["WANDB_SWEEP_ID"] = "sweep"
agent = Agent(api=None, queue=None)  # it asks no server, and starts what the file says as it always does
file = yaml.safe_load(open("sweep.yaml"))
agent._sweep_command = [*file["command"], *sys.argv[1:]]
values = {name: {"value": each.get("values", [each.get("max")])[-1]} for name, each in file["parameters"].items()}
agent._command_run({"run_id": "theagents", "program": None, "args": values})
sys.exit(agent._run_processes["theagents"].wait())"""


@pytest.mark.rare
def test_the_sweep_of_the_docs_trains_two_processes_in_the_run_that_its_agent_names(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()
    (tmp_path / "sweep.yaml").write_text(page.partition("test_wandb_content.py -->\n```yaml\n")[2].partition("```")[0])
    (tmp_path / "agent.py").write_text(AGENT)
    known = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    known |= {"WANDB_MODE": "offline", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    small = ["--trainer.max_epochs=1", "--data.subset=0.1", "--name=swept", "--trainer.accelerator=cpu"]
    both = ["--trainer.devices=2", "--trainer.strategy=ddp"]
    for words in (
        [sys.executable, "agent.py", *small, *both],
        ["vitlab", "test", "swept"],
        ["vitlab", "fit", "--resume", "swept", "--trainer.max_epochs=2"],
    ):
        done = subprocess.run(words, cwd=tmp_path, env=known, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "runs" / "swept"
    assert json.loads((folder / "run.json").read_text())["wandb_id"] == "theagents"
    found = [read(path) for path in sorted((folder / "wandb").glob("offline-run-*"))]  # of two processes, one
    assert [run.run_id for run, *_ in found] == ["theagents"] * 3
    (run, config, summary, _), (_, _, tested, _), _ = found
    assert run.sweep_id == "sweep" and run.run_group
    model, given = config["model"]["init_args"], {item.key or item.nested_key[0] for item in run.config.update}
    assert model["lr"] == 4e-3 and model["pos_embed"] == "sincos2d" and {"model.lr", "model.pos_embed"} <= given
    assert "best/val/acc1" in summary and "test/acc1" in tested


@pytest.fixture
def server(tmp_path):
    """A small server of W&B's protocol on this machine: its address, and the file of its database."""
    program = os.environ.get("OPENWANDB") or shutil.which("openwandb")
    if not program:
        pytest.skip("needs openwandb: pip install it into an environment of its own, and name the program in OPENWANDB")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [program, "serve", "--host", "127.0.0.1", "--port", str(port), "--data-dir", str(tmp_path / "server")]
    own = {**os.environ, "OPENWANDB_DATA_DIR": str(tmp_path / "server")}
    own.pop("PYTHONPATH", None)
    served = subprocess.Popen(words, env=own, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            with suppress(OSError):
                urllib.request.urlopen(address, timeout=5).close()
                break
            time.sleep(0.5)
        yield address, tmp_path / "server" / "openwandb.db"
    finally:
        served.terminate()
        served.wait(30)


@pytest.mark.rare
def test_a_server_has_one_run_of_two_processes_their_resumed_training_and_its_test(server, tmp_path):
    address, database = server
    known = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    known |= {"WANDB_BASE_URL": address, "WANDB_API_KEY": "local" + 40 * "0", "WANDB_INIT_TIMEOUT": "60"}
    both = ["--trainer.devices=2", "--trainer.strategy=ddp", "--seed_everything=3", "--name=w"]
    logger = [word for word in WANDB if "log_model" not in word]
    for words in (
        [*FIT, *logger, *both, "--trainer.log_every_n_steps=1", "--trainer.max_epochs=1"],
        ["fit", "--resume", "w", "--trainer.max_epochs=2"],
        ["test", "w"],
    ):
        line = [sys.executable, "-m", "vitlab", *words]
        done = subprocess.run(line, cwd=tmp_path, env=known, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0 and "offline" not in done.stdout + done.stderr, done.stdout + done.stderr
    record, results = (
        json.loads((tmp_path / "runs" / "w" / f"{name}.json").read_text()) for name in ("run", "results")
    )
    with closing(sqlite3.connect(database)) as kept:
        kept.row_factory = sqlite3.Row
        (run,) = kept.execute("select * from runs")
        steps = [row[0] for row in kept.execute("select distinct step from metrics order by step")]
    assert run["run_id"] == record["wandb_id"] and "seed 3" in json.loads(run["tags_json"])
    summary = json.loads(run["summary_json"])
    assert summary["test/acc1"] == results["test"]["acc1"] and summary["best/val/acc1"] == results["val"]["acc1"]
    assert steps and len(steps) >= sum("train/loss" in row for row in rows(tmp_path / "runs" / "w"))


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
