"""What there is to save from: a rank's own parts of the step, and its waiting for those that have more of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.analysis.step.breakdown import breakdown
from dlprof.analysis.step.headroom import room
from tests.fixtures import traces
from tests.fixtures.runs import CPU, MS, asked, foreign, light, measured, recorded, stall


def test_a_ranks_own_time_is_the_room(tmp_path: Path) -> None:
    run = measured(foreign(tmp_path, traces.training(world_size=1)), breakdown)
    # Of each step of 990 µs: 550 computing, 120 in a reduction that nothing hides, 25 copying, 100 waiting for data.
    assert asked(run, room, ["copy"]) == 25_000
    assert asked(run, room, ["computation", "copy"]) == 575_000
    assert asked(run, room, ["communication"]) == 120_000
    assert asked(run, room, ["checkpoint"]) == 0
    assert asked(run, room, []) == 0


def test_waiting_for_another_ranks_part_is_room_as_far_as_there_is_waiting(tmp_path: Path) -> None:
    quiet = traces.training(rank=0)
    busy = traces.training(rank=1)
    for event in busy["traceEvents"]:
        if event["name"].startswith("enumerate(DataLoader)"):
            event["dur"] = 5.0  # µs, of 100
    run = measured(foreign(tmp_path, quiet, busy), breakdown)
    # Rank 0 waits 100 µs for data itself. Rank 1's 5 µs may be waited for on rank 0, in its reduction of 120 µs.
    assert asked(run, room, ["input_wait"]) == 105_000


def test_ranks_that_stand_still_in_turn_have_the_sum(tmp_path: Path) -> None:
    rows = [light(n, 100 * MS, first=int(n == 0)) for n in range(30)]
    pauses = [[stall("garbage_collection", n, 20 * MS) for n in range(r, 30, 2)] for r in (0, 1)]
    path = recorded(tmp_path, (None, rows, CPU), (None, rows, CPU), stalls=pauses)
    run = measured(path, breakdown)
    # Each has 10 ms a step of its own, and waits 10 ms for the other's; without a trace that is among the other time.
    assert asked(run, room, ["garbage_collection"]) == pytest.approx(20 * MS, rel=0.1)
