"""Plays jobs: as they are recorded, and for long without a profiler, to know what is true of them.

True are a job's period, what the device did in it, why it had nothing to do, and who was late. Work belongs to the step
that launched it. A step's window on the device begins with the first of its work on the stream that computes, and ends
with the next step's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm

from simulator.hardware import DEVICES
from simulator.job import Job, Recording, groups
from simulator.machine import Setup, Simulated, Simulation, simulate
from simulator.parallel import Halves, Replicas, Stage
from simulator.program import APART, COMPUTE, Step
from simulator.recorder import Window
from simulator.streams import Work
from simulator.training import Training

SHORT_NS = 20_000  # a gap before queued work that is shorter is the launch's own

# Categories of device time, in their order of claim.
BUSY = ("computation", "communication", "copy")
_KINDS = {"kernel": "computation", "communication": "communication", "copy": "copy", "set": "copy"}


@dataclass(frozen=True)
class Share:
    """One rank's mean step on its device, ns: what it did, exclusively, and why it was idle."""

    rank: int
    steps: int
    step_ns: float
    parts: Mapping[str, float]  # computation, communication, copy (both where nothing claims before them), idle
    idle: Mapping[str, float]  # host:WHAT, launch_latency, queued_wait
    after_sync_ns: float  # of the idle time: ran dry while the host waited for the device
    lag_ns: float  # from the begin of the host's step to that of the device's
    wait_ns: float  # in collectives, for the last rank
    kernels: float


@dataclass(frozen=True)
class Truth:
    """A whole job's."""

    period_ns: float  # mean steady step, as the devices take it
    host_ns: float  # mean steady step, as the hosts take it
    loop_ns: float  # the whole loop, spread over its training steps
    ranks: Sequence[Share]
    last: Mapping[int, int] = field(default_factory=dict)  # how often each rank came last to a collective


def intervals(work: Work) -> Iterator[tuple[str, int, int]]:
    """Return what a piece of work does on the device: kind, start, end. A graph's nodes each; a wait does nothing."""
    if work.kind == "graph":
        for at, took, node in work.parts:
            if node.kind != "wait":
                yield _KINDS[node.kind], work.start + at, work.start + at + took
    elif work.kind in _KINDS:
        yield _KINDS[work.kind], work.start, work.end


def boundaries(rank: Simulated) -> list[tuple[int, int]]:
    """Return when the device began each step: (step, ns), in order; steps that launched nothing have none."""
    first: dict[int, int] = {}
    for work in rank.work.get(COMPUTE, ()):
        if work.kind in _KINDS or work.kind == "graph":
            first.setdefault(work.step, work.start)
    return sorted(first.items())


def truth(simulation: Simulation, warm: int) -> Truth:
    """Return the truth of a simulation, without its first `warm` steps and its last one."""
    shares = [share for rank in simulation.ranks if (share := _share(rank, warm)) is not None]
    hosts, loops = [], []
    for rank in simulation.ranks:
        rows = [row for row in rank.records.rows[:-1] if row.step >= warm]
        trains = [r for r in rows if r.kind == "train" and not r.first]
        hosts.append(sum(r.end - r.start for r in trains) / max(len(trains), 1))
        count = sum(r.kind == "train" for r in rows)
        loops.append((rows[-1].end - rows[0].start) / max(count, 1))
    last: dict[int, int] = defaultdict(int)
    for meeting in simulation.meetings:
        last[meeting.last] += 1
    period = sum(s.step_ns for s in shares) / len(shares) if shares else sum(hosts) / len(hosts)
    return Truth(period, sum(hosts) / len(hosts), sum(loops) / len(loops), shares, dict(last))


def _share(rank: Simulated, warm: int) -> Share | None:
    """Return one rank's mean step; None where its device does nothing."""
    begins = [(step, at) for step, at in boundaries(rank) if step >= warm]
    if len(begins) < 3:
        return None
    low, high, steps = begins[0][1], begins[-1][1], len(begins) - 1
    busy = sorted(
        (start, end, kind)
        for stream in rank.work.values()
        for work in stream
        for kind, start, end in intervals(work)
        if end > low and start < high
    )
    parts = dict.fromkeys((*BUSY, "idle"), 0)
    for kind, length in _partition(busy, low, high):
        parts[kind] += length
    idle, dry = _idle(rank, low, high)
    starts = {row.step: row.start for row in rank.records.rows}
    lags = [at - starts[step] for step, at in begins if step in starts]
    waits = sum(
        w.meeting.wait_ns(rank.rank)
        for stream in rank.work.values()
        for w in stream
        if w.meeting is not None and low <= w.start < high
    )
    kernels = sum(low <= start < high for start, _, kind in busy if kind != "copy")
    return Share(
        rank.rank,
        steps,
        (high - low) / steps,
        {k: v / steps for k, v in parts.items()},
        {k: v / steps for k, v in idle.items()},
        dry / steps,
        sum(lags) / len(lags),
        waits / steps,
        kernels / steps,
    )


def _partition(busy: Sequence[tuple[int, int, str]], low: int, high: int) -> Iterator[tuple[str, int]]:
    """Return the exclusive parts of [low, high): computation > communication > copy > idle."""
    marks = sorted(
        [(max(s, low), 1, BUSY.index(k)) for s, e, k in busy if e > s]
        + [(min(e, high), -1, BUSY.index(k)) for s, e, k in busy if e > s]
    )
    open_ = [0] * len(BUSY)
    at = low
    for when, change, kind in marks:
        if when > at:
            claims = next((k for k, n in enumerate(open_) if n), None)
            yield ("idle" if claims is None else BUSY[claims]), when - at
            at = when
        open_[kind] += change
    if high > at:
        yield "idle", high - at


def _idle(rank: Simulated, low: int, high: int) -> tuple[dict[str, int], int]:
    """Return the idle time of [low, high) by its cause, and how much of it began while the host waited in a sync."""
    runs = sorted(
        (
            (start, end, work)
            for number, stream in rank.work.items()
            if number < APART
            for work in stream
            for _, start, end in intervals(work)
        ),
        key=lambda run: run[:2],
    )
    times = [at for at, _ in rank.records.doing]
    causes: dict[str, int] = defaultdict(int)
    dry = 0
    free = low
    for start, end, work in runs:
        begin, until = max(free, low), min(start, high)
        if until > begin:
            late = min(max(work.arrive, begin), until)
            for what, length in _doing(rank.records.doing, times, begin, late):
                causes[f"host:{what}"] += length
            rest = until - late
            if rest:
                causes["launch_latency" if rest < SHORT_NS else "queued_wait"] += rest
            at = bisect_right(times, begin) - 1
            if late - begin > SHORT_NS and rank.records.doing[at][1] in ("sync", "pageable_copy"):
                dry += until - begin
        free = max(free, end)
        if free >= high:
            break
    return dict(causes), dry


def _doing(doing: Sequence[tuple[int, str]], times: Sequence[int], begin: int, end: int) -> Iterator[tuple[str, int]]:
    """Return what the host did between two times."""
    at = bisect_right(times, begin) - 1
    while begin < end:
        until = min(times[at + 1] if at + 1 < len(times) else end, end)
        if until > begin:
            yield doing[at][1], until - begin
        begin, at = max(until, begin), at + 1


def work_by_module(works: Sequence[Work], steps: range) -> dict[tuple[str, str], float]:
    """Return what device work takes of a mean step, by the module and the part of the step that it was launched for."""
    found: dict[tuple[str, str], float] = {}
    for work in works:
        if work.step in steps and work.kind in ("kernel", "set", "copy", "communication"):
            key = ("", "communication") if work.kind == "communication" else work.belongs
            found[key] = found.get(key, 0.0) + (work.end - work.start) / len(steps)
    return found


WARM = 20  # steps that are left out: the host's queue fills
STEPS = 60
LONGEST_CYCLE = 60


def setup(job: Job, steps: int, window: Window | None = None) -> Setup:
    """Return what the machine runs of a job."""
    makers = [_maker(job, rank) for rank in range(job.ranks)]
    loaders = [made for rank in range(job.ranks) if (made := job.loader_of(rank)) is not None]
    speeds, hosts = dict(job.speeds), dict(job.host_speeds)
    return Setup(
        _by_rank(makers),
        job.ranks,
        steps,
        DEVICES[job.device],
        job.host,
        loaders,
        groups(job),
        [(hosts.get(rank, 1.0), speeds.get(rank, 1.0)) for rank in range(job.ranks)],
        job.seed,
        window,
    )


def _maker(job: Job, rank: int) -> Callable[[int], Step]:
    if job.pipeline is not None:
        return Stage(job, rank).step
    if job.devices > 1:
        return (Halves if job.cut else Replicas)(job, rank).step
    return Training(job, rank).step


def _by_rank(makers: Sequence[Callable[[int], Step]]) -> Callable[[int, int], Step]:
    return lambda rank, number: makers[rank](number)


def play(job: Job, steps: int) -> Simulation:
    """Simulate a job without a profiler."""
    return simulate(setup(job, steps))


def cycle(job: Job) -> int:
    """Return after how many steps all that comes now and then has come as often as it should."""
    pauses, script = job.pauses, job.script
    every = [job.epochs.steps + job.epochs.validation or 1]
    every += [script.every if script.items else 1, script.skips or 1]
    for length, often in (
        (pauses.garbage, pauses.garbage_every),
        (pauses.checkpoint, pauses.checkpoint_every),
        (pauses.compile, pauses.compile_every),
        (pauses.retry, pauses.retry_every),
    ):
        every.append(often if length else 1)
    if job.loader is not None and job.loader.slow_worker:
        every.append(job.loader.workers)
    return lcm(*every)


def true(job: Job, warm: int = WARM, steps: int = STEPS) -> Truth:
    """Simulate a job without a profiler; return what is true of it, over whole cycles of about so many steps."""
    whole = min(cycle(job), LONGEST_CYCLE)
    warm, steps = (-(-count // whole) * whole for count in (warm, steps))
    return truth(play(job, warm + steps + 1), warm)


def record(job: Job, recording: Recording) -> Simulation:
    """Simulate a job as it is recorded."""
    window = Window(
        recording.skip + recording.warmup, recording.active, recording.warmup, event=recording.event,
        after=recording.after, own=recording.light,
    )  # fmt: skip
    return simulate(setup(job, recording.steps, window))
