"""Names of configs, experiments and networks, where those are that the package ships, and the card beside a file."""

import os
from pathlib import Path

from vitlab.errors import UsageError, did_you_mean

HERE = Path(__file__).parent
HOME = HERE if (HERE / "configs").is_dir() else HERE.parent  # installed from a wheel, or a checkout
FOLDERS = ("configs", "experiments")
WEIGHTS = HERE / "weights"
PREFIX = "vitlab:"  # of the name of shipped weights
LIBRARIES = ("timm:", "hf:", "torchvision:")  # how names of other libraries' networks begin


def find_shipped(text: str, folder: str = "configs") -> Path | None:
    """Return the shipped file of a name such as ``t2t``, or of a path such as ``configs/t2t.yaml``.

    Args:
        text: What the user wrote.
        folder: Where to look up a bare name: ``configs`` or ``experiments``.
    """
    paths = [HOME / folder / text, HOME / folder / f"{text}.yaml"]
    if text.startswith(tuple(f"{name}/" for name in FOLDERS)):
        paths.insert(0, HOME / text)
    return next((path for path in paths if path.is_file()), None)


def shipped_weights() -> list[str]:
    """Return the names of the networks whose weights are part of the package.

    Example:
        >>> shipped_weights()
        ['photos64_t2t', 'photos64_vit']
    """
    return sorted(path.stem for path in WEIGHTS.glob("*.safetensors"))


def find_weights(text: str) -> str:
    """Return the file of shipped weights that ``vitlab:NAME`` names; of anything else, only ``~`` is expanded.

    Raises:
        UsageError: No weights of that name are shipped; the message names the closest.

    Example:
        >>> Path(find_weights("vitlab:photos64_vit")).name, find_weights("mine.safetensors")
        ('photos64_vit.safetensors', 'mine.safetensors')
    """
    if not text.startswith(PREFIX):
        return os.path.expanduser(text)
    name, names = text.removeprefix(PREFIX), shipped_weights()
    if name not in names:
        raise UsageError(f"vitlab ships the weights of {', '.join(names)}, not of {name!r}{did_you_mean(name, names)}")
    return str(WEIGHTS / f"{name}.safetensors")


def card_beside(file: str | Path) -> Path:
    """Return the file in which ``vitlab export`` says how to prepare images and what outputs mean.

    Beside weights from elsewhere, a reader writes it for the arguments of their ``network``.

    Example:
        >>> card_beside("mine.safetensors").name
        'mine.safetensors.json'
    """
    return Path(f"{file}.json")


def refuse_graph(file: Path) -> None:
    """Refuse an exported graph where weights are read.

    Raises:
        UsageError: The file is one.

    Example:
        >>> refuse_graph(Path("net.safetensors"))
    """
    if file.suffix in (".onnx", ".pt2"):
        raise UsageError(f"{file} is a graph, which gives predictions alone: name the run that it was exported from")


def as_typed(path: str) -> str:
    """Return the path of a shipped file as it can be typed in any folder, such as ``configs/t2t.yaml``; others stay."""
    folders = [HOME / name for name in FOLDERS]
    return Path(path).relative_to(HOME).as_posix() if any(f in Path(path).parents for f in folders) else path


def find_file(text: str, flag: str, folder: str = "configs") -> str:
    """Return the path of the file that a user names: their own, or else the shipped one of that name.

    Args:
        text: What the user wrote.
        flag: The flag they wrote it after, for the message.
        folder: Where to look up a bare name: ``configs`` or ``experiments``.

    Raises:
        UsageError: There is neither; the message names the closest.
    """
    if Path(text).is_file():
        return text
    if found := find_shipped(text, folder):
        return str(found)
    near = [str(path) for path in Path(text).parent.glob("*.yaml")]
    for path in (path for name in FOLDERS for path in (HOME / name).rglob("*.yaml")):
        near.append(path.relative_to(HOME).as_posix())
        near += [path.relative_to(HOME / folder).with_suffix("").as_posix()] if HOME / folder in path.parents else []
    raise UsageError(
        f"`{flag} {text}`: there is no such file, neither here nor shipped with vitlab{did_you_mean(text, near)}"
    )
