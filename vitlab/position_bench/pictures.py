"""What posbench trains on: photos of CIFAR-10 or of a folder, and generated images whose answers are known."""

import hashlib
import pickle
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlab.errors import UsageError, one_line, preview
from vitlab.position_bench.protocol import classes_of_photos
from vitlab.runs.atomic import atomic_write
from vitlab.runs.directory import RunDir

T = TypeVar("T")
CELLS = 8  # tokens a side
PIXELS = 4  # of a token
SIDE = CELLS * PIXELS  # of an image, in pixels
OFFSETS = (-3, -2, -1, 1, 2, 3)
QUESTIONS = {"row": CELLS, "column": CELLS, "offset": len(OFFSETS), "far": len(OFFSETS)}  # outputs of each
NOISE = 0.2  # of the pixels; marks differ from it by 2
_MEAN = [0.4914, 0.4822, 0.4465]  # of CIFAR-10, one spread for all channels
_OWN_PHOTOS = "this protocol is on CIFAR-10; for photos of yours copy `imagenet100`, and name the copy to --protocol"
SPLITS = {  # of each training, the names of its images for training, test and validation
    "photos": ("train", "test", "val"),
    "few": ("few", "test", "val"),
    "glyphs": ("glyphs", "glyphs_test", "glyphs_val"),
}
GLYPH_SEEDS = {"glyphs": 0, "glyphs_test": 1, "glyphs_val": 2}
A_CLASS = 2000  # training images of each class: those whose file names come first


class Split(NamedTuple):
    """Images and their labels.

    Args:
        images: ``(N, C, H, W)``, of mean about 0 and spread about 1, or the bytes of photos, for
            :func:`as_floats`.
        labels: ``(N,)`` classes, or ``(N, 4)`` answers to :data:`QUESTIONS`.
    """

    images: Tensor
    labels: Tensor

    def part(self, start: int, stop: int) -> "Split":
        """Return the images from ``start`` to ``stop``, and their labels."""
        return Split(self.images[start:stop], self.labels[start:stop])

    def digest(self) -> str:
        """Return the SHA-256 of images and labels."""
        found = hashlib.sha256()
        for values in self:
            found.update(np.ascontiguousarray(values.numpy()).tobytes())
        return found.hexdigest()


class Splits(NamedTuple):
    """The images of a training."""

    train: Split
    test: Split
    val: Split


class Pictures:
    """The images of a protocol, made or read when they are first asked for.

    Args:
        protocol: What is registered.
        data: Folder of the photos.
        keep: Folder to keep the decoded photos of a folder in.
    """

    def __init__(self, protocol: Mapping[str, Any], data: Path | None, keep: Path) -> None:
        self.protocol, self.data, self.keep = protocol, data, keep
        self._splits: dict[str, Split] = {}

    def of(self, training: str) -> Splits:
        """Return the images of a training.

        Raises:
            UsageError: The images are not those of the protocol.
        """
        if not self._splits.keys() >= {*SPLITS[training]}:
            found = self._glyphs() if training == "glyphs" else self._photos()
            self._check_digests(found)
            self._splits |= found
        return Splits(*(self._splits[name] for name in SPLITS[training]))

    def _glyphs(self) -> dict[str, Split]:
        counts = self.protocol["trainings"]["glyphs"]["images"], self.protocol["test"]["glyphs"]
        images = zip(GLYPH_SEEDS.items(), (*counts, self.protocol["validation"]), strict=True)
        return {name: glyphs(count, seed) for (name, seed), count in images}

    def _photos(self) -> dict[str, Split]:
        of_folder = self.protocol.get("photos", {}).get("from") == "folder"
        if self.data is None:
            what = "a folder with train/CLASS/* and val/CLASS/*" if of_folder else "CIFAR-10"
            raise UsageError(f"posbench trains on {what}: give its folder, `--data DIR`")
        trainings = self.protocol["trainings"]
        sizes = {"train": trainings["photos"]["images"], "few": trainings["few"]["images"]}
        sizes |= {"test": self.protocol["test"]["photos"], "val": self.protocol["validation"]}
        if not of_folder:
            return photos(self.data, sizes)
        side, classes = self.protocol["network"]["img_size"], classes_of_photos(self.protocol)
        return folder_photos(self.data, sizes, side, self.keep, classes)

    def _check_digests(self, splits: Mapping[str, Split]) -> None:
        """Refuse other images than the protocol's; where it has no digests, than those of the cells that are kept."""
        place, digests = RunDir(self.keep), self.protocol["digests"]
        kept, new = place.read("images.json"), {}
        for name, split in splits.items():
            digest = split.digest()
            if known := digests.get(name):
                if digest != known:
                    way_out = "" if name in GLYPH_SEEDS else f"; `--data {self.data}` must be the folder of its photos"
                    raise _other_images(name, "the protocol", way_out)
            elif name not in kept:
                new[name] = digest
            elif digest != kept[name]:
                way_out = "; give those, or another `--folder`"
                raise _other_images(name, f"the cells in {self.keep}, by images.json there", way_out)
        if new:
            self.keep.mkdir(parents=True, exist_ok=True)
            place.write("images.json", kept | new)


def _other_images(name: str, of: str, way_out: str) -> UsageError:
    return UsageError(f"the images of {name!r} are not those of {of}: verdicts would not compare{way_out}")


def glyphs(count: int, seed: int) -> Split:
    """Return generated images: one channel, 32 x 32, marks that fill a token each, on noise.

    A bright mark A and a dark mark B lie at two places. The questions are the row and the column of A, and how many
    columns B is to the right of A. Two further marks, neither bright nor dark, lie in the two leftmost and in the two
    rightmost columns, each with its pattern. The last question is how many rows the right one is below the left one.

    Args:
        count: Number of images.
        seed: What all of them follow from.

    Example:
        >>> glyphs(5, seed=0).images.shape
        torch.Size([5, 1, 32, 32])
    """
    patterns = np.random.default_rng(2718).permuted(np.repeat([[-1.0, 1.0] * 8], 8, axis=0), axis=1).reshape(8, 4, 4)
    rng = np.random.default_rng([43, seed])
    images = rng.normal(0, NOISE, (count, CELLS, PIXELS, CELLS, PIXELS))
    labels = np.zeros((count, len(QUESTIONS)), dtype=np.int64)
    for image, label in zip(images, labels, strict=True):
        step, drop = rng.integers(len(OFFSETS), size=2)
        dx, dy = OFFSETS[step], OFFSETS[drop]
        (row, below), column = rng.integers(CELLS, size=2), _start(rng, dx)
        taken = {(row, column), (below, column + dx)}
        while True:  # until the marks at the borders lie beside those
            left = _start(rng, dy), rng.integers(2)
            right = left[0] + dy, CELLS - 1 - rng.integers(2)
            if not {left, right} & taken:
                break
        image[row, :, column] += 2 + patterns[rng.integers(len(patterns))]
        image[below, :, column + dx] += -2 + patterns[rng.integers(len(patterns))]
        for (r, c), pattern in zip((left, right), patterns[:2], strict=True):
            image[r, :, c] += 2 * pattern
        label[:] = row, column, step, drop
    return Split(torch.from_numpy(images.reshape(count, 1, SIDE, SIDE).astype(np.float32)), torch.from_numpy(labels))


def _start(rng: np.random.Generator, step: int) -> int:
    """Return a cell of a side from which a step leads to another."""
    return int(rng.integers(max(0, -step), CELLS - max(0, step)))


def photos(root: Path, sizes: Mapping[str, int]) -> dict[str, Split]:
    """Return ``train``, ``val``, ``test`` and ``few``: CIFAR-10, Krizhevsky 2009, classes in turn.

    Args:
        root: Folder that holds ``cifar-10-batches-py``, as torchvision leaves it, or ``train/CLASS/*.png`` and
            ``test/CLASS/*.png`` with the original file names.
        sizes: Number of images of each split.

    Raises:
        UsageError: The folder holds neither, or damaged files.
    """
    if (root / "train").is_dir() and (root / "test").is_dir():
        train, test = (_of_folder(root / name) for name in ("train", "test"))
    elif (folder := root / "cifar-10-batches-py").is_dir():
        train, test = (_of_batches(folder, files) for files in ("data_batch_[1-5]", "test_batch"))
    else:
        raise UsageError(
            f"{root} holds no CIFAR-10: neither `cifar-10-batches-py` nor `train` and `test`; "
            "`python -c \"import torchvision; torchvision.datasets.CIFAR10('DIR', download=True)\"`, then `--data DIR`"
        )
    return _divided(train, test, sizes)


def _split_of(images: NDArray[np.uint8], labels: Sequence[int]) -> Split:
    """Return ``(N, H, W, 3)`` bytes and their classes as images of a training."""
    return Split(as_floats(torch.from_numpy(images).permute(0, 3, 1, 2)).contiguous(), torch.tensor(labels))


def as_floats(images: Tensor) -> Tensor:
    """Return images of mean about 0 and spread about 1; bytes of photos are converted as those of CIFAR-10 are."""
    if images.dtype != torch.uint8:
        return images
    return (images / 255 - torch.tensor(_MEAN, device=images.device).view(3, 1, 1)) / 0.25


def folder_photos(root: Path, sizes: Mapping[str, int], side: int, keep: Path, classes: int) -> dict[str, Split]:
    """Return ``train``, ``val``, ``test`` and ``few`` of a folder of photos, as bytes that stay on disk.

    The shorter side is resized to 8/7 of ``side`` (bicubic), and the middle is cut out. Classes take turns, so that
    each split has about equally many images of each.

    Args:
        root: Folder that holds ``train/CLASS/*`` and ``val/CLASS/*``; the test images are those of ``val``.
        sizes: Number of images of each split.
        side: Side of the images, in pixels.
        keep: Folder to keep the decoded images in.
        classes: Number of classes.

    Raises:
        UsageError: ``train`` or ``val`` is missing, or holds too few images, another number of classes, or a file that
            is no image.
    """
    train = _decoded_folder(root / "train", sizes["val"] + sizes["train"], side, keep / f"train-{side}", classes)
    test = _decoded_folder(root / "val", sizes["test"], side, keep / f"val-{side}", classes)
    return _divided(train, test, sizes)


def _divided(train: Split, test: Split, sizes: Mapping[str, int]) -> dict[str, Split]:
    """Return the first images for validation, then those of training, of which the first are the few."""
    val, few = sizes["val"], sizes["val"] + sizes["few"]
    return {
        "train": train.part(val, val + sizes["train"]),
        "few": train.part(val, few),
        "val": train.part(0, val),
        "test": test.part(0, sizes["test"]),
    }


def _decoded_folder(folder: Path, count: int, side: int, keep: Path, classes: int) -> Split:
    """Return the first images of each class in turn; kept as one array that is mapped, not read."""
    if not folder.is_dir():
        raise UsageError(f"{folder.parent} must hold train/CLASS/* and val/CLASS/*: there is no {folder.name}")
    by_class = [_shown(path) for path in _shown(folder) if path.is_dir()]
    if len(by_class) != classes:
        raise UsageError(f"{folder} holds {len(by_class)} classes, and the protocol has {classes}: `photos.classes`")
    chosen = _in_turn(by_class)[:count]
    if len(chosen) < count:
        raise UsageError(f"{folder} holds {len(chosen)} images, and the protocol takes {count}")
    names = hashlib.sha256("\n".join(str(path) for path, _ in chosen).encode()).hexdigest()[:12]
    path = keep.with_name(f"{keep.name}-{names}.npy")
    if not path.is_file():
        with atomic_write(path) as beside:
            images = np.lib.format.open_memmap(beside, "w+", np.uint8, (count, 3, side, side))
            for i, (file, _) in enumerate(chosen):
                images[i] = np.asarray(_middle(_image(file), side)).transpose(2, 0, 1)
            images.flush()
    mapped = np.load(path, mmap_mode="c")  # private to this process: torch wants to be able to write
    return Split(torch.from_numpy(mapped), torch.tensor([label for _, label in chosen]))


def _in_turn(by_class: Sequence[Sequence[T]]) -> list[tuple[T, int]]:
    """Return the members of classes with the number of their class: the first of each, then the second of each.

    >>> _in_turn(["ab", "cde"])
    [('a', 0), ('c', 1), ('b', 0), ('d', 1), ('e', 1)]
    """
    turns = zip_longest(*[[(each, k) for each in members] for k, members in enumerate(by_class)])
    return [each for turn in turns for each in turn if each is not None]


def _image(file: Path) -> Any:
    """Return a photo in RGB."""
    from PIL import Image

    try:
        with Image.open(file) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:  # of a file that is no image, or cut off
        raise UsageError(f"{file} cannot be read as an image: {one_line(error)}; mend or remove it") from None


def _shown(folder: Path) -> list[Path]:
    """Return what a folder holds, in order, without hidden files such as ``.DS_Store``."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _middle(image: Any, side: int) -> Any:
    """Return the middle of an image whose shorter side is resized to 8/7 of ``side``."""
    from PIL import Image

    scale = round(side * 8 / 7) / min(image.size)
    width, height = (max(side, round(length * scale)) for length in image.size)
    left, top = (width - side) // 2, (height - side) // 2
    resized = image.resize((width, height), Image.Resampling.BICUBIC)
    return resized.crop((left, top, left + side, top + side))


def _of_folder(folder: Path) -> Split:
    """Return the photos of a split: of each class the first by file name, classes in turn."""
    by_class = [sorted(path.glob("*.png"))[:A_CLASS] for path in _shown(folder) if path.is_dir()]
    counts = [len(files) for files in by_class] or [0]
    if not 0 < min(counts) == max(counts):
        raise UsageError(f"{folder} must hold as many CLASS/*.png of each class, got {preview(counts)}: {_OWN_PHOTOS}")
    images, chosen = [], _in_turn(by_class)
    for file, _ in chosen:
        images.append(np.asarray(_image(file)))
        if images[-1].shape[:2] != (SIDE, SIDE):
            height, width = images[-1].shape[:2]
            raise UsageError(f"{file} must have {SIDE} x {SIDE} pixels, got {width} x {height}: {_OWN_PHOTOS}")
    return _split_of(np.stack(images), [label for _, label in chosen])


def _of_batches(folder: Path, files: str) -> Split:
    """Return the photos of published files: of each class the first by file name, classes in turn."""
    from torchvision.datasets import CIFAR10

    try:
        CIFAR10(folder.parent)  # checks the MD5 of the published files, which are pickles, before any is read
    except RuntimeError:
        raise UsageError(f"{folder} lacks files of CIFAR-10 or holds damaged ones: download it again") from None
    images, labels, names = [], [], []
    for path in sorted(folder.glob(files)):
        batch = pickle.loads(path.read_bytes(), encoding="bytes")
        images.append(batch[b"data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        labels += batch[b"labels"]
        names += [each.decode() for each in batch[b"filenames"]]
    every = np.concatenate(images)
    order = sorted(range(len(names)), key=lambda i: names[i])
    chosen = [i for i, _ in _in_turn([[i for i in order if labels[i] == k][:A_CLASS] for k in range(10)])]
    return _split_of(every[chosen], [labels[i] for i in chosen])
