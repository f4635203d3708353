"""DICOM files among photos."""

import io

import numpy as np
import pytest

from vitlab.data import ImageFolder
from vitlab.data.files.decode import Decoding, ImageError, decode_bytes, image_header

pydicom = pytest.importorskip("pydicom")
from pydicom.dataset import FileMetaDataset  # noqa: E402

VALUES = np.arange(5 * 7).reshape(5, 7) * 100 - 1000


def dicom(values=None, **attributes):
    """Return a file of 5 x 7 pixels of 16 bits in Hounsfield units, stored with an offset of 1024."""
    file = pydicom.Dataset()
    file.file_meta = FileMetaDataset()
    file.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    file.SOPClassUID, file.SOPInstanceUID, file.Modality = pydicom.uid.CTImageStorage, "1.2.3", "CT"
    if values is not None:
        file.Rows, file.Columns = values.shape[:2]
        file.SamplesPerPixel, file.PhotometricInterpretation = 1, "MONOCHROME2"
        file.BitsAllocated, file.BitsStored, file.HighBit, file.PixelRepresentation = 16, 16, 15, 0
        file.RescaleSlope, file.RescaleIntercept = 1, -1024
        file.PixelData = (values + 1024).astype("<u2").tobytes()
    for name, value in attributes.items():
        setattr(file, name, value)
    file.save_as(out := io.BytesIO(), enforce_file_format=True)
    return out.getvalue()


def _scaled(values, low, high):
    return np.round((values - low).clip(0, high - low) * 255 / (high - low)).astype(np.uint8)


def test_numbers_are_shown_in_the_given_range_or_the_window_or_their_own():
    data = dicom(VALUES)
    assert image_header(data) == ("DICOM gray", (5, 7))
    assert (np.asarray(decode_bytes(data, "x", Decoding("L"))) == _scaled(VALUES, -1000, 2400)).all()
    window = dicom(VALUES, WindowCenter=["40", "500"], WindowWidth=["400", "2000"])
    assert (np.asarray(decode_bytes(window, "x", Decoding("L"))) == _scaled(VALUES, -160, 239)).all()
    lungs = np.asarray(decode_bytes(window, "x", Decoding(value_range=(-1000, 0))))
    assert lungs.shape == (5, 7, 3) and (lungs[..., 0] == _scaled(VALUES, -1000, 0)).all()
    inverted = dicom(VALUES, PhotometricInterpretation="MONOCHROME1")
    assert (np.asarray(decode_bytes(inverted, "x", Decoding("L"))) == 255 - _scaled(VALUES, -1000, 2400)).all()


def test_the_first_frame_of_dicom_is_read_in_gray_and_color():
    rng = np.random.default_rng(0)
    colors = rng.integers(0, 256, (2, 5, 7, 3), dtype=np.uint8)
    eight = {"BitsAllocated": 8, "BitsStored": 8, "HighBit": 7, "SamplesPerPixel": 3, "PlanarConfiguration": 0}
    data = dicom(VALUES, PhotometricInterpretation="RGB", NumberOfFrames=2, PixelData=colors.tobytes(), **eight)
    assert image_header(data) == ("DICOM RGB", (5, 7))
    assert (np.asarray(decode_bytes(data, "x")) == colors[0]).all()


def test_a_file_without_pixels_a_truncated_one_and_a_missing_library_are_one_line(tmp_path, monkeypatch):
    for name, kind, data in (
        ("0", "a", dicom(VALUES)), ("1", "a", dicom(VALUES[::-1])), ("2", "b", dicom(VALUES[:, ::-1])),
        ("report", "b", dicom(Modality="SR")), ("cut", "b", dicom(VALUES)[:-20]),
    ):  # fmt: skip
        (tmp_path / kind).mkdir(exist_ok=True)
        (tmp_path / kind / f"{name}.dcm").write_bytes(data)
    data = ImageFolder(str(tmp_path), num_workers=0, max_unreadable=2, val_share=0.3, test_share=0.3, img_size=4)
    data.setup("fit"), data.setup("test")
    reasons = {name.rpartition("/")[2]: reason for name, reason in data.unreadable.items()}
    assert reasons["report.dcm"] == "a DICOM file without pixels (modality SR)"
    assert set(reasons) == {"report.dcm", "cut.dcm"} and "\n" not in reasons["cut.dcm"]
    monkeypatch.setitem(__import__("sys").modules, "pydicom", None)
    with pytest.raises(ImageError, match=r"x.dcm: a DICOM file, which needs `pip install 'vitlab\[dicom\]'`"):
        decode_bytes((tmp_path / "a" / "0.dcm").read_bytes(), "x.dcm")
