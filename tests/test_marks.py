"""Marks of a script reach the recorder where there is one, and do nothing without."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

import dlprof
from dlprof import marks
from tests.fixtures.places import ROOT


class Clock:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def user_step(self, samples: Any, tokens: Any) -> None:
        self.log.append(f"step {samples} {tokens}")

    def open_range(self, name: str) -> Any:
        self.log.append(f"+{name}")
        return SimpleNamespace(__exit__=lambda *_: self.log.append(f"-{name}"))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(marks, "recorder", SimpleNamespace(clock=clock))
    return clock


def test_steps_and_ranges_reach_the_recorder(clock: Clock) -> None:
    with dlprof.annotate("outer"):
        dlprof.step()
        dlprof.step(samples=8, tokens=64)
    assert clock.log == ["+outer", "step None None", "step 8 64", "-outer"]


def test_a_decorated_function_has_a_range_for_each_call_also_where_it_recurses(clock: Clock) -> None:
    @dlprof.annotate("down")
    def down(n: int) -> int:
        return down(n - 1) + 1 if n else 0

    assert down(2) == 2
    assert clock.log == ["+down"] * 3 + ["-down"] * 3
    assert down.__name__ == "down"


def test_without_a_recorder_they_do_nothing_and_exceptions_pass() -> None:
    assert marks.recorder is None
    dlprof.step()
    with pytest.raises(KeyError), dlprof.annotate("name"):
        raise KeyError("theirs")


def test_the_version_is_that_of_the_package() -> None:
    found = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    assert found[1] == marks.__version__ == dlprof.__version__
