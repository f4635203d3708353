"""Embedded ICC profiles: photos in CMYK, of a wide gamut and with a gray curve are converted to sRGB."""

import io
import struct

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms

from vitlab.data import ImageFolder, Packed, Table
from vitlab.data.files.decode import Decoding, decode_bytes, to_srgb
from vitlab.data.pack.write import pack

ADOBE = ((0.60974, 0.31111, 0.01947), (0.20528, 0.62567, 0.06087), (0.14919, 0.06322, 0.74457))  # D50, of r, g and b
D50 = (0.9642, 1.0, 0.8249)


def _profile(space, kind, pcs, tags):
    """Return a profile of version 2.1 (ICC.1:1998-09) with these tags."""
    table, body, start = [], b"", 128 + 4 + 12 * len(tags)
    for name, data in tags.items():
        data += bytes(-len(data) % 4)
        table.append(struct.pack(">4sII", name, start + len(body), len(data)))
        body += data
    content = struct.pack(">I", len(tags)) + b"".join(table) + body
    head = struct.pack(">I4sI4s4s4s12x4s28xIII", 128 + len(content), b"lcms", 0x02100000, kind, space, pcs, b"acsp",
                       *(round(x * 65536) for x in D50))  # fmt: skip
    return head.ljust(128, b"\0") + content


def _xyz(values):
    return b"XYZ \0\0\0\0" + struct.pack(">3i", *(round(x * 65536) for x in values))


def _gamma(exponent):
    return b"curv\0\0\0\0" + struct.pack(">IH", 1, round(exponent * 256))


def _text(words):
    return b"desc\0\0\0\0" + struct.pack(">I", len(words) + 1) + words + b"\0" * 80


def _rgb(primaries, exponent):
    curves = {name: _gamma(exponent) for name in (b"rTRC", b"gTRC", b"bTRC")}
    colors = {name: _xyz(x) for name, x in zip((b"rXYZ", b"gXYZ", b"bXYZ"), primaries, strict=True)}
    return _profile(b"RGB ", b"mntr", b"XYZ ", {b"desc": _text(b"test"), b"wtpt": _xyz(D50), **colors, **curves})


def _gray(exponent):
    tags = {b"desc": _text(b"test"), b"wtpt": _xyz(D50), b"kTRC": _gamma(exponent)}
    return _profile(b"GRAY", b"mntr", b"XYZ ", tags)


def _cmyk():
    """Return a press whose inks make L* = 100 (1 - k) (1 - (c + m + y) / 6), and a little color."""
    grid = np.stack(np.meshgrid(*[np.arange(2)] * 4, indexing="ij"), -1).reshape(16, 4)
    light = (1 - grid[:, 3]) * (1 - grid[:, :3].sum(1) / 6)
    ab = (1 - grid[:, 3:]) * (grid[:, :3] @ np.array([[-40, -50], [60, -10], [-5, 80]]))
    lab = np.c_[light * 255, ab + 128].round().astype(np.uint8)
    lut = b"mft1\0\0\0\0" + bytes([4, 3, 2, 0]) + struct.pack(">9i", *(np.eye(3, dtype=int) * 65536).ravel().tolist())
    lut += bytes(range(256)) * 4 + lab.tobytes() + bytes(range(256)) * 3
    return _profile(b"CMYK", b"prtr", b"Lab ", {b"desc": _text(b"test"), b"wtpt": _xyz(D50), b"A2B0": lut})


WIDE, PRESS, DARK = _rgb(ADOBE, 563 / 256), _cmyk(), _gray(1.0)


def _saved(image, profile, kind="TIFF", **how):
    file = io.BytesIO()
    image.save(file, kind, icc_profile=profile, **how)
    return file.getvalue()


def _noise(*shape, low=60, high=200):
    return np.random.default_rng(0).integers(low, high, shape).astype(np.uint8)


def _wide_in_srgb(pixels):
    """Return Adobe RGB (1998) in sRGB by the formulas of both (IEC 61966-2-1), both adapted to D50."""
    srgb = np.array([[0.43607, 0.22249, 0.01392], [0.38515, 0.71687, 0.09708], [0.14307, 0.06061, 0.71410]]).T
    linear = np.linalg.inv(srgb) @ np.array(ADOBE).T @ ((pixels.reshape(-1, 3) / 255.0) ** (563 / 256)).T
    linear = linear.clip(0, 1)
    coded = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return 255 * coded.T.reshape(pixels.shape)


def _off(image, wanted):
    return abs(np.asarray(image).astype(float) - wanted)


def test_a_photo_of_a_wide_gamut_is_converted_as_its_formulas_say():
    pixels = _noise(16, 16, 3)
    data = _saved(Image.fromarray(pixels), WIDE)
    assert _off(decode_bytes(data, "x"), _wide_in_srgb(pixels)).max() <= 2
    ignored = decode_bytes(data, "x", Decoding(color_profile="ignore"))
    assert (np.asarray(ignored) == pixels).all() and _off(ignored, _wide_in_srgb(pixels)).max() > 20


def test_cmyk_is_converted_by_its_profile_and_plainly_without_one():
    inks = _noise(8, 8, 4, low=0, high=255)
    inks[0, 0], inks[0, 1] = (0, 0, 0, 0), (0, 0, 0, 255)
    image = Image.frombytes("CMYK", (8, 8), inks.tobytes())
    found = np.asarray(decode_bytes(_saved(image, PRESS), "x")).astype(int)
    assert found[0, 0].min() >= 253 and found[0, 1].max() <= 2
    half = Image.new("CMYK", (1, 1), (0, 0, 0, 127))  # L* = 50: a luminance of .184, 119 in sRGB
    assert _off(decode_bytes(_saved(half, PRESS), "x"), 119).max() <= 2
    plain = np.asarray(decode_bytes(_saved(image, None), "x"))
    assert (plain == np.asarray(image.convert("RGB"))).all() and abs(plain.astype(int) - found).mean() > 10


def test_gray_stays_gray_and_opacity_is_kept():
    pixels = _noise(8, 8)
    gray = np.asarray(decode_bytes(_saved(Image.fromarray(pixels), DARK, "PNG"), "x"))
    coded = 255 * (1.055 * (pixels / 255) ** (1 / 2.4) - 0.055)  # of linear light
    assert (gray == gray[..., :1]).all() and _off(gray[..., 0], coded).max() <= 2
    clear = np.dstack([_noise(8, 8, 3), np.full((8, 8), 128, np.uint8)])
    found = to_srgb(Image.open(io.BytesIO(_saved(Image.fromarray(clear), WIDE, "PNG"))))
    assert (np.asarray(found)[..., 3] == 128).all() and "icc_profile" not in found.info
    assert _off(np.asarray(found)[..., :3], _wide_in_srgb(clear[..., :3])).max() <= 2
    assert to_srgb(found) is found


@pytest.mark.parametrize(
    "image, profile",
    [
        (Image.fromarray(_noise(8, 8, 3)), ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()),
        (Image.fromarray(_noise(8, 8, 3)), WIDE[:200]),
        (Image.fromarray(_noise(8, 8, 3)), b"no profile at all"),
        (Image.fromarray(_noise(8, 8, 3)), PRESS),
        (Image.fromarray(_noise(8, 8)), WIDE),
        (Image.fromarray(_noise(8, 8).astype(np.uint16) * 99), DARK),
    ],
    ids=["srgb", "truncated", "words", "of-cmyk", "gray-of-rgb", "16-bits"],
)
def test_a_profile_that_changes_nothing_is_broken_or_of_another_kind_is_ignored(image, profile):
    data = _saved(image, profile, "PNG")
    assert decode_bytes(data, "x").tobytes() == decode_bytes(data, "x", Decoding(color_profile="ignore")).tobytes()


@pytest.fixture
def photos(tmp_path):
    for part, n in (("train", 6), ("test", 3)):
        for k, name in enumerate(("cat", "dog")):
            (folder := tmp_path / "photos" / part / name).mkdir(parents=True)
            for i in range(n):
                inks = np.random.default_rng(10 * i + k).integers(0, 250, (40, 30 + i, 4), dtype=np.uint8)
                cmyk = Image.frombytes("CMYK", (30 + i, 40), inks.tobytes())
                wide, gray = Image.fromarray(inks[..., :3]), Image.fromarray(inks[..., 0])
                of = ((cmyk, PRESS), (wide, WIDE), (gray, DARK))[i % 3]
                (folder / f"{i}.jpg").write_bytes(_saved(*of, "JPEG", quality=90))
    return tmp_path / "photos"


def _seen(data):
    data.setup("fit")
    data.setup("test")
    loaders = data.train_dataloader(), data.val_dataloader(), data.test_dataloader()
    return [x for loader in loaders for x, _ in data.iterate_batches(loader)]


HOW = {"img_size": 24, "num_workers": 0, "batch_size": 4, "augment": "crop-flip"}


@pytest.mark.parametrize("size", [64, None])
def test_packed_photos_with_profiles_equal_the_files(photos, tmp_path, size):
    packed = {}
    for way in ("srgb", "ignore"):
        pack(str(photos), str(tmp_path / way), size, num_workers=0, color_profile=way)
        folder, packed[way] = ImageFolder(str(photos), color_profile=way, **HOW), Packed(str(tmp_path / way), **HOW)
        files, shards = _seen(folder), _seen(packed[way])
        assert len(files) == len(shards) and all(map(torch.equal, files, shards))
        assert folder.statistics() == packed[way].statistics()
        assert packed[way].fingerprint()["color_profile"] == way
    assert packed["srgb"].mean != packed["ignore"].mean
    assert packed["ignore"].notes and not [note for note in packed["srgb"].notes if "profile" in note]
    with pytest.raises(ValueError, match=r"was packed with color_profile srgb, got `data.color_profile` ignore"):
        Packed(str(tmp_path / "srgb"), color_profile="ignore", **HOW)


def test_scans_with_and_without_color_profiles_are_kept_apart(photos):
    means = []
    for way in ("srgb", "ignore", "srgb"):
        (data := ImageFolder(str(photos), color_profile=way, **HOW)).setup("fit")
        means.append(data.mean)
    assert means[0] == means[2] != means[1]
    with pytest.raises(ValueError, match=r"`data.color_profile` must be one of srgb, ignore, got 'cmyk'"):
        ImageFolder(str(photos), color_profile="cmyk")


def test_an_opened_image_is_prepared_like_its_file(photos):
    (data := ImageFolder(str(photos), **HOW)).setup("test")
    for i, file in enumerate(data.splits["test"].files):
        direct = data.eval_transform(Image.open(photos / file))
        assert torch.equal(direct, data.eval_file(photos / file)), i


def test_every_data_set_takes_the_options_of_the_command_line():
    import jsonargparse

    for kind, names in ((Packed, {"color_profile", "max_pixels"}), (Table, {"fold", "missing", "fold_column"})):
        parser = jsonargparse.ArgumentParser()
        parser.add_class_arguments(kind, "data")
        assert {f"data.{name}" for name in names} <= {action.dest for action in parser._actions}
