"""Long work says how far it is: on a terminal in one line that goes, elsewhere in a few lines, if quiet not at all."""

from __future__ import annotations

import io

import pytest

from dlprof.analysis.engine import Done
from dlprof.commands.progress import Progress


class Terminal(io.StringIO):
    """Text that is written to a terminal."""

    def isatty(self) -> bool:
        return True


def ticking(*seconds: float) -> object:
    """Return a clock that reads so, one after the other."""
    times = iter(seconds)
    return lambda: next(times)


HALF = Done(2, 4, 6, 12, 50_000_000, 100_000_000)


def test_rate_and_time_left_are_told() -> None:
    stream = Terminal()
    progress = Progress("A: ", stream=stream, clock=ticking(0.0, 10.0, 10.0))  # type: ignore[arg-type]
    progress(HALF)
    line = stream.getvalue().strip("\r")
    assert line == "A: read 2 of 4 ranks · 6 of 12 files · 50 MB of 100 MB · 5 MB/s · 10 s left"


@pytest.mark.parametrize(
    ("seconds", "left"),
    [(0.1, "1 s left"), (59.0, "59 s left"), (125.0, "2 min 5 s left"), (4320.0, "1 h 12 min left")],
)
def test_time_is_written_as_people_count_it(seconds: float, left: str) -> None:
    stream = Terminal()
    Progress(stream=stream, clock=ticking(0.0, seconds, seconds))(HALF)  # type: ignore[arg-type]
    assert stream.getvalue().endswith(left)


def test_at_the_start_nothing_is_guessed() -> None:
    stream = Terminal()
    Progress(stream=stream, clock=ticking(0.0, 1.0, 1.0))(Done(0, 8, 0, 8, 0, 1000))  # type: ignore[arg-type]
    assert stream.getvalue().strip("\r") == "read 0 of 8 ranks · 0 of 8 files · 0 B of 1 kB"


def test_a_terminal_is_left_as_it_was() -> None:
    stream = Terminal()
    with Progress(stream=stream) as progress:
        progress(HALF)
        progress(Done(4, 4))
    last = stream.getvalue().split("\r")
    assert last[-1] == ""
    assert last[-2].strip() == ""
    assert len(last[-2]) >= len("read 4 of 4 ranks")
    assert "\n" not in stream.getvalue()


def test_elsewhere_a_tenth_of_the_work_is_a_line() -> None:
    stream = io.StringIO()
    with Progress(stream=stream) as progress:
        for n in range(101):
            progress(Done(n, 100))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[-1].startswith("read 100 of 100 ranks")


def test_one_rank_is_no_long_work_in_a_log() -> None:
    stream = io.StringIO()
    Progress(stream=stream)(Done(1, 1))
    assert stream.getvalue() == ""


def test_quiet_is_quiet() -> None:
    stream = Terminal()
    with Progress(stream=stream, quiet=True) as progress:
        progress(HALF)
    assert stream.getvalue() == ""


def test_what_was_known_before_is_not_in_the_rate_and_the_time_left() -> None:
    stream = Terminal()
    progress = Progress(stream=stream, clock=ticking(0.0, 10.0, 10.0))  # type: ignore[arg-type]
    progress(Done(3, 5, 3, 5, 60_000_000, 100_000_000, known_ranks=2, known_bytes=40_000_000))
    assert stream.getvalue().strip("\r") == ("read 3 of 5 ranks · 3 of 5 files · 60 MB of 100 MB · 2 MB/s · 20 s left")


def test_where_all_was_known_before_nothing_is_left() -> None:
    stream = Terminal()
    progress = Progress(stream=stream, clock=ticking(0.0, 10.0, 10.0))  # type: ignore[arg-type]
    progress(Done(2, 2, 2, 2, 100, 100, known_ranks=2, known_bytes=100))
    assert stream.getvalue().strip("\r") == "read 2 of 2 ranks · 2 of 2 files · 100 B of 100 B"


def test_a_line_that_stays_takes_the_place_of_the_one_that_goes() -> None:
    stream = Terminal()
    progress = Progress(stream=stream, clock=ticking(0.0, 10.0, 10.0))  # type: ignore[arg-type]
    progress(HALF)
    progress.tell("2 ranks\x1b are read again")
    assert stream.getvalue().endswith("\r2 ranks\\x1b are read again\n")
    quiet = io.StringIO()
    Progress(quiet=True, stream=quiet).tell("nothing")
    assert quiet.getvalue() == ""
