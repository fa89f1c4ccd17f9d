"""A rank that waits in vain ends with one line; one that goes on is left alone."""

from __future__ import annotations

import threading

from dlprof.trial.bandwidth.watching import Watch


def test_what_takes_too_long_ends_with_a_line() -> None:
    said: list[str] = []
    ended = threading.Event()
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    with Watch(0.05, said.append, end) as watch:
        watch.at("all_reduce of 1 MB has not ended on rank 3")
        assert ended.wait(60)
    assert codes == [1]
    (line,) = said
    assert line == "given up after 0.05 s: all_reduce of 1 MB has not ended on rank 3 (--timeout waits for longer)"


def test_what_goes_on_or_has_more_time_is_left_alone() -> None:
    said: list[str] = []
    with Watch(0.0, said.append, lambda _: None) as watch:
        watch.at("this takes long", more_s=3_600)
        watch.still()  # takes nothing away
        watch._over.wait(0.5)  # several looks
    assert said == []
