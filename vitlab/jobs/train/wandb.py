"""Weights & Biases in a run directory: one W&B run, offline without an API key; failures never stop a training."""

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

from vitlab.config.callbacks import trainer_parts
from vitlab.errors import UsageError, one_line
from vitlab.runs import interrupt
from vitlab.runs.directory import RunDir
from vitlab.runs.guard import at_most, during, limit_of
from vitlab.runs.manifest import read_manifest

LOG = logging.getLogger("vitlab")
HURRY = 4.0  # seconds that W&B has to finish once the process was told to end


ENVIRONMENT = {
    **dict.fromkeys(("WANDB_SILENT", "WANDB_DISABLE_GIT", "WANDB_DISABLE_CODE"), "true"),
    "WANDB_CONSOLE": "off",
    "WANDB_HOST": "-",  # do not send the machine's name
    "WANDB_INIT_TIMEOUT": "7",  # seconds; then the run stays offline
    "WANDB_FINISH_TIMEOUT": "120",  # seconds; the rest can be sent later
}


def prepare_environment() -> None:
    """Set W&B's defaults; variables that the user has set take priority."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def new_id() -> str:
    """Return the identity of a new W&B run: the one that the agent of a sweep has given to this process, or a new one.

    Within a sweep W&B takes its agent's whatever is asked for, and results that are added later must find the run.
    """
    given = os.environ.get("WANDB_RUN_ID") if os.environ.get("WANDB_SWEEP_ID") else None
    return given or os.urandom(4).hex()


def place_loggers(config: Namespace, run: RunDir, wandb_id: str) -> str | None:
    """Point the loggers of a parsed configuration to ``run``; return the header's line about W&B if it is used."""
    line = None
    for logger in trainer_parts(config.trainer, "logger"):
        if "save_dir" in logger.init_args:
            logger.init_args.save_dir = str(run.path)
        if logger.class_path.endswith(".WandbLogger"):
            line = _place_wandb(logger.init_args, run, wandb_id)
            logger.class_path = f"{SafeWandbLogger.__module__}.{SafeWandbLogger.__name__}"
    return line


def _place_wandb(args: Any, run: RunDir, wandb_id: str) -> str:
    prepare_environment()
    args["version"], args["id"], args["resume"] = None, wandb_id, "allow"
    args["name"] = args["name"] or run.path.name
    if args["offline"] and args["log_model"]:
        raise UsageError(f"`trainer.logger.log_model={args['log_model']}` cannot send checkpoints with offline=true")
    mode = chosen_mode(args["offline"])
    if mode == "offline" and not args["offline"] and "WANDB_MODE" not in os.environ:
        args["mode"] = "offline"
    if "disabled" in (args.get("mode"), mode):
        return "disabled"
    if args["offline"] or args.get("mode") == "offline" or mode in ("offline", "dryrun"):
        return f"offline; upload it with `wandb sync {run.typed}/wandb/offline-run-*`"
    return f"project {args['project']}, run {wandb_id}"


def add_result(run: RunDir, config: Mapping[str, Any], values: Mapping[str, float]) -> None:
    """Add metrics to the summary of a finished run's W&B run, if it has one.

    Args:
        run: The run.
        config: Its stored configuration.
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
            logged = SafeWandbLogger(**given)
            logged.set_group(run.record.get("recipe"), run.record["seed"])
            logged.log_summary(values)
            finish_run(failed=False)


class SafeWandbLogger(WandbLogger):
    """Lightning's logger with failures that do not stop a training: it continues offline, or stops logging."""

    has_failed = False

    def __init__(self, *args: Any, group: str | None = None, tags: Sequence[str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._wandb_init.pop("anonymous", None)  # wandb warns of it, and Lightning always gives it
        self._wandb_init |= {"group": os.environ.get("WANDB_RUN_GROUP") or group, "tags": list(tags or ())}
        if folder := self._wandb_init["dir"]:  # W&B's service stays where the first run of a process began
            self._wandb_init["dir"] = os.path.abspath(folder)

    def set_group(self, recipe: str | None, seed: int | bool) -> None:
        """Group the run with those of its recipe, unless the user named a group, and tag it with its seed."""
        known = self._wandb_init
        tags = known["tags"] or os.environ.get("WANDB_TAGS", "").split(",")
        known |= {"group": known["group"] or recipe, "tags": [*filter(None, tags), f"seed {seed}"]}

    def log_summary(self, values: Mapping[str, Any]) -> None:
        """Write values into the summary of the run."""
        self.experiment.summary.update(dict(values))

    def keep_checkpoint(self, path: Path, aliases: list[str], at_end: bool) -> None:
        """Send a checkpoint as an artifact if ``log_model`` asks for it: "all" sends every one, true the best.

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
        """Return the W&B run, started offline if it cannot start online within seconds."""
        if self._experiment is not None:
            return self._experiment
        import wandb  # only for runs that use it

        _skip_launch_import()
        try:
            return WandbLogger.experiment.__get__(self)
        except Exception as error:  # unreachable, a wrong key, a refusal: wandb has an error for each
            LOG.warning("W&B    cannot be reached, this run stays offline: %s", one_line(error))
        os.environ["WANDB_MODE"] = self._wandb_init["mode"] = "offline"
        try:
            wandb.teardown()  # its service still holds the run that it could not start
            return WandbLogger.experiment.__get__(self)
        except Exception as error:
            LOG.warning("W&B    cannot start offline either, training continues without it: %s", one_line(error))
        self.has_failed, self._experiment = True, DummyExperiment()  # type: ignore[assignment]
        return self._experiment


def _skip_launch_import() -> None:
    """Keep W&B from importing W&B Launch, which takes a CPU second, only to find no inputs.

    A program with inputs has already imported it. Delete this when ``Run._detect_and_apply_job_inputs`` checks that.
    """
    from wandb.sdk.wandb_run import Run

    if "wandb.sdk.launch" not in sys.modules and hasattr(Run, "_detect_and_apply_job_inputs"):
        Run._detect_and_apply_job_inputs = lambda self: None  # type: ignore[method-assign]


def _never_raise(name: str) -> Callable[..., None]:
    method = getattr(SafeWandbLogger, name)

    @wraps(method)
    def attempt(self: SafeWandbLogger, *args: Any, **kwargs: Any) -> None:
        if self.has_failed:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # its service was killed, its disk is full, its server refuses
            self.has_failed = True
            LOG.warning("W&B    failed, training continues and metrics.jsonl has the metrics: %s", one_line(error))

    return attempt


for _name in (
    "log_metrics",
    "log_hyperparams",
    "log_image",
    "log_table",
    "save",
    "finalize",
    "log_summary",
    "keep_checkpoint",
):
    setattr(SafeWandbLogger, _name, _never_raise(_name))


def finish_run(failed: bool, hurry: bool = False) -> None:
    """End the W&B run of this process, so that the next one starts separately.

    What is not sent within ``VITLAB_WANDB_TIMEOUT`` seconds stays in the run directory.

    Args:
        failed: Whether W&B is to show the run as failed.
        hurry: Whether the process has been told to end, which gives W&B a few seconds only.
    """
    wandb = sys.modules.get("wandb")
    if wandb is None or wandb.run is None:
        return

    def finish() -> None:
        try:
            wandb.finish(exit_code=int(failed))
        except Exception:  # unsent data stays in the run directory
            with suppress(Exception):
                wandb.teardown()  # else a dead service causes a traceback at exit

    seconds, place = min(HURRY, limit_of("wandb")) if hurry else limit_of("wandb"), wandb.run.dir
    with during("wandb", "W&B to finish"):
        is_finished = at_most(seconds, finish)
    if not is_finished:
        interrupt.HURRY.set()
        what = f"W&B    has not sent everything within {seconds:.0f} s; the rest is in {Path(place).parent}"
        LOG.warning("%s: `wandb sync` sends it", what)


def chosen_mode(is_offline: bool = False) -> str:
    """Return the mode of W&B: that of the environment, else offline if the user says so or has no key, else online."""
    return os.environ.get("WANDB_MODE") or ("offline" if is_offline or not has_key() else "online")


def has_key() -> bool:
    """Return whether this machine can log in to W&B."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return any("wandb" in host for host in netrc.netrc().hosts)
    except (OSError, netrc.NetrcParseError):
        return False
