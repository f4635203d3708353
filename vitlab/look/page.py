"""One HTML page about a run, several runs, or any network: a single file that works offline."""

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np

from vitlab.analysis.subject import Subject
from vitlab.config.keys import differences, dotted
from vitlab.jobs.typed import first_settings
from vitlab.look.analysis_page import HOME, template
from vitlab.look.diagram import explorer
from vitlab.look.facts import (
    MANY,
    Shown,
    SplitPredictions,
    config_of,
    doubts_of,
    environment,
    first_words,
    logged_curves,
    numbers_of,
    outcome_facts,
    overview_of,
    paired,
    predictions_of,
)
from vitlab.look.listed import has_images, listed
from vitlab.look.moments import SHOWN, moments_of
from vitlab.look.stored_analyses import findings_of
from vitlab.look.viewer import BUDGET, packed, picture_url, pictures_of, shape_of
from vitlab.look.written import MARK
from vitlab.runs.directory import RunDir
from vitlab.runs.machine import own_version
from vitlab.runs.records import parameters_of

WRONG = 12  # largest number of mistakes shown
POINTS = 2000  # of a curve
SCRIPTS = ("common.js", "viewer.js", "analyses.js", "curves.js", "listed.js", "drawings.js", "overview.js")
RELOAD = 20  # seconds


def render(
    title: str,
    runs: dict[str, RunDir],
    subjects: Sequence[Subject] = (),
    pictures: int = 12,
    reload: int = 0,
    live: dict[str, SplitPredictions] | None = None,
) -> str:
    """Return the page.

    Args:
        title: Its heading.
        runs: Run directories by name.
        subjects: Networks with their pictures, for viewer, drawings and mistakes; those of runs first, in their order.
        pictures: Pictures of the viewer, at most.
        reload: Seconds after which the page loads itself again; 0 for never.
        live: Split and predictions of runs that still train, in place of the stored ones; then maps are few and small.
    """
    by_name = {subject.name: subject for subject in subjects}
    shown = [_shown(name, run, by_name.get(name), (live or {}).get(name)) for name, run in runs.items()]
    facts = [_facts_of(one) for one in shown]
    differs = differences([config_of(run) for run in runs.values()]) if len(runs) > 1 else []
    is_many = len(runs) >= MANY
    pairs = [(a, b, paired(a, b)) for a, b in combinations(shown, 2)]
    content: dict[str, Any] = {
        "runs": facts,
        "overview": overview_of(facts, differs) if is_many else None,
        "differs": [] if is_many else differs,
        "pairs": [{"a": a.name, "b": b.name, **found} for a, b, found in pairs if found],
        "curves": _thinned(logged_curves(runs)),
        "viewer": _viewed(runs, subjects, pictures, live is None),
        "listed": listed(shown) if live is None else None,
        "drawings": _drawings(subjects),
        "analyses": findings_of(runs),
    }
    tables = [(one["files"], one["differences"]) for one in content["analyses"]]
    return template("page.html").render(
        **content,
        title=title,
        many=is_many,
        sections=_sections(content),
        files=[{"runs": runs_of, "differences": found and found["csv"]} for runs_of, found in tables],
        reload=reload,
        mark="" if live is None else MARK,
        version=own_version(),
        script="".join((HOME / name).read_text() for name in SCRIPTS),
        plot_script=(HOME / "uplot" / "uPlot.iife.min.js").read_text(),
        plot_style=(HOME / "uplot" / "uPlot.min.css").read_text(),
    )


def _sections(content: dict[str, Any]) -> list[tuple[str, str]]:
    """Return id and name of each section, in their order."""
    names = {"differs": "what differs", "pairs": "image by image", "viewer": "pictures", "listed": "predictions"}
    names["drawings"], is_many = "architecture", content["overview"] is not None
    first = [("runs", "runs")] if is_many else [(f"run{i}", one["name"]) for i, one in enumerate(content["runs"])]
    order = ("curves", "pairs") if is_many else ("differs", "pairs", "curves")
    shown = [key for key in (*order, "viewer", "listed", "drawings", "analyses") if content[key]]
    return [*first, *((key, names.get(key, key)) for key in shown), *([("each", "each run")] if is_many else [])]


def _viewed(
    runs: dict[str, RunDir], subjects: Sequence[Subject], pictures: int, has_gradients: bool
) -> list[dict[str, Any]]:
    """Return shape, pictures and moments of each network that has pictures."""
    share = (BUDGET if has_gradients else BUDGET // 8) // max(1, len(subjects))
    shown: list[dict[str, Any]] = []
    for subject in subjects:
        if pictures and subject.has_pictures:
            found = pictures_of(subject, share, pictures, has_gradients)
            one: dict[str, Any] = {"shape": shape_of(subject, len(found), share), "pictures": found}
            most = max(3, SHOWN // max(1, len(subjects) // 2))
            shown.append(one | {"moments": _moments(runs.get(subject.name), subject, one["shape"], most)})
    return shown


def _drawings(subjects: Sequence[Subject]) -> list[tuple[str, str]]:
    """Return drawings of the networks and, where several are drawn alike and share one, whose it is."""
    found: dict[str, list[int]] = {}
    for i, subject in enumerate(subjects):
        found.setdefault(explorer(subject.net, "", "") if len(subjects) > 1 else "", []).append(i)
    drawn = []
    for first, *others in found.values():
        names = ", ".join(subjects[i].name for i in (first, *others)) if others else ""
        drawn.append((names, explorer(subjects[first].net, subjects[first].name, f"net{first}")))
    return drawn


def _moments(run: RunDir | None, subject: Subject, shape: dict[str, Any], most: int) -> dict[str, Any] | None:
    """Return what a run kept of the viewer's first pictures while it trained; None if there is nothing."""
    if run is None or subject.pictures is not None or "val" not in getattr(subject.data, "splits", {}):
        return None
    names = subject.class_names if subject.scores_classes else None
    found = moments_of(run, subject.data.splits["val"], names, shape, most)
    if found:
        found |= {name: packed(found[name]) for name in ("token", "positions") if name in found}
    return found


def _thinned(metrics: dict[str, dict[str, list[tuple[float, float]]]]) -> dict[str, dict[str, Any]]:
    """Return curves with up to ``POINTS`` points each, many curves with fewer: every n-th point and the last."""
    found: dict[str, dict[str, Any]] = {}
    for kind, lines in metrics.items():
        for name, points in lines.items():
            apart = -(-len(points) // max(POINTS // max(1, len(lines) // MANY), 100))
            kept = [*points[:-1:apart], *points[-1:]]
            found.setdefault(kind, {})[name] = {"x": [x for x, _ in kept], "y": [y for _, y in kept], "every": apart}
    return found


def _shown(name: str, run: RunDir, subject: Subject | None, live: SplitPredictions | None) -> Shown:
    """Return a run with its network and predictions, given or stored."""
    found, data, doubt = live or predictions_of(run), run.read("data.json"), ""
    there = has_images(subject, found, data) if subject and found else None
    if found and there is False:
        again = f"vitlab {'validate' if found[0] == 'val' else 'test'} {run.typed}"
        doubt = (
            f"The images of {found[0]} are no longer those that were measured: no pictures of mistakes, and no map; "
        )
        doubt += f"`{again}` measures those of now."
    return Shown(name, run, data, found, subject if there else None, doubt)


def _facts_of(shown: Shown) -> dict[str, Any]:
    """Return what stands on the page of a run alone."""
    run = shown.run
    outcome = outcome_facts(shown)
    return {
        "name": shown.name,
        "typed": run.typed,
        "outcome": outcome,
        "recipe": list(dotted(first_settings(run) or {}).items()),
        "environment": environment(run),
        "numbers": None if outcome else numbers_of(run),
        "doubts": [*doubts_of(run), *([shown.doubt] if shown.doubt else [])],
        "first": first_words(run),
        "size": parameters_of(run.read("model.json")),
        "config": list(config_of(run).items()),
        "wrong": _mistakes(outcome, shown.subject),
    }


def _mistakes(outcome: dict[str, Any] | None, subject: Subject | None) -> list[dict[str, Any]]:
    """Return the worst mistakes with their images, if available."""
    if not outcome or subject is None:
        return []
    images = subject.data.splits[outcome["split"]]
    found = []
    for row in outcome["wrong"][:WRONG]:
        (pixels,) = subject.pixels_of(images.take(np.array([row["index"]])))
        names = {key: outcome["names"][int(row[key])] for key in ("target", "prediction")}
        found.append({**row, **names, "src": picture_url(pixels, 112)})
    return found
