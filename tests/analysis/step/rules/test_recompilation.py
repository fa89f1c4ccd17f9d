"""Compiling in the middle of training: found with its reason, silent where it is done early, abstaining when blind."""

import json
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.step.rules.recompilation import RULE
from dlprof.result import Setting
from tests.fixtures import runs
from tests.fixtures.asking import ask
from tests.fixtures.runs import MS

KIND = "compilation"
SIZE = {"path": "/x/model.py:12 forward", "reason": "tensor 'x' size mismatch at index 0. expected 4, actual 5"}
FLAG = {"path": "/x/model.py:12 forward", "reason": "L['self'].scale == 2"}


def recorded(folder: Path, *compiling: range, compiled: Any = True, **said: Any) -> Path:
    """Record ranks of 63 steps of 100 ms, 60 of them steady; each compiles for 20 ms in the steps that are told."""
    steps = [runs.light(n, 100 * MS) for n in range(63)]
    stalls = [[runs.stall(KIND, n, 20 * MS, phase="forward", **said) for n in which] for which in compiling]
    facts = {**runs.CPU, "models": [{"class": "Net", "parameters": 1, "compiled": compiled}]}
    return runs.recorded(folder / "run", *((None, steps, facts) for _ in compiling), stalls=stalls)


def test_compiling_in_every_other_step_is_found(tmp_path: Path) -> None:
    found = ask(RULE, recorded(tmp_path, range(0, 63, 2), **SIZE))
    assert found.state == "found"
    assert found.saving_ns == pytest.approx(10 * MS, rel=0.02)
    assert found.share == found.lost_share == pytest.approx(0.1, rel=0.02)
    assert found.summary.startswith("30 compilations in 60 steady steps of rank 0")
    assert "expected 4, actual 5" in found.summary
    assert [change.settings for change in found.changes] == [
        (Setting("drop_last", None, True),),
        (Setting("dynamic", None, True),),
        (Setting("TORCH_LOGS", None, "recompiles"),),
    ]
    assert found.evidence is not None
    assert found.evidence.rows == (("/x/model.py:12 forward", SIZE["reason"], 30, 600.0 * MS),)


def test_another_reason_has_other_advice(tmp_path: Path) -> None:
    found = ask(RULE, recorded(tmp_path, range(0, 63, 2), **FLAG))
    assert found.state == "found"
    assert [change.settings for change in found.changes] == [(), (Setting("TORCH_LOGS", None, "recompiles"),)]


def test_a_loader_that_drops_its_last_batch_is_not_told_to(tmp_path: Path) -> None:
    path = recorded(tmp_path, range(0, 63, 2), **SIZE)
    facts = path / "ranks/00000/facts.json"
    facts.write_text(json.dumps(json.loads(facts.read_text()) | {"loaders": [{"role": "train", "drop_last": True}]}))
    padded = ask(RULE, path).changes[0]
    assert (padded.settings, padded.numerics) == ((), True)


def test_ranks_that_compile_together_cost_as_much_as_one(tmp_path: Path) -> None:
    found = ask(RULE, recorded(tmp_path, range(3, 63, 2), range(3, 63, 2), **SIZE))
    assert found.saving_ns == pytest.approx(10 * MS)
    assert found.ranks == (0, 1)
    assert [cost.ns for cost in found.by_rank] == pytest.approx([10 * MS, 10 * MS])


def test_a_little_compiling_is_left_alone(tmp_path: Path) -> None:
    clear = ask(RULE, recorded(tmp_path, range(3, 63, 20), **SIZE))
    assert clear.state == "clear"
    assert clear.share == pytest.approx(0.01)
    assert clear.summary == "1.0 % of each step is spent recompiling"


def test_compiling_in_the_first_steps_is_left_alone(tmp_path: Path) -> None:
    clear = ask(RULE, recorded(tmp_path, range(3), path="/x/model.py:12 forward"))
    assert (clear.state, clear.summary, clear.share) == ("clear", "no steady step compiled anything", 0.0)


def test_a_job_that_compiles_nothing_is_left_alone(tmp_path: Path) -> None:
    assert ask(RULE, recorded(tmp_path, range(0), compiled=False)).state == "clear"


def test_a_compiled_model_whose_compilations_nobody_saw_abstains(tmp_path: Path) -> None:
    answer = ask(RULE, recorded(tmp_path, range(0)))
    assert (answer.state, "does not tell when" in answer.why) == ("not_measured", True)
