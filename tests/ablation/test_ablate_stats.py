"""Statistics against closed forms, scipy's documented examples, and simulation."""

import numpy as np
import pytest
from scipy import stats as reference

from vitlab import stats

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


def test_the_seeds_needed_have_an_answer_at_every_size_of_an_effect():
    x = np.array([0.0, 1.0, 2.0])
    assert [stats.seeds_needed(d, x, x + d) for d in (0.0, 0.05, 2.9, 5.0, 50.0)] == [None, None, 4, 3, 2]


@pytest.mark.parametrize(("arms", "n", "factor"), [(1, 6, 2.23), (3, 6, 2.54), (4, 3, 2.89), (4, 5, 2.65)])
def test_dunnetts_intervals_have_the_factors_of_his_table(arms, n, factor):
    x = np.random.default_rng(0).standard_normal((arms + 1, n))
    found = stats.against(x[1:], x[0], "dunnett")[0]
    pooled = np.sqrt(x.var(axis=1, ddof=1).mean() * 2 / n)
    assert (found.high - found.low) / 2 / pooled == pytest.approx(factor, abs=0.02)  # two-sided, 5 %, Dunnett 1964


def test_dunnett_with_one_arm_is_students_test():
    (found,) = stats.against([DRUG_B], CONTROL, "dunnett")
    assert found.adjusted == pytest.approx(reference.ttest_ind(DRUG_B, CONTROL).pvalue, abs=5e-4)


def test_holm_by_hand():
    assert stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_the_interaction_has_the_standard_error_of_hc3():
    cells = [[3.0, 3.1, 2.9], [1.0, 1.2, 0.8], [9.0, 9.1, 8.9], [2.0, 2.1, 1.9]]
    n = 3  # in a saturated model each cell adds its sum of squares / (n - 1)^2: residuals over one minus 1 / n, squared
    variance = sum(np.sum((np.array(x) - np.mean(x)) ** 2) / (n - 1) ** 2 for x in cells)
    t = reference.t(4 * (n - 1))
    found = stats.interaction(cells)
    assert found.high - found.low == pytest.approx(2 * t.isf(0.025) * np.sqrt(variance))
    assert found.p == pytest.approx(2 * t.sf(5 / np.sqrt(variance)), rel=1e-6)


def test_mcnemar_is_the_sign_test_of_the_images_that_differ():
    assert stats.mcnemar(2, 9) == pytest.approx(reference.binomtest(2, 11, 0.5).pvalue)
    assert stats.mcnemar(0, 0) == 1.0


def test_seeds_and_images_by_hand():
    a, b = np.array([[1, 1, 0, 1.0], [1, 1, 1, 1]]), np.array([[0, 1, 0, 1.0], [1, 0, 0, 1]])
    found = stats.seeds_and_images(a, b)
    parts = [0.03125 / 2, 0.0, np.var([0.5, 0.5, 0.5, 0], ddof=1) / 4]  # seeds of a, seeds of b, images
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / 1 + parts[2] ** 2 / 3)
    half = reference.t(freedom).isf(0.025) * np.sqrt(sum(parts))
    assert (found.value, found.high - found.low) == pytest.approx((0.375, 2 * half))


def chances(hits, n, p):
    """Return the p value of ``hits`` of ``n`` against a true share ``p``."""
    return reference.binomtest(int(hits), n, p).pvalue


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 5])
def test_intervals_cover_the_mean_as_often_as_they_say(n):
    rng = np.random.default_rng(n)
    values = rng.standard_normal((1000, n))
    covered = sum(low < 0 < high for low, high in map(stats.interval, values))
    assert chances(covered, 1000, 0.95) > 1e-3
    half = 1.96 * values.std(axis=1, ddof=1) / np.sqrt(n)
    assert chances((np.abs(values.mean(axis=1)) < half).sum(), 1000, 0.95) < 1e-9  # what a normal interval would do


@pytest.mark.slow
def test_welchs_difference_covers_the_truth_when_spreads_differ():
    rng = np.random.default_rng(2)
    found = [stats.two(3 * rng.standard_normal(5) + 1, rng.standard_normal(5)) for _ in range(800)]
    assert chances(sum(d.low < 1 < d.high for d in found), 800, 0.95) > 1e-3


@pytest.mark.slow
def test_the_joint_interval_covers_the_truth_for_new_seeds_and_images():
    rng = np.random.default_rng(3)

    def runs(shift):  # images differ in difficulty and in which arm they suit, seeds in luck
        luck = 0.3 * rng.standard_normal((3, 1))
        return (base + shift + luck + rng.standard_normal((3, 200)) > 0).astype(float)

    big = np.random.default_rng(4).standard_normal((2, 1_000_000))
    ones = reference.norm(0, np.sqrt(1 + 0.3**2)).cdf
    truth = float(np.mean(ones(big[0] + 0.5) - ones(big[0])))
    covered = 0
    for _ in range(300):
        base = rng.standard_normal(200)
        d = stats.seeds_and_images(runs(0.5), runs(0.0))
        covered += d.low < truth < d.high
    assert covered / 300 > 0.93  # it may be wide, for the images' own noise counts in both variances


@pytest.mark.slow
def test_equal_arms_are_called_different_by_welch_and_holm_in_one_report_of_twenty():
    values = np.random.default_rng(1).standard_normal((5000, 5, 5))
    p = reference.ttest_ind(values[:, 1:], values[:, :1], axis=2, equal_var=False).pvalue  # (reports, arms)
    smallest = p.min(axis=1)
    for near in (0.011, 0.0122, 0.0128, 0.014):  # Holm's first step: 0.05 / 4; reports on either side of it
        i = np.argmin(np.abs(smallest - near))
        found = stats.against(values[i, 1:], values[i, 0], "welch")
        assert any(d.adjusted < 0.05 for d in found) == (near < 0.0125)
    alarms, raw = (smallest < 0.05 / 4).sum(), (smallest < 0.05).sum()
    assert reference.binomtest(int(alarms), 5000, 0.05, alternative="greater").pvalue > 0.01
    assert chances(raw, 5000, 0.05) < 1e-9  # what no adjustment would do


@pytest.mark.slow
def test_equal_arms_are_called_different_by_dunnett_in_one_report_of_twenty():
    values = np.random.default_rng(1).standard_normal((20_000, 5, 5))
    error = np.sqrt(values.var(axis=2, ddof=1).mean(axis=1) * 2 / 5)
    largest = np.abs(values[:, 1:].mean(axis=2) - values[:, :1].mean(axis=2)).max(axis=1) / error
    first = stats.against(values[0, 1:], values[0, 0], "dunnett")[0]
    factor = (first.high - first.low) / 2 / error[0]  # the test alarms beyond this, which costs 0.3 s to find
    for share in (0.9, 0.97, 1.03, 1.1):  # reports on either side of it
        i = np.argmin(np.abs(largest / factor - share))
        found = stats.against(values[i, 1:], values[i, 0], "dunnett")
        assert any(d.adjusted < 0.05 for d in found) == (share > 1)
    assert chances((largest > factor).sum(), 20_000, 0.05) > 1e-3


@pytest.mark.slow
def test_equivalence_is_claimed_at_the_margin_in_one_case_of_twenty():
    rng = np.random.default_rng(5)
    values = rng.standard_normal((800, 2, 5))
    claimed = sum(stats.equivalence(a + 4, b, 4.0) < 0.05 for a, b in values)  # the true difference is the margin
    assert chances(claimed, 800, 0.05) > 1e-3
