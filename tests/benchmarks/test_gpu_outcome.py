"""What passes and what fails: tolerances, missing figures, rows of parts, and the exit code."""

from __future__ import annotations

import json
import math

import pytest

from benchmarks.gpu import outcome
from benchmarks.gpu.outcome import Part, Row, above, below, between, holds, near, row_of, same, skipped


@pytest.mark.parametrize(
    ("said", "true", "state"),
    [
        (114.9, 100.0, "passed"),
        (85.1, 100.0, "passed"),
        (115.1, 100.0, "failed"),
        (84.9, 100.0, "failed"),
        (-114.9, -100.0, "passed"),
        (None, 100.0, "failed"),
        (math.nan, 100.0, "failed"),
        (100.0, None, "failed"),
        (100.0, math.nan, "failed"),
        (math.inf, math.inf, "failed"),
    ],
)
def test_a_figure_within_its_share_of_the_truth_passes(said: float | None, true: float | None, state: str) -> None:
    assert near("saving", said, true, share=0.15, unit="ms", how="events").state == state


def test_points_are_of_the_unit_and_the_wider_limit_counts() -> None:
    assert near("computation", 0.951, 0.98, points=0.03, unit="share", how="").state == "passed"
    assert near("computation", 0.949, 0.98, points=0.03, unit="share", how="").state == "failed"
    # The tolerance itself is within: 0.1 + 0.2 is not 0.3.
    assert near("sum", 0.1 + 0.2, 0.0, points=0.3, unit="", how="").state == "passed"
    assert near("gain", 3.0, 1.0, share=0.15, points=2.0, unit="ms", how="").state == "passed"
    assert near("gain", 3.1, 1.0, share=0.15, points=2.0, unit="ms", how="").state == "failed"
    assert near("gain", 124.0, 100.0, share=0.25, points=2.0, unit="ms", how="").state == "passed"


def test_limits_exclude_their_own_value_but_those_of_a_range() -> None:
    assert below("light", 0.0099, 0.01, unit="share", how="").state == "passed"
    assert below("light", 0.01, 0.01, unit="share", how="").state == "failed"
    assert above("tensor", 0.61, 0.6, unit="share", how="").state == "passed"
    assert above("tensor", 0.6, 0.6, unit="share", how="").state == "failed"
    assert between("traced", 0.9, 0.9, 1.1, unit="", how="").state == "passed"
    assert between("traced", 1.101, 0.9, 1.1, unit="", how="").state == "failed"
    for nothing in (None, math.nan):
        assert below("light", nothing, 0.01, unit="share", how="").state == "failed"
        assert above("tensor", nothing, 0.6, unit="share", how="").state == "failed"
        assert between("traced", nothing, 0.9, 1.1, unit="", how="").state == "failed"


def test_equal_is_equal_and_nothing_equals_nothing_said() -> None:
    assert same("steps", 60, 60, how="").state == "passed"
    assert same("steps", 59, 60, how="").state == "failed"
    assert same("device", None, None, how="").state == "failed"


def test_a_row_fails_with_its_first_failure_and_passes_with_a_part_that_did() -> None:
    good, bad, left = holds("a", True, ""), holds("b", False, "no kernel"), skipped("c", "one GPU")
    assert row_of("x", [good, left]).state == "passed"
    assert row_of("x", [left]).state == "skipped"
    assert row_of("x", []).state == "failed"
    failed = row_of("x", [good, bad, holds("d", False, "later")], "exit code 1")
    assert failed.state == "failed"
    assert failed.why.startswith("b: no kernel")
    assert "2 more" in failed.why
    assert row_of("x", [good], "exit code 1").state == "failed"


def test_a_rehearsal_passes_nothing_and_hides_no_failure() -> None:
    passed, failed = holds("a", True, ""), holds("a", False, "wrong")
    assert [outcome.rehearsed(part).state for part in (passed, failed)] == ["rehearsed", "rehearsed"]
    assert outcome.rehearsed(skipped("c", "one GPU")).state == "skipped"
    assert row_of("x", [passed], rehearsal=True).state == "rehearsed"
    assert row_of("x", [failed], rehearsal=True).state == "failed"


def test_only_all_passed_is_0() -> None:
    def rows(*states: outcome.State) -> list[Row]:
        return [Row(str(n), state) for n, state in enumerate(states)]

    assert outcome.exit_code(rows("passed", "passed")) == 0
    assert outcome.exit_code(rows("rehearsed")) == 0
    states: tuple[outcome.State, ...] = ("failed", "skipped", "running")
    for state in states:
        assert outcome.exit_code([*rows("passed"), Row("y", state)]) == 1
    assert outcome.exit_code([]) == 1


def test_a_row_comes_back_from_json_without_what_json_cannot_hold() -> None:
    part = Part("a", "failed", "why", said=math.nan, true=2.5, unit="ms", limit="± 3%", how="events")
    row = Row("async", "failed", "a: why", (part, skipped("b", "one GPU")), 12.5, "2026-01-02 03:04 UTC")
    data = outcome.to_json(row)
    back = outcome.from_json(json.loads(json.dumps(data, allow_nan=False)))
    assert back.parts[0].said is None
    assert (back.check, back.state, back.took_s, back.parts[1]) == ("async", "failed", 12.5, row.parts[1])
