"""Type the commands of pages as they stand, from a wheel in a new environment: ``make walk PYTHON=python3.13``.

Nothing is shortened, and nothing of the checkout can be imported: what the wheel lacks, or what another version of
Python breaks, shows. Not a test of the suite, since it downloads packages and trains in full.
"""

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).parents[1]


def blocks(text: str, kind: str) -> list[str]:
    """Return the code blocks of a kind, such as ``bash``, in a page."""
    return re.findall(rf"^```{kind}\n(.*?)^```", text, flags=re.S | re.M)


def commands(text: str) -> list[str]:
    """Return the lines of a page that start vitlab."""
    lines = [line for block in blocks(text, "bash") for line in re.sub(r"\\\n\s*", "", block).splitlines()]
    return [line for line in lines if line.startswith(("vitlab ", "torchrun "))]


def lay_out(folder: Path) -> None:
    """Put there what a reader has: photos of two classes, and a picture of a digit."""
    pixels = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (folder / "photos" / name).mkdir(parents=True)
        for i in range(60):
            picture = Image.fromarray(pixels.integers(0, 255, (40, 36, 3), np.uint8))
            picture.save(folder / "photos" / name / f"{i}.png")
    Image.fromarray(pixels.integers(0, 255, (28, 28), np.uint8)).save(folder / "digit.png")


def copy_out(text: str, folder: Path) -> None:
    """Write the files that a page tells its reader to write."""
    for block in blocks(text, "yaml"):
        if block.startswith("name:"):
            (folder / "mine.yaml").write_text(block)
    for block in blocks(text, "python") + blocks(text, "yaml"):
        if name := re.match(r"# (\w+\.(?:py|yaml))\n", block):
            (folder / name[1]).write_text(block)


def walk(page: Path, vitlab: str) -> list[str]:
    """Type a page's commands in a new folder, print the seconds of each, and return those that failed."""
    failed, text = [], page.read_text()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        lay_out(folder)
        copy_out(text, folder)
        for line in commands(text):
            start = time.monotonic()
            command = re.sub(r"configs/([\w/]+)\.yaml", r"\1", line).replace("vitlab ", f"{vitlab} ", 1)
            done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True)
            print(f"{time.monotonic() - start:6.1f} s  exit {done.returncode}  {line}", flush=True)
            if done.returncode:
                failed.append(line)
                print(done.stdout[-2000:], done.stderr[-2000:])
    return failed


if __name__ == "__main__":
    found = Path(sys.executable).with_name("vitlab")
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    print(f"{version}, Python {sys.version.split()[0]}, from {found}")
    missed = [line for page in sys.argv[1:] for line in walk(ROOT / page, str(found))]
    sys.exit(f"{len(missed)} commands failed" if missed else 0)
