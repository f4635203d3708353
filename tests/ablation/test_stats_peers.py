"""The statistics beside statsmodels': the same numbers, by other code."""

import math

import numpy as np
import pytest

from vitlab.stats import contrast, detectable, holm, interval, mcnemar, power, seeds_needed

multitest = pytest.importorskip("statsmodels.stats.multitest")
contingency = pytest.importorskip("statsmodels.stats.contingency_tables")
powers = pytest.importorskip("statsmodels.stats.power")
weights = pytest.importorskip("statsmodels.stats.weightstats")
RNG = np.random.default_rng(0)


@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_holms_adjustment_equals_that_of_statsmodels(count):
    p = RNG.uniform(0, 0.2, count) ** 2
    assert [adjusted for adjusted, _ in holm(p)] == pytest.approx(
        multitest.multipletests(p, method="holm")[1], abs=1e-15
    )


def test_welch_paired_interval_and_equivalence():
    for n, m in ((3, 3), (5, 8), (10, 4)):
        a, b = RNG.normal(0.9, 0.01, n), RNG.normal(0.89, 0.03, m)
        ours, theirs = contrast([a, b], [1.0, -1.0]), weights.CompareMeans.from_data(a, b)
        assert ours.p() == pytest.approx(theirs.ttest_ind(usevar="unequal")[1], rel=1e-10)
        assert ours.interval(0.95) == pytest.approx(theirs.tconfint_diff(0.05, usevar="unequal"), rel=1e-9)
        assert ours.p_equivalent(0.02) == pytest.approx(
            weights.ttost_ind(a, b, -0.02, 0.02, usevar="unequal")[0], rel=1e-9
        )
        whole = contrast([a[:3], b[:3]], [1.0, -1.0], pair=True)
        assert whole.p_equivalent(0.02) == pytest.approx(weights.ttost_paired(a[:3], b[:3], -0.02, 0.02)[0], rel=1e-9)
        assert interval(a, 0.9) == pytest.approx(weights.DescrStatsW(a).tconfint_mean(0.1), rel=1e-12)


def test_mcnemar():
    for a, b in ((30, 10), (0, 5), (7, 7)):
        assert mcnemar(a, b) == pytest.approx(contingency.mcnemar([[0, a], [b, 0]], exact=True).pvalue, rel=1e-12)


@pytest.mark.parametrize("n", [2, 3, 5, 10, 30])
def test_power_and_the_smallest_effect(n):
    for level in (0.05, 0.01, 0.0005):
        for distance in (0.1, 0.5, 1.0, 3.0):
            theirs = powers.TTestPower().power(distance, n, level, alternative="larger", df=None)
            assert power(distance, 1.0, n - 1.0, [n], 2 * level)[0] == pytest.approx(theirs, abs=2e-9)
    theirs = powers.TTestPower().solve_power(None, n, 0.025, 0.8, alternative="larger")
    if n > 2:
        assert detectable(n, 0.05) == pytest.approx(float(np.squeeze(theirs)), rel=1e-5)


def test_the_effect_that_two_seeds_detect_at_the_level_of_an_early_look_is_known_in_closed_form():
    limit = 1 / math.tan(math.pi * 1e-6 / 2)  # of Student's t with one degree of freedom
    true = limit * 1.2815515655 / math.sqrt(2)  # a half-normal spread below that in four of five cases
    assert detectable(2, 1e-6) == pytest.approx(true, rel=1e-4)
    theirs = powers.TTestPower().solve_power(None, 2, 0.5e-6, 0.8, alternative="larger")
    assert abs(float(np.squeeze(theirs)) / true - 1) > 0.5, "statsmodels solves it now: use it"


def test_seeds_needed():
    values = [0.90, 0.92, 0.91]
    estimate = contrast([values, [0.895, 0.91, 0.90]], [1.0, -1.0], pair=True)
    effect = 0.01 / (estimate.error * math.sqrt(3))
    theirs = powers.TTestPower().solve_power(effect, None, 0.025, 0.8, alternative="larger")
    assert seeds_needed(estimate, 0.01, 0.05) == math.ceil(float(np.squeeze(theirs)))
