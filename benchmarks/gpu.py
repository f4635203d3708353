"""What vitlab does on a GPU, on one page: one command, ten minutes.

    python benchmarks/gpu.py benchmarks/gpu.md                                    # `make benchmarks-gpu`
    python benchmarks/gpu.py FILE --device cpu --side 96 --batch 8 --minutes 5    # the same steps, small, without a GPU

Positions and recipes take whole training steps, as a task takes them: network, loss, backward pass, optimizer, on
images that lie on the device. On a GPU the network is compiled; recipes are compiled several at once, by processes that
leave the result in torch's cache, before the first is timed. What a time limit leaves out is named.
"""

import argparse
import gc
import json
import math
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, get_args

import torch
import yaml
from torch import Tensor

import vitlab
from bench.model import Case, compiled_as_used, step
from bench.networks import NETWORKS, build, ours
from bench.numerics import difference, images_of, results
from bench.pairs import IN_A_ROW, compare, interleave, timed
from bench.report import machine_line
from cluster.daemons import wait_for
from vitlab.callbacks.steps import peak_flops
from vitlab.interface import trained
from vitlab.layers.compiled import compile_parts
from vitlab.layers.pos_embed import PosEmbedName
from vitlab.models.cost import count_macs
from vitlab.models.vit import VisionTransformer
from vitlab.pretraining import MAE
from vitlab.runs.machine import facts
from vitlab.tables import table
from vitlab.tasks import Classifier
from vitlab.tasks.optimizer import build_optimizer

CONFIGS = Path(__file__).parents[1] / "configs"
TASKS: dict[str, Callable[..., Any]] = {"Classifier": Classifier, "MAE": MAE}
LEFT_OUT = {"Distillation": "its teacher is a file", "DINO": "its crops come from the loader"}
NETWORK = "vit_s16"  # of the position embeddings
ROUNDS, SECONDS = 15, 3.0  # at most: of the position embeddings, and of a recipe
# of the time that is left, spent at most
SHARES = {"positions": 0.35, "compiled": 0.05, "numerics": 0.15, "recipes": 1.0}
AHEAD = max(1, (os.cpu_count() or 1) // 2)  # processes that compile recipes


class Images(NamedTuple):
    """A data set: its training images, without the 1 % of ImageNet's that validate, and what they look like."""

    number: int
    in_chans: int
    num_classes: int
    side: int


DATA = {
    "ImageNet": Images(1_268_355, 3, 1000, 224),
    "CIFAR10": Images(50_000, 3, 10, 32),
    "CIFAR100": Images(50_000, 3, 100, 32),
    "FashionMNIST": Images(60_000, 1, 10, 28),
}


class Training:
    """A task with its optimizer and a batch on the device.

    Args:
        task: The task.
        shape: ``(B, C, H, W)`` of a batch.
        num_classes: Number of classes of the targets.
        device: ``cuda`` or ``cpu``.
        half: Whether steps are taken in bfloat16.
    """

    def __init__(self, task: Any, shape: tuple[int, ...], num_classes: int, device: str, half: bool) -> None:
        self.macs, self.batch = count_macs(trained(task), (shape[-2], shape[-1])), shape[0]
        self.others = torch.cuda.memory_allocated() if device == "cuda" else 0  # bytes of what else is measured
        self.task, self.device, self.half = task.train().to(device), device, half
        steps = {"global_step": 0, "accumulate_grad_batches": 1, "num_training_batches": 1}
        task._trainer = SimpleNamespace(training=True, datamodule=None, **steps)  # what steps of tasks ask
        if device == "cuda":
            compile_parts(self.task)
        self.optimizer = build_optimizer(
            task.hparams["opt"], task.optimizer_groups(), task.hparams["lr"], trained(task)
        )
        shares = torch.rand(shape[0], num_classes).softmax(dim=1)  # mixed images have shares of classes
        self.content = torch.randn(shape).to(device), shares.to(device)

    def step(self) -> None:
        """Take a training step."""
        with torch.autocast(self.device, torch.bfloat16, enabled=self.half):
            loss: Tensor = self.task.training_step(self.content, 0)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def begin(self) -> dict[str, Any]:
        """Take the first steps: return the seconds of the first, the memory of a later one, and whether it waits.

        The memory is that of this training: weights, state of the optimizer, images, and what a step adds.
        """
        first, second = timed(self.step), timed(self.step)
        found: dict[str, Any] = {"compiles": max(0.0, first - second), "waits": waits(self.step, self.device)}
        if self.device == "cuda":
            found["memory"] = peak_memory(self.step) - self.others / 2**30
        return found

    def speed(self, seconds: float) -> dict[str, float]:
        """Return images per second of steps of so many seconds, and the share of the device's peak."""
        rate = self.batch / seconds
        peak = peak_flops(torch.device(self.device))
        return {"rate": rate} | ({"mfu": 6 * self.macs * rate / peak} if peak else {})


def peak_memory(step: Callable[[], object]) -> float:
    """Return the most memory of the GPU that is taken during a step, in GiB, with what was there before."""
    torch.cuda.reset_peak_memory_stats()
    timed(step)
    return torch.cuda.max_memory_allocated() / 2**30


def waits(step: Callable[[], None], device: str) -> str:
    """Return whether the host waits for the GPU anywhere in a step; of a CPU nothing is known."""
    if device != "cuda":
        return "-"
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return "yes"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "no"


def positions(options: argparse.Namespace, seconds: float) -> list[dict[str, Any]]:
    """Return a row for each position embedding: speed beside the network without one, in turns."""
    shape = (options.batch, 3, options.side, options.side)
    trainings, firsts = dict[str, Training](), dict[str, dict[str, Any]]()
    for name in get_args(PosEmbedName):
        torch.manual_seed(0)
        task = Classifier(num_classes=1000, **NETWORKS[NETWORK] | {"img_size": options.side, "pos_embed": name})
        trainings[name] = Training(task, shape, 1000, options.device, options.device == "cuda")
        firsts[name] = trainings[name].begin()
    times = interleave(
        {name: one.step for name, one in trainings.items()}, ROUNDS, seconds, in_a_row=IN_A_ROW[options.device]
    )
    found = compare(times, "none")
    return [
        {"name": name, **row, **firsts[name], **trainings[name].speed(row["seconds"])} for name, row in found.items()
    ]


def compiled(options: argparse.Namespace, seconds: float) -> list[dict[str, Any]]:
    """Return a row for each way to train one network, ours and timm's with the same weights, in turns."""
    case = Case(NETWORK, "train", "bf16" if options.device == "cuda" else "fp32", options.batch)
    nets = {name: build(NETWORK, name).to(options.device) for name in ("timm", "vitlab")}
    if options.device == "cuda":
        nets["timm, compiled"] = compiled_as_used("timm", build(NETWORK, "timm").cuda())
        nets["vitlab, default"] = compiled_as_used("vitlab", nets["vitlab"])
        nets["vitlab, whole"], nets["vitlab, reduce-overhead"] = (build(NETWORK, "vitlab").cuda() for _ in range(2))
        nets["vitlab, whole"].compile()
        compile_parts(nets["vitlab, reduce-overhead"], "reduce-overhead")
    images = torch.randn(options.batch, 3, *ours(NETWORK).img_size, device=options.device)
    works = {name: step(net, images, case) for name, net in nets.items()}
    found = compare(interleave(works, ROUNDS, seconds, in_a_row=IN_A_ROW[options.device]), "timm")
    if options.device == "cuda":
        for name, row in found.items():
            if name.endswith("reduce-overhead"):
                continue  # what is recorded keeps its memory between steps
            there = torch.cuda.memory_allocated() / 2**30
            row["memory"] = peak_memory(works[name]) - there
    return [{"name": name, **row, "rate": options.batch / row["seconds"]} for name, row in found.items()]


def recipe_files() -> list[Path]:
    """Return the recipes of images that :data:`DATA` knows, those of ImageNet first."""
    found = [path for path in sorted(CONFIGS.rglob("*.yaml")) if "cluster" not in path.parts]
    known = [path for path in found if yaml.safe_load(path.read_text())["data"]["class_path"] in DATA]
    return sorted(known, key=lambda path: "imagenet" not in path.parts)


def prepared(config: Mapping[str, Any], device: str, batch: int | None) -> Training:
    """Return the training of a recipe: the batch of one of its GPUs, its precision, optimizer and loss."""
    trainer, kind = config["trainer"], config["model"]["class_path"]
    images, given = DATA[config["data"]["class_path"]], config["data"]["init_args"]
    side = given.get("img_size", images.side)
    processes = int(trainer.get("devices", 1)) * int(trainer.get("num_nodes", 1))
    size = batch or given["batch_size"] // processes
    torch.manual_seed(0)
    arguments = {
        **config["model"].get("init_args", {}),
        "img_size": side,
        "in_chans": images.in_chans,
        "compile": False,
    }
    if kind == "Classifier":
        arguments["num_classes"] = images.num_classes
    half = str(trainer.get("precision", "32-true")).startswith("bf16")
    return Training(TASKS[kind](**arguments), (size, images.in_chans, side, side), images.num_classes, device, half)


def recipe(config: Mapping[str, Any], device: str, batch: int | None) -> dict[str, Any]:
    """Return the speed of a recipe, and the hours that its epochs take at it."""
    training, trainer, data = prepared(config, device, batch), config["trainer"], config["data"]
    first = training.begin()
    times, end = list[float](), time.monotonic() + SECONDS
    while len(times) < 3 or time.monotonic() < end:
        times.append(timed(training.step, IN_A_ROW[device]))
    speed = training.speed(statistics.median(times))
    if config["model"]["class_path"] != "Classifier":
        speed.pop("mfu", None)  # MAE computes a quarter of the tokens, and a decoder
    seen = (
        trainer["max_steps"] * data["init_args"]["batch_size"]
        if "max_steps" in trainer
        else trainer["max_epochs"] * DATA[data["class_path"]].number
    )
    precision = "bf16" if training.half else "fp32"
    return {"batch": training.batch, "half": precision, **first, **speed, "hours": seen / speed["rate"] / 3600}


def recipes(options: argparse.Namespace, seconds: float) -> list[dict[str, Any]]:
    """Return a row for each recipe; what does not fit on the device or into the time says so."""
    rows, end = list[dict[str, Any]](), time.monotonic() + seconds
    named = {path.relative_to(CONFIGS).with_suffix("").as_posix(): path for path in recipe_files()}
    configs = {name: yaml.safe_load(path.read_text()) for name, path in named.items()}
    left = {name: LEFT_OUT.get(config["model"]["class_path"]) for name, config in configs.items()}
    measured = {name: config for name, config in configs.items() if not left[name]}
    compiles = compiled_ahead(measured, options, seconds / 2) if options.device == "cuda" else {}
    for name, config in configs.items():
        row: dict[str, Any] = {"name": name}
        rows.append(row)
        if left[name]:
            row["left"] = left[name]
        elif time.monotonic() > end:
            row["left"] = "the time was over: give more --minutes"
        else:
            try:
                row |= recipe(config, options.device, options.recipe_batch) | compiles.get(name, {})
            except torch.OutOfMemoryError as error:
                row["left"] = str(error).partition(". ")[0]
            free(options.device)
    return rows


def compiled_ahead(
    configs: Mapping[str, Mapping[str, Any]], options: argparse.Namespace, seconds: float
) -> dict[str, dict[str, Any]]:
    """Compile recipes, :data:`AHEAD` at once: return the seconds that each took, without those that failed."""
    pool = ProcessPoolExecutor(AHEAD, multiprocessing.get_context("spawn"), initializer=_few_threads)
    begun: dict[str, Future[dict[str, Any]]] = {
        name: pool.submit(_compile, config, options.device, options.recipe_batch) for name, config in configs.items()
    }
    wait(begun.values(), timeout=seconds)
    pool.shutdown(cancel_futures=True)
    return {name: one.result() for name, one in begun.items() if not one.cancelled() and not one.exception()}


def _few_threads() -> None:
    from torch._inductor import config

    torch.set_num_threads(1)
    config.compile_threads = 2


def _compile(config: Mapping[str, Any], device: str, batch: int | None) -> dict[str, Any]:
    training = prepared(config, device, batch)
    first = timed(training.step)
    found = {"compiles": max(0.0, first - timed(training.step))}
    del training
    torch.compiler.reset()
    free(device)
    return found


def free(device: str) -> None:
    """Give back the memory of what was measured."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def float32_as(precision: str) -> Iterator[None]:
    """Inside a ``with`` block, float32 products and convolutions have the precision ``highest`` or ``high`` (TF32)."""
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = precision == "high"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


def numerics(options: argparse.Namespace, seconds: float) -> list[dict[str, Any]]:
    """Return, for each position embedding and for T2T, how far logits and gradients are from float64."""
    rows, end = list[dict[str, Any]](), time.monotonic() + seconds
    named = {f"{NETWORK}, {name}": {**NETWORKS[NETWORK], "pos_embed": name} for name in get_args(PosEmbedName)}
    for name, arguments in {**named, **{name: NETWORKS[name] for name in ("t2t_vit_7", "t2t_vit_t_14")}}.items():
        row: dict[str, Any] = {"name": name}
        if time.monotonic() > end:
            rows.append(row)
            continue
        images = images_of(options.side)["random"].to(options.device)
        torch.manual_seed(0)
        net = VisionTransformer(**arguments | {"img_size": options.side, "num_classes": 10}).to(options.device)
        for parameter in net.parameters():  # also what begins at zero
            parameter.data += 0.02 * torch.randn_like(parameter)
        found = dict[str, list[Tensor]]()
        for kind, precision in (("fp32", "highest"), ("tf32", "high"), ("bf16", "highest")):
            half = torch.autocast(options.device, torch.bfloat16, enabled=kind == "bf16")
            with float32_as(precision), half:
                found[kind] = results(net, images)
        exact = results(net.double(), images.double())
        for kind, tensors in found.items():
            row[kind], row[f"{kind}_gradients"] = difference(tensors, exact)
        rows.append(row)
        del net, exact, found
        free(options.device)
    return rows


HANG = '''
import time

from lightning.pytorch.callbacks import Callback


class Hang(Callback):
    """The process of rank 1 never comes to the reduction of the gradients of step 30, in which rank 0 waits for it."""

    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step == 30 and trainer.global_rank == 1:
            time.sleep(1e6)
'''
FIT = [
    *("fit", "--config", str(CONFIGS / "vit.yaml"), "--trainer.logger=false", "--trainer.max_epochs=100000"),
    *("--trainer.devices=2", "--trainer.strategy=ddp", "--trainer.log_every_n_steps=1", "--deadline=60"),
]
FAULTS = {"a process is killed": signal.SIGKILL, "a process is stopped": signal.SIGSTOP, "a reduction hangs": None}


def faults(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what becomes of a run of two processes whose second is lost: seconds to the end, exit code, last line."""
    if options.device == "cuda" and torch.cuda.device_count() < 2:
        return []
    return [fault(what, number, options.device) for what, number in FAULTS.items()]


def fault(what: str, number: int | None, device: str) -> dict[str, Any]:
    """Return the row of one fault."""
    accelerator = "gpu" if device == "cuda" else device
    environment = {**os.environ, "VITLAB_RANK_TIMEOUT": "10", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "vitlab", *FIT, "--name=lost", f"--trainer.accelerator={accelerator}"]
        if number is None:
            (Path(folder) / "hang.py").write_text(HANG)
            environment["PYTHONPATH"] = f"{folder}:{environment.get('PYTHONPATH', '')}"
            words += ["--trainer.callbacks+=hang.Hang", "--trust_imports", "hang"]
        with (Path(folder) / "log").open("w") as log:
            run = subprocess.Popen(words, cwd=folder, env=environment, stdout=log, stderr=log)
        rows, second = Path(folder) / "runs" / "lost" / "metrics.jsonl", list[int]()
        try:
            wait_for(lambda: run.poll() is not None or (rows.is_file() and len(rows.read_text()) > 2000), 300, "steps")
            second += ranks_of(run.pid)
            if not second:
                raise RuntimeError(
                    f"the run ended before anything happened: {(Path(folder) / 'log').read_text()[-2000:]}"
                )
            if number is not None:
                os.kill(second[0], number)
            began = time.monotonic()
            code: int | str = run.wait(300)
            seconds = time.monotonic() - began
        except subprocess.TimeoutExpired:
            code, seconds = "none: it was killed", math.inf
        finally:
            for pid in (*second, run.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            run.wait()
        lines = [line for line in (Path(folder) / "log").read_text().splitlines() if line.strip()]
    return {"name": what, "code": code, "after": seconds, "line": next(filter(_tells, lines[::-1]), lines[-1])}


def _tells(line: str) -> bool:
    return "process" in line and not line.startswith(("waiting", " "))


def ranks_of(pid: int) -> list[int]:
    """Return the processes of further ranks that a process has started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == pid and b"LOCAL_RANK=1" in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


HEAD = """\
# What vitlab does on a GPU

{machine}. `python benchmarks/gpu.py FILE --device {device} --side {side} --batch {batch} --minutes {minutes:g}`.
{compiled} MFU is the share of the peak of 16 bits that a forward and a backward pass of the network need, whatever the
precision. *Waits* says whether the host waits for the GPU in a step.
"""
SPEED = {
    "images/s": "{rate:.0f}",
    "MFU": "{mfu:.1%}",
    "memory, GiB": "{memory:.2f}",
    "compiles, s": "{compiles:.1f}",
    "waits": "{waits}",
}
RATIO = "{ratio:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]"
COLUMNS = {
    "positions": {"`pos_embed`": "`{name}`", "speed": RATIO, **SPEED},
    "compiled": {"network": "{name}", "speed": RATIO, **{key: SPEED[key] for key in ("images/s", "memory, GiB")}},
    "recipes": {
        "recipe": "`{name}`",
        "images of a GPU": "{batch}",
        "precision": "{half}",
        **SPEED,
        "GPU hours": "{hours:.1f}",
        "left out": "{left}",
    },
    "numerics": {
        "network": "{name}",
        "float32: logits, gradients": "{fp32:.0e}, {fp32_gradients:.0e}",
        "TF32": "{tf32:.0e}, {tf32_gradients:.0e}",
        "bf16": "{bf16:.0e}, {bf16_gradients:.0e}",
    },
    "faults": {"what": "{name}", "ends after": "{after:.0f} s", "exit code": "{code}", "says": "{line}"},
}
TEXT = {
    "positions": """\
## Position embeddings

ViT-S/16, {side} x {side} pixels, {batch} images a step. Speed is relative to `none`, in turns: the median and its 95 %
interval.
""",
    "compiled": """\
## Compiled

Training steps of the same ViT-S/16, {batch} images each, with fused AdamW. Speed is relative to timm's network, not
compiled. Ours is compiled block by block, as `model.compile` says: `default`, or `reduce-overhead`, which records the
kernels and replays them without the host; `whole` is one graph of all blocks. The memory is what a step adds to weights
and optimizer.
""",
    "recipes": """\
## Recipes

The batch that a recipe gives to one GPU, its optimizer and its precision. GPU hours are those of its epochs at this
speed: what loaders and the exchange between GPUs add is not in them.{ahead}
""",
    "numerics": """\
## Numerics

Differences from float64: of the logits relative to the largest, of all gradients relative to their norm.
""",
    "faults": """\
## Lost processes

Two processes train, and something happens to the second (`--deadline=60`, `VITLAB_RANK_TIMEOUT=10`). {faults}
""",
}


def page(found: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> str:
    """Return the page of the rows of each table."""
    words = {
        "machine": machine_line(facts(options.device)),
        "compiled": "Networks are compiled block by block." if options.device == "cuda" else "Nothing is compiled.",
        "ahead": f" They were compiled {AHEAD} at once." if options.device == "cuda" else "",
        "faults": "" if found["faults"] else "Skipped: this machine has one GPU, and it takes two.",
        **vars(options),
    }
    parts = [HEAD.format(**words)]
    for name, rows in found.items():
        parts += [TEXT[name].format(**words).rstrip() + "\n", *([table(rows, COLUMNS[name]) + "\n"] if rows else [])]
    return "\n".join(parts)


def main(argv: list[str] | None = None) -> int:
    """Measure, and write page and numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the page; the numbers are written beside it as .json")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--side", type=int, default=224, help="height and width of the images, in pixels")
    parser.add_argument("--batch", type=int, default=128, help="images of a step, for position embeddings")
    parser.add_argument("--recipe_batch", type=int, help="images of a step, for recipes (default: the recipe's)")
    parser.add_argument("--minutes", type=float, default=10.0)
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("this machine has no GPU: --device cpu takes the same steps")
    end, found = time.monotonic() + 60 * options.minutes, dict[str, list[dict[str, Any]]]()
    found["faults"] = faults(options)  # first: they take what they take
    for measure in (positions, compiled, numerics, recipes):
        name = measure.__name__
        found[name] = measure(options, SHARES[name] * max(0.0, end - time.monotonic()))
        free(options.device)
        print(table(found[name], COLUMNS[name]), flush=True)
    found = {name: found[name] for name in TEXT}
    options.file.write_text(page(found, options))
    numbers = {"machine": facts(options.device), "vitlab": vitlab.__version__, **found}
    options.file.with_suffix(".json").write_text(json.dumps(numbers, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
