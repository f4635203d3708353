"""Train the cells of an ablation on this machine, or submit them to SLURM."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from vitlab.ablation.execution.cells import Resolved, Say
from vitlab.ablation.execution.commands import stages
from vitlab.ablation.execution.pool import Interrupts, Pool
from vitlab.ablation.execution.probe import known
from vitlab.ablation.execution.resolve import resolve
from vitlab.ablation.execution.slurm import batch_script, needs_submission, submit_workers, task_count
from vitlab.ablation.execution.tuning import Tuning, run_trials, suggest
from vitlab.ablation.file.arms import Arm
from vitlab.ablation.file.spec import Ablation
from vitlab.ablation.inference.audit import mismatches
from vitlab.errors import UsageError

NOTHING = "every cell is done; nothing to submit"


@dataclass(frozen=True)
class RunOptions:
    """What is asked of a call of ``run``.

    Args:
        workers: Cells at a time.
        only: Axis and level of each condition that an arm must satisfy.
        fail_fast: Start no new cells after a failure.
        retry_failed: Try the failed cells again.
        tune_only: Stop before the first measured seed.
    """

    workers: int
    only: Sequence[tuple[str, str]] = ()
    fail_fast: bool = False
    retry_failed: bool = False
    tune_only: bool = False

    def wants(self, arm: Arm) -> bool:
        """Return whether an arm satisfies all conditions."""
        return all(arm.levels[axis] == level for axis, level in self.only)

    def of(self, arms: Sequence[Resolved]) -> list[Resolved]:
        """Return the arms that satisfy all conditions."""
        return [arm for arm in arms if self.wants(arm.arm)]

    def words(self) -> list[str]:
        """Return what each worker on a cluster is told; failures are forgotten once, where it is submitted."""
        only = [word for axis, level in self.only for word in ("--only", f"{axis}={level}")]
        return only + ["--fail_fast"] * self.fail_fast + ["--tune_only"] * self.tune_only


def conditions(ablation: Ablation, only: Sequence[str]) -> list[tuple[str, str]]:
    """Return axis and level of each condition such as ``pos_embed=none``.

    Raises:
        UsageError: There is no such level.
    """
    found = []
    for text in only:
        axis, _, level = text.partition("=")
        if level not in (levels := ablation.axes.get(axis, {})):
            there = f"the levels of {axis} are {', '.join(levels)}"
            hint = there if levels else f"the axes are {', '.join(ablation.axes)}"
            raise UsageError(f"`--only` takes AXIS=LEVEL, got {text}; {hint}")
        found.append((axis, level))
    return found


def run_locally(ablation: Ablation, asked: RunOptions, say: Say | None) -> tuple[list[str], int]:
    """Train the cells; return those that failed, and the exit code of a signal that ended the call, or 0."""
    tell = say or (lambda text: None)
    with Interrupts(tell) as interrupts:
        pool_of = partial(Pool, workers=asked.workers, say=say, interrupts=interrupts, fail_fast=asked.fail_fast)
        arms = resolved_arms(ablation, asked, tell, lambda: interrupts.count > 0)
        if interrupts.count:
            return [], interrupts.code
        if asked.retry_failed:
            _forget_failures(ablation, arms)
        if ablation.tune:
            failed = run_trials(ablation, arms, pool_of)
            if failed or interrupts.count:
                return failed, interrupts.code
        tuning = Tuning(ablation, arms)
        for name, why in tuning.given_up.items():
            tell(f"given up {name}: {why}; it is not measured")
        cells = [] if asked.tune_only else tuning.cells
        if not cells:
            return [*tuning.given_up], 0
        pool = pool_of(cells)
        pool.run_all()
    failed = [cell.name for cell in cells if cell.failure() or cell.name in pool.failed]
    return [*tuning.given_up, *failed], interrupts.code


def submit_cells(ablation: Ablation, asked: RunOptions, say: Say) -> None:
    """Submit workers to SLURM; this machine trains and resolves nothing.

    Raises:
        UsageError: There is no SLURM here, or it refused the job.
    """
    if asked.retry_failed:
        _forget_failures(ablation, asked.of(known(ablation)))
    if left := _missing(ablation, asked):
        submit_workers(ablation, task_count(ablation, left), asked.words(), say)
    else:
        say(NOTHING)


def dry_run(ablation: Ablation, asked: RunOptions, say: Say) -> str:
    """Return what ``run`` would do as text: the commands of each cell, or the batch script of a cluster."""
    if needs_submission(ablation):
        if left := _missing(ablation, asked):
            return batch_script(ablation, task_count(ablation, left), asked.words())
        say(NOTHING)
        return ""
    arms = resolved_arms(ablation, asked, say)
    suggest(ablation, arms)
    tuning = Tuning(ablation, arms)
    cells = tuning.due + ([] if asked.tune_only else tuning.cells)
    due = [(cell.name, stages(cell)) for cell in cells]
    parts = [[f"# {name}", *(shlex.join(stage.words) for stage in left)] for name, left in due if left]
    return "\n".join(line for part in parts for line in part)


def resolved_arms(
    ablation: Ablation, asked: RunOptions, say: Say, stop: Callable[[], bool] = lambda: False
) -> list[Resolved]:
    """Resolve all arms and return those asked for; refuse arms that do not match if the file demands it.

    Raises:
        UsageError: An arm cannot be built, or arms do not match and the file demands it.
    """
    size = f"{len(ablation.arms)} arms x {len(ablation.seeds)} seeds"
    say(f"{ablation.name}: {size}, {asked.workers} at a time; resolving")
    resolved = resolve(ablation, asked.workers, stop)
    if stop():
        return []
    unfair = mismatches(ablation, resolved)
    for name, words in unfair.items():
        say(f"note     {name}: {'; '.join(words)}")
    if unfair and ablation.match.on_violation == "fail":
        raise UsageError(f"{ablation.file.path}: arms do not match, and `match.on_violation` is fail")
    return asked.of(resolved)


def _missing(ablation: Ablation, asked: RunOptions) -> int:
    """Return how many cells are not finished, including those of the tuning; only reads files."""
    count = sum(asked.wants(arm) for arm in ablation.arms)
    tuning, left = Tuning(ablation, asked.of(known(ablation))), 0
    if tune := ablation.tune:
        over = sum(trial.is_over or cell.is_finished() for trial in tuning.trials for cell in trial.cells)
        left = count * tune.budget * len(tune.seeds) - over
    if asked.tune_only:
        return left
    measured = (count - len(tuning.given_up)) * len(ablation.seeds)
    return left + measured - sum(cell.is_finished() for cell in tuning.cells)


def _forget_failures(ablation: Ablation, arms: Sequence[Resolved]) -> None:
    """Let failed cells and candidates be tried again; one that diverged stays, as its search has learned from it."""
    tuning = Tuning(ablation, arms)
    for cell in [*(cell for cell in tuning.candidates if cell.state() == "failed"), *tuning.cells]:
        cell.sibling(".failed.json").unlink(missing_ok=True)
