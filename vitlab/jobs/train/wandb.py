"""Weights & Biases inside a run directory: one run, offline without a key, never in the way."""

import logging
import netrc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.fabric.loggers.logger import _DummyExperiment as DummyExperiment
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import WandbLogger

from vitlab.errors import UsageError
from vitlab.runs.directory import RunDir
from vitlab.runs.manifest import read_manifest

LOG = logging.getLogger("vitlab")


ENVIRONMENT = {
    **dict.fromkeys(("WANDB_SILENT", "WANDB_DISABLE_GIT", "WANDB_DISABLE_CODE"), "true"),
    "WANDB_CONSOLE": "off",
    "WANDB_HOST": "-",  # the machine's name stays here
    "WANDB_INIT_TIMEOUT": "7",  # seconds; then the run is kept offline
    "WANDB_FINISH_TIMEOUT": "120",  # what has not been sent by then can be sent later
}


def prepare_environment() -> None:
    """Keep W&B quiet and modest, where the user's environment does not say otherwise."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


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
            logger.class_path = f"{Guarded.__module__}.{Guarded.__name__}"
    return line


def _place_wandb(args: Any, run: RunDir, wandb_id: str) -> str:
    prepare_environment()
    args["version"], args["id"], args["resume"] = None, wandb_id, "allow"
    args["name"] = args["name"] or run.path.name
    if args["offline"] and args["log_model"]:
        raise UsageError(f"`trainer.logger.log_model={args['log_model']}` sends checkpoints, and offline=true none")
    if not args["offline"] and not has_key() and "WANDB_MODE" not in os.environ:
        args["mode"] = "offline"
    if args["offline"] or args.get("mode") == "offline" or os.environ.get("WANDB_MODE") in ("offline", "dryrun"):
        return f"offline; send it with `wandb sync {run.path}/wandb/offline-run-*`"
    return f"project {args['project']}, run {wandb_id}"


def add_result(run: RunDir, config: Mapping[str, Any], values: Mapping[str, float]) -> None:
    """Add what was measured of a finished run to the summary of its W&B run, where it has one.

    Args:
        run: The run.
        config: Its configuration, as it is kept.
        values: Metrics by name.
    """
    loggers = (config.get("trainer") or {}).get("logger")
    for logger in loggers if isinstance(loggers, list) else [loggers]:
        if isinstance(logger, dict) and logger["class_path"].endswith(".WandbLogger") and run.record.get("wandb_id"):
            given = {
                **logger.get("init_args", {}),
                **logger.get("dict_kwargs", {}),
                "save_dir": str(run.path),
                "dir": None,
            }
            _place_wandb(given, run, str(run.record["wandb_id"]))
            logged = Guarded(**given)
            logged.belongs(run.record.get("recipe"), run.record["seed"])
            logged.sum_up(values)
            finish(failed=False)


class Guarded(WandbLogger):
    """Lightning's logger, whose failures stop no training: it goes on offline, or falls silent."""

    has_failed = False

    def __init__(self, *args: Any, group: str | None = None, tags: Sequence[str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._wandb_init.pop("anonymous", None)  # wandb warns of it, and Lightning always gives it
        self._wandb_init |= {"group": os.environ.get("WANDB_RUN_GROUP") or group, "tags": list(tags or ())}

    def belongs(self, recipe: str | None, seed: int | bool) -> None:
        """Group the run with those of its recipe, unless the user has named a group, and tag it with its seed."""
        known = self._wandb_init
        tags = known["tags"] or os.environ.get("WANDB_TAGS", "").split(",")
        known |= {"group": known["group"] or recipe, "tags": [*filter(None, tags), f"seed {seed}"]}

    def sum_up(self, values: Mapping[str, Any]) -> None:
        """Write values into the summary of the run."""
        self.experiment.summary.update(dict(values))

    def keep_checkpoint(self, path: Path, aliases: list[str], at_end: bool) -> None:
        """Send a checkpoint as an artifact where ``log_model`` asks for it: with "all" each one, with true the best.

        Args:
            path: The checkpoint.
            aliases: Names that this version gets.
            at_end: Whether the training is over.
        """
        if self._log_model is True if at_end else self._log_model == "all":
            import wandb

            name = self._checkpoint_name or f"model-{self.experiment.id}"
            artifact = wandb.Artifact(name, type="model", metadata={"original_filename": path.name})
            artifact.add_file(str(path), name="model.ckpt", policy=self.add_file_policy)
            if shards := read_manifest(path.parent).get(path.name, {}).get("shards"):
                artifact.add_dir(str(path.parent / shards["folder"]), name=shards["folder"])
            self.experiment.log_artifact(artifact, aliases=aliases)

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """Return the W&B run, started offline if it does not start within ten seconds."""
        if self._experiment is not None:
            return self._experiment
        import wandb  # now, and not for a run that does without

        _leave_launch_alone()
        try:
            return WandbLogger.experiment.__get__(self)
        except Exception as error:  # unreachable, a wrong key, a refusal: wandb has an error for each
            LOG.warning("W&B    cannot be reached, this run is kept offline: %s", _line(error))
        os.environ["WANDB_MODE"] = self._wandb_init["mode"] = "offline"
        try:
            wandb.teardown()  # its service still holds the run that it could not start
            return WandbLogger.experiment.__get__(self)
        except Exception as error:
            LOG.warning("W&B    cannot start offline either, training goes on without: %s", _line(error))
        self.has_failed, self._experiment = True, DummyExperiment()  # type: ignore[assignment]
        return self._experiment


def _leave_launch_alone() -> None:
    """Keep W&B from importing W&B Launch, a CPU second, to see that nobody has staged inputs for it.

    Who stages some has imported it. Delete this when ``Run._detect_and_apply_job_inputs`` looks there itself.
    """
    from wandb.sdk.wandb_run import Run

    if "wandb.sdk.launch" not in sys.modules and hasattr(Run, "_detect_and_apply_job_inputs"):
        Run._detect_and_apply_job_inputs = lambda self: None  # type: ignore[method-assign]


def _attempt(name: str) -> Callable[..., None]:
    method = getattr(Guarded, name)

    @wraps(method)
    def attempt(self: Guarded, *args: Any, **kwargs: Any) -> None:
        if self.has_failed:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # its service was killed, its disk is full, its server refuses
            self.has_failed = True
            LOG.warning("W&B    has failed, training goes on and metrics.jsonl is the record: %s", _line(error))

    return attempt


for _name in (
    "log_metrics",
    "log_hyperparams",
    "log_image",
    "log_table",
    "save",
    "finalize",
    "sum_up",
    "keep_checkpoint",
):
    setattr(Guarded, _name, _attempt(_name))


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def finish(failed: bool) -> None:
    """End the W&B run of this process, so that the next one is a run of its own."""
    wandb = sys.modules.get("wandb")
    if wandb is None or wandb.run is None:
        return
    try:
        wandb.finish(exit_code=int(failed))
    except Exception:  # what could not be sent is kept beside the run
        with suppress(Exception):
            wandb.teardown()  # or its service, if it has died, is mourned with a traceback at exit


def has_key() -> bool:
    """Return whether this machine can log in to W&B."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return any("wandb" in host for host in netrc.netrc().hosts)
    except (OSError, netrc.NetrcParseError):
        return False
