"""The result as one self-contained page, report.html: it needs no network, no other file and no server.

Texts in a result may come from anybody's trace. The template escapes them all, figures are JSON that cannot close its
element, and the page's policy allows no script but its own two.
"""

from __future__ import annotations

import base64
import hashlib
import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemBytecodeCache, FunctionLoader, Template
from jinja2.bccache import Bucket
from markupsafe import Markup, escape
from msgspec import Struct

from dlprof.files import compact
from dlprof.plain import NBSP, command_line, plain
from dlprof.report import brief, first, formatting, looks, tried, verdict
from dlprof.report.figures import drawing, memory, modules, ranks, screen, shapes
from dlprof.result import SAVING, Fact, Outcome, Place, Proposal, Result
from dlprof.units import UNKNOWN


class Tile(Struct, frozen=True):
    """One figure in large type, and what it is."""

    value: str
    name: str


class Card(Struct, frozen=True):
    """A finding as the page shows it."""

    key: str  # its place; "training-1": shown apart, as it changes the training
    number: int  # of the change that cures it; 0: none does
    outcome: Outcome
    width: float  # the saving as a part of the step, in percent
    faster: bool  # whether its speed-up is known
    evidence: drawing.Figure | None


def render(result: Result, run: str = "", named: first.Named = lambda _: None) -> str:
    """Return the page as text. Write it as UTF-8 with Unix line ends: its policy has the hashes of its scripts.

    `run`: how a command names the run, by default as it was read; `named`: what `dlprof try --set` takes for a change.
    """
    run = run or command_line((plain(result.run.path, 300),))
    agent, shown = brief.markdown(result, run, named), first.first(result, run, named)
    stack, waited = ranks.stack(result), ranks.blame(result)
    of = formatting.numbers(result)
    found = sorted(result.found, key=lambda o: of.get(o.id, len(of) + 1))
    cards = [_card(str(place), of.get(o.id, 0), o) for place, o in enumerate(found, 1)]
    apart = [_card(f"training-{n}", of.get(o.id, 0), o) for n, o in enumerate(result.if_training_may_change, 1)]
    panels = [(f"panel-{i}", shapes.panel(panel)) for i, panel in enumerate(result.panels, 1)]
    many, tree, held = ranks.many(result), modules.shown(result), memory.shown(result.footprint)
    figures = {"where": stack, "waits": waited}
    figures |= {"ranks": many.by_category, "pairs": many.by_pair} if many else {}
    figures |= modules.specs(tree) | ({"memory": held.bars} if held else {})
    figures |= {**{f"evidence-{c.key}": c.evidence for c in (*cards, *apart)}, **dict(panels)}
    specs = {name: figure.spec for name, figure in figures.items() if figure and figure.spec}
    _share_range([figure.spec for _, figure in panels if figure.spec])
    sections: dict[str, list[tuple[str, str]]] = {}
    for fact in result.facts:
        sections.setdefault(fact.section, []).append((fact.name, _fact(fact)))
    keys = {card.outcome.id: card.key for card in (*cards, *apart)}
    return template("report.html").render(
        title=f"{formatting.name(result)} · {plain(shown.headline, 120)}",
        css=Markup(asset("page.css")),
        scripts=tuple(Markup(s) for s in scripts()),
        policy=policy(),
        colours=colours(),
        data=data(specs, agent),
        name=formatting.name(result),
        first=shown,
        made=screen.made(result, shown),
        edit=screen.edit(shown.lead.change.diff) if shown.lead else (),
        titles={o.id: o.title for o in result.outcomes},
        keys=keys,
        run=run,
        unlock=first.unlock(result),
        again=lambda option: formatting.recording(result, option),
        line=first.summary(result).partition(" · ")[2],
        **_cause(result, shown.lead),
        notices=verdict.notices(result),
        timelines=any(panel.shape == "timeline" for panel in result.panels),
        agent=agent,
        numbered=bool(result.changes),
        measured=formatting.limits(result),
        unit=formatting.unit(result),
        result=result,
        stack=stack,
        waited=waited,
        many=many,
        tree=tree,
        held=held,
        device=ranks.device(result),
        kinds=ranks.device_kinds(result),
        lines=ranks.lines_of_work(result),
        limits=verdict.device_floor(result)[0],
        host=verdict.host_limited(result),
        cards=cards,
        apart=apart,
        together=formatting.together(result),
        tried=result.tried and tried.sentence(result.tried),
        attempts=result.tried and shapes.panel(tried.panel(result.tried)),
        panels=panels,
        **{state: _by_relevance(of) for state, of in formatting.by_state(result).items()},
        traced=verdict.traced(result),
        span=verdict.span(result),
        sections=sections,
        command=" ".join(result.run.command),
        missing=formatting.ranks(result.run.missing_ranks),
        blamed=verdict.blamed(result),
        categories=[
            *formatting.ordered(part.category for part in result.time),
            *(("waiting",) if stack and "waiting" in stack.legend else ()),
        ],
    )


def _cause(result: Result, lead: Proposal | None) -> dict[str, Any]:
    """Return what is said of the cause that the first change cures: its line, and how its gain was estimated."""
    cause = next((o for o in result.found if lead and o.id in lead.findings[:1]), None)
    if lead is None or cause is None:
        return {}
    place = next((p for p in (lead.change.at, *cause.where) if p and p.line), None)
    slowed = result.window.overhead if result.window else None
    longer = f" Tracing made steps {formatting.times(slowed)} as long." if slowed and slowed >= verdict.SLOWED else ""
    return {"at": place, "sure": cause.sure + longer}


def _share_range(specs: Iterable[dict[str, Any]]) -> None:
    """Set one range for all figures over the run's time, so that the same instant is at the same place."""
    timed = [s for s in specs if s["layout"].get("meta") == {"axis": "time"}]
    xs = [x for s in timed for trace in s["data"] for x in trace["x"] if x is not None]
    for s in timed if xs else []:
        s["layout"]["xaxis"]["range"] = [min(0.0, *xs), max(xs)]


def _card(key: str, number: int, outcome: Outcome) -> Card:
    share = outcome.share if 0 <= outcome.share <= 1 else 0.0  # False for NaN as well
    return Card(
        key,
        number,
        outcome,
        round(100 * share, 2) if formatting.saves(outcome) else 0.0,
        formatting.speedup(outcome) != UNKNOWN,
        shapes.panel(outcome.evidence) if outcome.evidence else None,
    )


def _by_relevance(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Sort answers: what takes most of the step first, then the same reasons together, the most frequent first."""
    often = Counter(o.why for o in outcomes)
    return sorted(outcomes, key=lambda o: (-(drawing.number(o.lost_share or o.share) or 0.0), -often[o.why], o.why))


def _fact(fact: Fact) -> str:
    """Format large numbers, but for versions; `compare` and other readers of facts need them unformatted."""
    if not fact.value.isdecimal() or len(fact.value) < LONG_NUMBER or fact.section == "Software":
        return fact.value
    if fact.name.endswith("bytes"):
        return formatting.quantity(float(fact.value), "bytes")
    return f"{int(fact.value):,}"


LONG_NUMBER = 5  # digits that are hard to read without commas


# Units that follow a number.
_UNITS = frozenset(("%", "×", "s", "ms", "µs", "ns", "B", "kB", "MB", "GB", "TB"))


def _joined(text: str) -> str:
    """Join numbers and their units by no-break spaces."""
    first, *rest = text.split(" ")
    joined = [first]
    for word in rest:
        joined += [NBSP if joined[-1][-1:].isdigit() and word.rstrip(".,:;)") in _UNITS else " ", word]
    return "".join(joined)


def inline(text: object, limit: int = 2000) -> Markup:
    """Return a text in which `code` is in backticks."""
    parts = plain(text, limit, keep="\n").replace("``", "`").split("`")
    if len(parts) % 2 == 0:  # one backtick is not closed
        parts[-2:] = ["`".join(parts[-2:])]
    written = (Markup("<code>{}</code>").format(p) if i % 2 else escape(_joined(p)) for i, p in enumerate(parts))
    return Markup("").join(written)


def _manual(text: str) -> Markup:
    """Return a rule's manual: paragraphs, lists of lines that begin with a dash, and indented code."""
    out = []
    every = inspect.cleandoc(plain(text, 20_000, keep="\n")).split("\n")
    for blank, block in groupby(every, key=lambda line: not line.strip()):
        lines = list(block)
        if blank:
            continue
        if all(line.startswith("    ") for line in lines):
            out.append(Markup("<pre>{}</pre>").format("\n".join(line[4:] for line in lines)))
            continue
        first = next((i for i, line in enumerate(lines) if line.lstrip().startswith(("- ", "* "))), len(lines))
        if first:
            out.append(Markup("<p>{}</p>").format(inline(" ".join(lines[:first]))))
        items: list[str] = []
        for line in lines[first:]:
            if line.lstrip().startswith(("- ", "* ")) or not items:
                items.append(line.lstrip()[2:])
            else:
                items[-1] += " " + line.strip()
        if items:
            out.append(
                Markup("<ul>{}</ul>").format(Markup("").join(Markup("<li>{}</li>").format(inline(i)) for i in items))
            )
    return Markup("\n").join(out)


def _whole_code(text: str) -> str:
    """Return the code of an advice that is nothing but code, else ""."""
    before, _, rest = text.strip().partition("`")
    code, end, after = rest.partition("`")
    return plain(code, 2000) if end and not before + after else ""


_SIGNS = {"+": "ins", "-": "del"}
_MOST_DIFF = 60  # lines that are shown of a diff


def _edits(diff: str) -> list[tuple[str, str]]:
    """Return the lines of a diff, each with the element that it is."""
    lines = diff.rstrip("\n").split("\n")[:_MOST_DIFF]
    heads = ("--- ", "+++ ")
    return [
        ("span" if line.startswith(heads) else _SIGNS.get(line[:1], "span"), line.rstrip("\r").expandtabs(4))
        for line in lines
    ]


def _where(place: Place) -> Markup:
    """Return a line of the user's code: its place as code, and what is known about it."""
    at, _, rest = formatting.where(place).partition(": ")
    return Markup("<code>{}</code>").format(at) + (Markup(" {}").format(rest) if rest else Markup(""))


def themed(block: Callable[[bool], str]) -> Markup:
    """Return a block of CSS declarations for each theme; `block(dark)` makes one."""
    return Markup(f":root{{{block(False)}}}@media screen and (prefers-color-scheme:dark){{:root{{{block(True)}}}}}")


def colours() -> Markup:
    """Return the colours of the style sheet, from the table that the figures use."""

    def block(dark: bool) -> str:
        known = {k: drawing.DARK[v] if dark else v for k, v in drawing.NAMED.items()}
        known |= {f"c-{k}": v.dark if dark else v.light for k, v in looks.DRAWN.items()}
        return "".join(f"--{k}:{v};" for k, v in known.items())

    return themed(block)


def data(specs: dict[str, Any], agent: str = "") -> Markup:
    """Return figures, and the text for an agent, as JSON that cannot end its script element in any HTML parser."""
    often = [numbers for numbers, n in Counter(_lists(specs)).items() if n > 1]
    packed = _packed(specs, {numbers: place for place, numbers in enumerate(often)})
    data = {"lists": often, "figures": packed, "dark": drawing.DARK, "agent": agent}
    text = compact(data)
    # All but ASCII is escaped already (U+2028 and U+2029, too); HTML could interpret these three.
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Markup(text)


PACKED = 60  # lists so long are written once, and so are their parts
_PART = " · "

Numbers = tuple[float | None, ...]


def _lists(value: Any) -> Iterator[Numbers]:
    """Yield every long list of numbers in a specification."""
    if isinstance(value, dict):
        for inner in value.values():
            yield from _lists(inner)
    elif _is_long(value):
        yield tuple(value)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for inner in value:
            yield from _lists(inner)


def _is_long(value: Any) -> bool:
    return isinstance(value, list) and len(value) >= PACKED and isinstance(value[0], (int, float))


def _packed(value: Any, often: Mapping[Numbers, int]) -> Any:
    """Return a specification in which repeated values are written once.

    A long list of texts becomes {"texts": parts, "of": for each text the places of its parts}; a repeated list of
    numbers becomes {"list": place}.
    """
    if isinstance(value, dict):
        return {key: _packed(inner, often) for key, inner in value.items()}
    if not isinstance(value, list):
        return value
    if _is_long(value):
        place = often.get(tuple(value))
        return value if place is None else {"list": place}
    if len(value) < PACKED or not all(isinstance(text, str) for text in value):
        return [_packed(inner, often) for inner in value] if value and isinstance(value[0], dict) else value
    parts: dict[str, int] = {}
    of = [[parts.setdefault(part, len(parts)) for part in text.split(_PART)] for text in value]
    return {"texts": list(parts), "of": [places[0] if len(places) == 1 else places for places in of]}


_COMMENT = re.compile(r"//.*|/\*.*\*/")


@cache
def asset(name: str) -> str:
    """Return the text of a file of the page; of our script and style sheet without comment lines and indentation."""
    text = (files("dlprof.report") / "page" / name).read_text(encoding="utf-8")
    if name != "page.js" and not name.endswith(".css"):
        return text
    lines = (line.strip() for line in text.split("\n"))
    return "\n".join(line for line in lines if line and not _COMMENT.fullmatch(line)) + "\n"


def scripts() -> tuple[str, ...]:
    """Return the scripts of a page with figures."""
    return asset("plotly-basic.min.js"), asset("page.js")


@cache
def policy() -> str:
    """Return the page's content security policy: it runs its own two scripts; nothing is fetched, sent or framed."""
    hashes = (base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts())
    own = " ".join(f"'sha256-{h}'" for h in hashes)
    # plotly sets styles on what it draws, and offers a figure as an image through data: and blob:.
    return (
        f"default-src 'none'; script-src {own}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def prepare() -> None:
    """Prepare what every page needs, to be called while the result is not there yet."""
    template("report.html")
    policy()


@cache
def template(name: str) -> Template:
    """Return a page's template, in which every text is escaped and made safe to show."""

    def written(value: object) -> object:
        return value if isinstance(value, Markup) or not isinstance(value, str) else plain(value, 2000)

    environment = Environment(
        autoescape=True,
        finalize=written,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FunctionLoader(asset),
        bytecode_cache=None if sys.dont_write_bytecode else Compiled(str(Path(__file__).parent / "__pycache__")),
    )
    environment.filters.update(inline=inline, manual=_manual, whole_code=_whole_code, edits=_edits, where=_where)
    environment.filters["in_model"] = modules.named
    environment.filters |= {"factor": first.factor, "between": first.between, "place": screen.place}
    environment.filters["kilobytes"] = lambda text: formatting.quantity(len(text.encode()), "bytes")
    texts = (formatting.saving, formatting.noise, formatting.speedup, formatting.gained, formatting.ranks)
    environment.filters.update((text.__name__, text) for text in texts)
    said = {"saving": SAVING, "apart_title": verdict.APART, "otherwise": verdict.OTHERWISE}
    environment.globals.update(
        newline=Markup("\n"),
        arrow=first.arrow,
        ways=first.KNOWN,
        looks=looks.DRAWN,
        look=looks.look,
        **said,
    )
    return environment.get_template(name)


class Compiled(FileSystemBytecodeCache):
    """Keeps compiled templates next to the compiled modules, where the folder can be written."""

    def dump_bytecode(self, bucket: Bucket) -> None:
        """Write a compiled template, or nothing where the folder cannot be written."""
        with suppress(OSError):
            super().dump_bytecode(bucket)


_CELL_ROW = Markup(
    "<tr><td style='text-align:left'>{}</td><td>{}</td><td>{}</td><td style='text-align:left'>{}</td></tr>"
)


def cell(result: Result) -> str:
    """Return what a notebook's cell shows, without a script and readable in both themes.

    The headline, the findings with their savings and changes, and what the reader must know first.
    """
    diagnosis, gain, _ = verdict.headline(result)
    parts = [
        Markup("<p style='opacity:.7'>{}</p>").format(first.summary(result)),
        Markup("<p><strong>{}</strong> {}</p>").format(diagnosis, gain),
    ]
    notices = verdict.notices(result)
    if notices:
        parts.append(Markup("<ul>{}</ul>").format(Markup("").join(map(Markup("<li>{}</li>").format, notices))))
    for heading, found in (("finding", result.found), (verdict.APART.lower(), result.if_training_may_change)):
        heads = "".join(f"<th>{head}</th>" for head in (heading, "would save", "speedup", "change"))
        rows = Markup("").join(map(_cell_row, found))
        parts += [Markup(f"<table><tr>{heads}</tr>{{}}</table>").format(rows)] if found else []
    return str(Markup("").join(parts))


def framed(result: Result) -> str:
    """Return what a notebook's cell shows, and below it the whole report in a frame, which can be folded.

    The frame has an origin of its own: what the page runs reaches nothing of the notebook's.
    """
    frame = "<iframe sandbox='allow-scripts' style='width:100%;height:48em;border:0' srcdoc='{}'></iframe>"
    whole = Markup(f"<details open><summary>Report</summary>{frame}</details>").format(render(result))
    return cell(result) + str(whole)


def _cell_row(outcome: Outcome) -> Markup:
    said = [f"{plain(c.text, 400)}{verdict.OTHERWISE if c.training else ''}" for c in outcome.changes]
    changes = Markup("<br>").join(said)
    return _CELL_ROW.format(plain(outcome.title, 200), formatting.saving(outcome), formatting.speedup(outcome), changes)
