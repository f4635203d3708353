"""An ablation that Python gives as a mapping, written as the file that it would be; alone, as files do not need it."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from vitlab.ablation.file import spec
from vitlab.ablation.file.arms import NAME
from vitlab.config.trust import TRUSTED, needs_no_trust, trust
from vitlab.errors import PARTS_FILE, UsageError
from vitlab.notebook import names_in, source_of
from vitlab.objects import written
from vitlab.runs.atomic import write_text
from vitlab.runs.directory import RUNS

BASE = "base.yaml"  # the configuration that Python gave


def write_file(content: Mapping[str, Any]) -> Path:
    """Write ``runs/ablations/NAME/ablation.yaml``, and the source of classes of a notebook, and return its path.

    Args:
        content: What a file of an ablation holds; classes and objects stand for their class paths. Its ``base`` may be
            the configuration itself, as ``{"model": MyNet, "data": MyData(), "trainer": {"max_epochs": 3}}``, which
            becomes ``base.yaml`` beside it.

    Raises:
        UsageError: It has a mistake, or an object that cannot be written; nothing is written.
    """
    used: list[str] = []
    plain = {key: written(key, value, used) for key, value in content.items()}
    if isinstance(one := plain.get("trust_imports"), str):
        plain["trust_imports"] = [one]
    name = str(plain.get("name") or "")
    if not NAME.fullmatch(name):
        raise UsageError(f"`ablate` needs a `name` of a-z 0-9 _ . - for its folder, got {plain.get('name')!r}")
    folder = RUNS / "ablations" / name
    source = source_of(names) if (names := names_in(plain)) else None
    packages = list(dict.fromkeys(path.partition(".")[0] for path in used if not needs_no_trust(path)))
    trust(packages)
    own = [*packages, *([str(folder / PARTS_FILE)] if source else [])]
    if own:
        plain["trust_imports"] = list(dict.fromkeys([*plain.get("trust_imports", []), *own]))
    base = _with_classes(plain["base"]) if isinstance(plain.get("base"), Mapping) else None
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "ablation.yaml"
        if base is not None:
            plain["base"] = str(Path(place) / BASE)
            Path(plain["base"]).write_text(yaml.safe_dump(base, sort_keys=False))
        file.write_text(yaml.safe_dump(plain, sort_keys=False))
        try:
            spec.read_ablation(file)
        except UsageError as error:
            raise UsageError(str(error).replace(str(file), "ablate({...})")) from error
    if source:
        write_text(folder / PARTS_FILE, source)
        if (parts := str(folder / PARTS_FILE)) not in TRUSTED:
            TRUSTED.append(parts)  # its classes are those of this process
    if base is not None:
        plain["base"] = str(folder / BASE)
        write_text(folder / BASE, yaml.safe_dump(base, sort_keys=False))
    write_text(folder / "ablation.yaml", yaml.safe_dump(plain, sort_keys=False))
    return folder / "ablation.yaml"


def _with_classes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration in which model and data are mappings, as files have them.

    >>> _with_classes({"model": "mypkg.Mine", "trainer": {"max_epochs": 1}})
    {'model': {'class_path': 'mypkg.Mine'}, 'trainer': {'max_epochs': 1}}
    """
    if dots := [key for key in config if "." in str(key)]:
        raise UsageError(f"`base` is nested, as a config file is: {dots[0]!r} is a key for levels of `axes`")
    return {k: {"class_path": v} if k in ("model", "data") and isinstance(v, str) else v for k, v in config.items()}
