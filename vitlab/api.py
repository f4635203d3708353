"""The Python API, which the commands use too: train, load, compare."""

import os
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vitlab.config.arguments import as_arguments
from vitlab.config.options import FitOptions, Policy
from vitlab.config.trust import trust
from vitlab.errors import Stopped
from vitlab.run import Overrides, PathLike, Run

if TYPE_CHECKING:
    from vitlab.ablation.lab import Lab
    from vitlab.jobs.load import Loaded


def fit(
    config: PathLike | Sequence[PathLike] | None = None,
    overrides: Overrides | None = None,
    *,
    name: str | None = None,
    run_dir: PathLike | None = None,
    resume: PathLike | None = None,
    auto_resume: bool = False,
    init_from: PathLike | None = None,
    resize: Policy | None = None,
    init_grid: Sequence[int] | None = None,
    overwrite: bool = False,
    quiet: bool = False,
    trust_imports: Sequence[str] = (),
) -> Run:
    """Train as ``vitlab fit`` does, and return the run.

    Args:
        config: File, shipped name such as ``t2t``, or several of them; later ones override.
        overrides: Dotted keys and values that change the configuration, as ``{"model.pos_embed": "rope2d"}``.
        name: Name of the run, whose directory is ``runs/NAME``; None makes one from date, config, seed and a hash.
        run_dir: Directory of the run, instead of ``name``.
        resume: Run to continue exactly from its last checkpoint.
        auto_resume: Whether to continue the run of ``name`` or ``run_dir`` if it exists, else start it.
        init_from: Weights to start from: a run, a checkpoint, a file, or ``timm:NAME``.
        resize: With ``init_from``, how to resample positions for another grid; None is the method's default.
        init_grid: With ``init_from``, rows and columns of the token grid where the file lacks them.
        overwrite: Whether to delete the run directory if it exists.
        quiet: Whether to print errors only.
        trust_imports: Packages of yours that class paths of the configuration may import.

    Raises:
        ValueError: The configuration is wrong; the message is that of the command.
        RunFailed: The training ended early for an outside reason, such as a full disk or no memory.
        KeyboardInterrupt: The training was interrupted and saved; ``fit(resume=...)`` continues it.

    Example:
        >>> short = {"trainer.max_epochs": 1, "trainer.logger": False, "data.subset": 0.1}
        >>> run = fit("t2t", short, name="tiny", quiet=True)
        >>> run.status
        'done'
    """
    from vitlab.jobs.train.fit import fit as train

    trust(trust_imports)
    files = [config] if isinstance(config, str | os.PathLike) else list(config or ())
    words = [word for file in files for word in ("--config", os.fspath(file))]
    options = FitOptions(
        name=name,
        run_dir=_text(run_dir),
        resume=_text(resume),
        auto_resume=auto_resume,
        init_from=_text(init_from),
        resize=resize,
        init_grid=",".join(map(str, init_grid)) if init_grid else None,
        overwrite=overwrite,
        quiet=quiet,
    )
    try:
        return Run(train([*words, *as_arguments(overrides)], options).path)
    except Stopped as stopped:
        if stopped.args[0] == signal.SIGINT:
            raise KeyboardInterrupt from stopped
        raise


def load(source: PathLike = "last", trust_imports: Sequence[str] = ()) -> "Loaded":
    """Return a trained network and the transform that prepares its images, ``(net, transform)``.

    ``net(transform(image)[None])`` of a PIL image gives ``(1, K)`` outputs. The network is in evaluation mode.

    Args:
        source: A run by name or directory, ``last``, one of its checkpoints or weights, a file that ``vitlab export``
            wrote, or ``timm:NAME``.
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

    trust(trust_imports)
    return load_trained(os.fspath(source))


def ablate(file: PathLike, trust_command: bool = False, trust_imports: Sequence[str] = ()) -> "Lab":
    """Return the ablation that a file describes, to ``plan``, ``run`` and ``report``.

    >>> [arm.name for arm in ablate("position_embeddings/probe").ablation.arms]
    ['none', 'learned', 'sincos1d', 'sincos2d', 'rope2d']

    Args:
        file: A YAML file, the name of a shipped experiment such as ``position_embeddings/probe``, or exported evidence.
        trust_command: Whether to allow `run.command` of the file, which may be any program.
        trust_imports: Packages of yours that class paths of the file may import.
    """
    from vitlab.ablation.lab import Lab

    trust(trust_imports)
    return Lab(os.fspath(file), trust_command=trust_command)


def _text(path: PathLike | None) -> str | None:
    return None if path is None else os.fspath(path)
