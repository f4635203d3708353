import json
import re
import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from vitlab.cli.main import main
from vitlab.config.options import FitOptions
from vitlab.errors import UsageError
from vitlab.jobs.find_subject import has_no_run
from vitlab.jobs.restore import run_of_checkpoint
from vitlab.jobs.train.build import check_job
from vitlab.jobs.train.choose import choose_run, initial_weights, run_to_continue
from vitlab.jobs.train.initial import load_first_weights
from vitlab.run import Run
from vitlab.runs import atomic
from vitlab.runs.atomic import alone_in, atomic_write, write_text
from vitlab.runs.before import Before
from vitlab.runs.directory import RunDir
from vitlab.runs.find import find_directory, find_run


def test_a_file_keeps_its_content_until_the_next_one_is_whole(tmp_path):
    path = tmp_path / "new" / "a.csv"
    write_text(path, "first", sync=True)
    with pytest.raises(OSError), atomic_write(path) as beside:
        assert beside.parent == path.parent and beside.suffix == ".csv"
        beside.write_text("half")
        raise OSError
    assert path.read_text() == "first" and list(path.parent.iterdir()) == [path]


def test_what_several_write_into_one_file_at_once_is_all_kept(tmp_path):
    def write(name):
        for i in range(10):
            RunDir(tmp_path).update("notes.json", **{f"{name}{i}": i})

    with ThreadPoolExecutor() as pool:
        assert all(done is None for done in pool.map(write, "abc"))
    assert len(RunDir(tmp_path).read("notes.json")) == 30


def test_who_was_stopped_in_the_middle_of_a_write_holds_nobody_up_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic, "PATIENCE", 0.05)
    with alone_in(tmp_path):
        RunDir(tmp_path).update("notes.json", done=True)
    assert RunDir(tmp_path).read("notes.json") == {"done": True}


def test_a_run_without_checkpoints_is_used_through_its_weights(tmp_path):
    run = RunDir(tmp_path)
    with pytest.raises(UsageError, match="has no checkpoint: it was stopped before its first epoch ended"):
        run.checkpoint()
    run.weights.mkdir()
    for name in ("last", "best"):
        (run.weights / f"{name}.safetensors").write_bytes(b"")
        assert run.checkpoint().name == f"{name}.safetensors"


@pytest.mark.parametrize(
    ("config", "status", "told"),
    [
        ("trainer: {enable_checkpointing: false}", "done", "trained with `trainer.enable_checkpointing=false`"),
        ("trainer: {max_epochs: 1}", "done", "no checkpoint any more: the run is done"),
        ("trainer: null", "preempted", "no checkpoint: it was stopped before its first epoch ended"),
    ],
)
def test_a_run_without_checkpoints_says_why(tmp_path, config, status, told):
    run = RunDir(tmp_path)
    run.config.write_text(config)
    run.write("run.json", {"status": status})
    with pytest.raises(UsageError, match=told):
        run.checkpoint()


def test_a_run_is_found_in_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    run = RunDir(tmp_path / "x")
    run.checkpoints.mkdir(parents=True)
    run.config.touch()
    (run.weights).mkdir()
    (run.weights / "last.safetensors").touch()
    assert choose_run(FitOptions(run_dir="~/y"), [], 0, "").path == tmp_path / "y"
    assert find_directory("~/x").path == find_run("~/x")[0].path == run.path
    assert Run("~/x/weights/last.safetensors").checkpoint == run.weights / "last.safetensors"


def test_a_run_is_found_by_a_checkpoint_from_within(tmp_path, monkeypatch):
    run = RunDir(tmp_path / "runs" / "a")
    (run.checkpoints / "old").mkdir(parents=True)
    run.config.touch()
    (run.checkpoints / "a.safetensors").touch()
    for place, file in ((run.checkpoints, "a.safetensors"), (run.checkpoints / "old", "../a.safetensors"),
                        (run.path, "checkpoints/a.safetensors")):  # fmt: skip
        monkeypatch.chdir(place)
        assert find_run(file)[0].path.samefile(run.path) and not has_no_run(file)
        with run_of_checkpoint(str(run.config), Path(file)) as found:
            assert found.path.samefile(run.path)


def test_a_run_with_the_name_of_a_published_network_comes_first(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("vit_s16").mkdir()  # of images, perhaps
    assert has_no_run("vit_s16")
    RunDir("runs/vit_s16").path.mkdir(parents=True)
    RunDir("runs/vit_s16").config.touch()
    assert not has_no_run("vit_s16") and has_no_run("vit_b16")
    assert main(["look", "vit_s16", "--diagram", "d.svg"]) == 2
    assert "runs/vit_s16 has no checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["runs/a/export/a.onnx", "a.pt2"])
def test_a_graph_in_place_of_a_run_is_refused_with_a_way_out_that_works(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path("runs/a/export").mkdir(parents=True)
    Path("runs/a/config.yaml").touch()
    Path(name).touch()
    with pytest.raises(UsageError, match=f"^{name} is a graph, which gives predictions alone: name the run"):
        find_run(name, "give its configuration too")


@pytest.mark.parametrize("inside", ["checkpoints", "checkpoints/last.ckpt", "config.yaml"])
def test_what_lies_in_a_run_names_it_where_a_run_is_wanted(inside, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = RunDir("runs/a")
    run.checkpoints.mkdir(parents=True)
    for path in (run.config, run.checkpoints / "last.ckpt", run.path / "run.json"):
        path.touch()
    with pytest.raises(UsageError, match=f"^runs/a/{inside} lies in a run: name that, runs/a$"):
        find_directory(f"runs/a/{inside}")


def test_a_run_is_the_same_in_another_working_directory(tmp_path, monkeypatch):
    for place in ("here", "there"):  # each with a run of this name
        run = RunDir(tmp_path / place / "runs" / "a")
        run.weights.mkdir(parents=True)
        run.config.write_text(f"place: {place}")
        (run.weights / "last.safetensors").touch()
    monkeypatch.chdir(tmp_path / "here")
    named, weights = Run("a"), Run("runs/a/weights/last.safetensors")
    assert named.path == weights.path == Path("runs/a")
    monkeypatch.chdir(tmp_path / "there")
    for run in (named, weights):
        assert run.config == {"place": "here"}
        assert Path(run) == run.path == tmp_path / "here/runs/a"
        assert run.checkpoint == run.path / "weights/last.safetensors"
    monkeypatch.chdir(tmp_path / "here")
    assert repr(named).startswith("Run('runs/a', ")


@pytest.mark.parametrize("name", ["last", "auto"])
def test_a_run_is_not_called_by_a_word_that_names_another(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=f"^`--name {name}` cannot be told .* another name, or --run_dir runs/{name}$"):
        choose_run(FitOptions(name=name), [], 0, "")
    assert choose_run(FitOptions(run_dir=f"runs/{name}"), [], 0, "").path == Path("runs") / name  # reached by its path


@pytest.mark.parametrize("name", ["ablations", "slurm", ".launch"])
def test_a_run_does_not_take_the_place_of_what_else_lies_among_runs(name):
    with pytest.raises(
        UsageError, match=f"^`--name {name}`: runs/{name} is where vitlab keeps .*; choose another name"
    ):
        choose_run(FitOptions(name=name), [], 0, "")


@pytest.mark.parametrize(("flag", "value"), [("name", "b"), ("run_dir", "elsewhere/a")])
def test_a_run_goes_on_in_its_own_directory(tmp_path, monkeypatch, flag, value):
    monkeypatch.chdir(tmp_path)
    run = RunDir("runs/a")
    run.path.mkdir(parents=True)
    run.config.touch()
    with pytest.raises(UsageError, match=f"`--resume a` goes on in runs/a, and --{flag} {value} is another directory"):
        run_to_continue(FitOptions(resume="a", **{flag: value}))
    for same in ({}, {"name": "a"}, {"run_dir": "runs/a"}, {"run_dir": str(tmp_path / "runs" / "a")}):
        assert run_to_continue(FitOptions(resume="a", **same)).path == run.path


def test_commands_to_type_are_quoted(tmp_path):
    run = RunDir(tmp_path / "my runs")
    run.path.mkdir()
    result = {"acc1": 1.0, "overrides": {"model.pos_embed": "[learned, rope2d]"}}
    told = run.standing("test", result).text
    assert shlex.split(told.split("`")[1]) == [
        *("vitlab", "test", str(run.path)),
        "--model.pos_embed=[learned, rope2d]",
    ]


@pytest.mark.parametrize(
    ("known", "kept"),
    [
        (None, [1, 2, 3]),
        (0, []),
        (24, [1, 2]),  # as large as it was at the checkpoint
        (20, [1, 2, 3]),  # edited
        (500, [1, 2, 3]),  # removed since, and begun again: its size says nothing
    ],
)
def test_no_row_of_a_step_that_is_repeated_stays(tmp_path, known, kept):
    run = RunDir(tmp_path)
    run.metrics.write_text("".join(f'{{"step": {step}}}\n' for step in (1, 2, 3, 4, 5)) + '{"st')
    run.drop_later_rows(known, 3)
    assert [row["step"] for row in run.rows()] == kept


def test_rows_whose_file_is_removed_before_they_are_cut_do_not_come_back(tmp_path):
    run = RunDir(tmp_path)
    run.metrics.write_text("".join(f'{{"step": {step}}}\n' for step in (1, 2, 3)))
    run.take_over()
    run.metrics.unlink()
    run.drop_later_rows(24, 2)
    run.append_row({"step": 3})
    assert [row["step"] for row in run.rows()] == [1, 2, 3]


def test_a_checkpoint_outside_of_a_run_is_refused_with_flags_that_the_command_has(tmp_path, capsys):
    (tmp_path / "kept.ckpt").write_bytes(b"x")
    flags, place = "--config FILE --ckpt_path FILE", "RUN/checkpoints/ beside RUN/config.yaml"
    for words, way_out in ((["test"], flags), (["export", "--to=timm"], place)):
        assert main([*words, str(tmp_path / "kept.ckpt")]) == 2
        told = capsys.readouterr().err
        assert [way for way in (flags, place) if way in told] == [way_out]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory of its own."""
    monkeypatch.chdir(tmp_path)


def begun(name, **record):
    (path := Path("runs") / name).mkdir(parents=True)
    (path / "run.json").write_text(json.dumps(record))
    (path / "config.yaml").touch()
    return RunDir(path)


@pytest.mark.slow
def test_the_last_run_is_chosen_once_at_the_start_and_is_never_the_run_itself(here):
    config = ["--config=vit"]
    options = FitOptions(name="a", init_from="last", overwrite=True)
    with pytest.raises(UsageError, match=r"^`--init_from last`: there is no other run in runs/ yet; name a run or"):
        check_job(config, options)
    begun("source", started="2026-01-01")
    begun("a", started="2026-01-02")
    check_job(config, options)
    assert options.init_from == "runs/source"  # which run.json gets, and a resume reads
    begun("newer", started="2026-01-03")
    assert initial_weights("last", RunDir("runs/a")) == "runs/newer"
    Path("last").touch()
    assert initial_weights("last", RunDir("runs/a")) == "last"  # a file
    Path("last").unlink()
    older = SimpleNamespace(run=begun("older", init_from="last"), resumed=True, options=FitOptions())
    with pytest.raises(
        UsageError, match=r"^runs/older has no checkpoint yet, and which run was `last` at its start is"
    ):
        load_first_weights(older)


def test_a_run_that_goes_on_by_itself_does_not_begin_with_other_weights(here):
    begun("source", started="2026-01-01")
    began = {"init_from": "runs/source", "resize": "rescale", "init_grid": "4,2"}
    run = begun("a", started="2026-01-02", **began)
    same = [{}, {"init_from": "last"}, *({**began, "init_grid": grid} for grid in (None, (4, 2)))]
    for given in same:
        assert run_to_continue(FitOptions(name="a", auto_resume=True, **given)).path == run.path
    others = [{"init_from": "runs/a"}, {"init_from": "timm:vit"}, {"init_from": "last", "resize": "extrapolate"}]
    for given in [*others, {"init_from": "last", "init_grid": (2, 4)}]:
        *_, (name, value) = given.items()
        told = rf"^`{name}` {re.escape(str(value))}: runs/a began with .*, and `--auto_resume` continues it as it is: "
        with pytest.raises(UsageError, match=told.replace(r"\(2,\ 4\)", "2,4")):
            run_to_continue(FitOptions(name="a", auto_resume=True, **given))
    begun("random", init_from=None)
    begun("old")
    with pytest.raises(UsageError, match="runs/random began with new weights, and"):
        run_to_continue(FitOptions(name="random", auto_resume=True, init_from="last"))
    assert run_to_continue(FitOptions(name="old", auto_resume=True, init_from="source")).name == "old"


def test_a_refused_resume_gives_damaged_records_back(tmp_path):
    """`results.json` stayed away, under another name."""
    run = RunDir(tmp_path)
    for name in ("run.json", "results.json", "data.json"):
        (tmp_path / name).write_text('{"a": ')
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    kept = Before(run, resumed=True)
    assert len(run.set_aside_damaged()) == 3
    run.take_over()
    kept.put_back(is_refusal=True)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before
