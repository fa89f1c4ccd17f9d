"""What late ranks cost is theirs alone: what another rule answers for is taken off."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.analysis.stragglers.late_ranks import late_ranks, straggling
from dlprof.analysis.stragglers.own_time import NOTABLE_SHARE
from tests.fixtures import runs, traces
from tests.fixtures.runs import MS


def job(folder: Path, late_ns: int) -> Path:
    """Return traces of two ranks; rank 1 computes for so much longer before each all-reduce, in which rank 0 waits."""
    made = []
    for rank, (computes, reduces) in enumerate(((20 * MS, 5 * MS + late_ns), (20 * MS + late_ns, 5 * MS))):
        events = []
        for n in range(4):
            begin = n * 100 * MS
            events += [
                traces.step(n, begin, 90 * MS),
                traces.kernel("gemm", begin, computes),
                traces.collective(begin + computes, reduces, 1 << 20),
            ]
        made.append(traces.trace(*events, rank=rank, world_size=2))
    return runs.foreign(folder, *made)


@pytest.mark.parametrize("late_ns", [0, 30 * MS])
def test_the_rank_that_computes_longer_is_late_by_that(tmp_path: Path, late_ns: int) -> None:
    run = runs.measured(job(tmp_path, late_ns), late_ranks, straggling)
    found, left = run.frame(late_ranks), run.frame(straggling)
    assert found.share * found.lead.step_ns == pytest.approx(late_ns, rel=0.01, abs=1.0)
    assert (left.share >= NOTABLE_SHARE) == bool(late_ns)
    if late_ns:
        assert (found.lead.ranks, left.cause) == ((1,), "computation")
