"""Free the disk of what runs no longer need: what goes, how many bytes it frees, and which results name it."""

import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vitlab.errors import UsageError
from vitlab.runs import lock
from vitlab.runs.directory import LOCK, RunDir
from vitlab.runs.fence import unfinished_in
from vitlab.runs.manifest import read_manifest
from vitlab.runs.matching import matching
from vitlab.runs.records import MEASURED_BY
from vitlab.runs.run_lock import is_running_in, run_status

What = Literal["spare", "resume", "checkpoints", "runs"]
WHAT = {
    "spare": "previous.ckpt of runs that are done, and what interrupted writes left",
    "resume": "also last.ckpt of runs that are done and have best.ckpt: they cannot be trained further",
    "checkpoints": "all checkpoints of runs that are done; weights/ and the records stay",
    "runs": "whole directories of the named runs that do not train now",
}


@dataclass
class Item:
    """A file or folder of a run that can go.

    Args:
        run: Its run.
        path: The file or folder.
        why: What it is.
        frees: Bytes that its removal frees, if all items before it are removed.
        named: What was measured with it, such as ``test``.
        stays: Why it does not go; empty if it does.
    """

    run: RunDir
    path: Path
    why: str
    frees: int = 0
    named: list[str] = field(default_factory=list)
    stays: str = ""

    def row(self) -> dict[str, Any]:
        """Return the item as a row of a table."""
        return {
            "run": self.run.name,
            "path": str(self.path),
            "why": self.why,
            "bytes": self.frees,
            "named": self.named,
        }


def to_clean(runs: Sequence[RunDir], what: What = "spare") -> tuple[list[Item], dict[str, str]]:
    """Return what can go from runs, and by path of a run why nothing of it goes; nothing is removed.

    Args:
        runs: The runs.
        what: Which files; see ``WHAT``.

    Example:
        >>> items, kept = to_clean([RunDir("runs/first")])
        >>> [item.path.name for item in items], kept
        ([], {})
    """
    items: list[Item] = []
    kept: dict[str, str] = {}
    for run in runs:
        if is_running_in(run):
            kept[str(run.path)] = "a process trains in it"
            continue
        try:
            found = [_whole(run)] if what == "runs" else _parts(run, what)
        except (UsageError, OSError) as error:
            kept[str(run.path)] = str(error)
            continue
        items += [item for item in found if not item.stays]
        kept |= {str(item.path): item.stays for item in found if item.stays}
    _weigh(items)
    if what in ("spare", "resume"):  # last.ckpt may be best.ckpt by another name, which stays
        items = [item for item in items if item.frees]
    return items, kept


def _whole(run: RunDir) -> Item:
    named = {one for splits in _named(run).values() for one in splits}
    if foreign := run.foreign():
        return Item(run, run.path, "the whole run", stays=f"it contains {foreign[0]}, which no run writes")
    if run.path.is_symlink():
        return Item(run, run.path, f"the link alone: the run stays in {run.path.resolve()}")
    return Item(run, run.path, "the whole run", named=sorted(named))


def _parts(run: RunDir, what: What) -> list[Item]:
    named, items = _named(run), list[Item]()

    def add(why: str, *paths: Path) -> None:
        items.extend(Item(run, path, why, named=named.get(path.name, [])) for path in paths if path.exists())

    for place in (run.path, run.checkpoints, run.weights, run.path / "moments"):
        add("left by an interrupted write", *unfinished_in(place))
    for pattern in ("*.damaged", ".probe-*"):
        add("left by an interrupted write", *matching(run.path, pattern))
    is_done = run_status(run, run.record) == "done"
    if what == "checkpoints" and not (is_done and matching(run.weights, "*.safetensors")):
        why = "its last weights are in its checkpoints alone; --what=runs removes it"
        items.append(Item(run, run.path, "checkpoints", stays=why))
    elif what == "checkpoints":
        add("a checkpoint", *matching(run.checkpoints, "*.ckpt"))
        add("shards of a checkpoint", *matching(run.checkpoints, "shards-*"))
    elif is_done and (run.checkpoints / "last.ckpt").is_file():
        add("the state before the last, of a run that is done", run.checkpoints / "previous.ckpt")
        if what == "resume" and (run.checkpoints / "best.ckpt").is_file():
            add("the state to train on from, of a run that is done", run.checkpoints / "last.ckpt")
    for item in items:
        if what == "spare" and item.named:
            item.stays = f"{', '.join(item.named)} was measured with it; --what=resume removes it"
    return items


def _named(run: RunDir) -> dict[str, list[str]]:
    """Return by name of a checkpoint what was measured with it, or with another file of its content."""
    results: list[tuple[str, Any]] = []
    stored = run.stored
    results += [(split, stored[split]) for split in MEASURED_BY if split in stored]
    results += [(f"{one.get('split', '?')} with other settings", one) for one in stored.get("variations", [])]
    results += [(f"analysis {name}", one) for name, one in run.read("analysis/notes.json").items()]
    exports = [path.name for path in matching(run.path, "export/*.json")]
    for name in exports:
        of = run.read(f"export/{name}").get("checkpoint")
        if isinstance(of, dict):
            results.append((f"export {name.removesuffix('.json')}", {"checkpoint": of["file"], "sha256": of["sha256"]}))
    sums = {name: entry.get("sha256") for name, entry in run.read("checkpoints/manifest.json").items()}
    found: dict[str, list[str]] = {}
    for text, one in results:
        if isinstance(one, dict) and one.get("checkpoint"):
            digest, there = one.get("sha256"), (run.checkpoints / str(one["checkpoint"])).is_file()
            same = [name for name, known in sums.items() if digest and known == digest]
            for name in [str(one["checkpoint"])] if there and (not same or one["checkpoint"] in same) else same:
                if text not in found.setdefault(name, []):
                    found[name].append(text)
    return found


def _weigh(items: Iterable[Item]) -> None:
    """Note what each item frees: a file that has other names is freed with the last of them."""
    seen: dict[tuple[int, int], int] = {}
    for item in items:
        if item.path.is_dir() and item.path.is_symlink():
            continue  # its content stays
        for path in [item.path, *item.path.rglob("*")] if item.path.is_dir() else [item.path]:
            if path.is_dir() and not path.is_symlink():
                continue
            status = path.lstat()
            place = status.st_dev, status.st_ino
            seen[place] = seen.get(place, 0) + 1
            if seen[place] == status.st_nlink:
                item.frees += status.st_size


def remove(items: Sequence[Item]) -> tuple[int, dict[str, str]]:
    """Remove items, each run's under its lock; return the bytes that were freed, and by path why some stayed."""
    freed, kept = 0, {}
    by_run: dict[Path, list[Item]] = {}
    for item in items:
        by_run.setdefault(item.run.path, []).append(item)
    for path, mine in by_run.items():
        if not path.is_dir():
            continue
        try:
            claim = lock.take(path.resolve() / LOCK)  # a link may go before its lock
        except OSError as error:
            kept[str(path)] = error.strerror or str(error)
            continue
        if claim is None:
            kept[str(path)] = "a process trains in it"
            continue
        try:
            for item in mine:
                try:
                    _remove(item)
                    freed += item.frees
                except OSError as error:
                    kept[str(item.path)] = error.strerror or str(error)
            _sweep(mine[0].run)
        except OSError as error:  # of the checkpoints that are left, nobody knows what they need
            kept[str(path)] = error.strerror or str(error)
        finally:
            claim.release()
            with suppress(OSError):
                path.rmdir()  # succeeds only if the whole run went
    return freed, kept


def _remove(item: Item) -> None:
    is_run = item.path == item.run.path and not item.path.is_symlink()
    paths = [path for path in item.path.iterdir() if path.name != LOCK] if is_run else [item.path]
    for path in sorted(paths, key=lambda one: one.name == "config.yaml"):  # while it is there, this is a run
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _sweep(run: RunDir) -> None:
    """Remove the shards that belonged to a checkpoint that went; the manifest keeps its checksum, for the results."""
    if matching(run.checkpoints, "shards-*"):
        from vitlab.runs.shards import sweep_shards  # torch

        there = {path.name for path in matching(run.checkpoints, "*.ckpt")}
        sweep_shards(run.checkpoints, {n: e for n, e in read_manifest(run.checkpoints).items() if n in there})
