"""Every printed interval holds the truth in 90 to 98 % of 200 draws from a population that is known.

Drawn are the numbers of each image from which an analysis makes its interval, not networks.
"""

import numpy as np
import pytest

from vitlab.analysis.outcomes.calibration import BINS, bins_of, calibration_error

DRAWS = 200


def share_held(draw, truth, draws=DRAWS):
    """Return the share of intervals that hold the truth; ``draw`` maps a generator to an interval."""
    rng = np.random.default_rng(0)
    ends = np.array([draw(rng) for _ in range(draws)])
    return ((ends[:, 0] <= truth + 1e-12) & (truth <= ends[:, 1] + 1e-12)).mean()


def overconfident(p):
    return 1 / (1 + np.sqrt(1 / p - 1))  # half of the logit


NETWORKS = {  # of the true share at each predicted probability
    "calibrated": lambda p: p,
    "overconfident": overconfident,
    "wrong in one bin": lambda p: np.where((p > 0.6) & (p < 2 / 3), 0.3, p),
}


@pytest.mark.slow
@pytest.mark.parametrize("n", [200, 440, 5000])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_calibration_error(name, n):
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
