"""Collectives of GPUs matched over ranks whose hosts run ahead differently, as several versions of NCCL write them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.communication.collectives import collectives, exposed
from dlprof.analysis.communication.matching import matched
from dlprof.analysis.communication.waits import bare_waits, waits
from dlprof.analysis.engine import Measured, by_rank
from dlprof.analysis.step.breakdown import breakdown
from dlprof.analysis.timeline.steps import step_means, step_series
from tests.fixtures import runs, traces
from tests.fixtures.runs import MS

NEEDS = (bare_waits, breakdown, collectives, exposed, matched, step_means, step_series, waits)
PERIOD = 10 * MS
TRANSFER = 2 * MS
LATE = 3 * MS
HOST_LAG = (35 * MS, 4 * MS)  # rank 0's host is three steps further ahead than rank 1's

Make = Callable[[int, int, int], traces.Event]  # begin, duration, correlation → the collective's kernel


def reduces(begin: int, dur: int, correlation: int) -> traces.Event:
    """Make an all-reduce as torch before 2.4 writes it: nothing but a kernel's name."""
    return traces.kernel("ncclKernel_AllReduce_RING_LL_Sum_half(ncclWorkElem)", begin, dur, correlation, stream=21)


def exchanges(begin: int, dur: int, correlation: int) -> traces.Event:
    """Make an all-to-all as NCCL 2.1x writes it."""
    return traces.kernel("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", begin, dur, correlation, stream=21)


def generic(begin: int, dur: int, correlation: int) -> traces.Event:
    """Make a collective as RCCL writes it: its kernel does not name its kind."""
    return traces.kernel("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", begin, dur, correlation, stream=2)


def job(make: Make | None = None, steps: Sequence[range] = (range(4), range(4))) -> list[dict[str, Any]]:
    """Make two ranks that compute 5 ms a step, rank 1 for 8 ms, and then exchange for 2 ms together.

    `make`: how the kernel is written; by default with torch's metadata and number. `steps`: those in a rank's window,
    which its profiler numbers from 0.
    """
    made = []
    for rank in (0, 1):
        busy = 5 * MS + rank * LATE
        events: list[Any] = []
        for n in steps[rank]:
            host = n * PERIOD - HOST_LAG[rank]
            begin, end = n * PERIOD + busy, n * PERIOD + 5 * MS + LATE + TRANSFER
            events += [
                traces.step(n - steps[rank][0], host, PERIOD),
                traces.launched("gemm", host + MS, n * PERIOD, busy, 100 + 2 * n),
                traces.call("cudaLaunchKernelExC", host + 2 * MS, 5_000, 101 + 2 * n),
            ]
            if make is not None:
                events.append(make(begin, end - begin, 101 + 2 * n))
                continue
            told = traces.collective(begin, end - begin, 1_000, correlation=101 + 2 * n)
            told["args"] |= {"Seq": 40 + 2 * n, "Comms Id": "77"}
            # A second one follows, to which both come at once.
            after = traces.collective(end, MS, 1_000, correlation=101 + 2 * n)
            after["args"] |= {"Seq": 41 + 2 * n, "Comms Id": "77"}
            events += [told, after]
        made.append(traces.trace(*events, rank=rank))
    return made


def run_of(folder: Path, made: list[dict[str, Any]]) -> Measured:
    return runs.measured(runs.foreign(folder, *made), *NEEDS)


@pytest.mark.parametrize("make", [None, reduces, exchanges, generic])
def test_the_last_to_start_is_waited_for_however_far_its_host_is_behind(tmp_path: Path, make: Make | None) -> None:
    run = run_of(tmp_path, job(make))
    frame = run.frame(matched)
    assert len(frame) == (6 if make else 12)
    assert by_rank(frame, "wait_ns") == {0: 3 * LATE, 1: 0}
    assert set(frame["rank"][frame["wait_ns"] > 0]) == {0}
    assert by_rank(run.frame(bare_waits), "waited_ns") == {0: 3 * LATE, 1: 0}


def test_windows_of_other_steps_share_what_is_numbered_alike(tmp_path: Path) -> None:
    frame = run_of(tmp_path, job(steps=(range(5), range(1, 6)))).frame(matched)
    assert sorted(frame["sequence"]) == [44, 44, 45, 45, 46, 46, 47, 47, 48, 48, 49, 49]
    assert by_rank(frame, "wait_ns") == {0: 3 * LATE, 1: 0}


def test_what_a_rank_did_not_trace_shifts_no_other_by_one(tmp_path: Path) -> None:
    made = job()
    # Rank 1's profiler missed the first of a step: by order, its second would meet rank 0's first.
    lost = next(e for e in made[1]["traceEvents"] if e["args"].get("Seq") == 42)
    made[1]["traceEvents"].remove(lost)
    frame = run_of(tmp_path, made).frame(matched)
    assert sorted(frame["sequence"]) == [43, 43, 44, 44, 45, 45, 46, 46, 47, 47]
    assert by_rank(frame, "wait_ns") == {0: 2 * LATE, 1: 0}


def test_groups_that_are_numbered_alike_are_told_apart(tmp_path: Path) -> None:
    made = job()
    for rank, trace in enumerate(made):
        for n in range(4):
            # A second group's exchange of the same number; here rank 0 is the last to come.
            begin = n * PERIOD + 10 * MS + (1 - rank) * 500_000
            other = traces.collective(begin, n * PERIOD + 11 * MS - begin, 1_000, group="1", correlation=900 + n)
            other["args"] |= {"Seq": 40 + 2 * n, "Comms Id": "78"}
            call = traces.call("cudaLaunchKernelExC", n * PERIOD - HOST_LAG[rank] + 3 * MS, 5_000, 900 + n)
            trace["traceEvents"] += [call, other]
    frame = run_of(tmp_path, made).frame(matched)
    assert by_rank(frame[frame["group"] == "1"], "wait_ns") == {0: 0, 1: 3 * 500_000}
    assert by_rank(frame[frame["group"] == "0"], "wait_ns") == {0: 3 * LATE, 1: 0}
