"""What is known of a run before its first step: the header on the terminal, the files in the run directory."""

import importlib.metadata
import platform
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
import yaml

from vitlab.callbacks.record import now_utc
from vitlab.models.cost import count_macs, count_parameters, count_tokens
from vitlab.optim.param_groups import describe_groups, param_groups
from vitlab.run_dir import write_text

if TYPE_CHECKING:
    from vitlab.cli.training import FitCLI

PACKAGES = ("vitlab", "torch", "torchvision", "lightning", "torchmetrics", "timm", "numpy", "jsonargparse", "wandb")


def model_facts(net: Any) -> dict[str, Any]:
    """Return parameters, multiply-adds, tokens and grid of a network."""
    return {
        "parameters": count_parameters(net),
        "parameters_total": sum(p.numel() for p in net.parameters()),
        "macs": count_macs(net),
        "flops": 2 * count_macs(net),
        "tokens": count_tokens(net),
        "grid": list(net.grid_size),
        "img_size": list(net.img_size),
        "in_chans": net.in_chans,
    }


def header(cli: "FitCLI", trainer: L.Trainer) -> str:
    """Return the lines that say what is trained, on what, and where."""
    net, hparams, data = cli.model.net, cli.model.hparams, cli.datamodule
    facts, splits = model_facts(net), data.fingerprint()["splits"]
    size = "x".join(map(str, (net.in_chans, *net.img_size)))
    groups = param_groups(
        net, hparams["lr"], hparams["weight_decay"], hparams["layer_decay"], hparams["pos_embed_lr_mult"]
    )
    decayed = sum(p.numel() for g in groups if g["weight_decay"] for p in g["params"])
    lines = {
        "model": f"{type(net.tokenizer).__name__} -> {facts['grid'][0]}x{facts['grid'][1]} tokens, "
        f"{len(net.blocks)} blocks, position embedding {hparams.get('pos_embed', 'learned')}; "
        f"{facts['parameters'] / 1e6:.3g} M parameters, {facts['macs'] / 1e6:,.4g} M multiply-adds an image",
        "data": f"{type(data).__name__}: {splits['train']['n']:,} training and {splits['val']['n']:,} validation images of {size}, "
        f"{data.num_classes} classes",
        "train": f"{trainer.max_epochs} epochs, batch {data.batch_size}, lr {hparams['lr']:g}, weight decay "
        f"{hparams['weight_decay']:g} on {decayed:,} weights, seed {cli.config.seed_everything}, "
        f"{trainer.num_devices * trainer.num_nodes} x {trainer.accelerator.__class__.__name__.removesuffix('Accelerator')}, "
        f"precision {trainer.precision}",
        "run": f"{cli.run.path}" + (" (continued)" if cli.resumed else ""),
    }
    if cli.wandb_line:
        lines["W&B"] = cli.wandb_line
    return "\n".join(f"{name:<6} {text}" for name, text in lines.items())


def describe(cli: "FitCLI", trainer: L.Trainer) -> None:
    """Write the files that make the run directory self-sufficient."""
    run, net, hparams = cli.run, cli.model.net, cli.model.hparams
    if not run.config.is_file():
        write_text(run.config, cli.config_text)
        write_text(run.path / "overrides.yaml", yaml.safe_dump(cli.overrides(), sort_keys=False))
    groups = param_groups(
        net, hparams["lr"], hparams["weight_decay"], hparams["layer_decay"], hparams["pos_embed_lr_mult"]
    )
    run.write("param_groups.json", describe_groups(net, groups, hparams["lr"]))
    run.write("model.json", model_facts(net))
    run.write("data.json", cli.datamodule.fingerprint())
    record = run.read("run.json")
    run.write("run.json", {**record, **_facts(cli, trainer), "started": record.get("started") or now_utc()})
    for logger in trainer.loggers:
        if type(logger).__name__ == "WandbLogger":
            logger.experiment.config.update(yaml.safe_load(cli.config_text), allow_val_change=True)


def _facts(cli: "FitCLI", trainer: L.Trainer) -> dict[str, Any]:
    return {
        "status": "running",
        "attempts": cli.record.attempt,
        "argv": ["vitlab", "fit", *cli.arguments],
        **_commit(),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "devices": [torch.cuda.get_device_name()] if torch.cuda.is_available() else [platform.machine()],
        "world_size": trainer.world_size,
        "threads": torch.get_num_threads(),
        "seed": cli.config.seed_everything,
        "wandb_id": cli.wandb_id if cli.wandb_line else None,
        "resumed": now_utc() if cli.resumed else None,
    }


def _commit() -> dict[str, Any]:
    package = Path(sys.modules["vitlab"].__path__[0])

    def git(*words: str) -> str | None:
        done = subprocess.run(["git", "-C", package, *words], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    return {"commit": commit, "dirty": bool(git("status", "--porcelain", "--untracked-files=no")) if commit else None}
