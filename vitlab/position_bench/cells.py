"""A folder of cells: what is kept of each training of a method, and what its records say together."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitlab.class_paths import name_and_args
from vitlab.errors import UsageError
from vitlab.layers.pos_embed import POS_EMBEDS
from vitlab.position_bench.methods import Method, code_of, method_text
from vitlab.position_bench.pictures import Pictures
from vitlab.position_bench.protocol import evidence_of, protocol_digest, read_protocol
from vitlab.runs.atomic import atomic_write, write_text
from vitlab.runs.manifest import file_digest

NEEDED = {  # of a record, by the word that tells its kind
    "scores": {"training", "seed", "rate", "not_applicable"},
    "validation": {"training", "rate"},
}


def read_cell(path: Path) -> dict[str, Any]:
    """Return the record of a cell.

    Raises:
        UsageError: It is truncated, or lacks what such a record has.
    """
    try:
        kept = json.loads(path.read_text())
        whole = isinstance(kept, dict) and all(NEEDED[kind] <= kept.keys() for kind in NEEDED if kind in kept)
        if whole and (path.stem != "card" or "method" in kept):
            return kept
    except ValueError:
        pass
    raise UsageError(f"{path} is damaged: remove it, and its cell is trained again")


class Bench:
    """A folder of cells under one protocol, with a folder for each method, called by its label.

    Args:
        folder: Where cells are kept.
        data: Folder of the photos.
        protocol: What is registered; other settings, for tests, are refused by ``verify``.
        say: Receives a line for each thing done.
    """

    def __init__(
        self,
        folder: Path,
        data: Path | None = None,
        protocol: Mapping[str, Any] | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self.folder, self.data, self.say = Path(folder), data, say
        self.protocol = dict(protocol or read_protocol())
        self.digest = protocol_digest(self.protocol)
        self.pictures = Pictures(self.protocol, data, self.folder)

    def cells(self) -> dict[str, tuple[str, int]]:
        """Return training and seed of each cell that a method has, by name: those of the first seed first."""
        trainings, seeds = self.protocol["trainings"], self.protocol["seeds"]
        return {f"{training}-{seed}": (training, seed) for seed in seeds for training in trainings}

    def path(self, label: str, cell: str) -> Path:
        """Return the record of a cell."""
        return self.folder / label / f"{cell}.json"

    def record(self, label: str, cell: str) -> dict[str, Any] | None:
        """Return what is kept of a cell, or None if it is not complete."""
        path = self.path(label, cell)
        return read_cell(path) if path.is_file() else None

    def predictions(self, label: str, cell: str) -> dict[str, NDArray[Any]]:
        """Return the predicted classes of a cell, by task."""
        with np.load(self.path(label, cell).with_suffix(".npz")) as kept:
            return dict(kept)

    def write(
        self, label: str, cell: str, kept: dict[str, Any], predictions: Mapping[str, NDArray[Any]] | None = None
    ) -> None:
        """Keep the record of a cell, and its predictions if there are any."""
        path = self.path(label, cell)
        if predictions:
            arrays = path.with_suffix(".npz")
            with atomic_write(arrays) as beside:
                np.savez_compressed(beside, **predictions)  # type: ignore[arg-type]
            kept = kept | {"predictions": file_digest(arrays)}
        write_text(path, json.dumps(kept | {"protocol": self.digest}, indent=1, sort_keys=True) + "\n", sync=True)

    def method_kept(self, label: str) -> Method | None:
        """Return the method that a folder holds the cells of, or None without a card."""
        if (card := self.record(label, "card")) is None:
            return None
        name, args = card["method"]
        return {"class_path": name, "init_args": args} if args else name

    def check_kept(self, label: str, method: Method | None = None) -> None:
        """Refuse a folder whose cells are of another protocol, of another method or of another source of it."""
        folder = self.folder / label
        for path in sorted(folder.glob("*.json")):
            if read_cell(path).get("protocol", self.digest) != self.digest:
                raise UsageError(f"{path} was trained under another protocol: give another folder")
        if not method or (kept := self.method_kept(label)) is None:
            return
        if method_text(kept) != (now := method_text(method)):
            raise UsageError(f"{folder} holds the cells of {method_text(kept)}, not of {now}: give another folder")
        if self.is_of_other_code(label, method):
            name = name_and_args("pos_embed", method)[0]
            raise UsageError(f"{folder} was trained with another source of {name}: give another folder")

    def is_of_other_code(self, label: str, method: Method) -> bool:
        """Return whether the source of a method is not the one that its card was written with, where both are known."""
        kept, now = (self.record(label, "card") or {}).get("code"), code_of(method)
        return kept is not None and now is not None and kept != now

    def is_complete(self, label: str) -> bool:
        """Return whether all cells of a method are there."""
        return all(self.path(label, cell).is_file() for cell in [*self.cells(), "cost"])

    def complete(self) -> list[str]:
        """Return the methods of vitlab whose cells are all there."""
        return [name for name in POS_EMBEDS if self.is_complete(name)]

    def results(self, label: str) -> list[dict[str, Any]]:
        """Return the records of the cells of a method that are there, those of the first seed first."""
        return [kept for cell in self.cells() if (kept := self.record(label, cell)) is not None]

    def scores(self, label: str) -> dict[str, list[float]]:
        """Return the scores of a method by task, a score a seed; without the tasks that do not apply to it."""
        found: dict[str, list[float]] = {}
        for kept in self.results(label):
            for task, score in kept["scores"].items():
                found.setdefault(task, []).append(score)
        return {task: values for task, values in found.items() if len(values) == len(self.protocol["seeds"])}

    def validation(self, label: str) -> list[float]:
        """Return the validation accuracy of each seed of photos."""
        return [kept["validation"] for kept in self.results(label) if kept["training"] == "photos"]


def published(protocol: str | None = None) -> Bench:
    """Return the bench whose evidence is published, of which methods may be missing.

    Args:
        protocol: Name or file of another protocol than the registered one.
    """
    return Bench(evidence_of(protocol), protocol=read_protocol(protocol))
