"""The n-th call of a command to the file system fails, for every n: a loop in the manner of SQLite.

Python's own calls are patched: open, os.open, os.fsync, os.replace, os.rename, os.link, os.utime, os.stat, os.mkdir,
and write and flush of files that Python opened for writing; each under the command's working folder alone. What this
cannot see: calls of libraries in C++ and Rust (safetensors, pyarrow, onnx, torch.export, the core of W&B), memory
maps, and directories that are listed.
"""

import builtins
import contextlib
import errno
import io
import json
import os
import random
import shutil
import sys
from functools import partial
from pathlib import Path

from harness import CONFIGS, Process

ERRORS = (errno.EIO, errno.ENOSPC, errno.ESTALE, errno.EACCES)
FIT = ["fit", "--config", str(CONFIGS / "vit.yaml"), "--trainer.logger=false", "--model.embed_dim=8", "--quiet"]
FIT += ["--model.depth=1", "--model.num_heads=2", "--data.batch_size=32", "--trainer.max_epochs=2", "--data.subset=0.1"]
COMMANDS = {  # words; those of the repetition, where they differ; the file that exit 0 promises
    "fit": ([*FIT, "--name", "new"], [*FIT, "--name", "new", "--auto_resume"], "runs/new/weights/last.safetensors"),
    "resume": (["fit", "--resume", "cut", "--quiet"], None, "runs/cut/weights/last.safetensors"),
    "validate": (["validate", "done", "--quiet"], None, "runs/done/predictions/val.parquet"),
    "test": (["test", "done", "--quiet"], None, "runs/done/predictions/test.parquet"),
    "predict": (["predict", "done", "image.png", "-o", "p.csv"], None, "p.csv"),
    "embed": (["embed", "done", "image.png", "-o", "e.csv"], None, "e.csv"),
    "export": (["export", "done", "--to", "safetensors"], None, "runs/done/export/best.safetensors"),
    "look": (["look", "done", "--pictures", "2", "-o", "l.html"], None, "l.html"),
    "analyze": (["analyze", "cost", "done"], None, "runs/done/analysis/cost.csv"),
    "pack": (["pack", "photos", "packed", "--size", "16", "--num_workers", "0"], None, "packed/index.npz"),
    "results": (["results", "done"], None, None),
    "verify": (["verify", "done"], None, None),
}


class Failing:
    """Calls are counted; the ``n``-th fails with ``number``."""

    def __init__(self, root, n, number):
        self.root, self.n, self.number, self.count = os.path.realpath(root), n, number, 0
        self.what = ""

    def __call__(self, name, place):
        try:
            path = os.readlink(f"/proc/self/fd/{place}") if isinstance(place, int) else os.fspath(place)
        except (OSError, TypeError):
            return
        path = os.path.join(os.getcwd(), os.fsdecode(path))
        if not path.startswith(self.root) or "/log-" in path or path.endswith("/calls"):
            return
        self.count += 1
        if self.count == self.n:
            self.what = f"{name} {path}"
            raise OSError(self.number, os.strerror(self.number), path)


class Written:
    """A file opened for writing whose writes and flushes are counted."""

    def __init__(self, file, failing):
        self.file, self.failing = file, failing

    def __getattr__(self, name):
        return getattr(self.file, name)

    def write(self, data):
        self.failing("write", self.file.name)
        return self.file.write(data)

    def flush(self):
        self.failing("flush", self.file.name)
        return self.file.flush()

    def __iter__(self):
        return iter(self.file)

    def __enter__(self):
        self.file.__enter__()
        return self

    def __exit__(self, *error):
        return self.file.__exit__(*error)


def install(root, n, number):
    """Patch this process; at its end, the file ``calls`` has the number of calls and the one that failed."""
    failing, leave = Failing(root, n, number), os._exit

    def patched(call, name, position=0):
        def counted(*words, **more):
            failing(name, words[position] if len(words) > position else None)
            return call(*words, **more)

        return counted

    real = io.open

    def opened(file, mode="r", *words, **more):
        failing("open", file)
        found = real(file, mode, *words, **more)
        return Written(found, failing) if set(mode) & set("wax+") and not isinstance(file, int) else found

    builtins.open = io.open = opened
    for name in ("open", "fsync", "rename", "link", "utime", "stat", "mkdir"):
        setattr(os, name, patched(getattr(os, name), name))
    os.replace = patched(os.replace, "replace", 1)

    def ended(code):
        with real(os.path.join(root, "calls"), "w") as file:
            file.write(json.dumps([failing.count, failing.what]))
        leave(code)

    os._exit = ended


def prepare(folder):
    """Write what all commands need: a finished run, one that was stopped, an image, and photos."""
    from harness import finish
    from PIL import Image

    finish([*FIT, "--name", "done"], folder)
    finish(["test", "done", "--quiet"], folder)
    shutil.copytree(folder / "runs" / "done", folder / "runs" / "cut")
    for name in ("weights", "results.json"):
        path = folder / "runs" / "cut" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    Image.effect_noise((8, 8), 50).convert("L").save(folder / "image.png")
    for i in range(4):
        path = folder / "photos" / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((20, 20), 50 + i).save(path)


def numbers(folder):
    """Return the measured numbers of all runs in a folder."""
    found = {}
    for path in folder.glob("runs/*/results.json"):
        with contextlib.suppress(ValueError):
            found[path.parent.name] = json.loads(path.read_text())
    return found


def once(command, template, folder, n, number):
    """Run a command whose ``n``-th call fails, and repeat it; return its calls, and what is wrong if anything is."""
    words, again, promised = COMMANDS[command]
    shutil.copytree(template, folder)
    facts = {"VITLAB_CACHE": str(folder / "cache")}
    process = Process(words, folder, partial(install, str(folder), n, number), facts)
    code, said = process.wait(120), process.output()
    calls, failed = json.loads((folder / "calls").read_text()) if (folder / "calls").is_file() else (0, "?")
    where = f"{command}, call {n} ({failed.replace(str(folder), '.')}, {errno.errorcode[number]}): "
    lines = [line for line in said.splitlines() if line.strip()]
    if "Traceback" in said:
        return calls, f"{where}traceback, exit {code}: {lines[-1][:200] if lines else ''}"
    if code not in (0, 1, 2):
        return calls, f"{where}exit {code}: {said[-200:]}"
    if code and failed and not any("/" in line or "vitlab" in line for line in lines):
        return calls, f"{where}exit {code} without a line that names a path: {said[-200:]!r}"
    if code == 0 and promised and not (folder / promised).is_file():
        return calls, f"{where}exit 0 and no {promised}"
    if code:
        repeated = Process(again or words, folder, None, facts)
        if (second := repeated.wait(120)) != 0:
            return calls, f"{where}exit {code}, and again exit {second}: {repeated.output()[-200:]!r}"
    return calls, None


def loop(folder, commands=tuple(COMMANDS), share=1.0, seed=0):
    """Fail calls of each command, all or a random share; return how many there are and failed, and what is wrong."""
    draw = random.Random(seed)
    template = folder / "template"
    template.mkdir(parents=True)
    prepare(template)
    found = {}
    for command in commands:
        total, wrong = once(command, template, folder / f"{command}-0", -1, errno.EIO)
        injected, problems = 0, [wrong] if wrong else []
        every = [(n, number) for n in range(1, total + 1) for number in ERRORS]
        for n, number in every if share == 1 else draw.sample(every, max(2, round(share * len(every)))):
            place = folder / f"{command}-{n}-{number}"
            problems += [wrong] if (wrong := once(command, template, place, n, number)[1]) else []
            injected += 1
            shutil.rmtree(place)
        found[command] = {"calls": total, "injected": injected, "wrong": problems}
    return found


def main():
    """Run the loop: FOLDER SHARE [COMMAND ...]."""
    folder, share = Path(sys.argv[1]), float(sys.argv[2])
    for command in sys.argv[3:] or COMMANDS:
        calls, injected, wrong = loop(folder / command, [command], share)[command].values()
        sys.stdout.write(f"{command}: {calls} calls, {injected} injected, {len(wrong)} wrong\n")
        sys.stdout.write("".join(f"  {text}\n" for text in wrong))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
