"""How many planted near duplicates are found among generated photos, and how many pairs are none.

    python benchmarks/near_duplicates.py 100000 500

Of N photos half are for training and half for testing; copies of the first are added to the latter: encoded anew at a
quality of 40 to 80, at .6 of their size, enlarged as WebP, brighter, and with a margin of 2 pixels cut off. Hash and
search are those of `vitlab data` and `vitlab fit`.
"""

import io
import sys
import time
from collections import Counter

import numpy as np
from PIL import Image

from vitlab.data.files.decode import Decoding
from vitlab.data.files.scan import inspect_image
from vitlab.data.files.twins import near

SIZE = 128, 96


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
    "encoded anew": lambda image, rng: encoded(image, int(rng.integers(40, 80))),
    "smaller": lambda image, rng: encoded(image.resize((77, 58), Image.Resampling.LANCZOS), 85),
    "larger": lambda image, rng: encoded(image.resize((200, 150), Image.Resampling.BICUBIC), 70, "WEBP"),
    "brighter": lambda image, rng: encoded(image.point(lambda value: min(255, int(1.1 * value + 5))), 80),
    "cropped": lambda image, rng: encoded(image.crop((2, 2, SIZE[0] - 2, SIZE[1] - 2)), 85),
}


def main(n: int, planted: int) -> None:
    """Print the share found of each kind of copy, false pairs, and times."""
    rng, how, kinds = np.random.default_rng(0), Decoding(), list(COPIES)
    looks, copies, seconds = [], [], 0.0
    for i in range(n):
        image = generated(rng)
        file = encoded(image, 92)
        start = time.process_time()
        looks.append(inspect_image(file, how)["look"])
        seconds += time.process_time() - start
        if i < planted:
            copies.append(inspect_image(COPIES[kinds[i % len(kinds)]](image, rng), how)["look"])
    train, test = np.array(looks[: n // 2]), np.array([*looks[n // 2 :], *copies])
    start = time.process_time()
    pairs = near(train, test)
    search = time.process_time() - start
    right = {i for i, j in pairs if i == j - (n - n // 2)}
    found, of = Counter(kinds[i % len(kinds)] for i in right), Counter(kinds[i % len(kinds)] for i in range(planted))
    for kind in kinds:
        print(f"{kind:<14} {found[kind]} of {of[kind]}")
    print(f"false pairs    {len(pairs) - len(right)}")
    print(f"CPU time       {1e3 * seconds / n:.2f} ms a photo to decode and hash, {search:.1f} s to search")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
