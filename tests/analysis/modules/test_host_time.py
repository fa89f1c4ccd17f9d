"""The host's time in pieces, on hand-made traces."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dlprof.analysis import intervals as iv
from dlprof.analysis.modules.host_time import apart, host_pieces
from tests.fixtures import layers, runs, traces

OTHER = 4200  # another thread


def test_pieces_of_a_thread_do_not_overlap_and_calls_outside_of_modules_are_some(tmp_path: Path) -> None:
    made = layers.on_cpu(
        traces.step(0, 0, 1_000),
        layers.called("", "Net", 100, 300),
        layers.called("a", "ReLU", 200, 100),
        traces.op("aten::relu", 210, 50),
        traces.op("aten::mse_loss", 500, 100),
        traces.op("aten::sub", 520, 50),
        traces.op("c10d::allreduce_", 700, 20),
        traces.annotation("gloo:all_reduce", 700, 250),  # lasts until it is through
        traces.op("aten::mul", 50, 100, OTHER),
    )
    pieces = runs.rank_of(tmp_path, made).once(host_pieces)
    begin = traces.BASE_NS
    by_lane = {
        lane: sorted(zip(pieces.start[of] - begin, pieces.end[of] - begin, pieces.module[of], strict=True))
        for lane in set(pieces.lane.tolist())
        for of in [pieces.lane == lane]
    }
    assert sorted(by_lane.values(), key=len) == [
        [(50, 150, -1)],
        [(100, 200, 0), (200, 300, 1), (300, 400, 0), (500, 600, -1), (700, 720, -1)],
    ]
    assert (pieces.outside - begin).tolist() == [[0, 50], [400, 500], [600, 700], [720, 1_000]]


def test_an_operator_around_a_module_has_what_the_module_has_not(tmp_path: Path) -> None:
    made = layers.on_cpu(traces.step(0, 0, 1_000), traces.op("Wrapper", 100, 300), layers.called("", "Net", 200, 100))
    pieces = runs.rank_of(tmp_path, made).once(host_pieces)
    took = (pieces.end - pieces.start).tolist()
    assert sorted(zip(pieces.module.tolist(), took, strict=True)) == [(-1, 100), (-1, 100), (0, 100)]


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), max_size=25))
def test_intervals_apart_cover_the_same_and_overlap_nowhere(made: list[tuple[int, int]]) -> None:
    start = np.array([s for s, _ in sorted(made)], dtype=np.int64)
    end = start + np.array([d for _, d in sorted(made)], dtype=np.int64)
    begin, stop = apart(start, end)
    assert (stop >= begin).all()
    assert (stop - begin).sum() == iv.total(iv.union(start, end))
    np.testing.assert_array_equal(iv.union(begin, stop), iv.union(start, end))
