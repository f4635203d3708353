"""``vitlab models``: list the published networks without building one."""

import fnmatch
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from vitlab.class_paths import choice_text, name_and_args
from vitlab.cli.lines import show, show_rows
from vitlab.config.arguments import CommandParser, add_formats
from vitlab.config.keys import class_and_arguments
from vitlab.config.yaml_files import read_own
from vitlab.errors import UsageError, did_you_mean
from vitlab.models.sizes import AGAIN, PUBLISHED, SIZES
from vitlab.shipped import HOME
from vitlab.tables import columns

_DEFAULTS = {"tokenizer": "patch", "patch_size": 16, "t2t_attn": "performer", "mlp_ratio": 4.0, "attn": "softmax"}
_SHAPE = (*_DEFAULTS, "embed_dim", "depth", "num_heads", "norm_layer")


def main(argv: list[str]) -> int:
    """Run ``vitlab models`` and return its exit code."""
    parser = CommandParser(
        "vitlab models",
        description="List the published networks, or explain one.",
        epilog="examples: vitlab models 't2t*'; vitlab models t2t_vit_14",
    )
    parser.add_argument("name", nargs="?", default="*", metavar="PATTERN|NAME", help="name, part of one, or pattern")
    add_formats(parser)
    options = parser.parse_args(argv)
    name = options.name
    if name in SIZES and not options.form:
        show(_one(name))
        return 0
    found = [name] if name in SIZES else [size for size in SIZES if fnmatch.fnmatchcase(size, name) or name in size]
    if not found:
        recipes = [path for path in map(_config_name, _configs()) if name.casefold() in path]
        hint = f"; configs with this name: {', '.join(recipes)};" if recipes else did_you_mean(name, SIZES) or ";"
        raise UsageError(f'there is no model called "{name}"{hint} `vitlab models` lists them')
    show_rows(_facts(found), options.form) if options.form else show(_table(found))
    return 0


def _facts(names: list[str]) -> list[dict[str, Any]]:
    configs = _configs()
    rows = []
    for name in names:
        facts = PUBLISHED[name]
        row = {"model": name, "parameters": facts.parameters, "macs": facts.macs, "tokens": facts.tokens}
        row |= {"top1": facts.top1, "source": facts.source, "configs": _trainers(name, configs)}
        rows.append({**row, "arguments": SIZES[name]})
    return rows


def _table(names: list[str]) -> str:
    rows = [["model", "parameters", "GMACs", "tokens", "top-1", "config"]]
    for row in _facts(names):
        top1 = "-" if row["top1"] is None else f"{row['top1']:.1f}"
        size = [f"{row['parameters'] / 1e6:.1f} M", f"{row['macs'] / 1e9:.2f}", str(row["tokens"])]
        first, *others = [_config_name(path) for path in row["configs"]] or ["-"]
        rows.append([row["model"], *size, top1, first + (f" and {len(others)} more" if others else "")])
    return (
        f"{columns(rows, right=(1, 2, 3, 4))}\n\n"
        "At 224 x 224 pixels with 1,000 classes. One GMAC is 10^9 multiply-adds, or two\n"
        "GFLOPs, and includes the products within attention. top-1: published accuracy\n"
        "in percent, trained and tested on ImageNet-1k only; `vitlab models NAME` names\n"
        "its source. config: what --config takes; a file may follow another paper than\n"
        "top-1, and states the accuracy of its own."
    )


def _one(name: str) -> str:
    facts, arguments = PUBLISHED[name], SIZES[name]
    top1 = facts.source if facts.top1 is None else f"{facts.top1:.1f} % on ImageNet-1k: {facts.source}"
    lines = [
        ("parameters", f"{facts.parameters / 1e6:.1f} M ({facts.parameters:,} trained)"),
        ("cost", f"{facts.macs / 1e9:.2f} GMACs, {2 * facts.macs / 1e9:.2f} GFLOPs per image of 224 x 224"),
        ("tokens", f"{facts.tokens}, including the class token"),
        ("top-1", top1),
    ]
    if facts.again:
        lines.append(("", f"reproduced: {facts.again[0]:.2f} %, top-5 {facts.again[1]:.2f} % ({AGAIN})"))
    lines.append(("config", ", ".join(_trainers(name, _configs())) or "none yet"))
    lines += [
        ("arguments" if i == 0 else "", f"{key}: {choice_text(value)}")
        for i, (key, value) in enumerate(arguments.items())
    ]
    text = "\n".join(f"{key:<11} {value}" for key, value in lines)
    return f'{name}\n{text}\n\nin Python   vitlab.create_model("{name}")'


def _configs() -> dict[str, dict[str, Any]]:
    """Return the model arguments of each ImageNet config, from ./configs and from those that vitlab ships."""
    found: dict[str, dict[str, Any]] = {}
    for folder in (Path("configs"), HOME / "configs"):
        for path in sorted((folder / "imagenet").glob("*.yaml")):
            with suppress(OSError, ValueError):  # not a config: `vitlab fit` says what is wrong
                _, arguments = class_and_arguments(read_own(path), "model")
                found.setdefault(f"configs/imagenet/{path.name}", arguments)
    return found


def _config_name(path: str) -> str:
    """Return the short form that ``--config`` takes."""
    return path.removeprefix("configs/").removesuffix(".yaml")


def _trainers(name: str, configs: dict[str, dict[str, Any]]) -> list[str]:
    """Return the configs that train a network with the tokenizer, width and depth of the published one."""
    return [path for path, arguments in configs.items() if _shape(arguments) == _shape(SIZES[name])]


def _shape(arguments: Mapping[str, Any]) -> list[Any]:
    word, options = name_and_args("tokenizer", arguments.get("tokenizer", "patch"))
    unused = "patch_size" if word == "t2t" else "t2t_attn"
    shape = {**arguments, **options, "tokenizer": word}
    return [shape.get(key, _DEFAULTS.get(key)) for key in _SHAPE if key != unused]
