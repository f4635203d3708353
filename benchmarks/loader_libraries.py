"""Each hand-written part of `vitlab.data` beside the libraries that could carry it, by speed and by promise.

    python benchmarks/loader_libraries.py --json benchmarks/loader-libraries.json --awkward FOLDER

The promise: order and pixels of a batch are a function of seed, epoch and image, for any number of workers. Speed is an
epoch in one process; every round runs every contender once, and the ratio is taken within a round. Contenders of a part
get the same files, read all images, and cut the same crops of the same seeds, so only the part itself differs; an image
is never read twice in a row. A library that is not installed is left out: `pip install webdataset litdata
mosaicml-streaming datasets`. FOLDER has awkward files, as `tests/data` do; without it none are decoded.

    python benchmarks/loader_libraries.py --table benchmarks/loader-libraries.json

prints the tables of `benchmarks/loader.md`.
"""

import argparse
import importlib.util
import io
import json
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler

from bench.pairs import compare, cpu_seconds, interleave
from vitlab.data.files.decode import ImageError, decode_bytes
from vitlab.data.files.ranges import Ranges
from vitlab.data.files.tars import members_of
from vitlab.data.loading.order import TrainOrder
from vitlab.data.loading.own_ratio import OwnRatio, OwnRatioCropFlip
from vitlab.data.loading.streams import AUGMENT, stream
from vitlab.data.loading.transforms import RandomCropFlip, to_tensor
from vitlab.data.pack.shards import PackedStore, read_index
from vitlab.data.pack.write import pack
from vitlab.data.packed import Packed
from vitlab.packed_batch import PackedBatch
from vitlab.runs.machine import installed_versions

ROOT = Path(__file__).parents[1]
HEIGHT, WIDTH, SHORT, SIDE, BATCH, SHARDS = 375, 500, 256, 224, 32, 4
MANY = 200_000  # images whose order is drawn
LINES = {  # files of vitlab/data that would go if a library carried the part whole
    "decoding": ["files/decode.py"],
    "cropping": ["loading/transforms.py"],
    "packing": ["pack/shards.py", "pack/write.py", "packed.py"],
    "tars": ["files/tars.py", "web_dataset.py"],
    "order": ["loading/order.py", "loading/streams.py"],
    "native sizes": ["loading/own_ratio.py"],
}
VERSIONS = ("torchvision", "timm", "webdataset", "litdata", "mosaicml-streaming", "datasets")
Read = Callable[[int], np.ndarray]


def photos(count: int) -> list[bytes]:
    """Return JPEG files of the size that is usual in ImageNet."""
    rng, files = np.random.default_rng(0), []
    for _ in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8)).resize((WIDTH, HEIGHT))
        pixels = np.asarray(coarse) + rng.normal(0, 6, (HEIGHT, WIDTH, 3))
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file := io.BytesIO(), "JPEG", quality=90)
        files.append(file.getvalue())
    return files


def epoch(read: Read, order: list[int]) -> None:
    """Read all images and cut them, as a worker of `SampleLoader` does."""
    crop, seeds = RandomCropFlip((SIDE, SIDE), 0.08, "bicubic"), stream(0, AUGMENT, 0, np.arange(len(order)))
    for i in order:
        crop.cut(read(i), int(seeds[i]))


def through(images: Iterable[tuple[int, np.ndarray]]) -> None:
    """Cut the images of a library that gives them in an order of its own."""
    crop, seeds = RandomCropFlip((SIDE, SIDE), 0.08, "bicubic"), stream(0, AUGMENT, 0, np.arange(MANY))
    for i, pixels in images:
        crop.cut(pixels, int(seeds[i]))


def decoding(files: list[bytes]) -> dict[str, Callable[[], object]]:
    """Return contenders that decode JPEG files and cut the same crops."""
    from torchvision.io import ImageReadMode, decode_image

    order = TrainOrder(len(files), 1, seed=0)
    numbers = [int(step.indices[0]) for step in order.steps()]
    buffers = [torch.frombuffer(bytearray(file), dtype=torch.uint8) for file in files]

    def tensor(i: int) -> np.ndarray:
        return decode_image(buffers[i], ImageReadMode.RGB, apply_exif_orientation=True).permute(1, 2, 0).numpy()

    return {
        "vitlab": partial(epoch, lambda i: np.asarray(decode_bytes(files[i], "")), numbers),
        "torchvision.io.decode_image": partial(epoch, tensor, numbers),
    }


def cropping(files: list[bytes]) -> dict[str, Callable[[], object]]:
    """Return contenders that cut and mirror decoded photos."""
    from torchvision.transforms import v2

    arrays = [np.asarray(decode_bytes(file, "")) for file in files]
    images = [Image.fromarray(array) for array in arrays]
    tensors = [torch.from_numpy(array.copy()).permute(2, 0, 1) for array in arrays]
    how = v2.InterpolationMode.BICUBIC
    both = v2.Compose([v2.RandomResizedCrop(SIDE, interpolation=how, antialias=True), v2.RandomHorizontalFlip()])
    return {
        "vitlab": partial(epoch, lambda i: arrays[i], list(range(len(arrays)))),
        "torchvision v2, of PIL": lambda: [v2.functional.pil_to_tensor(both(image)) for image in images],
        "torchvision v2, of tensors": lambda: [both(tensor) for tensor in tensors],
    }


def packing(files: list[bytes], folder: Path) -> dict[str, Callable[[], object]]:
    """Return contenders that read decoded photos by their numbers, in our order."""
    for i, file in enumerate(files):
        (folder / "photos" / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        (folder / "photos" / "ab"[i % 2] / f"{i:05}.jpg").write_bytes(file)
    pack(str(folder / "photos"), str(folder / "packed"), size=SHORT, num_workers=0)
    header, rows = read_index(str(folder / "packed"))
    store = PackedStore(str(folder / "packed"), header["files"], rows)
    ours = sorted(header["files"], key=lambda file: Path(file).name)
    arrays = [pixels for file in ours if (pixels := store.pixels(file)) is not None]
    numbers = [int(step.indices[0]) for step in TrainOrder(len(arrays), 1, seed=0).steps()]

    def of(name: str) -> np.ndarray:
        pixels = store.pixels(name)
        assert pixels is not None
        return pixels

    reads: dict[str, Read] = {"vitlab": lambda i: of(ours[i])}
    for name, make in (("litdata", in_litdata), ("mosaicml-streaming", in_mds), ("datasets", in_arrow)):
        if importlib.util.find_spec({"mosaicml-streaming": "streaming"}.get(name, name)):
            reads[name] = make(arrays, folder / name)
    for name, read in reads.items():
        assert all(np.array_equal(read(i), array) for i, array in enumerate(arrays[:20])), name
    return {name: partial(epoch, read, numbers) for name, read in reads.items()}


def in_litdata(arrays: list[np.ndarray], folder: Path) -> Read:
    """Write images for litdata; return how one is read by its number."""
    from litdata import StreamingDataset
    from litdata.streaming import Cache

    folder.mkdir()
    cache = Cache(str(folder), chunk_bytes=2**26)
    for i, array in enumerate(arrays):
        cache[i] = {"number": i, "pixels": array}
    cache.done()
    cache.merge()
    data = StreamingDataset(str(folder))
    return lambda i: data[i]["pixels"]


def in_mds(arrays: list[np.ndarray], folder: Path) -> Read:
    """Write images for MosaicML streaming; return how one is read by its number."""
    from streaming import MDSWriter, StreamingDataset

    with MDSWriter(out=str(folder), columns={"number": "int", "pixels": "ndarray:uint8"}) as writer:
        for i, array in enumerate(arrays):
            writer.write({"number": i, "pixels": array})
    data = StreamingDataset(local=str(folder), batch_size=1)
    return lambda i: data[i]["pixels"]


def in_arrow(arrays: list[np.ndarray], folder: Path) -> Read:
    """Write images for datasets, as bytes in Arrow; return how one is read by its number."""
    import datasets

    columns = {"pixels": [array.tobytes() for array in arrays], "size": [array.shape for array in arrays]}
    datasets.Dataset.from_dict(columns).save_to_disk(str(folder))
    data = datasets.load_from_disk(str(folder))

    def read(i: int) -> np.ndarray:
        row = data[i]
        return np.frombuffer(row["pixels"], np.uint8).reshape(row["size"])

    return read


def write_tars(files: list[bytes], folder: Path) -> list[str]:
    """Write the photos into shards."""
    paths = [str(folder / f"{k}.tar") for k in range(SHARDS)]
    for k, path in enumerate(paths):
        with tarfile.open(path, "w") as tar:
            for i in range(k, len(files), SHARDS):
                for suffix, data in (("jpg", files[i]), ("cls", b"0")):
                    (entry := tarfile.TarInfo(f"{i:05}.{suffix}")).size = len(data)
                    tar.addfile(entry, io.BytesIO(data))
    return paths


def tars(files: list[bytes], paths: list[str]) -> dict[str, Callable[[], object]]:
    """Return contenders that read photos in tar shards and decode them alike."""
    members, stamps = members_of(paths, "cls")
    found = [(x.name, (k, x.offset, x.length)) for k, inside in enumerate(members) for x in inside if x.text is None]
    names, rows = [name for name, _ in sorted(found)], np.array([row for _, row in sorted(found)])
    store = Ranges(paths, names, rows, stamps)
    numbers = [int(step.indices[0]) for step in TrainOrder(len(names), 1, seed=0).steps()]
    contenders: dict[str, Callable[[], object]] = {
        "vitlab": partial(epoch, lambda i: np.asarray(decode_bytes(store.read(names[i]), "")), numbers)
    }
    if importlib.util.find_spec("webdataset"):

        def images() -> Iterator[tuple[int, np.ndarray]]:
            for key, jpeg in of_webdataset(paths):
                yield key, np.asarray(decode_bytes(jpeg, ""))

        contenders["webdataset"] = lambda: through(images())
    return contenders


def of_webdataset(paths: list[str], seed: int = 0) -> Iterable[tuple[int, bytes]]:
    """Return the photos as webdataset gives them, shuffled by its own buffer."""
    import webdataset

    shuffled = webdataset.WebDataset(paths, shardshuffle=len(paths), seed=seed, empty_check=False).shuffle(
        1000, seed=seed
    )
    return shuffled.to_tuple("__key__", "jpg").map_tuple(int, bytes)


def orders() -> dict[str, Callable[[], object]]:
    """Return contenders that draw the batches of an epoch for the first of two processes."""
    empty: Dataset[int] = [0] * MANY  # type: ignore[assignment]
    sampler = DistributedSampler(empty, num_replicas=2, rank=0, shuffle=True, seed=0)
    ours = TrainOrder(MANY, 256, seed=0, rank=0, world=2)
    return {
        "vitlab": lambda: sum(1 for _ in ours.steps()),
        "torch's DistributedSampler": lambda: sum(1 for _ in BatchSampler(sampler, 128, drop_last=True)),
    }


def native(files: list[bytes]) -> dict[str, Callable[[], object]]:
    """Return contenders that cut photos at their own aspect ratio into batches of patches."""
    from timm.data.naflex_dataset import NaFlexMapDatasetWrapper
    from timm.data.naflex_transforms import RandomResizedCropToSequence
    from torchvision.transforms import v2

    rng = np.random.default_rng(0)
    whole = [np.asarray(decode_bytes(file, "")) for file in files]
    arrays = [x[: rng.integers(200, HEIGHT), : rng.integers(200, WIDTH)].copy() for x in whole]
    images = [(Image.fromarray(array), 0) for array in arrays]
    most = (SIDE // 16) ** 2
    crop = OwnRatioCropFlip(OwnRatio(16, (SIDE, SIDE), "bicubic"), 0.08)

    def ours() -> None:
        tokens = crop.own_ratio.tokens(np.array([array.shape[:2] for array in arrays]))
        order = TrainOrder(len(arrays), BATCH, seed=0, tokens=tokens)
        for step in order.steps():
            pairs = zip(step.indices.tolist(), step.seeds.tolist(), strict=True)
            PackedBatch.of([crop.cut(arrays[i], seed) for i, seed in pairs], patch=16)

    def made(max_seq_len: int, patch_size: Any) -> Any:
        cut = RandomResizedCropToSequence(patch_size=16, max_seq_len=max_seq_len, interpolation="bicubic")
        return v2.Compose([cut, v2.RandomHorizontalFlip(), v2.PILToTensor()])

    theirs = NaFlexMapDatasetWrapper(
        images, patch_size=16, seq_lens=(most,), max_tokens_per_batch=BATCH * most,  # type: ignore[arg-type]
        transform_factory=made, seed=0, shuffle=True,
    )  # fmt: skip
    return {"vitlab": ours, "timm's NaFlex": lambda: sum(1 for _ in theirs)}


def measured(contenders: dict[str, Callable[[], object]], rounds: int, budget: float) -> dict[str, Any]:
    """Return the speed of each contender relative to ours, by the clock and by CPU time."""
    used: dict[str, list[float]] = {name: [] for name in contenders}

    def work(name: str) -> None:
        before = cpu_seconds()
        contenders[name]()
        used[name].append(cpu_seconds() - before)

    found = compare(interleave({name: partial(work, name) for name in contenders}, rounds, budget, 1), "vitlab")
    cpu = compare({name: seconds[1:] for name, seconds in used.items()}, "vitlab")
    keys = ("ratio", "interval", "rounds")
    return {
        name: {key: row[key] for key in keys} | {f"cpu_{key}": cpu[name][key] for key in (*keys[:2], "seconds")}
        for name, row in found.items()
    }


def keeps_order(files: list[bytes], paths: list[str], folder: Path) -> dict[str, bool]:
    """Return whether the shuffled order of each library is the same with one worker and with two."""
    made: dict[str, Callable[[int], list[int]]] = {
        "vitlab": lambda workers: [i for *_, step in ours(folder, workers) for i in step.indices.tolist()],
    }
    if importlib.util.find_spec("webdataset"):
        made["webdataset"] = lambda workers: through_workers(
            of_webdataset(paths).map_tuple(int, len),  # type: ignore[attr-defined]
            workers,
        )
    if (folder / "litdata").exists():
        from litdata import StreamingDataLoader
        from litdata import StreamingDataset as LitDataset

        def lit(workers: int) -> list[int]:
            data = LitDataset(str(folder / "litdata"), shuffle=True, seed=0)
            loader = StreamingDataLoader(data, batch_size=4, num_workers=workers, collate_fn=_numbers)
            return [i for batch in loader for i in batch]

        made["litdata"] = lit
    if (folder / "mosaicml-streaming").exists():
        import streaming

        def mosaic(workers: int) -> list[int]:
            streaming.base.util.clean_stale_shared_memory()
            data = streaming.StreamingDataset(
                local=str(folder / "mosaicml-streaming"), shuffle=True, shuffle_seed=0, batch_size=4
            )
            loader = DataLoader(data, 4, num_workers=workers, collate_fn=_numbers)
            return [i for batch in loader for i in batch]

        made["mosaicml-streaming"] = mosaic
    return {name: epoch_of(1) == epoch_of(2) for name, epoch_of in made.items()}


def _numbers(rows: list[dict[str, Any]]) -> list[int]:
    return [int(row["number"]) for row in rows]


def through_workers(data: Any, workers: int) -> list[int]:
    """Return the numbers of the images in the order in which a DataLoader gives them."""
    return [int(i) for batch, _ in DataLoader(data, 4, num_workers=workers) for i in batch]


def ours(folder: Path, workers: int) -> Iterable[Any]:
    """Return the training batches of the packed photos."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {"batch_size": 4, "img_size": 32, "augment": "crop-flip", "num_workers": workers}
    data = Packed(str(folder / "packed"), **settings)
    data.setup("fit")
    return data.train_dataloader()


def keeps_pixels(files: list[bytes], folder: Path) -> dict[str, bool]:
    """Return whether random crops are the same with one worker and with two."""

    def theirs(workers: int) -> torch.Tensor:
        drawn = torch.Generator().manual_seed(0)
        return torch.cat(list(DataLoader(_Crops(files), 4, num_workers=workers, generator=drawn)))

    batches = [torch.cat([images for images, *_ in ours(folder, workers)]) for workers in (1, 2)]
    return {"vitlab": torch.equal(*batches), "torchvision v2": torch.equal(theirs(1), theirs(2))}


class _Crops(Dataset[torch.Tensor]):
    def __init__(self, files: list[bytes]) -> None:
        from torchvision.transforms import v2

        self.files, self.crop = files[:16], v2.RandomResizedCrop(32)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> torch.Tensor:
        return to_tensor(self.crop(decode_bytes(self.files[i], "")))


def decoded_alike(files: list[bytes]) -> int:
    """Return how many of our JPEG files torchvision decodes to equal pixels."""
    from torchvision.io import ImageReadMode, decode_image

    theirs = [decode_image(torch.frombuffer(bytearray(file), dtype=torch.uint8), ImageReadMode.RGB) for file in files]
    return sum(torch.equal(x, to_tensor(decode_bytes(file, ""))) for x, file in zip(theirs, files, strict=True))


def awkward(folder: Path) -> dict[str, int]:
    """Count awkward files that vitlab decodes, what torchvision does of these, and what within 3 gray levels."""
    from torchvision.io import ImageReadMode, decode_image

    found = {"files": 0, "torchvision decodes": 0, "of these within 3 gray levels": 0}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        data = file.read_bytes()
        try:
            ours = np.asarray(decode_bytes(data, "")).astype(int)
        except ImageError:
            continue
        found["files"] += 1
        try:
            buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            theirs = decode_image(buffer, ImageReadMode.RGB, apply_exif_orientation=True).permute(1, 2, 0).numpy()
        except (RuntimeError, ValueError):
            continue
        found["torchvision decodes"] += 1
        same = theirs.shape == ours.shape and abs(ours - theirs).mean() <= 3
        found["of these within 3 gray levels"] += int(same)
    return found


def lines() -> dict[str, int]:
    """Return the number of lines of each part."""
    home = ROOT / "vitlab" / "data"
    return {part: sum(len((home / file).read_text().splitlines()) for file in files) for part, files in LINES.items()}


def measure(count: int, rounds: int, budget: float, folder: Path, awkward_files: Path | None) -> dict[str, Any]:
    """Return all that the page's tables say."""
    torch.set_num_threads(1)
    files, part = photos(count), budget / 6
    paths = write_tars(files, folder)
    made = {
        "decoding": lambda: decoding(files), "cropping": lambda: cropping(files),
        "packing": lambda: packing(files, folder), "tars": lambda: tars(files, paths), "order": orders,
        "native sizes": lambda: native(files),
    }  # fmt: skip
    speed = {}
    for name, make in made.items():
        speed[name] = measured(make(), rounds, part)
        print(name, {of: round(row["ratio"], 2) for of, row in speed[name].items()}, file=sys.stderr, flush=True)
    return {
        "images": count, "lines": lines(), "speed": speed, "many": MANY, "order": keeps_order(files, paths, folder),
        "pixels": keeps_pixels(files, folder), "decoded alike": decoded_alike(files),
        "awkward": awkward(awkward_files) if awkward_files else {},
        "versions": installed_versions(VERSIONS),
    }  # fmt: skip


def tables(found: dict[str, Any]) -> str:
    """Return what the page says in numbers."""
    rows = ["| part | lines | library | speed | 95 % | per CPU second |", "| --- | --- | --- | --- | --- | --- |"]
    for part, contenders in found["speed"].items():
        for name, row in list(contenders.items())[1:]:
            low, high = row["interval"]
            rows.append(
                f"| {part} | {found['lines'][part]} | {name} | {row['ratio']:.2f} | {low:.2f} to {high:.2f} | "
                f"{row['cpu_ratio']:.2f} |"
            )
    for what, title in (("order", "order"), ("pixels", "pixels of random crops")):
        rows += ["", f"| {title} | the same with one worker and with two |", "| --- | --- |"]
        rows += [f"| {name} | {'yes' if same else 'no'} |" for name, same in found[what].items()]
    per = {
        part: 1e6 * found["speed"][part]["vitlab"]["cpu_seconds"] / n
        for part, n in (("order", found["many"]), ("decoding", found["images"]))
    }
    words = [f"Of {found['images']} JPEG files, torchvision decodes {found['decoded alike']} to equal pixels."]
    if found["awkward"]:
        files, decoded, alike = found["awkward"].values()
        words.append(f"Of {files} awkward files that vitlab decodes, it decodes {decoded}, {alike} of them alike.")
    words.append(f"The order costs vitlab {per['order']:.2g} us an image, decoding {per['decoding']:,.0f} us.")
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return "\n".join([*rows, "", " ".join(words), "", versions])


def main(argv: list[str]) -> int:
    """Measure, or print the table of a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--images", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budget", type=float, default=240.0, help="seconds for all parts")
    parser.add_argument("--awkward", type=Path, help="folder of awkward files to decode")
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--table", type=Path, help="file whose table is printed; nothing is measured")
    options = parser.parse_args(argv)
    if options.table:
        print(tables(json.loads(options.table.read_text())))
        return 0
    folder = Path(tempfile.mkdtemp())
    try:
        found = measure(options.images, options.rounds, options.budget, folder, options.awkward)
    finally:
        shutil.rmtree(folder)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(tables(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
