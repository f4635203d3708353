"""One engine of inference: what reports say wrongly, and how often, when the truth is known."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from scipy import stats as reference
from scipy.stats import norm

from tests.ablation.made_up import built, give, lose, without_numbers
from vitlab.ablation.evidence.chain import append, read_chain
from vitlab.ablation.execution.cells import Resolved
from vitlab.ablation.execution.resolve import _refuse_equal
from vitlab.ablation.file.spec import read_ablation
from vitlab.ablation.inference import linear, looks, plan
from vitlab.ablation.inference.answers import NOTHING, Answer, Question, answer, share_batches
from vitlab.ablation.inference.baselines import arm_questions
from vitlab.ablation.inference.findings import find
from vitlab.ablation.inference.looks import Looks, history, looks_at, take_look
from vitlab.ablation.inference.verdicts import additional_seeds
from vitlab.ablation.report.sections import _answer, _cautions, _digits, _gate_words, _main_tables, _own_looks, _why
from vitlab.errors import UsageError
from vitlab.runs.directory import RunDir
from vitlab.stats import Estimate, detectable, levels, overall, spent

MARGIN = 2.0


def all_at_once(n):
    return Looks((n,), n, tuple(range(n)))


def results_of(folder, names, n, claims=(), metric="score", secondary=(), **stats):
    """Results without numbers, of arms that are compared with the first."""
    (folder / "base.yaml").write_text("{}\n")
    axes = {"variant": {name: {"model.lr": float(i)} for i, name in enumerate(names)}}
    content = {"name": "made-up", "base": "base.yaml", "axes": axes, "baseline": {"variant": names[0]}, "seeds": n}
    content |= {"metric": {"primary": metric, "secondary": list(secondary)}}
    content |= {"claims": list(claims), "stats": {"margin": MARGIN, **stats}}
    (folder / "made-up.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    ablation = read_ablation(folder / "made-up.yaml")
    return without_numbers(ablation)


def fill(results, values, metric="score"):
    """Give each arm its values, ``(arms, seeds)``."""
    arms = results.ablation.arms
    return give(
        results,
        {(arm.name, s): {metric: float(v)} for arm, x in zip(arms, values, strict=True) for s, v in enumerate(x)},
    )


def draw(rng, means, n, correlation):
    """Return ``(arms, seeds)`` with sd 1 whose seeds are alike in all arms; every other arm spreads twice as much."""
    shared, own = rng.standard_normal((1, n)), rng.standard_normal((len(means), n))
    spread = np.where(np.arange(len(means)) % 2, 2.0, 1.0)[:, None]
    return np.asarray(means)[:, None] + np.sqrt(correlation) * shared + np.sqrt(1 - correlation) * spread * own


def at_most(hits, n, share):
    """Whether so many hits may happen where the share is at most this."""
    return reference.binomtest(int(hits), n, share, alternative="greater").pvalue > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("correlation", [pytest.param(0.0, marks=pytest.mark.rare), 0.9])
@pytest.mark.parametrize(
    ("arms", "n"), [(4, 3), *(pytest.param(*n, marks=pytest.mark.rare) for n in ((5, 5), (10, 5)))]
)
def test_of_twenty_reports_on_equal_arms_at_most_one_finds_a_difference(tmp_path, arms, n, correlation):
    results = results_of(tmp_path, [f"a{i}" for i in range(arms)], n, ["a1 > a0", "a2 > a1"])
    rng, false, reports = np.random.default_rng(arms), 0, 400
    for _ in range(reports):
        found = find(fill(results, draw(rng, [0.0] * arms, n, correlation)), all_at_once(n))
        words = [row.verdict for row in found.arms] + [v.word for v in found.verdicts]
        false += any(word.startswith(("higher", "lower", "supported", "refuted")) for word in words)
    assert at_most(false, reports, 0.05), false


@pytest.mark.slow
@pytest.mark.parametrize("correlation", [pytest.param(0.0, marks=pytest.mark.rare), 0.9])
@pytest.mark.parametrize(
    ("arms", "n"), [(4, 3), *(pytest.param(*n, marks=pytest.mark.rare) for n in ((5, 5), (10, 5)))]
)
def test_of_twenty_reports_on_arms_at_the_margin_at_most_one_finds_an_equivalence(tmp_path, arms, n, correlation):
    results = results_of(tmp_path, [f"a{i}" for i in range(arms)], n, [f"a1 ~ a0 within {MARGIN}"])
    rng, false, reports = np.random.default_rng(arms), 0, 400
    for _ in range(reports):
        found = find(fill(results, draw(rng, [0.0] + [MARGIN] * (arms - 1), n, correlation)), all_at_once(n))
        words = [row.verdict for row in found.arms] + [v.word for v in found.verdicts]
        false += any("equivalent" in word or "within" in word or word == "supported" for word in words)
    assert at_most(false, reports, 0.05), false


POINT = 0.01  # of accuracy


@pytest.mark.slow
@pytest.mark.parametrize("n", [4, *(pytest.param(n, marks=pytest.mark.rare) for n in (3, 5, 10))])
def test_false_verdicts_of_each_kind_are_at_most_the_declared_level(tmp_path, n):
    """From the numbers of cells to the words: ``a1`` is better than ``a0`` by the margin, and ``a2`` equals ``a0``."""
    claims = ["a1 > a0", "a2 > a0", f"a1 ~ a0 within {POINT}", f"a2 ~ a0 within {POINT}"]
    results = results_of(tmp_path, ["a0", "a1", "a2"], n, claims, metric="acc1", margin=POINT)
    draws, rng = 400, np.random.default_rng(n)
    false = {"difference": 0, "equivalence": 0, "direction": 0, "no equivalence": 0}
    for _ in range(draws):
        values = 0.8 + draw(rng, [0.0, POINT / 0.003, 0.0], n, 0.8) * 0.003
        found = find(fill(results, values, "acc1"), all_at_once(n))
        better, same, alike, equal = (v.word for v in found.verdicts)
        by_arm = {row.arm: row.verdict for row in found.arms}
        false["difference"] += same in ("supported", "refuted") or by_arm["a2"].startswith(("higher", "lower"))
        false["direction"] += better == "refuted" or by_arm["a1"].startswith("lower")
        within = alike == "supported" or better == "equivalent" or "equivalent" in by_arm["a1"]
        false["equivalence"] += within  # at the margin, where it is not within it
        false["no equivalence"] += "refuted" in (alike, equal)  # at the margin at most
    assert all(at_most(count, draws, 0.05) for count in false.values()), false


@pytest.mark.slow
@pytest.mark.parametrize("correlation", [pytest.param(0.0, marks=pytest.mark.rare), 0.9])
@pytest.mark.parametrize(("arms", "n"), [(4, 3), pytest.param(10, 5, marks=pytest.mark.rare)])
def test_every_printed_interval_covers_the_truth_as_often_as_it_says(tmp_path, arms, n, correlation):
    results = results_of(tmp_path, [f"a{i}" for i in range(arms)], n)
    truth = np.linspace(0, 3, arms)
    rng, missed, reports = np.random.default_rng(arms), np.zeros(3), 300
    for _ in range(reports):
        rows = find(fill(results, draw(rng, truth, n, correlation)), all_at_once(n)).arms[1:]
        for row, true in zip(rows, truth[1:], strict=True):
            a = row.answer
            for i, test in enumerate((a.difference, a.equivalence, a.unpaired)):
                missed[i] += not test.low <= true <= test.high
    shares = missed / reports / (arms - 1)
    # of 95, 90 and 95 %; intervals of one report are alike, so that the bound is wider than a binomial one
    assert shares[0] < 0.06 and shares[1] < 0.115 and shares[2] < 0.06, shares


@pytest.mark.slow
def test_adding_seeds_until_something_is_significant_errs_in_at_most_one_case_of_twenty():
    rng, studies, counts = np.random.default_rng(0), 3000, (3, 4, 5, 6, 8)
    values = rng.standard_normal((studies, 8))
    naive, spending = np.zeros(studies, bool), np.zeros(studies, bool)
    for k, n in enumerate(counts):
        p = reference.ttest_1samp(values[:, :n], 0, axis=1).pvalue
        times = tuple(c / 8 for c in counts[: k + 1])
        naive |= p < 0.05
        level = levels(times, 0.05)[-1]
        spending |= p < level
        assert overall(0.97 * level, times) < 0.05 < overall(1.03 * level, times)
    assert at_most(spending.sum(), studies, 0.05), spending.mean()
    assert naive.mean() > 0.1  # what nobody counting the looks would do


def test_the_levels_of_the_looks_are_the_published_ones():
    # Lan and DeMets 1983 as tabulated by Reboussin et al. 2000: z values of five and of two equally spaced looks
    assert norm.isf(np.array(levels([0.2, 0.4, 0.6, 0.8, 1.0], 0.05)) / 2) == pytest.approx(
        [4.8769, 3.3569, 2.6803, 2.2898, 2.0310], abs=1e-3
    )
    assert norm.isf(np.array(levels([0.5, 1.0], 0.05)) / 2) == pytest.approx([2.9626, 1.9686], abs=1e-3)
    assert levels([1.0], 0.05) == pytest.approx([0.05]) and spent(1.0, 0.05) == pytest.approx(0.05)
    assert overall(0.03, [1.0]) == 0.03 and overall(0.03, [0.6]) > 0.05


def test_the_table_and_a_claim_agree_on_the_same_comparison(tmp_path):
    names = ["none", "learned", "sincos"]
    claims = ["learned > none", "none > learned", "sincos ~ none within 2.0", "sincos > learned"]
    results = results_of(tmp_path, names, 5, claims)
    rng = np.random.default_rng(1)
    for means in ([0, 0, 0], [0, 9, 0], [0, 0.5, 0.2], [0, 2.5, 5]):
        found = find(fill(results, draw(rng, means, 5, 0.9)), all_at_once(5))
        learned, mirror, equal, _ = found.verdicts
        row = {row.arm: row.answer for row in found.arms[1:]}
        assert learned.answer.difference == row["learned"].difference
        assert mirror.answer.difference.adjusted == row["learned"].difference.adjusted
        assert equal.answer.equivalence == row["sincos"].equivalence
        assert found.sizes == {"score": 3}  # the claims on what the table asks are not counted again
        for a in row.values():
            d, e = a.difference, a.equivalence
            assert (d.adjusted < 0.05) == (not d.low <= 0 <= d.high)
            assert (e.adjusted < 0.05) == (e.low > -MARGIN and e.high < MARGIN)


def test_a_comparison_has_a_p_for_each_margin_that_it_is_asked_about(tmp_path):
    """Of differences of 2.9, 3 and 3.1: with 2 degrees of freedom, p is 1 - t / sqrt(t**2 + 2)."""
    results = results_of(tmp_path, ["a0", "a1"], 3, ["a1 ~ a0 within 1", "a1 ~ a0 within 2"])
    one, two = find(fill(results, [[0.0, 1.0, 2.0], [2.9, 4.0, 5.1]]), all_at_once(3)).verdicts
    assert (one.answer.excess.p, two.answer.excess.p) == pytest.approx((0.00083230, 0.0033168), rel=1e-4)
    assert (one.answer.excess.adjusted, two.answer.excess.adjusted) == pytest.approx((0.0016646, 0.0033168), rel=1e-4)
    assert one.word == two.word == "refuted" and one.shown is one.answer.excess and two.shown is two.answer.excess


@pytest.mark.parametrize("text", ["a1 > a0 on loss", "a0 > a1 on loss", "a0 ~ a1 within 0.5 on loss"])
def test_a_row_of_a_secondary_metric_is_in_the_family_of_the_claim_that_compares_the_same(tmp_path, text):
    results = results_of(tmp_path, ["a0", "a1", "a2"], 5, [text], secondary=["loss"])
    fill(results, draw(np.random.default_rng(0), [0, 0, 0], 5, 0.9))
    gains = {"a0": [0.0] * 5, "a1": [0.9, 1.0, 1.1, 1.2, 0.8], "a2": [0.3, 0.2, 0.1, 0.1, 0.2]}
    for (arm, seed), cell in results.cells.items():
        cell.numbers["loss"] = seed + gains[arm][seed]
    found = find(results, all_at_once(5))
    rows = {row.arm: row for row in found.arms if row.metric == "loss"}
    claim, row = found.verdicts[0].answer.difference, rows["a1"].answer.difference
    assert row.adjusted == claim.adjusted == pytest.approx(3 * row.p)  # of two arms in the score, and the claim
    assert rows["a1"].is_claimed and sorted(np.abs([row.low, row.high])) == sorted(np.abs([claim.low, claim.high]))
    assert rows["a2"].answer.difference.adjusted == rows["a2"].answer.difference.p
    assert {k: row["comparisons"] for k, row in found.power("loss").items()} == {"score": 3, "loss": 1}
    assert [row["comparisons"] for row in found.power("score").values()] == [3]


def test_a_gain_that_five_pairs_of_seeds_show_is_reported_as_higher(tmp_path):
    # the published seeds of Fashion-MNIST behind T2T: r = .98, and unpaired tests see nothing
    none, learned = [0.8193, 0.8243, 0.8273, 0.8247, 0.8258], [0.8229, 0.8291, 0.8324, 0.8288, 0.8314]
    results = fill(results_of(tmp_path, ["none", "learned"], 5, margin=0.01), [none, learned])
    row = find(results, all_at_once(5)).arms[1]
    assert row.verdict == "higher, within the margin" and row.answer.correlation > 0.97
    assert row.answer.difference.p == pytest.approx(reference.ttest_rel(learned, none).pvalue)
    assert row.answer.difference.adjusted < 0.001
    assert row.answer.unpaired.adjusted == pytest.approx(reference.ttest_ind(learned, none, equal_var=False).pvalue)


def test_arms_that_see_other_batches_are_not_paired_and_a_file_may_say_otherwise(tmp_path):
    q = Question("score", (("a1", 1.0), ("a0", -1.0)))
    values = draw(np.random.default_rng(0), [0, 1], 5, 0.9)

    def is_paired(test, sizes):
        results = fill(results_of(tmp_path, ["a0", "a1"], 5, test=test), values)
        results.resolved = [
            built({"data": {"init_args": {"batch_size": b}}}, r.arm)
            for r, b in zip(results.resolved, sizes, strict=True)
        ]
        return answer(results, all_at_once(5), [q])[q].is_paired

    assert is_paired("auto", (32, 32)) and not is_paired("auto", (32, 64))
    assert is_paired("paired", (32, 64)) and not is_paired("welch", (32, 32))


def test_arms_of_other_images_in_another_folder_are_two_arms_and_no_pairs(tmp_path):
    results = results_of(tmp_path, ["raw", "clean"], 5)

    def arms(*digests, roots=("raw", "clean")):
        results.resolved = [
            replace(r, config={"data": {"root": root}}, data={"splits": {"train": {"sha256": digest}}})
            for r, root, digest in zip(results.resolved, roots, digests, strict=True)
        ]
        return results.resolved

    _refuse_equal(results.ablation, arms("a", "b"))
    assert not share_batches(results, ["raw", "clean"]) and share_batches(results, ["raw"])
    with pytest.raises(UsageError, match=r"raw and clean resolve to the same configuration and images$"):
        _refuse_equal(results.ablation, arms("a", "a"))
    assert share_batches(results, ["raw", "clean"])


def test_an_interval_never_exceeds_the_range_of_the_metric(tmp_path):
    results = results_of(tmp_path, ["a0", "a1"], 3, metric="acc1", margin=0.9)
    rows = find(fill(results, [[0.1, 0.9, 0.99], [0.97, 0.99, 1.0]], "acc1"), all_at_once(3)).arms
    assert (rows[0].low, rows[0].high, rows[1].high) == (0.0, 1.0, 1.0)
    assert rows[1].answer.difference.low >= -1 and rows[1].answer.difference.high <= 1
    rows = find(fill(results, [[70.0, 75.0, 72.0], [74.0, 76.5, 75.0]], "acc1"), all_at_once(3)).arms  # in percent
    assert rows[0].low < 72.3 < rows[0].high and rows[1].answer.difference.high > rows[1].answer.estimate.value > 1


def test_the_interval_of_an_accuracy_less_a_number_ends_where_the_accuracy_does(tmp_path):
    results = fill(results_of(tmp_path, ["a0", "a1"], 3), [[0.5, 0.6, 0.7], [0.8, 0.9, 1.0]], "acc1")
    below, above = Question("acc1", (("a0", 1.0),), 0.9), Question("acc1", (("a1", 1.0),), 0.7)
    half = 0.248414  # t of 2 degrees of freedom x .1 / sqrt(3)
    found = [answer(results, all_at_once(3), [q])[q].difference for q in (below, above)]
    assert (found[0].low, found[0].high) == pytest.approx((-0.3 - half, -0.3 + half), abs=1e-5)
    assert (found[1].low, found[1].high) == pytest.approx((0.2 - half, 0.3), abs=1e-5)


def test_a_secondary_metric_that_is_no_number_is_named(tmp_path):
    results = fill(results_of(tmp_path, ["a0", "a1"], 2, secondary=["loss", "acc5"]), [[0.0, 1.0], [1.0, 2.0]])
    found = [
        replace(results.cells["a1", seed], cell=SimpleNamespace(failure_text=str), run=RunDir(".")) for seed in (0, 1)
    ]
    found[1].numbers["loss"] = math.nan
    assert [_why(results, cell) for cell in found] == ["", "loss is nan"]


def test_the_speed_of_an_arm_is_the_median_over_the_epochs_of_all_its_seeds(tmp_path):
    results = fill(results_of(tmp_path, ["a0", "a1"], 2), [[0.0, 1.0], [1.0, 2.0]])
    results.cells["a1", 0].rows = [{"images_per_second": 9.0}, {"val/acc1": 0.5}]
    results.cells["a1", 1].rows = [{"images_per_second": 1.0}, {"images_per_second": 2.0}]
    none, fast = find(results, all_at_once(2)).arms
    assert math.isnan(none.images_per_second) and fast.images_per_second == 2.0


def test_an_arm_that_only_equals_logistic_regression_is_under_trained(tmp_path):
    results = results_of(tmp_path, ["a0", "a1"], 2, metric="acc1", margin=0.9)
    fill(results, [[0.25, 0.75], [0.25, 0.8125]], "acc1")
    gates = {linear._key(results.ablation, results.resolved[0]): {"acc1": 0.5}}
    words = [row.verdict for row in find(results, all_at_once(2), gates).arms]
    assert [word.endswith("; under-trained") for word in words] == [True, False]


def test_two_seeds_are_tested_and_one_is_not(tmp_path):
    results = results_of(tmp_path, ["a0", "a1"], 2, ["a1 > a0"])
    assert "no inference" in find(fill(results, [[1.0], [2.0]]), all_at_once(2)).arms[1].verdict
    found = find(fill(results, [[1.0, 1.1], [2.0, 3.2]]), all_at_once(2))
    assert found.arms[1].verdict == "not distinguishable at n = 2" and found.verdicts[0].word == "inconclusive"


def test_a_seed_that_one_arm_lacks_is_not_a_pair(tmp_path):
    results = results_of(tmp_path, ["a0", "a1"], 4)
    fill(results, [[1.0, 1.1, 1.2, 9.0], [2.0, 2.2, 2.4, 2.6]])
    lose(results, "a0", 3)
    a = find(results, all_at_once(4)).arms[1].answer
    assert a.estimate.n == 3 and a.estimate.value == pytest.approx(1.1)


def seen(looks, most, *later):
    """The last of looks at one set of seeds after the other."""
    known = [{"seeds": seeds, "most": most} for seeds in (looks, *later)]
    return looks_at(known[:-1], known[-1]["seeds"], most)


def test_looks_are_counted_once_for_each_set_of_seeds():
    found = seen([0, 1, 2], 5, [0, 1, 2], [0, 1, 2, 3, 4])
    assert (found.counts, found.most) == ((3, 5), 5)
    assert found.seeds == (0, 1, 2, 3, 4) and "Look 2, at 3, 5 of at most 5 seeds" in found.sentences()[0]


def test_seeds_added_after_the_error_is_spent_enter_no_test():
    found = seen([0, 1, 2], 3, [0, 1, 2, 3, 4])
    assert (found.counts, found.seeds, found.added) == ((3,), (0, 1, 2), (3, 4))
    assert "3, 4 came after the error was spent" in found.sentences()[0]


def test_replacing_seen_seeds_by_others_does_not_reset_the_looks():
    found = seen([0, 1, 2], 3, [7, 8, 9])
    assert found.seeds == () and found.left_out == (0, 1, 2)
    assert found.sentences()[-1] == "Seeds 0, 1, 2 were in an earlier look and are missing now."


def test_the_first_look_fixes_the_largest_number_of_seeds():
    found = looks_at([{"seeds": [0, 1], "most": 4}], [0, 1, 2], 99)
    assert found.most == 4 and found.times == (0.5, 0.75)


def test_a_report_notes_its_look_beside_the_cells(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ablation = results_of(tmp_path, ["a0", "a1"], 3, seeds_max=6).ablation
    for seeds in ([0, 1, 2], [0, 1, 2], [0, 1, 2, 3]):
        looks = take_look(ablation, seeds)
    lines = (tmp_path / "runs/ablations/made-up/looks.jsonl").read_text().splitlines()
    assert [json.loads(line)["seeds"] for line in lines] == [[0, 1, 2], [0, 1, 2, 3]]
    assert looks.counts == (3, 4) and looks.most == 6
    exported = replace(ablation, is_evidence=True)  # its checksums are those of the export
    assert take_look(exported, [0, 1, 2, 3, 4]).counts == (3, 4, 5)
    assert (tmp_path / "runs/ablations/made-up/looks.jsonl").read_text().splitlines() == lines


def test_a_look_is_a_record_of_the_chain_so_that_it_cannot_be_taken_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ablation = results_of(tmp_path, ["a0", "a1"], 3, seeds_max=8).ablation
    ablation.directory.mkdir(parents=True)
    history(ablation).write_text(json.dumps({"seeds": [0], "most": 8}) + "\n")  # of an older vitlab
    append(ablation.directory, "version", digest="of the file")

    def late(*record, **facts):  # another report ends between reading and writing
        monkeypatch.setattr(looks, "append", append)
        take_look(ablation, [0, 1, 2, 3])
        append(*record, **facts)

    monkeypatch.setattr(looks, "append", late)
    take_look(ablation, [0, 1])
    assert [record["seeds"] for record in read_chain(ablation.directory).of("look")] == [[0, 1, 2, 3], [0, 1]]
    assert take_look(ablation, [0, 1, 2, 3, 4, 5]).counts == (1, 4, 6)
    place = ablation.directory / "chain.jsonl"
    place.write_text("".join(line for line in place.read_text().splitlines(keepends=True) if "0, 1, 2, 3]" not in line))
    assert "does not follow" in read_chain(ablation.directory).broken


def test_a_look_that_cannot_be_read_is_not_forgotten(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ablation = results_of(tmp_path, ["a0", "a1"], 3).ablation
    take_look(ablation, [0, 1])
    history(ablation).write_text(history(ablation).read_text()[:20])
    with pytest.raises(UsageError, match=r"looks.jsonl, line 1, is no look"):
        take_look(ablation, [0, 1, 2])


def test_a_look_names_its_split_and_counts_on_the_other_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ablation = results_of(tmp_path, ["a0", "a1"], 3, seeds_max=6).ablation
    place = tmp_path / "runs/ablations/made-up/looks.jsonl"
    for split, seeds in (("val", [0, 1, 2]), ("test", [0, 1, 2]), ("test", [0, 1, 2]), ("test", [0, 1, 2, 3])):
        looks = take_look(replace(ablation, evaluate=split), seeds)
    assert [json.loads(line)["split"] for line in place.read_text().splitlines()] == ["val", "test", "test"]
    assert looks.counts == (3, 4)
    older = "".join(place.read_text().splitlines(keepends=True)[:1]).replace(', "split": "val"', "")
    place.write_text(older)
    assert take_look(replace(ablation, evaluate="test"), [0, 1, 2]).counts == (3,) and place.read_text() == older


def test_of_more_new_seeds_than_the_most_allows_the_first_are_tested():
    found = seen([0, 1, 2], 5, [0, 1, 2, 9, 8, 7, 6])
    assert (found.counts, found.seeds, found.added) == ((3, 5), (0, 1, 2, 9, 8), (7, 6))
    assert "Seeds 7, 6 came after the error was spent, at 5 seeds" in found.sentences()[1]


def report_of(results, values, present, state="missing"):
    """The findings of a report of ``values``, in which each arm has so many seeds, and the others this state."""
    fill(results, values)
    for arm, seed in results.cells:
        if seed >= present[arm]:
            lose(results, arm, seed, state)
    return find(results, take_look(results.ablation, results.seeds(), results.had()))


def test_seeds_that_reach_one_arm_later_are_looks_at_its_comparison(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = results_of(tmp_path, ["a0", "a1", "a2"], 5, ["a2 > a1"])
    values = draw(np.random.default_rng(0), [0, 0, 1], 5, 0.5)
    for i, n in enumerate((3, 4, 5)):
        found = report_of(results, values, {"a0": 5, "a1": 5, "a2": n})
        on_time, late, claimed = (*(row.answer for row in found.arms[1:]), found.verdicts[0].answer)
        assert (on_time.looks.counts, late.looks.counts, late.estimate.n) == ((5,), (3, 4, 5)[: i + 1], n)
        assert claimed.looks.counts == late.looks.counts
    p = reference.ttest_rel(values[2], values[0]).pvalue
    assert late.difference.p == pytest.approx(p) and late.difference.adjusted >= overall(p, [0.6, 0.8, 1.0]) > p
    (words,) = _own_looks(found)
    assert words.endswith("own: a2 (at 3, 4, 5 of at most 5 seeds), `a2 > a1` (at 3, 4, 5 of at most 5 seeds).")
    assert _own_looks(find(fill(results, values), all_at_once(5))) == []


@pytest.mark.rare
def test_looking_again_whenever_an_arm_has_another_seed_errs_in_at_most_one_case_of_twenty(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results, false, studies = results_of(tmp_path, ["a0", "a1"], 5), 0, 300
    rng = np.random.default_rng(0)
    for _ in range(studies):
        values, hits = draw(rng, [0, 0], 5, 0.5), False
        history(results.ablation).unlink(missing_ok=True)
        for n in (3, 4, 5):
            found = report_of(results, values, {"a0": 5, "a1": n})
            hits |= found.arms[1].verdict.startswith(("higher", "lower"))
        false += hits
    assert at_most(false, studies, 0.05), false


def test_an_arm_that_is_added_later_has_looks_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = draw(np.random.default_rng(0), [0, 0, 0], 5, 0.5)
    report_of(results_of(tmp_path, ["a0", "a1"], 5), values[:2], {"a0": 5, "a1": 5})
    results = results_of(tmp_path, ["a0", "a1", "a2"], 5)
    report_of(results, values, {"a0": 5, "a1": 5, "a2": 3})
    found = report_of(results, values, {"a0": 5, "a1": 5, "a2": 5})
    assert [row.answer.looks.counts for row in found.arms[1:]] == [(5,), (3, 5)]


def test_a_renamed_arm_keeps_its_looks(tmp_path, monkeypatch):
    """The same numbers had smaller p values, and the report told of fewer looks."""
    monkeypatch.chdir(tmp_path)
    values, present = draw(np.random.default_rng(0), [0, 1, 1], 5, 0.5), {"a0": 5, "a2": 5}
    looks = []
    for name, identity, n in (("a1", "1", 3), ("a1", "1", 5), ("b1", "1", 5), ("a1", "1", 5), ("c1", "2", 5)):
        results = results_of(tmp_path, ["a0", name, "a2"], 5)
        append(results.ablation.directory, "cell", cell=f"{name}/s0-{identity}")
        append(results.ablation.directory, "cell", cell="a0/s0-0")
        found = report_of(results, values, {**present, name: n})
        looks.append((found.arms[1].answer.looks.counts, found.arms[2].answer.looks.counts))
    assert looks == [((3,), (5,)), *[((3, 5), (5,))] * 3, ((5,), (5,))]  # the last is another arm
    assert len(read_chain(results.ablation.directory).of("look")) == 3


def test_a_seed_that_diverged_is_no_seed_to_come(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = results_of(tmp_path, ["a0", "a1", "a2"], 5)
    values, present = draw(np.random.default_rng(0), [0, 1, 0], 5, 0.5), {"a0": 5, "a1": 4, "a2": 5}
    found = report_of(results, values, present, "diverged")
    answered = found.arms[1].answer
    assert answered.looks.counts == (5,) and answered.estimate.n == 4
    assert found.arms[2].answer.looks.counts == (5,) and _own_looks(found) == []


def test_of_two_arms_a_seed_that_diverged_is_no_seed_to_come_either(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = results_of(tmp_path, ["a0", "a1"], 4, ["a1 > a0"])
    values = draw(np.random.default_rng(0), [0, 1], 4, 0.5)
    found = report_of(results, values, {"a0": 4, "a1": 3}, "diverged")
    difference = found.arms[1].answer.difference
    assert found.looks.counts == found.verdicts[0].answer.looks.counts == (4,) and found.looks.sentences() == []
    p = reference.ttest_rel(values[1][:3], values[0][:3]).pvalue
    assert difference.adjusted == difference.p == pytest.approx(p)


def test_a_seed_whose_primary_metric_is_no_number_counts_in_the_others(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = results_of(tmp_path, ["a0", "a1"], 5, ["a1 > a0 on loss"], secondary=["loss"])
    cells = fill(results, draw(np.random.default_rng(0), [0, 1], 5, 0.5)).cells
    for cell in cells.values():
        cell.numbers["loss"] = cell.numbers["score"]
    cells["a1", 2].numbers["score"] = math.nan
    found = find(results, take_look(results.ablation, results.seeds(), results.had()))
    score, loss = (next(r for r in found.arms if (r.arm, r.metric) == ("a1", m)).answer for m in ("score", "loss"))
    assert (found.looks.counts, score.estimate.n, loss.estimate.n) == ((5,), 4, 5)
    assert score.looks.counts == loss.looks.counts == (5,)
    assert found.verdicts[0].answer == loss and "missing" not in found.verdicts[0].note


def test_a_claim_says_how_many_seeds_diverged_and_how_many_are_missing(tmp_path):
    results = results_of(tmp_path, ["a0", "a1"], 6, ["a1 > a0"])
    fill(results, draw(np.random.default_rng(0), [0, 1], 6, 0.5))
    lose(results, "a1", 4)
    assert find(results, all_at_once(6)).verdicts[0].note.endswith("; 1 of 6 seeds is missing")
    lose(results, "a0", 5)
    assert find(results, all_at_once(6)).verdicts[0].note.endswith("; 2 of 6 seeds are missing")
    lose(results, "a1", 4, "diverged")
    note = find(results, all_at_once(6)).verdicts[0].note
    assert note.endswith("; 1 of 6 seeds diverged; 1 of 6 seeds is missing")
    lose(results, "a0", 5, "diverged")
    assert find(results, all_at_once(6)).verdicts[0].note.endswith("; 2 of 6 seeds diverged")


def test_a_claim_names_the_cells_whose_value_is_no_number(tmp_path):
    results = results_of(tmp_path, ["a0", "a1"], 6, ["a1 > a0"])
    fill(results, draw(np.random.default_rng(0), [0, 1], 6, 0.5))
    for key in (("a0", 2), ("a1", 2), ("a1", 5)):
        results.cells[key].numbers["score"] = math.nan
    lose(results, "a1", 4)
    note = find(results, all_at_once(6)).verdicts[0].note
    assert note.endswith("; score is nan in a1/s2, a1/s5, a0/s2; 1 of 6 seeds is missing")
    give(results, {key: {"score": math.inf if key[0] == "a1" else 1.0} for key in results.cells if key != ("a1", 4)})
    note = find(results, all_at_once(6)).verdicts[0].note
    assert note.startswith("a1 without a result: no inference; score is inf in a1/s0, a1/s1")


def test_a_claim_on_a_number_counts_the_seeds_of_its_arm_while_others_have_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = results_of(tmp_path, ["a0", "a1"], 3, ["a1 > 0.5", "a1 > a0"])
    values = [[0.0, 0.1, 0.2], [0.9, 0.91, 0.92]]
    alone, pair = report_of(results, values, {"a0": 0, "a1": 3}).verdicts
    assert (alone.answer.estimate.n, alone.word) == (3, "supported") and pair.answer.estimate.n == 0
    alone, pair = report_of(results, values, {"a0": 3, "a1": 3}).verdicts
    assert (alone.answer.estimate.n, pair.answer.estimate.n) == (3, 3)
    assert alone.answer.looks.counts == pair.answer.looks.counts == (3,)


def test_the_seeds_of_a_report_are_those_at_which_something_can_be_compared(tmp_path):
    results = results_of(tmp_path, ["a0", "a1", "a2"], 6, ["a1 > 0.5 on loss"])
    alone = {("a1", 0): "loss", ("a1", 1): "score", ("a2", 2): "loss"}
    pairs = {("a0", 3): "score", ("a2", 3): "score", ("a0", 4): "score", ("a2", 4): "loss"}
    give(results, {cell: {metric: 1.0} for cell, metric in {**alone, **pairs}.items()})
    assert results.seeds() == [0, 3]


@pytest.mark.parametrize(("claim", "seeds"), [("with > 0.5 | border=zero", [0]), ("with > 0.5 over border", [])])
def test_a_claim_on_a_number_makes_the_seeds_of_its_own_arm_comparable_and_of_no_other(tmp_path, claim, seeds):
    results = two_factors(tmp_path, [claim], 4)
    names = ("zero-with", "zero-without", "wrap-with")
    assert give(results, {(name, i): {"score": 1.0} for i, name in enumerate(names)}).seeds() == seeds
    give(results, {(name, 3): {"score": 1.0} for name in ("zero-with", "wrap-with")})
    assert results.seeds() == [3]


def test_a_look_that_an_older_version_recorded_counts_for_all_arms():
    found = looks_at([{"seeds": [0, 1, 2], "most": 5}], [0, 1, 2, 3, 4], 5)
    assert found.of("score", ["a0", "a1"], [0, 1, 2, 3]).counts == (3, 4)


def test_the_advice_on_seeds_accounts_for_holm_and_the_looks(tmp_path):
    values = [[0.0, 0.4, -0.4, 0.1, -0.2], [3.0, -0.6, 2.4, 0.2, 1.9]]
    few = results_of(tmp_path, ["a0", "a1"], 5, ["a1 > a0"], seeds_max=30)
    few = find(fill(few, values), Looks((5,), 30, tuple(range(5)))).verdicts[0]
    many = results_of(tmp_path, ["a0", "a1", *(f"b{i}" for i in range(8))], 5, ["a1 > a0"])
    more = find(fill(many, [*values, *draw(np.random.default_rng(0), [0.0] * 8, 5, 0.5)]), all_at_once(5)).verdicts[0]
    assert few.word == more.word == "inconclusive" and 0 < few.more < more.more
    assert "in a new ablation, as this one allows at most 5" in more.note and "new ablation" not in few.note


@pytest.mark.parametrize(("counts", "most"), [((5,), 5), ((4,), 5), ((2, 4), 5), ((5,), 12)])
def test_the_advice_on_seeds_accounts_for_missing_seeds(tmp_path, counts, most):
    results = results_of(tmp_path, ["a0", "a1"], 5, ["a1 > a0"], seeds_max=most)
    fill(results, [[0.0] * 5, [1.2, 2.2, 3.2, 2.0, 2.1]])
    for seed in (3, 4):
        lose(results, "a1", seed)
    first, *later = (range(count) for count in counts)
    verdict = find(results, seen(first, most, *later)).verdicts[0]
    assert verdict.answer.estimate.n == 3 and verdict.more >= 1 and "2 of 5 seeds are missing" in verdict.note


@pytest.mark.parametrize("most", [5, 30])
def test_the_advice_on_seeds_counts_those_that_diverged_as_spent(tmp_path, most):
    results = results_of(tmp_path, ["a0", "a1"], 5, ["a1 > a0"], seeds_max=most)
    fill(results, [[0.0] * 5, [1.2, 2.2, 3.2, np.nan, np.nan]])
    (verdict,) = find(results, Looks((5,), most, tuple(range(5)))).verdicts
    assert verdict.answer.estimate.n == 3
    few = additional_seeds(verdict.answer, all_at_once(3), 0.05)  # had none of three diverged
    assert most == 30 or verdict.more == math.ceil(few * 5 / 3) > few
    assert ("in a new ablation, as this one allows at most" in verdict.note) == (most == 5)


def test_where_half_of_the_seeds_diverged_twice_as_many_are_advised():
    found = Answer(Estimate(1.2, error=0.5, freedom=3, n=4))
    assert additional_seeds(found, Looks((4,), 16, tuple(range(4))), 0.05) == 7
    assert additional_seeds(found, Looks((8,), 32, tuple(range(8))), 0.05) == 14


@pytest.mark.parametrize("value", [0.0, 0.6])
def test_the_seeds_advised_for_an_equivalence_pass_both_tests_in_four_of_five_cases(value):
    estimate = Estimate(value, error=1 / 3**0.5, freedom=2, n=3)  # of three pairs with sd 1
    more = additional_seeds(Answer(estimate, equivalence=NOTHING), all_at_once(3), 0.05, margin=1.5)
    rng, shares = np.random.default_rng(0), []
    for n in (2 + more, 3 + more):
        pairs = rng.standard_normal((20_000, n)) + value
        error = pairs.std(axis=1, ddof=1) / n**0.5
        shares.append(np.mean((1.5 - np.abs(pairs.mean(axis=1))) / error > reference.t.ppf(0.95, n - 1)))
    assert shares[0] < 0.81 and shares[1] > 0.79, (more, shares)


def test_a_supported_difference_says_so_where_it_is_within_the_margin(tmp_path):
    results = results_of(tmp_path, ["a0", "a1", "a2"], 4, ["a1 > a0", "a1 ~ a0 within 2", "a2 > a0"])
    fill(results, [[0.0, 1.0, 2.0, 3.0], [0.5, 1.51, 2.52, 3.5], [5.0, 6.01, 7.02, 8.0]])  # of a margin of 2
    found = find(results, all_at_once(4)).verdicts
    notes = ["the difference is within the margin", "", ""]
    assert [(v.word, v.note) for v in found] == [("supported", note) for note in notes]


def test_the_advice_for_an_equivalence_says_what_it_is_for(tmp_path):
    results = results_of(tmp_path, ["a0", "a1"], 4, ["a1 ~ a0 within 1.5"], seeds_max=20)
    fill(results, [[0.0] * 4, [0.9, -0.9, 1.2, -1.0]])
    (verdict,) = find(results, Looks((4,), 20, tuple(range(4)))).verdicts
    assert verdict.word == "inconclusive" and verdict.more > 0
    assert verdict.note == f"to show it within the margin would take about {verdict.more} more seeds"


def test_the_advice_for_a_difference_against_the_claim_says_that_it_would_be_refuted(tmp_path):
    results = results_of(tmp_path, ["a0", "a1"], 4, ["a1 > a0", "a0 > a1"], seeds_max=20)
    fill(results, [[0.0] * 4, [0.9, -0.3, 1.2, 0.1]])
    first, second = find(results, Looks((4,), 20, tuple(range(4)))).verdicts
    assert first.word == second.word == "inconclusive" and first.more == second.more > 1
    end = f" would take about {first.more} more seeds"
    assert first.note == f"detecting the observed difference{end}"
    assert second.note == f"the difference points against the claim: if it stays as large, refuting it{end}"


@pytest.mark.parametrize(
    ("unit", "mean", "difference"),
    [(1e-6, "0.000005080 ± 0.000000084", "+0.000001150"), (0.1, "0.5080 ± 0.0084", "+0.1150"), (1e6, "5080000", "+1")],
)
def test_numbers_of_any_unit_are_told_with_four_digits(tmp_path, unit, mean, difference):
    values = np.array([[5.0, 5.1, 5.2, 5.0, 5.1], [6.1, 6.2, 6.3, 6.2, 6.35]]) * unit
    results = results_of(tmp_path, ["a0", "a1"], 5, ["a1 > a0"], metric="mse", margin=unit)
    found = find(fill(results, values, "mse"), all_at_once(5))
    first, second = _main_tables(found.arms)[0][1:]
    assert first[2].startswith(mean) and second[4].startswith(difference)
    (verdict,) = found.verdicts
    told = _answer(results, verdict, _digits(found, verdict))
    assert f"difference {difference}" in told and f" (r {np.corrcoef(values)[0, 1]:.2f}, unpaired p " in told


def test_why_tests_are_paired_is_told_as_it_is(tmp_path):
    results = fill(results_of(tmp_path, ["a0", "a1", "a2"], 3, test="paired"), np.random.default_rng(0).random((3, 3)))
    words = _cautions(found := find(results, all_at_once(3)), "score", found.arms)
    assert words[0].startswith("Paired t tests: arms of one seed share the order of batches")
    results.resolved[1].config["data"] = {"batch_size": 7}
    assert _cautions(found, "score", found.arms)[0] == (
        "Paired t tests, as the file says, although the batches of a1 are not the baseline's."
    )


def test_the_time_of_a_plan_counts_all_batches_of_an_optimizer_step_and_its_disk_32_bytes_a_parameter():
    config = {"data": {"batch_size": 10}, "trainer": {"accumulate_grad_batches": 4}}
    model = {"parameters": 2**20}
    arm = Resolved(None, config, {}, model, (), 2.0, "", start_seconds=0.0, length={"steps": 30})
    cell = SimpleNamespace(resolved=arm, is_done=lambda: False, missing_analyses=list)
    (time, disk) = plan._cost(SimpleNamespace(analyses=(), directory="runs"), [cell], 1)
    assert time.startswith("time     about 10.0 min for 1 cells")  # 30 steps of 40 images at 2 images/s
    assert disk == "disk     about 32 MiB in runs"  # of float32: twice weights with Adam's two moments, twice weights


def test_a_family_counts_the_comparisons_that_can_be_tested(tmp_path):
    results = results_of(tmp_path, ["a0", "a1", "a2", "a3"], 5, ["a2 > a1"])
    values = draw(np.random.default_rng(0), [0, 1, 1, 0], 5, 0.5)
    values[3] = values[0]  # an arm that changes nothing
    found = find(fill(results, values), all_at_once(5))
    assert found.sizes == {"score": 3}
    assert any(words.startswith("3 comparisons are one family") for words in _cautions(found, "score", found.arms))
    found = find(fill(results_of(tmp_path, ["a0", "a1"], 5), values[:2]), all_at_once(5))
    assert any(words.startswith("One comparison: of equal arms") for words in _cautions(found, "score", found.arms))


def test_power_is_told_of_the_comparison_with_the_fewest_seeds_and_lost_ones_are_counted(tmp_path):
    results = fill(results_of(tmp_path, ["a0", "a1", "a2"], 6), draw(np.random.default_rng(0), [0, 1, 1], 6, 0.5))
    lost = ("missing or have no number", "Seeds that diverged")
    words = _cautions(found := find(results, all_at_once(6)), "score", found.arms)
    assert not any(each in text for text in words for each in lost)
    for arm, seed in (("a2", 1), ("a2", 4), ("a1", 5)):
        lose(results, arm, seed, "diverged")
    found = find(results, all_at_once(6))
    (power,) = found.power("score").values()
    smallest = detectable(4, 0.05 / 2, True)
    assert power.pop("detectable_sd") == pytest.approx(smallest)
    assert power == {"metric": "score", "n": 4, "test": "paired", "comparisons": 2}
    words = _cautions(found, "score", found.arms)
    assert any(f"n = 4 detects a difference to the baseline of {smallest:.1f} sd of the paired" in x for x in words)
    assert [text for text in words if any(each in text for each in lost)] == [
        "Some cells are missing or have no number: n differs from the plan, see below.",
        "Seeds that diverged are in no mean and no test, which favors the arms that lost them: a1 (1), a2 (2).",
    ]


def test_an_arm_that_is_not_above_the_logistic_regression_of_its_own_images_is_under_trained(tmp_path):
    results = results_of(tmp_path, ["a0", "a1", "a2", "a3"], 2, metric="acc1", margin=0.1)
    results.resolved = [replace(arm, data={"n": i // 2}) for i, arm in enumerate(results.resolved)]
    fill(results, [[0.5, 0.5], [0.5, 0.52], [0.1, 0.1], [0.9, 0.9]], "acc1")
    keys = [linear._key(results.ablation, arm) for arm in results.resolved[::2]]
    gates = {keys[0]: {"acc1": 0.5, "n_train": 20000, "n": 1234}, keys[1]: {"why": "no room"}}
    found = find(results, all_at_once(2), gates)
    assert [row.verdict.endswith("; under-trained") for row in found.arms] == [True, False, False, False]
    assert _gate_words(found) == [
        "Logistic regression on the pixels of 20,000 training images of a0, a1 reaches 0.5000 on 1,234; an arm whose "
        "mean is not above that is marked under-trained.",
        "There is no logistic regression to compare with: no room.",
    ]


def power_line(results):
    (line,) = plan._power(results)
    return line


def test_the_plan_states_the_power_of_the_test_that_the_report_will_make(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for test, unit in (("paired", "the paired differences"), ("welch", "a run")):
        line = power_line(results := results_of(tmp_path, ["a0", "a1"], 5, test=test))
        fill(results, draw(np.random.default_rng(0), [0, 1], 5, 0.9))
        found = find(results, all_at_once(5)).power("score")["score"]
        assert found["test"] == test and f"{found['detectable_sd']:.1f} sd of {unit} with 80 % power" in line


@pytest.mark.parametrize(("test", "value"), [("paired", "0.0238 if"), ("welch", "0.0202 if")])
def test_the_plan_states_its_power_in_the_unit_of_the_metric(tmp_path, monkeypatch, test, value):
    """Five seeds detect 1.682 sd of paired differences, whose sd is sqrt(2) that of runs, or 2.024 sd of a run."""
    monkeypatch.chdir(tmp_path)
    assert f": {value} runs have sd 0.01" in power_line(results_of(tmp_path, ["a0", "a1"], 5, test=test, sd=0.01))
    results = fill(results_of(tmp_path, ["a0", "a1"], 5), [[-1.0, 0.0, 1.0], [-3.0, 0.0, 3.0]])
    assert plan._spread(results) == pytest.approx(5**0.5)  # of variances of 1 and 9


def test_the_plan_knows_the_largest_number_of_seeds_that_the_first_report_fixed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    take_look(results_of(tmp_path, ["a0", "a1"], 3).ablation, [0, 1, 2])
    line = power_line(results_of(tmp_path, ["a0", "a1"], 5))
    assert line.startswith("power    3 seeds detect") and "comparisons" not in line
    assert "; n = 3 is exploratory: it only detects effects far above the spread of seeds, and more" in line
    assert power_line(results_of(tmp_path, ["a0", "a1"], 1)).startswith("power    n = 1: no inference; set")
    (tmp_path / "runs/ablations/made-up/looks.jsonl").unlink()
    take_look(results_of(tmp_path, ["a0", "a1"], 3, seeds_max=5).ablation, [0, 1, 2])
    least = detectable(5, levels([0.6, 1.0], 0.05)[-1])
    assert f"5 seeds detect a difference of {least:.1f} sd" in power_line(results_of(tmp_path, ["a0", "a1"], 5))


def test_a_plan_of_arms_without_a_baseline_says_that_nothing_is_compared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    apart = [{"border": "zero", "table": "with"}, {"border": "wrap", "table": "without"}]
    results = two_factors(tmp_path, [], 5, exclude=apart)
    assert power_line(results) == "power    nothing is compared: no arm has a baseline, and there is no claim"


def test_a_report_without_common_seeds_is_not_a_look(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ablation = results_of(tmp_path, ["a0", "a1"], 3).ablation
    empty = take_look(ablation, [])
    assert (empty.counts, empty.sentences()) == ((), [])
    assert not (tmp_path / "runs/ablations/made-up/looks.jsonl").exists()
    known = [{"seeds": [], "most": 2}]  # as an older vitlab wrote it
    looks = looks_at(known, [0, 1, 2], 3)
    assert (looks.counts, looks.most, looks.overall(0.03)) == ((3,), 3, 0.03)


def test_at_an_early_look_an_estimate_beyond_the_margin_has_no_narrower_interval(tmp_path):
    results = results_of(tmp_path, ["a0", "a1"], 6, seeds_max=6)
    fill(results, [[0.0, 0.1, -0.1], [2.4, 2.9, 1.6]])  # the margin is 2
    a = find(results, Looks((3,), 6, (0, 1, 2))).arms[1].answer
    assert a.equivalence.p > 0.5 and a.equivalence.adjusted >= a.equivalence.p
    low, high = a.estimate.interval(0.9)
    assert a.equivalence.low <= low + 1e-9 and high - 1e-9 <= a.equivalence.high


@pytest.mark.parametrize("size", [0.001, 0.03, 1.0])
def test_at_an_early_look_the_interval_does_not_widen_as_the_effect_becomes_clearer(tmp_path, size):
    results, gains = results_of(tmp_path, ["a0", "a1"], 6, seeds_max=10), np.array([0, 2, -1, 1, 3, -2]) * 1e-4
    none = np.array([0.80, 0.81, 0.79, 0.805, 0.795, 0.80])
    a = find(fill(results, [none, none + size + gains]), Looks((6,), 10, tuple(range(6)))).arms[1].answer
    width = np.subtract(*reversed(a.estimate.interval(1 - levels([0.6], 0.05)[-1])))
    assert a.difference.high - a.difference.low == pytest.approx(width, rel=1e-3)


@pytest.mark.parametrize("looks", [Looks((6,), 10, tuple(range(6))), seen(range(4), 6, range(6))])
def test_at_every_look_an_interval_excludes_0_where_its_adjusted_p_is_below_alpha(tmp_path, looks):
    results = results_of(tmp_path, ["a0", "a1", "a2", "a3"], 6, seeds_max=looks.most)
    rng, words = np.random.default_rng(0), set()
    for _ in range(40):
        for row in find(fill(results, draw(rng, [0, 1, 2, 3], 6, 0.9)), looks).arms[1:]:
            for test in (row.answer.difference, row.answer.unpaired):
                assert (test.adjusted < 0.05) == (not test.low <= 0 <= test.high)
                words.add(test.adjusted < 0.05)
            e = row.answer.equivalence
            assert (e.adjusted < 0.05) == (e.low > -MARGIN and e.high < MARGIN)
    assert words == {True, False}


def test_the_margin_of_the_primary_metric_is_not_that_of_a_claim_on_another(tmp_path):
    results = results_of(tmp_path, ["a0", "a1"], 3, ["a1 > a0 on loss", "a1 ~ a0 within 0.5 on loss"])
    fill(results, [[1.0, 1.1, 1.3], [1.0, 1.2, 1.25]])
    for cell in results.cells.values():
        cell.numbers["loss"] = cell.numbers["score"]
    words = [v.word for v in find(results, all_at_once(3)).verdicts]
    assert words == ["inconclusive", "supported"]


def test_arms_without_a_common_seed_get_no_inference(tmp_path):
    results = results_of(tmp_path, ["a0", "a1"], 4)
    give(results, {(f"a{i}", 2 * i + j): {"score": i + j / 9} for i in range(2) for j in range(2)})
    assert find(results, all_at_once(4)).arms[1].verdict == "no seed in common with its baseline: no inference"


def test_an_arm_whose_baseline_was_given_up_is_told_so(tmp_path):
    results = results_of(tmp_path, ["a0", "a1", "a2"], 4, ["a1 > a0", "a2 > a1"])
    numbers = {(f"a{i}", seed): {"score": i + seed / 9 + i * seed**2} for i in (1, 2) for seed in range(4)}
    found = find(give(results, numbers), all_at_once(4))
    assert [row.verdict for row in found.arms] == ["no result", *["its baseline has no result: not compared"] * 2]
    assert found.verdicts[0].note == "a0 without a result: no inference"
    numbers["a0", 0] = {"score": 0.0}
    assert find(give(results, numbers), all_at_once(4)).arms[0].verdict == "n = 1: no inference"
    assert found.verdicts[1].answer.estimate.n == 4


def test_every_arm_is_compared_in_the_unit_of_the_margin(tmp_path):
    results = results_of(tmp_path, ["a0", "a1", "a2"], 3)
    assert {q.margin for q in arm_questions(results, "score").values()} == {MARGIN}
    assert {q.margin for q in arm_questions(results, "loss").values()} == {None}


def test_a_claim_over_axes_is_the_paired_test_of_the_means_without_what_is_excluded(tmp_path):
    (tmp_path / "base.yaml").write_text("{}\n")
    axes = {
        "tokens": {name: {"model.depth": i} for i, name in enumerate(("apart", "shared", "patch"))},
        "border": {name: {"model.num_heads": i} for i, name in enumerate(("zero", "wrap"))},
        "table": {name: {"model.lr": i} for i, name in enumerate(("without", "with"))},
    }
    gap = "gap(with, without | tokens=shared) < gap(with, without | tokens=apart) over border"
    effect = "zero > wrap over tokens | table=without"
    larger = "gap(with, without | tokens=apart) > gap(with, without | tokens=shared) over border"
    content = {"name": "made-up", "base": "base.yaml", "axes": axes, "baseline": {"table": "without"}, "seeds": 5}
    content |= {"exclude": [{"tokens": "patch", "border": "zero"}], "metric": {"primary": "score"}}
    (tmp_path / "made-up.yaml").write_text(
        yaml.safe_dump({**content, "claims": [gap, effect, larger]}, sort_keys=False)
    )
    ablation = read_ablation(tmp_path / "made-up.yaml")
    results = without_numbers(ablation)
    values = np.random.default_rng(0).standard_normal((len(ablation.arms), 5))
    values[[arm.levels["tokens"] == "apart" and arm.levels["table"] == "with" for arm in ablation.arms]] += 9
    v = {arm.name: x for arm, x in zip(ablation.arms, values, strict=True)}
    gains = {
        t: np.mean([v[f"{t}-{b}-with"] - v[f"{t}-{b}-without"] for b in axes["border"]], 0)
        for t in axes["tokens"]
        if t != "patch"
    }
    zeros = np.mean(
        [v[f"{t}-zero-without"] - v[f"{t}-wrap-without"] for t in gains], 0
    )  # there are no patches with zeros
    found = find(fill(results, values), all_at_once(5)).verdicts
    assert [one.setting for one in found] == ["", "table=without", ""]
    assert (found[0].word, found[2].word) == ("supported", "supported")
    assert found[0].shown.factor == found[2].shown.factor == 5 + 2  # mirror images count once
    differences = (gains["shared"] - gains["apart"], zeros, gains["apart"] - gains["shared"])
    for verdict, expected in zip(found, differences, strict=True):
        assert verdict.answer.is_paired and verdict.answer.estimate.value == pytest.approx(expected.mean())
        assert verdict.answer.difference.p == pytest.approx(reference.ttest_1samp(expected, 0).pvalue)
    assert "combinations" not in found[0].note
    assert "the mean of 2 of 3 combinations, as `exclude` leaves out arms of the others" in found[1].note


GAP = "gap(with, without | border=zero) {} gap(with, without | border=wrap)"
SIDES = {"zero-with": 1.0, "zero-without": -1.0, "wrap-with": -1.0, "wrap-without": 1.0}  # of the difference of gaps


def two_factors(folder, claims, n, exclude=(), **stats):
    """Results without numbers of the four arms that ``SIDES`` names, or of those that are not excluded."""
    (folder / "base.yaml").write_text("{}\n")
    axes = {
        "border": {name: {"model.num_heads": i} for i, name in enumerate(("zero", "wrap"))},
        "table": {name: {"model.lr": i} for i, name in enumerate(("without", "with"))},
    }
    content = {"name": "made-up", "base": "base.yaml", "axes": axes, "baseline": {"table": "without"}, "seeds": n}
    content |= {"metric": {"primary": "score"}, "claims": claims, "stats": stats, "exclude": list(exclude)}
    (folder / "made-up.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return without_numbers(read_ablation(folder / "made-up.yaml"))


@pytest.mark.parametrize(
    ("step", "noise", "word"), [(0.0, 0.001, "supported"), (0.05, 0.001, "refuted"), (0.0, 0.05, "inconclusive")]
)
def test_gaps_that_are_equal_within_a_margin_are_the_paired_test_of_equivalence(tmp_path, step, noise, word):
    results = two_factors(tmp_path, [f"{GAP.format('~')} within 0.02"], 6)
    values = noise * np.random.default_rng(0).standard_normal((4, 6))
    of = {arm.name: x for arm, x in zip(results.ablation.arms, values, strict=True)}
    of["zero-with"] += step
    (verdict,) = find(fill(results, values), all_at_once(6)).verdicts
    zero, wrap = (of[f"{border}-with"] - of[f"{border}-without"] for border in ("zero", "wrap"))
    sides = [
        reference.ttest_1samp(zero - wrap, bound, alternative=side).pvalue
        for bound, side in ((-0.02, "greater"), (0.02, "less"))
    ]
    assert verdict.word == word
    assert verdict.answer.equivalence.p == pytest.approx(max(sides))
    assert verdict.shown is (verdict.answer.excess if word == "refuted" else verdict.answer.equivalence)


@pytest.mark.slow
@pytest.mark.parametrize("n", [pytest.param(4, marks=pytest.mark.rare), 10])
def test_false_verdicts_on_equal_gaps_are_at_most_the_declared_level(tmp_path, n):
    """Gaps that differ by the margin are not equal within it, nor are they further apart."""
    results = two_factors(tmp_path, [f"{GAP.format('~')} within 3"], n)
    draws, rng, words = 400, np.random.default_rng(n), []
    for _ in range(draws):
        values = draw(rng, [0.0, 3.0, 0.0, 0.0], n, 0.8)
        words += [v.word for v in find(fill(results, values), all_at_once(n)).verdicts]
    assert len(words) == draws
    assert all(at_most(words.count(word), draws, 0.05) for word in ("supported", "refuted"))


@pytest.mark.parametrize("gain", [-0.5, 0.5])
def test_the_advice_for_gaps_says_what_more_seeds_would_show(tmp_path, gain):
    claims = [GAP.format("<"), GAP.format(">"), *(f"{GAP.format('~')} within {margin}" for margin in (0.7, 0.4))]
    results = two_factors(tmp_path, claims, 4, test="paired")
    values = [[0.06 * SIDES[arm.name] * x for x in (-1, 1, 1, -1)] for arm in results.ablation.arms]
    values[[arm.name for arm in results.ablation.arms].index("zero-with")] += np.float64(gain)
    less, more, near, beyond = find(fill(results, values), all_at_once(4)).verdicts
    assert {v.word for v in (less, more, near, beyond)} == {"inconclusive"} and less.more == more.more > 1
    claimed, against = (less, more) if gain < 0 else (more, less)
    assert claimed.note.startswith(f"detecting the observed difference would take about {less.more} more seeds")
    assert against.note.startswith("the difference points against the claim: if it stays as large, refuting it would")
    assert near.note.startswith(f"to show it within the margin would take about {near.more} more seeds")
    beyond_it = f"the estimate is beyond the margin: to show that the difference is would take about {beyond.more} more"
    assert beyond.note.startswith(beyond_it) and beyond.more > less.more


@pytest.mark.slow
@pytest.mark.parametrize(
    ("claim", "margin", "sides"),
    [
        (GAP.format("<"), None, SIDES),
        (f"{GAP.format('~')} within 2", 2.0, SIDES),
        (f"{GAP.format('~')} within 0.2", 0.2, SIDES),
        ("with > 0 | border=zero", None, {"zero-with": 1.0}),
    ],
    ids=["gaps", "equal gaps", "gaps beyond a margin", "number"],
)
@pytest.mark.parametrize("test", ["paired", "welch"])
def test_the_seeds_advised_decide_a_claim_in_four_of_five_cases(tmp_path, claim, margin, sides, test):
    """Of studies whose arms have the means and spreads that were observed; of pairs, also their correlations."""
    results = two_factors(tmp_path, [claim], 6, test=test)
    weights = np.array([sides.get(arm.name, 0.0) for arm in results.ablation.arms])
    values = draw(rng := np.random.default_rng(5), [0.0] * 4, 6, 0.3)
    values += (0.6 * weights / np.abs(weights).sum() - values.mean(1))[:, None]
    (verdict,) = find(fill(results, values), all_at_once(6)).verdicts
    assert verdict.answer.estimate.value == pytest.approx(0.6) and verdict.word == "inconclusive"
    answer, shares = verdict.answer, []
    shown = answer.difference
    if margin:
        shown = answer.equivalence if margin > 0.6 else answer.excess
    spread = np.cov(values) if test == "paired" else np.diag(values.var(1, ddof=1))
    for n in (5 + verdict.more, 6 + verdict.more):
        seeds = rng.multivariate_normal(values.mean(1), spread, size=(2000, n))  # (studies, seeds, arms)
        parts = ((seeds @ weights).var(1, ddof=1) / n)[:, None]
        if test == "welch":
            parts = weights**2 * seeds.var(1, ddof=1) / n
        error, freedom = parts.sum(1) ** 0.5, parts.sum(1) ** 2 / (parts**2).sum(1) * (n - 1)
        far = np.abs((seeds @ weights).mean(1))
        p = 2 * reference.t.sf((far - (margin or 0.0)) / error, freedom)
        if shown is answer.equivalence:
            p = reference.t.sf((margin - far) / error, freedom)
        shares.append(np.mean(p < 0.05 / shown.factor))
    assert shares[0] < 0.83 and shares[1] > 0.77, (verdict.more, shares)
