"""Every printed interval holds the truth in 90 to 98 % of 200 draws from a population that is known.

Drawn are the numbers of each image from which an analysis makes its interval, not networks.
"""

import numpy as np
import pytest
import torch

from vitlab.analysis.cka import cka, interval, linear_kernel
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


def related(n, share, generator):
    """Return two sets of features of n images of which the second is a function of the first, and noise."""
    spread = torch.linspace(2, 0.2, 12)
    mixing = torch.randn(12, 12, generator=torch.Generator().manual_seed(5)) / 12**0.5
    x = torch.randn(n, 12, generator=generator) * spread
    noise = torch.randn(n, 12, generator=generator) * spread
    return x, share * torch.tanh(x @ mixing) + (1 - share) * noise


@pytest.mark.slow
@pytest.mark.parametrize("n", [24, 64, 256])
@pytest.mark.parametrize("share", [0.0, 0.4, 0.6, 0.9])
def test_cka(share, n):
    generator = torch.Generator().manual_seed(0)

    def kernels(count):
        return [linear_kernel(x) for x in related(count, share, generator)]

    truth = 0.0 if share == 0 else cka(*kernels(6000))

    def draw(rng):
        k, m = kernels(n)
        return interval(cka(k, m), k, m)

    most = 0.99 if share == 0 and n < 256 else 0.98  # somewhat too wide where few images are unrelated
    assert 0.9 <= share_held(draw, truth) <= most
