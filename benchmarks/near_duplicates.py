"""How many planted near duplicates `vitlab data` finds among generated photos, and how many of its pairs are none.

    python benchmarks/near_duplicates.py 100000 500 /tmp/planted

Of N photos half are for training and half for testing. Copies of the first training photos are added to the latter:
encoded anew at a quality of 40 to 80, at .6 of their size, enlarged as WebP, and brighter; and, counted apart, a
quarter as many with a margin of 2 pixels cut off. All are files in the folder, in four classes, with names that say
what they are; the command reads them as a user's.
"""

import io
import json
import resource
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image

SIZE = 128, 96
CLASSES = 4


def generated(rng: np.random.Generator) -> Image.Image:
    """Return noise of five scales, whose spectrum falls as that of photos."""
    total = np.zeros((SIZE[1], SIZE[0], 3))
    for side in (3, 6, 12, 24, 48):
        coarse = Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8))
        total += np.asarray(coarse.resize(SIZE, Image.Resampling.BICUBIC), dtype=float) / side
    total = 255 * (total - total.min()) / (total.max() - total.min())
    return Image.fromarray(total.astype(np.uint8))


def encoded(image: Image.Image, quality: int, kind: str = "JPEG") -> bytes:
    """Return an image as a file."""
    file = io.BytesIO()
    image.save(file, kind, quality=quality)
    return file.getvalue()


COPIES = {
    "encoded-anew": lambda image, rng: encoded(image, int(rng.integers(40, 80))),
    "smaller": lambda image, rng: encoded(image.resize((77, 58), Image.Resampling.LANCZOS), 85),
    "larger": lambda image, rng: encoded(image.resize((200, 150), Image.Resampling.BICUBIC), 70, "WEBP"),
    "brighter": lambda image, rng: encoded(image.point(lambda value: min(255, int(1.1 * value + 5))), 80),
    "cropped": lambda image, rng: encoded(image.crop((2, 2, SIZE[0] - 2, SIZE[1] - 2)), 85),
}


def write(n: int, planted: int, folder: Path) -> Counter[str]:
    """Write the files; return the number of copies of each kind."""
    rng, kinds, of = np.random.default_rng(0), list(COPIES), Counter[str]()
    for part in ("train", "test"):
        for k in range(CLASSES):
            (folder / part / f"c{k}").mkdir(parents=True)
    for i in range(n):
        image, place = generated(rng), f"c{i % CLASSES}"
        part = "train" if i < n // 2 else "test"
        (folder / part / place / f"{i:06}.jpg").write_bytes(encoded(image, 92))
        if i < planted + planted // 4:
            kind = kinds[i % 4] if i < planted else "cropped"
            of[kind] += 1
            (folder / "test" / place / f"{kind}-{i:06}").write_bytes(COPIES[kind](image, rng))
    return of


def main(n: int, planted: int, folder: Path) -> None:
    """Print the share found of each kind of copy, false pairs, and CPU time."""
    of = write(n, planted, folder)
    report, before = folder.with_suffix(".json"), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "vitlab", "data", str(folder), f"--json={report}"]
    subprocess.run([*command, f"--output={folder.with_suffix('.png')}"], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found: Counter[str] = Counter()
    false = 0
    for pair in json.loads(report.read_text())["near_duplicates_across_splits"]:
        first, second = sorted((Path(name).stem for name in pair), key=len)  # the copy has the longer name
        kind, _, number = second.rpartition("-")
        found[kind] += number == first
        false += number != first
    for kind in COPIES:
        print(f"{kind:<14} {found[kind]} of {of[kind]}")
    right = sum(found[kind] for kind in COPIES if kind != "cropped")
    print(f"without crops  {right} of {planted}, {100 * right / planted:.1f} %")
    print(f"false pairs    {false}, {100 * false / max(1, found.total() + false):.1f} % of the pairs")
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"CPU time       {seconds:.0f} s of the command, {1e3 * seconds / n:.2f} ms a photo")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
