"""The run directory: one folder with everything that belongs to a run."""

import json
import os
import shlex
import socket
from collections.abc import Mapping
from contextlib import chdir, suppress
from pathlib import Path
from typing import Any, cast

from vitlab.errors import UsageError, trusting
from vitlab.objects import as_yaml
from vitlab.runs.atomic import alone_in, write_json, write_text
from vitlab.runs.fence import Fence, RunGone
from vitlab.runs.manifest import first_whole, is_within_step
from vitlab.runs.matching import is_there
from vitlab.runs.records import (
    MEASURED_BY,
    RECORDS,
    Record,
    Results,
    read_json,
    read_record,
    with_policy,
)
from vitlab.runs.standing import CHOICE, Standing, standing

RUNS = Path("runs")
LOCK = ".lock"  # exists while a process trains in the directory
OWN = {  # what vitlab and the loggers write into a run directory
    *("config.yaml", "overrides.yaml", "run.json", "data.json", "model.json", "param_groups.json", "results.json"),
    *("metrics.jsonl", "train.log", "done.json", "checkpoints", "weights", "predictions", "analysis", "look.html"),
    *("wandb", "lightning_logs", "export", "trained_on.npy", "parts.py", "openings.jsonl", "moments"),
}


class RunDir:
    """A run directory and the files in it.

    Args:
        path: The directory, which may not exist yet.

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
        self.fence: Fence | None = None  # of the process that trains here
        self._place: tuple[int, int] | None = None

    @classmethod
    def around(cls, file: Path) -> "RunDir":
        """Return the run, if it is one, in whose folder of checkpoints, weights or exports a file lies.

        Example:
            >>> RunDir.around(Path("runs/first/checkpoints/best.ckpt")).path, RunDir.around(Path("best.ckpt")).path
            (PosixPath('runs/first'), PosixPath('..'))
        """
        folder = file.parent
        return cls(folder / ".." if folder.name in ("", "..") else folder.parent)  # within a run, a path may be short

    @property
    def name(self) -> str:
        """The name of the directory, also of one that is named by ``.``.

        Example:
            >>> RunDir("runs/first").name, RunDir("runs/first/../second").name
            ('first', 'second')
        """
        return os.path.basename(os.path.abspath(self.path))

    @property
    def typed(self) -> str:
        """The directory as a command line takes it, for messages: in quotes if it has spaces.

        Example:
            >>> RunDir("runs/first").typed, RunDir("my runs/first").typed
            ('runs/first', "'my runs/first'")
        """
        return shlex.quote(str(self.path))

    @property
    def way_on(self) -> str:
        """The command that goes on with the run, with what it trusts.

        Example:
            >>> RunDir("my runs/first").way_on
            "vitlab fit --resume 'my runs/first'"
        """
        return trusting(f"vitlab fit --resume {self.typed}", self.path)

    def predictions(self, split: str) -> Path:
        """Return the place of the table of predictions on a split, which may not exist."""
        return self.path / "predictions" / f"{split}.parquet"

    def exists(self) -> bool:
        """Return whether the directory exists and is not empty."""
        try:
            return any(path.name != LOCK for path in self.path.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return False

    def check_there(self) -> None:
        """Raise :class:`RunGone` unless this is the directory of the first call, and still this process's.

        Raises:
            RunGone: It was deleted or replaced.
            OSError: The file system does not answer, so this is unknown.
        """
        try:
            status = self.path.stat()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise RunGone(f"the run directory {self.path} disappeared during training") from error
        place = status.st_dev, status.st_ino
        if place != (self._place or place):
            raise RunGone(f"the run directory {self.path} was replaced by another during training")
        self._place = place
        if self.fence:
            self.fence.check()

    def take_over(self) -> None:
        """Make this process the one that writes here: from now on, earlier attempts to train write nothing more."""
        record = dict(self.record)
        self.fence = Fence(self.path)
        self.fence.take_over({**record, "host": socket.gethostname(), "pid": os.getpid()})

    def foreign(self) -> list[str]:
        """Return the names of files in the directory that no run writes."""
        names = [path.name.removesuffix(".damaged") for path in self.path.iterdir()]
        return sorted(name for name in names if name not in OWN and not name.startswith("."))

    def has_begun(self) -> bool:
        """Return whether there is a run to resume: a configuration, or at least a checkpoint."""
        return is_there(self.config) or self.has_checkpoint()

    def has_checkpoint(self) -> bool:
        """Return whether there is a checkpoint to resume from."""
        return any(is_there(self.checkpoints / name) for name in ("last.ckpt", "previous.ckpt"))

    def last_checkpoint(self) -> Path | None:
        """Return the newest intact checkpoint to resume from; None if the run stopped before it had one.

        The best may have been saved within an accumulated step, without the gradient of the batches before.

        Raises:
            UsageError: There are checkpoints, and none is intact.
        """
        try:
            paths = [self.checkpoints / name for name in ("last.ckpt", "previous.ckpt", "best.ckpt")]
            return first_whole([path for path in paths if not is_within_step(path)])
        except UsageError as error:
            words = f"vitlab fit --config {shlex.quote(str(self.config))} --run_dir {self.typed} --overwrite"
            raise UsageError(f"{error}; start the run again: `{trusting(words)}`") from error

    def checkpoint(self) -> Path:
        """Return the checkpoint to use: the best, else the last; the weights of a run that kept only these.

        Raises:
            UsageError: There is none, or none is intact.
        """
        path = first_whole([self.checkpoints / f"{name}.ckpt" for name in CHOICE])
        weights = [self.weights / name for name in ("best.safetensors", "last.safetensors")]
        path = path or next((file for file in weights if is_there(file)), None)
        if path is None:
            raise UsageError(self._why_no_checkpoint())
        return path

    def _why_no_checkpoint(self) -> str:
        """Return a sentence on why there is none, as far as configuration and status tell."""
        import yaml  # not for the help of a command

        config = None
        with suppress(yaml.YAMLError, UnicodeDecodeError):  # a damaged one does not tell
            config = yaml.safe_load(self.config.read_text()) if is_there(self.config) else None
        if isinstance(config, dict) and (config.get("trainer") or {}).get("enable_checkpointing") is False:
            return f"{self.path} has no checkpoint: it was trained with `trainer.enable_checkpointing=false`"
        if self.record.get("status") == "done":
            return f"{self.path} has no checkpoint any more: the run is done, and its files were removed"
        return f"{self.path} has no checkpoint: it was stopped before its first epoch ended, or its files were removed"

    @property
    def record(self) -> Record:
        """How the run was started and its status; empty before its start."""
        return read_record(self.path / "run.json")

    @property
    def stored(self) -> dict[str, Any]:
        """The content of ``results.json``, whichever checkpoint it was measured with; empty if there is none."""
        found: dict[str, Any] = read_record(self.path / "results.json")
        if "variations" in found:
            found["variations"] = [with_policy(one) for one in found["variations"]]
        return found

    @property
    def results(self) -> Results:
        """The stored results of checkpoints that lie there now; the others are in ``stale``, each with its reason."""
        found = self.stored
        variations: list[dict[str, Any]] = found.pop("variations", [])
        kept: list[dict[str, Any]] = []
        stale: list[dict[str, Any]] = []
        for split in MEASURED_BY:
            if split in found and (now := self.standing(split, found[split])).is_stale:
                stale.append({"split": split, **found.pop(split), "why": now.text})
        for one in variations:
            now = self.standing(one["split"], one)
            (stale if now.is_stale else kept).append({**one, **({"why": now.text} if now.is_stale else {})})
        found |= {name: rows for name, rows in (("variations", kept), ("stale", stale)) if rows}
        return cast(Results, found)

    def measured(self, split: str) -> dict[str, Any]:
        """Return the results on a split under the run's own conditions; empty if there are none or they are stale."""
        result: dict[str, Any] = self.stored.get(split) or {}
        return {} if not result or self.standing(split, result).is_stale else result

    def standing(self, split: str, result: Mapping[str, Any] | None = None, read: bool = True) -> Standing:
        """Return whether a result on a split belongs to the present weights; default: the stored one.

        Args:
            split: The split.
            result: The result; None for the stored one.
            read: Whether to read a checkpoint that cannot be told by its size and time.

        Example:
            >>> RunDir("runs/first").standing("val").kind
            'current'
        """
        result = self.stored.get(split) if result is None else result
        flags = [_flag(key, value) for key, value in (result or {}).get("overrides", {}).items()]
        flags += [] if split in MEASURED_BY else ["--with_training_images"]
        command = "validate" if split.startswith("val") else "test"
        again = " ".join(["vitlab", command, self.typed, *map(shlex.quote, flags)])
        return self._compared(result or {}, trusting(again), read)

    def note(self, analysis: str) -> tuple[dict[str, Any], Standing]:
        """Return what an analysis has noted, empty if it is not done, and whether it belongs to the present weights."""
        note = self.read("analysis/notes.json").get(analysis) or {}
        if "note" not in note:  # not done, or known not to apply to the network
            return note, Standing("current")
        return note, self._compared(note, trusting(f"vitlab analyze {analysis} {self.typed}"))

    def _compared(self, result: Mapping[str, Any], again: str, read: bool = True) -> Standing:
        return standing(self.path, result, again, read)  # `AtCheckpoint` asks otherwise

    @property
    def data(self) -> dict[str, Any]:
        """Facts about the data, see :class:`~vitlab.runs.records.DataFacts`; a run without them is refused.

        Every run writes them once its data is set up.
        """
        return self._need("data.json")

    @property
    def model(self) -> dict[str, Any]:
        """Sizes and costs of the network, see :class:`~vitlab.runs.records.ModelFacts`; refused as :attr:`data` is."""
        return self._need("model.json")

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameters with their learning rates and weight decays, as the optimizer has them; empty if unknown."""
        path = self.path / "param_groups.json"
        return json.loads(path.read_text()) if path.is_file() else []

    def _need(self, file: str) -> Any:
        if content := read_record(self.path / file):
            return content
        raise UsageError(f"{self.path} has no {file}: copy it from where the run was trained, or train it again")

    def read(self, file: str) -> dict[str, Any]:
        """Return the content of any other JSON file; empty if there is none."""
        return read_json(self.path / file)

    def write(self, file: str, content: Any) -> None:
        """Write a JSON file atomically, so that no reader and no crash sees half of it."""
        write_json(self.path / file, content, self.fence)

    def write_text(self, file: str, text: str) -> None:
        """Write a text file atomically, if this process may write."""
        write_text(self.path / file, text, sync=True, fence=self.fence)

    def update(self, file: str, **values: Any) -> None:
        """Change some values of a JSON file; of several processes, one after another."""
        if self.fence:
            self.check_there()  # what was removed is written again first
        with alone_in((self.path / file).parent):
            self.write(file, {**self.read(file), **values})

    def damaged(self) -> dict[str, str]:
        """Return by file what is wrong with the records that cannot be read."""
        found = {}
        for file in RECORDS:
            try:
                read_record(self.path / file)
            except UsageError as error:
                found[file] = str(error).partition("; ")[0]
        return found

    def set_aside_damaged(self) -> list[str]:
        """Rename unreadable records, which training rewrites, and return what is wrong with each."""
        found = self.damaged()
        for file in found:
            os.replace(self.path / file, self.path / f"{file}.damaged")
        return [f"{why}; it is kept as {file}.damaged" for file, why in found.items()]

    def append_row(self, row: dict[str, Any]) -> None:
        """Append a row to metrics.jsonl, if this process may write."""
        self.check_there()
        if self.fence:
            self.fence.append(json.dumps(row))
        else:
            with self.metrics.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def drop_later_rows(self, known: int | None, step: int) -> None:
        """Cut metrics.jsonl to complete rows that are not later than a checkpoint, whose steps are repeated.

        Args:
            known: Bytes that the file had at the checkpoint; None if unknown. Somebody may have removed it since.
            step: Step of the checkpoint; no row of a later one stays.
        """
        own = self.metrics.read_bytes() if not self.fence and is_there(self.metrics) else b""
        text = self.fence.read_rows() if self.fence else own
        size = text.rfind(b"\n") + 1
        if known is not None and text[:known].endswith(b"\n" if known else b""):  # otherwise the file was edited
            size = min(size, known)
        start = 0
        for line in text[:size].splitlines(keepends=True):
            if _step_of(line) > step:
                size = start
                break
            start += len(line)
        if size < len(text) and self.fence:
            self.fence.cut_rows(size)
        elif size < len(text):
            os.truncate(self.metrics, size)

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl, without a last line that a crash truncated."""
        lines = self.metrics.read_text().splitlines() if is_there(self.metrics) else []
        return [json.loads(line) for line in lines if line.endswith("}")]


class Here:
    """The working directory of the program when an object was made, which stays the same object in another one.

    Example:
        >>> here = Here()
        >>> here.reached(Path("runs/first"))
        PosixPath('runs/first')
    """

    def __init__(self) -> None:
        self._folder = Path.cwd()

    def reached(self, path: Path) -> Path:
        """Return a relative path as it is, and as an absolute one once the program is in another directory."""
        return path if Path.cwd() == self._folder else self._folder / path

    def entered(self) -> chdir[Path]:
        """Return a context in which the program is in this directory again."""
        return chdir(self._folder)


def _flag(key: str, value: Any) -> str:
    """Return what was changed for a measurement as it is typed."""
    return "--no_antialias" if key == "no_antialias" else f"--{key}={as_yaml(value)}"


def _step_of(line: bytes) -> float:
    """Return the step of a row; none is later than one that cannot be read."""
    try:
        step = json.loads(line).get("step", -1)
    except (ValueError, AttributeError):
        return -1
    return step if isinstance(step, int | float) else -1
