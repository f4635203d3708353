"""HTML pages that show a run, several runs, or any network; each is one file that works offline."""

from typing import TYPE_CHECKING

from vitlab.lazy import lazy

if TYPE_CHECKING:
    from vitlab.look.diagram import architecture as architecture
else:
    __getattr__, __dir__ = lazy(__name__)
