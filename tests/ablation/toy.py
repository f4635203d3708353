"""A stand-in for ``vitlab`` that trains in milliseconds: the same arguments, the same files, no torch.

Its accuracy is a closed form of the config plus a normal number that belongs to (config, seed), so that the order in
which cells run cannot matter. Keys under ``toy.`` in the environment variable TOY make it fail, hang or wait.
"""

import hashlib
import json
import os
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

import yaml

DEFAULTS = {
    "trainer.max_epochs": 2,
    "trainer.max_steps": -1,
    "model.pos_embed": "none",
    "model.global_pool": "token",
    "model.lr": 0.001,
    "model.sd": 0.01,
    "seed_everything": 0,
}
IMAGES = 10_000
GAIN = {"none": 0.0, "learned": 0.2, "sincos2d": 0.2, "rope2d": 0.25}


def flat(config, prefix=""):
    out = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        out |= flat(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return out


def nested(values):
    config = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        place = config
        for part in filter(None, section.split(".")):
            place = place.setdefault(part, {})
        place[name] = value
    return config


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(content if isinstance(content, str) else json.dumps(content))
    os.replace(temporary, path)


def accuracy(config, epoch):
    known = {k: v for k, v in config.items() if k.startswith("model.")}
    digest = hashlib.sha256(json.dumps([known, config["seed_everything"]], sort_keys=True).encode()).digest()
    share = (int.from_bytes(digest[:6]) + 0.5) / 2**48
    noise = config["model.sd"] * statistics.NormalDist().inv_cdf(share)
    return 0.5 + GAIN[config["model.pos_embed"]] + noise - 0.1 * 0.5**epoch


def value(args, flag):
    return args[args.index(flag) + 1]


def fit(args):
    run = Path(value(args, "--run_dir"))
    resume = "--resume" in args
    config = dict(DEFAULTS)
    if resume:
        config |= flat(yaml.safe_load((run / "config.yaml").read_text()))
    elif run.exists() and any(run.iterdir()):
        sys.exit(f"vitlab: the run directory {run} exists")
    for flag, path in pairwise(args):
        if flag == "--config":
            config |= flat(yaml.safe_load(Path(path).read_text()))
    if config["model.pos_embed"] not in GAIN:
        sys.stderr.write(f"vitlab: `model.pos_embed` must be one of {', '.join(GAIN)}\n")
        sys.exit(2)
    is_probe = config["trainer.max_steps"] == 20
    if not is_probe:
        count(run, "fit")
        misbehave(config, run)
    write(run / "config.yaml", yaml.safe_dump(nested(config)))
    splits = {"train": {"n": int(os.environ.get("TOY_IMAGES", 640))}, "val": {"n": IMAGES}}
    facts_of_data = {"data": "Toy", "class_names": ["a", "b"], "mean": [0.5], "std": [0.5], "splits": splits}
    write(run / "data.json", facts_of_data)
    write(run / "model.json", {"parameters": 1000, "macs": 500, "flops": 1000, "tokens": 17, "grid": [4, 4]})
    group = {"name": "pos_embed.weight", "shape": [1, 16, 4], "weight_decay": 0.0, "lr_scale": 1.0}
    write(run / "param_groups.json", [group, {**group, "name": "head.weight", "weight_decay": 0.05}])
    first = 0
    if resume:
        first = json.loads((run / "checkpoints/last.ckpt").read_text())["epoch"] + 1
    attempts = json.loads((run / "run.json").read_text())["attempts"] + 1 if resume else 1
    facts = {"status": "running", "attempts": attempts, "commit": "abc", "versions": {"torch": "0"}, "devices": ["toy"]}
    write(run / "run.json", facts)
    for epoch in range(first, 1 if is_probe else config["trainer.max_epochs"]):
        time.sleep(0 if is_probe else float(os.environ.get("TOY_SLEEP", 0)))
        acc = accuracy(config, epoch)
        row = {"step": 10 * (epoch + 1), "epoch": epoch, "attempt": attempts}
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({**row, "lr": 0.001, "images_per_second": 1000.0}) + "\n")
            file.write(json.dumps({**row, "val/acc1": acc, "val/loss": 1 - acc, "val/n": 100}) + "\n")
        if not is_probe:
            write(run / "checkpoints/last.ckpt", {"epoch": epoch})
    write(run / "run.json", {**facts, "status": "done"})


def count(run, what):
    if place := os.environ.get("TOY_STARTS"):
        with open(place, "a") as file:
            file.write(f"{what} {run}\n")


def misbehave(config, run):
    plan = json.loads(os.environ.get("TOY", "{}"))
    match plan.get(f"{config['model.pos_embed']} {config['seed_everything']}"):
        case "fail":
            sys.exit("RuntimeError: the toy broke")
        case "wrong":
            sys.stderr.write("vitlab: wrong\n")
            sys.exit(2)
        case "hang":
            time.sleep(60)
        case "diverge":
            sys.exit("FloatingPointError: the loss is nan in step 3")
        case "preempt once":
            mark = run.with_name(run.name + ".preempted")
            if not mark.exists():
                mark.parent.mkdir(parents=True, exist_ok=True)
                mark.touch()
                sys.exit(75)


def evaluate(split, args):
    checkpoint = Path(args[0])
    run = checkpoint.parent.parent
    count(run, split)
    epoch = json.loads(checkpoint.read_text())["epoch"]
    acc = accuracy(flat(yaml.safe_load((run / "config.yaml").read_text())), epoch)
    old = json.loads((run / "results.json").read_text()) if (run / "results.json").exists() else {}
    acc = round(acc * IMAGES) / IMAGES
    if os.environ.get("TOY_PREDICTIONS"):
        predict(run, split, round(acc * IMAGES))
    digest = hashlib.sha256(checkpoint.read_bytes()).hexdigest()
    result = {"acc1": acc, "loss": 1 - acc, "n": float(IMAGES), "checkpoint": checkpoint.name, "sha256": digest}
    write(run / "results.json", {**old, split: result})


def predict(run, split, right):
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {"index": range(IMAGES), "target": [0] * IMAGES, "prediction": [0] * right + [1] * (IMAGES - right)}
    (run / "predictions").mkdir(exist_ok=True)
    table = pa.table({name: list(values) for name, values in columns.items()})
    pq.write_table(table, run / f"predictions/{split}.parquet")


def analyze(args):
    names, checkpoint = args[0].split(","), Path(args[1])
    run = checkpoint.parent.parent
    count(run, f"analyze {args[0]}")
    config = flat(yaml.safe_load((run / "config.yaml").read_text()))
    place = run / "analysis/notes.json"
    notes = json.loads(place.read_text()) if place.exists() else {}
    for name in names:
        if name == "cost":
            sys.exit("RuntimeError: the toy cannot tell its cost")
        if name == "position" and config["model.pos_embed"] == "none":
            notes[name] = {"not_done": "there is no table"}
        else:
            acc = accuracy(config, 2)
            sizes = "".join(
                f"toy,resize,{size},usual,resolution/acc1@{size},{acc - abs(size - 8) / 40:.6g},100\n"
                for size in (4, 8, 16)
            )
            write(run / f"analysis/{name}.csv", "run,protocol,size,policy,metric,acc1,n\n" + sizes)
            notes[name] = {"note": "toy", "checkpoint": checkpoint.name}
        write(place, notes)
    sys.exit(2 if len(names) == 1 and "not_done" in notes[names[0]] else 0)


if __name__ == "__main__":
    word, *rest = sys.argv[1:]
    measure = {"validate": lambda a: evaluate("val", a), "test": lambda a: evaluate("test", a)}
    {"fit": fit, "analyze": analyze, **measure}[word](rest)
