"""Whose clock the times of a log are of."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime, timezone

import pytest

from dlprof.analysis.machine.log_clocks import _clock

SECOND, HOUR = 10**9, 3600 * 10**9
RUN = int(datetime(2026, 3, 4, 5, 6, tzinfo=timezone.utc).timestamp()) * SECOND
SPAN = (RUN, RUN + 60 * SECOND)
LOG = (RUN - 20 * SECOND, RUN + 90 * SECOND)  # around the run


@pytest.fixture(autouse=True)
def _zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def test_a_log_that_says_its_zone_is_not_moved() -> None:
    assert _clock("zone", *LOG, SPAN)[:2] == (0, "zone")


def test_a_log_without_zone_that_lies_with_the_run_is_of_this_machines() -> None:
    assert _clock("local", *LOG, SPAN)[:2] == (0, "machine")


@pytest.mark.parametrize("hours", [-8, 1, 5.5, 9])
def test_another_zone_is_found_where_only_one_fits(hours: float) -> None:
    ahead = int(hours * HOUR)
    assert _clock("local", LOG[0] + ahead, LOG[1] + ahead, SPAN)[:2] == (-ahead, "fitted")


def test_where_none_fits_it_stays_and_says_so() -> None:
    clock = _clock("local", LOG[0] + 7 * 60 * SECOND, LOG[1] + 7 * 60 * SECOND, SPAN)
    assert clock[:2] == (0, "machine")
    assert "do not lie" in clock.words


def test_a_long_log_fits_in_many_zones_and_is_not_guessed() -> None:
    assert _clock("local", RUN + 20 * HOUR, RUN + 44 * HOUR, SPAN).how == "machine"


def test_times_of_day_are_put_on_the_runs_day() -> None:
    midnight = RUN // (24 * HOUR) * 24 * HOUR
    begin, end = LOG[0] - midnight, LOG[1] - midnight
    assert _clock("day", begin, end, SPAN)[:2] == (midnight, "fitted")
    assert _clock("day", begin + 2 * HOUR, end + 2 * HOUR, SPAN)[:2] == (midnight - 2 * HOUR, "fitted")
    assert _clock("day", begin, end, (0, 0)).how == "none"


def test_a_log_without_times_has_none() -> None:
    assert _clock("none", 0, 5, SPAN).how == "none"
