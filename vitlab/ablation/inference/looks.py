"""The interim looks at an ablation, stored beside its cells: each look at more seeds is another chance of an error.

A look is a report on a set of seeds. The error that it may spend depends on the maximal number of seeds, which the
first look fixes: `stats.seeds_max` of the file, or its `seeds`.
"""

import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitlab.ablation.file.spec import Ablation
from vitlab.ablation.inference.spending import overall
from vitlab.runs.directory import write_text


@dataclass(frozen=True)
class Looks:
    """The looks so far; the last is the present one.

    Args:
        counts: Number of seeds seen at each look.
        most: The maximal number of seeds.
        seeds: Seeds that the tests may use.
        added: Seeds beyond the maximum; shown but not tested.
        left_out: Seeds of an earlier look that are missing now.
    """

    counts: tuple[int, ...]
    most: int
    seeds: tuple[int, ...]
    added: tuple[int, ...] = ()
    left_out: tuple[int, ...] = ()

    @property
    def times(self) -> tuple[float, ...]:
        """Each look as a share of the most seeds."""
        return tuple(count / self.most for count in self.counts)

    def overall(self, p: float) -> float:
        """Return the error of all looks together at which a p of this one is significant."""
        return overall(p, self.times)

    def sentences(self) -> list[str]:
        """Return the sentences of a report about the looks."""
        words = []
        if self.times not in ((), (1.0,)):
            counts = ", ".join(map(str, self.counts))
            words.append(
                f"Look {len(self.counts)}, at {counts} of at most {self.most} seeds: p values are adjusted for the "
                "looks (alpha spending of Lan and DeMets, O'Brien-Fleming type)."
            )
        if self.added:
            words.append(
                f"Seeds {', '.join(map(str, self.added))} came after the error was spent, at {self.most} seeds: means "
                "include them, tests do not. An ablation with another name can test them; to leave room for more "
                "seeds, set `stats.seeds_max` before the first report."
            )
        if self.left_out:
            words.append(f"Seeds {', '.join(map(str, self.left_out))} were in an earlier look and are missing now.")
        return words


def history(ablation: Ablation) -> Path:
    """Return the file that stores the looks."""
    return ablation.directory / "looks.jsonl"


def take_look(ablation: Ablation, seeds: Sequence[int]) -> Looks:
    """Record a report on ``seeds``, and return the looks including it; exported evidence stays as it is."""
    path = history(ablation)
    lines = path.read_text().splitlines() if path.is_file() else []
    known = [json.loads(line) for line in lines]
    looks, entry = next_look(known, seeds, ablation.stats.seeds_max or len(ablation.seeds))
    if entry and seeds and not ablation.home:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        text = json.dumps({**entry, "file": ablation.digest, "time": now})
        write_text(path, "".join(f"{line}\n" for line in [*lines, text]), sync=True)
    return looks


def next_look(known: list[dict[str, Any]], seeds: Sequence[int], most: int) -> tuple[Looks, dict[str, Any] | None]:
    """Return the looks including one at ``seeds``, and the entry to record; None if it is recorded already.

    Args:
        known: The entries so far.
        seeds: The seeds of the present look.
        most: The maximal number of seeds, if this is the first look.
    """
    known = [entry for entry in known if entry["seeds"]]
    most = known[0]["most"] if known else max(most, len(seeds))
    seen: set[int] = set()
    valid: list[int] = []  # number of seeds seen at each look within the maximum
    allowed: set[int] = set()
    for look in [*(entry["seeds"] for entry in known), seeds]:
        is_new = not set(look) <= seen
        seen |= set(look)
        if is_new and len(seen) <= most:
            valid.append(len(seen))
            allowed = set(seen)
    looks = Looks(
        counts=tuple(valid),
        most=most,
        seeds=tuple(seed for seed in seeds if seed in allowed),
        added=tuple(seed for seed in seeds if seed not in allowed),
        left_out=tuple(sorted(allowed - set(seeds))),
    )
    return looks, None if any(set(entry["seeds"]) == set(seeds) for entry in known) else {
        "seeds": [*seeds],
        "most": most,
    }
