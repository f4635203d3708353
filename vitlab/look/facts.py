"""Facts about a run for its page, and its card in a notebook, from the files in its directory."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import pandas as pd

from vitlab.analysis.intervals import share_interval
from vitlab.analysis.outcomes.calibration import calibration_error, reliability
from vitlab.analysis.subject import Subject
from vitlab.class_metrics import confusion
from vitlab.class_paths import choice_text
from vitlab.config.keys import class_and_arguments, dotted
from vitlab.config.yaml_files import read_own
from vitlab.data.files.splits import SplitName
from vitlab.jobs.listing import record_of
from vitlab.look.analysis_page import as_html
from vitlab.look.charts import confusions_table, line_chart, matrix_chart
from vitlab.runs.directory import RunDir
from vitlab.runs.manifest import read_manifest
from vitlab.runs.records import parameters_of, split_metrics
from vitlab.runs.run_lock import run_status
from vitlab.runs.same_images import same_images
from vitlab.runs.standing import Standing
from vitlab.stats import mcnemar, paired_interval
from vitlab.tables import in_short, percent_factor

CHARTS = {"loss": "loss", "acc1": "acc1", "lr": "(?<![a-z])lr(?![a-z])", "grad_norm": "grad_norm"}  # what keys have
NOT_DRAWN = ("step", "epoch", "attempt", "images_per_second", "data_wait", "seconds_left", "mfu")
NAMED_FIRST = {"tokenizer": "tokenizer", "pos_embed": "positions"}  # arguments of a network
MANY = 4  # runs from which on a page begins with a table of them
MOST_CLASSES = 60  # largest confusion matrix on a page
CARD = """.vitlab svg{width:23rem;max-width:100%;height:auto}.vitlab text{font:11px sans-serif;fill:currentColor}
.vitlab .t{font-size:13px}.vitlab .r{text-anchor:end}.vitlab .m{text-anchor:middle}
.vitlab .axis{stroke:currentColor;fill:none}.vitlab .line{fill:none;stroke-width:1.6}"""  # in a notebook
Points = list[tuple[float, float]]
SplitPredictions = tuple[SplitName, pd.DataFrame]  # a split, and what was predicted on it


@dataclass(frozen=True)
class Shown:
    """A run on the page.

    Args:
        name: Its name there.
        run: Its directory.
        data: What data.json says of its data.
        predictions: A split and what was predicted on it; None if there is nothing.
        subject: Its network, if its data still has these images.
        doubt: What to say where its data has others by now.
    """

    name: str
    run: RunDir
    data: dict[str, Any]
    predictions: SplitPredictions | None
    subject: Subject | None = None
    doubt: str = ""

    def names_of_classes(self, most: int) -> list[str]:
        """Return the names of the classes 0 to ``most``: those that the data gives, or numbers."""
        names = list(self.data.get("class_names") or [])
        return names + [f"class {k}" for k in range(len(names), most + 1)]


def config_of(run: RunDir) -> dict[str, str]:
    """Return the configuration of a run as dotted keys and values.

    Example:
        >>> config_of(RunDir("runs/first"))["data"]
        'vitlab.Digits'
    """
    return dotted(_configuration(run))


def _configuration(run: RunDir) -> dict[str, Any]:
    """Return the configuration of a run as it is nested; empty without a file."""
    return read_own(run.config) if run.config.is_file() else {}


def _chart_of(key: str) -> tuple[int, str]:
    """Return the place and the name of the chart of a logged key: one of :data:`CHARTS`, or the metric's own."""
    last = key.rpartition("/")[2]
    known = [(place, kind) for place, (kind, form) in enumerate(CHARTS.items()) if re.search(form, last)]
    return known[0] if known else (len(CHARTS), re.sub("^(train|val|test)[/_]", "", key))


def logged_curves(runs: dict[str, RunDir]) -> dict[str, dict[str, Points]]:
    """Return what runs have logged as charts, of each the points by line: loss, accuracy, learning rate and gradient
    norm, as far as any run has them, then the other metrics of training and validation, each with a chart of its own.

    Of :data:`MANY` runs and more, every key has a chart of its own, in which a line is a run.

    Example:
        >>> list(logged_curves({"first": RunDir("runs/first")})["loss"])
        ['train/loss', 'val/loss']
    """
    found: dict[tuple[int, str], dict[str, Points]] = {}
    for name, run in runs.items():
        for row in run.rows():
            at = row.get("step", row.get("epoch"))
            for key, value in row.items():
                if key in NOT_DRAWN or at is None or not isinstance(value, int | float) or not math.isfinite(value):
                    continue
                place, kind = _chart_of(key)
                chart, line = (kind, f"{name} {key}" if len(runs) > 1 else key) if len(runs) < MANY else (key, name)
                lines = found.setdefault((place, chart), {})
                lines.setdefault(line, []).append((float(at), float(value)))
    return {chart: found[at, chart] for at, chart in sorted(found)}


def environment(run: RunDir) -> list[tuple[str, str]]:
    """Return when, where and with which versions a run was trained."""
    record = record_of(run) if run.record else {}
    names = ("status", "ending", "started", "ended", "host", "devices", "python", "commit", "dirty", "seed")
    rows = [(name, record[name]) for name in names if record.get(name) not in (None, "")]
    rows += [(f"version of {name}", version) for name, version in (record.get("versions") or {}).items()]
    return [(name, value["text"] if name == "ending" else str(value)) for name, value in rows]


def predictions_of(run: RunDir) -> SplitPredictions | None:
    """Return a split and its predictions with the present weights, of test if possible; None if there is none."""
    splits: tuple[SplitName, ...] = ("test", "val")
    for split in splits:
        path = run.predictions(split)
        if path.is_file():
            table = pd.read_parquet(path)
            columns = {"target", "prediction", "probability"} <= set(table)
            if columns and not _standing(run, split, table).is_stale:
                return split, table
    return None


def _standing(run: RunDir, split: str, table: pd.DataFrame) -> Standing:
    """Return whether predictions belong to the present weights; those of an older vitlab go with the stored result."""
    return run.standing(split, table.attrs if "sha256" in table.attrs else None)


def numbers_of(run: RunDir) -> dict[str, Any] | None:
    """Return the stored metrics of the present weights: of test if there are any, else of val; None without either."""
    for split in ("test", "val"):
        result = run.measured(split)
        if metrics := split_metrics(result):
            first = "acc1" if "acc1" in metrics else next(iter(metrics))
            value = metrics[first]
            head = f"{percent_factor([value]) * value:.2f} %" if first == "acc1" else f"{value:.4g}"
            counts = {k: f" on {result[f'{k}_images']:.0f} images" for k in metrics if f"{k}_images" in result}
            texts = {k: f"{k} {in_short(v)}" if isinstance(v, float) else f"{k} {v}" for k, v in metrics.items()}
            others = [text + counts.get(k, "") for k, text in texts.items() if k != first]
            facts = {
                "split": split,
                "head": head,
                "name": "accuracy" if first == "acc1" else first,
                "n": f"{result['n']:.0f} " if "n" in result else "",
                "others": ", ".join(others),
                "value": value,
            }
            return {**facts, "of": _weights(run, result)}
    return None


def first_words(run: RunDir) -> list[str]:
    """Return what the page says first of a run: status, model, data, and whether its numbers are of its weights.

    Example:
        >>> first_words(RunDir("runs/first"))[1].partition(",")[0]
        'Classifier'
    """
    record: dict[str, Any] = dict(run.record)
    ending = record.get("ending") or {}
    words = [f"{run_status(run, record)}{': ' if ending else ''}{ending['text'] if ending else ''}"]
    content = _configuration(run)
    (model, args), (data, _) = (class_and_arguments(content, part) for part in ("model", "data"))
    size = parameters_of(run.read("model.json"))
    network = [(model or "unknown").rpartition(".")[2]]
    for key in (key for key in NAMED_FIRST if args.get(key) is not None):
        network.append(f"{NAMED_FIRST[key]} {str(choice_text(args[key])).partition('(')[0]}")
    words.append(", ".join([*network, *([f"{size / 1e6:.3g} M parameters"] if size else [])]))
    found: dict[str, Any] = run.read("data.json")
    images = [str(found.get("data") or data or "unknown").rpartition(".")[2]]
    if (n := ((found.get("splits") or {}).get("train") or {}).get("n")) is not None:
        images.append(f"{n:,} training images")
    images += [f"{len(names)} classes" for names in [found.get("class_names")] if names]
    words.append(", ".join(images))
    doubted = "not all numbers are of its present weights" if doubts_of(run) else "numbers of its present weights"
    return [*words, doubted if numbers_of(run) or doubts_of(run) else "not measured yet"]


def doubts_of(run: RunDir) -> list[str]:
    """Return what to say of stored results that are not of the weights that a test would measure now."""
    splits = [split for split in ("test", "val") if run.stored.get(split)]
    found = [(split, run.standing(split)) for split in splits]
    return [f"The result on {split} was {now.text}." for split, now in found if now.text and now.kind != "gone"]


def _weights(run: RunDir, result: Mapping[str, Any]) -> str:
    """Return which checkpoint a result is of, and its epoch if the manifest tells."""
    name = result.get("checkpoint")
    entry = read_manifest(run.checkpoints).get(str(name), {})
    known = entry.get("sha256") == result.get("sha256") and "epoch" in entry
    return f", of {name}, saved in epoch {entry['epoch'] + 1}" if known else f", of {name}" if name else ""


def outcome_facts(shown: Shown) -> dict[str, Any] | None:
    """Return accuracy, confusion, calibration and the worst mistakes of predictions; None without any."""
    found = shown.predictions
    if found is None or not np.isfinite(found[1]["probability"]).all():  # the largest of others is none
        return None
    split, table = found
    names = shown.names_of_classes(int(table[["target", "prediction"]].to_numpy().max()))
    right = (table["target"] == table["prediction"]).to_numpy()
    low, high = share_interval(int(right.sum()) / len(right), len(right))
    probability = table["probability"].to_numpy()
    bins, error = reliability(probability, right), calibration_error(probability, right)
    points = list(zip(bins["confidence"].tolist(), bins["accuracy"].tolist(), strict=True))
    title = f"calibration error {error.rms:.3f} [{error.low:.3f}, {error.high:.3f}], ECE {error.plain:.3f}"
    chart = line_chart(title, {"accuracy": points, "calibrated": [(0.0, 0.0), (1.0, 1.0)]}, x="probability")
    matrix = confusion(table["target"].to_numpy(), table["prediction"].to_numpy(), len(names))
    if len(names) <= MOST_CLASSES:
        confused = matrix_chart(matrix.tolist(), names)
    else:
        pairs = {(int(a), int(b)): int(matrix[a, b]) for a, b in np.argwhere(matrix) if a != b}
        confused = confusions_table(pairs, matrix.sum(axis=1).tolist(), names)
    wrong = table[~right].sort_values("probability", ascending=False, ignore_index=True)
    return {
        "split": split, "of": _weights(shown.run, table.attrs),
        "accuracy": float(right.mean()), "low": low, "high": high, "n": len(right), "chart": chart,
        "matrix": confused, "names": names,
        "wrong": wrong[["index", "target", "prediction", "probability"]].to_dict("records"),
    }  # fmt: skip


def overview_of(facts: Sequence[Mapping[str, Any]], differs: Sequence[tuple[str, Sequence[str]]]) -> dict[str, Any]:
    """Return a table of runs: what they reached, how large they are, how they ended, and in which values they differ.

    Args:
        facts: Of each run, with its name, first words, parameters, and its ``outcome`` or its ``numbers``.
        differs: Keys of the configurations with the value of each run.

    Example:
        >>> facts = [{"name": "a", "outcome": None, "numbers": None, "first": ["running"], "size": 7}]
        >>> table = overview_of(facts, [("model.depth", ["3"])])
        >>> [head for head, _ in table["heads"]][3:], [text for text, _ in table["rows"][0]]
        (['of', 'status', 'parameters', 'depth'], ['a', '', '', '', 'running', '7', '3'])
    """
    heads = [(name, "") for name in ("run", "result", "95 % over images", "of", "status", "parameters")]
    heads += [(key.rpartition(".")[2], key) for key, _ in differs]
    rows = []
    for i, run in enumerate(facts):
        outcome, numbers = run["outcome"], run["numbers"]
        value, result, ends, of = None, "", "", ""
        if outcome:
            value, result = outcome["accuracy"], f"{100 * outcome['accuracy']:.2f} %"
            ends = f"{100 * outcome['low']:.2f} to {100 * outcome['high']:.2f} %"
            of = f"accuracy, {outcome['n']} of {outcome['split']}"
        elif numbers:
            value, result = numbers["value"], numbers["head"]
            of = f"{numbers['name']}, {numbers['n']}of {numbers['split']}"
        first = [(run["name"], None), (result, value), (ends, value), (of, None)]
        size = (f"{run['size']:,}", run["size"]) if run["size"] else ("", None)
        status = run["first"][0].partition(":")[0]
        rows.append([*first, (status, None), size, *((values[i], None) for _, values in differs)])
    return {"heads": heads, "rows": rows}


def paired(one: Shown, other: Shown) -> dict[str, Any] | None:
    """Compare two runs image by image: McNemar's exact p, and the difference with its interval over images.

    Returns:
        The comparison; None if the runs are not known to have predicted the same images.
    """
    if one.predictions is None or other.predictions is None or not share_images(one, other):
        return None
    (split, a), (_, b) = one.predictions, other.predictions
    right, right_b = _rights(a), _rights(b)
    only_a, only_b = int((right & ~right_b).sum()), int((right_b & ~right).sum())
    low, high = paired_interval(only_b, only_a, len(right))
    facts = {"split": split, "n": len(right), "only_a": only_a, "only_b": only_b, "p": mcnemar(only_a, only_b)}
    return {**facts, "difference": (only_b - only_a) / len(right), "low": low, "high": high}


def share_images(one: Shown, other: Shown) -> bool:
    """Return whether two runs are known to have predicted the same images."""
    if one.predictions is None or other.predictions is None or one.predictions[0] != other.predictions[0]:
        return False
    (split, first), (_, second) = one.predictions, other.predictions
    return same_images(split, (first, second), (one.data, other.data)) is True


def _rights(table: pd.DataFrame) -> np.ndarray:
    """Return whether each image was right, ``(n,)``, in the order of the split."""
    order = np.argsort(table["index"].to_numpy(), kind="stable")
    return (table["target"] == table["prediction"]).to_numpy()[order]


def card_of(run: RunDir, status: str) -> str:
    """Return status, answer and curves of a run as HTML; what it does not have yet, or what is damaged, is left out.

    Example:
        >>> card = card_of(RunDir("runs/first"), "done")
        >>> "<b>first</b>, done" in card, card.count("<svg") > 0
        (True, True)
    """
    parts = [f"<p><b>{escape(run.name)}</b>, {escape(status)}</p>"]
    try:
        if found := numbers_of(run):
            split = "validation" if found["split"] == "val" else found["split"]
            answer = f"{found['name']} on {found['n']}{split} images{found['of']}"
            parts.append(f"<p><b>{escape(found['head'])}</b> {escape(answer)}</p>")
        parts += [f"<p>{as_html(doubt)}</p>" for doubt in doubts_of(run)]
        curves = logged_curves({run.name: run})
        parts += [line_chart(kind, lines, x="step") for kind, lines in curves.items()]
    except (ValueError, KeyError, TypeError, OSError) as error:
        parts.append(f"<p>{escape(str(error))}</p>")
    return f'<div class="vitlab"><style>{CARD}</style>{"".join(parts)}</div>'
