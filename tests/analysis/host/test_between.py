"""The script's lines between the phases and the host's Python there: who keeps what both see."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.diagnosis import diagnose
from dlprof.analysis.host.between import held_up
from dlprof.analysis.host.rules import host_bound, step_python
from dlprof.read.run import open_run
from dlprof.result import Outcome
from tests.fixtures import runs, traces
from tests.fixtures.runs import MS, light
from tests.fixtures.sampled_stacks import MAIN

LINES = f"{MAIN};main (/me/train.py:70) 60\n{MAIN};main (/me/train.py:71) 40\n"
MODULE = "_wrapped_call_impl (/lib/python3.11/site-packages/torch/nn/modules/module.py:1)"
INSIDE = f"{MAIN};main (/me/train.py:60);{MODULE} 100\n"


def recorded(folder: Path, *, between: int, computing: int = 0, inside: int = 0, stacks: str = LINES) -> Path:
    """Record steps of 20 ms on a CPU: so many ms are between the phases, `computing` of them in an operator.

    Of the rest, which is forward, `inside` ms are Python.
    """
    events: list[Any] = []
    for n in range(3):
        t, forward = n * 20 * MS, (20 - between) * MS
        events += [
            traces.step(n, t, 20 * MS),
            traces.annotation("dlprof::forward", t, forward),
            traces.op("aten::mm", t, forward - inside * MS),
        ]
        events += [traces.op("aten::mean", t + forward, computing * MS)] if computing else []
    made = traces.trace(*events, device="", backend="", world_size=1)
    steps = [light(n, 20 * MS, forward_ns=(20 - between) * MS) for n in range(50)]
    path = runs.recorded(folder / "run", (made, steps, {**runs.CPU, "pid": 10}))
    (path / "ranks/00000/stacks.txt.gz").write_bytes(gzip.compress(stacks.encode()))
    return path


def verdict(path: Path) -> dict[str, Outcome]:
    found = diagnose(open_run(path), (host_bound.RULE, step_python.RULE), jobs=1)
    return {outcome.id: outcome for outcome in found.outcomes}


def test_lines_that_take_all_of_it_are_told_once(tmp_path: Path) -> None:
    """Without an operator, both would have the same 6 ms at the same lines."""
    told = verdict(recorded(tmp_path, between=6))
    assert told["step_python"].saving_ns == pytest.approx(6 * MS)
    assert told["host_bound"].state == "clear"
    assert told["host_bound"].share == pytest.approx(0, abs=0.001)


def test_the_host_keeps_what_is_its_besides_the_lines(tmp_path: Path) -> None:
    told = verdict(recorded(tmp_path, between=6, inside=5))
    # 11 ms are Python, more than the lines take: they have nothing of their own.
    assert told["host_bound"].saving_ns == pytest.approx(11 * MS)
    assert told["step_python"].state == "clear"


def test_the_larger_lines_leave_the_host_its_python_in_the_phases(tmp_path: Path) -> None:
    """The lines take 8 ms, 5 of which compute; 3 + 4 ms are Python."""
    told = verdict(recorded(tmp_path, between=8, computing=5, inside=4))
    assert told["step_python"].saving_ns == pytest.approx(8 * MS)
    assert told["host_bound"].saving_ns == pytest.approx(4 * MS, rel=0.01)
    assert {place.line for place in told["step_python"].where} == {70, 71}
    assert not {place.line for place in told["host_bound"].where} & {70, 71}


def test_the_larger_host_leaves_the_lines_what_they_compute(tmp_path: Path) -> None:
    """The lines take 8 ms, 5 of which compute; 3 + 7 ms are Python."""
    told = verdict(recorded(tmp_path, between=8, computing=5, inside=7))
    assert told["host_bound"].saving_ns == pytest.approx(10 * MS)
    assert told["step_python"].saving_ns == pytest.approx(5 * MS, rel=0.01)
    assert {place.line for place in told["host_bound"].where} >= {70, 71}
    assert not told["step_python"].where


def test_without_lines_the_host_has_it_all(tmp_path: Path) -> None:
    path = recorded(tmp_path, between=6, stacks=INSIDE)
    told = verdict(path)
    assert told["step_python"].state == "not_measured"
    assert told["host_bound"].saving_ns == pytest.approx(6 * MS)
    assert not runs.measured(path, held_up).frame(held_up).besides
