"""Decode image files to upright RGB or gray, or refuse them with a reason."""

import contextlib
import io
import math
import os
import re
import typing
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import ExifTags, Image, ImageCms, ImageOps, TiffImagePlugin, features

from vitlab.data.files.array_images import loses_channels
from vitlab.data.files.dicom import dicom_header, is_dicom, read_dicom
from vitlab.errors import one_line, printable
from vitlab.ranges import check_ranges, check_word

try:
    import pillow_heif
except ImportError:
    _HEIF = []
else:
    pillow_heif.register_heif_opener()
    _HEIF = ["HEIF"]

Mode = Literal["RGB", "L"]
ColorProfile = Literal["srgb", "ignore"]
FORMATS = (  # recognized by content, not by suffix
    *("JPEG", "PNG", "WEBP", "BMP", "TIFF", "PPM", "GIF"),
    *(name for name, codec in (("AVIF", "avif"), ("JPEG2000", "jpg_2000")) if features.check(codec)),
    *_HEIF,
)
_SAME = 3  # largest difference in gray levels by which a profile counts as sRGB
_DEEP = re.compile(r"(RGB[AX]?|LA);16([BLN])")  # of which Pillow keeps the higher byte; of CMYK, it is enough


@dataclass(frozen=True)
class Decoding:
    """How to decode an image file.

    Args:
        mode: RGB, or L for gray.
        value_range: Values mapped to 0 and 255 in files with more than 8 bits; default: the range of each file.
        max_pixels: Largest number of pixels of an image.
        color_profile: srgb converts images of 8 bits with an embedded ICC profile to sRGB; ignore takes their values
            as they are.

    >>> Decoding("L", value_range=(0, 4095)).value_range
    (0, 4095)
    """

    mode: Mode = "RGB"
    value_range: Sequence[float] | None = None
    max_pixels: int = 50_000_000
    color_profile: ColorProfile = "srgb"

    def __post_init__(self) -> None:
        check_word("data.color_profile", self.color_profile, typing.get_args(ColorProfile))
        check_ranges("data", {"max_pixels": self.max_pixels})
        limits = self.value_range
        if limits is not None and not (len(limits) == 2 and limits[0] < limits[1]):
            raise ValueError(f"`data.value_range` must be [low, high] with low < high, got {list(limits)}")


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


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn an OSError inside a ``with`` block into an ImageError of the file that is read there."""
    try:
        yield
    except OSError as error:
        raise ImageError(path, error.strerror or str(error)) from None


def decode(path: str | os.PathLike[str], how: Decoding = Decoding()) -> Image.Image:
    """Return the first frame of an image file, as `decode_bytes` does."""
    with reading(os.fspath(path)):
        data = Path(path).read_bytes()
    return decode_bytes(data, os.fspath(path), how)


def decode_opened(image: Image.Image, how: Decoding = Decoding()) -> Image.Image:
    """Return an image that Pillow has opened as `decode` returns its file; a decoded one stays as it is.

    Of a color image of 16 bits, Pillow has kept only the higher byte.

    >>> decode_opened(Image.new("LA", (1, 1))).getpixel((0, 0))
    (255, 255, 255)
    """
    if not isinstance(image, Image.Image):
        what = f"got a {type(image).__name__}"
        raise ValueError(f"a transform takes an image of Pillow, as PIL.Image.open(FILE) gives it, {what}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about metadata
        return _to_mode(_upright(image), how)


def decode_bytes(data: bytes, name: str, how: Decoding = Decoding(), shrink: int | None = None) -> Image.Image:
    """Return the first frame of an encoded image: upright, opaque on white, 8 bits per channel.

    Values of more than 8 bits are scaled to 0..255, from the given range or that of the image (of a DICOM file, its
    window); others are converted to sRGB, unless profiles are ignored. Broken EXIF data and profiles are ignored; any
    other fault raises an ImageError with ``name`` and the reason. With ``shrink``, a JPEG image may be decoded at 1/2,
    1/4 or 1/8 of its size, with no side shorter than ``shrink`` pixels.

    >>> decode_bytes(b"P6 2 1 255 " + bytes(6), "black.ppm").size
    (2, 1)
    """
    if not data:
        raise ImageError(name, "the file is empty")
    with warnings.catch_warnings(), _without_limit():
        warnings.simplefilter("ignore")  # about metadata
        try:
            return _of_dicom(data, how) if is_dicom(data) else _of_pillow(data, how, shrink)
        except Image.UnidentifiedImageError:
            raise ImageError(name, f"not one of {', '.join((*FORMATS, 'DICOM'))}") from None
        except Exception as error:  # decoders can raise anything for a broken file
            raise ImageError(name, one_line(error)) from None


@contextlib.contextmanager
def _without_limit() -> Iterator[None]:
    """Lift Pillow's limit of pixels, in whose place `max_pixels` is compared before anything is decoded."""
    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = limit


def _check_size(width: int, height: int, how: Decoding) -> None:
    if width * height > how.max_pixels:
        most = f"`data.max_pixels` allows {how.max_pixels / 10**6:g} million"
        raise ValueError(f"{width} x {height} pixels, {most}")


def _of_pillow(data: bytes, how: Decoding, shrink: int | None) -> Image.Image:
    """Return an image that Pillow reads, with what Pillow leaves out of 16 bits."""
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        _check_size(image.width, image.height, how)
        if loses_channels(image):
            raise ValueError("a TIFF file of several channels, which --data=Table reads as an array")
        if _is_deep_odd_tiff(image):
            raise ValueError("a 16-bit TIFF file of separate color planes or inverted gray, which is not read")
        if (values := _wide_ppm(image, data)) is not None:
            return _to_mode(Image.fromarray(_scaled(values, how.value_range)), how)
        if shrink:
            image.draft(None, (shrink, shrink))
        lower = _lower_bytes(image, data)
        image.load()
        if lower is not None:
            _scale_16_bits(image, lower, how.value_range)
            image.info.pop("icc_profile", None)  # the scaled values are no colors of the profile
        return _to_mode(_upright(image), how)


def _of_dicom(data: bytes, how: Decoding) -> Image.Image:
    """Return a DICOM image: numbers scaled from the given range, or the file's window, or their own range."""
    height, width = dicom_header(data)[1]
    _check_size(width, height, how)
    read = read_dicom(data)
    if read.values.ndim == 3:
        return Image.fromarray(read.values).convert(how.mode)
    eight = _scaled(read.values, how.value_range or read.window)
    return Image.fromarray(255 - eight if read.inverted else eight).convert(how.mode)


def draft_scale(size: tuple[int, int], shrink: int) -> int:
    """Return the factor by which `decode_bytes` shrinks a JPEG image of this size.

    >>> draft_scale((1000, 750), 224), draft_scale((300, 400), 224)
    (2, 1)
    """
    return next(scale for scale in (8, 4, 2, 1) if min(size) // shrink >= scale or scale == 1)


def image_header(data: bytes) -> tuple[str, tuple[int, int]]:
    """Return format and mode, such as "JPEG CMYK", and upright height and width of a file that can be decoded.

    >>> image_header(b"P6 2 1 255 " + bytes(6))
    ('PPM RGB', (1, 2))
    """
    with warnings.catch_warnings(), _without_limit():
        warnings.simplefilter("ignore")
        if is_dicom(data):
            return dicom_header(data)
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            size = (image.height, image.width)
            if isinstance(image, TiffImagePlugin.TiffImageFile):  # Pillow may have turned its size already
                size = (image.tag_v2[ExifTags.Base.ImageLength], image.tag_v2[ExifTags.Base.ImageWidth])
            with contextlib.suppress(Exception):  # as in `_upright`
                size = size[::-1] if image.getexif().get(ExifTags.Base.Orientation, 1) >= 5 else size
            return f"{image.format} {image.mode}", size


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # broken EXIF data has no orientation
        return image


def _is_deep_odd_tiff(image: Image.Image) -> bool:
    """Tell 16-bit TIFF files whose values Pillow decodes wrongly: colors in separate planes, gray with white as 0."""
    if not isinstance(image, TiffImagePlugin.TiffImageFile):
        return False
    tags = image.tag_v2
    bits = tags.get(ExifTags.Base.BitsPerSample, (1,))
    planes = len(bits) > 1 and tags.get(ExifTags.Base.PlanarConfiguration) == 2
    return max(bits) == 16 and (planes or tags.get(ExifTags.Base.PhotometricInterpretation) == 0)


def _lower_bytes(image: Image.Image, data: bytes) -> Image.Image | None:
    """Return the lower bytes of a 16-bit color image, of which Pillow decodes only the higher ones."""
    tiles = getattr(image, "tile", [])
    args = tiles[0].args if tiles else None
    raw = args if isinstance(args, str) else args[0] if args else ""
    found = _DEEP.fullmatch(str(raw))
    if found is None:
        return None
    gray = found[1] == "LA"  # its four bytes, of which the second is wanted, are read as four channels
    other = "RGBA" if gray else f"{found[1]};16{'L' if found[2] == 'B' else 'B'}"  # there the lower byte is the higher
    with Image.open(io.BytesIO(data), formats=FORMATS) as lower:
        lower.tile = [  # those at an edge have strides of their own
            tile._replace(args=other if isinstance(tile.args, str) else (other, *tile.args[1:])) for tile in tiles
        ]
        return lower.getchannel("G").convert("RGB") if gray else lower.copy()


def _wide_ppm(image: Image.Image, data: bytes) -> np.ndarray | None:
    """Return the values of a PPM or PGM file of over 8 bits, which Pillow would scale by the largest possible one."""
    tile = image.tile[0] if image.format == "PPM" else None  # type: ignore[attr-defined]
    if tile is None or not isinstance(tile.args[-1], int) or tile.codec_name == "raw" or tile.args[-1] < 256:
        return None
    most, shape = tile.args[-1], (image.height, image.width, 3)[: 3 if image.mode == "RGB" else 2]
    if tile.codec_name == "ppm":
        values = np.frombuffer(data, ">u2", math.prod(shape), tile.offset)
    else:
        words = re.sub(rb"#[^\r\n]*", b"", data[tile.offset :]).split()
        values = np.array(words[: math.prod(shape)], dtype=np.int64)
    return values.reshape(shape).clip(0, most).astype(np.float64)


def _scale_16_bits(image: Image.Image, lower: Image.Image, value_range: Sequence[float] | None) -> None:
    """Scale a 16-bit color image to 8 bits in place: all colors on one scale, opacity unchanged."""
    eight = np.array(image)
    values = eight[..., :3] * 256.0 + np.asarray(lower)[..., :3]
    eight[..., :3] = _scaled(values, value_range)
    image.frombytes(eight.tobytes())


def _to_mode(image: Image.Image, how: Decoding) -> Image.Image:
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        image = _to_8_bits(image, how.value_range)
    elif image.mode == "LAB":
        lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        image = ImageCms.applyTransform(image, ImageCms.buildTransform(lab, srgb, "LAB", "RGB")) or image
    elif how.color_profile == "srgb":
        image = to_srgb(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB").convert(how.mode) if image.mode != how.mode else image.copy()


def to_srgb(image: Image.Image) -> Image.Image:
    """Return an image in sRGB by its embedded ICC profile, without which it is returned as it is.

    The intent is relative colorimetric with black point compensation. A profile that is broken, or of another number of
    channels than the image, is ignored. Opacity is kept, and gray stays gray.

    >>> to_srgb(Image.new("CMYK", (2, 1))).mode
    'CMYK'
    """
    profile = image.info.get("icc_profile")
    if not profile:
        return image
    gray = image.mode in ("1", "L", "LA")
    mode = "L" if gray else image.mode if image.mode == "CMYK" else "RGB"
    transform = _srgb_transform(bytes(profile), mode)
    if transform is None:
        return image
    opaque = image.convert("RGBA").getchannel("A") if image.has_transparency_data else None
    done = ImageCms.applyTransform(image.convert(mode), transform)
    assert done is not None  # as it is not in place
    done = done.convert("L") if gray else done
    if opaque is not None:
        done.putalpha(opaque)
    done.info = {key: value for key, value in image.info.items() if key not in ("icc_profile", "transparency")}
    return done


@lru_cache(16)
def _srgb_transform(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """Return the transform of a profile to sRGB; None if it changes nothing, or does not fit the mode."""
    intent, flags = ImageCms.Intent.RELATIVE_COLORIMETRIC, ImageCms.Flags.BLACKPOINTCOMPENSATION
    try:
        source, srgb = ImageCms.ImageCmsProfile(io.BytesIO(profile)), ImageCms.createProfile("sRGB")
        transform = ImageCms.buildTransform(source, srgb, mode, "RGB", intent, flags)
    except Exception:  # broken profiles fail in several ways
        return None
    if mode == "CMYK":
        return transform
    side = np.linspace(0, 255, 9).round().astype(np.uint8)
    cube = np.stack(np.meshgrid(side, side, side), axis=-1).reshape(27, 27, 3)
    tried = Image.fromarray(cube[..., 0] if mode == "L" else cube)
    done = np.asarray(ImageCms.applyTransform(tried, transform)).astype(int)
    return None if abs(done - np.asarray(tried.convert("RGB"))).max() <= _SAME else transform


def _to_8_bits(image: Image.Image, value_range: Sequence[float] | None) -> Image.Image:
    values = np.asarray(image).astype(np.float64)
    gray = Image.fromarray(_scaled(values, value_range))
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        gray.paste(255, mask=Image.fromarray(values == transparent))
    return gray


def _scaled(values: np.ndarray, value_range: Sequence[float] | None) -> np.ndarray:
    finite = np.isfinite(values)
    if not finite.any():
        raise ValueError("no pixel has a finite value")
    low, high = value_range or (values[finite].min(), values[finite].max())
    if low == high:  # one color: scale by the range of 16 bits
        scaled = np.full_like(values, np.clip(high / 257, 0, 255))
    else:
        scaled = (np.nan_to_num(values, nan=low, posinf=high, neginf=low) - low) * (255 / (high - low))
    return np.round(scaled.clip(0, 255)).astype(np.uint8)
