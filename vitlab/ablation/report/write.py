"""The report: tables as files, report.md, report.html, which is one file and opens anywhere, and all of it on W&B."""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import pandas as pd

from vitlab.ablation.execution.cells import Resolved
from vitlab.ablation.execution.identity import json_digest
from vitlab.ablation.file.schema import meant
from vitlab.ablation.file.spec import Ablation
from vitlab.ablation.inference.findings import find
from vitlab.ablation.inference.linear import linear
from vitlab.ablation.inference.looks import take_look
from vitlab.ablation.inference.measured import CellResults, collect
from vitlab.ablation.inference.verdicts import Verdict
from vitlab.ablation.inference.words import Section
from vitlab.ablation.report.drawings import Drawn, figures, panels
from vitlab.ablation.report.sections import report_sections
from vitlab.ablation.report.tuned import responses
from vitlab.analysis.typeset import INCHES, Format, Width, figure_bytes, printed
from vitlab.errors import UsageError, one_line, preview
from vitlab.runs.atomic import atomic_write, is_writable, write_text
from vitlab.runs.records import split_metrics
from vitlab.tables import markdown_lines

SHOWN = re.compile(r"^!\[.*\]\(figures/([^/()]+)\.svg\)$", re.MULTILINE)  # the name of a figure in report.md
VIEW = '<meta name="viewport" content="width=device-width, initial-scale=1">'  # as wide as a phone is
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#1a1a1a;background:#fff}
h1{font-size:1.6rem}h2{font-size:1.15rem;margin-top:2.2rem;border-bottom:1px solid #ddd}
table{border-collapse:collapse;font-size:13px;margin:.8rem 0;display:block;overflow-x:auto}
td,th{padding:.25rem .5rem;text-align:left;border-bottom:1px solid #e4e4e4;white-space:nowrap}
td:first-child,th:first-child{position:sticky;left:0;background:#fff}
th{font-weight:600;border-bottom:2px solid #999}figure{margin:1.2rem 0;overflow-x:auto}ul{padding-left:1.2rem}
svg{max-width:100%;height:auto}svg text{font-family:system-ui,sans-serif!important}
@media(max-width:40rem){body{margin:.8rem auto;padding:0 .6rem}figure svg{max-width:none;width:38rem}}
pre{background:#f6f6f6;padding:1rem;overflow-x:auto;font-size:12.5px}code{font-size:.92em}
"""


@dataclass
class Report:
    """The report on the finished cells; as text, the answers to the claims."""

    arms: pd.DataFrame  # one row per arm and metric: mean, interval, difference to the baseline, verdict
    claims: pd.DataFrame  # one row per claim and setting
    verdicts: list[Verdict]
    results: pd.DataFrame  # one row per cell and metric
    summary: pd.DataFrame  # every number of the report; `kind` tells the rows apart
    answers: list[str]
    files: list[Path]
    sent: str = ""  # line about sending it to W&B

    def __str__(self) -> str:
        return "\n".join(self.answers)


def write_report(
    ablation: Ablation,
    resolved: list[Resolved],
    output: str | None,
    accept_stale: bool,
    formats: Sequence[Format] = ("pdf", "svg"),
    width: Width = "page",
) -> Report:
    """Write the report on the finished cells, and return it."""
    results = collect(ablation, resolved, accept_stale)
    _refuse_useless(results)
    place, target = ablation.directory / "report", Path(output) if output else None
    if not is_writable(place):
        if target is None:
            raise UsageError(f"cannot write into {place}; give another folder with --output")
        place, target = target, None
    place.mkdir(parents=True, exist_ok=True)
    table, gates = results.table(), linear(ablation, results.resolved)
    found = find(results, take_look(ablation, results.seeds(), results.had()), gates)  # a look, once nothing failed
    with atomic_write(place / "results.csv") as csv:
        table.to_csv(csv, index=False)
    with atomic_write(place / "results.parquet") as parquet:
        table.to_parquet(parquet, index=False)
    summary = found.table()
    with atomic_write(place / "summary.csv") as csv:
        summary.to_csv(csv, index=False, float_format="%.10g")
    drawn = figures(results, found.arms) | panels(found) | responses(results)
    svgs = _keep(drawn, place, formats, width)
    parts = report_sections(found)
    source = ablation.file.path.read_text()
    titles = {name: each.title for name, each in drawn.items()}
    write_text(place / "report.md", _markdown(ablation.name, parts, source, titles))
    write_text(place / "tables.tex", _latex(parts))
    write_text(
        place / "report.html", _html(ablation.name, parts, [(titles[name], svg) for name, svg in svgs.items()], source)
    )
    names = ("report.html", "report.md", "summary.csv", "results.csv", "results.parquet")
    if output:
        _copy(place / "results.csv", Path(output) / "seeds.csv")
    if target:
        for name in ("report.md", "summary.csv", "tables.tex"):
            _copy(place / name, target / name)
        for name in (f"{name}.{form}" for name in drawn for form in ("svg", "pdf", "png")):
            if (place / "figures" / name).is_file():
                _copy(place / "figures" / name, target / "figures" / name)
    return Report(
        arms=pd.DataFrame([row.record() for row in found.arms]),
        claims=summary[summary["kind"] == "claim"].dropna(axis=1, how="all").reset_index(drop=True),
        verdicts=found.verdicts,
        results=table,
        summary=summary,
        answers=parts[0].sentences,
        files=[place / name for name in names],
    )


def _copy(source: Path, target: Path) -> None:
    """Copy a file over one that a paper may already include: whole, or the old one stays."""
    with atomic_write(target) as beside:
        beside.write_bytes(source.read_bytes())


def _refuse_useless(results: CellResults) -> None:
    """Refuse results of no cell, those without the primary metric, and those of cells that read different images."""
    if not results.runs:
        stale = sum(cell.state == "stale" for cell in results.cells.values())
        ways = [f"--accept_stale includes the {stale} that other code or versions trained"] if stale else []
        text = f"no cell of {results.ablation.name} is done with the present code and readable"
        notes = [cell.note for cell in results.cells.values() if cell.note]
        raise UsageError("; ".join([text, *ways, *notes[:1]]))
    primary, measured = results.ablation.primary, {name for cell in results.cells.values() for name in cell.numbers}
    if primary not in measured and not results.ablation.is_analyzed(primary):  # an analysis says why it was not done
        there = split_metrics(dict.fromkeys(sorted(measured), 0.0))
        text = f"no finished cell has a metric `{primary}`{meant(primary, there)}"
        raise results.ablation.file.mistake("metric/primary", text)
    done = [found.cell for found in results.cells.values() if found.state == "done"]
    if mixed := [cell.name for cell in done if json_digest(cell.run.read("data.json")) != cell.parts["data"]]:
        text = "trained on other images than the rest; remove these cells and `run` again"
        raise UsageError(f"{preview(mixed, 4)}: {text}")


def _keep(drawn: dict[str, Drawn], place: Path, formats: Sequence[Format], width: Width) -> dict[str, str]:
    """Write every figure in each format, and its numbers; return the SVG of each, which the pages show.

    What the report that lies there drew and this one does not is removed: the file that it was of has changed.
    """
    folder, page = place / "figures", place / "report.md"
    folder.mkdir(exist_ok=True)
    for name in SHOWN.findall(page.read_text()) if page.is_file() else ():
        for kind in ("svg", "pdf", "png", "csv") if name not in drawn else ():
            (folder / f"{name}.{kind}").unlink(missing_ok=True)
    svgs = {}
    for name, each in drawn.items():
        figure = printed(each.figure, INCHES[width])
        text = figure_bytes(figure, "svg").decode()
        svgs[name] = text[text.index("<svg") :]
        write_text(folder / f"{name}.svg", svgs[name])
        for form in ("pdf", "png"):
            if form not in formats:
                (folder / f"{name}.{form}").unlink(missing_ok=True)
                continue
            with atomic_write(folder / f"{name}.{form}") as beside:
                beside.write_bytes(figure_bytes(figure, form))
        with atomic_write(folder / f"{name}.csv") as beside:
            pd.DataFrame(each.rows).to_csv(beside, index=False, float_format="%.10g")
    return svgs


def _latex(sections: list[Section]) -> str:
    """Return every table for a paper, in booktabs."""
    escaped = {"\\": r"\textbackslash{}", "±": r"$\pm$", "<": "$<$", ">": "$>$", "~": r"\textasciitilde{}"}
    escaped |= {"^": r"\textasciicircum{}", "−": "$-$"} | {sign: f"\\{sign}" for sign in "&%$#_{}"}
    lines = ["% needs \\usepackage{booktabs}"]
    for title, _, tables in sections:
        for table in tables:
            signed = [[re.sub(r"(?<!\S)-(?=\d)", "−", cell) for cell in row] for row in table]
            cells = [["".join(escaped.get(c, c) for c in cell) for cell in row] for row in signed]
            head, *rows = [" & ".join(row) + r" \\" for row in cells]
            body = [rf"\begin{{tabular}}{{l{'r' * (len(table[0]) - 1)}}}", r"\toprule", head, r"\midrule", *rows]
            lines += ["", f"% {title}", *body, r"\bottomrule", r"\end{tabular}"]
    return "\n".join(lines) + "\n"


def _markdown(name: str, sections: list[Section], source: str, drawn: dict[str, str]) -> str:
    lines = [f"# {name}"]
    for title, sentences, tables in sections:
        lines += ["", f"## {title}", "", *(f"- {sentence}" for sentence in sentences)]
        for table in tables:
            lines += ["", *markdown_lines(table)]
    lines += ["", "## Figures"] if drawn else []
    for figure, title in drawn.items():
        lines += ["", f"![{title}](figures/{figure}.svg)", "", f"*{title}*"]
    lines += ["", "## The file", "", "```yaml", source.rstrip(), "```", ""]
    return "\n".join(lines)


def _html(name: str, sections: list[Section], drawn: list[tuple[str, str]], source: str) -> str:
    """Return one self-contained page without scripts: answers and main table, then the figures, then the rest."""
    head, rest = sections[:2], sections[2:]
    body = [f"<h1>{html.escape(name)}</h1>", *map(_html_section, head), "<h2>Figures</h2>"]
    for i, (title, svg) in enumerate(drawn):
        body.append(f'<figure role="img" aria-label="{html.escape(title)}">{_own_ids(svg, f"f{i}")}</figure>')
    body += map(_html_section, rest)
    body.append(f"<h2>The file</h2><pre>{html.escape(source)}</pre>")
    start = f'<!doctype html><html lang="en"><head><meta charset="utf-8">{VIEW}<title>{html.escape(name)}</title>'
    return f"{start}<style>{STYLE}</style></head><body>\n" + "\n".join(body) + "\n</body></html>\n"


def _html_section(section: Section) -> str:
    parts = [f"<h2>{html.escape(section.title)}</h2>"]
    if section.sentences:
        parts.append("<ul>" + "".join(f"<li>{_inline(sentence)}</li>" for sentence in section.sentences) + "</ul>")
    for head, *rows in section.tables:
        cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
        lines = ["<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
        parts.append(f"<table><tr>{cells}</tr>{''.join(lines)}</table>")
    return "\n".join(parts)


def _inline(text: str) -> str:
    text = re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text))
    return re.sub(r"\*\*([^*]*)\*\*", r"<strong>\1</strong>", text)


def _own_ids(svg: str, prefix: str) -> str:
    """Prefix the ids of a figure, so that they are unique on the page."""
    svg = re.sub(r' id="image[0-9a-f]+"', "", svg)  # not referenced, and equal for equal images
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'((?:xlink:)?href="#)', rf"\1{prefix}-", svg).replace("url(#", f"url(#{prefix}-")
    return re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)


def send_report(ablation: Ablation, report: Report) -> str:
    """Send a report to W&B as one run of the group of its cells, offline without an API key; return a line about it.

    Where the file does not ask for W&B, the line is empty.
    """
    if not (where := ablation.wandb):
        return ""
    from vitlab.jobs.train.wandb import chosen_mode, prepare_environment

    way: Any
    name, project, way = ablation.name, where.project, chosen_mode(where.mode == "offline")
    if way == "disabled":
        return "W&B      disabled"
    prepare_environment()
    try:
        import wandb

        names: Any = {"project": project, "group": name, "job_type": "report", "name": f"{name} report"}
        with wandb.init(**names, mode=way, dir=str(ablation.directory.absolute())) as run:
            table = report.summary.astype(object).where(report.summary.notna(), None)
            page = wandb.Html(report.files[0])  # the whole report in one file
            run.log({"summary": wandb.Table(dataframe=table, allow_mixed_types=True), "report": page})
    except Exception as error:  # the files are the record; W&B may fail in many ways
        return f"W&B      not sent: {one_line(error)}"
    if way == "online":
        return f"W&B      project {project}, group {name}"
    return f"W&B      {way}; upload it with `wandb sync {quote(str(ablation.directory))}/wandb/offline-run-*`"
