"""What lies in a run's directory before its first step, and what is open while it trains."""

import hashlib
import math
import os
import platform
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from lightning.pytorch.loggers import WandbLogger
from numpy.typing import NDArray

from vitlab.config.arguments import config_paths, grid_as_typed
from vitlab.config.keys import key_of
from vitlab.config.parser import settings
from vitlab.config.secret import redact
from vitlab.config.trust import changed_code, own_code
from vitlab.data.base import ImageData
from vitlab.data.record import TRAINED_ON, fingerprints, read_numbers
from vitlab.errors import PARTS_FILE, RunFailed, Stopped, UsageError
from vitlab.interface import fingerprint, path_of, redefines, trained
from vitlab.jobs.checkpoint import checkpoint_to_resume
from vitlab.jobs.results import first_settings, settings_so_far
from vitlab.jobs.terminal import close_log, log_to, print_error
from vitlab.jobs.train.endings import cut_short, resuming
from vitlab.jobs.train.job import GIVEN, Job
from vitlab.jobs.train.wandb import finish_run
from vitlab.layers.precision import float32_precision
from vitlab.notebook import names_in, source_of
from vitlab.optim import describe_groups
from vitlab.runs.atomic import atomic_write
from vitlab.runs.directory import RunDir
from vitlab.runs.guard import Guard, enter, others_of
from vitlab.runs.launch import announce_run, join_group_store
from vitlab.runs.lock import is_leader
from vitlab.runs.machine import cpu_name, git, installed_versions, uncommitted_code
from vitlab.runs.manifest import read_manifest
from vitlab.runs.matching import is_there
from vitlab.runs.overwrite import discard, has_set_aside, prepare
from vitlab.runs.records import DataFacts, now_utc, part_of, wrong_values
from vitlab.tasks.base import Task

PACKAGES = ("vitlab", "torch", "torchvision", "lightning", "torchmetrics", "timm", "numpy", "jsonargparse", "wandb")
WRITTEN = (  # in a run's directory before the first step
    *("config.yaml", "overrides.yaml", PARTS_FILE, "run.json", "data.json", "model.json", "param_groups.json"),
    *(TRAINED_ON, "metrics.jsonl", "train.log", "run.json.damaged", "data.json.damaged", "model.json.damaged"),
)
LOGS = ("wandb", "lightning_logs")
SUMS = ("sum_of_learning_rates", "sum_of_learning_rates_pos_embed")
OF_ATTEMPT = (*SUMS, "ended", "peak_memory")  # what an attempt states anew, or not at all if it is killed
RESUMED = "not those of this configuration from its first step: the run was resumed with changes, or on other processes"


def begin(job: Job) -> None:
    """Prepare the directory, and write what resuming needs, before data, loggers or anything else is touched.

    The first process of a launch does it; the directory is locked by it.
    """
    if not is_leader():
        return
    run = job.run
    prepare(run, job.options.overwrite, job.resumed, sum(p.nbytes for p in job.task.parameters()))
    for text in run.set_aside_damaged():
        print_error(text)
    run.take_over()
    if not job.resumed:
        run.write_text("overrides.yaml", redact(yaml.safe_dump(dict(settings(job.arguments)), sort_keys=False)))
    if job.resumed and is_there(run.config):  # which describes the weights until this attempt makes a step
        job.record.waiting.append(partial(_write_config, job))
    else:
        _write_config(job)
    log_to(run.path / "train.log", job.said)
    run.write("run.json", _first_record(job))


@contextmanager
def as_before_if_refused(job: Job) -> Iterator[None]:
    """Train inside a ``with`` block; an error before the first step leaves the directory as it was before.

    So the run that was to be resumed is there again, byte for byte, or the one that was to be overwritten. A new one
    that is refused leaves nothing, also of loggers, which Lightning opens before data and callbacks are asked. A
    signal, or an outside cause such as a full disk, refuses nothing: the new configuration stays, for a later attempt.
    """
    if not is_leader():
        yield
        return
    folder, written = job.run.path, WRITTEN if job.resumed else ()
    files = {name: path.read_bytes() if is_there(path := folder / name) else None for name in written}
    logs, before = _logs(folder) if job.resumed else {}, [*folder.iterdir()]
    try:
        yield
    except (RunFailed, Stopped):
        with suppress(OSError):  # such as a full disk, which is the cause
            job.record.settle()
        raise
    except Exception as error:
        if job.record.has_stepped(job.trainer):
            raise
        is_refused = isinstance(error, UsageError) and job.run.fence is not None  # else it may be the run of another
        if not job.resumed and (is_refused or has_set_aside(job.run)):
            discard(job.run, before)
        elif job.resumed and job.run.fence:
            job.run.fence.put_back(files)
            job.run.fence = None
            _put_back_logs(folder, logs)
        raise


def _logs(folder: Path) -> dict[Path, str | None]:
    """Return the paths in the folders of the loggers; for a symbolic link its target, for others None."""
    paths = (path for name in LOGS for path in (folder / name, *(folder / name).rglob("*")))
    return {path: os.readlink(path) if path.is_symlink() else None for path in paths if os.path.lexists(path)}


def _put_back_logs(folder: Path, logs: dict[Path, str | None]) -> None:
    """Remove what loggers have written since, and give symbolic links the targets that they had."""
    now = _logs(folder)
    for path in sorted(now, reverse=True):  # what lies in a folder before the folder
        if now[path] is not None and now[path] != logs.get(path):
            path.unlink()
        elif path not in logs:
            path.rmdir() if path.is_dir() else path.unlink()
    for path, leads_to in logs.items():
        if leads_to is not None and not path.is_symlink():
            path.symlink_to(leads_to)


@contextmanager
def telling_of_rest(job: Job) -> Iterator[None]:
    """Say that the training itself is done if a signal ends the command before weights and results are written."""
    run = job.run
    try:
        yield
    except Stopped as stopped:
        stopped.when = "after training" if job.record.started else stopped.when  # in it, `explained` has told
        if not stopped.said and is_leader() and run.record.get("status") == "done":
            why = f"stopped by {signal.Signals(stopped.args[0]).name}: the training is done"
            print_error(f"\n{why}, and `{resuming(run)}` writes its weights and results")
            stopped.said = True
        raise


@contextmanager
def running(job: Job) -> Iterator[Path | None]:
    """Yield the checkpoint that the training goes on from, if any, with all its processes at one place.

    At the end it closes what would outlive the training: the thread of ``job.deadline``, the W&B run, the log.
    """
    announce_run(job.run.path)
    failed, hurry = True, False
    try:
        checkpoint = checkpoint_to_resume(job.run) if job.resumed else None
        join_group_store()
        yield checkpoint
        failed = False
    except Stopped:
        hurry = True
        enter("close", "the record of the run")
        raise
    finally:
        del os.environ["VITLAB_RUN_DIR"], os.environ["VITLAB_LAUNCHER"]
        job.deadline.stop()  # still running after an error during error handling
        try:
            if job.wandb_line:
                finish_run(failed, hurry)
        finally:
            close_log()


def watch_over(guard: Guard, job: Job) -> None:
    """Tell the guard of the command how the run can be continued, how to end it, and which processes it has."""
    guard.way_on = f"continue with `{resuming(job.run)}`"
    guard.on_end = partial(_end_early, job)
    guard.children = partial(job.watch.adopt_children, job.trainer)
    if job.trainer.world_size > 1:
        guard.join(job.trainer.global_rank, job.trainer.world_size)


def _end_early(job: Job, reason: str) -> None:
    with suppress(OSError):
        job.record.settle()
    cut_short(job.run, reason)


@contextmanager
def telling_of_data(job: Job) -> Iterator[None]:
    """Tell the guard of the command when the data are downloaded and set up, by wrapping the hooks Lightning calls."""
    data, name = job.data, type(job.data).__qualname__
    others = others_of(job.trainer.global_rank, job.trainer.world_size) if job.trainer.world_size > 1 else ""
    prepare, set_up = data.prepare_data, data.setup

    def prepare_data() -> None:
        del data.prepare_data
        enter("download", f"the data, `prepare_data` of {name}")
        prepare()
        enter("data", f"{others or 'the loggers'} and the data")

    def setup(stage: str) -> None:
        del data.setup  # this instance is itself again
        enter("data", f"the data, `setup` of {name}")
        set_up(stage)
        enter("start", f"{f'{others}, or ' if others else ''}the first step, which may compile")

    data.prepare_data, data.setup = prepare_data, setup
    try:
        yield
    finally:
        for part in ("prepare_data", "setup"):
            vars(data).pop(part, None)


def _first_record(job: Job) -> dict[str, Any]:
    """Return the content of run.json at the start of an attempt; what earlier attempts have written stays."""
    record = job.run.record
    first = {
        "recipe": job.recipe,
        "init_from": job.options.init_from if job.options.start is None else GIVEN,
        "resize": job.options.resize,
        "init_grid": grid_as_typed(job.options.init_grid),
        "started": now_utc(),
        "configs": config_paths(record.get("argv", job.arguments)),  # of its first attempt
        "changes": [],
    }
    now: dict[str, Any] = {
        "status": "running",
        "argv": ["vitlab", "fit", *map(redact, job.arguments)],
    }
    now |= {"ending": None, "error": None, "wandb_id": job.wandb_id if job.wandb_line else record.get("wandb_id")}
    kept = {name: value for name, value in record.items() if name not in OF_ATTEMPT}
    return {**first, **kept, **now, **_changes(job)}


def _write_config(job: Job) -> None:
    """Write the configuration, and the source of classes of a notebook or script, with which it is loaded elsewhere."""
    job.run.write_text("config.yaml", job.config_text)
    if not (names := names_in(job.stored_config)):
        return
    try:
        job.run.write_text(PARTS_FILE, source_of(names))
    except UsageError as error:
        print_error(f"{error}; until then this run can be loaded only where {', '.join(names)} is defined")


def _changes(job: Job) -> dict[str, Any]:
    """Return the settings and changed modules of every resume that the run did not have before, if this one has any."""
    record = job.run.record
    if not job.resumed or first_settings(job.run) is None:
        return {}
    known = settings_so_far(job.run, record)
    given = yaml.safe_load(redact(yaml.safe_dump(dict(settings(job.arguments)))))
    if not job.options.resume:  # else it is typed; here it is the list to which the words of the first start add
        given = {key: value for key, value in given.items() if key in known or f"{key}+" not in given}
    if code := changed_code(record.get("own_code", {}), job.stored_config):
        given["own_code"] = code
    new = {key: value for key, value in given.items() if key not in known or known[key] != value}
    return {"changes": [*record.get("changes", []), new]} if new else {}


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
    packs = trainer.datamodule.pipeline.native  # as many patches as each process may have
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
