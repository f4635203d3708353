"""The Python API, which the commands use too: train, load, compare."""

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from inspect import signature
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal

from vitlab.class_paths import name_and_args
from vitlab.config.arguments import as_arguments, python_words
from vitlab.config.options import FitOptions, Policy
from vitlab.config.trust import trust, trust_classes
from vitlab.errors import Stopped, UsageError
from vitlab.jobs.terminal import lightning_quieted, terminal_as_it_was
from vitlab.objects import written
from vitlab.run import Overrides, PathLike, Run
from vitlab.runs.launch import is_connected, is_launched
from vitlab.runs.processes import as_it_was

if TYPE_CHECKING:
    from vitlab.ablation.file.spec import Ablation
    from vitlab.ablation.lab import Lab
    from vitlab.jobs.load import Loaded

FIT = ("name", "run_dir", "resume", "auto_resume", "init_from", "resize", "init_grid", "overwrite")
_together = False  # whether this process has trained with others that Lightning has started, as copies of the script


@python_words(*FIT)
def fit(
    config: PathLike | Sequence[PathLike] | None = None,
    overrides: Overrides | None = None,
    *,
    model: Any = None,
    data: Any = None,
    name: str | None = None,
    run_dir: PathLike | None = None,
    resume: PathLike | None = None,
    auto_resume: bool = False,
    init_from: PathLike | None = None,
    resize: Policy | None = None,
    init_grid: Sequence[int] | None = None,
    overwrite: bool = False,
    quiet: bool = False,
    trust_imports: str | Sequence[str] = (),
) -> Run:
    """Train as ``vitlab fit`` does, and return the run.

    Args:
        config: File, shipped name such as ``t2t``, or several of them; later ones override.
        overrides: Dotted keys and values that change the configuration, as ``{"model.pos_embed": "rope2d"}``; a value
            may be a class or an object, as in ``{"model.pos_embed": Coordinates}``.
        model: A LightningModule, as an object, which starts with its weights; or its class, a
            :class:`functools.partial` of it, or a task of vitlab with the weights that it was built with, which starts
            with those of the seed. It replaces that of ``config``.
        data: A LightningDataModule, likewise.
        name: Name of the run, whose directory is ``runs/NAME``; None makes one from date, config, seed and a hash.
        run_dir: Directory of the run, instead of ``name``.
        resume: Run to continue exactly from its last checkpoint.
        auto_resume: Whether to continue the run of ``name`` or ``run_dir`` if it exists, else start it.
        init_from: Weights to start from: a run, a checkpoint, a file, ``vitlab:NAME``, or ``timm:NAME``, ``hf:NAME``,
            ``torchvision:NAME``.
        resize: With ``init_from``, how to resample positions for another grid; None is the method's default.
        init_grid: With ``init_from``, rows and columns of the token grid where the file lacks them.
        overwrite: Whether to delete the run directory if it exists.
        quiet: Whether to print errors only.
        trust_imports: Packages of yours that class paths of the configuration may import.

    Raises:
        ValueError: The configuration is wrong; the message is that of the command, in Python's words.
        RunFailed: The training ended early for an outside reason, such as a full disk or no memory.
        KeyboardInterrupt: The training was interrupted and saved; ``fit(resume=...)`` continues it.

    Example:
        >>> short = {"trainer.max_epochs": 1, "trainer.logger": False, "data.subset": 0.1}
        >>> run = fit("t2t", short, name="tiny", quiet=True)
        >>> run.status
        'done'
    """
    from vitlab.jobs.train.fit import fit as train

    if _together:
        raise UsageError("this script has trained on several processes, which all run it: train again in another one")
    trust(trust_imports)
    files = [config] if isinstance(config, str | os.PathLike) else list(config or ())
    if resume and not (model is None and data is None):
        raise UsageError("`resume` continues a run as it is: leave out `model` and `data`")
    parts = {**_described("model", model, bool(files)), **_described("data", data, bool(files))}
    words = [word for file in files for word in ("--config", os.fspath(file))]
    options = FitOptions(
        name=name,
        run_dir=_text(run_dir),
        resume=_text(resume),
        auto_resume=auto_resume,
        init_from=_text(init_from),
        resize=resize,
        init_grid=init_grid,
        overwrite=overwrite,
        quiet=quiet,
        start=_weights_of(model),
    )
    try:
        with terminal_as_it_was(), as_it_was() as kept, _alone_after(is_connected()):
            run = Run(train([*words, *as_arguments(parts), *as_arguments(overrides)], options).path)
            kept.random = run.record.get("seed") is not False  # without a seed, the next run goes on drawing
            return run
    except Stopped as stopped:
        if stopped.number == signal.SIGINT:
            raise KeyboardInterrupt from stopped
        raise


@contextmanager
def _alone_after(was_connected: bool) -> Iterator[None]:
    """Leave, after a ``with`` block, the processes that Lightning has started in it for a training, also a failed one.

    Each goes on with the caller's script by itself: their sums over processes would count each image of a later
    measurement several times. Those that torchrun or srun has started, or the caller has connected, measure together.
    """
    global _together
    from torch import distributed

    leave = distributed.distributed_c10d._abort_process_group  # which waits for none of them
    try:
        yield
        leave = distributed.destroy_process_group
    finally:
        if is_connected() and not was_connected and not is_launched():
            _together = distributed.get_world_size() > 1
            leave()


@python_words("trust_imports")
def load(source: PathLike = "last", trust_imports: str | Sequence[str] = ()) -> "Loaded":
    """Return a trained network and the transform that prepares its images, ``(net, transform)``.

    ``net(transform(image)[None])`` of a PIL image gives ``(1, K)`` outputs. The network is in evaluation mode.

    Args:
        source: A run by name or directory, ``last``, one of its checkpoints or weights, a file that ``vitlab export``
            wrote (safetensors, or onnx, which onnxruntime runs), or ``timm:NAME``, ``hf:NAME``, ``torchvision:NAME``.
        trust_imports: Packages of yours whose classes it may use.

    Raises:
        ValueError: There is no such run or file, it is damaged, or it contains more than weights.

    Example:
        >>> from PIL import Image
        >>> net, transform = load("first")
        >>> net(transform(Image.new("L", (8, 8)))[None]).shape
        torch.Size([1, 10])
    """
    from vitlab.jobs.load import load_trained

    if not isinstance(source, str | os.PathLike):
        raise UsageError(f"`load` takes a run, its name or a file, got a {type(source).__name__}")
    trust(trust_imports)
    with lightning_quieted(), as_it_was():
        return load_trained(os.fspath(source))


def ablate(
    file: "PathLike | Mapping[str, Any] | Ablation",
    trust_command: bool = False,
    trust_imports: str | Sequence[str] = (),
) -> "Lab":
    """Return the ablation that a file describes, to ``plan``, ``run`` and ``report``.

    >>> [arm.name for arm in ablate("position_embeddings/probe").ablation.arms]
    ['none', 'learned', 'sincos1d', 'sincos2d', 'rope2d']

    Args:
        file: A YAML file, the name of a shipped experiment such as ``position_embeddings/probe``, or exported evidence;
            or what such a file holds, in which ``base`` may be a configuration, and levels and base may hold classes
            and objects: it becomes ``runs/ablations/NAME/ablation.yaml``.
        trust_command: Whether to allow `run.command` of the file, which may be any program.
        trust_imports: Packages of yours that class paths of the file may import.
    """
    from vitlab.ablation.file.spec import Ablation
    from vitlab.ablation.lab import Lab

    if not isinstance(file, str | os.PathLike | Mapping | Ablation):
        raise UsageError(f"`ablate` takes a file, what it holds as a dict, or an Ablation, got a {type(file).__name__}")
    trust(trust_imports)
    return Lab(os.fspath(file) if isinstance(file, str | os.PathLike) else file, trust_command=trust_command)


def _described(key: Literal["model", "data"], part: Any, has_config: bool) -> dict[str, Any]:
    """Return a module or its data as dotted keys and values of a configuration, and trust its class.

    Args:
        key: What it is.
        part: An object, a class, a partial of one, or the name of a class.
        has_config: Whether there is a configuration, of which no argument must be left.
    """
    import lightning as L

    from vitlab.interface import LINKS

    if part is None or isinstance(part, str):
        return {} if part is None else {key: part}
    kind = L.LightningModule if key == "model" else L.LightningDataModule
    cls = getattr(part, "func", part) if not isinstance(part, kind) else type(part)
    if (isinstance(cls, type) and not issubclass(cls, kind)) or not isinstance(cls, type | FunctionType):
        given = cls.__name__ if isinstance(cls, type) else type(cls).__name__
        needed = "training_step and configure_optimizers" if key == "model" else "train_dataloader"
        raise UsageError(
            f"`{key}` must be a {kind.__name__}, which has {needed}, or a class of one, got {given}; "
            "see docs/bring_your_own.md"
        )
    used: list[str] = []
    path, arguments = name_and_args(key, written(key, part, used))
    trust_classes(used)
    if has_config:
        others = {name: p.default for name, p in signature(cls).parameters.items() if p.default is not p.empty}
        arguments = {k: v for k, v in others.items() if k not in LINKS} | arguments
    return {key: path, **{f"{key}.{name}": value for name, value in arguments.items()}}


def _weights_of(model: Any) -> dict[str, Any] | None:
    """Return the weights of a module that is given as an object; None for initial weights that the seed can draw."""
    if not hasattr(model, "state_dict") or isinstance(model, type):
        return None
    if getattr(model, "is_as_built", bool)():
        return None
    state = model.state_dict().items()  # of tensors, and of what parts of the user's keep beside them
    return {name: v.detach().cpu().clone() if hasattr(v, "detach") else deepcopy(v) for name, v in state}


def _text(path: PathLike | None) -> str | None:
    return None if path is None else os.fspath(path)
