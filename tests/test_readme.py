"""README and docs are true: their commands run, in order, as typed but for the numbers of epochs, pictures and maps."""

import ast
import functools
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

import vitlab
from tests import walk
from vitlab.cli.main import COMMANDS, main
from vitlab.config.arguments import refuse_unknown

ROOT = Path(__file__).parents[1]
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "README.md", *ROOT.glob("docs/*.md"))}


def blocks(page, kind):
    return walk.blocks(PAGES[page], kind)


def commands(page):
    return walk.commands(PAGES[page])


OWN = (
    "docs/bring_your_own.md",
    "docs/five_minutes.md",
    "docs/tutorial_cluster.md",
    "docs/tutorial_positions.md",
)  # they have tests of their own
SELDOM = [
    f"docs/{name}.md" for name in ("ablation", "analysis", "cluster", "gallery", "pretraining", "troubleshooting")
]
SELDOM += [f"docs/tutorial_{name}.md" for name in ("first_run", "photos", "unlabeled")]
RUN = [page for page in PAGES if commands(page) and page not in (*OWN, *SELDOM)]
RUN += [pytest.param(page, marks=pytest.mark.rare) for page in SELDOM]


MANY = 35  # epochs of a page that are one in the tests, where a run is resumed


def shorter(words):
    if words[0] == "look":
        return [*words, "--pictures=2"]
    if words[0] != "fit" or "--help" in words or "--dry_run" in words:
        return words
    if "--resume" in words:
        return [re.sub(r"max_epochs=(\d+)", lambda n: f"max_epochs={int(n[1]) // MANY}", word) for word in words]
    less = [] if any(word.startswith("--data.root=") for word in words) else ["--data.subset=0.2"]
    return [*words, "--trainer.max_epochs=1", *less]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a run called first, as the README's reader has it when turning to the other pages: resumed once."""
    folder = tmp_path_factory.mktemp("trained")
    words = ["fit", "--config", "t2t", "--run_dir", str(folder / "runs/first"), "--trainer.logger=false"]
    assert main(shorter(words)) == 0
    (resumed,) = (line for line in commands("README.md") if "--resume first" in line)
    assert main(shorter(["fit", "--resume", str(folder / "runs/first"), *shlex.split(resumed)[4:]])) == 0
    return folder


@pytest.fixture
def desk(tmp_path, monkeypatch, hasty):
    """A folder with the things that the reader has."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    walk.lay_out(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("vitlab.look.viewer.MOST_CLASSES", 1)  # beside the predicted one, and maps of each
    monkeypatch.setattr("vitlab.analysis.attribution.maps.STEPS", 8)
    return tmp_path


def run(command):
    """Run a command of a page and return its exit code; what starts processes gets one of its own."""
    program, *words = shlex.split(command, comments=True)
    if program == "torchrun":
        return subprocess.run([sys.executable, "-m", "torch.distributed.run", *words], timeout=600).returncode
    if "--trainer.devices=2" in words:
        return subprocess.run([sys.executable, "-m", "vitlab", *shorter(words)], timeout=600).returncode
    return main(shorter(words))


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN)
def test_every_command_of_the_page_runs(page, desk, request, monkeypatch):
    if page == "README.md":
        assert len(commands(page)) >= 10
    else:
        shutil.copytree(request.getfixturevalue("trained") / "runs", desk / "runs")
    walk.copy_out(re.sub(r"(epochs?): \d+", r"\1: 1", PAGES[page]), desk)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the folder joins it where a class of the page is trusted
    for i, command in enumerate(commands(page)):
        if i == 4:  # the runs before have logged to W&B, as a reader's do
            monkeypatch.setenv("WANDB_MODE", "disabled")
        allowed = (0, 1) if command == "vitlab doctor" and page != "README.md" else (0,)
        assert run(command) in allowed, command


@pytest.mark.slow
@pytest.mark.rare
def test_the_preemption_that_the_page_rehearses_ends_in_a_run_that_was_continued(desk):
    page = "docs/tutorial_cluster.md"
    (text,) = (text for text in blocks(page, "yaml") if text.startswith("name:"))
    (desk / "mine.yaml").write_text(text)
    (desk / "vitlab").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m vitlab "$@"\n')
    (desk / "vitlab").chmod(0o755)
    environment = {**os.environ, "PATH": f"{desk}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    words = ["bash", "-e", "-c", "".join(blocks(page, "bash"))]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    stopped, continued = done.stdout.split("exit code 75\n")
    assert "runs/rehearsal\n" in stopped and "runs/rehearsal (continued)\n" in continued
    record = json.loads((desk / "runs/rehearsal/run.json").read_text())
    assert (record["attempts"], record["status"]) == (2, "done")
    assert "stopped by SIGUSR1; continue with `vitlab fit --resume runs/rehearsal`" in done.stderr + done.stdout
    for line in ("#SBATCH --signal=USR1@120", "scontrol requeue", 'if [ "$code" -eq 75 ]', "#SBATCH --array=0-3"):
        assert line in continued and line in PAGES[page]


def test_the_readme_is_a_screen_and_a_half_and_its_tables_are_narrow():
    lines = PAGES["README.md"].splitlines()
    assert len(lines) <= 80
    assert max(line.count("|") - 1 for line in lines if line.startswith("|")) <= 6


@pytest.mark.rare
def test_the_python_code_for_users_of_other_libraries_runs(desk):
    pytest.importorskip("onnxscript", reason="pip install -e '.[export]'")
    (snippet,) = blocks("docs/coming_from.md", "python")
    names = {}
    exec(compile(snippet, "coming_from.md", "exec"), names)
    assert names["run"].config["model"]["init_args"]["pos_embed"] == "sincos2d"
    assert set(names["run"].results) >= {"val", "test"}
    assert (desk / "runs/second/export/best.onnx").is_file()
    assert names["transform"](Image.open("digit.png")).shape == (1, 8, 8)
    assert names["net"].num_classes == 10


TYPED = {  # pages with lines that a reader types; notebooks run as a whole
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in (
        *(ROOT / page for page in PAGES),
        ROOT / "CONTRIBUTING.md",
        *ROOT.glob("experiments/*/README.md"),
        *ROOT.glob("benchmarks/**/*.md"),
    )
}
PROGRAMS = r"(?:[A-Z_]+=\S+ )*(?:vitlab|torchrun|python|pip|docker|tar|for) "
WHY_NOT = ("the internet", "a cluster", "two machines", "Docker", "minutes", "hours")


def typed(text):
    """Yield the kind, the lines and the mark before it of each block of a page that holds commands."""
    for found in re.finditer(r"(?:<!-- ((?:not )?run[^>]*?) -->\n+)?^```(\w*)\n(.*?)^```", text, re.S | re.M):
        mark, kind, lines = found.groups()
        if kind in ("", "sh", "bash") and re.search(rf"^{PROGRAMS}", lines, re.M):
            yield kind, lines, mark
    rest = re.sub(r"^ *```.*?^ *```", "", text, flags=re.S | re.M)
    for found in re.finditer(rf"(?:<!-- ((?:not )?run[^>]*?) -->\n+)?((?:^    (?:make |{PROGRAMS}).*\n)+)", rest, re.M):
        if re.search(rf"^    {PROGRAMS}", found[2], re.M):
            yield "indented", found[2], found[1]


@pytest.mark.parametrize("page", TYPED)
def test_every_command_of_a_page_is_run_by_a_test_or_says_why_not(page):
    for kind, lines, mark in typed(TYPED[page]):
        if kind == "bash" and page in PAGES and not mark:
            assert page in OWN or page in str(RUN), page
        elif mark and mark.startswith("not run: needs "):
            assert mark.removeprefix("not run: needs ") in WHY_NOT, f"{page}: {mark}"
        else:
            assert mark and (ROOT / mark.removeprefix("run by ")).is_file(), f"{page}: {lines}"


@pytest.mark.parametrize("page", TYPED)
def test_every_command_that_a_page_names_has_the_flags_that_are_given(page, help_of):
    text = TYPED[page].replace("\\\n", " ")
    code = [line for kind, lines, _ in typed(text) for line in re.findall(r"\bvitlab .*", lines)]
    prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.S | re.M)
    code += [" ".join(line.split()) for line in re.findall(r"`(vitlab [a-z][^`]*)`", prose)]
    for line in code:
        words = line.partition("  #")[0].split()[1:]
        words = [word for word in words if word.isidentifier() or word.startswith("-")]
        command, *given = words
        assert command in COMMANDS, line
        shown = help_of(command, *given[:1]) + (help_of("fit") if command in ("submit", "cv") else "")
        for word in filter(lambda word: word.startswith("--"), given):
            flag = word.partition("=")[0]
            if flag.startswith(("--model", "--data.", "--trainer.", "--checkpoint.")):
                refuse_unknown([word])
            else:
                assert re.search(rf"{flag}\b", shown), line


@pytest.fixture(scope="module")
def help_of():
    """Return the help of a command, or of its subcommand where there are some."""

    @functools.cache
    def ask(*words):
        said = io.StringIO()
        with redirect_stdout(said), suppress(SystemExit):
            main([*words, "--help"])
        return said.getvalue()

    return lambda command, *word: ask(command, *(word if command in ("ablate", "runs") else ()))


NUMBER = r"\d[\d,]*(?:\.\d+)?"


def as_shown(shown, said):
    """Return whether a command said what a page shows, line breaks, what `...` stands for and last digits aside.

    Whole numbers must be equal, and others differ by at most .025: nine images of 359, or what a loss varies by.
    """
    parts = re.split(rf"({NUMBER})", " ".join(shown.split()))
    pattern = "".join(f"({NUMBER})" if i % 2 else re.escape(part) for i, part in enumerate(parts))
    found = re.fullmatch(pattern.replace(r"\.\.\.", ".*"), " ".join(said.split()))
    if not found:
        return False
    pairs = zip(parts[1::2], found.groups(), strict=True)
    return all(one == other or ("." in one and abs(float(one) - float(other)) <= 0.025) for one, other in pairs)


def test_shown_output_is_compared_with_printed_output():
    said = "acc1 0.9833 on 359\nimages\nepoch 2 took 0:14\nend"
    assert as_shown("acc1 0.9721\non 359 images ... end", said)
    assert not as_shown("acc1 0.9421\non 359 images ... end", said)
    assert not as_shown("acc1 0.9833\non 358 images ... end", said)
    assert not as_shown("acc1 0.9833\non 359 images ... done", said)
    assert not as_shown("acc1 0.9833 on 359 images", said)


def test_five_minutes_can_be_followed_on_a_phone():
    text = PAGES["docs/five_minutes.md"]
    assert len(blocks("docs/five_minutes.md", "bash")) == len(commands("docs/five_minutes.md")) >= 6
    assert text.count("```bash") == len(re.findall(r"```\n\n(?:[^`\n]+\n+)?```text\n", text)), (
        "a command, what it prints"
    )
    code = [
        line
        for kind in ("bash", "text")
        for block in blocks("docs/five_minutes.md", kind)
        for line in block.split("\n")
    ]
    assert max(map(len, code)) <= 50, "what docs/site.css shows on a phone without scrolling"
    assert max(map(len, re.findall(r"^\|.*", text, re.M)), default=0) <= 80 and len(text.split()) < 600


def test_what_the_pages_say_of_the_run_without_positions_follows_from_the_numbers_that_they_show():
    pages = [PAGES["docs/five_minutes.md"], (ROOT / "docs" / "tutorial_first_run.md").read_text()]
    blind, images = blocks("docs/five_minutes.md", "text")[3].split("recall")[0], 359
    (with_positions,) = {*re.findall(r"test/acc1 ([\d.]+)", "\n".join(pages).replace(blind, ""))}
    right = [round(float(acc1) * images) for acc1 in (with_positions, *re.findall(r"test/acc1 ([\d.]+)", blind))]
    for text in pages:
        told = re.search(
            r"positions classifies (\d+) of (\d+) images correctly.*?the one without (\d+)", text, re.DOTALL
        )
        assert told and [*map(int, told.groups())] == [right[0], images, right[1]]
        assert "OMP_NUM_THREADS=1" in text
    shares = "with positions classifies {} of 359 images correctly ({:.1%}), the one without {} ({:.1%})"
    said = shares.format(right[0], right[0] / images, right[1], right[1] / images).replace("%", " %")
    assert said in " ".join(pages[1].split())


@pytest.mark.rare
def test_every_command_of_five_minutes_prints_what_the_page_shows(desk, capsys):
    page = "docs/five_minutes.md"
    for command, shown in zip(commands(page), blocks(page, "text"), strict=True):
        assert main(shlex.split(command)[1:]) == 0, command
        said = re.sub(r"^waiting for .*\n", "", capsys.readouterr().out, flags=re.M)  # on a busy machine
        assert as_shown(shown, said), f"{command}{said}"


@pytest.mark.parametrize("page", PAGES)
def test_the_page_names_files_and_targets_that_exist(page):
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^    make (\w+)", PAGES[page], flags=re.M):
        assert f"\n{target}:" in makefile
    for path in re.findall(r"`((?:configs|tests|benchmarks|docs|experiments)/[\w/.-]+)`", PAGES[page]):
        assert (ROOT / path).exists(), path
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", PAGES[page]):
        assert (ROOT / page).parent.joinpath(link).exists(), link


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial_cluster.md"])
def test_the_number_of_kills_on_a_page_is_the_counted_one(page):
    rows = (ROOT / "benchmarks/faults.md").read_text()
    counted = re.findall(r"^\| (?!TorchFT).*?(\d+) SIGKILLs", rows, re.M)  # its loop is no run of vitlab
    assert f"{sum(map(int, counted))} kills" in PAGES[page]


def test_the_page_on_ablations_names_every_key():
    from vitlab.ablation.file.settings import KEYS

    keys = [f"{section}.{key}".lstrip(".") for section, names in KEYS.items() for key in names if key not in KEYS]
    text = PAGES["docs/ablation.md"]
    missing = [key for key in keys if f"`{key}`" not in text and f"`.{key.rpartition('.')[2]}`" not in text]
    assert missing == []


def test_the_page_on_analyses_names_every_analysis():
    from vitlab.analysis import ANALYSES

    assert [name for name in ANALYSES if f"`{name}`" not in PAGES["docs/analysis.md"]] == []


def test_the_page_on_positions_names_every_method():
    from typing import get_args

    from vitlab.layers.pos_embed import PosEmbedName

    assert [
        name for name in get_args(PosEmbedName) if f"| `{name}` |" not in PAGES["docs/position_embeddings.md"]
    ] == []


def test_the_example_of_posbench_is_the_class_of_the_tutorial():
    definition, _ = blocks("docs/tutorial_positions.md", "python")
    assert (ROOT / "examples/coordinates.py").read_text().endswith(definition.partition("\n")[2])


@pytest.mark.rare
def test_the_position_embedding_of_the_tutorial_passes_its_check_and_its_ablation(desk, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    definition, check = blocks("docs/tutorial_positions.md", "python")
    assert len([line for line in definition.splitlines()[1:] if line.strip()]) <= 15
    Path("coordinates.py").write_text(definition)
    Path("tiny.yaml").write_text("trainer: {max_epochs: 1, logger: false}\ndata: {init_args: {subset: 0.2}}\n")
    *_, ablation = blocks("docs/tutorial_positions.md", "yaml")
    shorter_one = ablation.replace("base: vit", "base: [vit, tiny.yaml]").replace("seeds: 3", "seeds: 1")
    Path("coordinates.yaml").write_text(f"{shorter_one}run: {{workers: 2}}\n")
    lines = [line.split()[1:] for line in commands("docs/tutorial_positions.md")]
    assert [words[0] for words in lines] == ["fit", "test", *["ablate"] * 4]
    for words in lines:
        assert main([*words, *(["--config", "tiny.yaml"] if words[0] == "fit" else [])]) == 0, words
    torch.manual_seed(0)
    names = {}
    exec(compile(check, "page", "exec"), names)  # asserts
    assert names["both"].shape == (2, 10)
    folder = Path("runs/ablations/coordinates")
    (cell,) = folder.glob("coordinates/s0-*/config.yaml")
    assert yaml.safe_load(cell.read_text())["model"]["init_args"]["pos_embed"] == "coordinates.Coordinates"
    report = (folder / "report" / "report.md").read_text()
    assert "| coordinates |" in report and "| none |" in report
    state = torch.load("runs/own/checkpoints/last.ckpt", weights_only=True)["optimizer_states"][0]["state"]
    assert len(state) == len(list(names["net"].parameters())), "Adam has seen gradients of all"


def messages():
    """Return every string of the source, with a dot-dot-dot in place of what is filled in."""
    for path in Path(vitlab.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(p.value if isinstance(p, ast.Constant) else "..." for p in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


@pytest.mark.slow
def test_every_message_that_is_explained_exists():
    known = {text.replace("`", "") for text in messages()}
    explained = re.findall(r"^\| `(.+?)` \|", PAGES["docs/troubleshooting.md"], flags=re.M)
    assert len(explained) >= 15
    for message in explained:
        parts = [part.strip() for part in message.split("...")]
        pattern, longest = re.compile(".*".join(map(re.escape, parts)), flags=re.S), max(parts, key=len)
        likely = (text for text in known if longest in text)
        assert len(pattern.pattern) > 12 and any(map(pattern.search, likely)), message
