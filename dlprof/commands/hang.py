"""`dlprof hang`: why a job stands still, asked of its processes right now."""

from __future__ import annotations

import json

import click

from dlprof.commands import form, say
from dlprof.units import duration, listed


@click.command(short_help="Say why a job stands still.")
@click.argument("job", metavar="RUN | PID")
@click.option("--here", is_flag=True, help="Ask no rank on another host.")
@form
def hang(job: str, here: bool, form: str) -> None:
    """Say why a job stands still: who waits for whom, and what that rank does.

    \b
    dlprof hang runs/a
    dlprof hang 4711

    RUN is the folder of a recording, PID a process of any job of yours on this host: a rank, or what has started the
    ranks. Nothing in the job is changed or stopped; py-spy reads its stacks. The ranks of a recording that are on other
    hosts answer themselves.
    """  # noqa: D301 - \b keeps these lines apart in click's help
    from dlprof.live.gather import look
    from dlprof.live.standstill import standstill

    seen = look(job, here=here)
    found = standstill(seen)
    still = [rank.still_s for rank in seen.ranks if rank.still_s is not None]
    if form == "json":
        click.echo(
            json.dumps(
                {
                    "why": found.why,
                    "more": list(found.more),
                    "blamed": list(found.blamed),
                    "at_work": found.at_work,
                    "waiting": list(found.waiting),
                    "ranks": [
                        {"rank": rank.number, "host": rank.host, "step": rank.step, "does": found.where[rank.number]}
                        for rank in seen.ranks
                    ],
                    "still_s": round(min(still), 1) if still else None,
                }
            )
        )
        return
    if still:
        say(f"No rank has ended a step for {duration(min(still) * 1e9)}.")
    for line in (found.why, *found.more):
        say(line)
    if len(seen.ranks) > 1:
        by_place: dict[str, list[int]] = {}
        for number, text in sorted(found.where.items()):
            by_place.setdefault(text, []).append(number)
        for text, numbers in list(by_place.items())[:12]:
            say(f"  rank {listed(numbers)}: {text}")
