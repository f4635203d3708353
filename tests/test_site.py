"""The site: every page is in its contents, what it counts is so, and it is built without a warning."""

import ast
import doctest
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import vitlab
from vitlab.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
HIGHLIGHTED = ("number", "special", "function", "constant", "keyword", "string")  # the rest has a color of the text


@pytest.fixture
def hooks():
    """What mkdocs does on the way."""
    pytest.importorskip("griffe", reason="pip install -e '.[docs]'")
    spec = importlib.util.spec_from_file_location("hooks", DOCS / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def contents(entries):
    for entry in entries:
        value = next(iter(entry.values()))
        yield from [value] if isinstance(value, str) else contents(value)


def test_every_page_is_in_the_contents_and_every_entry_is_a_page():
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    entries = list(contents(settings["nav"]))
    assert sorted(entries) == sorted(page.relative_to(DOCS).as_posix() for page in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_links_lead_to_files_that_are_there(page):
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_links_lead_to_sections_that_are_there(page):
    slugify = pytest.importorskip("markdown.extensions.toc", reason="pip install -e '.[docs]'").slugify
    for link, section in re.findall(r"\]\((?!https?:)([^)#]*)#([^).]+)\)", page.read_text()):
        headings = re.findall(r"^#+ (.+)$", (page.parent / link if link else page).read_text(), re.MULTILINE)
        assert section in [slugify(heading, "-") for heading in headings], f"{link}#{section}"


def test_nothing_is_fetched_by_a_reader():
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert settings["theme"]["font"] is False
    assert not any("//" in str(settings.get(key, "")) for key in ("extra_css", "extra_javascript", "extra"))
    (shim,) = settings["extra"]["polyfills"]
    assert "iframe-worker" in shim, "else the plugin `offline` adds one of the network"


def contrast(one, other):
    """Return the contrast of two colors such as #1c2024, from 1 to 21, as WCAG 2 defines it."""

    def luminance(color):
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["default", "slate"])
def test_text_of_the_site_can_be_read_in_both_modes(scheme):
    """Each color of text has a contrast of 4.5 with what lies behind it (WCAG 2.2, 1.4.3, level AA)."""
    assert round(contrast("#000000", "#ffffff"), 3) == 21 and round(contrast("#767676", "#ffffff"), 2) == 4.54
    sheet = (DOCS / "site.css").read_text()
    block = re.search(rf'^\[data-md-color-scheme="{scheme}"\] \{{\n(.*?)^\}}', sheet, re.S | re.M)[1]
    colors = dict(re.findall(r"--md-([\w-]+): (#[0-9a-f]{6});", block))
    assert len(colors) == block.count("--md-"), "no color is transparent, as what it is read on would change it"
    texts = {"default-fg-color", "default-fg-color--light", "typeset-a-color", "accent-fg-color"}
    code = {"code-fg-color", *(f"code-hl-{kind}-color" for kind in HIGHLIGHTED)}
    behind = {"default-bg-color", "code-bg-color", "primary-fg-color", "primary-bg-color"}  # the last lies on the bar
    assert set(colors) == texts | code | behind
    pairs = [(text, "default-bg-color") for text in texts] + [(text, "code-bg-color") for text in texts | code]
    for text, below in [*pairs, ("primary-bg-color", "primary-fg-color")]:
        assert contrast(colors[text], colors[below]) >= 4.5, (text, below)
    drawing = re.search(rf'^\[data-md-color-scheme="{scheme}"\] \.vl \{{ color: (#\w+); \}}', sheet, re.M)[1]
    assert drawing == colors["default-fg-color"]
    palette = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["theme"]["palette"]
    assert {"scheme": scheme, "primary": "custom", "accent": "custom"}.items() <= next(
        one for one in palette if one["scheme"] == scheme
    ).items()


def test_the_page_on_the_command_has_every_command_and_subcommand(capsys):
    shown = set(re.findall(r"<!-- help: (\w+(?: \w+)?) -->", (DOCS / "command.md").read_text()))
    below = set()
    for command in ("ablate", "runs"):
        with suppress(SystemExit):
            main([command, "--help"])
        (names,) = re.findall(r"^  (\w+(?:\|\w+)+)$", capsys.readouterr().out, re.M)
        below |= {f"{command} {name}" for name in names.split("|")}
    assert shown == {*COMMANDS, *below}


def test_every_name_on_the_api_pages_exists():
    named = [name for page in (DOCS / "api").glob("*.md") for name in re.findall(r"^::: (\S+)", page.read_text(), re.M)]
    assert len(named) > 50
    for name in named:
        module, _, member = name.rpartition(".")
        found = importlib.util.find_spec(name) if name.count(".") == 1 else importlib.import_module(module)
        assert found is not None and (name.count(".") == 1 or hasattr(found, member)), name


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted((DOCS / "api").glob("*.md")), ids=lambda page: page.stem)
def test_a_page_on_python_begins_with_an_example_that_runs_and_a_picture(page, here):
    head = page.read_text().partition("\n::: ")[0]
    (example,) = re.findall(r"^```pycon\n(.*?)^```", head, re.M | re.S)
    lines: list[str] = []
    found = doctest.DocTestParser().get_doctest(example, {}, page.name, str(page), 0)
    assert doctest.DocTestRunner().run(found, out=lines.append).failed == 0, "".join(lines)
    (picture,) = re.findall(r"^!\[.{10,}\]\((.*)\)$", head, re.M)
    assert (page.parent / picture).is_file()


def test_links_that_leave_the_site_lead_to_the_repository_where_it_has_a_public_address(hooks, monkeypatch):
    page = SimpleNamespace(file=SimpleNamespace(src_uri="notebooks/1.md"))
    text = "[the test](../../tests/test_site.py) and [a page](../index.md)"
    for remote, shown in {
        "git@github.com:someone/vitlab.git": "https://github.com/someone/vitlab/blob/1a2b/tests/test_site.py",
        "https://gitlab.com/a/b/vitlab": "https://gitlab.com/a/b/vitlab/blob/1a2b/tests/test_site.py",
        "/home/someone/vitlab": None,
        "ssh://git@cluster:/srv/vitlab.git": None,
    }.items():
        monkeypatch.setattr(hooks, "_git", lambda *words, remote=remote: remote if words[0] == "remote" else "1a2b")
        config = hooks.on_config(SimpleNamespace(repo_url=None, edit_uri=None, plugins={}))
        assert config.copyright == f"vitlab {vitlab.__version__}, commit 1a2b"
        found = hooks.on_page_markdown(text, page, config, [])
        link = f"[the test]({shown})" if shown else "the test (`tests/test_site.py`)"
        assert found == f"{link} and [a page](../index.md)"


def test_pages_offer_other_versions_only_where_there_are_some(hooks):
    for plugins, extra in (
        ({"search"}, {}),
        ({"search", "mike"}, {"version": {"provider": "mike", "default": "latest"}}),
    ):
        config = SimpleNamespace(repo_url=None, edit_uri=None, plugins=plugins, extra={})
        assert hooks.on_config(config).extra == extra


@pytest.mark.rare
def test_no_docstring_shows_a_role_of_sphinx_on_the_site(hooks):
    import griffe

    seen = 0
    for path in (ROOT / "vitlab").rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                one = griffe.Function("f", docstring=griffe.Docstring(text))
                hooks.Examples().on_object(obj=one)
                seen += ":`" in text
                assert not re.search(r":\w+:`", one.docstring.value), path
    assert seen > 0


def test_each_box_of_a_drawing_leads_to_what_is_inside_it(hooks):
    found = {
        page.relative_to(DOCS).as_posix(): hooks.with_drawings(page.read_text(), page.relative_to(DOCS).as_posix())
        for page in PAGES
    }
    ids = {name: re.findall(r'<svg [^>]*\bid="([^"]+)"', text) for name, text in found.items()}
    assert ids["gallery.md"] == ["drawn", "drawn-tokens", "drawn-block", "drawn-head"]
    assert ids["notebooks/3_vision_transformer.md"] == ["vit", "vit-block", "vit-head"]
    assert ids["notebooks/4_tokens_to_token.md"] == ["t2t", "t2t-tokens", "t2t-block", "t2t-head", "small-tokens"]
    for name, text in found.items():
        links = re.findall(r'<a href="([^#"]*)#([^"]+)"', text)
        assert len(ids[name]) == len(set(ids[name])) and (links or not ids[name])
        for file, target in links:
            page = (DOCS / name).parent / file.replace(".html", ".md") if file else DOCS / name
            assert target in ids[page.resolve().relative_to(DOCS).as_posix()], (name, file, target)


def test_every_picture_has_a_description_for_those_who_cannot_see_it(hooks):
    others = [ROOT / "README.md", *ROOT.glob("experiments/*/README.md"), *ROOT.glob("benchmarks/*.md")]
    found = [(page.name, alt) for page in [*PAGES, *others] for alt in re.findall(r"!\[(.*?)\]\(", page.read_text())]
    assert len(found) > 60
    assert [(name, alt) for name, alt in found if len(alt) < 20 or re.match(r"[Ff]igure \d", alt)] == []
    page = "notebooks/3_vision_transformer.md"
    drawings = re.findall(r"!\[(.+?)\]\(\S+\.svg\)", (DOCS / page).read_text())
    shown = re.findall(r'<svg [^>]*aria-label="([^"]+)"', hooks.with_drawings((DOCS / page).read_text(), page))
    assert shown == drawings and len(shown) == 3


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The site, and what mkdocs said."""
    pytest.importorskip("mkdocs", reason="pip install -e '.[docs]'")
    site = tmp_path_factory.mktemp("built") / "site"
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    return site, subprocess.run(words, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.rare
def test_the_site_is_built_without_a_warning(built):
    site, done = built
    assert done.returncode == 0, done.stderr
    assert "--model.pos_embed" in (site / "command.html").read_text()
    page = (site / "api/run.html").read_text()
    assert "vitlab.api.fit" in page and "&gt;&gt;&gt;" in page
    raw = [page.name for page in site.rglob("*.html") if re.search(r":\w+:<code>", page.read_text())]
    assert not raw and "slate" in page
    assert not re.search(r'(?:src|href)="https?://(?:fonts|cdn|unpkg)', page)


@pytest.mark.rare
def test_the_search_lists_guides_before_names_and_does_not_read_the_source(built):
    site, _ = built
    entries = json.loads((site / "search/search_index.json").read_text())["docs"]
    names = [entry for entry in entries if entry["location"].startswith("api/")]
    assert len(names) > 300 and {entry["boost"] for entry in names} == {0.002}
    assert not [entry for entry in entries if "boost" in entry and entry not in names]
    assert not [entry["location"] for entry in names if "return self." in entry["text"]]


@pytest.mark.rare
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("page", ["index.html", "api/run.html"])
def test_a_site_that_is_opened_from_the_disk_can_be_searched(built, tmp_path, page):
    site, _ = built
    flags = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path}",
        "--virtual-time-budget=20000",
    )
    words = [str(CHROMIUM), *flags, "--dump-dom", f"{(site / page).as_uri()}?q=checkpoint"]
    shown = subprocess.run(words, capture_output=True, text=True, timeout=120).stdout
    found = re.search(r'"md-search-result__meta">(\d+) matching documents<', shown)
    assert found and int(found[1]) > 5
    assert f'href="{(site / "security.html").as_uri()}#checkpoints-and-weights" class="md-search-result' in shown


@pytest.mark.rare
def test_the_maps_of_a_network_of_timm_are_drawn_by_the_command_of_the_page(tmp_path):
    import timm
    import torch
    from PIL import Image

    spec = importlib.util.spec_from_file_location("render", DOCS / "render.py")
    render = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(render)
    torch.manual_seed(0)
    render.maps("test_vit", timm.create_model("test_vit").state_dict(), "random", img_size=64, place=tmp_path)
    for kind in ("pca", "attention"):
        with Image.open(tmp_path / f"random_{kind}.jpg") as figure:
            assert figure.height > 200 and sum(map(bool, figure.convert("L").histogram())) > 50


def test_the_table_of_timms_networks_adds_up():
    """Names, equal, refused and not tried, which the page states, are those of its rows."""
    page = (DOCS / "timm.md").read_text().partition("<!-- peers -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:3] == "| `"]
    refused = [re.findall(r"(?:^|; )(\d+): ", row[4]) for row in rows]
    found = {
        "equal": sum(int(row[2].partition(",")[0] or 0) for row in rows),
        "refused": sum(int(count) for counts in refused for count in counts),
        "not tried": sum(int(row[5] or 0) for row in rows),
    }
    stated = re.search(r"Of (\d+) names: \*\*(.+)\*\*", page)
    assert stated[2] == ", ".join(f"{count} {kind}" for kind, count in found.items())
    assert int(stated[1]) == sum(found.values()) == sum(row[1].count("`") // 2 for row in rows)
