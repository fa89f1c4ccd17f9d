"""Steps of traces that nothing of torch's profiler marks, and clocks of a device that cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlprof.commands.report import analyse
from dlprof.read.kineto import torch_trace
from tests.fixtures import traces

MS = 1_000_000
US = 1_000


def batch(at: int, *, backward: bool = True, optimizer: bool = False, ops: int = 10) -> list[Any]:
    """Return a call of the loader, operators of a forward, and what trains after it, within 1 ms."""
    events = [traces.fetch(at, 50 * US), *(traces.op("aten::mm", at + (60 + n) * US, 500) for n in range(ops))]
    events += [traces.op("MulBackward0", at + 300 * US, US)] if backward else []
    return events + ([traces.annotation("Optimizer.step#SGD.step", at + 500 * US, 50 * US)] if optimizer else [])


def every(n: int, **made: Any) -> list[Any]:
    return [one for i in range(n) for one in batch(i * MS, **made)]


def alternating(n: int, **first: Any) -> list[Any]:
    """Return batches of which every second one ends with a run of the optimizer."""
    return [one for i in range(n) for one in batch(i * MS, **(first if i % 2 == 0 else {"optimizer": True}))]


VALIDATION = [one for i in range(3, 6) for one in batch(i * MS, backward=False)]
AGAIN = [one for i in range(6, 9) for one in batch(i * MS, optimizer=True)]


def by_optimizer(*at: int) -> list[Any]:
    """Return runs of an optimizer at these ms, with the same kernels before each."""
    return [
        one
        for n, ms in enumerate(at)
        for one in (
            *(traces.launched("gemm", ms * MS - (n + 2) * 10 * US, ms * MS, 5 * US, ms * 10 + n) for n in range(5)),
            traces.annotation("Optimizer.step#SGD.step", ms * MS, 50 * US),
        )
    ]


@pytest.mark.parametrize(
    ("events", "expected", "way"),
    [
        (every(4, optimizer=True), [0, 1, 2], "the loader's calls"),
        (every(4), [0, 1, 2], "the loader's calls"),
        (every(4, backward=False), [], ""),  # a loop over a loader is no training
        # Two batches for each run of the optimizer, or one of each of two loaders: that is one step.
        (alternating(9), [0, 2, 4, 6], "the loader's calls"),
        (alternating(9, backward=False, ops=0), [0, 2, 4, 6], "the loader's calls"),
        # Batches of a validation belong to no step.
        ([*every(3, optimizer=True), *VALIDATION, *AGAIN], [0, 1, 2, 6, 7], "the loader's calls"),
        # A range that names a step comes first, whatever it covers.
        (
            [*every(5, optimizer=True), *(traces.annotation(f"step {n}", n * MS + 55 * US, 99 * US) for n in range(5))],
            *([0.055, 1.055, 2.055, 3.055], "named ranges 'step #' (named by the trace)"),
        ),
        # Steps of very different lengths: a stall in one, two close together.
        (by_optimizer(1, 2, 3, 9, 10), [0.94, 1.05, 2.05, 3.05, 9.05], "the optimizer's named ranges"),
        (by_optimizer(1, 2), [], ""),
    ],
)
def test_steps_that_the_profiler_does_not_mark(
    events: list[Any], expected: list[float], way: str, tmp_path: Path
) -> None:
    reading = torch_trace.read(traces.write(tmp_path / "t.json", traces.trace(*events)))
    found = reading.tables["traced_steps"]
    assert ((found["start_ns"] - traces.BASE_NS) / MS).tolist() == pytest.approx(expected, abs=0.001)
    assert found["step"].tolist() == list(range(len(expected)))
    assert reading.facts.get("steps_by", "").startswith(way)
    assert bool(reading.facts.get("steps_by")) == bool(way)


def test_an_accelerator_whose_events_are_not_read_is_named(tmp_path: Path) -> None:
    events = [traces.step(0, 0, MS), traces.event("mtia_ccp_events", "pe_exe", 10, 20, pid=9, tid=801)]
    path = traces.write(tmp_path / "t.json", traces.trace(*events, device="", backend=""))
    assert torch_trace.read(path).facts["accelerator"] == "MTIA"
    said = analyse(path, 1)
    assert any("the job runs on MTIA, and of its trace only what the host does is read" in w for w in said.run.warnings)


def test_marks_with_one_number_are_one_step_only_where_they_overlap(tmp_path: Path) -> None:
    again = [traces.step(n, at * MS, MS) for n, at in ((0, 0), (1, 1), (0, 5), (1, 6))]
    found = torch_trace.read(traces.write(tmp_path / "t.json", traces.trace(*again))).tables["traced_steps"]
    assert found["step"].tolist() == [0, 1, 2, 3]
    assert ((found["start_ns"] - traces.BASE_NS) // MS).tolist() == [0, 1, 5, 6]


def read_back(n: int, off: int, *, memory: str = "Pageable", jitter: int = 0) -> list[Any]:
    """Return n steps of a kernel and a copy to the host that its call waits for; the device's clock is `off` ahead."""
    events: list[Any] = []
    for i in range(n):
        t, ahead = i * 10 * MS, off + (i % 2) * jitter
        events += [
            *traces.launched("gemm", t, t + 20 * US + ahead, 5 * MS, 2 * i + 1),
            traces.call("cudaMemcpyAsync", t + 50 * US, 5 * MS, 2 * i + 2),
            traces.copy(t + 5_020 * US + ahead, 20 * US, 4, f"DtoH (Device -> {memory})", 2 * i + 2),
        ]
    return events


@pytest.mark.parametrize(
    ("events", "begins", "linked", "words"),
    [
        (read_back(8, 0), 20 * US, True, ""),
        (read_back(8, 900 * US), 920 * US, True, ""),  # a queue, or a clock a little off: not to be told
        (read_back(8, 300 * MS), 30 * US, True, "300.0 ms ahead of the host's: copies that their calls wait for end"),
        (read_back(8, -150 * MS), 30 * US, True, "150.0 ms behind the host's: work begins"),
        (read_back(8, 300 * MS, memory="Pinned"), 20 * US + 300 * MS, True, ""),  # it may have waited in a queue
        (read_back(8, -150 * MS, memory="Pinned"), 0, False, "do not fit: work begins 147.5 ms before it is launched"),
        (read_back(8, 300 * MS, jitter=90 * MS), None, False, "do not fit: copies that their calls wait for end"),
        (
            [one for i in range(200) for one in traces.launched("gemm", i * MS, i * 1_000 * MS, 100, i)],
            *(None, False, "do not fit: what was launched within 160.0 ms runs within 160.0 s"),
        ),
    ],
)
def test_a_device_clock_that_cannot_be(
    events: list[Any], begins: int | None, linked: bool, words: str, tmp_path: Path
) -> None:
    reading = torch_trace.read(traces.write(tmp_path / "t.json", traces.trace(*events)))
    spans = reading.tables["spans"]
    kernels = spans[(spans["name"] == "gemm").to_numpy()]
    if begins is not None:
        assert int(kernels["start_ns"].iloc[0]) - traces.BASE_NS == pytest.approx(begins, abs=15 * US)
    assert spans["start_ns"].is_monotonic_increasing
    assert bool((kernels["launch"] >= 0).all()) is linked
    assert ("clock" in " ".join(reading.warnings)) is bool(words)
    assert words in " ".join(reading.warnings)
