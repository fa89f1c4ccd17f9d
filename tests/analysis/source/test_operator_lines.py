"""The line that calls operators most often, by the phase, and the function beside it."""

from __future__ import annotations

from typing import Any

import pytest

from dlprof.analysis.source.line_shares import busiest


def line(number: int, function: str, *, after: str = "backward", phase: str = "", **operators: int) -> dict[str, Any]:
    of = {f"aten::{name}": n for name, n in operators.items()}
    return {"file": "a.py", "line": number, "function": function, "source": "x", "phase": phase, "after": after} | {
        "operators": of
    }


@pytest.mark.parametrize(
    ("lines", "places"),
    [
        ([], []),
        ([line(1, "f", mul=5), line(2, "f", mul=9)], [2]),
        ([line(1, "f", mul=9), line(2, "g", mul=3), line(3, "h", mul=8)], [1, 3]),
        # A function that hardly calls them says nothing.
        ([line(1, "f", mul=9), line(2, "g", mul=2)], [1]),
        ([line(1, "f", add=9), line(2, "g", mul=2)], [2]),
        ([line(1, "f", mul=9, after="forward"), line(2, "g", mul=9, phase="forward")], []),
    ],
)
def test_the_busiest_line_of_each_function(lines: list[dict[str, Any]], places: list[int]) -> None:
    found = busiest({"flops": {"lines": lines}}, "", "backward", {"aten::mul"})
    assert [place.line for place in found] == places


@pytest.mark.parametrize("facts", [{}, {"flops": None}, {"flops": {"state": "off"}}])
def test_of_recordings_without_lines_nothing_is_known(facts: dict[str, Any]) -> None:
    assert busiest(facts, "", "backward", {"aten::mul"}) == ()
