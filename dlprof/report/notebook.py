"""What a notebook's cell shows: the verdict, without a script and readable in both themes, and the page in a frame."""

from __future__ import annotations

from markupsafe import Markup

from dlprof.plain import plain
from dlprof.report import formatting, verdict
from dlprof.result import Outcome, Result

_ROW = Markup("<tr><td style='text-align:left'>{}</td><td>{}</td><td>{}</td><td style='text-align:left'>{}</td></tr>")


def render(result: Result) -> str:
    """Return the headline, the findings with their savings and changes, and what the reader must know first."""
    diagnosis, gain, _ = verdict.headline(result)
    parts = [
        Markup("<p style='opacity:.7'>{} · {} · {}</p>").format(
            formatting.name(result), formatting.devices(result), formatting.steps(result)
        ),
        Markup("<p><strong>{}</strong> {}</p>").format(diagnosis, gain),
    ]
    notices = verdict.notices(result)
    if notices:
        parts.append(Markup("<ul>{}</ul>").format(Markup("").join(map(Markup("<li>{}</li>").format, notices))))
    for first, found in (("finding", result.found), (verdict.APART.lower(), result.if_training_may_change)):
        heads = "".join(f"<th>{head}</th>" for head in (first, "would save", "speedup", "change"))
        rows = Markup("").join(map(_row, found))
        parts += [Markup(f"<table><tr>{heads}</tr>{{}}</table>").format(rows)] if found else []
    return str(Markup("").join(parts))


def page(result: Result) -> str:
    """Return the verdict, and below it the whole report in a frame, which can be folded.

    The frame has an origin of its own: what the page runs reaches nothing of the notebook's.
    """
    from dlprof.report import html

    frame = "<iframe sandbox='allow-scripts' style='width:100%;height:48em;border:0' srcdoc='{}'></iframe>"
    whole = Markup(f"<details open><summary>Report</summary>{frame}</details>").format(html.render(result))
    return render(result) + str(whole)


def _row(outcome: Outcome) -> Markup:
    said = [f"{plain(c.text, 400)}{verdict.OTHERWISE if c.training else ''}" for c in outcome.changes]
    changes = Markup("<br>").join(said)
    return _ROW.format(plain(outcome.title, 200), formatting.saving(outcome), formatting.speedup(outcome), changes)
