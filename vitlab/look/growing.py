"""The page of a small network, written while it trains: nobody asks for it, and it takes a hundredth of the time."""

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import numpy as np
from lightning.pytorch.callbacks import Callback

from vitlab.errors import named_line
from vitlab.look.moments import SHARE, is_small
from vitlab.look.written import is_of_training, stand_still

if TYPE_CHECKING:
    from vitlab.look.live import LivePage

FIRST = 2.5  # seconds that the first page is taken to cost, imports among them, until it has been measured


def now() -> np.ndarray:
    """Return the seconds of the clock and of this process on processors, ``(2,)``.

    Example:
        >>> bool((now() <= now()).all())
        True
    """
    return np.array([time.monotonic(), time.process_time()])


class GrowingPage(Callback):
    """Write the page of :class:`vitlab.look.live.LivePage` after validations, as often as a small share of time allows.

    A page is written when all pages so far, this one and the last one together cost at most ``share`` of the time
    since the training was built: by the clock, and of the time on processors, as a page takes longer by the clock
    where others are busy, too. So a short run has none. Nothing is written for large networks, over a page that
    `vitlab look` made, and where :class:`~vitlab.look.moments.Moments` keep nothing. ``vitlab fit`` adds this callback
    itself unless the configuration names ``LivePage``; its share is that of ``Moments``: 0 there leaves both out.

    Args:
        share: Largest share of the run's time.

    Raises:
        ValueError: ``share`` is not from 0 to 1.

    Example:
        >>> page = GrowingPage(share=0.01)
        >>> [page.has_time(page.begun + each) for each in (499, 501, (501, 499))]  # two pages of 2.5 seconds each
        [False, True, False]
    """

    def __init__(self, share: float = SHARE) -> None:
        if not 0 <= share <= 1:
            raise ValueError(f"`share` of GrowingPage must lie in 0..1, got {share}")
        self.share, self.begun, self.written = share, now(), 0
        self.spent, self._cost, self._is_due = np.zeros(2), np.full(2, FIRST), False
        self._page: LivePage | None = None

    def has_time(self, at: np.ndarray) -> bool:
        """Return whether a page, and the last one after it, fit into the share at a time as :func:`now` tells it."""
        return bool((self.spent + 2 * self._cost <= self.share * (at - self.begun)).all())

    def on_validation_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Decide whether this validation is written; of any after the first page the predictions may be the last."""
        begun = now()
        self._is_due = self._may_write(trainer, pl_module) and self.has_time(begun)
        if self._is_due or self.written:
            self._made().on_validation_start(trainer, pl_module)
            self.spent += now() - begun  # imports, the first time

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Collect the predictions of a validation that is written, or may be what the last page tells."""
        if self._is_due or self.written:
            begun = now()
            self._made().on_validation_batch_end(trainer, pl_module, outputs, batch, batch_idx, dataloader_idx)
            self.spent += now() - begun

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Write the page."""
        if self._is_due:
            self._write(trainer, pl_module, is_last=False)

    def on_fit_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Write the last page, which does not reload, if there was one before."""
        if self.written:
            self._write(trainer, pl_module, is_last=True)

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Leave a page that does not reload."""
        if self.written:
            stand_still(Path(trainer.default_root_dir) / "look.html")

    def _may_write(self, trainer: L.Trainer, pl_module: Any) -> bool:
        if not self.share or trainer.sanity_checking or not trainer.is_global_zero or trainer.state.fn != "fit":
            return False
        page = Path(trainer.default_root_dir) / "look.html"
        return is_small(trainer, pl_module) and (not page.exists() or is_of_training(page))

    def _made(self) -> "LivePage":
        if self._page is None:
            from vitlab.look.live import LivePage

            self._page = LivePage()
            self._page.share = float("inf")  # pictures, too, are paid from the share of the whole page
        return self._page

    def _write(self, trainer: L.Trainer, pl_module: Any, is_last: bool) -> None:
        begun = now()
        try:
            self._made().write(trainer, pl_module, is_last)
            self.written += 1
        except Exception as error:  # a page that nobody asked for must not stop the training
            self.share = 0.0
            logging.getLogger("vitlab").warning("look.html is not continued: %s", named_line(error))
        self._cost = now() - begun
        self.spent += self._cost
