"""What is asked of an export, and where its file goes; it needs no torch, so a command answers ``--help`` at once."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from vitlab.errors import UsageError, did_you_mean
from vitlab.runs.directory import RunDir

Form = Literal["safetensors", "timm", "onnx", "onnx-int8", "pt2"]
SUFFIXES: dict[Form, str] = {
    "safetensors": ".safetensors",
    "timm": ".timm.safetensors",
    "onnx": ".onnx",
    "onnx-int8": ".int8.onnx",
    "pt2": ".pt2",
}
OF_ANY: tuple[Form, ...] = ("onnx", "onnx-int8", "pt2")  # graphs, which take any network
Dynamic = Literal["batch", "size"]  # what an exported graph leaves open
DYNAMIC: tuple[Dynamic, ...] = get_args(Dynamic)
OPSETS = range(18, 24)  # of ONNX; torch asked for an older one writes 18 all the same


@dataclass(frozen=True)
class ExportOptions:
    """What is asked of an export.

    Args:
        to: Format of the file: safetensors, timm, onnx, onnx-int8 or pt2.
        output: File to write.
        check: Whether to compare the outputs of safetensors with the run's; those of other formats always are.
        dynamic: What a graph leaves open: batch, or size, which is the batch, the height and the width.
        opset: Version of ONNX's operators; None is torch's default.

    Raises:
        UsageError: There is no such value, or it does not go with the format.
    """

    to: Form
    output: Path
    check: bool = False
    dynamic: Dynamic = "batch"
    opset: int | None = None

    def __post_init__(self) -> None:
        if self.dynamic not in DYNAMIC:
            raise UsageError(f"`dynamic` must be one of {', '.join(DYNAMIC)}, got {self.dynamic!r}")
        if self.dynamic == "size" and self.to not in OF_ANY:
            raise UsageError(f"`--dynamic size` is for graphs: use --to onnx or pt2, got {self.to}")
        if self.opset is not None and not self.to.startswith("onnx"):
            raise UsageError(f"`--opset` is for --to onnx, got {self.to}")
        if self.opset is not None and self.opset not in OPSETS:
            raise UsageError(f"`--opset` must be {OPSETS[0]} to {OPSETS[-1]}, which torch writes, got {self.opset}")


def export_path(run: RunDir, checkpoint: Path, form: Form, output: str | os.PathLike[str] | None = None) -> Path:
    """Return the file that a network is exported to; refuse a suffix that does not match the format."""
    if form not in SUFFIXES:
        raise UsageError(f"`to` must be one of {', '.join(SUFFIXES)}, got {form!r}{did_you_mean(form, SUFFIXES)}")
    path = Path(output or run.path / "export" / f"{checkpoint.stem}{SUFFIXES[form]}")
    suffix = f".{SUFFIXES[form].split('.')[-1]}"
    if path.suffix != suffix:
        raise UsageError(f"`--output` must end with {suffix}, got {path}")
    if path.is_dir():
        raise UsageError(f"`--output {output or path}` is a directory: name a file, such as one in it")
    return path
