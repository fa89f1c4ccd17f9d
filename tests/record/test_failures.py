"""What a rank writes of itself while it stands still, and that it goes once the rank goes on."""

from __future__ import annotations

import json
from pathlib import Path
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import pytest

from dlprof.record.failures import ASK, STILL, Still, seconds

S = 1_000_000_000


@pytest.mark.parametrize(
    ("asked", "mean_s", "after"), [("", 1.0, 60.0), ("auto", 10.0, 200.0), ("5", 10.0, 5.0), ("off", 1.0, float("inf"))]
)
def test_after_how_long(asked: str, mean_s: float, after: float) -> None:
    assert seconds(asked, mean_s) == after


def test_it_is_written_when_due_or_asked_for_and_goes_with_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLPROF_HANG", "100")
    now = 1000 * S
    monkeypatch.setattr("dlprof.record.failures.perf_counter_ns", lambda: now)
    clock: Any = SimpleNamespace(row=SimpleNamespace(start_ns=now, number=7), owner=get_ident())
    still = Still(clock, lambda ns: ns)
    now += 50 * S
    still.look(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / ASK).touch()
    try:
        raise OSError(28, "full")
    except OSError:
        still.look(tmp_path)
    written = json.loads((tmp_path / STILL).read_text())
    assert (written["step"], written["since_ns"]) == (7, 1000 * S)
    assert (written["handles"]["type"], written["handles"]["text"]) == ("OSError", "No space left on device")
    assert written["threads"][0]["main"]
    assert __file__ in [file for _, file, _ in written["threads"][0]["frames"]]
    assert not (tmp_path / ASK).exists()
    clock.row.number, clock.row.start_ns = 8, now
    now += 10 * S
    still.look(tmp_path)
    assert not (tmp_path / STILL).exists()
    now += 100 * S
    still.look(tmp_path)
    assert (tmp_path / STILL).exists()
    still.end(tmp_path, well=True)
    assert not (tmp_path / STILL).exists()
