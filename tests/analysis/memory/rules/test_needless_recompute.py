"""Activations computed twice: found where the memory to keep them is free, and left alone where it may not be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.memory.rules.needless_recompute import RULE
from dlprof.result import Outcome
from tests.fixtures import layers, runs, traces
from tests.fixtures.allocator import GB, GPU, reading, write
from tests.fixtures.asking import ask
from tests.fixtures.runs import MS

US = 1_000


def trained(folder: Path, *, peak: int, moved: int, again: bool = True) -> Outcome:
    """Trace steps of 10 ms: a block of 3 ms forward, again 3 ms in its backward function, and 3 ms of that itself."""
    events: list[Any] = []
    for n in range(4):
        at, ids = 10 * n * MS, 100 * n
        events += [
            traces.step(n, at, 10 * MS),
            layers.called("", "Net", at + 10 * US, 400 * US),
            layers.called("block", "Block", at + 20 * US, 300 * US),
            layers.forward("linear", at + 30 * US, 100 * US, 5),
            traces.launched("gemm", at + 40 * US, at + 50 * US, 3 * MS, ids + 1),
            layers.function("CheckpointFunctionBackward", at + 600 * US, 900 * US, 5, traces.AUTOGRAD),
            traces.call("cudaLaunchKernel", at + 1_300 * US, 5 * US, ids + 3, tid=traces.AUTOGRAD),
            traces.kernel("dgrad", at + 6_050 * US, 3 * MS, ids + 3),
            traces.call("cudaDeviceSynchronize", at + 1_600 * US, 7_460 * US, ids + 4),
        ]
        if again:
            events += [
                layers.called("block", "Block", at + 610 * US, 500 * US, traces.AUTOGRAD),
                traces.op("aten::linear", at + 620 * US, 100 * US, traces.AUTOGRAD),
                traces.call("cudaLaunchKernel", at + 630 * US, 5 * US, ids + 2, tid=traces.AUTOGRAD),
                traces.kernel("gemm", at + 3_050 * US, 3 * MS, ids + 2),
            ]
    return asked(folder, events, peak, moved)


def asked(folder: Path, events: list[Any], peak: int, moved: int) -> Outcome:
    path = runs.recorded(folder / "run", (traces.trace(*events, world_size=1), [], GPU))
    write(path, [reading(n, 10 * GB, peak_allocated_bytes=peak * GB, peak_reserved_bytes=peak * GB) for n in range(9)])
    rows = [
        {"path": name, "kind": kind, "parameters": 1, "parameter_bytes": 4, "bucket": -1, "forward_flops": 0,
         "recompute_flops": 0, "backward_flops": 0, "moved_bytes": size, "sharded": 0}
        for name, kind, size in (("", "Net", 0), ("block", "Block", moved * GB))
    ]  # fmt: skip
    (path / "ranks/00000/modules.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ask(RULE, path)


def test_with_memory_free_they_are_found(tmp_path: Path) -> None:
    found = trained(tmp_path, peak=20, moved=90)
    assert found.state == "found"
    # The block's kernel runs once and not twice: 3 of 10 ms.
    assert found.saving_ns == pytest.approx(3 * MS, rel=0.05)
    assert "block" in found.summary
    assert "30 GB at most" in found.summary


def test_where_they_may_not_fit_they_are_left_alone(tmp_path: Path) -> None:
    assert trained(tmp_path, peak=70, moved=90).state == "clear"


def test_a_model_that_computes_nothing_again_is_left_alone(tmp_path: Path) -> None:
    assert trained(tmp_path, peak=20, moved=90, again=False).state == "clear"


@pytest.mark.parametrize(("saves", "gain"), [(False, 500), (True, 500 + 280 + 0.3 * 590 + 0.45 * 400)])
def test_the_hosts_own_work_for_it_goes_too(tmp_path: Path, saves: bool, gain: float) -> None:
    """Of steps of 2 ms that wait for their host: 500 µs in which a block runs again, up to the operators around it, and
    280 µs between two blocks in which their input is kept for that; then also the hooks of what the blocks save, in
    590 µs of their forward pass and 400 of their backward pass.
    """
    events: list[Any] = []
    for n in range(4):
        at, ids = 2 * n * MS, 100 * n
        events += [
            traces.step(n, at, 2 * MS),
            layers.called("", "Net", at + 10 * US, 890 * US),
            layers.called("block", "Block", at + 20 * US, 300 * US),
            layers.forward("linear", at + 30 * US, 200 * US, 10 * n + 5),
            traces.launched("gemm", at + 40 * US, at + 50 * US, 5 * US, ids + 1),
            *([traces.op("_NoopSaveInputs", at + 400 * US, 10 * US)] if saves else []),
            layers.called("block", "Block", at + 600 * US, 290 * US),
            layers.function("AddmmBackward0", at + 1_000 * US, 900 * US, 10 * n + 5),
            traces.op("aten::sum", at + 1_010 * US, 90 * US),
            layers.called("block", "Block", at + 1_200 * US, 300 * US),
            traces.op("aten::linear", at + 1_210 * US, 100 * US),
            traces.call("cudaLaunchKernel", at + 1_230 * US, 5 * US, ids + 2),
            traces.kernel("gemm", at + 1_240 * US, 5 * US, ids + 2),
            traces.op("aten::mm", at + 1_600 * US, 290 * US),
            traces.call("cudaLaunchKernel", at + 1_610 * US, 5 * US, ids + 3),
            traces.kernel("dgrad", at + 1_620 * US, 5 * US, ids + 3),
        ]
    found = asked(tmp_path, events, peak=20, moved=90)
    assert found.state == "found"
    assert found.saving_ns == pytest.approx(gain * US, rel=0.05)
