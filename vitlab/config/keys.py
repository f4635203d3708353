"""Which keys of a configuration make an experiment another one."""

from typing import Any

from vitlab.errors import UsageError
from vitlab.runs.directory import RunDir

# Configurations that differ in these keys alone are one experiment: a run may be resumed with the other.
FREE_KEYS = (
    *(f"trainer.{key}" for key in ("accelerator", "devices", "num_nodes", "strategy", "logger", "log_every_n_steps")),
    *(f"data.{key}" for key in ("num_workers", "root", "download")),
)


def check_same_config(run: RunDir, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Refuse to continue ``run`` with a configuration that would make it another experiment."""
    changed = []
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        longer = key in ("trainer.max_epochs", "trainer.max_steps") and before is not None and (after or 0) > before
        sharded = key == "trainer.strategy" and "fsdp2" in (before, after)  # it numbers the moments in its own order
        if (
            before != after
            and not longer
            and (sharded or not any(key == k or key.startswith(f"{k}.") for k in FREE_KEYS))
        ):
            changed.append(f"{key}: {before} -> {after}")
    if changed:
        raise UsageError(
            f"`--resume`: the configuration differs from that of {run.path} ({'; '.join(changed)}). "
            "Resume it without these changes, or start a new run with --init_from"
        )
