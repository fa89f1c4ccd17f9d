"""What is asked of a recording is kept as the collectors read it, and what makes no sense is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dlprof.record.launch import options


@pytest.mark.parametrize(
    ("check", "given", "kept"),
    [
        (options.window, "", ""),
        (options.window, " 3, 1,2", "3,1,2"),
        (options.ranks, "all", "all"),
        (options.ranks, "0,1,last", "0,1,last"),
        (options.ranks, "0-7,16000-16383,per-host", "0-7,16000-16383,per-host"),
        (options.ranks, "per-stage", "per-stage"),
        (options.function, "auto", "auto"),
        (options.function, "package.data:Images.__getitem__", "package.data:Images.__getitem__"),
        (options.flops, "on", "on"),
        (options.stacks, "on", options.STACKS_A_SECOND),
        (options.stacks, "off", "off"),
        (options.stacks, "0100", "100"),
        (options.sample, "off", "off"),
        (options.sample, "0.10", "0.1"),
    ],
)
def test_a_value_is_kept(check: Callable[[str], str], given: str, kept: str) -> None:
    assert check(given) == kept


@pytest.mark.parametrize(
    ("check", "given"),
    [
        (options.window, "10,2"),
        (options.window, "10,-1,2"),
        (options.window, "10,2,0"),
        (options.ranks, ""),
        (options.ranks, "0,"),
        (options.ranks, "7-0"),
        (options.ranks, "-1"),
        (options.ranks, "first"),
        (options.ranks, "10000000000"),
        (options.function, "package.data"),
        (options.function, "data:9"),
        (options.flops, "maybe"),
        (options.stacks, "1001"),
        (options.sample, "0.01"),
        (options.sample, "nan"),
    ],
)
def test_what_cannot_be_is_refused(check: Callable[[str], str], given: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        check(given)


def test_what_is_asked_reaches_the_ranks_by_its_name() -> None:
    asked = options.asked(lines=("a:f", "b:g"), memory=True, nvtx=False, window="3,1,2")
    assert options.variables(asked) == {
        "DLPROF_LINES": "a:f\nb:g",
        "DLPROF_MEMORY": "on",
        "DLPROF_NVTX": "off",
        "DLPROF_WINDOW": "3,1,2",
    }
