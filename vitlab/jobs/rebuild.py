"""The arguments that rebuild what a run trained."""

import yaml

from vitlab.config.arguments import config_paths
from vitlab.errors import UsageError
from vitlab.runs.directory import RunDir


def evaluation_args(run: RunDir, rest: list[str]) -> list[str]:
    """Return the arguments that rebuild what ``run`` trained, without its loggers."""
    if config_paths(rest):
        raise UsageError(f"the configuration comes from {run.config}; change single values with --key=value")
    return ["--config", str(run.config), *rest, "--trainer.logger=false", "--trainer.enable_checkpointing=false"]


def one_device(run: RunDir) -> list[str]:
    """Return arguments for the machine at hand, which may be another than that of the training."""
    trainer = yaml.safe_load(run.config.read_text()).get("trainer") or {}
    accelerator = "cpu" if trainer.get("accelerator") == "cpu" else "auto"
    settings = {"accelerator": accelerator, "devices": 1, "num_nodes": 1, "strategy": "auto"}
    return [f"--trainer.{key}={value}" for key, value in settings.items()]
