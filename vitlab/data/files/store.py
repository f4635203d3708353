"""Places with encoded images: what each must tell of its files, how many are read, and a folder of them."""

import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from torch.utils.data import Dataset

from vitlab.data.files.decode import reading

_T = TypeVar("_T")


class Store(ABC):
    """A place with encoded images, each under a name."""

    place: str  # identifies the store

    @abstractmethod
    def path(self, file: str) -> str:
        """Return the name of a file for messages."""

    @abstractmethod
    def read(self, file: str) -> bytes:
        """Return the bytes of a file, or raise an OSError."""

    @abstractmethod
    def stamp(self, file: str) -> tuple[int, int]:
        """Return two numbers that change with a file, its size first, or raise an OSError."""

    @abstractmethod
    def identity(self, file: str) -> bytes:
        """Return the identity that assigns a file to a split."""

    def load(self, file: str) -> bytes:
        """Return the bytes of a file, or raise an ImageError that names it."""
        with reading(self.path(file)):
            return self.read(file)

    def expect(self, files: list[str]) -> None:
        """Prefetch the files that are read next, where each read alone would be slow."""
        return

    def pixels(self, file: str) -> np.ndarray | None:
        """Return an image as uint8 ``(H, W, 3)`` or ``(H, W)`` without a copy; None if it is encoded."""
        return None


class EachFile(Dataset[_T]):
    """What a function makes of each of some files; a loader's workers announce those of a batch before they read them.

    Args:
        store: The store of the files.
        files: Name of each in the store.
        make: The function, of a name.

    >>> EachFile(Folder(Path("photos")), ["cat/1.jpg"], str.upper).__getitems__([0])
    ['CAT/1.JPG']
    """

    def __init__(self, store: Store, files: Sequence[str], make: Callable[[str], _T]) -> None:
        self.store, self.files, self.make = store, files, make

    def __len__(self) -> int:
        return len(self.files)

    def __getitems__(self, indices: list[int]) -> list[_T]:
        files = [self.files[i] for i in indices]
        self.store.expect(files)
        return list(map(self.make, files))


class Folder(Store):
    """Files under a folder; a relative path is both name and identity.

    Args:
        root: The folder.

    >>> Folder(Path("photos")).identity("cat/1.jpg")
    b'cat/1.jpg'
    """

    def __init__(self, root: Path) -> None:
        self.root, self.place = root, os.fspath(root.resolve())

    def path(self, file: str) -> str:
        """Return the path."""
        return os.fspath(self.root / file)

    def read(self, file: str) -> bytes:
        """Return the bytes of a file, or raise an OSError, also for a pipe, which would block."""
        path = self.root / file
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError("neither a file nor a folder")
        return path.read_bytes()

    def stamp(self, file: str) -> tuple[int, int]:
        """Return size in bytes and time of the last change in nanoseconds."""
        status = os.stat(self.root / file)
        return status.st_size, status.st_mtime_ns

    def identity(self, file: str) -> bytes:
        """Return the relative path."""
        return os.fsencode(file)
