"""What the CPU at hand is fast at, as `vitlab doctor` and the first lines of a run say it."""

import pytest
import torch

from vitlab.cli import doctor
from vitlab.jobs import processor
from vitlab.layers import kernels


def test_doctor_shows_the_speed_of_both_kernels_and_the_one_used(monkeypatch):
    monkeypatch.setattr(processor, "speed_of_sdpa", lambda dtype, gradient: 0.5 if gradient else 2.0)
    monkeypatch.setattr(processor, "cost_of_half", lambda dtype: {torch.bfloat16: 0.5, torch.float16: 21.4}[dtype])
    monkeypatch.setattr(kernels, "HAS_TILES", False)
    for module in (kernels, processor):
        monkeypatch.setattr(module, "EMULATED", frozenset({torch.float16}))
    full, brain, half = doctor.speeds()
    measured = "speed of fused attention to products forward 2.00 ({} taken), training 0.50 ({} taken)"
    assert full.state == "note"
    assert full.text == f"float32: {measured.format('fused', 'fused')}; the way taken is the slower one here"
    assert brain.text.startswith(f"bfloat16: {measured.format('products', 'products')}; the way taken")
    assert half.state == "note"
    assert "emulated, products take 21.4 times as long as in float32: train in 32-true" in half.text


def test_emulated_products_are_many_times_slower_and_others_are_not():
    for dtype in (torch.float16, torch.bfloat16):  # seen: 18 to 60 where emulated, .4 to .6 or 2.1 where not
        assert (processor.cost_of_half(dtype) > 4) == (dtype in kernels.EMULATED)


def test_where_half_precision_is_emulated_the_fused_kernel_is_the_faster_one():
    for dtype in kernels.EMULATED:  # seen: 2.1 to 13
        assert processor.speed_of_sdpa(dtype, gradient=False) > 1.2


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "bf16"])
def test_emulated_half_precision_is_reported_with_its_factor(precision, monkeypatch):
    monkeypatch.setattr(processor, "cost_of_half", lambda dtype: {torch.bfloat16: 21.4}[dtype])
    monkeypatch.setattr(processor, "EMULATED", frozenset({torch.bfloat16}))
    assert processor.slow_half(precision, "cpu") == (
        f"precision {precision}: this CPU has no products of bfloat16, and one takes 21.4 times as long as in float32; "
        "use --trainer.precision=32-true"
    )
    assert processor.slow_half(precision, "cuda") is None
    assert processor.slow_half("32-true", "cpu") is None


@pytest.mark.parametrize(("cost", "is_slow"), [(0.5, False), (1.4, False), (2.14, True)])
def test_half_precision_slower_than_float32_is_reported_though_not_emulated(cost, is_slow, monkeypatch):
    monkeypatch.setattr(processor, "cost_of_half", lambda dtype: cost)
    monkeypatch.setattr(processor, "speed_of_sdpa", lambda dtype, gradient: 1.0)
    monkeypatch.setattr(processor, "EMULATED", frozenset())
    line = "precision bf16-mixed: on this CPU a product of bfloat16 takes 2.1 times as long as one of float32; "
    assert processor.slow_half("bf16-mixed", "cpu") == (line + "use --trainer.precision=32-true" if is_slow else None)
    _, (is_good, text), _ = processor.measured_ways()
    assert is_good != is_slow
    assert text.endswith("; products take 2.1 times as long as in float32: train in 32-true") == is_slow
