"""Real traces against figures made by an independent program: the spans alone must give them, to 0.005 ms.

Computation is kernels, communication is communication kernels, copies are copies and sets, all on device lanes.
"""

from functools import cache
from typing import Any, NamedTuple

import pytest

from dlprof.analysis import intervals
from dlprof.analysis.intervals import Intervals
from dlprof.read.kineto import torch_trace
from dlprof.read.kineto.format import peek
from dlprof.read.sources import Reading
from tests.fixtures.places import TRACES

pytestmark = pytest.mark.skipif(not TRACES.is_dir(), reason="needs ../shared/traces")


class Expected(NamedTuple):
    """One row of the reference: times in ms; `steps` is their number and, where given, their total."""

    span: float
    computation: float
    communication: float
    exposed_communication: float
    copy: float
    exposed_copy: float
    idle: float
    fetches: int
    fetch: float
    steps: int
    step: float | None = None


V100 = "dlrm_v100_8ranks/worker{}_step_12.*"
REFERENCE = {
    V100.format(0): Expected(13.009, 1.034, 5.798, 5.537, 0.019, 0.019, 6.419, 1, 1.101, 1, 14.455),
    V100.format(1): Expected(18.749, 1.246, 11.336, 11.056, 0.019, 0.019, 6.428, 1, 1.100, 1, 19.901),
    V100.format(2): Expected(11.350, 1.068, 3.492, 3.217, 0.019, 0.019, 7.046, 1, 1.283, 1, 13.017),
    V100.format(3): Expected(18.853, 1.240, 9.774, 9.450, 0.028, 0.018, 8.145, 1, 1.406, 1, 19.313),
    V100.format(4): Expected(16.589, 1.126, 6.587, 6.550, 0.026, 0.026, 8.887, 1, 1.048, 1, 17.979),
    V100.format(5): Expected(16.392, 1.041, 6.251, 6.211, 0.019, 0.019, 9.121, 1, 1.081, 1, 17.797),
    V100.format(6): Expected(11.410, 1.051, 3.558, 3.289, 0.019, 0.019, 7.051, 1, 1.298, 1, 13.091),
    V100.format(7): Expected(10.967, 1.059, 1.746, 1.580, 0.020, 0.020, 8.308, 1, 1.157, 1, 12.509),
    "resnet50_v100_workers0/*": Expected(996.477, 591.532, 0, 0, 12.026, 12.026, 392.919, 6, 415.791, 6),
    "resnet50_v100_workers4/*": Expected(801.550, 594.868, 0, 0, 19.545, 19.545, 187.137, 6, 8.522, 6),
    "resnet_rtx2080ti/*": Expected(14522.911, 4103.141, 0, 0, 630.681, 630.681, 9789.089, 30, 8204.993, 29),
    "dlrm_a100_rank3_of_8/*": Expected(464.594, 281.336, 163.535, 87.921, 54.638, 19.330, 76.007, 6, 0.420, 6),
    "ddp_a100_rank0_of_2/*": Expected(660.551, 115.656, 46.876, 39.559, 2.654, 2.285, 503.051, 0, 0, 3),
}
# Rows: events of the file that are complete and neither the profiler's window nor of no category.
ROWS = {
    V100.format(0): 2459,
    V100.format(3): 2551,
    "resnet50_v100_workers0/*": 44_665,
    "resnet50_v100_workers4/*": 41_905,
    "dlrm_a100_rank3_of_8/*": 74_936,
    "ddp_a100_rank0_of_2/*": 26_932,
}


@cache
def read(pattern: str) -> Reading:
    (path,) = TRACES.glob(pattern)
    return torch_trace.read(path)


def on_device(reading: Reading, *kinds: str) -> Intervals:
    spans = reading.tables["spans"]
    chosen = spans[spans["lane"].astype(str).str.startswith("device:") & spans["kind"].isin(kinds)]
    start = chosen["start_ns"].to_numpy()
    return intervals.union(start, start + chosen["dur_ns"].to_numpy())


@pytest.mark.parametrize("pattern", REFERENCE)
def test_device_time_loader_and_steps(pattern: str) -> None:
    expected = REFERENCE[pattern]
    reading = read(pattern)
    spans, steps = reading.tables["spans"], reading.tables["traced_steps"]
    computation = on_device(reading, "kernel")
    communication = on_device(reading, "communication")
    copies = on_device(reading, "copy", "set")
    busy = intervals.merge(computation, communication, copies)
    span = int(busy[-1, 1] - busy[0, 0])
    exposed_communication = intervals.subtract(communication, computation)
    exposed_copy = intervals.subtract(intervals.subtract(copies, computation), communication)
    idle = span - intervals.total(busy)
    parts = (computation, exposed_communication, exposed_copy)
    assert sum(intervals.total(part) for part in parts) + idle == span

    def ms(what: Any) -> object:
        ns = what if isinstance(what, int) else intervals.total(what)
        return pytest.approx(ns / 1e6, abs=0.005)

    figures = (span, computation, communication, exposed_communication, copies, exposed_copy, idle)
    assert tuple(expected[: len(figures)]) == tuple(map(ms, figures))
    fetches = spans[spans["kind"] == "fetch"]
    assert fetches["name"].astype(str).str.startswith("enumerate(DataLoader)").all()
    assert (len(fetches), expected.fetch) == (expected.fetches, ms(int(fetches["dur_ns"].sum())))
    assert len(steps) == expected.steps
    if expected.step is not None:
        assert expected.step == ms(int(steps["dur_ns"].sum()))
    assert len(spans) == ROWS.get(pattern, len(spans))
    assert reading.warnings == ()


@pytest.mark.parametrize(
    ("pattern", "memory", "count", "megabytes", "total", "exposed"),
    [
        ("resnet_rtx2080ti/*", "pageable", 61, 2312, 629.8, 629.8),
        ("resnet50_v100_workers0/*", "pageable", 12, 115.6, 11.5, 11.5),
        ("dlrm_a100_rank3_of_8/*", "pinned", 150, 424, 50.7, 16.0),
    ],
)
def test_copies_to_the_device(
    pattern: str, memory: str, count: int, megabytes: float, total: float, exposed: float
) -> None:
    reading = read(pattern)
    spans = reading.tables["spans"]
    copies = spans[spans["copy"] == "HtoD"]
    assert len(copies) == count
    assert set(copies["memory"]) == {memory}
    assert copies["bytes"].sum() / 1e6 == pytest.approx(megabytes, abs=0.5)
    assert copies["dur_ns"].sum() / 1e6 == pytest.approx(total, abs=0.06)
    start = copies["start_ns"].to_numpy()
    alone = intervals.union(start, start + copies["dur_ns"].to_numpy())
    alone = intervals.subtract(alone, on_device(reading, "kernel", "communication"))
    assert intervals.total(alone) / 1e6 == pytest.approx(exposed, abs=0.06)


def test_the_collectives_of_eight_ranks_match_and_end_together() -> None:
    readings = [read(V100.format(rank)) for rank in range(8)]
    assert [r.facts["rank"] for r in readings] == list(range(8))
    assert {r.facts["world_size"] for r in readings} == {8}
    frames = []
    for reading in readings:
        spans = reading.tables["spans"]
        frames.append(spans[(spans["kind"] == "communication") & spans["lane"].astype(str).str.startswith("device:")])
    kinds = [frame["collective"].to_list() for frame in frames]
    assert all(k == kinds[0] for k in kinds)
    assert set(kinds[0]) == {"all_reduce", "send_recv"}
    ends = [(frame["start_ns"] + frame["dur_ns"]).to_numpy() for frame in frames]
    # On one host with one clock all ranks leave a collective within microseconds; arrivals are milliseconds apart.
    for i, collective in enumerate(kinds[0]):
        if collective == "all_reduce":
            assert max(e[i] for e in ends) - min(e[i] for e in ends) < 100_000


def test_metadata_of_collectives() -> None:
    reading = read("ddp_a100_rank0_of_2/*")
    spans = reading.tables["spans"]
    device = spans[(spans["kind"] == "communication") & spans["lane"].astype(str).str.startswith("device:")]
    assert set(device["group"]) == {"0"}
    assert set(device["dtype"]) == {"float32", "int64"}
    assert set(device["collective"]) == {"all_reduce", "broadcast"}
    assert (device["bytes"] > 0).all()
    assert reading.facts["groups"] == {"0": {"desc": "default_pg", "size": 2, "ranks": [0, 1]}}
    assert 6_637_568 * 4 in set(device["bytes"])


@pytest.mark.parametrize(
    ("name", "rank", "world_size", "lanes"),
    [
        ("amd_trace__mi250*", None, None, {"device:0"}),
        ("cpu_only__rank-34*", 34, 300, set()),
        ("rank_unavailable*", None, None, set()),
        ("distributed_info_unavailable*", None, None, set()),
        ("triton_example*", None, None, {"device:7"}),
        ("cuda_event_sync*", 0, None, {"device:-1", "device:20", "device:24", "device:28"}),
        ("trace_filter__sampled_rank-1*", 1, 128, None),
        ("alexnet*", 0, None, None),
    ],
)
def test_odd_small_traces(name: str, rank: int | None, world_size: int | None, lanes: set[str] | None) -> None:
    (path,) = (TRACES / "tiny").glob(name)
    reading = torch_trace.read(path)
    looked = peek(path)
    assert looked["is_trace"]
    for facts in (reading.facts, looked):
        assert (facts.get("rank"), facts.get("world_size")) == (rank, world_size)
    assert reading.warnings == ()
    spans = reading.tables["spans"]
    if lanes is not None:
        assert {lane for lane in spans["lane"].astype(str) if lane.startswith("device")} == lanes
    # Every launch number on a device lane stands on a call too, where the file holds both.
    device = spans[spans["kind"].isin(("kernel", "copy", "set"))]
    calls = set(spans.loc[spans["kind"] == "runtime", "launch"])
    assert set(device["launch"]) <= calls
    if name.startswith("amd"):  # the call has the bytes of a copy
        copies = spans[spans["kind"] == "copy"]
        assert (copies["copy"].to_list(), copies["bytes"].to_list()) == (["HtoD", "HtoD"], [2560, 2560])
