"""Train the cells that are not done, several at a time; finished cells are never repeated."""

import random
import signal
import threading
import time
from functools import partial
from types import FrameType, TracebackType
from typing import Literal

from vitlab.ablation.evidence import chain
from vitlab.ablation.execution.cells import Cell, Say
from vitlab.ablation.execution.gpus import slot
from vitlab.ablation.execution.process import Seat
from vitlab.ablation.execution.progress import Board, Progress, begun, for_each
from vitlab.ablation.execution.worker import CODE, UNPLANNED, CellOutcome, process_cell
from vitlab.errors import UsageError, what_failed
from vitlab.runs import lock

RETRY = 30.0  # seconds after which a cell that another worker had, or that failed, is tried again before the others


class Interrupts:
    """Ctrl-C once: start no new cells. Twice, or another signal: running cells save and end.

    SIGUSR1 warns of a time limit: the exit code 75 means that the work can continue later.
    """

    def __init__(self, say: Say) -> None:
        self.say, self.count, self.code = say, 0, 0

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            self._old = {n: signal.signal(n, self._handle) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in getattr(self, "_old", {}).items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1 if number == signal.SIGINT else 2
        self.code = self.code or (75 if number == signal.SIGUSR1 else 130)
        if self.count == 1:
            self.say(
                "no new cells; waiting for the running ones (Ctrl-C again stops them; then the same command goes on)"
            )


class Pool:
    """The workers of one call of ``vitlab ablate run``.

    Args:
        cells: The cells, in order; at least one.
        workers: Number of cells at a time.
        say: Prints a line; None prints nothing.
        interrupts: Counts signals.
        fail_fast: Start no new cells after a failure.
    """

    def __init__(
        self, cells: list[Cell], workers: int, say: Say | None, interrupts: Interrupts, fail_fast: bool = False
    ) -> None:
        self.cells, self.workers, self.interrupts, self.fail_fast = cells, workers, interrupts, fail_fast
        for_each(partial(_set_aside, say=say), begun(cells))
        self.progress = Progress(cells, workers)
        self.board = Board(self.progress, say)
        self.failed: set[str] = set()  # names of cells that failed in this call
        self._broken: Exception | None = None
        self._is_outdated = False  # the code is no longer that of the plan, and all cells would fail
        self._mutex = threading.Lock()
        self._ablation = cells[0].ablation
        self._news = chain.Reader(self._ablation.directory)
        self._through = set(self.progress.values)  # names of finished cells, which are not looked at again
        self._seen: dict[str, float] = {}  # of a cell that another worker has, or that failed, when that was seen
        self._stretch = 1  # cells among which the search for the next begins

    def run_all(self) -> None:
        """Train until every cell is done or has failed, or until a signal.

        Raises:
            Exception: What has ended a worker, such as a disk that fails between two cells; the others went on.
        """
        with self.board:
            threads = [threading.Thread(target=self._worker) for _ in range(self.workers)]
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)
        if self._broken:
            raise self._broken

    def _worker(self) -> None:
        try:
            self._work()
        except Exception as error:  # left to the thread, it would be printed, and the command would succeed
            self._broken = self._broken or error

    def _work(self) -> None:
        per_gpu = self._ablation.run.per_gpu
        while not self.interrupts.count and not self._is_outdated and not (self.fail_fast and self.failed):
            with slot(self.workers, per_gpu, lambda: self.interrupts.count > 0 or self._all_over()) as place:
                taken = self._take() if place else None
                if taken is None or place is None:
                    return
                cell, claim = taken
                began = time.monotonic()
                try:
                    outcome = process_cell(cell, Seat(place, claim, lambda: self.interrupts.count > 1))
                except (OSError, UsageError, ValueError) as error:  # a full disk, or a file that was damaged meanwhile
                    outcome = CellOutcome("failed", "system", what_failed(error) or str(error))
                finally:
                    claim.release()
                with self._mutex:
                    self._tell(cell, outcome, time.monotonic() - began)

    def _take(self) -> tuple[Cell, lock.HeldLock] | None:
        """Claim a cell that is not running, done or failed.

        It is the first, for one worker. Where others have been met, the search begins at random, in a stretch that
        doubles with each cell that another worker has and halves with each that is free: about half of it is free then,
        and a take of one of a hundred workers tries two or three cells. What was passed over is looked at in the end.
        Cells that others have finished are known from the chain, and one that another was seen to have, or that has
        failed, is not tried again at once.
        """
        self._read_news()
        left = [cell for cell in self.cells if cell.name not in self._through]
        i = random.randrange(min(self._stretch, max(1, len(left))))
        passed = left[:i]
        while i < len(left):
            jump = 0
            if self._seen.get(left[i].name, -RETRY) > time.monotonic() - RETRY:
                passed.append(left[i])
            elif isinstance(claim := self._claim(left[i]), lock.HeldLock):
                self._stretch = max(1, self._stretch // 2)
                return left[i], claim
            elif claim == "held":
                self._stretch = min(2 * self._stretch, len(left))
                jump = random.randrange(self._stretch)
                passed += left[i + 1 : i + 1 + jump]
            i += 1 + jump
        for cell in passed:
            if isinstance(claim := self._claim(cell), lock.HeldLock):
                return cell, claim
        return None

    def _claim(self, cell: Cell) -> lock.HeldLock | Literal["over", "held"]:
        """Return the claim of a cell, or why there is none, which is noted: it is over, or another worker has it."""
        self._seen[cell.name] = time.monotonic()
        if self._is_over(cell):
            return "over"
        claim = lock.take(cell.claim)
        if claim is None:
            return "held"
        if self._is_over(cell):  # another worker has just finished it
            claim.release()
            return "over"
        del self._seen[cell.name]
        return claim

    def _read_news(self) -> None:
        last = "analyses" if self._ablation.analyses else "cell"  # the record of a finished cell
        for record in self._news.new():
            if record.get("kind") == last:
                self._through.add(str(record.get("cell")))

    def _all_over(self) -> bool:
        self._read_news()
        return all(self._is_over(cell) for cell in self.cells if cell.name not in self._through)

    def _is_over(self, cell: Cell) -> bool:
        if cell.is_finished():
            self._through.add(cell.name)
            return True
        return bool(cell.failure()) or cell.is_waiting() or cell.name in self.failed

    def _tell(self, cell: Cell, outcome: CellOutcome, seconds: float) -> None:
        match outcome.end:
            case "stopped":
                self.board.say(f"stopped  {cell.name}; the same command continues it")
            case "waiting":
                self.board.say(f"waiting  {cell.name} after {cell.until} epochs, {outcome.text}")
            case "failed":
                self.failed.add(cell.name)
                self._is_outdated |= outcome.kind == CODE
                self.board.say(f"failed   {cell.name}: {outcome.text}")
            case "done":
                self.progress.seconds.append(seconds)
                progress = "" if self.board.live else f"   [{self.progress.line(self.progress.update())}]"
                self.board.say(f"done     {cell.name}: {outcome.text}, {seconds:.0f} s{progress}")


def _set_aside(cell: Cell, say: Say | None) -> None:
    """Set aside a damaged cell, unless a worker has claimed it, and a failure to be as planned, which it is again."""
    if (text := cell.damage()) and (claim := lock.take(cell.claim)):
        cell.set_aside()
        claim.release()
        if say:
            say(f"damaged  {cell.name}: {text}; set aside and trained again")
    elif not text and cell.failure().get("kind") in UNPLANNED:
        cell.sibling(".failed.json").unlink(missing_ok=True)
