"""What commands say of numbers that are not, or not any more, those of the run's checkpoint."""

import json
import re
import shutil
from pathlib import Path

import pytest

import vitlab
from vitlab.cli.main import main
from vitlab.runs.directory import RunDir

CONFIG = str(Path(__file__).parents[2] / "configs" / "t2t.yaml")
SMALL = ["--model.depth=1", "--model.embed_dim=24", "--data.subset=0.3", "--trainer.logger=false", "--quiet"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of one epoch, `first`, that was tested and analyzed; for all to copy."""
    place = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert main(["fit", "--config", CONFIG, "--name", "first", "--trainer.max_epochs=1", *SMALL]) == 0
        shutil.copytree("runs/first", "runs/untested")
        assert main(["test", "first", "--quiet"]) == 0
        assert main(["analyze", "confusion", "first", "--quiet"]) == 0
    return place


@pytest.fixture
def place(trained, tmp_path, monkeypatch, capsys):
    shutil.copytree(trained / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    return tmp_path


def page_of(*names):
    assert main(["look", *names, "-o", "page.html", "--overwrite", "--pictures=0", "--quiet"]) == 0
    return Path("page.html").read_text()


@pytest.mark.rare
def test_after_a_resume_results_and_look_leave_out_the_old_number_until_a_new_test(place, capsys):
    assert re.search(r'big">[\d.]+ %</div>\s*accuracy on 359 images of test', page_of("first"))
    old = vitlab.Run("first").results["test"]["acc1"]
    assert main(["fit", "--resume", "first", "--trainer.max_epochs=2", "--quiet"]) == 0
    capsys.readouterr()
    why = "its test result was measured before it went on; run `vitlab test runs/first`"
    assert main(["results", "first"]) == 2
    assert capsys.readouterr().err == f"vitlab: runs/first: {why}\n"
    assert main(["results"]) == 2
    assert (
        "no run in runs/ has an accuracy on its test split; the test result of runs/first was"
        in capsys.readouterr().err
    )
    page = page_of("first")
    assert "The result on test was measured before it went on; run <code>vitlab test runs/first</code>." in page
    assert "images of test" not in page and "accuracy on 288 validation images, of best.ckpt, saved in epoch 2" in page
    assert "Left out: measured before it went on; run <code>vitlab analyze confusion runs/first</code>" in page
    found = vitlab.Run("first").results
    assert "test" not in found and found["stale"][0]["acc1"] == old and found["val"]["epoch"] == 1
    card = vitlab.Run("first").export("safetensors", "first.safetensors")
    assert set(json.loads(Path(f"{card}.json").read_text())["measured"]) == {"val"}
    assert main(["test", "untested", "--quiet"]) == main(["results"]) == 0  # the others are still tabulated
    told = capsys.readouterr()
    assert told.err == f"left out runs/first: {why}\n" and told.out.count("\n") == 3
    assert main(["test", "first", "--quiet"]) == main(["results", "first"]) == 0
    new = vitlab.Run("first").results["test"]["acc1"]
    assert new != old and f"| 2 | 1 | {100 * new:.1f} % of 359 |" in capsys.readouterr().out
    assert set(json.loads(Path(f"{vitlab.Run('first').export('pt2', 'first.pt2')}.json").read_text())["measured"]) == {
        "val", "test"
    }  # fmt: skip


def test_before_a_test_the_page_heads_with_the_validation_result_and_names_it(place):
    acc1 = vitlab.Run("untested").results["val"]["acc1"]
    page = page_of("untested")
    assert f'big">{100 * acc1:.2f} %</div>\naccuracy on 288 validation images, of best.ckpt, saved in epoch 1' in page
    assert "<code>vitlab test runs/untested</code> measures others" in page


def test_a_result_of_another_checkpoint_is_marked_wherever_it_is_shown(place, capsys):
    assert main(["fit", "--resume", "first", "--trainer.max_epochs=2", "--quiet"]) == 0
    assert main(["test", "runs/first/checkpoints/previous.ckpt", "--quiet"]) == main(["results", "first"]) == 0
    told = capsys.readouterr()
    assert re.search(r"\| [\d.]+ % of 359, with previous.ckpt \|", told.out)
    assert told.err == "note     runs/first: measured with previous.ckpt; `vitlab test runs/first` measures best.ckpt\n"
    assert re.search("accuracy on 359 images of test, .*, of previous.ckpt, saved in epoch 1", page_of("first"))


def test_an_unfinished_run_states_how_far_it_came(place, capsys):
    run = RunDir("runs/first")
    run.config.write_text(run.config.read_text().replace("max_epochs: 1", "max_epochs: 30"))
    run.update("run.json", status="preempted")
    assert main(["results", "first"]) == 0
    assert "| 1 of 30 | 1 |" in capsys.readouterr().out


def test_a_result_of_an_older_vitlab_is_shown_and_marked_as_such(place, capsys):
    run = RunDir("runs/first")
    run.update("results.json", test={k: v for k, v in run.stored["test"].items() if k != "sha256"})
    assert main(["results", "first"]) == 0
    assert "note     runs/first: measured without noting the checkpoint's checksum" in capsys.readouterr().err


def test_a_variation_is_named_as_such_on_the_terminal(place, capsys):
    before = vitlab.Run("first").results["test"]
    assert main(["test", "first", "--model.pos_embed=none", "--data.batch_size=7"]) == 0
    out = capsys.readouterr().out
    assert "\nvariation with model.pos_embed=none data.batch_size=7: test/loss" in f"\n{out}"
    assert vitlab.Run("first").results["test"] == before
    assert main(["test", "first"]) == 0
    assert "variation" not in capsys.readouterr().out


def test_what_changes_no_number_makes_no_variation(place, capsys):
    (Path("runs/first") / "results.json").write_text("{}")
    assert main(["test", "first", "--data.num_workers=0", "--trainer.devices=1", "--trainer.accelerator=cpu"]) == 0
    assert "variation" not in capsys.readouterr().out
    assert main(["results", "first"]) == 0


def test_a_checkpoint_that_is_replaced_while_it_is_measured_gives_no_number(place, capsys, monkeypatch):
    from vitlab.jobs import evaluate

    before, run = RunDir("runs/first").stored, evaluate._run

    def replaced(*given):
        run(*given)
        Path("runs/first/checkpoints/best.ckpt").unlink()
        Path("runs/first/checkpoints/best.ckpt").write_bytes(b"of the next epoch")

    monkeypatch.setattr(evaluate, "_run", replaced)
    assert main(["test", "first", "--quiet"]) == 2
    assert "best.ckpt was replaced while it was measured, as its training goes on" in capsys.readouterr().err
    assert RunDir("runs/first").stored == before


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--trainer.check_val_every_n_epoch=4"],
         "never validated (trainer.check_val_every_n_epoch=4, and 1 epoch was trained); the last epoch is kept"),
        (["--trainer.limit_val_batches=0"], "never validated; the last epoch is kept"),
    ],
)  # fmt: skip
def test_a_run_that_never_validates_says_so(tmp_path, monkeypatch, capsys, words, line):
    monkeypatch.chdir(tmp_path)
    small = [word for word in SMALL if word != "--quiet"]
    assert main(["fit", "--config", CONFIG, "--name", "a", "--trainer.max_epochs=1", *small, *words]) == 0
    out = capsys.readouterr().out
    assert out.count(line) == 1 and "best epoch" not in out


def test_a_run_of_which_only_the_weights_are_left_is_tested_to_the_same_number(place, capsys):
    """Before, `vitlab test` called its whole safetensors file truncated."""
    old = vitlab.Run("first").results["test"]
    for path in Path("runs/first/checkpoints").glob("*.ckpt"):
        path.unlink()
    assert main(["test", "first", "--quiet"]) == 0
    new = vitlab.Run("first").results["test"]
    assert new["checkpoint"] == "best.safetensors" and new["sha256"] == old["sha256"]
    assert {k: new[k] for k in ("acc1", "loss", "n")} == {k: old[k] for k in ("acc1", "loss", "n")}
