"""Kernels too small for their launches: found, silent on large kernels and on Python, abstaining on a CPU."""

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.compute.rules.small_kernels import RULE
from dlprof.result import Setting
from tests.fixtures import runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.runs import MS


def launching(folder: Path, length: int, apart: int, ops: bool = True, count: int = 10) -> Path:
    """Write three steps of 1 ms of so many kernels of a length, `apart` ns from start to start, and a long one."""
    events: list[Any] = []
    for n in range(3):
        t, c = n * MS, 1 + 100 * n
        events += [traces.step(n, t, MS)]
        events += [traces.op("aten::add", t, count * apart)] if ops else []
        for i in range(count):
            at = t + i * apart
            events += traces.launched("small", at, at + 5_000, length, c + i)
        events += traces.launched(
            "large", t + count * apart, t + count * apart + 5_000, MS - count * apart - 5_000, c + 50
        )
    return runs.foreign(folder, traces.trace(*events, world_size=1))


def test_found_with_what_a_graph_would_save(tmp_path: Path) -> None:
    found = ask(RULE, launching(tmp_path, 4_000, 40_000))
    assert found.state == "found"
    # Ten gaps of 36 µs behind the small ones, of which a µs each stays.
    assert found.saving_ns == pytest.approx(10 * 35_000, rel=0.02)
    assert "10 of 11 kernels a step" in found.summary
    assert found.ranks == (0,)
    captured, larger = found.changes
    assert captured.settings == (Setting("mode", None, "reduce-overhead"),)
    assert [(c.numerics, c.training) for c in (captured, larger)] == [(False, False), (True, True)]
    assert found.evidence is not None
    assert found.evidence.rows == (("small", 10.0, 4_000.0),)


def test_gaps_behind_large_kernels_are_left_alone(tmp_path: Path) -> None:
    clear = ask(RULE, launching(tmp_path, 30_000, 60_000))
    assert (clear.state, clear.share) == ("clear", 0.0)


def test_python_behind_small_kernels_is_left_alone(tmp_path: Path) -> None:
    # Nothing of the host's is traced between the launches: for 105 µs after each it is in Python.
    clear = ask(RULE, launching(tmp_path, 4_000, 110_000, ops=False, count=8))
    assert (clear.state, clear.share < 0.05) == ("clear", True)


def test_a_cpu_launches_nothing(tmp_path: Path) -> None:
    steps = [runs.light(n, 10 * MS) for n in range(30)]
    answer = ask(RULE, runs.recorded(tmp_path / "run", (None, steps, runs.CPU)))
    assert (answer.state, "on the CPU" in answer.why) == ("does_not_apply", True)
