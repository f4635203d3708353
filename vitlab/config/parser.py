"""LightningCLI as vitlab uses it: one flat parser for fit, validate and test, and errors of one line."""

import importlib
import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn
from urllib.error import URLError

import lightning as L
import lightning.pytorch.callbacks
import lightning.pytorch.loggers
from jsonargparse import Namespace, set_parsing_settings
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import Logger

import vitlab.callbacks.attention_maps
import vitlab.callbacks.ema
import vitlab.callbacks.quality
import vitlab.data
import vitlab.tasks  # all imported so that a name is found
from vitlab.callbacks.checkpoint import Checkpoint
from vitlab.callbacks.console import Bar
from vitlab.config.arguments import config_paths, flags
from vitlab.config.explain import explain, parse_yaml, read_yaml
from vitlab.config.guesses import as_typed
from vitlab.config.parts import as_mappings, import_parts, joined, parts_as_words
from vitlab.config.strategies import check_name
from vitlab.config.trust import ALLOWED, TRUSTED, refuse_secrets
from vitlab.contract import deals_samples, image_fact
from vitlab.errors import UsageError
from vitlab.layers.precision import let_convolutions_follow
from vitlab.ranges import check_ranges
from vitlab.runs.launch import launched_devices
from vitlab.shipped import find_file
from vitlab.tasks.base import Task

LINKS = {
    "img_size": "an image size of",
    "in_chans": "a channel count of",
    "num_classes": "a class count of",
    "targets": "targets",
}


class Parser(LightningArgumentParser):
    """A parser that takes no abbreviations and answers a mistake with one line."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})

    def add_class_arguments(self, class_type: Any, *args: Any, **kwargs: Any) -> list[str]:
        """Add the arguments of a class; where loggers write is the run directory, and need not be said."""
        added = super().add_class_arguments(class_type, *args, **kwargs)
        if inspect.isclass(class_type) and issubclass(class_type, Logger):
            for action in self._actions:
                if action.dest == "save_dir" and action.required:
                    action.required, action.default = False, "."
        return added

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise the mistake as :class:`UsageError`, with the closest key or value that exists."""
        if not self.exit_on_error:  # jsonargparse's own inner parser of a class: its outer one will report
            super().error(message, ex)
        keys = [*flags()["keys"], *(action.dest for action in self._actions)]
        raise UsageError(explain(message, keys, _class_names())) from ex


class VitlabCLI(LightningCLI):
    """Parse and build task, data and trainer from a configuration.

    Args:
        args: Arguments of the command line, ``--config`` among them.
        callbacks: Callbacks that a command adds to the trainer's own.
        **trainer: Arguments of the trainer that no configuration may set.
    """

    def __init__(self, args: list[str], callbacks: Sequence[Callback] = (), **trainer: Any) -> None:
        self.arguments = args = sorted(
            found_configs(args), key=lambda word: word.startswith("--print_config")
        )  # which ends parsing
        self.added_callbacks, self.trainer_settings = list(callbacks), trainer
        parts = [v for _, v in settings(args) if str(v).endswith((".yaml", ".yml")) and Path(str(v)).is_file()]
        self.contents = [read_yaml(path) for path in [*config_paths(args), *parts]]
        refuse_secrets({k: v for content in self.contents for k, v in flatten(content).items()} | dict(settings(args)))
        set_parsing_settings(import_path_denylist=["*"], import_path_allowlist=[*ALLOWED, *TRUSTED])
        super().__init__(
            L.LightningModule,
            L.LightningDataModule,
            parser_class=Parser,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            save_config_callback=None,
            seed_everything_default=0,
            trainer_defaults={"logger": False, "use_distributed_sampler": False, "enable_model_summary": False},
            args=joined(args, settings(args), self.contents),
            run=False,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Take the facts about the images from the data set."""
        parser.add_lightning_class_args(Checkpoint, "checkpoint")
        for name in LINKS:
            parser.link_arguments("data", f"model.init_args.{name}", self._reader(name), apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse ``args`` alone; the words of the command line have been seen to by the command."""
        with parts_as_words():
            self.config = parser.parse_args(args)

    def instantiate_classes(self) -> None:
        """Build data, task and trainer; what their constructors refuse is the user's mistake."""
        with user_mistakes(inspect.signature(class_of(self.config.model.class_path)).parameters):
            arguments: Any = self.config.model.get("init_args") or Namespace()
            as_mappings(arguments)
            if issubclass(class_of(self.config.data.class_path), vitlab.data.ImageData):
                check_ranges("data", vars(self.config.data.get("init_args") or Namespace()))
            check_ranges("trainer", vars(self.config.trainer))
            if issubclass(class_of(self.config.model.class_path), Task):
                check_ranges("model", vars(arguments))  # before a network of 10^9 channels is built
                import_parts(arguments)
            super().instantiate_classes()
        self._check_links()

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Build the trainer; :class:`Checkpoint` joins it only where a run is trained."""
        let_convolutions_follow()
        config = {**self._get(self.config_init, "trainer", default={}), **self.trainer_settings, **kwargs}
        if (
            config.get("enable_progress_bar") is False
        ):  # Lightning would refuse ours, which print the lines of epochs too
            config["enable_progress_bar"] = True
            for callback in self.added_callbacks:
                if isinstance(callback, Bar):
                    callback.hidden = True
        if not deals_samples(self.datamodule):
            config["use_distributed_sampler"] = True
        check_name(config.get("strategy"))
        config |= launched_devices(config.get("devices", "auto"), config.get("num_nodes", 1))
        return self._instantiate_trainer(config, self.added_callbacks)

    def given_links(self) -> dict[str, Any]:
        """Return what files and words say of the images, which data of vitlab say themselves."""
        given = [pair for content in self.contents for pair in flatten(content).items()] + settings(self.arguments)
        pairs = [(key.removeprefix("model.").removeprefix("init_args."), v) for key, v in given if "model." in key]
        return {name: value for name, value in pairs if name in LINKS}

    def _reader(self, name: str) -> Any:
        def read(data: Any) -> Any:
            if hasattr(data, name):
                return image_fact(data, name)
            cls = class_of(self.config.model.class_path)
            parameter = inspect.signature(cls).parameters.get(name)
            if parameter is None:
                return None  # jsonargparse goes no further with it
            default = parameter.default
            needed = name != "targets" and name not in self.given_links()
            if needed and (issubclass(cls, Task) or default is inspect.Parameter.empty):
                raise UsageError(f"{type(data).__name__} does not say its `{name}`: give --model.{name}")
            return self.given_links().get(name, default)

        return read

    def _check_links(self) -> None:
        for name, value in self.given_links().items():
            fact = image_fact(self.datamodule, name)
            if fact is not None and value != fact and [value, value] != fact:
                data = type(self.datamodule).__name__
                raise UsageError(
                    f"`model.{name}` comes from the data: {data} has {LINKS[name]} {fact}, got {value}; "
                    + ("set `data.img_size` instead" if name == "img_size" else "leave it out")
                )


@contextmanager
def user_mistakes(of_model: Iterable[str] = ()) -> Iterator[None]:
    """Turn a ValueError into a :class:`UsageError`: for code that checks what the user wrote.

    Args:
        of_model: Arguments of the model, which are typed with ``model.`` before them, and ``img_size`` with ``data.``.
    """
    try:
        yield
    except UsageError:
        raise
    except (ValueError, MisconfigurationException, FileNotFoundError, URLError) as error:
        root: BaseException = error  # jsonargparse wraps what a constructor said
        while isinstance(inner := _behind(root), ValueError) and str(inner):
            root = inner
        text = str(root)
        while (inner := _behind(root)) and "Does not validate" in str(root):
            root, text = inner, f"{type(inner).__name__}: {inner}"  # of a constructor of the user's own
        raise UsageError(as_typed(" ".join(text.split()), of_model)) from error


def _behind(error: BaseException) -> BaseException | None:
    """Return what an error was raised from, unless it was raised `from None`."""
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def found_configs(args: list[str]) -> list[str]:
    """Return the arguments with the paths of configs in place of their names."""
    found = []
    for flag, word in pairwise(["", *args]):
        if flag in ("-c", "--config"):
            found.append(find_file(word, "--config"))
        elif word.startswith("--config="):
            found.append(f"--config={find_file(word.removeprefix('--config='), '--config')}")
        else:
            found.append(word)
    return found


def settings(args: list[str]) -> list[tuple[str, Any]]:
    """Return what arguments set beside config files, as dotted keys and values."""
    words = [part for arg in args for part in (arg.split("=", 1) if arg.startswith("--") else [arg])]
    pairs = [(w[2:], v) for w, v in pairwise(words) if w.startswith("--") and w != "--config"]
    return [(key, parse_yaml(value, f"--{key}={value[:60]}")) for key, value in pairs]


def class_of(path: str) -> Any:
    """Return the class of a class path that has been parsed, which is whole."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def classes_of(module: Any) -> list[type]:
    """Return the classes that a module has."""
    return [cls for _, cls in inspect.getmembers(module, inspect.isclass)]


def _class_names() -> list[str]:
    modules = (vitlab.tasks, vitlab.data, lightning.pytorch.callbacks, lightning.pytorch.loggers)
    return [cls.__name__ for module in modules for cls in classes_of(module)]


def flatten(config: Namespace | dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values under dotted keys, lists whole, ``init_args`` left out of the keys."""
    flat: dict[str, Any] = {}
    for key, value in (config.as_dict() if isinstance(config, Namespace) else config).items():
        name = prefix if key == "init_args" else f"{prefix}.{key}".lstrip(".")
        flat |= flatten(value, name) if isinstance(value, dict) and value else {name: value}
    return flat
