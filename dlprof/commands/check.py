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
@no_limits
def check(path: Path, limits: tuple[str, ...]) -> None:
    """Fail (exit code 3) where a bottleneck of PATH exceeds a limit, or could not be measured.

    A bottleneck that the run cannot have, as waiting for other ranks with one rank, passes.
    """
    from dlprof.analysis.diagnosis import rule_named
    from dlprof.analysis.rules import RULES
    from dlprof.commands.report import analyse
    from dlprof.units import duration, percent

    asked = []
    for text in limits:
        m = _LIMIT.fullmatch(text)
        if not m:
            raise click.UsageError(f"{text!r} is no limit; write 'input_wait<5%' or 'host_bound<2ms'")
        asked.append((rule_named(RULES, m["rule"]).id, float(m["limit"]), m["unit"]))
    result = analyse(path)
    if result.window is None:
        raise DlprofError(f"{path}: no step was recorded, so nothing can be checked")
    outcomes = {o.id: o for o in result.outcomes}
    failed = False
    for rule, limit, unit in asked:
        o = outcomes[rule]
        risk = o.scope == "risk" and o.state == "found"  # what may end the job is no matter of time
        if o.state in ("not_measured", "error"):
            bad, what = True, f"{o.state.replace('_', ' ')}: {o.why}"
        elif o.state == "does_not_apply":
            bad, what = False, f"does not apply: {o.why}"
        else:
            bad = risk or (o.share * 100 if unit == "%" else o.saving_ns / _NS[unit]) >= limit
            of = "training loop" if o.scope == "job" else "step"
            what = f"{percent(o.share)} of the {of}, {duration(o.saving_ns)}" if o.saving_ns else o.summary
        failed |= bad
        say(f"{'FAIL' if bad else 'ok  '}  {rule} < {limit:g} {unit}: {o.title if risk else what}")
    if failed:
        raise SystemExit(FAILED)
