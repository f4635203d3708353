"""Every printed interval holds the truth in 90 to 98 % of 200 draws or more from a population that is known.

Drawn are the numbers of each image from which an analysis makes its interval, not networks.
"""

import numpy as np
import pytest
import torch
from scipy.stats import norm

from bench.pairs import interval as speed_interval
from vitlab.analysis.attribution.sanity import DRAWS as RANDOM_NETWORKS
from vitlab.analysis.attribution.sanity import MOST as SANITY_IMAGES
from vitlab.analysis.cka import cka, cka_interval, linear_kernel
from vitlab.analysis.features import DRAWS as LABELED_DRAWS
from vitlab.analysis.intervals import over_draws, over_images, over_several, share_interval
from vitlab.analysis.outcomes.calibration import BINS, bins_of, calibration_error
from vitlab.analysis.outcomes.confusion import _table, macro_intervals
from vitlab.analysis.segmentation import Counts
from vitlab.class_metrics import by_class, over_classes
from vitlab.stats import interval as interval_of_mean
from vitlab.stats import paired_interval

DRAWS = 200
MANY = 1000  # where a draw takes no time


def share_held(draw, truth, draws=DRAWS):
    """Return the share of intervals that hold the truth; ``draw`` maps a generator to an interval, or one of each."""
    rng = np.random.default_rng(0)
    ends = np.array([draw(rng) for _ in range(draws)])
    return ((ends[..., 0] <= np.asarray(truth) + 1e-12) & (truth <= ends[..., 1] + 1e-12)).mean(axis=0)


def overconfident(p):
    return 1 / (1 + np.sqrt(1 / p - 1))  # half of the logit


NETWORKS = {  # of the true share at each predicted probability
    "calibrated": lambda p: p,
    "overconfident": overconfident,
    "wrong in one bin": lambda p: np.where((p > 0.6) & (p < 2 / 3), 0.3, p),
}


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize("n", [440, *(pytest.param(n, marks=pytest.mark.rare) for n in (200, 5000))])
@pytest.mark.parametrize(
    "name", ["calibrated", *(pytest.param(n, marks=pytest.mark.rare) for n in ("overconfident", "wrong in one bin"))]
)
def test_the_interval_of_the_calibration_error_holds_the_truth_as_often_as_it_says(name, n):
    true = NETWORKS[name]
    many = np.random.default_rng(1).beta(5, 1.5, 2_000_000)
    of = bins_of(many)
    sizes, gaps = np.bincount(of, minlength=BINS), np.bincount(of, many - true(many), BINS)
    truth = np.sqrt(np.sum(gaps**2 / np.maximum(sizes, 1)) / len(many))

    def draw(rng):
        p = rng.beta(5, 1.5, n)
        found = calibration_error(p, rng.random(n) < true(p), draws=200)
        return found.low, found.high

    assert 0.9 <= share_held(draw, truth) <= 0.98


def related(n, share, generator):
    """Return two sets of features of n images of which the second is a function of the first, and noise."""
    spread = torch.linspace(2, 0.2, 12)
    mixing = torch.randn(12, 12, generator=torch.Generator().manual_seed(5)) / 12**0.5
    x = torch.randn(n, 12, generator=generator) * spread
    noise = torch.randn(n, 12, generator=generator) * spread
    return x, share * torch.tanh(x @ mixing) + (1 - share) * noise


@pytest.mark.rare
@pytest.mark.parametrize("n", [24, *(pytest.param(n, marks=pytest.mark.rare) for n in (64, 256))])
@pytest.mark.parametrize("share", [0.9, *(pytest.param(share, marks=pytest.mark.rare) for share in (0.0, 0.4, 0.6))])
def test_the_interval_of_cka_holds_the_true_similarity_as_often_as_it_says(share, n):
    generator = torch.Generator().manual_seed(0)

    def kernels(count):
        return [linear_kernel(x) for x in related(count, share, generator)]

    truth = 0.0 if share == 0 else cka(*kernels(6000))

    def draw(rng):
        k, m = kernels(n)
        return cka_interval(cka(k, m), k, m)

    draws = DRAWS if share or n == 256 else 5 * DRAWS  # 97 to 98 % where few images are unrelated
    assert 0.9 <= share_held(draw, truth, draws) <= 0.98


def ends(found, name="x"):
    return found[f"{name}_low"], found[f"{name}_high"]


VARIANCES = {  # standard deviations over draws, over images, and of an image in a draw, which count alike in the mean
    "all in the draws": (1.0, 0.1, 0.1),
    "all in the images": (0.05, 1.0, 0.1),
    "all alike": (0.5, 1.0, 1.0),
}


@pytest.mark.parametrize("name", VARIANCES)
def test_the_interval_of_sanity_covers_images_and_random_networks(name):
    """As in `sanity`; the interval over images alone held the mean over networks in 20 of 200 where draws differ."""
    of_draws, of_images, rest = VARIANCES[name]

    def values(rng):
        draws, images = RANDOM_NETWORKS, SANITY_IMAGES
        each = of_draws * rng.standard_normal((draws, 1)) + of_images * rng.standard_normal(images)
        return 0.3 + 0.2 * (each + rest * rng.standard_normal((draws, images)))

    assert 0.9 <= share_held(lambda rng: ends(over_draws("x", values(rng))), 0.3, MANY) <= 0.98
    if name == "all in the draws":  # the interval of before
        assert share_held(lambda rng: ends(over_images("x", values(rng)[0])), 0.3) < 0.3


def test_the_interval_of_a_share_over_draws_is_that_of_its_zeros_and_ones_far_from_0_and_1():
    right = np.random.default_rng(0).random((5, 2000)) < 0.5
    share, numbers = over_draws("x", right), over_draws("x", right.astype(float))
    assert list(share.values()) == pytest.approx(list(numbers.values()), abs=5e-4)
    assert numbers["x_high"] - numbers["x_low"] > 0.02


def test_draws_of_one_image_are_one_image():
    found = over_draws("acc1", np.ones((5, 1), bool))
    assert (found["acc1"], found["acc1_low"], found["acc1_high"]) == (
        1.0,
        pytest.approx(share_interval(1.0, 1)[0]),
        1.0,
    )
    assert np.isnan(over_draws("x", np.array([[1.0], [2.0]]))["x_low"])


@pytest.mark.slow
@pytest.mark.parametrize("n", [100, 500])
@pytest.mark.parametrize(("luck", "level"), [(0.3, 0.0), (0.1, 1.0), (0.3, 2.5), (0.0, 4.0)])
def test_the_interval_of_few_shots_covers_images_and_draws_of_labels(n, luck, level):
    """Images differ in difficulty, draws of labeled images in luck; both act on the chance of being right."""
    truth = (level + np.hypot(1, np.hypot(1, luck)) * np.random.default_rng(9).standard_normal(4_000_000) > 0).mean()

    def draw(rng):
        score = level + rng.standard_normal(n) + luck * rng.standard_normal((LABELED_DRAWS, 1))
        return ends(over_draws("x", score + rng.standard_normal((LABELED_DRAWS, n)) > 0))

    assert 0.9 <= share_held(draw, truth) <= 0.98


@pytest.mark.parametrize("n", [24, 64, 512])
@pytest.mark.parametrize("share", [0.5, 0.8, 0.95])
def test_the_interval_of_a_share_of_images_holds_the_truth_as_often_as_it_says(share, n):
    """Accuracy and flipped predictions of shift, scramble, resolution and knn; errors, recall, precision; the page."""
    assert 0.9 <= share_held(lambda rng: share_interval(int(rng.binomial(n, share)) / n, n), share, MANY) <= 0.98


@pytest.mark.slow
@pytest.mark.parametrize("n", [24, 64, 512])
@pytest.mark.parametrize(("share", "alike"), [(0.5, 0.0), (0.8, 2.0), (0.95, 1.0), (0.8, 9.0)])
def test_the_interval_of_shares_under_four_changes_holds_the_truth(share, alike, n):
    """The mean of four directions of a shift; ``alike`` is how much the images themselves differ.

    The mean of the four intervals, which was printed, held the truth in all of 1,000 draws where directions differ.
    """
    limit = np.sqrt(1 + alike**2) * norm.ppf(share)

    def draw(rng):
        hard = alike * rng.standard_normal(n)
        return ends(over_several("x", limit + hard + rng.standard_normal((4, n)) > 0))

    assert 0.9 <= share_held(draw, share, MANY) <= 0.98


SHAPES = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "skewed": lambda rng, n: rng.gamma(2, 1, n) - 2,  # changes of outputs, distances, ratios of norms
    "shares of tokens": lambda rng, n: rng.binomial(16, rng.beta(2, 3, n)) / 16 - 0.4,  # a probe's accuracy
    "differences": lambda rng, n: rng.gamma(3, 1, n) - rng.gamma(3, 1, n),  # above_null
}


@pytest.mark.slow
@pytest.mark.parametrize("n", [24, 64, 512])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_interval_of_a_mean_over_images_holds_the_truth_as_often_as_it_says(shape, n):
    """Distance, entropy, above_null, excess, R^2, change, norm_ratio, mean_distance, error of a reconstruction."""
    assert 0.9 <= share_held(lambda rng: ends(over_images("x", SHAPES[shape](rng, n))), 0.0, MANY) <= 0.98


@pytest.mark.parametrize("n", [50, 440, 5000])
@pytest.mark.parametrize(("only_a", "only_b"), [(0.02, 0.02), (0.05, 0.02), (0.2, 0.1)])
def test_the_interval_of_a_difference_of_two_runs_holds_the_truth(only_a, only_b, n):
    def draw(rng):
        a, b, _ = rng.multinomial(n, [only_a, only_b, 1 - only_a - only_b])
        return paired_interval(a, b, n)

    most = 0.98 if n * (only_a + only_b) > 10 else 1.0  # of few images that differ, an interval has few values
    assert 0.9 <= share_held(draw, only_a - only_b, MANY) <= most


@pytest.mark.slow
@pytest.mark.parametrize("measure", ["acc1_macro", "f1_macro"])
@pytest.mark.parametrize(
    ("classes", "images"),
    [(3, 20), *(pytest.param(*n, marks=pytest.mark.rare) for n in ((10, 44), (10, 10), (50, 10)))],
)
@pytest.mark.parametrize(
    "recalls",
    [
        pytest.param((0.5, 0.9), marks=pytest.mark.rare),
        pytest.param((0.9, 0.99), marks=pytest.mark.rare),
        (0.97, 0.995),
    ],
)
@pytest.mark.rare
def test_the_interval_of_a_mean_over_classes_holds_the_truth_as_often_as_it_says(recalls, classes, images, measure):
    of = np.linspace(*recalls, classes)
    wrong = np.random.default_rng(4).dirichlet(np.ones(classes - 1), classes)
    shares = np.array([np.insert((1 - r) * w, k, r) for k, (r, w) in enumerate(zip(of, wrong, strict=True))])
    truth = over_classes(np.round(shares * 1e9).astype(np.int64))[measure]

    def draw(rng):
        return macro_intervals(rng.multinomial(images, shares))[measure]

    assert 0.9 <= share_held(draw, truth) <= 0.98


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "recalls"),
    [((60, 60, 60), (0.9, 0.7, 0.5)), ((500, 500, 1), (0.9, 0.9, 0.6)), ((8, 6, 2, 1, 1), (0.7,) * 5)],
)
def test_the_interval_of_a_mean_over_frequent_and_rare_classes_holds_the_truth(sizes, recalls):
    """A class with one image is all right or all wrong: bootstraps within it do not vary, and it is half unknown."""
    of, classes = np.array(recalls), len(sizes)
    shares = np.where(np.eye(classes) > 0, of, ((1 - of) / (classes - 1))[:, None])
    truth = {**over_classes(shares * np.array(sizes)[:, None]), "acc1_macro": of.mean()}
    rng, found = np.random.default_rng(0), []
    for _ in range(100):
        ends = macro_intervals(rng.multinomial(sizes, shares), draws=50)
        found.append([low <= truth[name] <= high for name, (low, high) in ends.items()])
    assert np.mean(found, axis=0).min() >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize("images", [20, pytest.param(100, marks=pytest.mark.rare)])
def test_intervals_of_recall_precision_and_f1_hold_the_truth_as_often_as_they_say(images):
    shares, measures = np.array([[0.8, 0.15, 0.05], [0.1, 0.85, 0.05], [0.2, 0.1, 0.7]]), ("recall", "precision", "f1")
    truth = by_class(np.round(shares * 1e9).astype(np.int64))

    def draw(rng):
        matrix = rng.multinomial(3 * images, shares.flatten() / 3).reshape(3, 3)
        table = _table("class", ["a", "b", "c"], matrix.diagonal(), matrix.sum(1), matrix.sum(0))
        return [ends(table.iloc[0], measure) for measure in measures]

    held = share_held(draw, [truth[measure][0] for measure in measures], MANY)
    assert held.min() >= 0.9 and held.max() <= 0.98


@pytest.mark.slow
@pytest.mark.parametrize("images", [(2, 2), (5, 5), (100, 100), (100, 2), (100, 3)])
def test_intervals_of_intersections_over_unions_and_of_their_mean_hold_the_truth(images):
    """Class 0 is in all images, class 1 in some."""
    n = images[0]

    def masks(rng, n):
        true = np.ceil(rng.gamma(2, 50, (n, 2)))
        both = np.floor(true * rng.beta([9, 4], [3, 4], (n, 2)))
        return both, true, both + np.ceil(rng.gamma(1, 20, (n, 2)))

    both, true, said = (part.sum(axis=0) for part in masks(np.random.default_rng(1), 200_000))
    truth = both / (true + said - both)

    def draw(rng):
        parts = masks(rng, n)
        for part in parts:
            part[images[1] :, 1] = 0
        return Counts(*parts).intervals()

    held = share_held(draw, np.append(truth, truth.mean()), MANY)
    assert held.min() >= 0.9 and held.max() <= 0.98


@pytest.mark.slow
@pytest.mark.parametrize("n", [3, 5, 9])
def test_the_interval_of_a_ratio_of_speeds_holds_the_truth(n):
    assert 0.9 <= share_held(lambda rng: speed_interval(np.exp(0.1 * rng.standard_normal(n)).tolist()), 1.0) <= 0.98


@pytest.mark.parametrize("n", [2, 3, 5])
def test_the_interval_of_a_mean_over_seeds_or_folds_holds_the_truth(n):
    assert 0.9 <= share_held(lambda rng: interval_of_mean(rng.standard_normal(n).tolist()), 0.0, MANY) <= 0.98
