"""Losses that move their logits too often: found with what a cross entropy leaves, silent on that itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.analysis.compute.rules.unfused_loss import RULE
from simulator import folder
from simulator.faults import FAULTS
from simulator.faults.fault import recording
from tests.fixtures import operators
from tests.fixtures.asking import ask
from tests.fixtures.runs import MS

LOG = operators.times(["aten::softmax", "aten::log", "aten::index"], 2 * MS) + operators.times(
    ["IndexBackward0", "LogBackward0", "SoftmaxBackward0"], 2 * MS
)
PLAIN = [("aten::cross_entropy_loss", 5 * MS), ("NllLossBackward0", MS), ("LogSoftmaxBackward0", 5 * MS)]


@pytest.mark.parametrize("on_cpu", [False, True])
def test_found_with_what_a_cross_entropy_leaves(tmp_path: Path, on_cpu: bool) -> None:
    found = ask(RULE, operators.job(tmp_path, *LOG, on_cpu=on_cpu))
    assert found.state == "found"
    assert found.saving_ns == pytest.approx(6 * MS, rel=0.02)
    assert "cross_entropy(logits, target)" in found.advice[0]
    assert [change.numerics for change in found.changes] == [False]
    assert found.evidence is not None
    assert {row[0] for row in found.evidence.rows} == {"the log of a softmax"}


def test_a_float32_copy_is_found_with_the_ways_to_do_without(tmp_path: Path) -> None:
    found = ask(RULE, operators.job(tmp_path, ("aten::to", 2 * MS), *PLAIN, ("ToCopyBackward0", 2 * MS)))
    assert found.saving_ns == pytest.approx(15 * 0.67 * MS, rel=0.01)
    assert "torch.compile" in found.advice[0]
    assert [change.numerics for change in found.changes] == [False, True]


def test_a_job_that_runs_ahead_has_as_many_forward_as_backward_passes(tmp_path: Path) -> None:
    """The first traced step is not steady: its forward pass takes no place of a steady one's."""
    fault = next(f for f in FAULTS if f.name == "cast_loss")
    job = fault.make(1)
    folder.write(tmp_path / "run", job, recording(job, fault.name))
    found = ask(RULE, tmp_path / "run")
    assert found.evidence is not None
    assert [row[1:3] for row in found.evidence.rows] == [("backward", 1), ("forward", 1)]


def test_a_cross_entropy_is_left_alone(tmp_path: Path) -> None:
    clear = ask(RULE, operators.job(tmp_path, *PLAIN))
    assert (clear.state, clear.share) == ("clear", 0)


def test_a_cast_of_something_small_is_left_alone(tmp_path: Path) -> None:
    assert ask(RULE, operators.job(tmp_path, *PLAIN, ("ToCopyBackward0", MS // 10))).state == "clear"


def test_few_classes_are_left_alone_with_their_share(tmp_path: Path) -> None:
    clear = ask(RULE, operators.job(tmp_path, *((name, ns // 20) for name, ns in LOG)))
    assert clear.state == "clear"
    assert 0 < clear.share < 0.02
