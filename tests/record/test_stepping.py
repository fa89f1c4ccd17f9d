"""One step's counts and times, what its batches make of the loaders, and the ranges of its phases."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from dlprof.record.loaders import LoaderSeen, Pass
from dlprof.record.stepping import BACKWARD, FETCH, FORWARD, OPTIMIZER, PHASES, Phases, Row, Step, kind_of


class Source:
    """A loader, as far as it can be weakly referred to."""


class Refuses:
    """A driver that notes why it was switched off."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def fail(self, error: Exception) -> None:
        self.failed.append(str(error))


def over(source: Source, seen: LoaderSeen | None = None) -> Pass:
    return Pass(seen or LoaderSeen(weakref.ref(source), {}), 0, 0)


def test_an_ended_step_has_its_cells_in_order_and_the_next_begins_at_its_end() -> None:
    row = Row(7, 100)
    row.parts[:] = [1, 2, 3, 4]
    row.lead_ns = 5
    row.fetches, row.forwards, row.backwards, row.optimizer_steps, row.first, row.profiled = 6, 7, 8, 9, 1, 1
    step = Step._make(row.end(150, "events"))
    assert step == Step(7, 100, 50, 5, 1, 2, 3, 4, 6, 7, 8, 9, 1, 1, "events")
    following = Step._make(row.end(160, None))
    assert following == Step(8, 150, 10, -1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, None)


@pytest.mark.parametrize(
    ("forwards", "backwards", "optimizer_steps", "kind"),
    [(1, 1, 1, "train"), (0, 1, 0, "train"), (0, 0, 1, "train"), (2, 0, 0, "validation"), (0, 0, 0, "other")],
)
def test_a_step_is_of_the_kind_that_its_work_says(
    forwards: int, backwards: int, optimizer_steps: int, kind: str
) -> None:
    row = Row(0, 0)
    row.forwards, row.backwards, row.optimizer_steps = forwards, backwards, optimizer_steps
    assert kind_of(row) == kind
    assert row.worked == (kind != "other")
    assert kind_of(Step._make(row.end(1, None))) == kind


def test_a_loader_is_what_its_batches_are_used_for_and_once_it_trains_it_stays_so() -> None:
    source, row = Source(), Row(0, 0)
    mine = over(source)
    assert mine.loader is not None
    assert row.unsettle(mine)
    assert not row.unsettle(mine)  # a second batch of the same step
    assert not row.settle()  # nothing was done with it
    for forwards, backwards, role in ((1, 0, "validation"), (1, 1, "train"), (1, 0, "train")):
        row.unsettle(mine)
        row.forwards, row.backwards = forwards, backwards
        changed = row.settle()
        assert (mine.loader.role, changed) == (role, not (role == "train" and not backwards))
        assert row.unsettled == []
    assert not mine.unsettled


def test_a_pass_of_an_unknown_loader_is_settled_at_once() -> None:
    row, unknown = Row(0, 0), Pass(None, 0, 0)
    assert not row.unsettle(unknown)
    assert (unknown.unsettled, row.unsettled) == (False, [])


@pytest.fixture
def opened() -> list[str]:
    return []


@pytest.fixture
def phases(opened: list[str]) -> Phases:
    refuses: Any = Refuses()
    made = Phases(refuses)

    @contextmanager
    def named(name: str) -> Iterator[None]:
        opened.append(f"+{name}")
        yield
        opened.append(f"-{name}")

    made.ranges.append(named)
    return made


def test_a_phase_has_a_range_and_those_within_it_lie_within(phases: Phases, opened: list[str]) -> None:
    phases._push(OPTIMIZER)
    phases._push(BACKWARD)
    assert (phases.phase, phases.inside) == (BACKWARD, True)
    assert [phases.end(), phases.phase, phases.inside] == [BACKWARD, OPTIMIZER, False]
    assert [phases.end(), phases.end(), phases.phase] == [OPTIMIZER, -1, None]
    ranges = ["dlprof::optimizer", "dlprof::backward"]
    assert opened == [f"+{ranges[0]}", f"+{ranges[1]}", f"-{ranges[1]}", f"-{ranges[0]}"]


def test_a_range_of_the_scripts_own_is_opened_only_where_a_trace_is_recorded(phases: Phases, opened: list[str]) -> None:
    mine = phases.open_range("mine")
    assert opened == ["+mine"]
    mine.__exit__(None, None, None)
    assert opened == ["+mine", "-mine"]
    phases.ranges.clear()
    assert phases.open_range("mine") is None


def test_a_range_that_cannot_be_opened_switches_off_and_costs_the_script_nothing() -> None:
    driver: Any = Refuses()
    phases = Phases(driver)
    known: dict[str, Any] = {}
    phases.ranges.append(lambda name: known[name])
    assert phases.open_range("mine") is None
    assert driver.failed == ["'mine'"]


def test_only_the_training_thread_inside_a_loader_fetches(phases: Phases) -> None:
    import threading

    phases.owner = threading.get_ident()
    assert not phases.fetching
    phases._push(FETCH)
    assert phases.fetching
    seen: list[bool] = []
    other = threading.Thread(target=lambda: seen.append(phases.fetching))
    other.start()
    other.join()
    assert seen == [False]
    phases._push(FORWARD)
    assert not phases.fetching


def test_phases_have_names() -> None:
    assert [PHASES[phase] for phase in (FETCH, FORWARD, BACKWARD, OPTIMIZER)] == [
        "fetch",
        "forward",
        "backward",
        "optimizer",
    ]
