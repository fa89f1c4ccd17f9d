"""GPU traces that lack something: a partial answer, right as far as it goes, and what it lacks is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dlprof.analysis.diagnosis import diagnose
from dlprof.analysis.rules import RULES
from dlprof.read.run import open_run
from dlprof.result import Result
from simulator import folder, healthy, play
from simulator.faults import FAULTS
from simulator.job import Job, Recording
from simulator.play import Truth

# One rank of an H100 that its host is a step ahead of.
JOB = healthy.draw(3, ranks=1)


def traced(at: Path, job: Job, form: str = "torch-2.8") -> tuple[Result, Truth]:
    """Record a job with nothing but the profiler, diagnose it, and return the result and the truth."""
    folder.write(at, job, Recording(steps=60, active=7, form=form, light=False))
    result = diagnose(open_run(at), RULES, jobs=1)
    assert [o.id for o in result.outcomes if o.state == "error"] == []
    assert [w for w in result.run.warnings if "failed" in w] == []
    return result, play.true(job)


def why(result: Result, rule: str) -> str:
    return next(o.why for o in result.outcomes if o.id == rule)


def computation(result: Result) -> float:
    return sum(t.share for t in result.time if t.category == "computation")


@pytest.mark.long
@pytest.mark.parametrize("form", ["no-correlations", pytest.param("device-only", marks=pytest.mark.slow)])
def test_without_links_the_means_are_right_and_causes_are_not_told(tmp_path: Path, form: str) -> None:
    result, true = traced(tmp_path, JOB, form)
    assert result.window is not None
    assert result.window.step_ns == pytest.approx(true.period_ns, rel=0.03)
    assert computation(result) == pytest.approx(true.ranks[0].parts["computation"] / true.period_ns, abs=0.02)
    assert any("links no launch to the device's work" in warning for warning in result.run.warnings)
    for rule in ("host_bound", "host_sync", "exposed_copy"):
        assert "link" in why(result, rule)
    assert result.found == ()


@pytest.mark.long
@pytest.mark.parametrize("captured", ["all", pytest.param("model", marks=pytest.mark.slow)])
def test_a_graphs_nodes_are_of_the_step_that_launched_it(tmp_path: Path, captured: str) -> None:
    result, true = traced(tmp_path, replace(JOB, script=replace(JOB.script, captured=captured)))
    assert result.window is not None
    assert result.window.step_ns == pytest.approx(true.period_ns, rel=0.02)
    assert computation(result) == pytest.approx(true.ranks[0].parts["computation"] / true.period_ns, abs=0.02)
    assert result.run.warnings == ("left out of what was traced: 1 step in which the host only gained its lead",)


@pytest.mark.long
def test_a_step_that_launches_nothing_is_left_out(tmp_path: Path) -> None:
    result, true = traced(tmp_path, replace(JOB, script=replace(JOB.script, skips=3)))
    assert result.window is not None
    assert result.window.step_ns == pytest.approx(true.period_ns, rel=0.02)
    assert any("that launched nothing on the device" in warning for warning in result.run.warnings)


@pytest.mark.long
def test_a_process_with_several_devices_is_divided_by_what_all_of_them_do(tmp_path: Path) -> None:
    job = next(f for f in FAULTS if f.name == "replicas").make(0)
    result, true = traced(tmp_path, job)
    assert result.window is not None
    assert result.window.step_ns == pytest.approx(true.period_ns, rel=0.03)
    assert sum(t.share for t in result.time if t.rank == 0) == pytest.approx(1)
    assert "data_parallel" in [o.id for o in result.found]
