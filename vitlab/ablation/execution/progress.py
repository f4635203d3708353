"""The progress of a running ablation: a live table on a terminal, plain lines elsewhere."""

import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from vitlab.ablation.execution.cells import Cell, Say, State
from vitlab.errors import what_failed
from vitlab.runs import lock
from vitlab.tables import in_short

FEW = 100  # cells whose files are looked at one after another, and each time
AT_ONCE = 16  # cells of more that are looked at at once
SHOWN: tuple[State, ...] = ("done", "running", "failed", "diverged", "missing")


class Progress:
    """The progress of the cells.

    Args:
        cells: All cells; at least one.
        workers: Number of cells that run at a time.
    """

    def __init__(self, cells: list[Cell], workers: int) -> None:
        self.cells, self.workers, self._ablation = cells, workers, cells[0].ablation
        self.seconds: list[float] = []  # duration of each cell that this command finished
        self.values: dict[str, float] = {}  # name of a finished cell: primary metric
        self._states: dict[str, State] = {}
        self._next = 0.0  # time of the next look at all files
        self.update()

    def update(self) -> dict[str, State]:
        """Return the state of every cell, and collect new results.

        All cells' files are looked at for a hundredth of the time at most; in between, and while the disk does not
        answer, the last states are returned.
        """
        if (began := time.monotonic()) < self._next:
            return self._states
        try:
            self._states = self._look()
        except OSError:
            if not self._states:
                raise
        self._next = time.monotonic() + 100 * (time.monotonic() - began) if len(self.cells) > FEW else 0.0
        return self._states

    def _look(self) -> dict[str, State]:
        states: dict[str, State] = {cell.name: "missing" for cell in self.cells}
        left = [cell for cell in begun(self.cells) if cell.name not in self.values]
        for cell, (state, value) in zip(left, for_each(_seen, left), strict=True):
            states[cell.name] = state
            if value is not None:
                self.values[cell.name] = value
        return {name: "done" if name in self.values else state for name, state in states.items()}

    def best(self) -> tuple[str, float] | None:
        """Return name and value of the best cell so far."""
        known = {name: value for name, value in self.values.items() if value == value}
        return max(known.items(), key=lambda item: self._ablation.sign * item[1]) if known else None

    def line(self, states: dict[str, State]) -> str:
        """Return the numbers of done and failed cells, the time left, and the best cell so far."""
        counts = Counter(states.values())
        failed = counts["failed"] + counts["diverged"]
        words = [f"{counts['done']}/{len(self.cells)}"] + ([f"{failed} failed"] if failed else [])
        if self.seconds:
            left = len(self.cells) - counts["done"] - failed
            minutes = sum(self.seconds) / len(self.seconds) * left / self.workers / 60
            words.append(f"about {minutes:.1f} min left")
        if best := self.best():
            words.append(f"best {in_short(best[1])} ({best[0]})")
        return ", ".join(words)

    def table(self) -> Group:
        """Return the table: one row per arm, then the running cells."""
        states = self.update()
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("arm")
        for name in (*SHOWN, f"mean {self._ablation.primary}"):
            table.add_column(name, justify="right")
        for arm in dict.fromkeys(cell.arm.name for cell in self.cells):
            mine = [cell.name for cell in self.cells if cell.arm.name == arm]
            counts = Counter(states[name] for name in mine)
            values = [value for name in mine if (value := self.values.get(name, float("nan"))) == value]
            mean = in_short(sum(values) / len(values)) if values else ""
            table.add_row(arm, *(str(counts[state] or "") for state in SHOWN), mean)
        runs = [Text(f"{c.name}: {_running(c)}") for c in self.cells if states[c.name] == "running"]
        return Group(table, *runs, Text(self.line(states), style="bold"))


def _running(cell: Cell) -> str:
    try:
        return running_text(cell)
    except OSError as error:  # an error here would end the table
        return what_failed(error) or str(error)


def _seen(cell: Cell) -> tuple[State, float | None]:
    """Return a cell's state, in which missing analyses are work to do, and the primary metric if it is finished."""
    if cell.is_finished():
        return "done", cell.value()
    state = cell.state()
    if state == "done":  # its analyses are missing
        state = "failed" if cell.failure() else "running" if lock.is_alive(cell.claim) else "missing"
    return "missing" if state == "stale" else state, None


def begun(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells of whose arm and seed there is a file; each arm's folder is listed once, and no file is read."""
    folders = {cell.arm.name: cell.run.path.parent for cell in {cell.arm.name: cell for cell in cells}.values()}
    seeds: dict[str, set[str]] = {}
    for arm, folder in folders.items():
        with suppress(FileNotFoundError):
            seeds[arm] = {name.partition("-")[0] for name in os.listdir(folder)}
    return [cell for cell in cells if f"s{cell.seed}" in seeds.get(cell.arm.name, ())]


def for_each(look: Callable[[Cell], Any], cells: Sequence[Cell]) -> list[Any]:
    """Call a function for each cell and return what it returns; for many cells in threads, as files are waited for."""
    if len(cells) <= FEW:
        return [look(cell) for cell in cells]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(threads.map(look, cells))


def running_text(cell: Cell) -> str:
    """Return which process trains a cell, for how long, and its progress."""
    claim = lock.read(cell.claim) or {}
    seconds = max(0.0, time.time() - claim.get("started", time.time()))
    rows = cell.run.rows()
    epochs = cell.resolved.epochs
    where = f"host {claim.get('host', '?')}, pid {claim.get('pid', '?')}, {seconds:.0f} s"
    if not rows:
        return f"{where}, starting"
    epoch, left = rows[-1]["epoch"] + 1, ""
    if epochs >= epoch and cell.run.metrics.stat().st_mtime > claim.get("started", math.inf):  # a row is of this claim
        mine = [row for row in rows if row.get("attempt") == rows[-1].get("attempt")]
        count = len({row["epoch"] for row in mine})
        known = next((row["seconds_left"] for row in reversed(mine) if "seconds_left" in row), None)
        left = f", about {seconds * (epochs - epoch) / count if known is None else known:.0f} s left"
    return f"{where}, step {rows[-1]['step']}, {epoch_text(cell, rows)}{left}"


def epoch_text(cell: Cell, rows: list[dict[str, Any]]) -> str:
    """Return the epoch of the last row that a cell logged, and of how many, if that is known."""
    return f"epoch {rows[-1]['epoch'] + 1}" + (f"/{cell.resolved.epochs}" if cell.resolved.epochs else "")


class Board:
    """Shows progress: lines, and on a terminal a live table below them.

    Args:
        progress: The progress to show.
        say: Prints a line if there is no terminal; None prints nothing.
    """

    def __init__(self, progress: Progress, say: Say | None) -> None:
        self.progress, self._say = progress, say
        self.live: Live | None = None

    def __enter__(self) -> "Board":
        if self._say and sys.stdout.isatty():
            self.live = Live(get_renderable=self.progress.table, refresh_per_second=0.5, console=Console())
            self.live.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.live:
            self.live.stop()
            self.live = None

    def say(self, text: str) -> None:
        """Print a line, above the table if there is one."""
        if self.live:
            self.live.console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif self._say:
            self._say(text)
