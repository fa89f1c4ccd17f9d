"""All measures of the package are known by their names."""

from __future__ import annotations

import inspect

import pandas as pd
import pytest

from dlprof.analysis import subjects


def test_every_measure_is_known_once_and_says_what_it_returns() -> None:
    measures = subjects.every_measure()
    names = [measure.name for measure in measures]
    assert names == sorted(set(names))
    assert {"breakdown", "own_time", "step_means"} <= set(names)
    assert [m.name for m in measures if not inspect.getdoc(m.function)] == []


def test_every_subject_has_measures() -> None:
    modules = [measure.function.__module__ for measure in subjects.every_measure()]
    # Exports have measures of their own, once their modules are imported.
    rooms = {module.split(".")[2] for module in modules if module.startswith("dlprof.analysis.")}
    assert rooms == set(subjects.SUBJECTS)


def test_what_a_function_names_must_be_there_but_for_what_it_is_given() -> None:
    def typo(step_meens: pd.DataFrame) -> None:
        raise AssertionError(step_meens)

    with pytest.raises(TypeError, match="step_meens"):
        subjects.check(typo)
    subjects.check(typo, given=1)
