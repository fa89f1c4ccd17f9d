"""Memory asked from the GPU and given back in every step: found, and left alone where the first steps alone ask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.memory.rules.device_allocations import RULE
from dlprof.result import Outcome
from tests.fixtures import runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.runs import MS


def trained(folder: Path, *calls: tuple[str, int], thread: Any = traces.MAIN) -> Outcome:
    """Trace steps of 10 ms: ten kernels of 0.2 ms, then some calls of 2 ms that the device waits for."""
    events: list[Any] = []
    for n in range(4):
        at, ids = 10 * n * MS, 100 * n
        events.append(traces.step(n, at, 10 * MS))
        for k in range(10):
            events += traces.launched("gemm", at + k * 250_000, at + k * 250_000 + 8_000, 200_000, ids + k + 1)
        begin = at + 3 * MS
        for k, (name, dur) in enumerate(calls):
            events.append(
                traces.call(name, begin, dur, ids + 50 + k, tid=traces.MAIN if name == "cudaFree" else thread)
            )
            begin += dur + 10_000
        events += traces.launched("last", at + 9 * MS, at + 9 * MS + 8_000, 100_000, ids + 99)
    return ask(RULE, runs.foreign(folder / "traces", traces.trace(*events, world_size=1)))


@pytest.mark.parametrize("thread", [traces.MAIN, traces.AUTOGRAD])
def test_a_cache_that_every_step_empties_is_found(tmp_path: Path, thread: Any) -> None:
    # The backward pass asks for most of what it needs, on its own thread.
    found = trained(tmp_path, ("cudaFree", 2 * MS), ("cudaMalloc", 1 * MS), thread=thread)
    assert found.state == "found"
    assert found.saving_ns == pytest.approx(3 * MS, rel=0.05)
    assert "torch.cuda.empty_cache()" in found.advice[0]


@pytest.mark.parametrize("calls", [[], [("cudaMalloc", MS)], [("cudaFree", MS)]])
def test_growing_memory_and_none_at_all_are_left_alone(tmp_path: Path, calls: list[tuple[str, int]]) -> None:
    assert trained(tmp_path, *calls).state == "clear"
