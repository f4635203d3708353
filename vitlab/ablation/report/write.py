"""The report: tables as files, report.md, and report.html, which is one file and opens anywhere."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from vitlab.ablation.file.spec import Ablation
from vitlab.ablation.report.drawings import Drawing, Rows, figures
from vitlab.ablation.report.html_page import page
from vitlab.ablation.report.panels import panels
from vitlab.ablation.report.sections import report_sections
from vitlab.ablation.report.tuned import responses
from vitlab.ablation.verdict.findings import find
from vitlab.ablation.verdict.linear import linear
from vitlab.ablation.verdict.looks import take_look
from vitlab.ablation.verdict.measured import Results, collect
from vitlab.ablation.verdict.verdicts import Verdict
from vitlab.ablation.verdict.words import Section
from vitlab.ablation.work.cells import Resolved
from vitlab.errors import UsageError
from vitlab.runs.directory import write_text


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


def write_report(ablation: Ablation, resolved: list[Resolved], output: str | None, accept_stale: bool) -> Report:
    """Write the report on the finished cells, and return it."""
    results = collect(ablation, resolved, accept_stale)
    _refuse_useless(results)
    place = ablation.directory / "report"
    place.mkdir(parents=True, exist_ok=True)
    table, found = (
        results.table(),
        find(results, take_look(ablation, results.seeds()), linear(ablation, results.resolved)),
    )
    table.to_csv(place / "results.csv", index=False)
    table.to_parquet(place / "results.parquet", index=False)
    summary = found.table()
    summary.to_csv(place / "summary.csv", index=False, float_format="%.10g")
    drawn = figures(results, found.arms) | panels(found) | responses(results)
    _keep(drawn, place / "figures")
    parts = report_sections(found)
    source = ablation.file.path.read_text()
    titles = {name: title for name, (title, *_) in drawn.items()}
    write_text(place / "report.md", _markdown(ablation.name, parts, source, titles))
    write_text(place / "tables.tex", _latex(parts))
    write_text(place / "report.html", page(ablation.name, parts, [(t, d.svg) for t, d, _ in drawn.values()], source))
    names = ("report.html", "report.md", "summary.csv", "results.csv", "results.parquet")
    if output:
        Path(output).mkdir(parents=True, exist_ok=True)
        for name in ("report.md", "summary.csv", "tables.tex"):
            shutil.copyfile(place / name, Path(output) / name)
        shutil.copyfile(place / "results.csv", Path(output) / "seeds.csv")
        drawings = shutil.ignore_patterns("*.csv")
        shutil.copytree(place / "figures", Path(output) / "figures", ignore=drawings, dirs_exist_ok=True)
    return Report(
        arms=pd.DataFrame([row.record() for row in found.arms]),
        claims=summary[summary["kind"] == "claim"].dropna(axis=1, how="all").reset_index(drop=True),
        verdicts=found.verdicts,
        results=table,
        summary=summary,
        answers=parts[0][1],
        files=[place / name for name in names],
    )


def _refuse_useless(results: Results) -> None:
    """Refuse results of no cell, and of cells that read different images."""
    if not results.runs:
        stale = sum(state == "stale" for state in results.states.values())
        ways = [f"--accept-stale includes the {stale} that other code trained"] if stale else []
        text = f"no cell of {results.ablation.name} is done with the present code and readable"
        raise UsageError("; ".join([text, *ways, *list(results.notes.values())[:1]]))
    if results.mixed:
        cells = ", ".join(results.mixed[:4]) + (f" and {len(results.mixed) - 4} more" if len(results.mixed) > 4 else "")
        raise UsageError(f"{cells}: trained on other images than the rest; remove these cells and `run` again")


def _keep(drawn: dict[str, tuple[str, Drawing, Rows]], folder: Path) -> None:
    """Write every figure twice, and its numbers."""
    folder.mkdir(exist_ok=True)
    for name, (_, drawing, data) in drawn.items():
        write_text(folder / f"{name}.svg", drawing.svg)
        (folder / f"{name}.pdf").write_bytes(drawing.pdf)
        pd.DataFrame(data).to_csv(folder / f"{name}.csv", index=False, float_format="%.10g")


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
            head, *rows = [[cell.replace("|", "\\|") for cell in row] for row in table]
            lines += ["", f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
            lines += [f"| {' | '.join(row)} |" for row in rows]
    lines += ["", "## Figures"] if drawn else []
    for figure, title in drawn.items():
        lines += ["", f"![{title}](figures/{figure}.svg)", "", f"*{title}*"]
    lines += ["", "## The file", "", "```yaml", source.rstrip(), "```", ""]
    return "\n".join(lines)
