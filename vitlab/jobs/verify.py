"""Check the files of a run against their checksums."""

from collections.abc import Callable
from functools import partial
from typing import Any

from vitlab.config.explain import read_yaml
from vitlab.models.weights_file import read_weights
from vitlab.runs.directory import RunDir
from vitlab.runs.manifest import damage
from vitlab.runs.records import RECORDS, read_record


def check_files(run: RunDir) -> dict[str, str | None]:
    """Return what is wrong with each file of a run, None for an intact one; all files with checksums are read."""
    found = {f"checkpoints/{path.name}": damage(path) for path in sorted(run.checkpoints.glob("*.ckpt"))}
    reads: dict[str, Callable[[], Any]] = {
        f"weights/{path.name}": partial(read_weights, path) for path in sorted(run.weights.glob("*.safetensors"))
    }
    reads |= {name: partial(read_record, run.path / name, kind) for name, kind in RECORDS.items()}
    reads |= {"config.yaml": partial(read_yaml, run.config), "metrics.jsonl": run.rows}
    for name, read in reads.items():
        if (run.path / name).is_file():
            try:
                read()
                found[name] = None
            except ValueError as error:
                found[name] = str(error)
    return found
