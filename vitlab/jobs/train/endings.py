"""Explain in one line why a training ended early and how to continue."""

import errno
import os
from urllib.error import URLError

import torch

from vitlab.data.files.decode import ImageError
from vitlab.runs.directory import RunDir
from vitlab.runs.fence import Fenced, RunGone
from vitlab.runs.generations import NotSaved

OUT_OF_MEMORY = (
    "lower `data.batch_size`, keep the global batch with `trainer.accumulate_grad_batches`, or set "
    "`model.grad_checkpoint=true` or `trainer.precision=bf16-mixed`"
)
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EIO)


def explain_exception(error: Exception, run: RunDir, batch: int | None, processes: int) -> str | None:
    """Return an explanation of an error with an outside cause; None for a bug of ours.

    Args:
        error: What ended the training.
        run: The run directory.
        batch: Global batch size; None if unknown.
        processes: Number of processes.
    """
    way_on = f"`vitlab fit --resume {run.path}`"
    match error:
        case FloatingPointError() | NotSaved():
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
            return f"{error}; repair the file, or tolerate some with --data.max_unreadable, then {way_on}"
        case URLError():
            return f"the data could not be downloaded: {error.reason}; download them on a machine with a network"
        case OSError() if error.errno in _DISK:
            place = error.filename or run.path
            return f"{place}: {error.strerror}; what was saved before is intact. Make room, then {way_on}"
        case RuntimeError() if "Early stopping conditioned on" in str(error):
            return " ".join(str(error).split())
        case RuntimeError() if "loading state_dict" in str(error):
            return f"the checkpoints in {run.checkpoints} belong to another network: use its configuration"
        case RuntimeError() if "DataLoader worker" in str(error) or "DataLoader timed out" in str(error):
            what = " ".join(str(error).split()).split(". ")[0]
            return f"{what}: killed, out of memory, or hanging. Use fewer (--data.num_workers), then {way_on}"
    return None


def is_out_of_memory(error: Exception) -> bool:
    """Return whether the host's memory ran out: in Python, in torch's allocator, or for a worker or shared memory."""
    words = ("DefaultCPUAllocator: ", os.strerror(errno.ENOMEM))
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)
