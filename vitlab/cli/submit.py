"""``vitlab submit``: train on a SLURM cluster through a readable batch script."""

import hashlib
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from vitlab.config.arguments import (
    CommandParser,
    KeepLines,
    config_paths,
    flags_of,
    grid_as_typed,
    read_configs,
    refuse_unknown,
    values_of,
)
from vitlab.config.environment import with_environment
from vitlab.config.keys import flatten_as_typed
from vitlab.config.options import FitOptions, TypedOptions, options_parser
from vitlab.config.secret import SECRET
from vitlab.errors import UsageError, did_you_mean, trust_words
from vitlab.jobs.train.choose import NAME, choose_run, run_to_continue
from vitlab.runs.atomic import write_text
from vitlab.runs.directory import RUNS, RunDir

FOLDER = RUNS / "slurm"  # scripts and logs lie beside the run directory, which must be new
COUNTS = {"trainer.devices": "--gpus", "trainer.num_nodes": "--nodes"}

EXAMPLES = """examples:
  vitlab submit fit --config imagenet/t2t_vit_14 --slurm slurm.yaml --dry_run
  vitlab submit fit --resume NAME --slurm slurm.yaml --time 12:00:00
"""


def main(argv: list[str]) -> int:
    """Run ``vitlab submit`` and return its exit code."""
    parser = CommandParser(
        "vitlab submit",
        usage="vitlab submit fit --slurm FILE [options] [arguments of vitlab fit]",
        description="Write a SLURM batch script that runs `vitlab fit`, and submit it. At its time limit or when "
        "preempted, the run saves, is requeued, and continues in the same directory.",
        epilog=EXAMPLES + "\nEvery other argument goes to `vitlab fit`.",
        formatter_class=KeepLines,
    )
    parser.add_argument("command", metavar="fit", help="what to run")
    parser.add_argument(
        "--slurm", metavar="FILE", required=True, help="cluster settings, as in configs/cluster/slurm.yaml"
    )
    parser.add_argument("--nodes", type=int, help="number of machines (default: the file's)")
    parser.add_argument("--gpus", type=int, help="GPUs per machine, one process each (default: the file's)")
    parser.add_argument("--time", help="limit of one attempt, such as 24:00:00 or 2-12:00:00 (default: the file's)")
    parser.add_argument("--dry_run", action="store_true", help="print the script; write and submit nothing")
    options, rest = parser.parse_known_args(argv)
    if options.command != "fit":
        raise UsageError(
            f'`vitlab submit` submits fit, got "{options.command}"{did_you_mean(options.command, ["fit"])}'
        )
    from vitlab.jobs.sbatch import read_site, script_text

    site = read_site(options.slurm, nodes=options.nodes, gpus=options.gpus, time=options.time)
    run, words, files = plan(rest, site.nodes * site.gpus)
    script = FOLDER / f"{_stem(run)}.sbatch"
    text = script_text(site, words, script, _folder_of_vitlab(), run, files)
    if options.dry_run:
        sys.stdout.write(text)
        return 0
    return hand_over(text, script, run)


def plan(args: list[str], processes: int) -> tuple[Path, list[str], list[Path]]:
    """Check the arguments of ``vitlab fit`` and their values; nothing is trained.

    Returns:
        The run directory, the arguments that start the run or continue it, and the files of the user that it reads.
    """
    options, rest = options_parser().parse_known_args(args, TypedOptions())
    _check_arguments(options, rest)
    refuse_unknown(rest)
    more = trust_words()
    more += ["--deadline", f"{options.deadline:g}"] if options.deadline != FitOptions.deadline else []
    more += ["--quiet"] if options.quiet else []
    from vitlab.config.yaml_files import read_yaml
    from vitlab.jobs.train.build import check_job

    paths = config_paths(rest)
    contents = read_configs(rest)
    begun = run_to_continue(options) if options.resume or options.auto_resume else None
    stored = [read_yaml(begun.config)] if begun and begun.config.is_file() else []
    _check_batch(rest, [*stored, *contents] if options.resume else [*contents, *stored], processes)
    check_job(with_environment(rest, begun is not None)[0], options)
    if begun and options.resume:
        return begun.path, ["--resume", str(begun.path), *rest, *more], [begun.config]
    seed = [*(c["seed_everything"] for c in contents if "seed_everything" in c), *values_of(rest, "seed_everything")]
    run = begun or choose_run(options, paths, seed[-1] if seed else 0, repr((rest, contents)))
    if run.path == FOLDER:
        raise UsageError(f"`--name`: {FOLDER} holds scripts and logs; choose another name")
    start = ["--run_dir", options.run_dir] if options.run_dir else ["--name", run.path.name]
    weights = {"init_from": options.init_from, "resize": options.resize, "init_grid": grid_as_typed(options.init_grid)}
    start += [word for flag, value in weights.items() if value for word in (f"--{flag}", value)]
    named = [Path(text).expanduser() for text in (*paths, options.init_from) if text]
    own = [path for path in named if path.is_file()]
    return run.path, [*rest, *start, "--auto_resume", *more], own


def _check_arguments(options: TypedOptions, rest: list[str]) -> None:
    if options.overwrite:
        raise UsageError("`--overwrite` would delete the run each time it is requeued; delete the directory yourself")
    if options.help:
        raise UsageError("`vitlab fit --help` explains the arguments of a run, `vitlab submit --help` the others")
    for key in (flag.name for flag in flags_of(rest)):
        if key in COUNTS:
            raise UsageError(f"`--{key}` comes from {COUNTS[key]}; leave it out")
        if SECRET.search(key):
            raise UsageError(f"`--{key}` looks like a secret: the script would contain it; export it in your shell")


def _check_batch(rest: list[str], contents: list[dict[str, Any]], processes: int) -> None:
    sizes = [size for content in contents if (size := flatten_as_typed(content).get("data.batch_size"))]
    sizes += values_of(rest, "data.batch_size", "data.init_args.batch_size")
    if sizes and str(sizes[-1]).isdigit() and int(sizes[-1]) % processes:
        raise UsageError(
            f"`data.batch_size` is the global batch and must be divisible by the number of processes, got {sizes[-1]} "
            f"and {processes} (nodes x GPUs)"
        )


def _stem(run: Path) -> str:
    """Return the name of a run's script; outside ``runs/``, and for an unusual name, with a hash of the path."""
    path = run.resolve()
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", path.name)
    if path.parent == RUNS.resolve() and NAME.fullmatch(path.name):
        return stem
    return f"{stem[:57]}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:6]}"


def _folder_of_vitlab() -> str | None:
    """Return the folder of the ``vitlab`` command if PATH lacks it."""
    folder = Path(sys.executable).parent
    return str(folder) if shutil.which("vitlab") is None and (folder / "vitlab").is_file() else None


def hand_over(text: str, script: Path, run: Path) -> int:
    """Write the script, give it to sbatch, and return the exit code."""
    from vitlab.jobs.sbatch import ask_sbatch

    if shutil.which("sbatch") is None:
        raise UsageError("there is no sbatch here; submit on a login node, or print the script with --dry_run")
    if script.is_file() and not RunDir(run).has_begun():
        raise UsageError(f"{run.name} was submitted before; resubmit with `sbatch {script}`, or choose another --name")
    known = "continues" if RunDir(run).exists() else "will be"
    script.parent.mkdir(parents=True, exist_ok=True)
    before = script.read_text() if script.is_file() else None  # of a job that may still wait
    write_text(script, text)
    done = ask_sbatch(script)
    if done.returncode:
        script.unlink() if before is None else write_text(script, before)
        sys.stderr.write(f"vitlab: sbatch refused the job: {' '.join(done.stderr.split())}\n")
        return 1
    job = done.stdout.strip().split(";")[0]  # number;cluster where there are several
    sys.stdout.write(
        f"job     {job}, requeued until the run is done; `scancel {job}` stops it\n"
        f"run     {known} {run}\n"
        f"log     {script.with_name(f'{script.stem}-{job}.out')}\n"
        f"script  {script}\n"
    )
    return 0
