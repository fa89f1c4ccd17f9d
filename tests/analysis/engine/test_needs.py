"""What a measure needs is named by its parameters: unknown names fail where they stand, what is lacking says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest

from dlprof.analysis import engine
from dlprof.analysis.engine import Job, Maybe, across_ranks, needs_of, per_rank
from dlprof.analysis.estimate import Estimate, Rule
from dlprof.errors import NotMeasured
from dlprof.read.run import Run
from tests.fixtures.measures import (
    RANKS,
    rows,
    total,
)


def test_a_parameter_that_names_nothing_fails_where_it_is_defined() -> None:
    def typo(step_meens: pd.DataFrame) -> pd.DataFrame:
        return step_meens

    def of_a_process(timing: Any) -> Any:
        return timing

    def asks(step_meens: pd.DataFrame) -> Estimate:
        raise AssertionError(len(step_meens))

    with pytest.raises(TypeError, match="step_meens"):
        across_ranks(typo)
    with pytest.raises(TypeError, match="step_meens"):
        per_rank(typo)
    with pytest.raises(TypeError, match="timing"):  # which does not travel
        across_ranks(of_a_process)
    with pytest.raises(TypeError, match="step_meens"):
        Rule("Some state", asks, asks)  # type: ignore[arg-type] # it fails before that is called


def test_two_measures_of_one_name_fail_where_the_second_is_defined() -> None:
    def breakdown() -> pd.DataFrame:
        return pd.DataFrame()

    def spans() -> pd.DataFrame:
        return pd.DataFrame()

    for taken in (breakdown, spans):
        with pytest.raises(TypeError, match=taken.__name__):
            per_rank(taken)


def test_a_need_that_may_be_lacking_says_why(job: Run) -> None:
    def known(rows: Maybe[pd.DataFrame], mute: Maybe[pd.DataFrame], broken: Maybe[pd.DataFrame]) -> list[Any]:
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
    def never(mute: pd.DataFrame) -> None:
        raise AssertionError("it was called")

    with pytest.raises(NotMeasured, match="rank 0 cannot say"):
        engine.measure(job, [never], jobs=1).call(never)


def test_a_function_gets_facts_and_no_frames_that_it_did_not_name(job: Run) -> None:
    def facts(job: Job) -> bool:
        return hasattr(job, "frame") or hasattr(job, "call")

    assert not engine.measure(job, [facts], jobs=1).call(facts)


@pytest.mark.parametrize("measure", [rows, total], ids=lambda m: m.name)
def test_measures_travel_by_name(measure: engine.Measure[Any]) -> None:
    make, args = measure.__reduce__()
    travelled: Callable[..., Any] = make
    assert travelled(*args) is measure


def test_an_annotation_may_be_its_text_or_the_type_itself() -> None:
    def asks(spans: Any) -> Any:
        return spans

    for annotation in ("Maybe[pd.DataFrame]", Maybe[pd.DataFrame]):
        asks.__annotations__["spans"] = annotation
        assert [(need.name, need.optional) for need in needs_of(asks)] == [("spans", True)]
