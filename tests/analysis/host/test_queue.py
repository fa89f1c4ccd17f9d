"""How far a device is behind its host, how much is queued for it, and what queued work waits for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.host.queue import (
    EVENT,
    FUNCTION,
    GRAPH_NODE,
    GRAPH_START,
    MEMORY,
    OTHER_STREAM,
    UNKNOWN,
    device_lag,
    queue_series,
    queued_waits,
)
from dlprof.errors import NotMeasured
from tests.fixtures import runs, traces
from tests.fixtures.hosts import ahead, call, graph, waiting
from tests.fixtures.runs import MS


def rows(folder: Path, made: dict[str, Any]) -> list[dict[Any, Any]]:
    return list(runs.rank_of(folder, made).once(queued_waits).to_dict("records"))


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ((call("cudaStreamWaitEvent"),), EVENT),
        ((call("cudaLaunchHostFunc"),), FUNCTION),
        ((call("cudaEventRecord"),), UNKNOWN),
        # The device's memory is got while it idles.
        ((lambda at, c: [traces.call("cudaMalloc", at + 340_000, 400_000, c, tid=traces.AUTOGRAD)],), MEMORY),
    ],
)
def test_the_calls_before_its_launch_tell_what_work_waits_for(tmp_path: Path, calls: Any, reason: str) -> None:
    (row,) = rows(tmp_path, waiting(*calls))
    assert (row["ended_by"], row["stream"], row["launched_by"]) == ("second", "device:7", "cudaLaunchKernel")
    assert row["waits_for"] == reason
    assert (row["times"], row["ns"]) == (1, pytest.approx(500_000))
    assert row["queued_ns"] == pytest.approx(312_000 + 500_000 - 60_000)
    assert row["gain_ns"] == pytest.approx(500_000, rel=0.02)


def test_work_on_another_stream_that_had_just_ended_is_named(tmp_path: Path) -> None:
    made = waiting(lambda at, c: traces.launched("other", at, at + 292_000, 200_000, c, stream=9))
    (row,) = rows(tmp_path, made)
    assert row["waits_for"] == OTHER_STREAM
    assert row["ns"] == pytest.approx(300_000)  # from the end of the other one on


@pytest.mark.parametrize(("node", "reason"), [(True, GRAPH_NODE), (False, GRAPH_START)])
def test_a_graphs_first_node_is_told_from_a_later_one(tmp_path: Path, node: bool, reason: str) -> None:
    (row,) = rows(tmp_path, graph(node))
    assert (row["launched_by"], row["waits_for"]) == ("cudaGraphLaunch", reason)
    assert row["ns"] == pytest.approx(500_000, rel=0.01)


def test_where_nothing_waits_there_are_no_rows(tmp_path: Path) -> None:
    assert rows(tmp_path, waiting(wait=0)) == []


def test_the_lag_and_the_queue_grow_with_a_host_that_runs_ahead(tmp_path: Path) -> None:
    rank = runs.rank_of(tmp_path, ahead())
    (row,) = rank.once(device_lag).to_dict("records")
    # The first steps, in which the host gets its lead, do not count.
    assert row["lag_ns"] > 2 * MS
    series = rank.once(queue_series)
    assert series["queued"].max() <= 8
    assert series["queued"].iloc[-1] < 1 < series["queued"].max()


def test_without_links_nobody_knows(tmp_path: Path) -> None:
    rank = runs.rank_of(tmp_path, traces.trace(traces.step(0, 0, MS), traces.kernel("gemm", 10, MS, 0)))
    for one in (device_lag, queue_series):
        with pytest.raises(NotMeasured, match="does not link"):
            rank.once(one)
