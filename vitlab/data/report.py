"""Report on a folder of photos: classes, sizes, faults, and a picture of the augmentation."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from vitlab.data.files.scan import FACTS
from vitlab.data.files.sets import FileImages, Images
from vitlab.data.files.splits import SPLIT_NAMES
from vitlab.data.files.twins import contradictions, duplicates, near_duplicates
from vitlab.data.image_folder import ImageFolder
from vitlab.data.loading.streams import stream
from vitlab.data.loading.transforms import to_image
from vitlab.errors import printable
from vitlab.runs.atomic import atomic_write
from vitlab.tables import counted, in_short

_ROWS, _COLUMNS = 8, 7  # of the picture: one image of each class first; augmented versions
_SOURCES = {"train": "training split", "published": "published, of ImageNet", "given": "given"}
_MOST = 50  # lines of a list that can be long


def report(data: ImageFolder) -> dict[str, Any]:
    """Scan every file of all three splits, and return the report as plain values.

    Args:
        data: The folder; its `max_unreadable` and its one size are lifted while it is read, because unreadable files
            and images of other sizes are part of the report.
    """
    allowed, one_size, problems = data.max_unreadable, data.one_size, list[str]()
    data.max_unreadable, data.one_size = 10**9, None
    try:
        for name in SPLIT_NAMES:
            try:
                data.build(name)
            except ValueError as error:
                problems += [] if str(error) in problems else [str(error)]
    finally:
        data.max_unreadable, data.one_size = allowed, one_size
    splits = {name: images for name in SPLIT_NAMES if isinstance(images := data.splits.get(name), FileImages)}
    problems += list(filter(None, map(data.of_another_size, splits.values())))[:1]
    facts = np.concatenate([np.empty(0, FACTS), *(images.known for images in splits.values())])
    counts = {name: np.bincount(images.labels.numpy(), minlength=data.num_classes) for name, images in splits.items()}
    for k, class_name in enumerate(data.class_names):
        without = [name for name in splits if counts[name][k] == 0 and len(splits[name])]
        if without:
            problems.append(f"class {class_name} has no image in {', '.join(without)}")
    if "train" in splits and len(splits["train"]):
        mean, std = data.statistics()
    else:
        mean, std = (), ()
    return {
        "root": os.fspath(data.root),
        "class_names": data.class_names,
        "class_counts": {name: counts[name].tolist() for name in splits},
        "images": {name: len(images) for name, images in splits.items()},
        "kinds": dict(Counter(kind.decode() for kind in facts["kind"]).most_common()),
        "height": _range(facts["size"][:, 0]),
        "width": _range(facts["size"][:, 1]),
        "megabytes": round(float(facts["bytes"].sum()) / 1e6, 1),
        "unreadable": dict(sorted(data.unreadable.items())),
        "duplicates_across_splits": duplicates(splits),
        "near_duplicates_across_splits": near_duplicates(splits),
        "same_image_under_two_labels": contradictions(splits),
        "duplicates_within_splits": sum(len(x) - len(set(x.digests)) for x in splits.values()),
        "problems": problems + data.notes,
        "mean": mean,
        "std": std,
        "statistics_from": data.statistics_from,
    }


def report_as_text(found: dict[str, Any]) -> str:
    """Return a report as text for the terminal."""
    counts = found["class_counts"]
    names = list(counts)
    lines = [
        f"{found['root']}: {sum(found['images'].values()):,} readable images, {found['megabytes']:,} MB, "
        f"{counted(len(found['class_names']), 'class')}",
        "splits      " + ", ".join(f"{name} {n:,}" for name, n in found["images"].items()),
        "kinds       " + ", ".join(f"{n:,} {kind}" for kind, n in found["kinds"].items()),
        "height      {min} to {max} pixels, median {median}".format(**found["height"]),
        "width       {min} to {max} pixels, median {median}".format(**found["width"]),
    ]
    for name in ("mean", "std") if found["mean"] else ():
        source = _SOURCES[found["statistics_from"]]
        lines.append(f"{name:<11} " + " ".join(in_short(value) for value in found[name]) + f" ({source})")
    lines.append(f"duplicates  {len(found['duplicates_across_splits'])} across splits, "
                 f"{found['duplicates_within_splits']} within them")  # fmt: skip
    lines += _some([f"{first} = {second}" for first, second in found["duplicates_across_splits"]])
    for title, key in (("look alike", "near_duplicates_across_splits"), ("two labels", "same_image_under_two_labels")):
        lines.append(f"{title:<11} {len(found[key])}" + (" across splits" if title == "look alike" else ""))
        lines += _some([f"{first} = {second}" for first, second in found[key]])
    lines.append(f"unreadable  {len(found['unreadable'])}")
    lines += _some([f"{path}: {reason}" for path, reason in found["unreadable"].items()])
    lines += [f"problem     {problem}" for problem in found["problems"]]
    width = max(map(len, found["class_names"]))
    lines += ["", f"{'class':<{width}}" + "".join(f"{name:>8}" for name in names)]
    for k, class_name in enumerate(found["class_names"]):
        lines.append(f"{class_name:<{width}}" + "".join(f"{counts[name][k]:>8,}" for name in names))
    return "\n".join(map(printable, lines))


def write_picture(data: ImageFolder, path: Path) -> None:
    """Write a picture of training images: each as in evaluation, then as augmented in several epochs.

    Args:
        data: The folder, with the augmentation to show; of a MultiCrop, the crops of an image follow each other.
        path: File to write.
    """
    data.build("train")
    images = data.splits["train"]
    order = _one_of_each_class_first(images.labels.numpy())[:_ROWS]
    height, width = data.img_size
    sheet = Image.new("RGB", ((_COLUMNS + 1) * (width + 2), len(order) * (height + 2)), "white")
    plain = data.pipeline.transform(False, data.mean, data.pipeline.own_ratio)
    for row, index in enumerate(order.tolist()):
        image = images.image(index)
        cells = [plain(image, 0) if plain else image, *_augmented(data, images, index)]
        for column, cell in enumerate(cells):
            if data.pipeline.own_ratio:  # of another aspect ratio
                cell = ImageOps.contain(cell, (width, height))
            elif not data.pipeline.crops:
                cell = cell.resize((width, height))
            sheet.paste(cell, (column * (width + 2), row * (height + 2)))
    with atomic_write(path) as beside:
        sheet.save(beside)


def _augmented(data: ImageFolder, images: Images, index: int) -> list[Image.Image]:
    """Return an image as training sees it in several epochs, or several crops of it."""
    pipeline, seeds = data.pipeline, stream(0, np.arange(_COLUMNS), index)
    if (crops := pipeline.crops) is None:
        transform, image = pipeline.transform(True, data.mean, pipeline.own_ratio), images.image(index)
        return [transform(image, seed) if transform else image for seed in seeds.tolist()]
    seen: list[Image.Image] = []
    for seed in seeds:
        rows = crops(crops.cut(images.pixels(index), int(seed))[None], seed[None])
        seen += [to_image((255 * crop[0]).round().byte()) for crop in crops.split(rows)]
    return seen[:_COLUMNS]


def _one_of_each_class_first(labels: np.ndarray) -> np.ndarray:
    by_class = np.argsort(labels, kind="stable")
    starts = np.searchsorted(labels[by_class], labels[by_class])
    return by_class[np.argsort(np.arange(len(labels)) - starts, kind="stable")]


def _some(entries: list[str]) -> list[str]:
    rest = [f"... and {len(entries) - _MOST} more, all of them in --json"] if len(entries) > _MOST else []
    return [" " * 12 + entry for entry in entries[:_MOST] + rest]


def _range(values: np.ndarray) -> dict[str, int]:
    if not len(values):
        return {"min": 0, "median": 0, "max": 0}
    return {"min": int(values.min()), "median": int(np.median(values)), "max": int(values.max())}
