"""Cross-validation: an ablation whose arms are folds, and their results in one table."""

import csv
import io
import math
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from vitlab.ablation.execution.cells import Say
from vitlab.ablation.execution.commands import nested
from vitlab.ablation.execution.probe import known
from vitlab.ablation.execution.status import Status
from vitlab.ablation.file.arms import NAME
from vitlab.ablation.file.spec import Ablation
from vitlab.ablation.inference.measured import collect
from vitlab.ablation.lab import Lab
from vitlab.config.table_folds import check_takes_folds, folds_of_config
from vitlab.config.trust import TRUSTED
from vitlab.config.yaml_files import read_yaml
from vitlab.errors import UsageError
from vitlab.runs.atomic import write_text
from vitlab.runs.directory import RUNS
from vitlab.runs.find import file_of_weights
from vitlab.runs.records import bounds_of, split_metrics
from vitlab.shipped import LIBRARIES, find_file
from vitlab.stats import interval
from vitlab.tables import columns

_OWNED = {  # what cross-validation sets itself, and why
    **dict.fromkeys(("data.fold", "data.val_share", "data.split_file"), "the folds define the validation images"),
    "seed_everything": "use `--seed`",
    "trainer.devices": "a fold runs on one device",
}
_OF_WEIGHTS = {  # options of `vitlab fit` that an ablation does not take, and what serves in their place
    "resize": "set `resize` in the init_args of `model.pos_embed`",
    "init_grid": 'state the network of the weights in FILE.json beside them, {"network": {"img_size": 224, ...}}',
}


@dataclass
class Folds:
    """The results of the folds, each on its own part of the images outside the test split.

    Args:
        status: Progress of the folds.
        rows: One row per finished fold: its name, number of images (None if unknown), and metrics.
        file: Those rows as a CSV file.
    """

    status: Status
    rows: list[dict[str, Any]]
    file: Path

    def __str__(self) -> str:
        """Return the table, with mean, standard deviation and, over folds, the 95 % interval by Student's t."""
        names = [name for name in self.rows[0] if name not in ("fold", "n")]
        values = {name: [row[name] for row in self.rows if math.isfinite(row[name])] for name in names}
        values |= {"trained_on": []} if "trained_on" in values else {}  # images, whose mean nobody needs
        lines = [["fold", "images", *names]]
        counts = ["?" if row["n"] is None else f"{row['n']:,}" for row in self.rows]
        numbers = [[f"{row[name]:.4g}" for name in names] for row in self.rows]
        lines += [[row["fold"], count, *texts] for row, count, texts in zip(self.rows, counts, numbers, strict=True)]
        lines.append(["mean", "", *(f"{statistics.mean(x):.4g}" if x else "" for x in values.values())])
        if len(self.rows) > 1:
            spread = [f"{statistics.stdev(x):.2g}" if len(x) > 1 else "" for x in values.values()]
            lines.append(["sd", "", *spread])
            lines.append(["95 %", "", *(_interval(name, x) for name, x in values.items())])
        return columns(lines, range(1, len(lines[0])))


def _interval(name: str, values: Sequence[float]) -> str:
    """Return the interval of a metric's mean, which ends where the metric ends; a dash if all folds agree."""
    if len(values) < 2:
        return ""
    low, high = interval(values, within=bounds_of(name, values))
    return "-" if math.isnan(low) else f"{low:.4g} to {high:.4g}"


def cross_validate(
    configs: Sequence[str],
    settings: Sequence[tuple[str, Any]] = (),
    folds: int | None = None,
    seed: int = 0,
    name: str | None = None,
    workers: int | None = None,
    retry_failed: bool = False,
    say: Say | None = None,
) -> Folds:
    """Train each unfinished fold and measure it on its part; the test split is not used.

    Folds are those that a table names. Otherwise they are drawn within classes, by the hash of each image's name;
    groups of a table stay together. Folds share training images, so the interval over them is only a guide (Bengio and
    Grandvalet 2004).

    Args:
        configs: Config files or shipped names.
        settings: Dotted keys and values over them; ``init_from`` names weights that every fold starts from.
        folds: Number of folds to draw; default: those that the table of the data names in its column of folds, else 5.
        seed: Seed of every fold.
        name: NAME of the directory ``runs/ablations/NAME``; default: ``cv-`` and the last config.
        workers: Folds at a time; default: one per GPU, or half of the cores.
        retry_failed: Whether to try failed folds again.
        say: Called with each line of progress.

    Raises:
        UsageError: A setting is wrong, or no fold finished.

    Example:
        >>> cross_validate(["vit"], folds=1)
        Traceback (most recent call last):
            ...
        vitlab.errors.UsageError: `--folds` must be at least 2, got 1
    """
    if folds is not None and folds < 2:
        raise UsageError(f"`--folds` must be at least 2, got {folds}")
    _refuse_settings(settings, seed)
    start = {key: str(value) for key, value in settings if key == "init_from"}
    settings = [(key, value) for key, value in settings if key != "init_from"]
    files = [str(Path(find_file(config, "cv")).resolve()) for config in configs]
    if name is None:
        name = "cv-" + re.sub(r"[^a-z0-9_.-]+", "-", Path(files[-1]).stem.lower())
    if not NAME.fullmatch(name):
        raise UsageError(f"`--name` must be a-z 0-9 _ . -, beginning with a letter or digit, got {name!r}")
    for path in files:
        read_yaml(path, "cv")  # refuses what is no config before anything is written
    check_takes_folds(files, settings)
    drawn = {f"fold{k}of{folds or 5}": f"{k}/{folds or 5}" for k in range(1, (folds or 5) + 1)}
    arms = drawn if folds else folds_of_config(files, settings) or drawn
    levels = {arm: {"data.fold": fold, **start} for arm, fold in arms.items()}
    file = _File(name, files, settings, levels, seed)
    lab = Lab(file.written(), "cv")
    try:
        status = lab.run(workers, retry_failed=retry_failed, say=say)
    except UsageError:
        if (shown := _logged(lab.ablation)) is None:
            raise
        lab = Lab(file.written(shown), "cv")
        status = lab.run(workers, retry_failed=retry_failed, say=say)
    if not (rows := _finished(lab.ablation)):
        raise UsageError(_none_done(name, status))
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows([rows[0], *(row.values() for row in rows)])
    write_text(file.folder / "folds.csv", table.getvalue())
    return Folds(status, rows, file.folder / "folds.csv")


def _none_done(name: str, status: Status) -> str:
    """Return a line about folds of which none is done."""
    counts = Counter(row["state"] for row in status.rows)
    states = ", ".join(f"{n} {state}" for state, n in counts.items())
    more = ", with --retry_failed if failed folds are to be tried again" if counts["failed"] else ""
    return f"no fold of {name} is done: {states}; the same command continues them{more}"


def _finished(ablation: Ablation) -> list[dict[str, Any]]:
    """Return a row for each finished fold: name, number of images, and the metrics of any fold, NaN without one.

    A fold that does not count images which were trained on has none.
    """
    results = collect(ablation, known(ablation))
    rows = []
    for (fold, _), found in results.cells.items():
        if not found.run:
            continue
        data: dict[str, Any] = {**found.run.data}
        own = found.numbers.get("n")  # modules of one's own count none
        images = own or data.get("splits", {}).get("val", {}).get("n")
        rows.append({"fold": fold, "n": None if images is None else int(images), **split_metrics(found.numbers)})
    keys = dict.fromkeys(key for row in rows for key in row)
    return [{key: row.get(key, 0 if key == "trained_on" else math.nan) for key in keys} for row in rows]


def _refuse_settings(settings: Sequence[tuple[str, Any]], seed: int) -> None:
    """Refuse settings that folds cannot have, and initial weights that are not there, before anything is written."""
    if owned := [key for key, value in settings if key in _OWNED and (key, value) != ("trainer.devices", 1)]:
        raise UsageError(f"`{owned[0]}` is set by cross-validation: {_OWNED[owned[0]]}")
    if left := [key for key, _ in settings if key in _OF_WEIGHTS]:
        raise UsageError(f"`{left[0]}` is no option of cross-validation: {_OF_WEIGHTS[left[0]]}")
    for source in (str(value).replace("{seed}", str(seed)) for key, value in settings if key == "init_from"):
        if source == "last":
            raise UsageError("`init_from` of cross-validation must name its run: `last` is another one when it goes on")
        if not source.startswith(LIBRARIES):
            file_of_weights(source)


def _logged(ablation: Ablation) -> str | None:
    """Return what the lines of progress show of folds that log no `loss`; None if they log it, or nothing."""
    names = dict.fromkeys(name for arm in known(ablation) for name in arm.metrics)
    if "loss" in names or not names:
        return None
    return next((name for name in ("val_loss", *names) if name in names and not name.startswith("test_")), None)


@dataclass(frozen=True)
class _File:
    """The file of the ablation, ``cv.yaml``, in its folder.

    Args:
        name: Of the ablation.
        configs: Paths of the configs.
        settings: Dotted keys and values over them.
        arms: Of each fold, the settings of its level.
        seed: Seed of every fold.
    """

    name: str
    configs: Sequence[str]
    settings: Sequence[tuple[str, Any]]
    arms: Mapping[str, Mapping[str, str]]
    seed: int

    @property
    def folder(self) -> Path:
        """The folder of the file, the folds and their table."""
        return RUNS / "ablations" / self.name

    def written(self, shown: str = "loss") -> Path:
        """Write it and return its path; what it uses of the user's code, the command has confirmed.

        Args:
            shown: The metric that the lines of progress show.
        """
        text = yaml.safe_dump(nested(dict(self.settings)), sort_keys=False)
        write_text(self.folder / "settings.yaml", text)
        texts = "".join([text, *(Path(config).read_text() for config in self.configs)])
        own = [path for path in TRUSTED if ("__main__." if path.endswith(".py") else f"{path}.") in texts]
        content = {
            "name": self.name,
            "base": [*self.configs, str((self.folder / "settings.yaml").resolve())],
            "axes": {"fold": self.arms},
            "seeds": [self.seed],
            "baseline": {"fold": next(iter(self.arms))},
            "metric": {"primary": shown, "mode": "min"},
            "match": {"within": ["fold"]},
            **({"trust_imports": own} if own else {}),
        }
        write_text(self.folder / "cv.yaml", yaml.safe_dump(content, sort_keys=False))
        return self.folder / "cv.yaml"
