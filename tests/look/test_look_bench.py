"""The page as somebody works at it: a real browser points, moves, filters and saves."""

import base64
import html
import io
import json
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from vitlab.analysis.attribution.maps import gradient_attention, last_attention
from vitlab.analysis.probes import principal
from vitlab.analysis.subject import Subject
from vitlab.analysis.views.token_layers import split_features, token_layer_maps
from vitlab.cli.main import main
from vitlab.data import Digits
from vitlab.jobs.find_subject import subject_at
from vitlab.jobs.view import View
from vitlab.look.facts import Shown
from vitlab.look.listed import _sheet, listed
from vitlab.look.moments import Moments, first_of, hash_of, moments_of, seen
from vitlab.look.viewer import packed
from vitlab.models.vit import VisionTransformer
from vitlab.models.walk import attention_maps
from vitlab.runs.directory import RunDir
from vitlab.tokenizers.t2t import T2TTokenizer

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
CONFIG = str(ROOT / "configs" / "vit.yaml")
SHORT = ["--trainer.max_epochs=3", "--data.subset=0.3", "--trainer.logger=false", "--quiet"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of three epochs, tested, with one analysis, and their page."""
    place = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        for name, more in (("one", []), ("two", ["--model.depth=2"])):
            patch.setattr("vitlab.look.moments._USED", [-1e3])  # a run that takes long has time for every validation
            assert main(["fit", "--config", CONFIG, "--run_dir", f"runs/{name}", *SHORT, *more]) == 0
            assert main(["validate", f"runs/{name}", "--quiet"]) == 0
            assert main(["analyze", "attention,distance", f"runs/{name}", "--quiet"]) == 0
        assert main(["look", "one", "two", "-o", "both.html", "--quiet"]) == 0
    return place


@pytest.mark.slow
def test_each_validation_keeps_maps_positions_and_predictions(tmp_path):
    torch.manual_seed(0)
    net = VisionTransformer(img_size=8, in_chans=1, num_classes=10, patch_size=2, embed_dim=16, depth=2, num_heads=2)
    subject = Subject(net, Digits())
    images = subject.shown(8)
    found = seen(net, images)
    for layer in range(2):
        maps = attention_maps(net, images, layer)[:, :, 0, 1:]
        assert found["token"][:, layer] == pytest.approx(maps.numpy(), abs=1e-3)
    assert found["probabilities"] == pytest.approx(net(images).softmax(1).detach().numpy(), abs=1e-3)
    assert np.diag(found["positions"]) == pytest.approx(1, abs=1e-3)
    data = subject.data.splits["val"]
    index = first_of(len(data))
    assert torch.equal(next(subject.prepared(data.take(index)))[0], images)  # those that the viewer shows first
    run, shape = RunDir(tmp_path), {"depth": 2, "heads": 2, "grid": [4, 4]}
    (tmp_path / "moments").mkdir()
    for step in range(50):
        facts = {"index": index, "images": len(data), "hash": hash_of(data.take(index)), "epoch": step + 1}
        np.savez(tmp_path / f"moments/{step:09d}.npz", **found, **facts)
    (tmp_path / "moments/000000010.npz").write_bytes(b"cut off")
    kept = moments_of(run, data, subject.class_names, shape)
    assert len(kept["epochs"]) == 40 and (kept["epochs"][0], kept["epochs"][-1], kept["count"]) == (1, 50, 8)
    assert torch.equal(kept["token"][-1], torch.from_numpy(found["token"]).float())
    rows = np.arange(len(data))
    others = [rows[1:], rows[::-1].copy(), np.roll(rows, 1)]  # fewer, and as many in another order
    assert [moments_of(run, data.take(row), subject.class_names, shape) for row in others] == [None] * 3
    subject.data.build("train")
    other = subject.data.splits["train"].take(rows)
    assert len(other) == len(data) and moments_of(run, other, subject.class_names, shape) is None
    assert moments_of(run, data, subject.class_names, shape | {"depth": 3}) is None
    del facts["hash"]
    np.savez(tmp_path / "moments/000000049.npz", **found, **facts)  # of an earlier vitlab
    assert moments_of(run, other, subject.class_names, shape)["epochs"] == [50]


def test_moments_take_at_most_their_share_of_the_cpu_time(monkeypatch):
    moments, now = Moments(share=0.01), [0.0]
    trainer = type("Trainer", (), {"is_global_zero": True})()
    monkeypatch.setattr("vitlab.look.moments.can_be_shown", lambda *_: now.append(1) or False)

    def is_asked(cpu, last, spent):
        moments._begun, moments._last, moments.spent, before = 0.0, last, spent, len(now)
        moments._is_due(trainer, None, cpu)
        return len(now) > before

    assert is_asked(100.0, 0.1, 0.89) and not is_asked(100.0, 0.1, 0.91)
    moments.share = 0.0
    assert not is_asked(100.0, 0.0, 0.0)
    with pytest.raises(ValueError, match=r"`share` of Moments must lie in 0..1, got 2"):
        Moments(share=2)


def test_an_unreadable_folder_of_moments_ends_no_training(tmp_path, monkeypatch, caplog):
    def fail(run):
        raise OSError(5, "Input/output error", str(run / "moments"))

    monkeypatch.setattr("vitlab.look.moments._files", fail)
    moments = Moments()
    trainer = type("Trainer", (), {"is_global_zero": True, "default_root_dir": tmp_path, "global_step": 0})()
    moments.on_train_start(trainer, None)
    assert moments.share == 0 and "moments/ is not continued: OSError" in caplog.text


@pytest.mark.slow
@pytest.mark.rare
def test_a_run_keeps_its_moments_without_changing_training(runs, monkeypatch):
    monkeypatch.chdir(runs)
    assert [path.name for path in sorted(Path("runs/one/moments").iterdir())] == [
        f"{step:09d}.npz" for step in (5, 10, 15)
    ]
    off = "--trainer.callbacks=[{class_path: vitlab.look.moments.Moments, init_args: {share: 0}}]"
    assert main(["fit", "--config", CONFIG, "--run_dir", "runs/off", *SHORT, off]) == 0
    assert not Path("runs/off/moments").exists()
    weights = [torch.load(f"runs/{n}/checkpoints/last.ckpt", weights_only=True)["state_dict"] for n in ("one", "off")]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def test_the_list_has_a_fixed_sample_and_the_mistakes_beyond_it(monkeypatch):
    monkeypatch.setattr("vitlab.look.listed.MOST", 10)
    table = pd.DataFrame({"index": range(100), "target": 0, "prediction": 0, "probability": 0.5})
    wrong = table.assign(prediction=[int(i % 25 == 0) for i in range(100)])

    def on_page(name, found):
        return Shown(name, RunDir(name), {"splits": {"val": {"hash": "one"}}}, found)

    found = listed([on_page("a", ("val", table)), on_page("b", ("val", wrong)), on_page("c", ("test", table))])
    assert set(found["index"]) >= {0, 25, 50, 75} and 10 <= len(found["index"]) <= 14 and found["without"] == ["c"]
    values = torch.randn(30, 5).double() * torch.tensor([9.0, 3.0, 0.1, 0.1, 0.1])
    places, shares = principal(values, count=2)
    assert shares.sum() > 0.99 and abs(float(torch.corrcoef(torch.stack([places[:, 0], values[:, 0]]))[0, 1])) > 0.99
    assert listed([on_page("a", None)]) is None and listed([on_page("a", ("val", table.assign(index=-1)))]) is None


def test_pictures_beside_predictions_keep_their_shape():
    """Images of 8 x 24 pixels whose left half is white, on a sheet of 32 x 32 pixels each."""
    images = torch.zeros(3, 1, 8, 24)
    images[..., :12] = 1.0
    splits = {"val": SimpleNamespace(take=lambda index: images[index])}
    shown = lambda x: x.permute(0, 2, 3, 1).numpy()  # noqa: E731
    subject = SimpleNamespace(data=SimpleNamespace(splits=splits), pixels_of=shown)
    url = _sheet(subject, "val", np.arange(3))
    sheet = np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("L")).astype(int)
    one = sheet[:32, 64:96]
    assert sheet.shape == (32, 1024)
    assert (one[12:20, 1:15] > 230).all() and (one[12:20, 17:31] < 25).all()  # 11 of 32 rows, as 8 x 24 demands
    assert (abs(one[[2, 5, 8, 23, 26, 29]] - 128) < 25).all()


WORK = Path(__file__).with_name("work.js")


@pytest.mark.rare
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_reader_uses_the_page_in_a_browser(runs, scheme):
    page = (runs / "both.html").read_text()
    assert len(page.encode()) < 5e6 and not re.search(r'(src|href)="https?:', page)
    text = json.dumps(page).replace("</", "<\\/").replace("<!--", "<\\!--")
    (runs / "work.html").write_text(f"<body><script>{WORK.read_text().replace('PAGE', text)}</script></body>")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=60000", "--dump-dom"]
    flags += [
        "--enable-logging=stderr",
        *(["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] * (scheme == "dark")),
    ]
    words = [str(CHROMIUM), *flags, (runs / "work.html").as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    assert "Uncaught" not in done.stderr and "data-failed" not in done.stdout.rpartition("<body")[2][:2000]
    found = json.loads(html.unescape(re.search('data-said="([^"]*)"', done.stdout)[1]))
    assert [facts["width"] for facts in sorted(found, key=lambda f: f["width"])] == [390, 1200, 1920]
    for facts in found:
        for name, number in zip(("one", "two"), facts["numbers"], strict=False):
            table = pd.read_csv(runs / f"runs/{name}/analysis/attention.csv")
            weight = table.query("image == 0 and map == 'mean of heads' and row == 1 and column == 2")["weight"].item()
            assert number.startswith("row 1, column 2: ")
            assert float(number.split(": ")[1]) == pytest.approx(weight, abs=1e-3)
        saved = pd.read_csv(io.StringIO(facts["map"])).query("run == 'one' and row == 1 and column == 2")
        assert saved["value"].item() == pytest.approx(float(facts["numbers"][0].split(": ")[1]), abs=1e-4)
        assert facts["epoch"].startswith("1|true|epoch 1: ")
        with np.load(sorted((runs / "runs/one/moments").iterdir())[0]) as kept:
            first = kept["token"][0, -1].astype(float).mean(axis=0)
        then = pd.read_csv(io.StringIO(facts["then"])).query("run == 'one'")
        assert then["epoch"].unique().tolist() == [1] and then["value"].to_numpy() == pytest.approx(first, abs=1e-3)
        tables = [pd.read_parquet(runs / f"runs/{name}/predictions/val.parquet") for name in ("one", "two")]
        wrong = np.any([(table["target"] != table["prediction"]).to_numpy() for table in tables], axis=0)
        assert facts["mistakes"] == f"{wrong.sum()} of {len(wrong)} images" and facts["bad"]
        assert sorted(pd.read_csv(io.StringIO(facts["list"]))["image"]) == tables[0]["index"][wrong].tolist()
        assert facts["linked"] and facts["svg"] and facts["plots"] >= 3
        assert "@page{size:440px 270px;margin:0}" in facts["pdf"] and facts["pdf"].count("</svg>") == 1
        is_of_class(runs, facts)
        assert facts["curve"] == "name,step,value" and facts["file"].endswith(".svg")
        assert not facts["wide"] and not facts["overlap"], facts["overlap"]
        assert facts["dark"] == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 22, 26)")


def is_of_class(runs, facts):
    """Assert that the numbers of both maps are of the predicted class, then of the one that was chosen by its name."""
    k, chosen = facts["classed"]
    assert facts["target"] and str(int(k)) in facts["classes"]  # digits are called by their number
    shown = {name: pd.read_csv(io.StringIO(text)) for name, text in (("first", facts["predicted"]), ("then", chosen))}
    assert set(shown["then"]["class"].astype(str)) == {k} and set(shown["first"]["class"]) == {"predicted"}
    for name in ("one", "two"):
        subject, *_ = subject_at(str(runs / "runs" / name), View())
        image = subject.shown(1)
        values = {when: table["value"][table["run"] == name].to_numpy() for when, table in shown.items()}
        for when, of in (("first", subject.net(image).argmax(dim=1)), ("then", torch.tensor([int(k)]))):
            expected = gradient_attention(subject.net, image, of)[0].numpy()
            assert values[when] == pytest.approx(expected, abs=1e-4 * float(expected.max())), (name, when)
        assert not np.allclose(values["first"], values["then"], rtol=0.01)


def test_a_network_that_diverged_still_has_a_page():
    values = packed(torch.tensor([float("nan"), 1.0, float("inf")]))
    assert (values["low"], values["high"]) == (0.0, 1.0)
    torch.manual_seed(0)
    net = VisionTransformer(img_size=8, in_chans=1, num_classes=10, patch_size=2, embed_dim=16, depth=2, num_heads=2)
    torch.nn.init.constant_(net.blocks[0].attn.qkv.weight, float("nan"))
    table = pd.DataFrame({"index": range(4), "target": 0, "prediction": 0, "probability": float("nan")})
    subject = Subject(net, Digits())
    subject.data.build("val")
    found = listed([Shown("a", RunDir("a"), {}, ("val", table), subject)])
    assert found["runs"]["a"]["maps"] == {} and json.dumps(found, allow_nan=False)


def test_maps_of_a_performer_with_vanishing_features_are_those_it_applies():
    torch.manual_seed(0)
    tokenizer = T2TTokenizer((8, 8), in_chans=1, embed_dim=16, t2t_kernels=(3, 3), t2t_strides=(1, 2), t2t_dim=8)
    layer = tokenizer.layers()[0]
    with torch.no_grad():
        layer.kqv.weight *= 30  # exp(w x - |x|^2 / 2) is 0 for some tokens in float32
    images = torch.randn(2, 1, 8, 8)
    (maps, *_), ((windows, _), *_) = token_layer_maps(tokenizer, images), split_features(tokenizer, images)
    k, q, v = layer.kqv(layer.norm1(windows)).chunk(3, dim=-1)
    assert float(maps.sum(dim=-1).min()) < 0.5  # a token that reads nothing, and not 0 / 0
    torch.testing.assert_close(maps @ v, layer.attend(q, k, v), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("pool", "token"), [("map", False), ("avg", True)])
def test_what_is_kept_is_what_the_head_reads(pool, token):
    net = VisionTransformer(
        img_size=8, in_chans=1, patch_size=2, embed_dim=16, depth=1, num_heads=2, num_classes=3, init_std=0.5,
        class_token=token, global_pool=pool, pos_embed=["learned", "rope2d"],
    ).eval()  # fmt: skip
    images = torch.randn(2, 1, 8, 8)
    found = seen(net, images)
    expected = last_attention(net, images, torch.zeros(2, dtype=torch.long)).numpy()
    assert found["token"][:, 0].mean(axis=1) == pytest.approx(expected, abs=1e-3) and "positions" in found
