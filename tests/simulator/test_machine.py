"""The simulated machine keeps CUDA's rules: small programs take what a calculation by hand says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from simulator.hardware import A100, PAGEABLE_SHARE, PINNED_COPY_START, QUEUE_LENGTH, Host, Link, transfer_ns
from simulator.loading import Loader
from simulator.machine import END_SPREAD, LINK_JITTER, Deadlock, Setup, Simulation, simulate
from simulator.program import (
    COMPUTE,
    SIDE,
    Allocate,
    Copy,
    Exchange,
    Fetch,
    Graph,
    HostFunction,
    Instruction,
    Kernel,
    Operator,
    Record,
    Spend,
    Step,
    Synchronize,
    WaitFor,
)

# The recorder's own event at the end of each step costs nothing here.
HOST = Host(jitter=0.0, step_jitter=0.0, event_call=0)
DEVICE = replace(A100, jitter=0.0, step_jitter=0.0)
GAP, LATENCY = DEVICE.kernel_gap, DEVICE.launch_latency


def kernel(ns: int, before: int = 0, stream: int = COMPUTE) -> Operator:
    return Operator(("aten::mm",), (Kernel("gemm", ns),), 0, before, 0, stream)


def run(*program: Instruction, steps: int = 20, **setup: object) -> Simulation:
    return ranks([program], steps=steps, **setup)


def ranks(programs: Sequence[tuple[Instruction, ...]], steps: int = 20, **setup: object) -> Simulation:
    step: Callable[[int, int], Step] = lambda rank, number: Step(programs[rank])  # noqa: E731, ARG005
    told = {"host": HOST, "device": DEVICE, "ranks": len(programs), "steps": steps} | setup
    return simulate(Setup(step, **told))  # type: ignore[arg-type]


def host_steps(simulation: Simulation, rank: int = 0) -> list[int]:
    rows = simulation.ranks[rank].records.rows
    return [row.end - row.start for row in rows]


def device_steps(simulation: Simulation, rank: int = 0) -> list[int]:
    first: dict[int, int] = {}
    for work in simulation.ranks[rank].work[COMPUTE]:
        if work.kind not in ("event", "wait"):
            first.setdefault(work.step, work.start)
    return [b - a for a, b in pairwise(first.values())]


PINNED = round(24_000_000 / DEVICE.host_link * 1e9) + PINNED_COPY_START
PAGEABLE = round(24_000_000 / (DEVICE.host_link * PAGEABLE_SHARE) * 1e9) + PINNED_COPY_START
WAITED = HOST.launch + LATENCY + 900_000 + HOST.wake
NODES = tuple(Kernel(f"k{n}", 10_000) for n in range(50))


# A step on the device (the last) and on the host (the fifth), each None where it is not the point.
@pytest.mark.parametrize(
    ("program", "device", "host"),
    [
        ([kernel(100_000)] * 30, 30 * (100_000 + GAP), None),
        ([kernel(2_000, before=10_000)] * 30, 30 * (10_000 + HOST.launch), 30 * (10_000 + HOST.launch)),
        (
            *([Spend(300_000), kernel(500_000), Synchronize("stream")], None),
            300_000 + HOST.launch + LATENCY + 500_000 + HOST.wake + HOST.sync_call,
        ),
        ([Spend(300_000), kernel(500_000)], 500_000 + GAP, 300_000 + HOST.launch),
        ([kernel(100_000), HostFunction(400_000), kernel(100_000)], 600_000 + 3 * GAP, None),
        ([Graph(NODES)], 50 * 10_000 + 49 * DEVICE.graph_gap + GAP, None),
        # A pinned or a small copy does not hold the host; a pageable one waits for the stream, and while it is staged.
        ([kernel(900_000), Copy("HtoD", 24_000_000)], 900_000 + PINNED + 2 * GAP, HOST.launch + HOST.copy_call),
        ([kernel(900_000), Copy("HtoD", 64_000, "pageable")], None, HOST.launch + HOST.copy_call),
        (
            *([kernel(900_000), Copy("HtoD", 24_000_000, "pageable")], None),
            pytest.approx(WAITED + HOST.copy_call + PAGEABLE + HOST.wake, abs=5_000),
        ),
        ([kernel(900_000), Copy("DtoH", 4, "pageable")], None, pytest.approx(WAITED + HOST.copy_call, abs=50_000)),
        # Freeing memory waits for the device.
        (
            *([kernel(500_000), Allocate("cudaFree", 100_000, waits=True)], None),
            pytest.approx(600_000, abs=50_000),
        ),
        ([kernel(500_000), Allocate("cudaMalloc", 100_000)], None, HOST.launch + 100_000),
    ],
)
def test_a_step_takes_what_a_calculation_by_hand_says(
    program: list[Instruction], device: int | None, host: int | None
) -> None:
    made = run(*program, steps=12)
    assert device is None or device_steps(made)[-1] == device
    assert host is None or host_steps(made)[4] == host


def test_a_stream_takes_so_many_launches_and_then_blocks() -> None:
    made = run(*[kernel(100_000)] * 100, steps=30)
    works = [w for w in made.ranks[0].work[COMPUTE] if w.kind == "kernel"]
    for number, work in enumerate(works[QUEUE_LENGTH:], QUEUE_LENGTH):
        assert work.arrive >= works[number - QUEUE_LENGTH].end
    late = host_steps(made)
    assert late[2] == 100 * HOST.launch
    assert late[-2] == pytest.approx(100 * (100_000 + GAP), rel=0.01)


def test_streams_run_beside_each_other_and_events_order_them() -> None:
    beside = run(kernel(200_000), kernel(200_000, stream=SIDE))
    ordered = run(kernel(200_000), Record("a"), WaitFor("a", SIDE), kernel(200_000, stream=SIDE))
    first, second = (beside.ranks[0].work[s][0] for s in (COMPUTE, SIDE))
    assert second.start < first.end
    first = ordered.ranks[0].work[COMPUTE][0]
    second = next(w for w in ordered.ranks[0].work[SIDE] if w.kind == "kernel")
    assert second.start == first.end + DEVICE.wait_latency


GROUP = {"0": ((0, 1, 2), Link())}


def test_a_collective_ends_on_all_ranks_when_the_last_has_come_and_the_bytes_are_over() -> None:
    reduce = Exchange("all_reduce", "0", 5_000_000)
    programs = [
        (Spend(slow), kernel(100_000), Record("g"), WaitFor("g", 20), reduce, Record("r", 20), WaitFor("r"))
        for slow in (0, 0, 700_000)
    ]
    made = ranks(programs, groups=GROUP)
    took = transfer_ns("all_reduce", reduce.size, 3, Link())
    for meeting in made.meetings:
        starts = [w.start for w in meeting.work.values()]
        assert meeting.end - max(starts) == pytest.approx(took, rel=5 * LINK_JITTER)
        for work in meeting.work.values():
            assert 0 <= work.end - meeting.end <= END_SPREAD
        assert meeting.last == 2
        assert meeting.wait_ns(2) == 0
    later = made.meetings[-1]
    assert later.wait_ns(0) == pytest.approx(600_000, rel=0.5)
    # All go at the pace of the slowest, which its host holds up.
    assert device_steps(made)[-1] == pytest.approx(700_000 + 100_000 * 0 + 5_000, rel=0.05)


def test_the_alpha_beta_model_is_nccl_tests() -> None:
    link = Link(start=0, hop=0, bandwidth=100e9)
    assert transfer_ns("all_reduce", 10**9, 8, link) == pytest.approx(2 * 7 / 8 * 10**7)
    assert transfer_ns("all_gather", 10**9, 8, link) == pytest.approx(7 / 8 * 10**7)
    assert transfer_ns("send", 10**9, 2, link) == pytest.approx(10**7)


def test_ranks_that_meet_in_another_order_wait_forever() -> None:
    groups = {"a": ((0, 1), Link()), "b": ((0, 1), Link())}
    one, other = Exchange("all_reduce", "a", 10), Exchange("all_reduce", "b", 10)
    with pytest.raises(Deadlock):
        ranks([(one, other, Synchronize("device")), (other, one, Synchronize("device"))], groups=groups)


# -- loaders


def loaded(loader: Loader, compute: int, steps: int = 60) -> float:
    made = run(Fetch(), kernel(compute), Synchronize("stream"), steps=steps, loaders=[loader])
    return sum(host_steps(made)[20:]) / (steps - 20)


# One thread pins what all workers fetch, in the order in which it comes from them.
PINS = Loader(4, 2, fetch=8_000_000, jitter=0.3, receive=10_000, pin=5_000_000)


@pytest.mark.parametrize(
    ("loader", "compute", "pace"),
    [
        (replace(PINS, jitter=0.0), 1_000_000, 5_000_000),  # the thread is the slowest
        (replace(PINS, jitter=0.0), 6_000_000, 6_000_000),  # hidden behind the device
        (replace(PINS, jitter=0.0, fetch=30_000_000), 1_000_000, 7_500_000),  # the workers are
        (
            replace(PINS, jitter=0.0, workers=0, fetch=2_000_000),
            1_000_000,
            8_000_000,
        ),  # the training thread pins itself
    ],
)
def test_batches_come_as_fast_as_the_slowest_of_workers_and_pinning(loader: Loader, compute: int, pace: int) -> None:
    assert loaded(loader, compute, steps=100) == pytest.approx(pace, rel=0.02)
