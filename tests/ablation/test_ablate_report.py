"""Reports of cells whose files are made up: every number of it can be found, and the page can be read."""

import errno
import json
import math
import os
import re
import shutil
import subprocess
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import yaml
from matplotlib.figure import Figure

from tests.ablation.made_up import give, lose, of_runs, without_numbers
from vitlab.ablation.evidence.verify import verify_evidence
from vitlab.ablation.execution.cells import Resolved, cells_of
from vitlab.ablation.execution.status import foreign_cells_text
from vitlab.ablation.execution.tuning import Tuning
from vitlab.ablation.file.settings import WandB
from vitlab.ablation.file.spec import read_ablation
from vitlab.ablation.inference import analyses, images
from vitlab.ablation.inference.baselines import NOT_COMPARED, arm_rows
from vitlab.ablation.inference.findings import find
from vitlab.ablation.inference.looks import Looks
from vitlab.ablation.inference.measured import CellResult, collect
from vitlab.ablation.inference.plan import plan_of
from vitlab.ablation.inference.words import chance
from vitlab.ablation.report import drawings, write
from vitlab.ablation.report.drawings import figures
from vitlab.ablation.report.sections import _answer, _hours, _lost, _without_claims
from vitlab.ablation.report.tuned import tuning_section
from vitlab.ablation.report.write import send_report, write_report
from vitlab.analysis import Curve
from vitlab.errors import UsageError
from vitlab.runs.directory import RunDir
from vitlab.runs.records import bounds_of
from vitlab.runs.standing import Standing
from vitlab.stats import interval

pytestmark = pytest.mark.slow

ARMS = {"none": 0.70, "learned": 0.90, "sincos2d": 0.905}
FILE = {
    "name": "made-up",
    "base": "base.yaml",
    "axes": {"pos_embed": {arm: {"model.pos_embed": arm} for arm in ARMS}},
    "seeds": 3,
    "baseline": {"pos_embed": "none"},
    "evaluate": "test",
    "metric": {"primary": "acc1", "secondary": ["resolution/acc1@12"]},
    "analyses": ["resolution", "scramble", "shift", "displacement", "position", "confusion", "probe", "cka"],
    "stats": {"margin": 0.02},
    "claims": ["learned > none", "learned > none on resolution/acc1@12", "sincos2d > learned", "learned > 0.5"],
}
WITH_FEW_ANALYSES = {**FILE, "analyses": ["resolution", "confusion"]}


def resolved(ablation):
    for i, arm in enumerate(ablation.arms):
        model = {"parameters": 1000 + 2048 * i, "flops": 647_680 + i, "tokens": 17}
        config = {
            "trainer": {"max_epochs": 4},
            "model": {"init_args": {"lr": 0.002, "pos_embed": arm.name}},
            "data": {},
        }
        group = {"name": "pos_embed.weight", "shape": [1, 16, 8 * i], "weight_decay": 0.0, "lr_scale": 10.0}
        data = {"splits": {"train": {"n": 640}}}
        yield Resolved(arm, config, data, model, (group,), 1234.5, "c0de")


def analyze(run, cell, accuracy, rng, layers):
    sizes = [(8, 0.6), (12, 0.8), (16, 1.0), (24, 0.7)]
    rows = [
        {
            "protocol": p,
            "size": size,
            "policy": policy,
            "metric": f"resolution/acc1@{size}{suffix}",
            "acc1": f * accuracy,
        }
        for size, f in sizes
        for policy, suffix in (("interpolate", ""), ("extrapolate", "/extrapolate"))
        for p in ("resize", "canvas")
    ]
    tables = {"resolution": rows}
    tables["scramble"] = [
        {"blocks": blocks, "repeat": r, "acc1": accuracy / blocks, "flipped": 1 - 1 / blocks + 0.01 * r}
        for blocks, repeats in ((1, 1), (4, 3), (16, 3))
        for r in range(repeats)
    ]
    tables["shift"] = [
        {"fill": f, "pixels": p, "direction": d, "acc1": accuracy - p / 20, "flipped": p / 20, "agreement": 1 - p / 20}
        for f in ("black", "circular")
        for p in (0, 1, 4)
        for d in ("up", "down")
    ]
    tables["displacement"] = [
        {
            "layer": layer,
            "head": head,
            "dy": dy,
            "dx": dx,
            "position": rng.normal() * (cell.arm.name != "none"),
            "error": 0.1,
        }
        for layer in range(2)
        for head in range(2)
        for dy in range(-3, 4)
        for dx in range(-3, 4)
    ]
    tables["probe"] = [
        {"images": i, "positions": p, "layer": layer, "accuracy": accuracy, "excess": accuracy - 0.1, "r2": layer / 9}
        for i in ("validation", "noise")
        for p in ("with", "without")
        for layer in range(4)
    ]
    tables["cka"] = [
        {"layer": layer, "against": "itself", "other_layer": other, "cka": 1 / (1 + abs(layer - other))}
        for layer in range(layers)
        for other in range(layers)
    ]
    tables["confusion"] = [{"class": "cat", "recall": accuracy, "precision": 0.5, "f1": float("nan")}]
    for name, content in tables.items():
        path = run.path / "analysis" / f"{name}.csv"
        path.parent.mkdir(exist_ok=True)
        pd.DataFrame(content).to_csv(path, index=False)
    notes = {name: {"note": "512 validation images"} for name in tables}
    run.write("analysis/notes.json", {**notes, "position": {"not_done": "there is no table"}})


def finish(cell, images=500, layers=4):
    rng = np.random.default_rng([cell.seed, len(cell.arm.name)])
    targets = np.random.default_rng(0).integers(0, 10, images)
    accuracy = ARMS[cell.arm.name] + 0.01 * rng.standard_normal()
    right = rng.random(images) < accuracy
    run = cell.run
    (run.path / "predictions").mkdir(parents=True)
    table = pd.DataFrame({"index": range(images), "target": targets, "prediction": np.where(right, targets, 99)})
    table.to_parquet(run.path / "predictions/test.parquet", index=False)
    result = {"acc1": float(right.mean()), "loss": 1.0, "n": images, "checkpoint": "last.ckpt"}
    run.write("results.json", {"test": result})
    facts = {"commit": "abc", "dirty": True, "diff": "0123456789", "versions": {"torch": "2.10"}, "devices": ["toy"]}
    run.write("run.json", {**facts, "python": "3.11", "threads": 1, "peak_memory": {"host": 2**28}})
    run.write("data.json", cell.resolved.data)
    done = {"id": cell.id, "parts": cell.parts, "file": cell.ablation.digest, "host": "here", "seconds": 12.5}
    run.write("done.json", {**done, "ended": "2026-01-01T00:00:00+00:00"})
    lines = [{"step": 10 * e, "epoch": e, "images_per_second": 900.0 + e} for e in range(4)]
    lines += [{"step": 10 * e, "epoch": e, "val/acc1": accuracy - 0.3 / (e + 1)} for e in range(4)]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    analyze(run, cell, accuracy, rng, layers)


def test_a_section_says_what_the_notes_of_all_cells_share_and_no_result_of_one():
    def shared(*texts):
        notes = [({"note": text}, Standing("current")) for text in texts]
        runs = {i: SimpleNamespace(note=lambda name, note=note: note) for i, note in enumerate(notes)}
        return analyses._note(SimpleNamespace(runs=runs), "any")

    assert shared("calibration error 0.01 [0.00, 0.04]; 15 bins", "calibration error 0.25 [0.20, 0.30]; 15 bins") == ""
    assert shared("9 images, mean of four, patches of 2 pixels", "9 images, mean of four, patches of 4 pixels") == (
        "9 images, mean of four."
    )
    assert shared("9 images, pos_embed=learned, x", "9 images, pos_embed=none, y") == "9 images."
    assert shared() == ""


@pytest.mark.parametrize(("values", "cell"), [([0.2, 0.2], "0.2000"), ([0.0, 0.0], "0.0000 ± 0.0000"),
                                              ([0.1, 0.3], "0.2000 ± 1.2706"), ([0.2], "0.2000")])  # fmt: skip
def test_seeds_that_agree_have_no_interval_unless_nothing_has_changed(values, cell):
    tables = [pd.DataFrame({"pixels": [1], "acc1": [value], "seed": [i]}) for i, value in enumerate(values)]
    results = SimpleNamespace(ablation=SimpleNamespace(stats=SimpleNamespace(ci=0.95), seeds=(0, 1)))
    curve = Curve(x="pixels", measures={"acc1": "accuracy"})
    (row,) = analyses._arm_rows(results, "shift", curve, "a", tables)
    assert analyses._cell(row, 4) == cell


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("base.yaml").write_text("model: Classifier\n")
        Path("made-up.yaml").write_text(yaml.safe_dump(FILE, sort_keys=False))
        ablation = read_ablation("made-up.yaml")
        arms = list(resolved(ablation))
        for cell in cells_of(ablation, arms)[:-1]:  # one is missing
            finish(cell)
        write_report(ablation, arms, "kept", False, ("svg",))  # PDFs are a quarter of its time
        yield folder / "runs/ablations/made-up/report"


NUMBER = re.compile(r"(?<![\w.@])[+-]?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?%?(?![\w.])")


def numbers_of(report):
    """Every number of what was measured: not the provenance, the file itself, names of levels, or formulas."""
    text = report.split("\n## Provenance")[0]
    text = re.sub(r"`[^`]*`|\d+% (t )?interval|80 % power|p < 0\.0001|\| < 0\.0001|^#+ .*$", "", text, flags=re.M)
    return NUMBER.findall(re.sub(r"(?<=\d) % (?=more|fewer)", "% ", text))


def test_every_number_of_the_report_is_in_the_summary(folder):
    table = pd.read_csv(folder / "summary.csv")
    cells = [v for column in table.columns for v in table[column].dropna().unique()]
    known = np.array([float(v) for v in cells if isinstance(v, int | float | np.number)])
    words = " ".join(str(v) for v in cells) + " 512 2048"
    report = (folder / "report.md").read_text()
    found = numbers_of(report)
    assert len(found) > 200
    for text in found:
        value = float(text.rstrip("%").replace(",", ""))
        digits = len(text.rstrip("%").partition(".")[2])
        scaled = known * 100 if text.endswith("%") else np.concatenate([known, known / 1e6])
        close = np.isclose(scaled, value, rtol=5e-4 if "." in text and value > 100 else 0, atol=0.5001 * 10**-digits)
        assert close.any() or text in words, f"{text} is not in summary.csv"


def test_a_number_that_nobody_measured_is_noticed(folder):
    table = (folder / "summary.csv").read_text()
    (folder / "summary.csv").write_text(re.sub(r"\n(claim|pair),[^\n]*", "", table))
    try:
        with pytest.raises(AssertionError, match=r"is not in summary\.csv"):
            test_every_number_of_the_report_is_in_the_summary(folder)
    finally:
        (folder / "summary.csv").write_text(table)


def test_mcnemar_and_the_joint_interval_are_told_with_their_limits(folder):
    report = (folder / "report.md").read_text()
    assert "is about these two checkpoints" in report
    part = report.split("## Image by image")[1].split("\n## ")[0]
    assert len(re.findall(r"^\| learned \| [012] \| ", part, flags=re.M)) == 3
    assert len(re.findall(r"^\| sincos2d \| [01] \| ", part, flags=re.M)) == 2  # its third seed is missing


def test_pairs_without_predictions_are_named(folder, monkeypatch):
    monkeypatch.chdir(folder.parents[3])
    kept = next(Path("runs/ablations/made-up/learned").glob("s1-*/predictions/test.parquet"))
    kept.rename(kept.with_suffix(".away"))
    try:
        ablation = read_ablation("made-up.yaml")
        results = collect(ablation, list(resolved(ablation)))
        ((_, sentences, _),) = images.section(images.pairs_of(results))
    finally:
        kept.with_suffix(".away").rename(kept)
    assert sentences[-1].endswith(": learned s1.")


def table_of_predictions(ablation, arm, seed, **columns):
    path = ablation.directory / f"{arm}-s{seed}"
    (path / "predictions").mkdir(parents=True)
    pd.DataFrame(columns).to_parquet(path / f"predictions/{ablation.evaluate}.parquet")
    return RunDir(path)


def image_by_image(path, monkeypatch, tables, **stats):
    """Pairs, joint intervals and sections of arms whose seeds have these tables of predictions; None is no table."""
    monkeypatch.chdir(path)
    (path / "base.yaml").write_text("{}\n")
    content = {k: v for k, v in FILE.items() if k not in ("analyses", "claims")}
    content |= {"name": "small", "metric": {"primary": "acc1"}, "stats": stats}
    (path / "small.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    ablation = read_ablation("small.yaml")
    runs = {
        (arm, seed): table_of_predictions(ablation, arm, seed, **columns) if columns else RunDir(path)
        for (arm, seed), columns in tables.items()
    }
    results = of_runs(ablation, [], runs)
    found = images.pairs_of(results)
    return found.rows, found.joint, images.section(found)


def test_a_regression_has_no_section_on_right_answers(tmp_path, monkeypatch):
    tables = {(arm, seed): {"index": [0, 1], "target_x": [0.1, 0.2]} for arm in ("none", "learned") for seed in (0, 1)}
    assert image_by_image(tmp_path, monkeypatch, tables) == ([], [], [])


def test_a_pair_without_predictions_is_not_said_to_have_other_images(tmp_path, monkeypatch):
    columns = {"index": [0, 1], "target": [1, 2], "prediction": [1, 1]}
    tables = {("none", 0): columns, ("learned", 0): None, ("none", 1): columns}
    tables["learned", 1] = {**columns, "index": [0, 2]}
    ((_, sentences, _),) = image_by_image(tmp_path, monkeypatch, tables)[2]
    assert sentences == [
        "Left out, as there are no predictions of both: learned s0.",
        "Left out, as their images are not those of the baseline: learned s1.",
    ]


@pytest.mark.filterwarnings("error")
def test_of_a_single_image_there_is_no_interval_over_images(tmp_path, monkeypatch):
    columns = {"index": [0], "target": [1], "prediction": [1]}
    pairs, joint, _ = image_by_image(
        tmp_path, monkeypatch, {(arm, seed): columns for arm in ("none", "learned") for seed in (0, 1)}
    )
    assert [row["seed"] for row in pairs] == [0, 1] and joint == []


def test_the_joint_interval_ends_where_differences_of_accuracies_end(tmp_path, monkeypatch):
    right, wrong = ({"index": [0, 1, 2, 3], "target": [1] * 4, "prediction": [said] * 4} for said in (1, 0))
    tables = {("none", 0): right, ("none", 1): right, ("learned", 0): wrong, ("learned", 1): right}
    (row,) = image_by_image(tmp_path, monkeypatch, tables)[1]
    assert (row["difference"], row["difference_low"], row["difference_high"]) == (-0.5, -1.0, 1.0)


def test_arms_that_agree_on_every_image_have_no_interval_as_seeds_that_agree_have_none(tmp_path, monkeypatch):
    columns = {"index": [0, 1, 2, 3], "target": [1] * 4, "prediction": [1, 1, 0, 1]}
    tables = {(arm, seed): columns for arm in ("none", "learned") for seed in (0, 1)}
    ((_, _, (joint, _)),) = image_by_image(tmp_path, monkeypatch, tables)[2]
    assert joint[1] == ["learned", "2", "+0.0000", "-"]


def test_seeds_of_one_difference_that_are_right_on_other_images_have_no_interval_of_no_width(tmp_path, monkeypatch):
    said = {("none", 0): [0] * 4, ("none", 1): [0] * 4, ("learned", 0): [1, 0, 0, 0], ("learned", 1): [0, 1, 0, 0]}
    tables = {key: {"index": [0, 1, 2, 3], "target": [1] * 4, "prediction": value} for key, value in said.items()}
    ((_, _, (joint, _)),) = image_by_image(tmp_path, monkeypatch, tables)[2]
    assert joint[1] == ["learned", "2", "+0.2500", "-"]


def test_intervals_of_images_and_of_curves_have_the_coverage_that_the_file_names(tmp_path, monkeypatch):
    said = {"none": ([0, 1, 0, 1], [0, 0, 0, 0]), "learned": ([1, 1, 0, 1], [1, 1, 1, 1])}  # gains 1 0 0 0 and 1 1 1 1
    shared = {"index": [0, 1, 2, 3], "target": [1] * 4}
    tables = {(arm, s): {**shared, "prediction": each} for arm, seeds in said.items() for s, each in enumerate(seeds)}
    (row,) = image_by_image(tmp_path, monkeypatch, tables, ci=0.8)[1]
    assert row["difference_low"] == pytest.approx(0.625 - 3.07768 * 0.375, abs=1e-5)  # t of a degree of freedom
    results = SimpleNamespace(ablation=SimpleNamespace(stats=SimpleNamespace(ci=0.8), seeds=range(3)))
    tables = [pd.DataFrame([{"layer": 4, "norm": 1.0 + seed, "seed": seed}]) for seed in range(3)]
    (row,) = analyses._arm_rows(results, "own", Curve(x="layer", measures={"norm": ""}), "none", tables)
    assert (row["mean"], row["half"]) == pytest.approx((2, 1.88562 / 3**0.5), rel=1e-5)  # t of 2 degrees of freedom


def test_curves_are_means_over_seeds_with_the_number_of_them(folder):
    report = (folder / "report.md").read_text()
    part = report.split("## Analysis: resolution")[1].split("\n## ")[0]
    assert "| acc1: arm | line | n | size 8 | size 12 | size 16 | size 24 |" in part
    assert re.search(r"\| sincos2d \| resize, interpolate \| 2/3 \| 0\.\d{4} ± 0\.\d{4} \|", part)
    part = report.split("## Analysis: confusion")[1].split("\n## ")[0]
    assert "| precision: arm | line | n | value |" in part and "| sincos2d | cat | 2/3 | 0.5000 |" in part
    assert "f1: arm" not in part
    assert "position: not done for none: there is no table" in report
    table = pd.read_csv(folder / "summary.csv")
    rows = table[(table["kind"] == "analysis") & (table["analysis"] == "scramble") & (table["arm"] == "none")]
    assert (rows["high"] - rows["low"]).to_numpy() == pytest.approx(2 * rows["half"].to_numpy(), nan_ok=True)
    assert rows["half"].notna().sum() >= 4  # where seeds agree there is none
    results = pd.read_csv(folder / "results.csv")
    each = results[(results["metric"] == "scramble/flipped") & (results["pos_embed"] == "none")]["value"]
    finest = rows[(rows["measure"] == "flipped") & (rows["x"] == 16)]["mean"].item()
    assert finest == pytest.approx(each.mean())


def test_a_metric_of_an_analysis_is_said_to_be_of_the_split_that_it_was_measured_on(folder, monkeypatch):
    monkeypatch.chdir(folder.parents[3])
    first = pd.read_csv(folder / "results.csv").drop_duplicates("metric").set_index("metric")
    assert first.loc["acc1", ["split", "n_images"]].tolist() == ["test", 500]
    assert first.loc["resolution/acc1@12", "split"] == "val" and np.isnan(first.loc["resolution/acc1@12", "n_images"])
    ablation = replace(read_ablation("made-up.yaml"), primary="resolution/acc1@12", secondary=("acc1",))
    arms = list(resolved(ablation))
    assert plan_of(ablation, arms, 1).lines[1].endswith("the last checkpoint on the val split")
    results = collect(ablation, arms)
    rows = arm_rows(results, ablation.primary, defaultdict(lambda: NOT_COMPARED), set())
    monkeypatch.setattr(drawings, "draw", lambda height, paint, title, **sizes: title)
    assert drawings.figures(results, rows)["dots"][0].startswith("resolution/acc1@12 on the val split")
    drawings._dots(ax := Figure().subplots(), results, rows)
    assert "(val split)" in ax.get_xlabel()


def test_device_hours_say_which_attempts_they_count(folder):
    page, ended = (folder / "report.md").read_text(), "2026-01-01T00:00:00+00:00"
    assert (
        "device-hours: 0.028 over 8 cells, of 8 the last attempt alone (by an older vitlab); without analyses; "
        f"last one ended {ended}" in page
    )
    done = [{"seconds": 1.0, "device_seconds": seconds, "ended": ended} for seconds in (1800.0, 5400.0)]
    tuned = SimpleNamespace(tune=True, analyses=())
    assert _hours(tuned, done) == (
        f"device-hours: 2.000 over 2 cells, with all attempts; without tuning; last one ended {ended}"
    )


def test_the_page_has_everything_in_itself(folder):
    page = (folder / "report.html").read_text()
    assert page.count("<svg") == 10
    assert "learned &gt; none" in page
    for outside in ("http://", "https://", "src=", "<script", "<link", "@import"):
        urls = [u for u in re.findall(rf"{outside}[^\s\"'>]*", page) if "w3.org" not in u]
        assert not urls, urls
    links = set(re.findall(r'(?:xlink:)?href="([^"]*)"', page))
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in links)
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids))


def test_tables_and_figures_are_copied_to_where_they_are_kept(folder):
    kept = folder.parents[3] / "kept"
    drawn = [path for path in (folder / "figures").iterdir() if path.suffix != ".csv"]
    names = ["report.md", "summary.csv", "tables.tex", *(f"figures/{path.name}" for path in drawn)]
    assert "figures/dots.svg" in names
    assert sorted(str(path.relative_to(kept)) for path in kept.rglob("*.*")) == sorted([*names, "seeds.csv"])
    assert all((kept / name).read_bytes() == (folder / name).read_bytes() for name in names)
    assert (kept / "seeds.csv").read_bytes() == (folder / "results.csv").read_bytes()
    shown = re.findall(r"^!\[.+\]\((figures/.+\.svg)\)$", (kept / "report.md").read_text(), flags=re.M)
    assert sorted(shown) == sorted(name for name in names if name.endswith(".svg"))


def test_figures_say_what_they_show_in_text_and_tables_come_for_papers(folder):
    for path in (folder / "figures").glob("*.svg"):
        text = " ".join(re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text()))
        assert (
            "n of planned seeds" in text
            or "n = 2 to 3" in text
            or "each of 3 seeds" in text
            or "over heads and seeds" in text
        )
    assert ">none</text>" in (folder / "figures/dots.svg").read_text()  # whose line it is
    table = (folder / "tables.tex").read_text()
    assert table.count(r"\begin{tabular}") == table.count(r"\bottomrule") > 4 and r" $\pm$ " in table
    assert not re.search(r"(?<!\\)[%_&#]", "".join(c for row in cells(table) for c in row))


def of_many_layers():
    """Return a made-up ablation of networks of 26 layers, in the working directory."""
    Path("base.yaml").write_text("{}\n")
    Path("made-up.yaml").write_text(yaml.safe_dump(FILE, sort_keys=False))
    ablation = read_ablation("made-up.yaml")
    for cell in cells_of(ablation, list(resolved(ablation))):
        finish(cell, 50, 26)
    return ablation


@pytest.mark.rare
@pytest.mark.parametrize("layers", [4, 26])
def test_every_figure_of_a_report_can_be_read_in_a_column(folder, layers, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    if layers == 26:
        ablation = of_many_layers()
    else:
        shutil.copytree(folder.parents[3], tmp_path, dirs_exist_ok=True)
        ablation = read_ablation("made-up.yaml")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "analysis"))
    from figure_faults import faults

    seen = []
    monkeypatch.setattr(write, "figure_bytes", lambda figure, form: seen.append(figure) or b"<svg")
    write_report(ablation, list(resolved(ablation)), None, False, ("svg",), "column")
    assert len(seen) > 4
    for figure in seen:
        assert figure.get_figwidth() <= 3.3 and not faults(figure)


@pytest.mark.rare
def test_a_panel_is_drawn_for_each_measure_and_line_in_as_many_figures_as_they_need(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    drawn = {}
    monkeypatch.setattr(write, "_keep", lambda found, *_: drawn.update(found) or {})
    ablation = of_many_layers()
    write_report(ablation, list(resolved(ablation)), None, False, ("svg",), "column")
    labels = [ax.get_ylabel() for ax in drawn["probe"][1].axes]
    assert labels == ["accuracy"] * 4 + ["excess"] * 4 + ["r2"] * 4
    assert [len(drawn[name][1].axes) for name in ("cka", "cka_2")] == [24, 2] and "cka_3" not in drawn
    assert drawn["cka_2"][0].endswith("; figure 2 of 2") and "figure" not in drawn["probe"][0]
    monkeypatch.setattr("vitlab.ablation.report.drawings.MOST", 11)  # as of arms in several rows
    write_report(ablation, list(resolved(ablation)), None, False, ("svg",), "column")
    sheets = [drawn[name] for name in ("probe", "probe_2", "probe_3")]
    assert [{ax.get_ylabel() for ax in figure.axes} for _, figure, _ in sheets] == [{"accuracy"}, {"excess"}, {"r2"}]
    assert [{row["measure"] for row in rows} for _, _, rows in sheets] == [{"accuracy"}, {"excess"}, {"r2"}]
    assert {ax.get_title() for ax in drawn["scramble"][1].axes} == {""}


def test_an_interaction_is_of_seed_means_over_the_levels_that_all_its_points_have(write_axes):
    axes = {"pos": ("none", "learned"), "tokens": ("patch", "t2t"), "images": ("easy", "hard")}
    results = write_axes(axes, exclude=[{"pos": "none", "tokens": "t2t", "images": "hard"}])
    values = {"none-patch": 0.2, "learned-patch": 0.3, "none-t2t": 0.4, "learned-t2t": 0.6}
    numbers = {
        (f"{name}-{images}", seed): {"acc1": value + 0.01 * seed + (images == "hard") * 0.1}
        for name, value in values.items()
        for images in axes["images"]
        for seed in range(3)
    }
    found = figures(give(results, numbers), [])
    title, _, rows = found["interaction_pos_tokens"]
    assert "mean acc1 over images, 95% t interval and seeds (n = 3)" in title
    means = {(row["pos"], row["tokens"]): (row["mean"], row["low"], row["high"], row["n"]) for row in rows}
    for name, value in values.items():
        low, high = interval([value, value + 0.01, value + 0.02])
        assert means[tuple(name.split("-"))] == pytest.approx((value + 0.01, low, high, 3))
    rows = [row for row in found["interaction_pos_images"][2] if (row["pos"], row["images"]) == ("none", "hard")]
    assert [row["mean"] for row in rows] == pytest.approx([0.31] * 3)  # with patches alone


def test_a_file_without_claims_is_answered_by_the_verdict_of_each_arm(write_axes):
    """It said that there are no claims, and no more."""
    results = write_axes({"pos": ("none", "learned", "rope2d")})
    gains = {"none": 0.0, "learned": 0.3}
    give(results, {(arm, s): {"acc1": 0.4 + s / 99 + x * (1 + s / 50)} for arm, x in gains.items() for s in range(3)})
    words = _without_claims(find(results, Looks((3,), 3, (0, 1, 2))))
    assert words[0] == "The file makes no claims."
    assert re.match(r"\*\*higher\*\*: acc1 of `learned` against `none`; n 3/3, difference \+0\.306", words[1])
    assert words[2].startswith("**no result**: acc1 of `rope2d` against `none`; n 0/3")


def test_an_arm_whose_baseline_is_excluded_is_not_called_a_baseline(write_axes):
    axes = {"pos": ("none", "learned", "rope2d"), "tokens": ("patch", "t2t")}
    results = write_axes(axes, exclude=[{"pos": "none", "tokens": "t2t"}])
    give(results, {(arm.name, s): {"acc1": s / 9} for arm in results.ablation.arms for s in range(3)})
    words = {row.arm: row.verdict for row in find(results, Looks((3,), 3, (0, 1, 2))).arms}
    assert words["none-patch"] == "baseline"
    assert words["learned-t2t"] == words["rope2d-t2t"] == "no baseline: not compared"


def test_a_refuted_equivalence_is_shown_with_the_interval_and_p_of_being_beyond_the_margin(write_axes):
    axes, claims = {"pos": ("none", "learned", "rope2d")}, ["learned ~ none within 0.01"]
    results = write_axes(axes, claims=claims, stats={"ci": 0.999})
    gains = {"none": [0, 0, 0, 0], "learned": [0.3, 0.301, 0.299, 0.3005], "rope2d": [0.2, 0.1, -0.1, 0.3]}
    give(results, {(arm, s): {"acc1": 0.4 + s / 99 + x} for arm, xs in gains.items() for s, x in enumerate(xs)})
    results.ablation = replace(results.ablation, seeds=(0, 1, 2, 3))
    (verdict,) = find(results, Looks((4,), 4, (0, 1, 2, 3))).verdicts
    low, high = verdict.answer.estimate.interval(0.999)  # of one claim, where two arms are compared
    text = _answer(results, verdict)
    assert verdict.word == "refuted" and f"99.9% interval {low:+.4f} to {high:+.4f}" in text
    assert f"adjusted p {chance(verdict.answer.estimate.p_outside(0.01))} of being beyond the margin" in text


def test_an_interval_of_an_interaction_ends_where_the_metric_ends(write_axes):
    results = write_axes({"pos": ("none", "learned"), "tokens": ("patch", "t2t")})
    values = enumerate([0.02, 0.5, 0.98])
    give(results, {(arm.name, s): {"acc1": x} for s, x in values for arm in results.ablation.arms})
    rows = figures(results, [])["interaction_pos_tokens"][2]
    assert {(row["low"], row["high"]) for row in rows} == {(0.0, 1.0)}


@pytest.mark.parametrize(
    ("names", "ends"),
    [
        (
            "acc1 acc5 acc1_macro acc1_of_others f1_macro map acc1/species knn/acc1@20 val/acc1 val_acc val_f1 "
            "scramble/flipped",
            (0, 1),
        ),
        ("loss mae rmse mse mae/height rmse/map val_mae val_loss loss/species", (0, math.inf)),
        ("r2 r2/height val_r2", (-math.inf, 1)),
        ("displacement/mae_of_x accumulated f1x valuation heights/width", (-math.inf, math.inf)),
    ],
)
def test_the_range_of_a_metric_follows_from_its_name(names, ends):
    assert {name: bounds_of(name) for name in names.split()} == dict.fromkeys(names.split(), ends)
    assert bounds_of(names.split()[0], [-1.0, 101.0]) == (-math.inf, math.inf)  # in percent


def test_images_that_an_own_module_does_not_count_are_no_number(write_axes):
    results = write_axes({"pos": ("none", "learned")})
    numbers = [{"acc1": 0.5}, {"acc1": 0.5, "n": 360.0}]
    for cell, found in zip(cells_of(results.ablation, results.resolved), numbers, strict=False):
        results.cells[cell.arm.name, 0] = CellResult(cell, "done", numbers=found)
    assert [row.split(",")[-2] for row in results.table().to_csv().split()] == ["n_images", "", "360"]
    results.cells["learned", 0].numbers.clear()
    assert results.table()["n_images"].isna().all()


def test_an_interaction_without_balanced_levels_is_not_drawn(write_axes):
    axes = {"pos": ("none", "learned"), "tokens": ("patch", "t2t"), "images": ("easy", "hard")}
    out = [{"pos": "none", "tokens": "t2t", "images": "hard"}, {"pos": "none", "tokens": "patch", "images": "easy"}]
    results = write_axes(axes, exclude=out)
    give(results, {(arm.name, seed): {"acc1": 0.1 * seed} for arm in results.ablation.arms for seed in range(3)})
    assert "interaction_pos_tokens" not in figures(results, [])


def test_a_claim_at_a_level_where_an_arm_of_it_is_excluded_has_no_answer_there(write_axes):
    axes, out = {"pos": ("none", "learned"), "tokens": ("patch", "t2t")}, [{"pos": "learned", "tokens": "t2t"}]
    results = write_axes(axes, exclude=out, claims=["learned > none"])
    levels = {"learned": 0.5}
    values = {
        (arm.name, seed): {"acc1": levels.get(arm.levels["pos"], 0.3) + seed**2 / 100 * (1 + (arm.name != "none"))}
        for arm in results.ablation.arms
        for seed in range(3)
    }
    found = find(give(results, values), Looks((3,), 3, (0, 1, 2))).verdicts
    assert [(v.setting, v.word, v.answer.estimate.n, v.note) for v in found] == [
        ("tokens=patch", found[0].word, 3, found[0].note),
        ("tokens=t2t", "inconclusive", 0, "an arm of it is excluded"),
    ]
    text = "**inconclusive**: `learned > none` (tokens=t2t); n 0/3. An arm of it is excluded."
    assert _answer(results, found[1]) == text


def test_the_figure_of_differences_counts_the_pairs_of_its_intervals(write_axes):
    results = write_axes({"pos": ("none", "learned")})
    give(results, {(arm.name, s): {"acc1": s / 9} for arm in results.ablation.arms for s in range(3)})
    results.cells["learned", 2].numbers["acc1"] = 0.5
    lose(results, "none", 0)
    arms = find(results, Looks((3,), 3, (0, 1, 2))).arms
    (label,) = figures(results, arms)["differences"][1].axes[0].get_yticklabels()
    assert [row.n for row in arms] == [2, 3] and label.get_text() == "learned  (2/3)"


@pytest.fixture
def write_axes(tmp_path):
    """Write an ablation of axes with three seeds, and return its results, without numbers."""

    def write_axes(axes, **more):
        (tmp_path / "base.yaml").write_text("{}\n")
        keys = dict(zip(axes, ("model.lr", "model.depth", "data.size"), strict=False))
        levels = {axis: {name: {keys[axis]: i} for i, name in enumerate(names)} for axis, names in axes.items()}
        content = {"name": "made-up", "base": "base.yaml", "axes": levels, "baseline": {"pos": "none"}, "seeds": 3}
        path = tmp_path / "made-up.yaml"
        path.write_text(yaml.safe_dump({**content, "metric": {"primary": "acc1"}, **more}, sort_keys=False))
        ablation = read_ablation(path)
        return without_numbers(ablation)

    return write_axes


@pytest.fixture(scope="module")
def few_images(tmp_path_factory):
    """The folder of a finished ablation, for all to copy."""
    folder = tmp_path_factory.mktemp("few-images")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("base.yaml").write_text("{}\n")
        Path("made-up.yaml").write_text(yaml.safe_dump(WITH_FEW_ANALYSES, sort_keys=False))
        ablation = read_ablation("made-up.yaml")
        for cell in cells_of(ablation, list(resolved(ablation))):
            finish(cell, images=50)
    return folder


@pytest.fixture
def finished(few_images, tmp_path, monkeypatch):
    """A finished ablation: its file, arms and cells; its reports without figures, which are most of their time."""
    shutil.copytree(few_images, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    for drawn in ("figures", "panels"):
        monkeypatch.setattr(write, drawn, lambda *found: {})
    ablation = read_ablation("made-up.yaml")
    arms = list(resolved(ablation))
    return ablation, arms, cells_of(ablation, arms)


def set_result(cell, **values):
    results = cell.run.read("results.json")
    cell.run.write("results.json", {"test": {**results["test"], **values}})


def test_a_finished_cell_without_its_metric_is_named(finished):
    ablation, arms, cells = finished
    (cell,) = [cell for cell in cells if (cell.arm.name, cell.seed) == ("learned", 1)]
    set_result(cell, acc1=float("nan"))
    report = write_report(ablation, arms, None, False)
    assert list(report.claims)[:3] == ["kind", "n", "planned"] and report.claims["claim"].tolist() == FILE["claims"]
    page = (ablation.directory / "report/report.md").read_text()
    assert "peak memory of a training, host: 0.25 GiB" in page and "training, cuda" not in page  # no GPU was there
    assert "| learned | 2/3 |" in page and "| learned | 1 | done | acc1 is nan |" in page


def test_arms_that_are_not_built_or_not_tuned_have_cells_without_a_result(write_axes, monkeypatch, tmp_path):
    """The report said that every planned cell is done, and that every arm had tried its candidates."""
    monkeypatch.chdir(tmp_path)
    tune = {"model.depth": [1, 2, 3], "seeds": [100]}
    results = write_axes({"pos": ("none", "learned", "rope2d")}, name="tuned", tune=tune)
    known = [replace(arm, config={"model": {}, "data": {}}) for arm in results.resolved[:2]]
    for trial in Tuning(results.ablation, known[:1]).trials:
        cell = trial.cells[0]
        cell.run.write("done.json", {"parts": cell.parts})
        cell.run.write("results.json", {"val": {"acc1": 0.5, "checkpoint": "last.ckpt"}})
    results = collect(results.ablation, known)
    (_, (text, *_), _), *_ = tuning_section(results)
    assert text.startswith("Every arm tries the same 3 candidates") and text.endswith("; 3 of 9 are over so far.")
    assert [row[:3] for row in _lost(results)[:3]] == [["none", str(seed), "missing"] for seed in range(3)]
    others = [[arm, "all", "missing", f"not {verb} yet"] for arm, verb in (("learned", "tuned"), ("rope2d", "built"))]
    assert _lost(results)[3:] == others


def test_finished_cells_of_arms_that_the_file_no_longer_has_are_counted(write_axes, monkeypatch, tmp_path):
    """Neither status nor report said a word about cells of an arm that was dropped or renamed."""
    monkeypatch.chdir(tmp_path)
    results = write_axes({"pos": ("none", "learned")})
    for arm, parts in (("table", {"code": "0"}), ("rope2d", {}), ("none", {"config": "0", "code": ""})):
        RunDir(results.ablation.directory / arm / "s0-0123456789").write("done.json", {"parts": parts})
    text = "also finished cells that are not in this plan: 1 with other config and data, 2 of arms that the file no "
    assert foreign_cells_text(results.ablation, results.resolved) == f"{text}longer has"


def test_a_metric_that_no_cell_has_does_not_replace_the_report_by_an_empty_one(finished):
    ablation, arms, _ = finished
    write_report(ablation, arms, None, False)
    page = (ablation.directory / "report/report.md").read_text()
    other = {**WITH_FEW_ANALYSES, "metric": {"primary": "acc"}}
    Path("made-up.yaml").write_text(yaml.safe_dump(other, sort_keys=False))
    with pytest.raises(UsageError, match=r'line .* no finished cell has a metric `acc`; did you mean "acc1"'):
        write_report(read_ablation("made-up.yaml"), arms, None, False)
    assert (ablation.directory / "report/report.md").read_text() == page


def test_figures_of_the_last_report_that_this_one_lacks_are_removed_and_the_user_s_stay(finished, monkeypatch):
    ablation, arms, _ = finished
    figures = ablation.directory / "report/figures"
    for names in (("dots", "old"), ("dots",)):
        drawn = {name: write.Drawn(name, Figure(), []) for name in names}
        monkeypatch.setattr(write, "figures", lambda *found, drawn=drawn: drawn)
        write_report(ablation, arms, f"kept{len(names)}", False)
        (figures / "mine.svg").touch()
    forms = ("csv", "pdf", "svg")
    assert sorted(path.name for path in figures.iterdir()) == [*(f"dots.{form}" for form in forms), "mine.svg"]
    assert sorted(path.name for path in Path("kept1/figures").iterdir()) == ["dots.pdf", "dots.svg"]
    assert len([*Path("kept2/figures").iterdir()]) == 4
    assert Path("kept2/figures/old.pdf").read_bytes().startswith(b"%PDF")


def test_evidence_in_a_folder_that_cannot_be_written_is_reported_elsewhere(finished):
    ablation, arms, _ = finished
    (ablation.directory / "report").touch()  # in place of a folder without the right to write, which root has
    with pytest.raises(UsageError, match=r"cannot write into runs/ablations/made-up/report; give another .* --output"):
        write_report(ablation, arms, None, False)
    found = write_report(ablation, arms, "kept", False)
    assert all(path.parent == Path("kept") and path.is_file() for path in found.files)
    assert Path("kept/seeds.csv").read_bytes() == Path("kept/results.csv").read_bytes()


def test_a_report_of_one_arm_alone_and_the_next_of_all(finished):
    ablation, arms, cells = finished
    for cell in cells:
        if cell.arm.name != "learned":
            cell.run.path.rename(cell.run.path.with_name(f"away{cell.seed}"))
    found = write_report(ablation, arms, None, False)
    assert [v.word for v in found.verdicts] == [*["inconclusive"] * 3, "supported"]  # learned > 0.5 needs it alone
    for cell in cells:
        if cell.arm.name != "learned":
            cell.run.path.with_name(f"away{cell.seed}").rename(cell.run.path)
    assert write_report(ablation, arms, None, False).verdicts[0].word != "inconclusive"


def test_a_report_of_nothing_but_stale_cells_is_refused_with_the_way_out(finished):
    ablation, arms, _ = finished
    now = [replace(arm, code="other") for arm in arms]
    with pytest.raises(UsageError, match=r"no cell of made-up is done .* --accept_stale includes the 9"):
        write_report(ablation, now, None, False)
    assert write_report(ablation, now, None, True).verdicts[0].word == "supported"


def test_verify_names_cells_without_a_number_or_a_readable_config(finished):
    ablation, arms, cells = finished
    for cell in cells[1:]:
        cell.run.config.write_text(yaml.safe_dump({**cell.resolved.config, "seed_everything": cell.seed}))
    set_result(cells[1], acc1=float("nan"))
    cells[2].run.config.write_text("a: [\n")
    found = verify_evidence(ablation, arms)
    assert list(found.problems) == [cell.name for cell in cells[:3]]
    assert "acc1 is nan, its predictions give" in str(found) and str(found).count("config.yaml cannot be read") == 2


def test_classes_called_none_and_na_stay_in_the_report(finished):
    ablation, arms, cells = finished
    for cell in cells:
        path = cell.run.path / "analysis/confusion.csv"
        path.write_text("class,recall,precision,f1\nNone,0.25,0.5,\nNA,0.5,0.5,0.5\n")
    rows = write_report(ablation, arms, None, False).summary.query("analysis == 'confusion' and arm == 'none'")
    assert list(rows["line"]) == ["None", "None", "NA", "NA", "NA"]  # without an f1


def cells(table):
    return [re.split(r"(?<!\\)&", line.removesuffix(r" \\")) for line in table.splitlines() if line.endswith(r" \\")]


@pytest.mark.parametrize(
    ("call", "file"), [("pathlib.Path.write_bytes", "a.pdf"), ("pandas.DataFrame.to_csv", "a.csv")]
)
def test_a_figure_that_cannot_be_written_is_named(tmp_path, monkeypatch, call, file):
    """The system's error of a write has no path: before, `ablate report` said "Permission denied" alone."""

    def refused(*words, **more):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(call, refused)
    with pytest.raises(OSError, match="Permission denied") as error:
        write._keep({"a": write.Drawn("title", Figure(), [{"x": 1}])}, tmp_path, ("pdf",), "column")
    assert error.value.filename == str(tmp_path / "figures" / file)
    assert not (tmp_path / "figures" / file).exists()


@pytest.mark.rare
def test_a_report_that_is_repeated_is_the_same(folder, monkeypatch):
    monkeypatch.chdir(folder.parents[3])
    ablation, seen = read_ablation("made-up.yaml"), []
    for _ in range(2):
        write_report(ablation, list(resolved(ablation)), None, False)
        seen.append({path: path.read_bytes() for path in folder.rglob("*") if path.is_file()})
    assert seen[0] == seen[1]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
def test_the_report_page_opens_in_a_browser(folder, tmp_path):
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    flags += ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"]
    flags += [f"--user-data-dir={tmp_path / 'user'}", "--window-size=1100,4000"]
    shot = tmp_path / "report.png"
    page = (folder / "report.html").as_uri()
    subprocess.run(["chromium", *flags, f"--screenshot={shot}", page], capture_output=True, timeout=300, check=True)
    from PIL import Image

    pixels = np.asarray(Image.open(shot).convert("RGB"))
    assert pixels.shape[:2] == (4000, 1100)
    colors = pixels.reshape(-1, 3)
    for name in ("0072B2", "D55E00", "009E73"):  # of the three arms, in their figures
        drawn = (np.abs(colors - np.frombuffer(bytes.fromhex(name), np.uint8).astype(int)).max(axis=1) < 8).sum()
        assert drawn > 200, name
    assert (colors.max(axis=1) < 80).sum() > 5000  # words


def sent(folder, place):
    ablation = SimpleNamespace(name="made-up", wandb=WandB(), directory=place)
    report = SimpleNamespace(files=[folder / "report.html"], summary=pd.read_csv(folder / "summary.csv"))
    return send_report(ablation, report)


@pytest.mark.rare
def test_wandb_gets_the_report_as_one_offline_run_of_the_group(folder, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    said = sent(folder, tmp_path)
    assert said.startswith("W&B      offline; upload it with")
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    files = {path.name.split("_")[0] for path in run.rglob("media/*/*")}
    assert files == {"summary", "report"}


def test_nothing_can_be_uploaded_of_a_report_where_wandb_is_disabled(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    said = sent(folder, tmp_path)
    assert said == "W&B      disabled"
    assert not list(tmp_path.iterdir())


def test_a_failing_wandb_fails_no_report(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "sideways")
    said = sent(folder, tmp_path)
    assert said.startswith("W&B      not sent: ")
