"""Find the subject of an analysis: a run, a file of weights, a published network, or one of another library."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitlab.analysis.subject import Subject
from vitlab.errors import UsageError
from vitlab.jobs.subject_of_run import subject_of_run
from vitlab.jobs.subject_without_run import named_subject
from vitlab.jobs.view import View
from vitlab.models.sizes import SIZES
from vitlab.runs.directory import RunDir
from vitlab.runs.find import find_run, run_called
from vitlab.runs.standing import checksum
from vitlab.shipped import LIBRARIES, find_weights


def has_no_run(source: str) -> bool:
    """Return whether a source is a network without a run: a name that no run has, or a file outside of run directories.

    >>> has_no_run("vit_s16"), has_no_run("first"), has_no_run("vitlab:photos64_vit")
    (True, False, True)
    """
    path = Path(find_weights(source))
    named = source in SIZES and not run_called(source)
    return source.startswith(LIBRARIES) or named or (path.is_file() and not RunDir.around(path).config.is_file())


def subject_at(source: str, view: View, arguments: Sequence[str] = ()) -> tuple[Subject, Path, dict[str, Any]]:
    """Return the subject that a source names, the folder of its analyses, and name and checksum of its weights.

    Args:
        source: A run, its name or a checkpoint in it; a vitlab file; ``vitlab:NAME``, a trained network that vitlab
            ships; a name of `vitlab models`, or ``timm:NAME``, ``hf:NAME``, ``torchvision:NAME``.
        view: Which part of it to analyze.
        arguments: Command-line arguments that change values of a run's configuration.

    Raises:
        UsageError: There is no such run or network, its weights do not fit, or ``view`` names weights or a size for
            a run.
    """
    source = find_weights(source)
    if has_no_run(source):
        subject = named_subject(source, view, arguments)
        return subject, Path("analysis") / subject.name, {"checkpoint": view.weights or source}
    if view.weights or view.img_size or view.init_grid:
        raise UsageError(f"`--weights`, `--img_size` and `--init_grid` are for named networks, and {source} is a run")
    run, checkpoint = find_run(source)
    weights = {"checkpoint": checkpoint.name, "sha256": checksum(checkpoint)}
    return subject_of_run(run, checkpoint, arguments, view), run.path / "analysis", weights
