"""Idle device time by its cause: a late host, a launch's own latency, queued work that waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dlprof.analysis.timeline.idle import idle
from tests.fixtures import runs, traces


def of(folder: Path, *events: Any) -> dict[str, list[list[int]]]:
    """Return the idle time of a trace from 0 to 1 ms by cause."""
    found = runs.rank_of(folder, traces.trace(traces.step(0, 0, 1_000_000), *events, world_size=1)).once(idle)
    return {name: (getattr(found, name) - traces.BASE_NS).tolist() for name in ("late", "latency", "queued", "assumed")}


def test_a_gap_until_the_launch_is_the_hosts_and_the_rest_the_launchs(tmp_path: Path) -> None:
    found = of(
        tmp_path,
        traces.launched("a", 0, 8_000, 92_000, 1),
        # The device ran dry at 100 µs, and the next launch is called at 395 and returns at 400 µs.
        traces.launched("b", 395_000, 406_000, 594_000, 2),
    )
    assert found["late"] == [[0, 5_000], [100_000, 400_000]]
    assert found["latency"] == [[5_000, 8_000], [400_000, 406_000]]
    assert found["queued"] == []


def test_a_short_gap_before_queued_work_is_latency_and_a_long_one_a_wait(tmp_path: Path) -> None:
    found = of(
        tmp_path,
        traces.launched("a", 0, 5_000, 95_000, 1),
        traces.launched("b", 10_000, 103_000, 97_000, 2),
        traces.launched("c", 20_000, 500_000, 500_000, 3),
    )
    assert found["late"] == [[0, 5_000]]
    assert found["latency"] == [[100_000, 103_000]]
    assert found["queued"] == [[200_000, 500_000]]


def test_a_later_node_of_a_graph_was_launched_with_the_first(tmp_path: Path) -> None:
    found = of(
        tmp_path,
        traces.call("cudaGraphLaunch", 0, 300_000, 1),  # returns long after its first nodes ran
        traces.kernel("a", 10_000, 90_000, 1),
        traces.kernel("b", 200_000, 800_000, 1),
    )
    assert found["queued"] == [[100_000, 200_000]]


def test_before_work_whose_launch_is_unknown_the_host_is_assumed_late(tmp_path: Path) -> None:
    found = of(
        tmp_path,
        traces.launched("a", 0, 5_000, 95_000, 1),
        traces.kernel("b", 600_000, 400_000, 99),
    )
    assert [100_000, 600_000] in found["late"]
    assert found["assumed"] == [[100_000, 600_000]]


def test_all_streams_must_be_idle(tmp_path: Path) -> None:
    found = of(
        tmp_path,
        traces.launched("a", 0, 5_000, 495_000, 1),
        traces.launched("b", 0, 5_000, 995_000, 2, stream=9),
        traces.launched("c", 700_000, 800_000, 200_000, 3),
    )
    assert found["late"] == [[0, 5_000]]
    assert found["queued"] == []
