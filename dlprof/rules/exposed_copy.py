"""Copies between host and device run while nothing else does, though their memory would let them overlap.

A copy from pinned memory can run beside computation: on a stream of its own, one batch ahead. Where it is issued on the
computing stream, or waited for at once, the device only copies.

Needs a trace of a GPU run. Copies from pageable memory are the business of `pageable_copy` and are left out here.

Saving: the exposed time of these copies, as far as there is computation to hide them behind.

What to change: `non_blocking=True`, and prefetch the next batch on a side stream while this one computes; on the way
back (`.cpu()`, `.item()`, `.tolist()`), copy rarely and into pinned memory. Copies within the device are kernels' work
in disguise: `contiguous()` and dtype changes that a better layout avoids.
"""

from __future__ import annotations

from dlprof.diagnosis import Clear, Rule
from dlprof.engine import Measured, by_rank
from dlprof.measures.breakdown import breakdown, part_noise
from dlprof.measures.copies import copies, copy_table, hideable
from dlprof.measures.replay import own_time, saving
from dlprof.measures.steps import mean_step_ns, of_step, step_means
from dlprof.result import Finding
from dlprof.units import count, duration, percent

# As for pageable copies: worth a change from 3 % of a step on.
NOTABLE_SHARE = 0.03

_WAY = {"HtoD": "to the device", "DtoH": "from the device", "DtoD": "within the device", "PtoP": "between devices"}


def check(run: Measured) -> Finding | Clear:
    """Look at the exposed copies that are not from pageable memory to the device."""
    frame = run.frame(copies)
    able = frame[~((frame["copy"] == "HtoD") & (frame["memory"] == "pageable"))]
    step = mean_step_ns(run)
    exposed = by_rank(able, "exposed_ns")
    if not exposed:
        return Clear("no copies of more than a few bytes but those from pageable memory")
    gain = saving(run, hideable(run, exposed))
    share = gain / step
    if share < NOTABLE_SHARE:
        return Clear(f"{percent(share)} of the step is exposed copying, of {duration(able['copy_ns'].max())}")
    worst = max(exposed, key=lambda r: exposed[r])
    mine = able[able["rank"] == worst].sort_values("exposed_ns", ascending=False)
    top = mine.iloc[0]
    way = _WAY.get(top["copy"], top["copy"])
    advice = {
        "HtoD": "`non_blocking=True`, and copy the next batch on a side stream while this one computes",
        "DtoH": "copy results back every k steps, not every step; into pinned memory with `non_blocking=True`",
    }.get(top["copy"], "avoid the copy: a layout or dtype that both sides share")
    return Finding(
        title=f"Copies {way} are not hidden",
        summary=f"{count(float(mine['count'].sum()), 'copy')} a step take {duration(mine['copy_ns'].sum())},"
        f" {duration(exposed[worst])} of it with the device doing nothing else; most of it {way}.",
        verdict=f"{percent(share)} {of_step(run)} copies data {way}, with nothing beside it.",
        noise_ns=part_noise(run, "copy"),
        saving_ns=gain,
        advice=(advice,),
        evidence=copy_table(frame, worst),
        ranks=tuple(sorted(exposed)),
        sure="Estimated as the exposed copying gone, bounded by the computation that can hide it.",
    )


RULE = Rule(
    "exposed_copy", "Copies that nothing hides", (breakdown, copies, own_time, step_means), check, saves_from=("copy",)
)
