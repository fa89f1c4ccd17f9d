"""More threads want to compute than there are cores, and training waits for its turn.

Every rank that runs operators on the CPU splits them over a pool of threads, by default as many as the host has cores.
Eight ranks of one host then have eight times too many, and each of them stands still when any of its threads does. The
kernel's scheduler shares the cores out in slices of milliseconds, while an operator takes microseconds.

Needs what is sampled beside the job: how long the main thread of a rank was ready to run and had no core, as the Linux
kernel counts it. The rule speaks where a rank has more threads than cores to itself; waiting that other programs on the
host cause is no fault of the job's. On a GPU also a trace: it matters only where the GPU has nothing to do meanwhile.

Saving: the main thread's waiting gone, less the part that falls to programs outside the job, by what they use of the
host's cores. What it loses by waiting for its own pool, whose threads wait as well, comes on top and is not counted;
nor is that with fewer threads each has more of the work. The two are of one kind: a pool's threads may spin while they
wait for each other, and the kernel counts spinning as computing. Had all that a rank used of the cores been work, it
would need its own cores for as long: the report gives this least saving as well.

What to change: as many threads as a rank has cores to itself, loader workers left out of account only where the loader
is idle: `OMP_NUM_THREADS` in the job's environment, or `torch.set_num_threads`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.engine import Job, Maybe
from dlprof.analysis.estimate import LEAST_SHARE, Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.machine.samples import WAITED, outside
from dlprof.analysis.step.breakdown import part
from dlprof.analysis.step.savings import saving
from dlprof.errors import NotMeasured
from dlprof.result import Change, Panel
from dlprof.units import count, duration, percent

_MOST_RANKS = 16

_METRICS = {
    "cpu_cores": "cores in use",
    "involuntary_switches_per_s": "taken off a core, a second",
    "children_cpu_cores": "cores its children use",
}


def check(
    sample_means: pd.DataFrame,
    mean_step_ns: Maybe[float],
    breakdown: Maybe[pd.DataFrame],
    own_time: Maybe[pd.DataFrame],
    job: Job,
) -> Estimate:
    """Estimate the waiting for a core of the ranks that have more threads than cores."""
    waits = sample_means[sample_means["metric"] == WAITED].set_index("rank")
    if not len(waits):
        raise NotMeasured("this kernel does not count how long threads wait for a core")
    threads = {r: n for r in job.ranks if (n := (job.facts[r].get("cpu") or {}).get("torch_threads"))}
    cores = {r: n for r in threads if (n := _cores(job, r))}
    if not cores:
        raise NotMeasured("the numbers of cores and of threads are not known")
    step = mean_step_ns.get()
    waited = {r: float(waits["mean"][r]) * step for r in waits.index.intersection(list(cores))}
    if not waited:
        raise NotMeasured("no rank with samples tells its threads")
    rank = max(waited, key=lambda r: (threads[r] > cores[r], waited[r]))
    if threads[rank] <= cores[rank]:
        return nothing(
            f"{count(threads[rank], 'thread')} and {count(cores[rank], 'core')} a rank;"
            f" {percent(waited[rank] / step)} of the time its main thread waits for one"
        )
    if not settings.on_cpu(job):
        idle = part(breakdown.get(), "host", "optimizer_host")
        waited = {r: min(ns, idle.get(r, 0.0)) for r, ns in waited.items()}
    crowded = {r: ns for r, ns in waited.items() if threads[r] > cores[r]}
    own = 1 - outside(sample_means)
    gain = own * saving(own_time.get(), crowded)
    return Estimate(
        saving_ns=gain,
        by_rank_ns=crowded,
        noise_ns=own * float(waits["noise"][rank]) * step,
        loses="waits for a free core",
        explain=lambda: _explain(sample_means, mean_step_ns.get(), job, rank, threads, cores, waited, gain),
    )


def _explain(
    sample_means: pd.DataFrame,
    mean_step_ns: float,
    job: Job,
    rank: int,
    threads: Mapping[int, int],
    cores: Mapping[int, int],
    waited: Mapping[int, float],
    gain: float,
) -> Explanation:
    step = mean_step_ns
    others = outside(sample_means)
    besides = f", but for the {percent(others)} of the used cores that programs outside the job have" if others else ""
    return Explanation(
        title="More threads than cores",
        summary=f"Rank {rank} computes with {threads[rank]:,} threads and has {count(cores[rank], 'core')} to itself:"
        f" for {percent(waited[rank] / step)} of the time its main thread is ready and has none.",
        changes=_changes(job, rank, threads[rank], cores[rank]),
        evidence=_evidence(sample_means, threads, cores, waited),
        sure=f"Counted by the kernel; estimated as the main thread's waiting gone{besides}."
        + _least(sample_means, rank, cores[rank], step, gain),
    )


def _least(sampled: pd.DataFrame, rank: int, cores: int, step: float, most: float) -> str:
    """Say what is saved where all that a rank used of the cores was work, and had to be done with its own."""
    used = sampled[(sampled["rank"] == rank) & (sampled["source"] == "processes") & (sampled["metric"] == "cpu_cores")]
    if not len(used):
        return ""
    least = min(max(1 - float(used["mean"].iloc[0]) / cores, 0.0) * step, most)
    left = duration(least) if least >= LEAST_SHARE * step else "nothing"
    return f" If its threads never spun while they waited for each other, {left} is saved."


def _cores(job: Job, rank: int) -> int | None:
    """Return how many cores a rank has to itself: those it is bound to, or its share of the host's."""
    cpu = job.facts[rank].get("cpu") or {}
    bound, all_cores = cpu.get("affinity"), cpu.get("count")
    here = settings.neighbours(job, rank)
    if bound and all_cores and bound < all_cores and bound * here <= all_cores:
        return int(bound)
    return settings.cores_per_rank(job, rank)


def _changes(job: Job, rank: int, threads: int, cores: int) -> tuple[Change, ...]:
    workers = settings.training_loader(job, rank).get("num_workers") or 0
    left = max(1, cores - workers)
    fewer = change(
        f"`OMP_NUM_THREADS={left}`, or `torch.set_num_threads({left})` (is {threads})", OMP_NUM_THREADS=(threads, left)
    )
    if workers < cores:
        return (fewer,)
    return fewer, change(f"fewer loader workers: {workers} of them and the rank share {count(cores, 'core')}")


def _evidence(
    sampled: pd.DataFrame, threads: Mapping[int, int], cores: Mapping[int, int], waited: Mapping[int, float]
) -> Panel:
    own = sampled[sampled["source"] == "processes"]
    told = own.pivot_table(index="rank", columns="metric", values="mean").reindex(
        index=list(waited), columns=list(_METRICS)
    )
    rows = tuple(
        (f"rank {r}", threads[r], cores[r], ns, *(None if math.isnan(n) else n for n in read))
        for (r, ns), read in zip(waited.items(), told.to_numpy(dtype=float).tolist(), strict=True)
    )[:_MOST_RANKS]
    columns = ("", "threads", "cores to itself", "waits for a core a step_ns", *_METRICS.values())
    return Panel("table", "Threads and cores", rows, columns)


RULE = Rule(
    "thread_oversubscription",
    "Threads that wait for a core",
    check,
    saves_from=("computation", "communication", "input_wait", "optimizer_host", "host", "other"),
    feeds=True,
    notable=0.05,  # where tools for input and stragglers begin to speak (XProf, NVIDIA's resiliency extension)
)
