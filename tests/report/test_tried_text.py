"""The answer of `dlprof try` as text: it fits, begins with the answer, and obeys nothing that a terminal would."""

from __future__ import annotations

import unicodedata

import pytest
from msgspec.structs import replace

from dlprof.report.tried_text import render
from dlprof.result.tried import Attempt, Gain, Tried

WORKERS = Attempt(
    {"loader.num_workers": 4, "loader.persistent_workers": True},
    "gain",
    predicted=1.44,
    measured=Gain(1.412, 1.38, 1.44, 3),
    epochs=Gain(1.3, 1.2, 1.4, 3),
    before_ns=214.6e6,
    after_ns=152e6,
)
ODD = Attempt({"env.\x1b[31mODD": "\u202e"}, "not_counted", "the job ended with exit code 1: \x1b[2J" + "x" * 300)
BEST = Tried("out_of_time", (WORKERS, ODD), (WORKERS,), WORKERS, "", 7, 30, 100, ("it was recorded on node-1",))


@pytest.mark.parametrize("width", [40, 80, 132])
def test_every_line_fits_and_is_safe(width: int) -> None:
    text = render(BEST, width)
    assert max(map(len, text.splitlines())) <= width
    acting = {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")} - {"\n"}
    assert acting == set()


def test_the_answer_comes_first_and_the_rest_below() -> None:
    lines = render(BEST, 132).splitlines()
    assert lines[0].startswith("Tried: loader.num_workers=4, loader.persistent_workers=True: 1.41 × measured (1.38 to")
    assert lines[1] == "  215 ms → 152 ms a step" or lines[1] == "  214.6 ms → 152.0 ms a step"
    assert "  alone" in lines
    assert "  together, against the best before" in lines
    assert "  7 runs of 30 steps · 1.7 min · out of time" in lines
    assert lines[-1] == "  ! it was recorded on node-1"


def test_the_edit_is_printed_as_it_stands() -> None:
    diff = "--- a/train.py\n+++ b/train.py\n@@ -1 +1 @@\n-a\n+b\n"
    assert render(replace(BEST, diff=diff), 80).endswith("\n" + diff)


def test_nothing_that_ran_has_no_figures() -> None:
    assert render(Tried("complete"), 80).splitlines() == ["Tried: nothing, as no change could be set from outside."]
