"""Ranks are bound to the same cores, while others of their host are free.

Launchers and schedulers bind processes to cores. Where the binding is wrong (`--cpus-per-task` is missing, each task is
bound to the first cores of its node, two jobs' scripts call taskset with the same list), the ranks of a host wait for
each other's cores, and the rest of the host does nothing. What a rank is bound to may also lie on another NUMA node
than its GPU: then every launch and every copy goes through the link between the nodes.

Needs the cores that each rank may use, as recorded, and how long its threads were ready and had no core.

Saving: the waiting for a core gone on ranks that share cores while their host has others that none of them may use.
What the way to a GPU on another node costs is in no recording: the report then has a warning that names the ranks, and
where only that is seen, the rule abstains.

What to change: `srun --cpus-per-task=N --cpu-bind=cores`, `torchrun --numa-binding=node` (torch 2.8), mpirun's
`--map-by numa:PE=N`, or no binding at all.
"""

from __future__ import annotations

import math

import pandas as pd

from dlprof.analysis.engine import Frame, Maybe, by_rank, maybe, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.machine.cores import bindings, core_waits, far_from_gpu
from dlprof.analysis.machine.samples import outside, sample_means
from dlprof.analysis.panel import table
from dlprof.analysis.step.savings import own_time, saving
from dlprof.errors import NotMeasured
from dlprof.units import count, duration, ranks_named

# As of threads that wait for a core.
NOTABLE_SHARE = 0.05

_SHOWN = {
    "rank": "rank",
    "host": "host",
    "cores": "cores it may use",
    "shared": "of these with other ranks",
    "left": "cores no rank may use",
    "waits_ns": "waits for a core a step_ns",
    "node": "NUMA node",
    "gpu_node": "its GPU's",
}


def check(
    bindings: Frame = needs(bindings),
    core_waits: Maybe[Frame] = maybe(core_waits),
    sample_means: Maybe[Frame] = maybe(sample_means),
    own_time: Frame = needs(own_time),
) -> Estimate:
    crowded = bindings[(bindings["shared"] > 0) & (bindings["left"] > 0)]
    if crowded.empty:
        if far := far_from_gpu(bindings):
            raise NotMeasured(
                f"{far}: what that costs is in no recording; `torchrun --numa-binding=node` or `srun --cpu-bind` brings"
                " them together, and `dlprof compare` says what it gave"
            )
        return nothing("ranks that are bound to cores share none, or there are no others")
    waits = core_waits.get().set_index("rank")
    gone = waits["waits_ns"].reindex(crowded["rank"]).dropna()
    if gone.empty:
        raise NotMeasured("how long the ranks that share cores waited for one was not read")
    own = 1 - outside(sample_means.get())
    return Estimate(
        saving_ns=own * saving(own_time, gone),
        by_rank_ns={int(str(rank)): float(ns) for rank, ns in gone.items()},
        noise_ns=own * float(waits["noise_ns"].reindex(gone.index).max()),
        loses="waits for cores that other ranks are bound to as well",
        seen=crowded,
    )


def explain(
    estimate: Estimate, bindings: Frame = needs(bindings), core_waits: Frame = needs(core_waits)
) -> Explanation:
    crowded: pd.DataFrame = estimate.seen
    row = crowded[crowded["rank"] == estimate.worst].iloc[0]
    waits = by_rank(core_waits, "waits_ns")
    shown = bindings.assign(waits_ns=[waits.get(rank, math.nan) for rank in bindings["rank"]])
    each = max(int(row["cores"]) + int(row["left"]) // max(len(crowded), 1), 1)
    bind = f"bind each rank to cores of its own: `srun --cpus-per-task={each} --cpu-bind=cores`, or `torchrun"
    cores, shared, left = (count(int(row[c]), "core") for c in ("cores", "shared", "left"))
    return Explanation(
        title="Ranks share cores while others are free",
        summary=f"{ranks_named(crowded['rank']).capitalize()} may use {cores} each, of which others may use {shared} as"
        f" well; {left} of {row['host'] or 'the host'} no rank may use. Rank {row['rank']} waits"
        f" {duration(waits.get(int(row['rank']), 0.0))} a step for one.",
        changes=(change(f"{bind} --numa-binding=node` (torch 2.8)"), change("no binding: all cores for all ranks")),
        evidence=table("Cores that ranks may use", shown.astype({"waits_ns": float}), _SHOWN, 32),
        sure="Counted by the kernel: how long the main thread was ready and had no core, gone.",
        at_most=True,
    )


_SAVES_FROM = ("computation", "communication", "input_wait", "optimizer_host", "host", "other")
RULE = Rule("Ranks bound to the same cores", check, explain, _SAVES_FROM, notable=NOTABLE_SHARE)
