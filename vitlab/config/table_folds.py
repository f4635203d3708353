"""The folds that a configuration's table names; it stands alone, because comparisons do not know data sets."""

import re
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from vitlab.config.explain import read_yaml
from vitlab.config.keys import class_and_arguments
from vitlab.data.files.rows import folds_of
from vitlab.errors import UsageError


def folds_of_config(files: Sequence[str], settings: Sequence[tuple[str, Any]]) -> dict[str, str]:
    """Return the name of an arm and the value of `data.fold` for each fold that the table of the data names.

    Args:
        files: Configurations, of which later ones override.
        settings: Dotted keys and values over them.

    Raises:
        UsageError: The table cannot be read, or names one fold only.

    Example:
        >>> folds_of_config([], [("data", "ImageFolder"), ("data.root", "photos")])
        {}
    """
    given: dict[str, Any] = {}
    for file in files:
        kind, arguments = class_and_arguments(read_yaml(file), "data")
        given |= arguments | ({"class_path": kind} if kind else {})
    for key, value in settings:
        given |= (
            {"class_path": value}
            if key == "data"
            else {key.removeprefix("data.init_args.").removeprefix("data."): value}
        )
    path, column = given.get("path"), given.get("fold_column", "fold")
    if str(given.get("class_path")).rpartition(".")[2] != "Table" or not path or not column or Path(path).is_dir():
        return {}
    try:
        folds = folds_of(str(path), str(column))
    except ValueError as error:
        raise UsageError(str(error)) from error
    if len(folds) == 1:
        raise UsageError(f"{path}: the column {column} has only the fold {folds[0]}; --folds=5 draws folds instead")
    return dict(zip(_arm_names(folds), folds, strict=True))


def _arm_names(folds: Sequence[str]) -> list[str]:
    """Return a name for each fold in letters that suit a folder; equal ones are numbered.

    >>> _arm_names(["b/1", "東京", "大阪"])
    ['fold-b-1', 'fold----1', 'fold----2']
    """
    plain = [f"fold-{re.sub(r'[^0-9A-Za-z_.-]', '-', fold)}" for fold in folds]
    names: list[str] = []
    for name in plain:
        numbered = (f"{name}-{k}" for k in count(1))
        names.append(name if plain.count(name) == 1 else next(n for n in numbered if n not in {*plain, *names}))
    return names
