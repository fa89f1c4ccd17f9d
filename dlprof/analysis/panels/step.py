"""Panels of the step: its length over the run, one step as a timeline, and the whole job."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd

from dlprof.analysis import intervals as iv
from dlprof.analysis.communication.collectives import bare_waits
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, maybe, needs, per_rank, within_rank
from dlprof.analysis.input.loader import fetches
from dlprof.analysis.panel import MOST_RANKS, PHASES, Picture, points, rows, table
from dlprof.analysis.step.partition import BUBBLE, partition
from dlprof.analysis.step.whole_job import PARTS, began_ns, first_times, step_times, whole_job
from dlprof.analysis.timeline import device, host
from dlprof.analysis.timeline.device import device_work, has_device
from dlprof.analysis.timeline.host import on_training_thread
from dlprof.analysis.timeline.stalls import stalled_steps
from dlprof.analysis.timeline.steps import Timing, step_series, timing
from dlprof.errors import NotMeasured
from dlprof.result import Panel
from dlprof.units import count, duration, short

# Pieces of one category closer than this share of the step are drawn as one.
GRAIN = 1 / 600

# Workers of a rank's loader, and streams of its device, that have a lane.
MOST_WORKERS = 4
MOST_STREAMS = 4

# What a stream may do, and the kinds of spans that are it.
_ROLES = {"computation": ("kernel",), "communication": ("communication",), "copies": ("copy", "set")}

# What stands before the name of every function of the backward pass.
_EVALUATES = "autograd::engine::evaluate_function: "

_PHASES = (
    ("fetch", "input_wait", ("dlprof::fetch", "enumerate(DataLoader)")),
    ("optimizer", "optimizer_host", ("dlprof::optimizer", "Optimizer.step#")),
    ("backward", "host", ("dlprof::backward",)),
    ("forward", "host", ("dlprof::forward", "DistributedDataParallel.forward")),
)

Row = tuple[str, int, int, str, str]  # as the columns of `excerpt` from lane on


@within_rank
def in_phases(on_training_thread: Frame = needs(on_training_thread)) -> list[iv.Intervals]:
    """Return when the training thread is in each of the phases that are drawn."""
    thread = on_training_thread
    covers = [host.cover(thread, host.is_named(thread, *ranges)) for _, _, ranges in _PHASES]
    closures = host.cover(thread, host.is_named(thread, host.CLOSURE))
    return [
        iv.subtract(cover, closures) if name == "optimizer" else cover
        for cover, (name, *_) in zip(covers, _PHASES, strict=True)
    ]


@per_rank
def excerpt(
    timing: Timing = needs(timing),
    in_phases: Maybe[list[iv.Intervals]] = maybe(in_phases),
    device_work: Maybe[Frame] = maybe(device_work),
    partition: Maybe[dict[str, iv.Intervals]] = maybe(partition),
    has_device: bool = needs(has_device),
    on_training_thread: Maybe[Frame] = maybe(on_training_thread),
    fetches: Maybe[Frame] = maybe(fetches),
) -> pd.DataFrame:
    """Return two steady traced steps: shown (middle, slowest), step, step_ns, begin_ns; lane, start_ns, dur_ns, name,
    category.

    The middle one, not the shortest or longest, and by its place, so that all ranks show the same step; and this
    rank's slowest, where that is longer. Lanes: thread; of a device's streams `computation 7`, `communication 20`,
    `copies 22`, by what each does most; without a device work and communication; worker N.
    """
    if not len(timing.windows) or timing.unit != "step":
        raise NotMeasured("no step was traced")
    lengths = timing.windows[:, 1] - timing.windows[:, 0]
    middle, slowest = len(lengths) // 2, int(np.argmax(lengths))
    parts = []
    for which, chosen in {"middle": middle, "slowest": slowest}.items():
        if which == "slowest" and lengths[slowest] <= lengths[middle]:
            continue
        begin, end = (int(x) for x in timing.windows[chosen])
        rows = _on_thread(in_phases.get(), begin, end)
        if has_device:
            rows += _on_streams(device_work.get(), partition.get().get(BUBBLE, iv.EMPTY), begin, end)
        else:
            rows += _working(on_training_thread.get(), partition.get(), begin, end)
        rows += _in_workers(fetches.get(), begin, end) if fetches else []
        frame = pd.DataFrame(rows, columns=["lane", "start_ns", "dur_ns", "name", "category"])
        step = int(timing.numbers[chosen]) if len(timing.numbers) else 0
        parts.append(frame.assign(shown=which, step=step, step_ns=end - begin, begin_ns=begin))
    return pd.concat(parts, ignore_index=True)


def _on_thread(in_phases: list[iv.Intervals], begin: int, end: int) -> list[Row]:
    rows: list[Row] = []
    left = np.array([[begin, end]], dtype=np.int64)
    for (name, category, _), cover in zip(_PHASES, in_phases, strict=True):
        pieces = _coarse(iv.intersect(left, cover), end - begin)
        rows += _rows("thread", pieces, [name] * len(pieces), category)
        left = iv.subtract(left, cover)
    return rows


def _in_workers(fetches: pd.DataFrame, begin: int, end: int) -> list[Row]:
    """Return the batches that the first workers made meanwhile, of those that were recorded one by one."""
    start, stop = fetches["start_ns"], fetches["start_ns"] + fetches["dur_ns"]
    alone = (fetches["count"] == 1) & (fetches["dur_ns"] >= 0) & fetches["worker"].between(0, MOST_WORKERS - 1)
    mine = alone & (start < end) & (stop > begin)
    spans = zip(fetches["worker"][mine], start[mine].clip(lower=begin), stop[mine].clip(upper=end), strict=True)
    return [(f"worker {worker}", int(s), int(e - s), "makes a batch", "worker") for worker, s, e in spans]


def _on_streams(device_work: pd.DataFrame, bubble: iv.Intervals, begin: int, end: int) -> list[Row]:
    """Return what each of the busiest streams ran, hidden or not: those that compute first, those that copy last."""
    start = device_work["start_ns"].to_numpy()
    over = start + device_work["dur_ns"].to_numpy()
    inside = np.flatnonzero((start < end) & (over > begin))
    # What ran when the step began has a name, too.
    late, over = np.maximum(start[inside], begin), over[inside]
    shown = device_work[["lane", "kind", "name"]].iloc[inside].assign(start_ns=late, dur_ns=over - late)
    lanes = shown["lane"].cat
    of_role = {role: host.is_kind(shown, *kinds) for role, kinds in _ROLES.items()}
    streams = []
    for code in np.unique(lanes.codes).tolist():
        here = {role: np.flatnonzero(of & (lanes.codes.to_numpy() == code)) for role, of in of_role.items()}
        ran = {role: iv.clip(iv.union(late[at], over[at]), begin, end) for role, at in here.items()}
        busy = {role: iv.total(pieces) for role, pieces in ran.items()}
        role = max(busy, key=lambda role: busy[role])
        name = f"{role} {str(lanes.categories[code]).removeprefix('device').removeprefix(':')}"
        streams.append((list(_ROLES).index(role), -sum(busy.values()), name, here, ran))
    rows: list[Row] = []
    busiest = sorted(streams, key=lambda stream: stream[1])[:MOST_STREAMS]
    for _, _, lane, here, ran in sorted(busiest, key=lambda stream: stream[:3]):
        for role, category, cover in (
            ("computation", "computation", ran["computation"]),
            ("communication", "communication", iv.subtract(ran["communication"], bubble)),
            ("communication", BUBBLE, iv.intersect(ran["communication"], bubble)),
            ("copies", "copy", ran["copies"]),
        ):
            pieces = _coarse(cover, end - begin)
            rows += _rows(lane, pieces, _longest(shown.iloc[here[role]], pieces), category) if len(pieces) else []
    return rows


def _working(on_training_thread: pd.DataFrame, partition: dict[str, iv.Intervals], begin: int, end: int) -> list[Row]:
    """Return what the training thread computes, and apart from it the communication that nothing hides."""
    first, last = np.searchsorted(on_training_thread["start_ns"].to_numpy(), (begin, end))
    work = on_training_thread.iloc[first:last]
    work = work[host.is_kind(work, "op", *device.WORK)]
    rows: list[Row] = []
    for category, lane, name in (
        ("computation", "work", ""),
        ("communication", "communication", "collective"),
        (BUBBLE, "communication", "waits for another stage"),
    ):
        pieces = _coarse(iv.clip(partition.get(category, iv.EMPTY), begin, end), end - begin)
        rows += _rows(lane, pieces, [name] * len(pieces) if name else _longest(work, pieces), category)
    return rows


def _rows(lane: str, pieces: iv.Intervals, names: Iterable[str], category: str) -> list[Row]:
    return [(lane, s, e - s, name, category) for (s, e), name in zip(pieces.tolist(), names, strict=True)]


def _coarse(a: iv.Intervals, length: int) -> iv.Intervals:
    """Merge pieces that lie closer than the grain, and drop those shorter than a quarter of it."""
    grain = max(int(length * GRAIN), 1)
    merged = iv.union(a[:, 0], a[:, 1] + grain) - (0, grain)
    return merged[(merged[:, 1] - merged[:, 0]) * 4 >= grain]


def _longest(spans: pd.DataFrame, pieces: iv.Intervals) -> list[str]:
    """Name the longest of the spans, in order of their start, that begins in each piece, and count the others."""
    start, dur, name = spans["start_ns"].to_numpy(), spans["dur_ns"].to_numpy(), spans["name"].array
    names = []
    for i, j in np.searchsorted(start, pieces).tolist():
        longest = str(name[i + int(np.argmax(dur[i:j]))]).removeprefix(_EVALUATES) if j > i else ""
        names.append(short(longest, 200) + (f" and {j - i - 1:,} more" if j > i + 1 else ""))
    return names


# Points of the parts of the steps: each the mean of as many steps as it takes.
MOST_POINTS = 300

# What is marked, of each kind so many: stalls from this share of the mean step on, the longest of them.
LEAST_STALL = 0.1

MOST_MARKS = 40

MOST_BARS = 60

Mark = tuple[float, str, str]


def draw_steps(
    step_series: Frame = needs(step_series),
    step_times: Maybe[pd.Series[float]] = maybe(step_times),
    first_times: Maybe[tuple[int, ...]] = maybe(first_times),
    stalled_steps: Maybe[Frame] = maybe(stalled_steps),
    job: Job = needs(JOB),
) -> list[Panel]:
    """Draw the duration of each step, a line a rank, and what the steps were made of."""
    train = step_series[step_series["kind"] == "train"]
    if train["step"].nunique() < 2:
        raise NotMeasured("fewer than two steps")
    # A trace alone holds a few steps somewhere in the run.
    if train["profiled"].all():
        return [_durations(train, None, ())]
    at = step_times.get()
    began = began_ns(first_times.get(), step_series["start_ns"].min())
    resumed = sorted({at - began for rank in job.run.ranks for at in rank.resumed_ns})[:MOST_MARKS]
    marks = _marks(step_series, at) + _stall_marks(stalled_steps.or_none(), at, step_series)
    marks += [(float(n), "the job went on after it was stopped", "suspended") for n in resumed if 0 < n < at.max()]
    return [_durations(train, at, tuple(sorted(marks))), *_parts(train, at)]


def _durations(train: pd.DataFrame, at: pd.Series[float] | None, marks: tuple[Mark, ...]) -> Panel:
    table = train.drop_duplicates(["step", "rank"]).pivot(index="step", columns="rank", values="dur_ns")
    if table.shape[1] > MOST_RANKS:
        table = pd.DataFrame({"mean of ranks": table.mean(axis=1), "slowest rank": table.max(axis=1)})
    else:
        table.columns = pd.Index([f"rank {r}" for r in table.columns])
    slowed, note = train.groupby("step")["profiled"].max() > 0, ""
    if slowed.any() and not slowed.all():
        stretches = [(run.index[0], run.index[-1]) for run in _stretches(slowed)]
        named = " and ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in stretches)
        note = f"Step{'s' if slowed.sum() > 1 else ''} {named}: traced or counted, which takes longer."
    over, steps = "step", ()
    if at is not None:
        over, steps = "time_ns", tuple(table.index.tolist())
        table = table.set_axis(pd.Index(at[table.index]), axis=0)
    columns = (over, *map(str, table.columns))
    return Panel("lines", "Steps over the run", points(table), columns, unit="ns", note=note, marks=marks, steps=steps)


def _stretches(chosen: pd.Series[bool]) -> list[pd.Series[bool]]:
    """Split the chosen ones into those that follow each other."""
    return [run for _, run in chosen[chosen].groupby((~chosen).cumsum()[chosen])]


def _parts(train: pd.DataFrame, at: pd.Series[float]) -> list[Panel]:
    columns = [f"{phase}_ns" for phase in PHASES]
    known = train[(train[columns] >= 0).all(axis=1)]
    if known["step"].nunique() < 2:
        return []
    means = known.groupby("step")[["dur_ns", *columns]].mean()
    means["other"] = (means.pop("dur_ns") - means[columns].sum(axis=1)).clip(lower=0)
    size = -(-len(means) // MOST_POINTS)
    table = means.groupby(np.arange(len(means)) // size).mean()
    steps = means.index[::size]
    note = "The mean of the ranks" + (f" and of {size} steps a point." if size > 1 else ".")
    note += " Other is what lies between fetching, forward, backward and the optimizer."
    named = ("time_ns", *PHASES.values(), "other")
    title, rows = "What the training thread did in its steps", points(table.set_axis(pd.Index(at[steps]), axis=0))
    return [Panel("areas", title, rows, named, unit="ns", note=note, steps=tuple(steps.tolist()))]


def _marks(series: pd.DataFrame, at: pd.Series[float]) -> list[Mark]:
    """Mark epochs and validation, which make steps differ."""
    steps = series.drop_duplicates("step").set_index("step").sort_index()
    epochs = steps.index[steps["first"] != 0]
    # One step ends an epoch, the next one begins another.
    epochs = epochs[np.diff(epochs, prepend=-2) > 1]
    marks = [(float(at[n]), f"step {n}: an epoch begins or ends", "epoch") for n in epochs]
    marks = marks if len(marks) <= MOST_MARKS else []
    for stretch in _stretches(steps["kind"] == "validation"):
        n, length = stretch.index[0], duration(float(steps["dur_ns"][stretch.index].sum()))
        marks.append((float(at[n]), f"step {n}: validation, {count(len(stretch), 'step')}, {length}", "validation"))
    return marks


def _stall_marks(stalled_steps: pd.DataFrame | None, at: pd.Series[float], series: pd.DataFrame) -> list[Mark]:
    """Mark the longest stalls, where they were recorded."""
    if stalled_steps is None:
        return []
    stalls = stalled_steps.groupby(["kind", "step"], as_index=False)["ns"].max()
    least = LEAST_STALL * series.drop_duplicates("step")["dur_ns"].mean()
    longest = stalls[(stalls["ns"] >= least) & stalls["step"].isin(at.index)].nlargest(MOST_MARKS, "ns")
    return [
        (float(at[step]), f"step {step}: {kind.replace('_', ' ')}, {duration(float(ns))}", kind)
        for kind, step, ns in longest.itertuples(index=False)
    ]


def stall_bars(steps: pd.DataFrame, rank: int, what: str) -> Panel:
    """Draw the longest of a rank's steps that stalls of one kind held up, rows of `stalled_steps`: a bar a step."""
    longest = steps.nlargest(MOST_BARS, "ns").sort_values("step")
    bars = zip(longest["step"], longest["ns"], longest["kind"], strict=True)
    rows = tuple((f"step {step}", float(ns), str(kind)) for step, ns, kind in bars)
    return Panel("bars", f"{what} on rank {rank}, the {len(rows)} longest of its steps", rows, unit="ns")


STEPS_PICTURE = Picture(draw_steps)

# A step so much longer than the middle one is drawn, too.
SLOW = 1.1

# Waiting that is drawn within communication, and that arrows lead to: from these shares of the step on, the longest.
LEAST_WAIT, LEAST_ARROW = 0.005, 0.02

MOST_WAITS, MOST_ARROWS = 200, 16

Arrow = tuple[float, str, str, str]

_TITLES = {"middle": "One traced step (step {})", "slowest": "The slowest traced step (step {})"}


def draw_timeline(excerpt: Frame = needs(excerpt), bare_waits: Maybe[Frame] = maybe(bare_waits)) -> list[Panel]:
    """Draw what ran in one traced step of a few ranks, and in the slowest one."""
    if not len(excerpt):
        raise NotMeasured("nothing ran in the traced step")
    panels = []
    for shown, title in _TITLES.items():
        mine = _same_step(excerpt, shown)
        if len(mine):
            few, of = mine["rank"].nunique(), excerpt["rank"].nunique()
            note = (
                f"The slowest of {count(few, 'rank')} of {of}; the other ranks had another slowest step."
                if few < of
                else ""
            )
            panels.append(_panel(bare_waits.or_none(), mine, title, note))
    return panels


def _same_step(frame: pd.DataFrame, shown: str) -> pd.DataFrame:
    """Return the rows of one step: of the slowest the one that most ranks have; none where it is like the others."""
    mine = frame[frame["shown"] == shown]
    if shown == "slowest" and len(mine):
        mine = mine[mine["step"] == mine.groupby("step")["rank"].nunique().idxmax()]
        middle = frame[frame["shown"] == "middle"].groupby("rank")["step_ns"].first()
        if not (mine["step_ns"] >= SLOW * mine["rank"].map(middle)).any():
            return mine.iloc[:0]
    return mine


def _panel(bare_waits: pd.DataFrame | None, frame: pd.DataFrame, title: str, note: str) -> Panel:
    shown, left = _few(frame)
    frame = frame[frame["rank"].isin(shown)]
    waits, ahead = _waits(bare_waits, frame)
    early = frame["rank"].map(ahead).fillna(0).astype("int64")
    frame = frame.assign(begin_ns=frame["begin_ns"] - early, start_ns=frame["start_ns"] - early)
    begins = frame.groupby("rank")["begin_ns"].first()
    # One clock where the ranks' steps begin within a step of each other; else each rank from its own beginning.
    aligned = begins.max() - begins.min() <= (frame["start_ns"] - frame["begin_ns"]).max()
    zero = begins.min() if aligned else frame["rank"].map(begins)
    frame = frame.assign(at=frame["start_ns"] - zero, lane=_lanes(frame))
    drawn = pd.concat([frame, _waiting(frame, waits)])[["lane", "at", "dur_ns", "name", "category"]]
    arrows = _arrows(frame, waits, int(begins.min())) if aligned else ()
    notes = [note, left]
    if not aligned:
        notes.append("Each rank from its own beginning: their clocks differ.")
    elif arrows:
        notes.append("Arrows lead from the rank that came last to a collective to those that had waited for it.")
    named = title.format(int(frame["step"].iloc[0]))
    return Panel("timeline", named, rows(drawn), unit="ns", note=" ".join(filter(None, notes)), arrows=arrows)


def _lanes(frame: pd.DataFrame) -> pd.Series[str]:
    return "rank " + frame["rank"].astype("str") + " · " + frame["lane"]


def _waits(bare_waits: pd.DataFrame | None, frame: pd.DataFrame) -> tuple[pd.DataFrame, dict[int, int]]:
    """Return whom the ranks waited for in the step, on aligned clocks, and how far each clock is ahead, ns.

    Columns: rank, by, begin_ns, end_ns, waited_ns (the part with no computation); the longest of the visible waits.
    Empty where it is not known.
    """
    columns = ["rank", "by", "begin_ns", "end_ns", "waited_ns"]
    if bare_waits is None:
        return pd.DataFrame(columns=columns, dtype="int64"), {}
    pairs = bare_waits[bare_waits["step"] == frame["step"].iloc[0]]
    pairs = pairs.assign(begin_ns=pairs["start_ns"] - pairs["offset_ns"])
    pairs = pairs.assign(end_ns=pairs["begin_ns"] + pairs["wait_ns"])
    shown = pairs["rank"].isin(frame["rank"].unique()) & (pairs["wait_ns"] >= LEAST_WAIT * frame["step_ns"].max())
    longest = pairs.loc[shown & (pairs["rank"] != pairs["by"]), columns].nlargest(MOST_WAITS, "waited_ns")
    return longest, dict(zip(pairs["rank"].tolist(), pairs["offset_ns"].tolist(), strict=True))


def _waiting(frame: pd.DataFrame, waits: pd.DataFrame) -> pd.DataFrame:
    """Return the waiting within the communication that is drawn, to be drawn upon it."""
    exchanges = frame.loc[frame["category"] == "communication", ["rank", "lane", "at", "start_ns", "dur_ns"]]
    both = exchanges.merge(waits, on="rank")
    early = (both["begin_ns"] - both["start_ns"]).clip(lower=0)
    dur = (both["end_ns"] - both["start_ns"]).clip(upper=both["dur_ns"]) - early
    names = "waits for rank " + both["by"].astype("str")
    both = both.assign(at=both["at"] + early, dur_ns=dur, name=names, category="waiting")
    found: pd.DataFrame = both[dur >= LEAST_WAIT * frame["step_ns"].max()]
    return found


def _arrows(frame: pd.DataFrame, waits: pd.DataFrame, zero: int) -> tuple[Arrow, ...]:
    """Point from whom a rank waited for to it, where and when the waiting ended."""
    # Of each rank the lane in which it communicates most; its first one, where it does not.
    exchanging = frame["dur_ns"].where(frame["category"].isin(("communication", "pipeline_bubble")), 0)
    most = exchanging.groupby([frame["rank"], frame["lane"]], sort=False).sum().groupby(level=0).idxmax()
    lanes = dict(most.tolist())
    long = waits["by"].isin([*lanes]) & (waits["waited_ns"] >= LEAST_ARROW * frame["step_ns"].max())
    found = waits[long].head(MOST_ARROWS).sort_values("end_ns", kind="stable")
    return tuple(
        (int(end) - zero, lanes[by], lanes[rank], f"rank {rank} had waited {duration(waited)} for rank {by}")
        for rank, by, _, end, waited in found.itertuples(index=False)
    )


def _few(frame: pd.DataFrame) -> tuple[list[int], str]:
    """Choose as many ranks as can be drawn: the first, and those that communicate least, for others wait for them."""
    ranks = sorted(int(r) for r in frame["rank"].unique())
    if len(ranks) <= MOST_RANKS:
        return ranks, ""
    communicates = frame["dur_ns"].where(frame["category"] == "communication", 0).groupby(frame["rank"]).sum()
    late = [int(str(r)) for r in communicates.sort_values(kind="stable").index[: MOST_RANKS // 2]]
    first = [r for r in ranks if r not in late][: MOST_RANKS - len(late)]
    return sorted({*first, *late}), (
        f"{MOST_RANKS} of {len(ranks)} ranks: the first, and those that communicate least, for which others wait."
    )


TIMELINE_PICTURE = Picture(draw_timeline)

_PARTS = {
    "setup": "setting up, from importing torch to the first step",
    "warmup": "training, warming up",
    "steady": "training, steady",
    "traced": "traced or counted, which takes longer",
    "first_batch": "waiting for the first batch",
    "epoch_ends": "an epoch's first batch or end",
    "validation": "validation",
    "other": "no training and no validation",
    "stalled": "steps in which training stood still",
    "suspended": "steps during which the job was stopped",
    "checkpoint": "of it saving checkpoints",
    "compilation": "of it compiling",
    "garbage_collection": "of it collecting garbage",
}


def draw_whole_job(whole_job: Frame = needs(whole_job)) -> list[Panel]:
    """Return what the job's time went into besides its steady steps, as the mean over the ranks."""
    ranks = whole_job["rank"].nunique()
    sums = whole_job.groupby("part")[["steps", "ns"]].sum() / ranks
    sums = sums.assign(share=sums["ns"] / sums["ns"][sums.index.isin(PARTS)].sum())
    shown = sums.reindex(list(_PARTS)).query("ns > 0").rename(_PARTS).reset_index()
    if len(shown) < 2:
        raise NotMeasured("the whole job was steady steps")
    shown["steps"] = shown["steps"].astype(object).where(shown["part"] != _PARTS["setup"], "")
    shown["without"] = 1 / (1 - shown["share"].clip(upper=0.999))
    note = "Findings and their savings are of the steady steps, except those about the time outside them."
    note = f"Means over {ranks} ranks. {note}" if ranks > 1 else note
    headings = {"part": "", "steps": "how many", "ns": "time_ns", "share": "share", "without": "speed without it_times"}
    return [table("The whole job", shown, headings, note=note)]


WHOLE_JOB_PICTURE = Picture(draw_whole_job)
