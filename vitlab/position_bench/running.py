"""Train the cells of a method that are left, so that what was stopped continues."""

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch

from vitlab.class_paths import name_and_args
from vitlab.position_bench.answers import (
    NotFinite,
    accuracy_of,
    answers_of,
    bench_predictions_of,
    scores_of,
)
from vitlab.position_bench.cells import Bench, read_cell
from vitlab.position_bench.costs import check_method, cost_of
from vitlab.position_bench.methods import Method, code_of, label_of
from vitlab.position_bench.protocol import best_rate, rates_left, tuned_on
from vitlab.position_bench.training import train_network
from vitlab.runs.lock import held, take

T = TypeVar("T")


class CellRunner:
    """Train and test cells of a method. Several processes may share a folder: none trains a cell that another is at.

    Args:
        bench: Where the cells are kept, and under which protocol.
        method: The position embedding.
        label: Its folder; None is its name.
    """

    def __init__(self, bench: Bench, method: Method, label: str | None = None) -> None:
        self.bench, self.method, self.label = bench, method, label or label_of(method)

    def run(self) -> dict[str, str]:
        """Run all cells that are left: first the learning rates, then every training of each seed.

        Returns:
            The cells without a score, as their training diverged, and why.

        Raises:
            UsageError: The method cannot be measured, or its cells are of another protocol.
        """
        torch.set_num_threads(1)  # another number sums in another order
        self.bench.check_kept(self.label, self.method)
        check_method(self.method, self.bench.protocol)
        if self.bench.record(self.label, "card") is None:
            code = code_of(self.method)
            card = {"method": name_and_args("pos_embed", self.method), **({"code": code} if code else {})}
            self.bench.write(self.label, "card", card)
        rates = {training: self.tuned(training) for training in self.bench.protocol["tuning"]["rates"]}
        words = [f"{rate:g} for {name}" for name, rate in rates.items()]
        self.bench.say(f"{self.label}: learning rate " + ", ".join(words))
        each = {training: rates[tuned_on(training)] for training in self.bench.protocol["trainings"]}
        lost = self.run_cells(self.bench.cells().values(), each)
        self._shared({"cost": self._cost})
        return lost

    def tuned(self, training: str) -> float:
        """Return the learning rate that is best on validation images, trying what is not tried yet.

        The grid grows while the best rate lies at a border.

        Args:
            training: ``photos``, whose rate serves ``few`` too, or ``glyphs``.
        """
        found: dict[float, float] = {}
        while left := rates_left(self.bench.protocol["tuning"], training, found):
            cells = {f"tune-{training}-{rate:g}": rate for rate in left}
            works = {cell: partial(self._tune, training, cell, rate) for cell, rate in cells.items()}
            found |= {cells[cell]: accuracy for cell, accuracy in self._shared(works).items()}
        return best_rate(found)

    def run_cell(self, training: str, seed: int, rate: float) -> dict[str, Any]:
        """Train and test a cell, unless it is complete at this learning rate, and return its record.

        Raises:
            NotFinite: Its training diverged.
        """
        for why in self.run_cells([(training, seed)], {training: rate}).values():
            raise NotFinite(why)
        return read_cell(self.bench.path(self.label, f"{training}-{seed}"))

    def run_cells(self, cells: Iterable[tuple[str, int]], rates: Mapping[str, float]) -> dict[str, str]:
        """Train and test cells that are not complete at the learning rate of their training.

        Returns:
            The cells without a score, as their training diverged, and why; nothing is kept of these.
        """
        works = {
            f"{training}-{seed}": partial(self._run_cell, training, seed, rates[training]) for training, seed in cells
        }
        return {cell: why for cell, why in self._shared(works).items() if why is not None}

    def _shared(self, works: Mapping[str, Callable[[], T]]) -> dict[str, T]:
        """Do the work of cells, last that which another process is at, whose record is found then."""
        found, later = dict[str, T](), list[str]()
        folder = self.bench.folder / self.label
        locks = {cell: folder / f".{cell}.lock" for cell in works}
        folder.mkdir(parents=True, exist_ok=True)
        for cell, work in works.items():
            if (claim := take(locks[cell])) is None:
                later.append(cell)
                continue
            try:
                found[cell] = work()
            finally:
                claim.release()
        for cell in later:
            with held(locks[cell], f"is at {cell} of {self.label}"):
                found[cell] = works[cell]()
        return found

    def _tune(self, training: str, cell: str, rate: float) -> float:
        """Return the validation accuracy at a learning rate; 0 where the training diverges."""
        if (kept := self.bench.record(self.label, cell)) is None:
            seed, images = self.bench.protocol["tuning"]["seed"], self.bench.pictures.of(training)
            start = time.process_time()
            try:
                net = train_network(self.method, self.bench.protocol, training, seed, rate, images.train)
                accuracy = accuracy_of(net, training, images.val)
            except NotFinite:
                accuracy = 0.0
            seconds = time.process_time() - start
            kept = {"training": training, "validation": accuracy, "rate": rate, "seed": seed, "cpu_seconds": seconds}
            self.bench.write(self.label, cell, kept)
            self.bench.say(f"{self.label} {cell}: validation {accuracy:.3f}, {seconds:.0f} CPU s")
        return float(kept["validation"])

    def _run_cell(self, training: str, seed: int, rate: float) -> str | None:
        """Train and test a cell; return why it has no score, or None."""
        bench, label, cell, reads = self.bench, self.label, f"{training}-{seed}", 1
        if (kept := bench.record(label, cell)) is not None:
            if kept["rate"] == rate:
                return None
            bench.say(f"{label} {cell}: trained again, since another learning rate is best in validation now")
            reads += kept["test_reads"]
        images = bench.pictures.of(training)
        start = time.process_time()
        try:
            net = train_network(self.method, bench.protocol, training, seed, rate, images.train)
            seconds = time.process_time() - start
            predictions, refused = bench_predictions_of(net, bench.protocol, training, images.test)
        except NotFinite as error:
            bench.path(label, cell).unlink(missing_ok=True)  # at another learning rate
            bench.say(f"{label} {cell}: no score, as {error}")
            return str(error)
        scores = scores_of(predictions, answers_of(training, images.test))
        kept = {"training": training, "seed": seed, "rate": rate, "scores": scores, "not_applicable": refused}
        kept |= {"cpu_seconds": seconds, "test_reads": reads, "torch": torch.__version__}
        if training == "photos":
            kept["validation"] = accuracy_of(net, training, images.val)
        bench.write(label, cell, kept, predictions)
        bench.say(f"{label} {cell}: " + ", ".join(f"{k} {v:.3f}" for k, v in scores.items()) + f", {seconds:.0f} CPU s")
        return None

    def _cost(self) -> None:
        if self.bench.record(self.label, "cost") is None:
            self.bench.write(self.label, "cost", dict(cost_of(self.method, self.bench.protocol)))
