"""The report: tables as files, report.md, and report.html, which is one file and opens anywhere."""

import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from vitlab.ablation.file.spec import Ablation
from vitlab.ablation.report.drawings import figures
from vitlab.ablation.report.html_page import page
from vitlab.ablation.report.panels import panels
from vitlab.ablation.report.provenance import provenance
from vitlab.ablation.verdict import analyses, images
from vitlab.ablation.verdict.arms import ArmRow
from vitlab.ablation.verdict.audit import flags
from vitlab.ablation.verdict.findings import Findings, find
from vitlab.ablation.verdict.measured import Results, collect
from vitlab.ablation.verdict.verdicts import Verdict
from vitlab.ablation.verdict.words import Section, Table, chance, short, signed, span
from vitlab.ablation.work.cells import Resolved
from vitlab.runs.directory import write_text


@dataclass
class Report:
    """What the finished cells say; as text, the answers to the claims."""

    arms: pd.DataFrame  # a row for each arm and metric: mean, interval, difference to the baseline, verdict
    claims: pd.DataFrame  # a row for each claim and setting
    verdicts: list[Verdict]
    results: pd.DataFrame  # a row for each cell and metric
    summary: pd.DataFrame  # every number of the report; `kind` tells the rows apart
    answers: list[str]
    files: list[Path]
    sent: str = ""  # what became of it at W&B

    def __str__(self) -> str:
        return "\n".join(self.answers)


def write_report(ablation: Ablation, resolved: list[Resolved], output: str | None, accept_stale: bool) -> Report:
    """Write the report from whatever is done, and return it."""
    results = collect(ablation, resolved, accept_stale)
    place = ablation.directory / "report"
    place.mkdir(parents=True, exist_ok=True)
    table, found = results.table(), find(results)
    table.to_csv(place / "results.csv", index=False)
    table.to_parquet(place / "results.parquet", index=False)
    summary = found.table()
    summary.to_csv(place / "summary.csv", index=False, float_format="%.10g")
    drawn = figures(results, found.arms) | panels(found)
    (place / "figures").mkdir(exist_ok=True)
    for name, (_, svg, data) in drawn.items():
        write_text(place / "figures" / f"{name}.svg", svg)
        pd.DataFrame(data).to_csv(place / "figures" / f"{name}.csv", index=False, float_format="%.10g")
    sections = _sections(found)
    source = ablation.file.path.read_text()
    write_text(place / "report.md", _markdown(ablation.name, sections, source))
    write_text(place / "report.html", page(ablation.name, sections, [(t, svg) for t, svg, _ in drawn.values()], source))
    names = ("report.html", "report.md", "summary.csv", "results.csv", "results.parquet")
    if output:
        Path(output).mkdir(parents=True, exist_ok=True)
        for name in ("report.md", "summary.csv"):
            shutil.copyfile(place / name, Path(output) / name)
        drawings = shutil.ignore_patterns("*.csv")
        shutil.copytree(place / "figures", Path(output) / "figures", ignore=drawings, dirs_exist_ok=True)
    return Report(
        arms=pd.DataFrame([row.record() for row in found.arms]),
        claims=summary[summary["kind"] == "claim"].dropna(axis=1, how="all").reset_index(drop=True),
        verdicts=found.verdicts,
        results=table,
        summary=summary,
        answers=sections[0][1],
        files=[place / name for name in names],
    )


def _sections(found: Findings) -> list[Section]:
    results, ablation = found.results, found.results.ablation
    answers = [_answer(results, v) for v in found.verdicts]
    sections: list[Section] = [("Answers", answers or ["The file makes no claims."], [])]
    for metric in results.metrics():
        mine = [row for row in found.arms if row.metric == metric]
        title = f"{metric} on the {'val' if '/' in metric else ablation.evaluate} split"
        sections.append((title, _cautions(found, metric, mine), [_main_table(mine)]))
    sections += images.section(results, found.pairs, found.joint)
    sections += analyses.sections(results, found.curves)
    sections.append(("Fairness", _fairness_words(results), [_fairness_table(found)]))
    lost = [[name, str(seed), state, _why(results, name, seed)] for (name, seed), state in results.states.items()]
    lost = [row for row in lost if row[2] != "done"]
    if lost:
        sections.append(("Cells without a result", [], [[["arm", "seed", "state", "why"], *lost]]))
    else:
        sections.append(("Cells without a result", ["None: every planned cell is done."], []))
    sections.append(("Provenance", provenance(results), []))
    return sections


def _answer(results: Results, v: Verdict) -> str:
    where = f" ({v.setting})" if v.setting else ""
    d = v.difference
    numbers = ""
    if not math.isnan(d.value):
        what = "difference of gaps" if v.claim.sign == "gap" else "difference"
        ci = f"{results.ablation.stats.ci:.0%} interval"
        numbers = f", {what} {d.value:+.4f}, {ci} {d.low:+.4f} to {d.high:+.4f}, adjusted p {chance(v.p)}"
    note = f". {v.note[0].upper()}{v.note[1:]}" if v.note else ""
    return f"**{v.word}**: `{v.claim.text}`{where}; n {v.n}{numbers}{note}."


def _cautions(found: Findings, metric: str, rows: list[ArmRow]) -> list[str]:
    words = []
    tests = {row.test for row in rows} - {""}
    if "dunnett" in tests:
        words.append("Exploratory: Dunnett's test, which assumes equal spread of all arms. Headlines need five seeds.")
    if "welch" in tests:
        words.append("Welch's test with Holm's adjustment; no equal spread is assumed.")
    if power := found.power(metric):
        smallest = f"{power['detectable_sd']:.1f} sd of a run"
        words.append(f"n = {power['n']} finds a difference to the baseline of {smallest} in 80 % of cases.")
        words.append("Arms are compared with the baseline alone; what differs between the others is not tested here.")
    if len({row.n for row in rows}) > 1 or any(row.n < row.planned for row in rows):
        words.append("Some cells are missing: n differs from what was planned, see below.")
    if any(row.n == 1 for row in rows):
        words.append("n = 1: no inference.")
    return words


def _main_table(rows: list[ArmRow]) -> Table:
    head = ["arm", "n", "mean ± sd", "interval", "difference", "interval of difference", "adjusted p", "verdict"]
    table = [[*head, "parameters", "MFLOP", "images/s"]]
    for row in rows:
        mean = f"{row.mean:.4f}" if row.n else "-"
        spread = f" ± {row.sd:.4f}" if row.n > 1 else ""
        cells = [row.arm, f"{row.n}/{row.planned}", mean + spread, span(row.low, row.high)]
        cells += [signed(row.difference.value), span(row.difference.low, row.difference.high)]
        flops = f"{row.flops / 1e6:.4g}" if row.flops else "-"
        speed = f"{row.images_per_second:.0f}" if row.images_per_second == row.images_per_second else "-"
        table.append([*cells, chance(row.difference.adjusted), row.verdict, f"{row.parameters or 0:,}", flops, speed])
    return table


def _fairness_words(results: Results) -> list[str]:
    within = results.ablation.match.within
    words = ["The sum of the learning rates bounds how far Adam can move a weight."]
    words += [f"Arms must match within each level of {' and '.join(within)}."] if within else []
    unfair = flags(results.ablation, results.resolved)
    return words + [f"{name}: {'; '.join(text)}." for name, text in unfair.items()]


def _fairness_table(found: Findings) -> Table:
    keys = ["parameters", "pos_embed parameters", "flops", "tokens", "steps", "sum_lr", "sum_lr_pos_embed"]
    keys.append("pos_embed_weight_decay")
    rows = [[row["arm"], *(short(row[key]) for key in keys)] for row in found.fairness()]
    return [["arm", *(key.replace("_", " ") for key in keys)], *rows]


def _why(results: Results, name: str, seed: int) -> str:
    failure = results.cells[name, seed].failure()
    return f"{failure['stage']}, {failure['kind']}: {failure['last']}" if failure else ""


def _markdown(name: str, sections: list[Section], source: str) -> str:
    lines = [f"# {name}"]
    for title, sentences, tables in sections:
        lines += ["", f"## {title}", "", *(f"- {sentence}" for sentence in sentences)]
        for table in tables:
            head, *rows = [[cell.replace("|", "\\|") for cell in row] for row in table]
            lines += ["", f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
            lines += [f"| {' | '.join(row)} |" for row in rows]
    lines += ["", "## The file", "", "```yaml", source.rstrip(), "```", ""]
    return "\n".join(lines)
