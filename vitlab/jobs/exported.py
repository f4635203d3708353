"""Formats of an export, and where its file goes: without torch, for the command's help and for :class:`vitlab.Run`."""

import os
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
