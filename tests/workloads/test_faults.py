"""What the workloads can plant is known without running them, and every rule has a fault that it must notice."""

from __future__ import annotations

import ast
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks.accuracy import planted
from dlprof.analysis.rules import RULES
from dlprof.commands.run import constant
from tests.workloads import FOLDER
from tests.workloads.scripts import load

SCRIPTS = sorted(FOLDER.glob("*.py"))
FAULTS = [(script, fault) for script in SCRIPTS for fault in constant(script, "FAULTS")]

# A script cannot lower a clock: workloads/README.md says how an administrator does. Nor has PyTorch a call that makes
# queued work wait while its device idles: that is simulated (simulator).
NO_SCRIPT_CAN = {"queued_wait", "throttled_clock"}
# Needs a GPU whose memory is full, whatever GPU that is: simulated too.
NO_SCRIPT_CAN |= {"activation_memory"}
# Another network than any of the workloads': benchmarks/gpu has one, and the simulator.
NO_SCRIPT_CAN |= {"recurrent_loop"}
# Other data sets, models and starts than any of the workloads': benchmarks/causes has them.
NO_SCRIPT_CAN |= {
    "copied_memory",
    "costly_line",
    "dense_gradient",
    "deterministic",
    "duplicate_batches",
    "masked_attention",
    "needless_products",
    "frozen_forward",
    "own_profiler",
    "repeated_derivatives",
    "slow_start",
    "stalled_steps",
    "traced_python",
    "unbatched_calls",
    "unused_batches",
    "unused_gradients",
}
# Of jobs that failed: by dumps that PyTorch writes and no recording does, or by how they ended.
NO_SCRIPT_CAN |= {"job_failed"}
NO_SCRIPT_CAN |= {"fragmentation", "hung_collective", "mismatched_collectives", "out_of_memory"}


def loaded(script: Path) -> ModuleType:
    try:
        return load(script.stem)
    except SystemExit as without:
        pytest.skip(str(without))


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
    workload = loaded(script)
    for options in (constant(script, "HEALTHY") or {}).values():
        workload.parse(["--device=cpu", *shlex.split(options)])
    for fault, options in (constant(script, "SHOWN_WITH") or {}).items():
        asked = workload.parse(["--device=cuda", "--fault", fault, *shlex.split(options)])
        assert asked.fault == fault


@pytest.mark.parametrize(("script", "fault"), FAULTS, ids=lambda p: getattr(p, "stem", p))
def test_a_fault_is_planted_by_other_settings(script: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = loaded(script)
    alone = fault == "data_parallel"  # one process for two GPUs
    device = "cuda" if alone or fault in (constant(script, "NEEDS_GPU") or ()) else "cpu"
    world, rank = ("1", "0") if alone else ("2", "1")
    for name, value in (("WORLD_SIZE", world), ("RANK", rank), ("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", world)):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def settings(*options: str) -> dict[str, Any]:
        args = vars(workload.parse(["--device", device, *options]))
        return {name: getattr(value, "__code__", value) for name, value in args.items() if name != "fault"}

    assert settings() == settings()
    assert settings("--fault", fault) != settings()


@pytest.mark.parametrize(
    "script", [*SCRIPTS, *sorted(FOLDER.glob("parts/*.py"))], ids=lambda p: p.relative_to(FOLDER).as_posix()
)
def test_a_workload_is_plain_pytorch(script: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add((node.module or "").partition(".")[0])
    own = script.stem.partition("_")[0]  # deepspeed, lightning, horovod
    assert imported - sys.stdlib_module_names <= {"torch", "numpy", "PIL", "parts", own}
