"""Build the subject of an analysis from a run, a weights file, a published network, or a timm model."""

import inspect
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from PIL import Image
from torch import Tensor

import vitlab.data
from vitlab.analysis.subject import CkaTokens, Subject
from vitlab.config.parser import VitlabCLI, settings, user_mistakes
from vitlab.data.base import ImageData
from vitlab.data.loading.pipeline import Pipeline
from vitlab.data.timm_images import images_of
from vitlab.errors import UsageError
from vitlab.interface import network, path_of
from vitlab.jobs.load import load_pictures, load_trained
from vitlab.jobs.rebuild import evaluation_args, one_device
from vitlab.jobs.restore import load_checkpoint, restore
from vitlab.jobs.terminal import say
from vitlab.jobs.train.facts import has_grid
from vitlab.models.create import create_model
from vitlab.models.load import load_network, load_weights, network_args
from vitlab.models.sizes import SIZES
from vitlab.models.walk import as_transformer
from vitlab.models.weights_file import read_weights
from vitlab.runs.directory import RunDir, find_run
from vitlab.runs.shards import read_checkpoint
from vitlab.runs.standing import checksum
from vitlab.tasks import Classifier

Checkpointed = tuple[RunDir, Path]  # a run and one of its checkpoints
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean and standard deviation of its pixels


class NoTransformer(UsageError):
    """The network of the run is not a Vision Transformer."""


@dataclass(frozen=True)
class View:
    """Which part of a network an analysis examines, and on which images.

    Args:
        images: Folder or file of images to draw maps for; None takes validation images.
        layer: The block, from 0; None leaves the choice to the analysis.
        head: The head, from 0; None for all.
        query: Row and column of the patch whose attention is shown; None for the class token.
        num_images: Largest number of images to measure with.
        split: Split that errors, confusion and calibration use.
        weights: Weights file for a named network, instead of downloaded weights.
        img_size: Side of the images of a named network, in pixels.
        shown: Largest number of images to show.
        tokens: By which tokens cka compares images: mean of the patches, class, or flattened.
        init_grid: Rows and columns of the token grid of ``weights``, where the file lacks them.
    """

    images: str | None = None
    layer: int | None = None
    head: int | None = None
    query: tuple[int, int] | None = None
    num_images: int = 512
    split: Literal["train", "val", "test"] = "val"
    weights: str | None = None
    img_size: int | None = None
    shown: int = 8
    tokens: CkaTokens = "mean"
    init_grid: tuple[int, int] | None = None


def is_elsewhere(source: str) -> bool:
    """Return whether a source is a network without a run: a name, or a file outside of run directories."""
    path = Path(source)
    named = source in SIZES and not path.exists()
    return (
        source.startswith("timm:") or named or (path.is_file() and not (path.parent.parent / "config.yaml").is_file())
    )


def subject_at(source: str, view: View, arguments: Sequence[str] = ()) -> tuple[Subject, Path, dict[str, Any]]:
    """Return the subject that a source names, the folder of its analyses, and name and checksum of its weights.

    Args:
        source: A run, its name or a checkpoint in it; a vitlab file; a name of `vitlab models` or ``timm:NAME``.
        view: Which part of it to analyze.
        arguments: Command-line arguments that change values of a run's configuration.
    """
    if is_elsewhere(source):
        subject = named_subject(source, view)
        return subject, Path("analysis") / subject.name, {"checkpoint": view.weights or source}
    if view.weights or view.img_size or view.init_grid:
        raise UsageError(f"`--weights`, `--img_size` and `--init_grid` are for named networks, and {source} is a run")
    run, checkpoint = find_run(source)
    weights = {"checkpoint": checkpoint.name, "sha256": checksum(checkpoint)}
    return subject_of(run, checkpoint, arguments, view), run.path / "analysis", weights


def named_subject(source: str, view: View) -> Subject:
    """Build a network that has no run, and prepare the images of ``view`` for it."""
    changes: dict[str, Any] = {"img_size": view.img_size} if view.img_size else {}
    transform: Any = None
    with user_mistakes():
        if Path(source).is_file():
            if Path(f"{source}.json").is_file():
                net, transform = load_trained(source)
            else:
                net = load_network(source)
                say(f"images           {Path(source).name} does not define a normalization: using ImageNet's")
        else:
            if view.weights is None and not source.startswith("timm:"):
                raise UsageError(f"{source} has no weights: give them with --weights FILE")
            weights, grid = view.weights, view.init_grid
            file = read_weights(weights) if weights and not weights.startswith("timm:") else None
            if not grid and changes and file and not file.arguments and source in SIZES:
                with suppress(ValueError):  # the grid of the network's own image size, if the weights fit it
                    grid = create_model(source, weights=file).grid_size
            net = create_model(source, weights=file or weights, grid=grid, **changes)
        name = Path(source).stem if Path(source).is_file() else source.removeprefix("timm:")
        subject = Subject(net, transform or _prepare(net), name=name, **_fields(view))
        subject.pictures = load_pictures(view.images, view.shown, subject.data) if view.images else None
    return subject


def _prepare(net: Any, crop_pct: float | None = 0.9) -> Callable[[Image.Image], Tensor]:
    """Return the transform of timm's weights if the network has them, else the usual one for ImageNet."""
    how: dict[str, Any] = {"mean": IMAGENET[0], "std": IMAGENET[1], "crop_pct": crop_pct}
    how |= {"crop_mode": "center", "interpolation": "bicubic"}
    how = images_of(net.pretrained_cfg) if getattr(net, "pretrained_cfg", None) else how
    pipeline = Pipeline(
        None, net.img_size, "none", None, how["crop_pct"], how["interpolation"], crop_mode=how["crop_mode"]
    )
    mean, std = (tuple(how[name][: net.in_chans]) for name in ("mean", "std"))
    return lambda image: pipeline.eval_image(image, (mean, std))


def _fields(view: View) -> dict[str, Any]:
    names = ("num_images", "layer", "head", "query", "split", "tokens")
    return {name: getattr(view, name) for name in names}


def subject_of(run: RunDir, checkpoint: Path, rest: Sequence[str], view: View) -> Subject:
    """Rebuild a run and its data, with the weights of one of its checkpoints."""
    cli = _rebuild(run, checkpoint, [*one_device(run), *rest], bool(view.images))
    net: Any = network(cli.model)
    with user_mistakes():
        net = as_transformer(net, f"the network of {run.path}")
        data: Any = cli.datamodule if isinstance(cli.datamodule, ImageData) else _transform_of(cli.datamodule, net)
        subject = Subject(
            net=net.to(cli.trainer.strategy.root_device),
            data=data,
            arguments={**network_args(cli.model.hparams), "num_classes": _num_outputs(net)},
            name=run.path.name,
            classifies=isinstance(cli.model, Classifier) and cli.model.kind == "class",
            is_elsewhere="data" in dict(settings(list(rest))) and data.class_names != run.data.get("class_names"),
            task=_load_decoder(cli.model, checkpoint).to(cli.trainer.strategy.root_device),
            **_fields(view),
        )
        subject.pictures = load_pictures(view.images, view.shown, subject.data) if view.images else None
    return subject


def _load_decoder(task: Any, checkpoint: Path) -> Any:
    """Load the weights outside the network that a task such as MAE needs to reconstruct images."""
    if hasattr(task, "fill") and checkpoint.suffix != ".safetensors":
        content = read_checkpoint(checkpoint, map_location="cpu")["state_dict"]
        task.load_state_dict({k: v for k, v in content.items() if not k.startswith("net.")}, strict=False)
    return task


def _transform_of(data: Any, net: Any) -> Any:
    """Return the transform of images for a data module that is not vitlab's."""
    if callable(own := getattr(data, "eval_transform", None)):
        return own
    say("images           the data module has no `eval_transform`: using ImageNet's normalization")
    return _prepare(net, None)


def _rebuild(run: RunDir, checkpoint: Path, rest: Sequence[str], has_pictures: bool) -> VitlabCLI:
    """Build task and data of a run and load the weights; with other pictures, the data's files may be missing."""
    other = dict(settings(list(rest)))
    rest = [*rest, *_training_size(run, other)]
    try:
        cli = VitlabCLI(evaluation_args(run, rest), default_root_dir=str(run.path))
    except UsageError:
        if not has_pictures:
            raise
        cli = restore(run, checkpoint, rest, default_root_dir=str(run.path))
        check_net(cli)
        _check_size(cli, run)
        return cli
    check_net(cli)
    _check_size(cli, run)
    if not isinstance(cli.datamodule, ImageData):
        return restore(run, checkpoint, rest, default_root_dir=str(run.path))
    with user_mistakes():
        cli.datamodule.prepare_data()
        if "data" not in other:
            cli.datamodule.load_state_dict(dict(run.data))
        if has_grid(cli.model):
            load_weights(cli.model.net, checkpoint, "usual")
        else:
            load_checkpoint(cli.model, checkpoint)
    return cli


def _training_size(run: RunDir, given: dict[str, Any]) -> list[str]:
    """Return arguments that give another data set the image size and channels of the run."""
    cls = getattr(vitlab.data, given["data"], None) if isinstance(given.get("data"), str) else None
    taken = inspect.signature(cls).parameters if cls else ()
    known = {"img_size": run.model.get("img_size"), "in_chans": run.model.get("in_chans")}
    sizes = {name: v for name, v in known.items() if v and name in taken and f"data.{name}" not in given}
    return [f"--data.{name}={json.dumps(value)}" for name, value in sizes.items()]


def check_net(cli: VitlabCLI) -> None:
    """Refuse a module whose network is not a Vision Transformer."""
    net = network(cli.model)
    if not has_grid(cli.model) and not type(net).__module__.startswith("timm."):
        own = path_of(cli.model) if net is cli.model else f"{path_of(net)} as `net` of {path_of(cli.model)}"
        raise NoTransformer(f"only Vision Transformers of vitlab and of timm can be analyzed, got {own}")


def _num_outputs(net: Any) -> int:
    shapes = [parameter.shape for parameter in net.head.parameters()]
    return shapes[-1][0] if shapes else 0


def _check_size(cli: VitlabCLI, run: RunDir) -> None:
    net: Any = network(cli.model)
    built = list(net.img_size if has_grid(cli.model) else getattr(getattr(net, "patch_embed", net), "img_size", ()))
    trained = run.model.get("img_size") or built
    now = list(cli.datamodule.img_size) if isinstance(cli.datamodule, ImageData) else built
    if trained and now and trained != now:
        sizes = [" x ".join(map(str, size)) for size in (trained, now)]
        raise UsageError(
            f"{run.path} was trained on images of {sizes[0]} pixels, not {sizes[1]}: only `vitlab analyze resolution` "
            "measures other sizes"
        )
