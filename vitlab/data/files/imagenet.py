"""ImageNet as it is downloaded: its official tar files, and the classes of its validation images."""

import io
import tarfile
from pathlib import Path

import numpy as np

from vitlab.data.files.ranges import Ranges
from vitlab.data.files.tars import members_of
from vitlab.errors import named_line

TRAIN, VAL, DEVKIT = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar", "ILSVRC2012_devkit_t12"
_SOLUTION = "LOC_val_solution.csv"  # Kaggle's: name,wnid x y x y ...
_ANSWERS = ("ILSVRC2012_validation_ground_truth.txt", "meta.mat")


def tarred(root: Path) -> Ranges | None:
    """Return the images in the official tar files of a folder, named as if unpacked; None without such files.

    The names are train/WNID/IMAGE and val/WNID/IMAGE.
    """
    if not (root / TRAIN).is_file():
        return None
    classes = val_classes(root)
    addresses = [str(root / TRAIN), str(root / VAL)]
    (train, val), stamps = members_of(addresses)
    images = [(f"train/{x.name}", 0, x) for x in train]
    images += [(f"val/{class_of(Path(x.name), classes)}/{x.name}", 1, x) for x in val]
    images.sort()  # as in folders
    rows = np.array([(shard, x.offset, x.length) for _, shard, x in images], dtype=np.int64)
    return Ranges(addresses, [file for file, *_ in images], rows, stamps)


def class_of(image: Path, classes: dict[str, str]) -> str:
    """Return the class of a validation image."""
    try:
        return classes[image.stem]
    except KeyError:
        raise ValueError(f"{image} is not among the {len(classes):,} validation images of ImageNet") from None


def val_classes(root: Path) -> dict[str, str]:
    """Return the class (WNID) of each validation image, by file name without suffix.

    Raises:
        ValueError: Neither the development kit nor Kaggle's list is in the folder or up to three levels above.
    """
    for place in [root, *root.resolve().parents[:3]]:
        if (place / _SOLUTION).is_file():
            lines = (place / _SOLUTION).read_text().splitlines()[1:]
            return {name: answer.split()[0] for name, _, answer in (line.partition(",") for line in lines) if answer}
        try:
            if (place / DEVKIT).is_dir():
                return _from_devkit(*((place / DEVKIT / "data" / name).read_bytes() for name in _ANSWERS))
            if (place / f"{DEVKIT}.tar.gz").is_file():
                with tarfile.open(place / f"{DEVKIT}.tar.gz") as tar:
                    found = {Path(entry.name).name: tar.extractfile(entry) for entry in tar if entry.isreg()}
                    return _from_devkit(*(found[name].read() for name in _ANSWERS))  # type: ignore[union-attr]
        except Exception as error:  # a damaged archive or MATLAB file fails in many ways
            raise ValueError(f"{place / DEVKIT} cannot be read: {named_line(error)}") from None
    raise ValueError(
        f"the classes of the validation images are unknown: put {DEVKIT}.tar.gz or {_SOLUTION} into {root}, "
        "or sort the images into val/WNID/"
    )


def _from_devkit(truth: bytes, meta: bytes) -> dict[str, str]:
    from scipy.io import loadmat

    synsets = loadmat(io.BytesIO(meta), squeeze_me=True)["synsets"]
    name = dict(zip(synsets["ILSVRC2012_ID"].tolist(), map(str, synsets["WNID"].tolist()), strict=True))
    return {f"ILSVRC2012_val_{i:08}": name[int(number)] for i, number in enumerate(truth.split(), start=1)}
