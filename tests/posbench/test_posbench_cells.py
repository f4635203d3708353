"""posbench: how a cell is trained, kept and gone on with."""

import errno
import importlib
import json
import shutil
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from cluster.daemons import wait_for
from tests.posbench.planted import HERE, copied, cut_record, edit, tiny
from vitlab.cli.main import main
from vitlab.errors import UsageError
from vitlab.position_bench import bench as benches
from vitlab.position_bench import submission
from vitlab.position_bench import training as training_module
from vitlab.position_bench.answers import NotFinite
from vitlab.position_bench.cells import Bench
from vitlab.position_bench.costs import check_method
from vitlab.position_bench.judging import judge
from vitlab.position_bench.pictures import QUESTIONS, glyphs
from vitlab.position_bench.protocol import TASKS, chance_of_tasks, read_protocol
from vitlab.position_bench.running import CellRunner
from vitlab.position_bench.training import batches_of, bench_network_of, loss_of, train_network
from vitlab.runs.lock import take


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
    monkeypatch.setattr(benches, "note_look", lambda *words: 1)
    judged = benches.compare_with(bench, "none", small)._replace(lost=lost)
    assert set(judged.scores) == {task for task, (_, training) in TASKS.items() if training != "glyphs"}
    assert f"note: glyphs-0 has no score, and without every seed its tasks have none: {lost['glyphs-0']}" in str(judged)
    assert "  place     no score  " in str(judged)
    monkeypatch.setattr(benches, "posbench", lambda *words, **more: judged)
    assert main(["posbench", "learned"]) == 1 and "no score" in capsys.readouterr().out
    with pytest.raises(NotFinite, match="is nan at step 3"):
        CellRunner(bench, "none").run_cell("glyphs", 0, 0.01)


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


def test_the_cells_of_another_method_are_not_taken_for_those_of_this_one(tmp_path):
    bench = Bench(tmp_path, protocol=tiny())
    method = {"class_path": "rope2d", "init_args": {"theta": 10}}
    bench.write("mine", "card", {"method": ["rope2d", {"theta": 10}]})
    bench.check_kept("mine", method)
    with pytest.raises(UsageError, match=r'holds the cells of rope2d {"theta": 10}, not of rope2d: give another'):
        bench.check_kept("mine", "rope2d")


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


def test_the_loss_of_several_questions_is_the_sum_of_their_cross_entropies():
    """In the mean over the images: four times as steep as the mean over the questions."""
    outputs = torch.randn(5, sum(QUESTIONS.values()))
    labels = torch.stack([torch.randint(k, (5,)) for k in QUESTIONS.values()], dim=1)
    wanted, start = 0.0, 0
    for question, k in enumerate(QUESTIONS.values()):
        shares = outputs[:, start : start + k].softmax(dim=1)
        wanted -= sum(shares[i, labels[i, question]].log() for i in range(5)) / 5
        start += k
    assert loss_of(outputs, labels).item() == pytest.approx(float(wanted), rel=1e-5)
    assert loss_of(outputs, labels[:, 0]).item() == pytest.approx(
        -float(outputs.log_softmax(dim=1)[range(5), labels[:, 0]].mean()), rel=1e-5
    )
