"""Weights in eight bits: quantize a graph of ONNX, and measure what that changes in the answers of a run."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from vitlab.errors import UsageError
from vitlab.interface import answering, path_of
from vitlab.jobs.evaluate import Conditions, evaluate
from vitlab.jobs.formats import Outputs
from vitlab.runs.directory import RunDir
from vitlab.tasks.base import Task
from vitlab.tasks.regressor import Standardized


@dataclass
class Compared:
    """What the network of a run and its quantized graph reach on the same images.

    Args:
        run: Metrics of the run on its validation split, with the number of images as ``n``.
        int8: Those of the graph.
        other_class: Number of images that get another class; None where the answer is not one class.
    """

    run: dict[str, float]
    int8: dict[str, float]
    other_class: int | None


def quantize(source: Path, path: Path) -> None:
    """Write the graph in ``source`` with the weights of its matrices in int8, by onnxruntime's dynamic quantization.

    Each output channel of a matrix has a scale of its own. Weights take seven bits of the eight: processors without
    VNNI add two products in 16 bits, which more would overflow. Activations become eight bits as they are computed,
    with one scale for the whole batch, so that outputs depend a little on the other images of a batch. Convolutions,
    norms and the products of attention stay in float32.

    Args:
        source: A graph with its weights inside.
        path: File to write.

    Raises:
        UsageError: The weights are larger than 1.5 GB.
    """
    import onnx
    import onnxruntime
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.shape_inference import quant_pre_process

    if source.with_name(f"{source.name}.data").exists():
        raise UsageError("`--to onnx-int8` is for graphs that hold their weights, below 1.5 GB: use --to onnx")
    onnxruntime.set_default_logger_severity(4)  # it warns of each constant that it does not fold
    try:
        quant_pre_process(source, path, skip_symbolic_shape=True)  # fold what is constant: else no matrix is a constant
    finally:
        onnxruntime.set_default_logger_severity(2)  # its own default
    graph = onnx.load(path)
    del graph.graph.value_info[:]  # shapes of before the folding, which onnx's own inference takes for contradictions
    quantize_dynamic(
        graph,
        path,
        op_types_to_quantize=["MatMul", "Gemm"],
        per_channel=True,
        reduce_range=True,
        weight_type=QuantType.QInt8,
    )
    graph = onnx.load(path)
    del graph.graph.value_info[:]  # shapes of before again, of which onnxruntime would warn at each call
    onnx.save(graph, path)


def measure_both(run: RunDir, checkpoint: Path, outputs: Outputs, quiet: bool = False) -> Compared:
    """Measure a run and a graph in place of its network on the validation split; the run's own results stay.

    Raises:
        UsageError: The images cannot be read, or the graph cannot take the place of the network.
    """
    alone, graph = Conditions(alone=True), partial(answered_by, outputs=outputs)
    own = evaluate("validate", run, checkpoint, alone, quiet, keep=False)
    other = evaluate("validate", run, checkpoint, alone, quiet, keep=False, around=graph)
    assert own and other  # one process
    other_class = None
    if "prediction" in own.predictions:
        other_class = int((own.predictions["prediction"] != other.predictions["prediction"]).sum())
    return Compared(own.values, other.values, other_class)


@contextmanager
def answered_by(task: Any, outputs: Outputs) -> Iterator[None]:
    """Inside a ``with`` block, let a graph answer in place of a task's network.

    Raises:
        UsageError: The task did not ask it, or has images that do not fit into one tensor.
    """
    net: Any = task.net if isinstance(task, Task) else answering(task)
    asked = False

    def forward(images: Any) -> Tensor:
        nonlocal asked
        asked = True
        if not isinstance(images, Tensor):
            raise UsageError(f"a graph takes images of one size, and the run's data has batches of {path_of(images)}")
        found = outputs(images.float().cpu()).to(images.device)
        return (found - task.target_mean) / task.target_std if isinstance(task, Standardized) else found

    net.forward = forward
    try:
        yield
    finally:
        del net.forward
    if not asked:
        raise UsageError(f"{path_of(task)} does not call `forward` of {path_of(net)} in validation: use --to onnx")
