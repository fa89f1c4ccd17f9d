"""Anomaly mode: found by what it asks after each function of the backward pass, and priced by a replay without that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.host.rules.anomaly_mode import RULE
from tests.fixtures import runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.runs import MS

US = 1_000
STEPS, FUNCTIONS, LENGTH = 6, 20, 4 * MS


def job(folder: Path, *, checks: bool) -> Path:
    """Record steps of 1 ms forward and up to 3 ms backward: 20 functions of 50 µs, with 100 µs of checks after each."""
    each = 150 * US if checks else 50 * US
    events: list[Any] = []
    length = LENGTH if checks else 2 * MS
    for step in range(STEPS):
        at, ids = step * length, 1_000 * (step + 1)
        events += [traces.step(step, at, length), traces.annotation("dlprof::forward", at, 900 * US)]
        events += [
            traces.op("aten::mm", at, 800 * US),
            *traces.launched("gemm", at + 9 * US, at + 20 * US, 50 * US, ids),
        ]
        events.append(traces.annotation("dlprof::backward", at + MS, FUNCTIONS * each))
        for n in range(FUNCTIONS):
            began, tid = at + MS + n * each, traces.AUTOGRAD
            name = "autograd::engine::evaluate_function: MmBackward0"
            events.append(traces.op(name, began, each - 5 * US, tid=tid))
            events.append(traces.op("MmBackward0", began + US, 40 * US, tid=tid))
            events.append(traces.call("cudaLaunchKernel", began + 9 * US, 5 * US, ids + 10 * n + 1, tid=tid))
            events.append(traces.kernel("gemm", began + 20 * US, 10 * US, ids + 10 * n + 1))
            if checks:
                for k, check in enumerate(("aten::isnan", "aten::_is_any_true", "aten::item")):
                    start = began + (45 + 30 * k) * US
                    events.append(traces.op(check, start, 28 * US, tid=tid))
                    events.append(
                        traces.call("cudaLaunchKernel", start + 2 * US, 4 * US, ids + 10 * n + 2 + k, tid=tid)
                    )
                    events.append(traces.kernel("small", start + 8 * US, 2 * US, ids + 10 * n + 2 + k))
    made = traces.trace(*events, world_size=1, device="NVIDIA A100-SXM4-80GB")
    return runs.recorded(folder / "run", (made, [], runs.GPU))


def test_its_questions_are_what_is_saved(tmp_path: Path) -> None:
    found = ask(RULE, job(tmp_path, checks=True))
    assert found.state == "found"
    # 20 × 88 µs from the first question to the last answer.
    assert found.saving_ns == pytest.approx(20 * 88 * US, rel=0.1)
    assert "set_detect_anomaly(False)" in found.advice[0]


def test_without_them_it_is_off(tmp_path: Path) -> None:
    assert ask(RULE, job(tmp_path, checks=False)).state == "clear"
