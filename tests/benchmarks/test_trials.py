"""The cases of the benchmark of `dlprof try` are there, and its rows say what came of them."""

from __future__ import annotations

import pytest

from benchmarks import trials
from benchmarks.accuracy import WORKLOADS
from benchmarks.trials import FAULTS, HEALTHY, Case, Row
from dlprof import overrides
from dlprof.commands.run import constant


def test_there_are_ten_of_each_and_none_twice() -> None:
    assert len(FAULTS) == len(HEALTHY) == 10
    assert len({case.name for case in (*FAULTS, *HEALTHY)}) == 20


@pytest.mark.parametrize("case", FAULTS, ids=lambda case: case.name)
def test_each_fault_is_one_of_its_workload_and_a_setting_removes_it(case: Case) -> None:
    assert case.fault in (constant(WORKLOADS / f"{case.workload}.py", "FAULTS") or {})
    known = {setting.name for setting in overrides.OVERRIDES}
    assert set(case.settings) <= known


def test_a_gain_is_held_against_that_by_hand() -> None:
    row = Row("a", "2 CPU cores", True, "complete", "gc.freeze=True", True, "", 1.4, 1.3, 1.5, 1.25, 0.02)
    assert row.off == pytest.approx(0.12)
    assert trials.line(row) == "right  a: gc.freeze=True 1.40 × (1.30 to 1.50), by hand 1.25 × ± 0.02 complete  []"
    nothing = Row("b", "2 CPU cores", False, "complete", right=True)
    assert nothing.off is None
    assert "nothing to gain" in trials.line(nothing)
