"""The verdict as HTML for a notebook's cell: no script, and readable in both themes."""

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
    if result.found:
        heads = "".join(f"<th>{head}</th>" for head in ("finding", "would save", "speedup", "change"))
        rows = Markup("").join(map(_row, result.found))
        parts.append(Markup(f"<table><tr>{heads}</tr>{{}}</table>").format(rows))
    return str(Markup("").join(parts))


def _row(outcome: Outcome) -> Markup:
    changes = Markup("<br>").join(plain(change, 400) for change in outcome.advice)
    return _ROW.format(plain(outcome.title, 200), formatting.saving(outcome), formatting.speedup(outcome), changes)
