"""What the configuration of a run says, and the arguments by which its task and data are built again."""

import inspect
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from vitlab.class_paths import with_current_paths
from vitlab.config.arguments import config_paths, values_of, without_flags
from vitlab.config.keys import flatten_as_typed
from vitlab.config.parser import class_at, settings
from vitlab.config.trust import changed_code, may_import
from vitlab.config.yaml_files import parse_yaml, read_own, read_yaml
from vitlab.data.base import ImageData
from vitlab.data.files.splits import SplitName
from vitlab.errors import UsageError, preview, trusting
from vitlab.jobs.terminal import print_error
from vitlab.notebook import check_classes
from vitlab.runs.directory import RunDir
from vitlab.runs.launch import is_first

PLACES = ("data.root", "data.path")  # where the images are, which says nothing about what they are
NO_OUTPUT = ("--trainer.logger=false", "--trainer.profiler=null", "--trainer.enable_checkpointing=false")
_FORMER = {  # option of the data: the way before there was the option, and another that each run of then states
    "crop_mode": ("box", "crop_pct"),
    "color_profile": ("ignore", "max_pixels"),
}


def check_code(run: RunDir) -> None:
    """Refuse to go on with a run where a class of a notebook is another one now, and warn where a file has changed.

    Raises:
        UsageError: The notebook or script that runs now defines a class otherwise.
    """
    check_classes(run.path)
    kept = dict[str, str]()
    with suppress(UsageError):  # of a damaged record; and none in a run of an older vitlab
        kept = run.record.get("own_code", {})
    if not kept or not is_first() or (content := stored_config(run)) is None:
        return
    if changed := changed_code(kept, content):
        what = f"{preview(sorted(changed))} changed since {run.path} was trained"
        print_error(f"note   {what}: what follows is computed with the code of now")


def stored_config(run: RunDir) -> dict[str, Any] | None:
    """Return the configuration of a run; None if it is missing or damaged."""
    with suppress(UsageError):
        content: dict[str, Any] = with_current_paths(read_yaml(run.config))
        if all(isinstance(content.get(part), dict) for part in ("trainer", "model", "data")):  # else it is truncated
            content["data"].get("init_args", {}).update(former_ways(run))
            return content
    return None


def former_ways(run: RunDir) -> dict[str, Any]:
    """Return arguments of the data that an older run does not state and that had another default when it was trained.

    A run, unlike a recipe, states all arguments that its data set takes. Without `data.crop_mode` it is of a time when
    photos were cut before they were resized, and without `data.color_profile` of one when ICC profiles were ignored.
    """
    if not (run.path / "run.json").is_file():
        return {}
    with suppress(UsageError, AttributeError, TypeError):  # the last two: of a damaged one
        data = read_yaml(run.config).get("data", {})
        given, path = data.get("init_args") or {}, str(data.get("class_path"))
        ways = {key: way for key, (way, stated) in _FORMER.items() if key not in given and stated in given}
        if ways and may_import(path):
            taken = inspect.signature(class_at(path)).parameters
            return {key: way for key, way in ways.items() if key in taken}
    return {}


def _former_words(run: RunDir) -> list[str]:
    return [f"--data.{key}={value}" for key, value in former_ways(run).items()]


def training_args(run: RunDir | None, words: list[str], auto: bool) -> list[str]:
    """Return the arguments of a training; a resumed run uses its own stored configuration.

    Args:
        run: The run to resume; None for a new one.
        words: The arguments as given.
        auto: Whether the arguments are those of the run's first start, as with --auto_resume.

    Raises:
        UsageError: The configuration of the run to resume is missing or damaged, or a class of it is another one now.
    """
    if run is None:
        return words
    given = config_paths(words)
    if stored := stored_config(run):
        check_code(run)
        if auto:
            words = [*_before_additions(stored, words), *without_flags(words, "config")]
        config = ["--config", str(run.config)] if auto or not given else []
        return [*config, *_former_words(run), *words] if config else [*words, *_former_words(run)]
    if not given:
        again = trusting(f"vitlab fit --config FILE --run_dir {run.typed} --auto_resume")
        way_on = f"give one with `{again}`"
        raise UsageError(f"{run.config} is missing or damaged: {way_on}")
    return words


def _before_additions(config: Mapping[str, Any], words: list[str]) -> list[str]:
    """Return what sets the lists that ``words`` of the first start add to, as ``+=`` does, to what they were before.

    >>> config = {"trainer": {"callbacks": [{"class_path": "Timer"}, {"class_path": "EMA"}]}}
    >>> _before_additions(config, ["--model.depth=2", "--trainer.callbacks+=EMA"])
    ['--trainer.callbacks=[{"class_path": "Timer"}]']
    """
    before = []
    for key, value in flatten_as_typed(config).items():
        added = [parse_yaml(text, f"--{key}+") for text in values_of(words, f"{key}+")]
        if added and isinstance(value, list):
            n = sum(len(one) if isinstance(one, list) else 1 for one in added)
            before.append(f"--{key}={json.dumps(value[:-n])}")
    return before


def evaluation_args(run: RunDir, rest: Sequence[str], alone: bool = False) -> list[str]:
    """Return the arguments that rebuild task and data of ``run`` without other output, if ``alone`` on one device.

    Raises:
        UsageError: An argument names a config: that of the run is used. Or a class of it is another one now.
    """
    if config_paths(list(rest)):
        raise UsageError(f"the configuration comes from {run.config}; change single values with --key=value")
    check_code(run)
    trainer = read_own(run.config).get("trainer") or {}
    start = ["--config", str(run.config), *_former_words(run), *_without_callbacks(trainer)]
    return [*start, *(_one_device(trainer) if alone else []), *rest, *NO_OUTPUT]


def has_images_of(data: Any, run: RunDir, split: SplitName) -> bool:
    """Return whether data have the images of the run in a split, and in others that were read, wherever they are.

    A run of an older vitlab has no hash of its test split: it follows from the training split and the rule, unless it
    was given, as in a folder of its own.
    """
    if not isinstance(data, ImageData):
        return False
    facts = run.data
    known = {name: found.get("hash") for name, found in facts.get("splits", {}).items()}
    known |= {"test": run.record.get("test_hash")}
    tells: SplitName = split
    if split == "test" and known["test"] is None:
        tells = "train"
        if data.has_test_split or data.split_rule() != facts.get("split_rule"):
            return False
        with suppress(ValueError, OSError):  # then it is not read
            data.build(tells)
    now = {name: images.split_hash for name, images in data.splits.items() if known.get(name)}
    return tells in now and all(known[name] == found for name, found in now.items())


@contextmanager
def naming_place_of_data(run: RunDir | None, words: Sequence[str], keys: Sequence[str] = PLACES) -> Iterator[None]:
    """Inside a ``with`` block, an error about data that are not where the run had them says so, and the way out.

    Args:
        run: The run; None for a new one.
        words: Arguments as given: a place among them is the user's own.
        keys: The keys of a place that the command takes.
    """
    try:
        yield
    except ValueError as error:
        given = dict(settings(list(words)))
        if run is None or "data" in given:
            raise
        stored = flatten_as_typed(stored_config(run) or {})
        for key in keys:
            place = stored.get(key)
            if isinstance(place, str) and key not in given and place in str(error) and not os.path.lexists(place):
                here = "" if os.path.isabs(place) else f", looked for in {os.getcwd()}"
                raise UsageError(
                    f"{error}; {place} is where the data of {run.path} were{here}: if they are elsewhere now, give "
                    f"--{key}=NEW"
                ) from error
        raise


def _without_callbacks(trainer: Mapping[str, Any]) -> list[str]:
    """Return arguments that drop callbacks of Lightning, which evaluation does not need, and untrusted ones."""
    from lightning.pytorch import callbacks

    given = trainer.get("callbacks")
    listed = given if isinstance(given, list) else [given]

    def is_own(one: Any) -> bool:
        path = str(one.get("class_path") if isinstance(one, dict) else one)
        return may_import(path) and not path.startswith("lightning.") and not hasattr(callbacks, path)

    kept = [one for one in listed if is_own(one)]
    return [] if len(kept) == len(listed) else [f"--trainer.callbacks={json.dumps(kept or None)}"]


def _one_device(trainer: Mapping[str, Any]) -> list[str]:
    """Return arguments for one device of this machine, which may differ from the one that trained."""
    accelerator = "cpu" if trainer.get("accelerator") == "cpu" else "auto"
    settings = {"accelerator": accelerator, "devices": 1, "num_nodes": 1, "strategy": "auto"}
    return [f"--trainer.{key}={value}" for key, value in settings.items()]
