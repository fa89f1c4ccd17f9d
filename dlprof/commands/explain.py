"""`dlprof explain NAME`: the manual of a rule, a format or the settings, and what a rule needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from dlprof.analysis.engine.needs import Need
    from dlprof.overrides import Override

_MOST_EDITS = 2  # of an idiom that are printed

LISTS = ("rules", "sources", "settings", "idioms")


@click.command(short_help="Print the manual of a rule, a format or the settings.")
@click.argument("name", metavar="RULE|SOURCE|SETTING|rules|sources|settings|idioms", default="rules")
@click.option("--needs", is_flag=True, help="Print what the rule stands on: measures, tables, and what records these.")
def explain(name: str, needs: bool) -> None:
    """Print the manual of a RULE (what it looks at, when it finds something, what to change), a SOURCE or a SETTING.

    `rules` lists the bottlenecks that dlprof knows, `sources` the files of other tools that it reads, alone or several
    in one folder, `settings` what `dlprof wrap --set NAME=VALUE` overrides in a script, with values and risks, and
    `idioms` the ways of writing a line that are known to cost time, with their remedies.
    """
    from dlprof.commands import say

    for line in _needed(name) if needs else _explained(name):
        say(line)


def _explained(name: str) -> Iterator[str]:
    if name in LISTS:
        return {"rules": _rules, "sources": _sources, "settings": _settings, "idioms": _idioms}[name]()
    from dlprof.analysis.rules import RULES
    from dlprof.errors import DlprofError
    from dlprof.overrides import ENVIRONMENT, OVERRIDES
    from dlprof.read.formats import formats

    for rule in RULES:
        if rule.id == name:
            return iter((f"{rule.id}: {rule.title}", "", *rule.manual.splitlines()))
    for one in formats():
        if one.name == name:
            return (f"{label}: {text}" for label, text in one.described.items())
    for setting in (*OVERRIDES, ENVIRONMENT):
        if name in (setting.name, setting.setting):
            return _setting(setting)
    known = (*LISTS, *(rule.id for rule in RULES), *(one.name for one in formats()))
    raise DlprofError(f"nothing is called {name!r}; there are: {', '.join(known)}")


def _rules() -> Iterator[str]:
    from dlprof.analysis.rules import RULES

    width = max(len(r.id) for r in RULES)
    for rule in RULES:
        yield f"{rule.id:<{width}}  {rule.manual.splitlines()[0]}"


def _sources() -> Iterator[str]:
    from dlprof.read.formats import formats

    width = max(len(one.name) for one in formats())
    for one in formats():
        yield f"{one.name:<{width}}  {one.title}{'' if one.read else ' (known, and not read)'}"
        yield f"{'':<{width}}    {one.left or one.brings}"
        if one.record:
            yield f"{'':<{width}}    record: {one.record}"


def _settings() -> Iterator[str]:
    from dlprof.overrides import ENVIRONMENT, OVERRIDES

    yield "Settings that `dlprof wrap --set NAME=VALUE` overrides in an unedited script."
    yield "Those that change numbers need --allow-numerics."
    for one in (*OVERRIDES, ENVIRONMENT):
        yield ""
        yield from _setting(one)


def _setting(one: Override) -> Iterator[str]:
    import textwrap

    yield f"{one.name} = {one.values}{'  (changes numbers)' if one.numerics else ''}"
    for text in (one.help, *([f"Risk: {one.risk}"] if one.risk else [])):
        yield from textwrap.wrap(text, 96, initial_indent="    ", subsequent_indent="    ")


def _idioms() -> Iterator[str]:
    import textwrap

    from dlprof.analysis.idioms import IDIOMS
    from dlprof.analysis.source.rewrites import REWRITES

    yield "What a line of a script may do that costs time: a finding that has seen the line names the remedy."
    for one in IDIOMS:
        yield ""
        yield f"{one.name}: the line {one.what}"
        yield from textwrap.wrap(one.remedy, 96, initial_indent="    ", subsequent_indent="    ")
        yield f"    {one.link}"
        edits = [edit.shown for edit in REWRITES.get(one.name, ())]
        for edit in edits[:_MOST_EDITS]:
            yield from textwrap.wrap(f"dlprof fix: {edit}", 96, initial_indent="    ", subsequent_indent="      ")
        if len(edits) > _MOST_EDITS:
            yield f"    and {len(edits) - _MOST_EDITS} more ways of writing it"


def _needed(name: str) -> Iterator[str]:
    """Print the tree below a rule: each measure once in whole, with its file and line; at its ends the tables."""
    from dlprof.analysis.diagnosis import rule_named
    from dlprof.analysis.engine import needs_of
    from dlprof.analysis.rules import RULES

    rule = rule_named(RULES, name)
    yield f"{rule.id}  {_place(rule.check)}"
    yield from _below({**needs_of(rule.check), **needs_of(rule.explain)}, "", set())
    yield "?: it may be lacking"


def _below(found: dict[str, Need], indent: str, shown: set[str]) -> Iterator[str]:
    from dlprof.analysis.engine import Measure
    from dlprof.analysis.engine.needs import Fact
    from dlprof.schema import Table

    needed = {need.of.name: need for need in found.values() if not isinstance(need.of, Fact)}
    for place, need in enumerate(needed.values(), 1):
        of = need.of
        last = place == len(needed)
        head = f"{indent}{'└─ ' if last else '├─ '}{of.name}{'?' if need.optional else ''}"
        if isinstance(of, Table):
            yield f"{head}  table, {_recorded(of.name)}"
        elif isinstance(of, Measure):
            again = of.name in shown
            shown.add(of.name)
            yield f"{head}  {'see above' if again and of.needs else _place(of.function)}"
            if not again:
                yield from _below(dict(of.needs), f"{indent}{'   ' if last else '│  '}", shown)


def _place(function: object) -> str:
    import inspect
    from pathlib import Path

    import dlprof

    file, code = Path(inspect.getsourcefile(function) or ""), inspect.unwrap(function).__code__  # type: ignore[arg-type]
    return f"{file.relative_to(Path(dlprof.__file__).parent.parent).as_posix()}:{code.co_firstlineno}"


def _recorded(table: str) -> str:
    """Say what records a table: our recorder, or only other tools."""
    from dlprof.read.formats import formats
    from dlprof.read.sources import SOURCES

    ours = [f"{source.place} by dlprof/record/{source.recorder}" for source in SOURCES if table in source.tables]
    return ", ".join(ours) or "of " + ", ".join(one.name for one in formats() if table in one.tables)
