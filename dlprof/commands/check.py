"""`dlprof check PATH --max 'input_wait<5%'`: a gate for CI."""

from __future__ import annotations

import re
from pathlib import Path

import click

from dlprof.commands import no_limits, run_path, say
from dlprof.errors import DlprofError

FAILED = 3

_LIMIT = re.compile(r"\s*(?P<rule>[a-z_]+)\s*<\s*(?P<limit>\d+(\.\d+)?)\s*(?P<unit>%|ms|s|us|µs)\s*")
_NS = {"s": 1e9, "ms": 1e6, "us": 1e3, "µs": 1e3}


@click.command(short_help="Fail where a bottleneck exceeds a limit: a gate for CI.")
@run_path
@click.option(
    "--max",
    "limits",
    multiple=True,
    required=True,
    metavar="'RULE<LIMIT'",
    help="What a rule's saving must stay below, in % of the step or in time: 'input_wait<5%', 'host_bound<2ms'.",
)
@click.option(
    "--foreign-load",
    is_flag=True,
    help="Pass also where programs outside the job used the cores that it would have used.",
)
@no_limits
def check(path: Path, limits: tuple[str, ...], foreign_load: bool) -> None:
    """Fail (exit code 3) where a bottleneck of PATH exceeds a limit, or could not be measured.

    A bottleneck that the run cannot have, as waiting for other ranks with one rank, passes. A run beside which other
    programs used the cores passes no limit: a bottleneck may hide among what they cause.
    """
    from dlprof.analysis.diagnosis import rule_named
    from dlprof.analysis.rules import RULES
    from dlprof.commands.report import analyse
    from dlprof.result import TIMELESS
    from dlprof.units import duration, percent, used_by_others

    asked = []
    for text in limits:
        m = _LIMIT.fullmatch(text)
        if not m:
            raise click.UsageError(f"{text!r} is no limit; write 'input_wait<5%' or 'host_bound<2ms'")
        asked.append((rule_named(RULES, m["rule"]).id, float(m["limit"]), m["unit"]))
    result = analyse(path)
    if result.window is None:
        raise DlprofError(f"{path}: no step was recorded, so nothing can be checked")
    load = result.foreign_load
    disturbed = load is not None and load.disturbs
    outcomes = {o.id: o for o in result.outcomes}
    failed = False
    for rule, limit, unit in asked:
        o = outcomes[rule]
        risk = o.scope in TIMELESS and o.state == "found"  # what may end the job is no matter of time
        if o.state in ("not_measured", "error"):
            bad, what = True, f"{o.state.replace('_', ' ')}: {o.why}"
        elif o.state == "does_not_apply":
            bad, what = False, f"does not apply: {o.why}"
        else:
            bad = risk or (o.share * 100 if unit == "%" else o.saving_ns / _NS[unit]) >= limit
            of = "training loop" if o.scope == "job" else "step"
            what = f"{percent(o.share)} of the {of}, {duration(o.saving_ns)}" if o.saving_ns else o.summary
        word = "FAIL" if bad else "????" if disturbed else "ok  "
        failed |= bad or (disturbed and not foreign_load)
        say(f"{word}  {rule} < {limit:g} {unit}: {o.title if risk else what}")
    if load is not None and disturbed:
        say(f"{'warn' if foreign_load else 'FAIL'}  {used_by_others(load.foreign, load.cores, load.waited)}")
    if failed:
        raise SystemExit(FAILED)
