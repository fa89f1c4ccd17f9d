"""Launches: linked by correlation on any thread, counted while they wait, unknown where a trace does not link them."""

from __future__ import annotations

from pathlib import Path

from dlprof.analysis.timeline.launches import UNKNOWN, launch_queue, launches
from tests.fixtures import runs, traces


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
    assert (found.called[:2] - traces.BASE_NS).tolist() == [10_000, 30_000]
    assert (found.returned[:2] - traces.BASE_NS).tolist() == [15_000, 35_000]
    assert found.called[2] == found.returned[2] == UNKNOWN
    assert found.known.tolist() == [True, True, False]


def test_the_nodes_of_a_graph_have_one_launch_and_are_one_in_the_queue(tmp_path: Path) -> None:
    made = traces.trace(
        traces.step(0, 0, 900_000),
        traces.call("cudaGraphLaunch", 10_000, 5_000, 1),
        traces.kernel("a", 100_000, 50_000, 1),
        traces.kernel("b", 160_000, 50_000, 1),
    )
    rank = runs.rank_of(tmp_path, made)
    assert (rank.once(launches).called - traces.BASE_NS).tolist() == [10_000, 10_000]
    waiting = rank.once(launch_queue)
    assert (waiting.at - traces.BASE_NS).tolist() == [10_000, 100_000]
    assert waiting.length.tolist() == [1, 0]


def test_the_queue_grows_with_each_launch_and_shrinks_when_work_begins(tmp_path: Path) -> None:
    made = traces.trace(
        traces.step(0, 0, 900_000),
        traces.launched("a", 0, 100_000, 100_000, 1),
        traces.launched("b", 50_000, 200_000, 100_000, 2),
        traces.launched("c", 150_000, 300_000, 100_000, 3),
    )
    waiting = runs.rank_of(tmp_path, made).once(launch_queue)
    begin = traces.BASE_NS
    assert (waiting.at - begin).tolist() == [0, 50_000, 100_000, 150_000, 200_000, 300_000]
    assert waiting.length.tolist() == [1, 2, 1, 2, 1, 0]
    # 1 for 50 µs, 2 for 50, 1 for 50, 2 for 50, 1 for 100.
    assert waiting.mean(begin, begin + 300_000) == (50 + 100 + 50 + 100 + 100) / 300
    assert waiting.mean(begin + 400_000, begin + 500_000) == 0
    assert waiting.mean(5, 5) == 0


def test_a_trace_without_calls_links_nothing(tmp_path: Path) -> None:
    rank = runs.rank_of(tmp_path, traces.trace(traces.step(0, 0, 1_000), traces.kernel("a", 100, 50, 1)))
    assert not rank.once(launches).known.any()
    assert not len(rank.once(launch_queue).at)
