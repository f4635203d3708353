"""Image files as they come, decoded to upright RGB or refused with a reason."""

import io
import os
import warnings
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image, ImageCms, ImageOps

from vitlab.errors import printable

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "PPM", "GIF")  # by content; the suffix says nothing
MAX_PIXELS = 50_000_000

Mode = Literal["RGB", "L"]


class ImageError(ValueError):
    """A file that cannot be read as an image.

    Args:
        path: The file.
        reason: What is wrong with it.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f"{printable(self.path)}: {self.reason}"


def decode(path: str | os.PathLike[str], mode: Mode = "RGB") -> Image.Image:
    """Return the first frame of an image file, as `decode_bytes` does; the path is what errors call it."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ImageError(os.fspath(path), error.strerror or str(error)) from None
    return decode_bytes(data, os.fspath(path), mode)


def decode_bytes(data: bytes, name: str, mode: Mode = "RGB", shrink: int | None = None) -> Image.Image:
    """Return the first frame of an encoded image: upright, opaque on white, 8 bits a channel.

    Values of more than 8 bits are scaled from the image's own range to 0..255. EXIF data that cannot be read is left
    aside; everything else that is wrong is an ImageError with ``name`` and the reason. With ``shrink`` a JPEG image may
    be decoded at 1/2, 1/4 or 1/8 of its size, no side shorter than ``shrink`` pixels.
    """
    if not data:
        raise ImageError(name, "the file is empty")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about metadata; what matters is checked below
        try:
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise ValueError(f"{image.width} x {image.height} pixels, more than {MAX_PIXELS // 10**6} million")
                if shrink:
                    image.draft(None, (shrink, shrink))
                image.load()
                return _to_mode(_upright(image), mode)
        except Image.UnidentifiedImageError:
            raise ImageError(name, f"not one of {', '.join(FORMATS)}") from None
        except Exception as error:  # decoders meet broken files with every kind of error, also IndexError or TypeError
            raise ImageError(name, str(error) or type(error).__name__) from None


def header(data: bytes) -> tuple[str, tuple[int, int]]:
    """Return format and mode, such as "JPEG CMYK", and stored height and width of a file that can be decoded."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return f"{image.format} {image.mode}", (image.height, image.width)


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # EXIF data that cannot be read says nothing about how to turn the image
        return image


def _to_mode(image: Image.Image, mode: Mode) -> Image.Image:
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        image = _to_8_bits(image)
    elif image.mode == "LAB":
        lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        image = ImageCms.applyTransform(image, ImageCms.buildTransform(lab, srgb, "LAB", "RGB")) or image
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB").convert(mode) if image.mode != mode else image.copy()


def _to_8_bits(image: Image.Image) -> Image.Image:
    values = np.asarray(image).astype(np.float64)
    finite = np.isfinite(values)
    if not finite.any():
        raise ValueError("no pixel has a finite value")
    low, high = values[finite].min(), values[finite].max()
    if low == high:  # one colour: as bright as it is in the range of 16 bits
        scaled = np.full_like(values, np.clip(high / 257, 0, 255))
    else:
        scaled = (np.nan_to_num(values, nan=low, posinf=high, neginf=low) - low) * (255 / (high - low))
    grey = Image.fromarray(np.round(scaled).astype(np.uint8))
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey.paste(255, mask=Image.fromarray(values == transparent))
    return grey
