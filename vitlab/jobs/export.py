"""Write the network of a run as a file that other programs load."""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from vitlab.config.parser import VitlabCLI
from vitlab.data.base import ImageData
from vitlab.errors import MISTAKES, RunFailed, UsageError, in_own_code, named_line, what_failed
from vitlab.interface import (
    PAGE,
    answering,
    answers_itself,
    class_names,
    hparams_of,
    image_sizes,
    own_answer,
    own_parts,
    own_ratio_of,
    path_of,
)
from vitlab.jobs.exported import OF_ANY, ExportOptions, Form
from vitlab.jobs.formats import (
    FORMATS,
    Arguments,
    Plain,
    both_outputs,
    largest_difference,
    need_packages,
    network_arguments,
)
from vitlab.jobs.graph_sizes import Side, open_sides, sides_text
from vitlab.jobs.quantize import Compared, measure_both, quantize
from vitlab.jobs.restore import ON_CPU, network_of, restore
from vitlab.models.vit import VisionTransformer
from vitlab.runs.atomic import as_umask, write_json
from vitlab.runs.directory import RunDir
from vitlab.runs.manifest import file_digest
from vitlab.runs.records import MEASURED_BY, metrics_and_n
from vitlab.runs.standing import checksum
from vitlab.shipped import card_beside
from vitlab.tasks import MultiTask, Regressor
from vitlab.tasks.base import Task
from vitlab.tasks.regressor import Standardized
from vitlab.tokenizers.splits import pair

LIMIT = 1e-4  # of the difference between outputs, in `Exported.unit`
_STEPS = 4  # of float32, by which an output of any size may differ


@dataclass
class Exported:
    """An exported network.

    Args:
        path: The file; a .json beside it says how to prepare images and what the outputs mean.
        megabytes: Total size of all files.
        hints: How to load it, by program.
        difference: Largest difference between the file's outputs and the run's, in int8 those of the graph before it is
            quantized; None if it was not checked.
        unit: In what the difference is measured; empty for outputs without a unit, such as logits.
        compared: What the run and its graph in int8 reach on the validation split; None for other formats.
    """

    path: Path
    megabytes: float
    hints: dict[str, str]
    difference: float | None
    unit: str = ""
    compared: Compared | None = None


def export(run: RunDir, checkpoint: Path, options: ExportOptions, quiet: bool = False) -> Exported:
    """Write the network of a run, without what only training needs.

    Args:
        run: The run.
        checkpoint: Which of its weights to use.
        options: What is asked for.
        quiet: Whether to show no progress of a measurement.

    Raises:
        UsageError: The format cannot represent this network, an option does not go with it, the folder of the file
            cannot be written, or the validation images, on which int8 is measured, cannot be read.
        RunFailed: The outputs differ by more than 1e-4, numbers in standard deviations of their targets, a graph fails
            on other images than those that it was made with, or the disk is full or fails; nothing was written.
    """
    if options.to.startswith("onnx"):
        need_packages(f"`--to {options.to}`", "onnx", "onnxscript", "onnxruntime")
    with _folder_beside(options.output) as folder:
        return _export(run, checkpoint, options, folder, quiet)


@contextmanager
def _folder_beside(output: Path) -> Iterator[Path]:
    """Yield a new folder beside ``output``, and remove it.

    Removing a ``TemporaryDirectory`` recurses without an end where permission is refused (Python 3.11), and hides the
    error that came before.
    """
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".export-", dir=output.parent))
    except OSError as error:
        raise UsageError(f"`--output {output}` cannot be written: {error.strerror}") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _export(run: RunDir, checkpoint: Path, options: ExportOptions, folder: Path, quiet: bool) -> Exported:
    """Write into ``folder``, and move the files beside the output once they are complete and checked."""
    to, output, any_size = options.to, options.output, options.dynamic == "size"
    cli = restore(run, checkpoint, ON_CPU)
    net, network = _to_write(run, cli, to, any_size)
    write, read = FORMATS[to]
    sides = open_sides(net, to) if any_size else None
    write = partial(write, **({"sides": sides} if sides else {}), **({"opset": options.opset} if options.opset else {}))
    unfinished, beside = folder / output.name, card_beside(folder / output.name)
    is_int8 = to == "onnx-int8"
    graph = folder / f"{output.name}.float32" if is_int8 else unfinished
    with _explaining(options, net):
        hints = write(net, network, graph)
        if is_int8:
            quantize(graph, unfinished)
    scale, unit = _unit(cli.model)
    is_own = to not in OF_ANY and not path_of(cli.model).startswith("vitlab.")  # may have changed its network
    compares = options.check or is_own or own_parts(net) or to != "safetensors"
    what = f"the network of {path_of(cli.model)} is another one than vitlab builds from its arguments"
    changed = UsageError(f"`--to {to}`: {what}: use --to onnx or pt2")
    try:
        pairs = both_outputs(net, read(graph, network), sides) if compares else []
    except ValueError as error:
        if is_own:  # and has added weights to its network
            raise changed from error
        raise
    difference = largest_difference(pairs, scale) if pairs else None
    if pairs and not largest_difference(pairs, scale, _STEPS) <= LIMIT:  # also true for NaN
        if is_own:
            raise changed
        raise RunFailed(f"the outputs differ by {difference:.1e}{unit}, more than {LIMIT:g}; nothing was written")
    compared = None
    if is_int8:
        graph.unlink()
        compared = measure_both(run, checkpoint, read(unfinished, network), quiet)
    images = _images(cli.datamodule, net, sides)
    is_as_measured = to == "safetensors" or not images.pop("native_patch", None)  # other programs take one size
    facts = {"format": to, **_origin(run, checkpoint, is_as_measured)}
    facts["precision"] = str(cli.trainer.precision)  # of the measurements; the file computes in float32
    facts |= {"images": images, **_outputs(run, cli, net), "network": network, **hints}
    write_json(beside, {**facts, **({"quantized": asdict(compared)} if compared else {})})
    megabytes = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
    for file in sorted(folder.iterdir()):
        as_umask(file)
        os.replace(file, output.parent / file.name)
    return Exported(output, megabytes, hints, difference, unit, compared)


def _unit(task: Any) -> tuple[Any, str]:
    """Return in what outputs are compared, for all or for each, and how a line says so after a number."""
    if not isinstance(task, Standardized):
        return 1.0, ""
    is_unstated = isinstance(task, Regressor) and bool((task.target_std == 1).all())
    return task.target_std, f" {'in the unit' if is_unstated else 'standard deviations'} of the targets"


def _to_write(run: RunDir, cli: VitlabCLI, to: Form, any_size: bool) -> tuple[Any, Arguments]:
    """Return what maps images to the answers of a run, and the arguments that build it; none of code of the user's."""
    net, own = network_of(cli.model).float(), own_answer(cli.model)
    is_ours = isinstance(net, VisionTransformer)
    if to not in OF_ANY and (own or not is_ours):
        raise UsageError(
            f"`--to {to}` is for networks of vitlab, got {own.get('network') or path_of(net)}: use --to onnx or pt2"
        )
    if any_size and not is_ours:
        raise UsageError(f"`--dynamic size` is for networks of vitlab, got {path_of(net)}: leave it out")
    if to == "onnx-int8" and "answers" in own and isinstance(cli.model, Task):  # whose loss is of the network
        raise UsageError(f"`--to {to}` measures a network alone, and {own['answers']} answers: use --to onnx or pt2")
    if to == "onnx-int8" and own_ratio_of(cli.datamodule):
        raise UsageError(f"`--to {to}` is measured on images of one size, got `data.native_patch`: use --to onnx")
    if not is_ours:
        return Plain(net, *_sizes(run, cli)), {}
    return net, {} if own else network_arguments(net)


@contextmanager
def _explaining(options: ExportOptions, net: Any) -> Iterator[None]:
    """Say in a line why torch makes no graph of a network, or why the file could not be written."""
    try:
        yield
    except (SafetensorError, OSError, *MISTAKES) as error:  # libraries wrap what the system said
        if isinstance(error, UsageError):
            raise
        if what_failed(error) is None and "I/O error" not in str(error):
            if text := _why_no_graph(error, options.to, net):
                raise UsageError(text) from error
            raise
        reason = (what_failed(error) or "").rpartition(": ")[2] or str(error).rpartition("I/O error: ")[2]
        raise RunFailed(f"{options.output} could not be written: {reason}") from error


def _why_no_graph(error: BaseException, to: Form, net: Any) -> str | None:
    """Return that torch makes no graph of a network's parts of the user's own, and why; None if it has none."""
    first = error
    while first.__cause__ is not None:
        first = first.__cause__
    names = dict.fromkeys(path_of(part) for part in own_parts(net))
    if to not in OF_ANY or not names:
        return None
    why = re.split(r"(?<=[.!]) ", in_own_code(first) or named_line(first))[0]  # torch adds pages of advice
    return f"`--to {to}`: torch cannot make a graph of {', '.join(names)}: {why}"


def _sizes(run: RunDir, cli: VitlabCLI) -> tuple[int, tuple[int, int]]:
    """Return channels, and height and width, of the images that a network of the user's own takes."""
    found = image_sizes(cli.model, cli.datamodule, run.model, hparams_of(cli.model))
    if missing := [f"`{name}`" for name, value in found.items() if value is None]:
        owner = path_of(cli.datamodule)
        raise UsageError(f"an export needs the size of images: let {owner} have {' and '.join(missing)}; {PAGE}")
    return int(found["in_chans"]), pair("img_size", found["img_size"])


def _origin(run: RunDir, checkpoint: Path, is_as_measured: bool) -> dict[str, Any]:
    """Return where weights come from, and the metrics by split that the run has measured with them, as it is.

    Args:
        run: The run.
        checkpoint: File of the weights.
        is_as_measured: Whether the file computes what was measured.
    """
    digest = checksum(checkpoint) or file_digest(checkpoint)  # the manifest's, if the file is the one it notes
    found = run.stored if is_as_measured else {}
    mine = {split: one for split in MEASURED_BY if (one := found.get(split)) and one.get("sha256") == digest}
    return {
        "run": run.path.resolve().name,
        "checkpoint": {"file": checkpoint.name, "sha256": digest},
        "measured": {split: metrics_and_n(one) for split, one in mine.items()},
    }


def _images(data: Any, net: Any, sides: list[Side] | None) -> dict[str, Any]:
    """Return the shape of the images that a file takes, and how to prepare them."""
    if isinstance(data, ImageData):
        x = "x as stored" if data.arrays else "x in [0, 1]"
        how = {"values": f"(x - mean) / std of {x}", **data.preparation()}
    else:
        how = {"values": f"as `eval_transform` of {path_of(data)} returns them"}
    shape: list[str | int] = ["batch", net.in_chans, *net.img_size]
    if sides:
        shape[2:] = ["height", "width"]
        how["sizes"] = sides_text(sides)
        how |= {"trained_at": list(net.img_size), "height": vars(sides[0]), "width": vars(sides[1])}
    return {"shape": shape, **how}


def _outputs(run: RunDir, cli: VitlabCLI, net: Any) -> dict[str, Any]:
    """Return what the outputs of a file mean."""
    data, task = cli.datamodule, cli.model
    outputs: Any = "numbers" if isinstance(task, Regressor) else run.data["class_names"] or class_names(data)
    targets = getattr(data, "targets", None)
    if getattr(net, "num_classes", None) == 0:  # without a head
        outputs, targets = "features", {"kind": "feature"}
    return {
        "outputs": task.output_names if isinstance(task, MultiTask) else outputs,
        "targets": targets,
        **_scores(task, (targets or {}).get("kind")),
        "own": own_answer(task),
    }


def _scores(task: Any, kind: str | None) -> dict[str, str]:
    """Return what a network gives for classes and labels; nothing for other targets."""
    if kind not in ("class", "multilabel"):
        return {}
    if not isinstance(task, Task):
        return {"scores": f"as `forward` of {path_of(answering(task))} returns them"}
    return {"scores": "probabilities" if kind == "multilabel" and answers_itself(task) else "logits"}
