"""The fairness of a comparison: what differs between arms beside what is meant to."""

import math
from collections.abc import Mapping
from typing import Any

from vitlab.ablation.cells import Resolved
from vitlab.ablation.spec import Ablation

PARTS = ("tokenizer", "pos_embed", "blocks", "head")


def steps(arm: Resolved) -> int:
    """Return the number of optimizer steps of a run, an incomplete last batch left out."""
    trainer, data = arm.config["trainer"], arm.config["data"].get("init_args", arm.config["data"])
    per_epoch = arm.data["splits"]["train"]["n"] // int(data.get("batch_size", 64) or 1)
    per_epoch = max(1, per_epoch // int(trainer.get("accumulate_grad_batches") or 1))
    total = per_epoch * int(trainer.get("max_epochs") or 0)
    limit = int(trainer.get("max_steps") or -1)
    return min(total, limit) if limit > 0 else total


def sum_lr(arm: Resolved) -> float:
    """Return the sum of the learning rates over all steps, which bounds how far Adam can move a weight.

    Of a linear warm-up and a half cosine, by their areas, before any run; run.json has the exact sum.
    """
    model = arm.config["model"].get("init_args", arm.config["model"])
    lr, low = float(model.get("lr", math.nan)), float(model.get("min_lr") or 0)
    epochs = float(arm.config["trainer"].get("max_epochs") or 1)
    warm = min(1.0, float(model.get("warmup_epochs") or 0) / epochs)
    start = float(model.get("warmup_lr") or 0)
    cosine = (lr + low) / 2 * (1 - warm) - (lr - low) / (2 * math.pi) * math.sin(math.pi * warm)
    return steps(arm) * (warm * (start + lr) / 2 + cosine)


def facts(arm: Resolved) -> dict[str, Any]:
    """Return what the arms of a fair comparison have in common, apart from what is compared."""
    found: dict[str, Any] = {"parameters": arm.model.get("parameters"), "flops": arm.model.get("flops")}
    found["tokens"] = arm.model.get("tokens")
    for part in PARTS:
        sizes = [math.prod(g["shape"]) for g in arm.groups if g["name"].split(".")[0] == part]
        found[f"{part} parameters"] = sum(sizes)
    positions = [g for g in arm.groups if g["name"].startswith("pos_embed.")]
    found["steps"] = steps(arm)
    found["sum_lr"] = sum_lr(arm)
    found["sum_lr_pos_embed"] = sum_lr(arm) * positions[0]["lr_scale"] if positions else None
    found["pos_embed_weight_decay"] = max((g["weight_decay"] for g in positions), default=None)
    found["images_per_second"] = arm.images_per_second
    return found


def flags(ablation: Ablation, resolved: list[Resolved]) -> dict[str, list[str]]:
    """Return, for each arm that does not match its baseline, the words to print next to it."""
    match = ablation.match
    found = {r.arm.name: facts(r) for r in resolved}
    unfair: dict[str, list[str]] = {}
    for r in resolved:
        reference = _reference(ablation, r, resolved)
        if reference is None or reference is r:
            continue
        mine, other = found[r.arm.name], found[reference.arm.name]
        words = []
        for key, rule in (("steps", match["steps"]), ("parameters", match["params"]), ("flops", match["flops"])):
            text = _differs(key, mine, other, 0.0 if rule == "exact" else float(rule))
            words += [f"{text} than {reference.arm.name}"] if text else []
        if mine["tokens"] != other["tokens"]:
            words.append(f"{mine['tokens']} tokens, {reference.arm.name} has {other['tokens']}")
        if abs(mine["sum_lr"] / other["sum_lr"] - 1) > 1e-6:
            words.append(f"sum of learning rates {mine['sum_lr']:.3g}, {reference.arm.name} has {other['sum_lr']:.3g}")
        if mine["pos_embed_weight_decay"]:
            words.append("weight decay on the position embedding")
        if words:
            unfair[r.arm.name] = words
    return unfair


def _reference(ablation: Ablation, arm: Resolved, resolved: list[Resolved]) -> Resolved | None:
    """Return the baseline within the axes that are not matched across."""
    baseline = ablation.baseline_of(arm.arm)
    return next((r for r in resolved if r.arm is baseline), None)


def _differs(key: str, mine: Mapping[str, Any], other: Mapping[str, Any], limit: float) -> str:
    if not mine[key] or not other[key]:
        return ""
    share = mine[key] / other[key] - 1
    return f"{share:+.1%} {key}" if abs(share) > limit else ""
