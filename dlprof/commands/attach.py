"""`dlprof attach PID`: what a job that was started without dlprof spends its time on."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dlprof.commands import form, say
from dlprof.errors import DlprofError
from dlprof.plain import plain
from dlprof.units import count, percent

if TYPE_CHECKING:
    from dlprof.live.attach import Sampled

_NAMES = {
    "loader": "waits for its loader",
    "collective": "in collectives",
    "forward": "forward pass",
    "backward": "backward pass",
    "optimizer": "optimizer step",
    "checkpoint": "saves or loads checkpoints",
    "compile": "compiles",
    "starting": "starts",
    "joining": "waits for others to join",
    "window": "a profiler",
    "device": "waits for its device",
    "wait": "waits for a collective",
    "code": "other Python",
}

# What to do about a part that is large; from this share on.
_LARGE, _ALL = 0.15, 0.9
_ADVICE = {
    "loader": "Use more workers, or do less work per sample: the workers' hottest lines are below.",
    "device": "The host waits for the device here: keep the value on the device, or read it every N steps.",
    "checkpoint": "Save less often, or in the background.",
    "compile": "Shapes or branches change between steps: `dlprof wrap` names the reason of each compilation.",
    "code": "This line runs between the phases of a step: make it cheaper, or move it out of the loop.",
    "optimizer": "Try fused=True, or foreach=True, if the model has many small parameters.",
}


@click.command(short_help="Look into a job that was started without dlprof.")
@click.argument("pid", type=int, required=False)
@click.option("--job", metavar="SLURM_ID", help="All ranks of this SLURM job on this host.")
@click.option("--seconds", type=click.FloatRange(1, 3600), help="How long to look: 10, with --inject 60.")
@click.option("--inject", is_flag=True, help="Record it with the recorder itself, which leaves again (needs gdb).")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="With --inject, the folder of the recording.")
@form
def attach(pid: int | None, job: str | None, seconds: float | None, inject: bool, out: Path | None, form: str) -> None:
    """Say what a running job spends its time on, without having started it.

    \b
    dlprof attach 4711
    dlprof attach --job 123456
    dlprof attach --inject 4711

    PID is a rank, or what has started the ranks: then all of its ranks on this host are looked at. py-spy samples their
    stacks and tells the phases apart by PyTorch's own functions; nothing in the job is changed. With --inject the ranks
    record themselves, as under `dlprof wrap`, and the report is written. Only your own processes can be looked at.
    """  # noqa: D301 - \b keeps these lines apart in click's help
    from dlprof.live import attach as live
    from dlprof.live.look import mine

    if (pid is None) == (job is None):
        raise click.UsageError("either PID or --job SLURM_ID")
    if out is not None and not inject:
        raise click.UsageError("-o goes with --inject")
    of_job = [one.pid for one in mine().values() if job and one.job.partition(".")[0] == job]
    pids = [pid] if pid is not None else of_job
    if not pids:
        raise DlprofError(f"no process of yours on this host is of SLURM job {job}")
    if inject:
        _record(pids, out, seconds or 60, form)
        return
    seconds = seconds or 10
    if form == "text":
        say(f"looking for {seconds:g} s; the job goes on as it is", err=True)
    found = live.attach(pids, seconds)
    if form == "json":
        click.echo(json.dumps([asdict(one) for one in found]))
        return
    for line in lines(found):
        say(line)


def _record(pids: list[int], out: Path | None, seconds: float, form: str) -> None:
    """Record the ranks for so long, write the report, and print its first screen."""
    from dlprof.commands.report import write_report
    from dlprof.live.inject import Injected
    from dlprof.run_folder import recorded

    job = Injected(pids, out, seconds)
    for line in job.enter():
        say(line, err=True)
    inside = sum(not one.refused for one in job.ranks)
    say(
        f"recording into {job.named}: the recorder is in {count(inside, 'rank')} and leaves after {seconds:g} s",
        err=True,
    )
    for line in job.leave():
        say(line, err=True)
    if not recorded(job.path):
        raise DlprofError("nothing was recorded: no rank has ended a step meanwhile")
    verdict = write_report(job.path)
    click.echo(json.dumps({"run": str(job.path)}) if form == "json" else plain(verdict, keep="\n\x1b"))


def lines(found: list[Sampled]) -> list[str]:
    """Return what is printed about the ranks: the verdict, each rank's parts, and what such a look cannot know."""
    text = [verdict(found)]
    for one in found:
        text += ["", f"rank {one.rank} (process {one.pid}): {count(one.samples, 'sample')} of its training thread"]
        if one.problem:
            text.append(f"  {one.problem}")
        for part in one.parts:
            name = _NAMES.get(part.what, part.what)
            text.append(f"  {percent(part.share):>6}  {name} ({percent(part.low)}–{percent(part.high)})")
            for place, source, share in part.lines[:2]:
                if share >= 0.02:
                    text.append(f"          {percent(share):>6}  {place}  {source}")
        if one.workers and one.working is not None:
            text.append(
                f"  {count(one.workers, 'loader worker')}: {percent(one.working)} of the time at work on batches,"
                f" {one.worker_cores:.1f} cores"
            )
            text += [f"          {percent(share):>6}  {at}  {source}" for at, source, share in one.worker_lines[:2]]
        gil = ", ".join(f"{name} {percent(share)}" for name, share in one.gil.items() if share >= 0.005)
        text.append(f"  {one.cores:.1f} cores; holds Python's GIL: {gil or 'hardly ever'}")
    text += [
        "",
        "Shares of sampled stacks, with 95 % intervals. Not known from outside: the time of a step, what the device"
        " computes, and who waits for whom; `dlprof wrap` records that from the start.",
    ]
    return text


def verdict(found: list[Sampled]) -> str:
    """Return the first line: the largest part that something can be done about, with its line."""
    shares: dict[str, list[tuple[float, float, float, str]]] = {}
    for one in found:
        for part in one.parts:
            line = f" ({part.lines[0][0]}: {part.lines[0][1]})" if part.lines else ""
            shares.setdefault(part.what, []).append((part.share, part.low, part.high, line))
    if not shares:
        return "No sample of a training thread was taken: the job has just ended, or begun."
    many = len(found)
    means = {what: sum(share for share, *_ in of) / many for what, of in shares.items()}
    notable = {what: share for what, share in means.items() if what in _ADVICE and share >= _LARGE}
    if not notable:
        most = max(means, key=lambda what: means[what])
        if most in ("collective", "wait") and means[most] > _ALL:
            return f"{percent(means[most])} in collectives: `dlprof hang {found[0].pid}` says why, if it stands still."
        return f"Nothing stands out: most of the time, {percent(means[most])}, is {_NAMES.get(most, most)}."
    what = max(notable, key=lambda what: notable[what])
    _, low, high, line = max(shares[what])
    who = "its training thread" if many == 1 else f"the training threads of {count(many, 'rank')}"
    sure = f" ({percent(low)}–{percent(high)})" if many == 1 else ""
    return f"{percent(means[what])}{sure} of the time of {who}: {_NAMES[what]}{line}.\n{_ADVICE[what]}"
