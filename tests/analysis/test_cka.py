import numpy as np
import pytest
import torch

from vitlab.analysis.cka import analyze_cka, cka, linear_kernel, unbiased_hsic


def test_a_model_agrees_with_itself(small_subject):
    table = analyze_cka(small_subject()).table
    same = table[table["layer"] == table["other_layer"]]["cka"]
    np.testing.assert_allclose(same, 1, atol=1e-6)
    assert (table["cka"] < 1 + 1e-6).all()


def test_rotations_shifts_and_scales_do_not_count():
    x = torch.randn(12, 5)
    rotation = torch.linalg.qr(torch.randn(5, 5))[0]
    assert cka(linear_kernel(x), linear_kernel(3 * x @ rotation + 7)) == pytest.approx(1, abs=1e-5)


def test_unrelated_features_have_none_however_many_there_are():
    values = [cka(linear_kernel(torch.randn(40, 500)), linear_kernel(torch.randn(40, 500))) for _ in range(10)]
    assert abs(np.mean(values)) < 0.03  # the biased estimate would be above 0.9


def test_hsic_is_the_formula_of_song_et_al():
    k, m = (linear_kernel(torch.randn(7, 3)).numpy() for _ in range(2))
    np.fill_diagonal(k, 0)
    np.fill_diagonal(m, 0)
    n, ones = 7, np.ones(7)
    expected = np.trace(k @ m) + ones @ k @ ones * (ones @ m @ ones) / ((n - 1) * (n - 2))
    expected = (expected - 2 / (n - 2) * ones @ k @ m @ ones) / (n * (n - 3))
    assert unbiased_hsic(torch.tensor(k), torch.tensor(m)).item() == pytest.approx(expected)


def test_two_runs_give_a_floor(small_subject):
    subject = small_subject()
    subject.other = small_subject(pos_embed="none")
    subject.other.name = "other"
    finding = analyze_cka(subject)
    assert set(finding.table["against"]) == {"itself", "other"}
    assert "the noise floor if only the seed differs" in finding.note


def test_too_few_images_are_refused(small_subject):
    with pytest.raises(ValueError, match="at least 10, got 3"):
        analyze_cka(small_subject(num_images=3))
