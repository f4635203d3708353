"""Which run directory a training uses, and where a file that is made of a run goes."""

import os
from pathlib import Path
from typing import Any, Protocol

from vitlab.errors import UsageError
from vitlab.runs.directory import RUNS, RunDir, check_name, default_name, find_directory
from vitlab.runs.launch import agree, launched_rank

SUFFIXES = {"safetensors": ".safetensors", "timm": ".timm.safetensors", "onnx": ".onnx", "pt2": ".pt2"}  # of exports


class Options(Protocol):
    """What names a run; see :class:`vitlab.config.options.FitOptions`."""

    name: str | None
    run_dir: str | None
    resume: str | None
    init_from: str | None
    overwrite: bool


def resumed_run(options: Options) -> RunDir:
    """Return the run that ``--resume`` is to continue."""
    for flag in ("init_from", "overwrite"):
        if getattr(options, flag):
            raise UsageError(f"`--resume` continues a run as it is; leave out --{flag}")
    if options.resume and options.resume != "auto":
        return find_directory(options.resume)
    if not options.name and not options.run_dir:
        raise UsageError("`--resume` needs to know the run: `--resume RUN`, `--resume last`, or --name")
    run = RunDir(options.run_dir or RUNS / check_name(options.name or ""))
    if not run.config.is_file():
        raise UsageError(f"`--resume`: there is no run in {run.path}; leave --resume out to start one")
    return run


def choose_run(options: Options, configs: list[str], seed: Any, resolved: str) -> RunDir:
    """Return the directory of a new run; every process of one launch returns the same."""
    if inherited := os.environ.get("VITLAB_RUN_DIR"):
        return RunDir(inherited)
    if options.name and options.run_dir:
        raise UsageError("give --name or --run_dir, not both")
    if options.run_dir:
        run = RunDir(options.run_dir)
    elif options.name:
        run = RunDir(RUNS / check_name(options.name))
    else:
        run = RunDir(RUNS / agree(default_name(configs, seed, resolved)))
    if launched_rank() > 0:  # the first process sees to the rest
        return run
    if run.exists():
        if not options.overwrite:
            way_out = f"continue it with `--resume {run.path}`, or delete it with --overwrite"
            raise UsageError(f"the run directory {run.path} exists; {way_out}")
        if not run.config.is_file():
            raise UsageError(f"`--overwrite` deletes run directories only, and {run.path} holds no config.yaml")
    elif run.path.exists() and not run.path.is_dir():
        raise UsageError(f"`--run_dir` must be a directory, and {run.path} is a file")
    return run


def export_path(run: RunDir, checkpoint: Path, form: str, output: str | os.PathLike[str] | None = None) -> Path:
    """Return the file that a network is exported to; refuse a suffix that is not the form's."""
    path = Path(output or run.path / "export" / f"{checkpoint.stem}{SUFFIXES[form]}")
    suffix = f".{SUFFIXES[form].split('.')[-1]}"
    if path.suffix != suffix:
        raise UsageError(f"`--output` must end with {suffix}, got {path}")
    return path
