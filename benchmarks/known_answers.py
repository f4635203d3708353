"""Ask every analysis about networks whose answer is known, and print what it says beside what is true.

    python benchmarks/known_answers.py [FILE.md]

It takes some minutes of one core. The networks and the questions are those of `tests/known_answers/`.
"""

import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "known_answers"))

from answers import ALWAYS, ANSWERS, Answer, ask, check_intervals
from zoo import ZOO, build

from vitlab.analysis import ANALYSES
from vitlab.errors import UsageError
from vitlab.tables import table


def main(argv: list[str]) -> int:
    """Print the tables, write them to a file if one is named; return 1 if something said is not true."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    answers = [(answer, *_said(answer)) for answer in ANSWERS]
    rows = [
        {
            "analysis": a.analysis,
            "network": a.network,
            "said": said,
            "true": a.true,
            "right": "yes" if right else "**no**",
        }
        for a, said, right in answers
    ]
    networks = [{"network": name, "known": " ".join((made.__doc__ or "").split())} for name, made in ZOO.items()]
    taken = [_taken(name) for name in ANALYSES]
    lines = [
        "# Known answers",
        "`python benchmarks/known_answers.py benchmarks/known_answers.md` asks analyses about networks that are "
        "planted by hand, trained, or calibrated by construction (`tests/known_answers/zoo.py`), and writes this page. "
        "`segmentation`, `labels` and `reconstruction`, which need masks, folds or MAE, are asked in "
        "`tests/analysis/`.",
        table(sorted(rows, key=lambda row: row["analysis"]), {name: f"{{{name}}}" for name in rows[0]}),
        "## Networks",
        table(networks, {"network": "{network}", "what is known": "{known}"}),
        "## Every analysis of every network",
        "What must hold for any network, such as that attention sums to at most one and that a number lies in its "
        "interval, is checked for each that is taken; the others are refused in a line.",
        table(taken, {name: f"{{{name}}}" for name in taken[0]}),
    ]
    text = "\n\n".join(lines) + "\n"
    sys.stdout.write(text)
    for path in argv:
        Path(path).write_text(text)
    return int(not all(right for *_, right in answers) or any(row["broken"] for row in taken))


def _said(answer: Answer) -> tuple[str, bool]:
    said, right = answer.said
    return said.replace("|", "\\|"), right


def _taken(analysis: str) -> dict[str, str | int]:
    """Return how many networks an analysis takes and refuses, and those of which it says what cannot be."""
    took, broken = 0, []
    for network in ZOO:
        found = ask(analysis, network)
        if isinstance(found, UsageError):
            continue
        took += 1
        try:
            check_intervals(found.table)
            ALWAYS.get(analysis, lambda *_: None)(found.table, build(network))
        except AssertionError:
            broken.append(network)
    return {"analysis": analysis, "taken": took, "refused": len(ZOO) - took, "broken": ", ".join(broken)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
