import html
import json
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from PIL import Image
from small_nets import train

from vitlab.analysis import ANALYSES
from vitlab.analysis.outcomes.outcome import outcome_of
from vitlab.cli.main import main
from vitlab.jobs.find_subject import subject_at
from vitlab.jobs.view import View

pytestmark = pytest.mark.slow  # whole runs


@pytest.fixture(autouse=True)
def _drawn_where_figures_are_asked_about(request):
    if "figures" not in request.node.name:
        request.getfixturevalue("hasty")


def analyze(names, run, *arguments):
    return main(["analyze", names, str(run), "--num_images=64", *map(str, arguments)])


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for name, size in (("a.png", (8, 8)), ("b.png", (20, 12))):
        pixels = np.random.default_rng(0).integers(256, size=(size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)
    return folder


def test_each_analysis_writes_a_table_and_two_figures(run, tmp_path, capsys):
    assert analyze("distance,entropy", run, "-o", tmp_path / "out") == 0
    names = {f"{name}.{suffix}" for name in ("distance", "entropy") for suffix in ("csv", "png", "svg")}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names | {"notes.json"}
    assert "64 images; null" in capsys.readouterr().out
    table = pd.read_csv(tmp_path / "out" / "distance.csv")
    assert table["uniform"].iloc[0] == pytest.approx(2.01, abs=0.005)
    with Image.open(tmp_path / "out" / "distance.png") as image:
        assert min(image.size) > 200 and np.asarray(image.convert("L")).std() > 5
    assert (tmp_path / "out" / "entropy.svg").read_text().lstrip().startswith("<?xml")


@pytest.mark.rare
def test_analyze_all_writes_one_page_into_the_run_directory(run):
    assert analyze("all", run, "--quiet") == 0
    place = run / "analysis" / "num_images=64"
    page = (place / "analysis.html").read_text()
    for name, own in ANALYSES.items():
        assert f'<h2 id="{name}">' in page
        assert html.escape(own.reading) in page
        assert (place / f"{name}.csv").is_file() is ('alt="figure of ' + name + '"' in page)
    assert "http" not in page  # opens from a mail
    assert page.count("data:image/png;base64,") > len(ANALYSES) // 2


def test_the_numbers_come_from_the_named_weights(run, tmp_path):
    for name in ("checkpoints/best.ckpt", "weights/best.safetensors"):
        assert analyze("distance", run / name, "-o", tmp_path / name.split("/")[0], "--quiet") == 0
    tables = [(tmp_path / folder / "distance.csv").read_text() for folder in ("checkpoints", "weights")]
    assert tables[0] == tables[1]


def test_pictures_of_another_size_are_resized_with_a_note(run, photos, tmp_path, capsys):
    assert analyze("attention", run, "--images", photos, "-o", tmp_path / "out") == 0
    assert "1 of 2 resized and cropped to 8 x 8 pixels" in capsys.readouterr().out
    assert set(pd.read_csv(tmp_path / "out" / "attention.csv")["image"]) == {0, 1}


@pytest.mark.parametrize(
    ("names", "arguments", "message"),
    [
        ("distnce", [], 'no analysis called "distnce"; did you mean "distance"?'),
        ("occlusion", [], 'no analysis called "occlusion"; it is a map of "attribution"'),
        ("distance", ["--images", "{photos}/none"], "no images found: no such file"),
        ("distance", ["--layer=7"], "`--layer` must lie in 0..2, got 7"),
        ("token_layers", [], "tokenizer=patch has none; use attention"),
        ("attention", ["--query=9,0"], "`--query` must be a row in 0..3"),
        ("attention", ["--query=middle"], "--query: must be ROW,COLUMN of a patch, such as 3,4, got middle"),
        (
            "resolution",
            ["--data.img_size=12"],
            "leave out `--data.img_size`; `vitlab analyze resolution` measures other",
        ),
        ("distance", ["--data=loading"], "loading"),
        ("distance", ["--against", "nowhere"], 'no run or checkpoint called "nowhere"'),
        ("distance", ["--config", "x.yaml"], "the configuration comes from"),
    ],
)
def test_wrong_input_is_refused_in_one_line(run, photos, names, arguments, message, capsys):
    assert analyze(names, run, *(argument.format(photos=photos) for argument in arguments)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("vitlab: ") and error.count("\n") == 1


def test_against_compares_two_runs(run, tmp_path):
    out = tmp_path / "out"
    assert analyze("attention,cka,probe", run, "--against", run, "--query=1,2", "-o", out, "--quiet") == 0
    assert pd.read_csv(out / "cka.csv")["against"].unique().tolist() == ["itself", "run (other)"]


def test_analyzing_pictures_needs_no_training_data(tmp_path, capsys):
    root, rng = tmp_path / "data", np.random.default_rng(0)
    for name in ("dark", "light"):
        (root / name).mkdir(parents=True)
        for i in range(12):
            Image.fromarray(rng.integers(256, size=(8, 8, 3), dtype=np.uint8)).save(root / name / f"{i}.png")
    data = ["--data=ImageFolder", f"--data.root={root}", "--data.img_size=8", "--data.batch_size=8"]
    train(tmp_path / "run", *data, "--data.num_workers=0")
    picture = tmp_path / "picture.png"
    shutil.copy(root / "dark" / "0.png", picture)
    shutil.rmtree(root)
    capsys.readouterr()
    assert analyze("attention,rollout,filters,distance", tmp_path / "run", "--images", picture) == 0
    assert "this needs the images that run was trained on" in capsys.readouterr().out
    (folder,) = (tmp_path / "run" / "analysis").iterdir()
    assert folder.name.startswith("images=") and (folder / "filters.csv").is_file()
    assert analyze("attention", tmp_path / "run") == 2
    assert str(root) in capsys.readouterr().err


def test_help_names_every_analysis(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["analyze", "--help"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert all(name in text for name in ANALYSES)


def test_a_run_trained_on_many_devices_is_analyzed_on_one(run, tmp_path):
    other = shutil.copytree(run, tmp_path / "other")
    config = yaml.safe_load((other / "config.yaml").read_text())
    config["trainer"] |= {"accelerator": "gpu", "devices": 64, "num_nodes": 2, "strategy": "ddp"}
    (other / "config.yaml").write_text(yaml.safe_dump(config))
    assert analyze("filters", other, "--quiet") == 0
    assert analyze("filters", other, "--quiet", "--trainer.accelerator=cpu") == 0


def test_a_refusal_leaves_an_earlier_finding_in_its_place(run, tmp_path):
    """Before, it wrote over the note alone, and look lost the figure that was still there."""
    out, notes = ("-o", tmp_path), lambda: json.loads((tmp_path / "notes.json").read_text())["cka"]
    assert analyze("cka", run, *out, "--quiet", "--num_images=5") == 2
    assert list(notes()) == ["not_done"]
    assert analyze("cka", run, *out, "--quiet") == 0
    before = notes()
    assert analyze("cka", run, *out, "--quiet", "--num_images=5") == 2
    assert notes() == before and before["note"].startswith("64 validation images")
    (tmp_path / "cka.csv").unlink()
    assert analyze("cka", run, *out, "--quiet", "--num_images=5") == 2
    assert list(notes()) == ["not_done"]


def test_images_of_other_classes_are_shown_to_the_head_that_was_trained(run, tmp_path):
    """Before, it was a random one of as many outputs as they have classes, of which `shift` counted predictions."""
    for name in ("dark", "light"):
        (tmp_path / name).mkdir()
        for i in range(6):
            Image.fromarray(np.full((8, 8), 40 * i, np.uint8)).save(tmp_path / name / f"{i}.png")
    own = subject_at(str(run), View())[0]
    other = subject_at(str(run), View(), ["--data=ImageFolder", f"--data.root={tmp_path}", "--data.num_workers=0"])[0]
    assert torch.equal(other.net.head.weight, own.net.head.weight)
    assert other.net.num_classes == own.net.num_classes == 10
    assert other.class_names == [f"class {k}" for k in range(10)]
    assert other.data.statistics() == own.data.statistics()  # as an export of the run prepares them


@pytest.mark.parametrize("names", [["3", "7"], [str(k) for k in range(9, -1, -1)]])
def test_images_of_some_classes_of_the_training_have_its_numbers(run, tmp_path, names):
    """Before, they counted as classes that the network had not been trained on."""
    for name in names:
        (tmp_path / name).mkdir()
        for i in range(6):
            Image.fromarray(np.full((8, 8), 40 * i, np.uint8)).save(tmp_path / name / f"{i}.png")
    subject = subject_at(str(run), View(), ["--data=ImageFolder", f"--data.root={tmp_path}", "--data.num_workers=0"])[0]
    assert not subject.is_elsewhere and subject.class_names == [str(k) for k in range(10)]
    assert {*subject.labeled()[1].tolist()} == {*map(int, names)} and outcome_of(subject).outputs.shape[1] == 10


def test_a_variation_is_stored_apart_from_the_numbers_of_the_run(run):
    """Before, `--data.crop_pct` wrote another accuracy over that of the run, and look headed it as the run's.

    So did fewer images, another split and another run to compare with, and ablations read them.
    """
    of_run = ["analyze", "cost", str(run), "--quiet"]
    assert main(of_run) == 0
    before = (run / "analysis/cost.csv").stat().st_mtime_ns
    assert main([*of_run, "--data.num_workers=0", "--data.test_share=0.5"]) == 0
    assert (run / "analysis/data.test_share=0.5/notes.json").is_file()
    assert main([*of_run, "--quick", f"--against={run}"]) == 0
    assert any(path.name.startswith("num_images=64,against=") for path in (run / "analysis").iterdir())
    assert (run / "analysis/cost.csv").stat().st_mtime_ns == before
