"""What an ablation compares and how: its file, read and checked before anything starts."""

import hashlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitlab.ablation.file.claims import Claim, parse_claim
from vitlab.ablation.file.schema import File, check_level_name, level_names, read_packages
from vitlab.ablation.file.settings import Execution, Match, Stats, read_match, read_run, read_stats
from vitlab.ablation.file.tune import Tune, read_tune
from vitlab.errors import did_you_mean
from vitlab.runs.directory import RUNS
from vitlab.shipped import find_shipped

OWNED = (  # dotted keys that belong to the laboratory, and what to write instead
    ("seed_everything", "write `seeds:`"),
    ("trainer.devices", "a cell runs on one device"),
    ("trainer.num_nodes", "a cell runs on one device"),
    ("trainer.logger", "write `wandb:`"),
    ("trainer.default_root_dir", "the laboratory names the directories"),
    ("run_dir", "the laboratory names the directories"),
)
SECTIONS = ("model", "data", "trainer", "checkpoint", "seed_everything", "run_dir")


@dataclass(frozen=True)
class Arm:
    """One variant: a level of every axis, and what this sets."""

    levels: Mapping[str, str]  # axis: level
    configs: tuple[str, ...]
    overrides: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The names of its levels, joined."""
        return "-".join(self.levels.values())


@dataclass(frozen=True)
class Ablation:
    """A comparison, as its file describes it."""

    file: File
    name: str
    base: tuple[str, ...]
    axes: Mapping[str, Mapping[str, Any]]  # axis: level: what the file says of it
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    baseline: Mapping[str, str]
    primary: str
    mode: str
    secondary: tuple[str, ...]
    evaluate: str
    analyses: tuple[str, ...]  # of `vitlab analyze`, for each cell
    checkpoint: str
    match: Match
    stats: Stats
    run: Execution
    wandb: Mapping[str, Any] | None
    claims: tuple[Claim, ...] = ()
    tune: Tune | None = None
    trust_imports: tuple[str, ...] = ()
    home: Path | None = None  # of evidence that was exported

    @property
    def directory(self) -> Path:
        """Where its cells and its report lie."""
        return self.home or RUNS / "ablations" / self.name

    @property
    def digest(self) -> str:
        """The hash of the file, kept in every cell: a report tells whether the file changed since."""
        return hashlib.sha256(self.file.path.read_bytes()).hexdigest()[:10]

    def baseline_of(self, arm: Arm) -> Arm | None:
        """Return the arm that ``arm`` is compared with: the baseline's levels, the others its own."""
        wanted = {**arm.levels, **self.baseline}
        return next((a for a in self.arms if dict(a.levels) == wanted), None)


def read(path: str | Path, is_alone: bool = False) -> Ablation:
    """Read and check the file of an ablation; of one that is alone, the configs that it names need not be there."""
    file = File(path, is_alone)
    file.check_keys()
    content = file.content
    for key in ("name", "base", "axes", "baseline", "metric"):
        if not content.get(key):
            raise file.mistake(key, f"`{key}` is missing")
    axes = _axes(file, content["axes"])
    arms = _arms(file, axes, content.get("exclude") or [])
    baseline = _pick(file, "baseline", axes, content["baseline"])
    if not any(baseline.items() <= dict(arm.levels).items() for arm in arms):
        raise file.mistake("baseline", f"the baseline {content['baseline']} is no arm: `exclude` leaves it out")
    if not isinstance((metric := content["metric"]).get("primary"), str):
        raise file.mistake("metric", "`metric.primary` is missing, as in {primary: acc1}")
    analyses = _analyses(file, content.get("analyses") or [])
    claims = tuple(parse_claim(file, i, text, axes) for i, text in enumerate(content.get("claims") or ()))
    _check_metrics(file, metric, claims, analyses)
    seeds = _seeds(file, content.get("seeds", 3))
    return Ablation(
        file=file,
        name=check_level_name(file, "name", content["name"]),
        base=_paths(file, "base", content["base"]),
        axes=axes,
        arms=arms,
        seeds=seeds,
        baseline=baseline,
        primary=metric["primary"],
        mode=metric.get("mode", "max"),
        secondary=tuple(metric.get("secondary") or ()),
        evaluate=content.get("evaluate", "val"),
        analyses=analyses,
        checkpoint=content.get("checkpoint", "last"),
        match=read_match(file, axes),
        stats=read_stats(file, len(seeds)),
        run=read_run(file),
        wandb=content.get("wandb"),
        claims=claims,
        tune=read_tune(file, axes, seeds),
        trust_imports=read_packages(file),
    )


def _axes(file: File, content: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(content, dict):
        raise file.mistake("axes", f"`axes` must name axes and their levels, got {content!r}")
    axes: dict[str, dict[str, Any]] = {}
    for name, levels in content.items():
        where = f"axes/{name}"
        if isinstance(levels, list):  # the short form: a dotted key and its values
            named = level_names(levels)
            if doubles := {level for level in named if named.count(level) > 1}:
                raise file.mistake(
                    f"axes/{name}", f"two levels are called {min(doubles)}; name them: {{NAME: {{{name}: VALUE}}}}"
                )
            levels = {level: {name: value} for level, value in zip(named, levels, strict=True)}
            where, name = "axes", str(name).rpartition(".")[2]
        if not isinstance(levels, dict) or len(levels) < 2:
            raise file.mistake(where, f"the axis `{name}` needs two levels or more, got {levels!r}")
        checked = {check_level_name(file, f"{where}/{k}", k): v or {} for k, v in levels.items()}
        axes[check_level_name(file, where, name)] = checked
        for level, sets in checked.items():
            _check_overrides(file, f"axes/{name}/{level}", level, sets)
    for (a, levels_a), (b, levels_b) in itertools.combinations(axes.items(), 2):
        keys_a, keys_b = ({k for sets in levels.values() for k in sets} - {"config"} for levels in (levels_a, levels_b))
        if shared := keys_a & keys_b:
            raise file.mistake(
                f"axes/{b}", f"the axes `{a}` and `{b}` both set `{min(shared)}`; one would undo the other"
            )
    return axes


def _check_overrides(file: File, where: str, level: str, sets: Any) -> None:
    if not isinstance(sets, dict):
        raise file.mistake(where, f"the level `{level}` must be dotted keys and values, as in {{model.depth: 3}}")
    for key in sets:
        place = f"{where}/{key}"
        if key == "config":
            continue
        if str(key).split(".")[0] not in SECTIONS:
            hint = did_you_mean(str(key).split(".")[0], SECTIONS) or ", such as model.pos_embed"
            raise file.mistake(place, f"`{key}` of the level `{level}` is no dotted key of a config{hint}")
        for owned, way_out in OWNED:
            if key == owned or str(key).startswith(f"{owned}."):
                raise file.mistake(place, f"`{key}` of the level `{level}` belongs to the laboratory: {way_out}")


def _arms(file: File, axes: dict[str, dict[str, Any]], exclude: Any) -> tuple[Arm, ...]:
    if not isinstance(exclude, list):
        raise file.mistake("exclude", "`exclude` must be a list, as in [{tokenizer: t2t, pos_embed: none}]")
    excluded = [_pick(file, f"exclude/{i}", axes, levels) for i, levels in enumerate(exclude)]
    arms = []
    for combination in itertools.product(*axes.values()):
        levels = dict(zip(axes, combination, strict=True))
        if any(out.items() <= levels.items() for out in excluded):
            continue
        configs: tuple[str, ...] = ()
        overrides: dict[str, Any] = {}
        for axis, level in levels.items():
            sets = dict(axes[axis][level])
            if "config" in sets:
                configs += _paths(file, f"axes/{axis}/{level}/config", sets.pop("config"))
            overrides |= sets
        arms.append(Arm(levels, configs, overrides))
    names = [arm.name for arm in arms]
    if doubles := {name for name in names if names.count(name) > 1}:
        raise file.mistake("axes", f"two arms are called {min(doubles)}; give their levels other names")
    if len(arms) < 2:
        raise file.mistake("exclude", f"a comparison needs two arms or more, and `exclude` leaves {len(arms)}")
    return tuple(arms)


def _pick(file: File, where: str, axes: Mapping[str, Mapping[str, Any]], levels: Any) -> dict[str, str]:
    if not isinstance(levels, dict):
        raise file.mistake(where, f"expected axes and levels, as in {{pos_embed: none}}, got {levels!r}")
    for axis, level in levels.items():
        if axis not in axes:
            raise file.mistake(where, f"there is no axis `{axis}`{did_you_mean(str(axis), axes) or _known(axes)}")
        if str(level) not in axes[axis]:
            hint = did_you_mean(str(level), axes[axis]) or _known(axes[axis])
            raise file.mistake(where, f"the axis `{axis}` has no level `{level}`{hint}")
    return {axis: str(level) for axis, level in levels.items()}


def _known(names: Mapping[str, Any]) -> str:
    return f"; there are {', '.join(names)}"


def _paths(file: File, where: str, value: Any) -> tuple[str, ...]:
    paths = []
    for text in value if isinstance(value, list) else [value]:
        own = (p for p in (Path(str(text)), file.path.parent / str(text)) if p.is_file())
        found = next(own, None) or find_shipped(str(text))
        if not found and file.is_alone:
            found = Path(str(text))
        if not found:
            raise file.mistake(where, f"there is no config {text}: not here, not next to the file, not a shipped one")
        paths.append(str(found))
    return tuple(paths)


def _analyses(file: File, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        text = f"`analyses` must be a list of names of `vitlab analyze`, as in [resolution, scramble], got {value!r}"
        raise file.mistake("analyses", text)
    return tuple(dict.fromkeys(value))


def _check_metrics(file: File, metric: Mapping[str, Any], claims: tuple[Claim, ...], analyses: tuple[str, ...]) -> None:
    names = [("metric", name) for name in (metric["primary"], *(metric.get("secondary") or ()))]
    for where, name in names + [(f"claims/{i}", claim.metric) for i, claim in enumerate(claims)]:
        analysis, slash, _ = (name or "").partition("/")
        if slash and analysis not in analyses:
            raise file.mistake(where, f"the metric `{name}` comes from an analysis: add {analysis} to `analyses`")


def _seeds(file: File, value: Any) -> tuple[int, ...]:
    seeds = list(range(value)) if isinstance(value, int) and not isinstance(value, bool) else value
    whole = isinstance(seeds, list) and all(type(seed) is int and seed >= 0 for seed in seeds)
    if not whole or not seeds or len(set(seeds)) != len(seeds):
        raise file.mistake("seeds", f"`seeds` must be a number of seeds or a list of different ones, got {value!r}")
    return tuple(seeds)
