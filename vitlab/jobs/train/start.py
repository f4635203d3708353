"""What lies in a run's directory before its first step, and what is open while it trains."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from vitlab.config.arguments import config_paths, grid_as_typed
from vitlab.config.parser import settings
from vitlab.config.secret import redact
from vitlab.config.trust import changed_code
from vitlab.errors import PARTS_FILE, RunFailed, Stopped, UsageError
from vitlab.jobs.checkpoint import checkpoint_to_resume
from vitlab.jobs.terminal import close_log, log_to, print_error
from vitlab.jobs.train.endings import cut_short
from vitlab.jobs.train.facts import SUMS
from vitlab.jobs.train.job import GIVEN, Job
from vitlab.jobs.train.wandb import finish_run
from vitlab.jobs.typed import first_settings, settings_so_far
from vitlab.notebook import names_in, source_of
from vitlab.runs.before import Before, prepare
from vitlab.runs.guard import Guard, enter
from vitlab.runs.launch import announce_run, is_leader, join_group_store, others_of
from vitlab.runs.matching import is_there
from vitlab.runs.records import now_utc

OF_ATTEMPT = (*SUMS, "ended", "peak_memory")  # what an attempt states anew, or not at all if it is killed


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
    before = Before(job.run, job.resumed)
    try:
        yield
    except (RunFailed, Stopped):
        with suppress(OSError):  # such as a full disk, which is the cause
            job.record.settle()
        raise
    except Exception as error:
        if not job.record.has_stepped(job.trainer):
            before.put_back(is_refusal=isinstance(error, UsageError))
        raise


@contextmanager
def telling_of_rest(job: Job) -> Iterator[None]:
    """Say that the training itself is done if a signal ends the command before weights and results are written."""
    run = job.run
    try:
        yield
    except Stopped as stopped:
        stopped.when = "after training" if job.record.started else stopped.when  # in it, `explained` has told
        if not stopped.said and is_leader() and run.record.get("status") == "done":
            way_on = f"`{run.way_on}` writes its weights and results"
            print_error(f"\nstopped{stopped.by}: the training is done, and {way_on}")
            stopped.said = True
        raise


@contextmanager
def running(job: Job) -> Iterator[Path | None]:
    """Yield the checkpoint that the training goes on from, if any, with all its processes at one place.

    At the end it closes what would outlive the training: the looks of ``job.deadline``, the W&B run, the log.
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
    """Tell the guard of the command how the run can be continued, how to end it, and what else to look for."""
    guard.looks = [job.watch.look, job.deadline.look]
    guard.way_on = f"continue with `{job.run.way_on}`"
    guard.on_end = partial(cut_short, job)
    guard.children = partial(job.watch.adopt_children, job.trainer)
    if job.trainer.world_size > 1:
        guard.join(job.trainer.global_rank, job.trainer.world_size)


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
