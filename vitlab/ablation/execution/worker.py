"""The work on a cell: train, evaluate, record the result, analyze."""

import os
import shlex
import shutil
import socket
import time
from dataclasses import dataclass, replace
from typing import Literal

from vitlab.ablation.evidence import chain
from vitlab.ablation.evidence.protocol import record_version
from vitlab.ablation.execution import process
from vitlab.ablation.execution.cells import Cell
from vitlab.ablation.execution.commands import Stage, next_stage, training
from vitlab.ablation.execution.identity import code_digest, json_digest
from vitlab.ablation.execution.probe import discard_probe
from vitlab.ablation.execution.process import Seat
from vitlab.runs.records import now_utc

RETRIED = ("pre-empted", "time-out", "out of memory", "killed")
NOTED = 60.0  # seconds between two notes of how long a cell has run, of which a kill of its worker loses one
CODE = "other code"
UNPLANNED = (CODE, "other data", "other config")  # failures that a plan which holds again undoes


@dataclass(frozen=True)
class CellOutcome:
    """How the work on a cell ended, which may be to wait for other candidates, and why."""

    end: Literal["done", "failed", "stopped", "waiting"]
    kind: str = ""
    text: str = ""


def process_cell(cell: Cell, seat: Seat) -> CellOutcome:
    """Run the remaining stages of a cell, and repeat a stage that an outside cause has interrupted."""
    started, attempts, is_new = time.time(), 0, False
    cell.drop_result_from_beside()
    while not cell.is_waiting():
        if other := _unplanned(cell):
            return _failed(cell, training(cell), 0, *other)
        stage = next_stage(cell)
        if cell.is_measured() and (is_new or not cell.is_done()):
            _done(cell, started)
            is_new = False
        if stage is None:
            return _finished(cell)
        if stage.is_evaluation:
            chain.count_reading(cell.ablation.directory, cell.name, cell.ablation.evaluate)
            is_new = True  # even if an older measurement was recorded
        code, lines = _run(cell, stage, seat)
        if other := _other_settings(cell):  # also where it waits or diverged
            return _failed(cell, stage, code, *other)
        if cell.is_waiting():
            break
        if code == process.STOPPED or (code and seat.stop()):  # SLURM's warning also reaches the command
            return CellOutcome("stopped")
        kind = process.failure_kind(code, lines, cell.run.record)
        is_past = stage != next_stage(cell)
        if is_past and (not code or cell.is_done()):  # one analysis may not apply, the next may
            continue
        attempts += 1
        if kind not in RETRIED or attempts > cell.ablation.run.retries:
            return _failed(cell, stage, code, kind, lines, attempts)
    return CellOutcome("waiting", text=f"{cell.ablation.primary} {cell.value_at(cell.until):.4f}")


def _run(cell: Cell, stage: Stage, seat: Seat) -> tuple[int, list[str]]:
    """Run a stage to its end, or until the cell has to wait; return the exit code and the last lines of the log."""
    log, run = cell.sibling(".log"), cell.ablation.run
    before, began = cell.device_seconds(), time.monotonic()
    noted = began

    def ends() -> bool:
        nonlocal noted
        if (now := time.monotonic()) - noted > NOTED:
            noted = now
            cell.note_seconds(before + now - began)
        return seat.stop() or cell.is_waiting()

    try:
        return process.run_in_slot(stage.words, log, run, replace(seat, stop=ends), _wandb(cell))
    finally:
        cell.note_seconds(before + time.monotonic() - began)


def _unplanned(cell: Cell) -> tuple[str, list[str]] | None:
    """Return why a cell is no longer what was planned, as the kind and the lines of a failure; None if it is.

    This is asked before each stage, as each is a process of its own, which may load other code than the one before.
    Comparing all files takes about 10 ms: they are parsed and hashed again only after a change.
    """
    if cell.is_done():
        return None
    if code_digest(own=cell.ablation.trust_imports) != cell.parts["code"]:
        way = "`run` again to plan with it, or undo the change first to keep the cells that are done"
        return CODE, [f"the code has changed since the plan: no new cells; {way}"]
    if text := _other_data(cell):
        return "other data", [text]
    return _other_settings(cell)


def _other_settings(cell: Cell) -> tuple[str, list[str]] | None:
    """Return a failure if a run read other settings than its arm's probe, and set the run aside; None otherwise."""
    if cell.is_done() or not cell.run.config.is_file() or not (text := cell.changed_settings()):
        return None
    cell.discard()
    return "other config", [f"the settings have changed since the plan: {text}; `run` again to plan with them"]


def _other_data(cell: Cell) -> str:
    """Return a message if a run read other images than its arm's probe, and discard the probe."""
    own = cell.run.read("data.json")
    if cell.run.record.get("status") != "done" or not own or json_digest(own) == cell.parts["data"]:
        return ""
    discard_probe(cell.ablation, cell.parts["data"])
    sizes = [{k: v.get("n") for k, v in (x.get("splits") or {}).items()} for x in (cell.resolved.data, own)]
    return f"the images have changed since the plan: {sizes[0]} then, {sizes[1]} now; `run` again to plan with these"


def _done(cell: Cell, started: float) -> None:
    """Record that a cell is measured: in the chain of all cells, then in its own directory."""
    protocol = record_version(cell.ablation)
    tune = chain.read_chain(cell.ablation.directory / "tune")
    more = {"tuning": tune.head} if tune else {}
    split = cell.ablation.evaluate
    splits = sorted({*cell.run.read("done.json").get("splits", ()), split})
    facts = {"cell": cell.name, "id": cell.id, "split": split, "hashes": chain.hashes_of(cell.run, split)}
    record = chain.append(cell.ablation.directory, "cell", **facts, **more)
    cell.run.write(
        "done.json",
        {
            "cell": cell.name,
            "levels": dict(cell.arm.levels),
            "seed": cell.seed,
            "id": cell.id,
            "parts": cell.parts,
            "file": cell.ablation.digest,
            "protocol": protocol,
            "record": record,
            "splits": splits,
            "host": socket.gethostname(),
            "seconds": round(time.time() - started, 1),
            "device_seconds": round(cell.device_seconds(), 1),
            "ended": now_utc(),
        },
    )


def _finished(cell: Cell) -> CellOutcome:
    cell.sibling(".failed.json").unlink(missing_ok=True)
    if tables := chain.analyses_of(cell.run):
        chain.append(cell.ablation.directory, "analyses", cell=cell.name, tables=tables)
    if cell.ablation.run.keep != "all":
        shutil.rmtree(cell.run.checkpoints, ignore_errors=True)
    if cell.ablation.run.keep == "none":
        shutil.rmtree(cell.run.weights, ignore_errors=True)
    return CellOutcome("done", text=f"{cell.ablation.primary} {cell.value():.4f}")


def _failed(cell: Cell, stage: Stage, code: int, kind: str, lines: list[str], attempts: int = 1) -> CellOutcome:
    last = next((line for line in reversed(lines) if line.strip()), f"exit code {code}, no output")
    repeat = shlex.join(stage.words)
    facts = {"stage": stage.name, "kind": kind, "code": code, "attempts": attempts, "last": last}
    cell.fail({**facts, "command": repeat, "log": lines})
    way = "" if kind in UNPLANNED else f"\n    repeat it with: {repeat}"
    return CellOutcome("failed", kind, f"{stage.name}, {kind}: {last}{way}")


def _wandb(cell: Cell) -> dict[str, str]:
    wandb = cell.ablation.wandb
    if not wandb:
        return {}
    names = {"WANDB_RUN_GROUP": cell.ablation.name, "WANDB_JOB_TYPE": cell.arm.name, "WANDB_RESUME": "allow"}
    is_told = wandb.mode == "offline" and not os.environ.get("WANDB_MODE")
    return {**names, "WANDB_MODE": "offline"} if is_told else names
