"""Traced steps on the device: what a step launched is its own, however late the device comes to it.

Work and time of real asynchronous jobs are those that an independent program made of them. These traces were recorded
by others and are not part of this project: without them their tests skip.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import RankData
from dlprof.analysis.timeline import device, host
from dlprof.analysis.timeline.steps import NO_STEP, main_stream, timing, trace_window
from dlprof.read.run import open_run
from tests.fixtures import runs, traces
from tests.fixtures.places import TRACES
from tests.fixtures.runs import MS

ASYNC = TRACES / "gpu_async"


def test_a_device_behind_its_host_has_steps_of_its_own(tmp_path: Path) -> None:
    found = runs.rank_of(tmp_path, traces.ahead(4, host=1 * MS, busy=3 * MS)).once(trace_window)
    host, device = (w[:, 1] - w[:, 0] for w in (found.host, found.windows))
    assert host.tolist() == [1 * MS] * 4
    # The first begins with the trace, 10 µs before its first kernel.
    assert device.tolist() == [3 * MS + 10_000, 3 * MS, 3 * MS, 3 * MS]
    assert (found.windows[:, 0] - traces.BASE_NS).tolist() == [0, 3 * MS + 10_000, 6 * MS + 10_000, 9 * MS + 10_000]
    assert found.launched_in.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert found.lag_ns.tolist() == [10_000, 2 * MS + 10_000, 4 * MS + 10_000, 6 * MS + 10_000]
    assert (found.unit, found.linked) == ("step", 1.0)


def test_a_job_that_synchronises_has_its_hosts_steps(tmp_path: Path) -> None:
    found = runs.rank_of(tmp_path, traces.ahead(3, host=2 * MS, busy=1 * MS, synchronises=True)).once(trace_window)
    assert found.windows.tolist() == found.host.tolist()
    assert found.settled.all()


def test_the_steps_in_which_the_host_only_gets_its_lead_are_not_settled(tmp_path: Path) -> None:
    # Two steps run ahead of the device; from then on the host waits for room and goes at its pace.
    events: list[Any] = []
    hosts = [(0, 1), (1, 1), (2, 3), (5, 3), (8, 3)]
    for n, (at, dur) in enumerate(hosts):
        events.append(traces.step(n, at * MS, dur * MS))
        events += traces.launched("gemm", at * MS, 10_000 + 3 * n * MS, 3 * MS, n + 1)
    found = runs.rank_of(tmp_path, traces.trace(*events, world_size=1)).once(trace_window)
    assert found.lag_ns.tolist() == [10_000, 2 * MS + 10_000, 4 * MS + 10_000, 4 * MS + 10_000, 4 * MS + 10_000]
    assert found.settled.tolist() == [False, True, True, True, True]


def test_an_exchange_beside_the_main_stream_ends_its_step(tmp_path: Path) -> None:
    events: list[Any] = []
    for n in range(3):
        t = 5 * MS * n
        events += [
            traces.step(n, 2 * MS * n, 2 * MS),
            traces.launched("gemm", 2 * MS * n, t + 10_000, 3 * MS, 10 * n + 1),
            traces.call("cudaLaunchKernelExC", 2 * MS * n + 50_000, 5_000, 10 * n + 2),
            traces.collective(t + 3 * MS + 10_000, 2 * MS, 1_000, correlation=10 * n + 2),
        ]
    found = runs.rank_of(tmp_path, traces.trace(*events)).once(trace_window)
    assert (found.windows[:, 1] - found.windows[:, 0]).tolist() == [5 * MS + 10_000, 5 * MS, 5 * MS]


def test_work_that_was_launched_before_the_trace_or_between_steps_is_of_none(tmp_path: Path) -> None:
    events = [
        traces.kernel("before", 0, 50_000, 0),
        traces.step(0, 60_000, 500_000),
        *traces.launched("gemm", 70_000, 100_000, 100_000, 1),
        traces.kernel("unlinked", 210_000, 10_000, 77),
        traces.step(1, 560_000, 500_000),
        *traces.launched("gemm", 570_000, 600_000, 100_000, 2),
    ]
    found = runs.rank_of(tmp_path / "before", traces.trace(*events, world_size=1)).once(trace_window)
    # What nobody launched goes with its neighbour on the stream, which runs in order.
    assert found.launched_in.tolist() == [-1, 0, 0, 1]
    assert found.linked == pytest.approx(0.5)
    events = [
        traces.step(0, 0, 100_000),
        *traces.launched("gemm", 0, 10_000, 50_000, 1),
        *traces.launched("validation", 200_000, 210_000, 50_000, 2),
        traces.step(7, 400_000, 100_000),
        *traces.launched("gemm", 400_000, 410_000, 50_000, 3),
    ]
    found = runs.rank_of(tmp_path / "between", traces.trace(*events, world_size=1)).once(trace_window)
    assert found.numbers.tolist() == [0, 7]
    assert found.launched_in.tolist() == [0, NO_STEP, 1]
    assert (found.windows - traces.BASE_NS).tolist() == [[0, 100_000], [400_000, 500_000]]


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize(("launched_ms", "begins_ms"), [(1, 400), (399, 0)])
def test_a_device_that_is_still_at_work_of_before_the_trace_is_not_idle(
    launched_ms: int, begins_ms: int, marked: bool, tmp_path: Path
) -> None:
    events = [
        *traces.launched("small", 10_000, 20_000, 5_000, 1, stream=9),  # on another stream, at once
        *(
            one
            for n in range(20)
            for one in traces.launched("gemm", launched_ms * MS + n * 10_000, (400 + n) * MS, MS, n + 2)
        ),
        *([traces.step(4, 0, 400 * MS)] if marked else []),
    ]
    found = runs.rank_of(tmp_path, traces.trace(*events, world_size=1)).once(trace_window)
    assert (found.windows - traces.BASE_NS).tolist() == [
        [begins_ms * MS or 0 if marked else begins_ms * MS or 10_000, 420 * MS]
    ]


def test_a_step_that_launches_nothing_has_no_lag_and_no_length(tmp_path: Path) -> None:
    events = [
        traces.step(0, 0, 1 * MS),
        *traces.launched("gemm", 0, 10_000, 3 * MS, 1),
        traces.step(1, 1 * MS, 1 * MS),
        traces.step(2, 2 * MS, 1 * MS),
        *traces.launched("gemm", 2 * MS, 3 * MS + 10_000, 3 * MS, 2),
    ]
    found = runs.rank_of(tmp_path, traces.trace(*events, world_size=1)).once(trace_window)
    assert np.isnan(found.lag_ns).tolist() == [False, True, False]
    assert (found.windows[:, 1] >= found.windows[:, 0]).all()
    assert (found.windows[[0, -1], [0, 1]] - traces.BASE_NS).tolist() == [0, 6 * MS + 10_000]
    assert found.launched_in.tolist() == [0, 2]


@pytest.mark.parametrize("linked", [True, False])
def test_without_links_a_device_is_cut_at_its_hosts_marks(tmp_path: Path, linked: bool) -> None:
    made = traces.ahead(3, host=1 * MS, busy=2 * MS)
    for event in made["traceEvents"]:
        if event["cat"] == "cuda_runtime" and not linked:
            event["args"].pop("correlation")
    found = runs.rank_of(tmp_path, made).once(trace_window)
    # Three steps of 2 ms on the device: in the mean they are as long where only the host's marks cut them.
    ends = [1 * MS, 2 * MS, 6 * MS] if not linked else [2 * MS, 4 * MS, 6 * MS]
    assert found.windows[:, 1] - traces.BASE_NS == pytest.approx(ends, abs=20_000)
    assert (found.linked == 1.0) is linked


def test_only_loader_calls_mark_steps_where_nothing_else_does(tmp_path: Path) -> None:
    events: list[Any] = []
    for n in range(4):
        events += [traces.fetch(n * MS, 10_000), *traces.launched("gemm", n * MS + 20_000, n * MS + 40_000, MS // 2, n)]
    infers = runs.rank_of(tmp_path / "infers", traces.trace(*events, world_size=1)).once(trace_window)
    assert (infers.unit, len(infers.windows)) == ("trace", 1)  # a loop over a loader alone is no training
    events += [traces.op("MulBackward0", n * MS + 30_000, 100) for n in range(4)]
    found = runs.rank_of(tmp_path, traces.trace(*events, world_size=1)).once(trace_window)
    assert found.unit == "step"
    assert (found.host - traces.BASE_NS).tolist() == [[0, MS], [MS, 2 * MS], [2 * MS, 3 * MS]]
    none = runs.rank_of(tmp_path / "none", traces.trace(*traces.launched("gemm", 0, 10, MS, 1))).once(trace_window)
    assert (none.unit, len(none.windows)) == ("trace", 1)


def test_the_main_stream_is_the_one_that_computes_most(tmp_path: Path) -> None:
    made = traces.trace(
        traces.step(0, 0, 900_000),
        traces.launched("small", 0, 10_000, 100_000, 1, stream=7),
        traces.launched("large", 10_000, 20_000, 200_000, 2, stream=9),
        traces.collective(0, 800_000, 10, stream=21),
    )
    rank = runs.rank_of(tmp_path, made)
    assert rank.once(main_stream).tolist() == [False, False, True]


# Kernels and copies a step, and of them NCCL's or RCCL's; of each steady step, ms, from the least to the most: its
# length, computation, communication and what of it is exposed.
JOBS: dict[str, tuple[tuple[int, int], tuple[tuple[float, float], ...]]] = {
    "v100_ns": ((1_219, 0), ((95.6, 95.6), (93.7, 93.7), (0, 0), (0, 0))),
    "mi300_resnet": ((895, 4), ((18.6, 19.0), (6.4, 6.4), (15.4, 15.9), (11.4, 12.0))),
    "v100_rank1_of_2": ((2_503, 10), ((114.8, 123.1), (85.2, 87.5), (36.4, 39.5), (10.5, 13.5))),
    "queued_graph": ((1_375, 15), ((215, 216), (35.7, 36.3), (26.7, 37.8), (26, 37))),
}


@pytest.mark.skipif(not ASYNC.is_dir(), reason="the reference traces are not here (../shared/traces)")
@pytest.mark.parametrize("name", JOBS)
def test_work_and_time_of_real_jobs_are_those_of_the_step_that_launched_them(name: str) -> None:
    rank = RankData(open_run(ASYNC / f"{name}.json.gz").ranks[0])
    (pieces, exchanged), times = JOBS[name]
    work, found = rank.once(device.device_work), rank.once(trace_window)
    inside = (found.launched_in >= 0) & (found.launched_in < len(found.windows))
    of = found.launched_in[inside]
    exchanges = host.is_kind(work, "communication")[inside]
    assert np.bincount(of).tolist() == [pieces] * len(found.windows)
    assert np.bincount(of[exchanges], minlength=len(found.windows)).tolist() == [exchanged] * len(found.windows)
    t, sets = rank.once(timing), rank.once(device.device_sets)
    parts = (sets.computation, sets.communication, sets.exposed_communication)
    within = [iv.total(iv.intersect(iv.merge(t.windows), part)) / len(t.windows) for part in parts]
    for mean, (least, most) in zip([t.step_ns, *within], times, strict=True):
        assert 0.99 * least <= mean / 1e6 <= 1.01 * most
    if name == "v100_ns":  # the step in which the host runs ahead is left out
        assert (np.diff(found.host)[:, 0] / 1e6).round().tolist() == [35, 72, 96, 96, 96]
        assert t.chosen.tolist() == [1, 2, 3, 4]
