"""Export everything that a report needs into one folder, to repeat the report on another machine."""

import json
import os
import shutil
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd

from vitlab.ablation.execution.cells import Resolved
from vitlab.ablation.file import spec
from vitlab.ablation.file.spec import Ablation
from vitlab.ablation.inference.measured import collect
from vitlab.errors import UsageError, preview
from vitlab.runs.atomic import atomic_folder, atomic_write, write_json, write_text
from vitlab.runs.directory import RunDir
from vitlab.runs.lock import held
from vitlab.runs.manifest import file_digest
from vitlab.runs.matching import is_there, matching

SUMS = "SHA256SUMS"  # as `sha256sum -c` reads it
OWN = (
    *("chain.jsonl", "history/*.json", "linear.json", "looks.jsonl", "readings.jsonl", "registered.json"),
    *("tune/chain.jsonl", "tune/history/*.json", "tune/*/*.failed.json", "tune/*/try*.json"),
)
CURVES = ("step", "epoch", "train/loss", "images_per_second")  # of metrics.jsonl, and those of the validation
VALIDATION = ("val/", "val_")  # how they begin
OF_A_CELL = (
    *("*.json", "config.yaml", "metrics.jsonl", "openings.jsonl"),
    *("predictions/*.parquet", "analysis/*.csv", "analysis/*.json"),
    "checkpoints/manifest.json",  # of which weights the numbers are
)


def export_bundle(ablation: Ablation, resolved: list[Resolved], folder: Path) -> list[Path]:
    """Write the folder and return its files: no checkpoints, no probabilities, and of the curves what a report draws.

    Raises:
        UsageError: The folder exists and is not empty.
        OSError: A file cannot be read or written; what was written is removed, so that the call can be repeated.
    """
    place = folder.resolve()
    with held(place.with_name(f".{place.name}.lock"), f"exports into {folder}"):
        check_new(folder)
        with atomic_folder(place) as work:
            files = _fill(ablation, resolved, work)
    return [folder / path.relative_to(work) for path in files]


def _fill(ablation: Ablation, resolved: list[Resolved], folder: Path) -> list[Path]:
    shutil.copyfile(ablation.file.path, folder / "ablation.yaml")
    seeds = (*ablation.seeds, *(ablation.tune.seeds if ablation.tune else ()))
    facts = []
    for r in resolved:
        weights = {source: r.digest_of(source) for seed in seeds if (source := r.arm.weights(seed))}
        facts.append({**asdict(replace(r, arm=None, weights=weights)), "arm": r.name})  # type: ignore[arg-type]
    write_json(folder / "arms.json", json.loads(json.dumps(facts, sort_keys=True)))
    collected = collect(ablation, resolved)
    write_text(folder / "seeds.csv", collected.table().to_csv(index=False))
    _copy(ablation.directory, folder, OWN)
    _copy(ablation.directory, folder, tuple(f"tune/*/*/{name}" for name in OF_A_CELL))
    for cell in (found.cell for found in collected.cells.values()):
        if cell.run.exists():
            _copy(cell.run.path, folder / cell.name, OF_A_CELL)
        if is_there(failed := cell.sibling(".failed.json")):
            _copy(failed.parent, (folder / cell.name).parent, (failed.name,))
    for path in _below(folder):
        if path.parent.name == "predictions" and path.suffix == ".parquet":
            _drop_probabilities(path)
        elif path.name == "metrics.jsonl":
            _thin(path)
    files = _below(folder)
    write_text(folder / SUMS, "".join(f"{file_digest(p)}  {p.relative_to(folder).as_posix()}\n" for p in files))
    return [*files, folder / SUMS]


def check_new(folder: Path) -> None:
    """Refuse a folder that has something in it."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists and is not empty; export into a new folder")


def load_bundle(folder: Path) -> tuple[Ablation, list[Resolved]]:
    """Return the ablation in an exported folder and its arms.

    Raises:
        UsageError: It is not such a folder, or a file in it has changed.
    """
    if not (folder / SUMS).is_file():
        raise UsageError(f"{folder} was not written by `vitlab ablate export`: it has no {SUMS}")
    lines = [line.partition("  ") for line in (folder / SUMS).read_text().splitlines()]
    digests = {name: digest for digest, _, name in lines}
    if added := [name for name in _files(folder) if name not in digests]:
        raise UsageError(f"{folder}: these files were added since the export: {preview(added, 4)}; remove them")
    there = {name: (folder / name).is_file() and file_digest(folder / name) for name in digests}
    if changed := [name for name, digest in digests.items() if there[name] != digest]:
        raise UsageError(f"{folder}: these files changed since the export: {preview(changed, 4)}")
    ablation = replace(spec.read_ablation(folder / "ablation.yaml", is_evidence=True), home=folder)
    arms = {arm.name: arm for arm in ablation.arms}
    facts = json.loads((folder / "arms.json").read_text())
    return ablation, [Resolved(**{**f, "arm": arms[f["arm"]], "groups": tuple(f["groups"])}) for f in facts]


def _files(folder: Path) -> list[str]:
    """Return the files of evidence, without the report that was written into it, hidden files and the checksums."""
    names = [path.relative_to(folder) for path in _below(folder)]
    shown = [name for name in names if not any(part.startswith(".") for part in name.parts)]
    return [name.as_posix() for name in shown if name.parts[0] != "report" and name.as_posix() != SUMS]


def _below(folder: Path) -> list[Path]:
    """Return all files below a folder, sorted.

    Raises:
        OSError: A folder cannot be listed.
    """

    def refuse(error: OSError) -> None:
        raise error

    walk = os.walk(folder, onerror=refuse)
    return sorted(Path(place, name) for place, _, names in walk for name in names)


def seal_of(folder: Path) -> str:
    """Return the hash of the checksums of an exported folder, which holds every file of it."""
    return file_digest(folder / SUMS)


def _copy(source: Path, target: Path, patterns: tuple[str, ...]) -> None:
    for pattern in patterns:
        for path in matching(source, pattern):
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)


def _drop_probabilities(path: Path) -> None:
    """Rewrite a table of predictions without the probabilities, which are most of its bytes and in no report."""
    try:
        table = pd.read_parquet(path).drop(columns=["probability", "probabilities"], errors="ignore")
        whole = {name: pd.to_numeric(table[name], downcast="integer") for name in table.select_dtypes("integer")}
    except (OSError, ValueError):  # a damaged table is exported as it is
        return
    with atomic_write(path) as beside:
        table.assign(**whole).to_parquet(beside, index=False, compression="zstd")


def _thin(path: Path) -> None:
    """Rewrite the rows of a run with what a report reads."""
    with suppress(ValueError):  # damaged rows are exported as they are
        rows = [
            {k: v for k, v in row.items() if k in CURVES or k.startswith(VALIDATION)}
            for row in RunDir(path.parent).rows()
        ]
        write_text(path, "".join(json.dumps(row) + "\n" for row in rows if len(row) > 2))
