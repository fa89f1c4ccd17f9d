"""What is frozen, and what only waits for a core; real freezing is in tests/robustness/test_surroundings.py."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dlprof.record.launch.child import Suspensions
from tests.fixtures.jobs import until

STARVED_S = 4.0


def delay_s(thread: int) -> float:
    """Return how long a thread of this process was ready and had no core."""
    return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1]) / 1e9


@pytest.mark.long
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="whoever looks on needs a core as well")
def test_who_waits_for_a_core_is_not_frozen() -> None:
    known = set(threading.enumerate())
    suspensions = Suspensions()
    suspensions.start()
    (watching,) = (t.native_id for t in set(threading.enumerate()) - known if t.native_id is not None)
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(watching, {core})
    # Runs only when nobody else wants to, which on this core somebody always does.
    os.sched_setscheduler(watching, os.SCHED_IDLE, os.sched_param(0))
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(8)]
    try:
        for one in busy:
            os.sched_setaffinity(one.pid, {core})
        assert until(lambda: delay_s(watching) > STARVED_S)
    finally:
        for one in busy:
            one.kill()
            one.wait()
    # It has seen how late it is once it has slept again.
    rounds = Path(f"/proc/self/task/{watching}/schedstat")
    before = int(rounds.read_text().split()[2])
    assert until(lambda: int(rounds.read_text().split()[2]) > before)
    assert suspensions.end() == []
