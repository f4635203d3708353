"""Ablations from Python: ``Lab("mine.yaml")``, then ``plan``, ``run``, ``status`` and ``report``.

The command ``vitlab ablate`` only calls it and prints what it returns.
"""

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from vitlab.ablation.evidence.protocol import record_version, register
from vitlab.ablation.execution.cells import Cell, Resolved, Say
from vitlab.ablation.execution.gpus import visible_devices
from vitlab.ablation.execution.probe import known
from vitlab.ablation.execution.process import worker_count
from vitlab.ablation.execution.resolve import resolve
from vitlab.ablation.execution.slurm import needs_submission
from vitlab.ablation.execution.status import Status, count_of_other_code, status_of
from vitlab.ablation.execution.tuning import Tuning, seeds_left_behind
from vitlab.ablation.file import spec
from vitlab.ablation.file.given import write_file
from vitlab.ablation.file.spec import Ablation
from vitlab.ablation.running import RunOptions, conditions, dry_run, run_locally, submit_cells
from vitlab.analysis.catalogue import ANALYSES, instead_of
from vitlab.config.trust import TRUSTED
from vitlab.errors import UsageError, trust_also, trusting
from vitlab.runs.directory import Here
from vitlab.shipped import find_file

if TYPE_CHECKING:
    from vitlab.ablation.evidence.verify import Verified
    from vitlab.ablation.inference.plan import Plan
    from vitlab.ablation.report.write import Report
    from vitlab.analysis.typeset import Format, Width


P = ParamSpec("P")
T = TypeVar("T")


def _silent(text: str) -> None:
    """Say nothing."""


def _where_it_was_opened(method: "Callable[Concatenate[Lab, P], T]") -> "Callable[Concatenate[Lab, P], T]":
    """Return a method that works in the directory in which the laboratory was opened, as paths of its file do."""

    @wraps(method)
    def entered(self: "Lab", *args: P.args, **kwargs: P.kwargs) -> T:
        with self._here.entered():
            return method(self, *args, **kwargs)

    return entered


class Lab:
    """A comparison that one file describes, from the question to the verdict.

    It works in the directory in which it was opened, wherever the program goes afterwards.

    >>> lab = Lab("position_embeddings/probe")
    >>> [arm.name for arm in lab.ablation.arms]
    ['none', 'learned', 'sincos1d', 'sincos2d', 'rope2d']

    Args:
        file: A YAML file, the name of a shipped experiment, a folder that :meth:`export` wrote (or its
            ``ablation.yaml``), or what such a file holds, as a mapping or as an :class:`Ablation`.
        caller: Name of the call in the message about a missing file.
        trust_command: Whether to allow `run.command` of the file, which may be any program.

    Raises:
        UsageError: The file is missing or has a mistake; the message names the line.
    """

    def __init__(
        self, file: str | Path | Mapping[str, Any] | Ablation, caller: str = "ablate", trust_command: bool = False
    ) -> None:
        if isinstance(file, Mapping):
            file = write_file(file)
        given = file if isinstance(file, Ablation) else None
        file = given.file.path if given else str(file)
        self.file, self.trust_command, self._here = str(file), trust_command, Here()
        self._arms: list[Resolved] | None = None
        if given:
            self.ablation = given
        elif folder := exported(Path(file)):
            from vitlab.ablation.evidence.bundle import load_bundle

            self.ablation, self._arms = load_bundle(folder)
        else:
            self.ablation = spec.read_ablation(find_file(self.file, caller, "experiments"))
        for i, name in enumerate(self.ablation.analyses):
            if name not in ANALYSES:
                hint = instead_of(name) or f"; there are {', '.join(ANALYSES)}"
                if missing := [package for package in self.ablation.trust_imports if package not in TRUSTED]:
                    hint = f": if it is in {' or '.join(missing)}, add {trust_also(*missing)}"
                raise self.ablation.file.mistake(f"analyses/{i}", f'no analysis called "{name}"{hint}')

    @_where_it_was_opened
    def plan(self, workers: int | None = None, check: bool = False) -> "Plan":
        """Resolve every arm by a probe of 20 steps; return what a run will do and cost, and what it can detect.

        Args:
            workers: Probes and cells at a time; default: the file's.
            check: Also build every arm and compare their initial weights.

        Raises:
            UsageError: An arm cannot be built, cells belong on SLURM nodes and this is none, ``run.command`` is not
                trusted, or this is exported evidence.
        """
        from vitlab.ablation.inference.plan import check_lines, plan_of

        count = self._workers(workers)
        self._refuse_moved_seeds()
        if needs_submission(self.ablation) and len(known(self.ablation)) < len(self.ablation.arms):
            text = "a plan trains each arm for 20 steps, and this is not a SLURM node: put srun before the command"
            raise self.ablation.file.mistake("run/executor", text)
        plan = plan_of(self.ablation, resolve(self.ablation, count), count)
        if check:
            plan.starts, plan.same_start = check_lines(self.ablation)
        return plan

    @_where_it_was_opened
    def run(
        self,
        workers: int | None = None,
        only: Sequence[str] = (),
        fail_fast: bool = False,
        retry_failed: bool = False,
        say: Say | None = None,
        tune_only: bool = False,
    ) -> Status:
        """Train the cells that are not done, and return the progress; call again to continue.

        Args:
            workers: Cells at a time; default: the file's.
            only: Conditions such as ``pos_embed=none`` that a cell must satisfy.
            fail_fast: Start no new cells after a failure.
            retry_failed: Try the failed cells again.
            say: Called with each line of progress; with it, a terminal also shows a table.
            tune_only: Stop before the first measured seed.

        Raises:
            UsageError: An arm cannot be built, arms do not match and the file demands it, ``only`` names no level,
                ``tune_only`` is asked of a file without `tune`, SLURM refuses the job, ``run.command`` is not trusted,
                or this is exported evidence.
        """
        ablation, asked = self.ablation, self._asked(workers, only, fail_fast, retry_failed, tune_only)
        record_version(ablation)
        if needs_submission(ablation):
            submit_cells(ablation, asked, say or _silent)
            return replace(self.status(), submitted=True)
        failed, code = run_locally(ablation, asked, say)
        return replace(self.status(), failed=failed, code=code)

    @_where_it_was_opened
    def commands(
        self,
        workers: int | None = None,
        only: Sequence[str] = (),
        say: Say = _silent,
        fail_fast: bool = False,
        tune_only: bool = False,
    ) -> str:
        """Return what ``run`` would do as text: the commands of each cell, or the batch script of a cluster.

        Args:
            workers: As for :meth:`run`, as are the others.
            only: Conditions such as ``pos_embed=none`` that a cell must satisfy.
            say: Called with each line of progress.
            fail_fast: Start no new cells after a failure.
            tune_only: Stop before the first measured seed.

        Raises:
            UsageError: As from :meth:`run`.
        """
        return dry_run(self.ablation, self._asked(workers, only, fail_fast, False, tune_only), say)

    @_where_it_was_opened
    def status(self) -> Status:
        """Return the progress; only reads files."""
        return status_of(Tuning(self.ablation, self._known()))

    def report(
        self,
        output: str | Path | None = None,
        accept_stale: bool = False,
        formats: "Sequence[Format]" = ("pdf", "svg"),
        width: "Width" = "page",
    ) -> "Report":
        """Write tables, figures and verdicts of the finished cells to ``runs/ablations/NAME/report``, and return them.

        Args:
            output: Folder to copy report.md, summary.csv and the figures to; of evidence in a folder that cannot be
                written, the place of the report.
            accept_stale: Include cells that another version of the code trained.
            formats: Formats of the figures; report.md shows them as SVG, which is always written.
            width: Width of the figures in print, 3.3 or 6.9 inches.

        Raises:
            UsageError: No cell is done, or only by other code and without a new ``plan``, or ``output`` is a file.
        """
        from vitlab.ablation.report.write import send_report, write_report

        if output and Path(output).is_file():
            raise UsageError(f"`--output` must be a folder, and {output} is a file")
        place = os.path.abspath(output) if output else None
        with self._here.entered():
            if not any(cell.state() in ("done", "stale") for cell in self._cells()):
                self._refuse_other_code()
                start = trusting(f"vitlab ablate run {shlex.quote(self.file)}")
                raise UsageError(f"no cell of {self.ablation.name} is done; start with `{start}`")
            report = write_report(self.ablation, self._known(), place, accept_stale, formats, width)
            report.sent = send_report(self.ablation, report)
        report.files = [self._here.reached(path) for path in report.files]
        return report

    @_where_it_was_opened
    def register(self) -> dict[str, Any]:
        """Freeze claims and protocol, and return digest, time and commit; reports list later changes.

        Raises:
            UsageError: Another version is registered under this name, and a cell or candidate of it was started, or
                this is exported evidence.
        """
        self._refuse_evidence("registered")
        done = sum(cell.state() == "done" for cell in self._cells())
        return register(self.ablation, done)

    @_where_it_was_opened
    def verify(self, allow_missing: bool = False, deep: bool = False) -> "Verified":
        """Recompute every number of the finished cells and of the linear model; report disagreements.

        Args:
            allow_missing: Whether cells of the plan may be missing; they are named all the same.
            deep: Also evaluate kept weights again, and train one cell, drawn at random, again.

        Raises:
            UsageError: No cell is done, so that there is nothing to recompute; or ``deep`` is asked of exported
                evidence, which has no weights, or with a ``run.command`` that is not trusted.
        """
        from vitlab.ablation.evidence.verify import verify_evidence

        if deep:
            self._refuse_evidence("repeated (--deep), as it has no weights")
            self._refuse_to_start()
        found = verify_evidence(self.ablation, self._known(), allow_missing)
        if deep:
            from vitlab.ablation.evidence.repeat import verify_deep

            verify_deep(found, [cell for cell in self._cells() if cell.state() == "done"])
        if not found.checked and not found.problems:
            self._refuse_other_code()
            raise UsageError(
                f"nothing to verify: no cell of {self.ablation.name} is done in {self.ablation.directory}; to verify "
                "evidence, give the folder that `vitlab ablate export` wrote, such as an unpacked evidence.tar.xz"
            )
        return found

    def export(self, folder: str | Path, allow_missing: bool = False) -> list[Path]:
        """Write everything that the report needs into one folder, from which ``Lab(folder).report()`` writes it again.

        Args:
            folder: A new folder.
            allow_missing: Whether cells of the plan may be missing.

        Raises:
            UsageError: The folder exists and is not empty, or the cells do not verify.
        """
        from vitlab.ablation.evidence.bundle import check_new, export_bundle

        check_new(Path(folder))
        place = Path(os.path.abspath(folder))
        with self._here.entered():
            found = self.verify(allow_missing)
            if not found.is_green:
                words = [f"{name}: {'; '.join(why)}" for name, why in found.problems.items()]
                words += [f"{name}: {state}" for name, state in found.missing.items()]
                way = "" if found.problems else "; --allow_missing accepts what is missing"
                raise UsageError(f"nothing is exported that does not verify: {' | '.join(words)}{way}")
            files = export_bundle(self.ablation, self._known(), place)
        return [Path(folder) / path.relative_to(place) for path in files]

    def _known(self) -> list[Resolved]:
        """Return the arms that have been resolved."""
        return self._arms or known(self.ablation)

    def _cells(self) -> list[Cell]:
        """Return the cells of the resolved arms, but for those that are not tuned yet or are given up."""
        return Tuning(self.ablation, self._known()).cells

    def _refuse_other_code(self) -> None:
        """Refuse what needs finished cells where other seeds or other code finished some, and say how to use these."""
        self._refuse_moved_seeds()
        if count := count_of_other_code(self.ablation):
            what = f"{count} cells of {self.ablation.name} were finished with other code or versions"
            file = shlex.quote(self.file)
            plan, run, report = (trusting(f"vitlab ablate {word} {file}") for word in ("plan", "run", "report"))
            ways = f"that code verifies them, and `{run}` trains them again"
            if not self.ablation.tune:  # stale candidates choose no values, so that no arm would be known
                ways = f"`{plan}`, then `{report} --accept_stale` reports them, {ways}"
            raise UsageError(f"{what}: {ways}")

    def _asked(
        self, workers: int | None, only: Sequence[str], fail_fast: bool, retry_failed: bool, tune_only: bool
    ) -> RunOptions:
        """Return what is asked of a run; refuse levels and a tuning that the file does not have."""
        count = self._workers(workers)
        self._refuse_moved_seeds()
        if tune_only and self.ablation.tune is None:
            raise UsageError(f"`--tune_only` trains the candidates of `tune`, which {self.file} does not have")
        return RunOptions(count, conditions(self.ablation, only), fail_fast, retry_failed, tune_only)

    def _refuse_evidence(self, what: str) -> None:
        """Refuse what would write into a folder of exported evidence, which is sealed."""
        if self.ablation.is_evidence:
            raise UsageError(f"{self.file} is exported evidence: it can be reported and verified, not {what}")

    def _refuse_moved_seeds(self) -> None:
        """Refuse to tune again for the sole reason that a measured seed was added."""
        if (left := seeds_left_behind(self.ablation, self._known())) and (tune := self.ablation.tune):
            new = [*tune.seeds]
            text = f"the default of `tune.seeds` is {new} now, and there are candidates of {left}"
            raise self.ablation.file.mistake("tune", f"{text}: `seeds: {left}` keeps them, `seeds: {new}` tunes again")

    def _workers(self, given: int | None) -> int:
        """Return how many probes or cells to run at a time; refuse to start what must not be started."""
        if given is not None and given < 1:
            raise UsageError(f"`workers` must be a whole number, 1 or more, or None for that of the file, got {given}")
        self._refuse_to_start()
        if self.ablation.run.executor == "slurm":  # of a task; `run.workers` counts those of all tasks
            return given or max(1, len(visible_devices()) * self.ablation.run.per_gpu)
        return worker_count(given or self.ablation.run.workers, self.ablation.run.per_gpu)

    def _refuse_to_start(self) -> None:
        """Refuse evidence, which has no weights, analyses that cells cannot import, and programs that nobody trusts."""
        self._refuse_evidence("run")
        named = {name.partition(".")[0] for name in ("vitlab", "__main__", *self.ablation.trust_imports)}
        for i, name in enumerate(self.ablation.analyses):
            if (package := ANALYSES.module_of(name).partition(".")[0]) not in named:
                text = f"{name} is in {package}, which no cell imports: name it in `trust_imports` of this file"
                raise self.ablation.file.mistake(f"analyses/{i}", text)
        if self.ablation.run.command and not self.trust_command:
            words = f"`run.command` starts {shlex.join(map(str, self.ablation.run.command))}, which may be any program"
            raise self.ablation.file.mistake("run/command", f"{words}; if you trust it, add --trust_command")


def exported(file: Path) -> Path | None:
    """Return the folder of evidence that a path names, itself or by its ``ablation.yaml``; None for another file.

    Example:
        >>> exported(Path("experiments/tokenizers/digits.yaml"))
    """
    if file.is_dir():
        return file
    if file.name != "ablation.yaml":  # without the imports that evidence needs
        return None
    from vitlab.ablation.evidence.bundle import SUMS

    return file.parent if (file.parent / SUMS).is_file() else None
