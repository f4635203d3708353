"""The schemas of the JSON files in a run directory, checks against them, and the time that they note."""

import datetime
import json
import math
import re
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

from vitlab.errors import UsageError

MeasuredSplit = Literal["val", "test"]  # of which a run keeps results
EvaluationCommand = Literal["validate", "test"]
MEASURED_BY: dict[MeasuredSplit, EvaluationCommand] = {"val": "validate", "test": "test"}
SPLIT_OF: dict[EvaluationCommand, MeasuredSplit] = {command: split for split, command in MEASURED_BY.items()}
NO_END = (-math.inf, math.inf)
ENDS = {
    r"acc\d*(_macro|_of_others)?|f1(_\w+)?|map|accuracy|flipped|agreement": (0.0, 1.0),
    "loss|mse|rmse|mae": (0.0, math.inf),
    "r2": (-math.inf, 1.0),
}  # smallest and largest value of metrics, by name


def now_utc() -> str:
    """Return the time now in UTC, as all records have it: ISO 8601, in seconds.

    Example:
        >>> now_utc()[10], now_utc()[-6:]
        ('T', '+00:00')
    """
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


class Ending(TypedDict):
    """Why a training ended.

    Example:
        >>> read_record(Path("runs/first/run.json"))["ending"]
        {'why': 'finished', 'text': '1 epoch'}
    """

    why: str  # finished, early stop, time, steps, asked for, signal or error
    text: str


class Record(TypedDict, total=False):
    """``run.json``: how the run was started, on what, and its status.

    Example:
        >>> read_record(Path("runs/first/run.json"))["status"]
        'done'
    """

    status: str  # running, done, failed or preempted; see vitlab.runs.run_lock.run_status
    attempts: int
    argv: list[str]  # of the last attempt
    configs: list[str]  # config files of the first attempt
    changes: list[dict[str, Any]]  # settings that a resume changed, and `own_code`: digests of what had changed
    started: str  # ISO 8601, as all times
    resumed: str | None
    ended: str
    ending: Ending | None  # None during training
    error: str | None
    commit: str | None
    dirty: bool | None
    diff: str | None  # digest of uncommitted changes
    own_code: dict[str, str]  # digest of each module of the user's that the configuration leads to
    host: str
    pid: int
    token: str  # of the attempt that may write here, see vitlab.runs.fence
    python: str
    versions: dict[str, str]
    devices: list[str]
    world_size: int
    threads: int
    seed: int | bool
    recipe: str  # name shared by runs that differ only in the seed
    steps: int
    plans: list[list[int]]  # first step and number of steps of each schedule: several if resumed with more steps
    sum_of_learning_rates: float
    sum_of_learning_rates_pos_embed: float
    promises: dict[str, str]
    test_hash: str  # of the test split, which training only compares with the other splits
    peak_memory: dict[str, int]  # bytes by host and cuda
    wandb_id: str | None
    init_from: str | None  # source of the initial weights
    resize: Any
    init_grid: str | None  # token grid of those weights, where their file lacked it


class Results(TypedDict, total=False):
    """``results.json``: the results on each split, and those under conditions other than the run's.

    Example:
        >>> "val" in read_record(Path("runs/first/results.json"))
        True
    """

    val: dict[str, Any]
    test: dict[str, Any]
    variations: list[dict[str, Any]]
    stale: list[dict[str, Any]]  # not in the file: results of checkpoints that are no longer there, with `why`


def split_metrics(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics among what is stored of a split, without how many images and which epoch they are of.

    Example:
        >>> split_metrics({"acc1": 0.5, "n": 288.0, "epoch": 3, "checkpoint": "best.ckpt", "recall": {"cat": 0.5}})
        {'acc1': 0.5}
    """
    numbers = {k: v for k, v in result.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return {name: numbers[name] for name in without_counts(numbers) if name != "epoch"}


def metrics_and_n(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics among what is stored of a split and, where it is stored, of how many images as ``n``.

    A metric ``NAME`` of another number of images has its own, ``NAME_images``.

    Example:
        >>> metrics_and_n({"n": 288.0, "acc1": 0.5, "checkpoint": "best.ckpt"})
        {'acc1': 0.5, 'n': 288.0}
    """
    metrics = split_metrics(result)
    return metrics | {name: result[name] for name in ("n", *(f"{name}_images" for name in metrics)) if name in result}


def without_counts(names: Collection[str]) -> list[str]:
    """Return the names of metrics, without ``n`` and ``NAME_images``, which say of how many images they are.

    Example:
        >>> without_counts(["acc1", "n", "knn", "knn_images", "top_images"])
        ['acc1', 'knn', 'top_images']
    """
    counts = {"n", *(f"{name}_images" for name in names)}
    return [name for name in names if name not in counts]


def bounds_of(metric: str, values: Iterable[float] = ()) -> tuple[float, float]:
    """Return the range of possible values of a metric; no end where values are beyond it, such as those in percent.

    Example:
        >>> bounds_of("mae/height"), bounds_of("val_acc", [71.5])
        ((0.0, inf), (-inf, inf))
    """
    words = (re.sub(r"^(val|test)_|@.*", "", part) for part in metric.split("/"))  # mae/height, knn/acc1@20, val_acc
    known = (ends for word in words for names, ends in ENDS.items() if re.fullmatch(names, word))
    bottom, top = next(known, NO_END)
    return (bottom, top) if all(bottom <= value <= top for value in values) else NO_END


def with_policy(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result whose ``resize`` is a policy, as typed; it was once a sentence, which is ``resized`` now.

    Example:
        >>> old = {"overrides": {"data.img_size": 16, "resize": "positions: rescale from 4 x 4 to 8 x 8"}}
        >>> with_policy(old)["overrides"], with_policy(old)["resized"]
        ({'data.img_size': 16, 'resize': 'rescale'}, 'positions: rescale from 4 x 4 to 8 x 8')
    """
    overrides = dict(result.get("overrides") or {})
    if not (sentence := str(overrides.get("resize", ""))).startswith("positions: "):
        return dict(result)
    del overrides["resize"]
    if policy := re.match(r"positions: (\w+) from \d", sentence):
        overrides["resize"] = policy[1]
    return {**result, "overrides": overrides, "resized": sentence}


def part_of(name: str) -> str:
    """Return the part of the network that a parameter of ``param_groups.json`` belongs to.

    The ``student`` of self-distillation is a network, too; its projection head counts as the head.

    Example:
        >>> part_of("blocks.0.mlp.fc1.weight"), part_of("student.pos_embed.weight"), part_of("head.prototypes")
        ('blocks', 'pos_embed', 'head')
    """
    return name.removeprefix("student.").partition(".")[0]


class SplitFacts(TypedDict):
    """One split in ``data.json``.

    Example:
        >>> read_record(Path("runs/first/data.json"))["splits"]["val"]["n"]
        288
    """

    n: int
    hash: NotRequired[str]
    class_counts: NotRequired[list[int]]


class DataFacts(TypedDict):
    """``data.json``: the data that the network was trained on.

    Example:
        >>> read_record(Path("runs/first/data.json"))["class_names"][:3]
        ['0', '1', '2']
    """

    class_names: list[str]
    mean: list[float]
    std: list[float]
    data: NotRequired[str]
    splits: NotRequired[dict[str, SplitFacts]]
    duplicates: NotRequired[int]
    first_duplicates: NotRequired[list[Any]]
    unreadable: NotRequired[dict[str, str]]
    statistics_from: NotRequired[str]
    crop_pct: NotRequired[float]
    crop_mode: NotRequired[str]
    color_profile: NotRequired[str]
    value_range: NotRequired[list[float]]
    interpolation: NotRequired[str]
    img_size: NotRequired[list[int]]
    native_size: NotRequired[list[int] | None]
    in_chans: NotRequired[int]
    arrays: NotRequired[bool]
    targets: NotRequired[dict[str, Any]]
    split_rule: NotRequired[dict[str, Any]]
    notes: NotRequired[list[str]]


class ModelFacts(TypedDict, total=False):
    """``model.json``: sizes and costs of the network; operations are per image.

    Example:
        >>> read_record(Path("runs/first/model.json"))["grid"]
        [4, 4]
    """

    parameters: int  # trained ones
    parameters_total: int
    macs: int
    flops: int
    tokens: int
    grid: list[int]
    img_size: list[int]
    in_chans: int
    float32: dict[str, str]  # format that matrix products and convolutions round float32 to


def parameters_of(model: Mapping[str, Any]) -> int | None:
    """Return the number of parameters of a network by its ``model.json``, frozen ones too; None if it is not recorded.

    Example:
        >>> parameters_of({"parameters": 250, "parameters_total": 8050}), parameters_of({"parameters": 250})
        (8050, 250)
    """
    return model.get("parameters_total") or model.get("parameters")  # older runs have only those that are trained


_COPY = "copy it from where the run was trained, or let `vitlab fit --resume` write it again"
RECORDS: dict[str, tuple[type, str]] = {  # by file: what it holds, and the way out where it is damaged
    "run.json": (Record, "remove it; resuming the run writes it again"),
    "results.json": (Results, "remove it, and measure the run again with `vitlab validate` and `vitlab test`"),
    "data.json": (DataFacts, _COPY),
    "model.json": (ModelFacts, _COPY),
}


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file, empty if there is none; refuse a damaged one.

    Example:
        >>> read_json(Path("nowhere.json"))
        {}
    """
    try:
        content = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path} is damaged: it must contain names and values, not {type(content).__name__}")
    return content


def read_record(path: Path) -> Any:
    """Return a file as the record above that has its name, empty if there is none; refuse values of a wrong type.

    Unknown keys are kept: a later vitlab may have written more.

    Example:
        >>> read_record(Path("nowhere/results.json"))
        {}
    """
    kind, way_out = RECORDS[path.name]
    try:
        content = read_json(path)
        if wrong := wrong_values(content, kind) if content else {}:
            name = next(iter(wrong))
            must = f"`{name}` must not be {type(content[name]).__name__}" if name in content else f"it has no `{name}`"
            raise UsageError(f"{path} is damaged: {must}")
    except UsageError as error:
        raise UsageError(f"{error}; {way_out}") from error
    return content


def wrong_values(content: Mapping[str, Any], kind: type) -> dict[str, str]:
    """Return which values of one of the records above are of a wrong type or lacking, and the type that each must have.

    Example:
        >>> wrong_values({"class_names": ["cat"], "mean": 0.5, "std": [], "splits": {"val": {"hash": "c0"}}}, DataFacts)
        {'mean': 'list[float]', 'splits': 'dict[str, {n: int}]'}
    """
    hints = _hints(kind)
    lost = kind.__required_keys__ - content.keys()  # type: ignore[attr-defined]
    wrong = [name for name in hints if name in lost or (name in content and not _is(content[name], hints[name]))]
    return {name: _type_in_words(hints[name]) for name in wrong}


def _type_in_words(expected: Any) -> str:
    text = expected.__name__ if type(expected) is type else str(expected)
    return text.replace(f"{__name__}.{SplitFacts.__name__}", "{n: int}").replace("typing.", "")


_hints = cache(typing.get_type_hints)  # hundreds of runs are listed at once


def _is(value: Any, expected: Any) -> bool:
    if type(expected) is type:  # not a generic alias, nor a record
        return isinstance(value, (int, float) if expected is float else expected)
    origin, parts = typing.get_origin(expected), typing.get_args(expected)
    if expected is Any:
        return True
    if origin is types.UnionType:
        return any(_is(value, part) for part in parts)
    if origin is list:
        return isinstance(value, list) and all(_is(part, parts[0]) for part in value)
    if origin is dict:
        return isinstance(value, dict) and all(_is(part, parts[1]) for part in value.values())
    if typing.is_typeddict(expected):
        hints = _hints(expected)
        whole = isinstance(value, dict) and expected.__required_keys__ <= value.keys()
        return whole and all(_is(value[name], hints[name]) for name in hints if name in value)
    return isinstance(value, expected)
