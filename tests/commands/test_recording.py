"""The options of every command that records: which values they take, and which exclude each other."""

import json

import click
import pytest
from click.testing import CliRunner

from dlprof.commands.recording import Recording, recording_options
from dlprof.record.launch.options import STACKS_A_SECOND


def given(*words: str) -> Recording:
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
    recording = given("--window", "3,1,2", "--stacks", "on", "--memory")
    env = recording.environment({"HOME": "/home/me"})
    assert env["HOME"] == "/home/me"
    assert (env["DLPROF_WINDOW"], env["DLPROF_STACKS"], env["DLPROF_MEMORY"]) == ("3,1,2", STACKS_A_SECOND, "on")
    assert "DLPROF_SET" not in env


def test_overridden_variables_are_set_and_what_they_were_is_passed_on() -> None:
    env = given("--set", "env.OMP_NUM_THREADS=1", "--set", "loader.num_workers=2").environment({"OMP_NUM_THREADS": "8"})
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
        given(*words)


def test_numbers_change_only_where_that_is_allowed() -> None:
    recording = given("--set", "torch.autocast=bf16", "--allow-numerics")
    assert recording.overrides == {"torch.autocast": "bf16"}


def test_the_words_of_a_recording_ask_for_the_same() -> None:
    words = ["--window", "3,1,2", "--lines", "auto", "--memory", "--stacks", "9", "--sample", "2", "--set"]
    words += ["loader.num_workers=2", "--set", "env.OMP_NUM_THREADS=1", "--quiet"]
    recording = given(*words)
    assert given(*recording.words) == recording
    assert sorted(recording.words) == sorted(words)
    assert given().words == []
