"""Whether a benchmark says that a report has become slower, and where."""

from __future__ import annotations

import pytest

from benchmarks.against import Figure, said
from benchmarks.phases import PHASES


def figure(*whole: float, **phases: float) -> Figure:
    middle, least, most = whole
    return Figure((middle, least, most), {phase: phases.get(phase, 0.1) for phase in PHASES}, 0.5)


@pytest.mark.parametrize(
    ("now", "then", "words"),
    [
        (figure(1.0, 0.9, 1.1), None, "never measured before"),
        (figure(1.0, 0.9, 1.1), figure(1.05, 1.0, 1.2), "as before (1.050 (1.000 to 1.200))"),
        (figure(1.3, 1.05, 1.4), figure(1.0, 0.9, 1.1), "as before"),
        (
            figure(1.3, 1.2, 1.4, rules=0.3),
            figure(1.0, 0.9, 1.1),
            "SLOWER than 1.000 (0.900 to 1.100): rules took 0.100",
        ),
        (
            figure(0.7, 0.6, 0.8, start=0.02),
            figure(1.0, 0.9, 1.1),
            "faster than 1.000 (0.900 to 1.100): start took 0.100",
        ),
    ],
)
def test_what_is_said_of_a_change(now: Figure, then: Figure | None, words: str) -> None:
    assert words in said("a case", now, then)
