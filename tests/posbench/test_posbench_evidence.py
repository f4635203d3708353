"""posbench: what verify finds, what was submitted and published, and its pages."""

import json
import re
import shutil
from functools import partial

import numpy as np
import pytest
import torch
import yaml

from tests.posbench.planted import HERE, Alias, copied, cut_record, edit, tiny
from vitlab.cli.main import main
from vitlab.errors import UsageError
from vitlab.layers.pos_embed import POS_EMBEDS
from vitlab.position_bench import bench as benches
from vitlab.position_bench import costs as costs_module
from vitlab.position_bench import submission
from vitlab.position_bench.cells import Bench, published
from vitlab.position_bench.costs import check_method
from vitlab.position_bench.page import draw_scores, page_lines, write_bench_page
from vitlab.position_bench.protocol import FOLDER, read_protocol, registered_protocol
from vitlab.position_bench.running import CellRunner
from vitlab.position_bench.training import bench_network_of
from vitlab.runs.manifest import file_digest
from vitlab.tokenizers import T2TTokenizer


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


def edit_training(folder):
    edit(folder / "few-0.json", training="fewer")


def drop_rate(folder):
    next(folder.glob("tune-glyphs-*.json")).unlink()


def empty_record(folder):
    (folder / "photos-0.json").write_text('{"scores": {}}')


CHEATS = {drop_seed: "is missing", edit_score: "its predictions give", edit_predictions: "were edited",
          cut_record: "photos-0.json: is damaged", empty_record: "photos-0.json: is damaged",
          add_score: "has scores of few, sizes, not of few",
          edit_training: "few-0.json: is of fewer, seed 0",
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
    assert "trained again" in submission.retrain(bench, "none", "none")[0]


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


def test_the_list_names_the_methods_that_are_not_measured(capsys):
    assert main(["posbench", "--list"]) == 0
    out = capsys.readouterr().out
    assert "of 16 methods are measured" in out
    assert main(["posbench"]) == main(["posbench", "--lis"]) == 2  # no abbreviation


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
