"""Loaders of recordings from a real GPU, whose truth was measured: plain and fixed scripts, without dlprof.

g05: one worker decodes JPEG files; with 14 of them steps 16 to 40 took 12.9 ms each: in that time they used up the 28
batches that the workers had made ahead. g07: 201 MB of floats a batch come from 12 workers and are copied from pageable
memory, 50.9 ms a step; with pinned memory 51.9 ms. g07_pageable_fixed is the recording of the latter.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from dlprof.analysis.diagnosis import diagnose
from dlprof.analysis.rules import RULES
from dlprof.read.run import open_run
from dlprof.result import Outcome, Result
from tests.fixtures.runs import MS

H200 = Path(__file__).parents[3].parent / "shared/traces/h200"

pytestmark = pytest.mark.skipif(not H200.is_dir(), reason="the reference traces are not here (../shared/traces/h200)")


@cache
def diagnosed(name: str) -> Result:
    return diagnose(open_run(H200 / name), RULES, jobs=1)


def outcome(name: str, rule: str) -> Outcome:
    return next(o for o in diagnosed(name).outcomes if o.id == rule)


def step(name: str) -> float:
    window = diagnosed(name).window
    assert window is not None
    return window.step_ns


def test_more_workers_are_predicted_for_a_loader_with_one() -> None:
    found = diagnosed("g05_loader").found[0]
    assert found.id == "input_wait"
    assert [(s.name, s.now, s.to) for s in found.changes[0].settings] == [("num_workers", 1, 16)]
    # 16 workers that take 312 ms for a batch; and the step as it is while there are batches in stock.
    assert (step("g05_loader") - found.saving_ns) / MS == pytest.approx(312 / 16, rel=0.1)
    ahead = found.advice[0].partition(" predicted (")[2]
    assert float(ahead.partition(" ms for some ")[0]) == pytest.approx(12.9, rel=0.15)


def test_pinning_is_not_promised_where_its_thread_takes_as_long_as_the_copy() -> None:
    clear = outcome("g07_pageable", "pageable_copy")
    assert (clear.state, clear.saving_ns) == ("clear", 0.0)
    assert "201.3 MB a step are copied from pageable memory; pinning would not help" in clear.summary
    # Freeing the shared memory of each batch is not the script's Python either.
    assert outcome("g07_pageable", "host_bound").state == "clear"


def test_a_job_that_uses_up_what_was_made_ahead_is_as_slow_as_after_that() -> None:
    assert step("g07_pageable_fixed") / MS == pytest.approx(51.9, rel=0.1)
    assert not any("unknown reason" in text for text in diagnosed("g07_pageable_fixed").run.warnings)


def test_the_thread_that_pins_is_what_limits() -> None:
    found = diagnosed("g07_pageable_fixed").found
    assert (found[0].id, found[0].at_most) == ("input_wait", True)
    assert "One thread pins all batches, and takes 56.7 ms for each (201.3 MB, 3.55 GB/s)." in found[0].summary
    assert "more workers would not help" in found[0].advice[0]
    assert found[0].changes[0].settings == ()
    # Without it the workers are next: 12 that take 198 ms for a batch.
    assert (step("g07_pageable_fixed") - found[0].saving_ns) / MS == pytest.approx(198 / 12, rel=0.1)
    assert found[0].where[0].line == 17
