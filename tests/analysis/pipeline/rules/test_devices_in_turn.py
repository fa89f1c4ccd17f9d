"""Devices of one process that work in turn are found; those that overlap, replicas and single ones are left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.pipeline.rules.devices_in_turn import RULE
from tests.fixtures import runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.runs import MS


def job(folder: Path, pieces: int, devices: int = 2) -> Path:
    """Write steps of 1 ms and more in which each device computes 400 µs of each batch, in so many pieces."""
    events: list[Any] = []
    each, number = 400_000 // pieces, 0
    step = each * (pieces + devices - 1) + 50_000
    for n in range(5):
        t = n * step
        events += [traces.step(n, t, step)]
        for piece in range(pieces):
            for device in range(devices):
                number += 1
                at = t + 20_000 + (piece + device) * each
                events += [traces.call("cudaLaunchKernel", t + 100 * (number % 100), 90, number)]
                events += [traces.kernel("gemm", at, each - 1_000, number, device=device)]
    return runs.foreign(folder, traces.trace(*events, world_size=1))


def test_found_with_what_micro_batches_would_give(tmp_path: Path) -> None:
    found = ask(RULE, job(tmp_path, 1))
    assert found.state == "found"
    assert found.saving_ns == pytest.approx(400_000 - 400_000 / 8, rel=0.02)
    assert "8 micro-batches" in found.advice[0]
    assert found.at_most


def test_micro_batches_are_left_alone(tmp_path: Path) -> None:
    clear = ask(RULE, job(tmp_path, 8))
    assert clear.state == "clear"
    assert clear.share < 0.05


def test_one_device_has_none(tmp_path: Path) -> None:
    found = ask(RULE, job(tmp_path, 4, devices=1))
    assert (found.state, found.why) == ("does_not_apply", "one device computes in each process")


def test_replicas_are_another_rules(tmp_path: Path) -> None:
    events: list[Any] = []
    for n in range(5):
        t = n * MS
        events += [traces.step(n, t, MS), traces.annotation("DataParallel.forward", t, 500_000)]
        events += [traces.op("Broadcast", t, 100_000), traces.call("cudaLaunchKernel", t, 900, n + 1)]
        events += [traces.kernel("gemm", t + 100_000 + d * 400_000, 390_000, n + 1, device=d) for d in (0, 1)]
    found = ask(RULE, runs.foreign(tmp_path, traces.trace(*events, world_size=1)))
    assert found.state == "does_not_apply"
    assert "DataParallel" in found.why
