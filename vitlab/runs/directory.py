"""The run directory: one folder holds all that a run is and leaves."""

import datetime
import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from vitlab.errors import UsageError, did_you_mean
from vitlab.runs.manifest import check_whole, first_whole
from vitlab.runs.records import RECORDS, DataFacts, ModelFacts, Record, Results, read_json, read_record

RUNS = Path("runs")
LOCK = ".lock"  # there while a process trains in the directory
OWN = {  # what vitlab and the loggers write into a run directory
    *("config.yaml", "overrides.yaml", "run.json", "data.json", "model.json", "param_groups.json", "results.json"),
    *("metrics.jsonl", "train.log", "done.json", "checkpoints", "weights", "predictions", "analysis", "look.html"),
    *("wandb", "lightning_logs", "export", "trained_on.npy"),
}
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class RunGone(OSError):
    """The directory of a run was deleted, moved or exchanged while the run trained."""


class RunDir:
    """A run directory and the files in it.

    Args:
        path: The directory; need not exist yet.

    Example:
        >>> run = RunDir("runs/first")
        >>> run.record["status"], run.model["grid"]
        ('done', [4, 4])
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.weights = self.path / "weights"
        self._place: tuple[int, int] | None = None

    def exists(self) -> bool:
        """Return whether the directory exists and holds something."""
        return self.path.is_dir() and any(path.name != LOCK for path in self.path.iterdir())

    def check_there(self) -> None:
        """Raise :class:`RunGone` unless the directory is the one that was here at the first call."""
        try:
            status = self.path.stat()
        except OSError as error:
            raise RunGone(f"the run directory {self.path} has gone while the run trained") from error
        place = status.st_dev, status.st_ino
        if place != (self._place or place):
            raise RunGone(f"the run directory {self.path} has been exchanged for another while the run trained")
        self._place = place

    def foreign(self) -> list[str]:
        """Return what lies in the directory and no run has written."""
        names = [path.name.removesuffix(".damaged") for path in self.path.iterdir()]
        return sorted(name for name in names if name not in OWN and not name.startswith("."))

    def has_begun(self) -> bool:
        """Return whether there is a run that can go on: a configuration, or at least a checkpoint."""
        return self.config.is_file() or self.has_checkpoint()

    def has_checkpoint(self) -> bool:
        """Return whether there is something to continue from."""
        return any((self.checkpoints / name).is_file() for name in ("last.ckpt", "previous.ckpt"))

    def last_checkpoint(self) -> Path | None:
        """Return the newest whole checkpoint to continue from; None if the run was stopped before it had one."""
        try:
            return first_whole([self.checkpoints / name for name in ("last.ckpt", "previous.ckpt", "best.ckpt")])
        except UsageError as error:
            anew = f"`vitlab fit --config {self.config} --run_dir {self.path} --overwrite`"
            raise UsageError(f"{error}; start the run anew: {anew}") from error

    def checkpoint(self) -> Path:
        """Return the checkpoint to use: of the best epoch, or the last one; of a run that kept weights alone, these."""
        path = first_whole([self.checkpoints / name for name in ("best.ckpt", "last.ckpt", "previous.ckpt")])
        weights = [self.weights / name for name in ("best.safetensors", "last.safetensors")]
        path = path or next((file for file in weights if file.is_file()), None)
        if path is None:
            raise UsageError(f"{self.path} has no checkpoint yet: it was stopped before its first epoch ended")
        return path

    @property
    def record(self) -> Record:
        """How the run was started and how it goes; empty before its start."""
        return read_record(self.path / "run.json", Record)

    @property
    def results(self) -> Results:
        """What was measured; empty where nothing was."""
        return read_record(self.path / "results.json", Results)

    def measured(self, split: str) -> dict[str, Any]:
        """Return what was measured on a split under the run's own conditions; empty if nothing was."""
        return dict(self.results).get(split) or {}  # type: ignore[return-value]

    @property
    def data(self) -> DataFacts:
        """What the run is trained on; every run has it once its data is set up, and one without it is refused."""
        return self._need("data.json", DataFacts)

    @property
    def model(self) -> ModelFacts:
        """Sizes and costs of the network; every run has them once its data is set up, one without is refused."""
        return self._need("model.json", ModelFacts)

    def _need(self, file: str, kind: type) -> Any:
        if content := read_record(self.path / file, kind):
            return content
        raise UsageError(f"{self.path} has no {file}: copy it from where the run was trained, or train it again")

    def read(self, file: str) -> dict[str, Any]:
        """Return the content of another JSON file, empty if there is none."""
        return read_json(self.path / file)

    def write(self, file: str, content: Any) -> None:
        """Write a JSON file in one step, so that no reader and no crash sees half of it."""
        write_text(self.path / file, json.dumps(content, indent=1, default=str) + "\n", sync=True)

    def update(self, file: str, **values: Any) -> None:
        """Change some values of a JSON file."""
        self.write(file, {**self.read(file), **values})

    def set_aside_damaged(self) -> list[str]:
        """Rename the records that cannot be read, and return what is wrong with each: who trains writes them anew."""
        told = []
        for file, kind in RECORDS.items():
            path = self.path / file
            try:
                read_record(path, kind)
            except UsageError as error:
                os.replace(path, path.with_name(f"{file}.damaged"))
                told.append(f"{str(error).partition('; ')[0]}; it is kept as {file}.damaged")
        return told

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl; a last line that a crash cut off is left out."""
        lines = self.metrics.read_text().splitlines() if self.metrics.is_file() else []
        return [json.loads(line) for line in lines if line.endswith("}")]


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a place beside ``path``; what is written there takes its name in one step, or goes if writing fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{os.getpid()}.{path.name}")  # the suffix stays: some libraries go by it
    try:
        yield beside
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def write_text(path: Path, text: str, sync: bool = False) -> None:
    """Write a text file in one step, with ``sync`` in one that a power failure cannot undo by half."""
    with atomic_write(path) as beside, beside.open("w") as file:
        file.write(text)
        if sync:
            file.flush()
            os.fsync(file.fileno())


def find_run(text: str) -> tuple[RunDir, Path]:
    """Return the run and the checkpoint that a user means by a run directory, its name, a checkpoint, or ``last``.

    Example:
        >>> run, checkpoint = find_run("first")
        >>> checkpoint.name
        'best.ckpt'
    """
    path = Path(text)
    if path.is_file():
        run = RunDir(path.parent.parent)
        if not run.config.is_file():
            way_on = "say what it is a checkpoint of: --config FILE --ckpt_path FILE"
            raise UsageError(f"{path} lies in no run directory: there is no {run.config}; {way_on}")
        check_whole(path)
        return run, path
    run = find_directory(text)
    return run, run.checkpoint()


def find_directory(text: str) -> RunDir:
    """Return the run that a user means by a directory, a name in ``runs/``, or ``last``."""
    if text == "last":
        return last_run()
    others = ""
    for directory in (Path(text), RUNS / text):
        if RunDir(directory).has_begun():
            return RunDir(directory)
        if directory.is_dir() and (foreign := RunDir(directory).foreign()):
            others = f"; {directory} holds {foreign[0]} and no run: start one elsewhere with --name"
        elif directory.is_dir():
            way_on = f"`vitlab fit --config FILE --run_dir {directory} --auto_resume` starts it"
            raise UsageError(f"{directory} holds no run: its start was interrupted, or its files are gone; {way_on}")
    names = [run.path.name for run in all_runs()]
    hint = did_you_mean(text, names)
    raise UsageError(
        f'no run or checkpoint called "{text}"{hint} (newest in {RUNS}/: {", ".join(names[-3:]) or "none yet"}){others}'
    )


def all_runs() -> list[RunDir]:
    """Return the runs in ``runs/``, oldest first."""
    runs = [RunDir(path.parent) for path in RUNS.glob("*/run.json")]
    return sorted(runs, key=_started)


def _started(run: RunDir) -> str:
    with suppress(UsageError):  # a damaged file of one run is in no other's way
        return run.record.get("started", "")
    return ""


def last_run() -> RunDir:
    """Return the run that was started last."""
    runs = all_runs()
    if not runs:
        raise UsageError(f"there is no run in {RUNS}/ yet; start one with `vitlab fit --config configs/t2t.yaml`")
    return runs[-1]


def default_name(configs: list[str], seed: Any, resolved: str) -> str:
    """Return DATE_CONFIG_sSEED_HASH for a run that was given no name."""
    stem = re.sub(r"[^A-Za-z0-9.-]+", "-", Path(configs[-1]).stem)[:32] if configs else "run"
    digest = hashlib.sha256(resolved.encode()).hexdigest()[:4]
    return f"{datetime.datetime.now():%Y%m%d-%H%M%S}_{stem}_s{seed}_{digest}"


def check_name(name: str) -> str:
    """Return ``name`` if it can be a directory of its own."""
    if not NAME.fullmatch(name) or set(name) <= {"."}:
        raise UsageError(f'`--name` must be 1 to 64 of A-Z a-z 0-9 . _ -, got "{name}"; use --run_dir for a path')
    return name
