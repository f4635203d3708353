"""What a repository shows besides its code: workflows, image, citation, metadata."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import vitlab
from tests import image

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_workflow_tests_each_python_that_the_package_names_and_calls_targets_that_exist():
    jobs = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert jobs["test"]["strategy"]["matrix"]["python"] == named
    assert PROJECT["requires-python"] == f">={named[0]}"
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert commands == ["make test", "make lint", "make docs", "make test-lowest", "make notebooks"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(f"\n{command.split()[1]}:" in makefile for command in commands)
    assert all("timeout-minutes" in job for job in jobs.values())


def test_the_image_has_a_pinned_base_no_cache_and_an_unprivileged_user_who_can_write():
    (word, base), *steps = image.instructions((ROOT / "Dockerfile").read_text())
    assert word == "FROM" and re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", base)
    (install,) = (rest for word, rest in steps if word == "RUN")
    assert "--no-cache-dir" in install and "--constraint /src/constraints.txt" in install
    assert "--owner vitlab /work" in install and ("USER", "vitlab") in steps


@pytest.mark.slow
def test_the_steps_of_the_image_run_without_a_container_engine(tmp_path, monkeypatch):
    text = (ROOT / "Dockerfile").read_text()
    ran = []
    monkeypatch.setattr(image.Image, "inside", lambda self, words, **env: ran.append(words[-1]))
    one = image.Image(tmp_path)
    for word, rest in image.instructions(text)[1:]:
        one.take(word, rest)
    assert len(ran) == 1 and "&& useradd --create-home vitlab" in ran[0] and "\\" not in ran[0]
    assert (one.user, one.cwd, one.env["HOME"], one.entrypoint, one.command) == (
        "vitlab",
        "/work",
        "/tmp",
        ["vitlab"],
        ["--help"],
    )
    sent = {path.name for path in (tmp_path / "src").iterdir()}
    assert {"pyproject.toml", "setup.py", "constraints.txt", "vitlab", "configs", "experiments", "LICENSE"} <= sent
    assert not sent & {".git", ".venv", "build", "runs", "site", "data"}
    assert (tmp_path / "src/vitlab/data").is_dir() and not list((tmp_path / "src").rglob("__pycache__"))
    (words,) = image.runs(text)
    assert words[0] == "fit"
    with pytest.raises(SystemExit, match="the step ADD"):
        one.take("ADD", "a b")


def test_the_citation_names_this_version_and_has_what_bibtex_needs():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == vitlab.__version__
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in PROJECT["authors"]]
    assert {"title", "date-released", "license", "message"} <= set(citation)


def test_templates_ask_for_a_command_and_a_proof():
    assert "vitlab doctor" in (ROOT / ".github/ISSUE_TEMPLATE/bug.md").read_text()
    assert "make check" in (ROOT / ".github/pull_request_template.md").read_text()
