"""Passwords and API keys, which neither a saved configuration nor a batch script may contain; see docs/security.md."""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from vitlab.errors import UsageError

# Names of configuration keys and environment variables whose whole value is a secret: their last word counts, so that
# `token_dim` passes.
_SECRET_KEY = re.compile(
    r"(^|_)(api_?key|access_?key|private_?key|secret|secret_?key|password|passwd|credentials?|token)$", re.IGNORECASE
)
_NO_SECRETS = {"class_token", "mask_token"}
# Text that is a secret under any name: keys of W&B, Hugging Face, GitHub, GitLab, OpenAI and AWS, and passwords in
# addresses.
_SECRET_VALUE = re.compile(
    r"wandb_v1_\w{8,}|\bhf_[A-Za-z0-9]{20,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}|"
    r"\bsk-(?:proj|ant|svcacct)?-?[\w-]{20,}|\bAKIA[A-Z0-9]{16}\b|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)
# Words anywhere in what a batch script would contain, an option's name or a whole line of shell, where a value has no
# key to judge it by; a `token` alone is none there, as it may be a tokenizer's.
SECRET = re.compile(r"secret|passw(or)?d|api[_-]?key|(access|auth|bearer)[_-]?token|credential", re.IGNORECASE)


def refuse_secrets(values: Mapping[str, Any]) -> None:
    """Refuse a configuration with a password or an API key in it, as it is saved and sent to loggers."""
    for key, value in _flatten(values):
        name = key.split(".")[-1]
        is_secret = _SECRET_KEY.search(name) and name not in _NO_SECRETS and value not in (None, "", True, False)
        if is_secret or redact(str(value)) != str(value):
            raise UsageError(
                f"`{key}` looks like a secret, and configurations are saved and sent to loggers; leave it out, and use "
                "`wandb login` or an environment variable"
            )


def _flatten(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield all values with dotted keys, including those nested in mappings and lists."""
    for key, value in values.items():
        yield key, value
        parts = value if isinstance(value, Mapping) else dict(enumerate(value)) if isinstance(value, list) else {}
        yield from _flatten({f"{key}.{name}": part for name, part in parts.items()})


def redact(text: str) -> str:
    """Return text with keys, passwords and the values of secret environment variables replaced by ***."""
    for name, value in os.environ.items():
        if _SECRET_KEY.search(name) and len(value) >= 8:
            text = text.replace(value, "***")
    return _SECRET_VALUE.sub("***", text)
