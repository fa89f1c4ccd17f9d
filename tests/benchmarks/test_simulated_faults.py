"""Every simulated fault of a GPU job is found, by its rule, with the step that the fixed job then takes.

`python -m benchmarks.simulated` measures the same over many seeds and prints how near it comes.
"""

from __future__ import annotations

import pytest

from benchmarks.simulated import of_fault
from benchmarks.simulator.faults import FAULTS
from dlprof.analysis.rules import RULES

SEED = 1
NEAR = 0.15

# Their fix makes other work faster too, which is not promised: autocast halves what all operators move.
CAUTIOUS = ("float32",)


@pytest.mark.long
@pytest.mark.parametrize("name", [fault.name for fault in FAULTS])
def test_a_planted_fault_is_found_with_what_its_fix_gains(name: str) -> None:
    case = of_fault(name, SEED, None)
    assert case.error == ""
    assert case.reported_ns == pytest.approx(case.true_ns, rel=0.05)  # a hundred steps, not all of them
    assert case.state == "found"
    assert case.predicted_ns is not None
    assert case.predicted_ns >= (1 - NEAR) * case.fixed_ns
    if name not in CAUTIOUS:
        assert case.predicted_ns <= (1 + NEAR) * case.fixed_ns


def test_every_fault_is_of_a_rule() -> None:
    assert {fault.rule for fault in FAULTS} <= {rule.id for rule in RULES}
