"""The settings of a SLURM cluster and the batch script made from them.

submitit is not used: it submits a pickled Python function and pickles it again to requeue it, where this script is the
command that a user would type, can be read and submitted without vitlab, and stops a job that no attempt moves on.
"""

import dataclasses
import re
import shlex
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from vitlab.config.secret import SECRET
from vitlab.config.yaml_files import read_yaml
from vitlab.errors import UsageError, did_you_mean
from vitlab.shipped import find_file

TIME = re.compile(r"\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d+|\d+-\d+:\d\d|\d+-\d+:\d\d:\d\d")  # as sbatch takes it
OWN = {  # options of sbatch that the script sets itself, and where their values come from
    "nodes": "`nodes`",
    "cpus-per-task": "`cpus_per_task`",
    "time": "`time`",
    "signal": "`warn_seconds`",
    "job-name": "--name",
    "chdir": "the folder that you submit from, which holds the runs",
    **dict.fromkeys(("gpus", "gpus-per-node", "gpus-per-task", "ntasks", "ntasks-per-node"), "`gpus`"),
    **dict.fromkeys(("array", "error", "open-mode", "output", "no-requeue", "requeue"), "vitlab"),
}

EARLY = 60  # seconds that Slurm may warn before the time asked for (sbatch --signal)
ATTEMPTS = """\
# Where the run is, by the steps of its checkpoints, and how many attempts in a row of this job have not moved it.
job="${{SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}${{SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}}"
place() {{ grep -rhso '"step": *[0-9]*' --include=manifest.json {run} | sort | cksum; }}
stalled={folder}/.stalled-$job
before=$(place)
"""
CHECK = """\
# What only a node can know: it must see the folder and the files, and vitlab must start there. Else one line tells.
check() {{
    tell() {{ echo "vitlab: node ${{SLURMD_NODENAME:-$(hostname)}}: $1; nothing was started" >&2; exit 2; }}
    cd -- "$1" 2> /dev/null || tell "there is no folder $1, from which the job was submitted"
    for file in "${{@:2}}"; do [ -r "$file" ]{unless} || tell "cannot read $file, in $PWD"; done
    said=$({start} --version 2>&1) || tell "\\`{start}\\` does not start: ${{said##*$'\\n'}}"
}}
{run} || exit 2
"""
REQUEUE = """
# A rank that is warned before vitlab has begun, such as while Python starts on a slow disk, dies of the signal.
[ "$code" -eq "$((128 + $(kill -l USR1)))" ] && code=75
# Three attempts in a row without progress, as on a node that always hangs, end the job.
if [ "$code" -eq 75 ] && [ -z "$ended" ]; then
    [ "$(place)" = "$before" ] && echo >> "$stalled" || rm -f "$stalled"
    if [ "$(cat "$stalled" 2> /dev/null | wc -l)" -ge 3 ]; then
        rm -f "$stalled"
        echo "three attempts in a row saved no new step, so the job ends; see the log, then: sbatch {script}" >&2
        exit 1
    fi
else
    rm -f "$stalled"
fi
# A job that was cancelled stays cancelled, and one that Slurm pre-empted is requeued by Slurm. A task of an array is
# named by both numbers: one of them alone would requeue the whole array.
if [ "$code" -eq 75 ] && [ -z "$ended" ]; then
    scontrol requeue "$job" && exit 0
    echo "Slurm did not requeue the job; continue with: sbatch {script}" >&2
fi
exit "$code"
"""
SCRIPT = """\
#!/bin/bash
# {title}
# Written by `vitlab submit`. Submit it again to continue the run after its last checkpoint.
{header}
{setup}
# Requeued or submitted again, this command continues the same run with its configuration.
fit=(vitlab fit {fit})

{check}
# Slurm warns the ranks, which save and end with 75. This shell survives its own signal to see that code.
ended=
trap 'ended=1' TERM
{attempts}srun --cpus-per-task={cpus} --kill-on-bad-exit=0 --wait=300 \\
    "${{fit[@]}}" --trainer.devices={gpus} --trainer.num_nodes={nodes}
code=$?
{requeue}"""


@dataclasses.dataclass(frozen=True)
class Site:
    """The resources and options of a SLURM job.

    Args:
        time: Limit of one attempt, as sbatch takes it: minutes, hours:minutes:seconds, days-hours.
        nodes: Number of machines.
        gpus: GPUs per machine, one process each.
        gpu_type: Name of the GPU, where a cluster has several kinds.
        cpus_per_task: CPU cores per process, including the workers that decode its images.
        warn_seconds: Seconds between the warning and the limit; saving must fit in.
        sbatch: More options of sbatch by their long names, such as partition and account.
        setup: Lines of shell before training, such as ``module load cuda``.

    Raises:
        ValueError: A value is not one that sbatch takes, ``time`` is too short, or an option holds a secret.
    """

    time: str
    nodes: int = 1
    gpus: int = 1
    gpu_type: str | None = None
    cpus_per_task: int = 8
    warn_seconds: int = 120
    sbatch: dict[str, Any] = dataclasses.field(default_factory=dict)
    setup: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        if not isinstance(self.time, str) or not TIME.fullmatch(self.time):
            example = 'write it in quotes, as in time: "24:00:00" or "2-12:00:00"'
            raise ValueError(f"`time` must be a limit that sbatch takes, got {self.time!r}; {example}")
        for name in ("nodes", "gpus", "cpus_per_task", "warn_seconds"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"`{name}` must be a whole number of at least 1, got {value!r}")
        if _seconds(self.time) <= (least := 2 * self.warn_seconds + EARLY):  # else warned before it has trained
            raise ValueError(
                f"`time` must be more than twice `warn_seconds` plus {EARLY} s, as Slurm may warn early: more than "
                f"{least} s, got {self.time} and {self.warn_seconds}"
            )
        if self.gpu_type is not None and not re.fullmatch(r"[\w.-]+", str(self.gpu_type)):
            raise ValueError(f"`gpu_type` must be one word, got {self.gpu_type!r}")
        if not isinstance(self.sbatch, dict) or not isinstance(self.setup, list):
            raise ValueError("`sbatch` must hold names and values, and `setup` a list of shell lines")
        for name, value in self.sbatch.items():
            _check_option(str(name), value)
        for line in self.setup:
            if not isinstance(line, str) or "\n" in line:
                raise ValueError(f"`setup` must be a list of shell lines, got {line!r}")
            if SECRET.search(line):
                raise ValueError("`setup` must hold no secret: the script would contain it; export it in your shell")

    def header(self, name: str, log: Path, **more: Any) -> str:
        """Return the lines that sbatch reads, with ``more`` in place of its own options; None leaves one out."""
        kind = f"{self.gpu_type}:" if self.gpu_type else ""
        options = {
            "job-name": name,
            "nodes": self.nodes,
            "ntasks-per-node": self.gpus,
            "gpus-per-node": f"{kind}{self.gpus}",
            "cpus-per-task": self.cpus_per_task,
            "time": self.time,
            "output": log,
            "open-mode": "append",
            "signal": f"USR1@{self.warn_seconds}",
            "requeue": True,
            **{str(key).replace("_", "-"): value for key, value in self.sbatch.items()},
            **more,
        }
        options = {key: value for key, value in options.items() if value is not None}
        shown = {key: "" if value is True else f"={shlex.quote(str(value))}" for key, value in options.items()}
        return "\n".join(f"#SBATCH --{key}{value}" for key, value in shown.items())


def _seconds(time: str) -> int:
    days, dash, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if dash:  # days-hours[:minutes[:seconds]]
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    else:  # minutes, minutes:seconds, hours:minutes:seconds
        hours, minutes, seconds = (0, *parts, 0)[:3] if len(parts) < 3 else parts
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _check_option(name: str, value: Any) -> None:
    option = name.replace("_", "-")
    if option in OWN:
        raise ValueError(f"`sbatch.{name}` is set by {OWN[option]}; remove it from sbatch")
    if not re.fullmatch(r"[a-z][a-z0-9-]+", option):
        raise ValueError(f"`sbatch` takes the long names of options without dashes, got {name!r}")
    if SECRET.search(option):
        raise ValueError(f"`sbatch.{name}` looks like a secret: the script would contain it")
    if value is not True and (not isinstance(value, str | int) or isinstance(value, bool) or "\n" in str(value)):
        raise ValueError(f"`sbatch.{name}` must be a word, a number or true, got {value!r}")


def read_site(path: str, **given: Any) -> Site:
    """Read the settings of a cluster; values of the command line override the file's.

    Raises:
        UsageError: There is no such file, a key is unknown, or a value is wrong.
    """
    content = read_yaml(find_file(path, "--slurm"), "--slurm")
    known = [field.name for field in dataclasses.fields(Site)]
    for key in content:
        if key not in known:
            raise UsageError(f"`--slurm {path}`: there is no key `{key}`{did_you_mean(str(key), known)}")
    values = {**content, **{key: value for key, value in given.items() if value is not None}}
    if "time" not in values:
        raise UsageError(f'`--slurm {path}` must have a `time`, as in time: "24:00:00"; or give --time 24:00:00')
    try:
        return Site(**values)
    except ValueError as error:
        raise UsageError(f"`--slurm {path}`: {error}") from error


def ask_sbatch(script: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Submit a batch script and return what sbatch answered, with a code other than 0 if the job can never run.

    Slurm itself takes a job that asks for more than any node has, where ``EnforcePartLimits`` is not set, and lets it
    wait for ever; ``--test-only`` tells.
    """
    words = *words, str(script)
    tested = subprocess.run(["sbatch", "--test-only", *words], capture_output=True, text=True, check=False)
    if tested.returncode:
        return tested
    return subprocess.run(["sbatch", "--parsable", *words], capture_output=True, text=True, check=False)


def attempts_text(run: Path, folder: Path) -> str:
    """Return the shell lines that see whether an attempt moves the run or the cells below ``run``."""
    return ATTEMPTS.format(run=shlex.quote(str(run)), folder=shlex.quote(str(folder)))


def check_text(site: Site, start: Sequence[str], files: Iterable[str | Path], run: Path | None = None) -> str:
    """Return the shell lines that end a job with 2 and one line where a node lacks what it needs.

    Args:
        site: What the job asks of the cluster; a task on each node checks where there are several.
        start: The command that is vitlab.
        files: What the job reads, each relative to the folder of submission or absolute.
        run: The run directory; once that has a configuration, the files are not read again.
    """
    unless = f" || [ -r {shlex.quote(str(run / 'config.yaml'))} ]" if run else ""
    words = " ".join(['"${SLURM_SUBMIT_DIR:-$PWD}"', *(shlex.quote(str(file)) for file in files)])
    many = f"srun --ntasks={site.nodes} --ntasks-per-node=1 \\\n"
    many += f'    bash -c "$(declare -f check); check \\"\\$@\\"" check {words}'
    alone = f"(check {words})"
    return CHECK.format(start=shlex.join(start), unless=unless, run=many if site.nodes > 1 else alone)


def script_text(
    site: Site, fit: list[str], script: Path, extra_path: str | None, run: Path, files: Iterable[str | Path] = ()
) -> str:
    """Return the batch script of a run.

    Args:
        site: What the job asks of the cluster.
        fit: Arguments of ``vitlab fit``, the same at every attempt.
        script: Where the script will lie, relative to the directory of submission.
        extra_path: Folder of the ``vitlab`` command where the search path lacks it.
        run: The run directory, whose checkpoints tell whether an attempt has made progress.
        files: What the run reads, each relative to the directory of submission or absolute.
    """
    lines = [f"export PATH={shlex.quote(extra_path)}:$PATH"] if extra_path else []
    setup = "\n".join(["", *lines, *site.setup, ""]) if lines or site.setup else ""
    return SCRIPT.format(
        title=f"{script.stem}: {site.nodes} x {site.gpus} GPUs, a process each",
        header=site.header(script.stem, script.with_name(f"{script.stem}-%j.out")),
        setup=setup,
        fit=shlex.join(fit),
        check=check_text(site, ["vitlab"], files, run),
        cpus=site.cpus_per_task,
        gpus=site.gpus,
        nodes=site.nodes,
        attempts=attempts_text(run, script.parent),
        requeue=REQUEUE.format(script=script),
    )
