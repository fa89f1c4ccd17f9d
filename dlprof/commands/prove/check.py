"""`dlprof check PATH --max 'input_wait<5%' --baseline old/result.json`: a gate for CI."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from dlprof.commands import PATH, file, no_limits, rarely, run_path, say
from dlprof.errors import DlprofError, NotMeasured
from dlprof.plain import plain

if TYPE_CHECKING:
    from dlprof.result import Result

FAILED = 3

_LIMIT = re.compile(r"\s*(?P<rule>[a-z_]+)\s*<\s*(?P<limit>\d+(\.\d+)?)\s*(?P<unit>%|ms|s|us|µs)\s*")
_SHARE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%?\s*")
_NS = {"s": 1e9, "ms": 1e6, "us": 1e3, "µs": 1e3}

# ok; FAIL; ????: it passes, but could not be measured; warn: it would fail, but an option lets it pass.
Word = Literal["ok", "FAIL", "????", "warn"]


@dataclass(frozen=True)
class Checked:
    """One limit, and how the run compares with it."""

    name: str
    word: Word
    text: str


@click.command(short_help="Fail where a limit is exceeded, or a run is slower than its baseline: a gate for CI.")
@run_path
@click.option(
    "--max",
    "limits",
    multiple=True,
    metavar="'RULE<LIMIT'",
    help="What a rule's saving must stay below, in % of the step or in time: 'input_wait<5%', 'host_bound<2ms'.",
)
@click.option(
    "--baseline", type=PATH, help="A run of the same job, or its result.json, that PATH must not be slower than."
)
@click.option(
    "--max-slowdown",
    default="5%",
    show_default=True,
    metavar="PERCENT",
    help="How much slower than the baseline PATH may be.",
)
@file("--junit", "Write the outcome of each limit into FILE, as JUnit XML.")
@rarely
@click.option(
    "--not-measured",
    type=click.Choice(["fail", "pass"]),
    default="fail",
    show_default=True,
    help="What becomes of a limit that could not be judged on this run.",
)
@click.option(
    "--foreign-load",
    is_flag=True,
    help="Pass also where programs outside the job used the cores that it would have used.",
)
@no_limits
def check(
    path: Path,
    limits: tuple[str, ...],
    baseline: Path | None,
    max_slowdown: str,
    not_measured: str,
    foreign_load: bool,
    junit: Path | None,
) -> None:
    """Fail (exit code 3) where a bottleneck of PATH exceeds a limit, or PATH is slower than a baseline.

    A bottleneck that the run cannot have, as waiting for other ranks with one rank, passes. One that could not be
    measured fails, unless told to pass. A run beside which other programs used the cores passes no limit: a bottleneck
    may hide among what they cause. PATH is too slow if its median step, or where the batch differs its time a sample,
    is longer for sure (a 99 % interval), and not for sure by less than --max-slowdown. On GitHub's runners, what fails
    is annotated.
    """
    from dlprof.analysis.diagnosis import rule_named
    from dlprof.analysis.rules import RULES
    from dlprof.commands.report import analyse
    from dlprof.units import used_by_others

    if not limits and baseline is None:
        raise click.UsageError("name a limit: --max 'input_wait<5%', or --baseline old/result.json")
    slower = _SHARE.fullmatch(max_slowdown)
    if not slower:
        raise click.UsageError(f"{max_slowdown!r} is no share; write 5%")
    parsed = []
    for text in limits:
        m = _LIMIT.fullmatch(text)
        if not m:
            raise click.UsageError(f"{text!r} is no limit; write 'input_wait<5%' or 'host_bound<2ms'")
        parsed.append((rule_named(RULES, m["rule"]).id, float(m["limit"]), m["unit"]))
    result = analyse(path)
    if result.window is None:
        raise DlprofError(f"{path}: no step was recorded, so nothing can be checked")
    load = result.foreign_load
    disturbed = load is not None and load.disturbs
    checked = list(_limits(result, parsed, not_measured == "pass", disturbed))
    if baseline is not None:
        checked.append(_against(baseline, path, result, float(slower[1]) / 100, not_measured == "pass", disturbed))
    if load is not None and disturbed:
        text = used_by_others(load.foreign, load.cores, load.waited)
        checked.append(Checked("other programs", "warn" if foreign_load else "FAIL", text))
    for one in checked:
        say(f"{one.word:<4}  {one.name}: {one.text}" if one.name != "other programs" else f"{one.word:<4}  {one.text}")
    failed = [one for one in checked if one.word == "FAIL"]
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in _annotations(checked):
            click.echo(line)
    if junit is not None:
        _write_junit(junit, path.resolve().name, checked)
    if failed:
        raise SystemExit(FAILED)


def _limits(
    result: Result, limits: Sequence[tuple[str, float, str]], may_be_unknown: bool, disturbed: bool
) -> Iterator[Checked]:
    """Yield how the run compares with each limit on a rule."""
    from dlprof.result import TIMELESS
    from dlprof.units import duration, percent

    outcomes = {o.id: o for o in result.outcomes}
    for rule, limit, unit in limits:
        o = outcomes[rule]
        risk = o.scope in TIMELESS and o.state == "found"  # a risk of ending the job has no time to compare
        bad, word = False, "ok"
        if o.state in ("not_measured", "error"):
            what = f"{o.state.replace('_', ' ')}: {o.why}"
            bad, word = not may_be_unknown, "????"
        elif o.state == "does_not_apply":
            what = f"does not apply: {o.why}"
        else:
            bad = risk or (o.share * 100 if unit == "%" else o.saving_ns / _NS[unit]) >= limit
            of = {"job": "training loop", "run": "run"}.get(o.scope, "step")
            what = f"{percent(o.share)} of the {of}, {duration(o.saving_ns)}" if o.saving_ns else o.summary
        chosen: Word = "FAIL" if bad else "????" if disturbed or word == "????" else "ok"
        yield Checked(f"{rule} < {limit:g} {unit}", chosen, o.title if risk else what)


def _against(
    baseline: Path, path: Path, result: Result, limit: float, may_be_unknown: bool, disturbed: bool
) -> Checked:
    """Return how the run compares with its baseline."""
    from dlprof.analysis.compare.code import changed
    from dlprof.analysis.compare.gate import slowdown
    from dlprof.commands.prove.compare import result_of
    from dlprof.units import percent

    name = f"slower than {baseline} by < {percent(limit)}"
    before = result_of(baseline, None, quiet=True)
    try:
        found = slowdown(before, result)
    except NotMeasured as e:
        return Checked(name, "????" if may_be_unknown else "FAIL", f"not measured: {e}")
    fails = found.fails(limit)
    unsure = disturbed or (before.foreign_load is not None and before.foreign_load.disturbs)
    beside = "; programs outside the job used the cores of the baseline" if unsure and not disturbed else ""
    code = changed(before, result, baseline, path)
    beside += f"; your code changed too: {'; '.join(code)}" if code else ""
    text = f"{found.what} is {found.words}, over {found.steps[0]} and {found.steps[1]} steps{beside}"
    return Checked(name, "FAIL" if fails else "????" if unsure else "ok", text)


def _annotations(checked: Sequence[Checked]) -> Iterator[str]:
    """Yield a line of GitHub's workflow commands for each limit that failed or could not be measured."""
    levels = {"FAIL": "error", "????": "warning", "warn": "warning"}
    for one in checked:
        if one.word in levels:
            # Their escapes: https://docs.github.com/actions, workflow commands.
            title = f"dlprof: {one.name}".replace("%", "%25").replace(":", "%3A").replace(",", "%2C")
            yield f"::{levels[one.word]} title={plain(title, 200)}::{plain(one.text, 600).replace('%', '%25')}"


def _write_junit(path: Path, run: str, checked: Sequence[Checked]) -> None:
    """Write the outcomes as one suite of tests; raise DlprofError if the file cannot be written."""
    from xml.etree import ElementTree

    from dlprof.files import write, writing

    failed = sum(one.word == "FAIL" for one in checked)
    skipped = sum(one.word == "????" for one in checked)
    counts = {"tests": str(len(checked)), "failures": str(failed), "errors": "0", "skipped": str(skipped)}
    suite = ElementTree.Element("testsuite", {"name": f"dlprof check {plain(run, 200)}", **counts})
    for one in checked:
        case = ElementTree.SubElement(suite, "testcase", {"classname": "dlprof.check", "name": plain(one.name, 300)})
        text = plain(one.text, 2000)
        if one.word == "FAIL":
            ElementTree.SubElement(case, "failure", {"message": text}).text = text
        elif one.word == "????":
            ElementTree.SubElement(case, "skipped", {"message": text})
        else:
            ElementTree.SubElement(case, "system-out").text = text
    whole = ElementTree.Element("testsuites", counts)
    whole.append(suite)
    with writing(f"the outcome {path}"):
        write(path, ElementTree.tostring(whole, encoding="unicode", xml_declaration=True) + "\n")
