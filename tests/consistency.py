"""What holds of every result, whatever was recorded: parts add up, and nothing saves more than there is."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest

from dlprof.result import CATEGORIES
from dlprof.rules import RULES

_OF = {r.id: set(r.saves_from) for r in RULES}
_STATES = ("found", "clear", "not_measured", "error")
_ROUNDED = 1 + 1e-9


def assert_consistent(said: dict[str, Any]) -> None:
    """Hold a result, as result.json has it, against itself."""
    json.dumps(said, allow_nan=False)
    step = said["window"]["step_ns"]
    time = _time(said, step)
    states = [_STATES.index(o["state"]) for o in said["outcomes"]]
    assert states == sorted(states)
    assert [o["why"] for o in said["outcomes"] if o["state"] == "error"] == []
    found = [o for o in said["outcomes"] if o["state"] == "found"]
    savings = [o["saving_ns"] for o in found]
    assert savings == sorted(savings, reverse=True)
    for o in found:
        if o["scope"] == "step":
            assert 0 < o["saving_ns"] <= most_of(o["id"], time, step) * _ROUNDED, o["id"]
            assert o["share"] == pytest.approx(o["saving_ns"] / step)
            assert o["share"] == 1 or o["speedup"] == pytest.approx(1 / (1 - o["share"]))
        assert all(f["step_ns"] > 0 for f in o["forecasts"]), o["id"]
        assert o["changes"], o["id"]
        assert set(o["ranks"]) <= {cost["rank"] for cost in o["by_rank"]} or o["scope"] == "risk", o["id"]
    for o in said["outcomes"]:
        assert (o["state"] in ("found", "clear")) or not (o["saving_ns"] or o["by_rank"]), o["id"]
    together = said["together"]
    inside = [o["saving_ns"] for o in found if o["scope"] == "step"]
    if together and inside:
        assert max(inside) <= together["saving_ns"] * _ROUNDED
        # More than their sum, where ranks hide from each other what each of them would save.
        assert together["share"] <= _ROUNDED
    _blame(said, time)
    for d in said["device"]:
        parts = ("computation", "exposed_communication", "exposed_copy", "idle")
        assert sum(d[f"{part}_ns"] for part in parts) == d["span_ns"]


def _time(said: dict[str, Any], step: float) -> dict[int, dict[str, float]]:
    """Check that the parts of each rank's step add up, and give them."""
    time: dict[int, dict[str, float]] = defaultdict(dict)
    for part in said["time"]:
        assert part["category"] in CATEGORIES
        assert part["ns"] >= 0
        time[part["rank"]][part["category"]] = part["ns"]
    if time:
        totals = [sum(parts.values()) for parts in time.values()]
        assert sum(totals) / len(totals) == pytest.approx(step, rel=1e-6)
    return dict(time)


def most_of(rule: str, time: dict[int, dict[str, float]], step: float) -> float:
    """Return what a rule may save: of some rank its own time in rule's categories, and of its waiting as much as the
    others have of them.
    """
    if not _OF[rule] or not time:
        return step
    own = {r: sum(ns for c, ns in parts.items() if c in _OF[rule]) for r, parts in time.items()}
    waiting = {"communication", "pipeline_bubble", "other"} - _OF[rule]
    total = sum(own.values())
    return max(own[r] + min(total - own[r], sum(parts.get(c, 0.0) for c in waiting)) for r, parts in time.items())


def _blame(said: dict[str, Any], time: dict[int, dict[str, float]]) -> None:
    """Nobody waits for longer than it communicates, or for more of something than the other has of it."""
    waited: dict[int, float] = defaultdict(float)
    for b in said["blame"]:
        assert b["ns"] > 0
        assert b["rank"] != b["culprit"]
        waited[b["rank"]] += b["ns"]
        if b["culprit"] >= 0 and b["category"] != "other":
            assert b["ns"] <= time[b["culprit"]][b["category"]] * _ROUNDED + 1
    for rank, ns in waited.items():
        assert ns <= (time[rank].get("communication", 0.0) + time[rank].get("pipeline_bubble", 0.0)) * _ROUNDED + 1
