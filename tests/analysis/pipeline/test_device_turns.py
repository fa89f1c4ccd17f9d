"""How long each device of a process is busy, and what micro-batches would make of that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dlprof.analysis.pipeline.bubbles import device_turns, overlapped_ns
from dlprof.errors import DoesNotApply
from tests.fixtures import runs, traces
from tests.fixtures.runs import MS


def test_each_device_and_all_together(tmp_path: Path) -> None:
    events: list[Any] = []
    for n in range(4):
        t = n * MS
        events += [traces.step(n, t, MS)]
        events += [traces.kernel("a", t, 500_000, device=0), traces.kernel("b", t + 400_000, 300_000, device=1)]
        events += [traces.kernel("tiny", t + 900_000, 1_000, device=2)]  # no part of the model
    run = runs.measured(runs.foreign(tmp_path, traces.trace(*events, world_size=1)), device_turns)
    rows = run.frame(device_turns)[["device", "busy_ns", "any_ns"]].to_dict("records")
    assert rows == [
        {"device": "device", "busy_ns": 500_000, "any_ns": 700_000},
        {"device": "device1", "busy_ns": 300_000, "any_ns": 700_000},
    ]


def test_a_process_with_one_device_has_no_turns(tmp_path: Path) -> None:
    path = runs.foreign(tmp_path, traces.training(3, world_size=1))
    with pytest.raises(DoesNotApply):
        runs.measured(path, device_turns).frame(device_turns)


def test_stages_alike_take_what_gpipe_takes() -> None:
    for p, m in ((2, 4), (4, 16)):
        assert overlapped_ns(pd.Series([100.0] * p), m) == pytest.approx(100 * (m + p - 1) / m)
