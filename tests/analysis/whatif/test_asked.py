"""What a user asks is read from words, and written as such."""

from __future__ import annotations

import pytest

from dlprof.analysis.whatif.asked import PERFECT, Asked, factor
from dlprof.errors import DlprofError


@pytest.mark.parametrize(
    ("text", "value"), [("2x", 2.0), ("x2", 2.0), ("1.5", 1.5), (" 1.5× ", 1.5), ("perfect", PERFECT), ("0.5x", 0.5)]
)
def test_speeds(text: str, value: float) -> None:
    assert factor(text) == value


@pytest.mark.parametrize("text", ["", "fast", "-2x", "0", "1e9x", "2 2"])
def test_no_speed(text: str) -> None:
    with pytest.raises(DlprofError, match=r"write 2x, 1\.5x or perfect"):
        factor(text)


def test_each_change_alone_and_in_words() -> None:
    asked = Asked(input=PERFECT, workers=0, device=1.5, stages=True, microbatches=8)
    assert asked.named == ("perfect input", "workers 0", "device 1.5 × as fast", "even stages", "microbatches 8")
    assert [one.named for one in asked.singles] == [(name,) for name in asked.named]
    assert asked.of_pipeline
    assert asked.of_input
    assert Asked().named == ()
    assert not Asked(network=2.0).of_pipeline
