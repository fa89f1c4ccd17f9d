"""More threads want to compute than there are cores, and training waits for its turn.

Every rank that runs operators on the CPU splits them over a pool of threads, by default as many as the host has cores.
Eight ranks of one host then have eight times too many, and each of them stops when any of its threads does: the kernel
shares the cores out in slices of milliseconds, while an operator takes microseconds.

The same holds for processes that train side by side without a process group, as Hogwild's do.

Needs what is sampled of the host and its processes: how long the threads of a rank were ready to run and had no core,
as the Linux kernel counts it. Only ranks with more threads than cores to themselves count: waiting that other programs
on the host cause is no fault of the job's, and where it is long, also beside loader workers on the same cores, the rule
abstains: `dlprof try` measures what fewer threads or workers save. Where training computes on a CPU, and it is known
what a line of the workers does that they could do without, it names that line. On a GPU also a trace: waiting counts
only where the GPU is idle.

In a container with a quota (`cpu.max`) the kernel stops all of its threads until the next period, of 0.1 s, where they
have used it up: that counts as waiting, whatever the number of threads, where the group's `cpu.stat` counts it.

Saving: the main thread's waiting gone, and on a CPU, where an operator goes on only while all its threads have a core,
that of its pool's; with fewer threads each has more of the work. Less the share of programs outside the job in the
cores in use. A pool's threads may also spin while they wait for each other, which the kernel counts as computing: where
they do, more is saved; where all that a rank used of the cores was work, less, which the report gives as well. A bound
where the threads are to be fewer than the rank's cores, for the sake of its loader's workers: one thread instead of
four, on two cores with one worker, gained 1.09 × where the bound was 1.83 ×.

What to change: as many threads as a rank has cores to itself, less its loader workers, unless the loader is idle:
`OMP_NUM_THREADS` in the job's environment, or `torch.set_num_threads`.
"""

from __future__ import annotations

import math

import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, by_rank, maybe, needs
from dlprof.analysis.estimate import LEAST_SHARE, Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.machine.cores import core_waits, freed, line_of, threads_set_by, throttling
from dlprof.analysis.machine.samples import LITTLE, foreign_load, outside, sample_means
from dlprof.analysis.panel import named, table
from dlprof.analysis.source.line_shares import CostlyLine, costliest, costly_lines
from dlprof.analysis.step.breakdown import breakdown, part
from dlprof.analysis.step.savings import own_time, saving
from dlprof.analysis.timeline.steps import mean_step_ns
from dlprof.errors import NotMeasured
from dlprof.result import Change
from dlprof.units import count, digits, duration, percent

# From where on XProf and NVIDIA's resiliency extension report input waits and stragglers.
NOTABLE_SHARE = 0.05

_MOST_RANKS = 16

# Workers that use less of a core take little from training.
_BUSY_WORKERS = 0.3
_COLUMNS = {
    "name": "",
    "threads": "threads",
    "cores": "cores to itself",
    "waits_ns": "waits for a core a step_ns",
    "lost_ns": "loses by it_ns",
    "cpu_cores": "cores in use",
    "involuntary_switches_per_s": "taken off a core, a second",
    "children_cpu_cores": "cores its children use",
}


def check(
    core_waits: Frame = needs(core_waits),
    sample_means: Frame = needs(sample_means),
    own_time: Frame = needs(own_time),
    foreign_load: Maybe[Frame] = maybe(foreign_load),
    throttling: dict[int, float] = needs(throttling),
    costly_lines: Maybe[Frame] = maybe(costly_lines),
    breakdown: Maybe[Frame] = maybe(breakdown),
    mean_step_ns: float = needs(mean_step_ns),
    job: Job = needs(JOB),
) -> Estimate:
    # A rank that is bound to a few cores of many shares these with its loader's workers.
    beside = [
        settings.training_loader(job, rank).get("num_workers") or 0 if settings.is_bound(job, rank) else 0
        for rank in core_waits["rank"].tolist()
    ]
    stopped = core_waits["rank"].map(throttling).fillna(0.0) >= NOTABLE_SHARE
    crowded = core_waits[(core_waits["threads"] + beside > core_waits["cores"]) | stopped]
    row = (core_waits if crowded.empty else crowded).nlargest(1, "waited").iloc[0]
    if crowded.empty and row["waited"] >= NOTABLE_SHARE:
        others, loader = foreign_load.or_none(), settings.training_loader(job, int(row["rank"]))
        workers = loader.get("num_workers") or 0
        who = "" if others is None else f": programs outside the job used {digits(others['foreign'].max())} cores"
        if workers and others is not None and others["foreign"].max() < LITTLE * others["cores"].max():
            who = ""
            # Where training waits for its data as well, `input_wait` names the line.
            step = breakdown.or_none() if settings.on_cpu(job) else None
            waited = {} if step is None else part(step, "input_wait")
            looks = step is not None and waited.get(int(row["rank"]), 0.0) < NOTABLE_SHARE * mean_step_ns
            line = costliest(costly_lines, int(row["rank"]), "worker") if looks else None
            if line is not None and line.idiom is not None and row["children_cpu_cores"] >= _BUSY_WORKERS:
                waits = by_rank(core_waits, "lost_ns")
                return Estimate(
                    saving_ns=saving(own_time, waits),
                    by_rank_ns=waits,
                    loses="waits for a core on which a loader worker computes",
                    seen=(int(row["rank"]), line),
                )
        with_workers = f", {count(workers, 'loader worker')}" if workers else ""
        trial = f"; what fewer threads or workers save is not known: {_trial(job, row, workers)}" if workers else ""
        raise NotMeasured(
            f"{percent(row['waited'])} of the time its main thread waits for a core, with"
            f" {count(row['threads'], 'thread')}{with_workers} and {count(row['cores'], 'core')} a rank{who}{trial}"
        )
    if crowded.empty:
        return nothing(
            f"{count(row['threads'], 'thread')} and {count(row['cores'], 'core')} a rank;"
            f" {percent(row['waited'])} of the time its main thread waits for one"
        )
    waits = by_rank(crowded, "lost_ns")
    own = 1 - outside(sample_means)
    return Estimate(
        saving_ns=own * saving(own_time, waits),
        by_rank_ns=waits,
        noise_ns=own * float(row["noise_ns"]),
        loses="waits for a free core",
        seen=(int(row["rank"]), None),
    )


def explain(
    estimate: Estimate,
    core_waits: Frame = needs(core_waits),
    sample_means: Frame = needs(sample_means),
    mean_step_ns: float = needs(mean_step_ns),
    throttling: dict[int, float] = needs(throttling),
    job: Job = needs(JOB),
) -> Explanation:
    rank, line = estimate.seen
    row = core_waits[core_waits["rank"] == rank].iloc[0]
    if line is not None:
        return _of_workers(job, row, line, core_waits, mean_step_ns)
    threads, cores, used = int(row["threads"]), int(row["cores"]), float(row["cpu_cores"])
    others = outside(sample_means)
    line = line_of(job, rank, "affinity" if settings.is_bound(job, rank) else "threads")
    but = f", but for the {percent(others)} of the used cores that programs outside the job have" if others else ""
    sure = f"Counted by the kernel; estimated as its threads' waiting gone{but}."
    if not math.isnan(used):
        # Had all of it been work, it would have to be done with the rank's own cores.
        least = min(max(1 - used / cores, 0.0) * mean_step_ns, estimate.saving_ns)
        left = duration(least) if least >= LEAST_SHARE * mean_step_ns else "nothing"
        sure += f" If its threads never spun while they waited for each other, {left} is saved."
    stopped, changes = throttling.get(rank, 0.0), _changes(job, rank, threads, cores)
    title, held = "More threads than cores" if threads > cores else "Training waits for the few cores it may use", ""
    if stopped >= NOTABLE_SHARE:
        quota = digits((job.facts[rank].get("cpu") or {}).get("quota") or cores)
        title = "The container's quota stops the job"
        held = f" Its container's quota of {quota} cores was used up in {percent(stopped)} of its periods."
        raised = change(f"a larger CPU quota than {quota} cores (`docker run --cpus`, Kubernetes' `limits.cpu`)")
        changes = (*changes, raised) if threads > cores else (raised, *changes)
    return Explanation(
        title=title,
        summary=f"Rank {rank} computes with {count(threads, 'thread')} and has {count(cores, 'core')} to itself: for"
        f" {percent(row['waits_ns'] / mean_step_ns)} of the time its main thread waits for one.{held}",
        changes=changes,
        evidence=table("Threads and cores", named(core_waits), _COLUMNS, _MOST_RANKS),
        at_most=_left(job, rank, cores) < cores,
        sure=sure,
        where=() if line is None else (line,),
    )


def _of_workers(
    job: Job, row: pd.Series[float], line: CostlyLine, core_waits: Frame, mean_step_ns: float
) -> Explanation:
    workers = settings.training_loader(job, int(row["rank"])).get("num_workers") or 0
    return Explanation(
        title="Loader workers take cores that training computes with",
        summary=f"For {percent(row['waits_ns'] / mean_step_ns)} of the time the main thread of rank {int(row['rank'])}"
        f" waits for a core: {count(workers, 'loader worker')} {'uses' if workers == 1 else 'use'}"
        f" {digits(float(row['children_cpu_cores']))} of {count(int(row['cores']), 'core')}, and {line.does}.",
        changes=(change(line.advice()), Change(_trial(job, row, workers), informs=True)),
        evidence=table("Threads and cores", named(core_waits), _COLUMNS, _MOST_RANKS),
        at_most=True,
        sure="Counted by the kernel; estimated as its threads' waiting gone. What is left of the workers' work takes"
        " cores as well.",
        where=(line.place,),
    )


def _configured(job: Job, rank: int, threads: int) -> str:
    """Return the threads that a rank's environment asks for where they are fewer than it has: its script sets them."""
    configured = str((job.facts.get(rank, {}).get("env") or {}).get("OMP_NUM_THREADS") or "")
    return configured if configured.isdecimal() and int(configured) < threads else ""


def _sets_them(job: Job, rank: int, threads: int) -> bool:
    """Return whether a rank's script sets its threads, so that no variable does."""
    line = line_of(job, rank, "threads")
    return bool(_configured(job, rank, threads)) or (line is not None and "set_num_threads" in line.what)


def _trial(job: Job, row: pd.Series[float], workers: int) -> str:
    """Say how to measure the gain of a rank with loader workers on the cores of its threads."""
    if row["threads"] > 1:
        name = "torch.num_threads" if _sets_them(job, int(row["rank"]), int(row["threads"])) else "env.OMP_NUM_THREADS"
        return f"`dlprof try` with `--set {name}={max(1, int(row['cores']) - workers)}` measures it"
    return f"`dlprof try` with `--set loader.num_workers={workers - 1}` measures it"


def _left(job: Job, rank: int, cores: int) -> int:
    """Return how many of a rank's cores its loader's workers leave it."""
    return max(1, cores - (settings.training_loader(job, rank).get("num_workers") or 0))


def _changes(job: Job, rank: int, threads: int, cores: int) -> tuple[Change, ...]:
    workers = settings.training_loader(job, rank).get("num_workers") or 0
    left = _left(job, rank, cores)
    if configured := _configured(job, rank, threads):
        words = f"`torch.set_num_threads({left})` (is {threads}, although `OMP_NUM_THREADS={configured}` is set)"
        fewer = change(words, num_threads=(threads, left))
    elif _sets_them(job, rank, threads):
        by = threads_set_by(job, rank)
        fewer = change(f"`torch.set_num_threads({left})` (is {threads}{by})", num_threads=(threads, left))
    else:
        words = f"`OMP_NUM_THREADS={left}`, or `torch.set_num_threads({left})` (is {threads})"
        fewer = change(words, OMP_NUM_THREADS=(threads, left))
    if settings.is_bound(job, rank):
        more = freed(job, rank)
        return (more, fewer) if threads > cores else (more,)
    if workers < cores:
        return (fewer,)
    return fewer, change(f"fewer loader workers: {workers} of them and the rank share {count(cores, 'core')}")


_SAVES_FROM = ("computation", "communication", "input_wait", "optimizer_host", "host", "other")
RULE = Rule("Threads that wait for a core", check, explain, _SAVES_FROM, feeds=True, notable=NOTABLE_SHARE)
