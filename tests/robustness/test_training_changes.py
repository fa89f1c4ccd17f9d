"""Changes of the training on recordings of one H200: they lead nowhere, and no batch is advised beyond the evidence."""

from __future__ import annotations

import re

import pytest

from dlprof.analysis.diagnosis import diagnosed, wanted
from dlprof.analysis.engine import measure
from dlprof.analysis.rules import RULES
from dlprof.read.run import open_run
from dlprof.report import terminal, verdict
from dlprof.result import Result
from tests.fixtures.places import TRACES

H200 = TRACES / "h200"
NAMES = (
    "g01_gpt_fp32",
    "g02_resnet_layout",
    "g04_optimizer_loop",
    "g05_loader",
    "g06_grad_norm_items",
    "g07_pageable",
    "g07_pageable_fixed",
    "g10_hf_trainer_padding",
    "g14_synchronize",
)
# The device computes nearly all the time, or waits for data and copies, which are as much longer with a larger batch.
NO_LARGER_BATCH = ("g01_gpt_fp32", "g02_resnet_layout", "g05_loader", "g07_pageable", "g07_pageable_fixed")

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not H200.is_dir(), reason="the recordings of an H200 are not here (../shared/traces/h200)"),
]


@pytest.fixture(scope="module", params=NAMES)
def both(request: pytest.FixtureRequest) -> tuple[str, Result, Result]:
    """Return a recording's name, its result, and that of the rules without those whose changes change the training."""
    measured = measure(open_run(H200 / request.param), wanted(RULES), 1)
    result = diagnosed(measured, RULES)
    apart = {o.id for o in result.if_training_may_change}
    return request.param, result, diagnosed(measured, [rule for rule in RULES if rule.id not in apart])


def test_headline_findings_and_their_sum_are_those_without_changes_of_the_training(
    both: tuple[str, Result, Result],
) -> None:
    _, result, cures = both
    assert [o.id for o in result.found] == [o.id for o in cures.found]
    assert result.together == cures.together
    assert verdict.headline(result)[:2] == verdict.headline(cures)[:2] or not cures.found
    assert all(not o.changes[0].training for o in result.found)
    before, _, _ = terminal.render(result).partition(verdict.APART)
    for outcome in result.if_training_may_change:
        assert f"  {outcome.id} " not in before
        assert outcome.verdict not in before


def test_a_larger_batch_is_advised_only_where_it_fills_the_device(both: tuple[str, Result, Result]) -> None:
    name, result, _ = both
    advised = [change.text for o in result.outcomes if o.state == "found" for change in o.changes if change.training]
    batches = [text for text in advised if re.search(r"times as large|batch twice|batch_size=", text)]
    assert not any("8 times" in text for text in batches)
    if name in NO_LARGER_BATCH:
        assert not any("batch" in text for text in advised)
    for outcome in result.if_training_may_change:
        if outcome.id == "memory_headroom":
            assert "works for nine tenths of the step and limits it" in outcome.summary
            assert outcome.saving_ns < sum(t.ns for t in result.time if t.category != "computation")
