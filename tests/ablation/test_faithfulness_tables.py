"""The report reads tables of analyses: those of before, several lines, and names that look like numbers."""

from io import StringIO
from types import SimpleNamespace

import pandas as pd
import pytest

from vitlab.ablation.inference.analyses import _table, curve_rows
from vitlab.ablation.inference.measured import metrics_of
from vitlab.analysis import ANALYSES
from vitlab.runs.directory import RunDir


def saved(folder, rows, name="faithfulness"):
    (folder / "analysis").mkdir(parents=True)
    pd.DataFrame(rows).to_csv(folder / "analysis" / f"{name}.csv", index=False)
    return RunDir(folder)


def test_an_old_table_is_the_filling_with_the_mean_color(tmp_path):
    shares = (0.0, 0.5, 1.0)
    old = [
        {"kind": kind, "map": "rollout", "share": x, "probability": 0.5, "area": area, "above_random": 0.1}
        for kind, area in (("deletion", 0.2), ("insertion", 0.7))
        for x in shares
    ]
    new = [
        {"filling": filling, "kind": kind, "map": "rollout", "against": "random", "share": x, "probability": 0.5}
        | {"area": 0.1, "above_random": 0.1, "gain": gain, "first_above_random": 0.3}
        for filling, gain in (("mean color", 0.7), ("blur", -0.1))
        for kind in ("MoRF", "LeRF")
        for x in shares
    ]
    pair = {"filling": "blur", "kind": "pair", "map": "rollout", "against": "occlusion", "gain": 9.0}
    runs = {("a", 0): saved(tmp_path / "0", old), ("a", 1): saved(tmp_path / "1", [*new, pair])}
    ablation = SimpleNamespace(
        analyses=["faithfulness"], arms=[SimpleNamespace(name="a")], seeds=[0, 1], stats=SimpleNamespace(ci=0.95)
    )
    rows = curve_rows(SimpleNamespace(ablation=ablation, runs=runs))
    found = {(row["line"], row["measure"]): (row["n"], row["mean"]) for row in rows}
    assert found == {
        ("mean color, rollout", "gain"): (2, pytest.approx(0.6)),
        ("mean color, rollout", "first_above_random"): (1, pytest.approx(0.3)),
        ("blur, rollout", "gain"): (1, pytest.approx(-0.1)),
        ("blur, rollout", "first_above_random"): (1, pytest.approx(0.3)),
    }
    old_alone = curve_rows(SimpleNamespace(ablation=ablation, runs={("a", 0): runs["a", 0]}))
    assert [(row["line"], row["measure"]) for row in old_alone] == [("mean color, rollout", "gain")]
    assert set(ANALYSES["faithfulness"].curve.lines) == {"filling", "map"}


def test_classes_of_a_report_have_the_names_that_they_have_and_layers_stay_numbers(tmp_path):
    text = "class,recall,precision,f1\n01,0.9,1,1\n1,0.1,1,1\nNone,0.5,1,1\n1.50,0.4,1,1\n"
    run = saved(tmp_path, [], "confusion")
    (tmp_path / "analysis/confusion.csv").write_text(text)
    ablation = SimpleNamespace(
        analyses=["confusion"], arms=[SimpleNamespace(name="a")], seeds=[0], stats=SimpleNamespace(ci=0.95)
    )
    rows = curve_rows(SimpleNamespace(ablation=ablation, runs={("a", 0): run}))
    recall = {row["line"]: row["mean"] for row in rows if row["measure"] == "recall"}
    assert recall == {"01": 0.9, "1": 0.1, "None": 0.5, "1.50": 0.4}
    own = ANALYSES["cka"].read(StringIO("layer,against,other_layer,cka\n0,itself,0,1\n10,itself,1,0.5\n"))
    assert own.to_numpy().tolist() == [[0, "itself", 0, 1.0], [10, "itself", 1, 0.5]]


def test_a_table_that_also_has_another_run_gives_the_numbers_of_its_own(tmp_path):
    """Before, those of `analyze resolution --against OTHER`, which an older vitlab kept in their place, won."""
    both = [
        {"run": run, "protocol": "resize", "metric": "resolution/acc1@12", "acc1": x}
        for run, x in (("a", 0.9), ("b", 0.1))
    ]
    assert metrics_of(saved(tmp_path, both, "resolution"), ("resolution",)) == {"resolution/acc1@12": 0.9}


@pytest.mark.parametrize(
    ("unit", "cells"),
    [
        (1, ["0.5000 ± 0.0100", "0.0000 ± 0.0000"]),
        (1e-6, ["0.0000005000 ± 0.0000000100", "0.0000000000 ± 0.0000000000"]),
        (1e9, ["500000000 ± 10000000", "0 ± 0"]),
    ],
)
def test_an_analysis_has_the_decimals_of_its_unit_and_no_zero_below_zero(unit, cells):
    rows = [
        {
            "arm": "a",
            "line": "",
            "measure": "norm",
            "x": x,
            "n": 3,
            "planned": 3,
            "mean": mean * unit,
            "half": half * unit,
        }
        for x, mean, half in ((0.0, 0.5, 0.01), (1.0, -1e-10, 0.0))
    ]
    assert _table(rows, ANALYSES["entropy"].curve, "norm")[1] == ["a", "3/3", *cells]


def test_the_curve_of_a_map_goes_from_the_head_to_the_tokenizer(tmp_path):
    stages = ("the head", "half the blocks", "all blocks", "tokenizer too")
    table = [
        {"map": name, "random": stage, "blocks": blocks, "correlation": 0.9 - 0.2 * i}
        for name in ("attention", "rollout")
        for i, (stage, blocks) in enumerate(zip(stages, (0, 1, 2, 2), strict=True))
    ]
    ablation = SimpleNamespace(
        analyses=["sanity"], arms=[SimpleNamespace(name="a")], seeds=[0], stats=SimpleNamespace(ci=0.95)
    )
    runs = {("a", 0): saved(tmp_path / "0", table, "sanity")}
    rows = curve_rows(SimpleNamespace(ablation=ablation, runs=runs))
    found = [(row["line"], row["x"], round(row["mean"], 1)) for row in rows]
    assert found == [
        (name, float(i), v) for name in ("attention", "rollout") for i, v in enumerate((0.9, 0.7, 0.5, 0.3))
    ]
    curve = ANALYSES["sanity"].curve
    assert [title for title, _ in curve.panels(curve, rows)] == ["map: attention", "map: rollout"]
