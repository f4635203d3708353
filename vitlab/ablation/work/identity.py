"""The identity of a cell: whatever could change its numbers, and nothing else."""

import ast
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import vitlab

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
ROOMS = ("layers", "tokenizers", "models", "optim", "tasks", "data")  # the code that makes the numbers
NO_EFFECT = (  # dotted keys of a resolved config that cannot change a number; the seed is counted apart
    "seed_everything",
    *(f"trainer.{key}" for key in ("logger", "devices", "num_nodes", "default_root_dir", "profiler")),
    *(f"trainer.{key}" for key in ("enable_progress_bar", "enable_model_summary", "log_every_n_steps")),
    *(f"data.init_args.{key}" for key in ("num_workers", "root", "download")),
)


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values under dotted keys, lists whole."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return flat


def digest(content: Any) -> str:
    """Return the first ten hexadecimal digits of the hash of something that JSON can say."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def effective(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a resolved config under dotted keys, without what cannot change a number."""
    hidden = tuple(f"{key}." for key in NO_EFFECT)
    return {k: v for k, v in flatten(config).items() if k not in NO_EFFECT and not k.startswith(hidden)}


def code_digest(package: Path | None = None) -> str:
    """Return the hash of the code that makes the numbers; comments, docstrings and layout do not count."""
    package = package or Path(vitlab.__file__).parent
    parts = []
    for room in ROOMS:
        for path in sorted((package / room).rglob("*.py")):
            tree = ast.parse(path.read_text())
            for node in ast.walk(tree):
                if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
                    del node.body[0]
            parts.append(f"{path.relative_to(package)}\n{ast.dump(tree)}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:10]
