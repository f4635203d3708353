"""The fairness of a comparison: unintended differences between arms."""

import math
from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from vitlab.ablation.execution.cells import Resolved
from vitlab.ablation.file.arms import Arm
from vitlab.ablation.file.settings import Match
from vitlab.ablation.file.spec import Ablation
from vitlab.class_paths import choice_text
from vitlab.runs.records import Record, part_of

if TYPE_CHECKING:
    from vitlab.ablation.inference.measured import CellResults

PARTS = ("tokenizer", "pos_embed", "blocks", "head")


def as_trained(results: "CellResults") -> list[Resolved]:
    """Return the measured arms with the steps that their finished cells trained, and the sum of the rates up to there.

    Both are means over seeds, which may stop at different steps. Before a cell is done, they are what the arm's probe
    computed, which knows nothing of a tuned learning rate.
    """
    found = []
    for arm in results.resolved:
        of_arm = [cell for (name, _), cell in results.cells.items() if name == arm.name]
        trained = (_trained(arm, cell.run.record, cell.rows) for cell in of_arm if cell.run)
        lengths = [length for length in trained if length]
        mean: dict[str, float] = {}
        for key in ("steps", "sum_of_learning_rates"):
            if values := [length[key] for length in lengths if key in length]:
                mean[key] = values[0] if len(set(values)) == 1 else fmean(values)
        if len(steps := {length["steps"] for length in lengths}) > 1:
            mean |= {"steps_least": min(steps), "steps_most": max(steps)}
        found.append(replace(arm, length=mean or arm.length))
    return found


def _trained(arm: Resolved, record: Record, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the steps that a run has trained, and the sum of their rates where it is known; empty without a plan."""
    if (planned := record.get("steps", -1)) < 0:  # an earlier vitlab wrote -1 where the length of the loader is unknown
        return {}
    steps = min(planned, max((row["step"] for row in rows), default=planned))
    length: dict[str, float] = {"steps": steps}
    if "sum_of_learning_rates" not in record:
        return length
    total = record["sum_of_learning_rates"]
    if steps < planned:  # stopped early: the schedule was for all steps
        from vitlab.tasks.schedule import schedule

        first = max((row["step"] for row in rows if row["epoch"] == 0), default=planned)  # may be cut
        epoch = arm.steps_of_an_epoch(record) or first
        try:
            factor: Any = schedule(arm.recipe, planned, epoch)
        except KeyError:  # a task of the user's, whose rates its file does not tell
            return length
        total *= sum(map(factor, range(steps))) / sum(map(factor, range(planned)))
    return {**length, "sum_of_learning_rates": total}


def fair_facts(arm: Resolved) -> dict[str, Any]:
    """Return the facts that match between the arms of a fair comparison, apart from what is compared.

    Parts are those of :func:`vitlab.runs.records.part_of`.
    """
    found: dict[str, Any] = {"parameters": arm.model.get("parameters"), "flops": arm.model.get("flops")}
    found["tokens"] = arm.model.get("tokens")
    for part in PARTS:
        sizes = [math.prod(g["shape"]) for g in arm.groups if part_of(g["name"]) == part]
        found[f"{part} parameters"] = sum(sizes)
    positions = [g for g in arm.groups if part_of(g["name"]) == "pos_embed"]
    found |= {key: value for key, value in arm.length.items() if key.startswith("steps_")}  # seeds that differ
    found["steps"] = arm.length.get("steps")
    found["lr_scheduler"] = choice_text(arm.recipe.get("lr_scheduler", "cosine"))
    found["sum_lr"] = total = arm.length.get("sum_of_learning_rates", math.nan)  # bounds how far Adam moves a weight
    found["pos_embed_lr_scale"] = positions[-1]["lr_scale"] if positions else None
    found["sum_lr_pos_embed"] = total * positions[-1]["lr_scale"] if positions else None
    found["pos_embed_weight_decay"] = max((g["weight_decay"] for g in positions), default=None)
    found |= {"token_sd": arm.start.get("token_sd"), "pos_to_content": arm.start.get("pos_to_content")}
    found["images_per_second"] = arm.images_per_second
    return found


def shares(ablation: Ablation, resolved: list[Resolved]) -> dict[str, dict[str, float]]:
    """Return the relative differences of steps, parameters and FLOPs between each arm and the arm it must match."""
    found: dict[str, dict[str, float]] = {}
    of = {r.name: fair_facts(r) for r in resolved}
    for r in resolved:
        mine, other = of[r.name], of.get((reference(ablation, r.arm) or r.arm).name, of[r.name])
        keys = [key for key in ("steps", "parameters", "flops") if mine[key] and other[key]]
        found[r.name] = {key: mine[key] / other[key] - 1 for key in keys}
    return found


def mismatches(ablation: Ablation, resolved: list[Resolved]) -> dict[str, list[str]]:
    """Return, for each arm that does not match the one it must match, the notes to print."""
    facts, differing = {r.name: fair_facts(r) for r in resolved}, shares(ablation, resolved)
    unfair = {name: [text] for name, text in _unlike_positions(ablation.match.pos_to_content, resolved).items()}
    for r in resolved:
        matched = reference(ablation, r.arm)
        if matched is None or matched is r.arm or matched.name not in facts:
            continue
        words = _unlike_sizes(ablation.match, differing[r.name], matched.name)
        words += _unlike_training(facts[r.name], facts[matched.name], matched.name)
        if words:
            unfair[r.name] = words + unfair.get(r.name, [])
    return unfair


def _unlike_sizes(match: Match, differing: Mapping[str, float], matched: str) -> list[str]:
    """Return which relative differences to the arm ``matched`` are larger than the file allows."""
    words = []
    for key, rule in (("steps", match.steps), ("parameters", match.params), ("flops", match.flops)):
        share = differing.get(key, 0.0)
        if abs(share) > (0.0 if rule == "exact" else float(rule)):
            what = f"{'more' if share > 0 else 'fewer'} {'FLOPs' if key == 'flops' else key}"
            words.append(f"{100 * abs(share):.1f} % {what} than {matched}")
    return words


def _unlike_training(mine: Mapping[str, Any], other: Mapping[str, Any], matched: str) -> list[str]:
    """Return which other facts of an arm are not those of the arm ``matched``."""
    words = []
    if mine["tokens"] and other["tokens"] and mine["tokens"] != other["tokens"]:  # unknown of a network of one's own
        words.append(f"{mine['tokens']} tokens, {matched} has {other['tokens']}")
    if mine["lr_scheduler"] != other["lr_scheduler"]:
        words.append(f"lr_scheduler {mine['lr_scheduler']}, {matched} has {other['lr_scheduler']}")
    if abs(mine["sum_lr"] - other["sum_lr"]) > 1e-6 * abs(other["sum_lr"]):
        words.append(f"sum of learning rates {mine['sum_lr']:.3g}, {matched} has {other['sum_lr']:.3g}")
    scale, usual = mine["pos_embed_lr_scale"], other["pos_embed_lr_scale"]
    if scale is not None and abs(scale / (usual or 1.0) - 1) > 1e-6:
        versus = " of the rest" if usual is None else f", {matched} at {usual:g}"
        words.append(f"position embedding trained at {scale:g} times the rate{versus}")
    if mine["pos_embed_weight_decay"]:
        words.append("weight decay on the position embedding")
    return words


def _unlike_positions(rule: float | None, resolved: list[Resolved]) -> dict[str, str]:
    """Return the arms whose initial ratio of positions to content differs from that of the first such arm.

    Without a rule, arms are compared within one position embedding, and may differ by a factor of two. With one, an arm
    is named, too, whose tuned values may have changed its ratio, which its probe has measured without them.
    """
    first: dict[str, tuple[str, float]] = {}
    found = {}
    for r in resolved:
        ratio = r.start.get("pos_to_content", 0.0)
        if ratio is None and rule is not None:
            found[r.name] = "initial ratio of positions to content not measured with its tuned values"
        if not ratio:
            continue
        method = "" if rule is not None else choice_text(r.recipe.get("pos_embed"))
        name, usual = first.setdefault(method, (r.name, ratio))
        if max(ratio / usual, usual / ratio) - 1 > (1.0 if rule is None else rule) + 1e-9:
            found[r.name] = f"initial ratio of positions to content {ratio:.2g}, {name} has {usual:.2g}"
    return found


def reference(ablation: Ablation, arm: Arm) -> Arm | None:
    """Return the arm that ``arm`` must match: the baseline, at the arm's own levels of the axes in `match.within`.

    Arms must match across every other axis too, so it has the first level of each axis that the baseline leaves open.
    """
    wanted = {**ablation.baseline, **{axis: arm.levels[axis] for axis in ablation.match.within}}
    return next((other for other in ablation.arms if wanted.items() <= dict(other.levels).items()), None)
