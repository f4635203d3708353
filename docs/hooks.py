"""What mkdocs does on the way: links out of docs/ become names of files, commands show their --help, drawings open."""

import base64
import html
import os
import posixpath
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import griffe

import vitlab

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
ROLE = re.compile(r":(?:class|meth|func|mod|attr|data|exc|obj):`~?([^`]+)`")  # of Sphinx; the site is Markdown
HELP = re.compile(r"<!-- help: (\w+(?: \w+)?) -->")  # a command, and a subcommand if it has some
DRAWING = re.compile(r"^!\[([^\]]*)\]\(([^)]+\.svg)\)$", re.M)
GALLERY = "gallery.md"  # shows one network at all levels


def on_config(config):
    """Say the version, and link to the repository that this checkout was cloned from, if others can open it.

    Where mike builds the site, it stands beside those of other versions: each page offers them.
    """
    commit = _git("rev-parse", "--short", "HEAD")
    config.copyright = f"vitlab {vitlab.__version__}" + (f", commit {commit}" if commit else "")  # below each page
    if "mike" in config.plugins:
        config.extra["version"] = {"provider": "mike", "default": "latest"}
    config.repo_url = config.repo_url or public_address(_git("remote", "get-url", "origin"))
    if config.repo_url:
        config.edit_uri = config.edit_uri or f"blob/{_git('rev-parse', 'HEAD')}/docs/"
    return config


def on_page_markdown(markdown, page, config, files):
    """Fill in the --help of a command and drawings of networks; link to the repository where a link leaves the site.

    The file is named instead if the repository has no public address.
    """
    if page.file.src_uri.startswith("api/"):
        page.meta["search"] = {"boost": 0.002}  # a word in a title counts 1,000 times, and so guides would come last
    markdown = HELP.sub(lambda found: f"```text\n{_help(found[1])}```", markdown)
    markdown = with_drawings(markdown, page.file.src_uri)
    up = page.file.src_uri.count("/") + 1  # folders between the page and the repository
    markdown = with_pictures(markdown, up)
    outside = re.compile(rf"\[([^\]]+)\]\((?:\.\./){{{up}}}([^)]+)\)")
    if config.repo_url:
        tree = f"{config.repo_url}/{config.edit_uri.removesuffix('docs/')}"
        return outside.sub(lambda found: f"[{found[1]}]({tree}{found[2]})", markdown)
    return outside.sub(lambda found: found[1] if found[2] in found[1] else f"{found[1]} (`{found[2]}`)", markdown)


def on_page_content(content, page, config, files):
    """Leave the source of a class out of the search, which would find it by the name of any variable."""
    return content.replace(
        '<details class="mkdocstrings-source"', '<details data-search-exclude class="mkdocstrings-source"'
    )


class Examples(griffe.Extension):
    """Shows what a docstring lets the reader type as code, under a heading or without one."""

    def on_object(self, *, obj, **_):
        """Give examples the heading that griffe knows."""
        if obj.docstring:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.M)
            bare = re.compile(r"^(?=>>>).*(?:\n(?!\n).+)*", flags=re.M)
            text = bare.sub(lambda found: "Examples:\n" + textwrap.indent(found[0], "    "), text)
            obj.docstring.value = without_roles(text)


def with_drawings(markdown, src_uri):
    """Return a page with the drawings of networks in it: a box is a link to what is inside, here or in the gallery."""
    here = DOCS / posixpath.dirname(src_uri)
    drawn = {path: (here / path).read_text(encoding="utf-8") for _, path in DRAWING.findall(markdown)}
    drawn = {path: text for path, text in drawn.items() if text.startswith("<svg") and 'class="vl"' in text}
    there = {name for text in drawn.values() for name in re.findall(r'<svg [^>]*\bid="([^"]+)"', text)}
    gallery = posixpath.relpath(GALLERY.replace(".md", ".html"), posixpath.dirname(src_uri) or ".")

    def link(found):
        return found[0] if found[1] in there else f'href="{gallery}#{found[1]}"'

    def inline(found):
        if found[2] not in drawn:
            return found[0]
        drawing = re.sub(r'href="#([^"]+)"', link, drawn[found[2]].replace("\n", ""))
        drawing = re.sub(r'aria-label="[^"]*"', lambda _: f'aria-label="{html.escape(found[1])}"', drawing, count=1)
        return f'<div class="drawing">{drawing}</div>'

    return DRAWING.sub(inline, markdown)


def public_address(remote):
    """Return the web address of a repository on a public host, None for any other remote.

    Example:
        >>> public_address("git@github.com:someone/vitlab.git")
        'https://github.com/someone/vitlab'
    """
    host = r"(?:https://|git@|ssh://git@)(?:[^@/]+@)?(github\.com|gitlab\.com|codeberg\.org|bitbucket\.org)[:/](.+?)"
    found = re.fullmatch(host + r"(?:\.git)?/?", remote)
    return f"https://{found[1]}/{found[2]}" if found else None


def _git(*words):
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def with_pictures(markdown, up):
    """Return a page with the pictures in it that lie outside of docs/, as the site has no file of them."""

    def embed(found):
        text = base64.b64encode((ROOT / found[2]).read_bytes()).decode()
        return f"![{found[1]}](data:image/svg+xml;base64,{text})"

    return re.sub(rf"!\[([^\]]*)\]\((?:\.\./){{{up}}}([^)]+\.svg)\)", embed, markdown)


def without_roles(text):
    """Return a docstring with the names of Python as code, where Sphinx would have a link."""
    return ROLE.sub(r"`\1`", text)


def _help(command):
    words = [sys.executable, "-m", "vitlab", *command.split(), "--help"]
    environment = {**os.environ, "COLUMNS": "100", "PYTHONPATH": str(ROOT)}
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
