"""Weights and moments in shards: a folder beside the checkpoint that names it, written by all processes at once.

The checkpoint keeps everything else, and the sha256 of each file of the folder. A folder is whole before a checkpoint
names it, and goes after no checkpoint names it any more: a kill at any moment leaves a whole state.
"""

import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vitlab.runs.manifest import Entry, file_digest, sync_folder

FOLDER = "shards-"
_HARMLESS = {  # what the index of a folder may consist of; a pickle could else run code
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool"},
    "pathlib": {"Path", "PosixPath"},
    "pathlib._local": {"Path", "PosixPath"},
}  # fmt: skip


class _Index(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _HARMLESS.get(module, ()):
            raise ValueError(f"it is refused: it names {module}.{name}, which could run code when loaded")
        return super().find_class(module, name)


class TornShards(ValueError):
    """A folder of shards that is not there, is damaged or holds more than tensors."""


def reader(folder: Path) -> Any:
    """Return what reads a folder of shards without running what is in it, or raise TornShards."""
    from torch.distributed.checkpoint import FileSystemReader

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return index

    try:
        with (folder / ".metadata").open("rb") as file:
            index = _Index(file).load()
        inside = {info.relative_path for info in index.storage_data.values()}
        if any(Path(name).name != name for name in inside):
            raise ValueError("it names files outside")
    except Exception as error:  # a damaged pickle fails as it likes
        raise TornShards(f"{folder} is no whole folder of shards: {error}") from error
    return Reader(folder)


def fill(tensors: dict[str, torch.Tensor], source: Any, *, alone: bool) -> None:
    """Read shards into ``tensors``, in this process ``alone`` or in all at once; TornShards where that fails."""
    import torch.distributed.checkpoint as dcp

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is")  # not there, which is as it should be
            dcp.load(tensors, storage_reader=source, no_dist=alone)
    except dcp.CheckpointException as error:  # which no `except Exception` meets
        first = next(iter(error.failures.values()))[0]
        raise TornShards(f"{source.path} is no whole folder of shards: {first}") from error


def write(tensors: dict[str, torch.Tensor], folder: Path, process: int = 0, group: Any = None) -> dict[str, str]:
    """Write what this process has of ``tensors``; return the sha256 of each file, of all processes of the group.

    Raises:
        OSError: In all processes, where one could not write.
    """
    import torch.distributed.checkpoint as dcp

    def attempt(work: Callable[[], Any]) -> Any:
        try:
            return work()
        except (OSError, dcp.CheckpointException) as error:
            return error

    def digests() -> dict[str, str]:
        sync_folder(folder)
        names = [path.name for path in folder.glob(f"__{process}_*.distcp")] + [".metadata"] * (process == 0)
        return {name: file_digest(folder / name) for name in names}

    alone, writer = group is None, dcp.FileSystemWriter(folder)
    failed = attempt(lambda: dcp.save(tensors, storage_writer=writer, process_group=group, no_dist=alone))
    parts = [own := attempt(digests)]
    if not alone:
        parts *= group.size()
        torch.distributed.all_gather_object(parts, own, group=group)
    for bad in [failed, *parts]:
        if isinstance(bad, Exception):
            first = next(iter(bad.failures.values()))[0] if isinstance(bad, dcp.CheckpointException) else bad
            if process == 0:  # all have come to their end
                shutil.rmtree(folder, ignore_errors=True)
            raise OSError(getattr(first, "strerror", None) or str(first)) from bad
    return {name: digest for part in parts for name, digest in part.items()}


def is_sharded(path: Path) -> bool:
    """Return whether a checkpoint names shards; its bytes must be known to be harmless and whole."""
    return path.suffix == ".ckpt" and "shards" in torch.load(path, map_location="meta", weights_only=True, mmap=True)


def read_checkpoint(path: Path, **how: Any) -> Any:
    """Read a checkpoint in the mode that cannot run code, with whole weights where they lie in shards.

    Args:
        path: The file.
        **how: Where to, as :func:`torch.load` takes it.
    """
    content = torch.load(path, weights_only=True, **how)
    whole = not isinstance(content, dict) or "shards" not in content or "state_dict" in content
    if not whole and how.get("map_location") != "meta":
        source = reader(path.parent / Path(content["shards"]["folder"]).name)
        parts = source.read_metadata().state_dict_metadata
        inside = {key: part for key, part in parts.items() if key.startswith("state_dict.")}
        flat = {key: torch.empty(part.size, dtype=part.properties.dtype) for key, part in inside.items()}
        fill(flat, source, alone=True)
        content["state_dict"] = {key.removeprefix("state_dict."): value for key, value in flat.items()}
    return content


def sweep_shards(folder: Path, entries: dict[str, Entry]) -> None:
    """Remove the shards that no checkpoint names; all stay where one is there of which nothing is known."""
    if all(path.name in entries for path in folder.glob("*.ckpt")):
        named = {entry["shards"]["folder"] for entry in entries.values() if entry.get("shards")}
        for path in folder.glob(f"{FOLDER}*"):
            if path.name not in named:
                shutil.rmtree(path, ignore_errors=True)
