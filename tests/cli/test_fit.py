import contextlib
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pandas as pd
import pytest
import torch
import wandb
import yaml
from safetensors.torch import load_file

from tests.cli.commands import CONFIGS, T2T, finish
from vitlab.callbacks.record import RunRecord
from vitlab.cli.main import main
from vitlab.data.timm_images import images_of_timm
from vitlab.jobs.subject_without_run import _data_for
from vitlab.jobs.train.initial import LibraryImages
from vitlab.jobs.train.start import _first_record
from vitlab.layers.pos_embed import PosEmbedName
from vitlab.runs.directory import RunDir

SHORT = [*T2T, "--trainer.max_epochs=2", "--data.subset=0.2", "--model.depth=1"]
OFTEN = ("learned", "relpos", "rope2d")  # a table, a bias, a rotation


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of two short epochs."""
    with contextlib.chdir(tmp_path_factory.mktemp("fit")):
        assert main(["fit", *SHORT, "--name", "short", "--model.pos_embed=sincos2d"]) == 0
        yield Path("runs/short").absolute()


def read(path):
    return json.loads(path.read_text())


def test_a_run_leaves_all_that_later_commands_need(run):
    left = {str(p.relative_to(run)) for p in run.rglob("*") if p.is_file()}
    expected = {"config.yaml", "overrides.yaml", "run.json", "metrics.jsonl", "results.json", "param_groups.json"}
    expected |= {
        "model.json",
        "data.json",
        "trained_on.npy",
        "train.log",
        "checkpoints/last.ckpt",
        "checkpoints/best.ckpt",
    }
    expected |= {
        "checkpoints/manifest.json",
        "checkpoints/previous.ckpt",
        "weights/best.safetensors",
        "weights/last.safetensors",
    }
    expected |= {"moments/000000003.npz"}  # maps of eight images after the first epoch, for look
    assert left - {"moments/000000006.npz"} == expected  # after the second if the first took 1% of the CPU time at most
    record = read(run / "run.json")
    assert (record["status"], record["attempts"], record["seed"]) == ("done", 1, 0)
    assert 2**26 < record["peak_memory"]["host"] < 2**36
    assert {"commit", "dirty", "diff"} <= record.keys()
    assert record["promises"]["weights"].startswith("bit-identical with 1 process, ")
    assert yaml.safe_load((run / "overrides.yaml").read_text())["model.pos_embed"] == "sincos2d"
    assert read(run / "results.json")["val"]["n"] == sum(read(run / "data.json")["splits"]["val"]["class_counts"])


def test_the_config_of_a_run_trains_it_again(run, here):
    assert main(["fit", "--config", str(run / "config.yaml"), "--name", "again"]) == 0
    ours, theirs = load_file(run / "weights/last.safetensors"), load_file(here / "runs/again/weights/last.safetensors")
    assert all(torch.equal(ours[k], theirs[k]) for k in ours)


def test_the_manifest_has_the_checksum_of_each_checkpoint(run):
    folder = run / "checkpoints"
    manifest = read(folder / "manifest.json")
    assert {path.name for path in folder.iterdir()} == {*manifest, "manifest.json"}
    for name, entry in manifest.items():
        assert entry["sha256"] == hashlib.sha256((folder / name).read_bytes()).hexdigest()


def test_training_reads_neither_loggers_nor_the_test_split(run):
    assert set(read(run / "data.json")["splits"]) == {"train", "val"}
    assert "test" not in read(run / "results.json")


def test_checkpoints_of_a_run_load_without_running_code(run):
    state = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    assert state["hyper_parameters"]["pos_embed"] == "sincos2d"
    weights = load_file(run / "weights" / "last.safetensors")
    assert all(torch.equal(state["state_dict"][f"net.{k}"], v) for k, v in weights.items())


def test_rows_of_metrics_are_means_over_all_samples(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [r["epoch"] for r in rows if "val/loss" in r] == [0, 1]
    assert all(r["lr"] > 0 and r["images_per_second"] > 0 for r in rows if "train/loss" in r)


def test_a_run_records_which_parameters_decay(run):
    rows = {r["name"]: r for r in read(run / "param_groups.json")}
    assert rows["cls_token"]["weight_decay"] == rows["norm.weight"]["weight_decay"] == 0
    assert rows["head.weight"]["weight_decay"] == 0.05


def test_the_sum_of_the_learning_rates_is_written_down(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    record = read(run / "run.json")
    assert record["steps"] == rows[-1]["step"]
    assert max(r["lr"] for r in rows if "lr" in r) <= record["sum_of_learning_rates"] <= 2e-3 * record["steps"]
    assert record["sum_of_learning_rates_pos_embed"] == record["sum_of_learning_rates"]


def test_after_a_resume_with_more_epochs_the_record_has_the_rates_that_were_used(here, monkeypatch):
    used, file = [], here / "runs" / "longer" / "run.json"
    step = RunRecord.on_before_optimizer_step

    def spy(self, trainer, task, optimizer):
        used.append(optimizer.param_groups[0]["lr"])
        step(self, trainer, task, optimizer)

    monkeypatch.setattr(RunRecord, "on_before_optimizer_step", spy)
    assert main(["fit", *SHORT, "--data.subset=0.1", "--name", "longer"]) == 0
    first = read(file)
    assert first["sum_of_learning_rates"] == pytest.approx(sum(used)) and first["plans"] == [[0, len(used)]]
    assert main(["fit", "--resume", "longer", "--trainer.max_epochs=4", "--data.num_workers=1"]) == 0
    record = read(file)
    assert record["sum_of_learning_rates"] == pytest.approx(sum(used))
    assert record["plans"] == [[0, first["steps"]], [first["steps"], len(used)]]
    assert "resumed with changes" in record["promises"]["weights"]


def test_a_resume_without_changes_that_matter_keeps_promises_and_rates(run, here):
    run = RunDir(shutil.copytree(run, here / "runs" / "same"))
    before = read(run.path / "run.json")
    run.update("run.json", status="preempted")
    assert main(["fit", "--resume", "same", "--data.num_workers=1"]) == 0
    after = read(run.path / "run.json")
    assert [after[k] for k in ("plans", "promises", "sum_of_learning_rates")] == [
        before[k] for k in ("plans", "promises", "sum_of_learning_rates")
    ]


def test_an_attempt_without_wandb_and_with_other_code_keeps_the_wandb_run_and_records_the_code(tmp_path, monkeypatch):
    monkeypatch.setattr("vitlab.jobs.train.start.changed_code", lambda before, content: {"mine": "b"})
    run = RunDir(tmp_path)
    run.write("run.json", {"wandb_id": "first", "own_code": {"mine": "a"}, "changes": [{"trainer.max_epochs": 4}]})
    run.write_text("overrides.yaml", "{}")
    options = SimpleNamespace(init_from=None, start=None, resize=None, init_grid=None, resume="last")
    facts = {"recipe": "vit", "arguments": [], "resumed": True, "stored_config": {}, "wandb_id": "second"}
    record = _first_record(SimpleNamespace(run=run, options=options, wandb_line=None, **facts))
    assert record["wandb_id"] == "first"
    assert record["changes"] == [{"trainer.max_epochs": 4}, {"own_code": {"mine": "b"}}]


def test_a_requeue_with_the_words_of_the_first_start_records_no_change(here):
    words = ["fit", *SHORT, "--trainer.callbacks+=Timer", "--name=added"]
    assert main(words) == 0
    run = RunDir(here / "runs" / "added")
    run.update("run.json", status="preempted")
    assert main([*words, "--auto_resume"]) == 0
    assert read(run.path / "run.json")["changes"] == []


LANCZOS = {"input_size": (3, 32, 32), "interpolation": "lanczos", "crop_mode": "squash", "mean": (0.5,), "std": (0.2,)}
NO_LANCZOS = r"^these weights .* interpolation lanczos, .*: set --data\.interpolation to one of bilinear, bicubic$"


@pytest.mark.parametrize("given", [None, "bicubic"])
def test_a_filter_that_the_user_gives_replaces_one_of_the_weights_that_does_not_exist_here(given, monkeypatch):
    monkeypatch.setattr("vitlab.jobs.train.initial.peer_images", lambda name: LANCZOS)
    data = SimpleNamespace(class_path="vitlab.data.Digits", init_args={"interpolation": given or "bilinear"})
    settings = [("data.init_args.interpolation", given)]
    net = SimpleNamespace(img_size=(8, 8), in_chans=1, pretrained_cfg=LANCZOS)
    words = ["--data=Digits", *([f"--data.interpolation={given}"] if given else [])]
    reads = [partial(LibraryImages.of, "hf:theirs", data, settings), partial(_data_for, net, "hf:theirs", words, None)]
    if given is None:
        for read_images in reads:
            with pytest.raises(ValueError, match=NO_LANCZOS):
                read_images()
        return
    library, own = (read_images() for read_images in reads)
    assert own.pipeline.interpolation == "bicubic"
    assert data.init_args == {"interpolation": "bicubic", "crop_mode": "squash"}
    assert library.known["interpolation"] == "lanczos"  # which the header tells


def test_a_folder_of_timm_whose_filter_does_not_exist_here_is_not_called_unreadable(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "test_vit", "pretrained_cfg": LANCZOS}))
    with pytest.raises(ValueError, match=NO_LANCZOS):
        images_of_timm(f"timm:local-dir:{tmp_path}")


def test_the_header_says_which_options_rule_out_the_fast_path_of_t2t(here, capsys):
    assert main(["fit", *T2T, "--dry_run", "--model.t2t_padding=reflect", "--model.t2t_value_skip=false"]) == 0
    assert "; t2t_padding and t2t_value_skip: the soft splits use the slower plain" in capsys.readouterr().out
    assert main(["fit", *T2T, "--dry_run"]) == 0
    assert "slower plain" not in capsys.readouterr().out


def test_the_header_says_when_positions_rule_out_flash_attention(here, capsys):
    assert main(["fit", *SHORT, "--dry_run", "--model.pos_embed=relpos"]) == 0
    assert "rules out flash kernels" in capsys.readouterr().out
    assert main(["fit", *SHORT, "--dry_run", "--model.pos_embed=rope2d", "--model.num_heads=4"]) == 0
    assert "flash" not in capsys.readouterr().out


def test_a_finished_run_is_measured_without_a_config(run, capsys):
    assert main(["test", str(run)]) == 0
    assert (run / "openings.jsonl").read_text().count('"split": "test"') == 1
    assert main(["validate", "last"]) == 0
    results = read(run / "results.json")
    assert results["test"]["n"] == 359
    assert "test/acc1" in capsys.readouterr().out
    fit, alone = results["val"], read(run / "results.json")["val"]
    assert alone["loss"] == pytest.approx(fit["loss"], abs=1e-6)


def test_a_variation_is_stored_beside_the_result(run):
    main(["test", str(run)])
    before = read(run / "results.json")["test"]
    assert main(["test", str(run), "--data.batch_size=32"]) == 0
    after = read(run / "results.json")
    assert after["test"] == before
    assert after["variations"][-1]["overrides"] == {"data.batch_size": 32}
    assert after["variations"][-1]["loss"] == pytest.approx(before["loss"], abs=1e-6)


def test_testing_at_another_image_size_needs_the_data_record_of_the_run(run, capsys):
    words = ["test", str(run), "--data.img_size=12"]
    assert main(words) == 0
    assert "variation with data.img_size=12 resize=rescale: test/" in capsys.readouterr().out
    result = read(run / "results.json")["variations"][-1]
    assert result["overrides"] == {"data.img_size": 12, "resize": "rescale"}
    assert "rescale from 4 x 4 to 6 x 6" in result["resized"]
    again = RunDir(run).standing("test", {**result, "sha256": 64 * "0"}).text.split("`")[1]
    assert main(shlex.split(again)[1:]) == 0
    assert read(run / "results.json")["variations"][-1] == result  # the command that is advised measures the same
    assert main([*words, "--model.pos_embed=[sincos2d,rope2d]", "--no_antialias"]) == 0
    listed = read(run / "results.json")["variations"][-1]
    assert "sincos2d by rescale, rope2d by extrapolate from 4 x 4 to 6 x 6" in listed["resized"]
    methods = {"model.pos_embed": ["sincos2d", "rope2d"]}
    assert listed["overrides"] == {"data.img_size": 12, **methods, "no_antialias": True}
    facts = (run / "data.json").rename(run / "facts.json")
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(f"vitlab: {run} has no data.json: copy it")
    facts.rename(run / "data.json")


def test_measuring_keeps_a_prediction_for_each_image(run):
    for command, split in (("test", "test"), ("validate", "val")):
        assert main([command, str(run), "--quiet"]) == 0
        result, table = read(run / "results.json")[split], pd.read_parquet(run / f"predictions/{split}.parquet")
        assert list(table.columns) == ["index", "target", "prediction", "probability", "probabilities"]
        assert table["index"].tolist() == list(range(int(result["n"])))
        assert (table["target"] == table["prediction"]).mean() == pytest.approx(result["acc1"], abs=1e-6)
        assert table["probability"].between(0.1, 1).all()
        assert [row.argmax() for row in table["probabilities"]] == table["prediction"].tolist()
    before = (run / "predictions/test.parquet").read_bytes()
    assert main(["test", str(run), "--quiet", "--model.pos_embed=none"]) == 0
    assert (run / "predictions/test.parquet").read_bytes() == before  # a variation's are not kept


def test_an_existing_run_is_neither_touched_nor_lost(run, capsys):
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    assert main(["fit", *SHORT, "--name", "short"]) == 2
    assert "--resume" in capsys.readouterr().err
    assert main(["fit", *SHORT, "--name", "short", "--resume", "--model.lr=0.5"]) == 2
    assert "model.lr: 0.002 -> 0.5" in capsys.readouterr().err
    assert before == {p: p.stat().st_mtime_ns for p in run.rglob("*")}


def test_overwrite_deletes_runs_only(here, capsys):
    (here / "precious").mkdir()
    (here / "precious" / "thesis.tex").write_text("x")
    assert main(["fit", *SHORT, "--run_dir", "precious", "--overwrite"]) == 2
    assert "contains thesis.tex" in capsys.readouterr().err
    assert (here / "precious" / "thesis.tex").exists()


def test_overwrite_deletes_nothing_after_a_mistake(run, here):
    quick = [*SHORT, "--data.subset=0.1", "--name", "again", "--overwrite"]
    shutil.copytree(run, here / "runs" / "again")
    first = read(here / "runs" / "again" / "run.json")
    assert main(["fit", *quick, "--model.num_heads=5"]) == 2
    assert main(["fit", *quick, "--dry_run"]) == 0
    assert read(here / "runs" / "again" / "run.json") == first
    assert main(["fit", *quick]) == 0
    assert read(here / "runs" / "again" / "run.json")["attempts"] == 1


def test_a_dry_run_shows_the_header_and_writes_nothing(here, capsys):
    assert main(["fit", *SHORT, "--trainer.accumulate_grad_batches=1000", "--dry_run"]) == 0
    out = capsys.readouterr().out
    assert "4x4 tokens" in out
    assert "235 training" in out and ", batch 192, " in out  # of the 3 batches of an epoch
    assert "position embedding sincos1d" in out
    assert list(here.iterdir()) == []


def test_wandb_is_one_offline_run_and_no_key_is_needed(here, monkeypatch):
    words = ["--config", str(CONFIGS / "vit.yaml"), "--trainer.max_epochs=1", "--data.subset=0.1", "--name", "w"]
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_RUN_GROUP", "the-group")  # as an ablation sets them for its cells
    monkeypatch.setenv("WANDB_JOB_TYPE", "the-arm")
    wandb.teardown()  # of the runs of tests before; it reads the environment once for all of a process
    for place in (here / "one", here / "two"):  # as a notebook may go from folder to folder
        place.mkdir()
        monkeypatch.chdir(place)
        assert main(["fit", *words]) == 0
    for place in (here / "one", here / "two"):
        (folder,) = (place / "runs" / "w" / "wandb").glob("offline-run-*")
        sent = next(folder.glob("*.wandb")).read_bytes()
        assert b"the-group" in sent and b"the-arm" in sent
        assert read(place / "runs" / "w" / "run.json")["wandb_id"]


@pytest.mark.parametrize(
    "pos_embed", [p if p in OFTEN else pytest.param(p, marks=pytest.mark.rare) for p in get_args(PosEmbedName)]
)
def test_every_position_embedding_trains_from_the_same_config(here, pos_embed):
    arguments = ["--model.pos_embed", pos_embed, "--trainer.limit_train_batches=2", "--trainer.max_epochs=1"]
    assert main(["fit", *T2T, *arguments, "--name", pos_embed]) == 0
    assert read(here / "runs" / pos_embed / "run.json")["status"] == "done"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["t2t", "vit"])
def test_a_run_trains_on_the_gpu_in_bf16_and_is_measured_on_it(here, name):
    device = ["--trainer.accelerator=gpu", "--trainer.devices=1", "--trainer.precision=bf16-mixed"]
    config = ["--config", str(CONFIGS / f"{name}.yaml"), "--trainer.logger=false", "--trainer.max_epochs=15"]
    assert main(["fit", *config, *device, "--name", name]) == 0
    assert main(["test", name]) == 0
    assert read(here / "runs" / name / "results.json")["test"]["acc1"] > 0.85


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch's own, which the terminal does not show
@pytest.mark.parametrize("more", [[], ["--trainer.accumulate_grad_batches=2"]], ids=["plain", "accumulated"])
def test_a_run_with_recorded_kernels_trains_validates_and_goes_on(here, more):
    config = ["--config", str(CONFIGS / "vit.yaml"), "--trainer.logger=false", "--model.compile=reduce-overhead"]
    device = ["--trainer.accelerator=gpu", "--trainer.devices=1"]
    assert main(["fit", *config, *device, *more, "--name=recorded", "--trainer.max_epochs=10"]) == 0
    assert main(["fit", "--resume=recorded", "--trainer.max_epochs=15"]) == 0
    assert main(["test", "recorded"]) == 0
    assert read(here / "runs" / "recorded" / "results.json")["test"]["acc1"] > 0.85


@pytest.mark.rare
def test_a_dry_run_downloads_nothing_and_says_what_training_would(here, capsys, monkeypatch):
    monkeypatch.setattr("torchvision.datasets.CIFAR10.download", lambda _: pytest.fail("a download"))
    assert main(["fit", "--config", "cifar10_t2t", "--trainer.logger=false", "--dry_run"]) == 0
    assert "not here: data/cifar-10-batches-py (170 MB), which training would download" in capsys.readouterr().out
    assert not list(here.iterdir())


def test_a_dry_run_imports_only_what_it_uses(here):
    def imported(code, then=""):
        code = f"import sys\n{code}\nprint(*{unused} & set(sys.modules))\n{then}"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return set(done.stdout.splitlines()[-1].split())

    unused = {"scipy.signal", "sklearn", "pandas", "pyarrow", "timm", "captum", "onnx", "optuna", "datasets"}
    found = imported(
        "from vitlab.cli.main import main\n"
        "assert main(['fit', '--config', 't2t', '--dry_run', '--trainer.logger=false']) == 0",
        "import gc\nfrom scipy.signal import convolve\nassert gc.isenabled() and convolve([1], [2]) == 2",
    )
    if found:  # some libraries import each other
        found -= imported("import lightning.pytorch, torchmetrics")
    assert not found


@pytest.mark.rare
def test_two_processes_share_one_run_and_count_every_image_once(tmp_path):
    arguments = ["fit", "--config", str(CONFIGS / "t2t.yaml"), "--trainer.max_epochs=1", "--trainer.accelerator=cpu"]
    output = finish([*arguments, "--trainer.devices=2", "--trainer.strategy=ddp", "--name", "two"], tmp_path)
    run = tmp_path / "runs" / "two"
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["two"]
    assert len(list((run / "wandb").glob("offline-run-*"))) == 1
    assert read(run / "results.json")["val"]["n"] == read(run / "data.json")["splits"]["val"]["n"]
    assert output.count("multiply-adds per image") == 1
    finish(["test", "two"], tmp_path)
    assert read(run / "results.json")["test"]["n"] == 359
    assert pd.read_parquet(run / "predictions/test.parquet")["index"].tolist() == list(range(359))
    before = read(run / "results.json")["test"]
    script = "import vitlab; print('once'); print('n', vitlab.Run('two').test()['n'])"
    (tmp_path / "measure.py").write_text(script)  # Lightning would start it again for the second process
    command = [sys.executable, "measure.py"]
    output = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=True).stdout
    assert output.split() == ["once", "n", "359.0"]
    assert read(run / "results.json")["test"] == before | {"loss": pytest.approx(before["loss"], abs=1e-6)}
