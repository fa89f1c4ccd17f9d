"""What a measure needs is named by its parameters: unknown names fail where they stand, what is lacking says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest

import dlprof.analysis.step.breakdown  # noqa: F401 - whose name is taken
from dlprof.analysis import engine
from dlprof.analysis.engine import JOB, Job, Maybe, across_ranks, check_needs, maybe, needs, needs_of, per_rank
from dlprof.analysis.estimate import Estimate, Rule
from dlprof.analysis.timeline.steps import timing
from dlprof.errors import NotMeasured
from dlprof.read.run import Run
from tests.fixtures.measures import (
    RANKS,
    broken,
    mute,
    rows,
    total,
)


def test_a_parameter_that_needs_nothing_known_fails_where_it_is_defined() -> None:
    def bare(means: pd.DataFrame) -> pd.DataFrame:
        return means

    def of_a_process(timing: Any = needs(timing)) -> Any:
        return timing

    def of_all(means: pd.DataFrame = needs(total)) -> pd.DataFrame:
        return means

    def asks(means: pd.DataFrame) -> Estimate:
        raise AssertionError(len(means))

    for make in (across_ranks, per_rank):
        with pytest.raises(TypeError, match="'means' needs no measure"):
            make(bare)
    with pytest.raises(TypeError, match="'timing' is not known across ranks"):  # it does not travel
        across_ranks(of_a_process)
    with pytest.raises(TypeError, match="'total' is not known per rank"):
        per_rank(of_all)
    with pytest.raises(TypeError, match="'means' needs no measure"):
        Rule("Some state", asks, asks)  # type: ignore[arg-type] # it fails before that is called


def test_what_a_caller_gives_needs_nothing() -> None:
    def given(means: pd.DataFrame, sums: pd.DataFrame = needs(total)) -> int:
        return len(means) + len(sums)

    check_needs(given, given=1)
    assert [need.of for need in needs_of(given).values()] == [total]


def test_two_measures_of_one_name_fail_where_the_second_is_defined() -> None:
    def breakdown() -> pd.DataFrame:
        return pd.DataFrame()

    with pytest.raises(TypeError, match="breakdown"):
        per_rank(breakdown)


def test_a_need_that_may_be_lacking_says_why(job: Run) -> None:
    def known(
        rows: Maybe[pd.DataFrame] = maybe(rows),
        mute: Maybe[pd.DataFrame] = maybe(mute),
        broken: Maybe[pd.DataFrame] = maybe(broken),
    ) -> list[Any]:
        assert silent_ranks(mute) == silent_ranks(broken) == list(range(RANKS))
        return [(bool(need), need.or_none() is None, need.why(), need.broke) for need in (rows, mute, broken)]

    def silent_ranks(need: Maybe[pd.DataFrame]) -> list[int]:
        return list(need.lacking)

    assert engine.measure(job, [known], jobs=1).call(known) == [
        (True, False, "", False),
        (False, True, "rank 0 cannot say", False),
        (False, True, "KeyError: 'nothing'", True),
    ]


def test_a_required_need_that_is_lacking_raises_before_the_function_is_called(job: Run) -> None:
    def never(mute: pd.DataFrame = needs(mute)) -> None:
        raise AssertionError("it was called")

    with pytest.raises(NotMeasured, match="rank 0 cannot say"):
        engine.measure(job, [never], jobs=1).call(never)


def test_a_function_gets_facts_and_no_frames_that_it_did_not_name(job: Run) -> None:
    def facts(job: Job = needs(JOB)) -> bool:
        return hasattr(job, "frame") or hasattr(job, "call")

    assert not engine.measure(job, [facts], jobs=1).call(facts)


@pytest.mark.parametrize("measure", [rows, total], ids=lambda m: m.name)
def test_measures_travel_by_name(measure: engine.Measure[Any]) -> None:
    make, args = measure.__reduce__()
    travelled: Callable[..., Any] = make
    assert travelled(*args) is measure
