"""`dlprof ps`: the training jobs of this user on this host, and what each does now."""

from __future__ import annotations

import json

import click

from dlprof.commands import form, say
from dlprof.units import duration, size


@click.command(short_help="List your training jobs on this host, and what each does.")
@form
def ps(form: str) -> None:
    """List the jobs of yours on this host that have loaded PyTorch, with one word for what each does now.

    Only your own processes are looked at, and nothing in them is changed. A job that dlprof records has its step time,
    and its run folder for `dlprof hang` and `dlprof report`.
    """
    from dlprof.live.gather import found_jobs

    rows = found_jobs()
    if form == "json":
        click.echo(json.dumps([row.as_json() for row in rows]))
        return
    if not rows:
        say("No process of yours on this host has loaded PyTorch.")
        return
    say(f"{'PID':>8}  {'ranks':>5}  {'workers':>7}  {'for':>8}  {'cores':>5}  {'memory':>8}  {'step':>9}  now")
    for row in rows:
        step = duration(row.step_ns) if row.step_ns else "—"
        age = f"{row.age_s / 3600:.0f}:{row.age_s % 3600 / 60:02.0f} h" if row.age_s >= 3600 else f"{row.age_s:.0f} s"
        say(
            f"{row.pid:>8}  {row.ranks:>5}  {row.workers:>7}  {age:>8}  {row.cores:>5.1f}  {size(row.rss_bytes):>8}"
            f"  {step:>9}  {row.now}"
        )
        say(f"{'':>10}{row.command}{f'  → {row.run}' if row.run else ''}")
