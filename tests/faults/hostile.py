"""Files and configurations that are broken or mean harm."""

import contextlib
import io
import json
import os
import pickle
import random
import shutil
from pathlib import Path

import numpy as np
import torch
import yaml
from harness import CONFIGS, TINY
from PIL import Image

from vitlab.cli.main import main
from vitlab.data.files.decode import ImageError, decode
from vitlab.ranges import RANGES

WEIRD = Path(os.environ.get("VITLAB_SHARED", Path(__file__).parents[3] / "shared")) / "data" / "weird"


def call(words):
    """Run a command in this process; return its exit code, and what it printed to both streams."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(word) for word in words])
        except SystemExit as error:
            code = error.code
        except BaseException as error:
            code = f"{type(error).__name__}: {error}"
    return code, out.getvalue(), err.getvalue()


def sources(draw):
    """Return valid image files of several formats, as bytes with their suffixes."""
    files = []
    for i, (kind, mode) in enumerate(
        [("JPEG", "RGB"), ("JPEG", "L"), ("PNG", "RGB"), ("PNG", "P"), ("WEBP", "RGB"), ("BMP", "RGB"), ("TIFF", "RGB"),
         ("GIF", "P"), ("PPM", "RGB"), ("PNG", "RGBA"), ("JPEG", "CMYK"), ("PNG", "I;16")]
    ):  # fmt: skip
        rng = np.random.default_rng(draw.randrange(2**32) + i)
        if mode == "I;16":
            image = Image.fromarray(rng.integers(0, 2**16, (37, 41), dtype=np.uint16))
        else:
            small = Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8))
            image = small.resize((41, 37), Image.Resampling.BICUBIC).convert(mode)
        buffer = io.BytesIO()
        image.save(buffer, kind)
        files.append((buffer.getvalue(), kind.lower()))
    return files


def fuzzed(folder, count, seed=0):
    """Write ``count`` files made from valid images: bytes flipped, cut, swapped in, appended, suffixes exchanged."""
    draw = random.Random(seed)
    files = sources(draw)
    paths = []
    for i in range(count):
        data, suffix = files[i % len(files)]
        data = bytearray(data)
        match i // len(files) % 7:
            case 0:
                for _ in range(draw.randrange(1, 30)):
                    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            case 1:
                data = data[: draw.randrange(len(data))]
            case 2:
                start = draw.randrange(len(data))
                data[start : start + 64] = draw.randbytes(64)
            case 3:
                data[: draw.randrange(1, 24)] = draw.randbytes(8)
            case 4:
                start = draw.randrange(len(data))
                del data[start : start + draw.randrange(1, 200)]
            case 5:
                data += draw.randbytes(draw.randrange(1, 999))
            case 6:
                other, _ = files[draw.randrange(len(files))]
                data[len(data) // 2 :] = other[len(other) // 2 :]
        if draw.random() < 0.3:
            suffix = draw.choice(["jpg", "png", "txt", "webp"])
        paths.append(folder / f"{i:03}.{suffix}")
        paths[-1].write_bytes(data)
    return paths


def images(folder, run, count=250):
    """Decode and predict weird and fuzzed files; return how many were decoded, refused by name, silent or crashed.

    What is decoded must be an upright RGB image that is not one color, unless the file says so; what is refused must
    be named with a reason. ``vitlab predict`` must agree with the decoder on every file.
    """
    place = folder / "images"
    place.mkdir()
    paths = fuzzed(place, count)
    if WEIRD.is_dir():
        for path in sorted(WEIRD.iterdir()):
            if path.suffix not in (".tsv",) and path.name != "LICENSE":
                paths.append(Path(shutil.copyfile(path, place / f"weird-{path.name}")))
    decoded, refused, crashes, silent = [], {}, 0, 0
    for path in paths:
        try:
            image = decode(path)
        except ImageError as error:
            refused[str(path)] = error.reason
            silent += not error.reason
            continue
        except BaseException:
            crashes += 1
            continue
        decoded.append(str(path))
        silent += image.mode != "RGB" or not image.width * image.height
    code, _, err = call(["predict", run, place, "-o", folder / "out.json", "--quiet"])
    predicted = {row["path"] for row in json.loads((folder / "out.json").read_text())}
    named = [path for path in refused if f"unreadable  {path}: " in err]
    crashes += code != 1
    silent += len(refused) - len(named) + len(set(decoded) ^ predicted)
    return {"files": len(paths), "decoded": len(decoded), "named": len(named), "silent": silent, "crashes": crashes}


class Payload:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def malicious(folder, command):
    """Write files of many kinds whose loading would run ``command``; return their paths."""
    bad = Payload(command)
    weights = {"net.head.weight": torch.zeros(2, 2)}
    contents = {
        "state": {"state_dict": {**weights, "x": bad}},
        "hyper": {"state_dict": weights, "hyper_parameters": bad},
        "whole": bad,
        "key": {"state_dict": weights, "callbacks": {"x": bad}},
    }
    paths = []
    for name, content in contents.items():
        for suffix in (".ckpt", ".safetensors"):
            paths.append(folder / f"{name}{suffix}")
            torch.save(content, paths[-1])
        paths.append(folder / f"{name}-legacy.pt")
        torch.save(content, paths[-1], _use_new_zipfile_serialization=False)
        paths.append(folder / f"{name}.pkl")
        paths[-1].write_bytes(pickle.dumps(content))
    return paths


def pickles(folder, run, every=1):
    """Give malicious files to every command that reads weights; return attempts, executions and tracebacks.

    ``every`` fourth file, say, instead of all.
    """
    proof = folder / "executed"
    bad = folder / "bad"
    bad.mkdir()
    attempts, executions, tracebacks, accepted = 0, 0, 0, 0
    for path in list(malicious(bad, f"touch {proof}"))[::every]:
        given = folder / "given"
        shutil.rmtree(given, ignore_errors=True)
        shutil.copytree(run, given)
        (given / "checkpoints" / "manifest.json").unlink()  # who can write the file can write its checksum
        for name in ("last.ckpt", "previous.ckpt", "best.ckpt"):
            shutil.copyfile(path, given / "checkpoints" / name)
        picture = given / "picture.png"
        Image.new("L", (8, 8)).save(picture)
        commands = [
            [*TINY, "--trainer.max_epochs=1", "--run_dir", folder / "new", "--init_from", path],
            [*TINY, "--trainer.max_epochs=1", "--run_dir", folder / "new", "--init_from", given],
            ["fit", "--resume", given, "--trainer.max_epochs=9"],
            ["test", given],
            ["validate", given / "checkpoints" / "last.ckpt"],
            ["predict", given, picture],
            ["export", given, "--to", "safetensors"],
            ["analyze", "cost", given],
        ]
        for words in commands:
            attempts += 1
            code, out, err = call(words)
            executions += proof.exists()
            proof.unlink(missing_ok=True)
            tracebacks += code not in (1, 2) or "Traceback" in out + err
            accepted += code == 0
    return {"attempts": attempts, "executions": executions, "accepted": accepted, "tracebacks": tracebacks}


RECIPES = [path for path in sorted(CONFIGS.rglob("*.yaml")) if "cluster" not in path.parts]
OVERRIDDEN = {"logger", "accelerator", "devices", "strategy"}
HERE = ["--trainer.logger=false", "--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.strategy=auto"]


def leaves(content, path=()):
    """Yield the place of every value of a configuration that is no mapping."""
    for key, value in content.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key)


def typo(draw, word):
    """Return a word with one letter dropped, doubled, exchanged or swapped."""
    i = draw.randrange(max(1, len(word) - 1))
    choices = [word[:i] + word[i + 1 :], word[:i] + word[i] + word[i:], word[:i] + "q" + word[i + 1 :]]
    choices.append(word[:i] + word[i + 1 : i + 2] + word[i] + word[i + 2 :])
    return next((c for c in draw.sample(choices, 4) if c not in ("", word)), word + "x")


def mutated(draw, content):
    """Change one thing of a configuration; return the kind, the key it is about, and whether it must be refused."""
    content.setdefault("trainer", {})
    kind = draw.choice(["key", "class", "type", "value", "number", "number", "missing", "extra", "double", "word"])
    places = [p for p in leaves(content) if p[-1] != "class_path" and p[0] != "seed_everything"]
    places = [p for p in places if not set(p) & OVERRIDDEN]
    place = draw.choice(places)
    parent = content
    for key in place[:-1]:
        parent = parent[key]
    name = place[-1]
    match kind:
        case "key":
            name = typo(draw, name)
            parent[name] = parent.pop(place[-1])
        case "class":
            group = draw.choice(["model", "data"])
            name = typo(draw, content[group]["class_path"])
            content[group]["class_path"] = name
        case "type":
            parent[name] = draw.choice([{"a": 1}, "many words", [[1], [2]]])
        case "value":
            group, name, value = draw.choice(WRONG)
            content[group].setdefault("init_args", {})[name] = value
        case "number":
            group, name = draw.choice([key.split(".") for key in sorted(RANGES) if key != "trainer.devices"])
            parent = content.setdefault(group, {})
            parent = parent.setdefault("init_args", {}) if group in ("model", "data") else parent
            parent[name] = draw.choice([float("nan"), 1e30, -1e30])
        case "missing":
            name = draw.choice(["model", "data"])
            del content[name]
        case "extra":
            name = draw.choice(["dropuot", "batchsize", "epochs", "modle", "weightdecay"])
            content[draw.choice(["model", "data"])].setdefault("init_args", {})[name] = 1
        case "double":
            return kind, name, "double"
        case "word":
            words = [p for p in places if isinstance(_at(content, p), str) and p[0] == "model" and p[-1] != "teacher"]
            place = draw.choice(words) if words else None
            if place is None:
                return mutated(draw, content)
            parent, name = _at(content, place[:-1]), place[-1]
            parent[name] = typo(draw, parent[name])
    return kind, name, "refused"


WRONG = [
    *(("model", name, -1) for name in ("depth", "lr", "mlp_ratio", "weight_decay", "warmup_epochs", "patch_size")),
    *(("model", name, 0) for name in ("depth", "num_heads", "patch_size")),
    *(
        ("model", "drop_path_rate", 2),
        ("model", "label_smoothing", 3),
        ("model", "embed_dim", 7),
        ("model", "lr", "nan"),
    ),
    *(("data", name, -1) for name in ("batch_size", "num_workers", "mixup", "cutmix", "repeats", "random_erasing")),
    *(("data", name, 0) for name in ("batch_size", "crop_pct", "subset", "crop_scale")),
    *(("data", "val_share", 1.5), ("data", "augment", "nonsense"), ("data", "fold", "3/2")),
]


def _at(content, place):
    for key in place:
        content = content[key]
    return content


def mutations(folder, count=200, seed=0):
    """Mutate shipped configurations and dry-run them; return how many were refused in one line that names the key.

    ``wrong`` lists the others: (config, kind, key, what happened).
    """
    draw = random.Random(seed)
    raw = folder / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for kind in ("images-idx3", "labels-idx1"):
        (raw / f"train-{kind}-ubyte").write_bytes(b"")
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(folder / "0.png")
    for i in range(1000):  # a folder without images is no class
        for part in ("train", "val"):
            (folder / part / f"n{i:08}").mkdir(parents=True)
            os.link(folder / "0.png", folder / part / f"n{i:08}" / "0.png")
    wrong, refused = [], 0
    for i in range(count):
        recipe = RECIPES[i % len(RECIPES)]
        content = yaml.safe_load(recipe.read_text())
        if "root" in content["data"].get("init_args", {}):
            content["data"]["init_args"]["root"] = str(folder)
        kind, name, end = mutated(draw, content)
        text = yaml.safe_dump(content, sort_keys=False)
        if end == "double":
            lines = text.splitlines()
            at = next(k for k, line in enumerate(lines) if line.strip().startswith(f"{name}:"))
            text = "\n".join([*lines[:at], lines[at].split(":")[0] + ": 1", *lines[at:]])
        path = folder / "mutated.yaml"
        path.write_text(text)
        with torch.device("meta"):
            code, out, err = call(["fit", "--config", path, *HERE, "--dry_run", "--run_dir", folder / "run"])
        one_line = err.count("vitlab: ") == 1 and err.count("\n") == 1 and "Traceback" not in out + err
        if code == 2 and one_line and (name in err or name.split("_")[0] in err):
            refused += 1
        else:
            wrong.append((recipe.name, kind, name, f"{code}: {(err or out)[-300:]}"))
    tracebacks = sum("Error" in str(w[3]).split(":")[0] or "Traceback" in w[3] for w in wrong)
    return {"mutations": count, "refused": refused, "tracebacks": tracebacks, "wrong": wrong}
