"""Run analyses of a network and write their tables and figures."""

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path

import torch

from vitlab.analysis import ANALYSES
from vitlab.analysis.subject import Finding, Subject
from vitlab.analysis.typeset import Format, Width
from vitlab.config.explain import user_mistakes
from vitlab.config.keys import key_as_typed
from vitlab.config.parser import settings
from vitlab.data.base import ImageData
from vitlab.errors import MISTAKES, UsageError, in_own_code
from vitlab.jobs.find_subject import has_no_run, subject_at
from vitlab.jobs.stored import PLACES, has_images_of
from vitlab.jobs.view import View
from vitlab.runs.directory import RunDir
from vitlab.runs.find import find_run
from vitlab.tables import shape_text

USUAL = View()
SAME = ("trainer.", "data.num_workers", "data.cache_gb", "data.batch_size")  # how fast, not what
OF_OUTPUT = ("shown", "weights", "img_size", "init_grid")  # of a view: how many pictures, and what no run takes
LONGEST = 80  # characters of a folder's name


def analyze(
    names: Sequence[str],
    of: str,
    view: View,
    against: str | None = None,
    output: str | Path | None = None,
    arguments: Sequence[str] = (),
    on_start: Callable[[str, int], None] = lambda name, done: None,
    formats: Sequence[Format] = ("png", "svg"),
    width: Width = "page",
) -> Iterator[tuple[str, Finding | UsageError, list[Path]]]:
    """Yield each analysis with its finding and the files it wrote, or with the reason why it does not apply.

    Args:
        names: Names of analyses.
        of: What to analyze, see :func:`vitlab.jobs.find_subject.subject_at`.
        view: Which part of it to analyze.
        against: Another run to compare with.
        output: Folder for tables and figures; default: ``analysis/`` of the run, and in it the folder of
            :func:`variation` where anything changes what is measured.
        arguments: Command-line arguments that change values of the run's configuration.
        on_start: Called before each analysis with its name and the number of analyses done.
        formats: Formats of the figures.
        width: Width of the figures in print.

    Raises:
        UsageError: The run or its weights cannot be used. An analysis that does not apply is yielded with its
            reason.
    """
    subject, place, weights = subject_at(of, view, arguments)
    if against:
        subject.other = subject_at(against, View(num_images=view.num_images), arguments)[0]
        _check_same_data(subject, subject.other)
    if not output and not has_no_run(of):
        place /= variation(arguments, view, against, _has_moved(subject, of, view, arguments))
    folder = Path(output) if output else place
    notes = RunDir(folder)
    for done, name in enumerate(names):
        on_start(name, done)
        try:
            with user_mistakes(), _mistakes_of_parts():
                finding = ANALYSES[name].measure(subject)
        except UsageError as error:
            if "note" not in notes.read("notes.json").get(name, {}) or not (folder / f"{name}.csv").is_file():
                notes.update("notes.json", **{name: {"not_done": str(error)}})
            yield name, error, []
            continue
        paths = finding.save(folder, name, formats, width, f"{name.replace('_', ' ')} of {subject.name}")
        notes.update("notes.json", **{name: {"note": finding.note, **weights}})
        yield name, finding, paths


def variation(arguments: Sequence[str], view: View = USUAL, against: str | None = None, has_moved: bool = False) -> str:
    """Return the name of the folder for numbers that are not those of the run as it is; empty if nothing changes them.

    Args:
        arguments: Command-line arguments that change values of the run's configuration.
        view: Which part of it is analyzed.
        against: The run that it is compared with.
        has_moved: Whether another place of the data has the images of the run.

    Example:
        >>> variation(["--model.pos_embed=none", "--data.num_workers=0", "--trainer.accelerator=cpu"])
        'model.pos_embed=none'
        >>> variation([], View(num_images=64), "runs/none")
        'num_images=64,against=runs_none'
    """
    same = (*SAME, *(PLACES if has_moved else ()))
    changed = {key: value for key, value in settings(list(arguments)) if not key_as_typed(key).startswith(same)}
    looked = {field.name: getattr(view, field.name) for field in fields(view) if field.name not in OF_OUTPUT}
    changed |= {key: value for key, value in looked.items() if value != getattr(USUAL, key)}
    changed |= {"against": against} if against else {}
    words = ",".join(f"{key}={value}" for key, value in changed.items())
    name = re.sub(r"[^\w.,=-]+", "_", words)
    return name if len(name) <= LONGEST else f"{name[:LONGEST]}-{hashlib.sha256(words.encode()).hexdigest()[:6]}"


def _has_moved(subject: Subject, of: str, view: View, arguments: Sequence[str]) -> bool:
    """Return whether another place of the data is named, and its images are those of the run; else none are read."""
    is_named = any(key_as_typed(key) in PLACES for key, _ in settings(list(arguments)))
    if not is_named or view.images or not isinstance(subject.data, ImageData):
        return False
    with suppress(ValueError, OSError):  # which the analyses tell
        subject.data.build(view.split)
    return has_images_of(subject.data, find_run(of)[0], view.split)


@contextmanager
def _mistakes_of_parts() -> Iterator[None]:
    """Turn what a part of the user's own raises into a UsageError: it may not do all that an analysis asks of it."""
    try:
        yield
    except MISTAKES as error:
        if isinstance(error, UsageError | torch.OutOfMemoryError) or (line := in_own_code(error)) is None:
            raise
        raise UsageError(line) from error


def _check_same_data(subject: Subject, other: Subject) -> None:
    own, others = (shape_text((each.net.in_chans, *each.net.img_size)) for each in (subject, other))
    if own != others:
        raise UsageError(f"`--against` must be a run on images of the same shape, got {others} and {own}")
