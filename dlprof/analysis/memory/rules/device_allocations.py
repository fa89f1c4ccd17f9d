"""Every step asks the GPU for memory, and gives it back.

PyTorch keeps freed memory and gives it to the next tensor, so that after the first steps nobody asks the GPU. A script
that empties this cache in every step (`torch.cuda.empty_cache()`) undoes that: each `cudaFree` waits for the device,
and each `cudaMalloc` of the next step takes the host as long as many kernels.

Needs a trace of a GPU that links launches to kernels. The rule looks for `cudaMalloc` and `cudaFree` in every steady
traced step. Where only the first is there, memory grows, or the allocator finds no piece that is large enough.

Saving: the traced steps replayed without these calls.

What to change: remove `torch.cuda.empty_cache()` from the loop (transformers' Trainer: `torch_empty_cache_steps`);
where sizes vary, `PYTORCH_ALLOC_CONF=expandable_segments:True`; no `PYTORCH_NO_CUDA_MEMORY_CACHING` in the environment.
"""

from __future__ import annotations

import pandas as pd

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis import settings
from dlprof.analysis.engine import JOB, Frame, Job, by_rank, needs, per_rank
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.host.gaps import SAVES_FROM
from dlprof.analysis.panel import table
from dlprof.analysis.settings import EXPANDABLE
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.steps import Timing, timing
from dlprof.analysis.timeline.what_if import WhatIf, what_if
from dlprof.units import duration, often

_ASKS = ("cudaMalloc", "hipMalloc", "cuMemCreate", "cuMemMap")
_FREES = ("cudaFree", "hipFree", "cuMemUnmap", "cuMemRelease")
_COLUMNS = {"call": "call", "calls": "times a step", "ns": "takes_ns"}


@per_rank
def allocating(
    what_if: WhatIf = needs(what_if), spans: Frame = needs(schema.SPANS), timing: Timing = needs(timing)
) -> Frame:
    """Return how often memory of the device is requested and given back in a steady traced step: call, calls, ns, and
    gain_ns, how much shorter the mean steady step would be without all of these calls.
    """
    called = host.is_kind(spans, "runtime") & host.is_named(spans, *_ASKS, *_FREES)
    called &= iv.holds(iv.merge(timing.host_windows), spans["start_ns"].to_numpy())
    calls = spans[called].astype({"name": "str"})
    n = max(len(timing.host_windows), 1)
    frame: Frame = calls.groupby("name")["dur_ns"].agg(calls="size", ns="sum").div(n).rename_axis("call").reset_index()
    times = host.cover(calls)
    frame["gain_ns"] = what_if.gain_ns(other=((times, 0.0),)) if len(times) else 0.0
    return frame


def check(allocating: Frame = needs(allocating)) -> Estimate:
    each = allocating.groupby(["rank", allocating["call"].str.startswith(_FREES)])["calls"].sum()
    both = each[each >= 1].groupby("rank").size()
    ranks = both[both == 2].index
    if not len(ranks):
        return nothing("no step asks the GPU for memory and gives it back")
    mine = allocating[allocating["rank"].isin(ranks)].drop_duplicates("rank")
    return Estimate(
        gone_ns=by_rank(mine, "gain_ns"),
        noise_of=("host",),
        loses="is lost to asking the GPU for memory and giving it back",
    )


def explain(estimate: Estimate, allocating: Frame = needs(allocating), job: Job = needs(JOB)) -> Explanation:
    rank, mine = estimate.worst, estimate.rows(allocating).sort_values("ns", ascending=False)
    variable, conf = settings.allocator(job, rank)
    text = f"where sizes vary from step to step: `{variable}={EXPANDABLE}` (is {conf or 'not set'})"
    return Explanation(
        title="Every step asks the GPU for memory, and gives it back",
        summary=f"{often(float(mine['calls'].sum())).capitalize()} a step rank {rank} asks the GPU for memory or gives"
        f" it back, which takes {duration(float(mine['ns'].sum()))}; `cudaFree` also waits until the GPU is idle.",
        changes=(
            change(
                "no `torch.cuda.empty_cache()` in the loop (transformers' Trainer: leave `torch_empty_cache_steps`"
                " unset): PyTorch gives the freed memory to the next tensor"
            ),
            *(
                []
                if EXPANDABLE in (conf or "")
                else [change(text, numerics=False, training=False, **{variable: (conf, EXPANDABLE)})]
            ),
        ),
        evidence=table(f"Calls for memory of the GPU, a step of rank {rank}", pd.DataFrame(mine), _COLUMNS),
        sure="Estimated by replaying the traced steps without these calls.",
    )


RULE = Rule("Memory from the GPU in every step", check, explain, (*SAVES_FROM, "queued_wait", "other"), only_with="gpu")
