"""The work of ``vitlab fit``, in the order of a training: build, train, close.

Each step says what it takes and what it gives: words become a :class:`Job`, a job becomes what was reached
(:class:`Reached`), and that becomes weights, results and last lines. A step that fails says why in ``endings.py``.
"""

import time
from pathlib import Path

from vitlab.config.options import FitOptions
from vitlab.jobs.train.build import build_job, rehearse
from vitlab.jobs.train.close import close, log_summary
from vitlab.jobs.train.endings import explained
from vitlab.jobs.train.job import Job, Reached
from vitlab.jobs.train.start import as_before_if_refused, begin, running, telling_of_data, telling_of_rest, watch_over
from vitlab.runs.directory import RunDir
from vitlab.runs.guard import guarded
from vitlab.runs.processes import keep_freed_memory
from vitlab.runs.run_lock import locked


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
    keep_freed_memory()
    with guarded() as guard:
        guard.enter("build", "network and data to be built")
        job = build_job(arguments, options)
        if options.dry_run:
            rehearse(job)
            return job.run
        with locked(job.run), telling_of_rest(job):
            with as_before_if_refused(job):
                begin(job)
                watch_over(guard, job)
                with running(job) as checkpoint:
                    reached = train(job, checkpoint)
            if reached:
                guard.enter("close", "weights and results to be written")
                close(job, reached, time.perf_counter() - started)
    return job.run


def train(job: Job, checkpoint: Path | None) -> Reached | None:
    """Train until the end, a signal or an error; return what was reached, on the first process, and tell W&B.

    Args:
        job: What was built.
        checkpoint: Where to go on from; None for the first step.
    """
    trainer = job.trainer
    with explained(job), telling_of_data(job):
        trainer.fit(job.task, datamodule=job.data, ckpt_path=checkpoint, weights_only=True)
    if not trainer.is_global_zero:
        return None
    reached = Reached.of(job)
    log_summary(job, reached)
    return reached
