"""The benchmark of reading many ranks: its three ways give the same report."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import many_ranks
from tests.fixtures import traces


@pytest.mark.long
def test_the_ways_give_the_same(tmp_path: Path) -> None:
    pytest.importorskip("distributed", reason="needs the extra dask")
    for r in range(3):
        traces.write(tmp_path / "traces" / f"rank{r}.json.gz", traces.training(rank=r, world_size=3))
    *rows, last = many_ranks.measured(tmp_path / "traces", list(many_ranks.WAYS), [1, 2], 1)
    assert last == {"same": True}
    assert [(row["way"], row["processes"]) for row in rows] == [(way, n) for way in many_ranks.WAYS for n in (1, 2)]
    assert all(row["cpu_s"] > 0 for row in rows)
