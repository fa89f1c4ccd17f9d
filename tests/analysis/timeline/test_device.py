"""The device's time on hand-made cases whose parts are known to the nanosecond."""

from pathlib import Path

import pytest

from dlprof.analysis.timeline import device
from dlprof.errors import NotMeasured
from tests.fixtures import runs, traces


def test_the_four_parts_add_up_to_the_span(tmp_path: Path) -> None:
    rank = runs.rank_of(
        tmp_path,
        traces.trace(
            traces.kernel("gemm", 0, 100_000),
            traces.kernel("gemm on another stream", 50_000, 100_000, stream=9),
            traces.collective(120_000, 100_000, 1_000),
            traces.copy(200_000, 60_000, 10_000_000),
            traces.kernel("gemm", 300_000, 20_000),
        ),
    )
    found = rank.once(device.device_time).iloc[0].to_dict()
    assert found == {
        "span_ns": 320_000,
        "computation_ns": 170_000,  # [0, 150) and [300, 320)
        "communication_ns": 100_000,
        "exposed_communication_ns": 70_000,  # [150, 220)
        "copy_ns": 60_000,
        "exposed_copy_ns": 40_000,  # [220, 260)
        "idle_ns": 40_000,  # [260, 300)
    }
    parts = ("computation_ns", "exposed_communication_ns", "exposed_copy_ns", "idle_ns")
    assert sum(found[p] for p in parts) == found["span_ns"]


def test_annotations_on_the_device_are_no_work(tmp_path: Path) -> None:
    made = traces.trace(
        traces.kernel("gemm", 0, 10_000),
        traces.on_device("gpu_user_annotation", "forward", 0, 500_000, 7, 0),
    )
    assert runs.rank_of(tmp_path, made).once(device.device_time)["span_ns"][0] == 10_000


def test_a_trace_without_a_device_abstains(tmp_path: Path) -> None:
    with pytest.raises(NotMeasured, match="no work of a device"):
        runs.rank_of(tmp_path, traces.trace(traces.op("aten::mm", 0, 10))).once(device.device_time)


def test_work_that_takes_no_time_abstains(tmp_path: Path) -> None:
    with pytest.raises(NotMeasured, match="takes any time"):
        runs.rank_of(tmp_path, traces.trace(traces.kernel("gemm", 0, 0))).once(device.device_time)
