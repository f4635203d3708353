"""What the experiments' pages say is what their reports hold, and the reports are what the engine says of the seeds."""

import itertools
import json
import re
import statistics
import tarfile
from functools import lru_cache
from pathlib import Path

import pandas as pd
import pytest
import yaml

from tests.ablation.made_up import give, without_numbers
from vitlab.ablation.file.spec import read_ablation
from vitlab.ablation.inference.findings import find
from vitlab.ablation.inference.looks import Looks
from vitlab.ablation.lab import Lab
from vitlab.ablation.report import write

ROOT = Path(__file__).parents[1]
RESULTS = sorted((ROOT / "experiments").glob("*/results/*/summary.csv"))
IDS = [f"{path.parents[2].name}/{path.parent.name}" for path in RESULTS]


def chance(p):
    return "< 0.0001" if p < 0.0001 else f"{p:.4f}"


def claim_line(row):
    """The line of a page on a claim: `~` with the interval and the p of its equivalence."""
    kind = "equivalence" if "~" in row.claim else "difference"
    low, high = (100 * getattr(row, f"{kind}_{end}") for end in ("low", "high"))
    p = row.equivalence_p if "~" in row.claim else row.adjusted_p
    claim, where = row.claim.replace("|", "\\|"), row.setting if isinstance(row.setting, str) else "-"
    return (
        f"| `{claim}` | {where} | {row.verdict} | {100 * row.difference:+.2f} [{low:.2f}, {high:.2f}] | {chance(p)} |"
    )


def arm_line(row):
    """The line of a page on an arm."""
    low, high = 100 * row.difference_low, 100 * row.difference_high
    numbers = f"{100 * row.difference:+.2f} [{low:.2f}, {high:.2f}]"
    return f"| {row.arm} | {numbers} | {row.correlation:.2f} | {chance(row.unpaired_p)} | {row.verdict} |"


@pytest.mark.parametrize("path", RESULTS, ids=IDS)
def test_the_page_of_an_experiment_states_the_accuracies_of_its_report(path):
    table = pd.read_csv(path)
    arms = table[(table["kind"] == "arm") & (table["metric"] == "acc1")]
    page = (path.parents[2] / "README.md").read_text()
    assert len(arms) > 1
    for arm in arms.itertuples():
        assert f" {100 * arm.mean:.1f} ± {100 * arm.sd:.1f} |" in page, arm.arm
    assert f"{arms['n'].sum():.0f} cells" in page


@pytest.mark.parametrize("path", RESULTS, ids=IDS)
def test_every_verdict_of_a_page_is_that_of_its_report(path):
    table = pd.read_csv(path)
    page = (path.parents[2] / "README.md").read_text()
    part = next(
        p for p in page.split("\n### ") + page.split("\n\nDigits:") if f"results/{path.parent.name}/report" in p
    )
    claims = table[table["kind"] == "claim"]
    file = path.parents[2] / f"{path.parent.name}.yaml"
    assert [*claims["claim"].drop_duplicates()] == yaml.safe_load(file.read_text())["claims"]
    for row in claims.itertuples():
        assert claim_line(row) in part
    arms = {arm_line(row) for row in table[(table["kind"] == "arm")].itertuples()}
    stated = [line for line in part.splitlines() if line.startswith("| t2t-") and "[" in line]
    assert set(stated) <= arms


def conclusions(page):
    """Yield the paragraphs, tables and bullets of a page that conclude, and the rows that their comments name."""
    for text in re.split(r"\n\n(?!<!-- rows)|\n(?=- )", (ROOT / page).read_text()):
        rows = re.findall(r"<!-- rows: (.*?) -->", text, flags=re.S)
        words = re.sub(r"<!--.*?-->|`[^`]*`|\]\([^)]*\)", "", text, flags=re.S)
        if rows or re.match(r"(- )?\*\*(Answer|The |Does |T2T |\"Without)|\*Where does", text.strip()):
            yield words, [named(place, row) for part in rows for place, row in pieces(part)]


def pieces(part):
    for group in part.split("; "):
        place, rows = group.split(": ")
        yield from ((place, row) for row in rows.split(", "))


@lru_cache
def summary_of(place):
    return pd.read_csv(ROOT / "experiments/{}/results/{}/summary.csv".format(*place.split("/")))


def named(place, row):
    """Return the row of a report that ``claim 5 refuted +1.24`` or ``arm t2t-learned higher +1.08`` names."""
    kind, name, word, points = re.fullmatch(r"(claim|arm) (\S+) (.*) ([-+]\d+\.\d\d)", row).groups()
    table = summary_of(place)
    mine = table[(table["kind"] == kind) & ((kind == "claim") | (table["metric"] == "acc1"))]
    found = mine.iloc[int(name) - 1] if kind == "claim" else mine[mine["arm"] == name].iloc[0]
    assert found["verdict"].replace(";", " and") == word, f"{place} {row}: the report says {found['verdict']}"
    assert f"{100 * found['difference']:+.2f}" == points, f"{place} {row}: it is {100 * found['difference']:+.2f}"
    return place, kind, name, found


def stated(row):
    """Every way to print a number of a row: its difference and ends in points, its p values."""
    ends = [row.get(f"{kind}_{end}") for kind in ("difference", "equivalence") for end in ("low", "high")]
    points = [f"{abs(100 * x):.{n}f}" for x in (row["difference"], *ends) if x == x for n in (1, 2)]
    return {*points, *(chance(row[name]) for name in ("adjusted_p", "unpaired_p", "equivalence_p"))}


CONCLUDING = ("README.md", *(f"experiments/{name}/README.md" for name in sorted({p.parents[2].name for p in RESULTS})))


@pytest.mark.parametrize("page", CONCLUDING)
def test_a_conclusion_names_the_rows_that_it_stands_on_and_says_their_numbers(page):
    for words, rows in conclusions(page):
        assert rows, f"it names no rows: {words[:80]}"
        numbers = re.findall(r"(?<![\d.,])\d+\.\d+(?! %)", words)
        known = set().union(*(stated(row) for *_, row in rows))
        assert set(numbers) <= known, (sorted(set(numbers) - known), words)
        if re.search(r"\bno (such )?difference\b|\bgains? nothing\b|\bnothing at all\b|\bis the same\b", words):
            alike = [name for _, _, name, row in rows if "equivalent" in row["verdict"]]
            assert alike, f"no row of it is equivalent: {words[:80]}"
        if re.search(r"\bno (such )?difference\b", words):
            assert all("equivalent" in row["verdict"] for *_, row in rows), words


@pytest.mark.parametrize("name", ["t2t_positions", "pretraining"])
def test_an_answer_names_every_claim_of_its_reports(name):
    top = (ROOT / f"experiments/{name}/README.md").read_text().partition("\n## ")[0]
    answer = [named(*each) for part in re.findall(r"<!-- rows: (.*?) -->", top) for each in pieces(part)]
    there = {(place, int(row)) for place, kind, row, _ in answer if kind == "claim"}
    for path in RESULTS:
        if path.parents[2].name == name:
            table = pd.read_csv(path)
            claims = {(f"{name}/{path.parent.name}", i + 1) for i in range((table["kind"] == "claim").sum())}
            assert claims <= there, claims - there


def test_no_answer_says_no_difference_where_a_claim_was_refuted():
    with pytest.raises(AssertionError, match="the report says refuted"):
        named("t2t_positions/fashion_mnist", "claim 5 equivalent +1.24")
    with pytest.raises(AssertionError, match="it is"):
        named("t2t_positions/fashion_mnist", "claim 5 refuted +0.24")


@pytest.mark.parametrize("data", ["cifar10", "fashion_mnist"])
def test_published_arms_without_positions_have_a_displacement_of_zero(data):
    table = pd.read_csv(ROOT / "experiments/t2t_positions/results" / data / "summary.csv")
    table = table[table["analysis"] == "displacement"]
    without, patches = table[table["arm"].str.endswith("-none")], table[table["arm"] == "patch-learned"]
    assert len(without) == 20 and without["mean"].abs().max() < 0.015 < 0.05 < patches["mean"].min()
    assert ((without["low"] <= 0) & (without["high"] >= 0)).mean() >= 0.8  # all seeds share one draw of the shuffles


@pytest.mark.parametrize("path", RESULTS, ids=IDS)
def test_a_published_report_is_what_the_statistics_give_for_its_seeds(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    ablation = read_ablation(f"experiments/{path.parents[2].name}/{path.parent.name}.yaml")
    results = without_numbers(ablation)
    seeds = pd.read_csv(path.with_name("seeds.csv"))
    if "metric" in seeds:
        seeds = seeds[seeds["metric"] == "acc1"].assign(arm=seeds["cell"].str.split("/").str[0], acc1=seeds["value"])
    give(results, {(r.arm, int(r.seed)): {"acc1": r.acc1} for r in seeds.itertuples()})
    found = find(results, Looks((len(ablation.seeds),), len(ablation.seeds), ablation.seeds))
    table, page = pd.read_csv(path), path.with_name("report.md").read_text()
    claims = table[table["kind"] == "claim"]
    assert [v.word for v in found.verdicts] == claims["verdict"].tolist()
    for verdict, p in zip(found.verdicts, claims["adjusted_p"], strict=True):
        assert verdict.answer.difference.adjusted == pytest.approx(p, rel=1e-6)
        assert f"**{verdict.word}**: `{verdict.claim.text}`" in page
    advice = [line for line in page.splitlines() if line.startswith("- **inconclusive**: ") and " within " in line]
    assert not any("observed difference" in line for line in advice)  # but that it is within the margin
    arms = table[(table["kind"] == "arm") & (table["metric"] == "acc1")]
    rows = [row for row in found.arms if row.metric == "acc1"]
    said = [word.removesuffix("; under-trained") for word in arms["verdict"]]  # the gate needs the images
    assert [row.verdict for row in rows] == said
    for row in rows:
        assert f"| {row.arm} | {row.n}/{row.planned} | {row.mean:.4f} ± {row.sd:.4f} |" in page


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[] if path.parent.name == "fashion_mnist" else [pytest.mark.rare])
        for path in sorted((ROOT / "experiments").glob("*/results/*/evidence.tar.xz"))
    ],
    ids=str,
)
def test_committed_evidence_verifies_and_gives_the_published_numbers(path, tmp_path, monkeypatch):
    with tarfile.open(path) as archive:
        archive.extractall(tmp_path, filter="data")
    for drawn in ("figures", "panels", "responses"):
        monkeypatch.setattr(write, drawn, lambda *found: {})
    lab = Lab(tmp_path / "evidence")
    found = lab.verify(allow_missing="factorial" in str(path))  # predictions of its candidates were not kept
    assert found.is_green and found.checked >= len(lab.ablation.arms) * len(lab.ablation.seeds)
    lab.report(tmp_path / "report")
    numbers = [
        re.findall(r"-?\d+\.\d+", (folder / "report.md").read_text()) for folder in (tmp_path / "report", path.parent)
    ]
    assert len(numbers[0]) > 100 and numbers[0] == numbers[1]
    again, published = (pd.read_csv(file) for file in (tmp_path / "report/summary.csv", path.with_name("summary.csv")))
    pd.testing.assert_frame_equal(again, published, rtol=1e-6)  # versions of scipy differ in the tenth digit


def _tried(archive):
    """Return the validation accuracies of each candidate in an archive, in percent, one for each tuning seed."""
    found = {}
    with tarfile.open(ROOT / "experiments/t2t_positions" / archive) as records:
        for member in records.getmembers():
            if "/tune/" in member.name and member.name.endswith("/results.json"):
                accuracy = 100 * json.load(records.extractfile(member))["val"]["acc1"]
                found.setdefault(member.name.split("/")[2], []).append(accuracy)
    return found


@pytest.mark.parametrize(
    ("archive", "count", "heading"),
    [
        ("candidates.tar.xz", 300, "### Candidates"),
        ("candidates_cifar10.tar.xz", 163, "### The same on CIFAR-10, on a GPU"),
    ],
)
def test_the_tables_of_candidates_are_what_their_records_say(archive, count, heading):
    folder = ROOT / "experiments/t2t_positions"
    found = _tried(f"factorial/{archive}")
    assert sum(map(len, found.values())) == count
    means = {name: statistics.fmean(both) for name, both in found.items() if len(both) == 2}
    page = re.split(r"^(?=##)", (folder / "README.md").read_text(), flags=re.M)
    (section,) = [part for part in page if part.startswith(heading)]
    assert re.search(rf"\b{count}( of the \d+)?\scandidates", section)
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| `(\w+)` \| (.*) \|$", section, re.M)
    bests, gains = {}, {}
    assert len(rows) == 12
    for *levels, stated in rows:
        arms = ("-".join([*levels, positions, "try"]) for positions in ("none", "learned"))
        none, learned = (max(x for name, x in means.items() if name.startswith(arm)) for arm in arms)
        assert stated == f"{none:.1f} | {learned:.1f} | {learned - none:+.1f}"
        bests |= {(*levels, "none"): none, (*levels, "learned"): learned}
        for level in levels:
            gains.setdefault(level, []).append(learned - none)
    shared, apart, zeros, mirror, wrap = (
        f"{statistics.fmean(gains[level]):.1f}" for level in ("shared", "apart", "zeros", "mirror", "wrap")
    )
    words = " ".join("".join(page).split())
    if heading == "### Candidates":
        assert (
            f"The gain is {shared} points on average where windows share pixels and {apart} where they do not" in words
        )
        assert f"{zeros} with zeros, {mirror} with mirrored images and {wrap} without a border" in words
        weak = [arm for arm, best in bests.items() if best < 88]
        assert f"{len(weak)} of these {len(bests)} arms are below 88 %" in words
        assert sum("apart" in arm for arm in weak) == 12
    else:
        assert f"On CIFAR-10 it is {shared} and {apart}; {zeros}, {mirror} and {wrap}." in words


def test_what_the_page_says_of_the_networks_of_the_factorial_is_in_its_tables():
    folder = ROOT / "experiments/t2t_positions"
    table = pd.read_csv(folder / "results/factorial_fashion_mnist/summary.csv")
    words = " ".join((folder / "README.md").read_text().split())
    arms = table[(table["kind"] == "arm") & (table["metric"] == "acc1")].set_index("arm")["mean"]
    assert list(arms[arms >= 0.88].index) == ["shared-wrap-alone-learned"] and "29 of the 30 arms stay below" in words
    pairs = [arms[name] - arms[name.replace("shared", "apart")] for name in arms.index if name.startswith("shared")]
    assert f"differs by {100 * min(pairs):.1f} to {100 * max(pairs):.1f} points" in words
    of = table[table["kind"] == "analysis"]
    assert set(of["n"]) == {6} and set(of["arm"]) == set(arms.index)

    shuffled = of[(of["analysis"] == "scramble") & (of["measure"] == "acc1")].pivot(index="arm", columns="x")["mean"]
    cost = 100 * (shuffled[1] - shuffled[49])
    assert cost[cost.index.str.endswith("-none")].abs().max() < 0.05
    for arms_of, stated in {
        "patch-wrap-alone-learned": "58 points behind patches",
        "apart-wrap-": "26 to 29 behind `apart-wrap`",
        "shared-wrap-": "6 to 9 behind `shared-wrap`",
        "shared-zeros-": "0.6 and 1.8 behind `shared-zeros`",
    }.items():
        mine = cost[cost.index.str.startswith(arms_of) & cost.index.str.endswith("-learned")]
        digits = 1 if "0.6" in stated else 0
        ends = [f"{end:.{digits}f}" for end in sorted({mine.min(), mine.max()})]
        assert re.findall(r"[\d.]+", stated) == ends and stated in words, (ends, stated)

    probe = of[(of["analysis"] == "probe") & (of["measure"] == "accuracy") & (of["x"] == 0)]
    noise = probe[probe["line"].str.contains("noise, without")].set_index("arm")["mean"]
    unmarked = noise[noise.index.str.contains("wrap|apart-mirror")]
    assert (100 * unmarked).round().eq(2).all() and "(2 % of tokens, chance is one in 49" in words
    spread = of[of["analysis"] == "displacement"].set_index("arm")["mean"]
    of_none = spread[spread.index.str.endswith("-none")]
    assert of_none.abs().max() < 0.015 and "`displacement` at most 0.01 in any layer" in words
    most = spread.groupby("arm").max().round(2)
    assert "largest behind patches (0.30 with the table, 0.40 with `rope2d`)" in words
    assert most.nlargest(2).to_dict() == {"patch-wrap-alone-rope2d": 0.40, "patch-wrap-alone-learned": 0.30}
    assert "smallest behind `conv` (0.03) and `shared-zeros` (0.04 and 0.05)" in words
    assert most[most.index.str.endswith("-learned")].nsmallest(3).to_list() == [0.03, 0.04, 0.05]


def test_what_the_page_says_of_ten_new_seeds_is_in_their_tables_beside_those_of_six():
    folder = ROOT / "experiments/t2t_positions"
    page = (folder / "README.md").read_text()
    of_file = {}
    for name in ("again_fashion_mnist", "factorial_fashion_mnist"):
        table = pd.read_csv(folder / f"results/{name}/summary.csv")
        of_file[name] = table[(table["kind"] == "arm") & (table["metric"] == "acc1")].set_index("arm")
    new, old = of_file.values()
    learned = new[new.index.str.endswith("-learned")]
    assert len(learned) == 13 and set(new["n"]) == {10}
    for arm in learned.index:
        assert f"{_gain_line(new, arm.removesuffix('-learned'))} {100 * old.loc[arm, 'difference']:+.2f} |" in page
    assert list(new.index[new["mean"] >= 0.88]) == ["shared-wrap-alone-learned"]
    assert f"25 of the {len(new)} of [ten new seeds]" in page
    for windows in ("shared", "apart"):
        means = 100 * new["mean"][new.index.str.startswith(windows)]
        assert f"`{windows}` arms" in page and f"{means.min():.1f} % to {means.max():.1f} %" in page


def test_a_cyclic_shift_by_a_token_changes_nothing_where_there_is_neither_a_border_nor_a_table():
    folder = ROOT / "experiments/t2t_positions"
    table = pd.read_csv(folder / "results/longer_fashion_mnist/summary.csv")
    words = " ".join((folder / "README.md").read_text().split())
    of = table[(table["analysis"] == "shift") & (table["line"] == "circular")]
    accuracy, other = (
        of[of["measure"] == name].pivot(index="arm", columns="x", values="mean") for name in ("acc1", "flipped")
    )
    unmarked = ["patch-none", "apart-none", "shared-none"]
    assert other.index[(other[4] == 0) & (other[8] == 0)].tolist() == sorted(unmarked)
    for arm in accuracy.index:
        cells = [f"{100 * value:.1f}" for value in (*accuracy.loc[arm], other.loc[arm, 4])]
        assert f"| `{arm}` | {' | '.join(cells)} |" in words
    patch, apart, shared = (f"{100 * (accuracy.loc[arm, 0] - accuracy.loc[arm, 2]):.0f}" for arm in unmarked)
    assert f"half a token costs {patch} points with patches, {apart} with windows apart, {shared} with shared" in words
    share = {arm: f"{100 * other.loc[arm, 4]:.0f} %" for arm in other.index}
    assert f"changes {share['apart-zeros-none']} of the predictions where windows are apart" in words
    assert f"and {share['t2t-none']} behind T2T" in words
    stated = f"changes {share['shared-learned']} of the predictions there, but {share['patch-learned']} behind patches"
    assert f"{stated}, and {share['apart-learned']} and {share['apart-zeros-learned']} behind windows apart" in words
    assert f"Behind T2T it changes {share['t2t-learned']}" in words


def test_what_the_page_says_of_four_methods_is_in_their_tables():
    folder, found = ROOT / "experiments/t2t_positions", _tried("methods/candidates.tar.xz")
    page = (folder / "README.md").read_text()
    for arm in ("patch-sincos2d", "t2t-rope2d", "t2t-sincos2d"):
        means = [statistics.fmean(found[f"{arm}-try{i}"]) for i in range(3)]
        assert f"| `{arm}` | {' | '.join(f'{mean:.1f}' for mean in means)} |" in page
        assert max(means) == means[1]  # 0.01, with which the arm is measured
    table = pd.read_csv(folder / "results/methods_fashion_mnist/summary.csv")
    arms = table[(table["kind"] == "arm") & (table["metric"] == "acc1")].set_index("arm")
    assert arms["mean"].max() < 0.88 and "All eight arms are below 88 %" in page
    _states_gains(page, arms, ("none", "learned", "rope2d", "sincos2d"))
    assert all(f"{arms.loc[f't2t-{method}', 'unpaired_p']:.4f}" in page for method in ("learned", "sincos2d"))


def _states_gains(page, arms, methods):
    """Assert that a page has accuracies and gains of each tokenizer, as two rows; the first method has no gain."""
    for tokenizer in ("patch", "t2t"):
        rows = [arms.loc[f"{tokenizer}-{method}"] for method in methods]
        accuracies = [f"{100 * row['mean']:.1f} ± {100 * row['sd']:.1f}" for row in rows]
        gains = [[100 * row[f"difference{end}"] for end in ("", "_low", "_high")] for row in rows[1:]]
        gains = [f"{points:+.2f} [{low:.2f}, {high:.2f}]" for points, low, high in gains]
        assert f"| `{tokenizer}` | {' | '.join(accuracies)} |\n| gain | | {' | '.join(gains)} |" in page


def _gain_line(arms, tokenizer):
    """The line of a page on a tokenizer: its levels, accuracies without and with a table, and the gain."""
    none, learned = (arms.loc[f"{tokenizer}-{method}"] for method in ("none", "learned"))
    cells = [f"{100 * row['mean']:.1f} ± {100 * row['sd']:.1f}" for row in (none, learned)]
    gain, low, high = (100 * learned[f"difference{end}"] for end in ("", "_low", "_high"))
    levels = " | ".join(f"`{level}`" for level in tokenizer.split("-"))
    return f"| {levels} | {' | '.join(cells)} | {gain:+.2f} [{low:.2f}, {high:.2f}] |"


def _curves(name, epochs):
    """Return the mean validation accuracies of each arm, its row of the summary, and the page; it must state them."""
    folder, found = ROOT / "experiments/t2t_positions", {}
    with tarfile.open(folder / f"results/{name}/evidence.tar.xz") as records:
        for member in records.getmembers():
            place = Path(member.name)
            if place.name == "metrics.jsonl" and place.parts[1] != "tune":
                for row in map(json.loads, records.extractfile(member)):
                    if "val/acc1" in row:
                        found.setdefault((place.parts[1], row["epoch"]), []).append(100 * row["val/acc1"])
    page, curves = (folder / "README.md").read_text(), {}
    table = pd.read_csv(folder / f"results/{name}/summary.csv")
    arms = table[(table["kind"] == "arm") & (table["metric"] == "acc1")].set_index("arm")
    for arm in arms.index:
        assert {len(found[arm, epoch]) for epoch in epochs} == {arms.loc[arm, "n"]}
        curves[arm] = [statistics.fmean(found[arm, epoch]) for epoch in epochs]
        assert f"| `{arm}` | {' | '.join(f'{mean:.1f}' for mean in curves[arm])} |" in page
    return curves, arms, page


def _cifar10(name, epochs, tokenizers=("patch", "t2t")):
    """Return what :func:`_curves` returns of arms without positions and with a table; the page must state the gains."""
    curves, arms, page = _curves(name, epochs)
    for tokenizer in tokenizers:
        assert _gain_line(arms, tokenizer) in page
    return curves, arms, page


def test_what_the_page_says_of_a_table_on_cifar10_is_in_its_tables():
    tried = _tried("results/table_cifar10/evidence.tar.xz")
    _, arms, page = _cifar10("table_cifar10", (1, 3, 5))
    for arm in arms.index:
        means = [statistics.fmean(tried[f"{arm}-try{i}"]) for i in (3, 0, 1, 2)]  # the smallest rate came last
        assert f"| `{arm}` | {' | '.join(f'{mean:.1f}' for mean in means)} |" in page
        assert max(means) == means[1]  # 0.004, with which the arm is measured
    assert arms["mean"].max() < 0.65 and "All four arms are below 65 %" in page


def test_what_the_page_says_of_longer_training_on_cifar10_is_in_its_tables():
    curves, arms, _ = _cifar10("longer_cifar10", (1, 3, 5, 9, 13, 15))
    for means in curves.values():
        assert 0.25 <= means[-1] - means[-2] < 0.75  # "by 0.3 to 0.7 points in the last two"
    assert [*arms.index[arms["mean"] < 0.65]] == ["patch-none"]


def test_what_the_page_says_of_the_parts_of_t2t_after_sixteen_epochs_is_in_their_tables_beside_those_of_six():
    curves, arms, page = _curves("longer_parts_cifar10", (1, 3, 5, 9, 13, 15))
    for means in curves.values():
        assert 0.15 <= means[-1] - means[-2] < 1.05  # "by 0.2 to 1.0 points in the last two"
    assert [*arms.index[arms["mean"] >= 0.65]] == ["shared-learned"]
    folder = ROOT / "experiments/t2t_positions/results"
    table = pd.read_csv(folder / "parts_cifar10/summary.csv")
    six = table[(table["kind"] == "arm") & (table["metric"] == "acc1")].set_index("arm")["difference"]
    tokenizers = [("shared", "shared pixels alone", "shared-wrap"), ("apart", "neither", "apart-wrap")]
    for tokenizer, words, before in (*tokenizers, ("apart-zeros", "zeros alone", "apart-zeros")):
        line = _gain_line(arms, tokenizer)
        gain = line.partition(" ± ")[0].rpartition("| ")[2]  # from the first accuracy on
        assert f"| `{tokenizer}` | {words} | {line[line.index(gain) :]} {100 * six[f'{before}-learned']:+.2f} |" in page
    claims = pd.read_csv(folder / "longer_parts_cifar10/summary.csv").query("kind == 'claim'")
    assert f"the unpaired test of the first claim is close (p {claims['unpaired_p'].iloc[0]:.4f})" in page


def test_what_the_page_says_of_the_parts_of_t2t_on_cifar10_is_in_its_tables():
    tokenizers = ("shared-zeros", "shared-wrap", "apart-zeros", "apart-wrap")
    _, arms, page = _cifar10("parts_cifar10", (1, 3, 5), tokenizers)
    assert arms["mean"].max() < 0.65 and "All eight arms are below 65 %" in page


def test_what_the_page_says_of_attention_and_mirrored_borders_on_cifar10_is_in_their_tables():
    tokenizers = ("zeros-mix", "zeros-alone", "mirror-mix", "mirror-alone")
    _, arms, page = _cifar10("attention_cifar10", (1, 3, 5), tokenizers)
    assert arms["mean"].max() < 0.65 and page.count("All eight arms are below 65 %") == 3


def test_what_the_page_says_of_ten_new_seeds_of_cifar10_is_in_their_tables_beside_those_of_five():
    tokenizers = ("zeros-mix", "zeros-alone", "mirror-mix", "mirror-alone")
    _, new, page = _cifar10("again_cifar10", (1, 3, 5), tokenizers)
    table = pd.read_csv(ROOT / "experiments/t2t_positions/results/attention_cifar10/summary.csv")
    old = table[(table["kind"] == "arm") & (table["metric"] == "acc1")].set_index("arm")["difference"]
    for tokenizer in tokenizers:
        assert f"{_gain_line(new, tokenizer)} {100 * old[f'{tokenizer}-learned']:+.2f} |" in page
    assert (
        new["mean"].max() < 0.65
        and page.count(f"{100 * new['mean'].min():.1f} % to {100 * new['mean'].max():.1f} %") == 2
    )
    table = pd.read_csv(ROOT / "experiments/t2t_positions/results/again_cifar10/summary.csv")
    claims = table[table["kind"] == "claim"].reset_index()
    assert f"the unpaired test does not show it (p {claims.loc[1, 'unpaired_p']:.4f})" in page


def test_the_page_counts_the_cells_of_an_experiment_that_has_begun():
    folder = ROOT / "experiments/t2t_positions"
    with tarfile.open(folder / "reach/cells_cifar10.tar.xz") as records:
        done = [name.split("/")[1] for name in records.getnames() if name.endswith("/results.json")]
        (version,) = [json.load(records.extractfile(m)) for m in records.getmembers() if "/history/" in m.name]
    ablation = read_ablation(folder / "reach_cifar10.yaml")
    total = len(ablation.arms) * len(ablation.seeds)
    assert {*done} == {arm.name for arm in ablation.arms}
    assert version["texts"]["the file"] == ablation.file.path.read_text()
    assert f" {len(done)} of its {total} cells " in (folder / "README.md").read_text()


def test_what_the_page_says_of_rotary_and_fixed_positions_on_cifar10_is_in_their_tables():
    tried = _tried("methods/candidates_cifar10.tar.xz")
    assert sum(map(len, tried.values())) == 32
    _, arms, page = _curves("methods_cifar10", (1, 3, 5))
    _states_gains(page, arms, ("none", "rope2d", "sincos2d"))
    for arm in arms.index:
        if not arm.endswith("none"):
            means = [statistics.fmean(tried[f"{arm}-try{i}"]) for i in range(4)]
            assert f"| `{arm}` | {' | '.join(f'{mean:.1f}' for mean in means)} |" in page
            assert max(means) == means[2 if "rope2d" in arm else 1]  # 0.01 or 0.004, with which the arm is measured
    assert arms["mean"].max() < 0.65 and "All six arms are below 65 %" in page


@pytest.mark.parametrize(
    ("name", "source", "of"),
    [
        ("parts_cifar10", "factorial_cifar10", "pos_embed"),
        ("attention_cifar10", "factorial_cifar10", "pos_embed"),
        ("table_cifar10", "factorial_cifar10", "pos_embed"),
        ("longer_cifar10", "table_cifar10", "pos_embed"),
        ("longer_parts_cifar10", "parts_cifar10", "pos_embed"),
        ("again_cifar10", "attention_cifar10", "pos_embed"),
        ("reach_cifar10", "factorial_cifar10", "pos_embed"),
        ("again_fashion_mnist", "factorial_fashion_mnist", "pos_embed"),
        ("longer_fashion_mnist", "factorial_fashion_mnist", "pos_embed"),
        ("methods_fashion_mnist", "factorial_fashion_mnist", "mlp_ratio"),  # with positions that have no arm there
        ("methods_cifar10", "table_cifar10", "mlp_ratio"),
    ],
)
def test_arms_that_are_said_to_be_those_of_another_file_are(name, source, of):
    folder, settings = ROOT / "experiments/t2t_positions", {}
    assert "word for word" in (folder / f"{name}.yaml").read_text()
    for file in (name, source):
        ablation = read_ablation(folder / f"{file}.yaml")
        keys = ("model.tokenizer", "model.mlp_ratio", f"model.{of}")
        settings[file] = {json.dumps([arm.overrides[key] for key in keys]) for arm in ablation.arms}
    assert settings[name] <= settings[source]


@pytest.mark.parametrize("page", sorted((ROOT / "experiments").glob("*/results/*/README.md")), ids=str)
def test_the_page_of_figures_beside_a_report_shows_every_figure(page):
    shown = re.findall(r"\(figures/([^)]+)\)", page.read_text())
    assert sorted(shown) == sorted(path.name for path in (page.parent / "figures").glob("*.svg"))


@pytest.mark.parametrize(
    ("data", "arm"),
    [
        *itertools.product(["fashion_mnist", "cifar10"], ["patch-learned", "t2t-learned"]),
        *itertools.product(["factorial_fashion_mnist"], ["patch-wrap-alone-learned", "shared-zeros-mix-learned"]),
        *itertools.product(["longer_fashion_mnist", "longer_cifar10"], ["patch-learned", "t2t-learned"]),
    ],
)
def test_the_pages_state_the_results_on_small_data(data, arm):
    table = pd.read_csv(ROOT / "experiments/t2t_positions/results" / data / "summary.csv")
    (row,) = table[(table["kind"] == "arm") & (table["metric"] == "acc1") & (table["arm"] == arm)].itertuples()
    accuracy = f"{100 * row.mean:.1f} % [{100 * row.low:.1f}, {100 * row.high:.1f}]"
    stated = f"| {row.parameters / 1e6:.2f} M | {row.n:.0f} | {accuracy} |"
    assert stated in (ROOT / "docs/results.md").read_text()
    if data in ("fashion_mnist", "cifar10", "longer_cifar10") and (data, arm) != ("fashion_mnist", "patch-learned"):
        assert stated in (ROOT / "README.md").read_text()
