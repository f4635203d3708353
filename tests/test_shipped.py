"""Shipped files are found by name from any folder, in a checkout and from the wheel; a local file wins."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from sklearn.datasets import load_sample_image

import vitlab
from vitlab.ablation.execution.identity import initial_weights_digest
from vitlab.ablation.file.spec import read_ablation
from vitlab.cli.main import main
from vitlab.config.parser import resolve_configs
from vitlab.errors import UsageError
from vitlab.jobs.train.initial import _load_weights_of
from vitlab.jobs.typed import command_of
from vitlab.models.load import load_network
from vitlab.shipped import HOME, find_file, find_weights, shipped_weights
from vitlab.tasks.distillation import read_teacher

pytestmark = pytest.mark.usefixtures("here")
ROOT = Path(__file__).parents[1]
YAMLS = sorted(p.relative_to(ROOT) for name in ("configs", "experiments") for p in (ROOT / name).rglob("*.yaml"))


@pytest.mark.parametrize("name", ["t2t", "t2t.yaml", "configs/t2t.yaml"])
def test_a_config_is_found_by_its_name_and_by_its_path(name):
    assert find_file(name, "--config") == str(HOME / "configs/t2t.yaml")


def test_tables_name_a_shipped_config_so_that_it_can_be_typed_anywhere(here):
    found = [find_file("t2t", "--config"), str(here / "mine.yaml")]
    command = command_of({"configs": found}, {"trainer.max_epochs": 2})
    assert command == f"vitlab fit --config configs/t2t.yaml --config {here}/mine.yaml --trainer.max_epochs=2"
    typed = {"trainer.check_val_every_n_epoch": None, "data.img_size": [32, 64], "model.class_token": False}
    words = shlex.split(command_of({"configs": found[1:]}, typed))[4:]
    assert words == ["--trainer.check_val_every_n_epoch=null", "--data.img_size=[32, 64]", "--model.class_token=false"]


def test_a_local_file_takes_precedence_over_a_shipped_one_of_the_same_name(here):
    (here / "configs").mkdir()
    for name in ("t2t", "configs/t2t.yaml"):
        (here / name).write_text("")
        assert find_file(name, "--config") == name


@pytest.mark.parametrize(
    ("name", "folder", "closest"),
    [
        ("t2tt", "configs", "t2t"),
        ("imagenet/t2t_vit14", "configs", "imagenet/t2t_vit_14"),
        ("configs/imagenet/vit_s_16.yaml", "configs", "configs/imagenet/vit_s16.yaml"),
        ("position_embedding/probe", "experiments", "position_embeddings/probe"),
        ("mime.yaml", "configs", "mine.yaml"),
    ],
)
def test_a_wrong_name_gets_the_closest_one(here, name, folder, closest):
    (here / "mine.yaml").write_text("")
    with pytest.raises(UsageError, match=f'did you mean "{closest}"') as caught:
        find_file(name, "--config", folder)
    assert "\n" not in str(caught.value)


def test_only_values_of_config_are_read_as_names():
    args = ["-c", "t2t", "--name", "t2t", "--config=vit", "--data.root=t2t"]
    t2t, vit = (str(HOME / f"configs/{name}.yaml") for name in ("t2t", "vit"))
    assert resolve_configs(args) == [f"--config={t2t}", "--name", "t2t", f"--config={vit}", "--data.root=t2t"]


@pytest.mark.slow
def test_a_shipped_ablation_is_read_with_its_base_from_an_empty_folder(capsys):
    assert read_ablation(HOME / "experiments/position_embeddings/digits.yaml").base == (str(HOME / "configs/vit.yaml"),)
    assert main(["ablate", "status", "position_embeddings/probe"]) == 0
    assert "15 missing" in capsys.readouterr().out


@pytest.mark.slow
def test_a_batch_script_is_written_from_shipped_files(capsys):
    words = ["submit", "fit", "--config", "imagenet/t2t_vit_14", "--dry_run", "--name", "x", "--slurm"]
    assert main([*words, "cluster/slurm"]) == 0
    assert "fit=(vitlab fit --config imagenet/t2t_vit_14 --name x --auto_resume)" in capsys.readouterr().out
    assert main([*words, "cluster/slrum"]) == 2
    assert 'did you mean "cluster/slurm"' in capsys.readouterr().err


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """What the wheel would install, in a folder of its own."""
    place = tmp_path_factory.mktemp("wheel")
    unwanted = {"build", "runs", "site", "tests"}

    def ignored(folder, names):
        of_root = folder == str(ROOT)
        return [n for n in names if n == "__pycache__" or (of_root and (n in unwanted or n.startswith(".")))]

    shutil.copytree(ROOT, place / "source", ignore=ignored)
    words = [sys.executable, "-c", f"import setuptools.build_meta as b; b.build_wheel({str(place)!r})"]
    subprocess.run(words, cwd=place / "source", check=True, capture_output=True)
    zipfile.ZipFile(next(place.glob("vitlab-*.whl"))).extractall(place / "site")
    return place / "site"


@pytest.mark.slow
def test_the_wheel_holds_the_package_with_configs_and_experiments_and_nothing_else(installed):
    files = {path.relative_to(installed) for path in installed.rglob("*") if path.is_file()}
    wanted = {path.relative_to(ROOT) for path in (ROOT / "vitlab").rglob("*.py*") if path.suffix != ".pyc"}
    wanted |= {
        path.relative_to(ROOT) for kind in ("html", "js", "css") for path in (ROOT / "vitlab").rglob(f"*.{kind}")
    }
    wanted |= {path.relative_to(ROOT) for path in (ROOT / "vitlab/weights").iterdir()}
    wanted |= {
        Path("vitlab/look/uplot/LICENSE"),
        Path("vitlab/py.typed"),
        Path("vitlab/config/flags.json"),
        *("vitlab" / path for path in YAMLS),
        *(
            "vitlab" / p.relative_to(ROOT)
            for p in (ROOT / "experiments").rglob("posbench/**/evidence/**/*")
            if p.is_file()
        ),
    }
    assert {path for path in files if not path.parts[0].endswith(".dist-info")} == wanted


@pytest.mark.rare
def test_the_wheel_trains_and_finds_an_ablation_from_an_empty_folder(installed, here):
    def vitlab(*words):
        env = {**os.environ, "PYTHONPATH": str(installed)}
        done = subprocess.run(
            [sys.executable, "-m", "vitlab", *words], cwd=here, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "imagenet/t2t_vit_14" in vitlab("models")
    vitlab("fit", "--config", "t2t", "--name", "first", "--trainer.max_epochs=1", "--trainer.logger=false")
    assert (here / "runs/first/results.json").is_file()
    assert "15 missing" in vitlab("ablate", "status", "position_embeddings/probe")  # file and base were found


LIBRARY = """
import sys
import vitlab
assert "torch" not in sys.modules
net = vitlab.create_model("t2t_vit_14", pos_embed="rope2d", img_size=(224, 320))
run = vitlab.fit("t2t", {"model.pos_embed": "sincos2d", "trainer.max_epochs": 2, "trainer.logger": False}, name="first")
run.test(); run.predict(["digit.png"]); run.analyze("attention"); run.export("onnx")
assert len(run.metrics) and run.results["test"] and run.config["model"]
net, transform = vitlab.load("runs/first")
from PIL import Image
print(tuple(net(transform(Image.open("digit.png"))[None]).shape))
lab = vitlab.ablate("mine.yaml"); plan = lab.plan(); lab.run(); report = lab.report()
print(plan, report)
"""
MINE = """
name: mine
base: [configs/vit.yaml, short.yaml]
axes: {pos_embed: {none: {model.pos_embed: none}, sincos2d: {model.pos_embed: sincos2d}}}
seeds: 2
baseline: {pos_embed: none}
metric: {primary: acc1, mode: max}
"""


@pytest.mark.rare
def test_the_library_works_from_the_wheel_as_the_documentation_shows(installed, here):
    from PIL import Image

    Image.new("L", (8, 8), 128).save(here / "digit.png")
    (here / "mine.yaml").write_text(MINE)
    short = "trainer: {max_epochs: 1, logger: false}\ndata: {init_args: {subset: 0.1}}\n"
    (here / "short.yaml").write_text(short + "model: {init_args: {pos_embed_lr_mult: 1}}\n")
    env = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run([sys.executable, "-c", LIBRARY], cwd=here, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "(1, 10)" in done.stdout
    assert (here / "runs/ablations/mine/report/report.md").is_file()


@pytest.mark.parametrize("name", shipped_weights())
def test_a_trained_network_is_shipped_whole_with_its_card(name):
    """It loads offline by its name; the card has recipe, seed, accuracy and license; below 2 MB; sum of its bytes."""
    file = Path(find_weights(f"vitlab:{name}"))
    card = json.loads(Path(f"{file}.json").read_text())
    assert file.stat().st_size < 2e6 and (ROOT / card["recipe"]).is_file() and isinstance(card["seed"], int)
    assert (
        "every 5th" in card["data"]["choice"]
        and card["data"]["license"] == "CC BY 4.0"
        and card["measured"]["test"]["n"] == 357
    )
    assert f"{card['measured']['test']['acc1']:.1%}".replace("%", " %") in (ROOT / card["recipe"]).read_text()
    built = vitlab.create_model(name, weights=f"vitlab:{name}").eval()
    net, transform = vitlab.load(f"vitlab:{name}")
    image = transform(Image.fromarray(load_sample_image("flower.jpg")))[None]
    torch.testing.assert_close(built(image), net(image))
    assert net.grid_size == (8, 8) and net(image).shape == (1, len(card["outputs"]))


@pytest.mark.parametrize("source", ["vitlab:photos64_vit", "~/mine.safetensors"])
def test_weights_are_named_alike_wherever_they_are_read(source, here, monkeypatch):
    file = Path(find_weights("vitlab:photos64_vit"))
    monkeypatch.setenv("HOME", str(here))
    for suffix in ("", ".json"):
        shutil.copy(f"{file}{suffix}", here / f"mine.safetensors{suffix}")
    state, trained = load_file(file), load_network(file)
    for p in trained.parameters():
        p.data.zero_()
    (task := L.LightningModule()).net = trained
    job = SimpleNamespace(task=task, data=None, say=lambda line: None)
    _load_weights_of(job, source, None, None)
    for net in (trained, read_teacher(source).net, vitlab.load(source).net):
        assert torch.equal(net.state_dict()["head.weight"], state["head.weight"])
    assert initial_weights_digest(source) == initial_weights_digest(str(file))
    (here / "mine.safetensors.json").unlink()
    with pytest.raises(ValueError, match=r"`model\.teacher`: .*mine\.safetensors is not in a run, and has no mine"):
        read_teacher(str(here / "mine.safetensors"))


PHOTOS = Path(os.environ.get("VITLAB_SHARED", ROOT.parent / "shared")) / "data/caltech101-20/val"


@pytest.mark.rare
@pytest.mark.skipif(not PHOTOS.is_dir(), reason="needs the photos, which the repository does not hold")
@pytest.mark.parametrize("name", shipped_weights())
def test_a_card_states_the_results_of_its_network_on_held_out_photos(name):
    net, transform = vitlab.load(f"vitlab:{name}")
    card = json.loads(Path(f"{find_weights(f'vitlab:{name}')}.json").read_text())
    files = sorted(PHOTOS.glob("*/*"))
    with torch.no_grad():
        found = net(torch.stack([transform(Image.open(file).convert("RGB")) for file in files])).argmax(dim=1)
    pairs = Counter((file.parent.name, card["outputs"][k]) for file, k in zip(files, found.tolist(), strict=True))
    for one, (right, count) in card["per_class"].items():
        assert (right, count) == (pairs[one, one], sum(n for (true, _), n in pairs.items() if true == one))
    assert {(a, b): n for a, b, n in card["mistakes"]} == {p: n for p, n in pairs.items() if p[0] != p[1] and n > 2}
    right = sum(right for right, _ in card["per_class"].values())
    assert right / len(files) == card["measured"]["test"]["acc1"]


def test_the_positions_of_the_shipped_network_are_a_grid():
    net, _ = vitlab.load("vitlab:photos64_vit")
    named = vitlab.create_model("vitlab:photos64_vit").state_dict()
    assert all(torch.equal(value, named[key]) for key, value in net.state_dict().items())
    table = torch.nn.functional.normalize(net.pos_embed.table().detach(), dim=-1).view(8, 8, -1)
    near, far = (table[3, 3] * table[3, 4]).sum(), (table[3, 3] * table[7, 4]).sum()
    assert near > 0.5 > 0 > far


def test_heads_of_the_shipped_network_look_at_their_neighbors():
    """In the mean over patches; even attention has 12 % of its weight within one step."""
    net, transform = vitlab.load("vitlab:photos64_vit")
    image = transform(Image.fromarray(load_sample_image("flower.jpg")))[None]
    near = vitlab.analysis.distances((8, 8)) < 1.5
    with torch.no_grad():
        maps = [vitlab.models.attention_maps(net, image, layer)[0, :, 1:, 1:] for layer in (1, 2)]
    shares = [(m / m.sum(dim=-1, keepdim=True) * near).sum(dim=-1).mean(dim=1).max() for m in maps]
    assert min(shares) > 0.35 and near.float().mean() < 0.13


def test_weights_that_are_not_shipped_are_named():
    with pytest.raises(ValueError, match=r'got \'photos64_vitt\'; did you mean "photos64_vit"'):
        vitlab.create_model("vitlab:photos64_vitt")
    with pytest.raises(UsageError, match=r"ships the weights of .*photos64_vit.*did you mean \"photos64_vit\""):
        find_weights("vitlab:photos64_vitt")
    assert main(["look", "vitlab:photos64", "-o", "page.html"]) == 2


@pytest.mark.slow
@pytest.mark.rare
def test_shipped_networks_are_analyzed_and_shown_offline(here, capsys):
    Image.fromarray(load_sample_image("flower.jpg")).save(here / "flower.png")
    assert main(["analyze", "position,attention", "vitlab:photos64_vit", "--images", "."]) == 0
    assert (here / "analysis/photos64_vit/position.csv").is_file()
    assert "nan" not in capsys.readouterr().out  # of one image
    assert main(["look", "vitlab:photos64_vit", "--images", ".", "-o", "page.html"]) == 0
