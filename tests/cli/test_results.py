import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from vitlab.cli.main import main
from vitlab.jobs.listing import about
from vitlab.jobs.results import markdown, record, rows_in_full
from vitlab.runs.directory import RunDir

IMAGES = {"class_names": ["0", "1"], "mean": [0.5], "std": [0.25]}


def make_run(path: Path, seed: int, acc1: float | None, **overrides: Any) -> str:
    run = RunDir(path)
    path.mkdir(parents=True)
    network = {"tokenizer": "t2t", "pos_embed": "rope2d"}
    run.config.write_text(yaml.safe_dump({"model": {"init_args": network}, "trainer": {"max_epochs": 7}}))
    chosen = {"seed_everything": seed, "trainer.logger": False, **overrides}
    (path / "overrides.yaml").write_text(yaml.safe_dump(chosen))
    argv = ["vitlab", "fit", "--config", "configs/t2t.yaml", f"--seed_everything={seed}"]
    place = {"commit": "0123456789", "dirty": False, "devices": ["a CPU"], "world_size": 2}
    run.write("run.json", {"argv": argv, "seed": seed, **place})
    run.write("model.json", {"parameters": 1_234_567, "macs": 98_765_432})
    run.write("data.json", {**IMAGES, "data": "Digits", "splits": {"train": {"n": 1200}}})
    run.write("results.json", {"val": {"acc1": 0.1}} | ({"test": {"acc1": acc1, "n": 360.0}} if acc1 else {}))
    return str(path)


def test_seeds_of_one_command_share_a_line_with_their_interval(tmp_path, capsys) -> None:
    runs = [make_run(tmp_path / f"a{i}", i, acc1) for i, acc1 in enumerate((0.90, 0.91, 0.92))]
    runs.append(make_run(tmp_path / "b", 0, 0.5, **{"model.depth": 3}))
    assert main(["results", *runs]) == 0
    first, second = capsys.readouterr().out.splitlines()[2:]
    assert (
        "| `vitlab fit --config configs/t2t.yaml` | t2t | rope2d | 1.23 M | 98.8 M | Digits, 1,200 images | 7 |"
        in first
    )
    assert "| 3 | 91.0 % [88.5, 93.5] of 360 | - | 2 x a CPU, commit 0123456 |" in first  # 1 * 4.303 / sqrt(3) = 2.48
    assert "`vitlab fit --config configs/t2t.yaml --model.depth=3`" in second
    assert "| 1 | 50.0 % of 360 |" in second  # nothing follows from one seed


def test_a_run_that_ended_early_says_how_many_epochs_and_steps_it_trained(tmp_path, capsys) -> None:
    runs = [make_run(tmp_path / f"a{i}", i, 0.9) for i in range(3)]
    for path, epoch in zip(runs[:2], (1, 4), strict=True):
        run = RunDir(Path(path))
        run.update("run.json", status="done", steps=63, ending={"why": "early stop", "text": f"epoch {epoch + 1}"})
        run.checkpoints.mkdir()
        last = {"epoch": epoch, "step": 9 * (epoch + 1)}
        (run.checkpoints / "manifest.json").write_text(json.dumps({"last.ckpt": last}))
    assert main(["results", runs[0]]) == 0
    assert "| Digits, 1,200 images | 2 of 7 | 1 |" in capsys.readouterr().out
    assert main(["results", *runs]) == 0
    assert "| Digits, 1,200 images | 2 to 7 of 7 | 3 |" in capsys.readouterr().out
    (row,) = rows_in_full([record(RunDir(Path(path))) for path in runs])
    assert (row["epochs"], row["trained"], row["trained_by_seed"]) == (7, None, {"0": 2, "1": 5, "2": 7})
    run = RunDir(Path(runs[1]))
    (run.checkpoints / "manifest.json").write_text(json.dumps({"last.ckpt": {"epoch": 4, "step": 40}}))
    assert main(["results", *runs[:2]]) == 0
    assert "| Digits, 1,200 images | 2 to 4.4 of 7 | 2 |" in capsys.readouterr().out  # 40 steps of 9 an epoch
    (row,) = rows_in_full([record(run)])
    assert (row["trained"], "trained_by_seed" in row) == (4.4, False)
    for limit, planned in ((7, 7), (-1, None)):
        run.config.write_text(yaml.safe_dump({"model": {}, "trainer": {"max_epochs": limit, "max_steps": 40}}))
        run.update("run.json", steps=40, ending={"why": "steps", "text": "trainer.max_steps=40"})
        assert main(["results", runs[1]]) == main(["results", runs[1], "--json"]) == 0
        table, _, rows = capsys.readouterr().out.partition("[")
        assert "| Digits, 1,200 images | 40 steps | 1 |" in table
        assert {"epochs": planned, "steps": 40}.items() <= json.loads(f"[{rows}")[0].items()
    shown = about(RunDir(Path(runs[0])))["run"]
    assert (shown["steps"], shown["planned_steps"]) == (18, 63)


def test_an_interval_of_two_seeds_ends_where_an_accuracy_ends(tmp_path, capsys) -> None:
    runs = [make_run(tmp_path / f"a{i}", i, acc1) for i, acc1 in enumerate((0.96, 0.98))]
    assert main(["results", *runs]) == 0
    assert "| 2 | 97.0 % [84.3, 100.0] of 360 |" in capsys.readouterr().out  # 1 * 12.706 = 12.7 points
    tied = [make_run(tmp_path / f"b{i}", i, 0.98) for i in range(2)]
    assert main(["results", *tied]) == 0
    assert "| 2 | 98.0 % of 360 |" in capsys.readouterr().out


def test_an_accuracy_that_a_module_logs_in_percent_is_shown_as_it_is(tmp_path, capsys) -> None:
    """It was multiplied by 100: 9320.0 %, in an interval that ended at 100."""
    runs = [make_run(tmp_path / f"a{i}", i, acc1) for i, acc1 in enumerate((92.8, 93.2, 94.1))]
    assert main(["results", *runs]) == 0
    assert "| 3 | 93.4 % [91.7, 95.0] of 360 |" in capsys.readouterr().out


def test_runs_without_a_seed_do_not_replace_each_other_or_seed_0(tmp_path, capsys) -> None:
    values = [(0, 0.90), (False, 0.91), (False, 0.92), (False, 0.92), (0, 0.93)]
    runs = [make_run(tmp_path / f"a{i}", seed, acc1) for i, (seed, acc1) in enumerate(values)]
    assert main(["results", *runs]) == 0
    assert "| 4 | 92.0 % " in capsys.readouterr().out  # the later run of seed 0, and three


def test_runs_from_other_weights_or_on_other_images_have_rows_of_their_own(tmp_path, capsys) -> None:
    """None replaces another of its seed, and none is averaged with another."""
    runs = [RunDir(make_run(tmp_path / name, 0, 0.9)) for name in "abcd"]
    runs[1].update("run.json", init_from="runs/my run", resize="bicubic")
    for run, split_hash in zip(runs[2:], ("3da18cfb7732008e", "a2808f0fb1874a8a"), strict=True):
        splits = {"train": {"n": 1200, "hash": "0123456789abcdef"}, "val": {"n": 300, "hash": split_hash}}
        run.write("data.json", {**IMAGES, "data": "Digits", "splits": splits})
    assert main(["results", *(str(run.path) for run in runs)]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert ["--config configs/t2t.yaml --init_from 'runs/my run' --resize bicubic`" in row for row in rows] == [
        False, True, False, False]  # fmt: skip
    assert "Digits 01234567 3da18cfb, 1,200 images" in rows[2] and "Digits 01234567 a2808f0f, 1,200" in rows[3]
    assert all("| 1 | 90.0 % of 360 |" in row for row in rows)


def test_seeds_of_a_config_that_was_edited_in_between_are_not_averaged(tmp_path, capsys) -> None:
    runs = [RunDir(make_run(tmp_path / f"a{i}", i, acc1)) for i, acc1 in enumerate((0.9, 0.8, 0.7))]
    for run, recipe in zip(runs, ("t2t-b0a9", "t2t-8883", "config-8883"), strict=True):
        run.update("run.json", recipe=recipe)
    assert main(["results", *(str(run.path) for run in runs)]) == 0
    first, second = capsys.readouterr().out.splitlines()[2:]
    assert "`vitlab fit --config configs/t2t.yaml`, recipe b0a9 |" in first and "| 1 | 90.0 % of 360 |" in first
    assert "`vitlab fit --config configs/t2t.yaml`, recipe 8883 |" in second and "| 2 | 75.0 % " in second


def test_a_custom_network_has_a_row_too(tmp_path, capsys) -> None:
    path = Path(make_run(tmp_path / "a", 0, 0.9))
    (path / "config.yaml").write_text("{model: {class_path: mypkg.Net}, trainer: {max_epochs: 7}}")
    RunDir(path).write("model.json", {"parameters": 1_234_567})
    assert main(["results", str(path)]) == 0
    assert "| - | - | 1.23 M | - | Digits, 1,200 images | 7 | 1 | 90.0 % of 360 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "published"),
    [
        ("vitlab fit --config configs/imagenet/t2t_vit_14.yaml", "81.5 %, "),
        ("vitlab fit --config configs/imagenet/t2t_vit_14.yaml --model.pos_embed=none", "- |"),
        ("vitlab fit --config configs/t2t.yaml", "- |"),
    ],
)
def test_an_unchanged_recipe_is_shown_beside_the_published_accuracy(tmp_path, command, published) -> None:
    one = record(RunDir(make_run(tmp_path / "a", 0, 0.8))) | {"command": command}
    assert f" of 360 | {published}" in markdown([one])


@pytest.mark.parametrize("known", [{}, {"tokenizer": "-", "pos_embed": "-"}])  # as records once were kept
def test_what_a_run_does_not_have_is_nothing_for_programs_and_a_dash_for_readers(tmp_path, known) -> None:
    run = RunDir(make_run(tmp_path / "a", 0, 0.9))
    run.config.write_text("{model: {class_path: my.Net}, trainer: {max_epochs: 7}}")
    one = record(run) | known
    assert [rows_in_full([one])[0][name] for name in ("tokenizer", "pos_embed", "published")] == [None] * 3
    assert "| - | - | 1.23 M |" in markdown([one]) and " of 360 | - | 2 x" in markdown([one])


def test_stored_records_give_the_same_table_and_are_stored_once(tmp_path, capsys) -> None:
    runs = [make_run(tmp_path / f"a{i}", i, acc1) for i, acc1 in enumerate((0.90, 0.91))]
    kept, page = str(tmp_path / "kept.jsonl"), tmp_path / "page.md"
    assert main(["results", runs[0], "--keep", kept]) == 0
    assert main(["results", *runs, "--keep", kept]) == 0
    assert len(Path(kept).read_text().splitlines()) == 2
    assert json.loads(Path(kept).read_text().splitlines()[1])["seed"] == 1
    capsys.readouterr()
    assert main(["results", *runs]) == 0
    table = capsys.readouterr().out
    page.write_text("before\n<!-- results -->\nold\n<!-- /results -->\nafter\n")
    assert main(["results", kept, "--into", str(page)]) == 0
    assert page.read_text() == f"before\n<!-- results -->\n{table}<!-- /results -->\nafter\n"


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: make_run(path / "a", 0, None), "no accuracy on its test split; run `vitlab test"),
        (lambda path: (path / "a.jsonl").write_text("{") and str(path / "a.jsonl"), "cannot be read as records"),
        (lambda path: (path / "a.jsonl").write_text('{"step": 3}') and None, "a line has no `command`"),
        (lambda path: (path / "a.jsonl").write_text("[3]") and None, "a line has no `command`"),
        (lambda path: str(path / "absent"), "no run or checkpoint called"),
        (
            lambda path: str(path / "absent.jsonl"),
            "absent.jsonl, and no run of this name; `vitlab results RUN --keep /",
        ),
    ],
)
def test_a_run_without_a_result_is_refused_in_one_line(tmp_path, capsys, write, message) -> None:
    source = write(tmp_path)
    source = source if isinstance(source, str) else str(tmp_path / "a.jsonl")
    assert main(["results", source]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_run_that_was_tested_for_something_else_is_not_sent_to_the_test_again(here, capsys) -> None:
    run = RunDir(make_run(Path("runs/a"), 0, 0.9))
    for result, names in (({"loss": 0.3, "mae": 1.5, "n": 8.0}, "loss, mae"), ({"checkpoint": "best.ckpt"}, "nothing")):
        run.update("results.json", test=result)
        for words in (["results"], ["results", "a"]):
            assert main(words) == 2
            error = capsys.readouterr().err
            assert f": its test measured {names}, see `vitlab runs show runs/a`" in error and "vitlab test" not in error
    make_run(Path("runs/b"), 0, 0.9)
    assert main(["results"]) == 0
    left_out = "left out runs/a: its test measured nothing, see `vitlab runs show runs/a`\n"
    assert capsys.readouterr().err.startswith(left_out)


def test_records_are_kept_in_a_file_that_can_be_read_again(tmp_path, capsys) -> None:
    assert main(["results", make_run(tmp_path / "a", 0, 0.9), "--keep", str(tmp_path / "a.json")]) == 2
    assert "`--keep` must end with .jsonl" in capsys.readouterr().err and not (tmp_path / "a.json").exists()


def test_a_run_may_have_the_name_of_another_kind_of_file(here, capsys) -> None:
    for name in ("a.jsonl", "a.onnx"):
        make_run(Path("runs") / name, 0, 0.9)
    assert main(["results", "a.jsonl"]) == 0
    assert "90.0 % of 360" in capsys.readouterr().out
    assert main(["predict", "a.onnx", "a.png"]) == 2
    assert "runs/a.onnx has no checkpoint" in capsys.readouterr().err


def test_a_page_without_marks_for_the_table_stays_unchanged(tmp_path, capsys) -> None:
    (tmp_path / "page.md").write_text("text")
    assert main(["results", make_run(tmp_path / "a", 0, 0.9), "--into", str(tmp_path / "page.md")]) == 2
    assert "must contain the lines <!-- results -->" in capsys.readouterr().err
    assert (tmp_path / "page.md").read_text() == "text"


def test_the_page_of_results_has_the_table_of_the_kept_records_and_the_readme_its_first_row() -> None:
    root = Path(__file__).parents[2]
    records = [json.loads(line) for line in (root / "benchmarks/results.jsonl").read_text().splitlines()]
    between = (root / "docs/results.md").read_text().split("<!-- results -->\n")[1].split("<!-- /results -->")[0]
    assert between == markdown(records) + "\n"
    first = [cell.strip() for cell in between.splitlines()[2].split("|")]
    row = f"| {first[4]} | {first[8]} | {first[9].removesuffix(' of 359')} |"
    assert first[1] == "`vitlab fit --config configs/t2t.yaml`" and row in (root / "README.md").read_text()


def test_a_resumed_run_shows_its_first_command_and_what_the_resume_changed(here, capsys) -> None:
    config = str(Path(__file__).parents[2] / "configs" / "vit.yaml")
    small = ["--model.depth=1", "--trainer.limit_train_batches=2", "--trainer.logger=false", "--quiet"]
    assert main(["fit", "--config", config, "--name", "a", "--trainer.max_epochs=1", *small]) == 0
    assert main(["fit", "--resume", "a", "--quiet"]) == 0  # as after a signal: nothing is changed
    assert main(["fit", "--resume", "a", "--trainer.max_epochs=2", "--quiet"]) == 0
    assert main(["test", "a"]) == 0
    capsys.readouterr()
    assert main(["results"]) == 0  # of all runs in runs/
    command = capsys.readouterr().out.splitlines()[2].split("|")[1]
    first = "vitlab fit --config configs/vit.yaml --trainer.max_epochs=1 --model.depth=1"
    assert command.strip() == f"`{first} --trainer.limit_train_batches=2`, resumed with `--trainer.max_epochs=2`"


def test_an_unknown_option_is_refused_with_those_that_exist(capsys) -> None:
    assert main(["results", "--yaml"]) == 2
    assert "unrecognized arguments: --yaml; there is --keep, --into, --json, --csv; see" in capsys.readouterr().err
    assert main(["results", "--kep=a.jsonl"]) == 2
    assert 'unrecognized arguments: --kep=a.jsonl; did you mean "--keep"?' in capsys.readouterr().err


def test_results_without_a_tested_run_say_what_to_do(here, capsys) -> None:
    assert main(["results"]) == 2
    assert "run `vitlab test RUN` first" in capsys.readouterr().err
