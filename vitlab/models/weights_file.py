"""Read weights from files without running what is in them."""

import argparse
import hashlib
import json
import pickle
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitlab.runs.manifest import torn_archive
from vitlab.runs.shards import TornShards, read_checkpoint

CONTAINERS = (
    "state_dict_ema",
    "model_ema",
    "state_dict",
    "model",
    "net",
)  # averaged weights first: they were published


@dataclass
class WeightsFile:
    """What a file of weights holds.

    Args:
        state_dict: Names and tensors, without the prefixes that wrappers add.
        arguments: How the network was built, where the file says so.
        sentences: What was chosen or left out, for the user.
        path: Where it lies, for messages.

    Example:
        >>> WeightsFile({"head.bias": torch.zeros(10)}, {"num_classes": 10}).arguments
        {'num_classes': 10}
    """

    state_dict: dict[str, Tensor]
    arguments: dict[str, Any] = field(default_factory=dict)
    sentences: list[str] = field(default_factory=list)
    path: str | Path = "the file"


def read_weights(path: str | Path | WeightsFile) -> WeightsFile:
    """Read a safetensors file, or a torch file in the mode that cannot run code; what was read already is returned.

    How the network was built is said in the file, or under ``network`` in a FILE.json beside it.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save({"state_dict": {"module.head.bias": torch.zeros(10)}}, f"{folder}/last.pth")
        ...     list(read_weights(f"{folder}/last.pth").state_dict)
        ['head.bias']
    """
    if isinstance(path, WeightsFile):
        return path
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"no such file: {path}")
    content, arguments = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    sentences = []
    for name in CONTAINERS:
        if isinstance(content.get(name), dict):
            content = content[name]
            sentences += [f"weights: {name}, the averaged ones"] if name.endswith("ema") else []
            break
    state_dict = {name: value for name, value in content.items() if isinstance(value, Tensor)}
    if not state_dict or len(state_dict) < len(content):
        raise ValueError(f"{path} holds no state dict: its entries are {preview(content)}")
    state_dict, outside = _strip_prefixes(state_dict)
    sentences += [f"weights: left out what lies outside the network, {preview(outside)}"] if outside else []
    return WeightsFile(state_dict, arguments or _beside(path), sentences, path)


def _beside(path: Path) -> dict[str, Any]:
    beside = Path(f"{path}.json")
    if not beside.is_file():
        return {}
    try:
        arguments = json.loads(beside.read_text()).get("network") or {}
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{beside} is no mapping in JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise ValueError(f"{beside}: `network` must hold arguments of the network, got {arguments!r}")
    return arguments


def _read_safetensors(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            facts = file.metadata() or {}
            arguments = json.loads(facts.get("hyper_parameters", "{}"))
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is truncated or not a safetensors file: {error}") from error
    if "sha256" in facts and facts["sha256"] != weights_digest(weights, facts.get("hyper_parameters", "")):
        raise ValueError(f"{path} is damaged: its weights are not those that were written (sha256)")
    return weights, arguments


def weights_digest(weights: dict[str, Tensor], arguments: str) -> str:
    """Return the sha256 of names, shapes, types and values, and of how the network was built.

    Example:
        >>> weights_digest({"head.bias": torch.zeros(10)}, "")[:8]
        '16871c41'
    """
    digest = hashlib.sha256(arguments.encode())
    for name in sorted(weights):
        value = weights[name].contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_readable(path: Path) -> None:
    """Refuse a torch file that is damaged or holds more than weights, without reading its tensors.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save({"head.bias": torch.zeros(10)}, f"{folder}/weights.pt")
        ...     check_readable(Path(folder) / "weights.pt")
    """
    _load(path, map_location="meta", mmap=True)


def _read_torch(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    if torn := torn_archive(path):
        raise ValueError(f"{path} is truncated or not a file that torch wrote: {torn}")
    content = _load(path, map_location="cpu")
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no state dict but {type(content).__name__}")
    arguments = content.get("hyper_parameters")
    return content, arguments if isinstance(arguments, dict) else {}


def _load(path: Path, **how: Any) -> Any:
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals([argparse.Namespace]):  # in published files
            warnings.simplefilter("ignore")  # about pickles of other protocols, which fail below
            return read_checkpoint(path, **how)
    except TornShards:
        raise
    except Exception as error:  # a damaged file fails as it likes: struct.error, AssertionError, TypeError, ...
        if isinstance(error, pickle.UnpicklingError) and "Unsupported operand" not in str(error):
            raise ValueError(
                f"{path} is refused: it is damaged or holds more than weights, which could run code when loaded; "
                f"where you trust its source, save its state dict alone, as safetensors"
            ) from error
        raise ValueError(f"{path} is truncated or not a file that torch wrote") from error


def _strip_prefixes(state_dict: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Return the state dict without what DDP, torch.compile and our tasks put before names, and the names left out."""
    state_dict = {name.replace("_orig_mod.", ""): value for name, value in state_dict.items()}
    if all(name.startswith("module.") for name in state_dict):
        state_dict = {name.removeprefix("module."): value for name, value in state_dict.items()}
    if not any(name.startswith("net.") for name in state_dict):
        return state_dict, []
    inside = {name.removeprefix("net."): value for name, value in state_dict.items() if name.startswith("net.")}
    return inside, [name for name in state_dict if not name.startswith("net.")]


def preview(names: Any) -> str:
    """Return the first few names, and how many there are beside them.

    Example:
        >>> preview(["a", "b", "c", "d", "e"])
        'a, b, c and 2 more'
    """
    names = list(names)
    return ", ".join(map(str, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
