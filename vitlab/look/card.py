"""A run as a notebook shows it: status, answer and curves in one piece of HTML; alone, as it needs no page."""

from html import escape

from vitlab.look.analysis_page import as_html
from vitlab.look.facts import curves_of, doubts_of, numbers_of
from vitlab.runs.directory import RunDir

STYLE = """.vitlab svg{width:23rem;max-width:100%;height:auto}.vitlab text{font:11px sans-serif;fill:currentColor}
.vitlab .t{font-size:13px}.vitlab .r{text-anchor:end}.vitlab .m{text-anchor:middle}
.vitlab .axis{stroke:currentColor;fill:none}.vitlab .line{fill:none;stroke-width:1.6}"""


def card_of(run: RunDir, status: str) -> str:
    """Return the HTML; what a run does not have yet, or what is damaged, is left out.

    Example:
        >>> card = card_of(RunDir("runs/first"), "done")
        >>> "<b>first</b>, done" in card, card.count("<svg") > 0
        (True, True)
    """
    parts = [f"<p><b>{escape(run.path.resolve().name)}</b>, {escape(status)}</p>"]
    try:
        if found := numbers_of(run):
            split = "validation" if found["split"] == "val" else found["split"]
            said = f"{found['name']} on {found['n']}{split} images{found['of']}"
            parts.append(f"<p><b>{escape(found['head'])}</b> {escape(said)}</p>")
        parts += [f"<p>{as_html(doubt)}</p>" for doubt in doubts_of(run)]
        parts += curves_of({run.path.name: run})
    except (ValueError, KeyError, TypeError, OSError) as error:
        parts.append(f"<p>{escape(str(error))}</p>")
    return f'<div class="vitlab"><style>{STYLE}</style>{"".join(parts)}</div>'
