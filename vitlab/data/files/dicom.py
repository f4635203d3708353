"""Read DICOM files by pydicom, which is optional."""

import io
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import pydicom

_PIXELS = ("PixelData", "FloatPixelData", "DoubleFloatPixelData")  # where a file has its pixels


class Dicom(NamedTuple):
    """The first frame of a DICOM file.

    Args:
        values: uint8 RGB ``(H, W, 3)``, or numbers ``(H, W)`` in the unit that the file states, such as Hounsfield.
        window: The values that are shown black and white, if the file states them.
        inverted: Whether large values are dark.

    >>> Dicom(np.zeros((2, 3))).window
    """

    values: np.ndarray
    window: tuple[float, float] | None = None
    inverted: bool = False


def is_dicom(data: bytes) -> bool:
    """Return whether a file is DICOM, by its first bytes.

    >>> is_dicom(bytes(128) + b"DICM")
    True
    """
    return data[128:132] == b"DICM"


def dicom_header(data: bytes) -> tuple[str, tuple[int, int]]:
    """Return "DICOM gray" or "DICOM RGB", and height and width; a file without pixels is a ValueError."""
    file = _open_dicom(data)
    return f"DICOM {'RGB' if _is_color(file) else 'gray'}", (int(file.Rows), int(file.Columns))


def read_dicom(data: bytes) -> Dicom:
    """Return the first frame; pydicom can raise anything for a broken file.

    Numbers are rescaled as the file says (modality LUT, DICOM PS3.3 C.11.1), and its first window is that of a linear
    VOI LUT (C.11.2.1.2).
    """
    from pydicom import pixels

    file = _open_dicom(data)
    values = pixels.pixel_array(file, index=0)
    if file.PhotometricInterpretation == "PALETTE COLOR":
        values = pixels.apply_color_lut(values, file)
        values = (values >> 8).astype(np.uint8) if values.dtype == np.uint16 else values
    if _is_color(file):
        if values.dtype != np.uint8:
            raise ValueError(f"colors of {8 * values.itemsize} bits")
        return Dicom(values[..., :3])
    values = np.asarray(pixels.apply_modality_lut(values, file), dtype=np.float64)
    window = None
    if file.get("WindowCenter") is not None and file.get("WindowWidth") is not None:
        center, width = (float(np.atleast_1d(x)[0]) for x in (file.WindowCenter, file.WindowWidth))
        window = (center - width / 2, center + width / 2 - 1) if width > 1 else None
    return Dicom(values, window, file.PhotometricInterpretation == "MONOCHROME1")


def _open_dicom(data: bytes) -> "pydicom.FileDataset":
    try:
        import pydicom
    except ImportError:
        raise ValueError("a DICOM file, which needs `pip install 'vitlab[dicom]'`") from None
    file = pydicom.dcmread(io.BytesIO(data))
    if not any(name in file for name in _PIXELS):
        raise ValueError(f"a DICOM file without pixels (modality {file.get('Modality') or 'not given'})")
    return file


def _is_color(file: "pydicom.FileDataset") -> bool:
    return int(file.SamplesPerPixel) > 1 or file.PhotometricInterpretation == "PALETTE COLOR"
