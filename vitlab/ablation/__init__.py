"""The ablation laboratory: from a file that describes a comparison to a report with a verdict.

It trains no network itself: it runs ``vitlab`` as a command and reads the run directories. In the order of a
comparison:

- ``file``: what the YAML says, as an ``Ablation`` of arms, seeds and claims;
- ``execution``: each arm is probed by a short training (``probe``), arms that cannot be compared are refused
  (``resolve``), each arm and seed is a cell (``cells``), workers take cells (``pool``) and train, measure and analyze
  them (``worker``), candidates of ``tuning`` first;
- ``evidence``: the chain of records, registration, ``verify``, a ``deep`` one, and export;
- ``inference``: the numbers of cells (``measured``), fairness (``audit``), every comparison with its p (``answers``)
  at each of its ``looks``, and ``verdicts`` on claims;
- ``report``: sentences and tables (``sections``), figures, and the files that hold them (``write``).

``lab`` is all of it from Python, ``running`` a call of ``run``, ``folds`` cross-validation as an ablation.
"""

from typing import TYPE_CHECKING

from vitlab.lazy import lazy

if TYPE_CHECKING:
    from vitlab.ablation.lab import Lab
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = ["Lab"]
