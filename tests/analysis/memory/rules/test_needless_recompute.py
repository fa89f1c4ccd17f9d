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
