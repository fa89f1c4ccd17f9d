"""What waiting for other ranks costs: where nothing is computed beside it, once, and with what it lays open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.communication.matching import bare_waits, waits
from dlprof.analysis.engine import by_rank
from dlprof.analysis.step.savings import saving
from tests.fixtures import traces
from tests.fixtures.exchanges import late_by, run_of
from tests.fixtures.runs import MS, asked


def test_waiting_behind_computation_is_not_counted(tmp_path: Path) -> None:
    made = late_by(0, 600_000)
    made[0]["traceEvents"] += [
        traces.kernel("overlap", n * (4 * MS + 600_000) + 2 * MS, 250_000, stream=9) for n in range(3)
    ]
    assert by_rank(run_of(tmp_path, made).frame(waits), "wait_ns") == {0: 3 * 350_000, 1: 0}


def test_of_waits_at_once_the_earliest_has_the_time_that_nothing_is_computed_in(tmp_path: Path) -> None:
    # ms: rank 0 comes at 1 and 2, and computes from 2.5 to 3; rank 1 comes at 4 to the one, and at 5 to the other.
    made = []
    for rank, (computes, begins) in enumerate([((2_500_000, 500_000), (MS, 2 * MS)), ((0, MS), (4 * MS, 5 * MS))]):
        events = [traces.step(0, 0, 8 * MS), traces.kernel("gemm", *computes)]
        events += [
            traces.collective(at, end - at, 1_000, stream=stream)
            for stream, at, end in zip((21, 22), begins, (6 * MS, 7 * MS), strict=True)
        ]
        made.append(traces.trace(*events, rank=rank))
    frame = run_of(tmp_path, made).frame(bare_waits)
    told = frame.sort_values(["rank", "start_ns"])[["rank", "by", "wait_ns", "waited_ns"]]
    assert told.to_numpy().tolist() == [
        [0, 1, 3 * MS, 3 * MS - 500_000],  # from 1 to 4, but for what it computed
        [0, 1, 3 * MS, MS],  # from 2 to 5: what is before 4 is the first one's
        [1, 1, 0, 0],
        [1, 1, 0, 0],
    ]


@pytest.mark.parametrize(
    ("computes", "costs"),
    [
        # It computes while it waits, which would have hidden the first transfer: that lies open, because it is ahead.
        (2 * MS, 1_500_000 + 500_000),
        # It has nothing to compute: the transfer would lie open in any case.
        (MS, MS + 1_500_000),
    ],
)
def test_a_transfer_that_lies_open_for_being_ahead_is_waiting_too(tmp_path: Path, computes: int, costs: int) -> None:
    made = []
    for rank, (ends, ready) in enumerate([(computes, (MS, 2_500_000)), (4 * MS, (2 * MS, 4 * MS))]):
        events: list[Any] = [traces.step(0, 0, 4_500_000), traces.kernel("gemm", 0, ends)]
        for begin, over in zip(ready, (2_500_000, 4_500_000), strict=True):
            events.append(traces.collective(begin, over - begin, 1_000))
        made.append(traces.trace(*events, rank=rank))
    run = run_of(tmp_path, made)
    assert by_rank(run.frame(waits), "wait_ns") == {0: costs, 1: 0}
    assert asked(run, saving, {1: 9 * MS}) == pytest.approx(costs)
