"""After any sequence of commands, each number that any command prints equals a fresh measurement, or is marked."""

import json
import random
import re
import shutil
from pathlib import Path

import pytest

import vitlab
from vitlab.cli.main import main
from vitlab.runs.directory import RunDir
from vitlab.runs.manifest import file_digest

CONFIG = str(Path(__file__).parents[2] / "configs" / "t2t.yaml")
SMALL = ["--model.depth=1", "--model.embed_dim=24", "--data.subset=0.2", "--trainer.limit_train_batches=3"]
SMALL += ["--trainer.logger=false", "--model.lr=0.02"]  # so large that some epochs are worse than those before
NAMES = ("a", "b", "c")
VARIATION = {"model.pos_embed": "none"}
NEVER = ["--trainer.check_val_every_n_epoch=9"]
SEEDS = (0,)  # meets a number that has outlived its checkpoint
RARE = range(1, 40)


class World:
    """A folder with runs, to which a random sequence of commands happens."""

    def __init__(self, seed, capsys, monkeypatch):
        self.rng, self.capsys, self.monkeypatch = random.Random(seed), capsys, monkeypatch
        self.done: list[str] = []
        self.known: dict[tuple[str, str, str], dict[str, float]] = {}
        self.marked = self.shown = 0

    @property
    def names(self):
        return sorted(path.parent.name for path in Path("runs").glob("*/run.json"))

    def run(self, *words, code=0):
        self.capsys.readouterr()
        assert main([*words]) == code, (self.done, words)
        return self.capsys.readouterr()

    def step(self):
        """Do one thing, chosen at random, that is possible now."""
        free = [name for name in NAMES if name not in self.names]
        acts = [self.resume, self.resume, self.test, self.test, self.overwrite, self.vary, self.validate, self.older]
        acts += [self.cut, self.analyze, self.touch, *([self.move, self.copy] if free else [])]
        act = self.rng.choice(acts) if self.names else self.fit
        name = self.rng.choice(self.names or NAMES)
        self.done.append(f"{act.__name__} {name}")
        act(name)

    def fit(self, name, *more):
        rare = NEVER if self.rng.random() < 0.25 else []
        words = ["--name", name, *SMALL, *rare, f"--seed_everything={self.rng.randrange(100)}", *more, "--quiet"]
        self.run("fit", "--config", CONFIG, f"--trainer.max_epochs={self.rng.choice((1, 2))}", *words)

    def overwrite(self, name):
        self.fit(name, "--overwrite")

    def resume(self, name):
        epochs = vitlab.Run(name).config["trainer"]["max_epochs"] + self.rng.choice((0, 1, 1, 2))
        self.run("fit", "--resume", name, f"--trainer.max_epochs={epochs}", "--quiet")

    def cut(self, name):
        """Resume, and be killed after the last checkpoint, before the results are written."""
        with self.monkeypatch.context() as patch:
            patch.setattr("vitlab.jobs.train.fit.close", lambda job, trained, seconds: None)
            self.resume(name)

    def test(self, name):
        self.run("test", name, "--quiet")

    def validate(self, name):
        self.run("validate", name, "--quiet")

    def older(self, name):
        """Measure another of its checkpoints."""
        path = self.rng.choice(sorted((Path("runs") / name / "checkpoints").glob("*.ckpt")))
        self.run(self.rng.choice(("test", "validate")), str(path), "--quiet")

    def vary(self, name):
        out = self.run("test", name, *(f"--{key}={value}" for key, value in VARIATION.items())).out
        assert "variation with model.pos_embed=none: test/" in out and "\ntest/" not in out

    def analyze(self, name):
        self.run("analyze", "confusion", name, "--quiet")

    def move(self, name):
        (Path("runs") / name).rename(Path("runs") / self._free())

    def copy(self, name):
        """Copy as `cp -r` does, which changes the times of all files, or as `cp -a`."""
        function = self.rng.choice((shutil.copyfile, shutil.copy2))
        shutil.copytree(Path("runs") / name, Path("runs") / self._free(), copy_function=function)

    def touch(self, name):
        for path in (Path("runs") / name / "checkpoints").glob("*.ckpt"):
            path.touch()

    def _free(self):
        return self.rng.choice([name for name in NAMES if name not in self.names])

    def fresh(self, name, split="test", checkpoint=None, overrides=()):
        """Measure a copy of a run now, once for each content of its checkpoint."""
        path = Path("runs") / name / "checkpoints" / checkpoint if checkpoint else vitlab.Run(name).checkpoint
        key = (file_digest(path), split, str(overrides))
        if key not in self.known:
            copied = Path("fresh") / name
            shutil.rmtree(copied, ignore_errors=True)
            shutil.copytree(Path("runs") / name, copied)
            run = vitlab.Run(copied / "checkpoints" / path.name)
            self.known[key] = run.validate() if split == "val" else run.test(dict(overrides))
            self.capsys.readouterr()
        return self.known[key]

    def check(self):
        """Ask every reader about every run."""
        for name in self.names:
            self.check_python(name)
            self.check_results(name)
        self.check_all_results()

    def check_python(self, name):
        run, stored = vitlab.Run(name), RunDir(Path("runs") / name).read("results.json")
        found = run.results
        for split in ("val", "test"):
            if split in found:
                self.same(found[split], self.fresh(name, split, found[split]["checkpoint"]), name)
            elif split in stored:  # marked, and rightly: the file of this name has another content
                (why,) = [one["why"] for one in found["stale"] if one["split"] == split and not one.get("overrides")]
                now = run.path / "checkpoints" / stored[split]["checkpoint"]
                assert not now.is_file() or file_digest(now) != stored[split]["sha256"], self.done
                assert "run `vitlab" in why
                self.marked += 1
        for one in found.get("variations", []):
            expected = self.fresh(name, one["split"], one["checkpoint"], tuple(one["overrides"].items()))
            self.same(one, expected, name)

    def same(self, result, expected, name):
        self.shown += 1
        for metric, value in expected.items():
            if metric in result:
                assert result[metric] == pytest.approx(value, abs=2e-5), (self.done, name, metric)

    def check_results(self, name):
        tested = "test" in RunDir(Path("runs") / name).read("results.json")
        stale = tested and "test" not in vitlab.Run(name).results
        told = self.run("results", name, code=0 if tested and not stale else 2)
        if stale:
            self.marked += 1
            assert re.search("measured before it went on; run|which was deleted; run", told.err), self.done
        elif tested:
            value, other = re.search(r"\| ([\d.]+) % of [\d,]+(?:, with (\S+))? \|", told.out).groups()
            assert float(value) == pytest.approx(100 * self.fresh(name, "test", other)["acc1"], abs=0.051), self.done
            assert bool(other) == ("measures" in told.err)

    def check_all_results(self):
        tested = [name for name in self.names if "test" in vitlab.Run(name).results]
        stale = [n for n in self.names if any(s["split"] == "test" for s in vitlab.Run(n).results.get("stale", []))]
        told = self.run("results", code=0 if tested else 2)
        plain = [n for n in stale if RunDir(Path("runs") / n).standing("test").is_stale]
        assert all(f"runs/{name}: its test result was" in told.err for name in plain) or not tested

    def check_pages(self):
        for name in self.names:
            self.run("look", name, "-o", f"{name}.html", "--overwrite", "--quiet", "--pictures=0")
            page = Path(f"{name}.html").read_text()
            self.check_head(page, name)
            self.check_analysis(page, name)
            self.check_card(name)
        for a, b in zip(self.names, self.names[1:], strict=False):
            self.run("look", a, b, "-o", "two.html", "--overwrite", "--quiet", "--pictures=0")
            self.check_pair(Path("two.html").read_text(), a, b)

    def check_head(self, page, name):
        shown = re.findall(r'class="big">([\d.]+) %</div>\s*accuracy on \d+ (.*)</div>', page)
        for value, words in shown:
            split = "val" if "validation" in words or "images of val" in words else "test"
            checkpoint = re.search(r"of (\w+\.ckpt)", words)
            expected = self.fresh(name, split, checkpoint and checkpoint[1])["acc1"]
            assert float(value) == pytest.approx(100 * expected, abs=0.0051), (self.done, name, words)
        results = vitlab.Run(name).results
        assert bool(shown) == ("test" in results or "val" in results), self.done
        for one in results.get("stale", []):
            if not one.get("overrides"):
                assert f"The result on {one['split']} was measured" in page, self.done

    def check_analysis(self, page, name):
        if not RunDir(Path("runs") / name).read("analysis/notes.json"):
            return
        text = re.search(r"<h3>confusion</h3>.*?<p class=\"note\">(.*?)</p>", page, re.S)[1]
        if "Left out: " not in text:
            found, now = RunDir(Path("runs") / name).note("confusion")
            self.run("analyze", "confusion", f"runs/{name}/checkpoints/{found['checkpoint']}", "-o", "fresh_analysis",
                     "--quiet")  # fmt: skip
            fresh = json.loads(Path("fresh_analysis/notes.json").read_text())["confusion"]["note"]
            assert found["note"] == fresh and not now.is_stale, self.done

    def check_card(self, name):
        path = vitlab.Run(name).export("safetensors", f"export/{name}.safetensors", check=False)
        for split, values in json.loads(Path(f"{path}.json").read_text())["measured"].items():
            self.same(values, self.fresh(name, split), name)

    def check_pair(self, page, a, b):
        if row := re.search(rf"<td>{a}, {b}</td><td>([+-][\d.]+)</td>", page):
            heads = re.findall(r'class="big">[\d.]+ %</div>\s*accuracy on \d+ images of (\w+).*?of (\w+\.ckpt)', page)
            first, second = (self.fresh(n, split, ckpt)["acc1"] for n, (split, ckpt) in zip((a, b), heads, strict=True))
            assert float(row[1]) == pytest.approx(second - first, abs=1e-4), self.done


def live(seed, tmp_path, monkeypatch, capsys, steps=9):
    monkeypatch.chdir(tmp_path)
    world = World(seed, capsys, monkeypatch)
    for i in range(steps):
        world.step()
        world.check()
        if i % 4 == 3:
            world.check_pages()
    world.check_pages()
    return world


@pytest.mark.rare
@pytest.mark.parametrize("seed", SEEDS)
def test_after_any_sequence_each_number_is_that_of_a_fresh_test_or_marked(seed, tmp_path, monkeypatch, capsys):
    world = live(seed, tmp_path, monkeypatch, capsys)
    assert world.shown > 0 and world.marked > 0


@pytest.mark.rare
@pytest.mark.parametrize("seed", RARE)
def test_a_page_shows_current_numbers_after_any_longer_sequence_of_commands(seed, tmp_path, monkeypatch, capsys):
    assert live(seed, tmp_path, monkeypatch, capsys, steps=14).shown > 0
