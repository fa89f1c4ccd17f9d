"""Which lane is the training thread, and what lies outermost on it."""

from pathlib import Path

import numpy as np
import pytest

from dlprof.analysis.timeline import host
from tests.fixtures import runs, traces


@pytest.mark.parametrize(
    "mark",
    [
        traces.step(1, 0, 100_000),
        traces.fetch(0, 100),
        traces.annotation("Optimizer.step#AdamW.step", 0, 100),
        traces.annotation("dlprof::forward", 0, 100),
    ],
)
def test_the_thread_that_marks_the_loop_trains(tmp_path: Path, mark: traces.Event) -> None:
    busier = [traces.op("aten::mm", n * 1_000, 900, tid=traces.AUTOGRAD) for n in range(50)]
    assert runs.rank_of(tmp_path, traces.trace(mark, *busier)).once(host.training_lane) == f"host:{traces.MAIN}"


def test_without_marks_it_is_the_busiest(tmp_path: Path) -> None:
    made = traces.trace(traces.op("a", 0, 10), traces.op("b", 0, 1_000, tid=77))
    assert runs.rank_of(tmp_path, made).once(host.training_lane) == "host:77"


def test_a_trace_of_a_device_alone_has_no_training_thread(tmp_path: Path) -> None:
    rank = runs.rank_of(tmp_path, traces.trace(traces.kernel("gemm", 0, 10)))
    assert rank.once(host.training_lane) == ""
    assert not len(rank.once(host.on_training_thread))


def test_nested_spans_are_not_outermost(tmp_path: Path) -> None:
    made = traces.trace(traces.op("outer", 0, 100_000), traces.op("inner", 0, 50_000), traces.op("next", 100_000, 10))
    found = host.outermost(runs.rank_of(tmp_path, made).once(host.on_training_thread))
    assert list(found["name"].astype(str)) == ["outer", "next"]


def test_nesting_is_looked_for_to_a_depth() -> None:
    many = np.zeros(20_000, dtype=np.int64)
    found = host.parents(many, many + 1)
    assert found[: host.MOST_DEEP].tolist() == list(range(-1, host.MOST_DEEP - 1))
    assert (found[host.MOST_DEEP :] == host.MOST_DEEP - 1).all()


def test_numbers_among_others() -> None:
    values = np.array([3, -1, 2**40, 3, 7])
    assert host.is_among(values, np.array([2**40, 3, 3])).tolist() == [True, False, True, True, False]
    assert not host.is_among(values, np.empty(0, dtype=np.int64)).any()
