"""What the workloads can plant is known without running them, and every rule has a fault that it must notice."""

from __future__ import annotations

import ast
import shlex
import sys
from pathlib import Path

import pytest

from benchmarks.accuracy import planted
from dlprof.analysis.rules import RULES
from dlprof.commands.run import constant
from tests.workloads.scripts import load

SCRIPTS = sorted((Path(__file__).parents[2] / "workloads").glob("*.py"))

# A script cannot lower a clock: workloads/README.md says how an administrator does. Nor has PyTorch a call that makes
# queued work wait while its device idles: that is simulated (benchmarks/simulator).
NO_SCRIPT_CAN = {"queued_wait", "throttled_clock"}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_every_fault_names_a_rule_and_is_recorded_beside_a_healthy_run(script: Path) -> None:
    healthy, faults = planted(script)
    assert (healthy[0].name, healthy[0].options) == ("healthy", ())
    assert all(one.options and not one.rule and not one.fault for one in healthy[1:])
    assert {one.fault: one.rule for one in faults} == constant(script, "FAULTS") != {}
    assert {one.rule for one in faults} <= {rule.id for rule in RULES}
    for name in ("SHOWN_WITH", "OTHER_STEP", "NEEDS_GPU", "NEEDS_TWO_RANKS"):
        assert set(constant(script, name) or ()) <= {one.fault for one in faults}


def test_every_rule_has_a_fault_in_some_workload() -> None:
    rules = {one.rule for script in SCRIPTS for one in planted(script)[1]}
    assert rules == {rule.id for rule in RULES} - NO_SCRIPT_CAN


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_a_workload_takes_the_options_that_it_names(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    try:
        workload = load(script.stem)
    except SystemExit as without:
        pytest.skip(str(without))
    for options in (constant(script, "HEALTHY") or {}).values():
        workload.parse(["--device=cpu", *shlex.split(options)])
    for fault, options in (constant(script, "SHOWN_WITH") or {}).items():
        asked = workload.parse(["--device=cuda", "--fault", fault, *shlex.split(options)])
        assert asked.fault == fault


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_a_workload_is_one_file_of_plain_pytorch(script: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add((node.module or "").partition(".")[0])
    own = script.stem.partition("_")[0]  # deepspeed, lightning, horovod
    assert imported - sys.stdlib_module_names <= {"torch", "numpy", "PIL", own}
