"""LightningCLI as vitlab uses it: one flat parser for fit, validate and test, with one-line errors."""

import importlib
import inspect
import os
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from types import MappingProxyType
from typing import Any, NoReturn

import lightning as L
import lightning.pytorch.callbacks
import lightning.pytorch.loggers
from jsonargparse import Namespace, set_dumper, set_parsing_settings
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import Logger

import vitlab.callbacks.attention_maps
import vitlab.callbacks.ema
import vitlab.callbacks.quality
import vitlab.data
import vitlab.tasks
from vitlab.callbacks.checkpoint import Checkpoint
from vitlab.callbacks.console import Bar
from vitlab.class_paths import current_path
from vitlab.config.arguments import Flag, flags, flags_of, read_configs
from vitlab.config.explain import explain, user_mistakes
from vitlab.config.keys import GROUPS, class_and_arguments, flatten_as_typed, flatten_with_classes, key_as_typed
from vitlab.config.parts import (
    check_parts,
    classes_alone,
    give_options,
    import_parts,
    in_parts,
    later_names,
    merged_parts,
    take_options,
    words_of_parts,
)
from vitlab.config.secret import refuse_secrets
from vitlab.config.strategies import check_strategy_name, divide_by_all_images
from vitlab.config.trust import allowed_imports
from vitlab.config.yaml_files import parse_own, parse_yaml, read_yaml, yaml_text
from vitlab.data.loading.own_loaders import evaluate_samples_once
from vitlab.errors import UsageError
from vitlab.interface import LINKS, deals_samples, image_fact
from vitlab.layers.precision import let_convolutions_follow
from vitlab.models.old_names import OLD
from vitlab.named_kwargs import check_types
from vitlab.objects import PARTS
from vitlab.ranges import MOST_SEED, check_ranges
from vitlab.runs.launch import check_launch, launched_devices
from vitlab.shipped import find_file
from vitlab.tables import shape_text
from vitlab.tasks.base import Task

with suppress(ModuleNotFoundError):  # the core stands without it
    import vitlab.pretraining
TASKS = [sys.modules[name] for name in ("vitlab.pretraining", "vitlab.tasks") if name in sys.modules]


class Parser(LightningArgumentParser):
    """A parser that takes no abbreviations and reports a mistake in one line."""

    parts: Mapping[str, Any] = MappingProxyType({})  # those of the task that have options
    later: Collection[str] = ()  # old names of options that override what their part says

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})

    def add_class_arguments(self, class_type: Any, *args: Any, **kwargs: Any) -> list[str]:
        """Add the arguments of a class; a logger's ``save_dir`` becomes optional, as it is the run directory."""
        added = super().add_class_arguments(class_type, *args, **kwargs)
        if inspect.isclass(class_type) and issubclass(class_type, Logger):
            for action in self._actions:
                if action.dest == "save_dir" and action.required:
                    action.required, action.default = False, "."
        return added

    def dump(self, cfg: Namespace, *args: Any, **kwargs: Any) -> str:
        """Return the configuration as text, with every option in the part that understands it."""
        if not isinstance(cfg.get("model"), Namespace):  # of the inner parser of a class
            return str(super().dump(cfg, *args, **kwargs))
        return yaml_text(self.content(cfg, *args, **kwargs))

    def content(self, cfg: Namespace, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the whole configuration as :meth:`dump` writes it."""
        cfg = cfg.clone()
        self.complete(cfg)
        given = cfg.model.get("init_args")
        parts = take_options(given) if isinstance(given, Namespace) else {}
        content: dict[str, Any] = parse_own(super().dump(cfg, *args, **kwargs))
        (content["model"].get("init_args") or {}).update(parts)
        return content

    def complete(self, cfg: Namespace) -> list[str]:
        """Give the parts of a parsed model their options, of a task also those with old names; return these names."""
        model = cfg.get("model")
        if not isinstance(model, Namespace) or not isinstance(given := model.get("init_args"), Namespace):
            return []
        give_options(given, self.parts)
        cls = class_at(model.class_path)
        if not issubclass(cls, Task):
            return []
        with user_mistakes([*inspect.signature(cls).parameters, *OLD]):
            return in_parts(given, cls, self.later)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise the mistake as :class:`UsageError`, with the closest valid key or value."""
        if not self.exit_on_error:  # jsonargparse's inner parser of a class: the outer one reports
            super().error(message, ex)
        keys = [*flags()["keys"], *(action.dest for action in self._actions)]
        raise UsageError(explain(message, keys, _class_names())) from ex


class VitlabCLI(LightningCLI):
    """Parse and build task, data and trainer from a configuration.

    Args:
        args: Command-line arguments, including ``--config``.
        callbacks: Callbacks that a command adds to the trainer's.
        **trainer: Trainer arguments that override the configuration.
    """

    def __init__(self, args: list[str], callbacks: Sequence[Callback] = (), **trainer: Any) -> None:
        self.arguments = resolve_configs(args)
        _refuse_valueless(self.arguments)
        self.added_callbacks, self.trainer_settings = list(callbacks), trainer
        self.contents = read_configs(self.arguments)
        args = _in_order(self.arguments, self.contents)
        self.typed = settings(args)
        files = [(key, str(v)) for key, v in self.typed if os.path.isfile(str(v))]
        files = [(k, v) for k, v in files if key_as_typed(k) in ("model", "data") or v.endswith((".yaml", ".yml"))]
        self.contents += [{key: read_yaml(path)} for key, path in files]
        self.parts = merged_parts(self.contents, self.typed)
        self.later = later_names(self.contents, self.typed)
        refuse_secrets(
            {k: v for content in self.contents for k, v in flatten_as_typed(content).items()} | dict(self.typed)
        )
        _refuse_incomplete(args, self.contents)
        set_dumper("yaml", yaml_text)  # jsonargparse writes the arguments of a class and reads them again
        set_parsing_settings(import_path_denylist=["*"], import_path_allowlist=allowed_imports())
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
            args=words_of_parts(args, self.parts),
            run=False,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Link the model's image size, channels, classes and targets to the data."""
        parser.parts, parser.later = self.parts, self.later  # type: ignore[attr-defined]
        parser.add_lightning_class_args(Checkpoint, "checkpoint")
        for name in LINKS:
            parser.link_arguments("data", f"model.init_args.{name}", self._reader(name), apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse only ``args``, not ``sys.argv``."""
        with user_mistakes(), classes_alone(args):
            self.config = parser.parse_args(args)
        seed = self.config.seed_everything
        if not isinstance(seed, bool) and not 0 <= (seed or 0) <= MOST_SEED:
            raise UsageError(f"`seed_everything` must be in [0, {MOST_SEED}], got {seed}")
        self.moved = parser.complete(self.config)  # type: ignore[attr-defined]

    def instantiate_classes(self) -> None:
        """Build data, task and trainer; an error in their constructors is a mistake of the user's."""
        with self._mistakes():
            self.check_values()
            super().instantiate_classes()
        self._check_links()

    def check_values(self) -> None:
        """Check ranges and the names of parts, before a network of 10^9 channels is built."""
        with self._mistakes():
            arguments: Any = self.config.model.get("init_args") or Namespace()
            data, of_data = class_at(self.config.data.class_path), self.config.data.get("init_args") or Namespace()
            if issubclass(data, vitlab.data.ImageData):
                _check_null("data", data, vars(of_data))
                check_ranges("data", vars(of_data))
            check_ranges("trainer", vars(self.config.trainer))
            if issubclass(task := class_at(self.config.model.class_path), Task):
                _check_null("model", task, vars(arguments))
                check_ranges("model", vars(arguments))
                check_parts(arguments)
                import_parts(arguments)

    def _mistakes(self) -> AbstractContextManager[None]:
        return user_mistakes([*inspect.signature(class_at(self.config.model.class_path)).parameters])

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Build the trainer; :class:`Checkpoint` joins it only where a run is trained."""
        check_launch()
        let_convolutions_follow()
        config = {**self._get(self.config_init, "trainer", default={}), **self.trainer_settings, **kwargs}
        if config.get("enable_progress_bar") is False:
            config["enable_progress_bar"] = True  # else Lightning refuses our bar, which also prints a line per epoch
            for callback in self.added_callbacks:
                if isinstance(callback, Bar):
                    callback.hidden = True
        if not deals_samples(self.datamodule) and "use_distributed_sampler" not in self.trainer_settings:
            config["use_distributed_sampler"] = True
        check_strategy_name(config.get("strategy"))
        config |= launched_devices(config.get("devices", "auto"), config.get("num_nodes", 1))
        try:
            trainer = self._instantiate_trainer(config, self.added_callbacks)
        except (TypeError, ModuleNotFoundError, MisconfigurationException) as error:
            if told := _of_devices(str(error), config.get("devices")):
                raise UsageError(told) from error
            raise
        if not deals_samples(self.datamodule):
            evaluate_samples_once(trainer)
        divide_by_all_images(trainer.strategy)
        return trainer

    def given_settings(self) -> list[tuple[str, Any]]:
        """Return the keys as typed and the values that config files and then arguments set, in their order."""
        files = [pair for content in self.contents for pair in flatten_as_typed(content).items()]
        return files + [(key_as_typed(key), value) for key, value in self.typed]

    def given_links(self) -> dict[str, Any]:
        """Return the linked values that config files or arguments set; vitlab's data sets provide them themselves."""
        links = {f"model.{name}": name for name in LINKS}
        return {links[key]: value for key, value in self.given_settings() if key in links}

    def _reader(self, name: str) -> Any:
        def read(data: Any) -> Any:
            cls = class_at(self.config.model.class_path)
            parameter = inspect.signature(cls).parameters.get(name)
            if (fact := image_fact(data, name)) is not None:  # None as of data that learn it in their `setup`
                takes_side = name == "img_size" and parameter is not None and parameter.annotation in (int, "int")
                return _side(fact, cls, data) if takes_side else fact
            if parameter is None:
                return None  # jsonargparse then sets nothing
            default = parameter.default
            needed = name != "targets" and name not in self.given_links()
            if needed and (issubclass(cls, Task) or default is inspect.Parameter.empty):
                raise UsageError(f"{type(data).__name__} does not define `{name}`: set --model.{name}")
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


def _side(size: Any, cls: type, data: Any) -> Any:
    """Return the side of square images, for a module of the user's own whose ``img_size`` is one number."""
    if not isinstance(size, list):
        return size
    if len({*size}) > 1:
        text = f"{type(data).__name__} has images of {shape_text(size)} pixels"
        raise UsageError(f"{text}; {cls.__name__} takes one int as `img_size`: let it take list[int], height and width")
    return size[0]


def _check_null(group: str, cls: Any, arguments: Mapping[str, Any]) -> None:
    """Refuse null for an argument that does not take it, which jsonargparse lets pass; the data fill in LINKS."""
    hints = {name: one.annotation for name, one in inspect.signature(cls).parameters.items() if one.default is not None}
    nulls = {name: None for name, value in arguments.items() if value is None and name not in LINKS}
    check_types(hints, nulls, group)


def _of_devices(text: str, devices: Any) -> str | None:
    """Return what to set where Lightning's Trainer refuses its devices; None for another refusal."""
    if any(words in text for words in ("backend found", "Accelerator` can not run", "torch_xla")):
        return "`trainer.accelerator`: this machine has no such device; use auto, which takes what there is, or cpu"
    if "CPUAccelerator` should be an int" in text or "`Trainer(devices=" in text:
        form = "auto or a number, 1 or more; with --trainer.accelerator=gpu also -1 (all) or a list such as [2]"
        return f"`trainer.devices` must be {form}, got {devices}"
    return None


def resolve_configs(args: list[str]) -> list[str]:
    """Return the arguments with config names replaced by paths."""
    found: list[str] = []
    for flag in flags_of(args):
        is_named = flag.name == "config" and flag.value
        found += [f"--config={find_file(str(flag.value), '--config')}"] if is_named else flag.words
    return found


def settings(args: list[str]) -> list[tuple[str, Any]]:
    """Return the dotted keys and values that arguments set, besides ``--config``."""
    given = [(flag.name, flag.value) for flag in flags_of(args) if flag.name not in ("", "config")]
    return [(key, parse_yaml(value, f"--{key}={value[:60]}")) for key, value in given if value is not None]


def _in_order(args: list[str], contents: Sequence[Any]) -> list[str]:
    """Return the arguments with those first that others change: config files, then classes, then keys.

    A class that no file names stands before the files, which may have keys of it; ``--print_config`` ends the parsing.

    >>> _in_order(["--data.root=photos", "--data", "ImageFolder", "-c", "t2t.yaml"], [{"data": "Digits"}])
    ['-c', 't2t.yaml', '--data', 'ImageFolder', '--data.root=photos']
    """
    in_files = {group for group in ("model", "data") if any(class_and_arguments(one, group)[0] for one in contents)}

    def place(flag: Flag) -> int:
        key = key_as_typed(flag.name).removesuffix(".class_path")
        if key in GROUPS:
            return 0 if key in ("model", "data") and key not in in_files else 2
        return {"config": 1, "print_config": 4}.get(key, 3)

    return [word for flag in sorted(flags_of(args), key=place) for word in flag.words]


def _refuse_valueless(args: list[str]) -> None:
    """Refuse what the parser would blame another flag for: keys without a value, or below what has no keys."""
    for flag in flags_of(args):
        is_bare = "." in flag.name and flag.value is None and not flag.name.endswith(".help")
        key = key_as_typed(flag.name)
        if key in [f"model.{name}.help" for name in PARTS]:
            raise UsageError(f"`vitlab fit --help={key.removesuffix('.help')}` explains it, not --{flag.name}")
        if is_bare or (flag.name == "config" and not flag.value):
            raise UsageError(f"--{flag.name} needs a value")
        if option := key.partition("data.augment.")[2]:
            step = f"{{class_path: STEP, init_args: {{{option.removeprefix('init_args.')}: {flag.value}}}}}"
            raise UsageError(f"--{flag.name}: options of a step stand beside it, --data.augment='[{step}]'")


def _refuse_incomplete(args: list[str], contents: Sequence[Any]) -> None:
    """Refuse a config file with an empty section, or with keys of a class that is named only later, or nowhere."""
    named, files = set[str](), iter(contents)
    for flag in flags_of(args):
        if flag.name != "config":
            named.add(key_as_typed(flag.name).removesuffix(".class_path"))
            continue
        where, keys = f"--config {shlex.quote(str(flag.value))}", flatten_with_classes(next(files))
        if empty := [group for group in GROUPS if keys.get(group, "") is None]:
            raise UsageError(f"{where}: `{empty[0]}` is empty; give it keys, or leave it out")
        named |= keys.keys()
        for group in ("model", "data"):
            inner = next((key for key in keys if key.startswith(f"{group}.")), None)
            if inner and group not in named:
                way_out = f"put --config or --{group} that names it before {where}"
                raise UsageError(f"{where} sets `{inner}` before the class of `{group}` is known: {way_out}")


def class_at(path: str) -> Any:
    """Return the class of a full class path, as it is after parsing."""
    module, _, name = current_path(path).rpartition(".")
    return getattr(importlib.import_module(module), name)


def classes_of(module: Any) -> list[type]:
    """Return the classes in a module."""
    return [cls for _, cls in inspect.getmembers(module, inspect.isclass)]


def _class_names() -> list[str]:
    modules = (*TASKS, vitlab.data, lightning.pytorch.callbacks, lightning.pytorch.loggers)
    return [cls.__name__ for module in modules for cls in classes_of(module)]
