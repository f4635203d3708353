"""The n-th call of a command to the file system fails, for every n: a loop in the manner of SQLite.

Python's own calls are patched: open, os.open, os.fsync, os.replace, os.rename, os.link, os.unlink, os.utime, os.stat,
os.mkdir, os.listdir, os.scandir, and write and flush of files that Python opened for writing; each under the command's
working folder alone.
What this cannot see: calls of libraries in C++ and Rust (safetensors, pyarrow, onnx, torch.export, the core of W&B),
memory maps, and the processes that a command starts (cells of an ablation, workers).

A site is a call from one place of the code, for one file up to its numbers. By default each site fails at its first
and its last call, with one of the errors in turn; with ``every`` = 1 all calls fail so, with 4 each with all errors.
"""

import builtins
import errno
import functools
import io
import itertools
import json
import os
import random
import re
import shutil
import sys
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import yaml
from harness import CONFIGS, Process

ERRORS = (errno.EIO, errno.ENOSPC, errno.ESTALE, errno.EACCES)
FIT = ["fit", "--config", str(CONFIGS / "vit.yaml"), "--trainer.logger=false", "--model.embed_dim=8", "--quiet"]
FIT += ["--model.depth=1", "--model.num_heads=2", "--data.batch_size=32", "--trainer.max_epochs=2", "--data.subset=0.1"]
SUBMIT = ["submit", "fit", *FIT[1:], "--slurm", str(CONFIGS / "cluster" / "slurm.yaml"), "--nodes", "1", "--gpus", "1"]
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
    "ablate run": (["ablate", "run", "new.yaml", "--trust_command"], None, "runs/ablations/new"),
    "ablate report": (["ablate", "report", "toy.yaml"], None, "runs/ablations/toy"),
    "ablate verify": (["ablate", "verify", "toy.yaml"], None, None),
    "ablate export": (["ablate", "export", "toy.yaml", "sent"], None, "sent"),
    "submit": ([*SUBMIT, "--name", "far"], None, "runs/slurm/far.sbatch"),
    "runs": (["runs", "list"], None, None),
    "results": (["results", "done"], None, None),
    "verify": (["verify", "done"], None, None),
}


class Failing:
    """Calls are counted by site; of the site ``target``, the call ``k`` fails with ``number``.

    As the system's own, the error names the path as the call gave it, and no path where the call gave a descriptor.
    With ``forever``, each later call fails as well, as of a disk that is gone.
    """

    def __init__(self, root, target, k, number, forever=False):
        self.root, self.target, self.k, self.number = os.path.realpath(root), target, k, number
        self.forever = forever
        self.counts = Counter()
        self.failed = []  # paths of the calls that failed
        self.busy = False

    def __call__(self, name, place, *named):
        if self.busy:
            return
        self.busy = True  # what is asked here is not a call of the command
        try:
            path = os.readlink(f"/proc/self/fd/{place}") if isinstance(place, int) else os.fspath(place)
        except (OSError, TypeError):
            return
        finally:
            self.busy = False
        path = os.fsdecode(path)
        if isinstance(place, int) and not path.startswith("/"):
            return  # a pipe to a process, such as sbatch: no file of the run directory
        path = os.path.join(os.getcwd(), path)
        if not path.startswith(self.root) or "/log-" in path or path.endswith("/calls"):
            return  # of another folder, or of this loop's
        if "/bin/" in path or "__path_hook__" in path:
            return  # where Python looks for programs and modules
        site = self.site(name, path)
        self.counts[site] += 1
        if (site == self.target and self.counts[site] == self.k) or (self.forever and self.failed):
            self.failed.append(path)
            raise OSError(self.number, os.strerror(self.number), *named)

    def site(self, name, path):
        """Return name, file and place in the code of a call, as text."""
        frame, places = sys._getframe(2), []
        while frame is not None and len(places) < 3:
            file = frame.f_code.co_filename
            if "/vitlab/" in file or not places:
                places.append(f"{file.rpartition('/')[2]}:{frame.f_lineno}")
            frame = frame.f_back
        file = re.sub(r"-[a-z0-9_]{8}(?=/|$)", "-#", path[len(self.root) :])  # a name of tempfile
        file = re.sub(r"[0-9a-f]{6,}|\d+", "#", file)
        return f"{name} {file} {' < '.join(places)}"


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


def install(root, target, k, number, forever=False):
    """Patch this process; at its end, the file ``calls`` has the calls of each site, and the paths that failed."""
    failing, leave = Failing(root, target, k, number, forever), os._exit

    def patched(call, name, position=0):
        @functools.wraps(call)
        def counted(*words, **more):
            place = words[position] if len(words) > position else None
            named = [os.fspath(word) for word in words[:2] if isinstance(word, str | os.PathLike)]
            named[1:] = [None, *named[1:]] if name in ("rename", "replace", "link") else []  # as the system's errors
            failing(name, place, *named)  # of a descriptor, no name
            return call(*words, **more)

        return counted

    real = io.open

    def opened(file, mode="r", *words, **more):
        failing("open", file, *() if isinstance(file, int) else (os.fspath(file),))
        found = real(file, mode, *words, **more)
        return Written(found, failing) if set(mode) & set("wax+") and not isinstance(file, int) else found

    builtins.open = io.open = opened
    for name in ("open", "fsync", "rename", "link", "unlink", "utime", "stat", "mkdir", "listdir", "scandir"):
        setattr(os, name, patched(getattr(os, name), name))
    os.replace = patched(os.replace, "replace", 1)

    def ended(code):
        with real(os.path.join(root, "calls"), "w") as file:
            file.write(json.dumps([failing.counts, failing.failed]))
        leave(code)

    os._exit = ended


def prepare(folder):
    """Write what all commands need: a finished run, one that was stopped, an ablation, an image, and photos."""
    from harness import finish
    from PIL import Image

    finish([*FIT, "--name", "done"], folder)
    finish(["test", "done", "--quiet"], folder)
    shutil.copytree(folder / "runs" / "done", folder / "runs" / "cut")
    for name in ("weights", "results.json"):
        path = folder / "runs" / "cut" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    Image.effect_noise((8, 8), 50).convert("L").save(folder / "image.png")
    (folder / "bin").mkdir()
    (folder / "bin" / "sbatch").write_text("#!/bin/sh\necho '4711;cluster'\n")
    (folder / "bin" / "sbatch").chmod(0o755)
    for i in range(4):
        path = folder / "photos" / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((20, 20), 50 + i).save(path)


def ablation(folder):
    """Write an ablation of a toy that trains nothing, run, and the same again, not run."""
    from harness import finish

    toy = Path(__file__).parents[1] / "ablation" / "toy.py"
    (folder / "base.yaml").write_text("trainer: {max_epochs: 3}\nmodel: {pos_embed: none, lr: 0.001}\ndata: {}\n")
    levels = {arm: {"model.pos_embed": arm} for arm in ("none", "learned")}
    for name in ("toy", "new"):
        run = {"workers": 1, "retries": 1, "command": [sys.executable, str(toy)]}
        content = {"name": name, "base": "base.yaml", "axes": {"pos_embed": levels}, "seeds": 2, "run": run}
        content |= {"baseline": {"pos_embed": "none"}, "metric": {"primary": "acc1"}, "claims": ["learned > none"]}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    facts = toy_facts(folder) | {"TOY_PREDICTIONS": "1"}  # without which nothing verifies and is exported
    finish(["ablate", "run", "toy.yaml", "--trust_command"], folder, environment=facts)
    finish(["ablate", "report", "toy.yaml"], folder, environment=toy_facts(folder))


def toy_facts(folder):
    """Return the environment that the toy reads, with a stand-in for sbatch."""
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    return {
        "PATH": path,
        "TOY_STARTS": str(folder / "starts"),
        "TOY_SLEEP": "0",
        "TOY": "{}",
        "VITLAB_CACHE": str(folder / "cache"),
    }


def numbers(command, folder):
    """Return what a command has measured or written, without times and places, to compare two executions."""
    from harness import curve
    from safetensors.torch import load_file

    match command:
        case "fit" | "resume":
            run = folder / "runs" / ("new" if command == "fit" else "cut")
            weights = load_file(run / "weights" / "last.safetensors")
            return {name: value.tolist() for name, value in weights.items()}, curve(run)
        case "validate" | "test":
            split = "val" if command == "validate" else "test"
            stored = json.loads((folder / "runs" / "done" / "results.json").read_text())[split]
            return {name: value for name, value in stored.items() if isinstance(value, float)}
        case "predict" | "embed":
            return (folder / COMMANDS[command][2]).read_text()
        case "analyze":
            rows = (folder / COMMANDS[command][2]).read_text().splitlines()
            return [row for row in rows if "per second" not in row and "memory" not in row]
        case "export":
            return {name: value.tolist() for name, value in load_file(folder / COMMANDS[command][2]).items()}
        case "pack":
            return {path.name: zlib.crc32(path.read_bytes()) for path in (folder / "packed").glob("*.bin")}
        case "ablate run":
            found = (folder / "runs" / "ablations" / "new").glob("*/*/results.json")
            return sorted((path.parent.name, json.loads(path.read_text())["val"]["acc1"]) for path in found)
        case "ablate report":
            report = folder / "runs" / "ablations" / "toy" / "report"
            return [(report / name).read_text() for name in ("results.csv", "summary.csv")]
        case "ablate export":
            return (folder / "sent" / "SHA256SUMS").read_text()
        case "submit":
            return (folder / "runs" / "slurm" / "far.sbatch").read_text().replace(str(folder), "")
    return None


def names(said, failed, folder):
    """Return whether an output names the file of a failed call, or a folder that it is in below the working folder."""
    path = Path(re.sub(r"/\.(fit-)?[0-9a-f]+-[0-9a-f]+\.", "/", failed))  # a file beside its place
    path = Path(re.sub(r"/\.([^/]+)-[0-9a-f]{12}(?=/|$)", r"/\1", str(path)))  # a set that is being packed
    path = Path(re.sub(r"/\.([^/]+)\.\d+$", r"/\1", str(path)))  # an output that is being written
    inside = [path, *path.parents][: len(path.parts) - len(folder.parts)] or [path]
    return failed in said or any(str(one.relative_to(folder)) in said for one in inside)


class End(NamedTuple):
    """How a command ended of which a call failed."""

    calls: dict  # by site
    failed: str  # path of the call that failed; empty if none did
    code: int
    said: str
    wrong: str | None


def once(command, template, folder, target, k, number, expected=None, forever=False):
    """Run a command of which one call fails, and repeat it."""
    words, again, _ = COMMANDS[command]
    shutil.copytree(template, folder)
    facts = toy_facts(folder)
    process = Process(words, folder, partial(install, str(folder), target, k, number, forever), facts)
    code, said = process.wait(120), process.output()
    calls, failed = json.loads((folder / "calls").read_text()) if (folder / "calls").is_file() else ({}, ["?"])
    is_lost = number == errno.EIO and "is damaged: " in said  # another takes its place, and a line says so
    wrong = judge(folder, code, said, failed, None if is_lost else COMMANDS[command][2])
    if code in (1, 2) and not wrong:
        repeated = Process(again or words, folder, None, facts)
        if second := repeated.wait(120):
            wrong = f"exit {code}, and again exit {second}: {repeated.output()[-200:]!r}"
    if not wrong and not is_lost and expected is not None and (found := numbers(command, folder)) != expected:
        wrong = f"exit {code}, and other numbers in the end: {str(found)[:100]}, {str(expected)[:100]}"
    how = f"{command}, call {k} of {target} ({errno.errorcode[number]}): "
    return End(calls, failed[0] if failed else "", code, said.replace(f"{folder}/", ""), wrong and how + wrong)


def judge(folder, code, said, failed, promised):
    """Return what is wrong with a command's end, None if nothing is; exit 0 means that the file ``promised`` exists."""
    lines = [line for line in said.splitlines() if line.strip()]
    if "Traceback" in said:
        return f"traceback, exit {code}: {lines[-1][:200] if lines else ''}"
    if code not in (0, 1, 2):
        return f"exit {code}: {said[-200:]}"
    if code and failed and not any(names(said, path, folder) for path in failed):
        return f"exit {code} without a line that names {failed[0]}: {said[-200:]!r}"
    if code == 0 and promised and not (folder / promised).exists():
        return f"exit 0 and no {promised}"
    return None


def chosen(sites, every, share, draw):
    """Return which calls fail, as site, number of the call, and error."""
    errors = itertools.cycle(ERRORS)
    if every:
        calls = [(site, k) for site, count in sites.items() for k in range(1, count + 1)]
        return [(*call, number) for call in calls for number in (ERRORS if every == 4 else [next(errors)])]
    ends = [(site, k, next(errors)) for site, count in sites.items() for k in sorted({1, count})]
    return ends if share >= 1 else draw.sample(ends, min(len(ends), max(2, round(share * len(ends)))))


def loop(folder, command, share=1.0, every=0, seed=0, say=lambda text: None, forever=False, at_once=2):
    """Fail calls of a command; return how many sites and calls there are, how many failed, and what is wrong.

    Args:
        folder: A new folder.
        command: A name of COMMANDS.
        share: Of the first and last calls of all sites, a random share.
        every: 1 for all calls, 4 for all calls with each error.
        seed: Of the random share.
        say: Called with each thing that is wrong.
        forever: Whether all later calls fail as well.
        at_once: Number of commands that run at a time.
    """
    template = folder / "template"
    template.mkdir(parents=True)
    prepare(template)
    if "ablate" in command:
        ablation(template)
    plain = once(command, template, folder / "plain", "", -1, errno.EIO)
    expected = None if plain.wrong else numbers(command, folder / "plain")
    calls = chosen(plain.calls, every, share, random.Random(seed))

    def fail(i):
        end = once(command, template, folder / f"point{i}", *calls[i], expected, forever)  # no name of a class
        say(f"  {end.wrong}\n" if end.wrong else "")
        shutil.rmtree(folder / f"point{i}")
        return end

    with ThreadPoolExecutor(at_once) as pool:
        ends = list(pool.map(fail, range(len(calls))))
    return {
        "calls": sum(plain.calls.values()),
        "sites": len(plain.calls),
        "injected": sum(bool(end.failed) for end in ends),
        "ends": Counter(end.code for end in ends),
        "wrong": [end.wrong for end in (plain, *ends) if end.wrong],
        "lines": Counter(end.said.strip() for end in ends if end.code),
    }


def main():
    """Run the loop and print each line that a command ended with: FOLDER SHARE [COMMAND ...]."""
    folder, share = Path(sys.argv[1]), float(sys.argv[2])
    for command in sys.argv[3:] or COMMANDS:
        place = folder / command.replace(" ", "-")
        found = loop(place, command, share, say=sys.stdout.write)
        for line, count in found.pop("lines").most_common():
            sys.stdout.write(f"  {count} x {line}\n")
        sys.stdout.write(f"{command}: {found}\n")
        sys.stdout.flush()
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
