"""Statistics against closed forms, scipy's documented examples, and simulation."""

import numpy as np
import pytest
from scipy import stats as reference

from vitlab.ablation import stats

# The blood counts of Dunnett 1955, as scipy's documentation of `dunnett` gives them.
CONTROL = [7.40, 8.50, 7.20, 8.24, 9.84, 8.32]
DRUG_A = [9.76, 8.80, 7.68, 9.36]
DRUG_B = [12.80, 9.68, 12.16, 9.20, 10.55]


def test_dunnett_gives_the_published_p_values():
    found = stats.against([DRUG_A, DRUG_B], CONTROL, "dunnett")
    assert [d.adjusted for d in found] == pytest.approx([0.62004941, 0.0059035], abs=2e-4)
    assert found[1].low > 0 > found[0].low


def test_welch_with_holm_by_hand():
    found = stats.against([DRUG_A, DRUG_B], CONTROL, "welch")
    p = [reference.ttest_ind(x, CONTROL, equal_var=False).pvalue for x in (DRUG_A, DRUG_B)]
    assert p[1] < p[0]
    assert [d.adjusted for d in found] == pytest.approx([max(p[0], 2 * p[1]), 2 * p[1]])
    assert found[0].value == pytest.approx(np.mean(DRUG_A) - np.mean(CONTROL))


def test_the_interval_of_three_values_by_hand():
    low, high = stats.interval([1.0, 2.0, 3.0])
    half = 4.302652730 * 1 / np.sqrt(3)  # t of 2 degrees of freedom
    assert (low, high) == pytest.approx((2 - half, 2 + half))


def test_one_value_has_no_interval_and_no_test():
    assert np.isnan(stats.interval([1.0])).all()
    assert stats.against([[1.0]], [2.0, 3.0], "dunnett") is None


def test_values_without_any_spread_are_not_tested():
    assert stats.against([[1.0, 1.0]], [2.0, 2.0], "welch") is None
    assert stats.interval([1.0, 1.0, 1.0]) == (1.0, 1.0)


def test_equivalence_by_two_one_sided_tests():
    a, b, margin = DRUG_A, CONTROL, 2.0
    upper = reference.ttest_ind(np.array(a) - margin, b, equal_var=False, alternative="less").pvalue
    lower = reference.ttest_ind(np.array(a) + margin, b, equal_var=False, alternative="greater").pvalue
    assert stats.equivalence(a, b, margin) == pytest.approx(max(upper, lower))
    assert stats.equivalence(a, b, 0.01) > 0.05


def test_equivalence_with_a_number():
    x = [0.24, 0.25, 0.26]
    p = reference.ttest_1samp(x, 0.25 + 0.04, alternative="less").pvalue
    assert stats.equivalence(x, 0.25, 0.04) == pytest.approx(p)


def test_the_interaction_is_the_difference_of_differences():
    cells = [[3.0, 3.1, 2.9], [1.0, 1.2, 0.8], [9.0, 9.1, 8.9], [2.0, 2.1, 1.9]]
    found = stats.interaction(cells)  # (3 - 1) - (9 - 2)
    assert found.value == pytest.approx(-5)
    assert found.low < -5 < found.high < 0
    assert found.p < 1e-4


def test_holm_leaves_out_what_could_not_be_tested():
    assert stats.holm([0.01, float("nan"), 0.03]) == pytest.approx([0.02, float("nan"), 0.03], nan_ok=True)


def test_few_seeds_take_dunnett_and_five_take_welch():
    assert stats.choose_test("auto", [3, 5]) == "dunnett"
    assert stats.choose_test("auto", [5, 5]) == "welch"
    assert stats.choose_test("welch", [3, 3]) == "welch"


@pytest.mark.parametrize(
    ("n", "k", "test", "expected"),
    [(3, 1, "welch", 3.54), (3, 7, "welch", 7.1), (5, 4, "welch", 2.8), (3, 4, "dunnett", 3.12)],
)
def test_the_smallest_effect_agrees_with_the_tables(n, k, test, expected):
    assert stats.detectable(n, k, test) == pytest.approx(expected, rel=0.02)


def test_the_seeds_needed_for_an_effect_of_one_sd_are_seventeen():
    x = np.array([-1.0, 0.0, 1.0])
    assert stats.seeds_needed(1.0, x, x + 1) == 17  # the textbook number for 80 % power at .05


@pytest.mark.slow
def test_intervals_of_three_values_cover_the_mean_as_often_as_they_say():
    rng = np.random.default_rng(0)
    covered = [low < 0 < high for low, high in (stats.interval(rng.standard_normal(3)) for _ in range(4000))]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.012)


@pytest.mark.slow
@pytest.mark.parametrize(("test", "reports"), [("dunnett", 60), ("welch", 100)])
def test_equal_arms_are_called_different_in_one_report_of_twenty(test, reports):
    rng = np.random.default_rng(1)
    alarms = []
    for _ in range(reports):
        control, *arms = rng.standard_normal((5, 5))
        alarms.append(any(d.adjusted < 0.05 for d in stats.against(arms, control, test)))
    assert np.mean(alarms) <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / reports)
