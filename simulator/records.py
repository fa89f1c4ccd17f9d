"""What a simulated rank leaves: the calls that a profiler notes, and what dlprof's recorder notes of every step.

All times are nanoseconds on the one true clock; −1: not known.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from simulator.program import Args
from simulator.streams import UNKNOWN, Work


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
