"""What is said of recordings of a real GPU, whose truth is known: each script was run again with one change.

The recordings, their scripts and the measured steps are in ../shared/traces/h200: one NVIDIA H200, torch 2.11.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import pytest

from dlprof.analysis.diagnosis import diagnose
from dlprof.analysis.rules import RULES
from dlprof.read.run import open_run
from dlprof.result import Outcome, Result
from tests.fixtures.places import TRACES

H200 = TRACES / "h200"
pytestmark = pytest.mark.skipif(not H200.is_dir(), reason="the recordings are not here (../shared/traces/h200)")

# A predicted step is right within this share of the measured one.
RIGHT = 0.15


class Case(NamedTuple):
    """A recording, and what must be said first: the rule, a line that must be named, and a part of the advice.

    `plain_ms`, `fixed_ms`: the script's own mean steps, without and with the change.
    """

    folder: str
    rule: str
    line: int
    advice: str
    plain_ms: float
    fixed_ms: float


CASES = (
    Case("g01_gpt_fp32", "fp32_matmul", 23, "autocast", 47.04, 14.09),
    Case("g02_resnet_layout", "memory_format", 18, "channels_last", 55.34, 29.54),
    Case("g04_optimizer_loop", "unfused_optimizer", 11, "fused=True", 43.14, 24.84),
    Case("g05_loader", "input_wait", 25, "num_workers=", 281.9, 12.9),
    Case("g06_grad_norm_items", "parameter_loop", 17, "get_total_norm", 22.14, 15.71),
    Case("g14_synchronize", "host_sync", 15, "torch.cuda.synchronize()", 24.72, 19.18),
)


@cache
def result_of(folder: str) -> Result:
    return diagnose(open_run(H200 / folder), RULES, jobs=1)


def first_of(folder: str) -> Outcome:
    return result_of(folder).found[0]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.folder)
def test_the_first_finding_is_the_true_cause_with_its_line_and_change(case: Case) -> None:
    first = first_of(case.folder)
    assert first.id == case.rule
    places = [*first.where, *(change.at for change in first.changes if change.at)]
    assert case.line in [place.line for place in places]
    assert case.advice in first.advice[0]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.folder)
def test_the_step_after_the_change_is_the_measured_one(case: Case) -> None:
    result, first = result_of(case.folder), first_of(case.folder)
    assert result.window is not None
    # The recorded run is another one than the plain ones: shares of its step are compared.
    predicted = 1 - first.saving_ns / result.window.step_ns
    measured = case.fixed_ms / case.plain_ms
    assert predicted == pytest.approx(measured, rel=RIGHT)
    assert not first.at_most
    assert abs(predicted - measured) <= first.error_ns / result.window.step_ns
