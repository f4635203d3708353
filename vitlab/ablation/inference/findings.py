"""All numbers of a report, in one table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pandas as pd

from vitlab.ablation.execution.cells import Resolved
from vitlab.ablation.inference import analyses, images
from vitlab.ablation.inference.answers import Answer, Question, answer
from vitlab.ablation.inference.audit import as_trained, fair_facts, shares
from vitlab.ablation.inference.baselines import ArmRow, answer_columns, arm_questions, arm_rows
from vitlab.ablation.inference.linear import Gates, gate_of
from vitlab.ablation.inference.looks import Looks
from vitlab.ablation.inference.measured import CellResults
from vitlab.ablation.inference.verdicts import Verdict, claim_questions, verdicts
from vitlab.analysis.catalogue import Rows
from vitlab.stats import detectable, levels


@dataclass(frozen=True)
class Findings:
    """All results of the finished cells."""

    results: CellResults
    looks: Looks
    sizes: dict[str, int]  # tests of the family of each metric; that of the primary one has all claims
    arms: list[ArmRow]  # of each metric
    verdicts: list[Verdict]
    curves: Rows
    pairs: images.Pairs
    linear: Gates  # accuracy of logistic regression

    def power(self, metric: str) -> dict[str, dict[str, Any]]:
        """Return the smallest difference in a metric that the seeds can detect, by the family of its tested rows."""
        primary = self.results.ablation.primary
        found: dict[str, list[ArmRow]] = {}
        for row in (row for row in self.arms if row.metric == metric and row.test):
            found.setdefault(primary if row.is_claimed else metric, []).append(row)
        return {family: self._power(metric, self.sizes[family], rows) for family, rows in found.items()}

    def _power(self, metric: str, m: int, tested: list[ArmRow]) -> dict[str, Any]:
        least = min((row.answer for row in tested), key=lambda found: found.estimate.n)
        n, is_paired, looks = least.estimate.n, all(row.test == "paired" for row in tested), least.looks or self.looks
        level = levels(looks.times, self.results.ablation.stats.alpha / m)[-1]
        test = "paired" if is_paired else "welch"
        smallest = detectable(n, level, is_paired)
        return {"metric": metric, "n": n, "test": test, "comparisons": m, "detectable_sd": smallest}

    def _mode(self, row: ArmRow) -> dict[str, str]:
        ablation = self.results.ablation
        return {"mode": "min"} if ablation.mode == "min" and row.metric == ablation.primary else {}

    @cached_property
    def trained(self) -> list[Resolved]:
        """The measured arms with the steps that they were trained."""
        return as_trained(self.results)

    def fairness(self) -> Rows:
        """Return the facts that should match in all arms, with relative differences to the arm to match."""
        differing = shares(self.results.ablation, self.trained)
        return [
            {"arm": arm.name, **fair_facts(arm), **{f"{k}_share": v for k, v in differing[arm.name].items()}}
            for arm in self.trained
        ]

    def table(self) -> pd.DataFrame:
        """Return every number of the report; `kind` tells the rows apart."""
        kinds: dict[str, Rows] = {
            "arm": [{**row.record(), **self._mode(row)} for row in self.arms],
            "claim": [_claim_row(v) for v in self.verdicts],
            "power": [row for metric in self.results.metrics() for row in self.power(metric).values()],
            "seeds and images": self.pairs.joint,
            "pair": self.pairs.rows,
            "analysis": self.curves,
            "fairness": self.fairness(),
        }
        return pd.DataFrame([{"kind": kind, **row} for kind, rows in kinds.items() for row in rows])


def find(results: CellResults, looks: Looks, gates: Gates | None = None) -> Findings:
    """Return the results of the finished cells."""
    primary, *others = results.metrics()
    claims = [asked.question for asked in claim_questions(results) if asked.question]
    claimed = {q.key for q in claims}
    rest = {metric: [*arm_questions(results, metric).values()] for metric in others}
    family = [*arm_questions(results, primary).values(), *claims]
    family += [q for questions in rest.values() for q in questions if q.key in claimed]
    answers = answer(results, looks, family)
    sizes = {primary: _size(answers, family)}
    for metric, questions in rest.items():  # exploratory, in a separate family
        mine = [q for q in questions if q.key not in claimed]
        answers |= answer(results, looks, mine)
        sizes[metric] = _size(answers, mine)
    gates = gates or {}
    rows = [row for metric in results.metrics() for row in arm_rows(results, metric, answers, claimed)]
    return Findings(
        results=results,
        looks=looks,
        sizes=sizes,
        arms=[_gated(results, gates, row) for row in rows],
        verdicts=verdicts(results, looks, answers),
        curves=analyses.curve_rows(results),
        pairs=images.pairs_of(results),
        linear=gates,
    )


def _size(answers: Mapping[Question, Answer], family: Sequence[Question]) -> int:
    """Return the number of comparisons of a family that a test was possible for."""
    return len({q.key for q in family if answers[q].estimate.is_testable})


def _gated(results: CellResults, gates: Gates, row: ArmRow) -> ArmRow:
    """Add `under-trained` to the verdict of a row whose mean does not beat logistic regression."""
    arm = results.arm(row.arm)
    least = gate_of(gates, results.ablation, arm).get("acc1") if arm and row.metric == "acc1" else None
    is_under = least is not None and row.n > 0 and row.mean <= least
    return replace(row, verdict=f"{row.verdict}; under-trained") if is_under else row


def _claim_row(v: Verdict) -> dict[str, Any]:
    n = v.answer.estimate.n
    row = {"claim": v.claim.text, "setting": v.setting, "n": n, "planned": v.planned, "missing": v.planned - n}
    row |= {**answer_columns(v.answer), "excess_p": v.answer.excess.adjusted}
    return {**row, "verdict": v.word, "more_seeds": v.more}
