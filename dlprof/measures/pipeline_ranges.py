"""The chunks of a pipeline as a trace shows them, where dlprof did not record the job.

torch.distributed.pipelining names a range after each action of its schedules with several stages a rank (PP:0F3: stage
0, forward, micro-batch 3), and after GPipe's forwards and backwards. All of them contain the wait for the neighbour: a
chunk is what was computed within its range, on a device what was launched within it. 1F1B names none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.engine import RankData
from dlprof.errors import NotMeasured
from dlprof.measures import device, host
from dlprof.measures.schedules import GPIPE, LOOPED, V_SHAPED, grid, runs
from dlprof.measures.steps import timing

_ACTION = re.compile(r"PP:(\d+)([FBIW])(\d+)")
_GPIPE = re.compile(r"(Forward|Backward) (\d+)")
_OVERLAPPED = re.compile(r"PP:\(.*\)OVERLAP_F_B")
_WORDS = {"F": "forward", "B": "backward", "I": "input", "W": "weight", "Forward": "forward", "Backward": "backward"}
_POINT_TO_POINT = ("send", "recv", "send_recv")


def told(rank: RankData) -> Mapping[str, Any]:
    """Give what the ranges tell of the pipeline, as the recorder's facts do; the schedule is "" where no grid fits.

    Raises NotMeasured with the reason where the trace has no such ranges.
    """
    return rank.once(_told)


def steady(rank: RankData) -> pd.DataFrame:
    """Give the chunks within the traced steps, as the table "chunks" has them, with a column `call`."""
    return rank.once(_steady)


def _ranges(rank: RankData) -> pd.DataFrame:
    """Give the ranges of actions on the training thread: stage (−1: not named), action, microbatch, start, end."""
    spans = rank.table("spans")
    names = [str(c) for c in spans["name"].cat.categories]
    found = {n: _ACTION.fullmatch(n) or _GPIPE.fullmatch(n) for n in names if n.startswith(("PP:", "For", "Back"))}
    thread = spans[host.is_kind(spans, "annotation") & ~host.is_on_device(rank)]
    rows = thread[host.is_one_of(thread["name"], *(n for n, match in found.items() if match))]
    # Anybody may call a range "Forward 0"; in a pipeline, something is sent as well.
    stages = any(match and match.re is _ACTION for match in found.values())
    if not len(rows) or not (stages or _sends(rank)):
        raise NotMeasured(_why_none(rank))
    if any(_OVERLAPPED.fullmatch(n) for n in names):
        raise NotMeasured("the trace names a forward and a backward that DualPipeV overlaps by one range")
    parts = [_parsed(found[str(n)]) for n in rows["name"]]
    start = rows["start_ns"].to_numpy()
    return pd.DataFrame(parts, columns=["stage", "action", "microbatch"]).assign(
        start_ns=start, end_ns=start + rows["dur_ns"].to_numpy()
    )


def _parsed(match: re.Match[str] | None) -> tuple[int, str, int]:
    if match is None:
        raise ValueError("no range of a pipeline's action")
    parts = match.groups()
    return (
        (-1, _WORDS[parts[0]], int(parts[1])) if len(parts) == 2 else (int(parts[0]), _WORDS[parts[1]], int(parts[2]))
    )


def _sends(rank: RankData) -> bool:
    return bool(host.is_one_of(rank.table("spans")["collective"], *_POINT_TO_POINT).any())


def _why_none(rank: RankData) -> str:
    if not _sends(rank):
        return "no pipeline stages were recorded, and the trace sends nothing from rank to rank"
    return (
        "the trace sends from rank to rank, but names no stage or micro-batch (1F1B does not, nor do pipelines that are"
        " not torch.distributed.pipelining's): record the job with dlprof"
    )


def _told(rank: RankData) -> Mapping[str, Any]:
    ranges = rank.once(_ranges)
    members = _members(rank)
    place = members.index(rank.index)
    stages = sorted({int(s) for s in ranges["stage"]})
    if stages == [-1]:
        stages = [place]  # GPipe's one stage a rank lies where the rank does
    microbatches = int(ranges["microbatch"].max()) + 1
    schedule = GPIPE if ranges["stage"].iloc[0] < 0 else ""
    first = rank.once(_numbered)
    first = first[first["step"] == first["step"].iloc[0]]
    order = tuple(zip(first["stage"], first["action"], first["microbatch"], strict=True))
    for name in (*LOOPED, *V_SHAPED) if not schedule else ():
        shape = (len(members), microbatches, len(stages))
        if runs(name, *shape) and grid(name, *shape).rows[place] == order:
            schedule = name
            break
    return {"schedule": schedule, "microbatches": microbatches, "stages": stages, "ranks": members}


def _members(rank: RankData) -> list[int]:
    """Give the ranks of the pipeline: those of the group in which is sent, else all."""
    spans = rank.table("spans")
    sent = spans["group"][host.is_one_of(spans["collective"], *_POINT_TO_POINT)]
    groups = rank.trace_facts.get("groups") or {}
    for name in sent[(sent != "").to_numpy()].unique()[:1]:
        members = [int(r) for r in (groups.get(str(name)) or {}).get("ranks") or []]
        if rank.index in members and len(members) > 2:  # a group of two may be made for one pair of neighbours
            return members
    return list(range(max(int(rank.trace_facts.get("world_size") or 1), rank.index + 1)))


def _numbered(rank: RankData) -> pd.DataFrame:
    """Give the ranges that lie in whole traced steps, with their step."""
    ranges = rank.once(_ranges)
    t = timing(rank)
    if t.unit != "step":
        raise NotMeasured("the trace has a pipeline's ranges, but nothing in it marks the steps")
    at = np.searchsorted(t.windows[:, 0], ranges["start_ns"].to_numpy(), side="right") - 1
    inside = (at >= 0) & (ranges["end_ns"].to_numpy() <= t.windows[np.maximum(at, 0), 1])
    if not inside.any():
        raise NotMeasured("no traced step holds a pipeline's ranges")
    numbered: pd.DataFrame = ranges[inside].assign(step=t.numbers[at[inside]]).reset_index(drop=True)
    return numbered


def _steady(rank: RankData) -> pd.DataFrame:
    ranges = rank.once(_numbered)
    begin, end = _computed(rank, ranges)
    chunks = ranges.assign(start_ns=begin, dur_ns=np.maximum(end - begin, 0), busy_ns=-1)
    chunks["stage"] = chunks["stage"].where(chunks["stage"] >= 0, _members(rank).index(rank.index))
    by = ranges.groupby("step")
    calls = pd.DataFrame({"start_ns": by["start_ns"].min(), "end_ns": by["end_ns"].max()}).reset_index()
    calls["end_ns"] = np.maximum(calls["end_ns"], (begin + chunks["dur_ns"]).groupby(ranges["step"]).max().to_numpy())
    calls = calls.assign(
        dur_ns=calls["end_ns"] - calls["start_ns"],
        busy_ns=chunks.groupby("step")["dur_ns"].sum().to_numpy(),
        action="schedule",
        stage=-1,
        microbatch=-1,
    )
    columns = ["step", "action", "stage", "microbatch", "start_ns", "dur_ns", "busy_ns"]
    frame = pd.concat([calls[columns], chunks[columns]], ignore_index=True)
    return frame.sort_values("start_ns", kind="stable", ignore_index=True).assign(call=0)


def _computed(rank: RankData, ranges: pd.DataFrame) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Give from when to when the work of each range ran: on a device what it launched, else its operators."""
    spans = rank.table("spans")
    if device.has_device(rank):
        work = device.device_work(rank)
        work = work[host.is_kind(work, "kernel", "copy", "set") & (work["launch"] >= 0)]
        ids = spans["launch"].to_numpy()
        calls = host.is_kind(spans, "runtime") & (ids >= 0)
        launched = pd.Series(spans["start_ns"].to_numpy()[calls], index=ids[calls]).groupby(level=0).first()
        at = launched.reindex(work["launch"].to_numpy()).fillna(-1).to_numpy(dtype=np.int64)
    else:
        work = spans[host.is_kind(spans, "op") & ~host.is_on_device(rank)]
        at = work["start_ns"].to_numpy()
    order = np.argsort(at, kind="stable")
    at, start = at[order], work["start_ns"].to_numpy()[order]
    stop = start + work["dur_ns"].to_numpy()[order]
    first = np.searchsorted(at, ranges["start_ns"].to_numpy())
    last = np.searchsorted(at, ranges["end_ns"].to_numpy())
    some = first < last
    begin, end = ranges["start_ns"].to_numpy(copy=True), ranges["start_ns"].to_numpy(copy=True)
    for k in np.flatnonzero(some):
        begin[k] = start[first[k] : last[k]].min()
        end[k] = stop[first[k] : last[k]].max()
    return begin, end
