"""Read weights from files without running code that they may contain."""

import argparse
import errno
import hashlib
import json
import pickle
import re
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from vitlab.errors import preview
from vitlab.models.arguments import ModelArgs
from vitlab.runs.format import NewerFormat
from vitlab.runs.manifest import torn_archive
from vitlab.runs.shards import TornShards, read_checkpoint
from vitlab.shipped import card_beside, find_weights, refuse_graph

CONTAINERS = (
    "state_dict_ema",
    "model_ema",
    "state_dict",
    "model",
    "net",
)  # averaged weights first: those are the published ones


@dataclass
class WeightsFile:
    """The content of a file of weights.

    Args:
        state_dict: The state dict, without the prefixes that wrappers add to names.
        arguments: Arguments of the network, if the file has them.
        sentences: What was chosen or left out, for the user.
        path: Path of the file, for messages.
        is_foreign: Whether another library wrote the weights, of which a position table is what is added, unscaled.
        own: Classes of the user's that the outputs need beside these weights: of the ``network``, or of the task that
            ``answers``.
        extra: What parts of the user's keep beside tensors, by ``get_extra_state`` of torch.

    Example:
        >>> WeightsFile({"head.bias": torch.zeros(10)}, {"num_classes": 10}).arguments
        {'num_classes': 10}
    """

    state_dict: dict[str, Tensor]
    arguments: ModelArgs = field(default_factory=ModelArgs)
    sentences: list[str] = field(default_factory=list)
    path: str | Path = "the file"
    is_foreign: bool = False
    own: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


def read_weights(path: str | Path | WeightsFile) -> WeightsFile:
    """Read a safetensors file, or a torch file in the mode that cannot run code; return a WeightsFile unchanged.

    ``vitlab:NAME`` is a file that the package ships.

    The arguments of the network come from the file, or from ``network`` in a FILE.json beside it.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save({"state_dict": {"module.head.bias": torch.zeros(10)}}, f"{folder}/last.pth")
        ...     list(read_weights(f"{folder}/last.pth").state_dict)
        ['head.bias']
    """
    if isinstance(path, WeightsFile):
        return path
    path = Path(find_weights(str(path)))
    if not path.is_file():
        raise ValueError(f"no such file: {path}")
    content, arguments, own = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    sentences = []
    for name in CONTAINERS:
        if isinstance(content.get(name), dict):
            content = content[name]
            sentences += [f"weights: {name}, the averaged ones"] if name.endswith("ema") else []
            break
    named = [(name, value) for name, value in content.items() if isinstance(name, str)]
    state = {name: v for name, v in named if isinstance(v, Tensor) or name.endswith("_extra_state")}
    if not state or len(state) < len(content):
        raise ValueError(f"{path} holds no state dict: its entries are {preview(content)}")
    state, outside = _strip_prefixes(state)
    sentences += [f"weights: left out what lies outside the network, {preview(outside)}"] if outside else []
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    extra = {name: value for name, value in state.items() if name not in tensors}
    return WeightsFile(tensors, arguments or _arguments_beside(path), sentences, path, own=own, extra=extra)


def network_prefix(state_dict: dict[str, Tensor]) -> str:
    """Return what stands before the names of a network within a larger module, ``model.``; empty for a network alone.

    Example:
        >>> network_prefix({"model.cls_token": torch.zeros(1, 1, 8), "model.blocks.0.norm1.bias": torch.zeros(8)})
        'model.'
    """
    found = (re.match(r"((?:\w+\.)*?)(?:blocks\.0|patch_embed)\.", name) for name in state_dict)
    return min((match[1] for match in found if match), default="", key=len)


def unwrapped(file: WeightsFile) -> WeightsFile:
    """Return a file without the prefix that all its names have, as a module that holds the network gives them.

    Example:
        >>> list(unwrapped(WeightsFile({"model.blocks.0.norm1.bias": torch.zeros(8)})).state_dict)
        ['blocks.0.norm1.bias']
    """
    prefix = network_prefix(file.state_dict)
    if not prefix or not all(name.startswith(prefix) for name in file.state_dict):
        return file
    state_dict, extra = ({k.removeprefix(prefix): v for k, v in part.items()} for part in (file.state_dict, file.extra))
    sentences = [*file.sentences, f"weights: those under {prefix}"]
    return replace(file, state_dict=state_dict, extra=extra, sentences=sentences)


def read_content(path: Path) -> dict[str, Any]:
    """Read a safetensors or torch file: its ``state_dict``, with all names as they stand there, and what is beside it.

    Example:
        >>> import tempfile
        >>> from safetensors.torch import save_file
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_file({"net.bias": torch.zeros(10)}, file := Path(folder) / "best.safetensors")
        ...     {name: list(value) for name, value in read_content(file).items()}
        {'state_dict': ['net.bias']}
    """
    content = (_read_safetensors if path.suffix == ".safetensors" else _read_torch)(path)[0]
    return content if "state_dict" in content else {"state_dict": content}


def facts_beside(path: str | Path) -> dict[str, Any]:
    """Return what FILE.json beside a file of weights says; nothing without one.

    Example:
        >>> facts_beside("mine.safetensors")
        {}
    """
    file = card_beside(path)
    if not file.is_file():
        return {}
    try:
        return dict(json.loads(file.read_text()).items())
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{file} must hold a JSON object: {error}") from error


def _arguments_beside(path: Path) -> ModelArgs:
    arguments = facts_beside(path).get("network") or {}
    if not isinstance(arguments, dict):
        raise ValueError(f"{card_beside(path)}: `network` must hold arguments of the network, got {arguments!r}")
    return cast(ModelArgs, arguments)


def _read_safetensors(path: Path) -> tuple[dict[str, Any], ModelArgs, dict[str, str]]:
    """Return weights, the network's arguments, and the user's own classes that the outputs need."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            facts = file.metadata() or {}
            arguments: ModelArgs = json.loads(facts.get("hyper_parameters", "{}"))
            own: dict[str, str] = json.loads(facts.get("own", "{}"))
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is truncated or not a safetensors file: {error}") from error
    if "sha256" in facts and facts["sha256"] != weights_digest(weights, facts.get("hyper_parameters", "")):
        raise ValueError(f"{path} is damaged: its weights differ from those that were written (sha256)")
    return weights, arguments, own


def weights_digest(weights: dict[str, Tensor], arguments: str) -> str:
    """Return the sha256 of names, dtypes, shapes and values, and of the network's arguments.

    Example:
        >>> weights_digest({"head.bias": torch.zeros(10)}, "")[:8]
        '16871c41'
    """
    digest = hashlib.sha256(arguments.encode())
    for name in sorted(weights):
        value = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_readable(path: Path) -> None:
    """Refuse a file that is damaged or holds more than weights; of a torch file no tensor is read.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save({"head.bias": torch.zeros(10)}, f"{folder}/weights.pt")
        ...     check_readable(Path(folder) / "weights.pt")
    """
    if path.suffix == ".safetensors":
        _read_safetensors(path)
    else:
        _load(path, map_location="meta", mmap=True)


def _read_torch(path: Path) -> tuple[dict[str, Any], ModelArgs, dict[str, str]]:
    refuse_graph(path)
    if torn := torn_archive(path):
        raise ValueError(f"{path} is truncated or not a file that torch wrote: {torn}")
    content = _load(path, map_location="cpu")
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no state dict but {type(content).__name__}")
    given = content.get("hyper_parameters")
    beside = [content.get(name) for name in ("network", "own")]  # in a file of others, anything
    built, own = (part if isinstance(part, dict) and "state_dict" in content else {} for part in beside)
    return content, cast(ModelArgs, {**(given if isinstance(given, dict) else {}), **built}), own


def _load(path: Path, **options: Any) -> Any:
    refuse_graph(path)
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals([argparse.Namespace]):  # published files
            warnings.simplefilter("ignore")  # about other pickle protocols, which fail below
            return read_checkpoint(path, **options)
    except (TornShards, NewerFormat):
        raise
    except OSError as error:
        if error.errno in (None, errno.EISDIR, errno.EINVAL):  # torch's own, a folder, or nothing to map
            raise ValueError(f"{path} is truncated or not a file that torch wrote") from error
        raise  # nobody knows what is in a file that the system does not give
    except Exception as error:  # a damaged file can raise anything: struct.error, AssertionError, TypeError, ...
        if isinstance(error, pickle.UnpicklingError) and "Unsupported operand" not in str(error):
            raise ValueError(
                f"{path} is refused: it is damaged or holds more than weights, which could run code when loaded; "
                f"where you trust its source, save its state dict as safetensors"
            ) from error
        raise ValueError(f"{path} is truncated or not a file that torch wrote") from error


def _strip_prefixes(state_dict: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Strip the prefixes of DDP, torch.compile, torch's AveragedModel (which also counts its updates) and our tasks.

    Also return the names outside the network, left out.
    """
    state_dict = {name.replace("_orig_mod.", ""): value for name, value in state_dict.items()}
    wrapped = {name: value for name, value in state_dict.items() if name != "n_averaged"}
    if all(name.startswith("module.") for name in wrapped):
        state_dict = {name.removeprefix("module."): value for name, value in wrapped.items()}
    if not any(name.startswith("net.") for name in state_dict):
        return state_dict, []
    inside = {name.removeprefix("net."): value for name, value in state_dict.items() if name.startswith("net.")}
    return inside, [name for name in state_dict if not name.startswith("net.")]
