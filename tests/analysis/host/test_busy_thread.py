"""A thread that computes in Python beside the training: found with its line; one that waits or sleeps is not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.host.rules.busy_thread import RULE
from tests.fixtures import runs
from tests.fixtures.asking import ask
from tests.fixtures.runs import MS
from tests.fixtures.sampled_stacks import burst

MAIN = 'process 10:"python train.py";thread (0x1): MainThread;<module> (/w/train.py:30)'
OTHER = 'process 10:"python train.py";thread (0x2): Thread-1;run (/usr/lib/python3.11/threading.py:982);'


def recorded(folder: Path, stack: str, seen: int, text: str, facts: Mapping[str, Any], thread: int = 2) -> Path:
    """Record steps of 10 ms, of which the training thread runs for some; another thread is seen in a stack."""
    steps = [runs.light(k, 10 * MS) for k in range(40)]
    path = runs.recorded(folder / "run", (None, steps, {**facts, "pid": 10, "directory": "/w/"}))
    runs.loading(path, 0, step=10 * MS, wait=0, fetch=0, cpu=0, n=40, workers=0, thread=thread * MS)
    stacks = {MAIN: 100} | ({OTHER + stack: seen} if stack else {})
    return burst(path, stacks, lines=[["/w/train.py", 12, text]])


BUSY, WAITS = "monitor (/w/train.py:12)", "wait (/usr/lib/python3.11/threading.py:331)"


@pytest.mark.parametrize(
    ("stack", "seen", "text", "thread", "state"),
    [
        pytest.param(BUSY, 60, "total = sum(n * n for n in values)", 2, "found", id="computes"),
        pytest.param(BUSY, 60, "time.sleep(0.1)", 2, "clear", id="sleeps"),
        pytest.param(BUSY, 20, "total += 1", 2, "clear", id="computes now and then"),
        pytest.param(BUSY, 60, "total += 1", 10, "clear", id="costs nothing"),
        pytest.param(f"{BUSY};{WAITS}", 60, "event.wait()", 2, "clear", id="waits"),
        pytest.param("", 0, "", 2, "clear", id="none"),
    ],
)
def test_a_thread_at_work_is_found_with_its_line(
    tmp_path: Path, stack: str, seen: int, text: str, thread: int, state: str
) -> None:
    found = ask(RULE, recorded(tmp_path, stack, seen, text, runs.CPU, thread))
    assert found.state == state
    if state == "found":
        assert found.saving_ns == pytest.approx(8 * MS, rel=0.05)
        assert not found.at_most
        assert [(place.file, place.line) for place in found.where] == [("train.py", 12)]


def test_on_a_gpu_nothing_is_promised(tmp_path: Path) -> None:
    assert ask(RULE, recorded(tmp_path, BUSY, 60, "total += 1", runs.GPU)).state == "not_measured"
