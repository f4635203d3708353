"""The ablation laboratory: from a file that describes a comparison to a report with a verdict.

It trains no network itself: it runs ``vitlab`` as a command and reads the run directories.
"""

from typing import TYPE_CHECKING

from vitlab.lazy import lazy

if TYPE_CHECKING:
    from vitlab.ablation.lab import Lab
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = ["Lab"]
