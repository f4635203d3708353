"""Train the cells that are not done, several at a time; finished cells are never repeated."""

import math
import random
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType

from vitlab.ablation.evidence import chain
from vitlab.ablation.execution.cells import Cell
from vitlab.ablation.execution.gpus import slot, visible_devices
from vitlab.ablation.execution.progress import Board, Progress
from vitlab.ablation.execution.worker import CellOutcome, process_cell
from vitlab.errors import UsageError
from vitlab.runs import lock

Say = Callable[[str], None]
RETRY = 30.0  # seconds after which a cell that another worker had is tried again before the others


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
            self.say("no new cells; waiting for the running ones (Ctrl-C again stops them; `run` continues them)")


class Pool:
    """The workers of one call of ``vitlab ablate run``.

    Args:
        cells: The cells, in order.
        workers: Number of cells at a time.
        say: Prints a line; None prints nothing.
        interrupts: Counts signals.
        fail_fast: Start no new cells after a failure.
    """

    def __init__(
        self, cells: list[Cell], workers: int, say: Say | None, interrupts: Interrupts, fail_fast: bool = False
    ) -> None:
        self.cells, self.workers, self.interrupts, self.fail_fast = cells, workers, interrupts, fail_fast
        for cell in cells:
            _set_aside_damaged(cell, say)
        self.progress = Progress(cells, workers)
        self.board = Board(self.progress, say)
        self.failures: list[tuple[Cell, CellOutcome]] = []
        self._mutex = threading.Lock()
        per_gpu = cells[0].ablation.run.per_gpu if cells else 1
        self._shares = max(per_gpu, math.ceil(workers / max(1, len(visible_devices()))))
        self._news = chain.Reader(cells[0].ablation.directory) if cells else None
        self._through: set[str] = set()  # names of cells that are not looked at again
        self._seen_held: dict[str, float] = {}  # of a cell that another worker has, when that was seen

    def run_all(self) -> None:
        """Train until every cell is done or has failed, or until a signal."""
        with self.board:
            threads = [threading.Thread(target=self._worker) for _ in range(self.workers)]
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)

    def failed(self, cell: Cell) -> bool:
        """Return whether a cell has failed in this call."""
        return any(cell is failed for failed, _ in self.failures)

    def _worker(self) -> None:
        while not self.interrupts.count and not (self.fail_fast and self.failures):
            with slot(self._shares, lambda: self.interrupts.count > 0 or all(map(self._is_over, self.cells))) as place:
                taken = self._take() if place else None
                if taken is None or place is None:
                    return
                cell, claim = taken
                began = time.monotonic()
                try:
                    outcome = process_cell(cell, claim, self.workers, place, lambda: self.interrupts.count > 1)
                except (OSError, UsageError, ValueError) as error:  # a full disk, or a file that was damaged meanwhile
                    outcome = CellOutcome("failed", "system", str(error))
                finally:
                    claim.release()
                with self._mutex:
                    self._tell(cell, outcome, time.monotonic() - began)

    def _take(self) -> tuple[Cell, lock.HeldLock] | None:
        """Claim a cell that is not running, done or failed.

        It is the first, for one worker. After each cell that another worker has, a random number of cells is passed
        over, out of twice as many as the time before, so that a hundred workers do not try a hundred cells each; what
        was passed over is looked at in the end. Cells that others have finished are known from the chain, and one that
        another was seen to have is not tried again at once.
        """
        self._read_news()
        left = [cell for cell in self.cells if cell.name not in self._through]
        passed: list[Cell] = []
        i, most = 0, 2
        while i < len(left):
            jump = 0
            if self._seen_held.get(left[i].name, -RETRY) > time.monotonic() - RETRY:
                passed.append(left[i])
            elif claim := self._claim(left[i]):
                return left[i], claim
            elif left[i].name in self._seen_held:
                jump, most = random.randrange(most), 2 * most
                passed += left[i + 1 : i + 1 + jump]
            i += 1 + jump
        return next(((cell, claim) for cell in passed if (claim := self._claim(cell))), None)

    def _claim(self, cell: Cell) -> lock.HeldLock | None:
        """Return the claim of a cell, or None if it is over or another worker has it, which is noted."""
        self._seen_held.pop(cell.name, None)
        if self._is_over(cell):
            return None
        claim = lock.take(cell.claim)
        if claim is None:
            self._seen_held[cell.name] = time.monotonic()
        elif self._is_over(cell):  # another worker has just finished it
            claim.release()
            return None
        return claim

    def _read_news(self) -> None:
        for record in self._news.new() if self._news else ():
            if record.get("kind") == ("analyses" if self.cells[0].ablation.analyses else "cell"):
                self._through.add(str(record.get("cell")))

    def _is_over(self, cell: Cell) -> bool:
        if cell.is_finished():
            self._through.add(cell.name)
            return True
        return bool(cell.failure()) or cell.is_waiting() or self.failed(cell)

    def _tell(self, cell: Cell, outcome: CellOutcome, seconds: float) -> None:
        if outcome.end == "stopped":
            self.board.say(f"stopped  {cell.name}; `run` continues it")
            return
        if outcome.end == "waiting":
            self.board.say(f"waiting  {cell.name} after {cell.until} epochs, {outcome.text}")
        elif outcome.end == "failed":
            self.failures.append((cell, outcome))
            self.board.say(f"failed   {cell.name}: {outcome.text}")
        else:
            self.progress.seconds.append(seconds)
            progress = "" if self.board.live else f"   [{self.progress.line(self.progress.update())}]"
            self.board.say(f"done     {cell.name}: {outcome.text}, {seconds:.0f} s{progress}")


def _set_aside_damaged(cell: Cell, say: Say | None) -> None:
    """Set aside a damaged cell, unless a worker has claimed it."""
    if (text := cell.damage()) and (claim := lock.take(cell.claim)):
        cell.set_aside()
        claim.release()
        if say:
            say(f"damaged  {cell.name}: {text}; set aside and trained again")
