"""Facts about a training that its run records before the first step: of network, data, machine and schedule."""

import hashlib
import math
import platform
import traceback
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.loggers import WandbLogger
from numpy.typing import NDArray
from torch import nn

from vitlab.config.keys import key_of
from vitlab.config.trust import own_code
from vitlab.data.base import ImageData
from vitlab.data.record import TRAINED_ON, fingerprints, read_numbers
from vitlab.errors import UsageError, in_own_code, one_line
from vitlab.interface import (
    answering,
    as_outputs,
    fingerprint,
    has_grid,
    image_sizes,
    network,
    own_parts,
    own_ratio_of,
    path_of,
    redefines,
    trained,
)
from vitlab.jobs.train.job import Job
from vitlab.layers.pos_embed import PosEmbed
from vitlab.layers.pos_embed.checked import tokens_in_words
from vitlab.layers.precision import float32_precision
from vitlab.models.cost import (
    call_on_meta,
    count_all_parameters,
    count_macs,
    count_parameters,
    count_tokens,
    flop_counter,
)
from vitlab.models.vit import VisionTransformer
from vitlab.optim import describe_groups
from vitlab.runs.atomic import atomic_write
from vitlab.runs.directory import RunDir
from vitlab.runs.machine import cpu_name, git, installed_versions, uncommitted_code
from vitlab.runs.manifest import read_manifest
from vitlab.runs.matching import is_there
from vitlab.runs.records import DataFacts, now_utc, part_of, wrong_values
from vitlab.tasks.base import Task
from vitlab.tasks.sizes import check_size

PACKAGES = ("vitlab", "torch", "torchvision", "lightning", "torchmetrics", "timm", "numpy", "jsonargparse", "wandb")
SUMS = ("sum_of_learning_rates", "sum_of_learning_rates_pos_embed")
RESUMED = "not those of this configuration from its first step: the run was resumed with changes, or on other processes"


def model_facts(task: Any, data: Any) -> dict[str, Any]:
    """Return parameters, multiply-adds, tokens and grid of a network, as far as known."""
    net: Any = network(task)
    facts = {
        "parameters": count_parameters(trained(task)),
        "parameters_total": count_all_parameters(net),
    }
    if not has_grid(task):
        images = image_sizes(task, data)
        return facts | images | _operations(_macs_of_forward(task, **images)) if all(images.values()) else facts
    return {
        **facts,
        **_operations(_macs_of_parts(net)),
        **_growing(task, data),
        "tokens": count_tokens(net),
        "grid": list(net.grid_size),
        "img_size": list(net.img_size),
        "in_chans": net.in_chans,
    }


def _growing(task: Any, data: Any) -> dict[str, list[list[int]]]:
    """Return the FLOPs per image by first epoch of each size in a schedule; refuse sizes that do not work."""
    if not isinstance(data, ImageData) or not (steps := data.pipeline.sizes.steps)[1:]:
        return {}
    net: Any = network(task)
    try:
        data.pipeline.sizes.check_end()
        if check := getattr(task, "check_images", None):
            check(data)
        for _, size in steps:
            check_size(net, size)
    except ValueError as error:
        text = str(error)
        raise UsageError(text if "img_size_schedule" in text else f"`data.img_size_schedule`: {text}") from None
    return {"flops_from": [[epoch, 2 * count_macs(net, size)] for epoch, size in steps]}


def _operations(macs: int | None) -> dict[str, int]:
    return {} if macs is None else {"macs": macs, "flops": 2 * macs}


def _macs_of_parts(net: VisionTransformer) -> int:
    """Count the multiply-adds of a network of vitlab with parts of one's own.

    Raises:
        UsageError: Such a part fails, or returns something else than a tensor.
    """
    entered: list[nn.Module] = []

    def check(part: nn.Module, args: Any, output: Any) -> None:
        if not isinstance(output, torch.Tensor):
            what = f"a {type(output).__name__}"
            raise UsageError(f"`forward` of {path_of(part)} must return a tensor, got {what}: return the tokens alone")

    own = own_parts(net)
    hooks = [part.register_forward_pre_hook(lambda part, args: entered.append(part)) for part in own]
    hooks += [part.register_forward_hook(check) for part in own]
    try:
        return count_macs(net)
    except UsageError:
        raise
    except Exception as error:  # foreign code can raise anything
        if not entered:
            raise
        why = (in_own_code(error) or one_line(error)) + _tokens_of_hook(error, net)
        raise UsageError(f"the forward pass fails in or after {path_of(entered[-1])}: {why}") from error
    finally:
        for hook in hooks:
            hook.remove()


def _tokens_of_hook(error: BaseException, net: VisionTransformer) -> str:
    """Return how many tokens a hook of a position embedding got that failed, as one written for patches does."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    hooks = [each.f_code.co_name for each in frames if isinstance(each.f_locals.get("self"), PosEmbed)]
    if not {"enter", "rotate", "bias", "relate", "leave"} & set(hooks):
        return ""
    patches = net.grid_size[0] * net.grid_size[1]
    return f"; here L = {count_tokens(net)}: {tokens_in_words(net.num_prefix_tokens, patches)}"


def _macs_of_forward(task: Any, img_size: list[int], in_chans: int) -> int | None:
    """Count on the meta device; None if the forward pass does not take images or depends on values.

    Raises:
        UsageError: The module returns several outputs for images, which could be neither predicted nor exported.
    """
    images = torch.empty(1, in_chans, *img_size, device="meta")
    net, macs = network(task), None
    outputs: Any = None
    with suppress(Exception), torch.random.fork_rng(devices=[]), torch.no_grad():  # the user's code may raise anything
        with flop_counter() as counter:
            outputs = call_on_meta(net, images)
        macs = sum(counter.get_flop_counts()["Global"].values()) // 2
        outputs = outputs if (asked := answering(task)) is net else call_on_meta(asked, images)
    if isinstance(outputs, tuple | list | Mapping):
        as_outputs(outputs, task)
    return macs


def write_facts(job: Job) -> None:
    """Write facts about network, data and devices once they are known.

    Those that a resume may change, of data and groups, wait with its configuration for its first step.
    """
    run, groups, data = job.run, _groups(job.task), readable_fingerprint(job.data)
    run.write("model.json", {**job.facts, "float32": float32_precision(job.trainer.strategy.root_device.type)})
    write = partial(_write_groups_and_data, job, groups, data)
    if job.record.waiting and is_there(run.path / "data.json"):
        job.record.waiting.append(write)
    else:
        write()
    run.update("run.json", **_facts(job, groups))
    for logger in job.trainer.loggers:
        if isinstance(logger, WandbLogger):
            with suppress(Exception):  # W&B never stops a training; its logger reports the failure
                known = {**job.stored_config, "facts": _for_loggers(run, data)}
                logger.experiment.config.update(known, allow_val_change=True)


def readable_fingerprint(data: Any) -> dict[str, Any]:
    """Return the fingerprint of data, which later commands read from ``data.json``.

    Raises:
        UsageError: It has a value in another form than vitlab reads there.
    """
    found = fingerprint(data)
    for name, form in wrong_values(found, DataFacts).items():
        what = f"`fingerprint` of {path_of(data)} must give `{name}` as {form}, or under another name"
        raise UsageError(f"{what}: vitlab reads it in data.json; got {found[name]!r}")
    return found


def _groups(task: Any) -> list[dict[str, Any]]:
    """Return which weights decay, and their rates; nothing of an optimizer that a user's module builds."""
    if not isinstance(task, Task) or redefines(task, "configure_optimizers"):
        return []
    lr, planned = task.hparams["lr"], task.optimizer_groups()
    if task.sets_own_peak:
        planned = [group | {"lr": lr} for group in planned]
    return describe_groups(trained(task), planned, lr, task.hparams["layer_decay"], task)


def _write_groups_and_data(job: Job, groups: list[dict[str, Any]], data: dict[str, Any]) -> None:
    if groups:
        job.run.write("param_groups.json", groups)
    job.run.write("data.json", data)
    if isinstance(job.data, ImageData):
        numbers = np.union1d(_trained_before(job), fingerprints(job.data.splits["train"]))
        with atomic_write(job.run.path / TRAINED_ON, job.run.fence) as beside:
            np.save(beside, numbers, allow_pickle=False)


def _trained_before(job: Job) -> NDArray[np.uint64]:
    """Return the fingerprints of images that the weights were trained on before this attempt."""
    if not job.trainer.ckpt_path:
        return job.before.seen
    with suppress(UsageError):  # a damaged file is written anew
        if (found := read_numbers(job.run.path / TRAINED_ON)) is not None:
            return found
    return job.before.seen


def _for_loggers(run: RunDir, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts, besides the configuration, by which W&B compares runs."""
    record = run.record
    commit = f"{record['commit']}{', with changes' if record['dirty'] else ''}" if record.get("commit") else None
    hashes = {name: split.get("hash") or split["n"] for name, split in data.get("splits", {}).items()}
    costs = {name: value for name, value in run.model.items() if name in ("parameters", "macs")}
    return {**costs, "commit": commit, "data": data.get("data"), "samples": hashes, "recipe": record.get("recipe")}


def _facts(job: Job, groups: list[dict[str, Any]]) -> dict[str, Any]:
    trainer, steps = job.trainer, _steps(job)
    return {
        "status": "running",
        "attempts": job.record.attempt,
        **_commit(),
        "python": platform.python_version(),
        "versions": installed_versions(PACKAGES),
        "devices": [torch.cuda.get_device_name()] if torch.cuda.is_available() else [cpu_name()],
        "world_size": trainer.world_size,
        "threads": torch.get_num_threads(),
        "seed": job.config.seed_everything,
        **({} if steps is None else {"steps": steps}),
        **_rates(job, groups),
        "promises": _promises(job) if isinstance(job.task, Task) and isinstance(job.data, ImageData) else {},
        "resumed": now_utc() if job.resumed else None,
        **({"own_code": code} if (code := own_code(job.stored_config)) else {}),
        **({"test_hash": test.split_hash} if (test := getattr(job.data, "held_back", {}).get("test")) else {}),
    }


def _rates(job: Job, groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the schedules of a run and the sums of its learning rates, as far as they are known."""
    plans = _plans(job)
    if not plans or not isinstance(task := job.task, Task) or (rates := task.sum_of_learning_rates(plans)) is None:
        return {"plans": plans}
    scales = [group["lr_scale"] for group in groups if part_of(group["name"]) == "pos_embed"]
    scale = scales[-1] if scales else task.hparams["pos_embed_lr_mult"]
    return {"plans": plans, **dict(zip(SUMS, (rates, rates * scale), strict=True))}


def _steps(job: Job) -> int | None:
    """Return the number of steps of the training; None if its length, or that of its loader, is unknown."""
    steps = float(job.trainer.estimated_stepping_batches)  # infinite, or of a loader without length -1
    return int(steps) if 0 <= steps < math.inf else None


def _plans(job: Job) -> list[list[int]]:
    """Return where each schedule of a run began and its number of steps; empty if one of them is unknown."""
    record, steps = job.run.record, _steps(job)
    if steps is None:
        return []
    if not (checkpoint := job.trainer.ckpt_path):
        return [[0, steps]]
    before = record.get("steps")
    longer = [change for change in record.get("changes", []) if {"trainer.max_epochs", "trainer.max_steps"} & {*change}]
    is_first = not longer or (len(longer) == 1 and before != steps)  # of a run of an older vitlab, which wrote no plans
    plans = record.get("plans", [[0, before]] if before and is_first else [])
    if not plans or plans[-1][1] == steps:
        return plans
    begin = read_manifest(job.run.checkpoints).get(Path(checkpoint).name, {}).get("step")
    return [*(plan for plan in plans if plan[0] < begin), [begin, steps]] if begin is not None else []


def _promises(job: Job) -> dict[str, str]:
    """Return what holds of the run: a second one has other weights if this one was resumed with changes."""
    record, found = job.run.record, promises(job.trainer)
    if not job.trainer.ckpt_path or "promises" not in record:
        return found
    here = {"world_size": job.trainer.world_size, "threads": torch.get_num_threads()}
    keys = [key for change in record.get("changes", []) for key in change]
    changed = [key for key in keys if key == "own_code" or key_of(key).identity]
    if changed or record["promises"].get("weights") == RESUMED or any(record.get(k, v) != v for k, v in here.items()):
        found["weights"] = RESUMED
    return found


def promises(trainer: Any) -> dict[str, str]:
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
    packs = own_ratio_of(trainer.datamodule)  # as many patches as each process may have
    any_number = "as many processes and any number of workers" if packs else "any number of processes and workers"
    return {
        "samples": f"the same at every global step, for {any_number}",
        "random draws": "the same for each sample (augmentation), and for each step and process (dropout, drop path)",
        "weights": weights,
    }


def _commit() -> dict[str, Any]:
    commit = git("rev-parse", "HEAD")
    if not commit:
        return {"commit": None, "dirty": None, "diff": None}
    diff = uncommitted_code()
    return {
        "commit": commit,
        "dirty": bool(diff),
        "diff": hashlib.sha256(diff.encode()).hexdigest()[:10] if diff else None,
    }
