"""The cells of posbench: what is kept of each, which are left, and running them so that they resume."""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from vitlab.class_paths import name_and_args
from vitlab.errors import UsageError
from vitlab.layers.pos_embed import POS_EMBEDS
from vitlab.position_bench.answers import (
    NotFinite,
    answers_of,
    bench_predictions_of,
    feature_likeness,
    outputs_by_question,
    outputs_of_images,
    scores_of,
)
from vitlab.position_bench.costs import check_method, cost_of
from vitlab.position_bench.methods import Method, code_of, method_text
from vitlab.position_bench.pictures import Pictures
from vitlab.position_bench.protocol import (
    best_rate,
    evidence_of,
    protocol_digest,
    rates_left,
    read_protocol,
    tuned_on,
)
from vitlab.position_bench.training import train_network
from vitlab.runs.atomic import atomic_write, write_text
from vitlab.runs.lock import held, take
from vitlab.runs.manifest import file_digest

T = TypeVar("T")
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
    """A folder of cells under one protocol. Several processes may share it: none trains a cell that another is at.

    Args:
        folder: Where cells are kept, a folder for each method.
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

    def tuned(self, method: Method, label: str, training: str) -> float:
        """Return the learning rate that is best on validation images, trying what is not tried yet.

        The grid grows while the best rate lies at a border.

        Args:
            method: The position embedding.
            label: Its folder.
            training: ``photos``, whose rate serves ``few`` too, or ``glyphs``.
        """
        found: dict[float, float] = {}
        while left := rates_left(self.protocol["tuning"], training, found):
            cells = {f"tune-{training}-{rate:g}": rate for rate in left}
            works = {cell: partial(self._tuning, method, label, training, cell, rate) for cell, rate in cells.items()}
            found |= {cells[cell]: accuracy for cell, accuracy in self._shared(label, works).items()}
        return best_rate(found)

    def _tuning(self, method: Method, label: str, training: str, cell: str, rate: float) -> float:
        seed = self.protocol["tuning"]["seed"]
        if (kept := self.record(label, cell)) is None:
            train = self.pictures.of(training).train
            start = time.process_time()
            try:
                net = train_network(method, self.protocol, training, seed, rate, train)
                accuracy = self.validated(net, training)
            except NotFinite:
                accuracy = 0.0
            kept = {"training": training, "validation": accuracy, "rate": rate, "seed": seed}
            kept["cpu_seconds"] = time.process_time() - start
            self._write(label, cell, kept, {})
            self.say(f"{label} {cell}: validation {accuracy:.3f}, {kept['cpu_seconds']:.0f} CPU s")
        return float(kept["validation"])

    def validated(self, net: Any, training: str) -> float:
        """Return the accuracy of a network on the validation images; of generated ones, its mean over the questions."""
        val = self.pictures.of(training).val
        outputs = outputs_of_images(net, val.images)
        parts = outputs_by_question(outputs).values() if training == "glyphs" else [outputs]
        answers = val.labels.view(len(outputs), -1).T
        right = [(part.argmax(1) == answer).float().mean() for part, answer in zip(parts, answers, strict=True)]
        return float(torch.stack(right).mean())

    def run_cell(self, method: Method, label: str, training: str, seed: int, rate: float) -> dict[str, Any]:
        """Train and test a cell, unless it is complete at this learning rate, and return its record.

        Raises:
            NotFinite: Its training diverged.
        """
        kept = self.run_cells(method, label, [(training, seed)], {training: rate})[f"{training}-{seed}"]
        if "lost" in kept:
            raise NotFinite(kept["lost"])
        return kept

    def run_cells(
        self, method: Method, label: str, cells: Iterable[tuple[str, int]], rates: Mapping[str, float]
    ) -> dict[str, dict[str, Any]]:
        """Train and test cells that are not complete at the learning rate of their training; return all records.

        Of a cell without a score, as its training diverged, nothing is kept, and its record says why as ``lost``.
        """
        works = {
            f"{training}-{seed}": partial(self._run_cell, method, label, training, seed, rates[training])
            for training, seed in cells
        }
        return self._shared(label, works)

    def _shared(self, label: str, works: Mapping[str, Callable[[], T]]) -> dict[str, T]:
        """Do the work of cells, last that which another process is at, whose record is found then."""
        found, later = dict[str, T](), list[str]()
        locks = {cell: self.folder / label / f".{cell}.lock" for cell in works}
        (self.folder / label).mkdir(parents=True, exist_ok=True)
        for cell, work in works.items():
            if (claim := take(locks[cell])) is None:
                later.append(cell)
                continue
            try:
                found[cell] = work()
            finally:
                claim.release()
        for cell in later:
            with held(locks[cell], f"is at {cell} of {label}"):
                found[cell] = works[cell]()
        return found

    def _run_cell(self, method: Method, label: str, training: str, seed: int, rate: float) -> dict[str, Any]:
        cell, reads = f"{training}-{seed}", 1
        if (kept := self.record(label, cell)) is not None:
            if kept["rate"] == rate:
                return kept
            self.say(f"{label} {cell}: trained again, since another learning rate is best in validation now")
            reads += kept["test_reads"]
        train, test, _ = self.pictures.of(training)
        start = time.process_time()
        try:
            net = train_network(method, self.protocol, training, seed, rate, train)
            seconds = time.process_time() - start
            predictions, refused = bench_predictions_of(net, self.protocol, training, test)
        except NotFinite as error:
            self.path(label, cell).unlink(missing_ok=True)  # at another learning rate
            self.say(f"{label} {cell}: no score, as {error}")
            return {"lost": str(error)}
        scores = scores_of(predictions, answers_of(training, test))
        kept = {"training": training, "seed": seed, "scores": scores, "not_applicable": refused}
        kept |= {
            "rate": rate,
            "cpu_seconds": seconds,
            "test_reads": reads,
            "torch": torch.__version__,
        }
        if training == "photos":
            kept["validation"] = self.validated(net, training)
            kept["likeness"] = feature_likeness(net, self.protocol, test)
        self._write(label, cell, kept, predictions)
        self.say(f"{label} {cell}: " + ", ".join(f"{k} {v:.3f}" for k, v in scores.items()) + f", {seconds:.0f} CPU s")
        return kept

    def _write(self, label: str, cell: str, kept: dict[str, Any], predictions: dict[str, NDArray[Any]]) -> None:
        path = self.path(label, cell)
        if predictions:
            arrays = path.with_suffix(".npz")
            with atomic_write(arrays) as beside:
                np.savez_compressed(beside, **predictions)  # type: ignore[arg-type]
            kept = kept | {"predictions": file_digest(arrays)}
        write_text(path, json.dumps(kept | {"protocol": self.digest}, indent=1, sort_keys=True) + "\n", sync=True)

    def run(self, method: Method, label: str) -> dict[str, str]:
        """Run all cells of a method that are left: first its learning rate, then five seeds of each training.

        Returns:
            The cells without a score, as their training diverged, and why.

        Raises:
            UsageError: The method cannot be measured, or its cells are of another protocol.
        """
        torch.set_num_threads(1)  # another number sums in another order
        self.check_kept(label, method)
        check_method(method, self.protocol)
        if self.record(label, "card") is None:
            code = code_of(method)
            card = {"method": name_and_args("pos_embed", method), **({"code": code} if code else {})}
            self._write(label, "card", card, {})
        rates = {training: self.tuned(method, label, training) for training in self.protocol["tuning"]["rates"]}
        words = [f"{rate:g} for {name}" for name, rate in rates.items()]
        self.say(f"{label}: learning rate " + ", ".join(words))
        trainings = self.protocol["trainings"]
        cells = [(training, seed) for seed in self.protocol["seeds"] for training in trainings]
        found = self.run_cells(method, label, cells, {training: rates[tuned_on(training)] for training in trainings})
        self._shared(label, {"cost": partial(self._cost, method, label)})
        return {cell: kept["lost"] for cell, kept in found.items() if "lost" in kept}

    def _cost(self, method: Method, label: str) -> None:
        if self.record(label, "cost") is None:
            self._write(label, "cost", cost_of(method, self.protocol), {})

    def check_kept(self, label: str, method: Method | None = None) -> None:
        """Refuse a folder whose cells are of another protocol, of another method or of another source of it."""
        for path in sorted((self.folder / label).glob("*.json")):
            if read_cell(path).get("protocol", self.digest) != self.digest:
                raise UsageError(f"{path} was trained under another protocol: give another folder")
        if not method:
            return
        name, args = name_and_args("pos_embed", method)
        card, now = self.record(label, "card"), method_text(name, args)
        if card and (kept := method_text(*card["method"])) != now:
            raise UsageError(f"{self.folder / label} holds the cells of {kept}, not of {now}: give another folder")
        if self.is_of_other_code(label, method):
            raise UsageError(f"{self.folder / label} was trained with another source of {name}: give another folder")

    def is_of_other_code(self, label: str, method: Method) -> bool:
        """Return whether the source of a method is not the one that its card was written with, where both are known."""
        kept, now = (self.record(label, "card") or {}).get("code"), code_of(method)
        return kept is not None and now is not None and kept != now

    def is_complete(self, label: str) -> bool:
        """Return whether all cells of a method are there."""
        cells = [f"{training}-{seed}" for training in self.protocol["trainings"] for seed in self.protocol["seeds"]]
        return all(self.path(label, cell).is_file() for cell in [*cells, "cost"])

    def complete(self) -> list[str]:
        """Return the methods of vitlab whose cells are all there."""
        return [name for name in POS_EMBEDS if self.is_complete(name)]

    def scores(self, label: str) -> dict[str, list[float]]:
        """Return the scores of a method by task, a score a seed; without the tasks that do not apply to it."""
        found: dict[str, list[float]] = {}
        for training in self.protocol["trainings"]:
            for seed in self.protocol["seeds"]:
                for task, score in (self.record(label, f"{training}-{seed}") or {"scores": {}})["scores"].items():
                    found.setdefault(task, []).append(score)
        return {task: values for task, values in found.items() if len(values) == len(self.protocol["seeds"])}

    def validation(self, label: str) -> list[float]:
        """Return the validation accuracy of each seed of photos."""
        kept = [self.record(label, f"photos-{seed}") for seed in self.protocol["seeds"]]
        return [each["validation"] for each in kept if each]


def published(protocol: str | None = None) -> Bench:
    """Return the bench whose evidence is published, of which methods may be missing.

    Args:
        protocol: Name or file of another protocol than the registered one.
    """
    return Bench(evidence_of(protocol), protocol=read_protocol(protocol))
