"""posbench: scores of predictions, and how often a verdict on them is wrong."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.posbench.planted import HERE, tiny
from vitlab.cli.main import main
from vitlab.errors import UsageError
from vitlab.position_bench import answers as answers_module
from vitlab.position_bench import bench as benches
from vitlab.position_bench.answers import accuracy_of, answers_of, bench_predictions_of, outputs_of_images, scores_of
from vitlab.position_bench.cells import Bench
from vitlab.position_bench.judging import best_of_families, judge, ranks
from vitlab.position_bench.pictures import Split
from vitlab.position_bench.protocol import TASKS, guessing_bounds, registered_protocol
from vitlab.position_bench.running import CellRunner
from vitlab.position_bench.training import bench_network_of


@pytest.mark.slow
def test_a_method_that_needs_a_square_grid_has_no_row_for_other_sizes(small):
    label = f"{HERE}.Square"
    assert "sizes" not in small.scores(label)
    assert "needs a square grid" in small.record(label, "photos-0")["not_applicable"]["sizes"]
    words = {v.task: v.word for v in judge(small.scores(label), {"none": small.scores("none")})}
    assert words["sizes"] == "not applicable"
    assert words["accuracy"] == "equal"


def test_outputs_that_are_not_finite_are_no_classes(small):
    test, settings = small.pictures.of("photos").test, small.protocol
    nets = {
        name: bench_network_of({"class_path": f"{HERE}.{name}"}, settings, "photos", 0).eval()
        for name in ("NanElsewhere", "NanInTests")
    }
    found, refused = bench_predictions_of(nets["NanElsewhere"], settings, "photos", test)
    assert set(found) == {"accuracy", "shift"}
    assert refused == {"sizes": "the outputs of 10 of 10 images are not finite"}
    with pytest.raises(UsageError, match="the outputs of 20 of 20 images are not finite"):
        bench_predictions_of(nets["NanInTests"], settings, "photos", test)


def test_what_returns_fewer_images_at_other_sizes_has_no_score_there(small):
    net = bench_network_of({"class_path": f"{HERE}.OneImageElsewhere"}, small.protocol, "photos", 0).eval()
    with pytest.raises(UsageError, match=r"OneImageElsewhere.forward at a grid of 10 x 10 changes the tokens"):
        outputs_of_images(net, torch.zeros(3, 3, 40, 40))
    with pytest.raises(UsageError, match="the network gives 1 outputs for 3 images"):
        outputs_of_images(First(), torch.zeros(3, 3, 32, 32))


def test_photos_of_other_sizes_are_interpolated_and_shifted_in_four_directions(monkeypatch):
    read = []
    monkeypatch.setattr(answers_module, "outputs_of_images", lambda net, x: read.append(x) or torch.zeros(len(x), 2))
    photos = torch.tensor([[0.0, 1.0], [4.0, 5.0], [8.0, 9.0]]).expand(3, 3, 3, 2)
    test = {"sizes": {"images": 2, "sizes": [[3, 4]]}, "shift": {"images": 3, "pixels": [1], "fill": "circular"}}
    bench_predictions_of(None, {"test": test}, "photos", Split(photos, torch.zeros(3)))
    whole, wider, *moved = read
    assert whole is photos and wider.shape == (2, 3, 3, 4)
    assert wider[1, 2].tolist() == [[row, row + 0.25, row + 0.75, row + 1] for row in (0, 4, 8)]
    first_pixels = sorted(float(x[2, 1, 0, 0]) for x in moved)
    assert first_pixels == [1, 1, 4, 8], "of the next columns, and of the row below and above"


def test_the_validation_accuracy_of_generated_images_is_the_mean_over_the_four_questions(tmp_path, monkeypatch):
    val = Bench(tmp_path, protocol=tiny()).pictures.of("glyphs").val
    rows, *others = (
        torch.nn.functional.one_hot((answer + wrong) % count, count)
        for answer, wrong, count in zip(val.labels.T, (0, 1, 1, 1), (8, 8, 6, 6), strict=True)
    )
    monkeypatch.setattr(answers_module, "outputs_of_images", lambda *words: torch.cat([rows, *others], 1))
    assert accuracy_of(None, "glyphs", val) == 0.25


class First(torch.nn.Linear):
    def __init__(self):
        super().__init__(32, 2)

    def forward(self, images):
        return images[:1, 0, 0, :2]


def test_the_reason_of_a_task_that_does_not_apply_is_shown(small):
    page = str(benches.compare_with(small, f"{HERE}.Square", small))
    assert "note: sizes is not applicable: ValueError: needs a square grid" in page


def test_the_verdicts_on_several_methods_are_one_table(monkeypatch, capsys):
    judged = benches.Judged("", {"accuracy": [0.5, 0.6]}, [], [], {}, [])
    monkeypatch.setattr(benches, "posbench", lambda method, **more: judged._replace(method=method))
    assert main(["posbench", "none", "learned", "--json"]) == 0
    assert [row["method"] for row in json.loads(capsys.readouterr().out)] == ["none", "learned"]
    assert main(["posbench", "none", "learned", "--csv"]) == 0
    assert [line.partition(",")[0] for line in capsys.readouterr().out.splitlines()] == ["method", "none", "learned"]
    for words in (["--price"], ["--cells"], ["verify"]):
        assert main(["posbench", "none", *words, "--json"]) == 2
        assert capsys.readouterr().err.endswith(f"as a table: leave it out with {words[0]}\n")


def draws(rng, effects, sd=0.006, seeds=5):
    shared = rng.normal(0, 0.01, seeds)
    return {task: (0.5 + effect + shared + rng.normal(0, sd, seeds)).tolist()
            for task, effect in zip(TASKS, effects, strict=True)}  # fmt: skip


def test_a_method_that_knows_the_answer_is_found_best_and_one_of_noise_is_not_better():
    rng = np.random.default_rng(1)
    none = draws(rng, [0] * 7)
    knows = {v.task: v.word for v in judge(draws(rng, [0, 0, 0, 0, 0.4, 0.4, 0.4]), {"none": none})}
    assert [knows[task] for task in ("place", "offset", "far")] == ["better"] * 3
    worse = judge(draws(rng, [-0.2] * 7), {"none": none})  # as a table that is shuffled at each step
    assert {v.word for v in worse} == {"worse"}


@pytest.mark.slow
@pytest.mark.parametrize("effect", [0.0, 0.01, -0.01])
def test_a_wrong_verdict_among_all_tasks_is_as_rare_as_declared(effect):
    rng, wrong, count = np.random.default_rng(7), 0, 400
    for _ in range(count):
        rates = {rate: 0.5 + rng.normal(0, 0.006) for rate in (1, 2, 4)}  # equal rates: the choice is chance alone
        tuned = max(rates, key=rates.__getitem__)
        others = {name: draws(rng, [0] * 7) for name in ("none", "learned")}
        words = {v.word for v in judge(draws(rng, [effect + 0 * tuned] * 7, sd=0.002), others)}
        wrong += bool(words & ({"better", "worse"} if effect == 0 else {"equal", "worse" if effect > 0 else "better"}))
    assert wrong / count <= 0.05 + 2 * (0.05 * 0.95 / count) ** 0.5


def test_the_interval_of_a_verdict_is_of_95_percent():
    (verdict,) = (v for v in judge({"few": [1.0, 2.0, 3.0]}, {"none": {"few": [0.0] * 3}}) if v.task == "few")
    assert (verdict.difference, verdict.low, verdict.high) == pytest.approx((2, -0.484138, 4.484138))


@pytest.mark.parametrize(
    ("score", "published", "where"),
    [
        (5.9, [0.0, 1.0, 2.0], "inside the interval of a further seed"),
        (-3.9, [0.0, 1.0, 2.0], "inside the interval of a further seed"),
        (6.0, [0.0, 1.0, 2.0], "OUTSIDE the interval of a further seed"),
        (1.1, [1.0], "whose seeds show no spread"),
    ],
)
def test_an_anchor_is_compared_with_the_interval_of_a_further_seed(monkeypatch, score, published, where):
    """Of published scores of 0, 1 and 2: 1 -+ 4.303 (t of 2 degrees of freedom) x sqrt(1 + 1 / 3), which is 4.968."""
    answers = iter([{"few": np.array([1])}, {"few": np.array([2])}])
    bench, known = (
        SimpleNamespace(
            protocol=tiny(),
            record=lambda *words, own=own: {"rate": 0.01, "scores": {"few": own}},
            predictions=lambda *words: next(answers),
            scores=lambda name: {"few": published},
        )
        for own in (score, 1.0)
    )
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(CellRunner, "run_cell", lambda *words: None)
    anchor = benches.check_anchor(bench, known)
    assert f", {where}" in anchor.notes[0] and not anchor.is_paired


def test_a_single_seed_has_a_score_and_no_interval():
    """It had one from 0 to 100 %, as if any score were possible, and ranks from the first to the last."""
    scores = {"accuracy": [0.7]}
    judged = benches.Judged("mine", scores, judge(scores, {"none": {"accuracy": [0.5]}}), [], {}, [])
    assert re.search(r"accuracy +70\.0 +undecided against none \(\+20\.0\)$", str(judged), re.MULTILINE)
    (row,) = benches.judged_rows(judged)
    assert np.isnan([row["low"], row["high"]]).all()
    assert ranks({"mine": scores, "none": {"accuracy": [0.5]}}, "accuracy")["none"] == pytest.approx(
        (2.0, np.nan, np.nan), nan_ok=True
    )


def test_seeds_without_spread_are_judged_by_their_difference():
    """All five networks right, against five that always give one answer: this was undecided, for want of a spread."""
    none = {task: [0.5] * 5 for task in TASKS}
    mine = {"place": [1.0] * 5, "offset": [0.495] * 5, "far": [0.4] * 5}
    words = {v.task: v.word for v in judge(mine, {"none": none})}
    assert [words[task] for task in mine] == ["better", "equal", "worse"]


def test_networks_at_chance_are_not_compared():
    """Networks that always give one answer differ as the answers of the test images do, with no spread over seeds."""
    rng, bounds = np.random.default_rng(0), guessing_bounds(registered_protocol())
    assert 0.18 < bounds["far"] < 0.19 and 0.018 < bounds["place"] < 0.024
    beyond = 0
    for _ in range(400):
        answers = rng.integers(0, 6, 2000)
        mine, other = ({"far": [float((answers == each).mean())] * 5} for each in (0, 1))
        (verdict,) = (v for v in judge(mine, {"none": other}, guessing=bounds) if v.task == "far")
        beyond += verdict.word in ("better", "worse")
    assert beyond / 400 <= 0.02
    solved = {"far": [0.9, 0.88, 0.91, 0.9, 0.9]}
    (verdict,) = (v for v in judge(solved, {"none": other}, guessing=bounds) if v.task == "far")
    assert verdict.word == "better"


def test_the_best_of_a_family_is_chosen_without_the_test_images():
    assert best_of_families({"added": ["learned", "fourier"]}, {"learned": [0.4], "fourier": [0.5]}) == {
        "added": "fourier"
    }
    tests = {"mine": 0.7, "none": 0.1, "learned": 0.2, "rope2d": 0.6, "liere": 0.9}  # better in the test images
    validation = {"none": 0.1, "learned": 0.2, "rope2d": 0.8, "liere": 0.3}
    known = SimpleNamespace(
        protocol=tiny(),
        complete=lambda: [*validation],
        is_complete=lambda name: True,
        scores=lambda name: {"few": [tests[name], tests[name] + 0.01]},
        validation=lambda name: [validation[name]] * 2,
        results=lambda name: [],
        record=lambda *words: None,
    )
    judged = benches.compare_with(known, "mine", known)
    assert {v.against for v in judged.families} == {"rope2d"}
    assert {v.against for v in judged.verdicts} == {"none", "learned"}


def test_a_perfect_network_of_300_classes_has_every_point(monkeypatch):
    monkeypatch.setattr(answers_module, "outputs_of_images", lambda net, images: torch.eye(300))
    test = Split(torch.zeros(300, 1), torch.arange(300))
    found, _ = bench_predictions_of(None, {}, "few", test)
    assert scores_of(found, answers_of("few", test)) == {"few": 1.0}
