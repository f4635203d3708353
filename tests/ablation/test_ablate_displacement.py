"""`displacement` in ablations: networks that know no position read 0, from today's tables and from those of before."""

import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from vitlab.ablation.inference.analyses import tables_of
from vitlab.analysis.positions import caution_of, displacement_profile, pairs_at, spread_of_layers
from vitlab.runs.directory import RunDir

GRID, HEADS, IMAGES = (4, 4), 3, 96
PAIRS = pairs_at(GRID)


def content(seed, two_passes, by_place=0.0):
    """The table of a layer whose heads go by what tokens show, and by ``by_place`` times the row of the offset."""
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, IMAGES, HEADS, 16, 8, generator=generator)
    k = k + q  # a token likes itself
    first, second = torch.rand(2, IMAGES, 16, generator=generator).argsort(dim=-1)
    second = second if two_passes else first
    q, k = (x.gather(2, order[:, None, :, None].expand_as(x)) for x, order in ((q, first), (k, second)))
    rows = torch.arange(16) // 4
    logits = (q @ k.mT + by_place * (rows - rows[:, None])).flatten(0, 1).double()
    each = displacement_profile(logits, GRID).unflatten(0, (IMAGES, HEADS))
    mean, error = each.mean(dim=0), each.std(dim=0) / math.sqrt(IMAGES)
    cells = [
        {"layer": 0, "head": head, "dy": y - 3, "dx": x - 3, "position": float(mean[head, y, x]),
         "error": float(error[head, y, x])} | ({"pairs": int(PAIRS[y, x])} if two_passes else {})
        for head, y, x in np.ndindex(HEADS, 7, 7)
    ]  # fmt: skip
    return pd.DataFrame(cells)


@pytest.fixture
def results_of(tmp_path):
    def build(tables):
        runs = {}
        for i, table in enumerate(tables):
            path = tmp_path / f"{i}" / "analysis" / "displacement.csv"
            path.parent.mkdir(parents=True, exist_ok=True)
            table.to_csv(path, index=False)
            runs["arm", i] = RunDir(tmp_path / f"{i}")
        return SimpleNamespace(runs=runs)

    return build


def displacements(results):
    return tables_of(results, "displacement")


def is_without_itself(results):
    return "that offset is left out" in caution_of(displacements(results))


def spreads(results):
    return np.array([spread_of_layers(table)["spread"].item() for table in displacements(results).values()])


@pytest.mark.slow
@pytest.mark.parametrize("two_passes", [True, False], ids=["today", "before"])
def test_heads_that_go_by_content_have_a_spread_of_zero(results_of, two_passes):
    tables = [content(seed, two_passes) for seed in range(60)]
    found = spreads(results_of(tables)).reshape(12, 5)  # 12 arms of five seeds
    floor = float(tables[0]["error"].median())
    assert abs(found.mean()) < 0.2 * floor and (found < 0).mean() > 0.3
    reach = 2.776 * found.std(axis=1, ddof=1) / math.sqrt(5)
    assert (abs(found.mean(axis=1)) <= reach).mean() >= 10 / 12


def test_older_tables_leave_out_the_offset_zero_and_present_ones_do_not(results_of):
    before, today = content(0, False), content(0, True)
    assert before["position"].max() > 5  # the offset (0, 0), which is content
    old = results_of([before])
    assert is_without_itself(old)
    (table,) = displacements(old).values()
    itself = table[(table["dy"] == 0) & (table["dx"] == 0)]
    assert itself["position"].isna().all() and (itself["pairs"] == 0).all()
    for _, head in table.groupby("head"):
        assert (head["pairs"] * head["position"]).sum() == pytest.approx(0, abs=1e-9)
    new = results_of([today])
    pd.testing.assert_frame_equal(displacements(new)["arm", 0], today)
    assert not is_without_itself(new)


@pytest.mark.parametrize("two_passes", [True, False], ids=["today", "before"])
def test_the_amount_of_positional_knowledge_is_recovered(results_of, two_passes):
    found = spreads(results_of([content(seed, two_passes, by_place=0.5) for seed in range(5)]))
    rows = torch.arange(-3, 4)[:, None].expand(7, 7)
    pairs = PAIRS.clone()
    pairs[3, 3] = pairs[3, 3] if two_passes else 0
    expected = 0.5 * float(((pairs * rows**2).sum() / pairs.sum()).sqrt())
    assert found.mean() == pytest.approx(expected, rel=0.05)
