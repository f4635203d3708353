"""Files, folders and patterns that a command is given images by."""

import os
import shutil

import pytest

from vitlab.config.images import find_images


def test_links_that_lead_back_are_followed_once(tmp_path):
    for name in ("a/x", "a/sub/y", "z", "outside/w"):
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).touch()
    shutil.move(tmp_path / "tree" / "outside", tmp_path / "outside")
    (tmp_path / "tree" / "a" / "loop").symlink_to("..")
    (tmp_path / "tree" / "again").symlink_to("a")
    (tmp_path / "tree" / "far").symlink_to(tmp_path / "outside")
    files, others = find_images([str(tmp_path / "tree")])
    assert [os.path.relpath(file, tmp_path / "tree") for file in files] == ["a/sub/y", "a/x", "far/w", "z"]
    assert others == []
    files, _ = find_images([str(tmp_path / "tree" / "**")])
    assert [os.path.relpath(file, tmp_path / "tree") for file in files] == ["a/sub/y", "a/x", "far/w", "z"]


def test_a_folder_stands_for_its_visible_files(tmp_path):
    for name in (".hidden/x", ".y", "Thumbs.db", "a", "b.JPG"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "lost").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")  # reading it would wait for ever
    files, others = find_images([str(tmp_path)])
    assert [os.path.basename(file) for file in files] == ["a", "b.JPG"]
    assert sorted(others) == [
        (str(tmp_path / "lost"), "a broken link"),
        (str(tmp_path / "pipe"), "neither a file nor a folder"),
    ]


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(tmp_path):
    for name in ("a[1].png", "a1.png"):
        (tmp_path / name).touch()
    assert find_images([str(tmp_path / "a[1].png")]) == ([str(tmp_path / "a[1].png")], [])


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("**", ["a.png", "b/1.png", "b/c/2.png", "b/x.txt"]),
        ("**/*.png", ["a.png", "b/1.png", "b/c/2.png"]),
        ("b/**/*.png", ["b/1.png", "b/c/2.png"]),
        ("[ab]/**/?.png", ["b/1.png", "b/c/2.png"]),
        ("**/c/**/*", ["b/c/2.png"]),
        ("*.png", ["a.png"]),
        ("*/*.txt", ["b/x.txt"]),
        ("b", ["b/1.png", "b/c/2.png", "b/x.txt"]),
        ("*", ["a.png", "b/1.png", "b/c/2.png", "b/x.txt"]),
        ("*.jpg", []),
    ],
)
def test_patterns_match_what_a_shell_would_match(here, pattern, expected):
    for name in ("a.png", "b/1.png", "b/c/2.png", "b/x.txt"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).touch()
    assert find_images([pattern])[0] == expected
    absolute = find_images([str(here / pattern)])[0]
    assert [os.path.relpath(file, here) for file in absolute] == expected
