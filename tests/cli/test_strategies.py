"""Several processes: what each strategy does, refuses, and leaves behind."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import StrategyRegistry
from PIL import Image
from safetensors.torch import load_file
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from tests.cli.commands import finish
from vitlab.cli.main import main
from vitlab.config.strategies import Replicate, check_shards, divide_by_all_images
from vitlab.errors import UsageError
from vitlab.models.load import load_network

CONFIG = str(Path(__file__).parents[2] / "configs" / "vit.yaml")
FIT = ["fit", "--config", CONFIG, "--trainer.logger=false", "--trainer.max_epochs=2", "--data.subset=0.3"]
FIT += ["--data.batch_size=36", "--trainer.log_every_n_steps=1", "--trainer.gradient_clip_val=0.5"]
ONE = ["--trainer.devices=1", "--trainer.strategy=auto"]
TWO = ["--trainer.devices=2", "--trainer.strategy=fsdp2"]
LAST = "weights/last.safetensors"
EMA = '--trainer.callbacks=[{"class_path": "EMA", "init_args": {"decay": 0.9}}]'


def test_a_mean_over_processes_with_unlike_numbers_of_images_is_over_all_of_them():
    """Lightning divided the sum of 12 and 11 images by twice 11: an accuracy of 1 was 1.045."""
    strategy = SimpleNamespace(reduce=lambda own, group, how: own.copy_((own + 11) / 2) if how == "mean" else own)
    assert strategy.reduce(torch.tensor(12), None, "mean") == 11
    divide_by_all_images(strategy)
    assert strategy.reduce(torch.tensor(12)) == strategy.reduce(torch.tensor(12.0)) == 11.5
    assert strategy.reduce(torch.tensor(12), reduce_op="sum").dtype == torch.int64


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--trainer.strategy=ddp_bf16"], "compresses gradients between GPUs; on a CPU use ddp"),
        (
            ["--trainer.strategy=ddp_static", "--trainer.accumulate_grad_batches=2"],
            "`trainer.strategy=ddp_static` cannot",
        ),
        (["--trainer.strategy=fsdp2", EMA.replace("EMA", "EMAWeightAveraging")], "not EMAWeightAveraging"),
        (["--trainer.strategy=fsdp2", "--model.opt=adamuon"], "got `model.opt=adamuon`"),
        (["--trainer.strategy=fsdp2", "--trainer.callbacks=FeatureQuality"], "that FeatureQuality needs whole"),
        (["--trainer.strategy=fsdp2", "--trainer.callbacks=AttentionMaps"], "that AttentionMaps needs whole"),
        (
            ["--trainer.strategy=fsdp2", "--model=MAE", "--model.decoder_dim=8", "--model.decoder_heads=2"],
            "shards `net` alone, and MAE trains decoder.mask_token, ",
        ),
    ],
)
def test_what_a_strategy_cannot_do_is_refused(arguments, told, here, capsys):
    assert main([*FIT, *arguments]) == 2
    assert told in capsys.readouterr().err


class Keeps(torch.nn.Linear):
    def get_extra_state(self):
        return {"calls": 3}


@pytest.mark.parametrize(
    ("part", "told"),
    [
        (torch.nn.ParameterList([torch.tensor(1.0)]), r"shards no net\.0, which has no dimension to divide: make it a"),
        (torch.nn.Sequential(Keeps(2, 2)), r"keeps tensors alone, and no net\.0\._extra_state: use ddp"),
        (Keeps(2, 2), r"and no net\._extra_state"),
        (torch.nn.Linear(2, 2), ""),
    ],
)
def test_parts_that_have_no_shards_are_refused_before_the_training(part, told):
    task = L.LightningModule()
    task.net = part
    with pytest.raises(UsageError, match=told) if told else nullcontext():
        check_shards(task)


class Sum(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)

    def training_step(self, batch, i):
        assert i > 0 or all(p.grad is None for p in self.parameters())
        return (self.b(batch) + self.a(batch)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_sums_over_processes_are_the_same_in_the_first_step_as_in_all_others():
    seen = []

    def note(state, bucket):
        seen.append([p.shape for p in bucket.parameters()])
        return allreduce_hook(state, bucket)

    class Noting(Replicate):
        def _register_ddp_hooks(self):  # which Lightning does on GPUs alone
            self.model.register_comm_hook(None, note)

    trainer = L.Trainer(strategy=Noting(), accelerator="cpu", devices=1, max_steps=3, barebones=True)
    trainer.fit(Sum(), torch.utils.data.DataLoader(torch.ones(3, 3)))
    torch.distributed.destroy_process_group()
    zeros, *steps = seen
    assert steps == [zeros[::-1]] * 3  # DDP turns its buckets round after the first


NORMED = """import sys
import lightning as L
import torch
from vitlab.callbacks.ema import EMA
from vitlab.config.strategies import Replicate

def measure(rank, folder):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/met", rank=rank, world_size=2)
    strategy, task, ema = Replicate(), L.LightningModule(), EMA()
    task.net = torch.nn.BatchNorm1d(3)
    task.trainer = trainer = L.Trainer(callbacks=[ema], barebones=True)
    ema.setup(trainer, task, "fit")
    for module in (task, ema.average):
        module.net(torch.randn(8, 3) + 10 * rank)
    strategy._lightning_module = task
    strategy.on_validation_start()
    torch.save(torch.stack([task.net.running_mean, ema.average.net.running_mean]), f"{folder}/{rank}.pt")

if __name__ == "__main__":
    torch.multiprocessing.spawn(measure, (sys.argv[1],), 2)"""


@pytest.mark.parametrize("name", ["ddp", "ddp_static", "ddp_find_unused_parameters_true", "fsdp2"])
def test_all_processes_measure_with_every_buffer_of_the_first(name, monkeypatch):
    """Counts were each process's own, and under all strategies but ddp running statistics, too."""
    net = torch.nn.BatchNorm1d(3)
    net.register_buffer("counts", torch.arange(4))
    net.register_buffer("waves", torch.ones(2, dtype=torch.complex64))
    net.register_buffer("wide", torch.ones(3, 1).expand(3, 5))  # a broadcast into it wrote past its end
    net.register_buffer("empty", torch.ones(0))
    task, strategy = L.LightningModule(), StrategyRegistry.get(name)
    task.net, task.trainer, strategy._lightning_module = net, L.Trainer(barebones=True), task
    monkeypatch.setattr("torch.distributed.broadcast", lambda tensor, source: tensor.zero_())  # as if those were zeros
    for moment in (strategy.on_validation_start, strategy.on_test_start):
        net.reset_running_stats()
        net.counts.fill_(2)
        moment()
        assert not any(buffer.any() for buffer in net.buffers())


def test_an_expanded_buffer_gets_memory_of_its_own_under_ddp_static_too(monkeypatch):
    monkeypatch.setattr("lightning.pytorch.strategies.DDPStrategy.configure_ddp", lambda self: None)
    strategy, net = StrategyRegistry.get("ddp_static"), torch.nn.Linear(2, 2)
    net.register_buffer("wide", torch.ones(3, 1).expand(3, 5))
    strategy.model = net
    strategy.configure_ddp()
    assert net.wide.is_contiguous() and net.wide.shape == (3, 5)


@pytest.mark.rare
def test_processes_validate_with_the_running_statistics_that_are_saved(tmp_path):
    (tmp_path / "normed.py").write_text(NORMED)
    subprocess.run([sys.executable, "normed.py", str(tmp_path)], cwd=tmp_path, timeout=300, check=True)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert torch.equal(first, second) and first.abs().max() < 0.2  # of process 0, which adds nothing


def rows(cwd, name):
    lines = (cwd / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "train/loss" in row]


@pytest.fixture(scope="module", params=[[], ["--model.opt=muon", "--model.lr=5e-4", EMA]], ids=["adamw", "muon, EMA"])
def sharded(request, tmp_path_factory):
    """A folder with a finished run of two processes, called two; its options are those of FIT for the test."""
    folder = tmp_path_factory.mktemp("sharded")
    with mock.patch.object(sys.modules[__name__], "FIT", [*FIT, *request.param]):
        assert "Traceback" not in finish([*FIT, *TWO, "--name", "two"], folder)
        yield folder


@pytest.mark.rare
def test_sharded_training_is_that_of_one_process(sharded, here, capsys):
    shutil.copytree(sharded, here, dirs_exist_ok=True)
    assert main([*FIT, "--name", "one"]) == 0
    one, two = rows(here, "one"), rows(here, "two")
    assert len(one) == len(two)
    for ours, theirs in zip(one, two, strict=True):
        for name in ("train/loss", "grad_norm", "lr"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3)
    ours, theirs = (load_file(f"runs/{name}/weights/last.safetensors") for name in ("one", "two"))
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-3)  # of weights near 0.1
    assert main(["test", "two", *ONE]) == 0
    Image.new("L", (8, 8)).save("image.png")
    assert "shards" in torch.load("runs/two/checkpoints/last.ckpt", weights_only=True)
    for words in (["validate", "two", *ONE], ["export", "two", "--to=safetensors"], ["predict", "two", "image.png"]):
        assert main(words) == 0, capsys.readouterr().err
    net = load_network("runs/two/checkpoints/last.ckpt").state_dict()
    assert all(torch.equal(net[name], value) for name, value in theirs.items())
    for name, strategy in (("one", "fsdp2"), ("two", "ddp")):
        assert main(["fit", "--resume", name, f"--trainer.strategy={strategy}", "--trainer.max_epochs=3"]) == 2
        assert f"-> {strategy}" in capsys.readouterr().err


UNEVEN = """import sys
import lightning as L, torch
from vitlab.config import strategies
from vitlab.interface import Weighted
from vitlab.packed_batch import PackedBatch
from vitlab.tasks import Classifier

def train(devices):
    torch.manual_seed(0)
    net = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2, "init_std": 0.2}
    task = Classifier(**net, num_classes=3, opt="sgd", lr=0.5, lr_scheduler="constant", warmup_epochs=0)
    sizes = [(16, 16), (8, 24), (32, 8), (16, 8), (8, 8)]
    images, targets = [torch.randn(3, *sizes[i % 5]) for i in range(38)], torch.randint(3, (38,))
    weights = torch.rand(38) * 2
    shares = [(1, 4), (3, 2), (5, 1), (2, 2), (1, 1), (4, 3), (2, 3), (3, 1)]  # images of each process in each batch

    def batches():
        first, found = 0, []
        for one, other in shares:
            whole = first, first + one + other
            own = slice(*(whole if devices == 1 else [(first, first + one), (first + one, whole[1])][task.global_rank]))
            found.append(Weighted(PackedBatch.of(images[own], 8), targets[own], weights[own]))
            first = whole[1]
        return torch.utils.data.DataLoader(found, batch_size=None)

    task.train_dataloader = batches
    trainer = L.Trainer(
        max_epochs=2, devices=devices, strategy="auto" if devices == 1 else "ddp", accumulate_grad_batches=2,
        accelerator="cpu", gradient_clip_val=0.5, use_distributed_sampler=False, barebones=True)
    trainer.fit(task)
    assert trainer.global_step == 8
    return task.net.state_dict()

if __name__ == "__main__":
    torch.save(train(2), sys.argv[1])"""


@pytest.mark.rare
@pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's: no validation, few workers
def test_accumulated_weighted_batches_of_uneven_processes_equal_those_of_one(tmp_path):
    (tmp_path / "uneven.py").write_text(UNEVEN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "uneven.py", "two.pt"]
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    exec(UNEVEN, space := {"__name__": "uneven"})
    one, two = space["train"](1), torch.load(tmp_path / "two.pt", weights_only=True)
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=0, atol=1e-5)


STOPPING = """import os, signal, sys
from vitlab.cli.main import main
from vitlab.config.strategies import Replicate
from vitlab.tasks import Classifier as C
step, at = C.training_step, int(os.environ["STOP_AT"])
def stopping(self, batch, i):
    if self.trainer.global_step == at: signal.raise_signal(signal.SIGTERM)
    return step(self, batch, i)
C.training_step = stopping
sys.exit(main())"""


@pytest.mark.rare
def test_sharded_training_continues_on_any_number_of_processes(sharded, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # sums of several threads round differently
    (tmp_path / "stop.py").write_text(STOPPING)

    def stop(at, arguments):
        monkeypatch.setenv("STOP_AT", str(at))
        words = [sys.executable, "stop.py", *arguments]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 75, done.stdout + done.stderr

    def copied(name):
        shutil.copytree(tmp_path / "runs" / "parts", tmp_path / "runs" / name)
        return ["fit", "--resume", name]

    stop(8, [*FIT, *TWO, "--name", "parts"])
    finish([*copied("on three"), "--trainer.devices=3"], tmp_path)
    stop(16, [*copied("on one, then two"), "--trainer.devices=1"])
    finish(["fit", "--resume", "on one, then two", "--trainer.devices=2"], tmp_path)
    finish(["fit", "--resume", "parts"], tmp_path)
    there, theirs = rows(sharded, "two"), load_file(sharded / "runs" / "two" / LAST)
    for name in ("on three", "on one, then two", "parts"):
        here, ours = rows(tmp_path, name), load_file(tmp_path / "runs" / name / LAST)
        assert [row["step"] for row in here] == [row["step"] for row in there]
        assert [row["train/loss"] for row in here] == pytest.approx([row["train/loss"] for row in there], rel=1e-4)
        for key in ours:
            torch.testing.assert_close(ours[key], theirs[key], rtol=1e-3, atol=1e-3)  # of weights near 0.1
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)  # of parts, on two as before
    finish(["fit", "--resume", "parts", "--trainer.devices=1", "--trainer.max_epochs=3"], tmp_path)
    steps = [row["step"] for row in rows(tmp_path, "parts")]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) * 2 == len(there) * 3


SHARES = """import copy, sys
import timm.optim.muon
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from vitlab.config.strategies import SHARDED
from vitlab.models import VisionTransformer
from vitlab.optim import param_groups
from vitlab.tasks.optimizer import build_optimizer

orthogonal = timm.optim.muon.zeropower_via_newtonschulz  # rounds to bfloat16, which hides what differs
orthogonal.__defaults__ = tuple(torch.float64 if one is torch.bfloat16 else one for one in orthogonal.__defaults__)

def train(net, name, images, targets):
    opt = build_optimizer(name, param_groups(net, 1e-2, 0.0 if name in ("Adadelta", "Adagrad") else 0.05), 1e-2, net)
    for batch, answers in zip(images, targets):
        torch.nn.functional.cross_entropy(net(batch), answers).backward()
        opt.step()
        opt.zero_grad()

def work(rank):
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
    torch.manual_seed(0)
    whole = VisionTransformer(**sizes, init_std=0.2, qkv_bias=False).double()  # a bias of keys has no gradient
    images, targets = torch.randn(4, 8, 3, 16, 16).double(), torch.randint(5, (4, 8))
    for name in SHARDED:
        one, two = copy.deepcopy(whole), copy.deepcopy(whole)
        for part in (*two.blocks, two):
            fully_shard(part, mesh=mesh)
        train(one, name, images, targets)
        train(two, name, *(each[:, 4 * rank : 4 * rank + 4] for each in (images, targets)))
        found = get_model_state_dict(two, options=StateDictOptions(full_state_dict=True))
        for key in found:  # of rank 0
            torch.testing.assert_close(found[key], one.state_dict()[key], rtol=0, atol=1e-9, msg=f"{name}: {key}")
        assert not torch.equal(one.head.weight, whole.head.weight), name
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, nprocs=2)"""


@pytest.mark.rare
def test_every_accepted_optimizer_takes_the_same_steps_on_shards_as_on_whole_weights(tmp_path):
    (tmp_path / "shares.py").write_text(SHARES)
    words = [sys.executable, "shares.py", str(tmp_path / "meet")]
    own = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=tmp_path, env=own, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
