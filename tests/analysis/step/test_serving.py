"""Steps of inference servers: each with its phase, requests, tokens, length and busy time; rules of training say so."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.analysis.diagnosis import diagnose
from dlprof.analysis.rules import RULES
from dlprof.analysis.step.serving import engine_of, serving_steps
from dlprof.errors import DoesNotApply
from dlprof.read.run import open_run
from tests.fixtures import dialects, runs, traces

NAMES = ["execute_context_2(512)_generation_0(0)", *["execute_context_0(0)_generation_2(2)"] * 3]
LENGTHS = [4_000_000, 1_000_000, 1_000_000, 1_000_000]


def test_prefill_and_decode_are_told_apart(tmp_path: Path) -> None:
    path = runs.foreign(tmp_path / "job", dialects.serving(NAMES, LENGTHS))
    run = runs.measured(path, serving_steps)
    assert engine_of(run.job) == "vLLM"
    frame = run.frame(serving_steps)
    assert list(zip(frame["phase"], frame["requests"], frame["tokens"], strict=True)) == [
        ("prefill", 2, 512),
        *[("decode", 2, 2)] * 3,
    ]
    assert frame["busy_ns"].tolist() == pytest.approx([0.8 * length for length in LENGTHS], rel=0.03)
    assert frame["dur_ns"].iloc[1] == pytest.approx(1_050_000, rel=0.03)


def test_of_a_training_job_it_does_not_apply(tmp_path: Path) -> None:
    with pytest.raises(DoesNotApply):
        runs.measured(runs.foreign(tmp_path / "job", traces.training()), serving_steps).frame(serving_steps)


def test_rules_of_training_do_not_apply_and_others_do(tmp_path: Path) -> None:
    result = diagnose(open_run(runs.foreign(tmp_path / "job", dialects.serving(NAMES * 4, LENGTHS * 4))), RULES, jobs=1)
    states = {outcome.id: outcome for outcome in result.outcomes}
    of_training = {rule.id for rule in RULES if rule.of_training}
    assert {"input_wait", "unfused_optimizer", "validation_share"} <= of_training
    assert all(states[name].state == "does_not_apply" and "vLLM" in states[name].why for name in of_training)
    assert states["host_sync"].state in ("found", "clear", "not_measured")
    assert not any(outcome.state == "error" for outcome in result.outcomes)
    assert any("vLLM" in warning for warning in result.run.warnings)
