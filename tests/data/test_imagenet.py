"""ImageNet as it is downloaded: tar files, validation images without classes, the development kit."""

import io
import re
import shutil
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from vitlab.cli.main import main
from vitlab.data.image_folder import ImageFolder
from vitlab.data.imagenet import ImageNet
from vitlab.data.pack.write import pack
from vitlab.data.packed import Packed

WNIDS = ["n01440764", "n01443537", "n02085620"]
SETTINGS = {"img_size": 16, "num_workers": 0, "batch_size": 4, "augment": "crop-flip", "val_share": 0.25}


def _jpeg(rng):
    content = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (20, 24, 3), dtype=np.uint8)).save(content, "JPEG")
    return content.getvalue()


def _tar(path, members, mode="w"):
    with tarfile.open(path, mode) as tar:
        for name, data in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))


def _download(folder):
    """Make the three archives of ILSVRC 2012 in small, and the folder that they are when unpacked."""
    rng, plain = np.random.default_rng(0), folder / "plain"
    photos = {wnid: {f"{wnid}_{i}.JPEG": _jpeg(rng) for i in range(8)} for wnid in WNIDS}
    (folder / "tars").mkdir()
    inner = {}
    for wnid, images in photos.items():
        _tar(folder / "x.tar", images)
        inner[f"{wnid}.tar"] = (folder / "x.tar").read_bytes()
    _tar(folder / "tars" / "ILSVRC2012_img_train.tar", inner)
    answers = [2, 1, 3, 3, 1, 2]  # the numbers of the kit are not in the order of the names
    names = {1: WNIDS[1], 2: WNIDS[0], 3: WNIDS[2]}
    val = {f"ILSVRC2012_val_{i + 1:08}.JPEG": _jpeg(rng) for i in range(6)}
    _tar(folder / "tars" / "ILSVRC2012_img_val.tar", val)
    kind = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("num_children", "O")]
    synsets = np.array([(k, names.get(k, "n00001740"), "a word", float(k > 3)) for k in range(1, 5)], dtype=kind)
    savemat(meta := io.BytesIO(), {"synsets": synsets[:, None]})
    truth = "".join(f"{answer}\n" for answer in answers).encode()
    kit = "ILSVRC2012_devkit_t12"
    members = {f"{kit}/readme.txt": b"", f"{kit}/data/meta.mat": meta.getvalue()}
    members[f"{kit}/data/ILSVRC2012_validation_ground_truth.txt"] = truth
    _tar(folder / "tars" / f"{kit}.tar.gz", members, "w:gz")
    for part, files in (("train", photos), ("val", {wnid: {} for wnid in WNIDS})):
        for wnid, images in files.items():
            (plain / part / wnid).mkdir(parents=True)
            for name, data in images.items():
                (plain / part / wnid / name).write_bytes(data)
    for answer, (name, data) in zip(answers, val.items(), strict=True):
        (plain / "val" / names[answer] / name).write_bytes(data)
    return folder / "tars", plain


def _flat(plain):
    for path in sorted((plain / "val").rglob("*.JPEG")):
        path.rename(plain / "val" / path.name)
    for wnid in WNIDS:
        (plain / "val" / wnid).rmdir()


def _all(data):
    torch.manual_seed(3)
    for name in ("train", "val", "test"):
        data.build(name)
    loaders = data.train_dataloader(), data.val_dataloader(), data.test_dataloader()
    return [batch[:2] for loader in loaders for batch in loader]


def _same(first, second):
    pairs = list(zip(_all(first), _all(second), strict=True))
    return len(pairs) > 5 and all(torch.equal(a, b) for pair in pairs for a, b in zip(*pair, strict=True))


def test_the_tar_files_of_imagenet_are_read_like_unpacked_folders(tmp_path):
    tars, plain = _download(tmp_path)
    first, second = ImageNet(str(tars), **SETTINGS), ImageNet(str(plain), **SETTINGS)
    assert first.class_names == second.class_names == WNIDS and len(_all(first)[-1][0]) == 2
    assert _same(first, second) and first.fingerprint()["splits"] == second.fingerprint()["splits"]
    assert _same(ImageNet(str(tars), **SETTINGS), second)  # out of the cache


def test_gray_images_of_imagenet_are_normalized_by_their_own_numbers(tmp_path):
    _, plain = _download(tmp_path)
    data = ImageNet(str(plain), **SETTINGS, in_chans=1)
    data.build("train")
    images, _ = next(data.iterate_batches(data.train_dataloader()))
    assert images.shape[1] == 1 and len(data.statistics()[0]) == 1 and data.statistics_from == "train"


def test_the_tar_files_of_imagenet_are_packed_like_folders(tmp_path, capsys):
    tars, plain = _download(tmp_path)
    assert main(["pack", str(tars), str(tmp_path / "packed"), "--num_workers=0"]) == 0
    assert "30 images of 3 classes" in capsys.readouterr().out
    assert main(["data", str(tars), "--num_workers=0", "-o", str(tmp_path / "picture.png")]) == 0
    assert "n02085620" in capsys.readouterr().out
    assert _same(Packed(str(tmp_path / "packed"), **SETTINGS), ImageFolder(str(plain), **SETTINGS))


@pytest.mark.parametrize("kind", ["archive", "folder", "kaggle"])
def test_validation_images_without_class_folders_get_their_classes_from_the_list_beside_them(tmp_path, kind):
    tars, plain = _download(tmp_path)
    expected = ImageNet(str(plain), **SETTINGS)
    expected.build("test")
    labels = dict(zip([f.rpartition("/")[2] for f in expected.splits["test"].files],
                      expected.splits["test"].labels.tolist(), strict=True))  # fmt: skip
    answers = {path.stem: path.parent.name for path in (plain / "val").rglob("*.JPEG")}
    _flat(plain)
    (plain / "test").mkdir()
    (plain / "test" / "ILSVRC2012_test_00000001.JPEG").write_bytes(b"")  # of the competition: without classes
    if kind == "kaggle":
        lines = ["ImageId,PredictionString", *(f"{name},{wnid} 1 2 3 4 " for name, wnid in answers.items())]
        (tmp_path / "LOC_val_solution.csv").write_text("\n".join(lines) + "\n")
    else:
        shutil.copy(tars / "ILSVRC2012_devkit_t12.tar.gz", plain)
    if kind == "folder":
        with tarfile.open(plain / "ILSVRC2012_devkit_t12.tar.gz") as archive:
            archive.extractall(plain, filter="data")
        (plain / "ILSVRC2012_devkit_t12.tar.gz").unlink()
    data = ImageNet(str(plain), **SETTINGS)
    data.build("test")
    images = data.splits["test"]
    assert dict(zip([f.rpartition("/")[2] for f in images.files], images.labels.tolist(), strict=True)) == labels
    pack(str(plain), str(tmp_path / "packed"), num_workers=0)
    assert Packed(str(tmp_path / "packed"), img_size=8).class_names == WNIDS


@pytest.mark.parametrize("cls", ["ImageNet", "ImageFolder"])
def test_validation_images_without_classes_are_refused_before_training(tmp_path, capsys, cls):
    _, plain = _download(tmp_path)
    _flat(plain)
    assert main(["fit", "--config", "photos_vit", f"--data={cls}", f"--data.root={plain}", "--dry_run"]) == 2
    error = capsys.readouterr().err
    way_out = "put ILSVRC2012_devkit_t12.tar.gz or LOC" if cls == "ImageNet" else "CLASS/, or take --data=ImageNet"
    assert way_out in error and error.count("\n") == 1


@pytest.mark.slow
def test_fewer_classes_than_imagenet_has_are_refused_before_training(tmp_path, capsys):
    tars, plain = _download(tmp_path)
    for root in (tars, plain):
        words = ["fit", "--config", "photos_vit", "--data=ImageNet", f"--data.root={root}", "--data.batch_size=4"]
        assert main([*words, "--dry_run"]) == 2
        assert re.search(r"has 1,000 classes, \S+ has 3: --data=ImageFolder takes any", capsys.readouterr().err)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda tars: (tars / "ILSVRC2012_img_val.tar").unlink(), r"there is no \S+ILSVRC2012_img_val.tar"),
        (lambda tars: (tars / "ILSVRC2012_devkit_t12.tar.gz").unlink(), "put ILSVRC2012_devkit_t12.tar.gz or"),
        (lambda tars: (tars / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(b"x"), "devkit_t12 cannot be read: ReadErr"),
        (
            lambda tars: (tars / "ILSVRC2012_img_train.tar").write_bytes(b"x" * 600),
            "not a complete, uncompressed tar file",
        ),
        (lambda tars: _cut(tars / "ILSVRC2012_img_train.tar"), "not a complete, uncompressed tar file: unexpected end"),
    ],
)
def test_archives_that_are_missing_or_broken_are_one_line(tmp_path, capsys, change, message):
    tars, _ = _download(tmp_path)
    change(tars)
    assert main(["pack", str(tars), str(tmp_path / "packed"), "--num_workers=0"]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and error.count("\n") == 1
    assert not list(tmp_path.glob("*packed*"))


def _cut(path):
    path.write_bytes(path.read_bytes()[:-30_000])
