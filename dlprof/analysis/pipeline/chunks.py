"""The chunks that a rank of a pipeline computes, recorded or read off its trace: their time, and its mean call.

Where dlprof did not record the job, the trace shows them: torch.distributed.pipelining names a range after each action
of its schedules with several stages a rank (PP:0F3: stage 0, forward, micro-batch 3), and after GPipe's forwards and
backwards. All of them contain the wait for the neighbour: a chunk is what was computed within its range, on a device
what was launched within it. DualPipeV's one range for a forward and a backward counts as two: the backward begins where
autograd does.

1F1B names no ranges, but it sends or receives between most of its passes. If the work between a rank's sends and
receives matches, pass by pass, 1F1B's schedule for that rank, each pass is known; else none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from itertools import count, pairwise
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import RANK, Frame, Maybe, RankFacts, maybe, needs, per_rank, within_rank
from dlprof.analysis.pipeline.schedules import ACTIONS, GPIPE, LOOPED, ONE_F_ONE_B, V_SHAPED, Action, grid, runs
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import Launches, device_work, has_device, launches
from dlprof.analysis.timeline.host import is_on_device, on_training_thread
from dlprof.analysis.timeline.steady import light_steps, standard_error
from dlprof.analysis.timeline.steps import Timing, timing
from dlprof.errors import DoesNotApply, NotMeasured

# The action of the row of one schedule.step(); all other rows are its chunks.
SCHEDULE = "schedule"

# What stages hand over by; a kernel of NCCL's may be a send, a receive or both.
SENDS = ("send", "recv", "send_recv")

NO_PIPELINE = "no pipeline: no step of one was recorded, and no trace shows anything sent from rank to rank"

_STEPS, _MOST_ROWS = 40, 4_000  # that travel of a rank's chunks at most, spread over the run

# The names of ranges, and each pass in such a name: stage ("": the rank's only one), initial, micro-batch.
_RANGE = re.compile(r"PP:\d+[FBIW]\d+|PP:\(\d+F\d+;\d+B\d+\)OVERLAP_F_B|(Forward|Backward) \d+")

_PASS = re.compile(r"(\d*)([FBIW])[a-z ]*(\d+)")

# Around each function of the backward pass, on whatever thread.
_EVALUATES = "autograd::engine::evaluate_function"

WHICH = "the traces do not show which ranks are one pipeline: record the job with dlprof"

_NO_ORDER = (
    "the trace sends from rank to rank, but names no stage or micro-batch (pipelines that are not"
    " torch.distributed.pipelining's do not), and what lies between is not in 1F1B's order: record the job with dlprof"
)

_Pass = tuple[int, str, int, int, int]

_COLUMNS = ["stage", "action", "microbatch", "start_ns", "end_ns"]


class _Members(NamedTuple):
    """Ranks that are one pipeline, in the order of their first stages, and the place of the rank that is read."""

    ranks: list[int]
    place: int


class _Found(NamedTuple):
    """The ranges of a rank's passes: stage (−1: the rank's only one), action, microbatch, start_ns, end_ns."""

    schedule: str  # "" where the stages show it
    ranges: pd.DataFrame
    members: _Members


@within_rank
def autograd_time(
    spans: Frame = needs(schema.SPANS), is_on_device: NDArray[np.bool_] = needs(is_on_device)
) -> iv.Intervals:
    """Return when functions of the backward pass ran."""
    return host.cover(spans, host.is_named(spans, _EVALUATES) & ~is_on_device)


@within_rank
def outermost_operators(on_training_thread: Frame = needs(on_training_thread)) -> pd.DataFrame:
    """Return the training thread's outermost operators: start_ns, dur_ns, code (of the name)."""
    ops = host.outermost(on_training_thread[host.is_kind(on_training_thread, "op")])
    ops = ops[~host.is_named(ops, _EVALUATES)]
    return ops[["start_ns", "dur_ns"]].assign(code=ops["name"].cat.codes)


@within_rank
def sends_and_receives(on_training_thread: Frame = needs(on_training_thread)) -> pd.DataFrame:
    """Return the training thread's calls that send to or receive from one rank: start_ns, collective."""
    sends = host.is_one_of(on_training_thread["collective"], *SENDS)
    return on_training_thread.loc[host.is_kind(on_training_thread, "communication") & sends, ["start_ns", "collective"]]


@within_rank
def maybe_members(spans: Frame = needs(schema.SPANS), rank: RankFacts = needs(RANK)) -> list[_Members]:
    """List which ranks may make up the rank's pipeline: the groups that send, as far as they are known, and all."""
    names = spans["group"][host.is_one_of(spans["collective"], *SENDS)].astype("str").unique()
    groups = rank.trace_facts.get("groups") or {}
    known = [(groups.get(name) or {}).get("ranks") or [] for name in names if name]
    everybody = range(max(int(rank.trace_facts.get("world_size") or 1), rank.index + 1))
    return [_Members(list(map(int, of)), of.index(rank.index)) for of in (*known, everybody) if rank.index in of]


@within_rank
def one_f_one_b(
    timing: Timing = needs(timing),
    sends_and_receives: Frame = needs(sends_and_receives),
    outermost_operators: Frame = needs(outermost_operators),
    autograd_time: iv.Intervals = needs(autograd_time),
    maybe_members: list[_Members] = needs(maybe_members),
) -> _Found:
    """Return the ranges of the passes that have no name, of each traced step; raises NotMeasured where not 1F1B's."""
    windows = _steps(timing).tolist()
    for members in maybe_members:
        with suppress(NotMeasured):
            found: list[_Pass] = []
            for begin, end in windows:
                marks, ops = (
                    f[f["start_ns"].between(begin, end - 1)] for f in (sends_and_receives, outermost_operators)
                )
                if len(marks):
                    evaluated = iv.clip(autograd_time, begin, end)
                    found += _between(marks["start_ns"].to_numpy(), ops, evaluated, members)
            if found:
                return _Found(ONE_F_ONE_B, pd.DataFrame(found, columns=_COLUMNS), members)
    raise NotMeasured(_NO_ORDER)


@within_rank
def sends_to_ranks(spans: Frame = needs(schema.SPANS)) -> bool:
    """Return whether the trace holds sends and receives, without which there is no pipeline."""
    return bool(host.is_one_of(spans["collective"], *SENDS).any())


@within_rank
def pass_ranges(
    spans: Frame = needs(schema.SPANS),
    is_on_device: NDArray[np.bool_] = needs(is_on_device),
    sends_and_receives: Frame = needs(sends_and_receives),
    outermost_operators: Maybe[Frame] = maybe(outermost_operators),
    autograd_time: Maybe[iv.Intervals] = maybe(autograd_time),
    one_f_one_b: Maybe[_Found] = maybe(one_f_one_b),
    maybe_members: list[_Members] = needs(maybe_members),
    sends_to_ranks: bool = needs(sends_to_ranks),
) -> _Found:
    """Return the ranges of the passes on the training thread, as they are named, or as sends and receives part them."""
    named = {name: _passes(name) for name in map(str, spans["name"].cat.categories) if _RANGE.fullmatch(name)}
    several = any(stage >= 0 for passes in named.values() for stage, _, _ in passes)
    rows = spans[host.is_kind(spans, "annotation") & ~is_on_device & host.is_one_of(spans["name"], *named)]
    # Anybody may call a range "Forward 0"; in a pipeline, something is sent as well.
    if not (sends_to_ranks or (several and len(rows))):
        raise DoesNotApply(NO_PIPELINE)
    if not len(rows):
        return one_f_one_b.get()
    found: list[_Pass] = []
    for name, start, dur in rows[["name", "start_ns", "dur_ns"]].itertuples(index=False, name=None):
        first, *then = named[name]
        middle = end = start + dur
        if then:
            middle = _then_back(outermost_operators.get(), autograd_time.get(), name, start, end)
        found += [(*first, start, middle), *((*back, middle, end) for back in then)]
    ranges = pd.DataFrame(found, columns=_COLUMNS)
    if not several:
        return _Found(GPIPE, ranges, _members_of_gpipe(sends_and_receives, maybe_members, ranges))
    mine = np.unique(ranges["stage"]).tolist()
    for members in maybe_members:
        place, p = members.place, len(members.ranks)
        if mine in (list(range(place, p * len(mine), p)), [place, 2 * p - 1 - place]):
            return _Found("", ranges, members)
    return _Found("", ranges, maybe_members[-1])


@within_rank
def numbered_ranges(pass_ranges: _Found = needs(pass_ranges), timing: Timing = needs(timing)) -> pd.DataFrame:
    """Return the ranges that lie in whole traced steps, with their step."""
    ranges, windows = pass_ranges.ranges, _steps(timing)
    at = np.searchsorted(windows[:, 0], ranges["start_ns"], side="right") - 1
    inside = (at >= 0) & (ranges["end_ns"].to_numpy() <= windows[at, 1])
    if not inside.any():
        raise NotMeasured("no traced step holds a whole pipeline step: trace more steps (`--window`)")
    numbered: pd.DataFrame = ranges[inside].assign(step=timing.numbers[at[inside]]).reset_index(drop=True)
    return numbered


@within_rank
def traced_facts(
    pass_ranges: _Found = needs(pass_ranges), numbered_ranges: Frame = needs(numbered_ranges)
) -> Mapping[str, Any]:
    """Return what the ranges show of the pipeline, as the recorder's facts do; schedule is "" where no grid fits."""
    schedule, found, (ranks, place) = pass_ranges
    stages = np.unique(found["stage"]).tolist()
    shape = (len(ranks), int(found["microbatch"].max()) + 1, len(stages))
    first = numbered_ranges[numbered_ranges["step"] == numbered_ranges["step"].iloc[0]]
    order = tuple(first[["stage", "action", "microbatch"]].itertuples(index=False, name=None))
    if not schedule:
        known = (name for name in (*LOOPED, *V_SHAPED) if runs(name, *shape))
        schedule = next((name for name in known if grid(name, *shape).rows[place] == order), "")
    stages = [place] if stages == [-1] else stages  # of one stage a rank, each has its rank's place
    return {"schedule": schedule, "microbatches": shape[1], "stages": stages, "ranks": ranks}


@within_rank
def traced_chunks(
    numbered_ranges: Frame = needs(numbered_ranges),
    pass_ranges: _Found = needs(pass_ranges),
    spans: Frame = needs(schema.SPANS),
    has_device: bool = needs(has_device),
    device_work: Maybe[Frame] = maybe(device_work),
    launches: Maybe[Launches] = maybe(launches),
) -> pd.DataFrame:
    """Return the chunks within the traced steps, as the table "chunks" has them."""
    ranges, starts, ends = numbered_ranges, *(numbered_ranges[c].to_numpy() for c in ("start_ns", "end_ns"))
    work, at = (device_work.get(), launches.get().called) if has_device else (spans, spans["start_ns"].to_numpy())
    of = np.searchsorted(starts, at, side="right") - 1
    inside = (of >= 0) & (at < ends[of]) & host.is_kind(work, *(("kernel", "copy", "set") if has_device else ("op",)))
    mine = work[["start_ns", "dur_ns"]][inside]
    ran = mine.assign(end_ns=mine.sum(axis=1)).groupby(of[inside]).agg({"start_ns": "min", "end_ns": "max"})
    begin, end = starts.copy(), starts.copy()  # a range without work is a chunk of no length
    begin[ran.index], end[ran.index] = ran["start_ns"], ran["end_ns"]
    stage = ranges["stage"].where(ranges["stage"] >= 0, pass_ranges.members.place)
    chunks = ranges.assign(stage=stage, start_ns=begin, dur_ns=end - begin, busy_ns=-1)
    calls = ranges[["step", "start_ns"]].assign(end_ns=np.maximum(ends, end), busy_ns=chunks["dur_ns"])
    calls = calls.groupby("step", as_index=False).agg({"start_ns": "min", "end_ns": "max", "busy_ns": "sum"})
    calls = calls.assign(dur_ns=calls["end_ns"] - calls["start_ns"], action=SCHEDULE, stage=-1, microbatch=-1)
    frame = pd.concat([calls, chunks]).sort_values("start_ns", kind="stable", ignore_index=True)
    return frame[["step", "action", "stage", "microbatch", "start_ns", "dur_ns", "busy_ns"]]


def _steps(timing: Timing) -> iv.Intervals:
    """Return the traced steps; raises NotMeasured where nothing marks them."""
    if timing.unit != "step":
        raise NotMeasured("the trace has a pipeline, but nothing in it marks the steps")
    return timing.windows


def _passes(name: str) -> list[Action]:
    """Return the passes in a range's name; stage −1: the rank's only one."""
    return [(int(stage or -1), ACTIONS[initial], int(which)) for stage, initial, which in _PASS.findall(name)]


def _then_back(ops: pd.DataFrame, autograd_time: iv.Intervals, name: str, start: int, end: int) -> int:
    """Return when, in a range that holds a forward and the backward that torch runs after it, the backward begins."""
    begun = autograd_time[np.searchsorted(autograd_time[:, 0], start) :, 0]
    if not len(begun) or begun[0] >= end:
        raise NotMeasured(f"the trace shows no backward pass in {name}")
    ops = ops[ops["start_ns"].between(start, end - 1)]
    late = ops["start_ns"] > begun[0]
    if ops["dur_ns"][late].sum() > ops["dur_ns"][~late].sum():
        raise NotMeasured("the trace names a forward and a backward by one range, in which they run at once")
    return int(begun[0])


def _members_of_gpipe(
    sends_and_receives: pd.DataFrame, maybe_members: list[_Members], ranges: pd.DataFrame
) -> _Members:
    """Return the ranks of a pipeline whose forwards receive on all but the first of them, and send on all but the last.

    Raises NotMeasured where they do not: then several pipelines run side by side, and nothing shows which.
    """
    forward = ranges[ranges["action"] == "forward"]
    calls = sends_and_receives[host.is_one_of(sends_and_receives["collective"], "send", "recv")]
    at = np.searchsorted(forward["start_ns"], calls["start_ns"], side="right") - 1
    inside = (at >= 0) & (calls["start_ns"] < forward["end_ns"].to_numpy()[at])
    within = set(calls["collective"][inside])
    for members in maybe_members:
        sends, receives = members.place < len(members.ranks) - 1, members.place > 0
        if not len(calls) or within == {what for what, here in (("send", sends), ("recv", receives)) if here}:
            return members
    raise NotMeasured(WHICH)


def _between(marks: NDArray[np.int64], ops: pd.DataFrame, evaluated: iv.Intervals, members: _Members) -> list[_Pass]:
    """Return the passes of one step between its sends and receives; raises NotMeasured where they are not 1F1B's."""
    op_at = np.searchsorted(marks, ops["start_ns"], side="right")
    back_at = np.searchsorted(marks, evaluated[:, 0], side="right")
    place, ranks, microbatches = members.place, len(members.ranks), len(np.unique(back_at))
    if ranks < 2 or not runs(ONE_F_ONE_B, ranks, microbatches, 1):
        raise NotMeasured(_NO_ORDER)
    wanted = _parted(grid(ONE_F_ONE_B, ranks, microbatches).rows[place], ranks)
    # What comes before the first micro-batch arrives, or after the last gradients are gone, is no pass.
    first, last = (1 if place else 0), int(back_at[-1])
    pieces = [at for at in np.union1d(op_at, back_at).tolist() if first <= at <= last]
    if np.isin(pieces, back_at).tolist() != [any(what == "backward" for _, what, _ in each) for each in wanted]:
        raise NotMeasured(_NO_ORDER)
    found: list[_Pass] = []
    for at, each in zip(pieces, wanted, strict=True):
        back = evaluated[back_at == at]
        for k, (_, what, which) in enumerate(each):
            mine = ops[op_at == at]
            if what == "backward":
                begin, end = back[0, 0], back[-1, 1]
            else:
                if len(each) > 1:  # next to a backward, before or after it
                    mine = mine[mine["start_ns"] >= back[-1, 1]] if k else mine[mine["start_ns"] < back[0, 0]]
                elif not which and not place:
                    mine = _last_like(mine, ops[op_at == pieces[1]])
                if not len(mine):
                    raise NotMeasured(_NO_ORDER)
                begin, end = mine["start_ns"].iloc[0], (mine["start_ns"] + mine["dur_ns"]).max()
            # As a range that has a name, the first one begins with the call that it then waits for.
            found.append((-1, what, which, int(marks[at - 1] if at and not k else begin), int(end)))
    return found


def _parted(row: tuple[Action, ...], ranks: int) -> list[list[Action]]:
    """Split a rank's passes where it sends or receives: the passes of one part need no other rank in between."""
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


@within_rank
def pipeline_facts(
    chunks: Maybe[Frame] = maybe(schema.CHUNKS),
    traced_facts: Maybe[Mapping[str, Any]] = maybe(traced_facts),
    sends_to_ranks: Maybe[bool] = maybe(sends_to_ranks),
    rank: RankFacts = needs(RANK),
) -> Mapping[str, Any]:
    """Return the pipeline's schedule, microbatches and ranks, and the rank's stages. Raises NotMeasured with why.

    Raises DoesNotApply where nothing looks like a pipeline.
    """
    if not rank.facts:
        return traced_facts.get()
    if not rank.facts.get("pipeline"):
        if sends_to_ranks.or_none():
            raise NotMeasured("the ranks send to each other, but in no schedule of torch.distributed.pipelining")
        raise DoesNotApply(NO_PIPELINE)
    if not len(chunks.get()):
        raise NotMeasured("no step of the pipeline's schedule was recorded: record more steps")
    return dict(rank.facts["pipeline"])


@within_rank
def all_chunks(
    chunks: Maybe[Frame] = maybe(schema.CHUNKS),
    traced_chunks: Maybe[Frame] = maybe(traced_chunks),
    rank: RankFacts = needs(RANK),
) -> pd.DataFrame:
    """Return the chunks of all steps; `call` counts the calls of schedule.step() within a step."""
    if not chunks and not rank.facts:
        return traced_chunks.get().assign(call=0)
    frame = chunks.get()
    # Within each step: a host may begin the next step's call while its device still runs this one's chunks.
    calls = (frame["action"] == SCHEDULE).astype("int64").groupby(frame["step"].to_numpy()).cumsum()
    return frame.assign(call=(calls - 1).clip(lower=0))


@within_rank
def steady_chunks(
    all_chunks: Frame = needs(all_chunks),
    chunks: Maybe[Frame] = maybe(schema.CHUNKS),
    light_steps: Maybe[Frame] = maybe(light_steps),
) -> pd.DataFrame:
    """Return the chunks of the steady steps, or of all traced ones where the trace is all there is."""
    if not chunks:
        return all_chunks
    return all_chunks[all_chunks["step"].isin(light_steps.get().query("steady")["step"])]


@within_rank
def has_pipeline(all_chunks: Maybe[Frame] = maybe(all_chunks)) -> bool:
    """Return whether the rank's chunks are known."""
    return bool(all_chunks)


@within_rank
def outside_chunks(all_chunks: Frame = needs(all_chunks)) -> iv.Intervals:
    """Return the time inside a schedule.step() and outside its chunks, for the calls with known chunks."""
    detailed = all_chunks["step"].isin(all_chunks.loc[all_chunks["action"] != SCHEDULE, "step"])
    return iv.subtract(host.cover(_calls(all_chunks[detailed])), inside_chunks(all_chunks))


@within_rank
def outside_chunks_ns(
    chunks: Maybe[Frame] = maybe(schema.CHUNKS),
    steady_chunks: Maybe[Frame] = maybe(steady_chunks),
    light_steps: Maybe[Frame] = maybe(light_steps),
) -> float:
    """Return ns of the mean steady step that schedule.step() spends outside its chunks; 0: no chunks were recorded."""
    if not chunks:
        return 0.0
    calls = _calls(steady_chunks.get())
    return float((calls["dur_ns"] - calls["busy_ns"]).clip(lower=0).sum()) / max(light_steps.get()["steady"].sum(), 1)


@per_rank
def pipeline(
    pipeline_facts: Mapping[str, Any] = needs(pipeline_facts), steady_chunks: Frame = needs(steady_chunks)
) -> pd.DataFrame:
    """Return one row of the steady calls of schedule.step(): which schedule, and the mean call in ns.

    Columns: schedule, microbatches, stages and ranks (as text, ", " between), size (how many ranks), first_stage (this
    rank holds it), chunks (stages a rank), calls_a_step (of training), dur_ns, busy_ns (inside chunks), noise_ns
    (standard error of the rest).
    """
    calls = _calls(steady_chunks)
    if not len(calls):
        raise NotMeasured("no steady step ran the pipeline")
    row = {
        "schedule": str(pipeline_facts["schedule"]),
        "microbatches": int(pipeline_facts["microbatches"]),
        "stages": ", ".join(map(str, pipeline_facts["stages"])),
        "ranks": ", ".join(map(str, pipeline_facts["ranks"])),
        "size": len(pipeline_facts["ranks"]),
        "first_stage": 0 in pipeline_facts["stages"],
        "chunks": len(pipeline_facts["stages"]),
        "calls_a_step": len(calls) / calls["step"].nunique(),
        "dur_ns": float(calls["dur_ns"].mean()),
        "busy_ns": float(calls["busy_ns"].mean()),
        "noise_ns": standard_error((calls["dur_ns"] - calls["busy_ns"]).to_numpy(dtype=float)),
    }
    return pd.DataFrame([row])


@per_rank
def pipeline_chunks(steady_chunks: Frame = needs(steady_chunks)) -> pd.DataFrame:
    """Return the chunks of some steady steps, one by one, and the row of the call that they belong to.

    Columns: step, call, stage, microbatch, action, start_ns, dur_ns. Ranks choose the same steps, as far as they have
    them: those whose numbers a power of two divides.
    """
    detailed = np.unique(steady_chunks.loc[steady_chunks["action"] != SCHEDULE, "step"])
    if not len(detailed):
        raise NotMeasured("no chunk of a steady step was recorded")
    columns = ["step", "call", "stage", "microbatch", "action", "start_ns", "dur_ns"]
    for power in count():
        shown = detailed[detailed % 2**power == 0] if (detailed % 2**power == 0).any() else detailed[:1]
        frame = steady_chunks.loc[steady_chunks["step"].isin(shown), columns]
        if len(shown) == 1 or (len(shown) <= _STEPS and len(frame) <= _MOST_ROWS):
            break
    return frame.astype({"action": "str"})


def inside_chunks(chunks: pd.DataFrame) -> iv.Intervals:
    """Return the time inside chunks."""
    return host.cover(chunks[chunks["action"] != SCHEDULE])


def _calls(chunks: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of schedule.step()."""
    return chunks[chunks["action"] == SCHEDULE]
