"""Results of an ablation that no cell has trained: numbers that a test makes up."""

from vitlab.ablation.execution.cells import Resolved
from vitlab.ablation.inference.measured import CellResult, CellResults


def built(config, arm=None):
    """An arm as a probe has built it, of which only the configuration is known."""
    return Resolved(arm, config, {}, {}, (), 1.0, "")


def without_numbers(ablation):
    """Results of arms that are alike in all but their names, without a cell."""
    return CellResults(ablation, [built({"data": {}}, arm) for arm in ablation.arms])


def give(results, numbers):
    """Give cells, by arm and seed, their numbers, and no cell but them any."""
    results.cells = {key: CellResult(None, "done", numbers=found) for key, found in numbers.items()}
    return results


def lose(results, arm, seed, state="missing"):
    """Take the numbers of a cell away, as if it had ended in another state."""
    results.cells[arm, seed] = CellResult(None, state)


def of_runs(ablation, arms, runs):
    """Results of arms whose cells have these runs, by arm and seed."""
    return CellResults(ablation, arms, arms, {key: CellResult(None, "done", run=run) for key, run in runs.items()})
