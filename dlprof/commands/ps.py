"""`dlprof ps`: the training jobs of this user on this host, and what each does now."""

from __future__ import annotations

import json

import click

from dlprof.commands import form, say
from dlprof.units import duration, percent, size


@click.command(short_help="List your training jobs on this host, and what each does.")
@click.option("--job", metavar="SLURM_ID", help="Those of this SLURM job, on all of its nodes.")
@form
def ps(job: str | None, form: str) -> None:
    """List the jobs of yours on this host that have loaded PyTorch, with one word for what each does now.

    Only your own processes are looked at, and nothing in them is changed. A job that dlprof records has its step time,
    and its run folder for `dlprof hang` and `dlprof report`. GPU: how busy those are that it computes on.
    """
    from dlprof.live.gather import found_jobs, jobs_of_slurm

    rows = jobs_of_slurm(job) if job else found_jobs()
    if form == "json":
        click.echo(json.dumps([row.as_json() for row in rows]))
        return
    if not rows:
        where = f"of SLURM job {job}" if job else "of yours on this host"
        say(f"No process {where} has loaded PyTorch.")
        return
    head = f"{'PID':>8}  {'ranks':>5}  {'workers':>7}  {'for':>8}  {'cores':>5}  {'memory':>8}  {'GPU':>5}  {'step':>9}"
    say(f"{head}  now")
    for row in rows:
        step = duration(row.step_ns) if row.step_ns else "—"
        gpu = "—" if row.gpu_share is None else percent(row.gpu_share)
        age = f"{row.age_s / 3600:.0f}:{row.age_s % 3600 / 60:02.0f} h" if row.age_s >= 3600 else f"{row.age_s:.0f} s"
        say(
            f"{row.pid:>8}  {row.ranks:>5}  {row.workers:>7}  {age:>8}  {row.cores:>5.1f}  {size(row.rss_bytes):>8}"
            f"  {gpu:>5}  {step:>9}  {row.now}"
        )
        at = f"{row.host}: " if job else ""
        say(f"{'':>10}{at}{row.command}{f'  → {row.run}' if row.run else ''}")
