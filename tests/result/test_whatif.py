"""Answers are plain data for whoever prints them."""

from dlprof.result.scale import Answer, Answers
from dlprof.result.stored import plain


def test_answers_as_plain_data() -> None:
    one = Answer(("workers 4",), 5e7)
    data = plain(Answers(1e8, (one,), None, None))
    assert data["alone"][0] == {"changes": ("workers 4",), "step_ns": 5e7, "why": "", "unknown": ()}
