"""Checks that the clocks of a trace's host and device agree, and corrects them where the trace says by how much.

A profiler converts the device's timestamps to the host's clock, and some conversions fail: work then begins before it
was launched, or a copy that its call waited for ends long after that call.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.units import duration

# Conversions are good to some tens of µs. From here on the order of host and device is not what it was.
_EARLY_NS = 100_000
_LATE_NS = 2_000_000

# So many pairs say something, so many are looked at, and of the early ones there are at least so many.
_FEWEST, _MOST, _SHARE = 5, 20_000, 0.2

# Copies agree on a constant difference if the middle half of them lies within this, or this share of the difference.
_AGREE_NS, _AGREE = 200_000, 0.02

# What was launched within some time runs within as long, but for what is queued; not this many times (units differ by
# 1,000).
_RATE = 200.0

_UNLINKED = "what the device waited for is not known, and launches are not linked to its work"


def aligned(spans: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Return the spans with the device's clock on the host's, and what was wrong with it.

    Copies from the device into pageable memory end when their calls do: where they agree on another difference, the
    device's times are corrected by it. Where they do not, or there are none, no launch is linked to the device's work.
    """
    kind = spans["kind"].cat
    of = {name: code for code, name in enumerate(kind.categories)}
    codes, launch = kind.codes.to_numpy(), spans["launch"].to_numpy()
    lanes = spans["lane"].cat
    on_device = np.array([str(name).startswith("device") for name in lanes.categories], dtype=bool)
    device = on_device[lanes.codes.to_numpy()]
    linked = np.flatnonzero(device & (launch >= 0))
    calls = np.flatnonzero((codes == of.get("runtime", -1)) & (launch >= 0))
    if len(linked) < _FEWEST or not len(calls):
        return spans, []
    start, dur = spans["start_ns"].to_numpy(), spans["dur_ns"].to_numpy()
    blocking = linked[(codes == of.get("copy", -1))[linked]]
    blocking = blocking[_from_device(spans.iloc[blocking])]
    rows, at = _calls_of(linked[:: -(-len(linked) // _MOST)], calls, launch)
    if len(rows) < _FEWEST:
        return spans, []
    lag = start[rows] - start[at]
    late, late_at = _calls_of(blocking[:_MOST], calls, launch)
    after = start[late] + dur[late] - (start[late_at] + dur[late_at])
    wrong = _wrong(lag, after, start[rows], start[at])
    if not wrong:
        return spans, []
    if len(after) >= _FEWEST:
        low, middle, high = np.quantile(after, (0.25, 0.5, 0.75)).astype(np.int64).tolist()
        if high - low <= max(_AGREE_NS, _AGREE * abs(middle)):
            moved = _shifted(spans, device, -middle)
            return moved, [
                f"the device's clock is {duration(abs(middle))} {'ahead of' if middle > 0 else 'behind'} the host's:"
                f" {wrong}; corrected by {len(after)} copies whose calls waited for them"
            ]
    moved = (
        _shifted(spans, device, -int(np.quantile(lag, 0.01))) if (lag < -_EARLY_NS).any() else spans.copy(deep=False)
    )
    moved["launch"] = np.where(device, -1, launch)
    return moved, [f"the clocks of host and device do not fit: {wrong}; {_UNLINKED}"]


def _from_device(copies: pd.DataFrame) -> NDArray[np.bool_]:
    """Return which copies go from the device into pageable memory: their calls return when they are done."""
    found: NDArray[np.bool_] = ((copies["copy"] == "DtoH") & (copies["memory"] == "pageable")).to_numpy(dtype=bool)
    return found


def _calls_of(
    rows: NDArray[np.int64], calls: NDArray[np.int64], launch: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return those rows of device work whose call is known, and the first call of each."""
    mine = calls[np.isin(launch[calls], launch[rows])]
    ids, first = np.unique(launch[mine], return_index=True)
    if not len(ids):
        return rows[:0], rows[:0]
    place = np.minimum(np.searchsorted(ids, launch[rows]), len(ids) - 1)
    known = ids[place] == launch[rows]
    return rows[known], mine[first[place[known]]]


def _wrong(
    lag: NDArray[np.int64], after: NDArray[np.int64], start: NDArray[np.int64], called: NDArray[np.int64]
) -> str:
    """Return what cannot be; "" where all can."""
    if len(after) >= _FEWEST and (late := int(np.median(after))) > _LATE_NS:
        return f"copies that their calls wait for end {duration(late)} after these"
    early = lag < -_EARLY_NS
    if early.mean() > _SHARE:
        return f"work begins {duration(-int(np.median(lag[early])))} before it is launched"
    order = np.argsort(called, kind="stable")
    first, last = order[len(order) // 10], order[-1 - len(order) // 10]
    passed, took = int(called[last] - called[first]), abs(int(start[last] - start[first]))
    if len(order) >= 100 and passed > 0 and not passed / _RATE <= took <= passed * _RATE:
        return f"what was launched within {duration(passed)} runs within {duration(took)}"
    return ""


def _shifted(spans: pd.DataFrame, device: NDArray[np.bool_], by: int) -> pd.DataFrame:
    """Return the spans in order of start, the device's moved by so many ns."""
    start = np.where(device, spans["start_ns"].to_numpy() + by, spans["start_ns"].to_numpy())
    order = np.lexsort((-spans["dur_ns"].to_numpy(), start))
    return spans.assign(start_ns=start).iloc[order].reset_index(drop=True)
