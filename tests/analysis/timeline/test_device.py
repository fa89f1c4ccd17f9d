"""The device's time by what it does, why it is idle, who launched its work, and which thread trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlprof.analysis.timeline import device, host
from dlprof.analysis.timeline.device import UNKNOWN, idle, launch_queue, launches
from dlprof.errors import NotMeasured
from tests.fixtures import runs, traces

BASE = traces.BASE_NS


def test_the_four_parts_add_up_to_the_span(tmp_path: Path) -> None:
    made = traces.trace(
        traces.kernel("gemm", 0, 100_000),
        traces.kernel("gemm on another stream", 50_000, 100_000, stream=9),
        traces.collective(120_000, 100_000, 1_000),
        traces.copy(200_000, 60_000, 10_000_000),
        traces.kernel("gemm", 300_000, 20_000),
        traces.on_device("gpu_user_annotation", "no work", 0, 500_000, 7, 0),
    )
    assert runs.rank_of(tmp_path, made).once(device.device_time).iloc[0].to_dict() == {
        "span_ns": 320_000,
        "computation_ns": 170_000,  # [0, 150) and [300, 320)
        "communication_ns": 100_000,
        "exposed_communication_ns": 70_000,  # [150, 220)
        "copy_ns": 60_000,
        "exposed_copy_ns": 40_000,  # [220, 260)
        "idle_ns": 40_000,  # [260, 300)
    }


@pytest.mark.parametrize(
    ("event", "why"),
    [(traces.op("aten::mm", 0, 10), "no work of a device"), (traces.kernel("gemm", 0, 0), "takes any time")],
)
def test_a_trace_without_a_devices_time_abstains(event: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(NotMeasured, match=why):
        runs.rank_of(tmp_path, traces.trace(event)).once(device.device_time)


@pytest.mark.parametrize(
    ("events", "lane"),
    [
        # The thread that marks the loop trains, however busy another one is.
        *(
            ([mark, *(traces.op("aten::mm", n * 1_000, 900, tid=traces.AUTOGRAD) for n in range(50))], traces.MAIN)
            for mark in (
                traces.step(1, 0, 100_000),
                traces.fetch(0, 100),
                traces.annotation("Optimizer.step#AdamW.step", 0, 100),
                traces.annotation("dlprof::forward", 0, 100),
            )
        ),
        ([traces.op("a", 0, 10), traces.op("b", 0, 1_000, tid=77)], 77),  # without marks it is the busiest
        ([traces.kernel("gemm", 0, 10)], None),
    ],
)
def test_which_thread_trains(events: list[Any], lane: int | None, tmp_path: Path) -> None:
    rank = runs.rank_of(tmp_path, traces.trace(*events))
    assert rank.once(host.training_lane) == (f"host:{lane}" if lane else "")
    assert bool(len(rank.once(host.on_training_thread))) is bool(lane)


def test_nested_spans_are_not_outermost_and_nesting_is_looked_for_to_a_depth(tmp_path: Path) -> None:
    made = traces.trace(traces.op("outer", 0, 100_000), traces.op("inner", 0, 50_000), traces.op("next", 100_000, 10))
    found = host.outermost(runs.rank_of(tmp_path, made).once(host.on_training_thread))
    assert list(found["name"].astype(str)) == ["outer", "next"]
    many = np.zeros(20_000, dtype=np.int64)
    parents = host.parents(many, many + 1)
    assert parents[: host.MOST_DEEP].tolist() == list(range(-1, host.MOST_DEEP - 1))
    assert (parents[host.MOST_DEEP :] == host.MOST_DEEP - 1).all()


def test_numbers_among_others() -> None:
    values = np.array([3, -1, 2**40, 3, 7])
    assert host.is_among(values, np.array([2**40, 3, 3])).tolist() == [True, False, True, True, False]
    assert not host.is_among(values, np.empty(0, dtype=np.int64)).any()


A = traces.launched("a", 0, 5_000, 95_000, 1)
# Idle in a step of 1 ms: until the host launches, while it launches, though work is queued; assumed to be the host's.
IDLE: dict[str, tuple[list[Any], dict[str, list[list[int]]]]] = {
    # The device ran dry at 100 µs; the next launch is called at 395 and returns at 400.
    "until the launch it is the host's, and then the launch's": (
        [traces.launched("a", 0, 8_000, 92_000, 1), traces.launched("b", 395_000, 406_000, 594_000, 2)],
        {"late": [[0, 5_000], [100_000, 400_000]], "latency": [[5_000, 8_000], [400_000, 406_000]]},
    ),
    "a short gap before queued work is latency, a long one a wait": (
        [A, traces.launched("b", 10_000, 103_000, 97_000, 2), traces.launched("c", 20_000, 500_000, 500_000, 3)],
        {"late": [[0, 5_000]], "latency": [[100_000, 103_000]], "queued": [[200_000, 500_000]]},
    ),
    # The call returns long after its first nodes ran.
    "a later node of a graph was launched with the first": (
        [
            traces.call("cudaGraphLaunch", 0, 300_000, 1),
            traces.kernel("a", 10_000, 90_000, 1),
            traces.kernel("b", 200_000, 800_000, 1),
        ],
        {"late": [[0, 10_000]], "queued": [[100_000, 200_000]]},
    ),
    "before work of an unknown launch": (
        [A, traces.kernel("b", 600_000, 400_000, 99)],
        {"late": [[0, 5_000], [100_000, 600_000]], "assumed": [[100_000, 600_000]]},
    ),
    "all streams must be idle": (
        [
            traces.launched("a", 0, 5_000, 495_000, 1),
            traces.launched("b", 0, 5_000, 995_000, 2, stream=9),
            traces.launched("c", 700_000, 800_000, 200_000, 3),
        ],
        {"late": [[0, 5_000]]},
    ),
}


@pytest.mark.parametrize(("events", "expected"), IDLE.values(), ids=IDLE)
def test_idle_time_has_its_cause(events: list[Any], expected: dict[str, Any], tmp_path: Path) -> None:
    made = traces.trace(traces.step(0, 0, 1_000_000), *events, world_size=1)
    found = runs.rank_of(tmp_path, made).once(idle)
    causes = ("late", "latency", "queued", "assumed")
    assert {name: (getattr(found, name) - BASE).tolist() for name in causes} == {c: [] for c in causes} | expected


def test_work_is_linked_to_the_call_with_its_correlation_on_whatever_thread(tmp_path: Path) -> None:
    made = traces.trace(
        traces.step(0, 0, 900_000),
        traces.call("cudaLaunchKernel", 10_000, 5_000, 1),
        traces.call("cudaLaunchKernelExC", 30_000, 5_000, 2, tid=traces.AUTOGRAD),
        traces.kernel("first", 100_000, 50_000, 1),
        traces.kernel("second", 150_000, 50_000, 2),
        traces.kernel("third", 200_000, 50_000, 99),
    )
    found = runs.rank_of(tmp_path, made).once(launches)
    assert (found.called[:2] - BASE).tolist() == [10_000, 30_000]
    assert (found.returned[:2] - BASE).tolist() == [15_000, 35_000]
    assert found.called[2] == found.returned[2] == UNKNOWN
    assert found.known.tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("events", "at", "length"),
    [
        # The queue grows with each launch and shrinks when work begins.
        (
            [
                traces.launched("a", 0, 100_000, 100_000, 1),
                traces.launched("b", 50_000, 200_000, 100_000, 2),
                traces.launched("c", 150_000, 300_000, 100_000, 3),
            ],
            [0, 50_000, 100_000, 150_000, 200_000, 300_000],
            [1, 2, 1, 2, 1, 0],
        ),
        # The nodes of a graph have one launch.
        (
            [
                traces.call("cudaGraphLaunch", 10_000, 5_000, 1),
                traces.kernel("a", 100_000, 50_000, 1),
                traces.kernel("b", 160_000, 50_000, 1),
            ],
            [10_000, 100_000],
            [1, 0],
        ),
        ([traces.kernel("a", 100, 50, 1)], [], []),
    ],
)
def test_launched_work_waits_in_a_queue(events: list[Any], at: list[int], length: list[int], tmp_path: Path) -> None:
    waiting = runs.rank_of(tmp_path, traces.trace(traces.step(0, 0, 900_000), *events)).once(launch_queue)
    assert ((waiting.at - BASE).tolist(), waiting.length.tolist()) == (at, length)
    if len(at) == 6:
        # 1 for 50 µs, 2 for 50, 1 for 50, 2 for 50, 1 for 100.
        assert waiting.mean(BASE, BASE + 300_000) == (50 + 100 + 50 + 100 + 100) / 300
        assert waiting.mean(BASE + 400_000, BASE + 500_000) == waiting.mean(5, 5) == 0
