"""An ablation of the toy in a directory of its own."""

import contextlib
import io
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from vitlab.ablation.execution.probe import known
from vitlab.ablation.file.spec import read_ablation
from vitlab.ablation.inference.measured import collect
from vitlab.ablation.lab import Lab as Laboratory
from vitlab.cli.main import main

TOY = Path(__file__).with_name("toy.py")
ARMS = ("none", "learned", "rope2d")


class Lab:
    """A directory with an ablation of the toy."""

    toy = TOY

    def __init__(self, path):
        self.path = path
        self.processes = []
        self.starts = path / "starts"
        (path / "base.yaml").write_text("trainer: {max_epochs: 3}\nmodel: {pos_embed: none, lr: 0.001}\ndata: {}\n")
        self.change()

    def change(self, arms=ARMS, seeds=2, claims=("learned > none",), analyses=(), **run):
        run = {"workers": 2, "retries": 1, "command": [sys.executable, str(TOY)], **run}
        levels = {arm: {"model.pos_embed": arm} for arm in arms}
        content = {"name": "toy", "base": "base.yaml", "axes": {"pos_embed": levels}, "seeds": seeds, "run": run}
        content |= {"baseline": {"pos_embed": "none"}, "metric": {"primary": "acc1"}, "claims": list(claims)}
        content |= {"analyses": list(analyses)} if analyses else {}
        (self.path / "toy.yaml").write_text(yaml.safe_dump(content, sort_keys=False))

    def start(self, word="run", *more, toy=None, sleep=0.0, terminal=None):
        """Start a command as a process, to be killed or to share the directory with others."""
        env = {**os.environ, **self.environment(toy, sleep), "PYTHONPATH": str(Path(__file__).parents[2])}
        words = [sys.executable, "-m", "vitlab", *self.words(word, more)]
        pipes = {"stdout": terminal or subprocess.PIPE, "stderr": terminal or subprocess.PIPE}
        self.processes.append(subprocess.Popen(words, cwd=self.path, env=env, text=True, **pipes))
        return self.processes[-1]

    def __call__(self, word="run", *more, toy=None, sleep=0.0):
        """Run a command in this process, which has imported everything; its cells are processes all the same."""
        out = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            patch.chdir(self.path)
            for name, text in self.environment(toy, sleep).items():
                patch.setenv(name, text)
            code = main(self.words(word, more))
        return code, out.getvalue()

    def environment(self, toy, sleep):
        return {"TOY_STARTS": str(self.starts), "TOY_SLEEP": str(sleep), "TOY": json.dumps(toy or {})}

    def words(self, word, more):
        return ["ablate", word, "toy.yaml", *more, *(["--trust_command"] if word in ("plan", "run") else [])]

    def counts(self):
        lines = self.starts.read_text().splitlines() if self.starts.exists() else []
        return Counter(line.replace(str(self.path), "") for line in lines)

    def files(self, suffix):
        return sorted((self.path / "runs/ablations/toy").glob(f"*/*{suffix}"))

    def results(self):
        with contextlib.chdir(self.path):
            ablation = read_ablation("toy.yaml")
            return collect(ablation, known(ablation)).table().to_csv(index=False)


@pytest.fixture
def lab(tmp_path):
    lab = Lab(tmp_path)
    yield lab
    for process in lab.processes:
        if process.poll() is None:
            process.kill()
            process.communicate()


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A toy that was registered and run, with predictions and analyses; for all to copy."""
    lab = Lab(tmp_path_factory.mktemp("finished"))
    lab.change(arms=("none", "learned"), analyses=("resolution", "position"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(lab.path)
        patch.setenv("TOY_PREDICTIONS", "1")
        toy = Laboratory("toy.yaml", trust_command=True)
        toy.register()
        assert not toy.run().failed
        assert toy.verify().is_green
    return lab.path


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    lab = Lab(tmp_path_factory.mktemp("undisturbed"))
    assert lab()[0] == 0
    return lab.results()
