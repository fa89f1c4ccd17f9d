"""What the workloads can plant is known without running them, and every fault has a rule that must notice it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.accuracy import Recorded, planted, tables
from dlprof.commands.run import constant
from dlprof.rules import RULES

SCRIPTS = sorted((Path(__file__).parents[2] / "workloads").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_every_fault_names_a_rule_and_is_recorded_after_the_healthy_run(script: Path) -> None:
    first, *rest = planted(script)
    assert (first.name, first.rule, first.options) == ("healthy", "", ())
    faults = {p.name: p.rule for p in rest if p.rule}
    assert faults == constant(script, "FAULTS") != {}
    assert set(faults.values()) <= {r.id for r in RULES}
    assert all(p.options == ("--fault", p.name) for p in rest if p.rule)
    assert all(p.options[0] == "--" for p in rest if not p.rule)


def test_the_table_sets_the_prediction_beside_the_healthy_step_of_its_round() -> None:
    records = [
        Recorded("job", "healthy", "", 0, 100e6, found=(("host_bound", 0.03, 97e6),), device="CPU", torch="2.13.0"),
        Recorded("job", "slow", "input_wait", 0, 150e6, (("input_wait", 0.3, 105e6),), healthy_ns=100e6),
        Recorded("job", "other", "gc_pauses", 0, 110e6, (("input_wait", 0.1, 99e6),), "a reason", healthy_ns=100e6),
        Recorded("job", "gpu_only", "host_sync", 0, said="needs a GPU"),
    ]
    lines = tables(records).splitlines()
    assert "| job | `slow` | `input_wait` | 1 of 1, first in 1 | 30% | 1.50 | 1.05 |  |" in lines
    assert "| job | `other` | `gc_pauses` | 0 of 1, first in 0 (a reason) |  | 1.10 |  | `input_wait` 10% |" in lines
    assert "| job | `gpu_only` | `host_sync` | not run: needs a GPU | | | | |" in lines
    assert "| job | healthy | 1 | 100.0 ms | `host_bound` 3.0% |" in lines
