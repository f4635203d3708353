"""The provenance of a report's numbers, and whether all cells share it."""

from typing import Any

from vitlab.ablation.verdict.measured import Results
from vitlab.ablation.work.status import foreign_cells_text

FACTS = ("commit", "dirty", "diff", "python", "versions", "devices", "threads")


def provenance(results: Results) -> list[str]:
    """Return a sentence for each fact; it says so if cells differ."""
    records = [run.record for run in results.runs.values()]
    done = [run.read("done.json") for run in results.runs.values()]
    lines = [f"{fact}: {_shared([record.get(fact) for record in records])}" for fact in FACTS]
    lines.append(f"config, data and code of the cells: {len({d['id'] for d in done})} different identities")
    for part in ("data", "code"):
        lines.append(f"{part} digest: {_shared([d['parts'][part] for d in done])}")
    peaks = [record.get("peak_memory") or {} for record in records]
    for kind in ("host", "cuda"):
        if most := max((peak.get(kind, 0) for peak in peaks), default=0):
            lines.append(f"peak memory of a training, {kind}: {most / 2**30:.2f} GiB")
    files = {d["file"] for d in done}
    changed = "unchanged since the first cell" if files <= {results.ablation.digest} else "CHANGED since some cells ran"
    lines.append(f"the file: {results.ablation.digest}, {changed}")
    lines.append(f"host: {_shared([d['host'] for d in done])}")
    hours = sum(d["seconds"] for d in done) / 3600
    lines.append(f"device-hours: {hours:.3f} over {len(done)} cells; last one ended {max(d['ended'] for d in done)}")
    if results.ablation.evaluate == "test":
        path = results.ablation.directory / "readings.jsonl"
        count = len(path.read_text().splitlines()) if path.is_file() else 0
        noted = f"{count} times" if count else f"at least {len(done)} times: readings were not counted"
        lines.append(f"the test split was read {noted} for these numbers, not counting analyses")
    kinds = [run.standing(results.ablation.evaluate).kind for run in results.runs.values()]
    if unknown := kinds.count("unknown"):
        lines.append(f"checksum: {unknown} cells do not tell which checkpoint was measured (by an older vitlab)")
    if text := foreign_cells_text(results.ablation, list(results.resolved)):
        lines.append(text.removeprefix("; "))
    return lines


def _shared(values: list[Any]) -> str:
    texts = sorted({_text(value) for value in values})
    return texts[0] if len(texts) == 1 else f"DIFFERS between cells: {' / '.join(texts)}"


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
