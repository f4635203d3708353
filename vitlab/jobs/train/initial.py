"""The weights that a training starts with: whose they are, what they need to fit, and what they were trained on."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vitlab.config.arguments import grid_of
from vitlab.config.explain import user_mistakes
from vitlab.config.parser import class_at
from vitlab.config.yaml_files import read_own
from vitlab.data.base import ImageData
from vitlab.data.record import TRAINED_ON, fingerprints, read_numbers
from vitlab.data.timm_images import images_of, images_of_timm
from vitlab.errors import UsageError, preview
from vitlab.interface import has_grid, network, path_of, redefines
from vitlab.jobs.checkpoint import (
    load_own,
    load_resized,
    meanings,
    misfit,
    named_outputs,
    needs_more_than_net,
    weights_outside,
)
from vitlab.jobs.train.job import GIVEN, ImagesBefore, Job
from vitlab.models.convert_peers import peer_images
from vitlab.models.create import load_of_library
from vitlab.models.load import NEW_HEAD, network_args, outputs_of
from vitlab.models.weights_file import facts_beside, read_content
from vitlab.runs.directory import RunDir
from vitlab.runs.find import file_of_weights
from vitlab.runs.manifest import check_whole
from vitlab.shipped import LIBRARIES
from vitlab.tasks.regressor import Standardized, refuse_own_units

NEAR = 0.1  # of a standard deviation: so much may statistics of images differ without a word


@dataclass
class LibraryImages:
    """How a library prepares images for its weights: the data of a training that begins with them follow it.

    Args:
        source: The weights.
        known: Arguments of the data with which they were trained.
        given: Arguments of the data that the user has set, which those do not replace.
    """

    source: str
    known: dict[str, Any]
    given: set[str]

    @classmethod
    def of(cls, source: str, data: Any, settings: Iterable[tuple[str, Any]]) -> "LibraryImages":
        """Learn them, and let data resize and cut images alike unless the user says how.

        Args:
            source: The weights.
            data: The configuration of the data, which is changed.
            settings: Keys and values that the user has set.
        """
        given = {key.split(".")[-1] for key, value in settings if value is not None and key.startswith("data.")}
        with user_mistakes():
            taken = signature(class_at(data.class_path)).parameters.keys()
            needed = taken - given
            if source.startswith("timm:"):
                known = images_of_timm(source, needed)
            else:
                known = images_of(described, needed) if (described := peer_images(source)) else {}  # it may not say
        images = cls(source, {name: value for name, value in known.items() if name in taken}, given)
        for name in {"crop_mode", "interpolation"} & images.known.keys() - given:
            data.init_args[name] = images.known[name]
        return images

    def prepare(self, data: ImageData, arguments: Any) -> None:
        """Normalize images as for the weights, now that the data knows its channels; note what is not alike.

        Args:
            data: The data.
            arguments: Its arguments in the configuration, which are changed.
        """
        for name, value in data.take_images(self.known, self.given).items():
            arguments[name] = value
        now = {name: arguments[name] for name in self.known}
        same = [f"{name} {value}" for name, value in self.known.items() if now[name] == value]
        others = [f"{k} {v} and not {now[k]}" for k, v in self.known.items() if k in self.given and now[k] != v]
        data.notes += [f"images as for the weights of {self.source}: {', '.join(same)}"] if same else []
        data.notes += [f"the weights of {self.source} were trained with {', '.join(others)}"] if others else []


def load_first_weights(job: Job) -> None:
    """Load the weights that a run starts with, unless it goes on from a checkpoint of its own."""
    options = job.options
    if not job.resumed and options.init_from:
        _load_weights_of(job, options.init_from, options.resize, options.init_grid)
    elif not job.resumed and options.start is not None:
        _load_given_weights(job, options.start)
    elif job.resumed and not job.run.has_checkpoint() and (source := job.run.record.get("init_from")):
        grid = job.run.record.get("init_grid")
        _load_weights_of(job, source, job.run.record.get("resize"), grid_of(grid) if grid else None)


def _load_given_weights(job: Job, state: Mapping[str, Any]) -> None:
    """Load the weights of the object that a Python caller gave as the model."""
    try:
        job.task.load_state_dict(state)
    except RuntimeError as error:
        raise misfit(None, error) from error
    job.say(f"init   weights of {GIVEN}, and not of `seed_everything`: give the class to draw new ones")


def _load_weights_of(job: Job, source: str, resize: str | None, grid: Sequence[int] | None) -> None:
    """Load weights of another model into the network, and print what was changed to make them fit."""
    if source == GIVEN:
        raise UsageError(f"{job.run.path} has no checkpoint yet, and its weights were those of an object: fit it again")
    if source == "last" and job.resumed:  # of an older vitlab
        way_out = "start it again with --overwrite and --init_from RUN"
        raise UsageError(
            f"{job.run.path} has no checkpoint yet, and which run was `last` at its start is lost: {way_out}"
        )
    how = {"resize": resize or "usual", "grid": grid and tuple(map(int, grid))}
    with user_mistakes():
        if not has_grid(job.task) and (source.startswith(LIBRARIES) or resize or grid):
            flag = f"--init_from {source}" if source.startswith(LIBRARIES) else "--resize" if resize else "--init_grid"
            raise UsageError(f"{flag} is for networks of vitlab, and {path_of(job.task)} has another: leave it out")
        weights: Any = source
        if not source.startswith(LIBRARIES):
            check_whole(weights := file_of_weights(source))
            job.before = ImagesBefore(source, *statistics_of_weights(weights), images_behind(weights))
        sentences = load_initial(job.task, job.data, weights, **how)
    for sentence in [f"weights of {source}", *sentences]:
        job.say(f"init   {sentence}")


def load_initial(task: Any, data: Any, source: str | Path, **how: Any) -> list[str]:
    """Load weights for a training to start with; the head stays new where theirs is for other classes or targets.

    Args:
        task: The task; a module of the user's whose network is not of vitlab takes all weights as they are.
        data: Its data; classes that are unknown, there or of the weights, are not compared.
        source: The file of weights, or a network of another library.
        **how: Passed to :func:`load_resized`, whose sentences are returned with one about the head.

    Raises:
        ValueError: The weights do not fit the network.
    """
    if not has_grid(task):
        file = Path(source)
        refuse_own_units(task, file, facts_beside(file))
        load_own(task, read_content(file)["state_dict"], file)
        return []
    net: Any = network(task)
    head = {name: value.clone() for name, value in net.state_dict().items() if name.startswith("head.")}
    if str(source).startswith(LIBRARIES):
        sentences = load_of_library(net, str(source), network_args(task.hparams), **how)
    else:
        sentences = _with_outside(task, Path(source), load_resized(task, Path(source), **how))
    theirs = named_outputs(source)
    ours = meanings({name: getattr(data, name, None) for name in ("class_names", "targets")})
    if not head or any(sentence.startswith(NEW_HEAD) for sentence in sentences):
        return sentences
    if not theirs or not ours:
        what = f"it has as many outputs, {outputs_of(net.state_dict())}"
        return [*sentences, f"head: the file's, as {what}; it does not say whether they are the same classes"]
    if theirs == ours:
        return sentences + _converted_head(task, source, head)
    net.load_state_dict(head, strict=False)
    others = preview(name for name in theirs if name not in ours)
    why = f"for {others}, which the data lack" if others else "in another order than the data's"
    sentences = [sentence for sentence in sentences if not sentence.startswith("head: ")]
    return [*sentences, f"{NEW_HEAD}, the file's is {why}"]


def _converted_head(task: Any, source: str | Path, new: dict[str, torch.Tensor]) -> list[str]:
    """Convert a head, trained on targets of another mean and spread, to those of a task; return what that changed.

    Args:
        task: The task, with the weights of the file.
        source: The file, of a run.
        new: The head as it was before.
    """
    if not isinstance(task, Standardized) or redefines(task, "in_units") or redefines(task, "train_loss"):
        return []  # or in units of its own
    run = RunDir.around(Path(source))
    facts = (run.read("data.json").get("targets") or {}) if run.config.is_file() else {}
    if not {"mean", "std"} <= facts.keys():
        return []
    mean, std = task.scale_of(facts)
    if mean.equal(task.target_mean) and std.equal(task.target_std):
        return []
    if task.convert_head(mean, std):
        return ["head: converted from mean and spread of the file's targets to those of the data"]
    network(task).load_state_dict(new, strict=False)
    return [f"{NEW_HEAD}, the file's is for targets of another mean and spread"]


def _with_outside(task: Any, file: Path, sentences: list[str]) -> list[str]:
    """Load what a class of the user's has outside of its network too, where the file has all of it; return sentences.

    Args:
        task: The task.
        file: The file, of which the network was read.
        sentences: What that changed.
    """
    mine = weights_outside(task.state_dict()) if needs_more_than_net(task) else {}
    theirs = weights_outside(read_content(file)["state_dict"]) if mine else {}
    has_all = bool(theirs) and (theirs.keys() == mine.keys() or not task.strict_loading)
    if not has_all or any(k not in mine or v.shape != mine[k].shape for k, v in theirs.items()):
        return sentences
    task.load_state_dict(theirs, strict=False)
    told = [sentence for sentence in sentences if "outside the network" not in sentence]
    return [*told, f"weights: those outside the network, too, {preview(sorted(theirs))}"]


def statistics_of_weights(source: str | Path) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation by which images were normalized for weights; empty if they do not say.

    Args:
        source: A file, of a run or with a card.

    Example:
        >>> [len(values) for values in statistics_of_weights(file_of_weights("vitlab:photos64_vit"))]
        [3, 3]
    """
    run, card = RunDir.around(Path(source)), facts_beside(source).get("images")
    facts: Mapping[str, Any] = {**run.read("data.json")} if run.config.is_file() else {}
    facts = card if isinstance(card, dict) else facts
    mean, std = (value if isinstance(value := facts.get(name), list) else [] for name in ("mean", "std"))
    return mean, std


def images_behind(source: str | Path, after: Sequence[Path] = ()) -> NDArray[np.uint64]:
    """Return the fingerprints of the images whose labels weights were trained on; none where no run tells.

    Args:
        source: A file, of a run or not; of one that read no labels, the weights that it began with tell.
        after: Directories of runs that began with it, one after another.
    """
    run, found = RunDir.around(Path(source)), None
    if _read_labels(run):
        found = read_numbers(run.path / TRAINED_ON)
    elif run.path not in after:  # else it replaced a run whose weights it began with
        with suppress(UsageError):  # those are gone, or of a library
            if (before := run.record.get("init_from")) and before != "last":  # of an older vitlab: which one is lost
                found = images_behind(file_of_weights(before), [*after, run.path])
    return np.zeros(0, np.uint64) if found is None else found


def _read_labels(run: RunDir) -> bool:
    """Return whether a training has compared with labels; with a class of the user's it is taken to have."""
    with suppress(UsageError, OSError, KeyError, TypeError, AttributeError, ImportError):
        path = read_own(run.config)["model"]["class_path"]
        return not path.startswith("vitlab.") or bool(getattr(class_at(path), "reads_labels", True))
    return True


def since_the_weights(job: Job) -> list[str]:
    """Say what the data and those of the initial weights have to do with each other.

    Nothing of weights of a library, whose images are prepared as it says, which is told.
    """
    if not isinstance(job.data, ImageData):
        return []
    return [*_other_statistics(job.data, job.before), *_trained_on_already(job.data, job.before)]


def _trained_on_already(data: ImageData, before: ImagesBefore) -> list[str]:
    """Say so where the weights were trained on images that are to measure them."""
    told = []
    for name, images in ("validation", data.splits["val"]), ("test", data.held_back.get("test")):
        if images is not None and (n := int(np.isin(fingerprints(images), before.seen).sum())):
            told.append(f"the weights of {before.source} were trained on {n:,} of the {len(images):,} {name} images")
    return told


def _other_statistics(data: ImageData, before: ImagesBefore) -> list[str]:
    """Say so where images are normalized by other numbers than those for which the initial weights were trained."""
    mean, std = before.mean, before.std
    if len(mean) != data.in_chans or len(std) != data.in_chans:
        return []
    pairs = [*zip(data.mean, mean, std, strict=True)], [*zip(data.std, std, std, strict=True)]
    if all(abs(ours - theirs) <= NEAR * scale for part in pairs for ours, theirs, scale in part):
        return []
    numbers = [" ".join(f"{value:.3f}" for value in values) for values in (data.mean, data.std, mean, std)]
    ours, theirs = (f"mean {mean} and std {std}" for mean, std in (numbers[:2], numbers[2:]))
    return [f"images are normalized by {ours}; those of the weights were by {theirs} (data.mean, data.std)"]
