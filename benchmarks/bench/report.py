"""Benchmark results as Markdown."""

from collections.abc import Iterator, Sequence
from typing import Any

from vitlab.tables import table

_SPEED = "{ratio:.2f} [{min:.2f}, {max:.2f}]"
COLUMNS = {
    "model": {
        "model": "{model}",
        "mode": "{mode}",
        "dtype": "{dtype}",
        "batch": "{batch}",
        "who": "{contender}",
        "speed [min, max]": _SPEED,
        "95 %": "{interval[0]:.2f} to {interval[1]:.2f}",
        "relative to": "{base}",
        "img/s (best)": "{images_per_second:.1f} ({best_images_per_second:.1f})",
        "share of canary": "{share_of_canary:.0%}",
        "memory MiB (batch)": "{memory:.0f} ({memory_batch})",
        "first step, s": "{first_seconds:.1f}",
        "logits differ": "{logit_difference:.0e}",
        "rounds": "{rounds}",
    },
    "attention": {
        "B, A, L": "{B}, {A}, {L}",
        "dtype": "{dtype}",
        "mode": "{mode}",
        "speed of sdpa to products": _SPEED,
        "rule": "{rule}",
        "rule loses > 10 %": "{loses}",
    },
    "linear": {
        "tokens, width, new width": "{N}, {D}, {out}",
        "mode": "{mode}",
        "speed of oneDNN to torch": _SPEED,
        "rule": "{rule}",
        "rule loses > 10 %": "{loses}",
    },
    "limit": {
        "model": "{model}",
        "GFLOP an image": "{gflop:.2f}",
        "fp32 fwd / train img/s": "{fp32_fwd:.1f} / {fp32_train:.1f}",
        "bf16 fwd / train img/s": "{bf16_fwd:.1f} / {bf16_train:.1f}",
    },
    "numerics": {
        "model": "{model}",
        "images": "{images}",
        "logits off by": "{logits:.1e}",
        "plain way": "{plain_logits:.1e}",
        "gradients off by": "{gradients:.1e}",
        "plain way's": "{plain_gradients:.1e}",
        "passes": "{passes}",
    },
    "overhead": {
        "loop": "{loop}",
        "ms a step": "{step_ms:.3f}",
        "added ms": "{added_ms:.3f} (at best {least_ms:.3f})",
    },
    "ddp": {"two processes, one thread each": "{setting}", "speed": _SPEED, "img/s": "{images_per_second:.1f}"},
    "loader": {
        "images": "{images}",
        "loader": "{loader}",
        "img/s": "{images_per_second:.0f}",
        "speed [min, max]": _SPEED,
        "95 %": "{interval[0]:.2f} to {interval[1]:.2f}",
        "per CPU second [min, max]": "{cpu_ratio:.2f} [{cpu_min:.2f}, {cpu_max:.2f}]",
        "relative to": "{base}",
    },
}


def tables(what: str, rows: list[dict[str, Any]]) -> list[str]:
    """Return the tables of ``vitlab bench WHAT``, one for each kind of row."""
    kinds = {row.get("table", what): None for row in rows}
    return [table([row for row in rows if row.get("table", what) == kind], COLUMNS[kind]) for kind in kinds]


def machine_line(facts: dict[str, Any]) -> str:
    """Return the machine in one line."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    load = ", ".join(f"{value:.1f}" for value in facts["load"])
    return (
        f"{facts['device']}; {facts['cpu']} ({', '.join(facts['flags'])}), {facts['cores']} cores, "
        f"{facts['threads']} threads, load {load}; {versions}; commit {facts['commit']}"
    )


def changes(rows: Sequence[dict[str, Any]], before: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a sentence for each ratio outside its interval in a saved run."""
    keys = ("model", "mode", "dtype", "batch", "contender", "base")
    old = {tuple(row.get(key) for key in keys): row for row in before}
    for row in rows:
        known = old.get(tuple(row.get(key) for key in keys))
        if known and not known["interval"][0] <= row["ratio"] <= known["interval"][1]:
            low, high = known["interval"]
            name = " ".join(str(row[key]) for key in keys[:5])
            yield f"{name}: {row['ratio']:.2f}, it was {known['ratio']:.2f} [{low:.2f}, {high:.2f}]"
