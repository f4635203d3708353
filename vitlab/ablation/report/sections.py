"""The sections of a report: sentences and tables, for Markdown and HTML alike."""

import json
from collections import Counter
from typing import Any

from vitlab.ablation.evidence import protocol
from vitlab.ablation.evidence.chain import environment_of, read_chain
from vitlab.ablation.execution.status import foreign_cells_text
from vitlab.ablation.file.spec import Ablation
from vitlab.ablation.inference import analyses, images
from vitlab.ablation.inference.answers import share_batches
from vitlab.ablation.inference.audit import mismatches
from vitlab.ablation.inference.baselines import ArmRow, arm_questions, arms_by_baseline
from vitlab.ablation.inference.findings import Findings
from vitlab.ablation.inference.linear import gate_of
from vitlab.ablation.inference.measured import CellResult, CellResults, is_number
from vitlab.ablation.inference.verdicts import Verdict
from vitlab.ablation.inference.words import (
    Section,
    Table,
    chance,
    decimals,
    deviations,
    exploratory,
    percent,
    short,
    signed,
    span,
)
from vitlab.ablation.report.tuned import tuning_section
from vitlab.errors import UsageError
from vitlab.runs.matching import is_there
from vitlab.runs.openings import openings

FACTS = ("commit", "dirty", "diff", "python", "versions", "devices", "threads")  # of a run, that cells should share
TESTS = ["arm", "n", "test", "r over seeds", "equivalence interval", "equivalence p"]
TESTS += ["interval, unpaired", "p, unpaired"]


def report_sections(found: Findings) -> list[Section]:
    """Return the sections of the report, answers first."""
    results, ablation = found.results, found.results.ablation
    answers = [_answer(results, v, _digits(found, v)) for v in found.verdicts] or _without_claims(found)
    parts = [Section("Answers", [*_mixed(results), *answers, *found.looks.sentences(), *_own_looks(found)])]
    for metric in results.metrics():
        mine = [row for row in found.arms if row.metric == metric]
        title = f"{metric} on the {ablation.split_of(metric)} split"
        words = [*(_gate_words(found) if metric == ablation.primary else []), *_cautions(found, metric, mine)]
        parts.append(Section(title, words, _main_tables(mine)))
    parts += images.section(found.pairs)
    parts += analyses.sections(results, found.curves)
    parts += tuning_section(results)
    parts.append(Section("Fairness", _fairness_words(found), [_fairness_table(found)]))
    if lost := _lost(results):
        parts.append(Section("Cells without a result", [], [[["arm", "seed", "state", "why"], *lost]]))
    else:
        parts.append(Section("Cells without a result", ["None: every planned cell is done."]))
    parts.append(Section("Provenance", _provenance(results)))
    parts.append(Section("Protocol", protocol.sentences(ablation)))
    return parts


def _without_claims(found: Findings) -> list[str]:
    """Return the verdict of each arm against its baseline in the primary metric, in words."""
    results, metric = found.results, found.results.ablation.primary
    rows = {row.arm: row for row in found.arms if row.metric == metric}
    digits, words = _decimals([*rows.values()]), ["The file makes no claims."]
    for baseline, arms in arms_by_baseline(results):
        for row in (rows[arm.name] for arm in arms if arm.name in rows):
            a, text = row.answer, f"**{row.verdict}**: {metric} of `{row.arm}` against `{baseline.name}`"
            text += f"; n {row.n}/{row.planned}"
            if row.test:
                text += f", difference {signed(a.estimate.value, digits)}, "
                text += f"interval {signed(a.difference.low, digits)} to {signed(a.difference.high, digits)}"
                text += f", adjusted p {chance(a.difference.adjusted)}"
            words.append(f"{text}.")
    return words


def _own_looks(found: Findings) -> list[str]:
    """Return a sentence on comparisons that had fewer seeds than the report at some look."""
    answers = [(row.arm, row.answer) for row in found.arms if row.test]
    answers += [(f"`{v.claim.text}`", v.answer) for v in found.verdicts if v.answer.estimate.is_testable]
    own = {
        f"{name} (at {', '.join(map(str, looks.counts))} of at most {looks.most} seeds)": None
        for name, answer in answers
        if (looks := answer.looks) and looks.counts != found.looks.counts
    }
    if not own:
        return []
    return [f"Fewer seeds at some look, so p values are adjusted for looks of their own: {', '.join(own)}."]


def _mixed(results: CellResults) -> list[str]:
    """Return a sentence on seeds whose arms were trained with different versions, so that they are no pairs."""
    seeds: dict[int, set[str]] = {}
    for (_, seed), run in results.runs.items():
        seeds.setdefault(seed, set()).add(environment_of(run))
    if not (mixed := [str(seed) for seed, kinds in seeds.items() if len(kinds) > 1]):
        return []
    kinds = " / ".join(sorted(set().union(*seeds.values())))
    return [
        f"**MIXED ENVIRONMENTS**: the arms of seed{'s' * (len(mixed) > 1)} {', '.join(mixed)} were trained with "
        f"different versions ({kinds}), so their differences hold those of the versions too; train them again."
    ]


def _digits(found: Findings, v: Verdict) -> int:
    """Return the decimals of the metric of a claim: those of its table, or of its number where it has none."""
    metric = v.claim.metric or found.results.ablation.primary
    rows = [row for row in found.arms if row.metric == metric]
    return _decimals(rows) if rows else decimals([v.answer.estimate.value])


def _decimals(rows: list[ArmRow]) -> int:
    """Return the decimals of a metric's table."""
    spreads = [x for row in rows for x in (row.sd, row.answer.estimate.value)]
    return decimals([row.mean for row in rows], spreads)


def _answer(results: CellResults, v: Verdict, digits: int = 4) -> str:
    where = f" ({v.setting})" if v.setting else ""
    a, test, alpha = v.answer, v.shown, results.ablation.stats.alpha
    numbers = ""
    if a.estimate.is_testable:
        what = "difference of gaps" if v.claim.is_gap else "difference"
        level = percent(1 - 2 * alpha if test is a.equivalence else 1 - alpha)
        low, high = signed(test.low, digits), signed(test.high, digits)
        numbers = f", {what} {signed(a.estimate.value, digits)}, {level} interval {low} to {high}"
        of = " of equivalence" if test is a.equivalence else " of being beyond the margin" if test is a.excess else ""
        numbers += f", adjusted p {chance(test.adjusted)}{of}"
        beside = [f"r {a.correlation:.2f}"] if a.correlation == a.correlation else []
        if a.is_paired and test is a.difference:
            beside.append(f"unpaired p {chance(a.unpaired.adjusted)}")
        numbers += f" ({', '.join(beside)})" if beside else ""
    note = f". {v.note[0].upper()}{v.note[1:]}" if v.note else ""
    return f"**{v.word}**: `{v.claim.text}`{where}; n {a.estimate.n}/{v.planned}{numbers}{note}."


def _cautions(found: Findings, metric: str, rows: list[ArmRow]) -> list[str]:
    ablation, words, powers = found.results.ablation, [], found.power(metric)
    tests = {row.test for row in rows} - {""}
    if "paired" in tests:
        words.append(_why_paired(found.results, metric, [row.arm for row in rows if row.test == "paired"]))
    if "welch" in tests:
        words.append("Welch's test: seeds are not treated as pairs.")
    for family, power in powers.items():
        which = "With" if family == ablation.primary else "Without"
        start = f"{which} a claim: " if len(powers) > 1 else ""
        m, low = power["comparisons"], 100 * ablation.stats.alpha
        words.append(
            f"{start}{m} comparisons are one family (Holm): at most {low:.3g} % of such reports have a false "
            f"difference, and at most {low:.3g} % a false equivalence. Intervals match the adjusted p values."
            if m > 1
            else f"{start}One comparison: of equal arms, at most {low:.3g} % of such reports find a difference, "
            f"and of arms at the margin, at most {low:.3g} % find them equivalent."
        )
        unit = "the paired differences" if power["test"] == "paired" else "a run"
        smallest = f"{deviations(power['detectable_sd'])} of {unit}"
        words.append(f"{start}n = {power['n']} detects a difference to the baseline of {smallest} with 80 % power.")
    if powers:
        if few := exploratory(min(power["n"] for power in powers.values())):
            words.append(f"{few}.")
        words.append("Arms are compared only with the baseline; other comparisons need a claim.")
    if metric != ablation.primary:
        words.append("Secondary metric: comparisons without a claim are exploratory, in a separate family.")
    if len({row.n for row in rows}) > 1 or any(row.n < row.planned for row in rows):
        words.append("Some cells are missing or have no number: n differs from the plan, see below.")
    lost = Counter(arm for (arm, _), cell in found.results.cells.items() if cell.state == "diverged")
    if lost:
        counts = ", ".join(f"{arm} ({n})" for arm, n in lost.items())
        words.append(f"Seeds that diverged are in no mean and no test, which favors the arms that lost them: {counts}.")
    if any(row.n == 1 for row in rows):
        words.append("n = 1: no inference.")
    return words


def _why_paired(results: CellResults, metric: str, arms: list[str]) -> str:
    asked = arm_questions(results, metric)
    unlike = [arm for arm in arms if not share_batches(results, [name for name, _ in asked[arm].terms])]
    if not unlike:
        return "Paired t tests: arms of one seed share the order of batches and their common initial weights."
    return f"Paired t tests, as the file says, although the batches of {', '.join(unlike)} are not the baseline's."


def _gate_words(found: Findings) -> list[str]:
    """Return the accuracy of logistic regression on the same pixels, the gate that arms must beat."""
    ablation, words = found.results.ablation, []
    gates: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for arm in found.results.resolved:
        gates.setdefault(str(gate := gate_of(found.linear, ablation, arm)), (gate, []))[1].append(arm.name)
    for gate, arms in gates.values():
        if "acc1" in gate:
            share = "" if len(gates) == 1 else f" of {', '.join(arms)}"
            words.append(
                f"Logistic regression on the pixels of {gate['n_train']:,} training images{share} reaches "
                f"{gate['acc1']:.4f} on {gate['n']:,}; an arm whose mean is not above that is marked under-trained."
            )
        elif "why" in gate:
            words.append(f"There is no logistic regression to compare with: {gate['why']}.")
    return words


def _main_tables(rows: list[ArmRow]) -> list[Table]:
    head = ["arm", "n", "mean ± sd", "interval", "difference", "interval of difference", "adjusted p", "verdict"]
    table, tests, digits = [head], [TESTS], _decimals(rows)
    for row in rows:
        a = row.answer
        mean = f"{row.mean:z.{digits}f}" if row.n else "-"
        spread = f" ± {row.sd:.{digits}f}" if row.n > 1 else ""
        cells = [row.arm, f"{row.n}/{row.planned}", mean + spread, span(row.low, row.high, digits)]
        cells += [signed(a.estimate.value, digits), span(a.difference.low, a.difference.high, digits)]
        table.append([*cells, chance(a.difference.adjusted), row.verdict])
        if row.test:
            r = f"{a.correlation:.2f}" if a.correlation == a.correlation else "-"
            inner = [span(a.equivalence.low, a.equivalence.high, digits), chance(a.equivalence.adjusted)]
            unpaired = [span(a.unpaired.low, a.unpaired.high, digits), chance(a.unpaired.adjusted)]
            tests.append([row.arm, str(a.estimate.n), row.test, r, *inner, *unpaired])
    return [table, tests] if len(tests) > 1 else [table]


def _fairness_words(found: Findings) -> list[str]:
    ablation, within = found.results.ablation, found.results.ablation.match.within
    words = ["The sum of the learning rates bounds how far Adam can move a weight."]
    words += [f"Arms must match within each level of {' and '.join(within)}."] if within else []
    unfair = mismatches(ablation, found.trained)
    return words + [f"{name}: {'; '.join(text)}." for name, text in unfair.items()]


def _fairness_table(found: Findings) -> Table:
    speed = {row.arm: row.images_per_second for row in found.arms if row.images_per_second == row.images_per_second}
    keys = ["parameters", "pos_embed parameters", "flops", "tokens", "steps", "sum_lr", "sum_lr_pos_embed"]
    keys += ["pos_embed_weight_decay", "token_sd", "pos_to_content"]
    for row in (rows := found.fairness()):
        if "steps_least" in row:  # seeds stopped at different steps
            row["steps"] = f"{row['steps_least']:,} to {row['steps_most']:,}"
    lines = [
        [
            row["arm"],
            *(row[k] if isinstance(row[k], str) else short(row[k]) for k in keys),
            f"{speed[row['arm']]:.0f}" if row["arm"] in speed else "-",
        ]
        for row in rows
    ]
    return [["arm", *(key.replace("_", " ") for key in keys), "images/s"], *lines]


def _lost(results: CellResults) -> Table:
    """Return arm, seed, state and reason of each planned cell without a result, a row for all seeds of an arm."""
    rows = [[name, str(seed), cell.state, _why(results, cell)] for (name, seed), cell in results.cells.items()]
    rows = [row for row in rows if row[2] != "done" or row[3]]
    lost, built = results.tuning.given_up, {arm.name for arm in results.known}
    rows += [[arm, "all", "given up", why] for arm, why in lost.items()]
    others = [arm.name for arm in results.ablation.arms if not results.arm(arm.name) and arm.name not in lost]
    return rows + [[arm, "all", "missing", f"not {'tuned' if arm in built else 'built'} yet"] for arm in others]


def _why(results: CellResults, found: CellResult) -> str:
    """Return why a cell has no result, or which of its metrics are no numbers; empty if all is well or said."""
    if found.note:
        return found.note
    if (text := found.cell.failure_text()) or not found.run:
        return text
    lost = [metric for metric in results.metrics() if not is_number(found.numbers.get(metric))]
    lost = [m for m in lost if m in found.numbers or m == results.ablation.primary]  # an analysis may not apply
    return "; ".join(f"{metric} is {found.numbers.get(metric, 'not among its numbers')}" for metric in lost)


def _provenance(results: CellResults) -> list[str]:
    """Return a sentence for each fact; it says so if cells differ."""
    records = [run.record for run in results.runs.values()]
    done = [run.read("done.json") for run in results.runs.values()]
    lines = [f"{fact}: {_shared([record.get(fact) for record in records])}" for fact in FACTS]
    identities = len({d.get("id") for d in done})
    shared = "one for each cell" if identities == len(done) else f"{identities} for {len(done)} cells"
    lines.append(f"identities of cells, digests of config, data and code: {shared}")
    for part in ("data", "code"):
        lines.append(f"{part} digest: {_shared([d.get('parts', {}).get(part) for d in done])}")
    if chain := read_chain(results.ablation.directory):
        lines.append(chain.sentence() + (f"; BROKEN: {chain.broken}" if chain.broken else ""))
    peaks = [record.get("peak_memory") or {} for record in records]
    for kind in ("host", "cuda"):
        if most := max((peak.get(kind, 0) for peak in peaks), default=0):
            lines.append(f"peak memory of a training, {kind}: {most / 2**30:.2f} GiB")
    files = {d.get("file") for d in done}
    changed = "unchanged since the first cell" if files <= {results.ablation.digest} else "CHANGED since some cells ran"
    lines.append(f"the file: {results.ablation.digest}, {changed}")
    lines.append(f"host: {_shared([d.get('host') for d in done])}")
    lines.append(_hours(results.ablation, done))
    if results.ablation.evaluate == "test":
        count = _opened(results)
        noted = f"{count} times" if count else f"at least {len(done)} times: readings were not counted"
        lines.append(f"the test split was opened {noted} on these cells, by whatever command, not counting analyses")
    kinds = [run.standing(results.ablation.evaluate).kind for run in results.runs.values()]
    if unknown := kinds.count("unknown"):
        lines.append(f"checksum: {unknown} cells do not tell which checkpoint was measured (by an older vitlab)")
    if text := foreign_cells_text(results.ablation, results.resolved):
        lines.append(text)
    return lines


def _hours(ablation: Ablation, done: list[dict[str, Any]]) -> str:
    """Return a sentence on how long the cells have run, and what of it is not known."""
    hours = sum(d.get("device_seconds", d["seconds"]) for d in done) / 3600
    older = sum("device_seconds" not in d for d in done)
    of = f", of {older} the last attempt alone (by an older vitlab)" if older else ", with all attempts"
    without = [name for name, there in (("tuning", ablation.tune), ("analyses", ablation.analyses)) if there]
    out = f"; without {' and '.join(without)}" if without else ""
    return f"device-hours: {hours:.3f} over {len(done)} cells{of}{out}; last one ended {max(d['ended'] for d in done)}"


def _opened(results: CellResults) -> int:
    """Return how often the test split was opened: by workers, on lost cells too, and by any command on a run."""
    path = results.ablation.directory / "readings.jsonl"
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines()] if is_there(path) else []
    except ValueError as error:
        raise UsageError(f"{path} is damaged: {error}; a line was cut off there: remove it") from error
    counts = Counter(row["cell"] for row in rows if row["split"] == "test")
    for run in results.runs.values():
        name = run.path.relative_to(results.ablation.directory).as_posix()
        counts[name] = max(counts[name], openings(run.path, "test"))
    return counts.total()


def _shared(values: list[Any]) -> str:
    texts = sorted({_text(value) for value in values})
    return texts[0] if len(texts) == 1 else f"DIFFERS between cells: {' / '.join(texts)}"


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
