"""What makes a cell another cell, and what does not."""

import pytest

from vitlab.ablation.execution.identity import (
    code_digest,
    effective,
    initial_weights_digest,
    json_digest,
    versions_in_use,
)

MODULE = '"""A module."""\n\n\ndef f(x):\n    """Double."""\n    return 2 * x\n'


@pytest.fixture
def package(tmp_path):
    for room in ("layers", "data", "callbacks", "jobs", "analysis", "runs", "config", "cli", "look", "ablation"):
        (tmp_path / room).mkdir()
    (tmp_path / "layers/a.py").write_text(MODULE)
    return tmp_path


@pytest.mark.parametrize(
    "same",
    [
        MODULE.replace("    return", "    # a comment\n    return"),
        MODULE.replace("Double.", "Return twice the number."),
        MODULE.replace("2 * x", "(2 * x)"),
        MODULE.replace('    """Double."""\n', ""),
    ],
)
def test_comments_docstrings_and_layout_do_not_change_the_code(package, same):
    before = code_digest(package)
    (package / "layers/a.py").write_text(same)
    assert code_digest(package) == before


@pytest.mark.parametrize(
    "change",
    [
        ("layers/a.py", MODULE.replace("2 *", "3 *")),
        ("data/b.py", "x = 1\n"),
        *((f"{room}/b.py", "x = 1\n") for room in ("callbacks", "jobs", "analysis", "runs", "config")),
        ("packed.py", "x = 1\n"),
        ("cli/fit.py", "x = 1\n"),
    ],
)
def test_a_changed_number_and_a_new_file_change_the_code(package, change):
    before = code_digest(package)
    (package / change[0]).write_text(change[1])
    assert code_digest(package) != before


@pytest.mark.parametrize("name", ["cli/x.py", "look/page.py", "ablation/report.py"])
def test_code_that_no_cell_runs_does_not_identify_it(package, name):
    before = code_digest(package)
    (package / name).write_text("x = 1\n")
    (package / "layers/page.html").write_text("<p>")
    assert code_digest(package) == before


def test_the_environment_names_the_versions_of_what_computes():
    assert {"python", "torch", "numpy", "lightning"} <= {part.split()[0] for part in versions_in_use().split(", ")}


CONFIG = {"seed_everything": 0, "trainer": {"max_epochs": 2, "logger": {"class_path": "W"}}, "data": {}}


@pytest.mark.parametrize(
    ("key", "value", "counts"),
    [("max_epochs", 3, True), ("precision", "bf16-mixed", True), ("logger", False, False), ("devices", 1, False)],
)
def test_a_config_identifies_a_cell_by_what_can_change_a_number(key, value, counts):
    changed = {**CONFIG, "trainer": {**CONFIG["trainer"], key: value}}
    assert (json_digest(effective(changed)) != json_digest(effective(CONFIG))) == counts


def test_the_folder_and_the_workers_of_the_data_do_not_identify_a_cell():
    a = {"data": {"class_path": "D", "init_args": {"root": "a", "num_workers": 1, "batch_size": 2}}}
    b = {"data": {"class_path": "D", "init_args": {"root": "b", "num_workers": 0, "batch_size": 2}}}
    assert effective(a) == effective(b) == {"data.class_path": "D", "data.init_args.batch_size": 2}


def test_initial_weights_of_other_libraries_identify_a_cell_by_file_or_name(tmp_path):
    (folder := tmp_path / "theirs").mkdir()
    for name, text in {"config.json": "{}", "model.safetensors": "a", "README.md": "a"}.items():
        (folder / name).write_text(text)
    first = initial_weights_digest(f"hf:{folder}")
    (folder / "README.md").write_text("other words")
    assert initial_weights_digest(f"hf:{folder}") == first
    (folder / "model.safetensors").write_text("other weights")
    assert initial_weights_digest(f"hf:{folder}") != first
    named = ["timm:vit_tiny_patch16_224", "hf:facebook/dinov2-small", "torchvision:vit_b_16", "vitlab:photos64_vit"]
    assert len({initial_weights_digest(name) for name in named}) == len(named)
