"""What commands share: options of recording and which exclude each other, and how long work says how far it is."""

from __future__ import annotations

import io
import json

import click
import pytest
from click.testing import CliRunner

from dlprof.analysis.engine import Done
from dlprof.commands.progress import Progress
from dlprof.commands.recording import Recording, recording_options
from dlprof.record.launch.options import STACKS_A_SECOND


def recording_of(*words: str) -> Recording:
    """Return the recording that words on a command line ask for."""
    asked: list[Recording] = []

    @click.command()
    @recording_options
    def command(recording: Recording) -> None:
        recording.check()
        asked.append(recording)

    result = CliRunner().invoke(command, words, standalone_mode=False)
    if result.exception:
        raise result.exception
    return asked[0]


def test_options_reach_the_job_as_variables_of_its_environment() -> None:
    recording = recording_of("--window", "3,1,2", "--stacks", "on", "--memory")
    env = recording.environment({"HOME": "/home/me"})
    assert env["HOME"] == "/home/me"
    assert (env["DLPROF_WINDOW"], env["DLPROF_STACKS"], env["DLPROF_MEMORY"]) == ("3,1,2", STACKS_A_SECOND, "on")
    assert "DLPROF_SET" not in env


def test_overridden_variables_are_set_and_what_they_were_is_passed_on() -> None:
    env = recording_of("--set", "env.OMP_NUM_THREADS=1", "--set", "loader.num_workers=2").environment(
        {"OMP_NUM_THREADS": "8"}
    )
    assert env["OMP_NUM_THREADS"] == "1"
    passed = json.loads(env["DLPROF_SET"])
    assert passed["environment"] == {"OMP_NUM_THREADS": "8"}
    assert passed["set"]["loader.num_workers"] == 2


@pytest.mark.parametrize(
    "words",
    [
        ["--window", "10,2"],
        *(["--window", window] for window in ("10,2,0", "-1,2,3", "a,b,c")),
        ["--ranks", "first"],
        ["--nsys", "--ranks", "0"],
        ["--stacks", "0"],
        *(["--sample", seconds] for seconds in ("0", "0.01", "often", "nan", "1e9")),
        ["--job", "a/b"],
        ["--lines", "no function"],
        ["--set", "loader.nothing=1"],
        ["--set", "torch.autocast=bf16"],
        ["--set", "loader.num_workers=1", "--set", "env.NVIDIA_TF32_OVERRIDE=1"],
        ["--set", "optimizer.fused=1", "--set", "optimizer.foreach=1"],
        ["--try", "--no-report"],
    ],
)
def test_what_cannot_be_is_a_usage_error(words: list[str]) -> None:
    with pytest.raises(click.UsageError):
        recording_of(*words)


def test_numbers_change_only_where_that_is_allowed() -> None:
    recording = recording_of("--set", "torch.autocast=bf16", "--allow-numerics")
    assert recording.overrides == {"torch.autocast": "bf16"}


def test_the_words_of_a_recording_ask_for_the_same() -> None:
    words = ["--window", "3,1,2", "--lines", "auto", "--memory", "--stacks", "9", "--sample", "2", "--set"]
    words += ["loader.num_workers=2", "--set", "env.OMP_NUM_THREADS=1", "--quiet"]
    recording = recording_of(*words)
    assert recording_of(*recording.words) == recording
    assert sorted(recording.words) == sorted(words)
    assert recording_of().words == []


class Terminal(io.StringIO):
    """Text that is written to a terminal."""

    def isatty(self) -> bool:
        return True


def ticking(*seconds: float) -> object:
    """Return a clock that reads so, one after the other."""
    times = iter(seconds)
    return lambda: next(times)


HALF = Done(2, 4, 6, 12, 50_000_000, 100_000_000)
READ = "read 2 of 4 ranks · 6 of 12 files · 50 MB of 100 MB"


@pytest.mark.parametrize(
    ("done", "seconds", "line"),
    [
        (HALF, 10, f"{READ} · 5 MB/s · 10 s left"),
        (HALF, 0.1, f"{READ} · 500 MB/s · 1 s left"),
        (HALF, 59, f"{READ} · 847.5 kB/s · 59 s left"),
        (HALF, 125, f"{READ} · 400 kB/s · 2 min 5 s left"),
        (HALF, 4320, f"{READ} · 11.6 kB/s · 1 h 12 min left"),
        # At the start nothing is guessed; what was known before is neither in the rate nor in the time left.
        (Done(0, 8, 0, 8, 0, 1000), 1, "read 0 of 8 ranks · 0 of 8 files · 0 B of 1 kB"),
        (
            Done(3, 5, 3, 5, 60_000_000, 100_000_000, known_ranks=2, known_bytes=40_000_000),
            *(10, "read 3 of 5 ranks · 3 of 5 files · 60 MB of 100 MB · 2 MB/s · 20 s left"),
        ),
        (
            Done(2, 2, 2, 2, 100, 100, known_ranks=2, known_bytes=100),
            *(10, "read 2 of 2 ranks · 2 of 2 files · 100 B of 100 B"),
        ),
    ],
)
def test_rate_and_time_left(done: Done, seconds: float, line: str) -> None:
    stream = Terminal()
    Progress("A: ", stream=stream, clock=ticking(0.0, seconds, seconds))(done)  # type: ignore[arg-type]
    assert stream.getvalue().strip("\r") == f"A: {line}"


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


def test_one_rank_is_no_long_work_in_a_log_and_quiet_is_quiet() -> None:
    for stream, done, quiet in ((io.StringIO(), Done(1, 1), False), (Terminal(), HALF, True)):
        with Progress(stream=stream, quiet=quiet) as progress:
            progress(done)
            if quiet:
                progress.tell("nothing")
        assert stream.getvalue() == ""


def test_a_line_that_stays_takes_the_place_of_the_one_that_goes() -> None:
    stream = Terminal()
    progress = Progress(stream=stream, clock=ticking(0.0, 10.0, 10.0))  # type: ignore[arg-type]
    progress(HALF)
    progress.tell("2 ranks\x1b are read again")
    assert stream.getvalue().endswith("\r2 ranks\\x1b are read again\n")
