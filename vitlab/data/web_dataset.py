"""Photos in tar shards of the WebDataset format, on disk or at any address that fsspec supports."""

import glob
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Unpack

import numpy as np

from vitlab.data.arguments import PhotoArgs
from vitlab.data.files.addresses import is_remote, opened, told
from vitlab.data.files.ranges import Ranges
from vitlab.data.files.rows import by_number
from vitlab.data.files.scan import sizes_of
from vitlab.data.files.sets import FileImages
from vitlab.data.files.tars import Member, members_of
from vitlab.data.photos import Photos, parts_among
from vitlab.data.record import RUN

_IMAGES = ("jpg", "jpeg", "png", "webp", "ppm", "bmp", "tif", "tiff", "gif", "avif", "jp2", "heic", "dcm")


class WebDataset(Photos):
    """Photos in tar shards, in which a sample is the members of one key: `a/1.jpg` with `a/1.cls` or `a/1.json`
    (Aizman et al. 2020, arXiv:2001.01858).

    An index stores where each image lies, so training shuffles over all images. Local images are read one by one,
    remote ones as byte ranges, a batch at once; none is stored on disk unless `cache_gb` says so. Parts work like the
    folders of :class:`ImageFolder`: without test shards, those of `val` are the test split.

    Args:
        train: Shards for training: a path or address, with * or {000..009} for several, or a list of them.
        val: Shards for validation.
        test: Shards for testing.
        image: Suffixes of images; if a sample has several, the first suffix counts.
        label: Member with the class: cls, or json.FIELD for a field of a JSON object.
        cache_gb: Size of the cache of remote images on this disk, in GB, for all data sets together; 0 stores none.
        **photos: Passed to :class:`Photos`.

    >>> WebDataset("no-such-shards/train-{00..01}.tar")
    Traceback (most recent call last):
        ...
    ValueError: there is no no-such-shards/train-00.tar
    """

    def __init__(
        self,
        train: str | list[str],
        val: str | list[str] | None = None,
        test: str | list[str] | None = None,
        image: list[str] | None = None,
        label: str = "cls",
        cache_gb: float = 0.0,
        **photos: Unpack[PhotoArgs],
    ) -> None:
        given = {part: x for part, x in (("train", train), ("val", val), ("test", test)) if x}
        addresses: list[str] = []
        stamps: list[int] = []
        files: list[str] = []  # PART/SHARD/KEY
        places: list[tuple[int, int, int]] = []  # shard, offset and length of each image
        self.texts: list[str] = []  # the class of each
        for part, shards in given.items():
            found = [x for address in ([shards] if isinstance(shards, str) else shards) for x in addresses_of(address)]
            members, numbers = members_of(found, label)
            for address, name, inside in zip(found, _names(found), members, strict=True):
                for key, member, text in _samples(address, inside, image or _IMAGES, label):
                    files.append(f"{part}/{name}/{key}")
                    places.append((len(addresses), member.offset, member.length))
                    self.texts.append(text)
                addresses.append(address)
            stamps += numbers
        self.tars = Ranges(addresses, files, np.array(places, dtype=np.int64).reshape(-1, 3), stamps, cache_gb)
        classes = {text for file, text in zip(files, self.texts, strict=True) if file.startswith("train/")}
        if not classes and not RUN.get():
            raise ValueError(f"`data.train` must name shards with images, got {train}")
        self.tars.expect(files[:16])
        sizes = sizes_of(self.tars, files[:16])
        super().__init__(", ".join(addresses[:1]), parts_among(given), by_number(classes), sizes, **photos)

    def list_files(self, parts: list[str]) -> FileImages:
        """Return the images of some parts, undecoded."""
        folders = {self.parts[part] for part in parts}
        chosen = [i for i, file in enumerate(self.tars.files) if file.partition("/")[0] in folders]
        return self.labeled(self.tars, [self.tars.files[i] for i in chosen], [self.texts[i] for i in chosen])


def addresses_of(pattern: str) -> list[str]:
    """Expand * and braces in an address.

    >>> addresses_of("s3://b/{train,val}-{08..10}.tar")[1:4]
    ['s3://b/train-09.tar', 's3://b/train-10.tar', 's3://b/val-08.tar']
    """
    if braces := re.search(r"\{([^{}]+)\}", pattern):
        first, dots, last = braces[1].partition("..")
        if dots and not (first.isdecimal() and last.isdecimal()):
            raise ValueError(f"{braces[0]} in {pattern} must be two numbers, as in {{000..009}}")
        if dots and int(first) > int(last):
            raise ValueError(f"{braces[0]} in {pattern} must ascend, as {{{last}..{first}}} does")
        items = [f"{i:0{len(first)}}" for i in range(int(first), int(last) + 1)] if dots else braces[1].split(",")
        return [x for i in items for x in addresses_of(pattern[: braces.start()] + i + pattern[braces.end() :])]
    if "*" not in pattern:
        if Path(pattern).is_dir():
            raise ValueError(f"{pattern} is a folder; name its tar files, as in {pattern.rstrip('/')}/*.tar")
        return [pattern]
    if not is_remote(pattern):
        found = sorted(glob.glob(pattern))
    else:
        with told(pattern):
            fs, path = opened(pattern)
            names = sorted(fs.glob(path))
        prefix = pattern.removesuffix(path)
        found = [prefix + name if prefix != pattern else fs.unstrip_protocol(name) for name in names]
    if not found:
        raise ValueError(f"there is no {pattern}")
    return found


def _names(addresses: Sequence[str]) -> list[str]:
    """Return a name for each shard, of which none is the same."""
    names = [PurePosixPath(address).stem for address in addresses]
    return names if len(set(names)) == len(names) else [f"{i:05}-{name}" for i, name in enumerate(names)]


def _samples(
    address: str, members: Sequence[Member], images: Sequence[str], label: str
) -> Iterator[tuple[str, Member, str]]:
    """Yield key, image and class of each sample of a shard."""
    keys: dict[str, dict[str, Member]] = {}
    for member in members:
        folder, slash, name = member.name.rpartition("/")
        stem, _, suffix = name.partition(".")
        of = keys.setdefault(folder + slash + stem, {})
        if of.setdefault(suffix.lower(), member) is not member:
            raise ValueError(f"{address} has {member.name} twice: keys must differ within a shard")
    for key, of in keys.items():
        image = next((of[suffix] for suffix in images if suffix in of), None)
        text = of.get(label.partition(".")[0])
        if image is None or text is None or text.text is None:
            what = "image" if image is None else f".{label.partition('.')[0]} member with its class"
            have = ", ".join(f".{suffix}" for suffix in of)
            raise ValueError(f"{address}: {key} has no {what}, only {have}; see `data.image`, `data.label`")
        if not text.text:
            raise ValueError(f"{address}: {text.name} is empty, and must hold the class of {key}")
        yield key, image, text.text
