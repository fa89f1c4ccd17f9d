"""What the workloads can plant is known without running them, and every fault has a rule that must notice it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.accuracy import planted
from dlprof.commands.run import constant
from dlprof.rules import RULES

SCRIPTS = sorted((Path(__file__).parents[2] / "workloads").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_every_fault_names_a_rule_and_is_recorded_beside_a_healthy_run(script: Path) -> None:
    healthy, faults = planted(script)
    assert (healthy[0].name, healthy[0].options) == ("healthy", ())
    assert all(one.options and not one.rule and not one.fault for one in healthy[1:])
    assert {one.fault: one.rule for one in faults} == constant(script, "FAULTS") != {}
    assert {one.rule for one in faults} <= {rule.id for rule in RULES}
    for name in ("SHOWN_WITH", "OTHER_STEP", "NEEDS_GPU", "NEEDS_TWO_RANKS"):
        assert set(constant(script, name) or ()) <= {one.fault for one in faults}
