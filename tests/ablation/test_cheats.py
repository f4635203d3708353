"""Cheats: each is refused, or shown, or known to leave only the head of the chain, kept elsewhere, to tell of it.

The page docs/ablation.md has a row for each; the last test holds the two together.
"""

import hashlib
import json
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest
import yaml

from tests.ablation.conftest import Lab as Toy
from vitlab.ablation.evidence import chain, protocol
from vitlab.ablation.execution import worker
from vitlab.ablation.lab import Lab
from vitlab.ablation.report import write
from vitlab.errors import UsageError
from vitlab.runs.directory import RunDir
from vitlab.runs.openings import note_opening

pytestmark = pytest.mark.slow  # whole runs of the toy
HOME = Path("runs/ablations/toy")
CHEATS: list[str] = []


def cheat(name):
    """Name the cheat that a test tries."""
    CHEATS.append(name)
    return lambda test: test


def started():
    return Lab("toy.yaml", trust_command=True)


@pytest.fixture
def toy(tmp_path, finished, monkeypatch):
    """A copy of the finished toy, to cheat in."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOY_PREDICTIONS", "1")
    for drawn in ("figures", "panels", "responses"):
        monkeypatch.setattr(write, drawn, lambda *found: {})
    return tmp_path


def cell(arm="learned", seed=0, home=HOME):
    (path,) = home.glob(f"{arm}/s{seed}-*/run.json")
    return path.parent


def change(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def better(path, more=500):
    """Turn wrong answers of a cell into right ones, in its predictions and its result alike."""
    place, results = path / "predictions/val.parquet", json.loads((path / "results.json").read_text())
    table = pd.read_parquet(place)
    wrong = table.index[table["prediction"] != table["target"]][:more]
    table.loc[wrong, "prediction"] = table.loc[wrong, "target"]
    table.to_parquet(place, index=False)
    results["val"]["acc1"] = float((table["prediction"] == table["target"]).mean())
    (path / "results.json").write_text(json.dumps(results))


def refused(words):
    """Verification names it, and nothing is exported."""
    found = started().verify()
    assert not found.is_green and words in str(found), str(found)
    with pytest.raises(UsageError, match="nothing is exported that does not verify"):
        started().export("kept")
    return found


def page():
    return (started().report().files[1]).read_text()


@cheat("a better accuracy in the results")
def test_a_result_alone(toy):
    change(cell() / "results.json", '"acc1": 0.', '"acc1": 0.9')
    refused("its predictions give")


@cheat("a better loss in the results")
def test_a_number_that_predictions_do_not_tell(toy):
    change(cell() / "results.json", '"loss": 0.', '"loss": 0.0')
    refused("not as it was recorded: metrics, result")


@cheat("better predictions and the result of these")
def test_predictions_and_result_together(toy):
    better(cell())
    refused("not as it was recorded: metrics, predictions, result")


@cheat("another table of an analysis")
def test_a_table_of_an_analysis(toy):
    change(cell() / "analysis/resolution.csv", ",0.", ",0.9")
    refused("not as it was recorded: resolution.csv")


@cheat("the folder of a bad seed is deleted")
def test_a_bad_seed_is_deleted(toy):
    name = cell().relative_to(HOME).as_posix()
    shutil.rmtree(cell())
    found = refused("1 are missing")
    assert found.missing == {name: "measured and recorded, but its folder is gone"}
    allowed = started().verify(allow_missing=True)
    assert allowed.is_green and f"{name} (measured and recorded, but its folder is gone)" in str(allowed)
    started().export("kept", allow_missing=True)
    assert name in str(Lab("kept").verify(allow_missing=True)) and not Lab("kept").verify().is_green


@cheat("a bad seed is dropped from the file")
def test_a_bad_seed_is_dropped_from_the_file(toy):
    change(toy / "toy.yaml", "seeds: 2", "seeds: [1]")
    text = page()
    assert "CHANGED since, see below" in text and "`the file: -seeds: 2`, `the file: +seeds: [1]`" in text
    assert "not in this plan: 2 with other seed" in text
    names = [cell(arm, 0).relative_to(HOME).as_posix() for arm in ("none", "learned")]
    (note,) = [note for note in started().verify().notes if note.startswith("recorded, but not in this plan: ")]
    assert set(note.partition(": ")[2].split(", ")) == {*names}
    shutil.rmtree(cell(seed=0))
    refused("measured and recorded, but its folder is gone")


@cheat("the folder of a good seed under the name of a bad one")
def test_a_seed_under_the_name_of_another(toy):
    bad, good = cell(seed=0), cell(seed=1)
    shutil.rmtree(bad)
    shutil.copytree(good, bad)
    refused("config.yaml has seed 1")
    change(bad / "config.yaml", "seed_everything: 1", "seed_everything: 0")
    refused("not as it was recorded: metrics, predictions, result")


@cheat("results and weights of two arms are exchanged")
def test_two_arms_are_exchanged(toy):
    one, other = cell("none"), cell("learned")
    for name in ("results.json", "predictions/val.parquet", "checkpoints"):
        (one / name).rename(one / "aside")
        (other / name).rename(one / name)
        (one / "aside").rename(other / name)
    assert len(refused("not as it was recorded: ").problems) == 2


@cheat("a checkpoint in place of the one that was measured")
def test_other_weights(toy):
    path = cell() / "checkpoints"
    manifest = {"last.ckpt": {"sha256": 64 * "0", "size": 1, "modified": 1}}
    (path / "last.ckpt").write_text('{"epoch": 9}')
    (path / "manifest.json").write_text(json.dumps(manifest))
    refused("measured before it went on")


@cheat("one cell on other images")
def test_other_images(toy):
    change(cell() / "data.json", "640", "480")
    refused("it was trained on other images")
    with pytest.raises(UsageError, match="trained on other images than the rest"):
        started().report()


@cheat("other labels for the images that were answered wrongly")
def test_other_targets(toy):
    path = cell() / "predictions/val.parquet"
    table = pd.read_parquet(path)
    table["target"] = table["prediction"]
    table.to_parquet(path, index=False)
    change(cell() / "results.json", '"acc1": 0.', '"acc1": 1.0, "was": 0.')
    assert "its images or their targets are not those of none/s" in str(
        refused("not as it was recorded: metrics, predictions, result")
    )


@cheat("the hard images are left out of every cell")
def test_hard_images_are_left_out(toy):
    for path in HOME.glob("*/s*/predictions/val.parquet"):
        table = pd.read_parquet(path)
        table = table[table["prediction"] == table["target"]]
        table.to_parquet(path, index=False)
        place = path.parents[1] / "results.json"
        results = json.loads(place.read_text())
        results["val"] |= {"acc1": 1.0, "n": float(len(table))}
        place.write_text(json.dumps(results))
    found = refused("images, the split has 10000")
    assert len(found.problems) == 4 and str(found).count("not as it was recorded: metrics, predictions, result") == 4


@cheat("claims are registered again when candidates of the tuning are known")
def test_registration_closes_with_the_first_candidate(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Toy(tmp_path)
    content = yaml.safe_load((tmp_path / "toy.yaml").read_text())
    tune = {"model.lr": [0.001, 0.002], "seeds": [100]}
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump({**content, "tune": tune}, sort_keys=False))
    before = started().register()
    (HOME / "tune/none-try0/s0-0123456789").mkdir(parents=True)
    (HOME / "tune/none-try0/s0-0123456789/run.json").write_text("{}")
    change(tmp_path / "toy.yaml", "learned > none", "none > learned")
    with pytest.raises(UsageError, match=r"toy was registered at .* and has changed since"):
        started().register()
    shutil.rmtree(HOME / "tune")
    chain.append(HOME / "tune", "opened", cell="none/s0-0123456789", split="val")  # as the worker of a candidate does
    with pytest.raises(UsageError, match=r"toy was registered at .* and has changed since"):
        started().register()
    (HOME / "registered.json").unlink()
    assert before["digest"] != started().register()["digest"]
    assert "AFTER 1 candidates of the tuning were tried" in protocol.sentences(started().ablation)[0]


@cheat("the registration is deleted")
def test_the_registration_is_deleted(toy):
    (HOME / "registered.json").unlink()
    shutil.rmtree(HOME / "history")
    refused("registered.json is not the registration that was recorded")
    change(toy / "toy.yaml", "learned > none", "none > learned")
    started().register()
    assert "4 cells were done" in page()


@cheat("a cell is trained again until it is good")
def test_again_until_it_is_good(toy):
    name = cell().relative_to(HOME).as_posix()
    better(cell())
    (cell() / "done.json").unlink()
    started().run()
    assert f"{name}: measured 2 times, with 2 different results" in str(started().verify())
    readings = len((HOME / "readings.jsonl").read_text().splitlines())
    (cell() / "results.json").unlink()
    started().run()
    assert len((HOME / "readings.jsonl").read_text().splitlines()) == readings + 1


@cheat("the test split is opened by `vitlab test`")
def test_the_test_split_is_opened_beside_the_laboratory(toy, monkeypatch):
    change(toy / "toy.yaml", "name: toy", "name: toy\nevaluate: test")
    monkeypatch.delenv("TOY_PREDICTIONS")
    assert not started().run().failed
    assert "the test split was opened 4 times on these cells" in page()
    for _ in range(5):  # what `vitlab test` does first
        note_opening(cell(), "test", "last.ckpt", {})
    assert "the test split was opened 8 times on these cells" in page()


@cheat("the code changes between two cells")
def test_other_code(toy, monkeypatch):
    for module in ("resolve", "probe", "status"):
        monkeypatch.setattr(f"vitlab.ablation.execution.{module}.code_digest", lambda own: "0123456789")
    assert "4 with other code" in str(started().status())
    with pytest.raises(UsageError, match=r"4 cells of toy were finished with other code"):
        started().report()


@pytest.mark.rare
@cheat("a file of the base is edited while a cell is trained, and restored")
def test_other_settings_for_a_while(toy, monkeypatch):
    base, run, kept = toy / "base.yaml", worker._run, (toy / "base.yaml").read_text()
    change(toy / "toy.yaml", "seeds: 2", "seeds: 3")

    def edited(*words):
        change(base, "lr: 0.001", "lr: 0.5")
        found = run(*words)
        base.write_text(kept)
        return found

    monkeypatch.setattr(worker, "_run", edited)
    assert len(started().run(workers=1).failed) == 2
    assert "other config: the settings have changed since the plan: model.lr 0.5, not 0.001" in str(started().status())
    monkeypatch.setattr(worker, "_run", run)
    monkeypatch.setattr(worker, "code_digest", lambda own: "0123456789")
    assert started().run().failed
    assert "other code: the code has changed since the plan" in str(started().status())
    monkeypatch.undo()
    monkeypatch.chdir(toy)
    monkeypatch.setenv("TOY_PREDICTIONS", "1")
    assert not started().run().failed and started().verify().is_green
    change(cell() / "config.yaml", "lr: 0.001", "lr: 0.5")
    refused("it was trained with other settings than planned: model.lr 0.5, not 0.001")


@pytest.mark.rare
@cheat("cells of two versions of a library are paired")
def test_other_versions(toy, monkeypatch):
    change(toy / "toy.yaml", "seeds: 2", "seeds: 3")
    for module in ("probe", "status"):
        monkeypatch.setattr(f"vitlab.ablation.execution.{module}.versions_in_use", lambda: "torch 1")
    assert "4 with other environment" in str(started().status())
    assert not started().run(only=["pos_embed=none"]).failed  # three cells of one arm, with the other version
    monkeypatch.undo()


@cheat("a cell that another version of a library trained, under the name of one of this version")
def test_a_cell_of_another_version(toy):
    change(cell() / "run.json", '"torch": "0"', '"torch": "1"')
    assert "trained with torch 1, the rest with torch 0" in str(refused("not as it was recorded: environment"))
    assert (
        "**MIXED ENVIRONMENTS**: the arms of seed 0 were trained with different versions (torch 0 / torch 1)" in page()
    )


@cheat("a record is removed from the chain")
def test_a_record_is_removed(toy):
    lines = (HOME / "chain.jsonl").read_text().splitlines()
    (HOME / "chain.jsonl").write_text("\n".join([*lines[:4], *lines[5:]]) + "\n")
    refused("does not follow the line before it")
    assert "BROKEN" in page()
    (HOME / "chain.jsonl").unlink()
    refused("chain.jsonl is gone")


@cheat("a file is added to evidence")
def test_a_file_is_added_to_evidence(toy):
    started().export("kept")
    Lab("kept").report()  # its own report may lie there
    shutil.copytree(cell(home=Path("kept")), Path("kept/learned/s2-0123456789"))
    with pytest.raises(
        UsageError, match=r"these files were added since the export: learned/s2-0123456789/.*remove them"
    ):
        Lab("kept")


def rewrite_sums(folder):
    names = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != "SHA256SUMS"]
    lines = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.relative_to(folder).as_posix()}\n" for p in names]
    (folder / "SHA256SUMS").write_text("".join(lines))


@cheat("evidence is edited and its checksums are written again")
def test_checksums_are_written_again(toy):
    started().export("kept")
    better(cell(home=Path("kept")))
    rewrite_sums(Path("kept"))
    assert "not as it was recorded: metrics, predictions, result" in str(Lab("kept").verify())


@cheat("everything is forged: predictions, results, chain and checksums")
def test_only_a_head_kept_elsewhere_reveals_a_rewritten_chain(toy):
    started().export("kept")
    head, records = Lab("kept").verify().head, chain.read_chain(Path("kept")).records
    forged = cell(home=Path("kept"))
    better(forged)
    (Path("kept") / "chain.jsonl").unlink()
    for record in records:
        facts = {k: v for k, v in record.items() if k not in ("kind", "time", "previous")}
        if record["kind"] == "cell" and record["cell"] == forged.relative_to("kept").as_posix():
            facts["hashes"] = chain.hashes_of(RunDir(forged), "val")
        chain.append(Path("kept"), record["kind"], **facts)
    rewrite_sums(Path("kept"))
    found = Lab("kept").verify()
    assert found.is_green and found.head != head  # documented: nothing in the folder can tell


@pytest.mark.rare
def test_kept_weights_and_retraining_reveal_forged_predictions(toy):
    found = started().verify(deep=True)
    assert found.is_green and "weights of 4 of 4 cells evaluated again" in str(found)
    forged = cell()
    better(forged)
    name = forged.relative_to(HOME).as_posix()
    chain.append(HOME, "cell", cell=name, hashes=chain.hashes_of(RunDir(forged), "val"))
    assert started().verify().is_green
    assert "its weights, evaluated again: other predictions" in str(started().verify(deep=True))


def test_the_page_has_a_row_for_each_cheat():
    text = (Path(__file__).parents[2] / "docs/ablation.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| (refused|shown|only an outside hash tells)", text, re.MULTILINE)
    assert [name.strip() for name, _ in rows] == CHEATS and len(CHEATS) >= 13
