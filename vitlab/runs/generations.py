"""Write checkpoints so that an intact one, and the one before it, survive any crash."""

import copy
import errno
import os
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch import Tensor

from vitlab.errors import UsageError, before_again, megabytes
from vitlab.interface import is_loadable, path_of
from vitlab.runs.atomic import nearest_existing, sync_folder
from vitlab.runs.directory import RunDir
from vitlab.runs.fence import Fence, RunGone, unfinished_in
from vitlab.runs.format import migrate
from vitlab.runs.guard import during
from vitlab.runs.manifest import Entry, file_digest, noted, read_manifest, write_manifest
from vitlab.runs.matching import matching
from vitlab.runs.shards import sweep_shards

WRITING = ".writing"  # never matches *.ckpt
_LINK = ".link"
_PLAIN = {bool, float, int, str, type(None)}  # a list of these alone, such as a random state, is not looked into


class NotSaved(OSError):
    """A checkpoint could not be written; earlier ones are intact."""


class BackgroundCheckpointIO(TorchCheckpointIO):
    """Write and sync a checkpoint in a thread, from a copy, while training continues.

    Lightning's own writes through TMPDIR, and copies if that is another file system. Other processes would not see an
    error that the writing process raises, so :meth:`wait` returns it. A save without ``finish``, such as that of
    Lightning's ModelCheckpoint, has nobody who waits for it, and is written at once.
    """

    finish: Callable[..., None] | None = None  # what the thread does after writing the next file

    def __init__(self) -> None:
        super().__init__()
        self._thread: threading.Thread | None = None
        self._folder = Path()
        self._failure: str | None = None
        self._error: BaseException | None = None

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a checkpoint, in the present format."""
        try:
            return migrate(super().load_checkpoint(path, *args, **kwargs))
        except FileNotFoundError as error:  # so Lightning says, whatever failed
            raise OSError(error.errno or errno.ENOENT, "it cannot be opened now", str(path)) from error

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Copy ``checkpoint`` and start to write it; the copy takes host memory until it is written.

        Raises:
            UsageError: It holds what could not be read again.
            NotSaved: It could not be written, where no callback waits for it.
        """
        refuse_objects(checkpoint)
        copies: dict[Any, Tensor] = {}
        content, finish = snapshot(checkpoint, copies), self.take_finish()
        size = sum(copy.nbytes for copy in copies.values())
        self.begin(partial(self.write, content, Path(path), finish), Path(path), size)
        if finish is None and (failure := self.wait()):
            raise NotSaved(failure)

    def take_finish(self) -> Callable[..., None] | None:
        """Return what is done after writing the next file, for that file alone."""
        finish, self.finish = self.finish, None
        return finish

    def begin(self, work: Callable[[], None], path: Path, size: int) -> None:
        """Start ``work``, which writes ``size`` bytes to ``path``, in the thread.

        Raises:
            NotSaved: The checkpoint before it could not be written.
        """
        if failure := self.wait():  # an earlier checkpoint failed
            raise NotSaved(failure)
        self._folder = path.parent
        self._thread = threading.Thread(target=self._run, args=(work, path, size), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> str | None:
        """Wait for the thread, and return why the last checkpoint could not be written; None if it was."""
        if self._thread is not None:
            with being_written(self._folder):
                self._thread.join()
        self._thread = None
        (failure, self._failure), (error, self._error) = (self._failure, None), (self._error, None)
        if error:
            raise error
        return failure

    def write(self, content: dict[str, Any], path: Path, finish: Callable[..., None] | None) -> None:
        """Write and sync a file, and ``finish`` it; again if somebody removes it or its folder meanwhile."""
        try:
            self._write(content, path, finish)
        except FileNotFoundError:
            self._write(content, path, finish)

    def _write(self, content: dict[str, Any], path: Path, finish: Callable[..., None] | None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        if finish:
            finish(**{key: content[key] for key in ("shards",) if key in content})

    def _run(self, work: Callable[[], None], path: Path, size: int) -> None:
        try:
            work()
        except BaseException as error:
            cause = None if isinstance(error, RunGone) else _cause(error)
            with suppress(OSError):
                path.unlink(missing_ok=True)
            if cause is None:
                self._error = error
            else:
                self._failure = _not_saved(path.parent, cause, size)


def being_written(folder: Path) -> AbstractContextManager[None]:
    """Return the phase in which a process waits until a checkpoint is written, by itself or by another of the run."""
    return during("save", f"the checkpoint to be written into {folder}")


def refuse_objects(checkpoint: dict[str, Any]) -> None:
    """Refuse to save what cannot be read again, as reading runs no code: objects of NumPy, paths, classes.

    Raises:
        UsageError: A hook such as ``state_dict`` of the user's has returned such a value.

    Example:
        >>> refuse_objects({"callbacks": {"Seen": {"count": 3, "last": torch.ones(2)}}})
        >>> refuse_objects({"callbacks": {"Seen": {"last": Path("a.png")}}})
        Traceback (most recent call last):
        vitlab.errors.UsageError: a checkpoint with `callbacks.Seen.last`, a pathlib.PosixPath, could not be ...
    """
    if found := _object_in(checkpoint, ""):
        raise UsageError(
            f"a checkpoint with {found}, could not be read again, as checkpoints only hold numbers, strings and "
            "tensors: save it as such, by `.item()` or `torch.from_numpy(...)` of NumPy's, or `str(...)` of a path"
        )


def _object_in(content: Any, name: str) -> str | None:
    """Return name and class of the first value that could not be read again; None if there is none."""
    has_plain = isinstance(content, dict | list | tuple) and _PLAIN.issuperset(map(type, content))  # keys, or values
    pairs: Iterable[Any] = ()
    if type(content) in (dict, OrderedDict) and has_plain:
        pairs = content.items()
    elif type(content) in (list, tuple):
        pairs = () if has_plain else enumerate(content)
    elif type(content) not in _PLAIN and not isinstance(content, Tensor) and not is_loadable(content):
        return f"`{name}`, a {path_of(content)}"
    inside = (_object_in(value, f"{name}.{key}" if name else str(key)) for key, value in pairs)
    return next(filter(None, inside), None)


def snapshot(content: Any, seen: dict[Any, Tensor]) -> Any:
    """Copy nested containers to the CPU; tensors that share memory, such as tied weights, still share it.

    Args:
        content: The containers.
        seen: Gets the copy of each tensor, by what tells it from others.

    >>> tied = torch.zeros(2)
    >>> copied = snapshot({"a": tied, "b": [tied]}, {})
    >>> tied.add_(1), copied["a"] is copied["b"][0], copied
    (tensor([1., 1.]), True, {'a': tensor([0., 0.]), 'b': [tensor([0., 0.])]})
    """
    if isinstance(content, Tensor):
        place = (content.data_ptr(), content.device, content.dtype, content.shape, content.stride())
        if content.numel() == 0 or place not in seen:
            seen[place] = content.detach().to("cpu", copy=True)
        return seen[place]
    if isinstance(content, dict):
        copied = copy.copy(content)  # keeps the version metadata of a state dict
        copied.update((key, snapshot(value, seen)) for key, value in content.items())
        return copied
    if type(content) in (list, tuple):
        is_plain = _PLAIN.issuperset(map(type, content))
        return type(content)(content if is_plain else (snapshot(value, seen) for value in content))
    return copy.deepcopy(content)


def _cause(error: BaseException) -> OSError | None:
    """Return why a file could not be written; torch wraps the system's error in its own."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, OSError):
            return chain
        chain = chain.__context__
    return OSError("the disk is full or failed") if "pos" in str(error) or "StreamWriter" in str(error) else None


def _not_saved(folder: Path, cause: OSError, size: int) -> str:
    """Return the message that a checkpoint could not be written, with the space it needs and the way out."""
    free = None
    with suppress(OSError):  # the disk is gone
        free = shutil.disk_usage(nearest_existing(folder)).free
    room = f"it needs {megabytes(size)}" + ("" if free is None else f", {megabytes(free)} are free")
    return (
        f"the checkpoint could not be written into {folder}: {cause.strerror or cause}; {room}. What was saved before "
        f"is intact: {before_again(cause.errno)}, then `{RunDir(folder.parent).way_on}`"
    )


def writing(fence: Fence | None) -> str:
    """Return the name of the checkpoint that is being written; every attempt to train has its own."""
    return f"{WRITING}-{fence.token}" if fence else WRITING


def rotate(folder: Path, names: list[str], facts: Entry, shards: Any = None, fence: Fence | None = None) -> None:
    """Give the new checkpoint its ``names``; if it is the last, the one before becomes ``previous``.

    At every moment each file is intact and its checksum is in the manifest: the new checksum is written there before
    the first file is renamed.
    """
    written, last, previous = (folder / name for name in (writing(fence), "last.ckpt", "previous.ckpt"))
    status = written.stat()
    entry = {"sha256": file_digest(written), "size": status.st_size, "modified": status.st_mtime_ns, **facts}
    entry |= {"shards": shards} if shards else {}
    before = read_manifest(folder)
    write_manifest(folder, {**before, WRITING: entry}, fence)
    entries = {name: e for name, e in before.items() if name != WRITING}
    is_last = "last" in names
    if is_last and last.is_file() and (old := _known(last, before)):  # a damaged file never replaces a good one
        _rename_link(last, previous, fence)
        entries[previous.name] = old
    for name in names[1:]:  # hard links to the same file
        _rename_link(written, folder / f"{name}.ckpt", fence)
    _check(fence)
    os.replace(written, folder / f"{names[0]}.ckpt")
    sync_folder(folder)
    entries |= {f"{name}.ckpt": entry for name in names}
    write_manifest(folder, entries, fence)
    sync_folder(folder)
    sweep_shards(folder, entries)


def _known(path: Path, entries: dict[str, Entry]) -> Entry | None:
    """Return the manifest's entry of a file; a modified file is found by its checksum."""
    if entry := noted(path, entries):
        return entry
    digest = file_digest(path)
    return next((e for e in entries.values() if e["sha256"] == digest), None)


def _check(fence: Fence | None) -> None:
    if fence:
        fence.check()


def _rename_link(source: Path, target: Path, fence: Fence | None) -> None:
    link = target.with_name(f"{_LINK}-{fence.token}" if fence else _LINK)
    link.unlink(missing_ok=True)
    try:
        os.link(source, link)
    except OSError:  # the file system has no hard links
        shutil.copyfile(source, link)
    _check(fence)
    os.replace(link, target)


def sweep(folder: Path) -> None:
    """Remove the leftovers of a process that was killed while writing, and match checksums to files again."""
    for path in unfinished_in(folder):
        path.unlink(missing_ok=True)
    checkpoints = matching(folder, "*.ckpt")
    entries = read_manifest(folder)
    if WRITING in entries:
        known = {e["sha256"]: e for e in entries.values()}
        digests = {path.name: file_digest(path) for path in checkpoints}
        write_manifest(folder, {name: known[d] for name, d in digests.items() if d in known})
