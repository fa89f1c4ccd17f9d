"""Copies between host and device run while nothing else does, though their memory would let them overlap.

A copy from pinned memory can run beside computation: on a stream of its own, one batch ahead. Where it is issued on the
computing stream, or waited for at once, the device only copies.

Needs a trace of a GPU run that links launches to kernels. Copies from pageable memory to the device are the business of
`pageable_copy` and are left out here.

Saving: that of the way on which most is exposed, for that is what the change is for. The traced steps replayed with
these copies on a stream of their own, as far as there is computation to hide them behind; on the way back and within
the device, without them.

What to change: `non_blocking=True`, and prefetch the next batch on a side stream while this one computes; on the way
back (`.cpu()`, `.item()`, `.tolist()`), copy rarely and into pinned memory. Copies within the device are kernels' work
in disguise: `contiguous()` and dtype changes that a better layout avoids.
"""

from __future__ import annotations

from dlprof.diagnosis import Clear, Rule
from dlprof.engine import Measured, by_rank
from dlprof.measures.breakdown import breakdown, part_least, part_noise
from dlprof.measures.copies import PINNED, copies, copy_gains, copy_table, hideable
from dlprof.measures.replay import own_time, saving
from dlprof.result import Finding
from dlprof.timeline.steps import mean_step_ns, of_step, step_means
from dlprof.units import count, duration, percent

# As for pageable copies: worth a change from 3 % of a step on.
NOTABLE_SHARE = 0.03

_WAY = {"HtoD": "to the device", "DtoH": "from the device", "DtoD": "within the device", "PtoP": "between devices"}


def check(run: Measured) -> Finding | Clear:
    """Look at the exposed copies that are not from pageable memory to the device."""
    frame = run.frame(copies)
    able = frame[~((frame["copy"] == "HtoD") & (frame["memory"] == "pageable"))]
    step = mean_step_ns(run)
    if not len(able):
        return Clear("no copies of more than a few bytes but those from pageable memory")
    way = str(able.groupby("copy")["exposed_ns"].sum().idxmax())
    exposed = by_rank(able[able["copy"] == way], "exposed_ns")
    gains = run.frame(copy_gains)
    gains = gains[(gains["copy"] == way) & (gains["change"] != PINNED)]
    gone = by_rank(gains, "gain_ns")
    gain = saving(run, hideable(run, gone) if way == "HtoD" else gone)
    share = gain / step
    if share < NOTABLE_SHARE:
        return Clear(f"{percent(share)} of the step is exposed copying, of {duration(able['copy_ns'].max())}")
    worst = max(exposed, key=lambda r: exposed[r])
    mine = able[(able["rank"] == worst) & (able["copy"] == way)]
    where = _WAY.get(way, way)
    advice = {
        "HtoD": "`non_blocking=True`, and copy the next batch on a side stream while this one computes",
        "DtoH": "copy results back every k steps, not every step; into pinned memory with `non_blocking=True`",
    }.get(way, "avoid the copy: a layout or dtype that both sides share")
    return Finding(
        title=f"Copies {where} are not hidden",
        summary=f"{count(float(mine['count'].sum()), 'copy')} a step {where} take {duration(mine['copy_ns'].sum())},"
        f" {duration(exposed[worst])} of it with the device doing nothing else.",
        verdict=f"{percent(share)} {of_step(run)} copies data {where}, with nothing beside it.",
        noise_ns=part_noise(run, "copy"),
        least_ns=min(gain, part_least(run, "copy")),
        saving_ns=gain,
        advice=(advice,),
        evidence=copy_table(frame, worst),
        ranks=tuple(sorted(exposed)),
        sure="Estimated by replaying the traced steps without these copies on the stream that computes.",
    )


RULE = Rule(
    "exposed_copy",
    "Copies that nothing hides",
    (breakdown, copies, copy_gains, own_time, step_means),
    check,
    saves_from=("copy", "input_wait", "host", "launch_latency"),
)
