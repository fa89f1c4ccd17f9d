"""Copies between host and device run while nothing else does, though their memory would let them overlap.

Computation can hide a copy from pinned memory: on a stream of its own, one batch ahead. Where it is issued on the
computing stream, or waited for at once, the device only copies.

Needs a trace of a GPU run that links launches to kernels. Copies from pageable memory to the device are left out: see
`pageable_copy`.

Saving: that of the way on which most is exposed, for that is what the change is for. The traced steps replayed with
these copies on a stream of their own, as far as there is computation to hide them; on the way back and within the
device, without them. Never more than the time in which the device only copies: what the host gains where it does not
wait for a copy is reported by `host_sync`.

What to change: `non_blocking=True`, and prefetch the next batch on a side stream while this one computes; on the way
back (`.cpu()`, `.item()`, `.tolist()`), copy rarely and into pinned memory. Copies within the device are kernels' work
in disguise: `contiguous()` and dtype changes that a better layout avoids.
"""

from __future__ import annotations

from typing import Any

from dlprof.analysis.engine import Frame, Maybe, by_rank, maybe, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.memory.copies import NOTABLE_SHARE, copies, copy_gains, from_pageable, hideable
from dlprof.analysis.panels.compute import copy_table
from dlprof.analysis.step.breakdown import breakdown
from dlprof.units import count, duration

_WAY = {"HtoD": "to the device", "DtoH": "from the device", "DtoD": "within the device", "PtoP": "between devices"}

_CHANGES = {
    "HtoD": "`non_blocking=True`, and copy the next batch on a side stream while this one computes",
    "DtoH": "copy results back every k steps, not every step; into pinned memory with `non_blocking=True`",
}


def check(
    copies: Frame = needs(copies),
    copy_gains: Maybe[Frame] = maybe(copy_gains),
    breakdown: Maybe[Frame] = maybe(breakdown),
) -> Estimate:
    able = copies[~from_pageable(copies)]
    if not len(able):
        return nothing("no copies of more than a few bytes but those from pageable memory")
    way = str(able.groupby("copy")["exposed_ns"].sum().idxmax())
    gains = copy_gains.get()
    gone = by_rank(gains[(gains["copy"] == way) & ~from_pageable(gains)], "gain_ns")
    gone = hideable(breakdown.get(), copies, gone) if way == "HtoD" else gone
    # What the host gains by not waiting for copies is the business of `host_sync`.
    exposed = by_rank(able[able["copy"] == way], "exposed_ns")
    return Estimate(
        gone_ns={rank: min(ns, exposed.get(rank, 0.0)) for rank, ns in gone.items()},
        noise_of=("copy",),
        least_of=("copy",),
        loses=f"is spent copying data {_WAY.get(way, way)} while nothing computes",
        seen=(way, able[able["copy"] == way]),
    )


def explain(estimate: Estimate, copies: Frame = needs(copies)) -> Explanation:
    way, copied = estimate.seen
    number, ns, exposed = estimate.rows(copied)[["count", "copy_ns", "exposed_ns"]].sum()
    settings: Any = {"non_blocking": (None, True)} if way in _CHANGES else {}
    where, text = _WAY.get(way, way), _CHANGES.get(way, "avoid the copy: a layout or dtype that both sides share")
    return Explanation(
        title=f"Copies {where} are not hidden",
        summary=f"{count(number, 'copy')} a step {where} {'takes' if number == 1 else 'take'} {duration(ns)}; for"
        f" {duration(exposed)} of it the device does nothing else.",
        changes=(change(text, **settings),),
        evidence=copy_table(copies, estimate.worst),
        sure="Estimated by replaying the traced steps without these copies on the stream that computes.",
    )


RULE = Rule("Copies that nothing hides", check, explain, ("copy",), notable=NOTABLE_SHARE, only_with="gpu")
