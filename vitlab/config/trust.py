"""What a configuration may import and must not contain; docs/security.md gives the reasons."""

import argparse
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from vitlab.errors import UsageError

ALLOWED = ["vitlab", "lightning.pytorch", "torch.optim", "torchmetrics"]
FORCED = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
TRUSTED: list[str] = []  # packages that the user has named on this command line

_SECRET_KEY = re.compile(
    r"(^|_)(api_?key|access_?key|private_?key|secret|secret_?key|password|passwd|credentials?|token)$", re.IGNORECASE
)
_NO_SECRETS = {"class_token", "mask_token"}
_SECRET_VALUE = re.compile(  # of W&B, Hugging Face, GitHub, GitLab, OpenAI and AWS, and passwords in addresses
    r"wandb_v1_\w{8,}|\bhf_[A-Za-z0-9]{20,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}|"
    r"\bsk-(?:proj|ant|svcacct)?-?[\w-]{20,}|\bAKIA[A-Z0-9]{16}\b|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)


class Trust(argparse.Action):
    """Let class paths of a package of the user's own be imported."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Remember the packages."""
        trust(str(values).split(","))


def trust(packages: Iterable[str]) -> None:
    """Let class paths of some packages be imported from now on."""
    for name in packages:
        if not all(part.isidentifier() for part in name.split(".")):
            raise UsageError(f"`--trust_imports` must name packages, such as my_package, got {name!r}")
        TRUSTED.append(name)


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add ``--trust_imports`` to a command's own options."""
    text = "let class paths of the configuration import this package of yours, beside vitlab and Lightning"
    parser.add_argument("--trust_imports", action=Trust, metavar="PACKAGE", help=text)


def check_import(path: str) -> None:
    """Refuse an import path of a configuration that neither vitlab nor the user trusts."""
    if "." in path and not any(f"{path}.".startswith(f"{name}.") for name in [*ALLOWED, *TRUSTED]):
        raise UsageError(not_allowed(path))


def not_allowed(path: str) -> str:
    """Say that an import path is refused, and the way out."""
    places = ", ".join(f"{name}." for name in ALLOWED)
    package = path.split(".")[0]
    return (
        f'the class path "{path}" is refused: a configuration imports from {places} only; '
        f"if it is code of yours, add --trust_imports {package}"
    )


def refuse_forced_loading() -> None:
    """Refuse to start where the environment makes torch run code from checkpoints."""
    if os.environ.get(FORCED):
        raise UsageError(f"{FORCED}={os.environ[FORCED]} lets every checkpoint run code; unset it")


def refuse_secrets(values: Mapping[str, Any]) -> None:
    """Refuse a configuration, by dotted keys, that holds a password or a key: it is saved and sent to loggers."""
    for key, value in _inner(values):
        name = key.split(".")[-1]
        is_secret = _SECRET_KEY.search(name) and name not in _NO_SECRETS and value not in (None, "", True, False)
        if is_secret or redact(str(value)) != str(value):
            raise UsageError(
                f"`{key}` looks like a secret, and a configuration is saved and sent to loggers; leave it out, and use "
                "`wandb login` or an environment variable of the shell"
            )


def _inner(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values, and those in mappings and lists among them, under dotted keys."""
    for key, value in values.items():
        yield key, value
        parts = value if isinstance(value, Mapping) else dict(enumerate(value)) if isinstance(value, list) else {}
        yield from _inner({f"{key}.{name}": part for name, part in parts.items()})


def redact(text: str) -> str:
    """Return text with what looks like a key or password, and what secret environment variables hold, as ***."""
    for name, value in os.environ.items():
        if _SECRET_KEY.search(name) and len(value) >= 8:
            text = text.replace(value, "***")
    return _SECRET_VALUE.sub("***", text)
