"""Whether a page was written while a run trained; apart from what writes it, as training and `vitlab look` ask this."""

import re
from contextlib import suppress
from pathlib import Path

from vitlab.runs.atomic import write_text

MARK = '<meta name="vitlab" content="written while training">'
RELOADS = re.compile(r'<meta http-equiv="refresh"[^>]*>\n?|; the run goes on and this page reloads itself[^.<]*')


def is_of_training(page: Path) -> bool:
    """Return whether a run wrote this page while it trained: such a page may be replaced.

    Example:
        >>> Path("look.html").write_text(f"<html><head>{MARK}</head></html>") > 0
        True
        >>> is_of_training(Path("look.html")), is_of_training(Path("other.html"))
        (True, False)
    """
    try:
        with page.open(encoding="utf-8") as file:
            return MARK in file.read(1000)
    except (OSError, UnicodeDecodeError):
        return False


def stand_still(page: Path) -> None:
    """Take from a page that it loads itself again, if it is one that training wrote.

    Example:
        >>> Path("look.html").write_text(f'{MARK}<meta http-equiv="refresh" content="20"><p>a</p>') > 0
        True
        >>> stand_still(Path("look.html"))
        >>> "refresh" in Path("look.html").read_text()
        False
    """
    with suppress(OSError):  # of a full disk, say: why the training ended is told, and not this
        if is_of_training(page):
            write_text(page, RELOADS.sub("", page.read_text(encoding="utf-8")))
