"""Why a training, or what goes before and after it, ended early, in one line each with the way on.

One context manager a step of ``vitlab fit``: :func:`building`, :func:`explained` around the training, :func:`closing`.
"""

import errno
import os
import signal
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn
from urllib.error import URLError

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from safetensors import SafetensorError
from torch import Tensor

from vitlab.data.base import ImageData
from vitlab.data.files.decode import ImageError
from vitlab.errors import (
    MISTAKES,
    Diverged,
    RunFailed,
    Stopped,
    UsageError,
    before_again,
    in_own_code,
    loader_timed_out,
    lost_loader,
    named_line,
    one_line,
    preview,
    what_failed,
)
from vitlab.interface import path_of
from vitlab.jobs.checkpoint import misfit
from vitlab.jobs.terminal import close_log, log_to, print_error, say
from vitlab.jobs.train.job import Job
from vitlab.runs.directory import RunDir
from vitlab.runs.fence import Fenced, RunGone
from vitlab.runs.generations import NotSaved
from vitlab.runs.launch import is_about_peers
from vitlab.runs.manifest import last_saved
from vitlab.runs.records import now_utc
from vitlab.tasks.base import Task

OUT_OF_MEMORY = (
    "lower `data.batch_size`, keep the global batch with `trainer.accumulate_grad_batches`, or set "
    "`model.grad_checkpoint=true` or `trainer.precision=bf16-mixed`"
)
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE)


@contextmanager
def building() -> Iterator[None]:
    """Say that the network is too large if memory runs out while it is built."""
    try:
        yield
    except UsageError as error:
        if is_out_of_memory(error):
            raise UsageError(f"out of memory: the network does not fit; make it smaller ({error})") from error
        raise


@contextmanager
def explained(job: Job) -> Iterator[None]:
    """Say why the training in a ``with`` block ended early; a bug is raised as it is.

    Raises:
        Stopped: A signal ended it, or a loader that hangs, after which it can be tried again.
        RunFailed: The cause lies outside, such as a full disk.
        UsageError: The user's mistake, before the first step.
    """
    try:
        yield
    except Stopped as stopped:
        _say_stopped(job, stopped)
        raise
    except Exception as error:
        sentence = explain_exception(error, job.run, job.batch, job.trainer.world_size)
        if loader_timed_out(error):
            print_error(f"\n{sentence}")
            ended = Stopped(signal.SIGTERM)
            ended.said = True
            raise ended from error
        if isinstance(error, RunGone):
            close_log()  # it may belong to another process now
        is_first = job.trainer.is_global_zero
        if sentence:
            if job.run.fence:
                job.run.fence.told = True
            in_all = isinstance(error, Diverged | NotSaved)  # of which the processes have told each other
            _fail(sentence, error, told=in_all and not is_first)
        if line := _unused(error, job.task):
            _fail(line, error, told=not is_first)
        _refuse(job, error)
        raise


@contextmanager
def closing(run: RunDir) -> Iterator[None]:
    """Say that the training itself is done if its weights or results cannot be written; log what is said."""
    try:
        log_to(run.path / "train.log")
        yield
    except (OSError, SafetensorError) as error:
        what = f"the training is done, but weights and results could not be written: {what_failed(error) or error}"
        first = before_again(getattr(error, "errno", None))
        _fail(f"{what}; {first}, then `{run.way_on}`", error)
    finally:
        close_log()


def cut_short(job: Job, reason: str, why: str) -> None:
    """Record that this process has ended without its main thread, on a signal or because that hangs."""
    with suppress(OSError):
        job.record.settle()
    if job.run.fence and not job.run.fence.loss:
        with suppress(OSError):
            _record_failure(job.run, "preempted", reason, why)


def lost_process(run: RunDir, what: str) -> None:
    """Say and record that another process of the run is gone."""
    print_error(f"\n{what}; the run ends. {last_saved(run.checkpoints)} `{run.way_on}`")
    _record_failure(run, "failed", what, "error")


def _record_failure(run: RunDir, status: str, what: str, why: str) -> None:
    if run.exists():
        run.update("run.json", status=status, ended=now_utc(), error=what, ending={"why": why, "text": what})


def _say_stopped(job: Job, stopped: Stopped) -> None:
    if job.trainer.is_global_zero:
        when = "" if job.record.started else " before the first step"
        way_on = f"continue with `{job.run.way_on}`"
        say(f"\nstopped{stopped.by}{when}; {way_on}")
    stopped.said = True


def _refuse(job: Job, error: Exception) -> None:
    """Raise a :class:`UsageError` if the error is a mistake of the user's; return otherwise."""
    sentence = None
    if job.trainer.global_step == 0:
        sentence = explain_mismatch(error, job.task, job.data)
    if isinstance(error, RuntimeError) and "loading state_dict" in str(error):
        sentence = str(misfit(job.run.checkpoints, error))
    if not sentence and (job.record.started or not isinstance(error, ValueError | MisconfigurationException)):
        return
    if "parameter group" in str(error):  # an older version grouped them differently, as with `layer_decay`
        way_on = f"resume with the vitlab of its commit (run.json), or start a new run --init_from {job.run.typed}"
        sentence = f"{job.run.path} has other parameter groups than this vitlab: {way_on}"
    raise UsageError(sentence or one_line(error, 2000)) from error


def _fail(sentence: str, error: Exception, told: bool = False) -> NoReturn:
    if not told:
        print_error(f"\n{sentence}")
    failed = RunFailed(sentence)
    failed.said = True
    raise failed from error


def explain_exception(error: Exception, run: RunDir, batch: int | None, processes: int) -> str | None:
    """Return an explanation of an error with an outside cause; None for a bug of ours.

    Args:
        error: What ended the training.
        run: The run directory.
        batch: Global batch size; None if unknown.
        processes: Number of processes.
    """
    way_on = f"`{run.way_on}`"
    match error:
        case Diverged() | NotSaved():
            return str(error)
        case torch.OutOfMemoryError():
            share = f" with data.batch_size={batch}, {batch // processes} on each GPU" if batch else ""
            return f"out of GPU memory{share}; {OUT_OF_MEMORY}"
        case MemoryError() | RuntimeError() | OSError() if is_out_of_memory(error):
            share = f" with data.batch_size={batch}, {batch // processes} in each process" if batch else ""
            return f"out of memory{share}; {OUT_OF_MEMORY}"
        case Fenced():
            return f"{error}; this one ends and writes nothing more"
        case RunGone():
            again = "start it again with the same command, or `vitlab fit --resume` its new place"
            return f"{error}; nothing more can be saved: {again}"
        case ImageError():
            return f"{error}; repair the file, then {way_on}; only a new run can leave it out, by --data.max_unreadable"
        case URLError():
            return f"the data could not be downloaded: {error.reason}; download them on a machine with a network"
        case OSError() if error.errno in _DISK:
            place = error.filename or run.path
            first = before_again(error.errno).capitalize()
            return f"{place}: {error.strerror}; what was saved before is intact. {first}, then {way_on}"
        case RuntimeError() | MisconfigurationException() if " conditioned on metric " in str(error):
            return one_line(error, 2000)
        case _ if processes > 1 and is_about_peers(error):
            return f"another process of the run has ended, or cannot be reached; the run ends. Go on with {way_on}"
        case RuntimeError() if (line := lost_loader(error)) is not None:
            return f"{line}, then {way_on}"
    return None


def _unused(error: Exception, task: torch.nn.Module) -> str | None:
    """Return which parameters got no gradient, if that is why DDP has ended the training."""
    if "not used in producing" not in str(error):  # Lightning's words for it, and torch's
        return None
    unused = [name for name, p in task.named_parameters() if p.requires_grad and p.grad is None]
    way_out = "leave them out, freeze them, or add --trainer.strategy=ddp_find_unused_parameters_true"
    return f"the loss does not depend on {preview(unused)}, and DDP waits for all gradients: {way_out}"


def is_out_of_memory(error: Exception) -> bool:
    """Return whether the host's memory ran out: in Python, in torch's allocator, or for a worker or shared memory."""
    words = ("DefaultCPUAllocator: ", os.strerror(errno.ENOMEM))
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


def explain_mismatch(error: Exception, task: Any, data: Any, split: str = "train") -> str | None:
    """Return where the first step failed and what a batch holds; None if neither task and data nor own code explain it.

    Args:
        error: The error of the first step, or of an evaluation.
        task: The LightningModule.
        data: The LightningDataModule.
        split: Whose loader gave the batch: ``train``, ``val`` or ``test``.
    """
    if isinstance(error, UsageError | torch.OutOfMemoryError) or is_out_of_memory(error) or lost_loader(error):
        return None
    if line := in_own_code(error):  # maybe of a part in a task of vitlab
        return line
    if isinstance(task, Task) and isinstance(data, ImageData):
        return None
    what = named_line(error)
    if not isinstance(error, MISTAKES):
        return None
    if not in_step(error):  # a ValueError says itself what is wrong
        is_told = isinstance(error, ValueError)
        return None if is_told else f"{path_of(task)} cannot be set up for {path_of(data)}: {what}"
    if isinstance(task, Task) and "You provided multiple `" in what:  # Lightning, of loaders
        return (
            f"{type(task).__name__} takes one loader for validation, one for tests, and {path_of(data)} gives several: "
            "give one, such as that of a ConcatDataset, and `vitlab test RUN --data=...` for the others"
        )
    if isinstance(task, Task):
        targets = (
            f"classes (B,), int64 from 0 to {task.net.num_classes - 1}" if task.kind == "class" else "targets (B,)"
        )
        return (
            f"{type(task).__name__} takes batches of images (B, C, H, W), float32, and {targets}, and the first of "
            f"{path_of(data)} for {split} {_first(data, split)}: {what}"
        )
    return f"{path_of(task)} does not take what {path_of(data)} gives for {split}: {what}"


def in_step(error: BaseException) -> bool:
    """Return whether an error was raised in a loop over batches, not before."""
    loops = ("training_epoch_loop.py", "evaluation_loop.py")
    return any(Path(frame.filename).name in loops for frame in traceback.extract_tb(error.__traceback__))


def _first(data: Any, split: str) -> str:
    try:
        return f"is {structure_of(next(iter(getattr(data, f'{split}_dataloader')())))}"
    except Exception:  # the user's code may raise anything
        return "cannot be loaded"


def structure_of(batch: Any) -> str:
    """Return the structure of a batch in short, with types other than float32 and int64.

    >>> import torch
    >>> structure_of((torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.zeros(4).long()))
    '(tensor (4, 3, 8, 8) uint8, tensor (4,))'
    >>> structure_of({"image": torch.zeros(4, 3, 8, 8), "label": [1, 2]})
    '{image: tensor (4, 3, 8, 8), label: list}'
    """
    if isinstance(batch, Tensor):
        usual = batch.dtype in (torch.float32, torch.int64)
        return f"tensor {tuple(batch.shape)}" + ("" if usual else f" {str(batch.dtype).removeprefix('torch.')}")
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{key}: {structure_of(value)}" for key, value in batch.items()) + "}"
    if isinstance(batch, list | tuple) and any(isinstance(part, Tensor) for part in batch):
        return f"({', '.join(map(structure_of, batch))})"
    return type(batch).__name__
