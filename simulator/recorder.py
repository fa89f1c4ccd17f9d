"""What a simulated rank leaves: the calls that a profiler notes, and what dlprof's recorder notes of every step.

The recorder marks steps and phases, notes stalls, and opens the profiler's window. It is opened and closed as the
collector `trace` does it: at the begin of a step, the profiler waits for the device when it starts and when it stops,
and the steps that feel it are marked as profiled. All times are nanoseconds on the one true clock; −1: not known.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from simulator.habits import RANGE as OPTIMIZER
from simulator.program import COMPUTE, HIDDEN, HIDDEN_NS, Args, Chunk, Stall, Step
from simulator.streams import UNKNOWN, Work

if TYPE_CHECKING:
    from simulator.machine import Process


@dataclass(frozen=True)
class Window:
    """When the profiler records, in steps from 0, and what that costs, in ns."""

    first: int = 12
    active: int = 5
    warmup: int = 2
    # What the host needs more for each traced operator, range and call of the runtime: a constant for each, so that a
    # phase of thousands of launches takes up to twice as long and one of ten calls no longer. On one H200 (torch 2.11)
    # 1.3 to 2.5 µs, measured as the traced phase less the untraced one, over its events.
    event: int = 1_500
    module: int = 900  # for the range of a module; 0.8 to 1.7 µs there
    kernel: int = 150  # that the device needs more between two kernels
    prepare: int = 15_000_000
    start: int = 4_000_000
    stop: int = 6_000_000
    export: int = 80_000_000
    after: float = 1.0  # what every call costs once CUPTI stays attached, as a factor
    own: bool = True  # dlprof's; else the script's own profiler, whose step() it calls after every batch


@dataclass(slots=True)
class Call:
    """One event of the host in the trace: an operator, a range, or a call of the runtime."""

    category: str
    name: str
    thread: int
    start: int
    end: int
    correlation: int = -1
    external: int = 0
    args: Args | None = None


@dataclass(slots=True)
class Row:
    """One step of the step log."""

    number: int
    step: int  # of the job; one that does nothing but fetch has no row of its own
    kind: str
    first: int
    start: int
    end: int = UNKNOWN
    lead: int = -1
    fetch: int = 0
    forward: int = 0
    backward: int = 0
    optimizer: int = 0
    fetches: int = 0
    forwards: int = 0
    backwards: int = 0
    optimizer_steps: int = 0
    profiled: int = 0
    ended: Work | None = None  # event at the end


@dataclass(slots=True)
class Stalled:
    """One stall that the recorder notes."""

    kind: str
    start: int
    end: int
    step: int
    phase: str
    path: str
    reason: str


@dataclass(slots=True)
class Chunked:
    """A pipeline stage's work on one micro-batch, or a whole schedule.step(): where its call began, and two events."""

    step: int
    action: str
    stage: int
    microbatch: int
    called: int
    begun: Work
    ended: Work | None = None


@dataclass
class Records:
    """All that one rank leaves."""

    calls: list[Call] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    stalls: list[Stalled] = field(default_factory=list)
    chunks: list[Chunked] = field(default_factory=list)
    doing: list[tuple[int, str]] = field(default_factory=list)  # what the host did, and from when on
    lines: list[tuple[int, str]] = field(default_factory=list)  # in which line of the script, and from when on
    traced: tuple[int, int] = (UNKNOWN, UNKNOWN)  # when the profiler began to record, and when it had stopped
    counted: tuple[int, int] = (UNKNOWN, UNKNOWN)  # the first and the last correlation id that it saw


STEP = "ProfilerStep"
SETTLED = 2  # steps after the last traced one that still count as profiled

CLASSES = {True: "_MultiProcessingDataLoaderIter", False: "_SingleProcessDataLoaderIter"}


class Recorder:
    """What is noted of one process."""

    def __init__(self, process: Process, window: Window | None) -> None:
        self._process = process
        self._window = window
        self._own = window is None or window.own
        self._row: Row | None = None
        self._phases: list[tuple[str, int]] = []
        self._chunks: list[Chunked] = []
        self._in_step = False  # a range of the profiler's for the step is open

    # -- steps

    def boundary(self, step: Step) -> Iterator[Work]:
        """End a step, and begin the next. One in which nothing was done but fetching goes on."""
        process = self._process
        if self._own and self._row is not None and self._row.kind == "other":
            self._row.kind = step.kind
            return
        yield from self._end()
        number = 0 if self._row is None else self._row.number + 1
        self._row = row = Row(number, process.step, step.kind, int(step.first), process.now)
        process.records.rows.append(row)
        if self._window is not None:
            yield from self._advance(self._window, row)

    def finish(self) -> Iterator[Work]:
        """End the last step."""
        yield from self._end()
        if self._window is not None and self._process.tracing:
            yield from self._close(self._window)

    def _end(self) -> Iterator[Work]:
        process, row = self._process, self._row
        if row is None:
            return
        if self._own:
            yield from process.record()
            row.ended = process.stream(COMPUTE).last
        row.end = process.now

    def _advance(self, window: Window, row: Row) -> Iterator[Work]:
        process, number = self._process, row.number
        if self._in_step:
            process.leave(STEP)
            self._in_step = False
        last = window.first + window.active - 1
        row.profiled = int(window.first - window.warmup <= number <= last + SETTLED)
        if number == window.first - window.warmup:
            process.spend(window.prepare, what="profiler")
        if number == window.first:
            yield from process.synchronize("device", COMPUTE)
            process.spend(window.start, what="profiler")
            process.records.traced = (process.now, -1)
            process.records.counted = (process.correlation, -1)
            process.tracing = True
        if number == last + 1:
            yield from self._close(window)
        if process.tracing:
            process.enter(f"{STEP}#{number}", "user_annotation")
            self._in_step = True

    def _close(self, window: Window) -> Iterator[Work]:
        process = self._process
        if self._in_step:
            process.leave(STEP)
            self._in_step = False
        yield from process.synchronize("device", COMPUTE)
        process.leave(OPTIMIZER)
        process.tracing = False
        process.records.counted = (process.records.counted[0], process.correlation)
        process.records.traced = (process.records.traced[0], process.now)
        process.spend(window.stop + window.export, what="profiler")
        process.slowed = window.after

    # -- within a step

    def phase(self, name: str) -> None:
        """Enter a phase, or leave it (""); "replay": a graph that holds a whole step follows."""
        process, row = self._process, self._row
        assert row is not None
        if not name:
            name, began = self._phases.pop()
            setattr(row, name, getattr(row, name) + process.now - began)
            if self._own:
                process.leave()
            return
        if name in ("forward", "replay") and row.lead < 0 and self._own:
            row.lead = process.now - row.start - row.fetch
        if name == "replay":  # counts as what the graph holds
            row.forwards, row.backwards, row.optimizer_steps = 1, row.backwards + 1, row.optimizer_steps + 1
            return
        row.forwards += name == "forward"
        row.backwards += name == "backward"
        row.optimizer_steps += name == "optimizer"
        self._phases.append((name, process.now))
        if self._own:
            process.enter(f"dlprof::{name}", "user_annotation")

    def fetch(self, loader: int) -> None:
        """Take a batch from a loader."""
        process, row = self._process, self._row
        assert row is not None
        queue, began = None if loader == HIDDEN else process.queues[loader], process.now
        process.do("fetch")
        if self._own:
            process.enter("dlprof::fetch", "user_annotation")
        name = CLASSES[queue is None or queue.loader.workers > 0]
        process.enter(f"enumerate(DataLoader)#{name}.__next__", "user_annotation")
        process.now = process.now + HIDDEN_NS if queue is None else queue.next(process.now, row.number)
        process.leave()
        if self._own:
            process.leave()
        row.fetch += process.now - began
        row.fetches += 1

    def stall(self, it: Stall) -> None:
        """Hold the thread up, and note it."""
        process, row = self._process, self._row
        assert row is not None
        began = process.now
        process.spend(it.ns, it.key, it.kind)
        phase = self._phases[-1][0] if self._phases else "rest"
        process.records.stalls.append(
            Stalled(it.kind, began, process.now, row.number, phase, it.path, it.reason)
        )  # fmt: skip

    def chunk(self, it: Chunk) -> Iterator[Work]:
        """Begin a chunk of a pipeline, or end the innermost one ("")."""
        process, row = self._process, self._row
        assert row is not None
        began = process.now
        yield from process.record()
        event = process.stream(COMPUTE).last
        assert event is not None
        if it.action:
            chunk = Chunked(row.number, it.action, it.stage, it.microbatch, began, event)
            self._chunks.append(chunk)
        else:
            process.records.chunks.append(replace(self._chunks.pop(), ended=event))
