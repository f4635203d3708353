"""The commands of a cell: how vitlab is started with the settings of an arm and a seed, and which stage is next."""

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from vitlab.ablation.execution.cells import Cell
from vitlab.ablation.execution.process import VITLAB
from vitlab.ablation.file.arms import Arm
from vitlab.ablation.file.spec import Ablation
from vitlab.config.trust import TRUSTED
from vitlab.errors import trust_also, trust_words
from vitlab.runs.atomic import write_text
from vitlab.runs.records import MEASURED_BY, SPLIT_OF

if TYPE_CHECKING:
    from vitlab.config.parser import VitlabCLI


class Stage(NamedTuple):
    """A command of the work on a cell: its name, one of fit, validate, test and analyze, and its words."""

    name: str
    words: list[str]

    @property
    def is_evaluation(self) -> bool:
        """Whether it opens the evaluated split."""
        return self.name in SPLIT_OF


def stages(cell: Cell) -> list[Stage]:
    """Return what is left to do, in order, and write the file that the training reads."""
    left = [training(cell)] if cell.run.record.get("status") != "done" else []
    left += [evaluation(cell)] if not cell.is_measured() or cell.is_from_beside() else []
    return left + ([analysis(cell)] if cell.missing_analyses() else [])


def next_stage(cell: Cell) -> Stage | None:
    """Return what is left to do first, None if nothing is; what was killed before its first checkpoint is removed."""
    if cell.run.record.get("status") != "done" and cell.run.exists() and not _can_resume(cell):
        shutil.rmtree(cell.run.path)
    return next(iter(stages(cell)), None)


def _can_resume(cell: Cell) -> bool:
    return cell.run.config.is_file() and cell.run.has_checkpoint()


def training(cell: Cell) -> Stage:
    """Return the command that trains a cell, and write its settings, or the command that resumes it."""
    start, run = [*command(cell.ablation), "fit"], ["--run_dir", str(cell.run.path), "--quiet"]
    if _can_resume(cell):
        return Stage("fit", [*start, "--resume", *run])
    given = fit_args(cell.ablation, cell.arm, cell.seed, cell.sibling(".yaml"))
    return Stage("fit", [*start, *given, *start_args(cell.arm, cell.seed), *run])


def evaluation(cell: Cell) -> Stage:
    """Return the command that measures a cell."""
    name, checkpoint = MEASURED_BY[cell.ablation.evaluate], f"{cell.ablation.checkpoint}.ckpt"
    return Stage(name, [*command(cell.ablation), name, str(cell.run.checkpoints / checkpoint), "--quiet"])


def analysis(cell: Cell) -> Stage:
    """Return the command for a cell's missing analyses, from its weights if no checkpoint was kept."""
    name = cell.ablation.checkpoint
    weights = cell.run.weights / f"{name}.safetensors"
    path = cell.run.checkpoints / f"{name}.ckpt"
    source = str(weights if weights.is_file() else path)
    return Stage("analyze", [*command(cell.ablation), "analyze", ",".join(cell.missing_analyses()), source, "--quiet"])


def command(ablation: Ablation) -> list[str]:
    """Return the command that starts vitlab, with the packages that the file names: their code identifies its cells.

    Raises:
        UsageError: The file names a package that the command line does not confirm.
    """
    if missing := [name for name in ablation.trust_imports if name not in TRUSTED]:
        way_out = f"confirm {'them' if len(missing) > 1 else 'it'} with {trust_also(*missing)}"
        raise ablation.file.mistake("trust_imports", f"the file imports {', '.join(missing)}: {way_out}")
    return [*(ablation.run.command or VITLAB), *trust_words(ablation.trust_imports)]


def overrides(ablation: Ablation, arm: Arm, seed: int) -> dict[str, Any]:
    """Return the settings of a cell: those of its arm, its seed, device and logger."""
    logger: Any = False
    if ablation.wandb:
        names = {"project": ablation.wandb.project, "name": f"{arm.name} s{seed}"}
        logger = {"class_path": "WandbLogger", "init_args": names}
    return {**nested(arm.overrides), "seed_everything": seed, "trainer.devices": 1, "trainer.logger": logger}


def nested(sets: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted settings with the arguments of a class grouped under the class, in any order.

    >>> nested({"data.root": "x", "data": "Packed", "model.lr": 1e-3})
    {'data': {'class_path': 'Packed', 'init_args': {'root': 'x'}}, 'model.lr': 0.001}
    """
    for section in ("model", "data"):
        if isinstance(path := sets.get(section), str):
            own = {key: value for key, value in sets.items() if key.startswith(f"{section}.")}
            args = {key.removeprefix(f"{section}.").removeprefix("init_args."): value for key, value in own.items()}
            others = {key: value for key, value in sets.items() if key not in own}
            sets = {**others, section: {"class_path": path, "init_args": args}}
    return dict(sets)


def fit_args(
    ablation: Ablation, arm: Arm, seed: int, file: Path, changes: Mapping[str, Any] | None = None
) -> list[str]:
    """Write the settings of a cell, with changes for another purpose, and return the arguments that name all configs.

    Args:
        ablation: The ablation.
        arm: The arm.
        seed: The seed.
        file: Where to write them.
        changes: Dotted keys and values in place of those of the cell.
    """
    write_text(file, yaml.safe_dump({**overrides(ablation, arm, seed), **(changes or {})}, sort_keys=False))
    return [word for path in (*ablation.base, *arm.configs, str(file)) for word in ("--config", path)]


def start_args(arm: Arm, seed: int) -> list[str]:
    """Return the arguments about initial weights."""
    source = arm.weights(seed)
    return ["--init_from", source] if source else []


def build_arm(ablation: Ablation, arm: Arm) -> "VitlabCLI":
    """Build task, data and trainer of an arm with the first seed, in this process, on the CPU and without a logger."""
    from vitlab.config.parser import VitlabCLI
    from vitlab.jobs.terminal import open_terminal

    open_terminal()
    changes = {"trainer.logger": False, "trainer.accelerator": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        return VitlabCLI(fit_args(ablation, arm, ablation.seeds[0], Path(folder) / "overrides.yaml", changes))
