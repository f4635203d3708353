"""posbench: planted methods, refusals, what verify finds, and how often a verdict is wrong."""

import copy
import errno
import importlib
import json
import pickle
import random
import re
import shutil
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from cluster.daemons import wait_for
from vitlab.cli.main import main
from vitlab.config.trust import trust
from vitlab.errors import UsageError
from vitlab.layers.pos_embed import POS_EMBEDS, PosEmbed
from vitlab.layers.pos_embed.added import AddedPosEmbed
from vitlab.position_bench import answers as answers_module
from vitlab.position_bench import bench as benches
from vitlab.position_bench import costs as costs_module
from vitlab.position_bench import submission
from vitlab.position_bench import training as training_module
from vitlab.position_bench.answers import (
    NotFinite,
    accuracy_of,
    answers_of,
    bench_predictions_of,
    outputs_of_images,
    scores_of,
)
from vitlab.position_bench.cells import Bench, published
from vitlab.position_bench.costs import check_method, cost_of, price_lines
from vitlab.position_bench.judging import best_of_families, judge, ranks
from vitlab.position_bench.methods import label_of, method_of
from vitlab.position_bench.page import draw_scores, page_lines, write_bench_page
from vitlab.position_bench.pictures import CELLS, OFFSETS, PIXELS, Split, as_floats, folder_photos, glyphs, photos
from vitlab.position_bench.protocol import (
    FOLDER,
    TASKS,
    chance_of_tasks,
    guessing_bounds,
    read_protocol,
    registered_protocol,
)
from vitlab.position_bench.running import CellRunner
from vitlab.position_bench.training import batches_of, bench_network_of, train_network
from vitlab.runs.lock import take
from vitlab.runs.manifest import file_digest
from vitlab.tokenizers import T2TTokenizer

HERE = __name__


class Alias(PosEmbed):
    """No position embedding, under another name."""


class Nan(PosEmbed):
    def forward(self, x):
        return x * float("nan")


class NanInTests(PosEmbed):
    def forward(self, x):
        return x if self.training else x * float("nan")


class NanElsewhere(PosEmbed):
    def forward(self, x):
        return x if self.grid_size == (8, 8) else x * float("nan")


class Longer(PosEmbed):
    def forward(self, x):
        return torch.cat([x, x[:, :1]], dim=1)


class OneImageElsewhere(PosEmbed):
    def forward(self, x):
        return x if self.grid_size[0] == self.grid_size[1] == 8 else x[:1]


class NoBackward(PosEmbed):
    def forward(self, x):
        return x + Unturned.apply(x)


class Unturned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("my backward\nis broken")


class Square(PosEmbed):
    def forward(self, x):
        if self.grid_size[0] != self.grid_size[1]:
            raise ValueError("needs a square grid")
        return x


class Scaled(PosEmbed):
    def __init__(self, grid_size, embed_dim, by=1):
        super().__init__(grid_size)


class Jitter(PosEmbed):
    def __init__(self, grid_size, embed_dim):
        super().__init__(grid_size)
        self.by = random.random()

    def forward(self, x):
        return x * (1 + self.by * np.random.rand())


class Stacked(AddedPosEmbed):
    def __init__(self, grid_size, embed_dim):
        super().__init__(grid_size)
        self.shape = (1, grid_size[0] * grid_size[1], embed_dim)  # as timm stores it

    def table(self, layer=0):
        return torch.zeros(self.shape)


class Wrong:
    pass


def tiny():
    protocol = copy.deepcopy(registered_protocol())
    protocol["network"] |= {"embed_dim": 8, "depth": 1, "num_heads": 2}
    protocol["recipe"] |= {"batch_size": 20, "opt": "adamw"}
    protocol["trainings"] = {
        "photos": {"images": 40, "epochs": 1},
        "few": {"images": 20, "epochs": 1},
        "glyphs": {"images": 40, "epochs": 1},
    }
    protocol |= {"validation": 20, "digests": {}, "seeds": [0, 1]}
    protocol["test"] = {
        "photos": 20, "glyphs": 20, "sizes": {"images": 10, "sizes": [[40, 40], [32, 48]]},
        "shift": {"images": 10, "pixels": [2], "fill": "reflect"},
    }  # fmt: skip
    protocol["tuning"] = {"seed": 100, "rates": {"photos": [0.01, 0.02], "glyphs": [0.01, 0.02]}, "most": 2}
    return protocol


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("cells"), np.random.default_rng(0)
    arrays = {}
    for name, count in (("train", 60), ("test", 20)):
        arrays[f"{name}_images"] = rng.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        arrays[f"{name}_labels"] = np.arange(count) % 10
    np.savez(folder / "photos.npz", root=str(folder.resolve()), **arrays)
    bench = Bench(folder, folder, tiny(), say=lambda line: None)
    for method in ("none", "learned", {"class_path": f"{HERE}.Square"}):
        CellRunner(bench, method).run()
    CellRunner(bench, {"class_path": f"{HERE}.Alias"}, "alias").run()
    return bench


@pytest.fixture
def undrawn(monkeypatch):
    """Figures are not set for print and not drawn, which is most of the time of a page."""
    monkeypatch.setattr("vitlab.position_bench.page.printed", lambda figure, width: figure)
    monkeypatch.setattr("vitlab.position_bench.page.figure_bytes", lambda figure, form: b"<svg/>")


@pytest.fixture
def answers(small):
    return {k: v for t in small.protocol["trainings"] for k, v in answers_of(t, small.pictures.of(t).test).items()}


@pytest.mark.slow
def test_none_under_another_name_has_the_same_predictions_and_is_equal_in_every_task(small):
    assert small.scores("alias") == small.scores("none")
    verdicts = judge(small.scores("alias"), {"none": small.scores("none")})
    assert [v.word for v in verdicts] == ["equal"] * len(TASKS)


@pytest.mark.slow
def test_complete_cells_are_not_trained_again(small, monkeypatch):
    monkeypatch.setattr("vitlab.position_bench.running.train_network", None)
    CellRunner(small, "none").run()


@pytest.mark.slow
def test_a_cell_is_trained_again_when_tuning_now_chooses_another_rate(small, tmp_path):
    shutil.copytree(small.folder, tmp_path, dirs_exist_ok=True)
    said: list[str] = []
    bench = Bench(tmp_path, small.data, tiny(), said.append)
    chosen = CellRunner(bench, "none").tuned("photos")
    other = chosen * 2 if chosen == 0.01 else chosen / 2
    path = bench.path("none", f"tune-photos-{other:g}")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"validation": 1.0}))
    CellRunner(bench, "none").run()
    cells = [bench.record("none", f"{training}-{seed}") for training in ("photos", "few", "glyphs") for seed in (0, 1)]
    assert [cell["rate"] for cell in cells[:4]] == [other] * 4
    assert [cell["test_reads"] for cell in cells] == [2] * 4 + [1] * 2
    assert sum("trained again" in line for line in said) == 4


@pytest.mark.slow
def test_a_cell_that_another_process_is_at_comes_last(small, tmp_path):
    shutil.copytree(small.folder, tmp_path, dirs_exist_ok=True)
    said: list[str] = []
    bench = Bench(tmp_path, small.data, tiny(), said.append)
    for cell in ("tune-photos-0.02", "photos-0", "few-1", "cost"):
        bench.path("none", cell).unlink()
    other = take(tmp_path / "none" / ".photos-0.lock")
    work = threading.Thread(target=CellRunner(bench, "none").run)
    work.start()
    wait_for(bench.path("none", "few-1").is_file, 60, "a cell")
    assert work.is_alive() and bench.record("none", "photos-0") is None
    other.release()
    work.join()
    done = [line.split(":")[0] for line in said if "CPU s" in line]
    assert done == ["none tune-photos-0.02", "none few-1", "none photos-0"]
    assert bench.is_complete("none") and not list((tmp_path / "none").glob(".*.lock"))


def test_methods_share_initial_values_and_the_order_of_images():
    nets = [dict(bench_network_of(m, tiny(), "photos", 3).named_parameters()) for m in ("none", "learned")]
    assert all(torch.equal(nets[0][name], nets[1][name]) for name in nets[0])
    split = glyphs(40, 0)
    first, again = (list(batches_of(split, 20, 2, 5, flip=True)) for _ in range(2))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, again, strict=True))


def test_a_method_that_draws_from_python_and_numpy_is_trained_alike_twice():
    nets = [train_network({"class_path": f"{HERE}.Jitter"}, tiny(), "glyphs", 3, 0.01, glyphs(20, 0)) for _ in range(2)]
    assert nets[0].pos_embed.by == nets[1].pos_embed.by
    values = zip(nets[0].parameters(), nets[1].parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in values)


def test_photos_are_flipped_and_generated_images_whose_columns_are_asked_for_are_not(monkeypatch):
    flips = []
    monkeypatch.setattr(training_module, "batches_of", lambda *words: flips.append(words[-1]) or iter(()))
    for training in ("photos", "few", "glyphs"):
        train_network("none", tiny(), training, 0, 0.01, glyphs(20, 0))
    assert flips == [True, True, False]


def test_a_training_has_the_schedule_the_weight_decay_and_the_clipping_of_its_protocol(monkeypatch):
    rates, decays, norms = [], set(), []

    class Noted(torch.optim.SGD):
        def step(self, closure=None):
            rates.append({group["lr"] for group in self.param_groups})
            decays.update(group["weight_decay"] for group in self.param_groups)
            grads = [p.grad.flatten() for group in self.param_groups for p in group["params"] if p.grad is not None]
            norms.append(float(torch.cat(grads).norm()))

    monkeypatch.setattr(training_module, "build_optimizer", lambda name, groups, rate, net: Noted(groups, rate))
    settings = tiny()
    settings["recipe"] |= {"warmup": 0.5, "weight_decay": 0.3, "clip": 0.001}
    train_network("none", settings, "glyphs", 0, 1.0, glyphs(80, 0))
    assert [len(each) for each in rates] == [1] * 4
    # one of two steps of warm-up, then half a cosine that would end a step later: (1 + cos(72, 108, 144 degrees)) / 2
    assert [each.pop() for each in rates] == pytest.approx([0.5, 0.6545085, 0.3454915, 0.0954915])
    assert decays == {0.0, 0.3}
    assert norms == pytest.approx([0.001] * 4, rel=1e-2)


@pytest.mark.slow
def test_a_method_that_needs_a_square_grid_has_no_row_for_other_sizes(small):
    label = f"{HERE}.Square"
    assert "sizes" not in small.scores(label)
    assert "needs a square grid" in small.record(label, "photos-0")["not_applicable"]["sizes"]
    words = {v.task: v.word for v in judge(small.scores(label), {"none": small.scores("none")})}
    assert words["sizes"] == "not applicable"
    assert words["accuracy"] == "equal"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Nan", "not finite in train mode"),
        ("NanInTests", "not finite in eval mode"),
        ("Longer", "changes the tokens"),
        ("Wrong", "PosEmbed"),
        ("Stacked", r"must return \(N, D\), .* got \(1, 64, 8\)"),
    ],
)
def test_a_method_that_cannot_be_measured_is_refused_in_one_line(name, says):
    with pytest.raises(UsageError, match=says) as error:
        check_method({"class_path": f"{HERE}.{name}"}, tiny())
    assert "\n" not in str(error.value)


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


def test_the_cost_of_a_method_is_relative_to_none(monkeypatch):
    def of(mine, none):
        return lambda net, *words: none if type(net.pos_embed) is PosEmbed else mine

    monkeypatch.setattr(costs_module, "_activations", of(300, 200))
    monkeypatch.setattr(costs_module, "_seconds_of_step", of(0.5, 0.25))
    assert cost_of("learned", tiny()) == {"step_cpu_seconds": 0.5, "time": 2.0, "memory": 1.5}


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


def test_the_price_of_a_method_that_cannot_be_trained_is_one_line():
    with pytest.raises(UsageError, match=r"NoBackward.* cannot be trained: RuntimeError: my backward is broken"):
        price_lines({"class_path": f"{HERE}.NoBackward"}, tiny())


class Needs(PosEmbed):
    def __init__(self, grid_size, base):
        super().__init__(grid_size)


def test_a_method_with_arguments_can_be_named_on_the_command_line(monkeypatch, capsys):
    method = f"{HERE}.Needs"
    words = f"give {method} as '{{class_path: {method}, init_args: {{...}}}}'"
    with pytest.raises(UsageError, match=f"missing 1 required .*'base'; {re.escape(words)}"):
        price_lines(method, tiny())
    monkeypatch.setattr("vitlab.position_bench.costs.price_lines", lambda method, protocol: [label_of(method)])
    asked = ["posbench", f"{{class_path: {method}, init_args: {{base: 50}}}}"]
    assert main([*asked, "--price"]) == 0
    assert capsys.readouterr().out == f"{method}_base_50\n"
    assert main([*asked, "verify", "--folder", "nowhere"]) == 2
    assert f"nowhere/{method}_base_50 does not exist: train it first, without verify" in capsys.readouterr().err
    assert main(["posbench", "{class_path: mine", "--price"]) == 2
    assert "`METHOD` line 1: a bracket that opens in line 1 is not closed" in capsys.readouterr().err


def test_a_method_is_retrained_only_if_it_is_trusted_and_leaves_nothing(tmp_path, monkeypatch):
    bench = Bench(tmp_path, protocol=tiny())
    monkeypatch.setattr(bench, "record", lambda label, cell: {"rate": 0.1})
    with pytest.raises(UsageError, match="add --trust_imports nowhere"):
        submission.retrain(bench, "none", "nowhere.Mine")
    assert list(tmp_path.iterdir()) == []

    def fails(self, *words):
        self.bench.folder.mkdir(parents=True)
        raise UsageError("cannot be trained")

    monkeypatch.setattr(CellRunner, "run_cell", fails)
    with pytest.raises(UsageError, match="cannot be trained"):
        submission.retrain(bench, "none", "none")
    assert list((tmp_path / "none").iterdir()) == []


def test_verify_names_the_folders_of_a_method_with_arguments(tmp_path, capsys):
    (tmp_path / "coordinates.Coordinates_width_8").mkdir()
    assert main(["posbench", "coordinates.Coordinates", "verify", "--folder", str(tmp_path)]) == 2
    assert "does not exist: name one of coordinates.Coordinates_width_8" in capsys.readouterr().err


def test_a_seed_that_diverges_is_named_and_the_others_are_measured(small, tmp_path, monkeypatch, capsys):
    def diverging(method, protocol, training, seed, rate, split):
        if (training, seed) == ("glyphs", 0):
            raise NotFinite("the loss of glyphs, seed 0, rate 0.01 is nan at step 3")
        return bench_network_of(method, protocol, training, seed).eval()

    said = []
    bench = copied(small, tmp_path)
    bench.say, bench.pictures = said.append, small.pictures
    for cell in ("glyphs-0", "glyphs-1", "few-1"):
        edit(bench.path("none", f"{cell}"), rate=0.5)  # each is to be trained again
    monkeypatch.setattr("vitlab.position_bench.running.train_network", diverging)
    lost = CellRunner(bench, "none").run()
    assert lost == {"glyphs-0": "the loss of glyphs, seed 0, rate 0.01 is nan at step 3"}
    assert f"none glyphs-0: no score, as {lost['glyphs-0']}" in said
    assert bench.record("none", "glyphs-0") is None
    assert {bench.record("none", cell)["test_reads"] for cell in ("glyphs-1", "few-1")} == {2}
    monkeypatch.setattr(benches, "look", lambda *words: 1)
    judged = benches.compare_with(bench, "none", small)._replace(lost=lost)
    assert set(judged.scores) == {task for task, (_, training) in TASKS.items() if training != "glyphs"}
    assert f"note: glyphs-0 has no score, and without every seed its tasks have none: {lost['glyphs-0']}" in str(judged)
    assert "  place     no score  " in str(judged)
    monkeypatch.setattr(benches, "posbench", lambda *words, **more: judged)
    assert main(["posbench", "learned"]) == 1 and "no score" in capsys.readouterr().out
    with pytest.raises(NotFinite, match="is nan at step 3"):
        CellRunner(bench, "none").run_cell("glyphs", 0, 0.01)


def test_the_reason_of_a_task_that_does_not_apply_is_shown(small):
    page = str(benches.compare_with(small, f"{HERE}.Square", small))
    assert "note: sizes is not applicable: ValueError: needs a square grid" in page


def test_cells_of_another_source_of_a_class_are_refused(tmp_path, monkeypatch):
    head = "from vitlab import PosEmbed\n\n\nclass Mine(PosEmbed):\n"
    monkeypatch.syspath_prepend(tmp_path)
    file, method, label = tmp_path / "embeds_of_mine.py", "embeds_of_mine.Mine", "embeds_of_mine.Mine"
    file.write_text(f"{head}    def forward(self, x):\n        return x\n")
    module = importlib.import_module("embeds_of_mine")
    bench = Bench(tmp_path, tmp_path, tiny(), say=lambda line: None)
    for name, found in (("tuned", 0.01), ("run_cells", {}), ("_shared", {})):
        monkeypatch.setattr(CellRunner, name, lambda *words, found=found: found)
    run = CellRunner(bench, method).run
    run()
    file.write_text(f'{head}    """Of mine."""\n\n    def forward(self, x):\n        return x  # as it is\n')
    run()
    file.write_text(f"{head}    def forward(self, x):\n        return x * x.new_ones(())\n")
    importlib.reload(module)
    with pytest.raises(UsageError, match=r"embeds_of_mine\.Mine was trained with another source of .*another folder"):
        run()
    assert any("another source" in line for line in submission.problems_of(bench, label, {}))
    monkeypatch.delitem(sys.modules, "embeds_of_mine")  # as `verify` begins, which then imports what is trusted
    monkeypatch.setattr("vitlab.config.trust.TRUSTED", ["embeds_of_mine"])
    assert any("another source" in line for line in submission.problems_of(bench, label, {}))
    edit(bench.path(label, "card"), code=None)  # as before there was a digest
    run()


def test_a_class_of_a_notebook_whose_source_cannot_be_kept_is_refused_before_its_first_cell(cell, tmp_path):
    cell("import torch, vitlab\nTABLE = torch.arange(4.0)\n")
    cell("class Mine(vitlab.PosEmbed):\n    def forward(self, x):\n        return x + TABLE[0]\n")
    with pytest.raises(UsageError, match="Mine uses `TABLE` of its notebook, a Tensor, whose source cannot be kept"):
        CellRunner(Bench(tmp_path, tmp_path, tiny()), "__main__.Mine").run()
    assert not any(tmp_path.iterdir())


def test_methods_that_differ_in_a_sign_have_folders_of_their_own():
    labels = [label_of({"class_path": "mine.Joined", "init_args": {"op": op}}) for op in "*/-"]
    assert len(set(labels)) == 3 and labels[2] == "mine.Joined_op_-"


def test_the_cells_of_another_method_are_not_taken_for_those_of_this_one(tmp_path):
    bench = Bench(tmp_path, protocol=tiny())
    method = {"class_path": "rope2d", "init_args": {"theta": 10}}
    bench.write("mine", "card", {"method": ["rope2d", {"theta": 10}]})
    bench.check_kept("mine", method)
    with pytest.raises(UsageError, match=r'holds the cells of rope2d {"theta": 10}, not of rope2d: give another'):
        bench.check_kept("mine", "rope2d")


def test_an_object_with_arguments_is_a_method():
    square = {"class_path": f"{HERE}.Scaled", "init_args": {"by": 2}}
    assert method_of(Scaled(by=2)) == method_of(Scaled((2, 2), 8, by=2)) == square
    with pytest.raises(UsageError, match="Wrong is not a PosEmbed"):
        method_of(partial(Wrong))


def test_a_slow_method_is_refused_before_it_is_trained():
    with pytest.raises(UsageError, match="too slow"):
        check_method("none", tiny() | {"limit_cpu_seconds": 1e-9})


def test_a_class_that_is_not_a_posembed_is_refused():
    with pytest.raises(UsageError, match="Wrong is not a PosEmbed"):
        method_of(Wrong)
    with pytest.raises(UsageError, match="'rope3d' is not a position embedding"):
        method_of("rope3d")


def test_the_answers_of_generated_images_can_be_read_from_them_and_not_from_their_tokens_alone():
    images, labels = glyphs(300, 9)
    cells = images[:, 0].view(-1, CELLS, PIXELS, CELLS, PIXELS).mean(dim=(2, 4)).flatten(1)
    a, b = cells.argmax(1), cells.argmin(1)
    assert torch.equal(a, labels[:, 0] * CELLS + labels[:, 1])
    assert answers_of("glyphs", Split(images, labels))["place"].tolist() == a.tolist()
    assert torch.equal(b % CELLS - a % CELLS, torch.tensor(OFFSETS)[labels[:, 2]])
    marks = images[:, 0].view(-1, CELLS, PIXELS, CELLS, PIXELS).permute(0, 1, 3, 2, 4).flatten(3)
    others = (marks.std(dim=3) > 1.6) & (cells.abs().view(-1, CELLS, CELLS) < 1.5)  # neither bright nor dark
    rows = [others[:, :, side].any(dim=2).float().argmax(dim=1) for side in (slice(2), slice(CELLS - 2, CELLS))]
    assert others.sum(dim=(1, 2)).eq(2).all()
    assert torch.equal(rows[1] - rows[0], torch.tensor(OFFSETS)[labels[:, 3]])


def copied(small, tmp_path):
    shutil.copytree(small.folder / "none", tmp_path / "none")
    return Bench(tmp_path, None, small.protocol, say=lambda line: None)


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def drop_seed(folder):
    (folder / "glyphs-1.json").unlink()


def edit_score(folder):
    edit(folder / "few-0.json", scores={"few": 0.99})


def add_score(folder):
    edit(folder / "few-0.json", scores=json.loads((folder / "few-0.json").read_text())["scores"] | {"sizes": 0.99})


def edit_predictions(folder):
    with np.load(folder / "few-0.npz") as kept:
        changed = {"few": (kept["few"] + 1) % 10}
    np.savez_compressed(folder / "few-0.npz", **changed)


def edit_recipe(folder):
    edit(folder / "few-0.json", protocol="0" * 64)


def edit_rate(folder):
    edit(folder / "photos-0.json", rate=0.5)


def drop_rate(folder):
    next(folder.glob("tune-glyphs-*.json")).unlink()


def cut_record(folder):
    path = folder / "photos-0.json"
    path.write_text(path.read_text()[:40])


def empty_record(folder):
    (folder / "photos-0.json").write_text('{"scores": {}}')


CHEATS = {drop_seed: "is missing", edit_score: "its predictions give", edit_predictions: "were edited",
          cut_record: "photos-0.json: is damaged", empty_record: "photos-0.json: is damaged",
          add_score: "has scores of few, sizes, not of few",
          edit_recipe: "another protocol", edit_rate: "is best in validation",
          drop_rate: "of the grid were not tried"}  # fmt: skip


@pytest.mark.parametrize("cheat", CHEATS)
def test_verify_refuses(cheat, small, answers, tmp_path):
    bench = copied(small, tmp_path)
    assert submission.problems_of(bench, "none", answers) == []
    cheat(tmp_path / "none")
    assert any(CHEATS[cheat] in line for line in submission.problems_of(bench, "none", answers))


def test_invented_predictions_fit_their_scores_and_retraining_exposes_them(small, answers, tmp_path):
    bench = copied(small, tmp_path)
    path = tmp_path / "none" / "few-0.npz"
    np.savez_compressed(path, few=answers["few"].astype(np.uint8))
    edit(path.with_suffix(".json"), scores={"few": 1.0}, predictions=file_digest(path))
    assert submission.problems_of(bench, "none", answers) == []
    bench.pictures = small.pictures
    bench.data = small.data
    (tmp_path / "none" / "again").mkdir()
    shutil.copyfile(small.folder / "photos.npz", tmp_path / "none" / "again" / "photos.npz")
    assert "trained again" in submission.retrain(bench, "none", "none")[0]


def test_a_full_disk_leaves_no_half_cell_and_no_half_submission(tmp_path, monkeypatch):
    def full(place, *words, **more):
        Path(place).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device", str(place))

    bench, predictions = Bench(tmp_path), {"few": np.zeros(3, np.uint8)}
    with monkeypatch.context() as patch:
        patch.setattr(np, "savez_compressed", full)
        with pytest.raises(OSError, match=r"No space left.*few-0\.npz"):
            bench.write("rope2d", "few-0", {"scores": {}}, predictions)
    assert list((tmp_path / "rope2d").iterdir()) == []
    bench.write("rope2d", "few-0", {"scores": {}}, predictions)
    monkeypatch.setattr(submission, "problems_of", lambda *words: [])
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", lambda source, place: full(place))
        with pytest.raises(OSError, match="No space left"):
            submission.write_submission(bench, "rope2d", tmp_path / "sent", {})
    files = submission.write_submission(bench, "rope2d", tmp_path / "sent", {})
    assert [path.name for path in files] == ["MANIFEST.json", "few-0.json", "few-0.npz"]


def test_a_damaged_cell_is_named_before_a_bench_goes_on(small, tmp_path):
    bench = copied(small, tmp_path)
    cut_record(tmp_path / "none")
    with pytest.raises(UsageError, match=r"photos-0\.json is damaged: remove it, and its cell is trained again"):
        bench.check_kept("none")


def test_a_page_beside_its_own_evidence_keeps_it(small, tmp_path, undrawn):
    copied(small, tmp_path / "evidence")
    there = {path: path.read_bytes() for path in (tmp_path / "evidence").rglob("*.json")}
    bench = Bench(tmp_path / "evidence", small.data, small.protocol)
    bench.pictures = small.pictures
    write_bench_page(bench, tmp_path)
    assert there and {path: path.read_bytes() for path in there} == there


def test_submit_writes_what_verify_accepts(small, answers, tmp_path):
    files = submission.write_submission(small, "none", tmp_path / "none", answers)
    assert (tmp_path / "none" / submission.MANIFEST) in files
    bench = Bench(tmp_path, None, small.protocol)
    assert submission.problems_of(bench, "none", answers) == []
    edit(tmp_path / "none" / "cost.json", time=0.1)
    assert "cost.json: differs" in submission.problems_of(bench, "none", answers)[0]
    with pytest.raises(UsageError, match="exists"):
        submission.write_submission(small, "none", tmp_path / "none", answers)


@pytest.mark.slow
def test_the_page_is_made_of_what_is_complete(small, tmp_path, request):
    write_bench_page(small, tmp_path)
    page = (tmp_path / "README.md").read_text()
    assert "2 of 16 methods are measured, 2 seeds each." in page
    assert "Against `none`" in page
    figure = (tmp_path / "posbench.svg").read_text()
    assert all(f">{word}<" in figure for word in ("accuracy", "learned", "better than none"))
    request.getfixturevalue("undrawn")
    write_bench_page(small, tmp_path)
    assert (tmp_path / "README.md").read_text() == page


@pytest.mark.slow
def test_a_figure_without_the_reference_methods_has_no_verdicts(small, undrawn):
    figure = draw_scores(small, ["none"])
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["none"]


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


def test_the_list_names_the_methods_that_are_not_measured(capsys):
    assert main(["posbench", "--list"]) == 0
    out = capsys.readouterr().out
    assert "of 16 methods are measured" in out
    assert main(["posbench"]) == main(["posbench", "--lis"]) == 2  # no abbreviation


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


def test_the_example_is_a_method_that_can_be_measured():
    sys.path.append(str(Path(__file__).parents[2] / "examples"))
    trust(["coordinates"])
    assert check_method(method_of("coordinates.Coordinates"), tiny()) > 0


PUBLISHED = {path.stem: published(path.stem).complete() for path in FOLDER.glob("*.yaml")}


def test_the_reference_methods_are_published_under_each_protocol_that_has_evidence():
    assert PUBLISHED["protocol"]
    for protocol, names in PUBLISHED.items():
        assert not names or set(read_protocol(protocol)["claims"]["against"]) <= set(names)


@pytest.mark.parametrize(("protocol", "name"), [(p, name) for p, names in PUBLISHED.items() for name in names])
def test_published_cells_are_verified(protocol, name):
    assert submission.problems_of(published(protocol), name, submission.answers_kept(protocol)) == []


@pytest.mark.parametrize("protocol", [p for p, names in PUBLISHED.items() if names])
def test_the_page_of_a_protocol_says_the_scores_of_its_evidence(protocol):
    bench, names = published(protocol), PUBLISHED[protocol]
    page = (bench.folder.parent / "README.md").read_text()
    for line in page_lines(bench, names):
        assert line in page.splitlines(), line
    assert f"{len(names)} of {len(POS_EMBEDS)} methods are measured" in page


def test_the_numbers_beside_those_of_the_papers_were_measured():
    text = (FOLDER / "README.md").read_text()
    rows = re.findall(r"^\| (\w+) - (\w+) \| \S+ \| (\S+) \|", text, flags=re.M)
    assert len(rows) >= 5
    bench = published()
    for one, other, here in rows:
        means = [np.mean(bench.scores(name)["accuracy"]) for name in (one, other)]
        assert f"{100 * (means[0] - means[1]):+.1f}" == here


@pytest.fixture
def photos_of_three_classes(tmp_path):
    """Flat photos, of another shade in each class, of several sizes."""
    for split, count in (("train", 8), ("val", 4)):
        for k, name in enumerate(("a", "b", "c")):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(count):
                side = (40 + 4 * i, 50 - 3 * i)
                Image.new("RGB", side, (80 * k, 80 * k + i, 10)).save(tmp_path / split / name / f"{i}.png")
    return tmp_path


def test_photos_of_a_folder_come_class_by_class_in_turn_and_stay_on_disk(photos_of_three_classes, tmp_path):
    sizes = {"val": 3, "train": 18, "few": 6, "test": 12}
    found = folder_photos(photos_of_three_classes, sizes, 32, tmp_path / "kept", 3)
    assert {name: len(split.images) for name, split in found.items()} == sizes
    assert found["few"].labels.tolist() == [0, 1, 2] * 2 and found["val"].labels.tolist() == [0, 1, 2]
    assert found["train"].images.dtype == torch.uint8 and found["train"].images.shape[1:] == (3, 32, 32)
    pixels = found["few"].images[:, :, 16, 16].tolist()  # the first three photos of each class are for validation
    assert pixels == [[80 * k, 80 * k + i, 10] for i in (1, 2) for k in range(3)]
    for path in photos_of_three_classes.glob("*/*/*.png"):
        path.write_bytes(b"not read again")
    (photos_of_three_classes / "train" / "a" / ".DS_Store").write_bytes(b"of a Mac")
    again = folder_photos(photos_of_three_classes, sizes, 32, tmp_path / "kept", 3)
    assert torch.equal(again["test"].images, found["test"].images)
    with pytest.raises(UsageError, match="holds 24 images, and the protocol takes 100"):
        folder_photos(photos_of_three_classes, sizes | {"train": 97}, 32, tmp_path / "kept", 3)
    with pytest.raises(UsageError, match="there is no train"):
        folder_photos(tmp_path / "elsewhere", sizes, 32, tmp_path / "kept", 3)


def test_photos_that_are_not_those_of_the_protocol_are_one_line(photos_of_three_classes, tmp_path):
    sizes = {"val": 3, "train": 18, "few": 6, "test": 12}
    with pytest.raises(UsageError, match=r"train holds 3 classes, and the protocol has 2: `photos.classes`"):
        folder_photos(photos_of_three_classes, sizes, 32, tmp_path / "kept", 2)
    (photos_of_three_classes / "train" / "a" / "0.txt").write_text("of Krizhevsky")
    with pytest.raises(UsageError, match=r"a/0\.txt cannot be read as an image: .*; mend or remove it"):
        folder_photos(photos_of_three_classes, sizes, 32, tmp_path / "kept", 3)
    (photos_of_three_classes / "train" / "a" / "0.txt").unlink()
    whole = (photos_of_three_classes / "val" / "b" / "0.png").read_bytes()
    (photos_of_three_classes / "val" / "b" / "0.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UsageError, match=r"b/0\.png cannot be read as an image: .*; mend or remove it"):
        folder_photos(photos_of_three_classes, sizes, 32, tmp_path / "kept", 3)


def as_pngs(root, counts, shade=0, side=(32, 32), suffix="png"):
    """Save as many photos of each class in ``train`` and in ``test``, and return their folder."""
    for split in ("train", "test"):
        for k, count in enumerate(counts):
            (root / split / str(k)).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", side, (80 * k, i, shade)).save(root / split / str(k) / f"{i}.{suffix}")
    return root


def test_the_few_photos_are_the_first_of_training_and_none_is_of_validation(tmp_path):
    found = photos(as_pngs(tmp_path, [4, 4]), {"val": 2, "train": 5, "few": 3, "test": 1})
    mean, order = torch.tensor([0.4914, 0.4822, 0.4465]), [[80 * k, i, 0] for i in range(4) for k in range(2)]
    colors = {name: ((x[:, :, 0, 0] * 0.25 + mean) * 255).round().tolist() for name, (x, _) in found.items()}
    assert colors == {"val": order[:2], "train": order[2:7], "few": order[2:5], "test": order[:1]}
    assert found["few"].labels.tolist() == [0, 1, 0]


def test_a_wrong_folder_of_photos_leaves_nothing_behind_for_the_right_one(tmp_path):
    wrong, right = as_pngs(tmp_path / "wrong", [3, 3], shade=1), as_pngs(tmp_path / "right", [3, 3])
    settings = tiny() | {"validation": 2}
    settings["trainings"] |= {"photos": {"images": 4}, "few": {"images": 2}}
    settings["test"] |= {"photos": 6}
    digest = photos(right, {"val": 2, "train": 4, "few": 2, "test": 6})["train"].digest()
    checked = settings | {"digests": {"train": digest}}
    for _ in range(2):
        with pytest.raises(UsageError, match=r"of 'train' are not those of the protocol.*; `--data .*wrong` must be"):
            Bench(tmp_path / "cells", wrong, checked).pictures.of("photos")
    assert Bench(tmp_path / "cells", right, checked).pictures.of("photos").train.digest() == digest
    shutil.rmtree(right / "train" / "0")
    assert Bench(tmp_path / "cells", right, checked).pictures.of("photos").train.digest() == digest, "not read again"
    (tmp_path / "cells" / "photos.npz").write_bytes(b"PK of a disk that was full")
    with pytest.raises(UsageError, match="right"):  # decoded anew, of which a class is gone
        Bench(tmp_path / "cells", right, checked).pictures.of("photos")
    assert Bench(tmp_path / "cells", wrong, settings).pictures.of("photos").train.digest() != digest, "without digests"


@pytest.mark.parametrize(
    ("photos_of_yours", "says"),
    [
        (
            {"counts": [2, 2], "suffix": "jpg"},
            r"train must hold as many CLASS/\*\.png of each class, got 0, 0: this protocol",
        ),
        ({"counts": [2, 3]}, r"train must hold as many CLASS/\*\.png of each class, got 2, 3: this protocol"),
        ({"counts": []}, r"train must hold as many CLASS/\*\.png of each class, got 0: this protocol"),
        ({"counts": [2], "side": (40, 32)}, r"0\.png must have 32 x 32 pixels, got 40 x 32: this protocol"),
    ],
)
def test_photos_of_yours_in_place_of_cifar10_are_one_line(photos_of_yours, says, tmp_path):
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
    with pytest.raises(UsageError, match=says):
        photos(as_pngs(tmp_path, **photos_of_yours), {"val": 1, "train": 1, "few": 1, "test": 1})


def test_bytes_of_photos_become_the_floats_of_the_registered_protocol():
    images = torch.arange(2 * 3 * 4 * 4).view(2, 3, 4, 4).to(torch.uint8)
    mean = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
    assert torch.equal(as_floats(images), (images / 255 - mean) / 0.25)
    assert as_floats(images.float()).equal(images.float())


def test_a_perfect_network_of_300_classes_has_every_point(monkeypatch):
    monkeypatch.setattr(answers_module, "outputs_of_images", lambda net, images: torch.eye(300))
    test = Split(torch.zeros(300, 1), torch.arange(300))
    found, _ = bench_predictions_of(None, {}, "few", test)
    assert scores_of(found, answers_of("few", test)) == {"few": 1.0}


def test_a_method_is_measured_under_another_protocol_on_photos_of_a_folder(photos_of_three_classes, tmp_path):
    settings = tiny() | {"photos": {"from": "folder", "classes": 3}, "validation": 4, "seeds": [0]}
    settings["trainings"] |= {"photos": {"images": 20, "epochs": 1}, "few": {"images": 10, "epochs": 1}}
    settings["recipe"] |= {"batch_size": 10}
    settings["test"] |= {"photos": 12}
    bench = Bench(tmp_path / "cells", photos_of_three_classes, settings, say=lambda line: None)
    kept = CellRunner(bench, "learned").run_cell("photos", 0, 0.01)
    assert set(kept["scores"]) == {"accuracy", "sizes", "shift"} and 0 <= kept["scores"]["accuracy"] <= 1
    assert max(x.max() for x in bench.predictions("learned", "photos-0").values()) < 3
    assert chance_of_tasks(settings)["few"] == 1 / 3 and chance_of_tasks(settings)["far"] == 1 / 6


@pytest.mark.slow
def test_the_protocol_for_gpus_has_14_tokens_a_side_and_a_price_that_can_be_added_up(monkeypatch, capsys):
    settings = read_protocol("imagenet100")
    for training, tokens, outputs in (("photos", (14, 14), 100), ("few", (14, 14), 100), ("glyphs", (8, 8), 28)):
        net = bench_network_of("none", settings | {"network": settings["network"] | {"depth": 1}}, training, 0)
        assert (net.grid_size, net.num_classes) == (tokens, outputs)
    monkeypatch.setattr(costs_module, "_seconds_of_step", lambda net, images, *_: len(images) / 1000)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["posbench", "rope2d", "--protocol", "imagenet100", "--price"]) == 0
    page = capsys.readouterr().out
    assert "photos  8 networks x 3,600,000 images, 1,000 images/s: 8.0 h" in page
    assert "few     5 networks x 1,080,000 images, 1,000 images/s: 1.5 h" in page
    assert "in all  10.4 CPU hours" in page  # and 8 x 400,000 generated images, .9 h
    assert main(["posbench", "rope2d", "--protocol", "imagenet100", "--cells"]) == 2
    assert "trains on a GPU, and there is none here" in capsys.readouterr().err
    assert main(["posbench", "rope2d", "--protocol", "imagenet"]) == 2
    assert "vitlab ships imagenet100, protocol, t2t" in capsys.readouterr().err


@pytest.mark.slow
def test_the_protocol_for_t2t_differs_from_the_registered_one_in_its_network_alone(tmp_path, capsys):
    registered, settings = registered_protocol(), read_protocol("t2t")
    assert {name for name in settings if settings[name] != registered[name]} == {"version", "network"}
    assert {**settings["network"], "patch_size": 4, "tokenizer": 0} == {**registered["network"], "tokenizer": 0}
    settings["network"] = settings["network"] | {"depth": 1}
    for training, chans in (("photos", 3), ("few", 3), ("glyphs", 1)):
        net = bench_network_of("rope2d", settings, training, 0)
        assert isinstance(net.tokenizer, T2TTokenizer) and (net.grid_size, net.in_chans) == ((8, 8), chans)
    assert check_method("relpos", settings | {"limit_cpu_seconds": None}) > 0
    (tmp_path / "mine.yaml").write_text("base: t2t\n")
    assert main(["posbench", "none", "--protocol", str(tmp_path / "mine.yaml"), "--price"]) == 2
    assert "`base` must be `protocol`, the registered one, got 't2t'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_method_is_compared_with_what_is_published_under_a_protocol_of_ones_own(small, tmp_path):
    protocol, cells, evidence = tmp_path / "mine.yaml", tmp_path / "cells", tmp_path / "mine" / "evidence"
    protocol.write_text(yaml.safe_dump({"base": "protocol", **tiny()}))
    shutil.copytree(small.folder, evidence)
    cells.mkdir()
    shutil.copyfile(small.folder / "photos.npz", cells / "photos.npz")
    shutil.copytree(small.folder / "alias", cells / f"{HERE}.Alias")
    compare = partial(benches.posbench, Alias, data=small.data, folder=cells, protocol=str(protocol))
    torch.set_num_threads(2)
    drawn = torch.get_rng_state()
    judged = compare(say=lambda line: None)
    assert torch.get_num_threads() == 2 and torch.equal(torch.get_rng_state(), drawn)  # those of the caller
    assert {v.difference for v in judged.verdicts if v.against == "none"} == {0} and judged.notes == []
    assert {path.name for path in cells.iterdir() if path.is_dir()} == {f"{HERE}.Alias", "anchor.none"}
    (anchor,) = (cells / "anchor.none").glob("*.npz")
    repeated = dict(np.load(anchor))
    np.savez(anchor, **{task: np.roll(x, 1) for task, x in repeated.items()})
    alone = compare(say=lambda line: None)  # as on a machine that does not repeat the published bits
    assert "so seeds are not taken as pairs" in alone.notes[0]
    widths = [[v.high - v.low for v in x.verdicts if v.against == "none"] for x in (judged, alone)]
    assert not any(widths[0]) and any(widths[1])
    shutil.rmtree(evidence / "learned")
    shutil.copytree(small.folder / "learned", cells / "learned")
    shutil.copytree(small.folder / "none", cells / "none")
    assert compare(say=lambda line: None).verdicts == judged.verdicts  # with anchors of this machine
    edit(evidence / "none" / "few-0.json", protocol="0" * 64)
    with pytest.raises(UsageError, match=r"none/few-0\.json was trained under another protocol"):
        compare()


@pytest.mark.slow
def test_a_method_is_measured_behind_t2t(tmp_path):
    small = tiny()
    settings = small | {"network": read_protocol("t2t")["network"] | {"embed_dim": 16, "depth": 1, "num_heads": 2}}
    bench = Bench(tmp_path, None, settings, say=lambda line: None)
    assert set(CellRunner(bench, "learned").run_cell("glyphs", 0, 0.01)["scores"]) == {"place", "offset", "far"}


@pytest.mark.gpu
def test_a_cell_is_trained_on_the_gpu_in_half_precision(photos_of_three_classes, tmp_path):
    settings = tiny() | {"photos": {"from": "folder", "classes": 3}, "validation": 4, "device": "cuda"}
    settings["trainings"] |= {"photos": {"images": 20, "epochs": 1}}
    settings["recipe"] |= {"batch_size": 10, "precision": "bf16"}
    settings["test"] |= {"photos": 12}
    settings["limit_cpu_seconds"] = None
    bench = Bench(tmp_path / "cells", photos_of_three_classes, settings, say=lambda line: None)
    assert 0 <= CellRunner(bench, "rope2d").run_cell("photos", 0, 0.01)["scores"]["accuracy"] <= 1
    assert check_method("learned", settings) > 0


class Planted:
    """What runs a program when it is unpickled."""

    def __reduce__(self):
        return (pytest.fail, ("a file that nobody has checked was unpickled",))


def test_only_the_published_files_of_cifar10_are_unpickled(tmp_path, monkeypatch):
    folder, rng = tmp_path / "cifar-10-batches-py", np.random.default_rng(0)
    folder.mkdir()
    with pytest.raises(UsageError, match="lacks files of CIFAR-10 or holds damaged ones"):
        photos(tmp_path, {"val": 10, "train": 40, "few": 10, "test": 10})
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        batch = {b"data": rng.integers(0, 256, (10, 3072), dtype=np.uint8), b"labels": [*range(10)]}
        names = [f"{name}-{i}.png".encode() for i in range(10)]
        (folder / name).write_bytes(pickle.dumps({**batch, b"filenames": names}))
    (folder / "data_batch_planted").write_bytes(pickle.dumps(Planted()))
    monkeypatch.setattr("torchvision.datasets.CIFAR10", lambda root: None)  # their MD5 is that of the published ones
    found = photos(tmp_path, {"val": 10, "train": 40, "few": 10, "test": 10})
    assert len(found["train"].images) == 40 and len(found["test"].images) == 10
