"""Build, train and close a run: the work of ``vitlab fit``."""

import os
import shutil
import signal
import time
from contextlib import suppress
from functools import partial

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from safetensors import SafetensorError

from vitlab.callbacks.progress import Progress
from vitlab.config.options import FitOptions
from vitlab.config.parser import user_mistakes
from vitlab.errors import RunFailed, Stopped, UsageError
from vitlab.jobs.rebuild import training_args
from vitlab.jobs.terminal import close_log, open_terminal, print_error, say
from vitlab.jobs.train.build import build_job
from vitlab.jobs.train.close import close, log_summary
from vitlab.jobs.train.describe import header
from vitlab.jobs.train.endings import explain_exception, is_out_of_memory
from vitlab.jobs.train.files import begin
from vitlab.jobs.train.job import Job
from vitlab.jobs.train.mismatch import explain_mismatch
from vitlab.jobs.train.wandb import finish_run
from vitlab.jobs.train.weights import load_given_weights, load_initial_weights
from vitlab.lazy import quick_imports
from vitlab.models.weights_file import check_readable
from vitlab.runs.choose import run_to_continue
from vitlab.runs.directory import RunDir
from vitlab.runs.fence import RunGone
from vitlab.runs.format import check_resumable
from vitlab.runs.hold import is_leader, locked, prepare
from vitlab.runs.launch import announce_run, join_group_store, joining, watch_launcher
from vitlab.runs.processes import keep_freed_memory
from vitlab.tasks.base import Task
from vitlab.tasks.distillation import Distillation


def fit(arguments: list[str], options: FitOptions) -> RunDir:
    """Train as configured, and return the run directory; a dry run does not create it.

    Args:
        arguments: Arguments of the configuration, as on the command line.
        options: Options of the run.

    Raises:
        UsageError: The user's mistake.
        RunFailed: The training ended for an outside reason, which has been printed.
        Stopped: A signal ended it.
    """
    started = time.perf_counter()
    watch_launcher()
    keep_freed_memory()
    run = run_to_continue(options)
    open_terminal(options.quiet)
    try:
        with quick_imports():  # of logger, data and the user's code
            job = build_job(training_args(run, arguments, auto=not options.resume), options, run)
    except UsageError as error:
        if is_out_of_memory(error):
            raise UsageError(f"out of memory: the network does not fit; make it smaller ({error})") from error
        raise
    if not job.resumed and options.init_from:
        load_initial_weights(job, options.init_from, options.resize, options.init_grid)
    elif not job.resumed and options.start is not None:
        load_given_weights(job, options.start)
    elif job.resumed and not job.run.has_checkpoint() and (source := job.run.record.get("init_from")):
        load_initial_weights(job, source, job.run.record.get("resize"), job.run.record.get("init_grid"))
    if options.dry_run:
        _dry_run(job)
    else:
        with locked(job.run):
            _train(job, started)
    return job.run


def _dry_run(job: Job) -> None:
    """Set up the data and print the header."""
    with user_mistakes():
        job.data.prepare_data()
        job.data.setup("fit")
        job.data.train_dataloader()
        if is_overridden("val_dataloader", job.data, L.LightningDataModule):
            job.data.val_dataloader()
        if isinstance(job.task, Task):
            job.task.check_targets()
        if isinstance(job.task, Distillation):
            job.task.find_teacher(job.data)
    say(header(job) + "\n\ndry run: everything can be built; nothing was written")


def _train(job: Job, started: float) -> None:
    if is_leader():
        prepare(job.run, job.options.overwrite, job.resumed, sum(p.nbytes for p in job.task.parameters()))
        begin(job)
    announce_run(job.run.path)
    failed = True
    try:
        _fit(job)
        failed = False
        if job.trainer.is_global_zero:
            log_summary(job)
    finally:
        del os.environ["VITLAB_RUN_DIR"], os.environ["VITLAB_LAUNCHER"]
        for part in job.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(part, Progress):  # still running after an error during error handling
                part.stop()
        if job.wandb_line:
            finish_run(failed)
        close_log()
    if job.trainer.is_global_zero:
        try:
            close(job, time.perf_counter() - started)
        except (OSError, SafetensorError) as error:
            what = f"the training is done, but weights and results could not be written: {error}"
            raise _failed(f"{what}; make room, then `vitlab fit --resume {job.run.path}`") from error


def _fit(job: Job) -> None:
    """Train until the end, a signal or an error."""
    checkpoint = job.run.last_checkpoint() if job.resumed else None
    if checkpoint:
        with user_mistakes():
            check_readable(checkpoint)
            check_resumable(checkpoint)
    join_group_store()
    try:
        with joining(job.trainer.global_rank, job.trainer.world_size, partial(_end_joining, job)):
            job.trainer.fit(job.task, datamodule=job.data, ckpt_path=checkpoint, weights_only=True)
    except Stopped as stopped:
        if job.trainer.is_global_zero:
            when = "" if job.record.started else " before the first step"
            way_on = f"continue with `vitlab fit --resume {job.run.path}`"
            why = "" if len(stopped.args) > 1 else f" by {signal.Signals(stopped.args[0]).name}"
            say(f"\nstopped{why}{when}; {way_on}")
        stopped.said = True
        raise
    except Exception as error:
        if "DataLoader timed out" in str(error):
            print_error(f"\n{explain_exception(error, job.run, job.batch, job.trainer.world_size)}")
            ended = Stopped(signal.SIGTERM)
            ended.said = True
            raise ended from error
        if isinstance(error, RunGone):
            close_log()  # it may belong to another process now
        if sentence := explain_exception(error, job.run, job.batch, job.trainer.world_size):
            if job.run.fence:
                job.run.fence.told = True
            raise _failed(sentence) from error
        sentence = explain_mismatch(error, job.task, job.data) if job.trainer.global_step == 0 else None
        if not sentence and (job.record.started or not isinstance(error, ValueError | MisconfigurationException)):
            raise
        if not job.resumed and job.trainer.is_global_zero:
            shutil.rmtree(job.run.path, ignore_errors=True)
        if "parameter group" in str(error):  # an older version grouped them differently, as with `layer_decay`
            way_on = f"resume with the vitlab of its commit (run.json), or start a new run --init_from {job.run.path}"
            sentence = f"{job.run.path} has other parameter groups than this vitlab: {way_on}"
        raise UsageError(sentence or " ".join(str(error).split())) from error


def _end_joining(job: Job, reason: str) -> None:
    """Record that the processes did not come together, and end those that Lightning has started from this one."""
    if job.run.fence:
        with suppress(OSError):
            job.run.update("run.json", status="preempted", error=reason, ending={"why": "signal", "text": reason})
    for child in getattr(job.trainer.strategy.launcher, "procs", []):
        child.kill()


def _failed(sentence: str) -> RunFailed:
    print_error(f"\n{sentence}")
    return RunFailed(sentence)
