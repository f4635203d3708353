"""Turn what jsonargparse and constructors say of a wrong configuration into one clear line."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from urllib.error import URLError

from lightning.fabric.utilities.exceptions import MisconfigurationException

from vitlab.config.guesses import VALUES, suggest_argument, with_typed_names
from vitlab.config.trust import import_problem, may_import, not_allowed
from vitlab.errors import UsageError, did_you_mean, in_own_code, named_line


@contextmanager
def user_mistakes(of_model: Iterable[str] = ()) -> Iterator[None]:
    """Turn a ValueError into a :class:`UsageError`, around code that checks the user's input.

    Args:
        of_model: Arguments of the model, shown with the prefix ``model.``, and ``img_size`` with ``data.``.
    """
    try:
        yield
    except UsageError:
        raise
    except (ValueError, MisconfigurationException, FileNotFoundError, URLError) as error:
        root: BaseException = error  # jsonargparse wraps what a constructor said
        inner = _cause_of(root)
        while isinstance(inner, ValueError) and str(inner):
            if not str(root).startswith("`") or str(inner).startswith("`"):  # else it names no key, as of an optimizer
                root = inner
            inner = _cause_of(inner)
        text = str(root)
        while (inner := _cause_of(root)) and "Does not validate" in str(root):
            root, text = inner, in_own_code(inner) or named_line(inner)  # from a constructor of the user's
        raise UsageError(with_typed_names(" ".join(text.split()), of_model)) from error


def _cause_of(error: BaseException) -> BaseException | None:
    """Return the error that caused another, unless that was raised `from None`."""
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def explain(message: str, keys: Iterable[str], class_names: Iterable[str]) -> str:
    """Return a line with the rule that was broken, the value, and the closest valid name.

    Args:
        message: jsonargparse's message, of one or many lines.
        keys: Every dotted key that the parser takes, including those of the selected classes.
        class_names: Short names of the classes that a ``class_path`` can name.
    """
    known = set(keys)
    found = re.search(r'Parser key "([\w.]+)"', message) or re.search(r"Group '([\w.]+)'", message)
    outer = found[1] if found else ""
    given = re.findall(r"Given value: (.*)", message)
    if (found := re.search(r"Importing '([^']+)' is not allowed", message)) and (not given or found[1] in str(given)):
        return not_allowed(found[1])
    if found := re.search(r"unrecognized arguments: --([^\s=]+)", message):
        key = found[1] if not outer or found[1].startswith(outer) else f"{outer}.{found[1]}"
        return f"there is no argument `--{key}`{_closest_key(key, known)}"
    if found := re.search(r"[Oo]ption '([^'\n]+)' is not accepted|accept option '([^'\n]+)'", message):
        key = ".".join(part for part in (outer, found[1] or found[2]) if part)
        return f"there is no key `{key}`{_closest_key(key, known)}"
    if found := re.search(r"Multiple subclasses with name (\w+)\. .*: (.*)\.", message):
        return f"`{outer}`: several classes are called {found[1]}: give the whole path of one, {found[2]}"
    if found := re.search(r"Expected a dot import path string: (\S+)", message):
        hint = "; leave out the space" if found[1] in (names := [*class_names]) else did_you_mean(found[1], names)
        return f'`{outer}`: there is no class "{found[1]}"{hint}'
    if outer in ("", "config") and (found := re.search(r"Path is not a file: '(.*)'", message)):  # it was one before
        return f"{found[1]}: it cannot be opened now"
    if found := re.search(r"the following arguments are required: (.*)", message):
        names = [f"--{outer}.{name}" if outer else name for name in found[1].split(", ")]
        if names == ["data"]:
            hint = "a module's own loaders are not used; put them into a LightningDataModule (docs/bring_your_own.md)"
            return f"missing: --data; {hint}"
        way_out = "" if outer else "; give a complete config, for example `--config configs/t2t.yaml`"
        return f"missing: {', '.join(names)}{way_out}"
    nested = re.search(r"Given value: NestedArg\(key='([^']*)', val='?(.*?)'?\)\s*$", message)
    if nested and "Problem with given class_path 'lightning.Lightning" in message:  # no class is known yet
        return f"--{outer}.{nested[1]}={nested[2]} needs the class of `{outer}`: name it with --config or --{outer}"
    if found := re.search(r"NestedArg\(key='([^']*[^\w.'][^']*)'", message):  # such as a key with a space
        key = f"{outer}.{found[1]}"
        return f"there is no key `{key}`{_closest_key(key, known)}"
    return _explain_value(message, outer) or re.sub(r"\s+", " ", message).strip()


def _explain_value(message: str, outer: str) -> str | None:
    if inner := re.findall(r'Parser key "([\w.]+)":\s+Expected a (.*?)\. Got value: (.*)', message):
        name, expected, value = inner[-1]
        key = name if name.startswith(outer) else f"{outer}.{name}"
        return _wrong_value(key, expected, value)
    heads = [*re.finditer(r'Parser key "([\w.]+)":\s+Does not .*\s+Subtypes: \[(.*)\]', message)]
    if len(heads) > 1 and (found := re.search(r"Given value: (.*)", message[heads[-1].end() :])):
        name = heads[-1][1]
        return _wrong_value(name if name.startswith(outer) else f"{outer}.{name}", heads[-1][2], found[1])
    if found := re.search(r"Subtypes: \[(.*)\](?s:.*)Given value: (.*)", message):
        value = _plain(found[2]).strip("'\" ")
        is_path = re.search(r"<class '\w+\.", found[1]) and all(part.isidentifier() for part in value.split("."))
        return not_allowed(value) if is_path and not may_import(value) else _wrong_value(outer, found[1], found[2])
    return None


def _closest_key(key: str, known: set[str]) -> str:
    if key in known and key.startswith(("model.", "data.")):
        return f": other classes of `{key.split('.')[0]}` have it, but not the selected one"
    return suggest_argument(key, known)


def _wrong_value(key: str, expected: str, value: str) -> str:
    if why := import_problem(value.strip("'\"")):
        return f"`{key}`: {why}"
    choices = re.findall(r"'([^']*)'", expected.replace("<class 'NoneType'>", "")) if "Literal" in expected else []
    value = _plain(value)
    if choices:
        meant = f'; did you mean "{VALUES[value]}"?' if VALUES.get(value) in choices else did_you_mean(value, choices)
        return f'`{key}` must be one of {", ".join(choices)}, got "{value}"{meant}'
    kind = re.sub(r"<class '([\w.]+)'>", r"\1", expected).replace("typing.", "").replace("NoneType", "null")
    kind = re.sub(r"collections\.abc\.Sequence(\[(?:[^\[\]]|\[[^\]]*\])*\])?", "a list such as [3; 3]", kind)
    kind = kind.replace(", ", " or ").replace(";", ",")
    return f'`{key}` must be {kind}, got "{value}"'


def _plain(value: str) -> str:
    """Return a value as it was typed, where jsonargparse shows one of its own objects."""
    return re.sub(r"NestedArg\(key='[\w.]+', val='?(.*?)'?\)", r"\1", value)
