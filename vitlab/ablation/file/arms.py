"""The arms of an ablation: combinations of levels, and the settings they change."""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitlab.ablation.file.schema import File, meant
from vitlab.errors import did_you_mean
from vitlab.shipped import find_shipped

NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")  # of an ablation, an axis and a level, which name folders
OWNED = (  # dotted keys that an ablation sets itself, and what to write instead
    ("seed_everything", "write `seeds:`"),
    ("trainer.devices", "a cell runs on one device"),
    ("trainer.num_nodes", "a cell runs on one device"),
    ("trainer.logger", "write `wandb:`"),
    ("trainer.default_root_dir", "the laboratory names the directories"),
    ("run_dir", "the laboratory names the directories"),
)
Adjusted = tuple[dict[str, str], dict[str, Any]]  # levels, and what is set where an arm has all of them
SECTIONS = ("model", "data", "trainer", "checkpoint", "seed_everything", "run_dir", "init_from")

COLUMNS = (  # of the tables and figures of a report, beside which each axis has a column of its own
    *("kind", "ablation", "cell", "arm", "seed", "split", "metric", "value", "step", "n_images", "status", "state"),
    *("note", "line", "mode", "n", "planned", "mean", "sd", "low", "high", "verdict", "test", "is_claimed"),
    *("parameters", "flops", "images_per_second", "pairs", "difference", "difference_low", "difference_high", "p"),
    *("adjusted_p", "equivalence_low", "equivalence_high", "equivalence_p", "correlation"),
    *("unpaired_low", "unpaired_high", "unpaired_p"),
)


@dataclass(frozen=True)
class Arm:
    """One variant: a level of every axis, and the settings that it changes."""

    levels: Mapping[str, str]  # axis: level
    configs: tuple[str, ...]
    overrides: Mapping[str, Any]
    init_from: str | None = None  # initial weights; {seed} stands for the cell's seed

    @property
    def name(self) -> str:
        """The names of its levels, joined."""
        return "-".join(self.levels.values())

    def weights(self, seed: int) -> str | None:
        """Return the initial weights for a seed, as ``--init_from`` takes them; None for random ones."""
        return self.init_from and self.init_from.replace("{seed}", str(seed))


def read_axes(file: File) -> dict[str, dict[str, Any]]:
    """Return the settings of each level of each axis, from ``axes`` of the file."""
    content = file.content["axes"]
    if not isinstance(content, dict):
        raise file.wrong("axes", "must name axes and their levels")
    axes: dict[str, dict[str, Any]] = {}
    for name, levels in content.items():
        where = f"axes/{name}"
        if isinstance(levels, list):
            levels, name = _named_levels(file, where, name, levels), str(name).rpartition(".")[2]
        if str(name) in COLUMNS:
            text = f"the axis `{name}` would share its column in the report with its numbers: give it another name"
            file.refuse(where, f"{text}: {_long_form('KEY')}")
        if str(name) in axes:
            raise file.mistake(where, f"two axes are called {name}; give them names: {_long_form('KEY')}")
        if not isinstance(levels, dict) or len(levels) < 2:
            raise file.mistake(where, f"the axis `{name}` needs two levels or more, got {levels!r}")
        checked = {check_level_name(file, f"{where}/{k}", k): v or {} for k, v in levels.items()}
        axes[check_level_name(file, where, name)] = checked
        for level, sets in checked.items():
            _check_overrides(file, f"{where}/{level}", level, sets)
    for (a, levels_a), (b, levels_b) in itertools.combinations(axes.items(), 2):
        keys_a, keys_b = ({k for sets in levels.values() for k in sets} - {"config"} for levels in (levels_a, levels_b))
        if shared := keys_a & keys_b:
            raise file.mistake(f"axes/{b}", f"the axes `{a}` and `{b}` both set `{min(shared)}`")
    return axes


def _named_levels(file: File, where: str, key: str, values: list[Any]) -> dict[str, Any]:
    """Return the levels of an axis in its short form: a dotted key and its values."""
    names = _level_names(values)
    for i, name in enumerate(names):
        if not isinstance(name, str) or not NAME.fullmatch(name):
            text = f"{name!r} is no name of a level (a-z 0-9 _ . -); name the levels"
            raise file.mistake(f"{where}/{i}", f"{text}: {_long_form(key)}")
        if name in names[:i]:
            raise file.mistake(where, f"two levels are called {name}; name the levels: {_long_form(key)}")
    return {name: {key: value} for name, value in zip(names, values, strict=True)}


def _long_form(key: str) -> str:
    return f"{{NAME: {{LEVEL: {{{key}: VALUE}}}}}}"


def check_level_name(file: File, where: str, name: Any) -> str:
    """Return ``name`` if it can be part of a directory name."""
    if isinstance(name, bool) or name is None:
        text = "YAML reads an unquoted on, off, yes, no, true, false, null or ~ as a value"
        raise file.mistake(where, f"{text}: quote the name, as in 'on' (a value needs no quotes)")
    if not NAME.fullmatch(str(name)):
        raise file.mistake(where, f"a name consists of a-z 0-9 _ . - and starts with a letter or digit, got {name!r}")
    return str(name)


def _level_names(values: list[Any]) -> list[Any]:
    """Return names for levels that are given as values: classes by name, with arguments where names collide.

    >>> _level_names(["none", 0.5, "mypkg.Coordinates", {"class_path": "mypkg.Wave"}, ["learned", "rope2d"]])
    ['none', '0.5', 'coordinates', 'wave', 'learned_rope2d']
    """
    names = [_value_name(value, is_long=False) for value in values]
    return [_value_name(v, is_long=True) if names.count(n) > 1 else n for n, v in zip(names, values, strict=True)]


def _value_name(value: Any, is_long: bool) -> Any:
    if isinstance(value, bool | int | float):
        return str(value).lower()
    if isinstance(value, list):
        return "_".join(str(_value_name(one, is_long)) for one in value)
    if not isinstance(value, str) and not (isinstance(value, dict) and "class_path" in value):
        return value
    path = value if isinstance(value, str) else str(value["class_path"])
    if isinstance(value, str) and not re.fullmatch(r"([A-Za-z_]\w*\.)*[A-Z]\w*", path):
        return value
    args = value.get("init_args") or {} if is_long and isinstance(value, dict) else {}
    words = [path.rpartition(".")[2], *(f"{name}{arg}" for name, arg in args.items())]
    return re.sub(r"[^a-z0-9_.]+", "_", "_".join(words).lower())


def _check_overrides(file: File, where: str, level: str, sets: Any) -> None:
    if not isinstance(sets, dict):
        raise file.mistake(where, f"the level `{level}` must be dotted keys and values, as in {{model.depth: 3}}")
    for key in sets:
        place = f"{where}/{key}"
        if key == "init_from" and not isinstance(sets[key], str | None):
            text = f"`init_from` of the level `{level}` must be a run or a checkpoint, as in 'runs/mae-{{seed}}'"
            raise file.mistake(place, f"{text}, got {sets[key]!r}")
        if key == "init_from" and sets[key] == "last":
            text = f"`init_from` of the level `{level}` must name its run: `last` is another one whenever a run starts"
            raise file.mistake(place, text)
        if key in ("config", "init_from"):
            continue
        if str(key).split(".")[0] not in SECTIONS:
            hint = did_you_mean(str(key).split(".")[0], SECTIONS) or ", such as model.pos_embed"
            raise file.mistake(place, f"`{key}` of the level `{level}` is not a dotted key of a config{hint}")
        if way_out := owned_by_ablation(str(key)):
            raise file.mistake(place, f"`{key}` of the level `{level}` is set by the ablation: {way_out}")


def owned_by_ablation(key: str) -> str | None:
    """Return what to write instead of a dotted key that an ablation sets itself; None for another key."""
    return next((way_out for owned, way_out in OWNED if key == owned or key.startswith(f"{owned}.")), None)


def read_arms(file: File, axes: dict[str, dict[str, Any]]) -> tuple[Arm, ...]:
    """Return the combinations of levels without those of ``exclude``, with the settings of ``adjust``."""
    if not isinstance(exclude := file.content.get("exclude") or [], list):
        raise file.mistake("exclude", "`exclude` must be a list, as in [{tokenizer: t2t, pos_embed: none}]")
    excluded = [pick(file, f"exclude/{i}", axes, levels) for i, levels in enumerate(exclude)]
    every = [dict(zip(axes, levels, strict=True)) for levels in itertools.product(*axes.values())]
    kept = [levels for levels in every if not any(out.items() <= levels.items() for out in excluded)]
    adjusted = read_adjust(file, axes)
    for i, (of, _) in enumerate(adjusted):
        if not any(of.items() <= levels.items() for levels in kept):
            raise file.mistake(f"adjust/{i}", f"no arm matches {of}: `exclude` removes it")
    arms = [_arm(file, axes, adjusted, levels) for levels in kept]
    names = [arm.name for arm in arms]
    if doubles := {name for name in names if names.count(name) > 1}:
        raise file.mistake("axes", f"two arms are called {min(doubles)}; give their levels other names")
    if len(arms) < 2:
        raise file.mistake("exclude", f"a comparison needs two arms or more, and `exclude` leaves {len(arms)}")
    return tuple(arms)


def _arm(file: File, axes: dict[str, dict[str, Any]], adjusted: Sequence[Adjusted], levels: dict[str, str]) -> Arm:
    """Return the arm with these levels, each with its settings, and those of ``adjust``."""
    configs: tuple[str, ...] = ()
    overrides: dict[str, Any] = {}
    for axis, level in levels.items():
        sets = dict(axes[axis][level])
        if "config" in sets:
            configs += find_configs(file, f"axes/{axis}/{level}/config", sets.pop("config"))
        overrides |= sets
    for of, sets in adjusted:
        if of.items() <= levels.items():
            overrides |= sets
    return Arm(levels, configs, overrides, overrides.pop("init_from", None))


def read_adjust(file: File, axes: Mapping[str, Mapping[str, Any]]) -> list[Adjusted]:
    """Return pairs of levels and the additional settings of arms with all these levels."""
    content = file.content.get("adjust") or []
    example = "{of: {tokenizer: t2t, pos_embed: learned}, set: {model.lr: 1e-3}}"
    if not isinstance(content, list) or not all(isinstance(e, dict) and set(e) == {"of", "set"} for e in content):
        raise file.wrong("adjust", f"must be a list, as in [{example}]")
    for i, one in enumerate(content):
        name = "-".join(map(str, one["of"].values())) if isinstance(one["of"], dict) else "adjust"
        _check_overrides(file, f"adjust/{i}/set", name, one["set"])
        if "config" in one["set"]:
            raise file.mistake(f"adjust/{i}/set", "`adjust` sets keys; a level names configs")
    return [(pick(file, f"adjust/{i}/of", axes, one["of"]), one["set"]) for i, one in enumerate(content)]


def pick(file: File, where: str, axes: Mapping[str, Mapping[str, Any]], levels: Any) -> dict[str, str]:
    """Return the levels at the place ``where`` of the file; refuse unknown ones."""
    if not isinstance(levels, dict):
        raise file.mistake(where, f"expected axes and levels, as in {{pos_embed: none}}, got {levels!r}")
    found = {str(axis): str(level).lower() if isinstance(level, bool) else str(level) for axis, level in levels.items()}
    for axis, level in found.items():  # YAML has read numbers and booleans among the names
        if axis not in axes:
            raise file.mistake(where, f"there is no axis `{axis}`{meant(axis, axes)}")
        if level not in axes[axis]:
            raise file.mistake(where, f"the axis `{axis}` has no level `{level}`{meant(level, axes[axis])}")
    return found


def find_configs(file: File, where: str, value: Any) -> tuple[str, ...]:
    """Return the paths of one config or several: here, beside the file, or shipped."""
    paths = []
    for text in value if isinstance(value, list) else [value]:
        own = (p for p in (Path(str(text)), file.path.parent / str(text)) if p.is_file())
        found = Path(str(text)) if file.is_evidence else next(own, None) or find_shipped(str(text))
        if not found:
            raise file.mistake(where, f"there is no config {text}, neither here, beside the file, nor shipped")
        paths.append(str(found))
    return tuple(paths)
