"""The limits stand in one place, each of them holds somewhere, and `--no-limits` lifts what it is to lift."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dlprof.read import limits

NAMES = [name for name in vars(limits) if name.isupper()]


@pytest.mark.parametrize("name", NAMES)
def test_every_limit_is_asked_for(name: str) -> None:
    package = Path(limits.__file__).parents[1]
    asking = [path for path in package.rglob("*.py") if re.search(rf"\b{name}\b", path.read_text())]
    of_itself = re.findall(rf"\b{name}\b", Path(limits.__file__).read_text())
    assert len(asking) > 1 or len(of_itself) > 1


def test_limits_hold_unless_they_are_lifted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(limits.NO_LIMITS, raising=False)
    assert limits.limit(5) == 5
    monkeypatch.setenv(limits.NO_LIMITS, "1")
    assert limits.limit(5) > limits.MOST_ROWS
