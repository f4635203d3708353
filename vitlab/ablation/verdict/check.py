"""``vitlab ablate plan --check``: build every arm and see that arms of one seed start alike."""

import hashlib
import tempfile
from pathlib import Path

import torch
import yaml

from vitlab.ablation.file.arms import Arm
from vitlab.ablation.file.spec import Ablation
from vitlab.ablation.verdict.audit import reference
from vitlab.ablation.work.resolve import fit_args, overrides
from vitlab.config.parser import VitlabCLI
from vitlab.jobs.terminal import open_terminal
from vitlab.models.vit import VisionTransformer

Start = dict[str, tuple[tuple[int, ...], str]]  # of each tensor: shape, hash of its values


def check_lines(ablation: Ablation) -> tuple[list[str], bool]:
    """Compare the initial weights of each arm with those of equal name and shape in the arm to match.

    Returns:
        A line for each arm, and whether all of them are equal.
    """
    open_terminal()
    starts = {arm.name: _start(ablation, arm) for arm in ablation.arms}
    lines, is_alike = [], True
    for arm in ablation.arms:
        matched, start = reference(ablation, arm) or arm, starts[arm.name]
        if matched is arm:
            lines.append(f"init     {arm.name}: {len(start)} tensors")
            continue
        other = starts[matched.name]
        shared = [key for key, (shape, _) in start.items() if key in other and other[key][0] == shape]
        differing = [key for key in shared if start[key] != other[key]]
        own = [key for key in start if key not in shared]
        text = f"{len(shared)} tensors of the same name and shape as in {matched.name}, "
        text += f"{len(differing)} DIFFER INITIALLY: {', '.join(differing[:4])}" if differing else "all equal initially"
        lines.append(f"init     {arm.name}: {text}" + (f"; only here: {_few(own)}" if own else ""))
        is_alike = is_alike and not differing
    return lines, is_alike


def _start(ablation: Ablation, arm: Arm) -> Start:
    """Build an arm with the first seed."""
    settings = {**overrides(ablation, arm, ablation.seeds[0]), "trainer.logger": False, "trainer.accelerator": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder) / "overrides.yaml"
        given.write_text(yaml.safe_dump(settings, sort_keys=False))
        net: VisionTransformer = VitlabCLI(fit_args(ablation, arm, given)).model.net
    state = net.state_dict()
    return {
        k: (tuple(v.shape), hashlib.sha256(v.contiguous().view(torch.uint8).numpy()).hexdigest())
        for k, v in state.items()
    }


def _few(names: list[str]) -> str:
    parts = list(dict.fromkeys(".".join(name.split(".")[:2]) for name in names))
    return ", ".join(parts[:4]) + (f" and {len(parts) - 4} more" if len(parts) > 4 else "")
