"""The README is true: its commands run, in order, as typed but for the number of epochs."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitlab.cli.main import main

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", TEXT, flags=re.S)
COMMANDS = [line for block in BLOCKS for line in block.splitlines() if line.startswith("vitlab ")]


def shorter(words):
    if words[0] != "fit" or "--help" in words:
        return words
    if "--resume" in words:
        return [re.sub(r"max_epochs=\d+", "max_epochs=2", word) for word in words]
    less = [] if "--data=ImageFolder" in words else ["--data.subset=0.2"]
    return [*words, "--trainer.max_epochs=1", *less]


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A folder with the things that the README's reader has."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    pixels = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(60):
            picture = Image.fromarray(pixels.integers(0, 255, (40, 36, 3), np.uint8))
            picture.save(tmp_path / "photos" / name / f"{i}.png")
    Image.fromarray(pixels.integers(0, 255, (28, 28), np.uint8)).save(tmp_path / "digit.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_command_of_the_readme_runs(desk):
    assert len(COMMANDS) > 10
    for command in COMMANDS:
        words = shorter(shlex.split(command)[1:])
        if "--trainer.devices=2" in words:
            code = subprocess.run([sys.executable, "-m", "vitlab", *words], timeout=240).returncode
        else:
            code = main(words)
        assert code == 0, command


def test_the_readme_shows_both_make_targets_and_names_files_that_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^    make (\w+)", TEXT, flags=re.M):
        assert f"\n{target}:" in makefile
    for path in re.findall(r"`((?:configs|tests|benchmarks|docs|experiments)/[\w/.-]+)`", TEXT):
        assert (ROOT / path).exists(), path
