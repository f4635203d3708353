"""Weights and moments in shards: a folder beside the checkpoint, written by all processes at once.

The checkpoint names the folder, and has everything else and the sha256 of each file. A folder is complete before a
checkpoint names it, and is removed after no checkpoint names it: a kill at any moment leaves a complete state.
"""

import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vitlab.runs.atomic import sync_folder
from vitlab.runs.format import refuse_newer
from vitlab.runs.manifest import Entry, file_digest
from vitlab.runs.matching import matching

FOLDER = "shards-"
_HARMLESS = {  # names that the index of a folder may contain; other pickles could run code
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "pathlib": {"Path", "PosixPath"},
    "pathlib._local": {"Path", "PosixPath"},
}  # fmt: skip


class _Index(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _HARMLESS.get(module, ()):
            raise ValueError(f"it is refused: it names {module}.{name}, which could run code when loaded")
        return super().find_class(module, name)


class TornShards(ValueError):
    """A folder of shards is missing, damaged, or contains more than tensors."""


def reader(folder: Path) -> Any:
    """Return a reader for a folder of shards that runs no code from it, or raise TornShards."""
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
    except Exception as error:  # a damaged pickle may raise anything
        raise TornShards(f"{folder} is not a complete folder of shards: {error}") from error
    return Reader(folder)


def fill(tensors: dict[str, torch.Tensor], source: Any, *, alone: bool) -> None:
    """Read shards into ``tensors``, in this process ``alone`` or in all at once; raise TornShards on failure."""
    import torch.distributed.checkpoint as dcp

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is")  # not initialized, as intended
            dcp.load(tensors, storage_reader=source, no_dist=alone)
    except dcp.CheckpointException as error:  # a BaseException
        first = next(iter(error.failures.values()))[0]
        raise TornShards(f"{source.path} is not a complete folder of shards: {first}") from error


def write_shards(tensors: dict[str, torch.Tensor], folder: Path, process: int = 0, group: Any = None) -> dict[str, str]:
    """Write this process's part of ``tensors``; return the sha256 of the files of all processes in the group.

    Raises:
        OSError: In all processes, if one could not write.
    """
    import torch.distributed.checkpoint as dcp

    def attempt(work: Callable[[], Any]) -> Any:
        try:
            return work()
        except (OSError, dcp.CheckpointException) as error:
            return error

    def digests() -> dict[str, str]:
        sync_folder(folder)
        names = [path.name for path in matching(folder, f"__{process}_*.distcp")] + [".metadata"] * (process == 0)
        return {name: file_digest(folder / name) for name in names}

    alone, writer = group is None, dcp.FileSystemWriter(folder)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # of torch 2.10 itself
        failed = attempt(lambda: dcp.save(tensors, storage_writer=writer, process_group=group, no_dist=alone))
    parts = [own := attempt(digests)]
    if not alone:
        parts *= group.size()
        torch.distributed.all_gather_object(parts, own, group=group)
    for bad in [failed, *parts]:
        if isinstance(bad, Exception):
            first = next(iter(bad.failures.values()))[0] if isinstance(bad, dcp.CheckpointException) else bad
            if process == 0:  # all processes have finished
                shutil.rmtree(folder, ignore_errors=True)
            raise OSError(getattr(first, "strerror", None) or str(first)) from bad
    return {name: digest for part in parts for name, digest in part.items()}


def has_shards(path: Path) -> bool:
    """Return whether a checkpoint has shards; it must have been checked before."""
    return path.suffix == ".ckpt" and "shards" in torch.load(path, map_location="meta", weights_only=True, mmap=True)


def read_checkpoint(path: Path, **how: Any) -> Any:
    """Read a checkpoint without running code from it, and assemble its weights if they are sharded.

    Args:
        path: The file.
        **how: Further arguments of :func:`torch.load`.
    """
    content = torch.load(path, weights_only=True, **how)
    refuse_newer(content, path)
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
    """Remove the shards that no checkpoint names; keep all if a checkpoint is missing from the manifest."""
    if all(path.name in entries for path in matching(folder, "*.ckpt")):
        named = {entry["shards"]["folder"] for entry in entries.values() if entry.get("shards")}
        for path in matching(folder, f"{FOLDER}*"):
            if path.name not in named:
                shutil.rmtree(path, ignore_errors=True)
