"""What is proposed for a loader: settings with their values, and the step that each number of workers would give."""

from typing import Any

import pytest

from dlprof.analysis.input.fetch_replay import PINNING, Forecast
from dlprof.analysis.input.input_waits import FasterLoader, Plan, Starving
from dlprof.analysis.input.loader_advice import changes, forecasts_of, predicted_steps
from dlprof.result import Setting
from tests.fixtures.runs import MS

# Two workers give 40 ms a step, one 80; four give no more than three.
FORECASTS = tuple(Forecast(n, step * MS, (step - 20) * MS) for n, step in ((1, 80), (1, 80), (2, 40), (3, 30), (4, 30)))
PLAN = Plan(FORECASTS, FORECASTS[3], 50 * MS)
HELPS = FasterLoader(50 * MS, PLAN, workers_help=True)


def starving(workers: int | None, step: int, wait: int, cores: int = 16, **loader: Any) -> Starving:
    return Starving(0, wait * MS, step * MS, workers, loader, cores, (0,), (), -1, {})


@pytest.mark.parametrize(
    ("workers", "cores", "settings"),
    [
        (None, 16, [("persistent_workers", None, True)]),
        # A batch is made in 80 ms and needed every 20: four workers; or what the cores allow, less the loop's own.
        (0, 16, [("num_workers", 0, 4), ("persistent_workers", False, True)]),
        (0, 3, [("num_workers", 0, 2), ("persistent_workers", False, True)]),
        (2, 16, [("num_workers", 2, 10)]),
        (2, 4, []),
    ],
)
def test_workers_that_keep_up_are_proposed_as_far_as_there_are_cores(
    workers: int | None, cores: int, settings: list[tuple[object, ...]]
) -> None:
    made = list(changes(starving(workers, 100, 80, cores), FasterLoader(80 * MS)))
    assert [(s.name, s.now, s.to) for c in made for s in c.settings] == settings


def test_the_planned_workers_are_proposed_with_what_is_left_to_wait_for() -> None:
    made = list(changes(starving(1, 80, 60), HELPS))
    assert [c.settings for c in made] == [(Setting("num_workers", 1, 3),), ()]
    assert "10.0 ms" in made[1].text
    # Three workers make six batches ahead; each step of 20 ms uses up one, and gets two thirds of one back.
    assert "(20.0 ms for some 18 steps at first, from what is made ahead)" in made[0].text


def test_one_thread_that_pins_all_batches_is_not_helped_by_workers() -> None:
    as_now = Forecast(12, 57 * MS, 47 * MS)
    made = list(changes(starving(12, 57, 47), FasterLoader(40 * MS, Plan((as_now,), as_now, 0.0), part=PINNING)))
    assert [c.settings for c in made] == [()]
    assert made[0].text.startswith("hand over fewer bytes")
    assert made[0].text.endswith("more workers would not help: one thread pins the batches of all of them")


def test_the_steps_that_are_shown_are_those_that_are_forecast() -> None:
    assert [(f.value, f.step_ns) for f in forecasts_of(80.0 * MS, PLAN)] == [
        ("1", 80 * MS),
        ("2", 40 * MS),
        ("3", 30 * MS),
        ("4", 30 * MS),
    ]
    shown = predicted_steps(starving(1, 80, 60), HELPS, PLAN)
    assert [row[0] for row in shown.rows] == ["1 (is)", "2", "3 (proposed)", "4"]
    assert [row[1] for row in shown.rows] == [80 * MS, 40 * MS, 30 * MS, 30 * MS]
    cheaper = predicted_steps(starving(1, 80, 60), FasterLoader(60 * MS, PLAN), PLAN)
    assert cheaper.rows[-1][:2] == ("samples that cost nothing", 20 * MS)


@pytest.mark.parametrize(("workers", "proposed"), [(2, ["persistent_workers", "prefetch_factor"]), (0, [])])
def test_settings_of_the_queue_are_proposed_where_there_are_workers(workers: int, proposed: list[str]) -> None:
    there = starving(workers, 80, 60, persistent_workers=False, prefetch_factor=1)
    _, *made = changes(there, FasterLoader(60 * MS))
    assert [s.name for c in made for s in c.settings] == proposed
