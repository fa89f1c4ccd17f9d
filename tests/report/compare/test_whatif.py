"""What a step would be, in words: the gain, that there is none, that it is not known."""

from __future__ import annotations

import json

import pytest

from dlprof.files import compact
from dlprof.report.compare.summary import page, summary, text, to_json
from dlprof.result.figures import Throughput
from dlprof.result.scale import Answer, Answers

MS = 1e6
T = Throughput(320.0, None, 32.0, "loader")


def said(*alone: Answer, together: Answer | None = None, throughput: Throughput | None = T) -> str:
    s = summary("run", Answers(100 * MS, alone, together, throughput))
    page(s)
    return text(s, 110)


@pytest.mark.parametrize(
    ("step", "part"),
    [
        (50 * MS, "a step would take 50.0 ms instead of 100.0 ms: 2.00 × faster"),
        (100.1 * MS, "a step would take as long as now"),
        (150 * MS, "a step would take longer: 150.0 ms instead of 100.0 ms"),
    ],
)
def test_one_change(step: float, part: str) -> None:
    text = said(Answer(("device 2 × as fast",), step))
    assert f"With device 2 × as fast {part}" in text


def test_samples_a_second_follow() -> None:
    assert "640" in said(Answer(("perfect input",), 50 * MS))
    assert "steps/s" in said(Answer(("perfect input",), 50 * MS), throughput=None)


def test_together_and_what_is_not_known() -> None:
    alone = (Answer(("workers 4",), 80 * MS, unknown=("who knows",)), Answer(("microbatches 8",), None, "no pipeline"))
    both = Answer(("workers 4", "microbatches 8"), None, "no pipeline")
    text = said(*alone, together=both)
    assert "What workers 4 and microbatches 8 would give is not known: no pipeline" in text
    assert "all together" in text
    assert "not known: no pipeline" in text
    assert "who knows" in text
    data = json.loads(compact(to_json(Answers(100 * MS, alone, both, T))))
    assert data["together"]["why"] == "no pipeline"
