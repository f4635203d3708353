"""Weights & Biases inside a run directory: one run, offline without a key, never in the way."""

import netrc
import os
from typing import Any

from jsonargparse import Namespace

from vitlab.run_dir import RunDir


def place_loggers(config: Namespace, run: RunDir, wandb_id: str) -> str | None:
    """Point the loggers of a parsed configuration to ``run``; return a line on W&B if it is among them."""
    loggers = config.get("trainer.logger")
    line = None
    for logger in loggers if isinstance(loggers, list) else [loggers]:
        if not isinstance(logger, Namespace):
            continue
        if "save_dir" in logger.init_args:
            logger.init_args.save_dir = str(run.path)
        if logger.class_path.endswith(".WandbLogger"):
            line = _place_wandb(logger.init_args, run, wandb_id)
    return line


def _place_wandb(args: Any, run: RunDir, wandb_id: str) -> str:
    os.environ.setdefault("WANDB_SILENT", "true")
    os.environ.setdefault("WANDB_CONSOLE", "off")
    os.environ.setdefault("WANDB_DISABLE_GIT", "true")
    os.environ.setdefault("WANDB_DISABLE_CODE", "true")
    args.id = args.version = None
    args.id, args.resume = wandb_id, "allow"
    args.name = args.name or run.path.name
    if not args.offline and not has_key() and "WANDB_MODE" not in os.environ:
        args.offline = True
    if args.offline or os.environ.get("WANDB_MODE") in ("offline", "dryrun"):
        return f"offline; send it with `wandb sync {run.path}/wandb/offline-run-*`"
    return f"project {args.project}, run {wandb_id}"


def hush(loggers: list[Any]) -> None:
    """Keep Lightning's logger from passing on a setting that wandb warns of."""
    for logger in loggers:
        getattr(logger, "_wandb_init", {}).pop("anonymous", None)


def finish(failed: bool) -> None:
    """End the W&B run of this process, so that the next one is a run of its own."""
    import wandb

    if wandb.run is not None:
        wandb.finish(exit_code=int(failed))


def has_key() -> bool:
    """Return whether this machine can log in to W&B."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return any("wandb" in host for host in netrc.netrc().hosts)
    except (OSError, netrc.NetrcParseError):
        return False
