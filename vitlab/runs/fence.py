"""Fencing: of the attempts to train in one run directory, only the newest writes there."""

import json
import os
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from vitlab.errors import UsageError
from vitlab.runs.matching import is_there, matching
from vitlab.runs.records import read_json

RECORD, ROWS = "run.json", "metrics.jsonl"
_UNFINISHED = (".fit-*", ".writing*", ".link*", ".*.manifest.json")


class RunGone(OSError):
    """The directory of a run was deleted, moved or replaced during training."""


class Fenced(RunGone):
    """Another process trains in the run directory now."""


def owner_text(facts: Mapping[str, object]) -> str:
    """Return how messages call the process that a claim or ``run.json`` names.

    Example:
        >>> owner_text({"pid": 7, "host": "node1"}), owner_text({})
        ('process 7 on node1', 'process ? on another machine')
    """
    return f"process {facts.get('pid', '?')} on {facts.get('host', 'another machine')}"


def unfinished_in(folder: Path) -> list[Path]:
    """Return the files of a folder that an attempt to train has begun to write, and that have no name of their own yet.

    Example:
        >>> unfinished_in(Path("runs/first/checkpoints"))
        []
    """
    return [*dict.fromkeys(path for pattern in _UNFINISHED for path in matching(folder, pattern))]


@contextmanager
def renamed_or_removed(beside: Path, path: Path) -> Iterator[None]:
    """Inside a ``with`` block, ``beside`` is written and renamed to ``path``; it is removed if that fails.

    Errors that name ``beside``, or nothing as a full disk does, then name ``path``.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as place:
        ...     path, beside = Path(place, "run.json"), Path(place, ".run.json")
        ...     with renamed_or_removed(beside, path):
        ...         _ = beside.write_text("{}")
        ...     beside.exists()
        False
    """
    try:
        yield
    except OSError as error:
        if error.errno and str(error.filename or beside) == str(beside):
            error.filename = str(path)
        raise
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)


class Fence:
    """The right of one attempt to write into a run directory, for as long as ``run.json`` has its token.

    A file is written beside its place, under a name with the token. Then the token is looked up, and the file renamed.
    An attempt that takes the directory over writes its own token first, and then removes the unfinished files of all
    others. So one that was stopped anywhere between these steps finds its token replaced or its file gone, and what it
    still appends to ``metrics.jsonl`` goes to a file that has lost its name.

    What the attempt itself has written is kept in memory, and written again if somebody has removed it.

    Args:
        folder: The run directory.
        token: Name of the attempt; None makes a new one.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as place:
        ...     ours, theirs = Fence(Path(place)), Fence(Path(place))
        ...     ours.take_over({})
        ...     theirs.take_over({})
        ...     ours.append("{}")
        Traceback (most recent call last):
        vitlab.runs.fence.Fenced: another process trains in ...
    """

    def __init__(self, folder: Path, token: str | None = None) -> None:
        self.folder = folder
        self.token = token or uuid.uuid4().hex[:12]
        self.loss: RunGone | None = None  # set once another process has the directory
        self.told = False  # whether the user has read of it
        self._kept: dict[str, bytes] = {}
        self._rows: int | None = None  # descriptor of metrics.jsonl
        self._mutex = threading.RLock()  # the main thread, the heartbeat and the writer of checkpoints come here

    def take_over(self, record: dict[str, object]) -> None:
        """Fence all earlier attempts: write ``record`` with the token, and remove what they have not finished."""
        with self._mutex:
            text = json.dumps({**record, "token": self.token}, indent=1, default=str) + "\n"
            self._finish(self.folder / RECORD, text.encode())
            for place in (self.folder, self.folder / "checkpoints", self.folder / "weights"):
                for path in unfinished_in(place):
                    path.unlink(missing_ok=True)
            if is_there(self.folder / ROWS):
                self._open_rows((self.folder / ROWS).read_bytes())

    def check(self) -> None:
        """Raise :class:`Fenced` if another attempt has taken over; write again what was removed.

        Raises:
            RunGone: Another attempt has taken over (:class:`Fenced`), or ``run.json`` was removed from outside.
            OSError: ``run.json`` cannot be read, so this is unknown.
        """
        if self.loss is not None:
            raise self.loss
        with self._mutex:
            token = self._check_token()
            if token is None and RECORD not in self._kept:
                raise RunGone(f"{self.folder / RECORD} was removed during training")
            for name, content in self._kept.items():
                if not (self.folder / name).exists() or (name == RECORD and token is None):
                    self._restore(name, content)
            if self._rows is not None and self._is_renamed():
                self._open_rows(self.read_rows())

    @contextmanager
    def beside(self, path: Path) -> Iterator[Path]:
        """Yield a path beside ``path``, whose file replaces ``path`` at the end if this attempt still may write."""
        unfinished = self._unfinished(path)
        with renamed_or_removed(unfinished, path):
            yield unfinished
            content = unfinished.read_bytes() if path.parent == self.folder else None
            self.check()
            try:
                os.replace(unfinished, path)
            except FileNotFoundError:  # removed by an attempt that took over since
                self.check()
                raise
            if content is not None:
                self._kept[path.name] = content

    def append(self, row: str) -> None:
        """Append a line to ``metrics.jsonl``, whole or not at all.

        Raises:
            RunGone: Another attempt has taken over, or the directory is gone.
            OSError: The disk is full or fails; nothing of the line stays in the file.
        """
        with self._mutex:
            self.check()
            if self._rows is None:
                self._open_rows(self.read_rows())
            assert self._rows is not None
            line, size = f"{row}\n".encode(), os.fstat(self._rows).st_size
            try:
                if os.write(self._rows, line) < len(line):
                    raise OSError(28, "No space left on device", str(self.folder / ROWS))  # a limit of size, or a quota
            except OSError as error:
                with suppress(OSError):
                    os.ftruncate(self._rows, size)
                raise OSError(error.errno, error.strerror, str(self.folder / ROWS)) from error

    def read_rows(self) -> bytes:
        """Return the content of ``metrics.jsonl``, of the file that this attempt has open even if its name is gone."""
        with self._mutex:
            if self._rows is not None:
                return os.pread(self._rows, os.fstat(self._rows).st_size, 0)
        path = self.folder / ROWS
        return path.read_bytes() if is_there(path) else b""

    def cut_rows(self, size: int) -> None:
        """Cut ``metrics.jsonl`` to its first bytes."""
        with self._mutex:
            if self._rows is not None:
                os.ftruncate(self._rows, size)

    def put_back(self, files: Mapping[str, bytes | None]) -> None:
        """Give the files of the run directory the content that they had before this attempt, which ends.

        Args:
            files: Content of each; None for one that was not there. The record, with its token, is the last.

        Raises:
            RunGone: Another attempt has taken over, or the directory is gone.
        """
        with self._mutex:
            self.check()
            self.close()
            for name in sorted(files, key=lambda name: name == RECORD):
                content, path = files[name], self.folder / name
                if content is None:
                    path.unlink(missing_ok=True)
                elif not is_there(path) or path.read_bytes() != content:
                    self._finish(path, content)
            self._kept.clear()  # nothing of this attempt is to be written again

    def close(self) -> None:
        """Close ``metrics.jsonl``; what is removed from now on is not written again."""
        with self._mutex:
            if self._rows is not None:
                os.close(self._rows)
            self._rows = None
            self._kept.clear()

    def _check_token(self) -> object:
        record = self._read()
        if (token := record.get("token")) not in (None, self.token):
            self.loss = Fenced(f"another process trains in {self.folder} now: {owner_text(record)}")
            raise self.loss
        return token

    def _read(self) -> dict[str, object]:
        for left in (2, 1, 0):  # a network file system forgets for a moment which file has the name
            try:
                return read_json(self.folder / RECORD)
            except UsageError:  # damaged by others: ours are renamed when they are whole
                return {}
            except OSError:
                if not left:
                    raise
                time.sleep(0.1)
        return {}

    def _restore(self, name: str, content: bytes) -> None:
        """Write a file that was removed; one that another attempt has just written stays."""
        path = self.folder / name
        unfinished = self._unfinished(path)
        with renamed_or_removed(unfinished, path):
            unfinished.write_bytes(content)
            if path.exists():  # damaged
                os.replace(unfinished, path)
                return
            try:
                os.link(unfinished, path)
            except FileExistsError:
                return
            except OSError:  # the file system has no hard links
                os.replace(unfinished, path)

    def _unfinished(self, path: Path) -> Path:
        """Return a new name beside ``path`` that tells whose file it is."""
        return path.with_name(f".fit-{self.token}-{uuid.uuid4().hex[:6]}.{path.name}")

    def _finish(self, path: Path, content: bytes) -> None:
        unfinished = self._unfinished(path)
        with renamed_or_removed(unfinished, path):
            with unfinished.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, path)
            self._kept[path.name] = content

    def _open_rows(self, content: bytes) -> None:
        """Give ``metrics.jsonl`` a new file with ``content``, which earlier attempts have not opened."""
        path, unfinished = self.folder / ROWS, self.folder / f".fit-{self.token}.{ROWS}"
        with renamed_or_removed(unfinished, path):
            unfinished.write_bytes(content)
            rows = os.open(unfinished, os.O_RDWR | os.O_APPEND)
            try:
                self._check_token()
                os.replace(unfinished, path)
            except BaseException:
                os.close(rows)
                raise
        if self._rows is not None:
            os.close(self._rows)
        self._rows = rows

    def _is_renamed(self) -> bool:
        """Return whether the name ``metrics.jsonl`` belongs to no file or to another."""
        assert self._rows is not None
        try:
            named, own = (self.folder / ROWS).stat(), os.fstat(self._rows)
        except FileNotFoundError:
            return True
        return (named.st_dev, named.st_ino) != (own.st_dev, own.st_ino)
