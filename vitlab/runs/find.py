"""Find runs by what a user types: a directory, a name in ``runs/``, a checkpoint, or ``last``."""

import shlex
from contextlib import suppress
from pathlib import Path

from vitlab.errors import UsageError, did_you_mean, trusting
from vitlab.runs.directory import RUNS, RunDir
from vitlab.runs.manifest import check_whole
from vitlab.shipped import find_weights, refuse_graph

TO_A_RUN = "put it into a run, RUN/checkpoints/ beside RUN/config.yaml"  # a checkpoint


def find_run(text: str, way_out: str = TO_A_RUN) -> tuple[RunDir, Path]:
    """Return the run and the checkpoint that a run directory, its name, a checkpoint, or ``last`` names.

    Args:
        text: Which.
        way_out: What to do with a checkpoint that is in no run, for the message.

    Raises:
        UsageError: There is no such run or checkpoint.

    Example:
        >>> run, checkpoint = find_run("first")
        >>> checkpoint.name
        'best.ckpt'
    """
    path = Path(text).expanduser()
    if path.is_file():
        refuse_graph(path)
        run = RunDir.around(path)
        if not run.config.is_file():
            raise UsageError(f"{path} is not in a run directory: there is no {run.config}; {way_out}")
        check_whole(path)
        return run, path
    run = find_directory(text)
    return run, run.checkpoint()


def file_of_weights(text: str) -> Path:
    """Return the file of weights that a file, ``vitlab:NAME``, a run directory, its name, or ``last`` names.

    Raises:
        UsageError: There is no such file, run or checkpoint.

    Example:
        >>> file_of_weights("first").name, file_of_weights("vitlab:photos64_vit").name
        ('best.ckpt', 'photos64_vit.safetensors')
    """
    path = Path(find_weights(text))
    return path if path.is_file() else find_run(str(path))[1]


def find_directory(text: str) -> RunDir:
    """Return the run that a directory, a name in ``runs/``, or ``last`` names.

    Raises:
        UsageError: There is no such run.
    """
    if text == "last":
        return some_runs()[-1]
    if found := run_called(text):
        return found
    path = Path(text).expanduser()
    around = [place for place in [*path.parents][:2] if (place / "run.json").is_file()]
    if around and path.exists():
        raise UsageError(f"{path} lies in a run: name that, {RunDir(around[0]).typed}")
    others = ""
    for directory in _places(text):
        if directory.is_dir() and (foreign := RunDir(directory).foreign()):
            others = f"; {directory} contains {foreign[0]} and no run: start one elsewhere with --name"
        elif directory.is_dir():
            words = f"vitlab fit --config FILE --run_dir {shlex.quote(str(directory))} --auto_resume"
            way_on = f"`{trusting(words)}` starts it"
            raise UsageError(f"{directory} has no run: its start was interrupted, or its files are gone; {way_on}")
    names = [run.path.name for run in all_runs()]
    hint = did_you_mean(text, names)
    raise UsageError(
        f'no run or checkpoint called "{text}"{hint} (newest in {RUNS}/: {", ".join(names[-3:]) or "none yet"}){others}'
    )


def run_called(text: str) -> RunDir | None:
    """Return the run that a directory or a name in ``runs/`` names; None if there is none.

    Example:
        >>> run_called("first").path, run_called("runs")
        (PosixPath('runs/first'), None)
    """
    runs = map(RunDir, _places(text))  # a folder here, as of images, may have the name of a run
    return next((run for run in runs if run.has_begun()), None)


def _places(text: str) -> tuple[Path, Path]:
    return Path(text).expanduser(), RUNS / text


def all_runs() -> list[RunDir]:
    """Return the runs in ``runs/``, oldest first."""
    runs = [RunDir(path.parent) for path in RUNS.glob("*/run.json")]
    return sorted(runs, key=_started)


def _started(run: RunDir) -> str:
    with suppress(UsageError, OSError):  # a damaged run does not affect the others
        return run.record.get("started", "")
    return ""


def some_runs() -> list[RunDir]:
    """Return the runs in ``runs/``, oldest first, of which there must be one.

    Raises:
        UsageError: There is no run yet.
    """
    if not (runs := all_runs()):
        raise UsageError(f"there is no run in {RUNS}/ yet; start one with `vitlab fit --config configs/t2t.yaml`")
    return runs
