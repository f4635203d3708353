"""The interim looks at an ablation, recorded in its chain: each look at more seeds is another chance of an error.

A look is a report on a set of seeds; at a comparison, on the seeds that all of its arms have. The error that it may
spend depends on the maximal number of seeds, which the first look fixes: `stats.seeds_max` of the file, or its `seeds`.
It is spent after Lan and DeMets 1983, of O'Brien and Fleming's type; levels are of normal means, applied to the p
values of t tests (Jennison and Turnbull 2000).
"""

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitlab.ablation.evidence.chain import FILE, Chain, append, read_chain
from vitlab.ablation.file.spec import Ablation
from vitlab.errors import UsageError
from vitlab.runs.atomic import write_text
from vitlab.runs.matching import is_there
from vitlab.runs.records import now_utc
from vitlab.stats import level, overall

Had = Mapping[str, Mapping[str, Sequence[int]]]  # metric: arm: seeds


@dataclass(frozen=True)
class Looks:
    """The looks so far; the last is the present one.

    Args:
        counts: Number of seeds seen at each look.
        most: The maximal number of seeds.
        seeds: Seeds that the tests may use.
        added: Seeds beyond the maximum; shown but not tested.
        left_out: Seeds of an earlier look that are missing now.
        entries: The records of all looks before this one.
    """

    counts: tuple[int, ...]
    most: int
    seeds: tuple[int, ...]
    added: tuple[int, ...] = ()
    left_out: tuple[int, ...] = ()
    entries: tuple[Mapping[str, Any], ...] = ()

    @property
    def times(self) -> tuple[float, ...]:
        """Each look as a share of the most seeds."""
        return tuple(count / self.most for count in self.counts)

    def of(self, metric: str, arms: Sequence[str], seeds: Sequence[int]) -> "Looks":
        """Return the looks at one comparison: a seed counts from the report at which all of its arms had it.

        Args:
            metric: The metric that is compared.
            arms: The arms that are compared.
            seeds: Seeds that all of them have now.
        """
        allowed = {*self.seeds, *self.left_out}
        past = [[seed for seed in _had(entry, metric, arms) if seed in allowed] for entry in self.entries]
        known = [{"seeds": seen, "most": self.most} for seen in past]
        return looks_at(known, [seed for seed in seeds if seed in allowed], self.most)

    def overall(self, p: float) -> float:
        """Return the error of all looks together at which a p of this one is significant."""
        return overall(p, self.times)

    def level(self, error: float) -> float:
        """Return the p of this look below which the error of all looks together is below ``error``."""
        return level(error, self.times)

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
    """Return the file that stored the looks before the chain did, and still does where the cells have no chain."""
    return ablation.directory / "looks.jsonl"


def _had(entry: Mapping[str, Any], metric: str, arms: Sequence[str]) -> list[int]:
    """Return the seeds of a look that all of some arms had; older records do not tell of arms: each had all."""
    if "had" not in entry:
        return list(entry["seeds"])
    had = [set(entry["had"].get(metric, {}).get(arm, ())) for arm in arms]
    return [seed for seed in entry["seeds"] if all(seed in mine for mine in had)]


def take_look(ablation: Ablation, seeds: Sequence[int], had: Had | None = None) -> Looks:
    """Record a report, and return the looks including it; exported evidence stays as it is.

    Args:
        ablation: The ablation.
        seeds: The seeds of the report.
        had: Of each metric, the seeds of each arm; by default, each arm has all.
    """
    known = _known(ablation)
    looks = looks_at(known, seeds, _most(ablation))
    entry: dict[str, Any] = {"seeds": [*seeds], "most": looks.most} | ({"had": had} if had else {})
    entry["split"] = ablation.evaluate
    if seeds and not ablation.is_evidence and not any(_is_same(old, entry) for old in known):
        entry["file"] = ablation.digest
        if is_there(ablation.directory / FILE):
            append(ablation.directory, "look", **entry)
        else:  # a chain that began here would lack all of its cells
            lines = [*_lines(ablation), json.dumps({**entry, "time": now_utc()})]
            write_text(history(ablation), "".join(f"{line}\n" for line in lines), sync=True)
    return looks


def _is_same(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Return whether two records are of the same look; those of 0.2.0 or before do not tell the split."""
    is_split = old.get("split", new["split"]) == new["split"]
    return is_split and set(old["seeds"]) == set(new["seeds"]) and old.get("had") == new.get("had")


def planned_look(ablation: Ablation) -> Looks:
    """Return the looks including one at all planned seeds, without recording it."""
    return looks_at(_known(ablation), ablation.seeds, _most(ablation))


def _most(ablation: Ablation) -> int:
    return ablation.stats.seeds_max or len(ablation.seeds)


def _lines(ablation: Ablation) -> list[str]:
    path = history(ablation)
    return path.read_text().splitlines() if path.is_file() else []


def _known(ablation: Ablation) -> list[dict[str, Any]]:
    """Return the records of the looks so far, oldest first.

    Raises:
        UsageError: One cannot be read.
    """
    found: list[dict[str, Any]] = []
    for i, line in enumerate(_lines(ablation), 1):
        try:
            found.append(json.loads(line))
            _ = found[-1]["seeds"], found[-1]["most"]
        except (ValueError, TypeError, KeyError) as error:
            text = f"{history(ablation)}, line {i}, is no look: p values would not count it; put a copy in its place"
            raise UsageError(text) from error
    if chain := read_chain(ablation.directory):
        names = _names(chain, {arm.name for arm in ablation.arms})
        found += [_as_named_now(record, names) for record in chain.of("look")]
    return found


def _names(chain: Chain, arms: Set[str]) -> dict[str, set[str]]:
    """Return other names of the file's arms: those under which a cell of the same seed and identity was measured."""
    known: dict[str, set[str]] = {}  # seed and identity: arms
    for record in chain.of("cell"):
        arm, _, cell = record["cell"].partition("/")
        known.setdefault(cell, set()).add(arm)
    return {arm: set[str]().union(*(names for names in known.values() if arm in names)) - arms for arm in arms}


def _as_named_now(look: Mapping[str, Any], names: Mapping[str, Set[str]]) -> dict[str, Any]:
    """Return a look with its arms as the file calls them now: the numbers of a renamed arm were seen, too."""
    if "had" not in look:
        return dict(look)
    old, had = set[str]().union(*names.values()), {}
    for metric, seeds in look["had"].items():
        had[metric] = {arm: mine for arm, mine in seeds.items() if arm not in old}
        for arm, others in names.items():
            if mine := [seed for name in (arm, *sorted(others)) for seed in seeds.get(name, ())]:
                had[metric][arm] = list(dict.fromkeys(mine))
    return {**look, "had": had}


def looks_at(known: Sequence[Mapping[str, Any]], seeds: Sequence[int], most: int) -> Looks:
    """Return the looks including one at ``seeds``.

    A look on one split counts on another, too: the same networks stand behind both, and their seeds go on or not
    after it.

    Args:
        known: The records so far, oldest first.
        seeds: The seeds of the present look.
        most: The maximal number of seeds, if this is the first look.
    """
    known = [entry for entry in known if entry["seeds"]]
    most = known[0]["most"] if known else max(most, len(seeds))
    valid: list[int] = []  # number of seeds seen at each look within the maximum
    allowed: set[int] = set()
    for look in [*(entry["seeds"] for entry in known), seeds]:
        if new := [seed for seed in look if seed not in allowed][: most - len(allowed)]:
            allowed |= set(new)
            valid.append(len(allowed))
    return Looks(
        counts=tuple(valid),
        most=most,
        seeds=tuple(seed for seed in seeds if seed in allowed),
        added=tuple(seed for seed in seeds if seed not in allowed),
        left_out=tuple(sorted(allowed - set(seeds))),
        entries=tuple(known),
    )
