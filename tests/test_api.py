"""The library: what a notebook calls does what the command does."""

import datetime
import io
import logging
import os
import random
import shutil
import subprocess
import sys
import typing
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from PIL import Image
from sklearn.datasets import load_digits

import vitlab
from vitlab.cli.main import main
from vitlab.config.arguments import as_arguments
from vitlab.errors import RunFailed
from vitlab.jobs.terminal import open_terminal, terminal_as_it_was
from vitlab.runs.processes import SETTINGS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("hasty")]  # whole runs

SHORT = {"trainer.max_epochs": 1, "trainer.logger": False, "data.subset": 0.06}  # one step


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("api")


@pytest.fixture(scope="module")
def run(place):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        return vitlab.fit("t2t", {**SHORT, "model.pos_embed": "sincos2d"}, name="first", quiet=True)


@pytest.fixture(autouse=True)
def _there(place, monkeypatch):
    monkeypatch.chdir(place)


@pytest.fixture(scope="module")
def digit(place):
    pixels = (load_digits().images[0] * 15.9375).round().astype(np.uint8)
    Image.fromarray(pixels).save(place / "digit.png")
    return place / "digit.png"


def test_importing_vitlab_imports_no_torch():
    code = "import sys, vitlab; print([m for m in ('torch', 'lightning', 'numpy', 'yaml') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_run_knows_what_it_is(run, place):
    assert run.path == Path("runs/first")
    assert (run.name, run.status) == ("first", "done")
    assert run.config["model"]["init_args"]["pos_embed"] == "sincos2d"
    assert run.record["argv"][:2] == ["vitlab", "fit"]
    assert repr(run) == "Run('runs/first', done)"
    rows = run.metrics
    assert {"step", "train/loss", "val/acc1"} <= set(rows.columns)
    assert run.results["val"]["acc1"] == rows["val/acc1"].dropna().iloc[-1]


def test_what_follows_a_training_on_several_processes_is_done_by_each_alone(run, tmp_path, monkeypatch):
    """Their group outlived the training, and `run.test` counted the images once for each process."""

    def train(arguments, options):
        meeting = f"file://{tmp_path}/met"
        torch.distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
        return run

    monkeypatch.setattr("vitlab.jobs.train.fit.fit", train)
    monkeypatch.setattr("vitlab.api._together", False)  # which the end of the test restores
    assert vitlab.fit("t2t", SHORT, quiet=True).status == "done"
    assert not torch.distributed.is_initialized()
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)  # a group of one can train again
    vitlab.fit("t2t", SHORT, quiet=True)
    with pytest.raises(ValueError, match="this script has trained on several processes, which all run it"):
        vitlab.fit("t2t", SHORT, quiet=True)


def test_what_follows_a_failed_training_on_several_processes_is_done_by_each_alone(tmp_path, monkeypatch):
    """Their group outlived it, and the next measurement ended in a traceback of gloo."""

    def train(arguments, options):
        meeting = f"file://{tmp_path}/met"
        torch.distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
        monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
        raise RunFailed("the loss is not finite")

    monkeypatch.setattr("vitlab.jobs.train.fit.fit", train)
    monkeypatch.setattr("vitlab.api._together", False)  # which the end of the test restores
    with pytest.raises(RunFailed):
        vitlab.fit("t2t", SHORT, quiet=True)
    assert not torch.distributed.is_initialized()
    with pytest.raises(ValueError, match="this script has trained on several processes, which all run it"):
        vitlab.fit("t2t", SHORT, quiet=True)


def test_processes_of_torchrun_measure_together_and_can_train_again(run, tmp_path, monkeypatch):
    def train(arguments, options):
        if not torch.distributed.is_initialized():
            meeting = f"file://{tmp_path}/met"
            torch.distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
        return run

    monkeypatch.setattr("vitlab.jobs.train.fit.fit", train)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    vitlab.fit("t2t", SHORT, quiet=True)
    assert torch.distributed.is_initialized()
    assert vitlab.fit("t2t", SHORT, quiet=True).status == "done"
    torch.distributed.destroy_process_group()


def test_a_run_started_in_python_repeats_from_the_command_line_with_the_same_numbers(run, place):
    words = [word for word in run.record["argv"][1:] if word != "--quiet"]
    assert main([*words, "--name", "again", "--quiet"]) == 0
    assert vitlab.Run("again").results["val"]["loss"] == run.results["val"]["loss"]


def test_python_measures_a_run_as_the_command_does(run, capsys):
    values = run.test()
    assert 0 < values["acc1"] <= 1
    assert run.results["test"]["acc1"] == values["acc1"]
    assert main(["test", "first", "--quiet"]) == 0
    assert run.results["test"]["acc1"] == values["acc1"]
    assert run.validate()["loss"] == pytest.approx(run.results["val"]["loss"])
    assert run.test({"data.batch_size": 32})["n"] == values["n"]
    assert run.results["variations"][0]["overrides"] == {"data.batch_size": 32}
    capsys.readouterr()
    assert run.test({"data.img_size": 16})["n"] == values["n"]
    assert "positions: rescale from 4 x 4 to 8 x 8" in capsys.readouterr().out


@pytest.mark.parametrize("source", ["first", "runs/first", "runs/first/checkpoints/best.ckpt", "run", "weights"])
def test_a_loaded_network_answers_an_image_as_predict_does(run, digit, source):
    places = {"run": run, "weights": "runs/first/weights/best.safetensors"}
    net, transform = vitlab.load(places.get(source, source))
    assert not net.training
    with torch.no_grad():
        mine = net(transform(Image.open(digit))[None]).softmax(dim=1)
    table = run.predict([digit], topk=1)
    assert table["class_1"][0] == str(int(mine.argmax()))
    assert table["probability_1"][0] == pytest.approx(float(mine.max()), abs=1e-6)


def test_an_exported_file_prepares_images_as_its_run_does(run, digit):
    path = run.export("safetensors")
    assert path == Path("runs/first/export/best.safetensors")
    image = Image.open(digit)
    for (net, transform), (other, other_transform) in [(vitlab.load(path), run.load())]:
        torch.testing.assert_close(transform(image), other_transform(image))
        torch.testing.assert_close(net(transform(image)[None]), other(transform(image)[None]))


def test_an_analysis_is_a_table_with_a_figure(run):
    finding = run.analyze("distance", num_images=8)
    assert isinstance(finding.table, pd.DataFrame)
    assert (run.path / "analysis" / "num_images=8" / "distance.png").is_file()
    several = run.analyze(("cost", "position"))
    assert set(several) == {"cost", "position"}


@pytest.mark.parametrize(
    "call",
    [
        lambda run, digit: run.load(),
        lambda run, digit: vitlab.load(run),
        lambda run, digit: run.predict(digit),
        lambda run, digit: run.analyze("cost"),
    ],
    ids=["load", "vitlab.load", "predict", "analyze"],
)
def test_lightning_is_as_quiet_as_in_the_commands_and_heard_again_afterwards(run, digit, call):
    heard = logging.StreamHandler(io.StringIO())
    heard.setLevel(logging.INFO)
    loggers = [logging.getLogger(f"lightning.{name}") for name in ("pytorch", "fabric")]  # each has such a handler
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        filters = [*warnings.filters]
        try:
            for logger in loggers:
                logger.addHandler(heard)
            call(run, digit)
            assert (heard.stream.getvalue(), [str(one.message) for one in warned]) == ("", [])
            for logger in loggers:
                logger.info("heard")
        finally:
            for logger in loggers:
                logger.removeHandler(heard)
        assert heard.stream.getvalue() == "heard\n" * 2
        assert warnings.filters == filters


def process():
    """Return what belongs to the caller of the library, and not to a run."""
    loggers = [logging.getLogger(name) for name in ("vitlab", "lightning.pytorch", "lightning.fabric")]
    return {
        "torch": torch.get_rng_state().tolist(),
        "numpy": str(np.random.get_state()),
        "random": random.getstate(),
        "variables": {name: os.environ.get(name) for name in SETTINGS},
        "algorithms": (torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()),
        "loggers": [(logger.level, logger.propagate, {*logger.handlers}) for logger in loggers],
        "warnings": (warnings.formatwarning, warnings.filters[:]),
    }


@pytest.mark.parametrize(
    "call",
    [
        lambda run, digit: vitlab.load(run),
        lambda run, digit: vitlab.load(run.export("safetensors")),
        lambda run, digit: run.load(),
        lambda run, digit: run.predict(digit),
        lambda run, digit: run.analyze("cost"),
        lambda run, digit: run.validate(),
        lambda run, digit: run.look(pictures=0, show=False),
        lambda run, digit: vitlab.fit("t2t", SHORT | {"trainer.deterministic": True}, name="other", quiet=True),
    ],
    ids=["vitlab.load", "export", "load", "predict", "analyze", "validate", "look", "fit"],
)
def test_a_call_leaves_the_process_as_it_was(run, digit, call, tmp_path, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    own = [logging.FileHandler(tmp_path / "own.log") for _ in range(2)]
    loggers = [logging.getLogger(name) for name in ("vitlab", "lightning.pytorch")]
    try:
        for logger, handler in zip(loggers, own, strict=True):
            logger.addHandler(handler)
        before = process()
        call(run, digit)
        assert {name: now for name, now in process().items() if now != before[name]} == {}
        assert None not in [handler.stream for handler in own]  # closed
    finally:
        for logger, handler in zip(loggers, own, strict=True):
            logger.removeHandler(handler)
            handler.close()


def test_a_handler_that_a_module_adds_in_a_call_stays():
    logger, own = logging.getLogger("vitlab"), logging.NullHandler()
    before = logger.handlers.copy()
    try:
        with terminal_as_it_was():
            open_terminal()
            logger.addHandler(own)
        assert logger.handlers == [*before, own]
    finally:
        logger.removeHandler(own)


def test_runs_without_a_seed_draw_one_after_the_other(place):
    runs = [vitlab.fit("t2t", SHORT | {"seed_everything": False}, name=f"unseeded-{i}", quiet=True) for i in (1, 2)]
    first, second = (run.results["val"]["loss"] for run in runs)
    assert first != second


def test_look_writes_the_page_of_a_run_and_opens_it_unless_told_not_to(run, place, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert run.look(pictures=0, show=False) == run.path / "look.html" and not opened
    page = run.look(place / "mine.html", pictures=0)
    assert opened == [(place / "mine.html").as_uri()]
    assert page == place / "mine.html" and "first" in page.read_text()


def test_python_resumes_a_run_as_the_command_does_even_with_another_saving_interval(place, run):
    shutil.copytree(run.path, "runs/longer")
    stopped = vitlab.Run("longer")
    longer = vitlab.fit(overrides={"trainer.max_epochs": 2}, resume=stopped, quiet=True)
    assert longer.path == stopped.path
    assert longer.metrics["epoch"].max() == 1
    more = {"trainer.max_epochs": 3, "checkpoint.every_minutes": 5, "trainer.enable_progress_bar": False}
    assert vitlab.fit(overrides=more, resume="longer", quiet=True).metrics["epoch"].max() == 2


def test_one_call_starts_a_run_or_continues_it(place, run):
    for epochs in (1, 2):
        found = vitlab.fit("t2t", {**SHORT, "trainer.max_epochs": epochs}, name="either", auto_resume=True, quiet=True)
        assert found.metrics["epoch"].max() == epochs - 1
    assert found.record["attempts"] == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: vitlab.create_model("t2t_vit_13"), 'did you mean "t2t_vit_1'),
        (lambda: vitlab.create_model("t2t_vit_14", pos_embd="none"), 'did you mean "pos_embed"'),
        (lambda: vitlab.Run("frist"), 'no run or checkpoint called "frist"; did you mean "first"'),
        (lambda: vitlab.load("no/such.ckpt"), "no run or checkpoint"),
        (lambda: vitlab.Run("first").analyze("distanse"), 'did you mean "distance"'),
        (
            lambda: vitlab.Run("first").analyze("cost", num_image=8),
            'no argument `num_image`; did you mean "num_images"',
        ),
        (lambda: vitlab.fit("t2t", {"model.pos_embd": "none"}), 'did you mean "model.pos_embed"'),
        (lambda: vitlab.fit("t2t", {"model.pos_embed": "sincos"}), 'did you mean "sincos2d"'),
        (lambda: vitlab.fit("t2tt"), 'did you mean "t2t"'),
        (lambda: vitlab.fit("t2t", name="first"), "exists"),
        (lambda: vitlab.fit(resume="first", name="other"), "goes on in runs/first, and name other is another direct"),
        (lambda: vitlab.fit("t2t", init_grid=(4,)), "`init_grid` must be rows and columns of tokens, whole"),
        (lambda: vitlab.fit("t2t", init_grid=(2.5, 2)), "above 0, got (2.5, 2)"),
        (lambda: vitlab.fit("t2t", init_grid="2,2"), "above 0, got '2,2'"),
        (lambda: vitlab.fit("t2t", init_grid=(0, 2)), "above 0, got (0, 2)"),
        (lambda: vitlab.fit("t2t", resize="bicubic"), "`resize` must be one of interpolate, rescale, extrapolate, got"),
        (lambda: vitlab.fit("t2t", resize="rescale"), "`resize` goes with init_from, initial weights: leave it out"),
        (lambda: vitlab.Run("first").test(resize="bicubic"), "`resize` must be one of interpolate, rescale, extrap"),
        (lambda: vitlab.fit("t2t", trust_imports=["a b"]), "must name packages"),
        (lambda: vitlab.Run("first").predict("nowhere.png"), "no images found"),
        (lambda: vitlab.Run("first").analyze("attention", layer=9), "`layer` must lie in 0..2, got 9"),
        (lambda: vitlab.fit("t2t", {"model": "userpkg.Net"}), 'if it is your code, add trust_imports="userpkg"'),
        (lambda: vitlab.fit("t2t", {"model": "Regressor"}), "numbers, data=Table data.path=FILE.csv data.targets="),
        (lambda: vitlab.Run("first").predict(), "no images given: name files, folders or patterns"),
        (lambda: vitlab.Run("first").export("onnx", "net.pt2"), "must end with .onnx"),
        (lambda: vitlab.ablate("position_embeddings/prob"), 'did you mean "position_embeddings/probe"'),
        (lambda: vitlab.Run("first").test({"data.batch_sise": 3}), 'did you mean "data.batch_size"'),
        (lambda: vitlab.Run("first").test({"ckpt_path": "a.ckpt"}), "no argument `--ckpt_path`; use vitlab.Run(FILE)"),
        (lambda: vitlab.Run("first").validate({"resize": "usual"}), "use the argument `resize` of the method"),
    ],
)
def test_a_mistake_is_one_line_with_the_way_out(run, call, message):
    with pytest.raises(ValueError) as caught:
        call()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_loading_refuses_a_file_that_holds_more_than_weights(run, place):
    torch.save({"state_dict": {}, "code": Path}, place / "runs/first/checkpoints/evil.ckpt")
    with pytest.raises(ValueError, match="holds more than weights"):
        vitlab.load("runs/first/checkpoints/evil.ckpt")


def test_a_file_that_does_not_say_how_images_are_prepared_is_refused_with_the_way_out(place):
    net = vitlab.create_model("t2t_vit_7", img_size=32)
    torch.save(net.state_dict(), place / "weights.pt")
    with pytest.raises(ValueError, match=r"create_model\(..., weights=...\) builds only the network"):
        vitlab.load("weights.pt")
    other = vitlab.create_model("t2t_vit_7", img_size=32, weights="weights.pt")
    torch.testing.assert_close(other.state_dict(), net.state_dict())


def test_a_training_that_fails_raises_what_the_command_prints(place, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device", "x")

    monkeypatch.setattr("vitlab.tasks.Classifier.training_step", full)
    with pytest.raises(RunFailed, match="No space left on device"):
        vitlab.fit("t2t", SHORT, name="full", quiet=True)


def test_an_interrupt_in_a_notebook_is_a_keyboard_interrupt(place, monkeypatch):
    import signal

    usual = vitlab.Classifier.training_step

    def interrupted(*words):
        signal.raise_signal(signal.SIGINT)
        return usual(*words)

    monkeypatch.setattr("vitlab.tasks.Classifier.training_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        vitlab.fit("t2t", SHORT, name="interrupted", quiet=True)
    monkeypatch.undo()
    monkeypatch.chdir(place)
    assert vitlab.fit(resume="interrupted", quiet=True).status == "done"


def test_values_reach_the_configuration_unchanged(place):
    odd = {"model.freeze": ["tokenizer"], "data.fold": "1/3", "trainer.gradient_clip_val": None, "data.subset": 0.2}
    run = vitlab.fit("vit", {**SHORT, **odd}, name="odd", quiet=True)
    assert run.config["model"]["init_args"]["freeze"] == ["tokenizer"]
    assert run.config["data"]["init_args"]["fold"] == "1/3"
    overrides = yaml.safe_load((run.path / "overrides.yaml").read_text())
    assert overrides["trainer.gradient_clip_val"] is None
    assert overrides["trainer.logger"] is False


def test_a_comparison_is_planned_and_reported_from_python():
    lab = vitlab.ablate("position_embeddings/probe")
    assert [arm.name for arm in lab.ablation.arms][:2] == ["none", "learned"]
    assert "15 missing" in str(lab.status())


def test_python_exports_the_same_formats_as_the_command():
    from vitlab.jobs.exported import SUFFIXES
    from vitlab.jobs.formats import FORMATS
    from vitlab.run import Form

    assert set(typing.get_args(Form)) == set(SUFFIXES) == set(FORMATS)


@pytest.mark.parametrize("text", ["*.png", "[abc", "100%", "%d", "a: b: c", "@x", "!x", "12", "true", ""])
def test_text_is_parsed_as_if_it_were_typed(text):
    assert as_arguments({"data.root": text}) == [f"--data.root={text}"]


def test_infinite_numbers_stay_numbers():
    words = as_arguments({"a": float("inf"), "b": -float("inf"), "c": float("nan")})
    assert words == ["--a=.inf", "--b=-.inf", "--c=.nan"]
    assert as_arguments({"a": [float("inf"), {"b": (float("nan"), 1)}]}) == ['--a=[.inf, {"b": [.nan, 1]}]']


def test_dates_and_paths_become_text():
    day = datetime.date(2026, 11, 23)
    words = as_arguments({"data.root": day, "data.folders": [day, Path("ü"), "a: b"]})
    assert words == ["--data.root=2026-11-23", '--data.folders=["2026-11-23", "ü", "a: b"]']
