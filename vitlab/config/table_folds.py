"""The folds of a configuration's data; it stands alone, because comparisons do not know data sets."""

import re
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from vitlab.class_paths import find_class
from vitlab.config.keys import flatten_with_classes, key_as_typed
from vitlab.config.trust import import_class
from vitlab.config.yaml_files import read_yaml
from vitlab.data.arrays import fold_column
from vitlab.data.files.rows import distinct_folds, fold_names
from vitlab.data.files.table_file import read_table
from vitlab.data.hugging_face import rows_of
from vitlab.errors import UsageError
from vitlab.named_kwargs import taken_by


def folds_of_config(files: Sequence[str], settings: Sequence[tuple[str, Any]]) -> dict[str, str]:
    """Return the name of an arm and the value of `data.fold` for each fold that a table or a file of arrays names.

    Args:
        files: Configurations, of which later ones override.
        settings: Dotted keys and values over them.

    Raises:
        UsageError: The data cannot be read, or name one fold only.

    Example:
        >>> folds_of_config([], [("data", "ImageFolder"), ("data.root", "photos")])
        {}
    """
    given = _data_of(files, settings)
    name, path = str(given.get("data")).rpartition(".")[2], given.get("data.path")
    column = given.get("data.fold_column", "fold") if name == "Table" else "fold"
    if name not in ("Table", "Arrays") or not path or not column:
        return {}
    try:
        folds = _folds(name, str(path), str(column), given)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if len(folds) == 1:
        raise UsageError(f"{path}: the column {column} has only the fold {folds[0]}; --folds=5 draws folds instead")
    return dict(zip(_arm_names(folds), folds, strict=True))


def check_takes_folds(files: Sequence[str], settings: Sequence[tuple[str, Any]]) -> None:
    """Refuse data of a user's own that cannot be asked for a fold, as all data sets of vitlab can.

    Args:
        files: Configurations, of which later ones override.
        settings: Dotted keys and values over them.

    Raises:
        UsageError: The class has no argument `fold`, or is not trusted.

    Example:
        >>> check_takes_folds([], [("data", "ImageFolder"), ("data.root", "photos")])
    """
    path = str(_data_of(files, settings).get("data", ""))
    if "." not in path or path.startswith("vitlab."):
        return
    import_class("data", path)
    taken = taken_by(find_class("data", path, object))
    if "fold" not in taken and not any(argument.kind is argument.VAR_KEYWORD for argument in taken.values()):
        raise UsageError(
            f"`vitlab cv` sets `data.fold`, and {path} has no argument `fold`: give it one, which is 1/5 for the first "
            "of five parts to validate on, or use a data set of vitlab, such as ImageFolder, Table or Arrays"
        )


def _data_of(files: Sequence[str], settings: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the keys of the data as typed, of which ``data`` is the class, and their values."""
    given = [pair for file in files for pair in flatten_with_classes(read_yaml(file)).items()]
    typed = [(key_as_typed(key).removesuffix(".class_path"), value) for key, value in settings]
    return {key: value for key, value in [*given, *typed] if key.partition(".")[0] == "data"}


def _folds(name: str, path: str, column: str, given: Mapping[str, Any]) -> list[str]:
    """Return the folds that data name in a column, in order; empty if they have no such column."""
    if name == "Arrays":
        cells = fold_column(path)
    elif Path(path).is_dir():
        columns = given.get("data.path_column", "path"), given.get("data.split_column", "split")
        cells = rows_of(path, *columns)[0].get(column)
    else:
        cells = read_table(path, [column], text=[column]).get(column)
    return [] if cells is None else distinct_folds(fold_names(cells))


def _arm_names(folds: Sequence[str]) -> list[str]:
    """Return a name for each fold in letters that an arm and its folder may have; equal ones are numbered.

    >>> _arm_names(["b/1", "North", "東京", "大阪"])
    ['fold-b-1', 'fold-north', 'fold----1', 'fold----2']
    """
    plain = [f"fold-{re.sub(r'[^0-9a-z_.-]', '-', fold.lower())}" for fold in folds]
    names: list[str] = []
    for name in plain:
        numbered = (f"{name}-{k}" for k in count(1))
        names.append(name if plain.count(name) == 1 else next(n for n in numbered if n not in {*plain, *names}))
    return names
