"""Describe a run before its first step: the header on the terminal, the files in the run directory."""

import hashlib
import importlib.metadata
import math
import platform
import socket
from contextlib import suppress
from typing import Any

import lightning as L
import numpy as np
import torch
import yaml
from lightning.pytorch.loggers import WandbLogger

from vitlab.callbacks.record import now_utc
from vitlab.classes import choice_text
from vitlab.config.parser import settings
from vitlab.config.trust import redact
from vitlab.contract import deals_samples, fingerprint, path_of, recipe
from vitlab.data.base import ImageData
from vitlab.data.record import TRAINED_ON, numbers
from vitlab.jobs.terminal import log_to, print_error
from vitlab.jobs.train.facts import has_grid
from vitlab.jobs.train.job import Job
from vitlab.layers.precision import float32_precision
from vitlab.optim import describe_groups
from vitlab.runs.directory import RunDir, atomic_write, write_text
from vitlab.runs.machine import cpu_name, git
from vitlab.tasks.base import Task
from vitlab.tasks.distillation import Distillation
from vitlab.tokenizers.t2t import T2TTokenizer

PACKAGES = ("vitlab", "torch", "torchvision", "lightning", "torchmetrics", "timm", "numpy", "jsonargparse", "wandb")


def header(job: Job) -> str:
    """Return the header of a run: model, data, training, directory."""
    lines = {
        "model": _model_line(job.task, job.facts) if has_grid(job.task) else _own_model_line(job.task, job.facts),
        "data": _data_line(job.data),
        "train": _train_line(job),
    }
    if isinstance(job.task, Distillation):
        lines["from"] = _teacher_line(job.task)
    lines["run"] = str(job.run.path) + (" (continued)" if job.resumed else "")
    if job.wandb_line:
        lines["W&B"] = job.wandb_line
    return "\n".join(f"{name:<6} {text}" for name, text in lines.items())


def _model_line(task: Task, facts: dict[str, Any]) -> str:
    net: Any = task.net
    h, w = net.grid_size
    size = f"{facts['parameters'] / 1e6:.3g} M parameters, {facts['macs'] / 1e6:,.4g} M multiply-adds per image"
    tokens = f"{type(net.tokenizer).__name__}, {h}x{w} tokens of width {net.embed_dim}"
    heads = net.blocks[0].attn.num_heads
    q = torch.zeros(1, heads, net.num_prefix_tokens + h * w, net.embed_dim // heads)
    free = net.pos_embed.bias(0) is None and net.pos_embed.relate(q, 0) is None
    note = "" if free else "; its attention bias rules out flash kernels"
    if isinstance(net.tokenizer, T2TTokenizer) and (aside := net.tokenizer.plain_because()):
        note += f"; {' and '.join(aside)}: the soft splits use the slower plain implementation"
    positions = choice_text(recipe(task).get("pos_embed", type(net.pos_embed).__name__))
    return f"{tokens}, {len(net.blocks)} blocks, position embedding {positions}: {size}{note}"


def _own_model_line(task: Any, facts: dict[str, Any]) -> str:
    size = f"{path_of(task)}: {facts['parameters'] / 1e6:.3g} M parameters"
    if "macs" in facts:
        return f"{size}, {facts['macs'] / 1e6:,.4g} M multiply-adds per image"
    return f"{size}; multiply-adds unknown: counting needs `img_size`, `in_chans` and a forward of images"


def _teacher_line(task: Distillation) -> str:
    teacher, hparams = task.teacher, task.hparams
    size = sum(p.numel() for p in teacher.parameters()) / 1e6
    return (
        f"teacher {hparams['teacher']} ({type(teacher.net).__name__}, {size:.3g} M parameters), {hparams['distill']}, "
        f"{hparams['distill_alpha']:.0%} of the loss"
    )


def _data_line(data: Any) -> str:
    if not isinstance(data, ImageData):
        known = "by its `fingerprint`" if hasattr(data, "fingerprint") else "not recorded: it has no `fingerprint`"
        place = "a run resumed within an epoch sees other batches, unless the loader has `state_dict`"
        return f"{path_of(data)}; its samples are recorded {known}; {place}"
    data.compare_with_test()
    facts = data.fingerprint()
    splits = facts["splits"]
    size = "x".join(map(str, (data.in_chans, *data.img_size)))
    counts = f"{splits['train']['n']:,} training and {splits['val']['n']:,} validation images"
    faults = {
        "unreadable and left out": len(facts["unreadable"]),
        "the same in two splits": facts["duplicates"],
        "nearly the same in two splits": facts["near_duplicates"],
        "the same under two labels": facts["contradictions"],
        "classes without training images": splits["train"].get("class_counts", []).count(0),
        "classes without validation images": splits["val"].get("class_counts", []).count(0),
    }
    found = ", ".join(f"{fault}: {n:,}" for fault, n in faults.items() if n)
    what = "labels" if data.targets["kind"] == "multilabel" else "classes"
    kinds = f"{data.num_classes} {what}" if data.num_classes else f"{len(data.targets['names'])} numbers each"
    line = f"{type(data).__name__}: {counts} of {size}, {kinds}, {data.pipeline}"
    line = f"{line} ({found}; see data.json)" if found else line
    leaks = [pair for pair in facts["first_duplicates"] if [name.split(":")[0] for name in pair] == ["train", "test"]]
    warnings = [f"training images are in the test split: {' = '.join(pair)}" for pair in leaks[:1]]
    return "\n       ".join([line, *facts["notes"], *warnings])


def _train_line(job: Job) -> str:
    trainer, batch = job.trainer, job.batch
    device = type(trainer.accelerator).__name__.removesuffix("Accelerator")
    parts = [f"{trainer.max_epochs} epochs" if trainer.max_epochs != -1 else f"{trainer.max_steps} steps"]
    parts += [f"batch {batch}"] if batch else []
    parts += [_recipe(job.task, batch or 0)] if isinstance(job.task, Task) else []
    parts += [f"seed {job.config.seed_everything}", f"{trainer.num_devices * trainer.num_nodes} x {device}"]
    rounded = float32_precision(trainer.strategy.root_device.type)
    words = dict.fromkeys(rounded.values()) if len({*rounded.values()}) == 1 else map(" ".join, rounded.items())
    return ", ".join([*parts, f"precision {trainer.precision} (float32: {', '.join(words)})"])


def _recipe(task: Task, batch: int) -> str:
    hparams = task.hparams
    decayed = sum(p.numel() for g in task.optimizer_groups() if g["weight_decay"] for p in g["params"])
    lr = hparams["lr"] * (task.batch_factor(batch) if batch else 1)
    return f"{choice_text(hparams['opt'])}, lr {lr:g}, weight decay {hparams['weight_decay']:g} on {decayed:,} weights"


def begin(job: Job) -> None:
    """Write what a run needs to be resumed, before data, loggers or anything else is touched."""
    run = job.run
    for text in run.set_aside_damaged():
        print_error(text)
    if not job.resumed:
        write_text(run.path / "overrides.yaml", redact(yaml.safe_dump(dict(settings(job.arguments)), sort_keys=False)))
    write_text(run.config, job.config_text, sync=True)
    log_to(run.path / "train.log")
    record = run.record
    first = {
        "recipe": job.recipe,
        "init_from": job.options.init_from,
        "resize": job.options.resize,
        "init_grid": job.options.init_grid,
        "started": now_utc(),
    }
    now: dict[str, Any] = {
        "status": "running",
        "argv": ["vitlab", "fit", *map(redact, job.arguments)],
        "host": socket.gethostname(),
    }
    now |= {"ending": None, "error": None, "wandb_id": job.wandb_id if job.wandb_line else None}
    run.write("run.json", {**first, **record, **now})


def describe(job: Job) -> None:
    """Write facts about network, data and devices once they are known."""
    run = job.run
    if isinstance(task := job.task, Task):
        lr, layer_decay = task.hparams["lr"], task.hparams["layer_decay"]
        groups = describe_groups(task.net, task.optimizer_groups(), lr, layer_decay, task)
        run.write("param_groups.json", groups)
    run.write("model.json", {**job.facts, "float32": float32_precision(job.trainer.strategy.root_device.type)})
    run.write("data.json", fingerprint(job.data))
    if isinstance(job.data, ImageData):
        with atomic_write(run.path / TRAINED_ON) as beside:
            np.save(beside, numbers(job.data.splits["train"]), allow_pickle=False)
    run.update("run.json", **_facts(job))
    for logger in job.trainer.loggers:
        if isinstance(logger, WandbLogger):
            with suppress(Exception):  # W&B never stops a training; its logger reports the failure
                known = {**yaml.safe_load(job.config_text), "facts": _for_loggers(run)}
                logger.experiment.config.update(known, allow_val_change=True)


def _for_loggers(run: RunDir) -> dict[str, Any]:
    """Return the facts, besides the configuration, by which W&B compares runs."""
    record, data = run.record, run.data
    commit = f"{record['commit']}{', with changes' if record['dirty'] else ''}" if record.get("commit") else None
    hashes = {name: split.get("hash", split["n"]) for name, split in data.get("splits", {}).items()}
    costs = {name: value for name, value in run.model.items() if name in ("parameters", "macs")}
    return {**costs, "commit": commit, "data": data.get("data"), "samples": hashes, "recipe": record.get("recipe")}


def _facts(job: Job) -> dict[str, Any]:
    trainer, steps = job.trainer, float(job.trainer.estimated_stepping_batches)
    return {
        "status": "running",
        "attempts": job.record.attempt,
        **_commit(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "devices": [torch.cuda.get_device_name()] if torch.cuda.is_available() else [cpu_name()],
        "world_size": trainer.world_size,
        "threads": torch.get_num_threads(),
        "seed": job.config.seed_everything,
        **({"steps": int(steps)} if math.isfinite(steps) else {}),
        **(_rates(job.task) if isinstance(job.task, Task) else {}),
        "promises": promises(trainer) if isinstance(job.task, Task) and deals_samples(job.data) else {},
        "resumed": now_utc() if job.resumed else None,
    }


def _rates(task: Task) -> dict[str, float]:
    rates = task.sum_of_learning_rates()
    if rates is None:
        return {}
    return {
        "sum_of_learning_rates": rates,
        "sum_of_learning_rates_pos_embed": rates * task.hparams["pos_embed_lr_mult"],
    }


def promises(trainer: L.Trainer) -> dict[str, str]:
    """Return how closely a second run with this configuration and seed, or a resumed one, reproduces this one."""
    on_cpu = trainer.strategy.root_device.type == "cpu"
    processes = f"{trainer.world_size} process" + ("es" if trainer.world_size > 1 else "")
    condition = f"with {processes}, {torch.get_num_threads()} threads each, and the same builds"
    if on_cpu and trainer.precision == "32-true":
        weights = f"bit-identical {condition}, for any number of data workers"
    elif torch.are_deterministic_algorithms_enabled():
        weights = f"bit-identical on this kind of device {condition} (deterministic algorithms)"
    else:
        weights = "close, not bit-identical; trainer.deterministic=true makes them so on one kind of device"
    return {
        "samples": "the same at every global step, for any number of processes and workers",
        "random draws": "the same for each sample (augmentation), and for each step and process (dropout, drop path)",
        "weights": weights,
    }


def _commit() -> dict[str, Any]:
    commit = git("rev-parse", "HEAD")
    if not commit:
        return {"commit": None, "dirty": None, "diff": None}
    diff = git("diff", "HEAD", "--no-ext-diff", "--", ".")
    return {
        "commit": commit,
        "dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
        "diff": hashlib.sha256(diff.encode()).hexdigest()[:10] if diff else None,  # of vitlab's code, uncommitted
    }
