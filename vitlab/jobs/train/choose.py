"""Choose the directory of a run that starts or resumes."""

import datetime
import hashlib
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from vitlab.config.options import FitOptions
from vitlab.errors import UsageError, preview
from vitlab.runs.directory import RUNS, RunDir
from vitlab.runs.find import all_runs, find_directory
from vitlab.runs.launch import agree, agreed, is_restarted, launched_rank

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def run_to_continue(options: FitOptions) -> RunDir | None:
    """Return the run to resume; None to start a new one.

    Raises:
        UsageError: Options contradict each other, ``resume`` names no run, or the run began with other weights.
    """
    if options.resume:
        return _resumed(options)
    if options.auto_resume and options.overwrite:
        raise UsageError("`--auto_resume` continues a run and --overwrite deletes it; leave one of them out")
    if options.auto_resume and not options.name and not options.run_dir:
        raise UsageError("`--auto_resume` needs a run: give --name or --run_dir")
    if not options.auto_resume and not is_restarted():
        return None
    path = os.environ.get("VITLAB_RUN_DIR") or _given(options) or ((known := agreed()) and RUNS / known)
    run = RunDir(path) if path else None
    if not run or not run.has_begun():
        return None
    _refuse_another_start(run, options)
    return run


def _refuse_another_start(run: RunDir, options: FitOptions) -> None:
    """Refuse initial weights, or a way to fit them, that are not typed as those with which a run began, or ``last``."""
    record: Any = {}
    with suppress(UsageError):  # a damaged one is rewritten later
        record = run.record
    grid = options.init_grid and ",".join(map(str, options.init_grid))
    for name, value in {"init_from": options.init_from, "resize": options.resize, "init_grid": grid}.items():
        began = record.get(name, value)  # an older run does not say
        if value not in (None, began) and not (value == "last" and began):
            began = began or ("new weights" if name == "init_from" else "none")
            what = f"`{name}` {value}: {run.path} began with {began}, and `--auto_resume` continues it as it is"
            raise UsageError(f"{what}: leave it out, or start a new run")


def _resumed(options: FitOptions) -> RunDir:
    """Return the run that ``--resume`` names."""
    for flag in ("init_from", "overwrite", "auto_resume"):
        if getattr(options, flag):
            raise UsageError(f"`--resume` continues a run as it is; leave out --{flag}")
    if options.resume and options.resume != "auto":
        run = find_directory(options.resume)
        _refuse_another_place(run, options)
        return run
    if not options.name and not options.run_dir:
        raise UsageError("`--resume` needs a run: `--resume RUN`, `--resume last`, or --name")
    run = RunDir(_given(options) or ".")
    if not run.has_begun():
        raise UsageError(f"`--resume`: there is no run in {run.path}; leave --resume out to start one")
    return run


def _refuse_another_place(run: RunDir, options: FitOptions) -> None:
    """Refuse a name or directory beside ``--resume RUN``, unless it is that of the run: it goes on where it is."""
    if (place := _given(options)) and os.path.realpath(place) != os.path.realpath(run.path):
        flag = f"--name {options.name}" if options.name else f"--run_dir {options.run_dir}"
        raise UsageError(
            f"`--resume {options.resume}` goes on in {run.path}, and {flag} is another directory: leave it out; or "
            f"copy {run.path} there and resume the copy; or start a new run with its weights, --init_from {run.typed}"
        )


def _given(options: FitOptions) -> Any:
    if options.name and options.run_dir:
        raise UsageError("give --name or --run_dir, not both")
    if options.run_dir:
        return Path(options.run_dir).expanduser()  # of --run_dir=~/x, the shell leaves it
    return options.name and RUNS / _check_name(options.name)


def initial_weights(text: str | None, run: RunDir) -> str | None:
    """Return what a new run starts from as it records it: ``last`` is the newest other run, and another one later.

    Raises:
        UsageError: There is no other run.

    Example:
        >>> initial_weights("vitlab:photos64_vit", RunDir("runs/new"))
        'vitlab:photos64_vit'
    """
    if text != "last" or Path(text).is_file():
        return text
    others = [str(one.path) for one in all_runs() if os.path.realpath(one.path) != os.path.realpath(run.path)]
    if not others:
        raise UsageError(f"`--init_from last`: there is no other run in {RUNS}/ yet; name a run or a file of weights")
    return others[-1]


def choose_run(options: FitOptions, configs: list[str], seed: Any, resolved: str) -> RunDir:
    """Return the directory of a new run; every process of one launch returns the same.

    Raises:
        UsageError: The directory holds a run or other files, or the name is invalid.
    """
    if inherited := os.environ.get("VITLAB_RUN_DIR"):
        return RunDir(inherited)
    run = RunDir(_given(options) or RUNS / agree(_default_name(configs, seed, resolved)))
    if launched_rank() > 0:  # rank 0 does the checks
        return run
    if run.exists():
        _check_can_start(run, options)
    elif run.path.exists() and not run.path.is_dir():
        raise UsageError(f"`--run_dir` must be a directory, and {run.path} is a file")
    return run


def _check_can_start(run: RunDir, options: FitOptions) -> None:
    """Refuse to start in a directory that contains a run or other files."""
    if run.has_begun():
        if not options.overwrite:
            way_out = f"continue it with `{run.way_on}`, or delete it with --overwrite (in Python, overwrite=True)"
            raise UsageError(f"the run directory {run.path} exists; {way_out}")
        return
    if foreign := run.foreign():
        what = f"it contains {preview(foreign)}"
        raise UsageError(f"{run.path} is not a run directory: {what}; choose another --name or --run_dir")
    if not options.overwrite and not options.auto_resume and not is_restarted():
        way_out = "start the run with --auto_resume, or empty the directory with --overwrite"
        raise UsageError(f"an interrupted start left {run.path} without its config.yaml; {way_out}")


def _default_name(configs: list[str], seed: Any, resolved: str) -> str:
    """Return DATE_CONFIG_sSEED_HASH-RANDOM, the name of a run without --name; two of one second differ."""
    stem = re.sub(r"[^A-Za-z0-9.-]+", "-", Path(configs[-1]).stem)[:32] if configs else "run"
    digest = hashlib.sha256(resolved.encode()).hexdigest()[:4]
    return f"{datetime.datetime.now():%Y%m%d-%H%M%S}_{stem}_s{seed}_{digest}-{os.urandom(3).hex()}"


def _check_name(name: str) -> str:
    """Return ``name`` if it is a valid directory name.

    Raises:
        UsageError: The name is not valid.
    """
    if not NAME.fullmatch(name) or set(name) <= {"."}:
        raise UsageError(f'`--name` must be 1 to 64 of A-Z a-z 0-9 . _ -, got "{name}"; use --run_dir for a path')
    if name in ("last", "auto"):  # `vitlab test last`, `vitlab fit --resume auto`
        raise UsageError(
            f"`--name {name}` cannot be told from the word `{name}`; choose another name, or --run_dir {RUNS / name}"
        )
    if name in ("ablations", "slurm", ".launch"):
        raise UsageError(f"`--name {name}`: {RUNS / name} is where vitlab keeps what is no run; choose another name")
    return name
