"""Copies by direction and memory, and how much of them nothing hides."""

from pathlib import Path

import pytest

from dlprof.analysis.engine import RankData
from dlprof.analysis.memory.copies import copies, freeing_ns, hideable
from dlprof.analysis.step.breakdown import breakdown
from dlprof.read.run import open_run
from tests.fixtures import runs, traces
from tests.fixtures.allocator import copied_batches
from tests.fixtures.runs import MS, asked


def test_copies_are_counted_per_step_by_way_and_memory(tmp_path: Path) -> None:
    events = []
    for n in range(2):
        t = n * MS
        events += [
            traces.step(n, t, MS),
            traces.kernel("gemm", t, 300_000),
            traces.copy(t + 200_000, 200_000, 1_000_000),  # half of it behind the kernel
            traces.copy(t + 500_000, 100_000, 500_000, "HtoD (Pinned -> Device)"),
            traces.copy(t + 700_000, 1_000, 8),  # a scalar
            traces.copy(t + 800_000, 50_000, 700_000, "DtoH (Device -> Pageable)"),
        ]
    frame = runs.rank_of(tmp_path, traces.trace(*events)).once(copies)
    found = {(c, m): (n, b, t, e) for c, m, n, b, t, e in frame.itertuples(index=False)}
    assert found == {
        ("HtoD", "pageable"): (1, 1_000_000, 200_000, 100_000),
        ("HtoD", "pinned"): (1, 500_000, 100_000, 100_000),
        ("DtoH", "pageable"): (1, 700_000, 50_000, 50_000),
    }


def test_copies_outside_the_steps_do_not_count(tmp_path: Path) -> None:
    made = traces.trace(traces.copy(0, 1_000, 1_000_000), traces.step(1, MS, MS), traces.kernel("gemm", MS, 1_000))
    assert not len(runs.rank_of(tmp_path, made).once(copies))


def test_a_copy_hides_behind_no_more_than_is_computed(tmp_path: Path) -> None:
    made = traces.trace(traces.step(1, 0, MS), traces.kernel("gemm", 0, 200_000), world_size=1)
    run = runs.measured(runs.foreign(tmp_path, made), breakdown, copies)
    assert asked(run, hideable, exposed={0: 50_000.0}) == {0: 50_000}
    assert asked(run, hideable, exposed={0: 700_000.0}) == {0: 200_000}


@pytest.mark.parametrize(("workers", "freeing"), [(4, (970_000, 2_000_000)), (0, (0, 0))])
def test_shared_memory_is_freed_by_whoever_takes_it_from_workers(
    tmp_path: Path, workers: int, freeing: tuple[float, float]
) -> None:
    facts = {**runs.GPU, "loaders": [{"role": "train", "num_workers": workers}]}
    rank = RankData(open_run(copied_batches(tmp_path, facts=facts)).ranks[0])
    assert rank.once(freeing_ns) == pytest.approx(freeing)
