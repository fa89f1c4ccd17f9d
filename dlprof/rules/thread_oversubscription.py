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

import pandas as pd

from dlprof.diagnosis import LEAST_SHARE, Clear, Rule
from dlprof.engine import Measured
from dlprof.errors import NotMeasured
from dlprof.measures import settings
from dlprof.measures.breakdown import breakdown, part
from dlprof.measures.replay import own_time, saving
from dlprof.measures.samples import WAITED, outside, sample_means
from dlprof.result import Finding, Panel
from dlprof.timeline.steps import mean_step_ns, step_means
from dlprof.units import count, digits, duration, percent

# Where tools for input and stragglers begin to speak: 5 % of a step (XProf, NVIDIA's resiliency extension).
NOTABLE_SHARE = 0.05

_MOST_RANKS = 16

_METRICS = {
    "cpu_cores": "cores in use",
    "involuntary_switches_per_s": "taken off a core, a second",
    "children_cpu_cores": "cores its children use",
}


def check(run: Measured) -> Finding | Clear:
    """Look at how long each rank's main thread had no core, and at how many threads it has."""
    sampled = run.frame(sample_means)
    waits = sampled[sampled["metric"] == WAITED].set_index("rank")
    if not len(waits):
        raise NotMeasured("this kernel does not count how long threads wait for a core")
    threads = {r: n for r in run.ranks if (n := (run.facts[r].get("cpu") or {}).get("torch_threads"))}
    cores = {r: n for r in threads if (n := _cores(run, r))}
    if not cores:
        raise NotMeasured("the numbers of cores and of threads are not known")
    step = mean_step_ns(run)
    waited = {r: float(waits["mean"][r]) * step for r in waits.index.intersection(list(cores))}
    if not waited:
        raise NotMeasured("no rank with samples tells its threads")
    worst = max(waited, key=lambda r: (threads[r] > cores[r], waited[r]))
    if threads[worst] <= cores[worst]:
        return Clear(
            f"{count(threads[worst], 'thread')} and {count(cores[worst], 'core')} a rank;"
            f" {percent(waited[worst] / step)} of the time its main thread waits for one"
        )
    if not settings.on_cpu(run):
        idle = part(run, "host", "optimizer_host")
        waited = {r: min(ns, idle.get(r, 0.0)) for r, ns in waited.items()}
    others = outside(sampled)
    gain = (1 - others) * saving(run, {r: ns for r, ns in waited.items() if threads[r] > cores[r]})
    if gain / step < NOTABLE_SHARE:
        return Clear(f"{percent(gain / step)} of the step waits for a core")
    return Finding(
        title="More threads than cores",
        summary=f"Rank {worst} computes with {threads[worst]:,} threads and has {count(cores[worst], 'core')} to"
        f" itself: for {percent(waited[worst] / step)} of the time its main thread is ready and has none.",
        verdict=f"{percent(gain / step)} of each step waits for a free core.",
        saving_ns=gain,
        noise_ns=(1 - others) * float(waits["noise"][worst]) * step,
        advice=_advice(run, worst, threads[worst], cores[worst]),
        evidence=_evidence(sampled, threads, cores, waited, step),
        ranks=tuple(sorted(r for r in waited if threads[r] > cores[r])),
        sure="Counted by the kernel; estimated as the main thread's waiting gone"
        + (f", but for the {percent(others)} of the used cores that programs outside the job have." if others else ".")
        + _least(sampled, worst, cores[worst], step, gain),
    )


def _least(sampled: pd.DataFrame, rank: int, cores: int, step: float, most: float) -> str:
    """Say what is saved where all that a rank used of the cores was work, and had to be done with its own."""
    used = sampled[(sampled["rank"] == rank) & (sampled["source"] == "processes") & (sampled["metric"] == "cpu_cores")]
    if not len(used):
        return ""
    least = min(max(1 - float(used["mean"].iloc[0]) / cores, 0.0) * step, most)
    left = duration(least) if least >= LEAST_SHARE * step else "nothing"
    return f" If its threads never spun while they waited for each other, {left} is saved."


def _cores(run: Measured, rank: int) -> int | None:
    """Give how many cores a rank has to itself: those it is bound to, or its share of the host's."""
    cpu = run.facts[rank].get("cpu") or {}
    bound, all_cores = cpu.get("affinity"), cpu.get("count")
    here = sum(run.facts[r].get("host") == run.facts[rank].get("host") for r in run.ranks)
    if bound and all_cores and bound < all_cores and bound * here <= all_cores:
        return int(bound)
    return settings.cores_per_rank(run, rank)


def _advice(run: Measured, rank: int, threads: int, cores: int) -> tuple[str, ...]:
    workers = settings.training_loader(run, rank).get("num_workers") or 0
    left = max(1, cores - workers)
    advice = [f"`OMP_NUM_THREADS={left}`, or `torch.set_num_threads({left})` (is {threads})"]
    if workers >= cores:
        advice.append(f"fewer loader workers: {workers} of them and the rank share {count(cores, 'core')}")
    return tuple(advice)


def _evidence(
    sampled: pd.DataFrame, threads: dict[int, int], cores: dict[int, int], waited: dict[int, float], step: float
) -> Panel:
    own = sampled[sampled["source"] == "processes"]
    told = own.pivot_table(index="rank", columns="metric", values="mean").reindex(list(waited))
    rows = tuple(
        (
            f"rank {r}",
            threads[r],
            cores[r],
            percent(waited[r] / step),
            *("" if m not in told or pd.isna(told[m][r]) else digits(float(told[m][r])) for m in _METRICS),
        )
        for r in list(waited)[:_MOST_RANKS]
    )
    columns = ("", "threads", "cores to itself", "ready, without a core", *_METRICS.values())
    return Panel("table", "Threads and cores", rows, columns)


RULE = Rule(
    "thread_oversubscription",
    "Threads that wait for a core",
    (breakdown, own_time, sample_means, step_means),
    check,
    saves_from=("computation", "communication", "input_wait", "optimizer_host", "host", "other"),
    feeds=True,
)
