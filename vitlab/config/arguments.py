"""Command-line arguments: the parser that every command uses, and helpers to find and remove arguments."""

import argparse
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from vitlab.config.guesses import FOR_A_RUN, FOR_FIT, about_word, suggest_argument
from vitlab.config.keys import GROUPS, class_and_arguments
from vitlab.config.secret import refuse_secrets
from vitlab.config.trust import trust_classes
from vitlab.errors import UsageError, did_you_mean
from vitlab.objects import as_yaml, written
from vitlab.shipped import find_file
from vitlab.tables import wrapped

FLAGS = Path(__file__).with_name("flags.json")
_FIRST_KEYS = {"trainer": "max_epochs", "checkpoint": "monitor"}  # of the groups that have no class
_CONFIGURATION = (*GROUPS, "seed_everything", "config", "print_config")


def flags() -> dict[str, Any]:
    """Return the ``keys`` of a configuration and the rows of ``help`` that :mod:`vitlab.config.help` stored."""
    return json.loads(FLAGS.read_text())


class CommandParser(argparse.ArgumentParser):
    """A parser that takes no abbreviations and reports a mistake in one line."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        """Raise the mistake as :class:`UsageError`."""
        kind, _, words = message.partition(": ")
        if kind == "unrecognized arguments" and words.startswith("--"):
            flags = [flag for action in self._actions[1:] for flag in action.option_strings if flag.startswith("--")]
            there_are = f"; there is {', '.join(flags)}" if flags else ""
            message += did_you_mean(words.split()[0].partition("=")[0], flags) or there_are
        raise UsageError(f"{message}; see `{self.prog} --help`")


class KeepLines(argparse.HelpFormatter):
    """Keeps the lines of a description or an epilog, and wraps those wider than the terminal, except commands."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(line if line.startswith("  vitlab ") else wrapped(line, width) for line in text.splitlines())


def grid_of(text: str) -> tuple[int, int]:
    """Return the row and column, or the rows and columns, that a flag names as ``3,4``.

    Raises:
        argparse.ArgumentTypeError: The text is not two whole numbers.
    """
    try:
        row, column = map(int, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be ROW,COLUMN of a patch, such as 3,4, got {text}") from None
    return row, column


def grid_as_typed(grid: Sequence[int] | None) -> str | None:
    """Return rows and columns as :func:`grid_of` reads them, and None as it is.

    >>> grid_as_typed((14, 7))
    '14,7'
    """
    return None if grid is None else ",".join(map(str, grid))


def positive(text: str) -> int:
    """Return the whole number of 1 or more that a flag gives.

    Raises:
        argparse.ArgumentTypeError: The text is something else.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, 1 or more, got {text}")
    return int(text)


def add_formats(parser: argparse.ArgumentParser, file: str = "") -> None:
    """Let a command that prints a table take ``--json`` and ``--csv``; ``form`` is then ``json``, ``csv`` or None.

    Args:
        parser: The command's parser.
        file: What ``--json FILE`` writes, for a command that may write it into a file; ``json_file`` is then that file.
    """
    forms = parser.add_mutually_exclusive_group()
    if file:
        forms.add_argument("--json", metavar="FILE", nargs="?", const="-", action=_JsonOrFile,
                           help=f"{file}; without FILE, print JSON alone, numbers in full")  # fmt: skip
        forms.add_argument("--csv", dest="form", action="store_const", const="csv", help="print CSV, numbers in full")
        parser.set_defaults(form=None, json_file=None)
        return
    for form, text in (("json", "print JSON, one object a row"), ("csv", "print CSV")):
        forms.add_argument(f"--{form}", dest="form", action="store_const", const=form, help=f"{text}, numbers in full")


class _JsonOrFile(argparse.Action):
    def __call__(self, parser: Any, options: Any, value: Any, word: str | None = None) -> None:
        """Set ``form`` for ``--json``, and ``json_file`` for ``--json FILE``."""
        if value == "-":
            options.form = "json"
        else:
            options.json_file = value


def add_print(parser: argparse.ArgumentParser, formats: str) -> None:
    """Let a command that writes figures take ``--format``, ``formats`` by default, and ``--width``."""
    parser.add_argument(
        "--format", metavar="pdf,svg,png", default=formats, help="formats of the figures (default: %(default)s)"
    )
    parser.add_argument("--width", choices=("column", "page"), default="page", help="width of the figures in print: "
        "a column has 3.3 inches, a page 6.9, with text of 7 points (default: %(default)s)")  # fmt: skip


class Flag(NamedTuple):
    """A flag of a command line.

    Args:
        name: Its name without dashes, of ``-c`` ``config``; empty of a word that belongs to no flag.
        value: The word that it is given, after it or after ``=``; None if there is none.
        words: It and its value, as they are typed.
    """

    name: str
    value: str | None
    words: tuple[str, ...]


def flags_of(args: Iterable[str]) -> list[Flag]:
    """Return the flags of a command line in their order, each with its value.

    >>> [flag[:2] for flag in flags_of(["-c", "t2t", "--data.root=photos", "mine", "--quiet"])]
    [('config', 't2t'), ('data.root', 'photos'), ('', 'mine'), ('quiet', None)]
    """
    found: list[Flag] = []
    for word in args:
        name, equals, value = word.partition("=")
        if (name.startswith("--") and name != "--") or name == "-c":
            found.append(Flag("config" if name == "-c" else name[2:], value if equals else None, (word,)))
        elif found and found[-1].value is None:
            found[-1] = Flag(found[-1].name, word, (*found[-1].words, word))
        else:
            found.append(Flag("", word, (word,)))
    return found


def refuse_unknown(words: list[str], names: Mapping[str, str] = FOR_FIT, own: Collection[str] | None = None) -> None:
    """Refuse the first argument that neither a command nor a configuration has, before the heavy imports.

    Keys that a class of the user's own may have are left to the full parser.

    Args:
        words: The arguments.
        names: Names of other programs for what the command alone has, and what to type instead.
        own: Flags of a command on a run, whose configuration may name such classes; None are those of ``vitlab fit``.
    """
    keys = flags()["keys"]
    known = {*keys} if own is None else {*own, *(key for key in keys if key.partition(".")[0] in _CONFIGURATION)}
    for flag in flags_of(words):
        if not flag.name:
            raise UsageError(about_word(str(flag.value), known))
        key = flag.name.rstrip("+").replace(".init_args", "")
        group, *deeper = key.split(".")
        if key in _FIRST_KEYS:
            _check_has_keys(key, flag.value or "", suggest_argument(key, known, names))
            continue
        outer = {".".join([group, *deeper[:count]]) for count in range(1, len(deeper) + 1)}
        if known & {key, *outer} or deeper[-1:] in (["help"], ["class_path"]):
            continue
        refuse_secrets({key: flag.value or "?"})
        of_class = group in ("model", "data")
        if not of_class or (own is None and not _names_own_classes(words)):
            what = f"key `{key}`" if of_class else f"argument `--{key}`"
            raise UsageError(f"there is no {what}{suggest_argument(key, known, names)}")


def parse_around_keys(parser: argparse.ArgumentParser, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the arguments of a command on a run; return its own, and the keys of a configuration among them.

    Raises:
        UsageError: An argument is neither.
    """
    words, dotted = split_dotted(argv)
    options, others = parser.parse_known_args(words)
    rest = [*others, *dotted]
    if stray := next((flag for flag in flags_of(rest) if not flag.name), None):
        raise UsageError(f'unexpected word "{stray.value}"; no flag stands before it; see `{parser.prog} --help`')
    own = {flag[2:] for action in parser._actions for flag in action.option_strings if flag.startswith("--")}
    refuse_unknown(rest, {k: way for k, way in FOR_A_RUN.items() if way[:2] != "--" or way[2:] in own}, own)
    return options, rest


def split_dotted(argv: list[str]) -> tuple[list[str], list[str]]:
    """Return a command's own arguments, and the dotted ones with their values, which may stand before a run's name.

    >>> split_dotted(["--data.num_workers", "0", "RUN", "--quiet", "--model.lr=1"])
    (['RUN', '--quiet'], ['--data.num_workers', '0', '--model.lr=1'])
    """
    end = argv.index("--") if "--" in argv else len(argv)
    found = flags_of(argv[:end])
    own = [word for flag in found if "." not in flag.name for word in flag.words]
    return [*own, *argv[end:]], [word for flag in found if "." in flag.name for word in flag.words]


def _check_has_keys(group: str, value: str, hint: str) -> None:
    """Refuse a group of keys that is given neither keys and values nor a file of them."""
    if not value.lstrip().startswith("{") and not value.endswith((".yaml", ".yml", ".json")):
        raise UsageError(f"`--{group}` is a group of keys, such as --{group}.{_FIRST_KEYS[group]}{hint}")


def _names_own_classes(words: list[str]) -> bool:
    named: list[Any] = values_of(words, "model", "data", "model.class_path", "data.class_path")
    named += [class_and_arguments(content, part)[0] for content in read_configs(words) for part in ("model", "data")]
    return any("." in str(name) for name in named)


def values_of(args: list[str], *names: str) -> list[str]:
    """Return the values that arguments give to a flag, under any of its ``names``."""
    return [flag.value or "" for flag in flags_of(args) if flag.name in names]


def without_flags(args: list[str], *names: str) -> list[str]:
    """Return the arguments without the flags ``names`` and their values."""
    return [word for flag in flags_of(args) if flag.name not in names for word in flag.words]


def config_paths(args: list[str]) -> list[str]:
    """Return the config files among the arguments."""
    return values_of(args, "config")


def read_configs(args: list[str]) -> list[dict[str, Any]]:
    """Return the contents of the config files among the arguments, in order, with those of files that they name."""
    from vitlab.config.yaml_files import read_yaml  # and PyYAML, which few commands need

    files = [find_file(path, "--config") for path in config_paths(args)]
    contents = [(read_yaml(file), Path(file).parent) for file in files]
    return [one | {part: read_yaml(path) for part, path in part_files(one, at).items()} for one, at in contents]


def part_files(content: Mapping[str, Any], folder: Path) -> dict[str, Path]:
    """Return the files that a config file in a folder names for model and data, as in ``model: net.yaml``."""
    named = {part: folder / content[part] for part in ("model", "data") if isinstance(content.get(part), str)}
    return {part: path for part, path in named.items() if os.path.isfile(path)}


def as_arguments(values: Mapping[str, Any] | None) -> list[str]:
    """Return dotted keys and values as command-line arguments; text stands as it would be typed.

    Classes and objects are written as class paths with arguments, and trusted: the caller has them in hand.

    >>> as_arguments({"model.pos_embed": "rope2d", "data.img_size": [32, 64], "trainer.logger": False})
    ['--model.pos_embed=rope2d', '--data.img_size=[32, 64]', '--trainer.logger=false']
    """
    used: list[str] = []
    words = [f"--{key}={as_yaml(written(key, value, used))}" for key, value in (values or {}).items()]
    trust_classes(used)
    return words


@contextmanager
def python_words(*names: str) -> Iterator[None]:
    """Let a refusal name keys, and these arguments, as a Python caller gives them; commands in it stay as they are.

    >>> with python_words("name"):
    ...     raise UsageError("`--data.root` is wrong; choose another --name, or `vitlab fit --name a --data.root=b`")
    Traceback (most recent call last):
        ...
    vitlab.errors.UsageError: `data.root` is wrong; choose another name, or `vitlab fit --name a --data.root=b`
    """
    try:
        yield
    except UsageError as error:
        text = re.sub(r"--\w+(?: \S+)? \(in Python, (.*?)\)", r"\1", str(error))
        known = "|".join((*names, *_CONFIGURATION))
        flag = rf"(?<![\w/])--((?:{known})\b)"
        error.args = (re.sub(rf"(`vitlab [^`]*`)|{flag}", lambda found: found[1] or found[2], text),)
        raise
