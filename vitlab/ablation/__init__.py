"""The ablation laboratory: from a file that describes a comparison to a report with a verdict.

It trains no network itself: it runs ``vitlab`` as a command and reads the run directories. The way of a cell, which is
an arm with a seed, file by file:

- ``file``: ``spec`` reads the YAML into an ``Ablation``: its sections (``settings``), ``arms`` and ``claims``, with the
  line of each mistake (``schema``). ``given`` writes that file for a comparison that Python gives.
- ``execution``: a ``probe``, a short training (which ``start`` measures), makes an arm a ``Resolved`` one, and
  ``resolve`` refuses arms that cannot be trained or compared. ``cells`` says what a ``Cell`` is, its ``identity`` and
  its states, read from files; ``tuning`` chooses the values that an arm is measured with, from its ``candidates``,
  which are cells, too. A worker of the ``pool`` takes a cell that is due and goes through its stages (``worker``),
  each of the ``commands`` a ``process``, forked from a ``warm`` one, on a share of the ``gpus``. ``progress`` shows it
  live, ``status`` from files, and ``slurm`` submits the same workers.
- ``evidence``: the ``chain`` of records that each measured cell becomes part of, registration and history
  (``protocol``), ``verify``, which computes numbers again, ``repeat``, which trains again, and export (``bundle``).
- ``inference``: the numbers of the cells (``measured``), fairness (``audit``, ``linear``), every comparison with its p
  (``answers``) at each of its ``looks``, for the ``baselines`` and for the claims (``verdicts``), all of it in one
  table (``findings``); beside it ``images`` one by one, curves of ``analyses``, and the ``plan`` before a run.
- ``report``: sentences and tables (``sections``, ``tuned``), figures (``drawings``), and the files that hold them
  (``write``).

``lab`` is all of it from Python, ``running`` a call of ``run``, ``side_by_side`` several reports on one page, and
``folds`` cross-validation as an ablation.
"""

from typing import TYPE_CHECKING

from vitlab.lazy import lazy

if TYPE_CHECKING:
    from vitlab.ablation.lab import Lab
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = ["Lab"]
