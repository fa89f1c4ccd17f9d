"""The processes of a job: each executes instructions, launches work, waits where CUDA waits; and how they run together.

Each rank goes as far as it gets, in turn, until all have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from simulator.hardware import A100, PAGEABLE_SHARE, PINNED_COPY_START, QUEUE_LENGTH, Device, Host, Link
from simulator.loading import Loader, Queue
from simulator.program import (
    COMPUTE,
    MAIN,
    Allocate,
    Args,
    Begin,
    Belongs,
    Chunk,
    Copy,
    End,
    Exchange,
    Fetch,
    Graph,
    HostFunction,
    Instruction,
    Line,
    Operator,
    Phase,
    Record,
    Spend,
    Stall,
    Step,
    Synchronize,
    Thread,
    WaitFor,
)
from simulator.recorder import STEP, Call, Recorder, Records, Window
from simulator.streams import MARKERS, UNKNOWN, Meeting, Stream, Work

KEYS = 251  # different draws of jitter in a step

VIEWS = ("aten::view", "aten::as_strided", "aten::empty", "aten::empty_strided", "aten::transpose")

# Up to so many bytes a copy from pageable memory is handed over without waiting (CUDA C++ Programming Guide,
# "Asynchronous Concurrent Execution": copies of 64 KB or less from host to device).
SMALL_COPY = 65_536


class Process:
    """One rank. run() executes its steps, and yields the work that it waits for while its end is not known."""

    def __init__(
        self,
        rank: int,
        host: Host,
        device: Device,
        meet: Callable[[int, Exchange, Work], Meeting],
        queues: Sequence[Queue] = (),
        seed: int = 0,
        speed: tuple[float, float] = (1.0, 1.0),  # factors of the host's and the device's times
        window: Window | None = None,
    ) -> None:
        self.rank, self.host, self.device = rank, host, device
        self.queues = queues
        self.streams: dict[int, Stream] = {}
        self.records = Records(doing=[(0, "python")])
        self.now = 0
        self.tracing = False
        self.slowed = 1.0  # factor of all calls
        self.thread = MAIN
        self.belongs = ("", "")
        self.step = 0
        self.correlation = 0  # of the last call
        self.recorder = Recorder(self, window)
        self._meet, self._seed, self._speed = meet, seed, speed
        self._events: dict[str, Work] = {}
        # Ranges that are open: category, name, args, thread, start, external id.
        self._open: list[tuple[str, str, Args | None, int, int, int]] = []
        self._external = 0
        self._window = window or Window()
        self._hosts: list[float] = []
        self._devices: list[float] = []

    def run(self, steps: int, step: Callable[[int, int], Step]) -> Iterator[Work]:
        """Execute so many steps; `step` gives each rank's and number's."""
        for number in range(steps):
            made = step(self.rank, number)
            self.step = number
            self._draw(number)
            yield from self.recorder.boundary(made)
            for instruction in made.program:
                yield from self._execute(instruction)
            if made.last:
                for queue in self.queues[:1]:
                    self.now = queue.finish(self.now, number)
        yield from self.recorder.finish()

    # -- time

    def _draw(self, number: int) -> None:
        """Draw the jitter of a step: the same for the same rank and step of any job with this seed."""
        z = np.random.default_rng((self._seed, self.rank, number)).standard_normal(2 * KEYS + 2)
        for scale, speed, at, name in (
            (self.host, self._speed[0], 0, "_hosts"),
            (self.device, self._speed[1], 1, "_devices"),
        ):
            own = z[2 + at * KEYS : 2 + (at + 1) * KEYS] * scale.jitter - scale.jitter**2 / 2
            setattr(self, name, (np.exp(own + scale.step_jitter * z[at]) * speed).tolist())

    def spend(self, ns: int, key: int = 0, what: str = "launch") -> None:
        """Let the host work for so long, before jitter."""
        self.do(what)
        self.now += int(ns * self._hosts[key % KEYS] * self.slowed)

    def do(self, what: str) -> None:
        """Note what the host does from now on."""
        if self.records.doing[-1][1] != what:
            self.records.doing.append((self.now, what))

    def wait(self, work: Work | None, what: str = "sync") -> Iterator[Work]:
        """Wait on the host until a piece of work has ended."""
        if work is None:
            return
        self.do(what)
        while work.end == UNKNOWN:
            yield work
        if work.end > self.now:
            self.now = work.end + self.host.wake

    # -- what the profiler sees

    def enter(self, name: str, category: str = "cpu_op", args: Args | None = None) -> None:
        """Open a range, while the profiler records."""
        if self.tracing:
            self._external += 1
            args = args and {**args, "step": self.step}
            self.now += self._profiling(category, name) // 2
            self._open.append((category, name, args, self.thread, self.now, self._external))

    def leave(self, named: str = "") -> None:
        """Close the innermost range, or of those whose names begin so; where there is none, nothing."""
        at = next((n for n in reversed(range(len(self._open))) if self._open[n][1].startswith(named)), -1)
        if self.tracing and at >= 0:
            category, name, args, thread, start, external = self._open.pop(at)
            self.records.calls.append(Call(category, name, thread, start, self.now, -1, external, args))
            self.now += self._profiling(category, name) // 2

    def _profiling(self, category: str, name: str) -> int:
        """Return what noting a range costs, half of it before its beginning is read and half behind its end.

        That of a step is the profiler's own: one ends where the next begins.
        """
        if name.startswith(STEP):
            return 0
        return self._window.module if category == "module" else self._window.event

    def called(self, name: str, began: int, work: Work | None = None) -> None:
        """Note a call of the runtime that ends now."""
        self.correlation += 1
        mine = [o for o in self._open if o[3] == self.thread]
        # The profiler numbers a call's operator, not the annotations within it; NCCL's own counts as one.
        external = next((o[5] for o in reversed(mine) if o[0] != "user_annotation" or o[1].startswith("nccl:")), 0)
        if work is not None:
            work.correlation, work.external, work.thread = self.correlation, external, self.thread
        if self.tracing:
            if work is not None:
                work.annotation = next((o[5] for o in reversed(mine) if o[0] == "user_annotation"), 0)
            self.now += self._window.event
            call = Call("cuda_runtime", name, self.thread, began, self.now, self.correlation, external)
            self.records.calls.append(call)

    # -- launching

    def stream(self, number: int) -> Stream:
        """Return a stream by its number."""
        if number not in self.streams:
            self.streams[number] = Stream()
        return self.streams[number]

    def launch(self, call: str, cost: int, key: int, work: Work) -> Iterator[Work]:
        """Make a launching call, which blocks while the stream's queue is full, and put its work into its stream."""
        stream, began = self.stream(work.stream), self.now
        if len(stream.queued) >= QUEUE_LENGTH and work.kind not in MARKERS:
            head = stream.queued[-QUEUE_LENGTH]
            if head.end == UNKNOWN or head.end > self.now:
                self.do("queue_full")
                while head.end == UNKNOWN:
                    yield head
                self.now = max(self.now, head.end)
        self.spend(cost, key)
        self.called(call, began, work)
        work.called, work.arrive = began, self.now + self.device.launch_latency
        stream.add(work)

    def work(self, kind: str, name: str, ns: int, key: int, stream: int, size: int = 0) -> Work:
        """Return work for a stream, with its length as it will be."""
        gap = self.device.kernel_gap + (self._window.kernel if self.tracing else 0)
        return Work(
            kind,
            name,
            stream,
            self.step,
            0,
            0,
            int(ns * self._devices[key % KEYS]),
            size=size,
            gap=gap,
            belongs=self.belongs,
        )

    def record(self, stream: int = COMPUTE) -> Iterator[Work]:
        """Record an event in a stream; the last thing in the stream is the event."""
        work = Work("event", "", stream, self.step, 0, 0)
        yield from self.launch("cudaEventRecord", self.host.event_call, 1, work)

    def synchronize(self, scope: str, stream: int, event: str = "") -> Iterator[Work]:
        """Wait for a stream, an event or the whole device."""
        began = self.now
        if scope == "device":
            waited = [s.last for s in self.streams.values()]
        else:
            waited = [self._events.get(event) if scope == "event" else self.stream(stream).last]
        for work in waited:
            yield from self.wait(work)
        self.spend(self.host.sync_call, 2, "sync")
        names = {"device": "cudaDeviceSynchronize", "stream": "cudaStreamSynchronize", "event": "cudaEventSynchronize"}
        self.called(names[scope], began)

    # -- instructions

    def _execute(self, it: Instruction) -> Iterator[Work]:
        if isinstance(it, Operator):
            yield from self._operator(it)
        elif isinstance(it, Begin):
            self.enter(it.name, it.category, it.args)
            self.spend(it.ns, it.key)
        elif isinstance(it, End):
            self.spend(it.ns, it.key)
            self.leave(it.name)
        elif isinstance(it, Spend):
            self.spend(it.ns, it.key, it.what)
        elif isinstance(it, Record):
            yield from self.record(it.stream)
            last = self.stream(it.stream).last
            assert last is not None
            self._events[it.event] = last
        elif isinstance(it, WaitFor):
            event = self._events.get(it.event)
            waiting = Work("wait", "", it.stream, self.step, 0, 0, event=event, gap=self.device.wait_latency)
            yield from self.launch("cudaStreamWaitEvent", self.host.wait_call, 4, waiting)
        elif isinstance(it, Synchronize):
            yield from self.synchronize(it.scope, it.stream, it.event)
        elif isinstance(it, Copy):
            yield from self._copy(it)
        elif isinstance(it, Exchange):
            yield from self._exchange(it)
        elif isinstance(it, Graph):
            yield from self._graph(it)
        elif isinstance(it, HostFunction):
            work = self.work("host_function", "", it.ns, it.key, it.stream)
            yield from self.launch("cudaLaunchHostFunc", self.host.launch, it.key, work)
        elif isinstance(it, Allocate):
            yield from self._allocate(it)
        elif isinstance(it, Fetch):
            self.recorder.fetch(it.loader)
        elif isinstance(it, Stall):
            if it.blocks:
                yield from self.synchronize("device", COMPUTE)
            self.recorder.stall(it)
        elif isinstance(it, Thread):
            self.thread = it.number
        elif isinstance(it, Phase):
            self.recorder.phase(it.name)
        elif isinstance(it, Belongs):
            self.belongs = (it.path, it.part)
        elif isinstance(it, Line):
            self.records.lines.append((self.now, it.name))
        elif isinstance(it, Chunk):
            yield from self.recorder.chunk(it)

    def _operator(self, op: Operator) -> Iterator[Work]:
        for name in op.names:
            self.enter(name, "cpu_op", op.args)
        self.spend(op.before, op.key)
        if self.tracing:
            for name in VIEWS[: op.views]:
                self.enter(name)
                self.leave()
        for n, kernel in enumerate(op.kernels, op.key):
            if kernel.kind in ("kernel", "communication"):
                call, cost = op.call, self.host.launch
            elif kernel.kind == "set":
                call, cost = "cudaMemsetAsync", self.host.set_call
            else:
                call, cost = "cudaMemcpyAsync", self.host.copy_call
            work = self.work(kernel.kind, kernel.name, kernel.ns, n, op.stream, kernel.size)
            yield from self.launch(call, cost, n, work)
        self.spend(op.after, op.key + 3)
        for _ in op.names:
            self.leave()

    def _copy(self, copy: Copy) -> Iterator[Work]:
        pageable = copy.memory == "pageable" and copy.direction != "DtoD"
        rate = self.device.host_link * (PAGEABLE_SHARE if pageable else 1.0)
        if copy.direction == "DtoD":
            rate = self.device.bandwidth * self.device.memory_efficiency / 2
        side = copy.memory.capitalize()
        kinds = {"HtoD": f"{side} -> Device", "DtoH": f"Device -> {side}", "DtoD": "Device -> Device"}
        name = f"Memcpy {copy.direction} ({kinds[copy.direction]})"
        took = PINNED_COPY_START + round(copy.size / rate * 1e9)
        work = self.work("copy", name, took, copy.key, copy.stream, copy.size)
        began, stages = self.now, pageable and copy.direction == "HtoD" and copy.size > SMALL_COPY
        if stages:
            yield from self.wait(self.stream(copy.stream).last, "pageable_copy")
        if not (stages or (pageable and copy.direction == "DtoH")):
            yield from self.launch("cudaMemcpyAsync", self.host.copy_call, copy.key, work)
            return
        self.spend(self.host.copy_call, copy.key, "pageable_copy")
        work.called, work.arrive = began, self.now
        self.stream(copy.stream).add(work)
        yield from self.wait(work, "pageable_copy" if stages else "sync")
        self.called("cudaMemcpyAsync", began, work)

    def _exchange(self, it: Exchange) -> Iterator[Work]:
        work = self.work("communication", it.kind, 0, it.key, it.stream, it.size)
        work.exchange = it
        work.meeting = self._meet(self.rank, it, work)
        yield from self.launch("cudaLaunchKernelExC", self.host.launch, it.key, work)

    def _graph(self, it: Graph) -> Iterator[Work]:
        at, parts = 0, []
        for n, node in enumerate(it.nodes, it.key):
            took = int(node.ns * self._devices[n % KEYS])
            parts.append((at, took, node))
            at += took + self.device.graph_gap
        work = self.work("graph", "", 0, it.key, it.stream)
        work.parts, work.dur = tuple(parts), at - self.device.graph_gap
        yield from self.launch("cudaGraphLaunch", self.host.graph_launch, it.key, work)

    def _allocate(self, it: Allocate) -> Iterator[Work]:
        began = self.now
        if it.waits:
            for stream in tuple(self.streams.values()):
                yield from self.wait(stream.last, "allocator")
        self.spend(it.ns, it.key, "allocator")
        self.called(it.call, began)


# How much longer a collective takes from time to time: standard deviation of the logarithm.
LINK_JITTER = 0.03
# Ranks notice the end of a collective within so many ns of each other (1 to 7 µs in the DLRM traces of 8 V100).
END_SPREAD = 3_000

_DRAWS = 1_021


@dataclass(frozen=True)
class Setup:
    """A job for the machine. Of what differs between ranks, one entry a rank, or one for all."""

    step: Callable[[int, int], Step]  # what a rank does in a step
    ranks: int = 1
    steps: int = 50
    device: Device = A100
    host: Host = field(default_factory=Host)
    loaders: Sequence[Loader] = ()  # the training loader of each rank
    groups: Mapping[str, tuple[tuple[int, ...], Link]] = field(default_factory=dict)
    speeds: Sequence[tuple[float, float]] = ()  # factors of each rank's host and device times
    seed: int = 0
    window: Window | None = None


@dataclass(frozen=True)
class Simulated:
    """What was simulated of one rank."""

    rank: int
    records: Records
    work: Mapping[int, Sequence[Work]]  # of each stream, in its order
    queue: Queue | None


@dataclass(frozen=True)
class Simulation:
    """A whole job, simulated."""

    ranks: Sequence[Simulated]
    meetings: Sequence[Meeting]


class Deadlock(Exception):  # noqa: N818 - what a job of such a program would do
    """No rank can go on: each waits for another."""


def simulate(setup: Setup) -> Simulation:
    """Run a job; raises Deadlock where its ranks wait for each other forever."""
    meetings = _Meetings(setup)
    processes = [_process(setup, rank, meetings) for rank in range(setup.ranks)]
    running = {p.rank: p.run(setup.steps, setup.step) for p in processes}
    waits: dict[int, Work] = {}
    while running:
        moved = False
        for rank, program in tuple(running.items()):
            if rank in waits and waits[rank].end == UNKNOWN:
                continue
            moved = True
            blocked = next(program, None)
            if blocked is None:
                del running[rank]
            else:
                waits[rank] = blocked
        if not moved:
            raise Deadlock(f"ranks {sorted(running)} wait for each other")
    return Simulation(
        [
            Simulated(p.rank, p.records, {n: s.work for n, s in p.streams.items()}, p.queues[0] if p.queues else None)
            for p in processes
        ],
        meetings.all,
    )


def _process(setup: Setup, rank: int, meetings: _Meetings) -> Process:
    queues: tuple[Queue, ...] = ()
    if setup.loaders:
        loader = setup.loaders[rank % len(setup.loaders)]
        z = np.random.default_rng((setup.seed, rank, 1 << 30)).standard_normal(_DRAWS)
        queues = (Queue(loader, np.exp(loader.jitter * z - loader.jitter**2 / 2).tolist(), 4_000 + 1_000 * rank),)
    speed = setup.speeds[rank % len(setup.speeds)] if setup.speeds else (1.0, 1.0)
    return Process(rank, setup.host, setup.device, meetings.meet, queues, setup.seed, speed, setup.window)


class _Meetings:
    """Brings the ranks' parts of a collective together: the n-th of a group on one rank is the n-th on every other."""

    def __init__(self, setup: Setup) -> None:
        self.all: list[Meeting] = []
        self._groups = setup.groups
        self._open: dict[tuple[str, int], Meeting] = {}
        self._count: dict[tuple[str, int], int] = {}
        rng = np.random.default_rng((setup.seed, 1 << 31))
        self._jitter = np.exp(LINK_JITTER * rng.standard_normal(_DRAWS)).tolist()
        self._late = rng.integers(0, END_SPREAD, (_DRAWS, setup.ranks)).tolist()

    def meet(self, rank: int, exchange: Exchange, work: Work) -> Meeting:
        """Let a rank join its next collective of a group."""
        ranks, link = self._groups[exchange.group]
        number = self._count.get((exchange.group, rank), 0)
        self._count[exchange.group, rank] = number + 1
        meeting = self._open.get((exchange.group, number))
        if meeting is None:
            draw = (number * 7 + len(exchange.group)) % _DRAWS
            late = tuple(self._late[draw][: len(ranks)])
            meeting = Meeting(
                exchange.group, number, exchange.kind, exchange.size, ranks, self._jitter[draw], link, late
            )  # fmt: skip
            self._open[exchange.group, number] = meeting
            self.all.append(meeting)
        meeting.work[rank] = work
        if len(meeting.work) == len(ranks):
            del self._open[exchange.group, number]
        return meeting
