"""Pictures over a run count from when the first thing was, unless its clock is another one."""

from __future__ import annotations

from pathlib import Path

from dlprof.analysis.step.run_clock import began_ns, first_times, step_times
from tests.fixtures import runs
from tests.fixtures.runs import CPU, MS, light, recorded

S = 1_000 * MS
WEEK_NS = 7 * 86_400 * 10**9


def test_the_first_of_what_is_drawn_is_the_beginning() -> None:
    assert began_ns((50, 20), own=30) == 20
    assert began_ns((), own=30) == 30


def test_a_clock_that_is_a_week_off_is_another_one() -> None:
    assert began_ns((30 - WEEK_NS, 25), own=30) == 25


def test_steps_count_from_the_first_of_them(tmp_path: Path) -> None:
    rank = (None, [light(n, 10 * MS) for n in range(4)], CPU)
    run = runs.measured(recorded(tmp_path, rank), step_times)
    assert run.frame(step_times).tolist() == [0, S, 2 * S, 3 * S]
    assert len(run.frame(first_times)) == 1
