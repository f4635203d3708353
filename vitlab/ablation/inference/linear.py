"""The logistic-regression gate: a network that does not beat it on the same pixels is under-trained."""

import warnings
from typing import Any

from vitlab.ablation.execution.cells import Resolved
from vitlab.ablation.execution.commands import build_arm
from vitlab.ablation.execution.identity import json_digest
from vitlab.ablation.file.spec import Ablation
from vitlab.errors import MISTAKES, UsageError, one_line
from vitlab.jobs.terminal import terminal_as_it_was
from vitlab.runs.atomic import write_json
from vitlab.runs.processes import as_it_was
from vitlab.runs.records import read_json

MOST, SIDE, STEPS = 20_000, 32, 100  # training images, height and width at most, iterations
CLOSE = 0.002  # largest difference in accuracy between machines, from the order of sums
FILE = "linear.json"
UNFIT = (*MISTAKES, ImportError, OSError)  # what images or a module of the user's may raise
Gates = dict[str, dict[str, Any]]  # digest of the data and split: accuracy and counts, or why there is none


def linear(ablation: Ablation, resolved: list[Resolved]) -> Gates:
    """Return, for each digest of data, the accuracy of logistic regression on the evaluated split, or why not.

    It is fitted once and stored beside the cells, so that exported evidence needs no images. A failure is stored, too,
    but tried again the next time, as memory or a disk may have been the cause.
    """
    found = _kept(ablation)
    if ablation.primary != "acc1" or ablation.is_evidence or ablation.run.command:
        return found
    for key, arm in {_key(ablation, arm): arm for arm in resolved}.items():
        if "acc1" not in found.get(key, {}):
            try:
                found[key] = _fit(ablation, arm)
            except UNFIT as error:
                found[key] = {"why": one_line(error)}
            write_json(ablation.directory / FILE, found)
    return found


def check(ablation: Ablation, resolved: list[Resolved]) -> tuple[int, list[str], str]:
    """Repeat the stored fits; return their number, what disagrees, and what could not be fitted here."""
    try:
        found: Gates = read_json(ablation.directory / FILE)
    except UsageError as error:
        return 0, [str(error)], ""
    wanted = {_key(ablation, arm): arm for arm in resolved}
    wanted = {key: arm for key, arm in wanted.items() if "acc1" in found.get(key, {})}
    if not wanted or ablation.is_evidence:
        return 0, [], f"{FILE} not fitted again: the images are not in this folder" if wanted else ""
    words = []
    for key, arm in wanted.items():
        try:
            again = _fit(ablation, arm)
        except UNFIT as error:
            return 0, [], f"{FILE} not fitted again: {one_line(error)}"
        near = {"acc1": CLOSE, "n_train": 0, "n": 0, "inputs": 0}
        wrong = [name for name, gap in near.items() if not abs(again[name] - found[key].get(name, -1)) <= gap]
        words += [f"{name} is {found[key].get(name)}, fitted again it is {again[name]}" for name in wrong]
    return len(wanted), words, ""


def _kept(ablation: Ablation) -> Gates:
    try:
        return read_json(ablation.directory / FILE)
    except UsageError:  # damaged: it is fitted again, where the images are
        return {}


def gate_of(found: Gates, ablation: Ablation, arm: Resolved) -> dict[str, Any]:
    """Return the gate for the data of an arm; empty if nothing was fitted."""
    return found.get(_key(ablation, arm), {})


def _key(ablation: Ablation, arm: Resolved) -> str:
    """Return what the gates of arms on the same images are stored by."""
    return f"{json_digest(arm.data)} {ablation.evaluate}"


@terminal_as_it_was()
@as_it_was()
def _fit(ablation: Ablation, arm: Resolved) -> dict[str, Any]:
    import torch
    from sklearn.linear_model import LogisticRegression

    from vitlab.analysis.subject import Subject

    cli = build_arm(ablation, arm.arm)
    pixels_alone: Any = torch.nn.Flatten()  # so that the task can be any
    subject = Subject(pixels_alone, cli.datamodule, name="logistic regression", task=cli.model)
    parts: list[Any] = []
    for split, limit in (("train", MOST), (ablation.evaluate, 10 * MOST)):
        images, labels = [], []
        for pixels, classes in subject.batches(split, limit):  # type: ignore[arg-type]
            sides = min(SIDE, pixels.shape[-2]), min(SIDE, pixels.shape[-1])
            images.append(torch.nn.functional.adaptive_avg_pool2d(pixels, sides).flatten(1).cpu())
            labels.append(classes.cpu())
        parts += [torch.cat(images).numpy(), torch.cat(labels).numpy()]
    x, y, held, truth = parts
    if y.ndim != 1 or y.dtype.kind not in "iu":
        raise ValueError("its targets are not classes")
    model = LogisticRegression(C=0.1, max_iter=STEPS, tol=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it could go on: the steps are declared
        model.fit(x, y)
    return {"acc1": float(model.score(held, truth)), "n_train": len(x), "n": len(held), "inputs": x.shape[1]}
