"""The collectives, sends and receives of each rank, when it communicates in the open, and its traced steps."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis import intervals as iv
from dlprof.analysis.communication.point_to_point import POINT_TO_POINT
from dlprof.analysis.engine import Maybe, RankFacts, per_rank
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.launches import UNKNOWN, Launches
from dlprof.analysis.timeline.steps import Timing
from dlprof.read.kineto.patterns import EXPERT_KERNEL

Nanoseconds = NDArray[np.int64]

# What stands in place of its members where nobody knows who takes part in a collective.
NOBODY = "?"
NO_GROUP = (
    "expert-parallel kernels whose group the trace does not tell, or that do not wait for the others (low latency)"
)

# Expert-parallel kernels tell no group. Megatron-LM and DeviceMesh name theirs (EXPERT_MODEL_PARALLEL_GROUP, mesh_ep);
# what spans their replicas or other stages is a wider one. Those of low latency send in one kernel, and receive in
# another.
_EXPERTS = re.compile(EXPERT_KERNEL)
_OF_EXPERTS = re.compile(r"(?i)(?:^|[\W_])(?:ep|expert)(?:$|[\W_])")
_WIDER = re.compile(r"(?i)data|pipeline|(?:^|[\W_])e?[dp]p(?:$|[\W_])")
_LOW_LATENCY = re.compile(r"internode_ll::|::(?:dispatch|combine)_ll\b")


@per_rank
def collectives(
    spans: pd.DataFrame,
    timing: Timing,
    point_to_point: pd.DataFrame,
    has_device: bool,
    is_on_device: NDArray[np.bool_],
    device_work: pd.DataFrame,
    launches: Maybe[Launches],
    launched_within: Maybe[NDArray[np.int64]],
    rank: RankFacts,
) -> pd.DataFrame:
    """Return the collectives, sends and receives that the steady traced steps made, in their order.

    Columns: step, group, members, collective, peer, bytes, dtype, sequence (−1: not told), communicator ("": not told),
    stream (among the rank's that communicate, in order of their first use; 0 on the host, where any thread of a pool
    may send), made_ns (the launch, where it is known),
    start_ns, end_ns. `members` are the ranks of the process group as text, "" where it is that of all ranks, NOBODY
    where it is not known; `peer` is the other rank of a send or receive, −1 where it is none or not told. From the
    device's kernels where there is a device, each with the step that launched it, else from the host's (gloo: from
    issue to completion). Empty where the rank has none.
    """
    of = host.is_kind(spans, "communication") & ~host.is_one_of(spans["collective"], *POINT_TO_POINT)
    of[point_to_point["row"].to_numpy(dtype=np.int64)] = False
    if has_device:
        of &= is_on_device
    else:
        of &= ~is_on_device & ~host.is_named(spans, "c10d", "_c10d") & ~host.is_one_of(spans["collective"], "")
    rows = np.concatenate((np.flatnonzero(of), point_to_point["row"].to_numpy(dtype=np.int64)))
    told = ["group", "collective", "peer", "bytes", "dtype", "start_ns", "dur_ns"]
    chosen = spans[[*told, "name"]][of].astype({"group": "str", "collective": "str", "dtype": "str"})
    if len(point_to_point):
        chosen = pd.concat([chosen, point_to_point[told]])
    start = chosen["start_ns"].to_numpy()
    made, window = (
        _made(device_work, launches.get(), launched_within.get(), rows, start)
        if has_device
        else (start, _window_of(timing.windows, start))
    )
    keep = np.flatnonzero(window >= 0)
    keep = keep[np.argsort(made[keep], kind="stable")]
    rows, chosen, made, start, window = rows[keep], chosen.iloc[keep], made[keep], start[keep], window[keep]
    numbers = timing.numbers if len(timing.numbers) else np.arange(max(len(timing.windows), 1), dtype=np.int64)
    lane = spans["lane"].array.codes[rows]
    return pd.DataFrame(
        {
            "step": numbers[window],
            "group": chosen["group"].to_numpy(),
            "members": _members_of(rank, chosen),
            "collective": chosen["collective"].to_numpy(),
            "peer": chosen["peer"].to_numpy(),
            "bytes": chosen["bytes"].to_numpy(),
            "dtype": chosen["dtype"].to_numpy(),
            "sequence": spans["sequence"].to_numpy()[rows],
            "communicator": spans["communicator"].iloc[rows].astype("str").to_numpy(),
            "stream": pd.factorize(lane)[0].astype(np.int64) if has_device else 0,
            "made_ns": made,
            "start_ns": start,
            "end_ns": start + chosen["dur_ns"].to_numpy(),
        }
    )


def _window_of(windows: iv.Intervals, start: Nanoseconds) -> Nanoseconds:
    """Return the place of the window in which each instant lies, −1: none."""
    if not len(windows):
        return np.full(len(start), -1, dtype=np.int64)
    window = np.searchsorted(windows[:, 0], start, side="right") - 1
    return np.where((window >= 0) & (start < windows[np.maximum(window, 0), 1]), window, -1)


def _made(
    device_work: pd.DataFrame,
    launches: Launches,
    launched_within: NDArray[np.int64],
    rows: Nanoseconds,
    start: Nanoseconds,
) -> tuple[Nanoseconds, Nanoseconds]:
    """Return for rows of device work in the spans the launch (their start where it is not known) and their step's
    place.
    """
    at = np.searchsorted(device_work.index.to_numpy(), rows)
    called = launches.called[at]
    return np.where(called < UNKNOWN, called, start), launched_within[at]


def _members_of(rank: RankFacts, rows: pd.DataFrame) -> NDArray[Any]:
    """Return the ranks of each row's group, as text."""
    groups = rank.trace_facts.get("groups") or {}
    world = int(rank.trace_facts.get("world_size") or rank.facts.get("world_size") or 0)
    members = rows["group"].map({g: _members(groups.get(g)) for g in rows["group"].unique()}).to_numpy(dtype=object)
    experts = [n for n in rows["name"].unique() if _EXPERTS.search(str(n))]
    if experts:
        several = any(1 < int(g.get("size") or 0) < world for g in groups.values())
        theirs = (rows["group"] == "") & rows["name"].isin(experts)
        members[theirs.to_numpy()] = _experts(rank, groups) if several else ""
        members[rows["name"].isin([n for n in experts if _LOW_LATENCY.search(str(n))]).to_numpy()] = NOBODY
    return members


def _experts(rank: RankFacts, groups: Mapping[str, Any]) -> str:
    """Return the ranks among which this one's experts are spread, as text: the largest group that is named for them."""
    known = [
        g.get("ranks") or []
        for g in groups.values()
        if _OF_EXPERTS.search(str(g.get("desc") or "")) and not _WIDER.search(str(g.get("desc")))
    ]
    mine = [ranks for ranks in known if rank.index in ranks]
    return ",".join(map(str, max(mine, key=len))) if mine else NOBODY


def _members(group: Any) -> str:
    ranks = (group or {}).get("ranks") or ()
    return ",".join(map(str, ranks))


@per_rank
def exposed(timing: Timing, exposed_communication: iv.Intervals) -> pd.DataFrame:
    """Return when, in the steady traced steps, this rank communicates and computes nothing: step, start_ns, end_ns."""
    numbers = timing.numbers if len(timing.numbers) else np.zeros(len(timing.windows), dtype=np.int64)
    rows = [
        (n, iv.clip(exposed_communication, int(s), int(e))) for n, (s, e) in zip(numbers, timing.windows, strict=True)
    ]
    return pd.DataFrame(
        {
            "step": np.concatenate([np.full(len(w), n) for n, w in rows]) if rows else np.empty(0, dtype=np.int64),
            "start_ns": np.concatenate([w[:, 0] for _, w in rows]) if rows else np.empty(0, dtype=np.int64),
            "end_ns": np.concatenate([w[:, 1] for _, w in rows]) if rows else np.empty(0, dtype=np.int64),
        }
    )


@per_rank
def window_steps(timing: Timing, has_device: bool, steps: Maybe[pd.DataFrame]) -> pd.DataFrame:
    """Return the steady traced steps: step, dur_ns, loose_ns.

    loose_ns is the light layer's time outside the backward pass, in which gradients are exchanged, less its mean over
    the steady steps: by how much more than usual this rank did of its own in this step. NaN where not recorded.
    """
    numbers = timing.numbers if len(timing.numbers) else np.zeros(len(timing.windows), dtype=np.int64)
    frame = pd.DataFrame({"step": numbers, "dur_ns": timing.windows[:, 1] - timing.windows[:, 0]})
    if timing.source != "steps" or not timing.phases.get("backward") or has_device:
        return frame.assign(loose_ns=np.nan)
    light = steps.get().drop_duplicates("step").set_index("step")
    loose = light["dur_ns"] - light["backward_ns"]
    return frame.assign(loose_ns=loose.reindex(numbers).to_numpy() - (timing.step_ns - timing.phases["backward"]))
