"""Everything that a report says, as numbers: one table holds all of them."""

from dataclasses import dataclass
from typing import Any

import pandas as pd

from vitlab.ablation.verdict import analyses, images
from vitlab.ablation.verdict.arms import ArmRow, arm_rows
from vitlab.ablation.verdict.audit import facts, shares
from vitlab.ablation.verdict.measured import Results
from vitlab.ablation.verdict.verdicts import Verdict, verdicts
from vitlab.stats import choose_test, detectable

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Findings:
    """What the finished cells say."""

    results: Results
    arms: list[ArmRow]  # of each metric
    verdicts: list[Verdict]
    curves: Rows
    pairs: Rows
    joint: Rows

    def power(self, metric: str) -> dict[str, Any] | None:
        """Return the smallest difference that the seeds of a metric can show; None where nothing is tested."""
        mine = [row for row in self.arms if row.metric == metric]
        tested = [row for row in mine if row.test]
        if not tested:
            return None
        n = min(row.n for row in mine if row.n > 1)
        k = max(1, len(tested) // max(1, len(mine) - len(tested)))
        test, ci = choose_test(min(row.test for row in tested), [n]), self.results.ablation.stats.ci
        return {"metric": metric, "n": n, "test": test, "detectable_sd": detectable(n, k, test, ci)}

    def fairness(self) -> Rows:
        """Return what should be alike in all arms, with its share above or below that of the arm to match."""
        differing = shares(self.results.ablation, self.results.resolved)
        return [
            {"arm": arm.arm.name, **facts(arm), **{f"{k}_share": v for k, v in differing[arm.arm.name].items()}}
            for arm in self.results.resolved
        ]

    def table(self) -> pd.DataFrame:
        """Return every number of the report; `kind` tells the rows apart."""
        powers = [self.power(metric) for metric in self.results.metrics()]
        kinds: dict[str, Rows] = {
            "arm": [row.record() for row in self.arms],
            "claim": [_claim_row(v) for v in self.verdicts],
            "power": [row for row in powers if row],
            "seeds and images": self.joint,
            "pair": self.pairs,
            "analysis": self.curves,
            "fairness": self.fairness(),
        }
        return pd.DataFrame([{"kind": kind, **row} for kind, rows in kinds.items() for row in rows])


def find(results: Results) -> Findings:
    """Return what the finished cells say."""
    return Findings(
        results=results,
        arms=arm_rows(results),
        verdicts=verdicts(results),
        curves=analyses.curve_rows(results),
        pairs=images.pairs(results),
        joint=images.joint(results),
    )


def _claim_row(v: Verdict) -> dict[str, Any]:
    n, planned = map(int, v.n.split("/"))
    d = v.difference
    row = {"claim": v.claim.text, "setting": v.setting, "n": n, "planned": planned, "missing": planned - n}
    row |= {"difference": d.value, "difference_low": d.low, "difference_high": d.high, "adjusted_p": v.p}
    return {**row, "verdict": v.word, "more_seeds": v.more}
