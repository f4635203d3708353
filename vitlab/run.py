"""A run as an object: the content of its directory, and the operations on it."""

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from vitlab.config.arguments import as_arguments, python_words, refuse_unknown
from vitlab.config.guesses import FOR_RUN
from vitlab.config.options import Policy, check_topk
from vitlab.config.yaml_files import read_own
from vitlab.errors import UsageError, escaped, not_finite
from vitlab.jobs.exported import Dynamic, ExportOptions, Form, export_path
from vitlab.jobs.terminal import lightning_quieted, open_terminal, terminal_as_it_was
from vitlab.named_kwargs import check_names
from vitlab.runs.directory import Here, RunDir
from vitlab.runs.find import find_directory, find_run
from vitlab.runs.processes import as_it_was
from vitlab.runs.records import EvaluationCommand, Record, Results
from vitlab.runs.run_lock import run_status

if TYPE_CHECKING:
    import pandas as pd

    from vitlab.analysis.subject import Finding
    from vitlab.jobs.load import Loaded

PathLike = str | os.PathLike[str]
Overrides = Mapping[str, Any]  # dotted keys of the configuration and their values


class Run:
    """A run: the content of its directory, and the operations on it.

    Args:
        run: Name of the run, its directory, one of its checkpoints, or ``last``.

    Raises:
        ValueError: There is no such run; the message names the newest ones.

    Example:
        >>> run = Run("first")
        >>> run.status, run.config["model"]["init_args"]["pos_embed"]
        ('done', 'sincos2d')
        >>> sorted(run.test())
        ['acc1', 'acc1_macro', 'acc5', 'f1_macro', 'loss', 'n']
    """

    def __init__(self, run: PathLike = "last") -> None:
        text = os.fspath(run)
        self._checkpoint: Path | None = None
        if Path(text).expanduser().is_file():
            directory, self._checkpoint = find_run(text)
        else:
            directory = find_directory(text)
        self._place, self._here = directory.path, Here()

    def __fspath__(self) -> str:
        return os.fspath(self.path)  # for `vitlab.fit(resume=run)` and `vitlab.load(run)`

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {self.status})"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: status, answer, curves."""
        from vitlab.look.facts import card_of

        return card_of(self._directory, self.status)

    @property
    def path(self) -> Path:
        """The run directory: as it was named, and as an absolute path once the program is in another folder."""
        return self._here.reached(self._place)

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.path.resolve().name

    @property
    def status(self) -> str:
        """``running``, ``done``, ``preempted``, ``failed``, or ``killed`` where no process trains any more."""
        return run_status(self._directory, self.record)

    @property
    def checkpoint(self) -> Path:
        """The checkpoint that the methods use: the given one, else that of the best epoch."""
        return self._here.reached(self._checkpoint) if self._checkpoint else self._directory.checkpoint()

    @property
    def record(self) -> Record:
        """The content of ``run.json``: how the run was started, on what, and its status."""
        return self._directory.record

    @property
    def results(self) -> Results:
        """The results on each split of ``results.json``.

        Those of a checkpoint that has been replaced since, as by a resume, are not among them: they are listed in
        ``stale``, each with its ``split`` and with ``why``, the sentence that the commands print.
        """
        return self._directory.results

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration."""
        return read_own(self._directory.config)

    @property
    def metrics(self) -> "pd.DataFrame":
        """The rows of ``metrics.jsonl``, with NaN where a row lacks a column."""
        import pandas as pd

        return pd.DataFrame(self._directory.rows())

    @python_words()
    def load(self) -> "Loaded":
        """Return the network and the transform of its images, as :func:`vitlab.load` does.

        Example:
            >>> net, transform = run.load()
            >>> net.training
            False
        """
        from vitlab.jobs.load import load_trained

        with lightning_quieted(), as_it_was():
            return load_trained(os.fspath(self.checkpoint))

    def validate(self, overrides: Overrides | None = None, resize: Policy | None = None) -> dict[str, float]:
        """Evaluate on the validation split; see :meth:`test`.

        Example:
            >>> 0 <= run.validate()["acc1"] <= 1
            True
        """
        return self._measure("validate", overrides, resize)

    def test(self, overrides: Overrides | None = None, resize: Policy | None = None) -> dict[str, float]:
        """Evaluate on the test split, save the result in the run directory, and return the metrics by name.

        What qualifies them is logged, such as images that were trained on.

        Args:
            overrides: Keys of the configuration to change; the result is then stored beside the run's own.
            resize: How to resample positions for another grid; None is the method's default.

        Example:
            >>> 0 <= run.test()["acc1"] <= 1
            True
        """
        return self._measure("test", overrides, resize)

    @python_words("topk")
    def predict(self, images: PathLike | Sequence[PathLike] | None = None, topk: int = 5) -> "pd.DataFrame":
        """Return classes and probabilities for image files, or the numbers of a regression; one row per image.

        Args:
            images: Files, folders, or patterns such as ``a/**/*.png``; None for the outputs of the samples that
                ``predict_dataloader`` of your own data gives.
            topk: Number of classes per image.

        Raises:
            ValueError: A file cannot be read, or there is none; outputs are not finite; images are given as objects;
                ``topk`` is below 1.

        Example:
            >>> run.predict("digit.png", topk=1).shape[0]
            1
        """
        from vitlab.config.images import find_images, refuse_none
        from vitlab.jobs.predict import NOT_FINITE, predict, predict_from_data
        from vitlab.tables import counted

        check_topk(topk)
        if images is None:
            with lightning_quieted(), as_it_was():
                return predict_from_data(self._directory, self.checkpoint, [], quiet=True)
        words = _paths(images)
        files, unreadable = find_images(words)
        refuse_none(files, unreadable, words)
        total = len(files) + len(unreadable)
        with lightning_quieted(), as_it_was():
            table, more = predict(self._directory, self.checkpoint, [], files, topk, quiet=True)
        unreadable += [problem for problem in more if problem[1] != NOT_FINITE]
        if unreadable:
            path, reason = unreadable[0]
            count = f"{len(unreadable):,} of {counted(total, 'image')}"
            raise UsageError(f"{count} cannot be read, the first is {escaped(path)}: {reason}")
        if more:
            raise UsageError(not_finite(len(more), total))
        assert table is not None  # None only on ranks other than 0
        return table

    @overload
    def analyze(self, names: Literal["all"] | list[str] | tuple[str, ...], **view: Any) -> "dict[str, Finding]": ...
    @overload
    def analyze(self, names: str, **view: Any) -> "Finding": ...
    def analyze(self, names: str | list[str] | tuple[str, ...], **view: Any) -> Any:
        """Return the finding of an analysis, a table with a figure; it is saved in ``analysis/`` of the run, too, in a
        folder of its own where ``view`` changes what is measured.

        Args:
            names: An analysis; or a list of several, or ``all``, for a dict of those that apply to this network.
            **view: Fields of :class:`vitlab.jobs.view.View`: images, layer, head, query, num_images.

        Raises:
            ValueError: There is no such analysis or field, or it does not apply to this network.

        Example:
            >>> list(run.analyze("cost").table.columns)
            ['quantity', 'of', 'value']
        """
        from vitlab.analysis import names_of
        from vitlab.jobs.analyze import analyze
        from vitlab.jobs.view import View

        several = not isinstance(names, str) or names == "all" or "," in names
        chosen = names_of(names if isinstance(names, str) else ",".join(names))
        check_names(View, view, "analyze")
        found = {}
        with python_words(*View.__dataclass_fields__), lightning_quieted(), as_it_was():
            for name, finding, _ in analyze(chosen, str(self.checkpoint), View(**view)):
                if not isinstance(finding, UsageError):
                    found[name] = finding
                elif not several:
                    raise finding
        return found if several else found[chosen[0]]

    @python_words("to", "output", "check", "dynamic", "opset")
    def export(
        self,
        to: Form,
        output: PathLike | None = None,
        check: bool = True,
        dynamic: Dynamic = "batch",
        opset: int | None = None,
    ) -> Path:
        """Write the network as a file that other programs load, and return its path.

        Args:
            to: Format of the file.
            output: The file; None is ``export/CHECKPOINT.SUFFIX`` of the run.
            check: Whether to compare the file's outputs with the run's; in int8, of the graph before it is quantized.
            dynamic: What a graph leaves open: batch, or size, which is the batch, the height and the width.
            opset: Version of ONNX's operators; None is torch's default.

        Raises:
            ValueError: There is no such format.

        Example:
            >>> run.export("safetensors").name
            'best.safetensors'
        """
        from vitlab.jobs.export import export

        path = export_path(self._directory, self.checkpoint, to, output)
        options = ExportOptions(to, path, check, dynamic, opset)
        with terminal_as_it_was(), as_it_was():
            open_terminal()
            return export(self._directory, self.checkpoint, options).path

    @python_words("pictures")
    def look(self, output: PathLike | None = None, pictures: int = 12, show: bool = True) -> Path:
        """Write the page of ``vitlab look`` about the run, open it in a browser, and return its path.

        Args:
            output: The file, which is replaced; None is ``look.html`` of the run.
            pictures: Largest number of images in its viewer.
            show: Whether to open it.

        Example:
            >>> run.look(pictures=0, show=False).name
            'look.html'
        """
        from vitlab.jobs.view import View
        from vitlab.look.command import page_about
        from vitlab.runs.atomic import is_writable, write_text

        path = Path(output or self.path / "look.html")
        if not is_writable(path.parent):
            raise UsageError(f"cannot write into {path.parent}; choose another file with `output`")
        source = self.checkpoint if self._checkpoint else self.path
        with terminal_as_it_was(), as_it_was():
            open_terminal(quiet=True)
            write_text(path, page_about([os.fspath(source)], View(shown=pictures), []))
        if show:
            import webbrowser

            webbrowser.open(path.resolve().as_uri())
        return path

    @property
    def _directory(self) -> RunDir:
        return RunDir(self.path)

    @python_words("resize")
    def _measure(
        self, command: EvaluationCommand, overrides: Overrides | None, resize: Policy | None
    ) -> dict[str, float]:
        from vitlab.jobs.evaluate import Conditions, evaluate
        from vitlab.runs.launch import is_launched

        words = as_arguments(overrides)
        refuse_unknown(words, FOR_RUN, own=())
        alone = not is_launched()  # else Lightning would start the caller's script again for a second device
        with terminal_as_it_was(), as_it_was():
            open_terminal()
            found = evaluate(command, self._directory, self.checkpoint, Conditions(words, resize, alone=alone))
            if found is None:
                return {}
            for sentence in [*found.sentences, *([found.unsaved] if found.unsaved else [])]:
                logging.getLogger("vitlab").warning(sentence)
        return found.values


def _paths(images: PathLike | Sequence[PathLike]) -> list[str]:
    """Return files, folders and patterns as text; refuse images in memory."""
    given = [images] if isinstance(images, str | os.PathLike) or not isinstance(images, Iterable) else [*images]
    if not given:
        raise UsageError("no images found: nothing was given")
    for one in given:
        if not isinstance(one, str | os.PathLike):
            way_out = "for an image in memory: `net, transform = vitlab.load(run)`, then `net(transform(image)[None])`"
            raise UsageError(f"`predict` takes files, folders and patterns, got a {type(one).__name__}; {way_out}")
    return [os.fspath(one) for one in given]
