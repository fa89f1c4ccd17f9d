"""The chunks of a pipeline as a trace shows them, where dlprof did not record the job.

torch.distributed.pipelining names a range after each action of its schedules with several stages a rank (PP:0F3: stage
0, forward, micro-batch 3), and after GPipe's forwards and backwards. All of them contain the wait for the neighbour: a
chunk is what was computed within its range, on a device what was launched within it. The range that DualPipeV has for a
forward and a backward together is two: the backward begins where autograd does.

1F1B names none, but it sends or receives between most of its passes. Where what lies between a rank's sends and
receives is, pass by pass, what 1F1B gives a rank of its place to do, each pass is told; else nothing is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import Maybe, RankFacts, within_rank
from dlprof.analysis.pipeline.schedules import GPIPE, LOOPED, ONE_F_ONE_B, V_SHAPED, Action, grid, runs
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.steps import Timing
from dlprof.errors import NotMeasured

_ACTION = re.compile(r"PP:(\d+)([FBIW])(\d+)")
_GPIPE = re.compile(r"(Forward|Backward) (\d+)")
_OVERLAPPED = re.compile(r"PP:\((\d+)(F)(\d+);(\d+)(B)(\d+)\)OVERLAP_F_B")
_WORDS = {"F": "forward", "B": "backward", "I": "input", "W": "weight", "Forward": "forward", "Backward": "backward"}
_POINT_TO_POINT = ("send", "recv", "send_recv")

WHICH = "the traces do not tell which ranks are one pipeline"

# Around each function of the backward pass, on whatever thread.
_EVALUATES = "autograd::engine::evaluate_function"


class _Named(NamedTuple):
    """The ranges of a rank's passes: stage (−1: the rank's only one), action, microbatch, start_ns, end_ns."""

    schedule: str  # "" where the stages tell it
    ranges: pd.DataFrame
    members: list[int]  # the pipeline's ranks, in the order of their first stages


@within_rank
def schedule_facts(ranges: _Named, numbered: pd.DataFrame, rank: RankFacts) -> Mapping[str, Any]:
    """Return what the ranges tell of the pipeline, as the recorder's facts do; the schedule is "" where no grid fits.

    Raises NotMeasured with the reason where the trace has no such ranges.
    """
    schedule, found, members = ranges
    place = members.index(rank.index)
    stages = sorted({int(s) for s in found["stage"]})
    if stages == [-1]:
        stages = [place]  # the one stage a rank lies where the rank does
    microbatches = int(found["microbatch"].max()) + 1
    first = numbered
    first = first[first["step"] == first["step"].iloc[0]]
    order = tuple(zip(first["stage"], first["action"], first["microbatch"], strict=True))
    for name in (*LOOPED, *V_SHAPED) if not schedule else ():
        shape = (len(members), microbatches, len(stages))
        if runs(name, *shape) and grid(name, *shape).rows[place] == order:
            schedule = name
            break
    return {"schedule": schedule, "microbatches": microbatches, "stages": stages, "ranks": members}


@within_rank
def steady_chunks(
    numbered: pd.DataFrame,
    spans: pd.DataFrame,
    has_device: bool,
    device_work: pd.DataFrame,
    is_on_device: NDArray[np.bool_],
    ranges: _Named,
    rank: RankFacts,
) -> pd.DataFrame:
    """Return the chunks within the traced steps, as the table "chunks" has them, with a column `call`."""
    begin, end = _computed(spans, has_device, device_work, is_on_device, numbered)
    chunks = numbered.assign(start_ns=begin, dur_ns=np.maximum(end - begin, 0), busy_ns=-1)
    chunks["stage"] = chunks["stage"].where(chunks["stage"] >= 0, ranges.members.index(rank.index))
    by = numbered.groupby("step")
    calls = pd.DataFrame({"start_ns": by["start_ns"].min(), "end_ns": by["end_ns"].max()}).reset_index()
    calls["end_ns"] = np.maximum(calls["end_ns"], (begin + chunks["dur_ns"]).groupby(numbered["step"]).max().to_numpy())
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


@within_rank
def ranges(
    spans: pd.DataFrame,
    is_on_device: NDArray[np.bool_],
    timing: Maybe[Timing],
    on_training_thread: pd.DataFrame,
    passes: Maybe[tuple[pd.DataFrame, iv.Intervals]],
    rank: RankFacts,
) -> _Named:
    """Return the ranges of the passes on the training thread, as they are named, or as sends and receives part them."""
    names = [str(c) for c in spans["name"].cat.categories]
    kinds = (_ACTION, _GPIPE, _OVERLAPPED)
    found = {n: m for n in names if n.startswith(("PP:", "For", "Back")) for k in kinds if (m := k.fullmatch(n))}
    thread = spans[host.is_kind(spans, "annotation") & ~is_on_device]
    rows = thread[host.is_one_of(thread["name"], *found)]
    # Anybody may call a range "Forward 0"; in a pipeline, something is sent as well.
    stages = any(match.re is not _GPIPE for match in found.values())
    if not len(rows) or not (stages or _sends(spans)):
        return _unnamed(spans, timing, on_training_thread, passes, rank)
    parts: list[_Pass] = []
    for name, start, dur in zip(rows["name"], rows["start_ns"].tolist(), rows["dur_ns"].tolist(), strict=True):
        match, end = found[str(name)], start + dur
        parts += (
            _overlapped(passes.get(), match, start, end) if match.re is _OVERLAPPED else [_parsed(match, start, end)]
        )
    ranges = pd.DataFrame(parts, columns=_COLUMNS)
    if not stages:
        return _Named(GPIPE, ranges, _members_of_gpipe(on_training_thread, spans, rank, ranges))
    mine = sorted({int(s) for s in ranges["stage"]})
    for members in _candidates(spans, rank):
        place, p = members.index(rank.index), len(members)
        if mine in (list(range(place, p * len(mine), p)), [place, 2 * p - 1 - place]):
            return _Named("", ranges, members)
    return _Named("", ranges, _candidates(spans, rank)[-1])


_COLUMNS = ["stage", "action", "microbatch", "start_ns", "end_ns"]
_Pass = tuple[int, str, int, int, int]


def _parsed(match: re.Match[str], start: int, end: int) -> _Pass:
    *stage, word, which = match.groups()
    return int(stage[0]) if stage else -1, _WORDS[word], int(which), start, end


def _overlapped(passes: tuple[pd.DataFrame, iv.Intervals], match: re.Match[str], start: int, end: int) -> list[_Pass]:
    """Part a range that holds a forward and the backward that torch runs after it."""
    there, _, first, back, _, then = match.groups()
    ops, evaluated = passes
    begun = evaluated[np.searchsorted(evaluated[:, 0], start) :, 0]
    if not len(begun) or begun[0] >= end:
        raise NotMeasured(f"the trace shows no backward pass in {match[0]}")
    ops = ops[(ops["start_ns"] >= start) & (ops["start_ns"] < end)]
    late = ops["start_ns"] > begun[0]
    if ops["dur_ns"][late].sum() > ops["dur_ns"][~late].sum():
        raise NotMeasured("the trace names a forward and a backward by one range, in which they run at once")
    middle = int(begun[0])
    return [(int(there), "forward", int(first), start, middle), (int(back), "backward", int(then), middle, end)]


@within_rank
def passes(
    spans: pd.DataFrame, is_on_device: NDArray[np.bool_], on_training_thread: pd.DataFrame
) -> tuple[pd.DataFrame, iv.Intervals]:
    """Return the training thread's outermost operators (start_ns, dur_ns, code: of the name), and when autograd ran."""
    evaluated = spans[host.is_named(spans, _EVALUATES) & ~is_on_device]
    ops = host.outermost(on_training_thread[host.is_kind(on_training_thread, "op")])
    ops = ops[~host.is_named(ops, _EVALUATES)]
    return ops[["start_ns", "dur_ns"]].assign(code=ops["name"].cat.codes), host.cover(evaluated)


def _candidates(spans: pd.DataFrame, rank: RankFacts) -> list[list[int]]:
    """List who may make up the pipeline: the groups in which is sent, as far as they are told, and all ranks."""
    sent = spans["group"][host.is_one_of(spans["collective"], *_POINT_TO_POINT)]
    groups = rank.trace_facts.get("groups") or {}
    schedule_facts = [
        (groups.get(str(name)) or {}).get("ranks") or [] for name in sent[(sent != "").to_numpy()].unique()
    ]
    everybody = list(range(max(int(rank.trace_facts.get("world_size") or 1), rank.index + 1)))
    return [*([int(r) for r in members] for members in schedule_facts if rank.index in members), everybody]


def _members_of_gpipe(
    on_training_thread: pd.DataFrame, spans: pd.DataFrame, rank: RankFacts, ranges: pd.DataFrame
) -> list[int]:
    """Return the ranks of a pipeline whose forwards receive on all but the first of them, and send on all but the last.

    Raises NotMeasured where they do not: then several pipelines run side by side, and nothing tells which.
    """
    forward = ranges[ranges["action"] == "forward"]
    begin, end = forward["start_ns"].to_numpy(), forward["end_ns"].to_numpy()
    marks = {what: _marks(on_training_thread, what) for what in ("send", "recv")}
    within = {what: bool((np.searchsorted(at, begin) < np.searchsorted(at, end)).any()) for what, at in marks.items()}
    for members in _candidates(spans, rank):
        place = members.index(rank.index)
        fits = within == {"send": place < len(members) - 1, "recv": place > 0}
        if fits or not any(map(len, marks.values())):
            return members
    raise NotMeasured(WHICH)


def _marks(on_training_thread: pd.DataFrame, *what: str) -> NDArray[np.int64]:
    """Return when the training thread called what sends or receives."""
    return on_training_thread["start_ns"].to_numpy()[
        host.is_kind(on_training_thread, "communication") & host.is_one_of(on_training_thread["collective"], *what)
    ]


def _unnamed(
    spans: pd.DataFrame,
    timing: Maybe[Timing],
    on_training_thread: pd.DataFrame,
    passes: Maybe[tuple[pd.DataFrame, iv.Intervals]],
    rank: RankFacts,
) -> _Named:
    """Return the ranges of the passes that nothing names, of each traced step, where they are 1F1B's."""
    if not _sends(spans):
        raise NotMeasured("no pipeline stages were recorded, and the trace sends nothing from rank to rank")
    windows, _ = _whole_steps(timing.get())
    marks = _marks(on_training_thread, *_POINT_TO_POINT)
    steps = [(marks[(marks >= begin) & (marks < end)], begin, end) for begin, end in windows.tolist()]
    for members in _candidates(spans, rank):
        with suppress(_OtherOrder):
            found = [_one_by_one(passes.get(), rank, members, *step) for step in steps if len(step[0])]
            if found:
                return _Named(ONE_F_ONE_B, pd.DataFrame([p for part in found for p in part], columns=_COLUMNS), members)
    raise NotMeasured(_NO_ORDER)


class _OtherOrder(Exception):  # noqa: N818 - what was found, and no error
    """The passes of a step are not those of 1F1B."""


def _one_by_one(
    passes: tuple[pd.DataFrame, iv.Intervals],
    rank: RankFacts,
    members: list[int],
    marks: NDArray[np.int64],
    begin: int,
    end: int,
) -> list[_Pass]:
    """Return the passes of one step between its sends and receives; raise _OtherOrder where they are not 1F1B's."""
    ops, evaluated = passes
    ops = ops[(ops["start_ns"] >= begin) & (ops["start_ns"] < end)]
    evaluated = iv.clip(evaluated, begin, end)
    op_at = np.searchsorted(marks, ops["start_ns"].to_numpy(), side="right")
    back_at = np.searchsorted(marks, evaluated[:, 0], side="right")
    place, microbatches = members.index(rank.index), len(np.unique(back_at))
    if len(members) < 2 or not runs(ONE_F_ONE_B, len(members), microbatches, 1):
        raise _OtherOrder
    wanted = _between(grid(ONE_F_ONE_B, len(members), microbatches).rows[place], len(members))
    # What comes before the first micro-batch arrives, or after the last gradients are gone, is no pass.
    first, last = (1 if place else 0), int(back_at[-1])
    pieces = [at for at in np.union1d(op_at, back_at).tolist() if first <= at <= last]
    holds_back = [any(what == "backward" for _, what, _ in each) for each in wanted]
    if np.isin(pieces, back_at).tolist() != holds_back:
        raise _OtherOrder
    found: list[_Pass] = []
    for at, each in zip(pieces, wanted, strict=True):
        mine, back = ops[op_at == at], evaluated[back_at == at]
        for k, (_, what, which) in enumerate(each):
            # As a range that has a name, the first one begins with the call that it then waits for.
            called = int(marks[at - 1]) if at and not k else None
            if what == "backward":
                found.append((-1, what, which, int(back[0, 0]) if called is None else called, int(back[-1, 1])))
                continue
            if len(each) > 1:  # beside a backward, before or after it
                start = mine["start_ns"].to_numpy()
                mine = mine[start >= back[-1, 1]] if k else mine[start < back[0, 0]]
            elif not which and not place:
                mine = _last_like(mine, ops[op_at == pieces[1]])
            if not len(mine):
                raise _OtherOrder
            begun = int(mine["start_ns"].iloc[0]) if called is None else called
            found.append((-1, what, which, begun, int((mine["start_ns"] + mine["dur_ns"]).max())))
    return found


def _between(row: tuple[Action, ...], ranks: int) -> list[list[Action]]:
    """Part a rank's passes where it sends or receives: what is left together needs no other rank in between."""
    parts: list[list[Action]] = [[row[0]]]
    for (stage, done, _), action in pairwise(row):
        sends = stage < ranks - 1 if done == "forward" else stage > 0
        receives = stage > 0 if action[1] == "forward" else stage < ranks - 1
        if sends or receives:
            parts.append([])
        parts[-1].append(action)
    return parts


def _last_like(ops: pd.DataFrame, model: pd.DataFrame) -> pd.DataFrame:
    """Return the last operators among which are all those of the model, in their order; none where there are none such.

    Before the first stage's first forward, the step does other things. That forward may do more than the next one:
    autocast casts weights once a step.
    """
    codes, at = ops["code"].to_numpy(), len(ops)
    for code in model["code"].to_numpy()[::-1]:
        earlier = np.flatnonzero(codes[:at] == code)
        if not len(earlier):
            return ops.iloc[:0]
        at = int(earlier[-1])
    return ops.iloc[at:]


def _sends(spans: pd.DataFrame) -> bool:
    return bool(host.is_one_of(spans["collective"], *_POINT_TO_POINT).any())


_NO_ORDER = (
    "the trace sends from rank to rank, but names no stage or micro-batch (pipelines that are not"
    " torch.distributed.pipelining's do not), and what lies between is not in 1F1B's order: record the job with dlprof"
)


@within_rank
def numbered(ranges: _Named, timing: Timing) -> pd.DataFrame:
    """Return the ranges that lie in whole traced steps, with their step."""
    found = ranges.ranges
    windows, numbers = _whole_steps(timing)
    at = np.searchsorted(windows[:, 0], found["start_ns"].to_numpy(), side="right") - 1
    inside = (at >= 0) & (found["end_ns"].to_numpy() <= windows[np.maximum(at, 0), 1])
    if not inside.any():
        raise NotMeasured("no traced step holds a pipeline's ranges")
    numbered: pd.DataFrame = found[inside].assign(step=numbers[at[inside]]).reset_index(drop=True)
    return numbered


def _whole_steps(timing: Timing) -> tuple[iv.Intervals, NDArray[np.int64]]:
    """Return the traced steps and their numbers; raises NotMeasured where nothing marks them."""
    if timing.unit != "step":
        raise NotMeasured("the trace has a pipeline, but nothing in it marks the steps")
    return timing.windows, timing.numbers


def _computed(
    spans: pd.DataFrame,
    has_device: bool,
    device_work: pd.DataFrame,
    is_on_device: NDArray[np.bool_],
    ranges: pd.DataFrame,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return from when to when the work of each range ran: on a device what it launched, else its operators."""
    if has_device:
        work = device_work
        work = work[host.is_kind(work, "kernel", "copy", "set") & (work["launch"] >= 0)]
        ids = spans["launch"].to_numpy()
        calls = host.is_kind(spans, "runtime") & (ids >= 0)
        launched = pd.Series(spans["start_ns"].to_numpy()[calls], index=ids[calls]).groupby(level=0).first()
        at = launched.reindex(work["launch"].to_numpy()).fillna(-1).to_numpy(dtype=np.int64)
    else:
        work = spans[host.is_kind(spans, "op") & ~is_on_device]
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
