"""Image files as they come: Pillow's own awkward ones, broken ones, random damage."""

import csv
import io
import os
import shutil
import struct
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image, features

from vitlab.analysis.pictures import PreparedPictures
from vitlab.data import FakeData
from vitlab.data.files.decode import Decoding, ImageError, decode, decode_bytes, decode_opened, image_header
from vitlab.data.loading.transforms import to_tensor
from vitlab.jobs.load import data_of_card

SHARED = Path(os.environ.get("VITLAB_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
OTHER_FORMATS = {"PSD", "ICO", "TGA"}  # Pillow reads them, vitlab does not


def _pixels(image):
    return np.asarray(image).astype(float)


@pytest.fixture(scope="module")
def weird(tmp_path_factory):
    if not (SHARED / "weird" / "MANIFEST.tsv").is_file():
        pytest.skip("the folder of awkward images is not here")
    return Path(shutil.copytree(SHARED / "weird", tmp_path_factory.mktemp("weird") / "copy"))


def _manifest(weird):
    with (weird / "MANIFEST.tsv").open() as lines:
        return list(csv.DictReader(lines, delimiter="\t"))


def test_every_awkward_file_is_decoded_or_refused_as_the_manifest_says(weird):
    rows = _manifest(weird)
    assert len(rows) == 50
    for row in rows:
        path = weird / row["file"]
        good = row["PIL_13_open+load+convert(RGB)"].startswith("ok") and row["format"] not in OTHER_FORMATS
        if not good:
            with pytest.raises(ValueError, match=row["file"]):
                decode(path)
            continue
        image = decode(path)
        width, height = map(int, row["size"].split("x"))
        turned = row["exif_orientation"] in ("5", "6", "7", "8")
        assert image.mode == "RGB"
        assert image.size == ((height, width) if turned else (width, height)), row["file"]


@pytest.mark.parametrize(
    "name, tolerance",
    [
        ("hopper.webp", 5), ("hopper.gif", 25), ("hopper_rle8.bmp", 25), ("hopper.Lab.tif", 8),
        ("hopper_orientation_2.jpg", 5), ("hopper_orientation_3.webp", 5), ("hopper_orientation_6.jpg", 5),
        ("hopper_orientation_8.jpg", 5), ("hopper_idat_after_image_end.png", 1), ("hopper_float_dpi_2.tif", 1),
    ],
)  # fmt: skip
def test_one_photo_is_the_same_in_every_format(weird, name, tolerance):
    assert abs(_pixels(decode(weird / name)) - _pixels(decode(weird / "hopper.tif"))).mean() < tolerance


@pytest.mark.parametrize("name", ["hopper_gray.jpg", "hopper.pfm", "hopper_16bit.pgm"])
def test_gray_and_16_bit_versions_keep_the_brightness_of_a_photo(weird, name):
    gray = _pixels(decode(weird / "hopper.tif", Decoding("L")))
    assert abs(_pixels(decode(weird / name, Decoding("L"))) - gray).mean() < 3


def test_16_bits_are_scaled_and_not_clipped(weird):
    assert len(np.unique(_pixels(decode(weird / "16bit.cropped.tif")))) > 100
    deep = np.linspace(0, 65535, 1000).astype(np.uint16).reshape(20, 50)
    assert abs(_pixels(_reopen(Image.fromarray(deep), "PNG"))[:, :, 0] - deep / 257).max() <= 0.5


def test_values_that_are_not_finite_do_not_spoil_a_float_image(tmp_path):
    values = np.linspace(-2, 2, 100, dtype=np.float32).reshape(10, 10)
    values[0, 0] = np.nan
    values[0, 1] = np.inf
    Image.fromarray(values).save(tmp_path / "x.tif")
    pixels = _pixels(decode(tmp_path / "x.tif", Decoding("L")))
    assert pixels[0, 0] == 0 and pixels[0, 1] == 255 and len(np.unique(pixels)) > 90


def test_transparent_parts_are_white(weird):
    for name, place in (("l_trns.png", (32, 32)), ("i_trns.png", (32, 32)), ("pil123rgba.png", (0, 0))):
        assert decode(weird / name).getpixel(place) == (255, 255, 255), name


def test_the_transparent_value_of_16_bits_is_white(tmp_path):
    deep = np.array([[0, 1000], [1000, 60000]], dtype=np.uint16)
    Image.fromarray(deep).save(tmp_path / "x.png", transparency=1000)
    assert _pixels(decode(tmp_path / "x.png", Decoding("L"))).tolist() == [[0, 255], [255, 255]]
    Image.fromarray(deep).save(tmp_path / "y.png")
    assert _pixels(decode(tmp_path / "y.png", Decoding("L"))).tolist() == [[0, 4], [4, 255]]


def test_half_transparent_black_over_white_is_gray():
    assert _reopen(Image.new("RGBA", (2, 2), (0, 0, 0, 128)), "PNG").getpixel((0, 0)) == (127, 127, 127)


def test_red_in_cmyk_is_decoded_as_red(weird):
    pixels = _pixels(decode(weird / "pil_sample_cmyk.jpg")).reshape(-1, 3)
    assert pixels.max(0)[0] > 200 and pixels.max(0)[1:].max() < 80


def test_a_jpeg_under_the_name_of_a_png_is_read(tmp_path):
    Image.new("RGB", (3, 2), "red").save(tmp_path / "photo.png", "JPEG")
    assert decode(tmp_path / "photo.png").size == (3, 2)


def test_a_decompression_bomb_is_refused_by_its_header():
    bomb = io.BytesIO()
    Image.new("1", (8000, 8000)).save(bomb, "PNG")
    assert Decoding().max_pixels < 8000**2 and len(bomb.getvalue()) < 50_000
    with pytest.raises(ValueError, match=r"bomb\.png: 8000 x 8000 pixels, `data.max_pixels` allows 50 million"):
        decode_bytes(bomb.getvalue(), "bomb.png")


@pytest.mark.parametrize("content, reason", [(b"", "the file is empty"), (b"hello", "not one of JPEG")])
def test_a_file_that_is_not_an_image_is_refused_with_its_path(tmp_path, content, reason):
    (tmp_path / "a b\u00e9.jpg").write_bytes(content)
    with pytest.raises(ValueError, match=rf"a b\u00e9\.jpg: {reason}"):
        decode(tmp_path / "a b\u00e9.jpg")


def test_a_large_photo_is_decoded_smaller_where_that_is_enough(tmp_path):
    Image.new("RGB", (1000, 800), "red").save(tmp_path / "x.jpg")
    data = (tmp_path / "x.jpg").read_bytes()
    sizes = [decode_bytes(data, "x.jpg", shrink=shrink).size for shrink in (None, 801, 400, 300, 101, 100)]
    assert sizes == [(1000, 800), (1000, 800), (500, 400), (500, 400), (250, 200), (125, 100)]


@pytest.mark.parametrize("given", ["a.jpg", np.zeros((2, 2, 3), np.uint8)])
def test_what_is_no_image_of_pillow_is_told_in_words(given):
    with pytest.raises(ValueError, match=r"an image of Pillow, as PIL.Image.open\(FILE\) gives it, got a (str|ndarr)"):
        decode_opened(given)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    for path in (tmp_path / "no.jpg", tmp_path):
        with pytest.raises(ValueError, match=str(path)):
            decode(path)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "TIFF", "PPM", "GIF"])
def test_damaged_files_are_decoded_or_refused_and_nothing_else(kind):
    rng = np.random.default_rng(0)
    file = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(file, kind)
    whole = np.frombuffer(file.getvalue(), dtype=np.uint8)
    refused = 0
    for trial in range(60):
        data = whole[: rng.integers(len(whole))].copy() if trial % 2 else whole.copy()
        places = rng.integers(0, max(len(data), 1), 4)
        data[places[places < len(data)]] = rng.integers(0, 256)
        try:
            assert decode_bytes(data.tobytes(), "damaged").mode == "RGB"
        except ValueError as error:
            assert str(error).startswith("damaged: ")
            refused += 1
    assert refused > 15


def _reopen(image, kind):
    file = io.BytesIO()
    image.save(file, kind)
    return decode_bytes(file.getvalue(), "image")


def _png_of_16_bits(values):
    """A PNG of 16 bits a channel, which Pillow reads and does not write."""
    height, width, channels = values.shape

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 16, {2: 4, 3: 2, 4: 6}[channels], 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("channels", [2, 3, 4])
def test_colors_of_16_bits_are_scaled_as_grays_are(channels):
    values = np.random.default_rng(0).integers(0, 4096, (6, 7, channels))
    values[0, 0], values[0, 1] = 0, 4095
    if channels != 3:
        values[..., -1] = 65535
    image = decode_bytes(_png_of_16_bits(values), "x.png")
    colors = values[..., :1].repeat(3, 2) if channels == 2 else values[..., :3]
    assert np.array_equal(np.asarray(image), np.round(colors * 255 / 4095))


@pytest.mark.parametrize("most", [1023, 4095, 65535])
@pytest.mark.parametrize("kind", ["P2", "P3", "P5", "P6"])
def test_values_of_ppm_files_are_those_that_they_state(kind, most):
    values = np.random.default_rng(0).integers(0, 1024, (6, 7, 3 if kind in ("P3", "P6") else 1))
    words = "# a comment 7\n".join(" ".join(map(str, row.ravel())) + "\n" for row in values).encode()
    data = f"{kind}\n7 6\n{most}\n".encode() + (words if kind in ("P2", "P3") else values.astype(">u2").tobytes())
    image = decode_bytes(data, "x.ppm", Decoding(value_range=(0, 1023)))
    assert np.array_equal(np.asarray(image), np.broadcast_to(np.round(values * 255 / 1023), (6, 7, 3)))
    with pytest.raises(ImageError):
        decode_bytes(data[:-20], "x.ppm")
    bits = decode_bytes(b"P1\n2 1\n0 1\n", "x.pbm")
    assert np.asarray(bits)[0, :, 0].tolist() == [255, 0]


def test_16_bits_may_be_scaled_from_one_range_for_all_files(tmp_path):
    how = Decoding(value_range=(1000, 3000))
    values = np.array([[[0, 1000, 2000], [3000, 5000, 1500]]])
    assert np.asarray(decode_bytes(_png_of_16_bits(values), "x", how)).tolist() == [[[0, 0, 128], [255, 255, 64]]]
    Image.fromarray(np.array([[1000, 2000, 9000]], dtype=np.uint16)).save(tmp_path / "x.png")
    assert np.asarray(decode(tmp_path / "x.png", how))[..., 0].tolist() == [[0, 128, 255]]
    with pytest.raises(ValueError, match=r"`data.value_range` must be \[low, high\] with low < high, got \[5, 5\]"):
        Decoding(value_range=[5, 5])


@pytest.mark.parametrize("kind, codec", [("AVIF", "avif"), ("JPEG2000", "jpg_2000")])
def test_newer_formats_are_read_where_pillow_has_them(kind, codec):
    if not features.check(codec):
        pytest.skip(f"this Pillow has no {kind}")
    file = io.BytesIO()
    Image.new("RGB", (40, 30), (200, 30, 60)).save(file, kind)
    assert np.abs(_pixels(decode_bytes(file.getvalue(), "x"))[15, 20] - (200, 30, 60)).max() < 6


@pytest.mark.parametrize("kind", ["transparent", "16 bits", "turned"])
def test_an_opened_image_is_prepared_like_its_file(kind, tmp_path):
    slope, path, options = np.linspace(0, 255, 64).reshape(8, 8).astype(np.uint8), tmp_path / "image.png", {}
    if kind == "transparent":
        image = Image.fromarray(np.stack([slope, slope, slope // 2, slope.T], axis=2))
    elif kind == "16 bits":
        image = Image.fromarray(slope.astype(np.uint16) * 8)
    else:
        image, options["exif"] = Image.fromarray(slope).convert("RGB"), Image.Exif()
        options["exif"][274] = 6
    image.save(path, **options)
    data = FakeData(n=20, native_size=8, value_range=[0, 4095], augment="none")
    expected = data.eval_file(path)
    assert torch.equal(data.eval_transform(Image.open(path)), expected)
    assert torch.equal(data.eval_transform(decode(path, data.decoding)), expected)
    rebuilt = data_of_card(SimpleNamespace(in_chans=3, img_size=(8, 8)), {"images": data.preparation()})
    assert torch.equal(rebuilt.eval_transform(Image.open(path)), expected)
    mine = PreparedPictures(to_tensor, (8, 8), 3)
    assert torch.equal(mine.eval_transform(Image.open(path)), to_tensor(decode(path)))


def test_a_file_of_weights_says_how_images_are_decoded_also_how_large_they_may_be():
    net = SimpleNamespace(in_chans=3, img_size=(8, 8))
    data = FakeData(n=20, native_size=8, max_pixels=10**9, value_range=[0, 4095])
    images = data.preparation()
    assert data_of_card(net, {"images": images}).decoding == data.decoding
    old = {key: value for key, value in images.items() if key not in ("max_pixels", "color_profile")}
    assert data_of_card(net, {"images": old}).decoding == Decoding("RGB", [0, 4095], 50_000_000, "ignore")


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_the_header_of_a_tiff_file_has_the_size_of_the_decoded_image(orientation):
    image, exif = Image.new("RGB", (40, 20)), Image.Exif()
    exif[274] = orientation
    image.save(file := io.BytesIO(), "TIFF", exif=exif)
    height, width = image_header(file.getvalue())[1]
    assert decode_bytes(file.getvalue(), "x").size == (width, height) == ((20, 40) if orientation > 4 else (40, 20))


@pytest.mark.parametrize("width", [32, 60])  # tiles of 16: whole ones, and a partial one at the edge
def test_a_tiled_16_bit_tiff_file_has_its_values(width):
    tifffile = pytest.importorskip("tifffile")
    values = np.random.default_rng(0).integers(0, 4096, (40, width, 3), dtype=np.uint16)
    tifffile.imwrite(file := io.BytesIO(), values, photometric="rgb", tile=(16, 16))
    image = decode_bytes(file.getvalue(), "x", Decoding(value_range=[0, 4095]))
    assert np.abs(_pixels(image) - values * (255 / 4095)).max() <= 0.51


@pytest.mark.parametrize("kind", ["planes", "inverted"])
def test_a_16_bit_tiff_file_that_pillow_decodes_wrongly_is_refused(kind):
    tifffile, values = pytest.importorskip("tifffile"), np.arange(1200, dtype=np.uint16)
    if kind == "planes":
        values, how = values.reshape(3, 20, 20), {"photometric": "rgb", "planarconfig": "separate"}
    else:
        values, how = values.reshape(30, 40), {"photometric": "miniswhite"}
    tifffile.imwrite(file := io.BytesIO(), values, **how)
    with pytest.raises(ImageError, match="16-bit TIFF file of separate color planes or inverted gray"):
        decode_bytes(file.getvalue(), "x")


def test_max_pixels_alone_limits_an_image(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    Image.new("L", (20, 20)).save(file := io.BytesIO(), "PNG")
    assert decode_bytes(file.getvalue(), "x").size == image_header(file.getvalue())[1] == (20, 20)
    with pytest.raises(ImageError, match=r"20 x 20 pixels, `data.max_pixels` allows 0.0001 million"):
        decode_bytes(file.getvalue(), "x", Decoding(max_pixels=100))
    assert Image.MAX_IMAGE_PIXELS == 10


@pytest.mark.parametrize("channels", [2, 4])
def test_steps_of_pillow_are_refused_for_channels_that_it_takes_for_opacity(channels):
    with pytest.raises(ValueError, match=f"must be none or crop-flip for {channels} channels, got rand-m9"):
        FakeData(n=20, native_size=8, in_chans=channels, augment="rand-m9")
    assert FakeData(n=20, native_size=8, in_chans=channels, augment="crop-flip").in_chans == channels


def test_a_step_that_takes_no_images_is_refused_with_its_key():
    with pytest.raises(ValueError, match=r"`data.augment`: TypeError: Normalize.* does not support PIL images"):
        FakeData(n=20, augment=[{"class_path": "Normalize", "init_args": {"mean": [0.5], "std": [0.5]}}])
